"""Checkpoints of a run: written in one piece or not at all, and refused by a run of other settings."""

from __future__ import annotations

import fcntl
import glob
import io
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "cgd-checkpoint-1"


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold a place for checkpoints alone: two runs that write the same one would undo each other's work.

    Raises:
        InputError: its folder cannot be written, or another process holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another place") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{path} is in use by another process; wait until that has ended, or name another place"
            ) from None
        for left_behind in path.parent.glob(f".{glob.escape(path.name)}.*.new"):  # by a process that was killed
            left_behind.unlink(missing_ok=True)
        yield
        Path(lock.name).unlink(missing_ok=True)


def save(path: Path, settings: dict[str, str], state: dict[str, Any]) -> None:
    """Write a checkpoint; whenever the process dies, the file is the old one or the new one."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "settings": settings, **state}, buffer)
    write_whole(path, buffer.getvalue())


def load(path: Path, settings: dict[str, str]) -> dict[str, Any] | None:
    """The state at this path, or None if there is none.

    Raises:
        InputError: it is no checkpoint, or one of other settings.
    """
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        before = dict(content["settings"])
    except Exception as error:
        raise damaged(path, error) from None
    changed = sorted(key for key in before.keys() | settings if before.get(key) != settings.get(key))
    if changed:
        told = "; ".join(f"{key} was {before.get(key)}, is {settings.get(key)}" for key in changed[:3])
        raise InputError(f"{path} is a checkpoint of another run ({told}); name another file, or move it away")
    return content


def damaged(path: Path, error: Exception) -> InputError:
    """Return the error about a file that holds something else than a checkpoint."""
    return InputError(f"{path} is not a checkpoint that cgd wrote ({_first_line(error)}); move it away to start anew")


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:  # with the name of the file: a full disk does not tell
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
