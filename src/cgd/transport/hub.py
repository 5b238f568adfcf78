"""`Hub`: relays messages of participants that only make outgoing connections, and adds up their deposits.

It has no data, and no key but its own. Participants connect to it (a DEALER each, to its ROUTER) and prove their keys;
unlisted keys are rejected. The rules:

1. A message has two parts: a name and a payload. To the hub, the name is that of the recipient; from the hub, that of
   the sender, which the hub takes from the key of the connection. The name of the hub itself is empty.
2. A message for another participant is relayed at once, or dropped: it is encrypted, and the participants' links
   retransmit. The hub neither reads nor stores it. If the recipient is not connected, the sender gets an empty message
   from its name.
3. The hub has a link in both directions with each participant. It carries deposits (`secagg/hub_aggregator.py`) and
   totals. The first frame to each participant is `ResendRequest`, because the hub keeps nothing across restarts.
4. Of several processes with one key, one is accepted: the one that has the link. The hub relays only for that one.

So the hub can be killed and restarted at any time: nothing is lost.
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
from cgd.secagg.reduction import MAX_SLICES_AHEAD
from cgd.transport import link
from cgd.transport.auth import FORMER_PARTICIPANT, UNKNOWN_CLIENT, HandshakeMonitor, RejectionLog, ZapAuthenticator
from cgd.transport.connections import listening_socket, port_of, read_message
from cgd.transport.limits import SECONDS_BETWEEN_CHECKS, ConnectionLimits
from cgd.transport.link import DatagramError
from cgd.transport.receiver import MAX_MESSAGES_PER_TURN
from cgd.transport.routes import HUB_NAME, Route, send_to

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.connections import Contact, Context, Message
    from cgd.transport.link import Datagram

    # Called with True for a received and False for a sent message, the participant, and the two parts of the message.
    MessageRecorder = Callable[[bool, PeerId, bytes, Buffer], None]

log = logging.getLogger("cgd.hub")

# The send queue for a participant has room for a window of large messages from each other participant.
MESSAGES_PER_PARTICIPANT = 16
MAX_REPLACED_CONNECTIONS = 16
MIN_PAUSE_SECONDS = 0.005
RESEND_REQUEST = to_bytes(Frame(bytes(SESSION_BYTES), 0, ResendRequest()))


@dataclass(frozen=True)
class HubClientStatus:
    """The status of one participant, for display.

    Attributes:
        name: the name of the participant.
        connected: True if it is connected.
        latency: the round-trip time in seconds, if known.
        relayed: the bytes relayed from it to others.
        deposited: the bytes of its deposits.
        lost: the number of messages for it that were dropped, because it was not connected or its queue was full.
    """

    name: PeerId
    connected: bool
    latency: float | None
    relayed: int
    deposited: int
    lost: int


class HubClient(Route):
    """The hub's route to one participant."""

    def __init__(self, peer: PeerId, incarnation: bytes, rejections: RejectionLog, hub: Hub) -> None:
        super().__init__(peer, incarnation, HUB.encode(), rejections)
        self.relayed = self.deposited = self.lost = 0
        self.replaced_connections: deque[bytes] = deque(maxlen=MAX_REPLACED_CONNECTIONS)
        self._hub = hub
        self._queue: deque[Buffer] = deque()
        self.outbound.enqueue(RESEND_REQUEST)

    def can_send(self) -> bool:
        """Return whether the participant is connected."""
        return self.inbound.reply_to is not None and self.inbound.is_alive(time.monotonic())

    def send_data(self, datagram: Datagram) -> None:
        """Send to the accepted process."""
        if self.inbound.reply_to is not None:
            self.send_ack(self.inbound.reply_to, datagram)

    def send_ack(self, reply_to: bytes, datagram: Datagram) -> bool:
        """Send by the connection that the participant has made."""
        return self._hub.send(self, reply_to, HUB_NAME, datagram.encode())

    def is_lost(self) -> bool:
        """Return whether the participant is not connected."""
        return not self.can_send()

    def outbound_problem(self, now: float) -> str:  # noqa: ARG002
        """Return that it is not connected."""
        return "not connected"

    def enqueue(self, frame: Buffer) -> bool:
        """Accept a frame for sending; return False if the participant has left too many unread."""
        if len(self._queue) > 4 * MAX_SLICES_AHEAD:
            return False
        self._queue.append(frame)
        self.fill_window()
        return True

    def fill_window(self) -> None:
        """Move frames from the queue to the link while its window has room."""
        while self._queue and self.outbound.enqueue(self._queue[0]):
            self._queue.popleft()

    def on_data(self, datagram: Datagram, reply_to: bytes) -> Buffer | None:
        """Process a datagram of the participant; store its previous connection if this one replaces it."""
        before = self.inbound.reply_to
        frame = super().on_data(datagram, reply_to)
        if before is not None and self.inbound.reply_to != before:
            self.replaced_connections.append(before)
        return frame

    def report(self) -> HubClientStatus:
        """Return the status of the participant."""
        return HubClientStatus(
            self.peer, self.can_send(), self.outbound.latency, self.relayed, self.deposited, self.lost
        )


