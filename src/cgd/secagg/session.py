"""A session: several sums among the same members, one after the other, without I/O.

A session numbers the sums, converts messages to frames and back, and keeps messages of a later sum until that sum is
reached. The rules:

1. A frame of a past sum is stale and ignored.
2. A peer may be ahead of us, by one sum, or by more if it aborted some. From there it can only send the beginning of
   its latest sum: that it is ready, and one share of a key and one slice of a subtotal; or that it aborts. The barrier
   stops it. This is kept for each peer until we start that sum; the peer takes no part in the sums before.
3. If a sum fails before we revealed our self-mask key, only this sum is aborted: no member can know its total. If it
   fails later, the session ends: a peer may have finished the sum, so the members may hold different states.
"""

from __future__ import annotations

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
    RevealError,
    SettingsError,
)
from cgd.secagg.codec import Frame, encode, from_bytes
from cgd.secagg.masking import PairwiseMasks
from cgd.secagg.messages import HUB, Abort, KeyShare, Leave, Message, Outbox, PeerId, Ready, Reason, Subtotal, SumSpec
from cgd.secagg.reduction import MAX_SLICE_BYTES, check_members
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from cgd.secagg.certificates import Certificate
    from cgd.secagg.completion import InterruptedSum
    from cgd.secagg.messages import Buffer
    from cgd.secagg.reduction import HubKeys
    from cgd.secagg.statements import StatementSigner

# Faults that the member that caused them announced to all members.
_ANNOUNCED = (PeerAbortedError, PeerLeftError)
# Faults that every member detects itself, unless a member sent different statements to different members.
_DETECTED_BY_ALL = (DisagreementError, SettingsError)


