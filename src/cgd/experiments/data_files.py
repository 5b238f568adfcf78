"""Files of data sets on this machine: the folders to search, the cache, and what fits into memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBER_BYTES, COPIES = 8, 4
"""The bytes of a number in double precision, and how many copies of the data exist while they are read and scaled."""


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


def check_memory(what: object, numbers: int, *, fewer: str = "records or features") -> None:
    """Check that numbers fit into the memory of this machine; a small compressed file may contain any number of them.

    Args:
        what: the file or the network, for the error.
        numbers: how many numbers it has, or at least has.
        fewer: what to use fewer of, for the error.

    Raises:
        InputError: they do not fit.
    """
    needed, available = NUMBER_BYTES * COPIES * numbers, memory_bytes()
    if needed > available:
        raise InputError(
            f"{what} has at least {numbers} numbers, which need {needed / 1e9:.1f} GB of memory, and this machine has "
            f"{available / 1e9:.1f} GB; use fewer {fewer}"
        )


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
