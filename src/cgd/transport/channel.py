"""End-to-end encryption of messages that the hub relays, and detection of tampering with them.

Both ends have CURVE keys, which are X25519 keys, and know each other's public key from the federation file. Two
processes agree on a session by Noise_KK_25519_AESGCM_SHA256 (`secagg/noise.py`). The rules:

1. A process that has a message to send and no session starts a handshake: it sends the first message and receives the
   second. The prologue has the version, both public keys and both names. The payload is the name of the process: 8
   random bytes.
2. All other messages are transport messages: AES-GCM under the keys of the session. The nonce is a sequence number in
   the header, so that a lost message does no harm. The header is authenticated, too.
3. A first message may be replayed, or forged with our own stolen secret key. So it changes nothing: the session that
   our second message offers is used from its first transport message on, which only the peer can create, and only now.
   Until then the earlier sessions stay in use, and messages that do not decrypt under an offered session are stale.
4. Messages of an unknown session are for an earlier process of ours, or from an earlier process of the peer. They are
   stale, which is not a fault. A hub that alters the name of a session has the effect of losing the message.
5. Messages are numbered. A message whose number is not above the last one of its connection was repeated or reordered.
   A gap means that messages were lost, and a few losses are no fault: connections are lost, and links retransmit.
   Continued losses are reported. Losses do not count while we, or the sender, had to reconnect.
6. The header has a fingerprint of both names and public keys. If it is not ours, the message was encrypted for another
   participant, or under another federation file than ours, which is the sender's fault or ours and not the hub's.
7. A message that is altered, swapped, repeated or reordered has the effect of a lost one. The hub can cause that, and
   so can the sender: it can send any bytes, and choose its numbers. So it proves no fault of the hub, and ends no
   program.

    offset  bytes  field
    0       4      "CGDS"
    4       1      version
    5       1      kind: first message, second message, transport message
    6       2      zero
    8       8      fingerprint of the sender's and the recipient's names and public keys
    16      8      name of the session: the beginning of the initiator's ephemeral key
    24      8      the number of the sender's connection to the hub, from 1 (upper 3 bytes), and of this message in it;
                   zero in handshakes
    32      …      a message of Noise

No I/O here.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from zmq.utils import z85

from cgd.errors import InputError
from cgd.secagg.noise import KEY_BYTES, Handshake, agree
from cgd.transport.channel_session import ChannelSession, SequenceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import Buffer, PeerId

VERSION = 2
PROCESS_BYTES = 8
NO_PROCESS = b""
_MAGIC = b"CGDS"
_HEADER = struct.Struct("<4sBBH8s8sQ")
HEADER_BYTES = _HEADER.size
_SESSION_NAME_BYTES = 8
# More than two honest processes need. Dropping a handshake or a session costs a new handshake.
MAX_HANDSHAKES = 8
MAX_SESSIONS = 8
# First messages that are recognised if they are repeated. Answering an older one again does no harm, see rule 3.
MAX_ANSWERED_HANDSHAKES = 1024
# After so many HELLOs without a message from the peer, a new session is started.
MAX_UNANSWERED_HELLOS = 4
# The penalty of a gap is the number of lost messages, up to a maximum. A message without a gap reduces the total by
# LOSS_CREDIT. Above MAX_LOSS_PENALTY it is reported. So a lasting loss of a tenth or one long gap is not reported, a
# lasting loss of half of the messages is.
MAX_GAP_PENALTY = 16
LOSS_CREDIT = 0.25
MAX_LOSS_PENALTY = 256

T = TypeVar("T")


class PacketKind(IntEnum):
    """The kinds of packets."""

    FIRST = 1
    SECOND = 2
    TRANSPORT = 3


class IncompatibleError(ValueError):
    """A message was encrypted under other keys than those of our federation file, or by another version."""


class RelayError(ValueError):
    """A relayed message is not what the peer sent to us, or not the next one; the hub or the peer has caused it.

    Attributes:
        kind: what it is, for the log.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Opened:
    """The result of opening a packet.

    Attributes:
        process: the process of the peer that sent it; empty if that is not proved.
        content: the decrypted content; None for a handshake or a stale packet.
        answer: the packet to send back at once; None if there is none.
        stale: True if it belongs to an unknown session or to a connection that was replaced.
        losses: the number of messages lost so far, if losses continue; else 0.
    """

    process: bytes = NO_PROCESS
    content: Buffer | None = None
    answer: bytes | None = None
    stale: bool = False
    losses: int = 0


