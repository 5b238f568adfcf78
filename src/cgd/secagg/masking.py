"""Shares and masks that hide a member's vector and cancel, or are removed, before the total is known.

- `split` and `reconstruct` are the paper's Shr and Rec (appendix A): additive secret sharing. A secret of the ring is
  split into shares that add up to it. Any proper subset of them is uniform and reveals nothing.
- `PairwiseMasks` expands one mask for each pair of members from a key that only the two have, with AES-CTR. One of
  them adds it, the other subtracts it, so it cancels in the total and is never sent. Secrecy is as good as AES-128.
- A self-mask is expanded from a key of the member itself (`add_self_mask`). All members reveal these keys when they
  agree on the masked total, and remove the self-masks from it (`remove_self_masks`).
"""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.aes import BLOCK_BYTES, keystream
from cgd.errors import InputError, LocalProtocolError
from cgd.secagg.fixed_point import CHUNK_ELEMENTS, WORD_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

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
        raise InputError(f"{words.dtype} is not a ring; use uint16, uint32 or uint64 (FixedPoint.encode makes them)")


KEY_BYTES = 16


class PairwiseMasks:
    """The masks that one member shares with each of its peers, expanded from pair keys.

    Of a pair, the member whose name sorts first adds the mask and the other subtracts it: over all members every mask
    cancels. The masks of one `position` are used once; using them twice would reveal the difference of two secrets, so
    an earlier position is rejected.

    Args:
        me: the name of this member.
        keys: one secret key of 16 bytes for each peer, the same on both sides.
        session: identifies this use of the keys; the same for all members.

    Examples:
        >>> import os
        >>> import numpy as np
        >>> from cgd.secagg.masking import reconstruct
        >>> ab, ac, bc = (os.urandom(16) for _ in range(3))
        >>> keys = {"a": {"b": ab, "c": ac}, "b": {"a": ab, "c": bc}, "c": {"a": ac, "b": bc}}
        >>> masked = [np.full(4, 5, dtype=np.uint32) for _ in keys]
        >>> for (me, pair_keys), words in zip(keys.items(), masked):
        ...     PairwiseMasks(me, pair_keys).add_to(words, position=1)
        >>> reconstruct(masked)
        array([15, 15, 15, 15], dtype=uint32)
    """

    def __init__(self, me: str, keys: Mapping[str, bytes], session: bytes = b"") -> None:
        for peer, key in keys.items():
            if len(key) != KEY_BYTES:
                raise InputError(f"the pair key with {peer} has {len(key)} bytes; it must have {KEY_BYTES}")
        self._me = me
        # Every session has keys of its own: positions start again there, and no mask may be used twice.
        self._keys = {
            peer: hmac.digest(key, b"cgd shares" + session, "sha256")[:KEY_BYTES] for peer, key in keys.items()
        }
        self._last_position = -1

    def __repr__(self) -> str:
        return f"PairwiseMasks(me={self._me!r}, peers={sorted(self._keys)}, keys=<secret>)"

    @property
    def peers(self) -> frozenset[str]:
        """The peers that masks are shared with."""
        return frozenset(self._keys)

    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        """Add this position's masks to a one-dimensional ring array, in place.

        The extra memory is two cache-sized chunks, whatever the size and the number of peers.
        """
        check_ring(words)
        if position <= self._last_position:
            raise LocalProtocolError(
                f"the masks of position {position} may have been used already (last: {self._last_position}); "
                "a position is used once, use a later one"
            )
        self._last_position = position
        _apply(words, [(self._me < peer, keystream(key, position)) for peer, key in self._keys.items()])


def add_self_mask(words: npt.NDArray[Any], key: bytes) -> None:
    """Add the mask of a key to a one-dimensional ring array, in place; use a key once.

    Self-masks add up: the sum of masked arrays is masked with all their keys, and known when the last key is revealed.

    Examples:
        >>> import numpy as np
        >>> one, other = np.full(3, 5, dtype=np.uint32), np.full(3, 6, dtype=np.uint32)
        >>> add_self_mask(one, b"a" * 16)
        >>> add_self_mask(other, b"b" * 16)
        >>> total = one + other
        >>> remove_self_masks(total, [b"a" * 16, b"b" * 16])
        >>> total
        array([11, 11, 11], dtype=uint32)
    """
    check_ring(words)
    _apply(words, [(True, keystream(key, 0))])


def remove_self_masks(words: npt.NDArray[Any], keys: Collection[bytes]) -> None:
    """Remove the self-masks of these keys, in place."""
    check_ring(words)
    _apply(words, [(False, keystream(key, 0)) for key in keys])


def _apply(words: npt.NDArray[Any], streams: Sequence[tuple[bool, Any]]) -> None:
    """Add streams to a ring array, or subtract them, in place; all of them to one cache-sized chunk, then the next."""
    chunk_bytes = min(CHUNK_ELEMENTS, max(1, words.size)) * words.itemsize
    zeros = memoryview(bytes(chunk_bytes))
    buffer = np.empty(chunk_bytes + BLOCK_BYTES, dtype=np.uint8)  # update_into requires one block more
    mask = buffer[:chunk_bytes].view(words.dtype)
    for start in range(0, words.size, CHUNK_ELEMENTS):
        chunk = words[start : start + CHUNK_ELEMENTS]
        for adds, stream in streams:
            stream.update_into(zeros[: chunk.nbytes], buffer)
            (np.add if adds else np.subtract)(chunk, mask[: chunk.size], out=chunk)
