"""ZeroMQ sockets with encryption, bounded queues and heartbeats, and the connections made with them."""

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
from cgd.transport.auth import CONNECT_FAILURES, CONNECTION_LOST, DOMAIN, NO_REPLY, NOT_CGD
from cgd.transport.base import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.secagg.messages import Buffer
    from cgd.transport.limits import ConnectionLimits

log = logging.getLogger("cgd.transport")

HEARTBEAT_MILLISECONDS = 2000
LINGER_MILLISECONDS = 1000
HANDSHAKE_MILLISECONDS = 10000
# The queue of a socket is short, because the links' windows already hold the frames in flight.
MAX_QUEUED_MESSAGES = 64
_WRITABLE = int(zmq.POLLOUT)  # a plain number: the enumeration is slow, and this is used for every message
RECONNECT_SECONDS = 1.0
RESOLVE_SECONDS = 3.0
MIN_SECONDS_BETWEEN_MOVES = 5.0
LISTEN = re.compile(r"tcp://.+:[0-9]+")

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True)
class Contact:
    """The address and the public key of a participant.

    Attributes:
        address: such as `tcp://hospital-a.example:7001`; empty if it only makes outgoing connections, to the hub.
        public_key: its CURVE key, 40 characters of Z85.
    """

    address: str
    public_key: bytes


