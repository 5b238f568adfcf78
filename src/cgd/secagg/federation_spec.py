"""The specification of a federation that its members must agree on, and the long-term keys of its members."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cgd.secagg.messages import Hello, PeerId


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a member.

    Attributes:
        agreement: X25519, 32 bytes.
        signing: Ed25519, 32 bytes.
    """

    agreement: bytes
    signing: bytes

    @property
    def digest(self) -> str:
        """A digest of both keys, as text."""
        return sha256(self.agreement + self.signing).hexdigest()

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


def tolerated_members(members: int, quorum: int | None) -> int:
    """Return the number of dishonest members up to which the promises hold.

    Every sum must have two honest members, and with a quorum, any two sets of present members an honest one in common.

    Examples:
        >>> [tolerated_members(*each) for each in [(5, None), (5, 4), (5, 3), (7, 5), (9, 7)]]
        [3, 2, 0, 2, 4]
    """
    quorum = members if quorum is None else quorum
    return min(quorum - 2, 2 * quorum - members - 1)


@dataclass(frozen=True)
class FederationSpec:
    """The specification that all members must agree on before they sum.

    Attributes:
        federation: the name of the federation.
        epoch: the number of the specification, from 1; it increases with every change.
        members: the names of all members.
        groups: the members that sum together, by the name of the group.
        sections: the digest of every section of the federation file, by name.
        version: the version of cgd.
        keys: the public keys of all members.
        quorum: the least number of members that go on together without the others; None if every sum waits for all.
            `sections` contains its digest.
    """

    federation: str
    epoch: int
    members: tuple[PeerId, ...]
    groups: Mapping[str, tuple[PeerId, ...]]
    sections: Mapping[str, str]
    version: str
    keys: Mapping[PeerId, PublicKeys]
    quorum: int | None = None

    @property
    def tolerated(self) -> int:
        """The number of dishonest members up to which the promises hold; see `tolerated_members`."""
        return tolerated_members(len(self.members), self.quorum)

    def with_present(self, present: Collection[PeerId]) -> FederationSpec:
        """Return this specification with the present members only, who sum together."""
        groups = {name: tuple(each for each in members if each in present) for name, members in self.groups.items()}
        return replace(self, members=tuple(sorted(present)), groups=groups)

    def check_successor(self, new: FederationSpec) -> None:
        """Check that `new` may replace this specification.

        Raises:
            InputError: it is not newer, or of another federation.
        """
        if new.federation != self.federation or new.epoch <= self.epoch:
            raise InputError(
                f"the new federation file is of {new.federation!r}, epoch {new.epoch}, and the present one of "
                f"{self.federation!r}, epoch {self.epoch}; the epoch must increase"
            )

    def difference(self, hello: Hello) -> str | None:
        """Describe how a peer's specification differs from this one; return None if it does not."""
        if hello.federation != self.federation:
            return f"it belongs to another federation, {hello.federation!r}; ours is {self.federation!r}"
        if hello.version != self.version:
            return f"it runs cgd {hello.version} and this member runs {self.version}; install the same version"
        if hello.epoch != self.epoch:
            outdated = "it needs" if hello.epoch < self.epoch else "this member needs"
            return (
                f"its federation file has epoch {hello.epoch} and ours has epoch {self.epoch}: "
                f"{outdated} the new federation file"
            )
        theirs = dict(hello.sections)
        differing = sorted(
            name for name in theirs.keys() | self.sections if theirs.get(name) != self.sections.get(name)
        )
        if not differing:
            return None
        sections = "], [".join(differing)
        return f"its federation file differs from ours in [{sections}]; compare the files (`cgd federation show`)"
