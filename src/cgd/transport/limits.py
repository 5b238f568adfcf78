"""Bounds what others can make this process keep: bytes of messages that are not complete, and connections.

ZeroMQ limits the size of one part of a message, and keeps all parts until the last one has come; whatever the number of
parts. It also keeps every connection, whoever made it. So we watch. The system tells how many bytes a connection has
received (TCP_INFO), each message that we take tells its connection (SRCFD), and ZeroMQ reports connections as they come
and go. The rules:

1. A connection whose received bytes exceed those of the messages that we took from it, by more than honest links can
   have under way, is cut.
2. Connections that have not brought a message yet may be anybody's. All of them together may have so many bytes, or the
   largest are cut; and there may be so many of them, or the oldest is cut.
3. A listed participant has one connection with us, and for a moment some more. Those beyond that are cut.

A cut connection is shut down; ZeroMQ then closes it and frees what it kept. Honest participants connect anew.

TCP_INFO with the number of received bytes is there on Linux since version 4.2. Elsewhere rules 2 and 3 hold for the
number of connections only, and a listed participant can fill our memory.
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.secagg.messages import PeerId
    from cgd.transport.auth import RejectionLog
    from cgd.transport.connections import Message

log = logging.getLogger("cgd.transport")

SECONDS_BETWEEN_CHECKS = 0.1
# Beyond what honest links have under way: a window each, and once more what is sent again.
MAX_SURPLUS = 32 << 20
MAX_UNPROVED_BYTES = 64 << 20
MAX_FROM_A_PEER = 8
# Besides one for each participant: all may connect at once.
MAX_UNPROVED = 64
# And no more than a quarter of the descriptors that the process may have, which we raise to so many.
UNPROVED_SHARE = 4
DESCRIPTORS = 1 << 16
# What CURVE and ZMTP add to a part of a message.
OVERHEAD_BYTES = 42
# Heartbeats, and what the line above is wrong by: forgiven when a message was taken and no more than this is left.
FORGIVEN_BYTES = 1 << 16
_RECEIVED = struct.Struct("<Q")
_RECEIVED_OFFSET = 128
_INFO_BYTES = _RECEIVED_OFFSET + _RECEIVED.size
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


@dataclass
class ConnectionUsage:
    """One connection.

    Attributes:
        ends: both ends' addresses, which tell it from another that gets its descriptor later.
        peer: the participant at the other end, once that is proved.
        ours: whether we made it.
        taken: the bytes of the messages that we took.
        forgiven: bytes that are part of no message.
        fresh: whether a message was taken since the last check.
    """

    ends: tuple[Any, Any]
    peer: PeerId | None
    ours: bool
    taken: int = 0
    forgiven: int = 0
    fresh: bool = False


class ConnectionLimits:
    """Watches the connections of one process.

    Args:
        refusals: where it is told what was cut.
        port: where we listen, if we do.

    Attributes:
        members: how many participants may connect with us.
        peers: how many of them may be behind one connection: all, if that is with the hub.
    """

    def __init__(self, rejections: RejectionLog, port: int | None = None) -> None:
        self.port = port
        self.members = self.peers = 1
        self._rejections = rejections
        self._connections: dict[int, ConnectionUsage] = {}
        self._checked = -1.0
        self._share = raise_descriptor_limit() // UNPROVED_SHARE

    def accepted(self, descriptor: int) -> None:
        """Note a connection that somebody made to us."""
        self._add(descriptor, None, lambda own, _: own[1] == self.port)
        unproved = [each for each, connection in self._connections.items() if connection.peer is None]
        if len(unproved) > min(MAX_UNPROVED + self.members, self._share):
            self._cut(unproved[0], "an idle connection", f"it is the oldest of {len(unproved)} without a message")

    def connected(self, descriptor: int, peer: PeerId, address: str) -> None:
        """Note a connection that we made."""
        port = int(address.rpartition(":")[2])
        self._add(descriptor, peer, lambda _, other: other[1] == port)

    def closed(self, descriptor: int) -> None:
        """Forget a connection."""
        self._connections.pop(descriptor, None)

    def took(self, message: Message, peer: PeerId | None) -> None:
        """Note a message that we took; no peer if its key is not listed any more."""
        descriptor = int(message.last.get(zmq.SRCFD))
        if descriptor not in self._connections:
            self._add(descriptor, None, lambda own, _: own[1] == self.port)
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        connection.taken += message.nbytes + OVERHEAD_BYTES * message.parts
        connection.fresh = True
        if connection.peer is None and peer is not None:
            connection.peer = peer
            have = sum(each.peer == peer and not each.ours for each in self._connections.values())
            if have > MAX_FROM_A_PEER:
                self._cut(descriptor, "a further connection", f"it has {have - 1} already")

    def check(self, now: float) -> None:
        """Cut the connections that keep too much; to be called often."""
        if now - self._checked < SECONDS_BETWEEN_CHECKS:
            return
        self._checked = now
        unproved = {}
        for descriptor, connection in list(self._connections.items()):
            found = _look(descriptor)
            if found is None or found[0] != connection.ends:
                del self._connections[descriptor]  # it was closed, and its descriptor may be another's
                continue
            kept = found[1] - connection.taken - connection.forgiven
            if connection.fresh and kept < FORGIVEN_BYTES:
                connection.forgiven += kept
            elif kept > MAX_SURPLUS + 2 * link.WINDOW * self.peers:
                self._cut(descriptor, "an endless message", f"{kept >> 20} MiB have come that are no whole message")
            elif connection.peer is None:
                unproved[descriptor] = kept
            connection.fresh = False
        while sum(unproved.values()) > MAX_UNPROVED_BYTES:
            largest = max(unproved, key=unproved.__getitem__)
            kept = unproved.pop(largest)
            self._cut(largest, "an endless message", f"{kept >> 20} MiB have come before a whole message")

    def _add(self, descriptor: int, peer: PeerId | None, fits: Callable[[Any, Any], bool]) -> None:
        found, known = _look(descriptor), self._connections.pop(descriptor, None)
        if found is None or not fits(*found[0]):
            return
        if known is None or known.ends != found[0]:  # else a message of it came before the report
            known = ConnectionUsage(found[0], peer, peer is not None)
        self._connections[descriptor] = known

    def _cut(self, descriptor: int, what: str, detail: str) -> None:
        connection = self._connections.pop(descriptor)
        self._rejections.add(connection.peer or "a stranger", what, detail)
        # It may be closed by now, and its descriptor another's; that of the copy cannot become another's meanwhile.
        with contextlib.suppress(OSError), _copy(descriptor) as copy:
            if (copy.getsockname(), copy.getpeername()) == connection.ends:
                copy.shutdown(socket.SHUT_RDWR)


def raise_descriptor_limit() -> int:
    """Raise the number of descriptors that this process may have, as far as the system lets us; return it.

    Systems without `resource` have no such limit to raise.
    """
    try:
        import resource
    except ImportError:
        return DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.info("the limit of %d open files stays: %s", soft, error)
        return soft
    return wanted


def _copy(descriptor: int) -> socket.socket:
    """Return a copy of a socket, with a descriptor of its own; an OSError if it is none."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _look(descriptor: int) -> tuple[tuple[Any, Any], int] | None:
    """Return both ends of a TCP connection, and how many bytes it has received (0 if the system does not tell)."""
    try:
        # Neither a copy nor owned by this object, which is made for one question.
        each = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
    except OSError:
        return None
    try:
        ends = each.getsockname(), each.getpeername()
        if _TCP_INFO is None:
            return (ends, 0) if isinstance(ends[0], tuple) else None
        info = each.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        return ends, _RECEIVED.unpack_from(info, _RECEIVED_OFFSET)[0] if len(info) == _INFO_BYTES else 0
    except OSError:
        return None
    finally:
        each.detach()
