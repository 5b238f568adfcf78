"""Checkpoints of a run: written in one piece or not at all, and refused by a run of other settings."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "cgd-checkpoint-1"


def check_place(path: Path) -> None:
    """Refuse a place where no checkpoint can be written, before hours of work depend on it.

    Raises:
        InputError: its folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path.with_name(f".{path.name}.try"), b"")
        path.with_name(f".{path.name}.try").unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another place") from None


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
        before = content["settings"]
    except Exception as error:
        raise InputError(
            f"{path} is not a checkpoint that cgd wrote ({_first_line(error)}); move it away to start anew"
        ) from None
    changed = sorted(key for key in before.keys() | settings if before.get(key) != settings.get(key))
    if changed:
        told = "; ".join(f"{key} was {before.get(key)}, is {settings.get(key)}" for key in changed[:3])
        raise InputError(f"{path} is a checkpoint of another run ({told}); name another file, or move it away")
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step."""
    beside = path.with_name(f".{path.name}.new")  # always the same name: what a killed process left is overwritten
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
