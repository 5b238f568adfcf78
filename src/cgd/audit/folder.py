"""The folder of an audit.

    audit.json    all results
    audit.html    the same as a page that needs no other file
    pictures/     recovered records, with the real ones

The page is made from the other files, and the same files give the same bytes. Only their owner may read the files: an
audit of a recorded run contains records.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from cgd.audit import results
from cgd.audit.page import render
from cgd.errors import InputError
from cgd.files import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.results import Audit

PAGE = "audit.html"


def check(folder: Path) -> None:
    """Raise InputError if an audit cannot be written to a folder, before minutes of work; leave nothing behind.

    Raises:
        InputError: the folder cannot be written, or holds other files than an audit, which are never overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not results.is_audit(folder):
        raise InputError(f"{folder} is not empty and holds no audit; name another folder with --out, or move it away")
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".cgd-audit-"):
            pass
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); name another folder with --out") from None


def write(folder: Path, audit: Audit) -> Path:
    """Write an audit, in place of a former one and its pictures, and return the path of the page.

    Raises:
        InputError: the folder cannot be written, or holds other files than an audit.
    """
    check(folder)
    former = _former_pictures(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = results.to_files(audit)
    for path, content in files.items():
        write_private(folder / path, content)
    for path in former - files.keys():
        (folder / path).unlink(missing_ok=True)
    return write_page(folder)


def write_page(folder: Path) -> Path:
    """Make the page from the other files, and return its path.

    Raises:
        InputError: there is no audit, or it is damaged.
    """
    page = folder / PAGE
    write_private(page, render(results.load_with_pictures(folder)).encode(errors="replace"))
    return page


def _former_pictures(folder: Path) -> set[str]:
    """Return the pictures of the audit that is replaced, if it can be read."""
    try:
        audit = results.load(folder)
    except InputError:
        return set()
    paths = [path for attack in audit.attacks for each in attack.findings for path in each.pictures.values()]
    return {path for path in paths if path.startswith(f"{results.PICTURES}/")}
