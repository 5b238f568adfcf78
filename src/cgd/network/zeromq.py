"""The transport between machines: ZeroMQ, encrypted and authenticated by CURVE.

Every participant binds one address (a ROUTER socket) and connects to the address of every peer (one DEALER each).
Frames go out by the DEALERs and come in by the ROUTER; links (`link.py`) number them, so that a connection that breaks
loses nothing. One thread owns all sockets. The others leave frames in the links and take them from the inbox.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq

from cgd.errors import ClosedError, InputError, MembershipError
from cgd.network import link
from cgd.network.gate import Gate, Refusals, Visitors
from cgd.network.link import Datagram, DatagramError, Incoming, Kind, Outgoing
from cgd.network.sockets import Way, calling_socket, listening_address, listening_socket
from cgd.network.transport import PeerStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.network.sockets import Contact, Context
    from cgd.protocol.messages import Buffer, PeerId

log = logging.getLogger("cgd.network")

LONGEST_SLEEP_SECONDS = 1.0
# Messages read from one kind of socket before the others have their turn.
TURN = 64
LONGEST_HELLO = 1024


class ZeroMQTransport:
    """One participant's connection with its peers over the network; see `Transport`.

    Args:
        me: this participant's name.
        contacts: every participant, this one among them.
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
        self.members = tuple(sorted(contacts))
        self.refusals = Refusals()
        self._contacts = dict(contacts)
        self._incarnation = os.urandom(link.INCARNATION_BYTES)
        self._changed = threading.Condition()
        self._inbox: deque[tuple[PeerId, Buffer, Incoming, int]] = deque()  # the last: the life it comes from
        self._answers: deque[tuple[bytes, Datagram]] = deque()
        self._woken = False
        self._closed = False
        self._asleep = False
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._secret_key = secret_key
        self._update: Mapping[PeerId, Contact] | None = None
        self._ways: dict[PeerId, Way] = {}
        self._visitors = Visitors(self.refusals)
        self._poller = zmq.Poller()
        self._context: Context = zmq.Context()
        try:
            self._open(listen or listening_address(contacts[me].address))
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
        """Take the next frame."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._woken or self._closed, timeout)
            if self._closed:
                raise ClosedError("this member's connection is closed; make new peers for further sums")
            if not self._inbox:
                self._woken = False
                return None
            sender, frame, into, life = self._inbox.popleft()
            answer = into.consumed(len(frame), life)
            if answer is not None and into.channel is not None:
                self._answers.append((into.channel, answer))
        if answer is not None:
            self._ring()
        return sender, frame

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
            return {peer: self._status(way, now) for peer, way in self._ways.items()}

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

    def _status(self, way: Way, now: float) -> PeerStatus:
        connected = way.out.welcomed and now - way.out.heard < link.SILENT_SECONDS
        trouble = way.out.refusal or way.trouble
        if connected:
            address = self._contacts[self.me].address
            deaf = f"nothing comes from it; if this lasts it does not reach us at {address}: is our port open?"
            trouble = "" if way.into.alive(now) else deaf
        return PeerStatus(connected, way.out.latency, trouble)

    def _open(self, listen: str) -> None:
        self._gate = Gate(self._context, self._names(), self.refusals)
        self._router, self._door = listening_socket(self._context, self._secret_key, listen)
        for each in (self._router, self._gate.socket, self._door, self._ear):
            self._poller.register(each, zmq.POLLIN)
        for peer in self._contacts:
            if peer != self.me:
                self._connect(peer)

    def _connect(self, peer: PeerId) -> None:
        contact, own = self._contacts[peer], self._contacts[self.me]
        dealer, monitor = calling_socket(self._context, peer, contact, own.public_key, self._secret_key)
        hello = f"{self.me}\0{own.address}".encode()
        out, into = Outgoing(self._incarnation, hello), Incoming(self._incarnation)
        self._ways[peer] = Way(dealer, monitor, out, into, contact.address)
        for each in (dealer, monitor):
            self._poller.register(each, zmq.POLLIN)

    def _disconnect(self, peer: PeerId) -> None:
        way = self._ways.pop(peer)
        for each in (way.dealer, way.monitor):
            self._poller.unregister(each)
        way.dealer.disable_monitor()
        way.monitor.close(linger=0)
        way.dealer.close(linger=0)

    def _apply_update(self) -> None:
        """Connect with members that are new, and let go of those that are not any more."""
        with self._changed:
            if self._update is None:
                return
            contacts, self._update = self._update, None
            for peer in list(self._ways):
                if contacts.get(peer) != self._contacts[peer]:
                    self._disconnect(peer)
            self._contacts = dict(contacts)
            self.members = tuple(sorted(contacts))
            self._gate.names = self._names()
            for peer in contacts:
                if peer != self.me and peer not in self._ways:
                    self._connect(peer)
            self._changed.notify_all()

    def _names(self) -> dict[bytes, PeerId]:
        return {contact.public_key: name for name, contact in self._contacts.items() if name != self.me}

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
                if self._gate.socket in ready:
                    self._gate.answer()
                if self._door in ready:
                    self._visitors.note(self._door, TURN)
                if self._router in ready:
                    self._take_in()
                for way in self._ways.values():
                    if way.monitor in ready:
                        way.note_event(time.monotonic())
                    if way.dealer in ready:
                        self._take_answers(way)
            self._send_all()
        except Exception:
            log.exception("the network of %s stopped", self.me, extra={"event": "failed"})
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        finally:
            self._release()

    def _send_all(self) -> float:
        """Send whatever can be sent now; how long to sleep after that, at most."""
        pause = LONGEST_SLEEP_SECONDS
        while self._answers:
            self._answer(*self._answers.popleft())
        for way in self._ways.values():
            way.redial_if_due(time.monotonic())
            while room := int(way.dealer.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                with self._changed:
                    datagram = way.out.next_datagram(time.monotonic())
                if datagram is None:
                    pause = min(pause, max(0.005, way.out.rest(time.monotonic())))
                    break
                self._post(way, datagram)
            # Without a connection, or with a full one, the poller tells when there is room.
            self._poller.register(way.dealer, zmq.POLLIN if room else zmq.POLLIN | zmq.POLLOUT)
        return pause

    def _post(self, way: Way, datagram: Datagram) -> None:
        with contextlib.suppress(zmq.Again):  # then it counts as lost, and the link sends it again
            way.dealer.send(datagram.to_bytes(), zmq.NOBLOCK)

    def _answer(self, channel: bytes, datagram: Datagram) -> bool:
        try:
            self._router.send_multipart([channel, datagram.to_bytes()], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EHOSTUNREACH: the connection is gone; EAGAIN: it does not read
            return error.errno != zmq.EHOSTUNREACH
        return True

    def _take_in(self) -> None:
        """Read what peers send."""
        waiting = len(self._inbox)
        for _ in range(TURN):
            try:
                channel = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            last = self._router.recv(copy=False)
            parts = 1
            while self._router.rcvmore:  # one by one: there may be millions
                self._router.recv(copy=False)
                parts += 1
            peer = self._gate.names.get(str(last.get("User-Id")).encode())
            if peer is None:
                self.refusals.add("a former participant", "a message", "its key is not in the federation file any more")
                continue
            if parts != 1:
                self.refusals.add(peer, "a malformed message", f"{parts} parts instead of 1")
                continue
            try:
                datagram = link.from_bytes(last.buffer.toreadonly())
            except DatagramError as error:
                kind = str(error).split(":")[0]
                if "version" in kind:
                    kind = "foreign"  # not the version: there are 256
                    self._refuse(channel, str(error))
                self.refusals.add(peer, f"{'an' if kind == 'oversized' else 'a'} {kind} message", str(error))
                continue
            self._take_datagram(peer, channel, datagram)
        with self._changed:
            if len(self._inbox) > waiting:  # once for all of them
                self._changed.notify()

    def _take_datagram(self, peer: PeerId, channel: bytes, datagram: Datagram) -> None:
        into, now = self._ways[peer].into, time.monotonic()
        answer: Datagram | None = None
        with self._changed:
            if datagram.kind is Kind.HELLO:
                answer = self._greet(peer, into, channel, datagram, now)
            elif datagram.kind in (Kind.DATA, Kind.PING):
                stale = into.stale
                frame, answer = into.take(datagram, channel, now)
                if frame is not None:
                    self._inbox.append((peer, frame, into, into.life))
                elif into.stale > stale:
                    self.refusals.add(peer, "a stale or repeated message", level=logging.INFO)
            else:
                self.refusals.add(peer, "a malformed message", f"{datagram.kind.name} from a sender")
        if answer is not None:
            self._answer(channel, answer)
        probe = into.probe()
        if probe is not None and into.channel is not None and not self._answer(into.channel, probe):
            into.gone()

    def _greet(self, peer: PeerId, into: Incoming, channel: bytes, datagram: Datagram, now: float) -> Datagram:
        claimed, _, address = bytes(datagram.body[:LONGEST_HELLO]).decode(errors="replace").partition("\0")
        if claimed != peer:
            self.refusals.add(peer, "a false name", f"it says that it is {claimed!r}, and its key is that of {peer}")
            why = f"your key is that of {peer}, and you say that you are {claimed}"
            return Datagram(Kind.REFUSED, self._incarnation, datagram.sender, 0, why.encode())
        answer = into.hello(datagram, channel, now)
        if answer.kind is Kind.REFUSED:
            self.refusals.add(peer, "a second process with the same key")
        elif address != self._ways[peer].address and address.startswith("tcp://"):
            self._ways[peer].follow(address)  # it has moved, and proved with its key that it is the one
        return answer

    def _refuse(self, channel: bytes, why: str) -> None:
        nobody = Datagram(Kind.REFUSED, self._incarnation, link.NOBODY, 0, why.encode())
        self._answer(channel, nobody)

    def _take_answers(self, way: Way) -> None:
        """Read what the receiving ends of our links say."""
        for _ in range(TURN):
            try:
                datagram = link.from_bytes(way.dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except DatagramError as error:
                way.trouble = f"it answers with a message we cannot read: {error}"
                continue
            with self._changed:
                answer = way.out.take(datagram, time.monotonic())
            if answer is not None:
                self._post(way, answer)

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
