"""Routes to a peer: directly, through the hub, or to the hub itself. A route has a link in each direction.

`send_data` sends the datagrams of our outbound link, `send_ack` those of our inbound link. `on_data` and `on_ack`
process the datagrams of the peer's ends. `reply_to` is the return path to one process of the peer: the identity of the
connection that it has made or, through the hub, the random name of the process.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import zmq

from cgd.errors import InputError
from cgd.transport import link
from cgd.transport.addresses import new_address
from cgd.transport.base import SETTLE_SECONDS, PeerStatus
from cgd.transport.channel import NO_PROCESS, IncompatibleError, RelayError
from cgd.transport.link import Datagram, DatagramKind, InboundLink, OutboundLink

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.auth import RejectionLog
    from cgd.transport.channel import Channel
    from cgd.transport.connections import Connection, HubConnection, Socket

MAX_HELLO_BYTES = 1024
# For so long the status shows that relayed messages were refused or lost. Its text has no count: each change is logged.
DISTURBED_SECONDS = 60.0
HUB_NAME = b""  # the name of the hub in messages that it sends or receives itself


class Route(ABC):
    """Both directions between this process and one peer.

    Args:
        peer: the name of the peer.
        incarnation: the incarnation of this process.
        hello: the body of our HELLO: our name and, after a zero byte, our address.
        rejections: logs rejected datagrams.
    """

    def __init__(self, peer: PeerId, incarnation: bytes, hello: bytes, rejections: RejectionLog) -> None:
        self.peer = peer
        self.outbound = OutboundLink(incarnation, hello)
        self.inbound = InboundLink(incarnation)
        self._incarnation = incarnation
        self._rejections = rejections

    def idle_seconds(self, now: float) -> float:  # noqa: ARG002
        """Return the seconds for which there is certainly nothing to send; 0 if that is not known."""
        return 0.0

    @abstractmethod
    def can_send(self) -> bool:
        """Return whether a datagram can be sent now."""

    @abstractmethod
    def send_data(self, datagram: Datagram) -> None:
        """Send a datagram of our outbound link."""

    @abstractmethod
    def send_ack(self, reply_to: bytes, datagram: Datagram) -> bool:
        """Send a datagram of our inbound link; return False if the return path is lost."""

    @abstractmethod
    def outbound_problem(self, now: float) -> str:
        """Return the reason if the peer cannot be reached."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Return whether there was a connection to the peer, and there is none now."""

    def inbound_problem(self, settling: bool) -> str:
        """Return the reason if the peer can be reached and nothing is received from it; `settling`: not for long."""
        return "nothing is received from it" + (" yet" if settling else "")

    def on_peer_address(self, address: str) -> None:  # noqa: B027 - most routes ignore it
        """Handle the address that the peer, which has proved its key, reports for itself."""

    def close(self) -> None:  # noqa: B027 - most routes own nothing
        """Release the resources that belong to this route alone."""

    def status(self, now: float) -> PeerStatus:
        """Return the connection status of the peer."""
        connected = self.outbound.established and now - self.outbound.last_received < link.SILENT_SECONDS
        if connected:
            one_way_since = max(self.outbound.established_at, self.inbound.last_received)
            settling = now - one_way_since < SETTLE_SECONDS
            problem = "" if self.inbound.is_alive(now) else self.inbound_problem(settling)
            return PeerStatus(True, self.outbound.latency, problem, now - self.outbound.last_received)
        problem = self.outbound.rejection or self.outbound_problem(now)
        return PeerStatus(False, self.outbound.latency, problem, now - self.outbound.last_received)

    def on_data(self, datagram: Datagram, reply_to: bytes) -> Buffer | None:
        """Process and answer a datagram of the peer's outbound link; return the frame if it carries the next one."""
        now = time.monotonic()
        frame: Buffer | None = None
        answer: Datagram | None = None
        if datagram.kind is DatagramKind.HELLO:
            answer = self._on_hello(datagram, reply_to, now)
        elif datagram.kind in (DatagramKind.DATA, DatagramKind.PING):
            dropped, refused = self.inbound.dropped, self.inbound.refused
            frame, answer = self.inbound.receive(datagram, reply_to, now)
            if self.inbound.dropped > dropped:
                self._rejections.add(self.peer, "a stale or repeated message", level=logging.INFO)
            if self.inbound.refused > refused:
                count = self.inbound.refused - refused
                self._rejections.add(self.peer, "a second process with the same key", count=count)
        else:
            self._rejections.add(self.peer, "a malformed message", f"{datagram.kind.name} from a sender")
        if answer is not None:
            self.send_ack(reply_to, answer)
        probe = self.inbound.next_probe()
        if probe is not None and self.inbound.reply_to is not None and not self.send_ack(self.inbound.reply_to, probe):
            self.inbound.mark_lost()
        return frame

    def on_ack(self, datagram: Datagram, reply_to: bytes) -> None:  # noqa: ARG002 - for RelayedRoute
        """Process a datagram of the peer's inbound link."""
        answer = self.outbound.receive(datagram, time.monotonic())
        if answer is not None:
            self.send_data(answer)

    def _on_hello(self, datagram: Datagram, reply_to: bytes, now: float) -> Datagram:
        claimed, _, address = bytes(datagram.body[:MAX_HELLO_BYTES]).decode(errors="replace").partition("\0")
        if claimed != self.peer:
            detail = f"it reports the name {claimed!r}, and its key is that of {self.peer}"
            self._rejections.add(self.peer, "a false name", detail)
            reason = f"your key is that of {self.peer}, and you say that you are {claimed}"
            return Datagram(DatagramKind.REJECTED, self._incarnation, datagram.sender, 0, reason.encode())
        answer = self.inbound.on_hello(datagram, reply_to, now)
        if answer.kind is not DatagramKind.REJECTED:
            self.on_peer_address(address)
        return answer