class ChannelFactory:
    """Creates and keeps this process's channels with all peers.

    Args:
        me: the name of this participant.
        secret_key: our CURVE key, 40 characters of Z85.
        public_keys: the keys of all participants, by name.
    """

    def __init__(self, me: PeerId, secret_key: bytes, public_keys: Mapping[PeerId, bytes]) -> None:
        self.me = me
        self.public_keys = dict(public_keys)
        self.process = os.urandom(PROCESS_BYTES)
        self.static = X25519PrivateKey.from_private_bytes(z85.decode(secret_key))
        self._channels: dict[tuple[PeerId, bytes], Channel] = {}

    def with_peer(self, peer: PeerId) -> Channel:
        """Return the channel with a peer; the same one for the same key, so that its sessions stay in use.

        Raises:
            InputError: the peer's public key is of small order.
        """
        key = self.public_keys[peer]
        if (peer, key) not in self._channels:
            try:
                agree(self.static, z85.decode(key))
            except ValueError:
                raise InputError(f"the public key of {peer}, {key!r}, cannot be used; it needs a new one") from None
            self._channels[peer, key] = Channel(self, peer)
        return self._channels[peer, key]

    def fingerprint(self, sender: PeerId, recipient: PeerId) -> bytes:
        """Return the fingerprint of the names and keys of one direction."""
        return hashlib.sha256(b"cgd fingerprint" + self.encode_pair(sender, recipient)).digest()[:8]

    def encode_pair(self, sender: PeerId, recipient: PeerId) -> bytes:
        """Encode both public keys, which have a fixed length, and both names, which have no zero byte."""
        return self.public_keys[sender] + self.public_keys[recipient] + f"{sender}\0{recipient}".encode()

    def find_pair(self, fingerprint: bytes) -> tuple[PeerId, PeerId] | None:
        """Return the sender and the recipient of a fingerprint, if our federation file has them."""
        pairs = ((one, other) for one in self.public_keys for other in self.public_keys if one != other)
        return next((pair for pair in pairs if self.fingerprint(*pair) == fingerprint), None)


