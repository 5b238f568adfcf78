"""One group of members that sum together, over the whole life of a federation: a ledger, and a session at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cgd.errors import CGDError, EquivocationError, LocalProtocolError, MembersChangedError, ProtocolError
from cgd.secagg.certificates import PendingReveal, Terms
from cgd.secagg.key_agreement import common_key
from cgd.secagg.messages import SESSION_BYTES
from cgd.secagg.positions import GroupRow
from cgd.secagg.reduction import HubKeys
from cgd.secagg.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from cgd.secagg.journal import Journal, Step
    from cgd.secagg.journal_transfer import JournalTransfer
    from cgd.secagg.messages import Buffer, PeerId, Reason, SumSpec
    from cgd.secagg.position_reports import PositionReports
    from cgd.secagg.statements import StatementSigner


@dataclass
class PendingSum:
    """A sum that our program waits for.

    Attributes:
        spec: what is summed, and how.
        encode: makes our addend, anew each time it is called.
        epoch: for whose members the addend is made.
        step: the step of an optimiser that it belongs to, if any.
        total: when it is finished.
        fault: when it has failed.
    """

    spec: SumSpec
    encode: Callable[[], npt.NDArray[Any]]
    epoch: int
    step: Step | None
    total: npt.NDArray[Any] | None = None
    abandoned: bool = False
    fault: CGDError | None = None

    @property
    def over(self) -> bool:
        """Whether it is finished or has failed."""
        return self.total is not None or self.fault is not None


@dataclass
class Group:
    """Where we stand with one group.

    Attributes:
        name: of the group.
        members: their names.
        ledger: what was summed so far.
        on_mark: called when the mark of the ledger has changed, to keep it before anything else happens.
        epoch: the present one.
        place: how many of its sums our program has made in this run.
        current: whether our ledger is known to be as long as anybody's.
        session: of the present view, if there is one.
        reports: of the present view, if there is one.
        pending: the sum that our program waits for, or the last one.
        takeover: what a peer that is ahead gives us of its ledger, if we have asked one.
        doubted: peers whose ledger was none.
        refusal: why our program cannot take part in its next sum, until the others can be told.
    """

    name: str
    members: tuple[PeerId, ...]
    journal: Journal
    on_mark: Callable[[Group], None] = lambda _: None
    epoch: int = 0
    place: int = 0
    current: bool = False
    session: Session | None = None
    reports: PositionReports | None = None
    pending: PendingSum | None = None
    journal_transfer: JournalTransfer | None = None
    doubted: set[PeerId] = field(default_factory=set)
    refusal: Reason | None = None

    @property
    def ready(self) -> bool:
        """Whether it is known what our program's next sum is."""
        return self.current or self.place < len(self.journal)

    @property
    def next_epoch(self) -> int:
        """The epoch of our program's next sum: of the past if it is made again, else the present one."""
        return self.journal.entries[self.place].epoch if self.place < len(self.journal) else self.epoch

    @property
    def next_addends(self) -> int:
        """How many members our program's next sum has, or had when it was made."""
        return self.journal.entries[self.place].addends if self.place < len(self.journal) else len(self.members)

    def row(self, commitment: bytes, *, states: bool) -> GroupRow:
        """Report where we stand."""
        mark = self.journal.mark
        return GroupRow(
            len(self.journal),
            self.journal.head,
            None if mark is None else mark.opening,
            commitment,
            self.journal.state_rows() if states else None,
        )

    def start(self, pending: PendingSum, clock: int) -> PendingSum:
        """Our program wants its next sum; one that it gave up waiting for is that sum."""
        before = self.pending
        if before is not None and not before.over:
            if not before.abandoned or before.spec != pending.spec:
                raise LocalProtocolError("a sum is still running; a member's sums run one after the other")
            before.abandoned = False
            return before
        self.pending, self.refusal = pending, None
        self.run(clock)
        return pending

    def abandon(self) -> None:
        """Our program waits no longer, but may have shared its addend: it stays what it is, whatever becomes of it."""
        pending = self.pending
        if pending is None or pending.fault is not None:
            return
        if pending.total is not None:
            self.place -= 1
            return
        words = pending.encode()
        pending.encode, pending.abandoned = words.copy, True

    def run(self, clock: int) -> None:
        """Begin the sum that our program waits for, or take it from the past."""
        if self.refusal is not None:
            self.refuse(self.refusal)
        pending = self.pending
        if pending is None or pending.over:
            return
        try:
            if self.place < len(self.journal):
                pending.total = self.journal.total(self.place, pending.spec)
                self.place += not pending.abandoned
            elif self.current and self.session is not None and self.reports is not None:
                if pending.epoch != self.epoch:
                    raise MembersChangedError(pending.epoch, self.epoch, self.members)
                self._check_mark()
                self.session.start(pending.spec, pending.encode(), self._terms(pending, clock))
                self.settle(clock)
        except EquivocationError:
            raise
        except CGDError as error:
            pending.fault = error

    def receive(self, sender: PeerId, data: Buffer, clock: int) -> None:
        """Take in a frame of the session."""
        assert self.session is not None  # noqa: S101 - for the type checker
        try:
            self.session.receive(sender, data)
        except EquivocationError:
            raise
        except CGDError as error:
            if self.pending is None or self.pending.over:
                raise
            self.pending.fault = error
        self.settle(clock)

    def settle(self, clock: int) -> None:
        """Enter the running sum into the ledger if it is finished."""
        pending, session = self.pending, self.session
        if pending is None or pending.over or session is None or self.reports is None or not self.current:
            return
        if session.fault is not None:
            pending.fault = session.fault
        if not session.finished:
            return
        if self.place != len(self.journal):
            return
        certificate = session.certificate(self.reports.view)
        self.journal.append(
            pending.spec, session.total, self.epoch, clock, pending.step, len(self.members), certificate
        )
        pending.total = session.total
        self.place += not pending.abandoned

    def fail(self, error: ProtocolError) -> None:
        """Give up the sum that our program waits for; the others are told."""
        if self.session is not None:
            self.session.give_up(error)
        if self.pending is not None and not self.pending.over:
            self.pending.fault = error

    def refuse(self, reason: Reason) -> None:
        """Tell the others that we cannot take part in the next sum, if that is one of the present."""
        self.refusal = reason
        if self.session is not None and self.current:
            self.refusal = None
            if self.place == len(self.journal):
                self.session.refuse(reason)

    def skip(self, slot: int, steps: int) -> None:
        """Our program does without the sums up to the end of this many steps of an optimiser: it has their outcome."""
        for place in range(len(self.journal) - 1, self.place - 1, -1):
            step = self.journal.entries[place].step
            if step is not None and step.slot == slot and step.number < steps:
                self.place = place + 1
                return

    def jump(self, clock: int) -> None:
        """Our program begins with this step of its loop: what it summed in earlier ones is not asked for again."""
        while self.place < len(self.journal) and self.journal.entries[self.place].clock < clock:
            self.place += 1

    def take_over(self, journal_transfer: JournalTransfer, clock: int) -> None:
        """Take over what a peer has given us and go on with it."""
        assert journal_transfer.given is not None  # noqa: S101 - for the type checker
        self.journal.catch_up(journal_transfer.given, states=journal_transfer.states)
        self.journal_transfer = None
        self.run(clock)

    def enter_view(
        self,
        me: PeerId,
        view: bytes,
        pair_keys: Mapping[PeerId, bytes],
        statement_signer: StatementSigner,
        reports: PositionReports,
    ) -> None:
        """Have a session of its own in this view."""
        session = hashlib.sha256(view + self.name.encode()).digest()[:SESSION_BYTES]
        own = {peer: pair_keys[peer] for peer in self.members if peer != me}
        self.reports = reports
        self.session = Session(me, self.members, session, own, statement_signer, self._opening)

    def share_key(self, contributions: Mapping[PeerId, bytes]) -> None:
        """Everybody has contributed to the key that the members have in common."""
        if self.session is not None:
            own = {member: contributions[member] for member in self.members}
            self.session.hub = HubKeys(self.name, common_key(own, self.session.session))

    def leave_view(self) -> None:
        """The present session is over, and where the others stand is not known."""
        self.session, self.reports, self.current, self.journal_transfer = None, None, False, None
        self.doubted.clear()

    # What is written down of sums that may have been opened; see `history.py`.

    def _check_mark(self) -> None:
        mark = self.journal.mark
        if mark is not None and set(mark.members) != set(self.members):
            raise LocalProtocolError(
                f"sum {mark.place + 1} may have been opened with {', '.join(sorted(mark.members))}, and the members "
                f"are {', '.join(sorted(self.members))} now: to open it again would show somebody's addend. Have the "
                "members of before come back for this sum, or train anew under another name of the federation"
            )

    def _opening(self, opening: bytes) -> None:
        self.journal.mark = PendingReveal(len(self.journal), self.members, opening)
        self.on_mark(self)

    def _terms(self, pending: PendingSum, clock: int) -> bytes:
        step = None if pending.step is None else (pending.step.slot, pending.step.number)
        place, head, kept = len(self.journal), self.journal.head, self.journal.kept_digest()
        return Terms(self.epoch, place, head, clock, step, kept).to_bytes()
