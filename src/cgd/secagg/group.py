"""A group of members that sum together in a federation: its journal, and its session in the present view."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cgd.errors import (
    CGDError,
    EquivocationError,
    LocalProtocolError,
    MembersChangedError,
    MembershipError,
    ProtocolError,
)
from cgd.secagg.certificates import PendingReveal, RevealedStep, Terms, spec_digest
from cgd.secagg.completion import InterruptedSum
from cgd.secagg.journal_entry import Step
from cgd.secagg.key_agreement import derive_group_key
from cgd.secagg.messages import SESSION_BYTES
from cgd.secagg.positions import MAX_STATES, GroupPosition, OpenStep, Participation
from cgd.secagg.reduction import HubKeys
from cgd.secagg.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from cgd.secagg.journal import Journal
    from cgd.secagg.journal_transfer import JournalTransfer
    from cgd.secagg.messages import Buffer, PeerId, Reason, SumSpec
    from cgd.secagg.positions import PositionReports
    from cgd.secagg.statements import StatementSigner


@dataclass
class PendingSum:
    """A sum that our program requested.

    Attributes:
        spec: the settings of the sum.
        encode: returns our addend, of the same values and with other noise at each call.
        epoch: the epoch for whose members the addend is weighted.
        step: the optimiser step that it belongs to, if any.
        loop_step: the step of our program's loop at which it was requested.
        total: the total, once the sum is finished.
        abandoned: whether our program stopped waiting for it.
        fault: the error, if the sum failed.
        before_reveal: called in every attempt before our self-mask key leaves.
    """

    spec: SumSpec
    encode: Callable[[], npt.NDArray[Any]]
    epoch: int
    step: Step | None
    loop_step: int = 0
    total: npt.NDArray[Any] | None = None
    abandoned: bool = False
    fault: CGDError | None = None
    before_reveal: Callable[[], None] = lambda: None

    @property
    def gradient_step(self) -> Step | None:
        """The step whose gradients it sums, if any."""
        return self.step if self.spec.weighted else None

    @property
    def done(self) -> bool:
        """True if the sum is finished or has failed."""
        return self.total is not None or self.fault is not None


@dataclass
class Group:
    """One member's state in one group.

    Attributes:
        name: the name of the group.
        members: the names of its members.
        journal: the finished sums.
        key_digests: a digest of each member's public keys.
        on_pending_reveal: called when the journal's pending reveal has changed, to save it before anything is sent.
        epoch: the present epoch; with a quorum, the present period (`attendance.py`).
        next_index: the journal index of our program's next sum.
        up_to_date: whether our journal is known to be as long as any member's.
        session: the session of the present view, if there is one.
        reports: the position reports of the present view, if there is one.
        pending: the sum that our program waits for, or the last one.
        journal_transfer: the transfer of missing entries from a peer, if we requested one.
        invalid_sources: the peers whose journal transfer was invalid.
        refusal: the reason why our program cannot take part in its next sum, until it can be sent.
        left: whether we have sent our goodbye: no sum is started any more, not even an abandoned one.
        quorum: the number of members that can go on without the others; None if all are needed.
        interrupted: with a quorum, what we have of a sum that was interrupted in an earlier view; see `completion.py`.
        size: with a quorum, the number of all members, with those that are absent.
        all_required: whether our program's next sum waits for all members, although there is a quorum.
        ignored: the members whose reports of revealed steps are void.
    """

    name: str
    members: tuple[PeerId, ...]
    journal: Journal
    on_pending_reveal: Callable[[Group], None] = lambda _: None
    key_digests: dict[PeerId, str] = field(default_factory=dict)
    epoch: int = 0
    next_index: int = 0
    up_to_date: bool = False
    session: Session | None = None
    reports: PositionReports | None = None
    pending: PendingSum | None = None
    journal_transfer: JournalTransfer | None = None
    invalid_sources: set[PeerId] = field(default_factory=set)
    refusal: Reason | None = None
    left: bool = False
    quorum: int | None = None
    interrupted: InterruptedSum | None = None
    ignored: frozenset[PeerId] = frozenset()
    size: int = 0
    all_required: bool = False

    @property
    def waits_for_all(self) -> bool:
        """Whether our program's next sum has to wait for absent members."""
        return self.all_required and len(self.members) < self.size

    @property
    def next_in_journal(self) -> bool:
        """True if our program's next sum is in the journal."""
        return self.next_index < len(self.journal)

    @property
    def next_sum_known(self) -> bool:
        """True if it is known whether our program's next sum is in the journal or has to run."""
        return self.up_to_date or self.next_in_journal

    @property
    def next_epoch(self) -> int:
        """The epoch of our program's next sum: the recorded one if the sum is in the journal, else the present one."""
        return self.journal.entries[self.next_index].epoch if self.next_in_journal else self.epoch

    @property
    def next_addends(self) -> int:
        """The number of members of our program's next sum, as recorded if the sum is in the journal."""
        return self.journal.entries[self.next_index].addends if self.next_in_journal else len(self.members)

    def position(self, commitment: bytes, *, states: bool) -> GroupPosition:
        """Return our position in the journal, for a report."""
        pending_reveal = self.journal.pending_reveal
        revealed = self.journal.revealed_steps.items()
        return GroupPosition(
            len(self.journal),
            self.journal.head,
            None if pending_reveal is None else pending_reveal.attempt,
            commitment,
            self.journal.state_summaries() if states else None,
            tuple((slot, step.number) for slot, step in sorted(revealed) if not step.finished)[-MAX_STATES:],
            self._participation() if self.quorum is not None else None,
        )

    def start(self, pending: PendingSum) -> PendingSum:
        """Start our program's next sum; if it abandoned a sum, continue that one."""
        before = self.pending
        if before is not None and not before.done:
            if not before.abandoned or before.spec != pending.spec:
                raise LocalProtocolError("a sum is still running; sums run one after the other")
            before.abandoned = False
            return before
        self.pending, self.refusal = pending, None
        self.run()
        return pending

    def abandon(self) -> None:
        """Stop waiting for the pending sum. It goes on, with the same values: `encode` keeps them.

        The addend itself is not kept: its noise, if it has any, is drawn anew in the next attempt, as always.
        """
        pending = self.pending
        if pending is None or pending.fault is not None:
            return
        if pending.total is not None:
            self.next_index -= 1
            return
        pending.abandoned = True

    def run(self) -> None:
        """Run the sum that our program waits for, or take its total from the journal."""
        if self.refusal is not None:
            self.refuse(self.refusal)
        pending = self.pending
        if pending is None or pending.done:
            return
        try:
            if self.next_in_journal:
                pending.total = self._recorded_total(pending)
                self.next_index += not pending.abandoned
            elif self.waits_for_all:
                pass
            elif self.up_to_date and self.session is not None and self.reports is not None and not self.left:
                if pending.epoch != self.epoch:
                    raise MembersChangedError(pending.epoch, self.epoch, self.members)
                self._check_revealed(pending)
                terms = self._make_terms(pending)
                self._begin_period()
                self.session.start(pending.spec, pending.encode(), terms, pending.before_reveal)
                self.record_if_finished()
        except EquivocationError:
            raise
        except CGDError as error:
            pending.fault = error

    def receive(self, sender: PeerId, data: Buffer) -> None:
        """Process a frame of the session."""
        assert self.session is not None  # noqa: S101 - for the type checker
        try:
            self.session.receive(sender, data)
        except EquivocationError:
            raise
        except CGDError as error:
            if self.pending is None or self.pending.done:
                raise
            self.pending.fault = error
        self.record_if_finished()

    def record_if_finished(self) -> None:
        """Append the running sum to the journal if it is finished."""
        pending, session = self.pending, self.session
        if pending is None or pending.done or session is None or self.reports is None or not self.up_to_date:
            return
        if session.fault is not None:
            pending.fault = session.fault
        if not session.finished:
            return
        if self.next_index != len(self.journal):
            return
        certificate = session.certificate(self.reports.view)
        self.journal.append(
            pending.spec, session.total, self.epoch, pending.loop_step, pending.step, len(self.members), certificate
        )
        if (step := pending.gradient_step) is not None:
            finished = RevealedStep(step.number, self.members, self._sorted_keys, finished=True)
            self.journal.add_revealed_step(step.slot, finished)
        pending.total = session.total
        self.next_index += not pending.abandoned

    def fail(self, error: ProtocolError) -> None:
        """Abort the sum that our program waits for, and announce it to the other members."""
        if self.session is not None:
            self.session.abort(error)
        if self.pending is not None and not self.pending.done:
            self.pending.fault = error

    def end_pending(self, epoch: int) -> None:
        """End the sum that our program waits for: the group is not part of this epoch."""
        if self.pending is not None and not self.pending.done:
            self.pending.fault = absent_group(self.name, epoch)

    def refuse(self, reason: Reason) -> None:
        """Abort our program's next sum, and announce it to the other members unless the sum is in the journal."""
        self.refusal = reason
        if self.session is not None and self.up_to_date:
            self.refusal = None
            if self.next_index == len(self.journal):
                self.session.refuse(reason)

    def skip(self, slot: int, steps: int) -> None:
        """Skip the sums of an optimiser's first `steps` steps: our program has their result."""
        for index in range(len(self.journal) - 1, self.next_index - 1, -1):
            step = self.journal.entries[index].step
            if step is not None and step.slot == slot and step.number < steps:
                self.next_index = index + 1
                return

    def jump(self, loop_step: int) -> None:
        """Start at this step of our program's loop: skip the sums of earlier steps."""
        while self.next_in_journal and self.journal.entries[self.next_index].loop_step < loop_step:
            self.next_index += 1

    def apply_transfer(self, journal_transfer: JournalTransfer) -> None:
        """Extend the journal by a complete transfer, and continue."""
        assert journal_transfer.journal is not None  # noqa: S101 - for the type checker
        reveal, first = self.journal.pending_reveal, journal_transfer.journal.entries[0]
        changed = self.quorum is not None and reveal is not None and first.attempt != reveal.attempt
        if changed and first.epoch > self.journal.started:  # a quorum without us has gone on
            self.journal.void_pending_reveal()
        self.journal.extend(journal_transfer.journal, states=journal_transfer.states)
        self.journal_transfer = None
        self.run()

    def enter_view(
        self,
        me: PeerId,
        view: bytes,
        pair_keys: Mapping[PeerId, bytes],
        statement_signer: StatementSigner,
        reports: PositionReports,
    ) -> None:
        """Create the session of this view."""
        session = hashlib.sha256(view + self.name.encode()).digest()[:SESSION_BYTES]
        own = {peer: pair_keys[peer] for peer in self.members if peer != me}
        self.reports = reports
        record = self._record_pending_reveal
        self.session = Session(me, self.members, session, own, statement_signer, record, self.quorum)

    def set_hub_key(self, contributions: Mapping[PeerId, bytes]) -> None:
        """Derive the key of the group, which is hidden from the hub, from the contributions of all members."""
        if self.session is not None:
            own = {member: contributions[member] for member in self.members}
            self.session.hub = HubKeys(self.name, derive_group_key(own, self.session.session))

    def leave_view(self) -> None:
        """End the present session; the positions of the other members are unknown from now on."""
        if self.session is not None and self.reports is not None:
            self.interrupted = self.session.interrupted(self.reports.view) or self.interrupted
        self.session, self.reports, self.up_to_date, self.journal_transfer = None, None, False, None
        self.invalid_sources.clear()

    # With a quorum; see `completion.py`.

    def material(self) -> InterruptedSum | None:
        """Return what we have of an interrupted sum, if it is the next one and we have not gone on without it."""
        reveal, own = self.journal.pending_reveal, self.interrupted
        if own is None and reveal is not None and reveal.interrupted is not None:
            own = self.interrupted = InterruptedSum.from_json(reveal.interrupted)
        if own is None or own.epoch < self.journal.started or own.index != len(self.journal):
            return None
        return own

    def proof(self, attempt: bytes | None) -> InterruptedSum | None:
        """Return what proves an attempt that we may have revealed, also if we have begun to repeat it."""
        for reveal in (self.journal.pending_reveal, self.journal.step_reveal):
            if reveal is not None and reveal.attempt == attempt and reveal.interrupted is not None:
                return InterruptedSum.from_json(reveal.interrupted).proof
        return None

    def may_be_repeated(self, own: InterruptedSum) -> bool:
        """Return whether an attempt is one at the next sum, or at a gradient sum that is not finished."""
        step = own.decoded_terms.step if own.sum_spec.weighted else None
        if step is not None:
            return own.index <= len(self.journal) and not self.journal.is_finished(*step)
        return own.index == len(self.journal)

    def record_completion(self, own: InterruptedSum) -> None:
        """Record that we help to open an interrupted sum, before our keys and shares are sent."""
        terms, step = own.decoded_terms, None
        if own.sum_spec.weighted:
            step = terms.step
        spec = spec_digest(own.sum_spec) if step is not None else ""
        keys = tuple(sorted(self.key_digests[name] for name in own.members))
        content = own.to_json(only=None)
        self.journal.set_pending_reveal(
            PendingReveal(len(self.journal), own.members, own.attempt, step, keys, spec, content)
        )
        self.on_pending_reveal(self)

    def complete(self, own: InterruptedSum) -> None:
        """Append an interrupted sum whose keys are all known to the journal, and continue."""
        total, certificate = own.open()
        terms, spec, reveal = own.decoded_terms, own.sum_spec, self.journal.pending_reveal
        step = None if terms.step is None else Step(*terms.step)
        self.journal.append(spec, total, terms.epoch, terms.loop_step, step, len(own.members), certificate)
        if step is not None and spec.weighted and reveal is not None:
            finished = RevealedStep(step.number, own.members, reveal.keys, finished=True)
            self.journal.add_revealed_step(step.slot, finished)
        self.interrupted = None
        self.run()

    def void_reveals(self, *, pending: bool, step: bool) -> None:
        """Drop our pending reveals, because a quorum has gone on without them."""
        reveal, own = self.journal.pending_reveal, self.interrupted
        if pending:
            self.journal.void_pending_reveal()
            if reveal is not None and own is not None and own.attempt == reveal.attempt:
                self.interrupted = None  # else it is of a later attempt, which may still be completed
        if step:
            self.journal.void_step_reveal()
        if pending or step:
            self.on_pending_reveal(self)

    def _participation(self) -> Participation:
        reveal, own = self.journal.pending_reveal, self.material()
        revealed_in = 0
        if reveal is not None and reveal.interrupted is not None:
            revealed_in = InterruptedSum.from_json(reveal.interrupted).epoch
        return Participation(
            self.journal.started,
            revealed_in,
            () if reveal is None else tuple(sorted(reveal.members)),
            None if own is None else own.attempt,
            own is not None and own.masked is not None,
            self._open_step(),
        )

    def _open_step(self) -> OpenStep | None:
        for reveal in (self.journal.pending_reveal, self.journal.step_reveal):
            if reveal is not None and reveal.step is not None and reveal.interrupted is not None:
                period = InterruptedSum.from_json(reveal.interrupted).epoch
                return OpenStep(*reveal.step, reveal.attempt, period, tuple(sorted(reveal.members)))
        return None

    def _begin_period(self) -> None:
        """Record, before our `Ready` is sent, that we go on in this period, and delete what we have of earlier sums."""
        if self.quorum is None:
            return
        self.interrupted = None
        if self.journal.started != self.epoch:
            self.journal.started = self.epoch
            self.on_pending_reveal(self)

    def _recorded_total(self, pending: PendingSum) -> npt.NDArray[Any]:
        """Return the total of our program's sum from the journal.

        Raises:
            MembersChangedError: it was made in another period, or others have gone on, and a stored state includes it.
        """
        if self.quorum is not None:
            entry = self.journal.entries[self.next_index]
            if pending.epoch != entry.epoch or entry.words is None:
                raise MembersChangedError(pending.epoch, entry.epoch, self.members)
        return self.journal.total(self.next_index, pending.spec)

    # Sums whose key may have been revealed; see `certificates.py`.

    def _check_revealed(self, pending: PendingSum) -> None:
        """Check that no other total of this sum may have been revealed or can be computed."""
        revealed = self.journal.pending_reveal
        if revealed is not None:
            self._check_members(f"sum {revealed.index + 1}", revealed)
        step = pending.gradient_step
        if step is None:
            return
        latest = self.journal.revealed_steps.get(step.slot)
        if latest is None or step.number > latest.number:
            self._check_second_training(step, first=latest is None)
        elif step.number < latest.number or (step.number == latest.number and latest.finished):
            raise LocalProtocolError(
                f"the gradients of step {step.number} were summed before, and the latest step is {latest.number}: "
                "another sum of the same step would disclose differences of gradients. Continue after the latest step "
                "(`for step in optimizer.steps(count)`), or train anew under another federation name"
            )
        elif step.number == latest.number:
            self._check_members(f"the gradient sum of step {step.number}", latest)
            if latest.spec and latest.spec != spec_digest(pending.spec):
                raise LocalProtocolError(
                    f"the gradient sum of step {step.number} may have been revealed, with another number of samples or "
                    "other settings of the training: another sum would disclose differences of gradients. Restart with "
                    "the former data and settings, or train anew under another federation name"
                )

    def _check_second_training(self, step: Step, *, first: bool) -> None:
        """Check that this sum cannot repeat one of another optimiser with other members.

        The first sum of an optimiser is compared with all of the others, a later one with those of the same number.
        """
        now = tuple(sorted(self.members)), self._sorted_keys
        for slot, latest in self.journal.revealed_steps.items():
            if slot == step.slot:
                continue
            numbers = [last for last, _, _ in latest.former] + [latest.number] if first else [step.number]
            for members, keys in map(latest.members_of, numbers):
                # They are not known of sums that other members have sent us.
                if members and (tuple(sorted(members)), keys or now[1]) != now:
                    raise LocalProtocolError(
                        f"the members have changed since optimiser {slot} took its steps. If another optimiser trains "
                        "from the same origin, the difference of their sums discloses a member's gradient. Use one "
                        "optimiser in the whole training, or train anew under another federation name"
                    )

    def _check_members(self, what: str, revealed: PendingReveal | RevealedStep) -> None:
        before, now = ", ".join(sorted(revealed.members)), ", ".join(sorted(self.members))
        if before != now:
            raise LocalProtocolError(
                f"{what} may have been revealed with the members {before}, and the members are {now} "
                "now: revealing it again would disclose a member's addend. Let the earlier members finish it, or "
                "train anew under another federation name"
            )
        if revealed.keys and set(revealed.keys) != set(self._sorted_keys):
            raise LocalProtocolError(
                f"{what} may have been revealed with the members {before}, and one of them has another key now: "
                "revealing it again would disclose a member's addend. Let the earlier members finish it with their "
                "former keys, or train anew under another federation name"
            )

    def may_be_revealed(self, step: Step) -> bool:
        """Return whether we, or as reported another member, may have revealed the gradient sum of a step.

        Call it when our journal is up to date: before that, not all members have reported.

        Raises:
            LocalProtocolError: the sum was revealed with other members. So nothing is counted for them, and the earlier
                members can still finish the step.
        """
        latest = self.journal.revealed_steps.get(step.slot)
        if latest is not None and latest.number >= step.number:
            if latest.number == step.number and not latest.finished and not self.next_in_journal:
                self._check_members(f"the gradient sum of step {step.number}", latest)
            return True
        if not self.up_to_date or self.reports is None:  # the reports of some members are missing
            return False
        positions = self.reports.positions(self.name).items()
        return any((step.slot, step.number) in each.revealed for name, each in positions if name not in self.ignored)

    def _record_pending_reveal(self, attempt: bytes) -> None:
        pending = self.pending
        step, spec = None, ""
        if pending is not None and pending.gradient_step is not None:
            step, spec = (pending.gradient_step.slot, pending.gradient_step.number), spec_digest(pending.spec)
        own = None
        if self.session is not None and self.reports is not None:
            own = self.session.interrupted(self.reports.view)
        content = None if own is None else own.to_json()
        reveal = PendingReveal(len(self.journal), self.members, attempt, step, self._sorted_keys, spec, content)
        self.journal.set_pending_reveal(reveal)
        self.on_pending_reveal(self)

    @property
    def _sorted_keys(self) -> tuple[str, ...]:
        return tuple(sorted(self.key_digests[member] for member in self.members))

    def _make_terms(self, pending: PendingSum) -> bytes:
        step = None if pending.step is None else (pending.step.slot, pending.step.number)
        index, head, fixed_states = len(self.journal), self.journal.head, self.journal.fixed_states_digest()
        return Terms(self.epoch, index, head, pending.loop_step, step, fixed_states).to_bytes()


def absent_group(name: str, epoch: int) -> MembershipError:
    """Return the error of a program that sums with a group that is not part of the present epoch."""
    return MembershipError(
        f"there is no group {name} in epoch {epoch}: members were removed; start a program without its sums"
    )
