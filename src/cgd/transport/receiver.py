"""`Receiver`: reads the sockets of a transport, and passes the messages to the routes.

If cgd fails on a message, only that message is dropped; the next one is read.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import zmq

from cgd.secagg.messages import HUB
from cgd.transport import link
from cgd.transport.auth import FORMER_PARTICIPANT
from cgd.transport.connections import read_message
from cgd.transport.link import Datagram, DatagramError, DatagramKind
from cgd.transport.routes import HUB_NAME, DirectRoute, HubRoute, RelayedRoute, send_to

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Mapping

    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.auth import RejectionLog, ZapAuthenticator
    from cgd.transport.connections import Message, Socket
    from cgd.transport.limits import ConnectionLimits
    from cgd.transport.routes import Route

# Messages that are read from one socket before the others are served.
MAX_MESSAGES_PER_TURN = 64


class Receiver:
    """Reads for one transport, in the thread that owns its sockets.

    Args:
        routes: the routes to all peers.
        inbox: the queue of received frames, each with its route and the generation of its sender.
        changed: protects the routes and the inbox.
        authenticator: maps keys to participants.
        limits: counts the messages.
        rejections: logs rejected messages.
        incarnation: the incarnation of this process.
    """

    def __init__(
        self,
        routes: Mapping[PeerId, Route],
        inbox: deque[tuple[Route, Buffer, int]],
        changed: threading.Condition,
        authenticator: ZapAuthenticator,
        limits: ConnectionLimits,
        rejections: RejectionLog,
        incarnation: bytes,
    ) -> None:
        self._routes, self._inbox, self._changed = routes, inbox, changed
        self._authenticator, self._limits, self._rejections = authenticator, limits, rejections
        self._incarnation = incarnation

    def read_router(self, router: Socket) -> None:
        """Read messages from the connections that peers have made."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                reply_to = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = read_message(router)
            peer = self._authenticator.member_of(message)
            self._limits.on_message(message, peer)
            with self._rejections.catch_errors(peer or FORMER_PARTICIPANT):
                self._on_message(router, peer, reply_to, message)

    def _on_message(self, router: Socket, peer: PeerId | None, reply_to: bytes, message: Message) -> None:
        if peer is None:
            self._rejections.add(FORMER_PARTICIPANT, "a message", "its key is not in the federation file any more")
            return
        route = self._routes[peer]
        if message.parts != 1:
            self._rejections.add(peer, "a malformed message", f"{message.parts} parts instead of 1")
        elif not isinstance(route, DirectRoute):
            self._rejections.add(peer, "a message", "it was sent directly, and we use the hub for this peer")
        else:
            try:
                datagram = link.from_bytes(message.last.buffer.toreadonly())
            except DatagramError as error:
                if self._reject(peer, error):
                    reason = str(error).encode()
                    answer = Datagram(DatagramKind.REJECTED, self._incarnation, link.NO_INCARNATION, 0, reason)
                    send_to(router, reply_to, answer.to_bytes())
                return
            route.source = str(message.last.get("Peer-Address"))
            self._on_data(route, datagram, reply_to)

    def read_connection(self, route: DirectRoute | HubRoute, ready: Mapping[Any, int]) -> None:
        """Read messages and monitor events of a connection that we have made."""
        if route.connection.monitor in ready:
            route.connection.read_event(time.monotonic())
        if route.connection.dealer not in ready:
            return
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                message = read_message(route.connection.dealer, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._limits.on_message(message, route.peer)
            with self._rejections.catch_errors(route.peer):
                if isinstance(route, HubRoute):
                    self._on_hub_message(route, message)
                else:
                    self._on_ack(route, message)

    def _on_ack(self, route: DirectRoute, message: Message) -> None:
        if message.parts != 1:
            self._rejections.add(route.peer, "a malformed message", f"{message.parts} parts instead of 1")
            return
        try:
            datagram = link.from_bytes(message.last.buffer.toreadonly())
        except DatagramError as error:
            route.connection.problem = f"it answers with a message we cannot read: {error}"
            return
        with self._changed:
            route.on_ack(datagram, b"")

    def _on_hub_message(self, hub: HubRoute, message: Message) -> None:
        """Process a message of the hub itself, or one that it relays."""
        if message.parts != 2:
            self._rejections.add(HUB, "a malformed message", f"{message.parts} parts instead of 2")
            return
        name, content = message.first.bytes, message.last.buffer.toreadonly()
        route = hub if name == HUB_NAME else self._routes.get(name.decode(errors="replace"))
        if route is None or isinstance(route, DirectRoute):
            self._rejections.add(HUB, "a message", "its sender is not a peer that we reach through the hub")
            return
        reply_to = b""
        if isinstance(route, RelayedRoute):
            opened = route.open(content)
            if opened is None:
                return
            reply_to, content = opened[0], memoryview(opened[1])
        with self._rejections.catch_errors(route.peer):
            self._on_datagram(route, content, reply_to)

    def _on_datagram(self, route: Route, content: Buffer, reply_to: bytes) -> None:
        try:
            datagram = link.from_bytes(content)
        except DatagramError as error:
            self._reject(route.peer, error)
            return
        if datagram.kind.from_sender:
            self._on_data(route, datagram, reply_to)
        else:
            with self._changed:
                route.on_ack(datagram, reply_to)

    def _on_data(self, route: Route, datagram: Datagram, reply_to: bytes) -> None:
        with self._changed:
            frame = route.on_data(datagram, reply_to)
            if frame is not None:
                self._inbox.append((route, frame, route.inbound.generation))

    def _reject(self, peer: PeerId, error: DatagramError) -> bool:
        """Log bytes that are not a datagram; return whether they are one of another version."""
        kind = str(error).split(":")[0]
        incompatible = "version" in kind
        if incompatible:
            kind = "incompatible"  # without the number of the version, of which there are 256
        self._rejections.add(peer, f"{'an' if kind[0] in 'io' else 'a'} {kind} message", str(error))
        return incompatible
