"""Deterministic keys of members, derived from their names."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

from cgd.secagg.federation_spec import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgd.secagg.federation_spec import PublicKeys


@cache
def identity(name: str) -> Identity:
    return Identity(sha256(f"agreement {name}".encode()).digest(), sha256(f"signing {name}".encode()).digest())


def public_keys(names: Iterable[str]) -> dict[str, PublicKeys]:
    return {name: identity(name).public for name in names}
