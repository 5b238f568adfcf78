"""Several sums among the same members, one after the other, without I/O.

A session gives each sum the next number, turns messages into frames and back, and keeps what belongs to a later sum
until we are there. The rules:

1. A frame of a sum that is over is stale and ignored.
2. A peer may be ahead of us, by one sum, or by more if it gave some up. All it can say from there is that it is ready
   or that it gives up: the barrier holds it. Its latest word is kept, one for each peer; it is out of all sums before.
3. A sum that fails before we showed the key of our seal is over, and the next one may go on: nobody can have opened it.
   One that fails later ends the session: a peer may have finished it, so the members need not hold the same state.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cgd.errors import (
    CGDError,
    DisagreementError,
    FrameError,
    HubError,
    LocalProtocolError,
    PeerAbortedError,
    PeerLeftError,
    ProtocolError,
    RemoteProtocolError,
    SettingsError,
)
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.masking import PairwiseMasks
from cgd.secagg.messages import HUB, Abort, Leave, Message, PeerId, Ready, Reason, SumSpec
from cgd.secagg.partition import check_members
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from cgd.secagg.certificates import Certificate
    from cgd.secagg.messages import Buffer
    from cgd.secagg.reduction import HubKeys
    from cgd.secagg.statements import StatementSigner

# Faults that every member was told of by the one who caused them.
_TOLD = (PeerAbortedError, PeerLeftError)
# Faults that every member notices for itself, unless somebody said different things to different members.
_ALL_NOTICE = (DisagreementError, SettingsError)


class Session:
    """One member's side of a session: frames in by `receive`, frames out by `next_outgoing`.

    Args:
        me: this member's name.
        members: the names of all members.
        session: 16 bytes that tell this session from any other, the same for all members.
        pair_keys: for `expanded` sharing, the secret key of 16 bytes that we have in common with each peer.
        notary: signs and checks what is said in sums; see `SecureSum`.
        on_opening: see `SecureSum`.
    """

    def __init__(
        self,
        me: PeerId,
        members: Collection[PeerId],
        session: bytes,
        pair_keys: Mapping[PeerId, bytes] | None = None,
        statement_signer: StatementSigner | None = None,
        on_opening: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        check_members(me, members)
        self.me = me
        self.members = tuple(sorted(members))
        self.number = 0
        """The number of the latest sum; 0 before the first."""
        self.session = session
        self.hub: HubKeys | None = None
        """What sums through the hub need, if there is one."""
        self._hooks = statement_signer, on_opening
        self._shares = None if pair_keys is None else PairwiseMasks(me, pair_keys, session)
        self._sum: SecureSum | None = None
        self._ahead: dict[PeerId, tuple[int, Ready | Abort]] = {}
        self._gone: dict[PeerId, int] = {}  # peers that left, with the last sum they finished
        self._outbox: deque[tuple[PeerId, int, Message]] = deque()
        self._ended: str | None = None

    # What a driver calls.

    def start(self, spec: SumSpec, secret: npt.NDArray[Any], terms: bytes = b"") -> None:
        """Begin the next sum with this member's secret; `terms` must be the same for all.

        Raises:
            LocalProtocolError: the sum before is still running, or the session has ended.
            RemoteProtocolError: a peer has left, gave this sum up, or is ready under other settings.
        """
        try:
            current = self._step()
        except RemoteProtocolError as error:  # what a peer said before we were there
            self._fail(error)
            raise
        try:
            for peer in self._gone:
                self._check_presence(peer)
            current.start(spec, secret, terms)
        except CGDError as error:
            self._fail(error)
            raise

    def refuse(self, reason: Reason) -> None:
        """Tell the others that we cannot take part in the next sum."""
        current = self._step()
        current.fail()
        self._tell_all(current.number, Abort(reason))

    def receive(self, sender: PeerId, data: Buffer) -> None:
        """Take in one frame.

        Raises:
            RemoteProtocolError: the sender broke a rule, gave up, or left; the running sum has failed.
        """
        try:
            self._receive(sender, from_bytes(data, sender))
        except ProtocolError as error:
            self._fail(error)
            raise

    def next_outgoing(self, blocked: Collection[PeerId] = ()) -> tuple[PeerId, bytes] | None:
        """The next frame to send and its recipient; None while there is nothing to send to anyone but `blocked`."""
        if self._sum is not None and (outgoing := self._sum.next_outgoing(blocked)) is not None:
            if self._sum.fault is not None:  # it came about with this message, the last one that we had to say
                self._fail(self._sum.fault)
            return outgoing[0], to_bytes(Frame(self.session, self._sum.number, outgoing[1]))
        for place, (to, number, message) in enumerate(self._outbox):
            if to not in blocked:
                del self._outbox[place]
                return to, to_bytes(Frame(self.session, number, message))
        return None

    def again(self) -> None:
        """The hub has nothing of ours."""
        if self._sum is not None:
            self._sum.again()

    def end(self, why: str) -> None:
        """Take part in no further sum, and tell the others."""
        if self._ended is not None:
            return
        self._ended = why
        finished = self.finished
        if self._sum is not None:
            self._sum.fail()
        self._tell_all(self.number if finished else max(0, self.number - 1), Leave())

    @property
    def running(self) -> bool:
        """Whether a sum is under way."""
        return self._sum is not None and self._sum.state not in (State.FINISHED, State.FAILED)

    @property
    def finished(self) -> bool:
        """Whether the latest sum is finished."""
        return self._sum is not None and self._sum.state is State.FINISHED

    @property
    def fault(self) -> ProtocolError | None:
        """Why the latest sum has failed, if a peer did it."""
        return self._sum.fault if self._sum is not None else None

    @property
    def total(self) -> npt.NDArray[Any]:
        """The total of the latest sum, flat, as ring elements."""
        if self._sum is None:
            raise LocalProtocolError("no sum was started in this session")
        return self._sum.total

    def certificate(self, view: bytes) -> Certificate:
        """Make the proof that the latest sum is finished; see `SecureSum`."""
        if self._sum is None:
            raise LocalProtocolError("no sum was started in this session")
        return self._sum.said.certificate(view)

    def give_up(self, error: ProtocolError) -> None:
        """Give the running sum up because of this error, and tell the others."""
        if self.running:
            self._fail(error)

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """What the running sum waits for, and the peers it has to come from."""
        return self._sum.waiting_for if self._sum is not None else ("nothing", frozenset())

    # How it works.

    def _receive(self, sender: PeerId, frame: Frame) -> None:
        if frame.session != self.session:
            raise FrameError(sender, "sent a frame of another session; it must join this one anew")
        if sender not in (*self.members, HUB) or sender == self.me:
            raise RemoteProtocolError(sender, f"is not a peer in this session ({', '.join(self.members)})")
        if isinstance(frame.message, Leave):
            self._gone.setdefault(sender, frame.number)
            if self.running:
                self._check_presence(sender)
        elif self._sum is not None and frame.number == self.number:
            self._sum.receive(sender, frame.message)
        elif frame.number > self.number:
            self._keep(sender, frame.number, frame.message)

    def _keep(self, sender: PeerId, number: int, message: Message) -> None:
        """Rule 2. Of two words about one sum, giving up is the later."""
        if not isinstance(message, (Ready, Abort)):
            raise RemoteProtocolError(
                sender, f"sent {type(message).__name__} of sum {number} while we are at {self.number}: too soon"
            )
        known, word = self._ahead.get(sender, (0, None))
        if number > known or (number == known and isinstance(word, Ready)):
            self._ahead[sender] = (number, message)

    def _step(self) -> SecureSum:
        """Go to the next sum, with what the peers that are ahead have said of it."""
        if self._ended is not None:
            raise LocalProtocolError(f"this session has ended ({self._ended}); join again for further sums")
        if self.running:
            raise LocalProtocolError(f"sum {self.number} is still running; one sum at a time")
        while self._sum is not None and (outgoing := self._sum.next_outgoing()) is not None:
            to, message = outgoing  # our last word in a sum that finished while we said it
            self._outbox.append((to, self.number, message))
        self.number += 1
        statement_signer, on_opening = self._hooks
        self._sum = SecureSum(
            self.me,
            self.members,
            self.number,
            self._shares,
            hub=self.hub,
            statement_signer=statement_signer,
            on_opening=on_opening,
        )
        for peer, (number, word) in self._ahead.items():
            if number >= self.number:
                with suppress(PeerAbortedError):  # start raises it
                    self._sum.receive(peer, word if number == self.number else Abort(Reason.AHEAD))
        return self._sum

    def _fail(self, error: CGDError) -> None:
        """Rule 3."""
        if self._sum is None or self._sum.state is State.FINISHED:
            return
        unsealed = self._sum.unsealed
        self._sum.fail()
        if unsealed:
            self.end(str(error))
        elif not isinstance(error, _TOLD):
            self._tell_all(self.number, Abort(_reason(error)))

    def _check_presence(self, peer: PeerId) -> None:
        last = self._gone[peer]
        if last >= self.number:
            return
        behind = f"; it did not finish sum {self.number - 1}, which we did" if last < self.number - 1 else ""
        raise PeerLeftError(peer, f"has left the session before sum {self.number}{behind}; start anew when it is back")

    def _tell_all(self, number: int, message: Message) -> None:
        self._outbox.extend((peer, number, message) for peer in self.members if peer != self.me)


def _reason(error: CGDError) -> Reason:
    """What the others are told of a fault."""
    if isinstance(error, _ALL_NOTICE):
        return Reason.DIFFERS
    return Reason.HUB if isinstance(error, HubError) else Reason.PEER