class DirectRoute(Route):
    """The route between two participants that both have an address: a connection in each direction.

    Args:
        connection: our connection to the peer.
        router: the socket at which the peer's connection to us arrives.
        address: our address.

    Attributes:
        source: the IP address from which the peer's last message came.
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

    def idle_seconds(self, now: float) -> float:
        """Return the idle time of the link; 0 if the connection needs attention."""
        return 0.0 if self.connection.needs_attention(now) else self.outbound.idle_seconds(now)

    def can_send(self) -> bool:
        """Return whether our connection accepts a message."""
        return self.connection.can_send()

    def send_data(self, datagram: Datagram) -> None:
        """Send by our connection."""
        self.connection.send(datagram.encode())

    def send_ack(self, reply_to: bytes, datagram: Datagram) -> bool:
        """Send by the peer's connection."""
        return send_to(self._router, reply_to, datagram.encode())

    def outbound_problem(self, now: float) -> str:  # noqa: ARG002
        """Return the problem of our connection."""
        return self.connection.problem

    def is_lost(self) -> bool:
        """Return whether our connection is lost."""
        return self.outbound.established and not self.connection.connected

    def inbound_problem(self, settling: bool) -> str:
        """Return that the peer's connection to us is missing."""
        if settling:
            return f"we reach it; it has not connected to us yet, at {self._address}"
        return f"we reach it, and it does not reach us at {self._address}: is our port open?"

    def on_peer_address(self, address: str) -> None:
        """Connect to the new address, if the peer is allowed to redirect us there."""
        if not address:
            return
        try:
            self.connection.request_move(new_address(address, self.connection.listed_address, self.source))
        except InputError as error:
            self._rejections.add(self.peer, "a new address", str(error))

    def close(self) -> None:
        """Close our connection."""
        self.connection.close()


class HubRoute(Route):
    """The route to the hub itself.

    Args:
        connection: our connection to the hub.
    """

    def __init__(
        self, peer: PeerId, incarnation: bytes, hello: bytes, rejections: RejectionLog, connection: HubConnection
    ) -> None:
        super().__init__(peer, incarnation, hello, rejections)
        self.connection = connection
        self._connection_number = 0

    def can_send(self) -> bool:
        """Return whether our connection accepts a message; on a new connection, HELLO or PING is due at once."""
        writable = self.connection.can_send()
        if writable and self._connection_number != self.connection.number:
            self._connection_number = self.connection.number
            self.outbound.expire_timer()
            self.inbound.mark_lost()  # the hub may have been restarted: accept its new process
        return writable

    def send_data(self, datagram: Datagram) -> None:
        """Send by our connection."""
        self.connection.send(HUB_NAME, datagram.encode())

    def send_ack(self, reply_to: bytes, datagram: Datagram) -> bool:  # noqa: ARG002
        """Send by our connection, the only one."""
        self.send_data(datagram)
        return True

    def outbound_problem(self, now: float) -> str:  # noqa: ARG002
        """Return the problem of our connection."""
        return self.connection.problem

    def is_lost(self) -> bool:
        """Return whether our connection is lost."""
        return self.outbound.established and not self.connection.connected

    def close(self) -> None:
        """Close our connection."""
        self.connection.close()


