"""The folder of an audit.

    audit.json    everything that was found
    audit.html    the same on one page that needs nothing else
    pictures/     records that were recovered, beside the real ones

The page is made from the other two and can be made again at any time; the same ones give the same bytes. Nobody but
their owner may read the files: of an audit of somebody's own data, they show it.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from cgd.audit import results
from cgd.audit.page import render
from cgd.errors import InputError
from cgd.files import write_private

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PAGE = "audit.html"


def check(folder: Path) -> None:
    """See that an audit can be written there, before minutes of work depend on it; nothing is left behind.

    Raises:
        InputError: it cannot, or there is something else than an audit, which is never overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not results.is_audit(folder):
        raise InputError(f"{folder} is not empty and holds no audit; name another folder with --out, or move it away")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".cgd-audit-"):
            pass
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); name another folder with --out") from None


def write(folder: Path, said: dict[str, Any], pictures: Mapping[str, bytes]) -> Path:
    """Write an audit; one that was there is replaced, with the pictures that it named. Gives the page's path.

    Raises:
        InputError: it cannot be written, or there is something else than an audit.
    """
    check(folder)
    former = _pictures_of(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, picture in pictures.items():
        write_private(folder / path, picture)
    write_private(folder / results.FILE, results.to_bytes(said))
    for path in former - pictures.keys():
        (folder / path).unlink(missing_ok=True)
    return write_page(folder)


def write_page(folder: Path) -> Path:
    """Make the page from the file and the pictures, and say where it is.

    Raises:
        InputError: there is no audit, or it is damaged.
    """
    audit = results.load(folder)
    page = folder / PAGE
    write_private(page, render(audit, results.load_pictures(folder, audit)).encode(errors="replace"))
    return page


def _pictures_of(folder: Path) -> set[str]:
    """Those of the audit that is to be replaced, as far as it can still be read."""
    try:
        return set(results.picture_paths(results.load(folder)))
    except InputError:
        return set()
