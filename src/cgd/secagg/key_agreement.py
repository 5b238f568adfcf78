"""Key agreement in a view: its digest, the keys of each pair of members, and the key of a group.

Every process generates an ephemeral X25519 key when it starts. The keys of a pair are derived from a Noise KK handshake
over the ephemeral and the static keys of both members, with both names and the view in its prologue, and from the hash
of its transcript. So they are new whenever one of the two processes is restarted, are lost when both have ended, and
cannot be computed without both secrets of one of the two. The handshake's authentication tags are sent with the first
message in the view: each proves that its sender knows the private half of the ephemeral key that it announced, and has
not copied another member's key.

The key of a group is derived from a contribution of each member. It hides data from parties that are not members, such
as the hub.
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

    from cgd.secagg.federation_spec import FederationSpec, Identity
    from cgd.secagg.messages import PeerId


class EphemeralKey:
    """The ephemeral key of one incarnation of a process."""

    def __init__(self) -> None:
        self.private = X25519PrivateKey.generate()
        self.public = self.private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"EphemeralKey(public={self.public.hex()})"

    def check(self, public: bytes) -> None:
        """Check that a public key is valid.

        Raises:
            ValueError: it does not have 32 bytes, or is of small order, such as zeros.
        """
        noise.agree(self.private, public)


@dataclass(frozen=True)
class PairKeys:
    """The keys of a pair of members in a view.

    Attributes:
        mask_key: 16 secret bytes that pairwise masks are expanded from.
        own_tag: the tag that proves to the peer that our ephemeral key is ours.
        peer_tag: the tag that the peer must send us.
    """

    mask_key: bytes = field(repr=False)
    own_tag: bytes
    peer_tag: bytes


def derive_pair_keys(
    me: PeerId,
    identity: Identity,
    ephemeral: EphemeralKey,
    peer: PeerId,
    federation_spec: FederationSpec,
    view: MembershipView,
) -> PairKeys:
    """Derive the keys that we share with a peer in a view."""
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
    # Noise's own keys depend on the shared secrets alone; the hash of the transcript covers the names and the view.
    key, _ = state.split()
    return PairKeys(hmac.digest(key, b"cgd masks" + state.hash, "sha256")[:KEY_BYTES], own, other)


@dataclass(frozen=True)
class MembershipView:
    """A set of processes that sum together, identified by the federation spec and all keys.

    Attributes:
        digest: 32 bytes that identify the view.
        keys: the ephemeral keys of all members.
    """

    digest: bytes
    keys: Mapping[PeerId, bytes]

    @classmethod
    def of(cls, federation_spec: FederationSpec, keys: Mapping[PeerId, bytes], number: int = 0) -> MembershipView:
        """Return the view of these ephemeral keys under a federation spec; with a quorum, views are numbered."""
        members = [
            (name, key.hex(), federation_spec.keys[name].agreement.hex(), federation_spec.keys[name].signing.hex())
            for name, key in sorted(keys.items())
        ]
        identified_by = (
            federation_spec.federation,
            federation_spec.epoch,
            federation_spec.version,
            sorted(federation_spec.sections.items()),
            members,
            *([number] if federation_spec.quorum is not None else []),
        )
        return cls(sha256(json.dumps(["cgd view", *identified_by]).encode()).digest(), dict(keys))


def derive_group_key(contributions: Mapping[PeerId, bytes], session: bytes) -> bytes:
    """Derive the key of all members of a session from their contributions."""
    secret = b"".join(each for _, each in sorted(contributions.items()))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"cgd common key" + session).derive(secret)


def constant_time_equal(one: bytes, other: bytes) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(one, other)
