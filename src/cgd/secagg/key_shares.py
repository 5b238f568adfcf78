"""Shamir's secret sharing of a self-mask key: any `threshold` of the shares determine it, fewer say nothing about it.

The key is the constant term of a polynomial of degree `threshold` − 1 over a prime field, whose other coefficients are
random; the share of the i-th member is its value at i (Shamir 1979, used for this purpose by Bonawitz et al. 2017).

Examples:
    >>> names = ["ada", "ben", "cleo", "dora"]
    >>> shares = deal(bytes(range(16)), names, threshold=3)
    >>> recover({name: shares[name] for name in ("ada", "cleo", "dora")}, names) == bytes(range(16))
    True
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cgd.secagg.messages import KEY_SHARE_BYTES, SELF_MASK_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cgd.secagg.messages import PeerId

PRIME = 2**130 - 5
"""A prime above every key of 128 bits."""


def deal(
    key: bytes, members: Sequence[PeerId], threshold: int, random: Callable[[int], bytes] = os.urandom
) -> dict[PeerId, bytes]:
    """Return the share of each member, in the order of their names; any `threshold` of them determine the key."""
    # 64 random bits more than the field has: the remainder is uniform but for a distance of 2⁻⁶⁴.
    higher = [int.from_bytes(random(KEY_SHARE_BYTES + 8), "little") % PRIME for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(key, "little"), *higher]
    shares = {}
    for place, name in enumerate(sorted(members), start=1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares[name] = value.to_bytes(KEY_SHARE_BYTES, "little")
    return shares


def recover(shares: Mapping[PeerId, bytes], members: Sequence[PeerId]) -> bytes:
    """Return the key that these shares determine; compare it with the commitment, since a share may be wrong."""
    places = {name: place for place, name in enumerate(sorted(members), start=1)}
    key = 0
    for name, share in shares.items():
        numerator = denominator = 1
        for other in shares.keys() - {name}:
            numerator = numerator * places[other] % PRIME
            denominator = denominator * (places[other] - places[name]) % PRIME
        key += int.from_bytes(share, "little") * numerator * pow(denominator, -1, PRIME)
    return (key % PRIME % (1 << 8 * SELF_MASK_KEY_BYTES)).to_bytes(SELF_MASK_KEY_BYTES, "little")
