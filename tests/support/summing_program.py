"""A participant without I/O: its membership, and a program that requests one sum after the other."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import CGDError, DisagreementError, MembersChangedError, PeerAbortedError
from cgd.secagg.federation_spec import FederationSpec, Identity
from cgd.secagg.journal import Journal, Step
from cgd.secagg.membership import Membership
from support.wire import spec

if TYPE_CHECKING:
    import numpy.typing as npt

SIZE = 3


@cache
def _identity(name: str) -> Identity:
    return Identity(sha256(f"agreement {name}".encode()).digest(), sha256(f"signing {name}".encode()).digest())


def federation_spec(members: tuple[str, ...], epoch: int) -> FederationSpec:
    keys = {name: _identity(name).public for name in members}
    return FederationSpec("trial", epoch, members, {"everyone": members}, {"training": "x"}, "1.0", keys)


def addend(member: str, index: int) -> npt.NDArray[Any]:
    words = sha256(f"addend of {member} at {index}".encode()).digest()[: 4 * SIZE]
    return np.frombuffer(words, dtype="<u4").copy()


class Program:
    """A participant's process: a membership, and a program that requests one sum after the other."""

    def __init__(self, me: str, held: FederationSpec, sums: int, journal: Journal | None = None) -> None:
        self.me, self.sums = me, sums
        self.membership = Membership(me, _identity(me), held, {} if journal is None else {"everyone": journal})
        self.saved = journal.to_bytes() if journal is not None else Journal().to_bytes()
        self.membership.on_pending_reveal = lambda _: self.save()
        self.totals: list[bytes] = []
        self.stopped: CGDError | None = None

    @property
    def journal(self) -> Journal:
        return self.membership.group("everyone").journal

    def save(self) -> None:
        """Save the journal: before our key is sent, and before our program gets a total."""
        self.saved = self.journal.to_bytes()

    def advance(self) -> None:
        group = self.membership.group("everyone")
        pending = group.pending
        if pending is not None and pending.fault is not None:
            if isinstance(pending.fault, MembersChangedError | PeerAbortedError | DisagreementError):
                group.pending = None  # the program tries again
            else:
                self.stopped = pending.fault
                return
        if pending is not None and pending.total is not None and len(self.totals) <= pending.step.number:  # type: ignore[union-attr]
            self.save()
            self.totals.append(pending.total.tobytes())
            self.journal.save_state(0, len(self.totals), self.totals[-1])
            self.membership.state_saved()
        pending = group.pending
        if len(self.totals) < self.sums and (pending is None or pending.done) and group.next_sum_known:
            number = len(self.totals)
            self.membership.start(
                "everyone", spec(SIZE), lambda: addend(self.me, number), group.next_epoch, Step(0, number)
            )
