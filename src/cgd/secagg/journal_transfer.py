"""The transfer of missing journal entries from a member that is ahead; the header is checked before the rest is stored.

The header arrives first. It has all entries, so the hash chain shows whether they lead from our head to the head that
the source signed, and the certificate of the last entry shows whether the other members signed them. So the sizes of
all totals are known, those of the states are what the members agree on, and nothing beyond them is stored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.secagg.certificates import extend_chain
from cgd.secagg.journal import Journal, read_header, read_row
from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.group import Group
    from cgd.secagg.journal import JournalEntry
    from cgd.secagg.messages import JournalChunk, PeerId
    from cgd.secagg.positions import GroupPosition

DIGEST_BYTES = 32
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
MAX_HEADER_BYTES_PER_ENTRY = 4096
MAX_HEADER_BYTES_PER_MEMBER = 512
MAX_ENTRIES = 1 << 50


class JournalTransfer:
    """Part of another member's journal, received in chunks.

    Args:
        source: the member that sends it.
        group: the group; the transfer extends its journal.
        claimed: the position that the source reported.
        federation_spec: the federation spec.
        states: whether optimiser states were requested as well.

    Attributes:
        attempt: the attempt that finished the last sum, once the header was received.
        members: the members of that sum.
        signers: those of them whose signatures were verified, because their keys are known.
        journal: the transferred entries and states, once they are complete and verified.
    """

    def __init__(
        self, source: PeerId, group: Group, claimed: GroupPosition, federation_spec: FederationSpec, *, states: bool
    ) -> None:
        self.source, self.claimed, self.states = source, claimed, states
        self.attempt = b""
        self.members: frozenset[PeerId] = frozenset()
        self.signers: frozenset[PeerId] = frozenset()
        self.journal: Journal | None = None
        self._group, self._federation_spec = group, federation_spec
        self._since, self._head = len(group.journal), group.journal.head
        self._received = bytearray()
        self._size = 0  # in bytes; known once the header was received

    def receive(self, chunk: JournalChunk) -> None:
        """Add the next chunk; a duplicate has no effect.

        Raises:
            InputError: the bytes are not a journal that extends ours and was signed by the members.
        """
        if chunk.start != len(self._received) or self.journal is not None:
            return
        try:
            if self._size and chunk.start + len(chunk.words) > self._size:
                raise ValueError("it is longer than its entries state")
            self._received += chunk.words
            if not self._size:
                self._read_header(chunk.size)
            if self._size and len(self._received) == self._size:
                self._finish()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise InputError(str(error)) from None

    def _max_header_bytes(self) -> int:
        entries = min(self.claimed.length - self._since, MAX_ENTRIES)
        per_entry = MAX_HEADER_BYTES_PER_ENTRY + MAX_HEADER_BYTES_PER_MEMBER * len(self._federation_spec.keys)
        return min(MAX_HEADER_BYTES, (1 << 16) + entries * per_entry)

    def _read_header(self, size: int) -> None:
        begin = DIGEST_BYTES + LENGTH_BYTES
        if len(self._received) < begin:
            return
        length = int.from_bytes(self._received[DIGEST_BYTES:begin], "little")
        if length > self._max_header_bytes():
            raise ValueError(f"a header of {length} bytes is too long for its entries")
        if len(self._received) < begin + length:
            return
        header, _ = read_header(memoryview(bytes(self._received[DIGEST_BYTES : begin + length])))
        entries = [read_row(row) for row in header["entries"]]
        content_bytes = self._check_chain(entries) + self._check_states(header["states"])
        if begin + length + content_bytes != size:
            raise ValueError(f"it has {size} bytes, but its entries have {begin + length + content_bytes}")
        self._size = size
        if len(self._received) > size:
            raise ValueError("it is longer than its entries state")

    def _check_chain(self, entries: list[tuple[JournalEntry, bool]]) -> int:
        """Check the entries; return the number of bytes of their totals."""
        if self._since + len(entries) != self.claimed.length or not entries:
            raise ValueError(f"it has {self._since + len(entries)} sums, but {self.claimed.length} were reported")
        head, total_bytes = self._head, 0
        for entry, kept in entries:
            if kept:
                if entry.certificate is None:
                    raise ValueError("a total has no certificate")
                entry.certificate.verify_entry(head, entry.fields)
                total_bytes += entry.size
            head = extend_chain(head, entry.fields)
        if head != self.claimed.head:
            raise ValueError("its entries do not lead from our history to the reported one")
        last, kept = entries[-1]
        if last.certificate is None or not kept:
            raise ValueError("its last sum has no proof")
        if len(last.certificate.keys) < MIN_MEMBERS:
            raise ValueError(
                f"its last sum has {len(last.certificate.keys)} members; a sum has at least {MIN_MEMBERS} members"
            )
        epoch = self._federation_spec.epoch
        self.signers = last.certificate.signers(self._group.name, self._federation_spec.keys)
        if last.epoch > epoch:  # its members may still repeat that sum, and we would not learn of it
            raise ValueError(f"its last sum is of epoch {last.epoch}, and this member is in epoch {epoch}")
        missing = set(self._group.members) - self.signers
        if last.epoch == epoch and missing:
            raise ValueError(f"its last sum is not signed by {', '.join(sorted(missing))}")
        self.members, self.attempt = frozenset(last.certificate.keys), last.attempt
        return total_bytes

    def _check_states(self, rows: list[Any]) -> int:
        """Check the states; return their number of bytes."""
        agreed = self.claimed.states if self.states and self.claimed.states is not None else ()
        found = [[slot, steps, size, bool(fixed)] for slot, steps, size, fixed in rows]
        if sorted(found) != [[state.slot, state.steps, state.size, state.fixed] for state in agreed]:
            raise ValueError("its states are not the reported ones")
        return sum(state.size for state in agreed)

    def _finish(self) -> None:
        journal = Journal.from_bytes(bytes(self._received))
        self._received.clear()
        for entry in journal.entries:
            if entry.words is not None and entry.certificate is not None:
                entry.certificate.verify_total(entry.words)
        if self.states and journal.state_summaries() != (self.claimed.states or ()):
            raise ValueError("its states are not the reported ones")
        self.journal = journal
