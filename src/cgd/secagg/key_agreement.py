"""What the members of a view have in common: its name, keys for each pair, and one for all.

Every process makes an ephemeral X25519 key when it starts. The keys of a pair come from a Noise KK handshake over the
ephemeral and the static keys of both, with the names of both and the view in its prologue, and from the hash of its
transcript. So they are new whenever one of the two processes is, gone when both have ended, and nobody can have them
who lacks either secret of one of the two. The handshake's authentication tags travel with the first message in the
view: they prove that each knows the secret half of the ephemeral key that it has announced, and has not copied another
member's.

The key for all is made of what each member contributes. It is for what is to be hidden from those who are no members,
such as the hub.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cgd.secagg import noise
from cgd.secagg.masking import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.identity import Identity
    from cgd.secagg.messages import PeerId


class EphemeralKey:
    """The key of one life of a process."""

    def __init__(self) -> None:
        self.private = X25519PrivateKey.generate()
        self.public = self.private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Ephemeral(public={self.public.hex()})"

    def check(self, public: bytes) -> None:
        """Refuse a public key that is none.

        Raises:
            ValueError: it has another length than 32 bytes, or is of small order, such as zeros.
        """
        noise.agree(self.private, public)


@dataclass(frozen=True)
class PairKeys:
    """What two members have in common in a view.

    Attributes:
        mask_key: 16 secret bytes that pairwise masks are expanded from.
        own_tag: what proves to the other that our ephemeral key is ours.
        peer_tag: what the other must show us.
    """

    mask_key: bytes = field(repr=False)
    own_tag: bytes
    peer_tag: bytes


def pair(
    me: PeerId,
    identity: Identity,
    ephemeral: EphemeralKey,
    peer: PeerId,
    federation_spec: FederationSpec,
    view: MembershipView,
) -> PairKeys:
    """Derive what we have in common with a peer in a view."""
    initiates = me < peer
    names = (me, peer) if initiates else (peer, me)
    statics = {me: identity.public.agreement, peer: federation_spec.keys[peer].agreement}
    prologue = json.dumps(["cgd pair", *names, view.digest.hex()]).encode()
    state = noise.SymmetricState(prologue)
    for name in names:
        state.mix_hash(statics[name])
    theirs, static = view.keys[peer], statics[peer]
    es = noise.agree(ephemeral.private, static) if initiates else noise.agree(identity.agreement, theirs)
    ss = noise.agree(identity.agreement, static)
    ee = noise.agree(ephemeral.private, theirs)
    se = noise.agree(identity.agreement, theirs) if initiates else noise.agree(ephemeral.private, static)
    tags = []
    for name, secrets in zip(names, ((es, ss), (ee, se)), strict=True):
        state.mix_hash(view.keys[name])
        for secret in secrets:
            state.mix_key(secret)
        tags.append(state.encrypt_and_hash(b""))
    own, other = tags if initiates else reversed(tags)
    # Noise's own keys depend on the shared secrets alone; the hash of the transcript has the names and the view in it.
    key, _ = state.split()
    return PairKeys(hmac.digest(key, b"cgd masks" + state.hash, "sha256")[:KEY_BYTES], own, other)


@dataclass(frozen=True)
class MembershipView:
    """A set of processes that sum together, named by the charter and everybody's keys.

    Attributes:
        digest: 32 bytes that tell it from any other.
        keys: everybody's ephemeral key.
    """

    digest: bytes
    keys: Mapping[PeerId, bytes]

    @classmethod
    def of(cls, federation_spec: FederationSpec, keys: Mapping[PeerId, bytes]) -> MembershipView:
        """Name the view that these ephemeral keys make under a charter."""
        members = [
            (name, key.hex(), federation_spec.keys[name].agreement.hex(), federation_spec.keys[name].signing.hex())
            for name, key in sorted(keys.items())
        ]
        everything = (
            federation_spec.federation,
            federation_spec.epoch,
            federation_spec.version,
            sorted(federation_spec.sections.items()),
            members,
        )
        return cls(sha256(json.dumps(["cgd view", *everything]).encode()).digest(), dict(keys))


def common_key(contributions: Mapping[PeerId, bytes], session: bytes) -> bytes:
    """Derive the key that all members of a session have."""
    secret = b"".join(each for _, each in sorted(contributions.items()))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"cgd common key" + session).derive(secret)


def equal(one: bytes, other: bytes) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(one, other)
