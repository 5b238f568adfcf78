"""What a member that is ahead gives us of its ledger: its header is checked before the rest is taken in.

The header comes first. It has all entries, so the hash chain tells whether they lead from our head to the one that the
holder has signed, and the certificate of the last one whether the others have signed them. With that the sizes of all
totals are known to be right, those of the states are what the members agree on, and nothing beyond them is taken in.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.secagg.certificates import link
from cgd.secagg.journal import Journal, read_header, read_row
from cgd.secagg.partition import MIN_MEMBERS

if TYPE_CHECKING:
    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.group import Group
    from cgd.secagg.journal import JournalEntry
    from cgd.secagg.messages import JournalChunk, PeerId
    from cgd.secagg.positions import GroupRow

DIGEST_BYTES = 32
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
HEADER_BYTES_FOR_AN_ENTRY = 4096
HEADER_BYTES_FOR_A_MEMBER = 512
MAX_NUMBER = 1 << 50


class JournalTransfer:
    """A part of another member's ledger on its way to us.

    Args:
        holder: who gives it.
        group: whose ledger; it continues ours.
        claim: what the holder has reported of its own.
        charter: what all hold to.
        states: whether we have asked for states, too.

    Attributes:
        opening: what the last sum opened, when the header is here.
        members: of that sum.
        signers: those of them whose keys we know; they have signed it.
        given: all of it, when it is here and right.
    """

    def __init__(
        self, holder: PeerId, group: Group, claim: GroupRow, federation_spec: FederationSpec, *, states: bool
    ) -> None:
        self.holder, self.claim, self.states = holder, claim, states
        self.opening = b""
        self.members: frozenset[PeerId] = frozenset()
        self.signers: frozenset[PeerId] = frozenset()
        self.given: Journal | None = None
        self._group, self._federation_spec = group, federation_spec
        self._since, self._head = len(group.journal), group.journal.head
        self._received = bytearray()
        self._size = 0  # of all of it, when the header is here

    def take(self, piece: JournalChunk) -> None:
        """Take in the next piece; a copy changes nothing.

        Raises:
            InputError: what has come is not a ledger that continues ours and was signed by the members.
        """
        if piece.start != len(self._received) or self.given is not None:
            return
        try:
            if self._size and piece.start + len(piece.words) > self._size:
                raise ValueError("it is longer than its entries say")
            self._received += piece.words
            if not self._size:
                self._read_header(piece.size)
            if self._size and len(self._received) == self._size:
                self._finish()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise InputError(str(error)) from None

    def _longest_header(self) -> int:
        entries = min(self.claim.length - self._since, MAX_NUMBER)
        allowed = HEADER_BYTES_FOR_AN_ENTRY + HEADER_BYTES_FOR_A_MEMBER * len(self._federation_spec.keys)
        return min(MAX_HEADER_BYTES, (1 << 16) + entries * allowed)

    def _read_header(self, size: int) -> None:
        begin = DIGEST_BYTES + LENGTH_BYTES
        if len(self._received) < begin:
            return
        length = int.from_bytes(self._received[DIGEST_BYTES:begin], "little")
        if length > self._longest_header():
            raise ValueError(f"a header of {length} bytes is too long for its entries")
        if len(self._received) < begin + length:
            return
        header, _ = read_header(memoryview(bytes(self._received[DIGEST_BYTES : begin + length])))
        rows = [read_row(row) for row in header["entries"]]
        kept = self._check_chain(rows) + self._check_states(header["states"])
        if begin + length + kept != size:
            raise ValueError(f"it has {size} bytes and its entries {begin + length + kept}")
        self._size = size
        if len(self._received) > size:
            raise ValueError("it is longer than its entries say")

    def _check_chain(self, rows: list[tuple[JournalEntry, bool]]) -> int:
        """Check the entries; returns how many bytes of totals come with them."""
        if self._since + len(rows) != self.claim.length or not rows:
            raise ValueError(f"it has {self._since + len(rows)} sums, not the {self.claim.length} it told of")
        head, nbytes = self._head, 0
        for entry, kept in rows:
            if kept:
                if entry.certificate is None:
                    raise ValueError("a total has no certificate")
                entry.certificate.check_entry(head, entry.fields)
                nbytes += entry.size
            head = link(head, entry.fields)
        if head != self.claim.head:
            raise ValueError("its entries do not lead from our history to the one it told of")
        last, kept = rows[-1]
        if last.certificate is None or not kept:
            raise ValueError("its last sum is not proved")
        if len(last.certificate.keys) < MIN_MEMBERS:
            raise ValueError(
                f"its last sum has {len(last.certificate.keys)} members; none has fewer than {MIN_MEMBERS}"
            )
        self.signers = last.certificate.signers(self._group.name, self._federation_spec.keys)
        if (
            last.epoch > self._federation_spec.epoch
        ):  # those who are in it may still run that sum again, and we would not know
            raise ValueError(
                f"its last sum is of epoch {last.epoch}, and we are in epoch {self._federation_spec.epoch}"
            )
        missing = set(self._group.members) - self.signers
        if last.epoch == self._federation_spec.epoch and missing:
            raise ValueError(f"its last sum is not signed by {', '.join(sorted(missing))}")
        self.members, self.opening = frozenset(last.certificate.keys), last.opening
        return nbytes

    def _check_states(self, rows: list[Any]) -> int:
        agreed = self.claim.states if self.states and self.claim.states is not None else ()
        found = [[slot, steps, size, bool(fixed)] for slot, steps, size, fixed in rows]
        if sorted(found) != [[row.slot, row.steps, row.size, row.fixed] for row in agreed]:
            raise ValueError("its states are not those it told of")
        return sum(row.size for row in agreed)

    def _finish(self) -> None:
        given = Journal.from_bytes(bytes(self._received))
        self._received.clear()
        for entry in given.entries:
            if entry.words is not None and entry.certificate is not None:
                entry.certificate.check_total(entry.words)
        if self.states and given.state_rows() != (self.claim.states or ()):
            raise ValueError("its states are not those it told of")
        self.given = given
