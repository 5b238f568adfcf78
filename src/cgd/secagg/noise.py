"""Noise_KK_25519_AESGCM_SHA256: the handshake of two members that know each other's static key in advance.

The pattern is that of the Noise specification (revision 34), section 7.5:

    -> s                the initiator's static key, known in advance
    <- s                the responder's
    ...
    -> e, es, ss        first message
    <- e, ee, se        second message

For pair keys the initiator is the member whose name sorts first (`key_agreement.py`); through the hub it is the side
that starts (`transport/channel.py`). Tests compare every byte with an independent implementation.
"""

from __future__ import annotations

import copy
import hmac
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NAME = b"Noise_KK_25519_AESGCM_SHA256"
KEY_BYTES = 32
TAG_BYTES = 16


class SymmetricState:
    """The chaining key, the transcript hash and the cipher of a handshake; methods are named as in Noise.

    Args:
        prologue: data that must be the same on both sides, besides the keys.
    """

    def __init__(self, prologue: bytes) -> None:
        self._chaining_key = self._hash = NAME.ljust(32, b"\0")
        self._key: bytes | None = None
        self._nonce = 0
        self.mix_hash(prologue)

    def __repr__(self) -> str:
        return f"SymmetricState(hash={self._hash.hex()}, key=<secret>)"

    @property
    def hash(self) -> bytes:
        """The hash of the transcript so far."""
        return self._hash

    def mix_hash(self, data: bytes) -> None:
        """Mix data into the transcript."""
        self._hash = sha256(self._hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        """Mix a shared secret into the chaining key."""
        self._chaining_key, self._key = _expand(self._chaining_key, secret)
        self._nonce = 0

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        """Encrypt with the current key, if there is one, and mix the ciphertext into the transcript."""
        ciphertext = plaintext
        if self._key is not None:
            ciphertext = AESGCM(self._key).encrypt(nonce(self._nonce), plaintext, self._hash)
            self._nonce += 1
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        """Decrypt the result of `encrypt_and_hash`.

        Raises:
            ValueError: it was not encrypted with these keys and this transcript.
        """
        plaintext = ciphertext
        if self._key is not None:
            try:
                plaintext = AESGCM(self._key).decrypt(nonce(self._nonce), ciphertext, self._hash)
            except InvalidTag:
                raise ValueError("a handshake message does not match its keys") from None
            self._nonce += 1
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[bytes, bytes]:
        """Derive the two keys of the session: initiator to responder, and responder to initiator."""
        return _expand(self._chaining_key, b"")


class Handshake:
    """One side of a handshake: the initiator writes and the responder reads, then the reverse, then both split.

    An invalid message has no effect: the valid one can be read after it.

    Args:
        initiator: whether this side writes the first message.
        prologue: data that must be the same on both sides, besides the keys.
        static: our static key.
        peer: the peer's static public key.
        ephemeral: our ephemeral key; generated if not given. A given key must be used once.
    """

    def __init__(
        self,
        initiator: bool,
        prologue: bytes,
        static: X25519PrivateKey,
        peer: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self._initiator = initiator
        self._static, self._peer = static, peer
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._peer_ephemeral: bytes | None = None
        self._state = SymmetricState(prologue)
        own = static.public_key().public_bytes_raw()
        for key in (own, peer) if initiator else (peer, own):
            self._state.mix_hash(key)

    @property
    def ephemeral(self) -> bytes:
        """Our ephemeral public key."""
        return self._ephemeral.public_key().public_bytes_raw()

    def write(self, payload: bytes = b"") -> bytes:
        """Write our message, with a payload that only the peer can read."""
        self._state.mix_hash(self.ephemeral)
        self._mix_keys(self._state, first=self._initiator)
        return self.ephemeral + self._state.encrypt_and_hash(payload)

    def read(self, message: bytes) -> bytes:
        """Read the peer's message and return its payload.

        Raises:
            ValueError: it was not written with these keys and this prologue.
        """
        state, before = copy.copy(self._state), self._peer_ephemeral
        self._peer_ephemeral = message[:KEY_BYTES]
        try:
            state.mix_hash(self._peer_ephemeral)
            self._mix_keys(state, first=not self._initiator)
            payload = state.decrypt_and_hash(message[KEY_BYTES:])
        except ValueError:
            self._peer_ephemeral = before
            raise
        self._state = state
        return payload

    def split(self) -> tuple[bytes, bytes]:
        """Derive the keys of the session after both messages: the key to encrypt with, and the key to decrypt with."""
        keys = self._state.split()
        return keys if self._initiator else (keys[1], keys[0])

    def _mix_keys(self, state: SymmetricState, *, first: bool) -> None:
        """Mix in the two shared secrets of a message: es, ss of the first, ee, se of the second."""
        theirs = self._peer_ephemeral or b""
        if first:  # es is of the initiator's ephemeral key and the responder's static one
            state.mix_key(agree(self._ephemeral, self._peer) if self._initiator else agree(self._static, theirs))
            state.mix_key(agree(self._static, self._peer))
        else:  # se is of the initiator's static key and the responder's ephemeral one
            state.mix_key(agree(self._ephemeral, theirs))
            state.mix_key(agree(self._static, theirs) if self._initiator else agree(self._ephemeral, self._peer))


def nonce(count: int) -> bytes:
    """Encode a message counter as the nonce that Noise prescribes for AES-GCM.

    Examples:
        >>> nonce(1).hex()
        '000000000000000000000001'
    """
    return count.to_bytes(12, "big")


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Compute the X25519 shared secret.

    Raises:
        ValueError: `public` is not a key, or is of small order.
    """
    return private.exchange(X25519PublicKey.from_public_bytes(public))


def _expand(chaining_key: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Compute HKDF with two outputs, as Noise defines it."""
    temporary = hmac.digest(chaining_key, secret, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")
