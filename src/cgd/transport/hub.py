"""`Hub`: relays for participants that only dial out, and adds up what they deposit.

It has no data, and no key but its own. Participants connect to it (a DEALER each, to its ROUTER) and prove their keys;
a key that is not listed is not let in. The rules:

1. A message has two parts: a name, and what is for it. Upward it is the recipient, downward the sender; that one is
   taken from the key of the connection, not from what anybody says. The hub itself has no name.
2. What is for another participant is passed on at once, or lost: it is sealed, and the participants' links send again
   what was lost. The hub neither reads nor keeps it. Who writes to somebody who is not here is told so, by an empty
   message.
3. With each participant the hub has a link of its own in both directions. By it come deposits
   (`secagg/hub_aggregator.py`), and totals go back. The first word to each is `ResendRequest`: the hub knows nothing of before.
4. Of several processes with one key, one is let in: the one that has the link. Only it is heard, and hears.

So whatever becomes of the hub, nothing is lost that matters. It is started again and all go on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from cgd.errors import RemoteProtocolError
from cgd.secagg.codec import Frame, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.messages import HUB, SESSION_BYTES, ResendRequest
from cgd.secagg.reduction import AHEAD
from cgd.transport import link
from cgd.transport.auth import HandshakeMonitor, RejectionLog, ZapAuthenticator
from cgd.transport.connections import listening_socket, port_of, read_message
from cgd.transport.limits import SECONDS_BETWEEN_CHECKS, ConnectionLimits
from cgd.transport.link import DatagramError
from cgd.transport.receiver import FORMER, TURN
from cgd.transport.routes import TO_HUB, Route, send_to

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.connections import Contact, Context, Message
    from cgd.transport.link import Datagram

    # Whether it came in (True) or went out, the participant at the other end, the name in it, and the rest.
    Record = Callable[[bool, PeerId, bytes, bytes], None]

log = logging.getLogger("cgd.hub")

# Messages that may wait for one participant: a window of large ones from everybody else fits.
MESSAGES_FROM_EACH = 16
PAST_CHANNELS = 16
AGAIN = to_bytes(Frame(bytes(SESSION_BYTES), 0, ResendRequest()))


@dataclass(frozen=True)
class HubClientStatus:
    """How it stands with one participant, for people.

    Attributes:
        name: of the participant.
        connected: whether it is here.
        latency: seconds to it and back, if known.
        relayed: how many bytes were passed on from it to others.
        deposited: how many bytes it has deposited.
        lost: how many messages for it were lost, because it was not here or did not read.
    """

    name: PeerId
    connected: bool
    latency: float | None
    relayed: int
    deposited: int
    lost: int


class HubClient(Route):
    """The hub's end of what it has with one participant."""

    def __init__(self, peer: PeerId, incarnation: bytes, rejections: RejectionLog, hub: Hub) -> None:
        super().__init__(peer, incarnation, HUB.encode(), rejections)
        self.relayed = self.deposited = self.lost = 0
        self.past: deque[bytes] = deque(maxlen=PAST_CHANNELS)
        self._hub = hub
        self._waiting: deque[bytes] = deque()
        self.out.offer(AGAIN)

    def has_room(self) -> bool:
        """Whether it is here."""
        return self.into.channel is not None and self.into.alive(time.monotonic())

    def send_data(self, datagram: Datagram) -> None:
        """To the process that is in."""
        if self.into.channel is not None:
            self.send_ack(self.into.channel, datagram)

    def send_ack(self, channel: bytes, datagram: Datagram) -> bool:
        """By the connection that the participant has made."""
        return self._hub.send(self, channel, TO_HUB, datagram.to_bytes())

    def outbound_problem(self, now: float) -> str:  # noqa: ARG002
        """That it is not here, and no more."""
        return "not connected"

    def tell(self, frame: bytes) -> bool:
        """Leave a frame for it; False if it has not taken a great many."""
        if len(self._waiting) > 4 * AHEAD:
            return False
        self._waiting.append(frame)
        self.offer_more()
        return True

    def offer_more(self) -> None:
        """Let the link have what it has room for."""
        while self._waiting and self.out.offer(self._waiting[0]):
            self._waiting.popleft()

    def on_data(self, datagram: Datagram, channel: bytes) -> Buffer | None:
        """Take in what the participant says; a connection that was followed by another is heard no more."""
        before = self.into.channel
        frame = super().on_data(datagram, channel)
        if before is not None and self.into.channel != before:
            self.past.append(before)
        return frame

    def report(self, now: float) -> HubClientStatus:
        """How it stands with it."""
        here = self.into.channel is not None and self.into.alive(now)
        return HubClientStatus(self.peer, here, self.out.latency, self.relayed, self.deposited, self.lost)


