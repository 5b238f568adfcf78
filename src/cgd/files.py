"""Files: TOML parsed with bounded memory, whole files written atomically, and CSV that no spreadsheet evaluates.

`write_file` is the only place that creates or replaces a file in one step, and it survives crashes and power failures;
`create_text`, `replace_text` and `write_private` call it and turn its errors into an `InputError`. Appended files
(event logs, metrics, recorded frames) and the state folder, which must not follow symbolic links
(`federation/state.py`), have writers of their own.

`write_rows` writes CSV. Spreadsheets evaluate a cell that begins with =, +, -, @, a tab or a line break as a formula,
and a formula can send the table to a server. A class or category may be a text that another participant chose, so such
a text gets an apostrophe in front, as OWASP advises ("CSV injection"). So does a part of a text after a comma,
semicolon, tab, bar, quote or line break, which would be a cell of its own under another locale's separator. Numbers,
also negative ones, are unchanged.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import os
import re
import secrets
import stat
import tomllib
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import TextIO


MAX_KEY_PARTS = 64
PRIVATE, SHARED = 0o600, 0o666
"""File modes, before the umask: for the owner alone, and the operating system's default."""
_HEADER = re.compile(r"\s*\[\[?([^\[\],]*)")
_QUOTED = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'""")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; reject keys of very many parts (`a.a.a.…`), for which the parser's memory grows quadratically.

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
        # A key precedes an equals sign, or follows a comma in an inline table; a line without either is a key, too.
        keys = [each.rpartition(",")[2] for each in (before or [last])] + ([header[1]] if header else [])
        if any(key.count(".") >= MAX_KEY_PARTS for key in keys):
            raise ValueError(f"line {number} has a key of more than {MAX_KEY_PARTS} parts")
    return tomllib.loads(text)


def read_text(path: Path) -> str:
    """Return the text of a federation file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} cannot be read ({reason}); name the federation file, a TOML file") from None


def write_file(path: Path, content: str | bytes, *, mode: int | None = SHARED, new: bool = False) -> None:
    """Write a whole file, atomically and durably.

    The content is written to a temporary file in the same folder, `.NAME.*.new`, flushed to the disk and renamed, so
    that other processes, and this one after a crash, find the previous content or the new content, never a part. A
    symbolic link is replaced, not followed. If writing fails, the previous file is unchanged and no file is left.

    Args:
        path: the file; its folder must exist.
        content: text is written as UTF-8, without any change of line endings.
        mode: permissions of the new file, reduced by the umask; None keeps those of the file that is replaced.
        new: never replace a file. It is then created under its own name, because file systems without hard links
            cannot rename without replacing; a process that is killed while it writes leaves a part.

    Raises:
        FileExistsError: `new` is set, and the file exists.
        OSError: it cannot be written; the error names `path`.
    """
    data = content.encode() if isinstance(content, str) else content
    written = path if new else path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE if mode is None else mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if mode is None:
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            if not new:
                os.replace(written, path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise
    except OSError as error:  # a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None


def create_text(path: Path, text: str, mode: int) -> None:
    """Write a new text file.

    Raises:
        InputError: it exists, or cannot be written; then no file is left behind.
    """
    try:
        write_file(path, text, mode=mode, new=True)
    except FileExistsError:
        raise InputError(
            f"{path} exists and is never overwritten; choose another name or folder, or move it away"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}); name a folder that exists, is yours and has room"
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Replace the text of an existing file atomically; keep its permissions, and a symbolic link that leads to it.

    Raises:
        InputError: it cannot be written; the file is unchanged.
    """
    try:
        write_file(path.resolve(), text, mode=None)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); check whether its folder is yours") from None


def write_private(path: Path, content: bytes) -> None:
    """Write or replace a file atomically, readable by its owner alone; create its folder if necessary.

    Raises:
        InputError: it cannot be written; a previous file is unchanged.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, content, mode=PRIVATE)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}); check whether its folder is yours and has room"
        ) from None


def open_private(path: str, flags: int) -> int:
    """Open a file that is never replaced by a link, readable by its owner alone; an `opener` for `open`.

    Raises:
        OSError: it is a symbolic link, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, f"{path} is a symbolic link, which is not followed; remove it") from None
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o600)  # it may have existed with another mode
    return descriptor


def check_writable(folder: Path) -> None:
    """Check that files can be written to a folder, or that it can be created; change nothing.

    Raises:
        OSError: they cannot.
    """
    existing = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def watch(path: Path, stop: threading.Event, seconds: float) -> Iterator[None]:
    """Yield once at the start and after every change of a file, until `stop` is set; look every `seconds`."""
    last: tuple[int, int] | object = object()
    while not stop.wait(seconds):
        current = _stamp(path)
        if current != last:
            last = current
            yield


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the modification time and the size of a file, which change when the file does; None if it is missing."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return None


_FORMULA = re.compile(r"""(^|[,;|"'\t\r\n])(?=[=+\-@\t\r\n＝＋－＠])""")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def write_rows(file: TextIO, rows: Iterable[Iterable[Any]], delimiter: str = ",") -> None:
    """Write rows as CSV, with formulas in texts escaped."""
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerows([escape_formula(each) for each in row] for row in rows)


def escape_formula(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula; numbers, also as text, are returned unchanged.

    Examples:
        >>> escape_formula("=1+1"), escape_formula("-1.5"), escape_formula("a-b"), escape_formula("x;@y")
        ("'=1+1", '-1.5', 'a-b', "x;'@y")
        >>> escape_formula(-2)
        -2
    """
    if not isinstance(cell, str) or _NUMBER.fullmatch(cell):
        return cell
    # The csv module does not quote a lone carriage return, and readers would end the row there.
    return _FORMULA.sub(r"\1'", cell.replace("\r\n", "\n").replace("\r", "\n"))
