"""The transport between machines: ZeroMQ, encrypted and authenticated by CURVE.

Every participant that has an address binds it (a ROUTER socket) and connects to that of every peer that has one (a
DEALER each). Frames go out by the DEALERs and come in by the ROUTER. If there is a hub, one more DEALER connects to it,
and what concerns a participant without an address goes through it, in both directions, sealed end to end (`routes.py`,
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
from cgd.transport.auth import HandshakeMonitor, RejectionLog, ZapAuthenticator
from cgd.transport.channel import ChannelFactory
from cgd.transport.connections import Connection, HubConnection, listening_socket, port_of
from cgd.transport.limits import SECONDS_BETWEEN_CHECKS, ConnectionLimits
from cgd.transport.receiver import TURN, Receiver
from cgd.transport.routes import DirectRoute, HubRoute, RelayedRoute

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.base import PeerStatus
    from cgd.transport.connections import Contact, Context, Socket
    from cgd.transport.link import Datagram
    from cgd.transport.routes import Route

log = logging.getLogger("cgd.transport")

MIN_PAUSE_SECONDS = 0.005


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
        self.rejections = RejectionLog()
        self._contacts = dict(contacts)
        self._incarnation = os.urandom(link.INCARNATION_BYTES)
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Route, Buffer, int]] = deque()  # the last: the life it comes from
        self._answers: deque[tuple[Route, bytes, Datagram]] = deque()
        self._fault: HubError | None = None
        self._woken = False
        self._closed = False
        self._asleep = False
        self._wakeup_send, self._wakeup_recv = socket.socketpair()
        for end in (self._wakeup_send, self._wakeup_recv):
            end.setblocking(False)
        self._secret_key = secret_key
        self._update: Mapping[PeerId, Contact] | None = None
        self._channels = ChannelFactory(me, secret_key, _public_keys(contacts))
        self._numbers = itertools.count(1)  # of connections with the hub
        self._routes: dict[PeerId, Route] = {}
        self._router: Socket | None = None
        self._limits = ConnectionLimits(self.rejections)
        self._clients = HandshakeMonitor(self.rejections, self._limits)
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
        if len(frame) > link.MAX_FRAME_BYTES:
            raise InputError(f"a frame has {len(frame)} bytes, and at most {link.MAX_FRAME_BYTES} go over the network")
        with self._changed:
            if to not in self._routes:
                raise MembershipError(f"{to} is not a peer of {self.me} ({', '.join(self.members)})")
            if self._closed or not self._routes[to].out.offer(frame):
                return self._closed
        self._wake_io_thread()
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
            route, frame, life = self._inbox.popleft()
            answer = route.into.consumed(len(frame), life)
            if answer is not None and route.into.channel is not None:
                self._answers.append((route, route.into.channel, answer))
        if answer is not None:
            self._wake_io_thread()
        return route.peer, frame

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
            self._wake_io_thread()
            self._thread.join()

    def status(self) -> dict[PeerId, PeerStatus]:
        """How it stands with every peer."""
        now = time.monotonic()
        with self._changed:
            return {peer: route.status(now) for peer, route in self._routes.items()}

    def update(self, contacts: Mapping[PeerId, Contact]) -> None:
        """Have these members from now on."""
        with self._changed:
            self._update = contacts
            self._wake_io_thread()
            self._changed.wait_for(lambda: self._update is None or self._closed)

    def backlog(self, *, connected: bool) -> int:
        """How many frames wait for a peer to take them; `connected`: only for those that can."""
        status = self.status()
        with self._changed:
            routes = [route for peer, route in self._routes.items() if status[peer].connected or not connected]
            return sum(route.out.waiting for route in routes)

    # What the thread does.

    def _open(self, listen: str | None) -> None:
        self._authenticator = ZapAuthenticator(self._context, self._names(), self.rejections)
        self._receiver = Receiver(
            *(self._routes, self._inbox, self._changed, self._authenticator, self._limits, self.rejections),
            *(self._incarnation, self._blame),
        )
        address = self._contacts[self.me].address
        listening: list[Any] = [self._authenticator.socket, self._wakeup_recv]
        if address:
            self._router, self._monitor = listening_socket(
                self._context, self._secret_key, listen or listening_address(address)
            )
            listening += [self._router, self._monitor]
            self._limits.port = port_of(self._router)
        elif listen is not None:
            raise InputError(f"{self.me} has no address in the federation file: it only dials out, and cannot listen")
        for each in listening:
            self._poller.register(each, zmq.POLLIN)
        self._connect()

    def _connect(self) -> None:
        """Have a way to everybody we have none to; to the hub first, for others lead through it."""
        self._limits.members = len(self._contacts)
        self._limits.peers = len(self._contacts) if HUB in self._contacts else 1
        own = self._contacts[self.me]
        keys = own.public_key, self._secret_key
        hello = f"{self.me}\0{own.address}".encode()
        for peer, contact in sorted(self._contacts.items(), key=lambda pair: pair[0] != HUB):
            if peer == self.me or peer in self._routes:
                continue
            common = peer, self._incarnation, hello, self.rejections
            if peer == HUB:
                hub_connection = HubConnection(
                    self._context, self._poller, peer, contact, keys, self._limits, self._numbers
                )
                self._routes[HUB] = HubRoute(*common, hub_connection)
            elif self._router is not None and contact.address:
                connection = Connection(self._context, self._poller, peer, contact, keys, self._limits)
                self._routes[peer] = DirectRoute(*common, connection, self._router, own.address)
            elif isinstance(hub := self._routes.get(HUB), HubRoute):
                self._routes[peer] = RelayedRoute(*common, hub, self._channels.with_peer(peer))
            else:
                raise InputError(f"{peer} or {self.me} has no address, and there is no hub; give both one")

    def _apply_update(self) -> None:
        """Connect with members that are new, and let go of those that are not any more."""
        with self._changed:
            if self._update is None:
                return
            contacts, self._update = self._update, None
            other_hub = contacts.get(HUB) != self._contacts.get(HUB)
            for peer, route in list(self._routes.items()):
                if contacts.get(peer) != self._contacts[peer] or (other_hub and isinstance(route, RelayedRoute)):
                    self._routes.pop(peer).close()
            self._contacts = dict(contacts)
            self.members = _members(contacts)
            self._authenticator.names = self._names()
            self._channels.public_keys = _public_keys(contacts)
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
                    while self._wakeup_recv in ready or self._wakeup_recv.fileno() in ready:
                        self._wakeup_recv.recv(4096)
                with self.rejections.guard("a stranger"):
                    self._check_connections(ready)
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
            with self.rejections.guard("a participant"):
                self._receiver.read_router(self._router)
        for route in list(self._routes.values()):
            if isinstance(route, DirectRoute | HubRoute) and (
                route.connection.dealer in ready or route.connection.monitor in ready
            ):
                with self.rejections.guard(route.peer):
                    self._receiver.read_connection(route, ready)

    def _check_connections(self, ready: Mapping[Any, int]) -> None:
        """Let in whoever may come in, and cut who keeps too much."""
        if self._authenticator.socket in ready:
            self._authenticator.handle_request()
        if self._router is not None and self._monitor in ready:
            self._clients.note(self._monitor, TURN)
        self._limits.check(time.monotonic())

    def _send_all(self) -> float:
        """Send whatever can be sent now; how long to sleep after that, at most."""
        pause = SECONDS_BETWEEN_CHECKS
        while self._answers:
            route, channel, answer = self._answers.popleft()
            with self.rejections.guard(route.peer):
                route.send_ack(channel, answer)
        now = time.monotonic()
        for route in self._routes.values():
            if (rest := route.rest(now)) > 0:
                pause = min(pause, max(MIN_PAUSE_SECONDS, rest))
                continue
            with self.rejections.guard(route.peer):
                pause = min(pause, self._send_to(route))
        return pause

    def _send_to(self, route: Route) -> float:
        """Send what a way has; how long there will be nothing more, at most."""
        if isinstance(route, DirectRoute | HubRoute):
            route.connection.redial_if_due(time.monotonic())
        while route.has_room():  # without a connection, or with a full one, the poller tells when there is room
            with self._changed:
                datagram = route.out.next_datagram(time.monotonic())
            if datagram is None:
                return max(MIN_PAUSE_SECONDS, route.out.rest(time.monotonic()))
            route.send_data(datagram)
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

    def _wake_io_thread(self) -> None:
        """Wake the thread that owns the sockets, unless somebody has."""
        if self._asleep:
            self._asleep = False
            with contextlib.suppress(BlockingIOError, OSError):
                self._wakeup_send.send(b"!")

    def _release(self) -> None:
        self._context.destroy(linger=1000)
        self._wakeup_send.close()
        self._wakeup_recv.close()


def _members(contacts: Mapping[PeerId, Contact]) -> tuple[PeerId, ...]:
    return tuple(sorted(set(contacts) - {HUB}))


def _public_keys(contacts: Mapping[PeerId, Contact]) -> dict[PeerId, bytes]:
    return {name: contact.public_key for name, contact in contacts.items() if name != HUB}
