"""The transport between machines: ZeroMQ, encrypted and authenticated by CURVE.

Every participant that has an address binds it (a ROUTER socket) and connects to every peer that has one (a DEALER
each). It sends frames by the DEALERs and receives them by the ROUTER. If there is a hub, one more DEALER connects to
it; messages to and from a participant without an address are relayed by the hub, encrypted end to end (`routes.py`,
`channel.py`). Links (`link.py`) number all frames, so that a lost connection loses nothing. One thread owns all
sockets. Other threads put frames into the links and take them from the inbox.
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

from cgd.errors import ClosedError, InputError, MembershipError
from cgd.secagg.messages import HUB
from cgd.transport import link
from cgd.transport.addresses import listening_address
from cgd.transport.auth import UNKNOWN_CLIENT, HandshakeMonitor, RejectionLog, ZapAuthenticator
from cgd.transport.base import CLOSE_SECONDS, MAX_FRAME_BYTES
from cgd.transport.channel import ChannelFactory
from cgd.transport.connections import Connection, HubConnection, listening_socket, port_of
from cgd.transport.limits import SECONDS_BETWEEN_CHECKS, ConnectionLimits
from cgd.transport.receiver import MAX_MESSAGES_PER_TURN, Receiver
from cgd.transport.routes import DirectRoute, HubRoute, RelayedRoute

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        me: the name of this participant.
        contacts: all participants, including this one; and the hub under its name, if there is one.
        secret_key: our CURVE key, 40 characters of Z85.
        listen: the address to bind if it is not our own, such as `tcp://*:7001`.

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
        self._inbox: deque[tuple[Route, Buffer, int]] = deque()  # with the sender's generation
        self._acks: deque[tuple[Route, bytes, Datagram]] = deque()
        self._woken = False
        self._closed = False
        self._asleep = False
        self._wakeup_send, self._wakeup_recv = socket.socketpair()
        for end in (self._wakeup_send, self._wakeup_recv):
            end.setblocking(False)
        self._secret_key = secret_key
        self._update: Mapping[PeerId, Contact] | None = None
        self._channels = ChannelFactory(me, secret_key, _public_keys(contacts))
        self._hub_connection_numbers = itertools.count(1)
        self._routes: dict[PeerId, Route] = {}
        self._router: Socket | None = None
        self._limits = ConnectionLimits(self.rejections)
        self._handshakes = HandshakeMonitor(self.rejections, self._limits)
        self._poller = zmq.Poller()
        self._context: Context = zmq.Context()
        try:
            self._open(listen)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name=f"cgd-network-{me}", daemon=True)
        self._thread.start()

    # The interface of Transport.

    def send(self, to: PeerId, frame: Buffer) -> bool:
        """Put a frame into the link to a peer; return False if its window is full."""
        if len(frame) > MAX_FRAME_BYTES:
            raise InputError(f"a frame has {len(frame)} bytes; the limit over the network is {MAX_FRAME_BYTES}")
        with self._changed:
            if to not in self._routes:
                raise MembershipError(f"{to} is not a peer of {self.me} ({', '.join(self.members)})")
            if self._closed or not self._routes[to].outbound.enqueue(frame):
                return self._closed
        self._wake_io_thread()
        return True

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """Return the next frame and its sender; None after `timeout` seconds without a frame, or after `wakeup`."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._woken or self._closed, timeout)
            if self._closed:
                raise ClosedError("this member's connection is closed; make new peers for further sums")
            if not self._inbox:
                self._woken = False
                return None
            route, frame, generation = self._inbox.popleft()
            ack = route.inbound.mark_consumed(len(frame), generation)
            if ack is not None and route.inbound.reply_to is not None:
                self._acks.append((route, route.inbound.reply_to, ack))
        if ack is not None:
            self._wake_io_thread()
        return route.peer, frame

    def wakeup(self) -> None:
        """Make a blocked `receive` call return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send the frames in the links for at most `CLOSE_SECONDS`, then close the sockets."""
        with self._changed:
            already, self._closed = self._closed, True
            self._inbox.clear()
            self._changed.notify_all()
        if not already:
            self._wake_io_thread()
            self._thread.join()

    def status(self) -> dict[PeerId, PeerStatus]:
        """Return the connection status of every peer."""
        now = time.monotonic()
        with self._changed:
            return {peer: route.status(now) for peer, route in self._routes.items()}

    def update(self, contacts: Mapping[PeerId, Contact]) -> None:
        """Replace the members and their addresses; return when the thread has applied that."""
        with self._changed:
            self._update = contacts
            self._wake_io_thread()
            self._changed.wait_for(lambda: self._update is None or self._closed)

    def backlog(self, *, connected: bool) -> int:
        """Return the number of frames that peers have not consumed yet; with `connected`, of connected peers only."""
        status = self.status()
        with self._changed:
            routes = [route for peer, route in self._routes.items() if status[peer].connected or not connected]
            return sum(route.outbound.unconsumed for route in routes)

    # The thread that owns the sockets.

    def _open(self, listen: str | None) -> None:
        self._authenticator = ZapAuthenticator(self._context, self._names(), self.rejections)
        self._receiver = Receiver(
            *(self._routes, self._inbox, self._changed, self._authenticator, self._limits, self.rejections),
            self._incarnation,
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
        """Create the missing routes; that to the hub first, because others use it."""
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
                    self._context, self._poller, peer, contact, keys, self._limits, self._hub_connection_numbers
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
        """Connect to new members, and close the routes of removed or changed ones."""
        with self._changed:
            if self._update is None:
                return
            contacts, self._update = self._update, None
            hub_changed = contacts.get(HUB) != self._contacts.get(HUB)
            for peer, route in list(self._routes.items()):
                if contacts.get(peer) != self._contacts[peer] or (hub_changed and isinstance(route, RelayedRoute)):
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
                self._asleep = True  # from here on, a thread that adds a frame wakes this one
                self._poll(self._send_all())
            self._send_remaining()
        except Exception:
            log.exception("the network of %s stopped", self.me, extra={"event": "failed"})
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        finally:
            self._release()

    def _poll(self, seconds: float) -> None:
        """Wait until a socket has messages, at most some seconds, and process them."""
        ready = dict(self._poller.poll(int(1000 * seconds)))
        with contextlib.suppress(BlockingIOError):
            while self._wakeup_recv in ready or self._wakeup_recv.fileno() in ready:
                self._wakeup_recv.recv(4096)
        with self.rejections.catch_errors(UNKNOWN_CLIENT):
            self._check_connections(ready)
        self._read_all(ready)
        with self._changed:
            if self._inbox:  # once for all frames; some of them may have been read meanwhile
                self._changed.notify()

    def _send_remaining(self) -> None:
        """Send the frames that were accepted before this transport was closed, except to peers that have gone."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while True:
            pause = self._send_all()
            unsent = [each for each in self._routes.values() if each.outbound.has_unsent_frames and not each.is_lost()]
            if not unsent or time.monotonic() >= deadline:
                return
            self._poll(pause)

    def _read_all(self, ready: Mapping[Any, int]) -> None:
        """Read from every socket that has messages."""
        if self._router is not None and self._router in ready:
            with self.rejections.catch_errors("a participant"):
                self._receiver.read_router(self._router)
        for route in list(self._routes.values()):
            if isinstance(route, DirectRoute | HubRoute) and (
                route.connection.dealer in ready or route.connection.monitor in ready
            ):
                with self.rejections.catch_errors(route.peer):
                    self._receiver.read_connection(route, ready)

    def _check_connections(self, ready: Mapping[Any, int]) -> None:
        """Authenticate new connections, and close those that exceed a limit."""
        if self._authenticator.socket in ready:
            self._authenticator.handle_request()
        if self._router is not None and self._monitor in ready:
            self._handshakes.process_events(self._monitor, MAX_MESSAGES_PER_TURN)
        self._limits.check(time.monotonic())

    def _send_all(self) -> float:
        """Send all datagrams that can be sent now; return the longest time to sleep after that."""
        pause = SECONDS_BETWEEN_CHECKS
        while self._acks:
            route, reply_to, ack = self._acks.popleft()
            with self.rejections.catch_errors(route.peer):
                route.send_ack(reply_to, ack)
        now = time.monotonic()
        for route in self._routes.values():
            if (idle := route.idle_seconds(now)) > 0:
                pause = min(pause, max(MIN_PAUSE_SECONDS, idle))
                continue
            with self.rejections.catch_errors(route.peer):
                pause = min(pause, self._send_to(route))
        return pause

    def _send_to(self, route: Route) -> float:
        """Send the datagrams of a route; return the longest time until the next one is due."""
        if isinstance(route, DirectRoute | HubRoute):
            route.connection.reconnect_if_due(time.monotonic())
        while route.can_send():  # without a connection, or with a full queue, the poller reports when it can send
            with self._changed:
                datagram = route.outbound.next_datagram(time.monotonic())
            if datagram is None:
                return max(MIN_PAUSE_SECONDS, route.outbound.idle_seconds(time.monotonic()))
            route.send_data(datagram)
        return SECONDS_BETWEEN_CHECKS

    def _wake_io_thread(self) -> None:
        """Wake the thread that owns the sockets, unless it is awake."""
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
