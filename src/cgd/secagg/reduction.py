"""How the members' subtotals become one sealed total: added up by the members themselves, or by the hub.

Every subtotal is sealed when it comes here, and so is the total. `MemberReduction` cuts the vector into parts, and each
part has a reducer among the members. `HubReduction` has the hub add up everything. The hub is no member, and nobody need trust
it: each subtotal carries tags (`secagg/mac.py`), and a total that does not fit its tags is refused before anybody
confirms it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cgd.errors import HubError, RemoteProtocolError
from cgd.secagg.mac import TAGS, LinearMac
from cgd.secagg.messages import HUB, Deposit, Message, PeerId, Slice, Subtotal, SumSpec, Total
from cgd.secagg.partition import parts, slice_at, slices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    Say = Callable[[PeerId, Message], None]

# How many slices a member deposits before the hub has told their totals: what bounds the hub's memory.
AHEAD = 64


@dataclass(frozen=True)
class HubKeys:
    """What a group needs to sum through the hub.

    Attributes:
        group: the name under which the hub knows it.
        key: 16 bytes that all members have and the hub has not.
    """

    group: str
    key: bytes = field(repr=False)


class Reduction(Protocol):
    """One member's part in making the sealed total."""

    def open(self, subtotal: npt.NDArray[Any]) -> None:
        """Begin, with our sealed subtotal."""

    def repeats(self, sender: PeerId, message: Subtotal | Total) -> bool:
        """Whether this has come before."""

    def take(self, sender: PeerId, message: Subtotal | Total) -> None:
        """Take in what another one has sent."""

    def again(self) -> None:
        """The hub has nothing of ours."""

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """What is missing, and of whom; nobody when the total is here."""

    def total(self) -> npt.NDArray[Any]:
        """The sealed total, when it is here."""


class MemberReduction:
    """Each part of the vector is added up by one member, which tells the others; see `Reduction`."""

    def __init__(self, me: PeerId, members: Collection[PeerId], spec: SumSpec, dtype: np.dtype[Any], say: Say) -> None:
        self._me = me
        self._others = [peer for peer in members if peer != me]
        self._say = say
        self._parts = parts(spec, members)
        self._slices = {member: slices(self._parts.get(member, slice(0, 0))) for member in members}
        self._total = np.zeros(spec.size, dtype=dtype)
        # The slices that have arrived, by their place: of our part, and of the parts of others.
        self._here: dict[type[Slice], dict[PeerId, set[int]]] = {
            kind: {peer: set() for peer in self._others} for kind in (Subtotal, Total)
        }
        self._reduced: int | None = None  # slices of our part whose total we have told; None before we have opened

    def open(self, subtotal: npt.NDArray[Any]) -> None:
        """Give every reducer its part: everyone's first slice, then everyone's second."""
        for row in zip_longest(*self._slices.values()):
            for reducer, place in zip(self._slices, row, strict=True):
                if place is None:
                    continue
                if reducer == self._me:
                    np.add(self._total[place], subtotal[place], out=self._total[place])
                else:
                    self._say(reducer, Subtotal(place.start, as_bytes(subtotal[place])))
        self._reduced = 0
        self._reduce()

    def repeats(self, sender: PeerId, message: Subtotal | Total) -> bool:
        """Whether this slice has come before."""
        return message.start in self._here[type(message)][sender]

    def take(self, sender: PeerId, message: Subtotal | Total) -> None:
        """Add a slice where it belongs."""
        if isinstance(message, Subtotal) and self._me not in self._parts:
            raise RemoteProtocolError(sender, "sent us a Subtotal, and we add up no part of this sum")
        if isinstance(message, Total) and sender not in self._parts:
            raise RemoteProtocolError(sender, "sent a Total, and it adds up no part of this sum")
        part = self._parts[self._me if isinstance(message, Subtotal) else sender]
        add_slice(sender, message, part, self._total)
        self._here[type(message)][sender].add(message.start)
        self._reduce()

    def again(self) -> None:
        """The hub has no part in this."""

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """Who has not sent all its slices."""
        if (self._reduced or 0) < len(self._slices[self._me]):
            here, whole = self._here[Subtotal], len(self._slices[self._me])
            return "Subtotal", frozenset(peer for peer in self._others if len(here[peer]) < whole)
        here = self._here[Total]
        return "Total", frozenset(peer for peer in self._others if len(here[peer]) < len(self._slices[peer]))

    def total(self) -> npt.NDArray[Any]:
        """The sealed total."""
        return self._total

    def _reduce(self) -> None:
        """Tell the total of every slice of our part that has come from all."""
        if self._reduced is None:
            return
        for place in self._slices[self._me][self._reduced :]:
            if not all(place.start in here for here in self._here[Subtotal].values()):
                return
            for peer in self._others:
                self._say(peer, Total(place.start, as_bytes(self._total[place])))
            self._reduced += 1