class Session:
    """One member's side of a session: frames in by `receive`, frames out by `next_outgoing`.

    Args:
        me: the name of this member.
        members: the names of all members.
        session: 16 bytes that identify the session, the same for all members.
        pair_keys: for `pairwise` masking, the secret key of 16 bytes that we share with each peer.
        statement_signer: signs and verifies the statements of sums; see `SecureSum`.
        on_reveal: see `SecureSum`.
        quorum: see `SecureSum`.
    """

    def __init__(
        self,
        me: PeerId,
        members: Collection[PeerId],
        session: bytes,
        pair_keys: Mapping[PeerId, bytes] | None = None,
        statement_signer: StatementSigner | None = None,
        on_reveal: Callable[[bytes], None] = lambda _: None,
        quorum: int | None = None,
    ) -> None:
        check_members(me, members)
        self.me = me
        self.members = tuple(sorted(members))
        self.number = 0
        """The number of the latest sum; 0 before the first."""
        self.session = session
        self.hub: HubKeys | None = None
        """The keys for sums through the hub, if there is one."""
        self._hooks = statement_signer, on_reveal
        self._quorum = quorum
        self._masks = None if pair_keys is None else PairwiseMasks(me, pair_keys, session)
        self._sum: SecureSum | None = None
        self._ahead: dict[PeerId, tuple[int, dict[type[Message], Message]]] = {}  # by kind, of the peer's latest sum
        self._departed: dict[PeerId, int] = {}  # peers that left, with the last sum they finished
        self._outbox: Outbox[tuple[int, Message]] = Outbox()
        self._ended: str | None = None
        self._last_failed = 0

    # Called by a driver.

    def start(
        self,
        spec: SumSpec,
        secret: npt.NDArray[Any],
        terms: bytes = b"",
        before_reveal: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the next sum with this member's secret; `terms` must be the same for all members.

        `before_reveal` is called before our key is sent; if it raises a `RevealError`, the key is not sent.

        Raises:
            LocalProtocolError: the previous sum is still running, or the session has ended.
            RemoteProtocolError: a peer left, aborted this sum, or is ready with other settings.
        """
        try:
            current = self._next_sum()
        except RemoteProtocolError as error:  # the fault of a message that was received before this sum
            self._fail(error)
            raise
        try:
            for peer in self._departed:
                self._check_departure(peer)
            current.start(spec, secret, terms, before_reveal)
        except CGDError as error:
            self._fail(error)
            raise

    def refuse(self, reason: Reason) -> None:
        """Abort the next sum, and send the reason to all members."""
        current = self._next_sum()
        current.fail()
        self._send_to_all(current.number, Abort(reason))

    def receive(self, sender: PeerId, data: Buffer) -> None:
        """Process one frame.

        Raises:
            RemoteProtocolError: the sender violated a rule, aborted, or left; the running sum has failed.
        """
        try:
            self._receive(sender, from_bytes(data, sender))
        except ProtocolError as error:
            self._fail(error)
            raise

    def next_outgoing(self, blocked: Collection[PeerId] = ()) -> tuple[PeerId, Buffer] | None:
        """Return the next recipient and frame; return None if there is nothing to send to recipients not `blocked`."""
        if (waiting := self._outbox.pop(blocked)) is not None:
            to, (number, message) = waiting
            return to, encode(Frame(self.session, number, message))
        if self._sum is not None and (outgoing := self._sum.next_outgoing(blocked)) is not None:
            if self._sum.fault is not None:  # it occurred with this message, the last of the sum
                self._fail(self._sum.fault)
            return outgoing[0], encode(Frame(self.session, self._sum.number, outgoing[1]))
        return None

    def resend(self) -> None:
        """Send all deposits again, because the hub lost them."""
        if self._sum is not None:
            self._sum.resend()

    def end(self, reason: str) -> None:
        """Take part in no further sum, and announce it to all members."""
        if self._ended is not None:
            return
        self._ended = reason
        finished = self.finished
        if self._sum is not None:
            self._sum.fail()
        self._queue_last_messages()
        self._send_to_all(self.number if finished else max(0, self.number - 1), Leave())

    @property
    def running(self) -> bool:
        """True if a sum is running."""
        return self._sum is not None and self._sum.state not in (State.FINISHED, State.FAILED)

    @property
    def finished(self) -> bool:
        """True if the latest sum is finished."""
        return self._sum is not None and self._sum.state is State.FINISHED

    @property
    def fault(self) -> ProtocolError | None:
        """The fault of a peer that made the latest sum fail, if any."""
        return self._sum.fault if self._sum is not None else None

    @property
    def total(self) -> npt.NDArray[Any]:
        """The total of the latest sum, flat, as ring elements."""
        if self._sum is None:
            raise LocalProtocolError("no sum was started in this session")
        return self._sum.total

    def certificate(self, view: bytes) -> Certificate:
        """Return the proof that the latest sum was finished in this view."""
        if self._sum is None:
            raise LocalProtocolError("no sum was started in this session")
        return self._sum.agreement.certificate(view)

    def interrupted(self, view: bytes) -> InterruptedSum | None:
        """Return what we have of the latest sum, if it is unfinished; see `SecureSum.interrupted`."""
        return None if self._sum is None else self._sum.interrupted(view)

    def abort(self, error: ProtocolError) -> None:
        """Abort the running sum because of this error, and announce it to all members."""
        if self.running:
            self._fail(error)

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """The message that the running sum waits for, and the peers that have to send it."""
        return self._sum.waiting_for if self._sum is not None else ("nothing", frozenset())

    @property
    def keeps_others_waiting(self) -> bool:
        """True if all other members are ready for the next sum, which our program has not started."""
        ahead = {peer for peer, (number, _) in self._ahead.items() if number > self.number}
        return not self.running and ahead | {self.me} == set(self.members)

    # Internals.

    def _receive(self, sender: PeerId, frame: Frame) -> None:
        if frame.session != self.session:
            raise FrameError(sender, "sent a frame of another session; it must join again")
        if sender not in (*self.members, HUB) or sender == self.me:
            raise RemoteProtocolError(sender, f"is not a peer in this session ({', '.join(self.members)})")
        if isinstance(frame.message, Leave):
            self._departed.setdefault(sender, frame.number)
            if self.running:
                self._check_departure(sender)
        elif self._sum is not None and frame.number == self.number:
            self._sum.receive(sender, frame.message)
        elif frame.number > self.number:
            self._keep_early(sender, frame.number, frame.message)

    def _keep_early(self, sender: PeerId, number: int, message: Message) -> None:
        """Apply rule 2; of two messages about one sum, the abort is the later one."""
        known, kept = self._ahead.get(sender, (0, {}))
        if isinstance(message, (Ready, Abort)):
            if number > known or (number == known and isinstance(message, Abort)):
                self._ahead[sender] = number, {type(message): message}
        elif number > known or not _may_be_kept(message, kept):
            raise RemoteProtocolError(
                sender, f"sent {type(message).__name__} of sum {number} too early: this member is at sum {self.number}"
            )
        elif number == known and Abort not in kept:
            kept.setdefault(type(message), message)

    def _next_sum(self) -> SecureSum:
        """Create the next sum, and pass it the messages of peers that are ahead."""
        if self._ended is not None:
            raise LocalProtocolError(f"this session has ended ({self._ended}); join again for further sums")
        if self.running:
            raise LocalProtocolError(f"sum {self.number} is still running; sums run one after the other")
        self._queue_last_messages()
        self.number += 1
        statement_signer, on_reveal = self._hooks
        self._sum = SecureSum(
            self.me,
            self.members,
            self.number,
            self._masks,
            hub=self.hub,
            statement_signer=statement_signer,
            on_reveal=on_reveal,
            quorum=self._quorum,
        )
        early, self._ahead = self._ahead, {peer: ahead for peer, ahead in self._ahead.items() if ahead[0] > self.number}
        for peer, (number, kept) in early.items():
            messages = kept.values() if number == self.number else [Abort(Reason.AHEAD)]
            for message in messages if number >= self.number else ():
                with suppress(PeerAbortedError):  # `start` raises it
                    self._sum.receive(peer, message)
        return self._sum

    def _queue_last_messages(self) -> None:
        """Queue our last messages of a finished sum, before those of the next one."""
        while self._sum is not None and (outgoing := self._sum.next_outgoing()) is not None:
            to, message = outgoing
            self._outbox.put(to, (self.number, message))

    def _fail(self, error: CGDError) -> None:
        """Apply rule 3."""
        if self._sum is None or self._sum.state is State.FINISHED or self._last_failed == self.number:
            return  # each failure is announced once, whatever a peer sends afterwards
        self._last_failed = self.number
        revealed = self._sum.revealed
        self._sum.fail()
        if revealed:
            self.end(str(error))
        elif not isinstance(error, _ANNOUNCED):
            self._send_to_all(self.number, Abort(_reason(error)))

    def _check_departure(self, peer: PeerId) -> None:
        last = self._departed[peer]
        if last >= self.number:
            return
        behind = f"; it did not finish sum {self.number - 1}, which this member did" if last < self.number - 1 else ""
        raise PeerLeftError(
            peer, f"left the session before sum {self.number}{behind}; start a new session when it is back"
        )

    def _send_to_all(self, number: int, message: Message) -> None:
        for peer in self.members:
            if peer != self.me:
                self._outbox.put(peer, (number, message))


def _may_be_kept(message: Message, kept: Mapping[type[Message], Message]) -> bool:
    """Return whether a peer may send this ahead of us, besides what we keep of it: one slice, of limited size."""
    if isinstance(message, Subtotal):
        return len(message.words) <= MAX_SLICE_BYTES and kept.get(Subtotal, message) == message
    return isinstance(message, KeyShare)


def _reason(error: CGDError) -> Reason:
    """Return the reason to send to the other members."""
    if isinstance(error, _DETECTED_BY_ALL):
        return Reason.DIFFERS
    if isinstance(error, RevealError):
        return Reason.STOPPED
    return Reason.HUB if isinstance(error, HubError) else Reason.PEER
