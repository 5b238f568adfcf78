"""A linear MAC: it detects a wrong sum by an untrusted third party, and reveals nothing to that party.

Each member appends T tags to its vector y before the third party adds all vectors: tag_t = Σ_i b_(i+t)·y_i + mask_t,
with random bits b and masks that all members know and the third party does not. Tags add up as vectors do. So a member
with the total Y subtracts the masks from the summed tags and compares the result with Σ_i b_(i+t)·Y_i, for every t.

Suppose that the total is off by e ≠ 0. Divide e by the largest power of two that divides all of it: some element is
odd, and let i be the last such. Modulo 2, the check of tag t contains b_(i+t), which is in no check of a smaller t. So
each of the T checks fails with probability 1/2 whatever the others do, and all pass with probability 2^-T. That covers
an error in a single top bit, which random ring elements instead of bits would miss half of the time. The masks hide b:
the tags are uniform to the third party.

The bits are shifted, not drawn again, for each tag (a Toeplitz matrix), so a vector of d elements takes d of them. The
sums are matrix products of doubles that hold integers below 2⁵³, and so are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.aes import keystream

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

TAGS = 64
# The number of products of TAGS rows computed at once. A product of this size runs in one thread; threads of several
# participants on one machine would wait for each other.
_PRODUCTS = 8
_DIAGONALS = np.arange(TAGS)[:, None] + np.arange(TAGS)


class LinearMac:
    """The MAC of one sum.

    Args:
        key: 16 secret bytes that only the members have.
        position: the number of the sum; each number is used once per key.
        members: the names of the members.

    Examples:
        >>> import numpy as np
        >>> mac = LinearMac(b"k" * 16, 1, ["a", "b", "c"])
        >>> vectors = {name: np.arange(5, dtype=np.uint32) for name in "abc"}
        >>> total = sum(np.concatenate([words, mac.tags(name, words)]) for name, words in vectors.items())
        >>> mac.verify(total)
        True
        >>> total[3] ^= np.uint32(1 << 31)
        >>> mac.verify(total)
        False
    """

    def __init__(self, key: bytes, position: int, members: Collection[str]) -> None:
        self._key, self._position, self._members = key, position, sorted(members)

    def __repr__(self) -> str:
        return f"LinearMac(key=<secret>, position={self._position}, members={self._members})"

    def tags(self, member: str, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the tags that this member appends to its vector."""
        masks, stream = self._begin(words.dtype)
        tags = _shifted_sums(words, stream)
        tags += masks[self._members.index(member)]
        return tags

    def verify(self, total: npt.NDArray[Any]) -> bool:
        """Return whether a total with its tags at the end is the sum of all members' vectors."""
        masks, stream = self._begin(total.dtype)
        expected = _shifted_sums(total[:-TAGS], stream)
        expected += masks.sum(axis=0, dtype=total.dtype)
        return bool(np.array_equal(expected, total[-TAGS:]))

    def _begin(self, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Any]:
        """Return the masks of all members, and the stream from which the bits are read next."""
        stream = keystream(self._key, self._position)
        size = len(self._members) * TAGS * dtype.itemsize
        return np.frombuffer(stream.update(bytes(size)), dtype=dtype).reshape(-1, TAGS), stream


def _shifted_sums(words: npt.NDArray[Any], stream: Any) -> npt.NDArray[Any]:
    """Return Σ_i b_(i+t)·words_i for every t below TAGS, with the bits b of a stream.

    With y as rows of TAGS elements, b_(i+t) is in the row of y_i or in the next row: the result is the diagonal
    C[p + t, p], where C has the products of columns p of y with columns of b, first of the same row, then of the next.
    """
    halves = max(1, words.dtype.itemsize // 4)
    sums = np.zeros(TAGS, dtype=np.uint64)
    last = _bits(stream, 1)
    step = _PRODUCTS * TAGS * TAGS
    for start in range(0, words.size, step):
        chunk = words[start : start + step]
        products = min(_PRODUCTS, -(-chunk.size // TAGS**2))
        bits = np.concatenate([last, _bits(stream, products * TAGS)])
        last = bits[-1:]
        padded = np.zeros((products * TAGS**2, halves), dtype=np.float64)
        padded[: chunk.size] = chunk.view(f"<u{words.dtype.itemsize // halves}").reshape(-1, halves)
        for half in range(halves):
            values = padded[:, half].reshape(products, TAGS, TAGS)
            both = [_product(bits[:-1], values), _product(bits[1:], values)]
            diagonals = np.concatenate(both)[_DIAGONALS, np.arange(TAGS)].astype(np.uint64)
            sums += diagonals.sum(axis=1, dtype=np.uint64) << np.uint64(32 * half)
    return sums.astype(words.dtype)


def _product(bits: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the products of columns of bits with columns of values, over all rows."""
    products: npt.NDArray[np.float64] = (bits.reshape(values.shape).transpose(0, 2, 1) @ values).sum(axis=0)
    return products


def _bits(stream: Any, rows: int) -> npt.NDArray[np.float64]:
    packed = np.frombuffer(stream.update(bytes(rows * TAGS // 8)), dtype=np.uint8)
    return np.unpackbits(packed).astype(np.float64).reshape(rows, TAGS)
