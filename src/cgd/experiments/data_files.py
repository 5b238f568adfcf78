"""Files of data sets on this machine: the folders to search, and the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def folders(names: tuple[str, ...], data_dir: Path | None) -> Iterator[Path]:
    """Yield the folders to search for a data set, in order.

    Args:
        names: possible names of its folder, relative to a data folder.
        data_dir: data folder to search first.
    """
    given = [Path(folder) for folder in (data_dir, os.environ.get("CGD_DATA")) if folder]
    shares = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    system = [Path(folder) for folder in shares.split(":") if folder]
    for parent in (*given, cache(), *system, *(folder / "datasets" for folder in system)):
        for name in names:
            yield parent / name
    yield from given


def find(file: str, names: tuple[str, ...], data_dir: Path | None) -> Path | None:
    """Return the path of a file in the first folder that has it; None if no folder has it."""
    for folder in folders(names, data_dir):
        if os.path.isfile(folder / file):  # Path.is_file raises an error in folders without permission
            return folder / file
    return None


def suggested_folder(name: str, data_dir: Path | None) -> Path:
    """Return the folder in which a user should put missing files."""
    return Path(data_dir or os.environ.get("CGD_DATA") or cache()) / name


def cache() -> Path:
    """Return the folder of downloaded and computed files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgd"
