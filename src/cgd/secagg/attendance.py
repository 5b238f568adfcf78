"""Attendance: which members are present, as they agree on it, if a federation has a quorum.

Every member announces whom it has not heard for too long, and which members it proposes for the next view. A view is
formed when all its members propose the same one: the same number, the same members and the same processes. The rules:

1. A view has at least as many members as the quorum, which is more than half. So two views without a common member do
   not exist, whatever the network does, and a member is in one view at a time.
2. A member goes on without a peer only if it has not heard it itself, or if two peers report each that they do not hear
   the other: then one of the two is left out.
3. Numbers increase: a member never enters a view with a number that is not above that of its last view. It follows the
   number of a peer only if that is near its own, or that of more members than may be dishonest: otherwise one of them
   could use up the numbers.
4. The first sum of an epoch is made by all members. So every later view has members that took part in it.
5. A view has its own *period*: the epoch and the number. The samples are counted again in every period, because the
   members have changed, and entries of the journal show in which period they were made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cgd.errors import NUMBER_BITS, RemoteProtocolError
from cgd.secagg.messages import Attendance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.messages import PeerId

MAX_LEAP = 64
"""By so much a number may be above the others. With 2⁴⁰ numbers, it takes 2³⁴ messages to use them up."""
MAX_TICKS = 10  # calls of `Membership.set_absent`, some seconds


def period_of(epoch: int, number: int) -> int:
    """Return the period of a view: the epoch in the upper bits, and the number of the view."""
    return epoch << NUMBER_BITS | number


def epoch_of(period: int) -> int:
    """Return the epoch of a period; without a quorum, a period is an epoch.

    Examples:
        >>> epoch_of(period_of(3, 17)), epoch_of(3)
        (3, 3)
    """
    return period >> NUMBER_BITS or period


def number_of(period: int) -> int:
    """Return the number of the view of a period; 0 without a quorum."""
    return period % (1 << NUMBER_BITS) if period >> NUMBER_BITS else 0


class AttendanceExchange:
    """The attendance as this member and its peers announce it.

    Args:
        me: the name of this member.
        federation_spec: the federation spec; it has a quorum.
        number: the number of the last view that this member was in.

    Attributes:
        absent: the members that we have not heard for too long.
        begun: whether we have finished a sum in this epoch.
        only: the members of a sum that only they can repeat, if they have to do so before the next one.
        received: the latest announcement of each peer.
        own: our latest announcement.
    """

    def __init__(self, me: PeerId, federation_spec: FederationSpec, number: int) -> None:
        self.absent: frozenset[PeerId] = frozenset()
        self.begun = False
        self.only: frozenset[PeerId] = frozenset()
        self.received: dict[PeerId, Attendance] = {}
        self.own = Attendance(number, (), bytes(32), (), begun=False)
        self._me, self._federation_spec, self._entered = me, federation_spec, number
        self._proposed: tuple[tuple[PeerId, ...], bytes] = (), b""
        self._renew, self._ticks = False, 0

    def receive(self, sender: PeerId, attendance: Attendance) -> None:
        """Record a peer's announcement.

        Raises:
            RemoteProtocolError: it names others than members.
        """
        if not {*attendance.members, *attendance.absent} <= set(self._federation_spec.members):
            raise RemoteProtocolError(sender, "announced an attendance with others than the members")
        self.received[sender] = attendance

    def forget(self, peer: PeerId) -> None:
        """Drop the announcement of a peer's earlier process."""
        self.received.pop(peer, None)

    def renew(self) -> None:
        """Propose a new view of the same members."""
        self._renew = True

    def restrict(self, only: frozenset[PeerId]) -> None:
        """Propose a view of these members only, if all of them are present, for some time."""
        self.only, self._ticks = only, 0

    def count_tick(self) -> None:
        """Give up a view of some members only, if the others do not propose it: they may not know the reason."""
        if self.only and (self.own.number > self._entered or self._me not in self.only):
            self._ticks += 1
            if self._ticks > MAX_TICKS:
                self.only = frozenset()

    def update(self, processes: Callable[[tuple[PeerId, ...]], bytes | None]) -> Attendance | None:
        """Return our new announcement if it has changed.

        Args:
            processes: returns the digest of the ephemeral keys of these members; None if one is not known.
        """
        members = self._target()
        digest = processes(members) if members else None
        number, proposed = self.own.number, self._proposed
        if digest is None:
            members, digest = (), bytes(32)
        else:
            highest = max(number, self._entered, *self._credible_numbers(members))
            changed = (members, digest) != proposed or self._renew
            number, proposed = (highest + 1 if changed else highest), (members, digest)
            self._renew = False
        self._proposed = proposed
        new = Attendance(number, members, digest, tuple(sorted(self.absent)), self.begun)
        if new == replace(self.own, begun=self.begun):
            return None
        self.own = new
        return new

    def agreed(self) -> Attendance | None:
        """Return the attendance that all its members propose, if it is that of a new view."""
        own = self.own
        if not own.members or own.number <= self._entered:
            return None
        for peer in own.members:
            if peer != self._me:
                theirs = self.received.get(peer)
                if theirs is None or (theirs.number, theirs.members, theirs.processes) != (
                    own.number,
                    own.members,
                    own.processes,
                ):
                    return None
        return own

    def enter(self) -> None:
        """Record that we enter the view that we propose."""
        self._entered = self.own.number

    @property
    def missing(self) -> frozenset[PeerId]:
        """The members of the view that we propose which do not propose it."""
        own = self.own
        return frozenset(
            peer
            for peer in own.members
            if peer != self._me and (peer not in self.received or self.received[peer].members != own.members)
        )

    def _target(self) -> tuple[PeerId, ...]:
        """Return the members of the view that we want; none if they are too few."""
        spec = self._federation_spec
        members = set(spec.members) - self.absent
        claims = {peer: set(each.absent) for peer, each in self.received.items() if peer in members}
        apart = {
            peer: {other for other in theirs & claims.keys() if peer in claims[other]}
            for peer, theirs in claims.items()
        }
        while any(theirs & members for peer, theirs in apart.items() if peer in members):
            members.remove(max(members, key=lambda peer: (len(apart.get(peer, set()) & members), peer)))
        if spec.quorum is None or len(members) < spec.quorum or self._me not in members:
            return ()
        if len(members) < len(spec.members) and not self._has_begun(members):
            return ()
        if self.only <= members and len(self.only) >= spec.quorum:
            return tuple(sorted(self.only)) if self._me in self.only else ()
        return tuple(sorted(members))

    def _credible_numbers(self, members: Collection[PeerId]) -> list[int]:
        """Return the numbers of these members without those that are far above what an honest one has announced."""
        own = max(self.own.number, self._entered)
        numbers = sorted((each.number for each in self.received.values()), reverse=True)
        tolerated = self._federation_spec.tolerated
        honest = max(own, numbers[tolerated] if len(numbers) > tolerated else 0)
        announced = [self.received[peer].number for peer in members if peer in self.received]
        return [each for each in announced if each <= honest + MAX_LEAP]

    def _has_begun(self, members: set[PeerId]) -> bool:
        """Return whether this epoch's first sum was made; a member that lost its state asks enough others."""
        claims = sum(each.begun for peer, each in self.received.items() if peer in members)
        return self.begun or claims > self._federation_spec.tolerated
