"""The state folder of a participant: the journals of its groups, as snapshots and segments of appended entries.

A participant can recover finished sums and states from any running member, so for these, the files are needed only if
all members of a group crash at the same time. Its pending reveal (a "mark" in the files) is its own record and cannot
be recovered from others: if it is lost, only the pending reveals of the other members prevent a revealed sum from being
repeated with other members. Entries are written to the operating system before the program continues, and pending
reveals before our key is sent, so they survive a crash of the process; snapshots are flushed to the disk, so a power
failure loses a few seconds of both at most. On a full disk neither is written: a warning is logged, and the next
snapshot contains everything.

Files are opened without following symbolic links and with mode 0600 (`open_private`), so this module does not use
`cgd.files.write_file`, whose temporary files have random names and would be left behind after a crash.
"""

from __future__ import annotations

import fcntl
import json
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
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, BinaryIO

from cgd.errors import InputError
from cgd.files import check_writable, open_private
from cgd.secagg.journal import Journal
from cgd.transport.waiting_times import WaitingTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cgd.secagg.messages import Buffer

log = logging.getLogger("cgd.federation")

WARNING_SECONDS = 60.0
MAX_MODE = 0o755  # of the folder: another user who can write to it could replace the files
_RECORD = struct.Struct("<QQI")  # the position of an entry, its size, and the checksum of its bytes
_CHECKSUM = struct.Struct("<I")  # of the above: a damaged size must not be mistaken for a truncated entry


