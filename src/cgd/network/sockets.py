"""ZeroMQ sockets as we want them: encrypted, bounded, with a heartbeat."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import zmq

from cgd.errors import InputError, TransportError
from cgd.network import link
from cgd.network.gate import DOMAIN, WHY_NOT

HEARTBEAT_MILLISECONDS = 2000
LINGER_MILLISECONDS = 1000
# Messages that wait in a socket: few, because what is under way is in the links' windows.
MOST_MESSAGES = 64

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


def listening_socket(context: Context, secret_key: bytes, listen: str) -> tuple[Socket, Socket]:
    """The socket that peers connect to, and a monitor that tells of failed handshakes.

    Raises:
        TransportError: we cannot listen there.
    """
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = secret_key
    router.zap_domain = DOMAIN
    router.router_mandatory = True  # so that we are told if a connection is gone
    _prepare(router)
    door = router.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    try:
        router.bind(listen)
    except zmq.ZMQError as error:
        in_use = error.errno == zmq.EADDRINUSE
        remedy = "stop what listens there, or listen elsewhere (listen=)" if in_use else "choose another (listen=)"
        raise TransportError(f"cannot listen at {listen}: {error.strerror}; {remedy}") from None
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
    _prepare(dealer)
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED
    for event in WHY_NOT:
        events |= event
    monitor = dealer.get_monitor_socket(events)
    try:
        dealer.connect(contact.address)
    except zmq.ZMQError as error:
        raise InputError(f"the address of {peer}, {contact.address!r}, cannot be used: {error.strerror}") from None
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
    each.ipv6 = True
