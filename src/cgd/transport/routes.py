"""Ways to a peer: directly, through the hub, or to the hub itself. Each has a link in both directions.

What our sending end says goes by `send_data`, what our receiving end says by `send_ack`. What the peer's ends say comes in by
`on_data` and `on_ack`. A channel is whatever leads back to one process of the peer: a connection that it has made,
or, through the hub, the name of that process.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import zmq

from cgd.errors import InputError
from cgd.transport import link
from cgd.transport.addresses import new_address
from cgd.transport.base import PeerStatus
from cgd.transport.channel import NOBODY, ForeignError
from cgd.transport.link import Datagram, DatagramKind, Incoming, Outgoing

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.auth import RejectionLog
    from cgd.transport.channel import Channel
    from cgd.transport.connections import Connection, HubConnection, Socket

MAX_HELLO_BYTES = 1024
TO_HUB = b""  # the name that a message for the hub itself is addressed to, or comes from


class Route(ABC):
    """Both directions to one peer.

    Args:
        peer: its name.
        incarnation: ours.
        hello: what we say of ourselves: our name, and our address behind a zero.
        refusals: where it is told what we do not take.
    """

    def __init__(self, peer: PeerId, incarnation: bytes, hello: bytes, rejections: RejectionLog) -> None:
        self.peer = peer
        self.out = Outgoing(incarnation, hello)
        self.into = Incoming(incarnation)
        self._incarnation = incarnation
        self._rejections = rejections

    def rest(self, now: float) -> float:  # noqa: ARG002
        """Return for how many seconds there is certainly nothing to send; 0 if that is not known."""
        return 0.0

    @abstractmethod
    def has_room(self) -> bool:
        """Whether something can be sent now."""

    @abstractmethod
    def send_data(self, datagram: Datagram) -> None:
        """Send what our sending end says."""

    @abstractmethod
    def send_ack(self, channel: bytes, datagram: Datagram) -> bool:
        """Send what our receiving end says; False if that channel is gone."""

    @abstractmethod
    def outbound_problem(self, now: float) -> str:
        """Why nothing reaches the peer, if nothing does."""

    def inbound_problem(self) -> str:
        """What it means if we reach the peer and nothing comes from it."""
        return "nothing comes from it"

    def moved(self, address: str) -> None:  # noqa: B027 - most need not follow
        """The peer, which has proved with its key that it is the one, says where it is."""

    def close(self) -> None:  # noqa: B027 - most have nothing of their own
        """Let go of what this way alone has."""

    def status(self, now: float) -> PeerStatus:
        """How it stands with the peer."""
        connected = self.out.welcomed and now - self.out.heard < link.SILENT_SECONDS
        if connected:
            return PeerStatus(True, self.out.latency, "" if self.into.alive(now) else self.inbound_problem())
        return PeerStatus(False, self.out.latency, self.out.refusal or self.outbound_problem(now))

    def on_data(self, datagram: Datagram, channel: bytes) -> Buffer | None:
        """Take in what the peer's sending end says, and answer it; the frame, if it brings the next one."""
        now = time.monotonic()
        frame: Buffer | None = None
        answer: Datagram | None = None
        if datagram.kind is DatagramKind.HELLO:
            answer = self._greet(datagram, channel, now)
        elif datagram.kind in (DatagramKind.DATA, DatagramKind.PING):
            stale = self.into.stale
            frame, answer = self.into.take(datagram, channel, now)
            if self.into.stale > stale:
                self._rejections.add(self.peer, "a stale or repeated message", level=logging.INFO)
        else:
            self._rejections.add(self.peer, "a malformed message", f"{datagram.kind.name} from a sender")
        if answer is not None:
            self.send_ack(channel, answer)
        probe = self.into.probe()
        if probe is not None and self.into.channel is not None and not self.send_ack(self.into.channel, probe):
            self.into.gone()
        return frame

    def on_ack(self, datagram: Datagram, channel: bytes) -> None:  # noqa: ARG002 - where it comes from
        """Take in what the peer's receiving end says."""
        answer = self.out.take(datagram, time.monotonic())
        if answer is not None:
            self.send_data(answer)

    def _greet(self, datagram: Datagram, channel: bytes, now: float) -> Datagram:
        claimed, _, address = bytes(datagram.body[:MAX_HELLO_BYTES]).decode(errors="replace").partition("\0")
        if claimed != self.peer:
            detail = f"it says that it is {claimed!r}, and its key is that of {self.peer}"
            self._rejections.add(self.peer, "a false name", detail)
            why = f"your key is that of {self.peer}, and you say that you are {claimed}"
            return Datagram(DatagramKind.REFUSED, self._incarnation, datagram.sender, 0, why.encode())
        answer = self.into.hello(datagram, channel, now)
        if answer.kind is DatagramKind.REFUSED:
            self._rejections.add(self.peer, "a second process with the same key")
        else:
            self.moved(address)
        return answer