class Hub:
    """A running hub, in its own thread.

    Args:
        contacts: all participants.
        groups: the members of each group that sums, by its name.
        secret_key: the hub's CURVE key, 40 characters of Z85.
        listen: the address to bind, such as `tcp://*:7000`.
        record: called with every message that the hub receives or sends, for audits.

    Raises:
        InputError: `listen` is not an address.
        TransportError: the address is in use.
    """

    def __init__(
        self,
        contacts: Mapping[PeerId, Contact],
        groups: Mapping[str, Collection[PeerId]],
        secret_key: bytes,
        listen: str,
        record: MessageRecorder | None = None,
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
            max_queued = MESSAGES_PER_PARTICIPANT * len(contacts)
            self._router, self._monitor = listening_socket(self._context, secret_key, listen, max_queued)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._limits = ConnectionLimits(self.rejections, port_of(self._router))
        self._handshakes = HandshakeMonitor(self.rejections, self._limits)
        self._poller = zmq.Poller()
        for each in (self._authenticator.socket, self._router, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        self._apply_update(contacts, groups)
        self._thread = threading.Thread(target=self._run, name="cgd-hub", daemon=True)
        self._thread.start()

    def update(self, contacts: Mapping[PeerId, Contact], groups: Mapping[str, Collection[PeerId]]) -> None:
        """Replace the participants and groups."""
        with self._changed:
            self._update = contacts, groups

    def report(self) -> list[HubClientStatus]:
        """Return the status of every participant."""
        with self._changed:
            return [client.report() for client in self._clients.values()]

    def close(self) -> None:
        """Stop; a second call does nothing."""
        self._closed = True
        self._thread.join()

    # The hub's thread.

    def _apply_update(self, contacts: Mapping[PeerId, Contact], groups: Mapping[str, Collection[PeerId]]) -> None:
        names = {contact.public_key: name for name, contact in contacts.items() if name != HUB}
        kept = {name for key, name in names.items() if self._authenticator.names.get(key) == name}
        self._authenticator.names = names
        self._limits.members = self._limits.peers = len(names)
        self._clients = {name: client for name, client in self._clients.items() if name in kept}
        if self._aggregator.adopt(groups):
            for client in self._clients.values():
                client.enqueue(RESEND_REQUEST)
        for name in sorted(names.values()):
            if name not in self._clients:
                self._clients[name] = HubClient(name, self._incarnation, self.rejections, self)

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._changed:
                    if self._update is not None:
                        update, self._update = self._update, None
                        self._apply_update(*update)
                    pause = self._send_all()
                ready = dict(self._poller.poll(int(1000 * pause)))
                with self.rejections.catch_errors(UNKNOWN_CLIENT):
                    self._check_connections(ready)
                if self._router in ready:
                    with self._changed, self.rejections.catch_errors("a participant"):
                        self._read_router()
        except Exception as error:
            log.exception("the hub stopped", extra={"event": "failed"})
            self.failure = error
        finally:
            self._context.destroy(linger=1000)

    def _check_connections(self, ready: Mapping[Any, int]) -> None:
        """Authenticate new connections, and close those that exceed a limit."""
        if self._authenticator.socket in ready:
            self._authenticator.handle_request()
        if self._monitor in ready:
            self._handshakes.process_events(self._monitor, MAX_MESSAGES_PER_TURN)
        self._limits.check(time.monotonic())

    def _send_all(self) -> float:
        """Send the hub's own datagrams; return the longest time to sleep after that."""
        pause = SECONDS_BETWEEN_CHECKS
        for client in self._clients.values():
            with self.rejections.catch_errors(client.peer):
                pause = min(pause, self._send_to(client))
        return pause

    def _send_to(self, client: HubClient) -> float:
        """Send the datagrams for a participant; return the longest time until the next one is due."""
        client.fill_window()
        while client.can_send():
            datagram = client.outbound.next_datagram(time.monotonic())
            if datagram is None:
                return max(MIN_PAUSE_SECONDS, client.outbound.idle_seconds(time.monotonic()))
            client.send_data(datagram)
        return SECONDS_BETWEEN_CHECKS

    def _read_router(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                reply_to = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = read_message(self._router)
            name = self._authenticator.member_of(message)
            self._limits.on_message(message, name)
            with self.rejections.catch_errors(name or FORMER_PARTICIPANT):
                self._on_message(name, reply_to, message)

    def _on_message(self, name: PeerId | None, reply_to: bytes, message: Message) -> None:
        if name is None:
            self.rejections.add(FORMER_PARTICIPANT, "a message", "its key is not in the federation file any more")
        elif message.parts != 2:
            self.rejections.add(name, "a malformed message", f"{message.parts} parts instead of 2")
        elif reply_to not in self._clients[name].replaced_connections:
            self._dispatch(self._clients[name], reply_to, message.first.bytes, message.last.buffer.toreadonly())

    def _dispatch(self, client: HubClient, reply_to: bytes, to: bytes, payload: Buffer) -> None:
        if self._record is not None:
            self._record(True, client.peer, to, payload)
        if to == HUB_NAME:
            self._on_hub_datagram(client, reply_to, payload)
        elif client.inbound.reply_to == reply_to:
            self._relay(client, to, payload)
        else:
            self.rejections.add(
                client.peer, "a message for another", "this process was not accepted", level=logging.INFO
            )

    def _relay(self, client: HubClient, to: bytes, payload: Buffer) -> None:
        """Relay a message to its recipient."""
        recipient = self._clients.get(to.decode(errors="replace"))
        if recipient is None or recipient is client:
            self.rejections.add(client.peer, "a message", "its recipient is not in the federation file")
            return
        if recipient.can_send() and self.send(recipient, recipient.inbound.reply_to, client.peer.encode(), payload):
            client.relayed += len(payload)
        elif payload:
            recipient.lost += 1
            self.send(client, client.inbound.reply_to, to, b"")

    def _on_hub_datagram(self, client: HubClient, reply_to: bytes, payload: Buffer) -> None:
        """Process a datagram for the hub itself."""
        try:
            datagram = link.from_bytes(payload)
        except DatagramError as error:
            self.rejections.add(client.peer, "a malformed message", str(error))
            return
        if not datagram.kind.from_sender:
            client.on_ack(datagram, reply_to)
            return
        frame = client.on_data(datagram, reply_to)
        if frame is None:
            return
        answer = client.inbound.mark_consumed(len(frame))
        if answer is not None:
            client.send_ack(reply_to, answer)
        client.deposited += len(frame)
        try:
            finished = self._aggregator.receive(client.peer, frame)
        except RemoteProtocolError as error:
            self.rejections.add(client.peer, "a deposit", str(error))
            return
        if finished is not None:
            self._send_total(*finished)

    def _send_total(self, members: Collection[PeerId], total: Buffer) -> None:
        for member in members:
            if member in self._clients and not self._clients[member].enqueue(total):
                self.rejections.add(member, "a total", "it has not read the previous ones, and its queue is full")

    def send(self, client: HubClient, reply_to: bytes | None, name: bytes, payload: Buffer) -> bool:
        """Send a message to a participant; return False if it is not connected."""
        if self._record is not None:
            self._record(False, client.peer, name, payload)
        return reply_to is not None and send_to(self._router, reply_to, name, payload)