class StateFolder:
    """A folder with the journals of one participant; implements `cgd.transport.runtime.JournalStore`.

    Args:
        folder: created when the first file is written.
        federation: the name of the federation.
    """

    def __init__(self, folder: Path, federation: str) -> None:
        self.folder = folder
        self._federation = federation
        self._open_segments: dict[str, BinaryIO] = {}
        self._lock: BinaryIO | None = None
        self._save_lock = threading.Lock()
        self._warned = -inf
        self._failed: set[str] = set()
        self._saved: dict[str, int] = {}  # the length of the last snapshot, by group

    def lock(self) -> None:
        """Lock the folder until `close` or the end of the process.

        Raises:
            InputError: another process holds the lock, other users can write to the folder, or it cannot be written.
        """
        try:
            self._create()
            self._check_access()
            self._lock = lock = self._open(self.folder / "lock")
        except OSError as error:
            raise self._unusable(error) from None
        self._lock_file(lock, fcntl.LOCK_EX)

    def check(self) -> None:
        """Check that the folder can be locked, without changing anything.

        Raises:
            InputError: as `lock`.
        """
        try:
            check_writable(self.folder)
            if self.folder.exists():
                self._check_access()
            lock = self.folder / "lock"
            if os.path.lexists(lock):
                with open(lock, "rb", opener=open_private) as file:
                    self._lock_file(file, fcntl.LOCK_SH)
        except OSError as error:
            raise self._unusable(error) from None

    def load(self) -> dict[str, Journal]:
        """Return the saved journals by group, without damaged parts, which are recovered from the peers.

        A group that is not part of the federation file may return in a later epoch, and its pending reveal counts.

        Raises:
            InputError: a file cannot be read, or is a symbolic link.
        """
        journals = {}
        for group in self._saved_groups():
            journal = self._load_snapshot(group)
            for start, segment in self._segments_of(group):
                if start > len(journal):
                    break
                content = self._read(segment)
                try:
                    _replay(content, journal)
                except InputError as error:
                    _warn_damaged(segment, error)
                    break
            if len(journal) or journal.pending_reveal is not None:
                journals[group] = journal
        return journals

    def _load_snapshot(self, group: str) -> Journal:
        path = self._snapshot(group)
        if not os.path.lexists(path):
            return Journal()
        content = self._read(path)
        try:
            return Journal.from_bytes(content)
        except InputError as error:
            _warn_damaged(path, error)
            return Journal()

    def append(self, group: str, place: int, entry: Sequence[Buffer]) -> bool:
        """Append an entry, a sequence of buffers, to a group's journal; return False if it could not be written."""
        if group in self._failed:  # entries after a missing one cannot be read; the next snapshot contains them
            return False
        try:
            if group in self._open_segments:
                self._open_segments[group].writelines((entry_header(place, entry), *entry))
                self._open_segments[group].flush()
            else:
                self._open_segments[group] = self._create_segment(group, place, entry)
        except OSError as error:
            self._warn_not_saved(error)
            self._failed.add(group)
            with suppress(OSError):
                self._unfinished(group, place).unlink(missing_ok=True)
            return False
        return True

    def _create_segment(self, group: str, place: int, entry: Sequence[Buffer]) -> BinaryIO:
        """Create a segment with its first entry, atomically.

        A segment of an earlier process may begin at the same place: its records are kept, because a pending reveal
        among them counts although another one follows.
        """
        path = self._snapshot(group).with_suffix(f".{place}.entries")
        before = _valid_records(self._read(path)) if path.is_file() and not path.is_symlink() else b""
        segment = self._open(self._unfinished(group, place))
        try:
            segment.writelines((before, entry_header(place, entry), *entry))
            segment.flush()
            self._unfinished(group, place).replace(path)
        except BaseException:
            with suppress(OSError):
                segment.close()
            raise
        return segment

    def _unfinished(self, group: str, place: int) -> Path:
        return self._snapshot(group).with_suffix(f".{place}.begun")

    def rotate(self, group: str) -> None:
        """Close the group's segment before a snapshot is saved; later entries go to a new segment."""
        self._failed.discard(group)
        if group in self._open_segments:
            with suppress(OSError):  # a full disk, which was logged when it was written to
                self._open_segments.pop(group).close()

    def save(self, group: str, length: int, *journal: Buffer) -> bool:
        """Save a snapshot of a group's journal, and remove the segments that it contains.

        A snapshot that is shorter than the last one is not saved: two threads save, and may overtake each other.

        Args:
            group: the group.
            length: the number of entries in the snapshot.
            journal: the serialised journal, in pieces.

        Returns:
            True if it was saved; if not, a warning was logged.
        """
        try:
            with self._save_lock:
                if length < self._saved.get(group, 0):
                    return True
                temporary = self._snapshot(group).with_suffix(".new")
                with self._open(temporary) as file:
                    file.writelines(journal)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._snapshot(group))
                self._saved[group] = length
                for start, segment in self._segments_of(group):
                    if start < length:
                        segment.unlink()
        except OSError as error:
            self._warn_not_saved(error)
            return False
        return True

    def save_waiting_times(self, times: WaitingTimes) -> None:
        """Save for whom the run waited that ends now, for `cgd federation check`; it is no loss if that fails."""
        path = self._waiting_times
        with suppress(OSError):
            with self._open(path.with_suffix(".new")) as file:
                file.write(json.dumps(times.stored(), indent=1).encode())
            path.with_suffix(".new").replace(path)

    def load_waiting_times(self) -> tuple[WaitingTimes, datetime] | None:
        """Return for whom the last run waited, and when it ended; None if there is none.

        Raises:
            InputError: the file cannot be read, or is damaged.
        """
        path = self._waiting_times
        if not os.path.lexists(path):
            return None
        content = self._read(path)
        try:
            ended = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
            return WaitingTimes.from_json(content), ended
        except (InputError, OSError) as error:
            raise InputError(f"{path} is damaged: {error}") from None

    def close(self) -> None:
        """Close the files."""
        for group in list(self._open_segments):
            self.rotate(group)
        if self._lock is not None:
            self._lock.close()

    def _saved_groups(self) -> list[str]:
        prefix = f"{self._federation}+"
        names = (path.name for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        files = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return sorted({name.partition(".")[0] for name in files if name.endswith((".ledger", ".entries"))})

    def _snapshot(self, group: str) -> Path:
        # Names of federations and groups have no plus, and groups no dot, so no two of them share a file.
        return self.folder / f"{self._federation}+{group}.ledger"

    @property
    def _waiting_times(self) -> Path:
        return self.folder / f"{self._federation}+waiting.json"

    def _segments_of(self, group: str) -> list[tuple[int, Path]]:
        name = re.compile(rf"{re.escape(self._snapshot(group).stem)}\.([0-9]{{1,19}})\.entries")
        files = self.folder.iterdir() if self.folder.exists() else ()
        return sorted((int(found[1]), file) for file in files if (found := name.fullmatch(file.name)))

    def _lock_file(self, file: BinaryIO, kind: int) -> None:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(
                f"{self.folder} is in use: this participant is already running; stop the other process first"
            ) from None

    def _unusable(self, error: OSError) -> InputError:
        return InputError(
            f"the state cannot be saved in {self.folder} ({error.strerror}); name another folder (state=, --state)"
        )

    def _create(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _check_access(self) -> None:
        status = self.folder.stat()
        mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
        if owner != os.geteuid():
            raise InputError(
                f"{self.folder} belongs to user {owner}, and this process runs as user {os.geteuid()}; run it as the "
                "owner, or name a folder of your own (state=, --state)"
            )
        if mode & ~MAX_MODE:
            raise InputError(
                f"{self.folder} has mode {mode:04o}, so other users can put files there; chmod 700 "
                f"{shlex.quote(str(self.folder))}, and check whether all files in it are yours"
            )

    def _open(self, path: Path) -> BinaryIO:
        self._create()
        return open(path, "wb", opener=open_private)

    def _read(self, path: Path) -> bytes:
        try:
            with open(path, "rb", opener=open_private) as file:
                return file.read()
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror}); check whether it is yours, or move it away: the journal is "
                "then recovered from the peers"
            ) from None

    def _warn_not_saved(self, error: OSError) -> None:
        if time.monotonic() - self._warned < WARNING_SECONDS:
            return
        self._warned = time.monotonic()
        log.warning(
            "the state cannot be saved in %s (%s); the peers hold a copy", self.folder, error.strerror,
            extra={"event": "not saved"},
        )  # fmt: skip


