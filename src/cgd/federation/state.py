"""What a participant keeps on disk: the ledgers of its groups, whole now and then, and each entry as it is made.

The others hold a participant's past as well, so nothing here is needed while one of them is alive. It is for members
who die together: all of them, or a column of a grid. Entries are handed to the system before the program goes on, so a
killed process has them; a whole ledger is also forced to the disk, so a power cut takes a few seconds of them at most.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shlex
import stat
import struct
import threading
import time
import zlib
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, BinaryIO

from cgd.errors import InputError
from cgd.secagg.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from cgd.secagg.messages import Buffer

log = logging.getLogger("cgd.federation")

COMPLAINT_SECONDS = 60.0
MAX_MODE = 0o755  # of the folder: who else could write there could put files of its own in place of ours
_RECORD = struct.Struct("<QQI")  # the place of an entry, its bytes, and their checksum
_CHECKSUM = struct.Struct("<I")  # of that: a wrong size must not be taken for an entry that was cut off


class StateFolder:
    """A folder with the ledgers of one participant; see `cgd.transport.runtime.Store`.

    Args:
        folder: made when there is something to keep.
        federation: the name of the federation.
    """

    def __init__(self, folder: Path, federation: str) -> None:
        self.folder = folder
        self._federation = federation
        self._segments: dict[str, BinaryIO] = {}
        self._lock: BinaryIO | None = None
        self._saving = threading.Lock()
        self._complained = -inf
        self._failed: set[str] = set()

    def lock(self) -> None:
        """Have the folder for ourselves, until `close` or the end of the process.

        Raises:
            InputError: another process has it, others can write there, or we cannot.
        """
        try:
            self._make()
            self._check_access()
            self._lock = lock = self._open(self.folder / "lock")
        except OSError as error:
            raise InputError(
                f"the state cannot be kept in {self.folder} ({error.strerror}); name another folder (state=, --state)"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise InputError(
                f"{self.folder} is in use: this participant runs already; stop the other process first, or give this "
                "one a folder of its own (state=, --state)"
            ) from None

    def load(self, groups: Iterable[str]) -> dict[str, Journal]:
        """Return the ledgers that were kept, by group. What is damaged is left out: the others will catch us up.

        Raises:
            InputError: a file cannot be read, or is a link.
        """
        journals = {}
        for group in groups:
            journal = self._load_journal(group)
            for start, segment in self._segments_of(group):
                if start > len(journal):
                    break
                content = self._read(segment)
                try:
                    _replay(content, journal)
                except InputError as error:
                    _warn_of(segment, error)
                    break
            if len(journal) or journal.mark is not None:
                journals[group] = journal
        return journals

    def _load_journal(self, group: str) -> Journal:
        path = self._file(group)
        if not os.path.lexists(path):
            return Journal()
        content = self._read(path)
        try:
            return Journal.from_bytes(content)
        except InputError as error:
            _warn_of(path, error)
            return Journal()

    def append(self, group: str, place: int, entry: Sequence[Buffer]) -> None:
        """Keep one more entry of a group's ledger, given in pieces."""
        if group in self._failed:  # nothing can be read behind an entry that is missing: the next whole save mends it
            return
        try:
            if group not in self._segments:
                self._segments[group] = self._begin_segment(group, place, entry)
                return
            self._segments[group].writelines((record_head(place, entry), *entry))
            self._segments[group].flush()
        except OSError as error:
            self._complain(error)
            self._failed.add(group)
            with suppress(OSError):
                self._begun(group, place).unlink(missing_ok=True)

    def _begin_segment(self, group: str, place: int, entry: Sequence[Buffer]) -> BinaryIO:
        """Begin a journal with its first entry, at once: one of this name, from before a restart, may hold a mark."""
        path = self._file(group).with_suffix(f".{place}.entries")
        segment = self._open(self._begun(group, place))
        try:
            segment.writelines((record_head(place, entry), *entry))
            segment.flush()
            self._begun(group, place).replace(path)
        except OSError:
            with suppress(OSError):
                segment.close()
            raise
        return segment

    def _begun(self, group: str, place: int) -> Path:
        return self._file(group).with_suffix(f".{place}.begun")

    def turn(self, group: str) -> None:
        """The ledger as it is now will be saved; what is appended from now on goes with it."""
        self._failed.discard(group)
        if group in self._segments:
            with suppress(OSError):  # a full disk; told when it was written to
                self._segments.pop(group).close()

    def save(self, group: str, length: int, journal: bytes) -> bool:
        """Keep a group's ledger as it was, in place of all entries up to this length; whether that worked."""
        try:
            with self._saving:
                temporary = self._file(group).with_suffix(".new")
                with self._open(temporary) as file:
                    file.write(journal)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._file(group))
                for start, segment in self._segments_of(group):
                    if start < length:
                        segment.unlink()
        except OSError as error:
            self._complain(error)
            return False
        return True

    def close(self) -> None:
        """Close the files."""
        for group in list(self._segments):
            self.turn(group)
        if self._lock is not None:
            self._lock.close()

    def _file(self, group: str) -> Path:
        # No name of a federation or a group has a plus, and no group's a dot: two of them never have a file in common.
        return self.folder / f"{self._federation}+{group}.ledger"

    def _segments_of(self, group: str) -> list[tuple[int, Path]]:
        name = re.compile(rf"{re.escape(self._file(group).stem)}\.([0-9]{{1,19}})\.entries")
        files = self.folder.iterdir() if self.folder.exists() else ()
        return sorted((int(found[1]), file) for file in files if (found := name.fullmatch(file.name)))

    def _make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _check_access(self) -> None:
        status = self.folder.stat()
        mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
        if owner != os.geteuid():
            raise InputError(
                f"{self.folder} belongs to user {owner}, and we are user {os.geteuid()}; run as its owner, or name a "
                "folder of your own (state=, --state)"
            )
        if mode & ~MAX_MODE:
            raise InputError(
                f"{self.folder} has mode {mode:04o}, so others can put files there; chmod 700 "
                f"{shlex.quote(str(self.folder))}, and look whether all that is in it is yours"
            )

    def _open(self, path: Path) -> BinaryIO:
        self._make()
        return open(path, "wb", opener=open_private)

    def _read(self, path: Path) -> bytes:
        try:
            with open(path, "rb", opener=open_private) as file:
                return file.read()
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror}); see whether it is yours, or move it away: the others will "
                "catch us up"
            ) from None

    def _complain(self, error: OSError) -> None:
        if time.monotonic() - self._complained < COMPLAINT_SECONDS:
            return
        self._complained = time.monotonic()
        log.warning(
            "the state cannot be saved in %s (%s); the others hold it", self.folder, error.strerror,
            extra={"event": "not saved"},
        )  # fmt: skip


