"""Departures: the goodbyes of programs that are done or were stopped, and the comparison of their final digests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.errors import PeerLeftError
from cgd.secagg.messages import Goodbye

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.group import Group
    from cgd.secagg.messages import PeerId


class Departures:
    """The goodbyes of this member and its peers.

    Args:
        groups: the groups that we are a member of.

    Attributes:
        own: our goodbye, once our program is done or was stopped.
        received: the goodbye of each peer that has not been restarted since.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.own: Goodbye | None = None
        self.received: dict[PeerId, Goodbye] = {}
        self._groups = groups

    def make_goodbye(self, done: bool) -> Goodbye:
        """Make our goodbye; if our program is done, it contains the final digests of our journals."""
        for group in self._groups.values():
            group.left = True
        self.own = Goodbye(done, self._ends() if done else ())
        return self.own

    def receive(self, sender: PeerId, goodbye: Goodbye) -> None:
        """Record a peer's goodbye, and fail the sums that wait for it."""
        self.received[sender] = goodbye
        self.fail_unreachable_sums()

    def is_done(self, peer: PeerId) -> bool | None:
        """Return True if a peer's program is done, False if it was stopped, and None if it is running."""
        return self.received[peer].done if peer in self.received else None

    def differences(self) -> dict[PeerId, str]:
        """Return the peers that are done and whose final digests differ from ours, and the differences."""
        ours = {name: (length, digest) for name, length, digest in self._ends()}
        found = {}
        for peer, goodbye in self.received.items():
            for name, length, digest in goodbye.ends if goodbye.done else ():
                if name in ours and ours[name] != (length, digest):
                    found[peer] = f"{length} sums of {name} with another history or state"
        return found

    def fail_unreachable_sums(self) -> None:
        """Fail the sums that wait for the `Ready` of a peer whose program is done: it will not send one."""
        for group in self._groups.values():
            if group.up_to_date and group.session is not None and group.pending is not None and not group.pending.done:
                what, missing = group.session.waiting_for
                for peer in sorted(missing):
                    if what == "Ready" and self.is_done(peer):
                        text = "is done, but our program requests another sum; all programs must make the same sums"
                        group.fail(PeerLeftError(peer, text))
                        break

    def _ends(self) -> tuple[tuple[str, int, bytes], ...]:
        journals = [(name, group.journal) for name, group in sorted(self._groups.items())]
        return tuple((name, len(journal), journal.final_digest()) for name, journal in journals)
