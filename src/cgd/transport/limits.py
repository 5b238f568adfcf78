"""Limits on what other processes can make this one store: bytes of incomplete messages, and connections.

ZeroMQ limits the size of one part of a message, but keeps all parts until the last one has arrived, whatever their
number. It also keeps every connection. So the connections are watched here: the operating system reports the bytes that
a connection has received (TCP_INFO), each message has the descriptor of its connection (SRCFD), and ZeroMQ reports when
connections are opened and closed. The rules:

1. A connection is closed if its received bytes exceed those of the messages read from it by more than honest links can
   have in flight.
2. A connection without a complete message is not authenticated. All these connections together may have received a
   limited number of bytes, or the largest are closed; and their number is limited, or the oldest is closed.
3. A listed participant has one connection with us, and briefly a few more. Further ones are closed.

To close a connection, its socket is shut down; ZeroMQ then closes it and frees its buffers. Honest participants
reconnect.

Linux reports the received bytes in TCP_INFO since version 4.2. On other systems rules 2 and 3 limit the number of
connections only, and a listed participant can fill our memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from cgd.transport import link
from cgd.transport.auth import UNKNOWN_CLIENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.secagg.messages import PeerId
    from cgd.transport.auth import RejectionLog
    from cgd.transport.connections import Message

log = logging.getLogger("cgd.transport")

SECONDS_BETWEEN_CHECKS = 0.1
# In addition to what honest links have in flight: a window each, and the same again for retransmissions.
MAX_INCOMPLETE_BYTES = 32 << 20
MAX_UNAUTHENTICATED_BYTES = 64 << 20
MAX_CONNECTIONS_PER_PEER = 8
# In addition to one for each participant, because all may connect at the same time.
MAX_UNAUTHENTICATED_CONNECTIONS = 64
# And at most this fraction (a quarter) of the descriptors of the process, whose limit is raised to `MAX_DESCRIPTORS`.
UNAUTHENTICATED_FRACTION = 4
MAX_DESCRIPTORS = 1 << 16
# The bytes that CURVE and ZMTP add to each part of a message.
PART_OVERHEAD_BYTES = 42
# Heartbeats, and the error of the line above: written off when a message was read and no more than this remains.
MAX_OVERHEAD_BYTES = 1 << 16
_RECEIVED = struct.Struct("<Q")
_RECEIVED_OFFSET = 128
_INFO_BYTES = _RECEIVED_OFFSET + _RECEIVED.size
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


@dataclass
class ConnectionUsage:
    """The bytes of one connection.

    Attributes:
        addresses: the addresses of both ends; they identify it if its descriptor is used again.
        peer: the participant at the other end; None before it is authenticated.
        ours: True if this process made the connection.
        message_bytes: the bytes of the messages that were read from it.
        overhead_bytes: the received bytes that are not part of a message.
        active: True if a message was read since the last check.
    """

    addresses: tuple[Any, Any]
    peer: PeerId | None
    ours: bool
    message_bytes: int = 0
    overhead_bytes: int = 0
    active: bool = False


class ConnectionLimits:
    """Watches the connections of one process.

    Args:
        rejections: logs the closed connections.
        port: the port on which this process listens, if it does.

    Attributes:
        members: the number of participants that may connect to this process.
        peers: the number of them that may share one connection: all, if it is with the hub.
    """

    def __init__(self, rejections: RejectionLog, port: int | None = None) -> None:
        self.port = port
        self.members = self.peers = 1
        self._rejections = rejections
        self._connections: dict[int, ConnectionUsage] = {}
        self._last_check = -1.0
        self._max_unauthenticated = raise_descriptor_limit() // UNAUTHENTICATED_FRACTION

    def on_accepted(self, descriptor: int) -> None:
        """Record a connection that a client has made to us."""
        self._add(descriptor, None, lambda own, _: own[1] == self.port)
        unauthenticated = [each for each, connection in self._connections.items() if connection.peer is None]
        limit = min(MAX_UNAUTHENTICATED_CONNECTIONS + self.members, self._max_unauthenticated)
        if len(unauthenticated) > limit:
            detail = f"it is the oldest of {len(unauthenticated)} without a message"
            self._close(unauthenticated[0], "an idle connection", detail)

    def on_connected(self, descriptor: int, peer: PeerId, address: str) -> None:
        """Record a connection that we have made."""
        port = int(address.rpartition(":")[2])
        self._add(descriptor, peer, lambda _, other: other[1] == port)

    def on_closed(self, descriptor: int) -> None:
        """Remove a closed connection."""
        self._connections.pop(descriptor, None)

    def on_message(self, message: Message, peer: PeerId | None) -> None:
        """Record a message that was read; `peer` is None if its key is no longer listed."""
        descriptor = int(message.last.get(zmq.SRCFD))
        if descriptor not in self._connections:
            self._add(descriptor, None, lambda own, _: own[1] == self.port)
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        connection.message_bytes += message.nbytes + PART_OVERHEAD_BYTES * message.parts
        connection.active = True
        if connection.peer is None and peer is not None:
            connection.peer = peer
            count = sum(each.peer == peer and not each.ours for each in self._connections.values())
            if count > MAX_CONNECTIONS_PER_PEER:
                self._close(descriptor, "a further connection", f"it has {count - 1} already")

    def check(self, now: float) -> None:
        """Close the connections that exceed a limit; to be called often."""
        if now - self._last_check < SECONDS_BETWEEN_CHECKS:
            return
        self._last_check = now
        unauthenticated = {}
        for descriptor, connection in list(self._connections.items()):
            info = _tcp_info(descriptor)
            if info is None or info[0] != connection.addresses:
                del self._connections[descriptor]  # it was closed; its descriptor may belong to another connection
                continue
            incomplete = info[1] - connection.message_bytes - connection.overhead_bytes
            if connection.active and incomplete < MAX_OVERHEAD_BYTES:
                connection.overhead_bytes += incomplete
            elif incomplete > MAX_INCOMPLETE_BYTES + 2 * link.WINDOW_BYTES * self.peers:
                detail = f"{incomplete >> 20} MiB were received that are not a complete message"
                self._close(descriptor, "an incomplete message", detail)
            elif connection.peer is None:
                unauthenticated[descriptor] = incomplete
            connection.active = False
        while sum(unauthenticated.values()) > MAX_UNAUTHENTICATED_BYTES:
            largest = max(unauthenticated, key=unauthenticated.__getitem__)
            detail = f"{unauthenticated.pop(largest) >> 20} MiB were received before a complete message"
            self._close(largest, "an incomplete message", detail)

    def _add(self, descriptor: int, peer: PeerId | None, matches: Callable[[Any, Any], bool]) -> None:
        info, known = _tcp_info(descriptor), self._connections.pop(descriptor, None)
        if info is None or not matches(*info[0]):
            return
        if known is None or known.addresses != info[0]:  # else a message arrived before this report
            known = ConnectionUsage(info[0], peer, peer is not None)
        self._connections[descriptor] = known

    def _close(self, descriptor: int, kind: str, detail: str) -> None:
        connection = self._connections.pop(descriptor)
        self._rejections.add(connection.peer or UNKNOWN_CLIENT, kind, detail)
        # The descriptor may have been closed and used again by now. That of a duplicate cannot be reused meanwhile.
        with contextlib.suppress(OSError), _duplicate(descriptor) as duplicate:
            if (duplicate.getsockname(), duplicate.getpeername()) == connection.addresses:
                duplicate.shutdown(socket.SHUT_RDWR)


def raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors of this process as far as the system allows; return it.

    Systems without `resource` have no such limit.
    """
    try:
        import resource
    except ImportError:
        return MAX_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.info("the limit of %d open files stays: %s", soft, error)
        return soft
    return wanted


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket with a duplicate of a descriptor.

    Raises:
        OSError: the descriptor is not a socket.
    """
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _tcp_info(descriptor: int) -> tuple[tuple[Any, Any], int] | None:
    """Return both addresses of a TCP connection and its number of received bytes (0 if the system does not report it).

    Return None if the descriptor is not a connected TCP socket.
    """
    try:
        # The object neither duplicates nor owns the descriptor; it is used for this query only.
        each = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
    except OSError:
        return None
    try:
        addresses = each.getsockname(), each.getpeername()
        if _TCP_INFO is None:
            return (addresses, 0) if isinstance(addresses[0], tuple) else None
        info = each.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        return addresses, _RECEIVED.unpack_from(info, _RECEIVED_OFFSET)[0] if len(info) == _INFO_BYTES else 0
    except OSError:
        return None
    finally:
        each.detach()
