"""What the members of a federation hold to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.identity import PublicKeys
    from cgd.secagg.messages import Hello, PeerId


@dataclass(frozen=True)
class FederationSpec:
    """What all members must agree on before they sum.

    Attributes:
        federation: its name.
        epoch: counts the changes of the charter, from 1.
        members: everyone.
        groups: who sums together, by the name of the group.
        sections: a digest of every section of the federation file.
        version: of the program.
        keys: the public keys of all members.
    """

    federation: str
    epoch: int
    members: tuple[PeerId, ...]
    groups: Mapping[str, tuple[PeerId, ...]]
    sections: Mapping[str, str]
    version: str
    keys: Mapping[PeerId, PublicKeys]

    def difference(self, hello: Hello) -> str | None:
        """What a peer's charter has differently, in words; None if nothing."""
        if hello.federation != self.federation:
            return f"it is of another federation, {hello.federation!r}; ours is {self.federation!r}"
        if hello.version != self.version:
            return f"it runs cgd {hello.version} and we run {self.version}; install the same version"
        if hello.epoch != self.epoch:
            behind = "it needs the new federation file" if hello.epoch < self.epoch else "we need the new one"
            return f"its federation file is of epoch {hello.epoch} and ours of epoch {self.epoch}: {behind}"
        theirs = dict(hello.sections)
        odd = sorted(name for name in theirs.keys() | self.sections if theirs.get(name) != self.sections.get(name))
        return f"its federation file differs from ours in [{'], ['.join(odd)}]" if odd else None
