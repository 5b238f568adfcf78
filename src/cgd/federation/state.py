"""What a participant keeps on disk: the ledgers of its groups, whole now and then, and each entry as it is made.

The others hold a participant's past as well, so nothing here is needed while one of them is alive. It is for members
who die together: all of them, or a column of a grid. Entries are handed to the system before the program goes on, so a
killed process has them; a whole ledger is also forced to the disk, so a power cut takes a few seconds of them at most.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, BinaryIO

from cgd.errors import InputError
from cgd.protocol.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from cgd.protocol.messages import Buffer

log = logging.getLogger("cgd.federation")

COMPLAINT_SECONDS = 60.0
_RECORD = struct.Struct("<QQ")  # the place of an entry, and its bytes


class StateFolder:
    """A folder with the ledgers of one participant; see `cgd.network.conductor.Store`.

    Args:
        folder: made when there is something to keep.
        federation: the name of the federation.
    """

    def __init__(self, folder: Path, federation: str) -> None:
        self.folder = folder
        self._federation = federation
        self._journals: dict[str, BinaryIO] = {}
        self._lock: BinaryIO | None = None
        self._saving = threading.Lock()
        self._complained = -inf
        self._failed: set[str] = set()

    def lock(self) -> None:
        """Have the folder for ourselves, until `close` or the end of the process.

        Raises:
            InputError: another process has it, or nothing can be written there.
        """
        try:
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

    def load(self, groups: Iterable[str]) -> dict[str, Ledger]:
        """The ledgers that were kept, by group. What is damaged is left out: the others will catch us up."""
        ledgers = {}
        for group in groups:
            ledger = Ledger()
            try:
                if self._file(group).exists():
                    ledger = Ledger.from_bytes(self._file(group).read_bytes())
                for start, journal in self._journals_of(group):
                    if start <= len(ledger):
                        _replay(journal, ledger)
            except InputError as error:
                log.warning(
                    "%s is damaged and not used (%s); the others will catch us up", self._file(group), error,
                    extra={"event": "damaged"},
                )  # fmt: skip
            if len(ledger) or ledger.mark is not None:
                ledgers[group] = ledger
        return ledgers

    def append(self, group: str, place: int, entry: Sequence[Buffer]) -> None:
        """Keep one more entry of a group's ledger, given in pieces."""
        if group in self._failed:  # nothing can be read behind an entry that is missing: the next whole save mends it
            return
        try:
            if group not in self._journals:
                self._journals[group] = self._open(self._file(group).with_suffix(f".{place}.entries"))
            self._journals[group].write(_RECORD.pack(place, sum(map(len, entry))))
            self._journals[group].writelines(entry)
            self._journals[group].flush()
        except OSError as error:
            self._complain(error)
            self._failed.add(group)
            with suppress(OSError):  # a file of this name has nothing else in it
                self._file(group).with_suffix(f".{place}.entries").unlink(missing_ok=True)

    def turn(self, group: str) -> None:
        """The ledger as it is now will be saved; what is appended from now on goes with it."""
        self._failed.discard(group)
        if group in self._journals:
            with suppress(OSError):  # a full disk; told when it was written to
                self._journals.pop(group).close()

    def save(self, group: str, length: int, ledger: bytes) -> bool:
        """Keep a group's ledger as it was, in place of all entries up to this length; whether that worked."""
        try:
            with self._saving:
                temporary = self._file(group).with_suffix(".new")
                with self._open(temporary) as file:
                    file.write(ledger)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._file(group))
                for start, journal in self._journals_of(group):
                    if start < length:
                        journal.unlink()
        except OSError as error:
            self._complain(error)
            return False
        return True

    def close(self) -> None:
        """Close the files."""
        for group in list(self._journals):
            self.turn(group)
        if self._lock is not None:
            self._lock.close()

    def _file(self, group: str) -> Path:
        return self.folder / f"{self._federation}-{group}.ledger"

    def _journals_of(self, group: str) -> list[tuple[int, Path]]:
        files = self.folder.glob(f"{self._federation}-{group}.*.entries")
        return sorted((int(file.suffixes[-2][1:]), file) for file in files if file.suffixes[-2][1:].isdigit())

    def _open(self, path: Path) -> BinaryIO:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def _complain(self, error: OSError) -> None:
        if time.monotonic() - self._complained < COMPLAINT_SECONDS:
            return
        self._complained = time.monotonic()
        log.warning(
            "the state cannot be saved in %s (%s); the others hold it", self.folder, error.strerror,
            extra={"event": "not saved"},
        )  # fmt: skip


def _replay(journal: Path, ledger: Ledger) -> None:
    """Add the entries of a journal that a ledger does not have yet; one that was cut off by a kill ends it."""
    for place, content in _records(journal.read_bytes()):
        if place != len(ledger):
            continue
        try:
            ledger.add_record(content)
        except InputError:
            return


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _RECORD.size <= len(data):
        place, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        yield place, data[at : at + size]
        at += size
