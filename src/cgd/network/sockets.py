"""ZeroMQ sockets as we want them: encrypted, bounded, with a heartbeat."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from cgd.errors import InputError, TransportError
from cgd.network import link
from cgd.network.gate import BROKEN, DOMAIN, NO_HANDSHAKE, WHY_NOT

if TYPE_CHECKING:
    from cgd.network.link import Incoming, Outgoing

HEARTBEAT_MILLISECONDS = 2000
LINGER_MILLISECONDS = 1000
HANDSHAKE_MILLISECONDS = 10000
# Messages that wait in a socket: few, because what is under way is in the links' windows.
MOST_MESSAGES = 64
REDIAL_SECONDS = 1.0
LISTEN = re.compile(r"tcp://.+:[0-9]+")

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True)
class Contact:
    """Where a participant is found and how it is known.

    Attributes:
        address: such as `tcp://hospital-a.example:7001`.
        public_key: its CURVE key, 40 characters of Z85.
    """

    address: str
    public_key: bytes


@dataclass
class Way:
    """Both directions to one peer."""

    dealer: Socket
    monitor: Socket
    out: Outgoing
    into: Incoming
    address: str
    trouble: str = "not reached yet"
    connected: bool = False
    event: zmq.Event | None = None  # the last one that ZeroMQ reported
    redial: float = inf  # when to connect anew, unless ZeroMQ does

    def note_event(self, now: float) -> None:
        """Take in what ZeroMQ reports of our connection."""
        event = zmq.Event(recv_monitor_message(self.monitor)["event"])
        before, self.event, self.redial = self.event, event, inf
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self.trouble = "connected, and not yet let in"
        elif event == zmq.EVENT_DISCONNECTED:
            # ZeroMQ connects anew, and reports that next; not if the other side broke the protocol or refused our key,
            # but it may know better in a while.
            self.redial = now + REDIAL_SECONDS
            if self.connected:
                self.trouble = BROKEN
            elif before is None or before == zmq.EVENT_CONNECT_RETRIED:  # else the reason came before
                self.trouble = f"{NO_HANDSHAKE} ({self.address})"
            self.connected = False
        elif event != zmq.EVENT_CONNECT_RETRIED or before in (None, event):  # else it is about a connection that ended
            self.trouble = f"{WHY_NOT[event]} ({self.address})"

    def redial_if_due(self, now: float) -> None:
        """Connect anew if ZeroMQ has given up."""
        if now > self.redial:
            self.redial, self.event = inf, None
            with contextlib.suppress(zmq.ZMQError):
                self.dealer.disconnect(self.address)
            self.dealer.connect(self.address)

    def follow(self, address: str) -> None:
        """The peer is to be found there now."""
        try:
            self.dealer.connect(address)
            self.dealer.disconnect(self.address)
        except zmq.ZMQError as error:
            self.trouble = f"it says that it is at {address!r}: {_reason(error)}"
            return
        self.address = address


def listening_socket(context: Context, secret_key: bytes, listen: str) -> tuple[Socket, Socket]:
    """The socket that peers connect to, and a monitor that tells who comes and goes.

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
    context: Context, peer: str, contact: Contact, public_key: bytes, secret_key: bytes
) -> tuple[Socket, Socket]:
    """A socket that connects to a peer, and a monitor that tells how it goes.

    Raises:
        InputError: the address cannot be used.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey = contact.public_key
    dealer.curve_publickey = public_key
    dealer.curve_secretkey = secret_key
    dealer.immediate = True  # a message waits in its link, not in a socket that may lose it
    dealer.reconnect_ivl = 100
    dealer.reconnect_ivl_max = 1000
    dealer.connect_timeout = HANDSHAKE_MILLISECONDS
    _prepare(dealer)
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    for event in WHY_NOT:
        events |= event
    monitor = dealer.get_monitor_socket(events)
    try:
        dealer.connect(contact.address)
    except zmq.ZMQError as error:
        raise InputError(f"the address of {peer}, {contact.address!r}, cannot be used: {_reason(error)}") from None
    return dealer, monitor


def listening_address(address: str) -> str:
    """Where to bind for an address that others connect to: this machine if it is a loopback, else all interfaces.

    Examples:
        >>> listening_address("tcp://hospital-a.example:7001")
        'tcp://*:7001'
        >>> listening_address("tcp://127.0.0.1:7001")
        'tcp://127.0.0.1:7001'
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return address.replace("localhost", "127.0.0.1") if loopback else f"tcp://*:{port}"


def _prepare(each: Socket) -> None:
    each.linger = LINGER_MILLISECONDS
    each.maxmsgsize = 2 * link.LONGEST_FRAME
    each.rcvhwm = each.sndhwm = MOST_MESSAGES
    each.heartbeat_ivl = HEARTBEAT_MILLISECONDS
    each.heartbeat_timeout = 3 * HEARTBEAT_MILLISECONDS
    each.handshake_ivl = HANDSHAKE_MILLISECONDS
    each.ipv6 = True


def _reason(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)  # its own text would name the address a second time