class Hub:
    """A running hub, in a thread of its own.

    Args:
        contacts: every participant.
        groups: who sums together, by the name of the group.
        secret_key: the hub's own CURVE key, 40 characters of Z85.
        listen: where to bind, such as `tcp://*:7000`.
        record: told of everything that the hub ever sees or sends, for audits.

    Raises:
        InputError: that is no address.
        TransportError: the address is in use.
    """

    def __init__(
        self,
        contacts: Mapping[PeerId, Contact],
        groups: Mapping[str, Collection[PeerId]],
        secret_key: bytes,
        listen: str,
        record: Record | None = None,
    ) -> None:
        self.rejections = RejectionLog()
        self.failure: Exception | None = None
        self._record = record
        self._incarnation = os.urandom(link.INCARNATION_BYTES)
        self._clients: dict[PeerId, HubClient] = {}
        self._aggregator = HubAggregator(groups)
        self._update: tuple[Mapping[PeerId, Contact], Mapping[str, Collection[PeerId]]] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._context: Context = zmq.Context()
        try:
            self._authenticator = ZapAuthenticator(self._context, {}, self.rejections)
            most = MESSAGES_FROM_EACH * len(contacts)
            self._router, self._monitor = listening_socket(self._context, secret_key, listen, most)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._limits = ConnectionLimits(self.rejections, port_of(self._router))
        self._handshakes = HandshakeMonitor(self.rejections, self._limits)
        self._poller = zmq.Poller()
        for each in (self._authenticator.socket, self._router, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        self._adopt(contacts, groups)
        self._thread = threading.Thread(target=self._run, name="cgd-hub", daemon=True)
        self._thread.start()

    def update(self, contacts: Mapping[PeerId, Contact], groups: Mapping[str, Collection[PeerId]]) -> None:
        """Have these participants and groups from now on."""
        with self._changed:
            self._update = contacts, groups

    def report(self) -> list[HubClientStatus]:
        """How it stands with every participant."""
        now = time.monotonic()
        with self._changed:
            return [client.report(now) for client in self._clients.values()]

    def close(self) -> None:
        """Stop; a second call does nothing."""
        self._closed = True
        self._thread.join()

    # What the thread does.

    def _adopt(self, contacts: Mapping[PeerId, Contact], groups: Mapping[str, Collection[PeerId]]) -> None:
        names = {contact.public_key: name for name, contact in contacts.items() if name != HUB}
        kept = {name for key, name in names.items() if self._authenticator.names.get(key) == name}
        self._authenticator.names = names
        self._limits.members = self._limits.peers = len(names)
        self._clients = {name: client for name, client in self._clients.items() if name in kept}
        if self._aggregator.adopt(groups):
            for client in self._clients.values():
                client.tell(AGAIN)
        for name in sorted(names.values()):
            if name not in self._clients:
                self._clients[name] = self._client(name)  # whose first word this is

    def _client(self, name: PeerId) -> HubClient:
        return HubClient(name, self._incarnation, self.rejections, self)

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._changed:
                    if self._update is not None:
                        update, self._update = self._update, None
                        self._adopt(*update)
                    pause = self._send_all()
                ready = dict(self._poller.poll(int(1000 * pause)))
                with self.rejections.guard("a stranger"):
                    self._check_connections(ready)
                if self._router in ready:
                    with self._changed, self.rejections.guard("a participant"):
                        self._take_in()
        except Exception as error:
            log.exception("the hub stopped", extra={"event": "failed"})
            self.failure = error
        finally:
            self._context.destroy(linger=1000)

    def _check_connections(self, ready: Mapping[Any, int]) -> None:
        """Let in whoever may come in, and cut who keeps too much."""
        if self._authenticator.socket in ready:
            self._authenticator.handle_request()
        if self._monitor in ready:
            self._handshakes.note(self._monitor, TURN)
        self._limits.check(time.monotonic())

    def _send_all(self) -> float:
        """Send what the hub has to say itself; how long to sleep after that, at most."""
        pause = SECONDS_BETWEEN_CHECKS
        for client in self._clients.values():
            with self.rejections.guard(client.peer):
                pause = min(pause, self._send_to(client))
        return pause

    def _send_to(self, client: HubClient) -> float:
        """Send what there is for a participant; how long there will be nothing more, at most."""
        client.offer_more()
        while client.has_room():
            datagram = client.out.next_datagram(time.monotonic())
            if datagram is None:
                return max(0.005, client.out.rest(time.monotonic()))
            client.send_data(datagram)
        return SECONDS_BETWEEN_CHECKS

    def _take_in(self) -> None:
        for _ in range(TURN):
            try:
                channel = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = read_message(self._router)
            name = self._authenticator.member_of(message)
            self._limits.took(message, name)
            with self.rejections.guard(name or FORMER):
                self._take_message(name, channel, message)

    def _take_message(self, name: PeerId | None, channel: bytes, message: Message) -> None:
        if name is None:
            self.rejections.add(FORMER, "a message", "its key is not in the federation file any more")
        elif message.parts != 2:
            self.rejections.add(name, "a malformed message", f"{message.parts} parts instead of 2")
        elif channel not in self._clients[name].past:
            self._take(self._clients[name], channel, message.first.bytes, message.last.bytes)

    def _take(self, client: HubClient, channel: bytes, to: bytes, payload: bytes) -> None:
        if self._record is not None:
            self._record(True, client.peer, to, payload)
        if to == TO_HUB:
            self._on_hub_datagram(client, channel, payload)
        elif client.into.channel == channel:
            self._relay(client, to, payload)
        else:
            self.rejections.add(client.peer, "a message for another", "it has not been let in", level=logging.INFO)

    def _relay(self, client: HubClient, to: bytes, payload: bytes) -> None:
        """Pass a message on."""
        recipient = self._clients.get(to.decode(errors="replace"))
        if recipient is None or recipient is client:
            self.rejections.add(client.peer, "a message", "it is for nobody who is in the federation file")
            return
        if recipient.has_room() and self.send(recipient, recipient.into.channel, client.peer.encode(), payload):
            client.relayed += len(payload)
        elif payload:
            recipient.lost += 1
            self.send(client, client.into.channel, to, b"")

    def _on_hub_datagram(self, client: HubClient, channel: bytes, payload: bytes) -> None:
        """Take in what is for the hub itself."""
        try:
            datagram = link.from_bytes(payload)
        except DatagramError as error:
            self.rejections.add(client.peer, "a malformed message", str(error))
            return
        if not datagram.kind.from_sender:
            client.on_ack(datagram, channel)
            return
        frame = client.on_data(datagram, channel)
        if frame is None:
            return
        answer = client.into.consumed(len(frame))
        if answer is not None:
            client.send_ack(channel, answer)
        client.deposited += len(frame)
        try:
            told = self._aggregator.receive(client.peer, frame)
        except RemoteProtocolError as error:
            self.rejections.add(client.peer, "a deposit", str(error))
            return
        if told is not None:
            self._tell(*told)

    def _tell(self, members: Collection[PeerId], total: bytes) -> None:
        for member in members:
            if member in self._clients and not self._clients[member].tell(total):
                self.rejections.add(member, "a total", "it has not taken those before, and we keep no more for it")

    def send(self, client: HubClient, channel: bytes | None, name: bytes, payload: bytes) -> bool:
        """Send a message to a participant; False if it is not there."""
        if self._record is not None:
            self._record(False, client.peer, name, payload)
        return channel is not None and send_to(self._router, channel, name, payload)
