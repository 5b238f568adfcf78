"""The hub's side of a sum: it adds the members' deposits slice by slice and sends the totals to all members.

The hub knows the members of each group and nothing else: no key, no setting, no size. No I/O here: one frame in, one
frame for all members of a group out. The rules:

1. A member is at one sum of a group at a time: the one of its latest deposit. A sum that no member is at any more is
   dropped. So there are never more sums than members.
2. A slice that all members have deposited is sent to all and dropped. A duplicate deposit has no effect.
3. A member deposits at most `MAX_SLICES_AHEAD` slices ahead of the totals; more than twice that is rejected, which
   bounds the hub's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import RemoteProtocolError
from cgd.secagg.buffers import pool
from cgd.secagg.codec import Frame, encode, from_bytes
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.messages import Deposit, PeerId, Total
from cgd.secagg.reduction import MAX_SLICES_AHEAD, SLICE_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy.typing as npt

    from cgd.secagg.messages import Buffer

    SumKey = tuple[str, bytes, int]  # group, session, number of the sum


@dataclass
class PartialSlice:
    """One slice of a sum at the hub: the sum of the deposits so far.

    Attributes:
        memory: the bytes of the sum, in a buffer with room for the headers of the message that it becomes.
        words: the same bytes as ring elements.
        depositors: the members that deposited it.
    """

    memory: memoryview
    words: npt.NDArray[Any]
    depositors: set[PeerId]


@dataclass
class PartialSum:
    """One sum at the hub.

    Attributes:
        slices: the incomplete slices, by start.
        sent: the starts of the slices whose totals were sent.
    """

    slices: dict[int, PartialSlice] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)


class HubAggregator:
    """Adds deposits.

    Args:
        groups: the members that sum together, by the name of the group.
    """

    def __init__(self, groups: Mapping[str, Collection[PeerId]]) -> None:
        self._groups: dict[str, frozenset[PeerId]] = {}
        self._sums: dict[SumKey, PartialSum] = {}
        self._current: dict[tuple[str, PeerId], SumKey] = {}
        self.adopt(groups)

    def adopt(self, groups: Mapping[str, Collection[PeerId]]) -> bool:
        """Use these groups from now on, drop the sums of changed groups, and return whether a group changed.

        If so, request all members to deposit again: some may have adopted the change before the hub, and their deposits
        for the next sum are dropped as well.
        """
        before, self._groups = self._groups, {name: frozenset(members) for name, members in groups.items()}
        same = {name for name, members in self._groups.items() if before.get(name) == members}
        self._sums = {key: partial for key, partial in self._sums.items() if key[0] in same}
        self._current = {member: key for member, key in self._current.items() if key[0] in same}
        return len(same) < len(self._groups)

    def receive(self, sender: PeerId, data: Buffer) -> tuple[frozenset[PeerId], Buffer] | None:
        """Add one deposit; return the total for all members of the group once the slice is complete.

        Raises:
            RemoteProtocolError: the sender may not deposit this; the frame is dropped.
        """
        frame = from_bytes(data, sender)
        deposit = frame.message
        if not isinstance(deposit, Deposit):
            raise RemoteProtocolError(sender, f"sent {type(deposit).__name__} to the hub, which accepts only Deposit")
        members = self._groups.get(deposit.group, frozenset())
        if sender not in members:
            raise RemoteProtocolError(sender, f"deposits in the group {deposit.group!r}, but is not a member of it")
        partial = self._partial_sum(sender, (deposit.group, frame.session, frame.number))
        if partial is None or deposit.start in partial.sent:
            return None
        total = self._add(sender, partial, deposit)
        if total.depositors != members:
            return None
        del partial.slices[deposit.start]
        partial.sent.add(deposit.start)
        return members, encode(Frame(frame.session, frame.number, Total(deposit.start, total.memory)))

    def _partial_sum(self, sender: PeerId, key: SumKey) -> PartialSum | None:
        """Apply rule 1; return None for an earlier sum of the session than the sender's latest."""
        before = self._current.get((key[0], sender))
        if before is not None and before[:2] == key[:2] and before[2] > key[2]:
            return None
        self._current[key[0], sender] = key
        if before is not None and before not in self._current.values():
            self._sums.pop(before, None)
        return self._sums.setdefault(key, PartialSum())

    def _add(self, sender: PeerId, partial: PartialSum, deposit: Deposit) -> PartialSlice:
        """Add a deposit to its slice, unless the sender has deposited it before; return the slice."""
        dtype = WORD_TYPES[deposit.bits]
        found = partial.slices.get(deposit.start)
        if found is None:
            return self._begin(sender, partial, deposit)
        if (found.words.dtype, found.words.nbytes) != (dtype, len(deposit.words)):
            raise RemoteProtocolError(
                sender,
                f"deposits {len(deposit.words)} bytes of {deposit.bits}-bit words at {deposit.start}, but others "
                f"deposited {found.words.nbytes} bytes of {8 * found.words.itemsize}-bit words",
            )
        if sender not in found.depositors:
            np.add(found.words, np.frombuffer(deposit.words, dtype=dtype), out=found.words)
            found.depositors.add(sender)
        return found

    def _begin(self, sender: PeerId, partial: PartialSum, deposit: Deposit) -> PartialSlice:
        """Begin a slice with its first deposit."""
        dtype = WORD_TYPES[deposit.bits]
        if len(deposit.words) > SLICE_ELEMENTS * dtype.itemsize:
            raise RemoteProtocolError(sender, f"deposits {len(deposit.words)} bytes at once, more than a slice has")
        if sum(sender in each.depositors for each in partial.slices.values()) >= 2 * MAX_SLICES_AHEAD:
            raise RemoteProtocolError(sender, f"deposits more than {2 * MAX_SLICES_AHEAD} slices ahead of the others")
        memory = pool.take(len(deposit.words))
        memory[:] = deposit.words
        begun = partial.slices[deposit.start] = PartialSlice(memory, np.frombuffer(memory, dtype=dtype), {sender})
        return begun
