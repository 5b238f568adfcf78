"""ZeroMQ sockets as we want them: encrypted, bounded, with a heartbeat."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from cgd.errors import InputError, TransportError
from cgd.transport import link
from cgd.transport.auth import BROKEN, DOMAIN, NO_HANDSHAKE, WHY_NOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.transport.limits import ConnectionLimits

log = logging.getLogger("cgd.transport")

HEARTBEAT_MILLISECONDS = 2000
LINGER_MILLISECONDS = 1000
HANDSHAKE_MILLISECONDS = 10000
# Messages that wait in a socket: few, because what is under way is in the links' windows.
MAX_QUEUED_MESSAGES = 64
_ROOM = int(zmq.POLLOUT)  # a plain number: the enumeration is slow, and this is asked often
REDIAL_SECONDS = 1.0
RESOLVE_SECONDS = 3.0
MOVE_SECONDS = 5.0
LISTEN = re.compile(r"tcp://.+:[0-9]+")

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True)
class Contact:
    """Where a participant is found and how it is known.

    Attributes:
        address: such as `tcp://hospital-a.example:7001`; empty if it only dials out, to the hub.
        public_key: its CURVE key, 40 characters of Z85.
    """

    address: str
    public_key: bytes


class Connection:
    """A connection that we make, and how it stands with it.

    Args:
        context: of the sockets.
        poller: told when something comes by it, or is reported of it.
        peer: to whom.
        contact: where it is found.
        own: our public and our secret key.
        watch: told of the connection.
        once: do not connect anew if the connection breaks.
    """

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        peer: str,
        contact: Contact,
        own: tuple[bytes, bytes],
        limits: ConnectionLimits,
        *,
        once: bool = False,
    ) -> None:
        self.peer = peer
        self.listed = self.address = contact.address
        self.problem = "not reached yet"
        self.connected = False
        self._poller = poller
        self._limits = limits
        self._wanted: str | None = None  # where the peer is to be found from now on
        self._moved = -inf  # when it was followed
        self._make = partial(calling_socket, context, peer, contact, *own, once=once)
        self._event: zmq.Event | None = None  # the last one that ZeroMQ reported
        self._redial = inf  # when to connect anew, unless ZeroMQ does
        self.open()

    def open(self) -> None:
        """Make the socket."""
        self.dealer, self.monitor = self._make()
        for each in (self.dealer, self.monitor):
            self._poller.register(each, zmq.POLLIN)
        self._full = False

    def close(self) -> None:
        """Let go of it."""
        for each in (self.dealer, self.monitor):
            self._poller.unregister(each)
        self.dealer.disable_monitor()
        self.monitor.close(linger=0)
        self.dealer.close(linger=0)

    def has_room(self) -> bool:
        """Whether something can be sent; if not, the poller tells when it can."""
        room = bool(int(self.dealer.getsockopt(zmq.EVENTS)) & _ROOM)
        if room == self._full:
            self._full = not room
            self._poller.register(self.dealer, zmq.POLLIN if room else zmq.POLLIN | zmq.POLLOUT)
        return room

    def send(self, *parts: bytes) -> None:
        """Send a message, or lose it: the link sends it again."""
        with contextlib.suppress(zmq.Again):
            self.dealer.send_multipart(parts, zmq.NOBLOCK)

    def take_event(self, now: float) -> None:
        """Take in what ZeroMQ reports of our connection."""
        message = recv_monitor_message(self.monitor)
        event, descriptor = zmq.Event(message["event"]), int(message["value"])
        if event == zmq.EVENT_CONNECTED:
            self._limits.connected(descriptor, self.peer, self.address)
            return
        if event == zmq.EVENT_DISCONNECTED:
            self._limits.closed(descriptor)
        self.note_event(event, now)

    def note_event(self, event: zmq.Event, now: float) -> None:
        """Conclude how it stands with our connection."""
        before, self._event, self._redial = self._event, event, inf
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.problem = "connected, and not yet let in"
        elif event == zmq.EVENT_DISCONNECTED:
            # ZeroMQ connects anew, and reports that next; not if the other side broke the protocol or refused our key,
            # but it may know better in a while.
            self._redial = now + REDIAL_SECONDS
            if self.connected:
                self.problem = BROKEN
            elif before is None or before == zmq.EVENT_CONNECT_RETRIED:  # else the reason came before
                self.problem = f"{NO_HANDSHAKE} ({self.address})"
            self.connected = False
        elif event != zmq.EVENT_CONNECT_RETRIED or before in (None, event):  # else it is about a connection that ended
            self.problem = f"{WHY_NOT[event]} ({self.address})"

    def needs_care(self, now: float) -> bool:
        """Return whether to ask for room, or to connect anew if that is due."""
        return self._full or self._wanted is not None or now > self._redial

    def redial_if_due(self, now: float) -> None:
        """Connect anew if ZeroMQ has given up, or the peer has moved."""
        if self._wanted is not None and now - self._moved > MOVE_SECONDS:
            self._move(self._wanted)
            self._wanted, self._moved = None, now
        elif now > self._redial:
            self._redial, self._event = inf, None
            with contextlib.suppress(zmq.ZMQError):
                self.dealer.disconnect(self.address)
            self.dealer.connect(self.address)

    def follow(self, address: str) -> None:
        """Connect there as soon as the last move is long enough ago: a peer must not send us from port to port."""
        self._wanted = None if address == self.address else address

    def _move(self, address: str) -> None:
        log.info("%s is at %s now", self.peer, address, extra={"event": "moved", "peer": self.peer})
        try:
            self.dealer.connect(address)
            self.dealer.disconnect(self.address)
        except zmq.ZMQError as error:
            self.problem = f"it says that it is at {address!r}: {_reason(error)}"
            return
        self.address = address


class HubConnection(Connection):
    """Our connection with the hub: each time it breaks it is made anew, with another socket and the next number.

    So whatever comes by a connection, or goes by it, is in order. A socket that connects anew by itself may hand out
    what is left of the connection before behind the first messages of the next.

    Args:
        numbers: where the numbers come from; none comes twice in the life of a process.
    """

    connection = 0

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        peer: str,
        contact: Contact,
        own: tuple[bytes, bytes],
        limits: ConnectionLimits,
        numbers: Iterator[int],
    ) -> None:
        self._numbers = numbers
        super().__init__(context, poller, peer, contact, own, limits, once=True)

    def open(self) -> None:
        """Make the next connection."""
        super().open()
        self.connection = next(self._numbers)
        self.connected, self._event = False, None
        self._redial = time.monotonic() + RESOLVE_SECONDS  # nothing is reported of a host that is not known

    def note_event(self, event: zmq.Event, now: float) -> None:
        """Conclude how it stands with our connection."""
        before, self._event = self._event, event
        self._redial = inf
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.problem = "connected, and not yet let in"
        elif event in WHY_NOT:
            self.problem = f"{WHY_NOT[event]} ({self.address})"
            self._redial = now + REDIAL_SECONDS
        elif event == zmq.EVENT_DISCONNECTED:
            if self.connected:
                self.problem = BROKEN
            elif before not in WHY_NOT:
                self.problem = f"{NO_HANDSHAKE} ({self.address})"
            self._redial = now + (REDIAL_SECONDS / 4 if self.connected else REDIAL_SECONDS)
            self.connected = False

    def redial_if_due(self, now: float) -> None:
        """Connect anew if the connection is broken, or was not made."""
        if now <= self._redial:
            return
        if self._event is None:
            self.problem = f"{WHY_NOT[zmq.EVENT_CONNECT_RETRIED]} ({self.address})"
        self.close()
        self.open()


def listening_socket(
    context: Context, secret_key: bytes, listen: str, most: int = MAX_QUEUED_MESSAGES
) -> tuple[Socket, Socket]:
    """The socket that peers connect to, and a monitor that tells who comes and goes.

    Args:
        context: of the sockets.
        secret_key: our CURVE key.
        listen: where to bind.
        most: how many messages may wait for one peer.

    Raises:
        InputError: that is no address.
        TransportError: we cannot listen there.
    """
    if not LISTEN.fullmatch(listen):
        raise InputError(f"listen is {listen!r}; write tcp://HOST:PORT, such as tcp://0.0.0.0:7001")
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = secret_key
    router.zap_domain = DOMAIN
    router.router_mandatory = True  # so that we are told if a connection is gone
    _prepare(router)
    router.sndhwm = max(most, MAX_QUEUED_MESSAGES)
    door = router.get_monitor_socket(
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_DISCONNECTED
    )
    try:
        router.bind(listen)
    except zmq.ZMQError as error:
        in_use = error.errno == zmq.EADDRINUSE
        remedy = (
            "stop what listens there (it may be this participant itself), or listen elsewhere (listen=, --listen)"
            if in_use
            else "choose another (listen=, --listen)"
        )
        raise TransportError(f"cannot listen at {listen}: {_reason(error)}; {remedy}") from None
    return router, door


def calling_socket(
    context: Context, peer: str, contact: Contact, public_key: bytes, secret_key: bytes, *, once: bool = False
) -> tuple[Socket, Socket]:
    """A socket that connects to a peer, and a monitor that tells how it goes; `once`: not anew if that breaks.

    Raises:
        InputError: the address cannot be used.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey = contact.public_key
    dealer.curve_publickey = public_key
    dealer.curve_secretkey = secret_key
    dealer.immediate = True  # a message waits in its link, not in a socket that may lose it
    dealer.reconnect_ivl = -1 if once else 100
    dealer.reconnect_ivl_max = 0 if once else 1000
    dealer.connect_timeout = HANDSHAKE_MILLISECONDS
    _prepare(dealer)
    events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    if once:
        events |= zmq.EVENT_CONNECT_DELAYED
    for event in WHY_NOT:
        events |= event
    monitor = dealer.get_monitor_socket(events)
    try:
        dealer.connect(contact.address)
    except zmq.ZMQError as error:
        raise InputError(f"the address of {peer}, {contact.address!r}, cannot be used: {_reason(error)}") from None
    return dealer, monitor