class Connection:
    """A connection that this process makes, and its state.

    Args:
        context: the context of the sockets.
        poller: polls the socket and its monitor.
        peer: the name of the peer.
        contact: the address and key of the peer.
        own: our public and our secret key.
        limits: counts the connection.
        single_use: do not reconnect if the connection is lost.

    Attributes:
        listed_address: the address of the peer in the federation file.
        address: the current address of the peer.
        connected: True after a successful handshake.
        problem: the reason if there is no connection.
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
        single_use: bool = False,
    ) -> None:
        self.peer = peer
        self.listed_address = self.address = contact.address
        self.problem = "not reached yet"
        self.connected = False
        self._poller = poller
        self._limits = limits
        self._requested_address: str | None = None
        self._last_move = -inf
        self._make = partial(connecting_socket, context, peer, contact, *own, single_use=single_use)
        self._event: zmq.Event | None = None  # the last one that ZeroMQ reported
        self._reconnect_at = inf  # unless ZeroMQ reconnects by itself
        self._attempted_at = inf  # when ZeroMQ began the last attempt to connect
        self.open()

    def open(self) -> None:
        """Create the socket and its monitor."""
        self.dealer, self.monitor = self._make()
        for each in (self.dealer, self.monitor):
            self._poller.register(each, zmq.POLLIN)
        self._full = False

    def close(self) -> None:
        """Close the socket and its monitor."""
        for each in (self.dealer, self.monitor):
            self._poller.unregister(each)
        self.dealer.disable_monitor()
        self.monitor.close(linger=0)
        self.dealer.close(linger=0)

    def can_send(self) -> bool:
        """Return whether the socket accepts a message; if not, the poller reports when it does."""
        writable = bool(int(self.dealer.getsockopt(zmq.EVENTS)) & _WRITABLE)
        if writable == self._full:
            self._full = not writable
            self._poller.register(self.dealer, zmq.POLLIN if writable else zmq.POLLIN | zmq.POLLOUT)
        return writable

    def send(self, *parts: Buffer) -> None:
        """Send a message, or drop it if the queue is full: the link retransmits it."""
        with contextlib.suppress(zmq.Again):
            self.dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def read_event(self, now: float) -> None:
        """Read and process an event of the monitor."""
        message = recv_monitor_message(self.monitor)
        event, descriptor = zmq.Event(message["event"]), int(message["value"])
        if event == zmq.EVENT_CONNECTED:
            self._limits.on_connected(descriptor, self.peer, self.address)
            return
        if event == zmq.EVENT_CONNECT_DELAYED:
            self._attempted_at = now
        if event == zmq.EVENT_DISCONNECTED:
            self._limits.on_closed(descriptor)
        self.on_event(event, now)

    def on_event(self, event: zmq.Event, now: float) -> None:
        """Update the state of the connection."""
        if event == zmq.EVENT_CONNECT_DELAYED:
            return
        previous, self._event, self._reconnect_at = self._event, event, inf
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.problem = "connected, and not yet accepted"
        elif event == zmq.EVENT_DISCONNECTED:
            # ZeroMQ reconnects, and reports that next. It does not after a protocol error or a rejected key, but the
            # other side may have been corrected since.
            self._reconnect_at = now + RECONNECT_SECONDS
            if self.connected:
                self.problem = CONNECTION_LOST
            elif previous is None or previous == zmq.EVENT_CONNECT_RETRIED:  # else the reason was reported before
                self.problem = f"{NOT_CGD} ({self.address})"
            self.connected = False
        elif event != zmq.EVENT_CONNECT_RETRIED or previous in (None, event):  # else it concerns an ended connection
            self.problem = self._failure(event, now)

    def _failure(self, event: zmq.Event, now: float) -> str:
        dropped = event == zmq.EVENT_CLOSED and now - self._attempted_at > 0.9 * HANDSHAKE_MILLISECONDS / 1000
        return f"{NO_REPLY if dropped else CONNECT_FAILURES[event]} ({self.address})"

    def needs_attention(self, now: float) -> bool:
        """Return whether `can_send` or `reconnect_if_due` has to be called."""
        return self._full or self._requested_address is not None or now > self._reconnect_at

    def reconnect_if_due(self, now: float) -> None:
        """Reconnect if ZeroMQ has given up, or if the peer has moved."""
        if self._requested_address is not None and now - self._last_move > MIN_SECONDS_BETWEEN_MOVES:
            self._move(self._requested_address)
            self._requested_address, self._last_move = None, now
        elif now > self._reconnect_at:
            self._reconnect_at, self._event = inf, None
            with contextlib.suppress(zmq.ZMQError):
                self.dealer.disconnect(self.address)
            self.dealer.connect(self.address)

    def request_move(self, address: str) -> None:
        """Connect to another address after `MIN_SECONDS_BETWEEN_MOVES`: a peer must not make us scan ports."""
        self._requested_address = None if address == self.address else address

    def _move(self, address: str) -> None:
        log.info("%s is at %s now", self.peer, address, extra={"event": "moved", "peer": self.peer})
        try:
            self.dealer.connect(address)
            self.dealer.disconnect(self.address)
        except zmq.ZMQError as error:
            self.problem = f"it reports the address {address!r}: {_reason(error)}"
            return
        self.address = address


class HubConnection(Connection):
    """Our connection to the hub; each reconnection has a new socket and the next number.

    So the messages of one connection number are in order. A socket that reconnects by itself may deliver remaining
    messages of the old connection after the first messages of the new one.

    Args:
        numbers: the source of the numbers; each is unique in this process.

    Attributes:
        number: the number of the current connection.
    """

    number = 0

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
        super().__init__(context, poller, peer, contact, own, limits, single_use=True)

    def open(self) -> None:
        """Make the next connection."""
        super().open()
        self.number = next(self._numbers)
        self.connected, self._event = False, None
        self._reconnect_at = time.monotonic() + RESOLVE_SECONDS  # ZeroMQ reports nothing about an unknown host

    def on_event(self, event: zmq.Event, now: float) -> None:
        """Update the state of the connection."""
        previous, self._event, self._reconnect_at = self._event, event, inf
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.problem = "connected, and not yet accepted"
        elif event in CONNECT_FAILURES:
            self.problem = self._failure(event, now)
            self._reconnect_at = now + RECONNECT_SECONDS
        elif event == zmq.EVENT_DISCONNECTED:
            if self.connected:
                self.problem = CONNECTION_LOST
            elif previous not in CONNECT_FAILURES:
                self.problem = f"{NOT_CGD} ({self.address})"
            self._reconnect_at = now + (RECONNECT_SECONDS / 4 if self.connected else RECONNECT_SECONDS)
            self.connected = False

    def reconnect_if_due(self, now: float) -> None:
        """Reconnect if the connection was lost, or could not be made."""
        if now <= self._reconnect_at:
            return
        if self._event is None:
            self.problem = self._failure(zmq.EVENT_CONNECT_RETRIED, now)
        self.close()
        self.open()


def listening_socket(
    context: Context, secret_key: bytes, listen: str, max_queued: int = MAX_QUEUED_MESSAGES
) -> tuple[Socket, Socket]:
    """Return a socket that accepts connections, and a monitor that reports them.

    Args:
        context: the context of the sockets.
        secret_key: our CURVE key.
        listen: the address to bind.
        max_queued: the size of the send queue for each peer.

    Raises:
        InputError: `listen` is not an address.
        TransportError: the address cannot be bound.
    """
    if not LISTEN.fullmatch(listen):
        raise InputError(f"listen is {listen!r}; write tcp://HOST:PORT, such as tcp://0.0.0.0:7001")
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = secret_key
    router.zap_domain = DOMAIN
    router.router_mandatory = True  # raise EHOSTUNREACH if a connection is lost
    _prepare(router)
    router.sndhwm = max(max_queued, MAX_QUEUED_MESSAGES)
    monitor = router.get_monitor_socket(
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
    return router, monitor


def connecting_socket(
    context: Context, peer: str, contact: Contact, public_key: bytes, secret_key: bytes, *, single_use: bool = False
) -> tuple[Socket, Socket]:
    """Return a socket that connects to a peer, and its monitor; a `single_use` socket does not reconnect.

    Raises:
        InputError: the address cannot be used.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey = contact.public_key
    dealer.curve_publickey = public_key
    dealer.curve_secretkey = secret_key
    dealer.immediate = True  # a message waits in its link, not in the queue of a socket without a connection
    dealer.reconnect_ivl = -1 if single_use else 100
    dealer.reconnect_ivl_max = 0 if single_use else 1000
    dealer.connect_timeout = HANDSHAKE_MILLISECONDS
    _prepare(dealer)
    events = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    for event in CONNECT_FAILURES:
        events |= event
    monitor = dealer.get_monitor_socket(events)
    try:
        dealer.connect(contact.address)
    except zmq.ZMQError as error:
        raise InputError(f"the address of {peer}, {contact.address!r}, cannot be used: {_reason(error)}") from None
    return dealer, monitor