class DirectRoute(Route):
    """To a peer that has an address, from one that has: a connection of ours, and one of the peer's.

    Args:
        line: our connection to the peer.
        router: where the peer's connection to us ends.
        address: ours.

    Attributes:
        source: the IP address that the peer's last message came from.
    """

    source = ""

    def __init__(
        self,
        peer: PeerId,
        incarnation: bytes,
        hello: bytes,
        rejections: RejectionLog,
        connection: Connection,
        router: Socket,
        address: str,
    ) -> None:
        super().__init__(peer, incarnation, hello, rejections)
        self.connection = connection
        self._router = router
        self._address = address

    def rest(self, now: float) -> float:
        """As the link says, unless there is something to be done about the connection."""
        return 0.0 if self.connection.needs_care(now) else self.out.rest(now)

    def has_room(self) -> bool:
        """Whether our connection takes something."""
        return self.connection.has_room()

    def send_data(self, datagram: Datagram) -> None:
        """By our connection."""
        self.connection.send(datagram.to_bytes())

    def send_ack(self, channel: bytes, datagram: Datagram) -> bool:
        """By the peer's connection."""
        return send_to(self._router, channel, datagram.to_bytes())

    def outbound_problem(self, now: float) -> str:  # noqa: ARG002
        """What is known of our connection."""
        return self.connection.problem

    def inbound_problem(self) -> str:
        """Its connection does not come about."""
        return f"nothing comes from it; if this lasts it does not reach us at {self._address}: is our port open?"

    def moved(self, address: str) -> None:
        """Follow it, if it may send us there."""
        if not address:
            return
        try:
            self.connection.follow(new_address(address, self.connection.listed, self.source))
        except InputError as error:
            self._rejections.add(self.peer, "a new address", str(error))

    def close(self) -> None:
        """Close our connection."""
        self.connection.close()


class HubRoute(Route):
    """To the hub itself.

    Args:
        line: our connection with the hub.
    """

    def __init__(
        self, peer: PeerId, incarnation: bytes, hello: bytes, rejections: RejectionLog, connection: HubConnection
    ) -> None:
        super().__init__(peer, incarnation, hello, rejections)
        self.connection = connection
        self._connection = 0

    def has_room(self) -> bool:
        """Whether the hub takes something; by a new connection, the first thing that it hears is that we are there."""
        room = self.connection.has_room()
        if room and self._connection != self.connection.connection:
            self._connection = self.connection.connection
            self.out.hurry()
            self.into.gone()  # if it is another process that answers now, we let it in
        return room

    def send_data(self, datagram: Datagram) -> None:
        """By our connection."""
        self.connection.send(TO_HUB, datagram.to_bytes())

    def send_ack(self, channel: bytes, datagram: Datagram) -> bool:  # noqa: ARG002
        """By our connection; there is no other."""
        self.send_data(datagram)
        return True

    def outbound_problem(self, now: float) -> str:  # noqa: ARG002
        """What is known of our connection."""
        return self.connection.problem

    def close(self) -> None:
        """Close our connection."""
        self.connection.close()


