"""What passes through the hub between two participants is sealed end to end; what the hub does to it, they see.

Both ends have CURVE keys, which are X25519 keys: with its own secret half and the other's public half each computes a
secret that the hub lacks. Every process also has an ephemeral key. The rules:

1. A sealed message is a header, its proof, and a body. The proof is an HMAC of the header under a key of the static
   secret and of both names, in the order of the direction. So the header is known to be the sender's, and to be for us.
2. The body is encrypted (AES-GCM) under a key of the static secret and of the ephemeral keys of both ends. Only a HELLO
   may do without the recipient's, which the sender need not know yet. So what was recorded cannot be read when both
   processes are gone, and means nothing to those who come after them.
3. Messages for another life of ours are stale. That is no fault of anybody's.
4. Messages are counted. One that is not beyond the last of its connection was repeated or reordered. A gap means that
   some were lost, and few losses are no fault: connections break, and links send again what was lost. Losses that go on
   are. What is lost while we, or the sender, had to connect anew does not count.
5. The header has a fingerprint of both names and public keys. If it is not ours, the message was sealed for another
   participant, or under another federation file than ours, which is the sender's fault or ours and not the hub's.

    offset  bytes  field
    0       4      "CGDS"
    4       1      version
    5       3      zero
    8       8      fingerprint of the sender's and the recipient's names and public keys
    16      32     the sender's ephemeral key
    48      32     the recipient's, or zeros
    80      8      the sender's connection with the hub, counted from 1 (upper 3 bytes), and the place of this message
    88      16     proof
    104     …      body

No I/O here.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from cgd.errors import HubError
from cgd.protocol import noise
from cgd.protocol.ephemeral import Ephemeral

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cgd.protocol.messages import Buffer, PeerId

VERSION = 1
NOBODY = bytes(32)
_MAGIC = b"CGDS"
_HEADER = struct.Struct("<4sB3x8s32s32sQ")
_PROOF_BYTES = 16
PREFIX_BYTES = _HEADER.size + _PROOF_BYTES
_CONNECTION = 1 << 40
# Peers' processes whose keys, or counts, are kept; far more than there are, unless somebody makes trouble.
MOST_KEYS = 8
MOST_LIVES = 10_000
MOST_CONNECTIONS = 64
# A gap costs what was lost, but not more than this; a message without one pays back a fraction; beyond the limit there
# are too many. So a tenth may be lost for ever, and one long silence is forgiven, but not that half of all gets lost.
MOST_FOR_A_GAP = 16
PAID_BACK = 0.25
MOST_LOSSES = 256


class ForeignError(ValueError):
    """A message that was sealed under other keys than ours, or is of another version: another federation file."""


@dataclass(frozen=True)
class Opened:
    """A message that is the sender's, and for us.

    Attributes:
        process: the sender's ephemeral key.
        content: what it says; None if it is meant for another life of ours, or of a connection that broke.
        fresh: whether it was sealed for this life of ours; if not, it may say HELLO and nothing else.
    """

    process: bytes
    content: bytes | None
    fresh: bool


@dataclass
class Count:
    """Where one process of a peer is.

    Attributes:
        last: the place of its last message, by its connection with the hub.
        ours: our connection, by which that came.
    """

    last: dict[int, int]
    ours: int


class Sealing:
    """One participant's end of what it has with each other one, as long as its process lives.

    Args:
        me: our name.
        secret_key: our CURVE key, 40 characters of Z85.
        public_keys: everybody's, by name.
    """

    def __init__(self, me: PeerId, secret_key: bytes, public_keys: Mapping[PeerId, bytes]) -> None:
        self.me = me
        self.public_keys = dict(public_keys)
        self.ephemeral = Ephemeral()
        self._secret = X25519PrivateKey.from_private_bytes(z85.decode(secret_key))
        self._channels: dict[tuple[PeerId, bytes], Channel] = {}

    def with_peer(self, peer: PeerId) -> Channel:
        """Our channel to a peer: always the same for the same key, because what it has counted must not come again."""
        key = self.public_keys[peer]
        if (peer, key) not in self._channels:
            public = X25519PublicKey.from_public_bytes(z85.decode(key))
            self._channels[peer, key] = Channel(self, peer, self._secret.exchange(public))
        return self._channels[peer, key]

    def fingerprint(self, sender: PeerId, recipient: PeerId) -> bytes:
        """What tells the names and keys of this direction from those of any other."""
        keys = self.public_keys[sender] + self.public_keys[recipient]
        return hashlib.sha256(b"cgd fingerprint" + keys + _names(sender, recipient)).digest()[:8]

    def whose(self, fingerprint: bytes) -> tuple[PeerId, PeerId] | None:
        """The sender and the recipient of this fingerprint, if our file has them; looked for only if it is not ours."""
        pairs = ((one, other) for one in self.public_keys for other in self.public_keys if one != other)
        return next((pair for pair in pairs if self.fingerprint(*pair) == fingerprint), None)


class Channel:
    """Seals what goes to one peer, and opens what comes from it."""

    def __init__(self, sealing: Sealing, peer: PeerId, static: bytes) -> None:
        self.lost = 0
        """How many messages of the peer did not arrive, that we know of."""
        self._own, self._peer, self._static = sealing, peer, static
        self._out_names, self._in_names = _names(sealing.me, peer), _names(peer, sealing.me)
        self._out_print = sealing.fingerprint(sealing.me, peer)
        self._in_print = sealing.fingerprint(peer, sealing.me)
        self._out_proof = _derive(static, b"cgd proof", [self._out_names])
        self._in_proof = _derive(static, b"cgd proof", [self._in_names])
        self._ciphers: OrderedDict[tuple[bytes, bytes], AESGCM] = OrderedDict()
        self._counts: dict[bytes, Count] = {}
        self._sent = (0, 0)  # our connection, and how many messages have gone by it
        self._losses = 0.0

    def seal(self, content: bytes, process: bytes, connection: int) -> bytes:
        """Seal a message for a process of the peer; NOBODY if it is not known, for a HELLO."""
        place = self._sent[1] if self._sent[0] == connection else 0
        self._sent = connection, place + 1
        count = connection * _CONNECTION + place
        own = self._own.ephemeral.public
        header = _HEADER.pack(_MAGIC, VERSION, self._out_print, own, process, count)
        proof = _prove(self._out_proof, header)
        cipher = self._cipher(own, process, self._out_names)
        return b"".join((header, proof, cipher.encrypt(_nonce(count), content, header)))

    def open(self, sealed: Buffer, connection: int) -> Opened:
        """Open what the hub says is a message of the peer; `connection` is ours, by which it came.

        Raises:
            HubError: the hub altered, swapped, repeated or reordered it, or loses too many.
            ForeignError: it was sealed under another federation file, or by another version.
        """
        header, body = bytes(sealed[: _HEADER.size]), sealed[PREFIX_BYTES:]
        proof = bytes(sealed[_HEADER.size : PREFIX_BYTES])
        process, to, count = self._check_header(header, proof)
        late = self._count(process, count, connection)
        own = self._own.ephemeral.public
        if late or to not in (own, NOBODY):
            return Opened(process, None, False)
        try:
            content = self._cipher(process, to, self._in_names).decrypt(_nonce(count), body, header)
        except (InvalidTag, ValueError):
            raise HubError(f"altered a message from {self._peer}: its seal is broken") from None
        return Opened(process, content, to == own)

    def _check_header(self, header: bytes, proof: bytes) -> tuple[bytes, bytes, int]:
        if len(proof) < _PROOF_BYTES or not header.startswith(_MAGIC):
            raise HubError(f"altered a message from {self._peer}: it is truncated, or not sealed at all")
        _, version, fingerprint, process, to, count = _HEADER.unpack(header)
        if version != VERSION:
            raise ForeignError(f"its seals are of version {version}, ours of {VERSION}; install the same cgd")
        if fingerprint != self._in_print:
            pair = self._own.whose(fingerprint)
            if pair is None:
                raise ForeignError("it seals its messages under other keys than our federation file has")
            raise HubError(
                f"swapped messages: what it gives us as a message from {self._peer} is one from {pair[0]} to {pair[1]}"
            )
        if not hmac.compare_digest(proof, _prove(self._in_proof, header)):
            raise HubError(f"altered a message from {self._peer}: its header is not what {self._peer} wrote")
        return process, to, count

    def _count(self, process: bytes, count: int, connection: int) -> bool:
        """Rule 4; whether it is late: of a connection of the sender's that was followed by another."""
        theirs, place = divmod(count, _CONNECTION)
        known = self._counts.get(process)
        if known is None:
            if len(self._counts) >= MOST_LIVES:  # none of them may be forgotten
                raise ForeignError(f"it was started more than {MOST_LIVES} times; start us again, too")
            self._counts[process] = Count({theirs: place}, connection)
            return False
        latest, last = max(known.last), known.last.get(theirs, -1)
        if place <= last:
            raise HubError(f"repeated or reordered messages from {self._peer}: one came that is older than the last")
        known.last[theirs] = place
        if theirs < latest:
            return True
        if len(known.last) > MOST_CONNECTIONS:
            del known.last[min(known.last)]
        lost = place - last - 1 if connection == known.ours else 0
        known.ours = connection
        self.lost += lost
        self._losses = max(0.0, self._losses + min(lost, MOST_FOR_A_GAP) - PAID_BACK)
        if self._losses > MOST_LOSSES:
            self._losses = 0.0
            raise HubError(f"loses messages from {self._peer}: {self.lost} so far, and it goes on")
        return False

    def _cipher(self, sender: bytes, recipient: bytes, names: bytes) -> AESGCM:
        key = sender, recipient
        if key not in self._ciphers:
            other = recipient if sender == self._own.ephemeral.public else sender
            secret = self._static
            if recipient != NOBODY:
                secret += noise.agree(self._own.ephemeral.private, other)
            self._ciphers[key] = AESGCM(_derive(secret, b"cgd seal", [names, sender, recipient]))
            if len(self._ciphers) > 2 * MOST_KEYS:
                self._ciphers.popitem(last=False)
        return self._ciphers[key]


def _names(sender: PeerId, recipient: PeerId) -> bytes:
    return f"{sender}\0{recipient}".encode()


def _prove(key: bytes, header: bytes) -> bytes:
    return hmac.digest(key, header, "sha256")[:_PROOF_BYTES]


def _nonce(count: int) -> bytes:
    return count.to_bytes(12, "big")


def _derive(secret: bytes, purpose: bytes, about: Iterable[bytes]) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=b"\0".join((purpose, *about))).derive(secret)
