"""Checkpoints of a run: written atomically, and rejected by a run with other settings."""

from __future__ import annotations

import fcntl
import glob
import io
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "cgd-checkpoint-1"
FIXED = repr("fixed")
"""Describes a fixed step size in the setting `schedule`."""


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock a checkpoint file against other processes: two runs would overwrite each other's checkpoints.

    Raises:
        InputError: its folder cannot be written, or another process holds the lock.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_file = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another place") from None
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{path} is in use by another process; wait until it has ended, or name another place"
            ) from None
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.new"):  # written by a process that was killed
            leftover.unlink(missing_ok=True)
        yield
        Path(lock_file.name).unlink(missing_ok=True)


def save(path: Path, settings: dict[str, str], state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: after a crash, the file is the old one or the new one."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "settings": settings, **state}, buffer)
    write_file(path, buffer.getvalue())


def load(path: Path, settings: dict[str, str], fixed_steps: int = 0) -> dict[str, Any] | None:
    """Return the state in a checkpoint file, or None if the file does not exist.

    Args:
        path: the checkpoint file.
        settings: settings of the run that is to continue.
        fixed_steps: number of its first steps that have a fixed step size. It may continue a run in which all steps
            have, from one of these.

    Raises:
        InputError: the file is not a checkpoint, or was written with other settings.
    """
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        before = dict(content["settings"])
        if before.get("schedule") == FIXED and len(content["history"]["training_loss"]) <= fixed_steps:
            before["schedule"] = settings["schedule"]
    except Exception as error:
        raise invalid(path, error) from None
    changed = sorted(key for key in before.keys() | settings if before.get(key) != settings.get(key))
    if changed:
        differences = "; ".join(f"{key} was {before.get(key)}, is {settings.get(key)}" for key in changed[:3])
        raise InputError(f"{path} is a checkpoint of another run ({differences}); name another file, or move it away")
    return content


def invalid(path: Path, error: Exception) -> InputError:
    """Return the error for a file that is not a valid checkpoint."""
    return InputError(f"{path} is not a checkpoint that cgd wrote ({_first_line(error)}); move it away to start again")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
