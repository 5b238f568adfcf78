"""Reads what comes by the sockets of a transport, and gives it to the ways.

Whatever a message is, it ends no more than itself: what our program fails on is refused, and the next one is read.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import zmq

from cgd.errors import HubError
from cgd.secagg.messages import HUB
from cgd.transport import link
from cgd.transport.connections import read_message
from cgd.transport.link import Datagram, DatagramError, DatagramKind
from cgd.transport.routes import TO_HUB, DirectRoute, HubRoute, RelayedRoute, send_to

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Callable, Mapping

    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.auth import RejectionLog, ZapAuthenticator
    from cgd.transport.connections import Message, Socket
    from cgd.transport.limits import ConnectionLimits
    from cgd.transport.routes import Route

# Messages read from one kind of socket before the others have their turn.
TURN = 64
FORMER = "a former participant"


class Receiver:
    """Reads for one transport, in the thread that owns its sockets.

    Args:
        ways: to every peer.
        inbox: where frames go, each with its way and the life it comes from.
        changed: guards the ways and the inbox.
        gate: knows whose key is whose.
        watch: told of what was taken.
        refusals: where it is told what we do not take.
        incarnation: ours.
        blame: told what the hub did that it must not.
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
        blame: Callable[[HubError], None],
    ) -> None:
        self._routes, self._inbox, self._changed = routes, inbox, changed
        self._authenticator, self._limits, self._rejections = authenticator, limits, rejections
        self._incarnation = incarnation
        self._blame = blame

    def read_router(self, router: Socket) -> None:
        """Read what peers send by their connections with us."""
        for _ in range(TURN):
            try:
                channel = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = read_message(router)
            peer = self._authenticator.member_of(message)
            self._limits.took(message, peer)
            with self._rejections.guard(peer or FORMER):
                self._take_in(router, peer, channel, message)

    def _take_in(self, router: Socket, peer: PeerId | None, channel: bytes, message: Message) -> None:
        if peer is None:
            self._rejections.add(FORMER, "a message", "its key is not in the federation file any more")
            return
        route = self._routes[peer]
        if message.parts != 1:
            self._rejections.add(peer, "a malformed message", f"{message.parts} parts instead of 1")
        elif not isinstance(route, DirectRoute):
            self._rejections.add(peer, "a message", "we reach it through the hub only, and it comes directly")
        else:
            try:
                datagram = link.from_bytes(message.last.buffer.toreadonly())
            except DatagramError as error:
                if self._refuse(peer, error):
                    nobody = Datagram(DatagramKind.REFUSED, self._incarnation, link.NOBODY, 0, str(error).encode())
                    send_to(router, channel, nobody.to_bytes())
                return
            route.source = str(message.last.get("Peer-Address"))
            self._take_datagram(route, datagram, channel)

    def read_connection(self, route: DirectRoute | HubRoute, ready: Mapping[Any, int]) -> None:
        """Read what comes by a connection of ours, and what is reported of it."""
        if route.connection.monitor in ready:
            route.connection.take_event(time.monotonic())
        if route.connection.dealer not in ready:
            return
        for _ in range(TURN):
            try:
                message = read_message(route.connection.dealer, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._limits.took(message, route.peer)
            with self._rejections.guard(route.peer):
                if isinstance(route, HubRoute):
                    self._take_from_hub(route, message)
                else:
                    self._take_answer(route, message)

    def _take_answer(self, route: DirectRoute, message: Message) -> None:
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

    def _take_from_hub(self, hub: HubRoute, message: Message) -> None:
        """Read what the hub says itself, or passes on."""
        if message.parts != 2:
            self._rejections.add(HUB, "a malformed message", f"{message.parts} parts instead of 2")
            return
        name, content = message.first.bytes, message.last.buffer.toreadonly()
        route = hub if name == TO_HUB else self._routes.get(name.decode(errors="replace"))
        if route is None or isinstance(route, DirectRoute):
            self._rejections.add(HUB, "a message", "it is from nobody whom we reach through the hub")
            return
        channel = b""
        if isinstance(route, RelayedRoute):
            try:
                opened = route.unseal(content)
            except HubError as fault:
                self._blame(fault)
                return
            if opened is None:
                return
            channel, content = opened[0], memoryview(opened[1])
        with self._rejections.guard(route.peer):
            self._take_relayed(route, content, channel)

    def _take_relayed(self, route: Route, content: Buffer, channel: bytes) -> None:
        try:
            datagram = link.from_bytes(content)
        except DatagramError as error:
            self._refuse(route.peer, error)
            return
        if datagram.kind.from_sender:
            self._take_datagram(route, datagram, channel)
        else:
            with self._changed:
                route.on_ack(datagram, channel)

    def _take_datagram(self, route: Route, datagram: Datagram, channel: bytes) -> None:
        with self._changed:
            frame = route.on_data(datagram, channel)
            if frame is not None:
                self._inbox.append((route, frame, route.into.life))

    def _refuse(self, peer: PeerId, error: DatagramError) -> bool:
        """Refuse what is no datagram of ours; return whether it is one of another version."""
        kind = str(error).split(":")[0]
        foreign = "version" in kind
        if foreign:
            kind = "foreign"  # not the version: there are 256
        self._rejections.add(peer, f"{'an' if kind == 'oversized' else 'a'} {kind} message", str(error))
        return foreign
