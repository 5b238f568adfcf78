"""What the hub does with the members' deposits: it adds them up, slice by slice, and tells all of them the totals.

It knows who belongs to which group, and nothing else: no key, no setting, no size. No I/O here: a frame in, a frame for
all members of a group out. The rules:

1. A member is at one sum of a group at a time, the one it deposited for last. A sum that no member is at any more is
   forgotten. So there are never more sums than members, whatever became of those who began them.
2. A slice that all have deposited is told to all and forgotten. A copy changes nothing.
3. A member deposits at most so many slices ahead of the totals (`reducing.AHEAD`); more than twice that is refused, so
   that nobody can fill the hub's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import RemoteProtocolError
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.messages import Deposit, PeerId, Total
from cgd.secagg.partition import SLICE
from cgd.secagg.reduction import AHEAD, as_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy.typing as npt

    from cgd.secagg.messages import Buffer

    Key = tuple[str, bytes, int]  # group, session, number of the sum


@dataclass
class PartialSum:
    """One sum: the slices that have not come from all yet, with those who gave theirs, and the slices that are told."""

    slices: dict[int, tuple[npt.NDArray[Any], set[PeerId]]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)


class HubAggregator:
    """Adds up deposits.

    Args:
        groups: who sums together, by the name of the group.
    """

    def __init__(self, groups: Mapping[str, Collection[PeerId]]) -> None:
        self._groups: dict[str, frozenset[PeerId]] = {}
        self._tallies: dict[Key, PartialSum] = {}
        self._at: dict[tuple[str, PeerId], Key] = {}
        self.adopt(groups)

    def adopt(self, groups: Mapping[str, Collection[PeerId]]) -> bool:
        """Have these groups from now on; what was begun in one that has changed is forgotten. Whether there is one.

        Then the members must be told to deposit again: some may have known of the change before us, and what they
        deposited for their next sum is forgotten, too.
        """
        before, self._groups = self._groups, {name: frozenset(members) for name, members in groups.items()}
        same = {name for name, members in self._groups.items() if before.get(name) == members}
        self._tallies = {key: tally for key, tally in self._tallies.items() if key[0] in same}
        self._at = {place: key for place, key in self._at.items() if key[0] in same}
        return len(same) < len(self._groups)

    def receive(self, sender: PeerId, data: Buffer) -> tuple[frozenset[PeerId], bytes] | None:
        """Take in one frame: the total of its slice for all members of the group, if this was the last that it lacked.

        Raises:
            RemoteProtocolError: the sender may not deposit this; it is dropped.
        """
        frame = from_bytes(data, sender)
        deposit = frame.message
        if not isinstance(deposit, Deposit):
            raise RemoteProtocolError(sender, f"sent the hub {type(deposit).__name__}, and it takes deposits only")
        members = self._groups.get(deposit.group, frozenset())
        if sender not in members:
            raise RemoteProtocolError(sender, f"deposits in the group {deposit.group!r}, which it is not a member of")
        tally = self._tally(sender, (deposit.group, frame.session, frame.number))
        if tally is None or deposit.start in tally.told:
            return None
        total, givers = self._slice(sender, tally, deposit)
        if sender in givers:
            return None
        np.add(total, np.frombuffer(deposit.words, dtype=total.dtype), out=total)
        givers.add(sender)
        if givers != members:
            return None
        del tally.slices[deposit.start]
        tally.told.add(deposit.start)
        return members, to_bytes(Frame(frame.session, frame.number, Total(deposit.start, as_bytes(total))))

    def _tally(self, sender: PeerId, key: Key) -> PartialSum | None:
        """Rule 1; None for a sum of this session that the sender has left behind."""
        before = self._at.get((key[0], sender))
        if before is not None and before[:2] == key[:2] and before[2] > key[2]:
            return None
        self._at[key[0], sender] = key
        if before is not None and before not in self._at.values():
            self._tallies.pop(before, None)
        return self._tallies.setdefault(key, PartialSum())

    def _slice(self, sender: PeerId, tally: PartialSum, deposit: Deposit) -> tuple[npt.NDArray[Any], set[PeerId]]:
        dtype = WORD_TYPES[deposit.bits]
        found = tally.slices.get(deposit.start)
        if found is not None:
            if (found[0].dtype, found[0].nbytes) != (dtype, len(deposit.words)):
                raise RemoteProtocolError(
                    sender,
                    f"deposits {len(deposit.words)} bytes of {deposit.bits}-bit words at {deposit.start}, and others "
                    f"{found[0].nbytes} of {8 * found[0].itemsize}",
                )
            return found
        if len(deposit.words) > SLICE * dtype.itemsize:
            raise RemoteProtocolError(sender, f"deposits {len(deposit.words)} bytes at once, more than a slice has")
        if sum(sender in givers for _, givers in tally.slices.values()) >= 2 * AHEAD:
            raise RemoteProtocolError(sender, f"deposits more than {2 * AHEAD} slices ahead of the others")
        tally.slices[deposit.start] = np.zeros(len(deposit.words) // dtype.itemsize, dtype=dtype), set()
        return tally.slices[deposit.start]