class HubReduction:
    """The hub adds up everything, and its tags tell whether it did; see `Reduction`."""

    def __init__(
        self,
        me: PeerId,
        members: Collection[PeerId],
        number: int,
        spec: SumSpec,
        dtype: np.dtype[Any],
        hub: HubKeys,
        say: Say,
    ) -> None:
        self._me, self._number, self._spec, self._hub, self._say = me, number, spec, hub, say
        self._tagging = LinearMac(hub.key, number, members)
        self._whole = slice(0, spec.size + TAGS)
        self._slices = slices(self._whole)
        self._total = np.zeros(self._whole.stop, dtype=dtype)
        self._subtotal: npt.NDArray[Any] | None = None
        self._here: set[int] = set()
        self._told: set[int] = set()  # of these, by the hub in its present life
        self._deposited = 0

    def open(self, subtotal: npt.NDArray[Any]) -> None:
        """Deposit our subtotal with its tags."""
        self._subtotal = subtotal
        self._tags = self._tagging.tags(self._me, subtotal)
        self._deposit()

    def repeats(self, sender: PeerId, message: Subtotal | Total) -> bool:
        """Whether this slice has come before; if the hub tells it for the first time in its life, we go on from it."""
        if sender != HUB or message.start not in self._here:
            return False
        self._told.add(message.start)
        self._deposit()
        return True

    def take(self, sender: PeerId, message: Subtotal | Total) -> None:
        """Keep a slice of the total."""
        if sender != HUB:
            raise RemoteProtocolError(sender, f"sent a {type(message).__name__}, and the hub adds up this sum")
        add_slice(sender, message, self._whole, self._total)
        self._here.add(message.start)
        self._told.add(message.start)
        self._deposit()

    def again(self) -> None:
        """Deposit all once more: the same bytes, so the hub learns nothing by it."""
        self._told.clear()
        self._deposited = 0
        self._deposit()

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """The hub, until all of the total is here."""
        return "Total", frozenset({HUB} if len(self._here) < len(self._slices) else ())

    def total(self) -> npt.NDArray[Any]:
        """The sealed total.

        Raises:
            HubError: it is not that of the members' subtotals.
        """
        if not self._tagging.holds(self._total):
            raise HubError(
                f"the total of sum {self._number} does not fit its tags: the hub added wrongly, or altered what it was "
                "given, or a member deposited what does not fit its tags; nothing was opened"
            )
        return self._total[: self._spec.size]

    def _deposit(self) -> None:
        """Deposit the next slices, but not many more than the hub has told the totals of."""
        if self._subtotal is None:
            return
        while self._deposited < len(self._slices) and self._deposited < len(self._told) + AHEAD:
            place = self._slices[self._deposited]
            size = self._subtotal.size
            words = self._subtotal[place]
            if place.stop > size:  # the tags are at the end, and may be a slice of their own
                words = np.concatenate([words, self._tags[max(0, place.start - size) : place.stop - size]])
            self._say(HUB, Deposit(place.start, self._hub.group, self._spec.ring_bits, as_bytes(words)))
            self._deposited += 1


def add_slice(sender: PeerId, message: Slice, part: slice, to: npt.NDArray[Any]) -> None:
    """Add a slice of a part to the vector that it belongs to.

    Raises:
        RemoteProtocolError: it is no slice of that part.
    """
    place = to[slice_at(part, message.start)]
    if len(message.words) != place.nbytes or not place.size:
        raise RemoteProtocolError(
            sender,
            f"sent a {type(message).__name__} of {len(message.words)} bytes from element {message.start} on, "
            f"not {place.nbytes}",
        )
    np.add(place, np.frombuffer(message.words, dtype=to.dtype), out=place)


def as_bytes(words: npt.NDArray[Any]) -> memoryview:
    """Ring elements as they travel."""
    return words.data.cast("B")
