"""The transport between machines: ZeroMQ, encrypted and authenticated by CURVE.

Every participant that has an address binds it (a ROUTER socket) and connects to that of every peer that has one (a
DEALER each). Frames go out by the DEALERs and come in by the ROUTER. If there is a hub, one more DEALER connects to it,
and what concerns a participant without an address goes through it, in both directions, sealed end to end (`ways.py`,
`sealing.py`). Links (`link.py`) number all frames, so that a connection that breaks loses nothing. One thread owns all
sockets. The others leave frames in the links and take them from the inbox.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from cgd.errors import ClosedError, HubError, InputError, MembershipError
from cgd.secagg.messages import HUB
from cgd.transport import link
from cgd.transport.addresses import listening_address
from cgd.transport.auth import Gate, Refusals, Visitors
from cgd.transport.channel import Sealing
from cgd.transport.connections import HubLine, Line, listening_socket, port_of
from cgd.transport.limits import SECONDS_BETWEEN_CHECKS, Watch
from cgd.transport.receiver import TURN, Reader
from cgd.transport.routes import DirectWay, HubWay, RelayedWay

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.base import PeerStatus
    from cgd.transport.connections import Contact, Context, Socket
    from cgd.transport.link import Datagram
    from cgd.transport.routes import Way

log = logging.getLogger("cgd.transport")

SHORTEST_PAUSE_SECONDS = 0.005


class ZeroMQTransport:
    """One participant's connection with its peers over the network; see `Transport`.

    Args:
        me: this participant's name.
        contacts: every participant, this one among them; and the hub under its name, if there is one.
        secret_key: our CURVE key, 40 characters of Z85.
        listen: where to bind if not at our address, such as `tcp://*:7001`.

    Raises:
        InputError: an address cannot be used.
        TransportError: our address is in use.
    """

    def __init__(
        self, me: PeerId, contacts: Mapping[PeerId, Contact], secret_key: bytes, listen: str | None = None
    ) -> None:
        self.me = me
        self.members = _members(contacts)
        self.refusals = Refusals()
        self._contacts = dict(contacts)
        self._incarnation = os.urandom(link.INCARNATION_BYTES)
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Way, Buffer, int]] = deque()  # the last: the life it comes from
        self._answers: deque[tuple[Way, bytes, Datagram]] = deque()
        self._fault: HubError | None = None
        self._woken = False
        self._closed = False
        self._asleep = False
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._secret_key = secret_key
        self._update: Mapping[PeerId, Contact] | None = None
        self._sealing = Sealing(me, secret_key, _public_keys(contacts))
        self._numbers = itertools.count(1)  # of connections with the hub
        self._ways: dict[PeerId, Way] = {}
        self._router: Socket | None = None
        self._watch = Watch(self.refusals)
        self._visitors = Visitors(self.refusals, self._watch)
        self._poller = zmq.Poller()
        self._context: Context = zmq.Context()
        try:
            self._open(listen)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name=f"cgd-network-{me}", daemon=True)
        self._thread.start()

    # What the layers above call; see Transport.

    def send(self, to: PeerId, frame: bytes) -> bool:
        """Leave a frame for a peer; False while there is no room for it."""
        if len(frame) > link.LONGEST_FRAME:
            raise InputError(f"a frame has {len(frame)} bytes, and at most {link.LONGEST_FRAME} go over the network")
        with self._changed:
            if to not in self._ways:
                raise MembershipError(f"{to} is not a peer of {self.me} ({', '.join(self.members)})")
            if self._closed or not self._ways[to].out.offer(frame):
                return self._closed
        self._ring()
        return True

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """Take the next frame; a fault of the hub is raised here, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._woken or self._closed or self._fault, timeout)
            if self._closed:
                raise ClosedError("this member's connection is closed; make new peers for further sums")
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if not self._inbox:
                self._woken = False
                return None
            way, frame, life = self._inbox.popleft()
            answer = way.into.consumed(len(frame), life)
            if answer is not None and way.into.channel is not None:
                self._answers.append((way, way.into.channel, answer))
        if answer is not None:
            self._ring()
        return way.peer, frame

    def wake(self) -> None:
        """Let `receive` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the sockets, after a moment for what is still to be sent."""
        with self._changed:
            already, self._closed = self._closed, True
            self._inbox.clear()
            self._changed.notify_all()
        if not already:
            self._ring()
            self._thread.join()

    def status(self) -> dict[PeerId, PeerStatus]:
        """How it stands with every peer."""
        now = time.monotonic()
        with self._changed:
            return {peer: way.status(now) for peer, way in self._ways.items()}

    def update(self, contacts: Mapping[PeerId, Contact]) -> None:
        """Have these members from now on."""
        with self._changed:
            self._update = contacts
            self._ring()
            self._changed.wait_for(lambda: self._update is None or self._closed)

    def backlog(self, *, connected: bool) -> int:
        """How many frames wait for a peer to take them; `connected`: only for those that can."""
        status = self.status()
        with self._changed:
            ways = [way for peer, way in self._ways.items() if status[peer].connected or not connected]
            return sum(way.out.waiting for way in ways)

    # What the thread does.

    def _open(self, listen: str | None) -> None:
        self._gate = Gate(self._context, self._names(), self.refusals)
        self._reader = Reader(
            *(self._ways, self._inbox, self._changed, self._gate, self._watch, self.refusals),
            *(self._incarnation, self._blame),
        )
        address = self._contacts[self.me].address
        listening: list[Any] = [self._gate.socket, self._ear]
        if address:
            self._router, self._door = listening_socket(
                self._context, self._secret_key, listen or listening_address(address)
            )
            listening += [self._router, self._door]
            self._watch.port = port_of(self._router)
        elif listen is not None:
            raise InputError(f"{self.me} has no address in the federation file: it only dials out, and cannot listen")
        for each in listening:
            self._poller.register(each, zmq.POLLIN)
        self._connect()

    def _connect(self) -> None:
        """Have a way to everybody we have none to; to the hub first, for others lead through it."""
        self._watch.members = len(self._contacts)
        self._watch.peers = len(self._contacts) if HUB in self._contacts else 1
        own = self._contacts[self.me]
        keys = own.public_key, self._secret_key
        hello = f"{self.me}\0{own.address}".encode()
        for peer, contact in sorted(self._contacts.items(), key=lambda pair: pair[0] != HUB):
            if peer == self.me or peer in self._ways:
                continue
            common = peer, self._incarnation, hello, self.refusals
            if peer == HUB:
                hub_line = HubLine(self._context, self._poller, peer, contact, keys, self._watch, self._numbers)
                self._ways[HUB] = HubWay(*common, hub_line)
            elif self._router is not None and contact.address:
                line = Line(self._context, self._poller, peer, contact, keys, self._watch)
                self._ways[peer] = DirectWay(*common, line, self._router, own.address)
            elif isinstance(hub := self._ways.get(HUB), HubWay):
                self._ways[peer] = RelayedWay(*common, hub, self._sealing.with_peer(peer))
            else:
                raise InputError(f"{peer} or {self.me} has no address, and there is no hub; give both one")

    def _apply_update(self) -> None:
        """Connect with members that are new, and let go of those that are not any more."""
        with self._changed:
            if self._update is None:
                return
            contacts, self._update = self._update, None
            other_hub = contacts.get(HUB) != self._contacts.get(HUB)
            for peer, way in list(self._ways.items()):
                if contacts.get(peer) != self._contacts[peer] or (other_hub and isinstance(way, RelayedWay)):
                    self._ways.pop(peer).close()
            self._contacts = dict(contacts)
            self.members = _members(contacts)
            self._gate.names = self._names()
            self._sealing.public_keys = _public_keys(contacts)
            self._connect()
            self._changed.notify_all()

    def _names(self) -> dict[bytes, PeerId]:
        return {key: name for name, key in _public_keys(self._contacts).items() if name != self.me}

    def _run(self) -> None:
        try:
            while not self._closed:
                self._apply_update()
                self._asleep = True  # from here on, whoever leaves a frame rings
                pause = self._send_all()
                ready = dict(self._poller.poll(int(1000 * pause)))
                with contextlib.suppress(BlockingIOError):
                    while self._ear in ready or self._ear.fileno() in ready:
                        self._ear.recv(4096)
                with self.refusals.guard("a stranger"):
                    self._watch_door(ready)
                with self._waking():
                    self._read_all(ready)
            self._send_all()
        except Exception:
            log.exception("the network of %s stopped", self.me, extra={"event": "failed"})
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        finally:
            self._release()

    def _read_all(self, ready: Mapping[Any, int]) -> None:
        """Read from every socket that has something."""
        if self._router is not None and self._router in ready:
            with self.refusals.guard("a participant"):
                self._reader.read_router(self._router)
        for way in list(self._ways.values()):
            if isinstance(way, DirectWay | HubWay) and (way.line.dealer in ready or way.line.monitor in ready):
                with self.refusals.guard(way.peer):
                    self._reader.read_line(way, ready)

    def _watch_door(self, ready: Mapping[Any, int]) -> None:
        """Let in whoever may come in, and cut who keeps too much."""
        if self._gate.socket in ready:
            self._gate.answer()
        if self._router is not None and self._door in ready:
            self._visitors.note(self._door, TURN)
        self._watch.check(time.monotonic())

    def _send_all(self) -> float:
        """Send whatever can be sent now; how long to sleep after that, at most."""
        pause = SECONDS_BETWEEN_CHECKS
        while self._answers:
            way, channel, answer = self._answers.popleft()
            with self.refusals.guard(way.peer):
                way.answer(channel, answer)
        now = time.monotonic()
        for way in self._ways.values():
            if (rest := way.rest(now)) > 0:
                pause = min(pause, max(SHORTEST_PAUSE_SECONDS, rest))
                continue
            with self.refusals.guard(way.peer):
                pause = min(pause, self._send_to(way))
        return pause

    def _send_to(self, way: Way) -> float:
        """Send what a way has; how long there will be nothing more, at most."""
        if isinstance(way, DirectWay | HubWay):
            way.line.redial_if_due(time.monotonic())
        while way.has_room():  # without a connection, or with a full one, the poller tells when there is room
            with self._changed:
                datagram = way.out.next_datagram(time.monotonic())
            if datagram is None:
                return max(SHORTEST_PAUSE_SECONDS, way.out.rest(time.monotonic()))
            way.post(datagram)
        return SECONDS_BETWEEN_CHECKS

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Wake whoever waits for a frame, once for all that have come."""
        waiting = len(self._inbox)
        yield
        with self._changed:
            if len(self._inbox) > waiting:
                self._changed.notify()

    def _blame(self, fault: HubError) -> None:
        """The hub did what it must not: whoever receives is told."""
        log.error("%s", fault, extra={"event": "hub", "peer": HUB})
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

    def _ring(self) -> None:
        """Wake the thread that owns the sockets, unless somebody has."""
        if self._asleep:
            self._asleep = False
            with contextlib.suppress(BlockingIOError, OSError):
                self._bell.send(b"!")

    def _release(self) -> None:
        self._context.destroy(linger=1000)
        self._bell.close()
        self._ear.close()


def _members(contacts: Mapping[PeerId, Contact]) -> tuple[PeerId, ...]:
    return tuple(sorted(set(contacts) - {HUB}))


def _public_keys(contacts: Mapping[PeerId, Contact]) -> dict[PeerId, bytes]:
    return {name: contact.public_key for name, contact in contacts.items() if name != HUB}
