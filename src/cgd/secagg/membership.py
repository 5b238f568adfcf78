"""The members of a federation over its whole life: who is here, what they agree on, how one that was away catches up.

A session lives as long as all of its members' processes do. An assembly outlives them. The rules:

1. Every process makes an ephemeral key when it starts and tells it to everyone (`Hello`), with the charter it holds:
   the federation, the epoch, the digest of every section of the file. When everybody is here under the same charter,
   the members form a *view*. It is named by the charter and all ephemeral keys, so whoever comes back makes a new one.
2. A view has one session for each group of members that sums. Its pair keys come from the ephemeral keys, so no share
   is ever made twice. A sum that was under way in an older view is given up, and begins again in the new one: a total
   is opened by all or by none (see `secure_sum`), so this shows nothing twice.
3. First everybody reports where it stands (`JournalPosition`): how many sums it has finished, by which history. Reports are
   signed and the same for all; their digests are compared before anybody goes on (`PositionsGathered`). If somebody finished a
   sum that we did not, it is finished: we take it from that member's ledger (`JournalRequest`, `JournalChunk`), if it can prove it
   (`history.py`), and do not run it again, whoever its members were. Only members of a group are given its ledger.
4. A new epoch (other members, or another setting) begins when all members of the new file hold it, and nobody goes
   back. A sum that has to be run again with other members is handed back to the caller, which must weight it anew; it
   is refused if somebody may have opened it with the members of before.
5. Who has signed different things for different members is dishonest (`statements.py`). Nothing is summed with it any
   more.

`catching_up.py` has rule 3. No I/O here: frames in by `receive`, frames out by `next_outgoing`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from cgd.errors import EquivocationError, InputError, LocalProtocolError, PeerLeftError, RemoteProtocolError
from cgd.secagg.codec import Frame, from_bytes, kind_of_frame, session_of, to_bytes
from cgd.secagg.group import Group, PendingSum
from cgd.secagg.hello import HelloExchange
from cgd.secagg.journal import Journal, Step
from cgd.secagg.key_agreement import MembershipView, pair
from cgd.secagg.messages import (
    HUB,
    SESSION_BYTES,
    Goodbye,
    Hello,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    MembershipMessage,
    Message,
    PeerId,
    PositionsGathered,
    Ready,
    ResendRequest,
    SignedEvidence,
    SumSpec,
    Total,
)
from cgd.secagg.partition import check_members
from cgd.secagg.statements import StatementLog
from cgd.secagg.view_change import ViewChange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.identity import Identity
    from cgd.secagg.messages import Buffer

    Early = tuple[bytes, JournalPosition | PositionsGathered]

MAX_EARLY = 4
NO_VIEW = bytes(SESSION_BYTES)


class Membership:
    """One member's side of a federation.

    Args:
        me: this member's name.
        identity: its keys.
        charter: what all hold to.
        ledgers: what we know of the past, by group; none if this is the first time, or all was lost.

    Attributes:
        on_mark: called when the mark of a group's ledger has changed, to keep it before anything is sent.
    """

    def __init__(
        self,
        me: PeerId,
        identity: Identity,
        federation_spec: FederationSpec,
        journals: Mapping[str, Journal] | None = None,
    ) -> None:
        self.me = me
        self.on_mark: Callable[[Group], None] = lambda _: None
        self._identity = identity
        self.clock = 0
        """The step that our program's loop is at."""
        self._hellos = HelloExchange(me, identity)
        self._ledgers = dict(journals or {})
        self._groups: dict[str, Group] = {}
        self._left: dict[PeerId, Goodbye] = {}
        self._parting: Goodbye | None = None
        self._view: MembershipView | None = None
        self._views: set[bytes] = set()
        self._statement_log: StatementLog | None = None
        self._view_change: ViewChange | None = None
        self._convicted: dict[PeerId, EquivocationError] = {}
        self._early: dict[PeerId, deque[Early]] = {}
        self._outbox: deque[tuple[PeerId, Frame]] = deque()
        self.adopt(federation_spec)

    # What a driver calls.

    def adopt(self, federation_spec: FederationSpec) -> None:
        """Hold to this charter from now on.

        Raises:
            InputError: it is older than the one we hold, or of another federation.
            MembershipError: a group has too few members.
        """
        held: FederationSpec | None = getattr(self, "federation_spec", None)
        if held is not None and (federation_spec.federation != held.federation or federation_spec.epoch <= held.epoch):
            raise InputError(
                f"the federation file is of {federation_spec.federation!r}, epoch {federation_spec.epoch}, and we are at "
                f"{held.federation!r}, epoch {held.epoch}; an epoch only goes up"
            )
        groups = {name: members for name, members in federation_spec.groups.items() if self.me in members}
        for members in groups.values():
            check_members(self.me, members)
        self.federation_spec = federation_spec
        self.others = tuple(sorted(set(federation_spec.members) - {self.me}))
        for name in self._groups.keys() - groups.keys():
            del self._groups[name]
        for name, members in groups.items():
            if name not in self._groups:
                journal = self._ledgers.get(name, Journal())  # one without entries may have a mark
                self._groups[name] = Group(name, members, journal, lambda group: self.on_mark(group))
            self._groups[name].members, self._groups[name].epoch = members, federation_spec.epoch
        for peer in self._convicted.keys() - set(self.others):
            del self._convicted[peer]
        self._hellos.adopt(federation_spec)
        self._leave_view()
        for peer in self.others:
            self._say_hello(peer)
        try:
            self._form_view()
        except EquivocationError as error:
            self._convict(error)
        except RemoteProtocolError:
            pass  # a report that came before the file is malformed: its sender is waited for

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that we sum with."""
        return tuple(self._groups)

    def group(self, name: str) -> Group:
        """One of the groups that we sum with."""
        return self._groups[name]

    def start(
        self, group: str, spec: SumSpec, encode: Callable[[], npt.NDArray[Any]], epoch: int, step: Step | None = None
    ) -> PendingSum:
        """Our program wants its next sum with this group; `encode` makes our addend, anew each time it is asked.

        `epoch` is what `Group.next_epoch` said when the addend was weighted.
        """
        pending = PendingSum(spec, encode, epoch, step)
        try:
            pending = self._groups[group].start(pending, self.clock)
        except EquivocationError as error:
            self._convict(error)
        self._give_up_on_the_done()
        self._fail_if_convicted()
        return pending

    def jump(self, clock: int) -> None:
        """Our program begins with this step of its loop: what it summed in earlier ones is not asked for again."""
        self.clock = clock
        for each in self._groups.values():
            each.jump(clock)

    @property
    def current(self) -> bool:
        """Whether all our ledgers are known to be as long as anybody's."""
        return all(group.current for group in self._groups.values())

    def farewell(self, done: bool) -> None:
        """Tell the others that our program is done, or was stopped."""
        self._parting = Goodbye(done, self._ends() if done else ())
        self._tell_all(NO_VIEW, self._parting)

    def hello(self, peer: PeerId) -> Hello | None:
        """What a peer said of itself, if it has."""
        return self._hellos.heard.get(peer)

    def left(self, peer: PeerId) -> bool | None:
        """Whether a peer's program is done (True) or was stopped (False); None if it is running."""
        return self._left[peer].done if peer in self._left else None

    @property
    def view(self) -> bytes:
        """The name of the present view, 16 bytes; zeros while there is none."""
        return NO_VIEW if self._view is None else self._view.digest[:SESSION_BYTES]

    @property
    def all_done(self) -> bool:
        """Whether every other member's program is done."""
        return all(peer in self._left and self._left[peer].done for peer in self.others)

    def remembered(self) -> None:
        """Tell who needs it that what we remember of an optimiser has changed."""
        if self._view_change is not None:
            self._view_change.tell_progress()

    def differences(self) -> dict[PeerId, str]:
        """The peers that are done as we are, and end with something else than we, and what; see `Goodbye`."""
        ours = {name: (length, digest) for name, length, digest in self._ends()}
        found = {}
        for peer, parting in self._left.items():
            for name, length, digest in parting.ends if parting.done else ():
                if name in ours and ours[name] != (length, digest):
                    found[peer] = f"{length} sums of {name} with a history or state that is not ours"
        return found

    def doubts(self) -> dict[PeerId, str]:
        """The peers that are here and hold us up by what they say, and why."""
        return self._hellos.doubts | (self._view_change.doubts() if self._view_change is not None else {})

    @property
    def conviction(self) -> EquivocationError | None:
        """Why nothing is summed any more, if a member was found to be dishonest."""
        return next(iter(self._convicted.values()), None)

    def problems(self) -> dict[PeerId, str]:
        """The peers without which nothing goes on, and why."""
        return {peer: why for peer in self.others if (why := self._problem(peer)) is not None}

    def waiting_for(self, group: str) -> tuple[str, frozenset[PeerId]]:
        """What our program's sum waits for, and the peers it has to come from."""
        each = self._groups[group]
        if self._view_change is None:
            return "to be here", frozenset(self.problems())
        if not each.current:
            if self._hellos.doubts:
                return "the same greeting for all", frozenset(self._hellos.doubts)
            return self._view_change.waiting_for(each)
        return each.session.waiting_for if each.session is not None else ("nothing", frozenset())

    def receive(self, sender: PeerId, data: Buffer) -> None:
        """Take in one frame.

        Raises:
            RemoteProtocolError: it breaks a rule and belongs to no sum of our program; it was dropped.
        """
        if sender not in (*self.others, HUB):
            raise RemoteProtocolError(sender, f"is not a member in epoch {self.federation_spec.epoch}")
        try:
            self._receive(sender, data)
        except EquivocationError as error:
            self._convict(error)
            raise

    def _receive(self, sender: PeerId, data: Buffer) -> None:
        session = session_of(data)
        for group in self._groups.values():
            if group.session is not None and group.session.session == session:
                if sender not in (*group.members, HUB):
                    raise RemoteProtocolError(sender, "is not a member of this group")
                if sender in self._left and kind_of_frame(data) is Ready:
                    raise RemoteProtocolError(sender, "has said farewell, and is ready for another sum")
                group.receive(sender, data, self.clock)
                return
        frame = from_bytes(data, sender)
        if sender == HUB:
            self._hear_the_hub(frame)
        elif isinstance(frame.message, MembershipMessage):
            self._receive_message(sender, frame)

    def next_outgoing(self, blocked: Collection[PeerId] = ()) -> tuple[PeerId, bytes] | None:
        """The next frame to send and its recipient; None while there is nothing to send to anyone but `blocked`."""
        for place, (to, frame) in enumerate(self._outbox):
            if to not in blocked:
                del self._outbox[place]
                return to, to_bytes(frame)
        for group in self._groups.values():
            if group.session is None:
                continue
            outgoing = group.session.next_outgoing(blocked)
            if outgoing is not None:
                group.settle(self.clock)  # the sum may be finished with this message
                return outgoing
        return None

    def _hear_the_hub(self, frame: Frame) -> None:
        """All that it may say besides a total, which may be late, is that it has nothing of ours."""
        if isinstance(frame.message, ResendRequest):
            for group in self._groups.values():
                if group.session is not None:
                    group.session.again()
        elif not isinstance(frame.message, Total):
            raise RemoteProtocolError(HUB, f"sent {type(frame.message).__name__}, which it has no business to say")

    # Who is here (rules 1 and 4).

    def _receive_message(self, sender: PeerId, frame: Frame) -> None:
        match frame.message:
            case Hello():
                self._greet(sender, frame.message)
            case Goodbye():
                self._left[sender] = frame.message
                self._give_up_on_the_done()
            case SignedEvidence():
                self._compare(sender, frame.message)
            case JournalPosition() | PositionsGathered() if self._view_change is None or frame.session != self.view:
                self._keep_early(sender, frame.session, frame.message)
            case JournalPosition() | PositionsGathered() | JournalRequest() | JournalChunk() if (
                frame.session == self.view
            ):
                if self._view_change is not None:
                    self._view_change.receive(sender, frame.message)
                    self._give_up_on_the_done()

    def _greet(self, sender: PeerId, hello: Hello) -> None:
        self._hellos.take(sender, hello)
        self._left.pop(sender, None)
        if hello.knows != self._hellos.ephemeral.public:
            self._say_hello(sender)
            if self._parting is not None:
                self._forget(lambda to, frame: to == sender and isinstance(frame.message, Goodbye))
                self._say(sender, Frame(NO_VIEW, 0, self._parting))
        self._form_view()

    def _say_hello(self, peer: PeerId) -> None:
        self._forget(lambda to, frame: to == peer and isinstance(frame.message, Hello))  # this one says it all
        self._say(peer, Frame(NO_VIEW, 0, self._hellos.greeting(peer)))

    def _problem(self, peer: PeerId) -> str | None:
        return str(self._convicted[peer]) if peer in self._convicted else self._hellos.problem(peer)

    def _form_view(self) -> None:
        if self.problems():
            return
        view = MembershipView.of(self.federation_spec, self._hellos.keys(self.others))
        if self._view is not None and view.digest == self._view.digest:
            return
        if view.digest in self._views:  # its shares may be spent
            raise LocalProtocolError("the members have gone back to a view of before; start this participant again")
        self._leave_view()
        self._view = view
        self._views.add(view.digest)
        pair_keys = {
            peer: pair(self.me, self._identity, self._hellos.ephemeral, peer, self.federation_spec, view)
            for peer in self.others
        }
        self._statement_log = StatementLog(
            self.me, self._identity, self.federation_spec.keys, view.digest, self._tell_what_was_seen
        )
        self._view_change = ViewChange(
            self.me,
            self.federation_spec,
            self._groups,
            pair_keys,
            self._statement_log,
            self._say_in_view,
            lambda: self.clock,
        )
        self._view_change.begin(self._hellos.passed_on())
        early = {peer: list(kept) for peer, kept in self._early.items()}
        faults = [fault for peer, kept in early.items() if (fault := self._take_early(peer, kept)) is not None]
        self._give_up_on_the_done()
        if faults:  # one member's fault does not keep us from hearing the others
            raise faults[0]

    def _take_early(self, peer: PeerId, kept: Collection[Early]) -> RemoteProtocolError | None:
        """Take in what a peer reported before we had formed the view; returns what is wrong with it."""
        try:
            for session, message in kept:
                if session == self.view and self._view_change is not None:
                    self._view_change.receive(peer, message)
        except RemoteProtocolError as fault:
            return fault
        return None

    def _leave_view(self) -> None:
        self._view = self._statement_log = self._view_change = None
        self._hellos.doubts.clear()
        self._forget(lambda _, frame: frame.session != NO_VIEW)  # nobody wants what is of the view that is over
        for group in self._groups.values():
            group.leave_view()

    def _keep_early(self, sender: PeerId, session: bytes, message: JournalPosition | PositionsGathered) -> None:
        """Keep a report of a view that we have not formed; it tells whose greetings the sender has."""
        self._early.setdefault(sender, deque(maxlen=MAX_EARLY)).append((session, message))
        if isinstance(message, JournalPosition):
            self._hellos.compare(sender, message.greetings)

    def _give_up_on_the_done(self) -> None:
        """A peer whose program is done, and that is not ready for the sum we wait for, will never be."""
        for group in self._groups.values():
            if group.current and group.session is not None and group.pending is not None and not group.pending.over:
                what, missing = group.session.waiting_for
                for peer in sorted(missing):
                    if what == "Ready" and self.left(peer):
                        text = "is done, and our program asks for one more sum; all programs must make the same sums"
                        group.fail(PeerLeftError(peer, text))
                        break

    # Who is dishonest (rule 5).

    def _compare(self, sender: PeerId, seen: SignedEvidence) -> None:
        statement_log = self._statement_log or StatementLog(
            self.me, self._identity, self.federation_spec.keys, b"", lambda _: None
        )
        statement_log.compare(sender, seen)
        statement_log.dispute(seen.kind, seen.slot)

    def _convict(self, error: EquivocationError) -> None:
        if error.peer in self._convicted:
            return
        self._convicted[error.peer] = error
        for group in self._groups.values():
            group.fail(error)
        self._leave_view()
        if isinstance(error.proof, SignedEvidence):
            self._tell_what_was_seen(error.proof)

    def _fail_if_convicted(self) -> None:
        if (error := self.conviction) is not None:
            for group in self._groups.values():
                group.fail(error)

    def _tell_what_was_seen(self, seen: SignedEvidence) -> None:
        self._tell_all(NO_VIEW, seen)

    def _ends(self) -> tuple[tuple[str, int, bytes], ...]:
        return tuple((name, len(group.journal), group.journal.end()) for name, group in sorted(self._groups.items()))

    def _forget(self, which: Callable[[PeerId, Frame], bool]) -> None:
        self._outbox = deque((to, frame) for to, frame in self._outbox if not which(to, frame))

    def _say(self, to: PeerId, frame: Frame) -> None:
        self._outbox.append((to, frame))

    def _say_in_view(self, to: PeerId, message: Message) -> None:
        self._say(to, Frame(self.view, 0, message))

    def _tell_all(self, session: bytes, message: Message) -> None:
        for peer in self.others:
            self._say(peer, Frame(session, 0, message))
