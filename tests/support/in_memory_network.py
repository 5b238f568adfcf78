"""A simulated network inside this process, on which a test can hold back frames or change them."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

from cgd.errors import ClosedError
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.messages import RevealKey
from cgd.transport.base import PeerStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from cgd.secagg.messages import Buffer, Message, PeerId


class HeldFrames:
    """Frames of one sender that are held back, from the first that matches on, for each recipient.

    The key of an earlier sum may be sent after the first frame of the next sum. It is not held back.
    """

    def __init__(self, sender: PeerId, to: Collection[PeerId], matches: Callable[[Message], bool]) -> None:
        self.sender = sender
        self._to = to
        self._matches = matches
        self.frames: list[tuple[PeerId, bytes]] = []
        self._first: dict[PeerId, Frame] = {}

    @property
    def reached(self) -> set[PeerId]:
        """The recipients for which frames are held back."""
        return {to for to, _ in self.frames}

    def take(self, to: PeerId, frame: Frame, data: bytes) -> bool:
        """Hold back this frame if it is the first that matches, or a later one; return whether it was."""
        if to not in self._to or (to not in self._first and not self._matches(frame.message)):
            return False
        first = self._first.setdefault(to, frame)
        earlier = frame.session == first.session and frame.number < first.number
        if earlier and isinstance(frame.message, RevealKey):
            return False
        self.frames.append((to, data))
        return True


class InMemoryNetwork:
    """Deliver frames completely and in order; unread frames are delivered to the next process of the recipient.

    Attributes:
        connected: the connection of each participant that sends and receives; earlier ones are cut off.
        rewrite: a function that may change a frame on its way.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connected: dict[PeerId, Connection] = {}
        self.rewrite: Callable[[PeerId, PeerId, Frame], Frame] = lambda _sender, _to, frame: frame
        self.cuts: set[frozenset[PeerId]] = set()
        """The pairs whose connections are broken: their frames wait until `heal`."""
        self._waiting: list[tuple[PeerId, PeerId, bytes]] = []
        self._unread: defaultdict[PeerId, deque[tuple[PeerId, bytes]]] = defaultdict(deque)
        self._holds: list[HeldFrames] = []

    def connect(self, me: PeerId, contacts: Mapping[PeerId, Any], _secret: bytes, _listen: str | None) -> Connection:
        """Return a connection; replaces `ZeroMQTransport`, and cuts off an earlier connection of this participant."""
        with self.lock:
            self.connected[me] = Connection(self, me, contacts)
            return self.connected[me]

    def hold(self, sender: PeerId, to: Collection[PeerId], matches: Callable[[Message], bool]) -> HeldFrames:
        """Hold back the first matching message to each of these recipients, and all later ones."""
        with self.lock:
            self._holds.append(HeldFrames(sender, to, matches))
            return self._holds[-1]

    def release(self, hold: HeldFrames) -> None:
        """Deliver the frames that are held back, unless their sender was killed."""
        with self.lock:
            if hold in self._holds:
                self._holds.remove(hold)
                for to, data in hold.frames:
                    self._deliver(hold.sender, to, data)

    def cut(self, *parts: Collection[PeerId]) -> None:
        """Break the connections between these parts."""
        with self.lock:
            self.cuts |= {
                frozenset((x, y)) for one in parts for other in parts if one is not other for x in one for y in other
            }

    def heal(self) -> None:
        """Repair all connections."""
        with self.lock:
            self.cuts.clear()
            waiting, self._waiting = self._waiting, []
            for frame in waiting:
                self._deliver(*frame)

    def drop_held(self, sender: PeerId) -> None:
        """Drop the frames of a killed sender that are held back."""
        self._holds = [hold for hold in self._holds if hold.sender != sender]

    def send(self, sender: PeerId, to: PeerId, data: bytes) -> None:
        """Send a frame of the sender's present connection."""
        frame = from_bytes(data, sender)
        rewritten = self.rewrite(sender, to, frame)
        data = data if rewritten is frame else to_bytes(rewritten)
        if not any(hold.sender == sender and hold.take(to, frame, data) for hold in self._holds):
            self._deliver(sender, to, data)

    def next_for(self, me: PeerId) -> tuple[PeerId, bytes] | None:
        """Return the next frame for the present connection of a participant."""
        return self._unread[me].popleft() if self._unread[me] else None

    def _deliver(self, sender: PeerId, to: PeerId, data: bytes) -> None:
        if frozenset((sender, to)) in self.cuts:
            self._waiting.append((sender, to, data))
            return
        self._unread[to].append((sender, data))
        if to in self.connected:
            self.connected[to].notify()


class Connection:
    """The transport of one process; implements `ReconnectingTransport`.

    Attributes:
        sent: the number of messages sent, by kind.
    """

    def __init__(self, network: InMemoryNetwork, me: PeerId, contacts: Mapping[PeerId, Any]) -> None:
        self.me = me
        self.members: tuple[PeerId, ...] = tuple(sorted(contacts))
        self.sent: Counter[type[Message]] = Counter()
        self._network = network
        self._received = threading.Condition(network.lock)
        self._woken = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """True if this is the present connection of its participant."""
        return self._network.connected.get(self.me) is self

    def send(self, to: PeerId, frame: Buffer) -> bool:
        """Send a frame; the queue is never full."""
        with self._network.lock:
            if self.connected:
                self.sent[type(from_bytes(frame, self.me).message)] += 1
                self._network.send(self.me, to, bytes(frame))
        return True

    def receive(self, timeout: float | None) -> tuple[PeerId, bytes] | None:
        """Return the next frame for this participant, if this is its present connection."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._network.lock:
            while True:
                if self._closed:
                    raise ClosedError(f"the connection of {self.me} is closed")
                if self.connected and (received := self._network.next_for(self.me)) is not None:
                    return received
                remaining = None if deadline is None else deadline - time.monotonic()
                if self._woken or (remaining is not None and remaining <= 0):
                    self._woken = False
                    return None
                self._received.wait(remaining)

    def notify(self) -> None:
        """Wake `receive` after a frame was delivered."""
        with self._network.lock:
            self._received.notify_all()

    def wakeup(self) -> None:
        """Make `receive` return."""
        with self._network.lock:
            self._woken = True
            self._received.notify_all()

    def close(self) -> None:
        """Disconnect; frames of this participant that are held back are dropped."""
        with self._network.lock:
            if self.connected:
                del self._network.connected[self.me]
                self._network.drop_held(self.me)
            self._closed = True
            self._received.notify_all()

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Set the members."""
        self.members = tuple(sorted(contacts))

    def status(self) -> dict[PeerId, PeerStatus]:
        """Return the status of every peer."""
        with self._network.lock:
            here = set(self._network.connected) if self.connected else set()
            here = {peer for peer in here if frozenset((self.me, peer)) not in self._network.cuts}
        others = [peer for peer in self.members if peer != self.me]
        return {peer: PeerStatus(peer in here, problem="" if peer in here else "away") for peer in others}

    def backlog(self, *, connected: bool) -> int:
        """Return the number of queued frames: delivery is immediate."""
        return 0
