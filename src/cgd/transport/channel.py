"""What passes through the hub between two participants is encrypted end to end; what the hub does to it, they notice.

Both ends have CURVE keys, which are X25519 keys, and know each other's public half from the federation file. Two
processes agree on a session by Noise_KK_25519_AESGCM_SHA256 (`secagg/noise.py`). The rules:

1. Whoever has something to say and no session begins a handshake: it sends the first message and gets the second. The
   prologue has the version, both public keys and both names. The payload names the process: 8 random bytes.
2. Everything else is a transport message: AES-GCM under the keys of the session. Its nonce is a counter that is in the
   header, so that a lost message does no harm. The header is authenticated with it.
3. A first message may be an old one, or made by somebody who has got our secret key. So it changes nothing: the session
   that we offer in the second message is used from its first transport message on. Only the peer can make that, and
   only now. Until then the sessions of before go on, and what does not fit the offer is stale.
4. Messages of a session that we do not have are for another life of ours, or from another life of the peer's. They are
   stale, which is no fault of anybody's. A hub that alters the name of a session thereby loses the message.
5. Messages are counted. One that is not beyond the last of its connection was repeated or reordered. A gap means that
   some were lost, and few losses are no fault: connections break, and links send again what was lost. Losses that go on
   are. What is lost while we, or the sender, had to connect anew does not count.
6. The header has a fingerprint of both names and public keys. If it is not ours, the message was sealed for another
   participant, or under another federation file than ours, which is the sender's fault or ours and not the hub's.

    offset  bytes  field
    0       4      "CGDS"
    4       1      version
    5       1      kind: first message, second message, transport message
    6       2      zero
    8       8      fingerprint of the sender's and the recipient's names and public keys
    16      8      name of the session: the beginning of the initiator's ephemeral key
    24      8      the sender's connection with the hub, counted from 1 (upper 3 bytes), and the place of this message;
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

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from zmq.utils import z85

from cgd.errors import HubError, InputError
from cgd.secagg.noise import KEY_BYTES, Handshake, agree, nonce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import Buffer, PeerId

VERSION = 2
PROCESS_BYTES = 8
NOBODY = b""
_MAGIC = b"CGDS"
_HEADER = struct.Struct("<4sBBH8s8sQ")
PREFIX_BYTES = _HEADER.size
_SESSION_NAME_BYTES = 8
_CONNECTION = 1 << 40
# More than two honest processes ever need; to forget a handshake or a session costs a new handshake.
MAX_HANDSHAKES = 8
MAX_SESSIONS = 8
# First messages that are known again. To answer an older one a second time does no harm, see rule 3.
MAX_ANSWERED = 1024
# So many HELLOs without a message from the peer, and the session is taken to be gone.
MAX_UNANSWERED = 4
MAX_CONNECTIONS = 64
# A gap costs what was lost, but not more than this; a message without one pays back a fraction; beyond the limit there
# are too many. So a tenth may be lost for ever, and one long silence is forgiven, but not that half of all gets lost.
MAX_GAP_PENALTY = 16
PAID_BACK = 0.25
MAX_LOSSES = 256

T = TypeVar("T")


class PacketKind(IntEnum):
    """What a sealed message is."""

    FIRST = 1
    SECOND = 2
    TRANSPORT = 3


class ForeignError(ValueError):
    """A message that was sealed under other keys than ours, or is of another version: another federation file."""


class RepeatedError(ValueError):
    """A message is not beyond the last one."""


@dataclass(frozen=True)
class Opened:
    """What came of a message.

    Attributes:
        process: the peer's process that sent it, if that is proved.
        content: what it says to the link, if it says anything.
        answer: what to send back at once, if anything.
        stale: whether it is of a session that we do not have, or of a connection that broke.
    """

    process: bytes = NOBODY
    content: bytes | None = None
    answer: bytes | None = None
    stale: bool = False


class ChannelSession:
    """Both directions between our process and one of the peer's, under the keys of one handshake.

    Args:
        name: of the session.
        process: the peer's.
        keys: to seal by, and to open by.
    """

    def __init__(self, name: bytes, process: bytes, keys: tuple[bytes, bytes]) -> None:
        self.name, self.process = name, process
        self._out, self._into = (AESGCM(key) for key in keys)
        self._sent = (0, 0)  # our connection, and how many messages have gone by it
        self._last: dict[int, int] = {}  # the place of the peer's last message, by its connection with the hub
        self._ours = 0  # our connection, by which that came

    def next_count(self, connection: int) -> int:
        """Return the counter of the next message that goes by our connection; none comes twice."""
        place = self._sent[1] if self._sent[0] == connection else 0
        self._sent = connection, place + 1
        return connection * _CONNECTION + place

    def encrypt(self, count: int, content: bytes, header: bytes) -> bytes:
        """Encrypt a transport message."""
        return self._out.encrypt(nonce(count), content, header)

    def decrypt(self, count: int, body: Buffer, header: bytes) -> bytes:
        """Decrypt a transport message.

        Raises:
            ValueError: it is not what the peer wrote.
        """
        try:
            return self._into.decrypt(nonce(count), body, header)
        except InvalidTag:
            raise ValueError("the tag does not fit") from None

    def note(self, count: int, connection: int) -> int | None:
        """Count a message that came by our connection `connection`: return how many before it were lost.

        None if it is late: of a connection of the sender's that was followed by another.

        Raises:
            RepeatedError: it is not beyond the last of its connection.
        """
        theirs, place = divmod(count, _CONNECTION)
        first, latest, last = not self._last, max(self._last, default=0), self._last.get(theirs, -1)
        if place <= last:
            raise RepeatedError
        self._last[theirs] = place
        if theirs < latest:
            return None
        if len(self._last) > MAX_CONNECTIONS:
            del self._last[min(self._last)]
        known, self._ours = not first and connection == self._ours, connection
        return place - last - 1 if known else 0


class ChannelFactory:
    """One participant's end of what it has with each other one, as long as its process lives.

    Args:
        me: our name.
        secret_key: our CURVE key, 40 characters of Z85.
        public_keys: everybody's, by name.
    """

    def __init__(self, me: PeerId, secret_key: bytes, public_keys: Mapping[PeerId, bytes]) -> None:
        self.me = me
        self.public_keys = dict(public_keys)
        self.process = os.urandom(PROCESS_BYTES)
        self.static = X25519PrivateKey.from_private_bytes(z85.decode(secret_key))
        self._channels: dict[tuple[PeerId, bytes], Channel] = {}

    def with_peer(self, peer: PeerId) -> Channel:
        """Return our channel to a peer: always the same for the same key, so that its sessions go on.

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
        """Derive what tells the names and keys of this direction from those of any other."""
        return hashlib.sha256(b"cgd fingerprint" + self.ends(sender, recipient)).digest()[:8]

    def ends(self, sender: PeerId, recipient: PeerId) -> bytes:
        """Encode both public keys, which have a fixed length, and both names, which have no zero in them."""
        return self.public_keys[sender] + self.public_keys[recipient] + f"{sender}\0{recipient}".encode()

    def whose(self, fingerprint: bytes) -> tuple[PeerId, PeerId] | None:
        """The sender and the recipient of this fingerprint, if our file has them; looked for only if it is not ours."""
        pairs = ((one, other) for one in self.public_keys for other in self.public_keys if one != other)
        return next((pair for pair in pairs if self.fingerprint(*pair) == fingerprint), None)