class RelayedRoute(Route):
    """The route to a peer through the hub, encrypted end to end.

    Args:
        hub: our route to the hub.
        channel: the encrypted channel with the peer.

    Attributes:
        incompatibility: the reason if the peer's messages cannot be decrypted, else empty.
        absent: True if the hub reports that the peer is not connected to it.
    """

    def __init__(
        self, peer: PeerId, incarnation: bytes, hello: bytes, rejections: RejectionLog, hub: HubRoute, channel: Channel
    ) -> None:
        super().__init__(peer, incarnation, hello, rejections)
        self.channel = channel
        self.incompatibility = ""
        self.absent = False
        self._hub = hub
        self._process = NO_PROCESS  # the process of the peer that has accepted our link
        self._disturbed_at = -inf  # the time of the last altered, swapped, repeated or missing message

    def can_send(self) -> bool:
        """Return whether the hub accepts a message from us."""
        return self._hub.can_send() and self._hub.outbound.established

    def send_data(self, datagram: Datagram) -> None:
        """Encrypt for the process that accepted our link; HELLO is for any process, and may start a handshake."""
        if datagram.kind is not DatagramKind.HELLO:
            self.send_ack(self._process, datagram)
        elif self._hub.connection.can_send():  # otherwise it is dropped before it gets a sequence number
            self._send(*self.channel.seal_hello(datagram.encode(), self._hub.connection.number))

    def send_ack(self, reply_to: bytes, datagram: Datagram) -> bool:
        """Encrypt for the process that sent the datagram; whether it still runs is not known."""
        connection = self._hub.connection
        sealed = self.channel.seal(datagram.encode(), reply_to, connection.number) if connection.can_send() else None
        if sealed is not None:
            self._send(sealed)
        return True

    def open(self, payload: Buffer) -> tuple[bytes, Buffer] | None:
        """Decrypt a relayed message; return the sending process and the datagram, or None if there is none.

        A message with which the hub or the peer has tampered is dropped and logged. The links send it again.
        """
        self.absent = not payload
        if self.absent:
            return None
        try:
            opened = self.channel.open(payload, self._hub.connection.number)
        except IncompatibleError as error:
            self.incompatibility = str(error)
            self._rejections.add(self.peer, "an incompatible message", str(error))
            return None
        except RelayError as error:
            self._disturbed_at = time.monotonic()
            self._rejections.add(self.peer, error.kind, f"{error}; the hub or {self.peer} has caused it")
            return None
        self.incompatibility = ""
        if opened.losses:
            self._disturbed_at = time.monotonic()
            detail = f"{opened.losses} so far, and it continues; the hub or {self.peer} causes it"
            self._rejections.add(self.peer, "messages", detail, event="missed")
        if opened.answer is not None:
            self._send(opened.answer)
        elif opened.stale:
            self._rejections.add(self.peer, "a stale or repeated message", level=logging.INFO)
        elif opened.content is None:  # our handshake is complete: what was waiting for a session can be sent
            self.outbound.expire_timer()
        return None if opened.content is None else (opened.process, opened.content)

    def on_data(self, datagram: Datagram, reply_to: bytes) -> Buffer | None:
        """Process a datagram of the peer's outbound link; if its process is new, restart our outbound link."""
        if datagram.kind is DatagramKind.HELLO and reply_to != self.inbound.reply_to:
            self.inbound.mark_lost()  # the hub accepts one process at a time, and this one has proved its key
        frame = super().on_data(datagram, reply_to)
        if self.outbound.established and self.inbound.reply_to not in (None, self._process):
            self.outbound.restart()
        return frame

    def on_ack(self, datagram: Datagram, reply_to: bytes) -> None:
        """Process a datagram of the peer's inbound link; the process that accepts our link gets our data."""
        established = self.outbound.established
        super().on_ack(datagram, reply_to)
        if self.outbound.established and not established:
            self._process = reply_to

    def is_lost(self) -> bool:
        """Return whether our connection to the hub is lost, or the peer is not connected to the hub."""
        return self.absent or self._hub.is_lost()

    def status(self, now: float) -> PeerStatus:
        """Return the connection status of the peer, and whether relayed messages were refused or lost lately."""
        status = super().status(now)
        return status if status.problem else replace(status, problem=self._disturbance(now))

    def _disturbance(self, now: float) -> str:
        if now - self._disturbed_at > DISTURBED_SECONDS:
            return ""
        return "messages that the hub relayed from it were altered, repeated or lost, by the hub or by itself"

    def outbound_problem(self, now: float) -> str:
        """Return whether the problem is at the hub or behind it."""
        hub = self._hub.status(now)
        if not hub.connected:
            return f"it can be reached through the hub only, and the hub is not connected: {hub.problem}"
        if self.incompatibility:
            return self.incompatibility
        if self.absent:
            return "it is not connected to the hub"
        if disturbance := self._disturbance(now):
            return disturbance
        return "no answer through the hub: it has just started, or the hub does not relay our messages"

    def inbound_problem(self, settling: bool) -> str:
        """Return that the hub relays messages in one direction only."""
        if settling:
            return "nothing is received from it through the hub yet"
        return "we reach it through the hub, and receive nothing: it sends nothing, or the hub does not relay it"

    def _send(self, *sealed: Buffer) -> None:
        for each in sealed:
            self._hub.connection.send(self.peer.encode(), each)


def send_to(router: Socket, reply_to: bytes, *parts: Buffer) -> bool:
    """Send by a connection that a peer has made; return False if it is lost. If its queue is full, drop the message."""
    try:
        router.send_multipart([reply_to, *parts], zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:  # EHOSTUNREACH: the connection is lost; EAGAIN: the queue is full
        return error.errno != zmq.EHOSTUNREACH
    return True
