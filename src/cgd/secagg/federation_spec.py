"""The specification of a federation that its members must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.identity import PublicKeys
    from cgd.secagg.messages import Hello, PeerId


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
    """

    federation: str
    epoch: int
    members: tuple[PeerId, ...]
    groups: Mapping[str, tuple[PeerId, ...]]
    sections: Mapping[str, str]
    version: str
    keys: Mapping[PeerId, PublicKeys]

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
        return f"its federation file differs from ours in [{'], ['.join(differing)}]" if differing else None