class Channel:
    """Seals what goes to one peer, and opens what comes from it."""

    def __init__(self, sealing: ChannelFactory, peer: PeerId) -> None:
        self.lost = 0
        """How many messages of the peer did not arrive, that we know of."""
        self.process = NOBODY
        """The peer's process that was the last to prove itself."""
        self._own, self._peer = sealing, peer
        self._peer_key = z85.decode(sealing.public_keys[peer])
        self._out_print = sealing.fingerprint(sealing.me, peer)
        self._in_print = sealing.fingerprint(peer, sealing.me)
        self._out_prologue = _prologue(sealing.ends(sealing.me, peer))
        self._in_prologue = _prologue(sealing.ends(peer, sealing.me))
        self._begun: OrderedDict[bytes, Handshake] = OrderedDict()  # by us, by the name of the session
        self._answered: OrderedDict[bytes, None] = OrderedDict()  # the peer's ephemeral keys
        self._offered: OrderedDict[bytes, ChannelSession] = OrderedDict()  # not proved yet
        self._sessions: OrderedDict[bytes, ChannelSession] = OrderedDict()  # proved, the newest last
        self._unanswered = 0
        self._losses = 0.0

    def begin(self) -> bytes:
        """Begin a handshake: return its first message."""
        handshake = Handshake(True, self._out_prologue, self._own.static, self._peer_key)
        name = handshake.ephemeral[:_SESSION_NAME_BYTES]
        _keep(self._begun, name, handshake, MAX_HANDSHAKES)
        return _header(PacketKind.FIRST, self._out_print, name) + handshake.write(self._own.process)

    def seal_hello(self, content: bytes, connection: int) -> list[bytes]:
        """Seal what is for whatever process the peer has; begin a handshake if we know of none that answers."""
        sealed = self.seal(content, self.process, connection)
        self._unanswered += 1
        messages = [] if sealed is None else [sealed]
        if sealed is None or self._unanswered > MAX_UNANSWERED:
            messages.append(self.begin())
        return messages

    def seal(self, content: bytes, process: bytes, connection: int) -> bytes | None:
        """Seal a message for a process of the peer that has proved itself; None if we have no session with it."""
        session = next((each for each in reversed(self._sessions.values()) if each.process == process), None)
        if session is None:
            return None
        count = session.next_count(connection)
        header = _header(PacketKind.TRANSPORT, self._out_print, session.name, count)
        return header + session.encrypt(count, content, header)

    def open(self, sealed: Buffer, connection: int) -> Opened:
        """Open what the hub says is a message of the peer; `connection` is ours, by which it came.

        Raises:
            HubError: the hub altered, swapped, repeated or reordered it, or loses too many.
            ForeignError: it was sealed under another federation file, or by another version.
        """
        header, body = bytes(sealed[:PREFIX_BYTES]), bytes(sealed[PREFIX_BYTES:])
        kind, name, count = self._check_header(header)
        if kind is PacketKind.FIRST:
            return self._respond(name, body)
        if kind is PacketKind.SECOND:
            return self._complete(name, body)
        proved = name in self._sessions
        session = self._sessions[name] if proved else self._offered.get(name)
        if session is None:
            return Opened(stale=True)
        try:
            content = session.decrypt(count, body, header)
        except ValueError:
            if proved:
                raise self._altered("its seal is broken") from None
            return Opened(stale=True)
        if not proved:
            del self._offered[name]
            self._use(session)
        late = self._count(session, count, connection)
        self._unanswered = 0
        return Opened(session.process, stale=True) if late else Opened(session.process, content)

    def _respond(self, name: bytes, body: bytes) -> Opened:
        """Answer a first message; see rule 3."""
        ephemeral = body[:KEY_BYTES]
        if ephemeral[:_SESSION_NAME_BYTES] != name:
            raise self._altered("its header is not what the sender wrote")
        if ephemeral in self._answered:
            raise self._repeated()
        handshake = Handshake(False, self._in_prologue, self._own.static, self._peer_key)
        process = self._read(handshake, body)
        answer = _header(PacketKind.SECOND, self._out_print, name) + handshake.write(self._own.process)
        _keep(self._answered, ephemeral, None, MAX_ANSWERED)
        _keep(self._offered, name, ChannelSession(name, process, handshake.split()), MAX_HANDSHAKES)
        return Opened(answer=answer)

    def _complete(self, name: bytes, body: bytes) -> Opened:
        """Take the second message of a handshake that we began; it proves the peer."""
        if name in self._sessions:
            raise self._repeated()
        if name not in self._begun:
            return Opened(stale=True)
        handshake = self._begun[name]
        process = self._read(handshake, body)
        del self._begun[name]
        self._use(ChannelSession(name, process, handshake.split()))
        return Opened(process)

    def _read(self, handshake: Handshake, body: bytes) -> bytes:
        """Read the other end's message of a handshake: return the process."""
        try:
            process = handshake.read(body)
        except ValueError:
            raise self._altered("its seal is broken") from None
        if len(process) != PROCESS_BYTES:
            raise ForeignError(f"its handshake names a process by {len(process)} bytes instead of {PROCESS_BYTES}")
        return process

    def _use(self, session: ChannelSession) -> None:
        """Have a session that is proved: the newest is what we send by."""
        self.process, self._unanswered = session.process, 0
        _keep(self._sessions, session.name, session, MAX_SESSIONS)

    def _check_header(self, header: bytes) -> tuple[PacketKind, bytes, int]:
        if len(header) < PREFIX_BYTES or not header.startswith(_MAGIC):
            raise self._altered("it is truncated, or not sealed at all")
        _, version, kind, zero, fingerprint, name, count = _HEADER.unpack(header)
        if version != VERSION:
            raise ForeignError(f"its seals are of version {version}, ours of {VERSION}; install the same cgd")
        if fingerprint != self._in_print:
            pair = self._own.whose(fingerprint)
            if pair is None:
                raise ForeignError("it seals its messages under other keys than our federation file has")
            raise HubError(
                f"swapped messages: what it gives us as a message from {self._peer} is one from {pair[0]} to {pair[1]}"
            )
        if kind not in list(PacketKind) or zero or (count and kind != PacketKind.TRANSPORT):
            raise self._altered("its header is not what the sender wrote")
        return PacketKind(kind), name, count

    def _count(self, session: ChannelSession, count: int, connection: int) -> bool:
        """Rule 5; whether it is late."""
        try:
            lost = session.note(count, connection)
        except RepeatedError:
            raise self._repeated() from None
        if lost is None:
            return True
        self.lost += lost
        self._losses = max(0.0, self._losses + min(lost, MAX_GAP_PENALTY) - PAID_BACK)
        if self._losses > MAX_LOSSES:
            self._losses = 0.0
            raise HubError(f"loses messages from {self._peer}: {self.lost} so far, and it goes on")
        return False

    def _altered(self, how: str) -> HubError:
        return HubError(f"altered a message from {self._peer}: {how}")

    def _repeated(self) -> HubError:
        return HubError(f"repeated or reordered messages from {self._peer}: one came that is older than the last")


def _header(kind: PacketKind, fingerprint: bytes, name: bytes, count: int = 0) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, 0, fingerprint, name, count)


def _prologue(ends: bytes) -> bytes:
    return b"cgd sealing" + bytes([VERSION]) + ends


def _keep(kept: OrderedDict[bytes, T], name: bytes, value: T, most: int) -> None:
    """Keep the last `most`."""
    kept[name] = value
    while len(kept) > most:
        kept.popitem(last=False)
