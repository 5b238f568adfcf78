"""The transfer of missing journal entries from a member that is ahead; the header is checked before the rest is stored.

The header arrives first. It has all entries, so the hash chain shows whether they lead from our head to the head that
the source signed, and the certificate of the last entry shows whether the other members signed them. So the sizes of
all totals are known, those of the states are what the members agree on, and nothing beyond them is stored. The rules:

1. A present member besides the source must have signed the last sum, or hold the same history. Otherwise the sizes are
   one member's invention, and the rest is not received. An honest source whose partners have left looks the same, so
   this is a refusal, not an accusation.
2. Epochs start at 1 and never decrease, so a sum of an earlier epoch cannot be appended to a later one.
3. A total is missing only if a state includes it, or if every member has dropped it (rule 3 of the journal). Otherwise
   our program could not run again from this journal.
4. The header has a limit per entry. The number of entries is itself a claim, so the whole header is limited, too, and
   more if another member reports the same history.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.secagg.attendance import epoch_of
from cgd.secagg.certificates import extend_chain
from cgd.secagg.journal import MAX_KEPT_BYTES, Journal, read_header, read_row
from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Collection

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.group import Group
    from cgd.secagg.journal_entry import JournalEntry
    from cgd.secagg.messages import JournalChunk, PeerId
    from cgd.secagg.positions import GroupPosition, StateSummary

DIGEST_BYTES = 32
LENGTH_BYTES = 8
MAX_HEADER_BYTES_PER_ENTRY = 4096
MAX_HEADER_BYTES_PER_MEMBER = 512
# About 200,000 sums, and 800,000 sums if another member reports the same history.
MAX_HEADER_BYTES_OF_ONE_MEMBER = 32 << 20
MAX_HEADER_BYTES = 128 << 20
# The states of an optimiser are a few vectors of the size of its sums: Adam's have three.
MIN_STATE_BYTES = 64 << 20
MAX_STATE_RATIO = 64
# Against members that collude: each of them confirms what the other one claims.
MAX_CONTENT_BYTES = 32 << 30


class JournalTransfer:
    """Part of another member's journal, received in chunks.

    Args:
        source: the member that sends it.
        group: the group; the transfer extends its journal.
        claimed: the position that the source reported.
        federation_spec: the federation spec.
        states: whether optimiser states were requested as well.
        holders: the members that reported the same history as the source.

    Attributes:
        refusal: the reason why the rest is not received, if there is one; the source may be honest.
        attempt: the attempt that finished the last sum, once the header was received.
        members: the members of that sum.
        signers: those of them whose signatures were verified, because their keys are known.
        period: the period of that sum.
        journal: the transferred entries and states, once they are complete and verified.
    """

    def __init__(
        self,
        source: PeerId,
        group: Group,
        claimed: GroupPosition,
        federation_spec: FederationSpec,
        *,
        states: bool,
        holders: Collection[PeerId] = (),
    ) -> None:
        self.source, self.claimed, self.states = source, claimed, states
        self.refusal: str | None = None
        self.attempt, self.period = b"", 0
        self.members: frozenset[PeerId] = frozenset()
        self.signers: frozenset[PeerId] = frozenset()
        self.journal: Journal | None = None
        self._group, self._federation_spec = group, federation_spec
        self._other_holders = frozenset(holders) - {source}
        self._since, self._head = len(group.journal), group.journal.head
        self._received = bytearray()
        self._size = 0  # in bytes; known once the header was received

    def receive(self, chunk: JournalChunk) -> None:
        """Add the next chunk; a duplicate has no effect, and none has after a refusal.

        Raises:
            InputError: the bytes are not a journal that extends ours and was signed by the members.
        """
        if chunk.start != len(self._received) or self.journal is not None or self.refusal is not None:
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
        per_entry = MAX_HEADER_BYTES_PER_ENTRY + MAX_HEADER_BYTES_PER_MEMBER * len(self._federation_spec.keys)
        return (1 << 16) + (self.claimed.length - self._since) * per_entry

    def _read_header(self, size: int) -> None:
        begin = DIGEST_BYTES + LENGTH_BYTES
        if len(self._received) < begin:
            return
        length = int.from_bytes(self._received[DIGEST_BYTES:begin], "little")
        if length > self._max_header_bytes():
            raise ValueError(f"a header of {length} bytes is too long for its entries")
        limit = MAX_HEADER_BYTES if self._other_holders else MAX_HEADER_BYTES_OF_ONE_MEMBER
        if length > limit:
            alone = "" if self._other_holders else " from one member alone"
            self._refuse(f"has a list of sums of {length >> 20} MiB; at most {limit >> 20} MiB are accepted{alone}")
            return
        if len(self._received) < begin + length:
            return
        header, _ = read_header(memoryview(bytes(self._received[DIGEST_BYTES : begin + length])))
        entries = [read_row(row) for row in header["entries"]]
        content_bytes = self._check_chain(entries) + self._check_states(header["states"])
        if begin + length + content_bytes != size:
            raise ValueError(f"it has {size} bytes, but its entries have {begin + length + content_bytes}")
        if not (self._other_holders | self.signers) - {self.source}:
            self._refuse("is the only present member that signed its history")
            return
        self._check_omitted_totals(entries)
        self._check_plausible([entry for entry, _ in entries], content_bytes)
        self._size = size
        if len(self._received) > size:
            raise ValueError("it is longer than its entries state")

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._received.clear()

    def _check_chain(self, entries: list[tuple[JournalEntry, bool]]) -> int:
        """Check the entries; return the number of bytes of their totals."""
        if self._since + len(entries) != self.claimed.length or not entries:
            raise ValueError(f"it has {self._since + len(entries)} sums, but {self.claimed.length} were reported")
        own = self._group.journal.entries
        head, latest_epoch, total_bytes = self._head, own[-1].epoch if own else 1, 0
        for entry, kept in entries:
            if kept:
                if entry.certificate is None:
                    raise ValueError("a total has no certificate")
                entry.certificate.verify_entry(head, entry.fields)
                total_bytes += entry.size
            if (epoch_of(entry.epoch), entry.epoch) < (epoch_of(latest_epoch), latest_epoch):
                raise ValueError(f"a sum is of epoch {entry.epoch}, but epoch {latest_epoch} had begun")
            head, latest_epoch = extend_chain(head, entry.fields), entry.epoch
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
        self.signers = last.certificate.signers(
            self._group.name, self._federation_spec.keys, all_valid=epoch_of(last.epoch) >= epoch
        )
        if epoch_of(last.epoch) > epoch:  # its members may still repeat that sum, and we would not learn of it
            raise ValueError(f"its last sum is of epoch {epoch_of(last.epoch)}, and this member is in epoch {epoch}")
        self.members, self.attempt, self.period = frozenset(last.certificate.keys), last.attempt, last.epoch
        if epoch_of(last.epoch) == epoch:
            self._check_signers(last)
        return total_bytes

    def _check_signers(self, last: JournalEntry) -> None:
        """Check that the last sum was signed by all members of the group, or by a quorum of those who were present."""
        quorum = self._federation_spec.quorum
        missing = (set(self._group.members) if quorum is None else self.members) - self.signers
        if missing:
            raise ValueError(f"its last sum is not signed by {', '.join(sorted(missing))}")
        if quorum is not None and len(self.members) < quorum:
            raise ValueError(f"its last sum has {len(self.members)} members, and the quorum is {quorum}")
        if quorum is not None and last.epoch > self._group.epoch:
            raise ValueError("its last sum is of a later view than this one")

    @property
    def _reported_states(self) -> tuple[StateSummary, ...]:
        return self.claimed.states or () if self.states else ()

    def _check_states(self, rows: list[Any]) -> int:
        """Check the states; return their number of bytes."""
        found = [[slot, steps, size, bool(fixed)] for slot, steps, size, fixed in rows]
        if sorted(found) != [[state.slot, state.steps, state.size, state.fixed] for state in self._reported_states]:
            raise ValueError("its states are not the reported ones")
        return sum(state.size for state in self._reported_states)

    def _check_omitted_totals(self, entries: list[tuple[JournalEntry, bool]]) -> None:
        """Apply rule 3."""
        steps = {slot: state.steps for slot, state in self._group.journal.states.items()}
        for state in self._reported_states:
            steps[state.slot] = max(state.steps, steps.get(state.slot, 0))
        bytes_since = 0  # of sums that are no steps, from this entry on
        for entry, kept in reversed(entries):
            if entry.step is None:
                bytes_since += entry.size
                dropped = bytes_since > MAX_KEPT_BYTES
            else:
                dropped = entry.step.number < steps.get(entry.step.slot, 0)
            if not kept and not dropped:
                raise ValueError("a total is missing that no state includes")

    def _check_plausible(self, entries: list[JournalEntry], content_bytes: int) -> None:
        """Compare the size of the states, which one member alone may have reported, with the sums."""
        entries = self._group.journal.entries + entries
        optimizers = {entry.step.slot for entry in entries if entry.step is not None}
        largest = max(entry.size for entry in entries)
        state_bytes = sum(state.size for state in self._reported_states)
        if state_bytes > MIN_STATE_BYTES + MAX_STATE_RATIO * largest * (1 + len(optimizers)):
            raise ValueError(f"its states have {state_bytes} bytes, and its largest sum has {largest}")
        if content_bytes > MAX_CONTENT_BYTES:
            raise ValueError(f"it has {content_bytes} bytes; at most {MAX_CONTENT_BYTES} are accepted")

    def _finish(self) -> None:
        journal = Journal.from_bytes(bytes(self._received))
        self._received.clear()
        for entry in journal.entries:
            if entry.words is not None and entry.certificate is not None:
                entry.certificate.verify_total(entry.words)
        if journal.state_summaries() != self._reported_states:
            raise ValueError("its states are not the reported ones")
        self.journal = journal
