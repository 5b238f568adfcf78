"""Records that belong together: the participants of a row have different columns of the same records.

All sort their records by the ID column, and see that they have the same ones without showing any: they draw a key
together (a secure sum of random numbers, which only the row's members learn), and compare a digest of all IDs under it.
Whoever is not of the row has no key and learns nothing. A member of the row could try out guesses, but only of all IDs
at once. The same key tells which records are kept back for validation, so that the row keeps back the same ones.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

KEY_NUMBERS, NUMBER_BITS = 6, 48  # exact in a sum of up to 2¹⁵ members


def row_key(row: Peers) -> bytes:
    """32 bytes that the members of a row have in common, and nobody else."""
    drawn = np.array([secrets.randbits(NUMBER_BITS) for _ in range(KEY_NUMBERS)], dtype=np.int64)
    total = row.sum(drawn, context="a key of the row")
    return hashlib.sha256(b"cgd row key" + total.astype("<i8").tobytes()).digest()


def align(records: TabularDataset, row: Peers, key: bytes) -> TabularDataset:
    """The records in the order that all members of the row have them in.

    Raises:
        InputError: somebody's records are others.
    """
    ids = _ids(records)
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    digest = hmac.new(key, b"cgd ids", "sha256")
    for place in order:
        encoded = ids[place].encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    try:
        row.sum(np.ones(1, dtype=np.int64), context=f"records {digest.hexdigest()}")
    except SettingsError as error:
        who = "we have" if error.peer == row.me else f"{error.peer} has"
        raise InputError(
            f"{who} other records than most of the row ({len(ids)} here): the IDs must be the same in the files of "
            f"{', '.join(row.members)}; bring files with the same records, in any order"
        ) from None
    return records.take(order)


def kept_back_together(records: TabularDataset, part: float, key: bytes) -> npt.NDArray[np.bool_]:
    """Which records of a row are kept back for validation: the same at all its members, about this part of them."""
    threshold = int(part * 2**64)
    drawn = [hmac.digest(key, b"cgd validation" + each.encode(), "sha256")[:8] for each in _ids(records)]
    return np.array([int.from_bytes(each, "little") < threshold for each in drawn], dtype=np.bool_)


def kept_back(rows: int, part: float, seed: bytes) -> npt.NDArray[np.bool_]:
    """Which of a participant's own records are kept back for validation: the same ones whenever it is started."""
    key = hmac.digest(seed, b"cgd validation", "sha256")
    chosen: npt.NDArray[Any] = np.zeros(rows, dtype=np.bool_)
    shuffled = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little"))).permutation(rows)
    chosen[shuffled[: min(int(part * rows), rows - 1)]] = True
    return chosen


def _ids(records: TabularDataset) -> Sequence[str]:
    if records.ids is None:
        raise InputError("the records have no IDs; name the id column in [data], and have it in the file")
    return records.ids
