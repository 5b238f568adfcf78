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
from cgd.transport.link import Datagram, DatagramError, Kind
from cgd.transport.routes import TO_HUB, DirectWay, HubWay, RelayedWay, send_to

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Callable, Mapping

    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.auth import Gate, Refusals
    from cgd.transport.connections import Message, Socket
    from cgd.transport.limits import Watch
    from cgd.transport.routes import Way

# Messages read from one kind of socket before the others have their turn.
TURN = 64
FORMER = "a former participant"


class Reader:
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
        ways: Mapping[PeerId, Way],
        inbox: deque[tuple[Way, Buffer, int]],
        changed: threading.Condition,
        gate: Gate,
        watch: Watch,
        refusals: Refusals,
        incarnation: bytes,
        blame: Callable[[HubError], None],
    ) -> None:
        self._ways, self._inbox, self._changed = ways, inbox, changed
        self._gate, self._watch, self._refusals = gate, watch, refusals
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
            peer = self._gate.whose(message)
            self._watch.took(message, peer)
            with self._refusals.guard(peer or FORMER):
                self._take_in(router, peer, channel, message)

    def _take_in(self, router: Socket, peer: PeerId | None, channel: bytes, message: Message) -> None:
        if peer is None:
            self._refusals.add(FORMER, "a message", "its key is not in the federation file any more")
            return
        way = self._ways[peer]
        if message.parts != 1:
            self._refusals.add(peer, "a malformed message", f"{message.parts} parts instead of 1")
        elif not isinstance(way, DirectWay):
            self._refusals.add(peer, "a message", "we reach it through the hub only, and it comes directly")
        else:
            try:
                datagram = link.from_bytes(message.last.buffer.toreadonly())
            except DatagramError as error:
                if self._refuse(peer, error):
                    nobody = Datagram(Kind.REFUSED, self._incarnation, link.NOBODY, 0, str(error).encode())
                    send_to(router, channel, nobody.to_bytes())
                return
            way.source = str(message.last.get("Peer-Address"))
            self._take_datagram(way, datagram, channel)

    def read_line(self, way: DirectWay | HubWay, ready: Mapping[Any, int]) -> None:
        """Read what comes by a connection of ours, and what is reported of it."""
        if way.line.monitor in ready:
            way.line.take_event(time.monotonic())
        if way.line.dealer not in ready:
            return
        for _ in range(TURN):
            try:
                message = read_message(way.line.dealer, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._watch.took(message, way.peer)
            with self._refusals.guard(way.peer):
                if isinstance(way, HubWay):
                    self._take_from_hub(way, message)
                else:
                    self._take_answer(way, message)

    def _take_answer(self, way: DirectWay, message: Message) -> None:
        if message.parts != 1:
            self._refusals.add(way.peer, "a malformed message", f"{message.parts} parts instead of 1")
            return
        try:
            datagram = link.from_bytes(message.last.buffer.toreadonly())
        except DatagramError as error:
            way.line.trouble = f"it answers with a message we cannot read: {error}"
            return
        with self._changed:
            way.take_answer(datagram, b"")

    def _take_from_hub(self, hub: HubWay, message: Message) -> None:
        """Read what the hub says itself, or passes on."""
        if message.parts != 2:
            self._refusals.add(HUB, "a malformed message", f"{message.parts} parts instead of 2")
            return
        name, content = message.first.bytes, message.last.buffer.toreadonly()
        way = hub if name == TO_HUB else self._ways.get(name.decode(errors="replace"))
        if way is None or isinstance(way, DirectWay):
            self._refusals.add(HUB, "a message", "it is from nobody whom we reach through the hub")
            return
        channel = b""
        if isinstance(way, RelayedWay):
            try:
                opened = way.unseal(content)
            except HubError as fault:
                self._blame(fault)
                return
            if opened is None:
                return
            channel, content = opened[0], memoryview(opened[1])
        with self._refusals.guard(way.peer):
            self._take_relayed(way, content, channel)

    def _take_relayed(self, way: Way, content: Buffer, channel: bytes) -> None:
        try:
            datagram = link.from_bytes(content)
        except DatagramError as error:
            self._refuse(way.peer, error)
            return
        if datagram.kind.from_sender:
            self._take_datagram(way, datagram, channel)
        else:
            with self._changed:
                way.take_answer(datagram, channel)

    def _take_datagram(self, way: Way, datagram: Datagram, channel: bytes) -> None:
        with self._changed:
            frame = way.take_in(datagram, channel)
            if frame is not None:
                self._inbox.append((way, frame, way.into.life))

    def _refuse(self, peer: PeerId, error: DatagramError) -> bool:
        """Refuse what is no datagram of ours; return whether it is one of another version."""
        kind = str(error).split(":")[0]
        foreign = "version" in kind
        if foreign:
            kind = "foreign"  # not the version: there are 256
        self._refusals.add(peer, f"{'an' if kind == 'oversized' else 'a'} {kind} message", str(error))
        return foreign
