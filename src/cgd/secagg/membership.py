"""Membership: the members of a federation, their views and epochs, and how a restarted member catches up.

No I/O here: frames in by `receive`, frames out by `next_outgoing`. The rules:

1. Every process sends a new ephemeral key and its federation spec to all members (`hello.py`). When all hellos have
   arrived and the specs agree, the members form a *view*. A restart of any member starts a new view.
2. A view has one session for each group that sums, with new pair keys, so no mask is used twice. A sum that was running
   in an older view is repeated, unless a member has finished it.
3. First the members compare their journals, and those that are behind catch up (`view_change.py`).
4. A new epoch starts when all members of the new file have adopted it; epochs only increase. A sum that has to be
   repeated with other members is weighted again, or rejected if it may have been revealed with the earlier ones.
5. A member that signed different statements (`statements.py`) is dishonest: nothing is summed with it any more.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from cgd.errors import EquivocationError, LocalProtocolError, RemoteProtocolError
from cgd.secagg.attendance import AttendanceExchange, epoch_of, number_of, period_of
from cgd.secagg.codec import Frame, from_bytes, kind_of_frame, session_of, to_bytes
from cgd.secagg.departures import Departures
from cgd.secagg.group import Group, PendingSum, absent_group
from cgd.secagg.hello import HelloExchange
from cgd.secagg.journal import Journal
from cgd.secagg.key_agreement import MembershipView
from cgd.secagg.messages import (
    HUB,
    SESSION_BYTES,
    Attendance,
    CompleteSum,
    Goodbye,
    Hello,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    Outbox,
    PositionsGathered,
    Ready,
    ResendRequest,
    SignedEvidence,
    Total,
)
from cgd.secagg.reduction import check_members
from cgd.secagg.statements import StatementLog
from cgd.secagg.view_change import ViewChange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from cgd.secagg.federation_spec import FederationSpec, Identity
    from cgd.secagg.journal_entry import Step
    from cgd.secagg.messages import Buffer, Message, PeerId, SumSpec
    from cgd.secagg.view_change import EarlyReport

MAX_EARLY_REPORTS = 4
NO_VIEW = bytes(SESSION_BYTES)


class Membership:
    """One member's side of a federation.

    Args:
        me: the name of this member.
        identity: its keys.
        federation_spec: the present federation spec.
        journals: the saved journals, by group; none in the first run, or if they were lost.

    Attributes:
        others: the names of all other members.
        present: the members of the latest view; all members if none was formed.
        on_pending_reveal: called when the pending reveal of a group has changed, to save it before anything is sent.
        on_present: called when other members than before are present, with those of before.
        loop_step: the step of our program's loop.
    """

    federation_spec: FederationSpec

    def __init__(
        self,
        me: PeerId,
        identity: Identity,
        federation_spec: FederationSpec,
        journals: Mapping[str, Journal] | None = None,
    ) -> None:
        self.me = me
        self.on_pending_reveal: Callable[[Group], None] = lambda _: None
        self.on_present: Callable[[frozenset[PeerId]], None] = lambda _: None
        self._renewing, self._length_before = False, 0
        self.loop_step = 0
        self._identity = identity
        self._hellos = HelloExchange(me, identity)
        self._journals = dict(journals or {})
        self._groups: dict[str, Group] = {}
        self._absent_groups: dict[str, Group] = {}  # of earlier epochs: a group that returns continues its journal
        self._departures = Departures(self._groups)
        self._attendance: AttendanceExchange | None = None
        self._view: MembershipView | None = None
        self._views: set[bytes] = set()
        self._view_change: ViewChange | None = None
        self._equivocations: dict[PeerId, EquivocationError] = {}
        self._early: dict[PeerId, deque[EarlyReport]] = {}
        self._outbox: Outbox[Frame] = Outbox()
        self._goodbyes: Outbox[Frame] = Outbox()  # sent last: no Ready of ours may follow our Goodbye
        self.adopt(federation_spec)

    def adopt(self, federation_spec: FederationSpec) -> None:
        """Use this federation spec from now on.

        Raises:
            InputError: it is older than the present one, or of another federation.
            MembershipError: a group has too few members.
        """
        before = self.federation_spec.keys if hasattr(self, "federation_spec") else {}
        if before:
            self.federation_spec.check_successor(federation_spec)
        groups = {name: members for name, members in federation_spec.groups.items() if self.me in members}
        for members in groups.values():
            check_members(self.me, members)
        self.federation_spec = federation_spec
        self.others = tuple(sorted(set(federation_spec.members) - {self.me}))
        self.present = frozenset(federation_spec.members)
        self._leave_view()
        for name in self._groups.keys() - groups.keys():
            self._absent_groups[name] = self._groups.pop(name)
            self._absent_groups[name].end_pending(federation_spec.epoch)
        for name, members in groups.items():
            if name not in self._groups:
                self._groups[name] = self._make_group(name, members)
            self._groups[name].members, self._groups[name].epoch = members, self._period(0)
            self._groups[name].quorum, self._groups[name].size = federation_spec.quorum, len(members)
            self._groups[name].key_digests = {member: federation_spec.keys[member].digest for member in members}
            self._groups[name].left = self._departures.own is not None
        for peer in [name for name, keys in before.items() if federation_spec.keys.get(name) != keys]:
            self._equivocations.pop(peer, None)  # it was removed, or has another key: that is another member
            self._departures.received.pop(peer, None)
        self._hellos.adopt(federation_spec)
        absent = frozenset() if self._attendance is None else self._attendance.absent
        self._attendance = None
        if federation_spec.quorum is not None:
            self._attendance = AttendanceExchange(self.me, federation_spec, self._latest_number())
            self._attendance.absent = absent & set(self.others)
        for peer in self.others:
            self._send_hello(peer)
        self._try_to_form_view()

    def _try_to_form_view(self) -> None:
        try:
            self._form_view()
        except EquivocationError as error:
            self._record_equivocation(error)
        except RemoteProtocolError:
            pass  # an early report is malformed: its sender is waited for

    def _period(self, number: int) -> int:
        """Return the period of a view with this number: without a quorum, the epoch."""
        spec = self.federation_spec
        return spec.epoch if spec.quorum is None else period_of(spec.epoch, number)

    def _latest_number(self) -> int:
        """Return the number of the latest view of this epoch in which we are known to have been."""
        journals = [group.journal for group in self._groups.values()]
        periods = [journal.started for journal in journals]
        periods += [journal.entries[-1].epoch for journal in journals if journal.entries]
        return max((number_of(each) for each in periods if epoch_of(each) == self.federation_spec.epoch), default=0)

    def set_absent(self, absent: Collection[PeerId]) -> None:
        """Record the peers that were not heard for too long; with a quorum, the others go on without them."""
        if self._attendance is not None:
            self._attendance.absent = frozenset(absent) & set(self.others)
            self._attendance.count_tick()
            self._try_to_form_view()

    def _announce_attendance(self) -> None:
        """Announce who is present, if that has changed."""
        if self._attendance is None:
            return
        entries = [group.journal.entries for group in self._groups.values()]
        begun = any(each and epoch_of(each[-1].epoch) == self.federation_spec.epoch for each in entries)
        self._attendance.begun = begun
        longer = self._length_before < sum(len(each.journal) for each in self._groups.values())
        if longer and not any(group.journal.has_unfinished for group in self._groups.values()):
            self._attendance.only = frozenset()
        if self._attendance.update(self._digest_of_processes) is not None:
            for peer in self.others:
                self._send_attendance(peer)

    def _send_attendance(self, peer: PeerId) -> None:
        if self._attendance is not None:
            self._outbox.discard(lambda to, frame: to == peer and isinstance(frame.message, Attendance))
            self._outbox.put(peer, Frame(NO_VIEW, 0, replace(self._attendance.own, begun=self._attendance.begun)))

    def _digest_of_processes(self, members: Collection[PeerId]) -> bytes | None:
        """Return the digest of the ephemeral keys of these members; None if one of them cannot be in a view with us."""
        others = [peer for peer in members if peer != self.me]
        if any(self._hellos.problem(peer) is not None for peer in others):
            return None
        keys = [(name, key.hex()) for name, key in sorted(self._hellos.ephemeral_keys(others).items())]
        return sha256(json.dumps([self.federation_spec.epoch, keys]).encode()).digest()

    def _make_group(self, name: str, members: tuple[PeerId, ...]) -> Group:
        if name in self._absent_groups:
            return self._absent_groups.pop(name)
        journal = self._journals.get(name, Journal())  # one without entries may have a pending reveal
        return Group(name, members, journal, lambda group: self.on_pending_reveal(group))

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that we are a member of."""
        return tuple(self._groups)

    def group(self, name: str) -> Group:
        """Return one of the groups that we are a member of; raise MembershipError for one of an earlier epoch."""
        if name not in self._groups:
            raise absent_group(name, self.federation_spec.epoch)
        return self._groups[name]

    def start(
        self,
        group: str,
        spec: SumSpec,
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,
        step: Step | None = None,
        before_reveal: Callable[[], None] = lambda: None,
    ) -> PendingSum:
        """Start our program's next sum with this group; `epoch` was `Group.next_epoch` when the addend was weighted."""
        pending = PendingSum(spec, encode, epoch, step, self.loop_step, before_reveal=before_reveal)
        try:
            pending = self.group(group).start(pending)
        except EquivocationError as error:
            self._record_equivocation(error)
        self._departures.fail_unreachable_sums()
        if self.equivocation is not None:
            self._fail_all(self.equivocation)
        return pending

    def jump(self, loop_step: int) -> None:
        """Start at this step of our program's loop: skip the sums of earlier steps, in all groups."""
        self.loop_step = loop_step
        for each in self._groups.values():
            each.jump(loop_step)

    @property
    def up_to_date(self) -> bool:
        """True if all our journals are known to be as long as any member's."""
        return all(group.up_to_date for group in self._groups.values())

    def send_goodbye(self, done: bool) -> None:
        """Announce to all members that our program is done, or was stopped."""
        goodbye = self._departures.make_goodbye(done)
        for peer in self.others:
            self._put_goodbye(peer, goodbye)

    def hello(self, peer: PeerId) -> Hello | None:
        """Return the latest hello of a peer, if there is one."""
        return self._hellos.received.get(peer)

    def left(self, peer: PeerId) -> bool | None:
        """Return True if a peer's program is done, False if it was stopped, and None if it is running."""
        return self._departures.is_done(peer)

    @property
    def view(self) -> bytes:
        """The first 16 bytes of the digest of the present view; zeros while there is none."""
        return NO_VIEW if self._view is None else self._view.digest[:SESSION_BYTES]

    @property
    def all_done(self) -> bool:
        """True if the programs of all other members are done."""
        return all(map(self.left, self.others))

    def state_saved(self) -> None:
        """Report progress to members that wait for an optimiser's new state."""
        if self._view_change is not None:
            self._view_change.report_progress()

    def differences(self) -> dict[PeerId, str]:
        """Return the peers that are done and whose final digests differ from ours, and the differences."""
        return self._departures.differences()

    def suspected(self) -> dict[PeerId, str]:
        """Return the connected peers whose statements keep us from continuing, and the reasons."""
        return self._hellos.suspected | (self._view_change.objections() if self._view_change is not None else {})

    @property
    def equivocation(self) -> EquivocationError | None:
        """The proof that a member is dishonest, if there is one; nothing is summed any more."""
        return next(iter(self._equivocations.values()), None)

    def problems(self) -> dict[PeerId, str]:
        """Return the peers without which no view can be formed, and the reasons."""
        dishonest = {peer: str(error) for peer, error in self._equivocations.items()}
        found = {peer: dishonest.get(peer) or self._hellos.problem(peer) for peer in self.others}
        return {peer: reason for peer, reason in found.items() if reason is not None}

    def waiting_for(self, group: str) -> tuple[str, frozenset[PeerId]]:
        """Return what our program's sum waits for, and the peers that have to provide it."""
        each = self.group(group)
        if self._view_change is None:
            if self._attendance is not None and not self.problems().keys() - self._attendance.absent:
                return "agreement on who is present", self._attendance.missing or self._attendance.absent
            return "its hello", frozenset(self.problems())
        if not each.up_to_date:
            if self._hellos.suspected:
                return "the same hello for all members", frozenset(self._hellos.suspected)
            return self._view_change.waiting_for(each)
        if each.waits_for_all:
            return "its return: all members make this sum", frozenset(self.federation_spec.members) - self.present
        return each.session.waiting_for if each.session is not None else ("nothing", frozenset())

    def receive(self, sender: PeerId, data: Buffer) -> None:
        """Process one frame.

        Raises:
            RemoteProtocolError: it violates a rule and belongs to no sum of our program; it was dropped.
        """
        if sender not in (*self.others, HUB):
            raise RemoteProtocolError(sender, f"is not a member in epoch {self.federation_spec.epoch}")
        try:
            self._receive(sender, data)
        except EquivocationError as error:
            self._record_equivocation(error)
            raise

    def next_outgoing(self, blocked: Collection[PeerId] = ()) -> tuple[PeerId, Buffer] | None:
        """Return the next recipient and frame; return None if there is nothing to send to recipients not `blocked`."""
        if (waiting := self._outbox.pop(blocked)) is not None:
            return waiting[0], to_bytes(waiting[1])
        for group in self._groups.values():
            if group.session is not None and (outgoing := group.session.next_outgoing(blocked)) is not None:
                group.record_if_finished()  # this message may finish the sum
                return outgoing
        if (waiting := self._goodbyes.pop(blocked)) is not None:
            return waiting[0], to_bytes(waiting[1])
        return None

    # Received frames.

    def _receive(self, sender: PeerId, data: Buffer) -> None:
        session = session_of(data)
        for group in self._groups.values():
            if group.session is not None and group.session.session == session:
                if sender not in (*group.members, HUB):
                    raise RemoteProtocolError(sender, "is not a member of this group")
                if self.left(sender) is not None and kind_of_frame(data) is Ready:
                    raise RemoteProtocolError(sender, "sent Ready for another sum after its Goodbye")
                if sender in self._hellos.suspicions:
                    self._hellos.withdraw(sender)
                group.receive(sender, data)
                return
        frame = from_bytes(data, sender)
        if sender == HUB:
            self._receive_from_hub(frame)
        else:
            self._receive_message(sender, frame)

    def _receive_from_hub(self, frame: Frame) -> None:
        """Process a frame of the hub, which may only request a resend; a total may arrive late."""
        if isinstance(frame.message, ResendRequest):
            for group in self._groups.values():
                if group.session is not None:
                    group.session.resend()
        elif not isinstance(frame.message, Total):
            raise RemoteProtocolError(HUB, f"sent {type(frame.message).__name__}, which the hub may not send")

    def _receive_message(self, sender: PeerId, frame: Frame) -> None:
        view_change = self._view_change if frame.session == self.view else None
        if view_change is not None and sender in self._hellos.suspicions:
            self._hellos.withdraw(sender)
        match frame.message:
            case Hello():
                self._receive_hello(sender, frame.message)
            case Goodbye():
                self._departures.receive(sender, frame.message)
            case Attendance() if self._attendance is not None:
                self._attendance.receive(sender, frame.message)
                self._form_view()
            case SignedEvidence():
                self._receive_evidence(sender, frame.message)
            case JournalPosition() | PositionsGathered() | JournalRequest() | JournalChunk() if view_change is not None:
                view_change.receive(sender, frame.message)
                self._departures.fail_unreachable_sums()
                self._renew_view()
            case CompleteSum() if view_change is not None:
                view_change.receive(sender, frame.message)
                self._renew_view()
            case JournalPosition() | PositionsGathered():
                self._keep_early(sender, frame.session, frame.message)

    # Views (rules 1 and 4).

    def _receive_hello(self, sender: PeerId, hello: Hello) -> None:
        before = self._hellos.received.get(sender)
        self._hellos.receive(sender, hello)
        self._departures.received.pop(sender, None)
        if self._attendance is not None and before is not None and before.ephemeral != hello.ephemeral:
            self._attendance.forget(sender)
        if hello.knows != self._hellos.ephemeral.public:
            self._send_hello(sender)
            self._send_attendance(sender)
            if self._departures.own is not None:
                self._put_goodbye(sender, self._departures.own)
        self._form_view()

    def _send_hello(self, peer: PeerId) -> None:
        self._outbox.discard(lambda to, frame: to == peer and isinstance(frame.message, Hello))  # it is superseded
        self._outbox.put(peer, Frame(NO_VIEW, 0, self._hellos.make_hello(peer)))

    def _put_goodbye(self, peer: PeerId, goodbye: Goodbye) -> None:
        self._goodbyes.discard(lambda to, _: to == peer)  # it is superseded
        self._goodbyes.put(peer, Frame(NO_VIEW, 0, goodbye))

    def _form_view(self) -> None:
        if self._equivocations:
            return
        number, members = 0, self.federation_spec.members
        if self._attendance is not None:
            self._announce_attendance()
            if (agreed := self._attendance.agreed()) is None:
                return
            number, members = agreed.number, agreed.members
        others = [peer for peer in members if peer != self.me]
        if any(self._hellos.problem(peer) is not None for peer in others):
            return
        view = MembershipView.of(self.federation_spec, self._hellos.ephemeral_keys(others), number)
        if self._view is not None and view.digest == self._view.digest:
            return
        if view.digest in self._views:  # its masks may have been used
            raise LocalProtocolError("the members returned to an earlier view; restart this participant")
        self._leave_view()
        self._view = view
        self._views.add(view.digest)
        if self._attendance is not None:
            self._attendance.enter()
            self._set_present(frozenset(members), number)
        present = self.federation_spec.with_present(self.present)
        self._view_change = view_change = ViewChange(
            self.me,
            self._identity,
            self._hellos.ephemeral,
            present if self._attendance is not None else self.federation_spec,
            view,
            self._groups,
            send=lambda to, message: self._outbox.put(to, Frame(self.view, 0, message)),
            send_evidence=self._send_to_all,
            renew=self._ask_for_new_view,
            whole=self.federation_spec,
        )
        view_change.start(self._hellos.signed_keys())
        faults = view_change.receive_early(self.view, self._early)
        self._departures.fail_unreachable_sums()
        self._renew_view()
        if faults:
            raise faults[0]

    def _set_present(self, present: frozenset[PeerId], number: int) -> None:
        """Let the groups sum with the members of the view, in its period."""
        before, self.present = self.present, present
        for name, group in self._groups.items():
            members = self.federation_spec.groups[name]
            group.members = tuple(each for each in members if each in present)
            group.epoch = self._period(number)
        if before != present:
            self.on_present(before)

    def _ask_for_new_view(self, only: frozenset[PeerId]) -> None:
        """Ask for a new view: of the members that have to repeat a sum, or of the same members."""
        if self._attendance is not None:
            if only:
                self._attendance.restrict(only)
                self._length_before = sum(len(group.journal) for group in self._groups.values())
            else:
                self._attendance.renew()
            self._renewing = True

    def _renew_view(self) -> None:
        """Propose a new view if one was asked for while messages were processed."""
        if self._renewing:
            self._renewing = False
            self._form_view()

    def _leave_view(self) -> None:
        self._view = self._view_change = None
        self._hellos.leave_view()
        self._outbox.discard(lambda _, frame: frame.session != NO_VIEW)  # frames of the old view are useless
        for group in self._groups.values():
            group.leave_view()

    def _keep_early(self, sender: PeerId, session: bytes, message: JournalPosition | PositionsGathered) -> None:
        """Keep a report of a view that we have not formed, and compare the hellos that its sender received."""
        self._early.setdefault(sender, deque(maxlen=MAX_EARLY_REPORTS)).append((session, message))
        if isinstance(message, JournalPosition):
            self._hellos.compare_keys(sender, message.hellos)

    def _receive_evidence(self, sender: PeerId, evidence: SignedEvidence) -> None:
        without_view = StatementLog(self.me, self._identity, self.federation_spec.keys, b"", lambda _: None)
        log = without_view if self._view_change is None else self._view_change.statement_log
        log.receive_evidence(sender, evidence)
        log.send_evidence(evidence.kind, evidence.slot)

    def _record_equivocation(self, error: EquivocationError) -> None:
        if error.peer in self._equivocations:
            return
        self._equivocations[error.peer] = error
        self._fail_all(error)
        self._leave_view()
        if isinstance(error.proof, SignedEvidence):
            self._send_to_all(error.proof)

    def _fail_all(self, error: EquivocationError) -> None:
        for group in self._groups.values():
            group.fail(error)

    def _send_to_all(self, message: Message) -> None:
        """Send a message that belongs to no view to all members."""
        for peer in self.others:
            self._outbox.put(peer, Frame(NO_VIEW, 0, message))