def _warn_damaged(path: Path, error: InputError) -> None:
    log.warning(
        "%s is damaged and not used (%s); the journal is recovered from the peers", path, error,
        extra={"event": "damaged"},
    )  # fmt: skip


def entry_header(place: int, entry: Sequence[Buffer]) -> bytes:
    """Return the header of an entry in a segment."""
    checksum = 0
    for piece in entry:
        checksum = zlib.crc32(piece, checksum)
    head = _RECORD.pack(place, sum(map(len, entry)), checksum)
    return head + _CHECKSUM.pack(zlib.crc32(head))


def _replay(data: bytes, journal: Journal) -> None:
    """Add the entries of a segment that the journal does not have yet; ignore a truncated entry at the end.

    Raises:
        InputError: an entry is damaged; those before it are added.
    """
    for place, content in _records(data):
        if place == len(journal):
            journal.add_record(content)


def _valid_records(data: bytes) -> bytes:
    """Return the records of a segment without a damaged or truncated end."""
    valid = b""
    with suppress(InputError):
        for place, content in _records(data):
            valid += entry_header(place, [content]) + content
    return valid


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while (start := at + _RECORD.size + _CHECKSUM.size) <= len(data):
        place, size, checksum = _RECORD.unpack_from(data, at)
        (header_checksum,) = _CHECKSUM.unpack_from(data, at + _RECORD.size)
        if zlib.crc32(data[at : at + _RECORD.size]) != header_checksum:
            raise InputError(f"the header of the entry at byte {at} does not match its checksum")
        at = start + size
        if at > len(data):  # truncated by a crash
            return
        content = data[start:at]
        if zlib.crc32(content) != checksum:
            raise InputError(f"entry {place} does not match its checksum")
        yield place, content