def open_private(path: str, flags: int) -> int:
    """Open a file of a state folder, for its owner alone; `open` takes this as its `opener`.

    Raises:
        OSError: it is a symbolic link, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, f"{path} is a symbolic link, and such are not followed; remove it") from None
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o600)  # it may have been there
    return descriptor


def _warn_of(path: Path, error: InputError) -> None:
    log.warning("%s is damaged and not used (%s); the others will catch us up", path, error, extra={"event": "damaged"})


def record_head(place: int, entry: Sequence[Buffer]) -> bytes:
    """Return what stands before an entry in a journal."""
    checksum = 0
    for piece in entry:
        checksum = zlib.crc32(piece, checksum)
    head = _RECORD.pack(place, sum(map(len, entry)), checksum)
    return head + _CHECKSUM.pack(zlib.crc32(head))


def _replay(data: bytes, journal: Journal) -> None:
    """Add the entries of a journal that a ledger does not have yet; one that was cut off by a kill ends it.

    Raises:
        InputError: an entry is damaged; those before it are added.
    """
    for place, content in _records(data):
        if place == len(journal):
            journal.add_record(content)


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while (start := at + _RECORD.size + _CHECKSUM.size) <= len(data):
        place, size, checksum = _RECORD.unpack_from(data, at)
        (head_checksum,) = _CHECKSUM.unpack_from(data, at + _RECORD.size)
        if zlib.crc32(data[at : at + _RECORD.size]) != head_checksum:
            raise InputError(f"the head of the entry at byte {at} does not fit its checksum")
        at = start + size
        if at > len(data):  # cut off
            return
        content = data[start:at]
        if zlib.crc32(content) != checksum:
            raise InputError(f"entry {place} does not fit its checksum")
        yield place, content
