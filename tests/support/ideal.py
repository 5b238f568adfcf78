"""Ideal replacements of signatures and key agreement, which make very many schedules affordable.

A signature is a keyed digest with a secret that only `sign` looks up. An agreed secret is a digest of both public keys.
Keys are derived by a faster digest than Noise's. Towards members that do not break them they behave as the real ones
do, at a hundredth of the time. All other tests use the real ones.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from cgd.secagg import key_agreement, noise
from cgd.secagg.federation_spec import Identity, PublicKeys

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECRETS: dict[bytes, bytes] = {}


class Private:
    """A secret key of the ideal key agreement."""

    def __init__(self, secret: bytes | None = None) -> None:
        public = bytearray(sha256(b"public" + (os.urandom(16) if secret is None else secret)).digest())
        public[31] &= 0x7F  # as that of X25519
        self.public = bytes(public)


def agree(private: Any, public: bytes) -> bytes:
    if len(public) != 32 or not any(public):
        raise ValueError("not a key")
    other = bytes([*public[:31], public[31] & 0x7F])  # X25519 ignores the top bit
    return sha256(b"".join(sorted((private.public, other)))).digest()


def _identity(self: Identity, agreement: bytes, signing: bytes) -> None:
    self.agreement = Private(agreement)  # type: ignore[assignment]
    public = sha256(b"signing" + signing).digest()
    _SECRETS[public] = signing
    self.public = PublicKeys(self.agreement.public, public)  # type: ignore[attr-defined]


def _sign(self: Identity, statement: bytes) -> bytes:
    return blake2b(statement, key=_SECRETS[self.public.signing]).digest()


def _verify(self: PublicKeys, statement: bytes, signature: bytes) -> bool:
    return blake2b(statement, key=_SECRETS[self.signing]).digest() == signature


def _expand(chaining_key: bytes, secret: bytes) -> tuple[bytes, bytes]:
    digest = blake2b(secret, key=chaining_key).digest()
    return digest[:32], digest[32:]


def _ephemeral(self: key_agreement.EphemeralKey) -> None:
    self.private = Private()  # type: ignore[assignment]
    self.public = self.private.public  # type: ignore[attr-defined]


@contextmanager
def ideal_cryptography() -> Iterator[None]:
    """Use the ideal replacements; do not use identities that were made outside of this context."""
    with (
        patch.object(Identity, "__init__", _identity),
        patch.object(Identity, "sign", _sign),
        patch.object(PublicKeys, "verify", _verify),
        patch.object(noise, "agree", agree),
        patch.object(noise, "_expand", _expand),
        patch.object(key_agreement.EphemeralKey, "__init__", _ephemeral),
    ):
        yield
