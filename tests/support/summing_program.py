"""A participant without I/O: its membership, and a program that requests sums as an optimiser does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import CGDError, DisagreementError, MembersChangedError, PeerAbortedError
from cgd.secagg.federation_spec import FederationSpec, Identity
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.membership import Membership
from support.wire import spec

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.secagg.group import PendingSum
    from cgd.secagg.messages import SumSpec

SIZE = 3


@cache
def _identity(name: str) -> Identity:
    return Identity(sha256(f"agreement {name}".encode()).digest(), sha256(f"signing {name}".encode()).digest())


def federation_spec(members: tuple[str, ...], epoch: int) -> FederationSpec:
    keys = {name: _identity(name).public for name in members}
    return FederationSpec("trial", epoch, members, {"everyone": members}, {"training": "x"}, "1.0", keys)


def gradient_spec() -> SumSpec:
    return replace(spec(SIZE - 1), weighted=True)


def addend(member: str, index: int) -> npt.NDArray[Any]:
    words = sha256(f"addend of {member} at {index}".encode()).digest()[: 4 * SIZE]
    return np.frombuffer(words, dtype="<u4").copy()


class Program:
    """A participant's process: a membership, and a program that requests sums as an optimiser does.

    It takes steps, each with a gradient sum; in every epoch but the first, it counts the samples before the next step.
    After a restart it continues from the state that the members have stored.
    """

    def __init__(self, me: str, held: FederationSpec, sums: int, journal: Journal | None = None) -> None:
        self.me, self.sums = me, sums
        self.membership = Membership(me, _identity(me), held, {} if journal is None else {"everyone": journal})
        self.saved = journal.to_bytes() if journal is not None else Journal().to_bytes()
        self.membership.on_pending_reveal = lambda _: self.save()
        self.totals: list[bytes] = []
        """The total of every step; empty bytes for those that only the restored state includes."""
        self.stopped: CGDError | None = None
        self._counted_epoch = 1
        self._restored = False

    @property
    def journal(self) -> Journal:
        return self.membership.group("everyone").journal

    def save(self) -> None:
        """Save the journal: before our key is sent, and before our program gets a total."""
        self.saved = self.journal.to_bytes()

    def advance(self) -> None:
        group = self.membership.group("everyone")
        if group.pending is not None and group.pending.fault is not None:
            if not isinstance(group.pending.fault, MembersChangedError | PeerAbortedError | DisagreementError):
                self.stopped = group.pending.fault
                return
            group.pending = None  # the program tries again
        if group.pending is not None and group.pending.total is not None:
            self._take(group.pending)
        if (group.pending is None or group.pending.done) and len(self.totals) < self.sums and group.next_sum_known:
            if not self._restored:
                if not group.up_to_date:
                    return
                self._restore()
            self._request()

    def _restore(self) -> None:
        """Continue from the stored state, as `ConfinedOptimizer` does."""
        self._restored, state = True, self.journal.states.get(0)
        if state is not None:
            self.totals = [b""] * (state.steps - 1) + [state.content[-4 * SIZE :]] * (state.steps > 0)
            self._counted_epoch = int.from_bytes(state.content[: -4 * SIZE], "little")
            self.membership.group("everyone").skip(0, state.steps)

    def _request(self) -> None:
        group, number = self.membership.group("everyone"), len(self.totals)
        if number >= self.sums:
            return
        settings, encode = gradient_spec(), partial(addend, self.me, number)
        if group.next_epoch != self._counted_epoch:
            settings = spec(1 + group.next_addends)
            encode = partial(np.ones, settings.size, dtype="<u4")
        self.membership.start("everyone", settings, encode, group.next_epoch, Step(0, number))

    def _take(self, pending: PendingSum) -> None:
        """Take a total: that of a count, or of a step, after which the state is stored."""
        assert pending.total is not None
        assert pending.step is not None
        if not pending.spec.weighted:
            self._counted_epoch = pending.epoch
        elif pending.step.number == len(self.totals):
            self.save()
            self.totals.append(pending.total.tobytes())
            content = self._counted_epoch.to_bytes(4, "little") + self.totals[-1]
            self.journal.save_state(0, len(self.totals), content)
            self.membership.state_saved()