class RelayedRoute(Route):
    """To a peer through the hub, sealed end to end.

    Args:
        hub: our way to the hub.
        channel: our end of what we have with the peer.

    Attributes:
        foreign: why we cannot read what comes from the peer, if we cannot.
        absent: whether the hub says that the peer is not connected with it.
    """

    def __init__(
        self, peer: PeerId, incarnation: bytes, hello: bytes, rejections: RejectionLog, hub: HubRoute, channel: Channel
    ) -> None:
        super().__init__(peer, incarnation, hello, rejections)
        self.channel = channel
        self.foreign = ""
        self.absent = False
        self._hub = hub
        self._process = NOBODY  # the one that has welcomed us

    def has_room(self) -> bool:
        """Whether the hub takes something from us."""
        return self._hub.has_room() and self._hub.out.welcomed

    def send_data(self, datagram: Datagram) -> None:
        """Seal it for the process that has welcomed us; a HELLO is for any, and begins a session if there is none."""
        if datagram.kind is not DatagramKind.HELLO:
            self.send_ack(self._process, datagram)
        elif self._hub.connection.has_room():  # else it is lost, but not counted: it has not left us
            self._send(*self.channel.seal_hello(datagram.to_bytes(), self._hub.connection.connection))

    def send_ack(self, channel: bytes, datagram: Datagram) -> bool:
        """Seal it for the process that has spoken; whether it is still there we cannot know."""
        connection = self._hub.connection
        sealed = (
            self.channel.seal(datagram.to_bytes(), channel, connection.connection) if connection.has_room() else None
        )
        if sealed is not None:
            self._send(sealed)
        return True

    def unseal(self, payload: Buffer) -> tuple[bytes, bytes] | None:
        """Open what the hub passes on: return the process it comes from, and what it says to the link, if anything.

        Raises:
            HubError: the hub did something to it.
        """
        self.absent = not payload
        if self.absent:
            return None
        try:
            opened = self.channel.open(payload, self._hub.connection.connection)
        except ForeignError as error:
            self.foreign = str(error)
            self._rejections.add(self.peer, "a foreign message", str(error))
            return None
        self.foreign = ""
        if opened.answer is not None:
            self._send(opened.answer)
        elif opened.stale:
            self._rejections.add(self.peer, "a stale or repeated message", level=logging.INFO)
        elif opened.content is None:  # our handshake is through, so there is a session for what we have to say
            self.out.hurry()
        return None if opened.content is None else (opened.process, opened.content)

    def on_data(self, datagram: Datagram, channel: bytes) -> Buffer | None:
        """Take in what the peer's sending end says; if that is a new process, we have to greet it, too."""
        if datagram.kind is DatagramKind.HELLO and channel != self.into.channel:
            self.into.gone()  # the hub lets in one process at a time, and this one has proved its key
        frame = super().on_data(datagram, channel)
        if self.out.welcomed and self.into.channel not in (None, self._process):
            self.out.restart()
        return frame

    def on_ack(self, datagram: Datagram, channel: bytes) -> None:
        """Take in what the peer's receiving end says; who welcomes us is the one that we send to."""
        welcomed = self.out.welcomed
        super().on_ack(datagram, channel)
        if self.out.welcomed and not welcomed:
            self._process = channel

    def outbound_problem(self, now: float) -> str:
        """Where it hangs: at the hub, or behind it."""
        hub = self._hub.status(now)
        if not hub.connected:
            return f"it is to be reached through the hub, and the hub is not: {hub.problem}"
        if self.foreign:
            return self.foreign
        if self.absent:
            return "it is not connected with the hub"
        return "no answer through the hub: it has just started, or the hub does not pass on what we send"

    def inbound_problem(self) -> str:
        """The hub passes on what we send, and nothing back."""
        return "nothing comes from it through the hub; if this lasts the hub does not pass it on"

    def _send(self, *sealed: bytes) -> None:
        for each in sealed:
            self._hub.connection.send(self.peer.encode(), each)


def send_to(router: Socket, channel: bytes, *parts: bytes) -> bool:
    """Send by a connection that another one has made; False if it is gone. What does not fit is lost."""
    try:
        router.send_multipart([channel, *parts], zmq.NOBLOCK)
    except zmq.ZMQError as error:  # EHOSTUNREACH: the connection is gone; EAGAIN: it does not read
        return error.errno != zmq.EHOSTUNREACH
    return True
