"""Text files: TOML parsed with bounded memory; files written in one piece or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from cgd.errors import InputError

MAX_KEY_PARTS = 64
_HEADER = re.compile(r"\s*\[\[?([^\[\],]*)")
_QUOTED = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'""")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML whose keys have few parts: for `a.a.a.…` the parser needs memory with the square of their number.

    Raises:
        ValueError: it is not TOML, or a key has more than `MAX_KEY_PARTS` parts.
        RecursionError: its values are nested too deeply.
    """
    for number, written in enumerate(text.split("\n"), start=1):
        if written.count(".") < MAX_KEY_PARTS:
            continue
        line = _QUOTED.sub("q", written)
        *before, last = line.split("=")
        header = _HEADER.match(line)
        # What is before an equals sign is a key, behind the comma of an inline table; so is a line that has none.
        keys = [each.rpartition(",")[2] for each in (before or [last])] + ([header[1]] if header else [])
        if any(key.count(".") >= MAX_KEY_PARTS for key in keys):
            raise ValueError(f"line {number} has a key of more than {MAX_KEY_PARTS} parts")
    return tomllib.loads(text)


def read_text(path: Path) -> str:
    """The text of a federation file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} cannot be read ({reason}); name the federation file, a TOML file") from None


def write_new(path: Path, text: str, mode: int) -> None:
    """Write a file that must not be there yet.

    Raises:
        InputError: it exists, or cannot be written; then nothing is left behind.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise InputError(
            f"{path} exists and is never overwritten; choose another name or folder, or move it away"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}); name a folder that exists and is yours"
        ) from None
    try:
        _fill(descriptor, text)
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError):
            raise InputError(f"{path} cannot be written ({error.strerror}); make room for it") from None
        raise


def replace_text(path: Path, text: str) -> None:
    """Put a new text in place of a file's, all at once: whoever reads it has the old one or the new one.

    Raises:
        InputError: it cannot be written; the file is as it was.
    """
    target = path.resolve()  # a link stays one
    beside: str | None = None
    try:
        descriptor, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        _fill(descriptor, text)
        os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    except BaseException as error:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{path} cannot be written ({error.strerror}); see whether its folder is yours") from None
        raise


def _fill(descriptor: int, text: str) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())  # the only copy of a key should outlive a power cut


def stamp(path: Path) -> tuple[int, int] | None:
    """What changes when the file does; None if it is not there."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return None


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, all at once: whoever reads it has the old one, if there was one, or the new one.

    Raises:
        InputError: it cannot be written; then what was there is as it was.
    """
    beside: str | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(
                f"{path} cannot be written ({error.strerror}); see whether its folder is yours and has room"
            ) from None
        raise
