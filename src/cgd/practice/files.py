"""Files that only their owner may read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cgd.errors import InputError


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
