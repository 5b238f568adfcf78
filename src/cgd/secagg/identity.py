"""The long-term keys of a member: one for key agreement, one for signatures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a member.

    Attributes:
        agreement: X25519, 32 bytes.
        signing: Ed25519, 32 bytes.
    """

    agreement: bytes
    signing: bytes

    def verify(self, statement: bytes, signature: bytes) -> bool:
        """Return whether the owner of these keys signed this statement."""
        try:
            _signing_key(self.signing).verify(signature, statement)
        except (InvalidSignature, ValueError):
            return False
        return True


class Identity:
    """The private keys of a member.

    Args:
        agreement: 32 secret bytes, X25519.
        signing: 32 secret bytes, Ed25519.

    Examples:
        >>> identity = Identity.generate()
        >>> identity.public.verify(b"statement", identity.sign(b"statement"))
        True
    """

    def __init__(self, agreement: bytes, signing: bytes) -> None:
        self.agreement = X25519PrivateKey.from_private_bytes(agreement)
        self._signing = Ed25519PrivateKey.from_private_bytes(signing)
        self.public = PublicKeys(
            self.agreement.public_key().public_bytes_raw(), self._signing.public_key().public_bytes_raw()
        )

    @classmethod
    def generate(cls) -> Identity:
        """Generate new keys."""
        return cls(X25519PrivateKey.generate().private_bytes_raw(), Ed25519PrivateKey.generate().private_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity(public={self.public})"

    def sign(self, statement: bytes) -> bytes:
        """Sign a statement."""
        return self._signing.sign(statement)


@lru_cache(maxsize=4096)
def _signing_key(public: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public)
