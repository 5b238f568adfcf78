"""The members of a federation over its whole life: who is here, what they agree on, how one that was away catches up.

A session lives as long as all of its members' processes do. An assembly outlives them. The rules:

1. Every process makes an ephemeral key when it starts and tells it to everyone (`Hello`), with the charter it holds:
   the federation, the epoch, the digest of every section of the file. When everybody is here under the same charter,
   the members form a *view*. It is named by the charter and all ephemeral keys, so whoever comes back makes a new one.
2. A view has one session for each group of members that sums. Its pair keys come from the ephemeral keys, so no share
   is ever made twice. A sum that was under way in an older view is given up, and begins again in the new one: a total
   is opened by all or by none (see `secure_sum`), so this shows nothing twice.
3. First everybody says how many sums it has finished (`Standing`), and contributes to a key that all have. If somebody
   finished one that we did not, it is finished: we take it from that member's ledger (`Ask`, `Piece`) and do not run it
   again, whoever its members were. Only members of a group are given its ledger.
4. A new epoch (other members, or another setting) begins when all members of the new file hold it, and nobody goes
   back. A sum that has to be run again with other members is handed back to the caller, which must weight it anew.

No I/O here: frames in by `receive`, frames out by `next_outgoing`.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError, LocalProtocolError, PeerLeftError, RemoteProtocolError
from cgd.protocol.ephemeral import Ephemeral, view_name
from cgd.protocol.frames import Frame, from_bytes, session_of, to_bytes
from cgd.protocol.group import Group, Pending
from cgd.protocol.ledger import Ledger, Step
from cgd.protocol.members import check_members
from cgd.protocol.messages import (
    CONTRIBUTION_BYTES,
    EPHEMERAL_BYTES,
    HUB,
    SESSION_BYTES,
    Again,
    Ask,
    Farewell,
    Hello,
    OfAnAssembly,
    PeerId,
    Piece,
    Standing,
    SumSpec,
    Total,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from cgd.protocol.charter import Charter
    from cgd.protocol.messages import Buffer

PIECE_BYTES = 1 << 20
MOST_LIVES = 10_000
NO_VIEW = bytes(SESSION_BYTES)


class Assembly:
    """One member's side of a federation.

    Args:
        me: this member's name.
        charter: what all hold to.
        ledgers: what we know of the past, by group; none if this is the first time, or all was lost.
    """

    def __init__(self, me: PeerId, charter: Charter, ledgers: Mapping[str, Ledger] | None = None) -> None:
        self.me = me
        self.clock = 0
        """The step that our program's loop is at."""
        self._ephemeral = Ephemeral()
        self._ledgers = dict(ledgers or {})
        self._groups: dict[str, Group] = {}
        self._hellos: dict[PeerId, Hello] = {}
        self._left: dict[PeerId, bool] = {}
        self._parting: Farewell | None = None
        self._view = NO_VIEW
        self._views: set[bytes] = set()
        self._spent: set[tuple[PeerId, bytes]] = set()  # ephemeral keys of peers' earlier lives
        self._standings: dict[PeerId, dict[str, int]] = {}
        self._contributions: dict[PeerId, bytes] = {}
        self._given: set[tuple[PeerId, str]] = set()  # who was given which ledger in this view
        self._early: dict[PeerId, tuple[bytes, Standing]] = {}
        self._outbox: deque[tuple[PeerId, Frame]] = deque()
        self.adopt(charter)

    # What a driver calls.

    def adopt(self, charter: Charter) -> None:
        """Hold to this charter from now on.

        Raises:
            InputError: it is older than the one we hold, or of another federation.
            MembershipError: a group has too few members.
        """
        held: Charter | None = getattr(self, "charter", None)
        if held is not None and (charter.federation != held.federation or charter.epoch <= held.epoch):
            raise InputError(
                f"the federation file is of {charter.federation!r}, epoch {charter.epoch}, and we are at "
                f"{held.federation!r}, epoch {held.epoch}; an epoch only goes up"
            )
        groups = {name: members for name, members in charter.groups.items() if self.me in members}
        for members in groups.values():
            check_members(self.me, members)
        self.charter = charter
        self.others = tuple(sorted(set(charter.members) - {self.me}))
        for name in self._groups.keys() - groups.keys():
            del self._groups[name]
        for name, members in groups.items():
            if name not in self._groups:
                self._groups[name] = Group(name, members, self._ledgers.get(name) or Ledger())
            self._groups[name].members, self._groups[name].epoch = members, charter.epoch
        for peer in self._hellos.keys() - set(self.others):
            del self._hellos[peer]
        self._leave_view()
        for peer in self.others:
            self._say_hello(peer)
        self._form_view()

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that we sum with."""
        return tuple(self._groups)

    def group(self, name: str) -> Group:
        """One of the groups that we sum with."""
        return self._groups[name]

    def start(
        self, group: str, spec: SumSpec, encode: Callable[[], npt.NDArray[Any]], epoch: int, step: Step | None = None
    ) -> Pending:
        """Our program wants its next sum with this group; `encode` makes our addend, anew each time it is asked.

        `epoch` is what `Group.next_epoch` said when the addend was weighted.
        """
        pending = self._groups[group].start(Pending(spec, encode, epoch, step), self.clock)
        self._give_up_on_the_done()
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
        self._parting = Farewell(done)
        for peer in self.others:
            self._say(peer, Frame(NO_VIEW, 0, self._parting))

    def hello(self, peer: PeerId) -> Hello | None:
        """What a peer said of itself, if it has."""
        return self._hellos.get(peer)

    def left(self, peer: PeerId) -> bool | None:
        """Whether a peer's program is done (True) or was stopped (False); None if it is running."""
        return self._left.get(peer)

    @property
    def view(self) -> bytes:
        """The name of the present view; zeros while there is none."""
        return self._view

    @property
    def all_done(self) -> bool:
        """Whether every other member's program is done."""
        return all(self._left.get(peer, False) for peer in self.others)

    def trouble(self) -> dict[PeerId, str]:
        """The peers without which nothing goes on, and why."""
        return {peer: why for peer in self.others if (why := self._trouble(peer)) is not None}

    def waiting_for(self, group: str) -> tuple[str, frozenset[PeerId]]:
        """What our program's sum waits for, and the peers it has to come from."""
        each = self._groups[group]
        if not self._view or self._view == NO_VIEW:
            return "to be here", frozenset(self.trouble())
        if not each.current:
            missing = frozenset(self.others) - frozenset(self._standings)
            return ("its standing", missing) if missing else ("the past", frozenset({each.holder or ""}))
        return each.session.waiting_for if each.session is not None else ("nothing", frozenset())

    def receive(self, sender: PeerId, data: Buffer) -> None:
        """Take in one frame.

        Raises:
            RemoteProtocolError: it breaks a rule and belongs to no sum of our program; it was dropped.
        """
        if sender not in (*self.others, HUB):
            raise RemoteProtocolError(sender, f"is not a member in epoch {self.charter.epoch}")
        session = session_of(data)
        for group in self._groups.values():
            if group.session is not None and group.session.session == session:
                if sender not in (*group.members, HUB):
                    raise RemoteProtocolError(sender, "is not a member of this group")
                group.receive(sender, data, self.clock)
                return
        frame = from_bytes(data, sender)
        if sender == HUB:
            self._hear_the_hub(frame)
        elif isinstance(frame.message, OfAnAssembly):
            self._receive(sender, frame)

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
            group.settle(self.clock)
            if outgoing is not None:
                return outgoing
        return None

    def _hear_the_hub(self, frame: Frame) -> None:
        """All that it may say besides a total, which may be late, is that it has nothing of ours."""
        if isinstance(frame.message, Again):
            for group in self._groups.values():
                if group.session is not None:
                    group.session.again()
        elif not isinstance(frame.message, Total):
            raise RemoteProtocolError(HUB, f"sent {type(frame.message).__name__}, which it has no business to say")

    # Who is here (rules 1 and 4).

    def _receive(self, sender: PeerId, frame: Frame) -> None:
        match frame.message:
            case Hello():
                self._greet(sender, frame.message)
            case Farewell(done):
                self._left[sender] = done
                self._give_up_on_the_done()
            case Standing():
                if frame.session == self._view:
                    self._take_standing(sender, frame.message)
                else:
                    self._early[sender] = frame.session, frame.message
            case Ask(name) if frame.session == self._view:
                self._give_ledger(sender, name)
            case Piece(_, name, _, _) if frame.session == self._view and name in self._groups:
                self._take_piece(sender, self._groups[name], frame.message)

    def _greet(self, sender: PeerId, hello: Hello) -> None:
        try:  # a key without a shared secret, such as zeros, would stop us later
            self._ephemeral.exchange(hello.ephemeral)
        except ValueError:
            raise RemoteProtocolError(sender, "sent an ephemeral key that is none") from None
        if (sender, hello.ephemeral) in self._spent:  # its shares may be too
            raise RemoteProtocolError(sender, "goes back to an ephemeral key of before; it must be started again")
        known = self._hellos.get(sender)
        if known is not None and known.ephemeral != hello.ephemeral:
            if sum(peer == sender for peer, _ in self._spent) >= MOST_LIVES:  # none of them may be forgotten
                raise RemoteProtocolError(sender, f"was started more than {MOST_LIVES} times; start us again, too")
            self._spent.add((sender, known.ephemeral))
        self._hellos[sender] = hello
        self._left.pop(sender, None)
        if hello.knows != self._ephemeral.public:
            self._say_hello(sender)
            if self._parting is not None:
                self._say(sender, Frame(NO_VIEW, 0, self._parting))
        self._form_view()

    def _say_hello(self, peer: PeerId) -> None:
        known = self._hellos.get(peer)
        charter = self.charter
        sections = tuple(sorted(charter.sections.items()))
        knows = known.ephemeral if known is not None else bytes(EPHEMERAL_BYTES)
        self._forget(lambda to, frame: to == peer and isinstance(frame.message, Hello))  # this one says it all
        hello = Hello(self._ephemeral.public, knows, charter.version, charter.federation, charter.epoch, sections)
        self._say(peer, Frame(NO_VIEW, 0, hello))

    def _trouble(self, peer: PeerId) -> str | None:
        if peer not in self._hellos:
            return "it is not here"
        return self.charter.difference(self._hellos[peer])

    def _form_view(self) -> None:
        if self.trouble():
            return
        keys = {self.me: self._ephemeral.public} | {peer: self._hellos[peer].ephemeral for peer in self.others}
        view = view_name(self.charter, keys)
        if view == self._view:
            return
        if view in self._views:  # its shares may be spent
            raise LocalProtocolError("the members have gone back to a view of before; start this participant again")
        self._leave_view()
        self._view = view
        self._views.add(view)
        pairs = {peer: self._ephemeral.pair_key(keys[peer], view) for peer in self.others}
        for group in self._groups.values():
            group.enter_view(self.me, view, pairs)
        self._contributions = {self.me: os.urandom(CONTRIBUTION_BYTES)}
        finished = tuple((name, len(group.ledger)) for name, group in self._groups.items())
        standing = Standing(finished, self._contributions[self.me])
        for peer in self.others:
            self._say(peer, Frame(view, 0, standing))
        for peer, (session, early) in list(self._early.items()):
            if session == view:
                del self._early[peer]
                self._take_standing(peer, early)

    def _leave_view(self) -> None:
        self._view = NO_VIEW
        self._forget(lambda _, frame: frame.session != NO_VIEW)  # nobody wants what is of the view that is over
        self._standings.clear()
        self._given.clear()
        for group in self._groups.values():
            group.leave_view()

    # Where they stand (rule 3).

    def _take_standing(self, sender: PeerId, standing: Standing) -> None:
        if sender in self._standings:
            raise RemoteProtocolError(sender, "told twice where it stands")
        self._standings[sender] = dict(standing.finished)
        self._contributions[sender] = standing.contribution
        if len(self._standings) < len(self.others):
            return
        for name, group in self._groups.items():
            group.share_key(self._contributions)
            self._catch_up(name, group)

    def _catch_up(self, name: str, group: Group, doubted: frozenset[PeerId] = frozenset()) -> None:
        """Ask whoever has finished most sums for its ledger, if that is more than we have."""
        finished = {peer: self._standings[peer].get(name, 0) for peer in sorted(group.members) if peer != self.me}
        ahead = [peer for peer in finished if finished[peer] > len(group.ledger)]
        if ahead:
            # If all of them gave us what cannot be, the first is named as the one we wait for.
            asked = max(ahead, key=lambda peer: (peer not in doubted, finished[peer]))
            group.holder, group.doubted, group.received = asked, doubted, bytearray()
            if asked not in doubted:
                self._say(asked, Frame(self._view, 0, Ask(name)))
        else:
            group.holder = None
            group.current = True
            group.run(self.clock)
            self._give_up_on_the_done()

    def _give_up_on_the_done(self) -> None:
        """A peer whose program is done, and that is not ready for the sum we wait for, will never be."""
        for group in self._groups.values():
            if group.current and group.session is not None and group.pending is not None and not group.pending.over:
                what, missing = group.session.waiting_for
                for peer in sorted(missing):
                    if what == "Ready" and self._left.get(peer):
                        group.pending.fault = PeerLeftError(
                            peer, "is done, and our program asks for one more sum; all programs must make the same sums"
                        )

    def _give_ledger(self, sender: PeerId, name: str) -> None:
        group = self._groups.get(name)
        if group is None or sender not in group.members:
            raise RemoteProtocolError(sender, f"asked for the ledger of {name!r}, which it is not a member of")
        if (sender, name) in self._given:  # once in a view is all that anybody needs
            return
        self._given.add((sender, name))
        content = memoryview(group.ledger.to_bytes())
        for start in range(0, len(content), PIECE_BYTES):
            piece = Piece(start, name, len(content), content[start : start + PIECE_BYTES])
            self._say(sender, Frame(self._view, 0, piece))

    def _take_piece(self, sender: PeerId, group: Group, piece: Piece) -> None:
        try:
            if group.take_piece(sender, piece, self._standings[sender].get(piece.group, 0)):
                self._catch_up(piece.group, group)
        except InputError as error:
            self._catch_up(piece.group, group, group.doubted | {sender})
            raise RemoteProtocolError(sender, f"gave us its past, and {error}") from None

    def _forget(self, which: Callable[[PeerId, Frame], bool]) -> None:
        self._outbox = deque((to, frame) for to, frame in self._outbox if not which(to, frame))

    def _say(self, to: PeerId, frame: Frame) -> None:
        self._outbox.append((to, frame))
