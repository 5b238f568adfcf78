"""Additive secret sharing: the paper's Shr and Rec (appendix A).

A secret of the ring is split into shares that add up to it. Any proper subset of them is uniform and reveals nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.secagg.fixed_point import WORD_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt


def split(secret: npt.NDArray[Any], shares: int) -> list[npt.NDArray[Any]]:
    """Shr: split a ring array into `shares` arrays that add up to it, any `shares` − 1 of them uniform.

    Examples:
        >>> import numpy as np
        >>> secret = np.array([7, 4_000_000_000], dtype=np.uint32)
        >>> reconstruct(split(secret, 3))
        array([         7, 4000000000], dtype=uint32)
    """
    check_ring(secret)
    if shares < 2:
        raise InputError(f"a secret cannot be split into {shares} share(s); use at least 2")
    last = secret.copy()
    parts = []
    for _ in range(shares - 1):
        share = uniform_words(secret.size, secret.dtype).reshape(secret.shape).copy()  # to be written to
        np.subtract(last, share, out=last)
        parts.append(share)
    return [*parts, last]


def reconstruct(shares: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Rec: add the shares in the ring."""
    if not shares:
        raise InputError("there are no shares to reconstruct from")
    check_ring(shares[0])
    total = shares[0].copy()
    for share in shares[1:]:
        if share.dtype != total.dtype or share.shape != total.shape:
            raise InputError(
                f"the shares of one secret have the same type and shape; here {total.dtype}{list(total.shape)} "
                f"and {share.dtype}{list(share.shape)}"
            )
        np.add(total, share, out=total)
    return total


def uniform_words(count: int, dtype: np.dtype[Any], random: Callable[[int], bytes] = os.urandom) -> npt.NDArray[Any]:
    """Return `count` uniform ring elements from the operating system's generator."""
    return np.frombuffer(random(count * dtype.itemsize), dtype=dtype)


def check_ring(words: npt.NDArray[Any]) -> None:
    """Raise an InputError if these are not ring elements."""
    if words.dtype not in WORD_TYPES.values():
        raise InputError(f"{words.dtype} is not a ring; use uint32 or uint64 (FixedPoint.encode makes them)")