class Channel:
    """Encrypts the messages to one peer, and decrypts those from it.

    Attributes:
        lost: the number of messages of the peer that are known to be lost.
        process: the process of the peer that was the last to prove its key; empty if there is none.
    """

    def __init__(self, factory: ChannelFactory, peer: PeerId) -> None:
        self.lost = 0
        self.process = NO_PROCESS
        self._factory, self._peer = factory, peer
        self._peer_key = z85.decode(factory.public_keys[peer])
        self._outbound_fingerprint = factory.fingerprint(factory.me, peer)
        self._inbound_fingerprint = factory.fingerprint(peer, factory.me)
        self._outbound_prologue = _prologue(factory.encode_pair(factory.me, peer))
        self._inbound_prologue = _prologue(factory.encode_pair(peer, factory.me))
        self._started: OrderedDict[bytes, Handshake] = OrderedDict()  # by us, by the name of the session
        self._answered: OrderedDict[bytes, None] = OrderedDict()  # ephemeral keys of the peer
        self._offered: OrderedDict[bytes, ChannelSession] = OrderedDict()  # sessions that are not proved yet
        self._sessions: OrderedDict[bytes, ChannelSession] = OrderedDict()  # proved sessions, the newest last
        self._unanswered_hellos = 0
        self._loss_penalty = 0.0

    def start_handshake(self) -> bytes:
        """Start a handshake and return its first message."""
        handshake = Handshake(True, self._outbound_prologue, self._factory.static, self._peer_key)
        name = handshake.ephemeral[:_SESSION_NAME_BYTES]
        _put(self._started, name, handshake, MAX_HANDSHAKES)
        return _header(PacketKind.FIRST, self._outbound_fingerprint, name) + handshake.write(self._factory.process)

    def seal_hello(self, content: Buffer, connection: int) -> list[Buffer]:
        """Encrypt a message for the current process of the peer; start a handshake if no known process answers."""
        sealed = self.seal(content, self.process, connection)
        self._unanswered_hellos += 1
        messages: list[Buffer] = [] if sealed is None else [sealed]
        if sealed is None or self._unanswered_hellos > MAX_UNANSWERED_HELLOS:
            messages.append(self.start_handshake())
        return messages

    def seal(self, content: Buffer, process: bytes, connection: int) -> Buffer | None:
        """Encrypt a message for a process of the peer that has proved its key; return None without a session."""
        session = next((each for each in reversed(self._sessions.values()) if each.process == process), None)
        if session is None:
            return None
        sequence = session.next_sequence(connection)
        header = _header(PacketKind.TRANSPORT, self._outbound_fingerprint, session.name, sequence)
        return session.encrypt(sequence, content, header)

    def open(self, sealed: Buffer, connection: int) -> Opened:
        """Open a packet that the hub has relayed as one of the peer; it came by our connection `connection`.

        Raises:
            RelayError: the hub or the peer altered, swapped, repeated or reordered it.
            IncompatibleError: it was encrypted under another federation file, or by another version.
        """
        header, body = bytes(sealed[:HEADER_BYTES]), memoryview(sealed)[HEADER_BYTES:]
        kind, name, sequence = self._check_header(header)
        if kind is PacketKind.FIRST:
            return self._answer_handshake(name, bytes(body))
        if kind is PacketKind.SECOND:
            return self._complete_handshake(name, bytes(body))
        proved = name in self._sessions
        session = self._sessions[name] if proved else self._offered.get(name)
        if session is None:
            return Opened(stale=True)
        try:
            content = session.decrypt(sequence, body, header)
        except ValueError:
            if proved:
                raise self._altered("its authentication tag is wrong") from None
            return Opened(stale=True)
        if not proved:
            del self._offered[name]
            self._use(session)
        late = self._check_sequence(session, sequence, connection)
        self._unanswered_hellos = 0
        if late:
            return Opened(session.process, stale=True)
        return Opened(session.process, content, losses=self._continued_losses())

    def _answer_handshake(self, name: bytes, body: bytes) -> Opened:
        """Answer a first message; see rule 3."""
        ephemeral = body[:KEY_BYTES]
        if ephemeral[:_SESSION_NAME_BYTES] != name:
            raise self._altered("its header is not what the sender wrote")
        if ephemeral in self._answered:
            raise self._repeated()
        handshake = Handshake(False, self._inbound_prologue, self._factory.static, self._peer_key)
        process = self._read_process(handshake, body)
        answer = _header(PacketKind.SECOND, self._outbound_fingerprint, name) + handshake.write(self._factory.process)
        _put(self._answered, ephemeral, None, MAX_ANSWERED_HANDSHAKES)
        _put(self._offered, name, ChannelSession(name, process, handshake.split()), MAX_HANDSHAKES)
        return Opened(answer=answer)

    def _complete_handshake(self, name: bytes, body: bytes) -> Opened:
        """Process the second message of a handshake that we started; it proves the peer's key."""
        if name in self._sessions:
            raise self._repeated()
        if name not in self._started:
            return Opened(stale=True)
        handshake = self._started[name]
        process = self._read_process(handshake, body)
        del self._started[name]
        self._use(ChannelSession(name, process, handshake.split()))
        return Opened(process)

    def _read_process(self, handshake: Handshake, body: bytes) -> bytes:
        """Read the peer's message of a handshake and return its process."""
        try:
            process = handshake.read(body)
        except ValueError:
            raise self._altered("its authentication tag is wrong") from None
        if len(process) != PROCESS_BYTES:
            raise IncompatibleError(f"its handshake names a process by {len(process)} bytes instead of {PROCESS_BYTES}")
        return process

    def _use(self, session: ChannelSession) -> None:
        """Add a proved session; messages are sent by the newest one."""
        self.process, self._unanswered_hellos = session.process, 0
        _put(self._sessions, session.name, session, MAX_SESSIONS)

    def _check_header(self, header: bytes) -> tuple[PacketKind, bytes, int]:
        if len(header) < HEADER_BYTES or not header.startswith(_MAGIC):
            raise self._altered("it is truncated, or not encrypted at all")
        _, version, kind, zero, fingerprint, name, sequence = _HEADER.unpack(header)
        if version != VERSION:
            raise IncompatibleError(
                f"its encrypted messages are of version {version}, ours of {VERSION}; install the same cgd"
            )
        if fingerprint != self._inbound_fingerprint:
            pair = self._factory.find_pair(fingerprint)
            if pair is None:
                raise IncompatibleError("it encrypts its messages with other keys than our federation file has")
            raise RelayError("a swapped message", f"it is encrypted as one from {pair[0]} to {pair[1]}")
        if kind not in list(PacketKind) or zero or (sequence and kind != PacketKind.TRANSPORT):
            raise self._altered("its header is not what the sender wrote")
        return PacketKind(kind), name, sequence

    def _check_sequence(self, session: ChannelSession, sequence: int, connection: int) -> bool:
        """Apply rule 5; return whether the message is late."""
        try:
            lost = session.check_sequence(sequence, connection)
        except SequenceError:
            raise self._repeated() from None
        if lost is None:
            return True
        self.lost += lost
        self._loss_penalty = max(0.0, self._loss_penalty + min(lost, MAX_GAP_PENALTY) - LOSS_CREDIT)
        return False

    def _continued_losses(self) -> int:
        """Return the number of lost messages if losses continue, and begin a new measurement; else 0."""
        if self._loss_penalty <= MAX_LOSS_PENALTY:
            return 0
        self._loss_penalty = 0.0
        return self.lost

    def _altered(self, how: str) -> RelayError:
        return RelayError("an altered message", how)

    def _repeated(self) -> RelayError:
        return RelayError("a repeated or reordered message", "it is not newer than the last one")


def _header(kind: PacketKind, fingerprint: bytes, name: bytes, sequence: int = 0) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, 0, fingerprint, name, sequence)


def _prologue(pair: bytes) -> bytes:
    return b"cgd sealing" + bytes([VERSION]) + pair


def _put(items: OrderedDict[bytes, T], name: bytes, value: T, limit: int) -> None:
    """Add an item; drop the oldest ones above the limit."""
    items[name] = value
    while len(items) > limit:
        items.popitem(last=False)