@dataclass(frozen=True)
class Message:
    """What is left of a message that was read to its end; the parts between the first and the last are not kept.

    Attributes:
        first: its first part.
        last: its last part.
        parts: how many it has.
        nbytes: how many bytes they have.
    """

    first: zmq.Frame
    last: zmq.Frame
    parts: int
    nbytes: int


def read_message(each: Socket, flags: int = 0) -> Message:
    """Read a message, or what is left of it.

    Raises:
        zmq.Again: there is none.
    """
    first = last = each.recv(flags, copy=False)
    parts, nbytes = 1, len(first)
    while last.more:  # one by one: there may be millions
        last = each.recv(copy=False)
        parts += 1
        nbytes += len(last)
    return Message(first, last, parts, nbytes)


def port_of(router: Socket) -> int:
    """Return the port at which a socket listens."""
    return int(str(router.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])


def _prepare(each: Socket) -> None:
    each.linger = LINGER_MILLISECONDS
    each.maxmsgsize = 2 * link.MAX_FRAME_BYTES
    each.rcvhwm = each.sndhwm = MAX_QUEUED_MESSAGES
    each.heartbeat_ivl = HEARTBEAT_MILLISECONDS
    each.heartbeat_timeout = 3 * HEARTBEAT_MILLISECONDS
    each.handshake_ivl = HANDSHAKE_MILLISECONDS
    each.ipv6 = True


def _reason(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)  # its own text would name the address a second time