@dataclass(frozen=True)
class Message:
    """A multipart message; the parts between the first and the last are not kept.

    Attributes:
        first: the first part.
        last: the last part.
        parts: the number of parts.
        nbytes: the number of bytes of all parts.
    """

    first: zmq.Frame
    last: zmq.Frame
    parts: int
    nbytes: int


def read_message(each: Socket, flags: int = 0) -> Message:
    """Read a message, or the rest of one whose first parts were read.

    Raises:
        zmq.Again: there is none.
    """
    first = last = each.recv(flags, copy=False)
    parts, nbytes = 1, len(first)
    while last.more:  # one by one: a hostile message may have millions
        last = each.recv(copy=False)
        parts += 1
        nbytes += len(last)
    return Message(first, last, parts, nbytes)


def port_of(router: Socket) -> int:
    """Return the port that a socket is bound to."""
    return int(str(router.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])


def _prepare(each: Socket) -> None:
    each.linger = LINGER_MILLISECONDS
    each.maxmsgsize = 2 * MAX_FRAME_BYTES
    each.rcvhwm = each.sndhwm = MAX_QUEUED_MESSAGES
    each.heartbeat_ivl = HEARTBEAT_MILLISECONDS
    each.heartbeat_timeout = 3 * HEARTBEAT_MILLISECONDS
    each.handshake_ivl = HANDSHAKE_MILLISECONDS
    each.ipv6 = True


def _reason(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)  # the text of the error itself would repeat the address
