"""Masks that hide a member's vector and cancel, or are removed, before the total is known.

- `PairwiseMasks` expands one mask for each pair of members from a key that only the two have, with AES-CTR. One of
  them adds it, the other subtracts it, so it cancels in the total and never travels. Secrecy is as good as AES-128.
- `seal` adds a mask under a key of the member's own. All members show these keys when they agree on the masked total.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cgd.errors import InputError, LocalProtocolError
from cgd.secagg.fixed_point import CHUNK
from cgd.secagg.secret_sharing import check_ring

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt

KEY_BYTES = 16
BLOCK_BYTES = 16


class PairwiseMasks:
    """The shares one member has in common with each of its peers, expanded from pair keys.

    Of a pair, the member whose name sorts first adds the share and the other subtracts it: over all members every
    share cancels. The shares of one `position` are used once; using them twice would show the difference of two
    secrets, so an earlier position is refused.

    Args:
        me: this member's name.
        keys: one secret key of 16 bytes for each peer, the same on both sides.
        session: tells this use of the keys from any other; the same for all members.

    Examples:
        >>> import numpy as np
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
        # A key of its own for every session: positions begin anew there, and no share may come twice.
        self._keys = {
            peer: hmac.digest(key, b"cgd shares" + session, "sha256")[:KEY_BYTES] for peer, key in keys.items()
        }
        self._last_position = -1

    def __repr__(self) -> str:
        return f"ExpandedShares(me={self._me!r}, peers={sorted(self._keys)}, keys=<secret>)"

    @property
    def peers(self) -> frozenset[str]:
        """The peers that shares are held in common with."""
        return frozenset(self._keys)

    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        """Add this position's shares to a one-dimensional ring array, in place.

        Whatever the size and the number of peers, the extra memory is two cache-sized chunks.
        """
        check_ring(words)
        if position <= self._last_position:
            raise LocalProtocolError(
                f"the shares of position {position} may be spent already (last: {self._last_position}); "
                "a position is used once, use a later one"
            )
        self._last_position = position
        _mix(words, [(self._me < peer, keystream(key, position)) for peer, key in self._keys.items()])


def seal(words: npt.NDArray[Any], key: bytes) -> None:
    """Hide a one-dimensional ring array under the stream of a key, in place; a key is used once.

    Seals add up: the sum of sealed arrays is sealed under all their keys, and opened when the last one is known.

    Examples:
        >>> import numpy as np
        >>> one, other = np.full(3, 5, dtype=np.uint32), np.full(3, 6, dtype=np.uint32)
        >>> seal(one, b"a" * 16)
        >>> seal(other, b"b" * 16)
        >>> total = one + other
        >>> unseal(total, [b"a" * 16, b"b" * 16])
        >>> total
        array([11, 11, 11], dtype=uint32)
    """
    check_ring(words)
    _mix(words, [(True, keystream(key, 0))])


def unseal(words: npt.NDArray[Any], keys: Collection[bytes]) -> None:
    """Remove the seals of these keys, in place."""
    check_ring(words)
    _mix(words, [(False, keystream(key, 0)) for key in keys])


def _mix(words: npt.NDArray[Any], streams: Sequence[tuple[bool, Any]]) -> None:
    """Add streams to a ring array, or subtract them, in place; all of them at one cache-sized chunk, then the next."""
    chunk_bytes = min(CHUNK, max(1, words.size)) * words.itemsize
    zeros = memoryview(bytes(chunk_bytes))
    buffer = np.empty(chunk_bytes + BLOCK_BYTES, dtype=np.uint8)  # update_into asks for one block more
    share = buffer[:chunk_bytes].view(words.dtype)
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        for adds, stream in streams:
            stream.update_into(zeros[: chunk.nbytes], buffer)
            (np.add if adds else np.subtract)(chunk, share[: chunk.size], out=chunk)


def keystream(key: bytes, position: int) -> Any:
    """AES-CTR at block 0 of a position: 2⁶⁴ blocks for each of 2⁶⁴ positions, no two alike under one key."""
    counter = position.to_bytes(8, "big") + bytes(8)
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
