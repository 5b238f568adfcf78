"""What the members of a view have in common: its name, a key for each pair, and one for all.

Every process makes an ephemeral X25519 key when it starts. A pair's key comes from both; so it is new whenever one of
the two is, and gone when both have ended. The key for all is made of what each member contributes; it is for what is to
be hidden from those who are no members, such as the hub.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cgd.protocol.messages import SESSION_BYTES
from cgd.ring.sharing import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.protocol.charter import Charter
    from cgd.protocol.messages import PeerId


class Ephemeral:
    """The key of one life of a process."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Ephemeral(public={self.public.hex()})"

    def exchange(self, public: bytes) -> bytes:
        """The secret that we have in common with the owner of this key.

        Raises:
            ValueError: it is no key, such as zeros.
        """
        return self._private.exchange(X25519PublicKey.from_public_bytes(public))

    def pair_key(self, public: bytes, view: bytes) -> bytes:
        """The key of a pair in a view."""
        return _derive([self.exchange(public)], b"cgd pair key" + view)


def common_key(contributions: Mapping[PeerId, bytes], session: bytes) -> bytes:
    """The key that all members of a session have."""
    return _derive([each for _, each in sorted(contributions.items())], b"cgd common key" + session)


def view_name(charter: Charter, keys: Mapping[PeerId, bytes]) -> bytes:
    """What tells a view from any other: the charter, and everybody's ephemeral key."""
    digest = hashlib.sha256(repr((charter.federation, charter.epoch, sorted(keys.items()))).encode())
    digest.update(repr(sorted(charter.sections.items())).encode())
    return digest.digest()[:SESSION_BYTES]


def _derive(secrets: list[bytes], info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(b"".join(secrets))
