"""Align the records of a grid row, whose participants hold different columns of the same records.

All members sort their records by the ID column and check that they hold the same ones without disclosing any: they draw
a common key (a secure sum of random numbers, opened to the row only) and compare a digest of all IDs under this key.
Participants outside the row lack the key and learn nothing. A member of the row can test guesses, but only of the whole
list of IDs. The same key selects the validation split, so that all members of the row hold out the same records.
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

KEY_NUMBERS, NUMBER_BITS = 6, 48  # the sum over up to 2¹⁵ members is exact


def row_key(row: Peers) -> bytes:
    """Return a random key of 32 bytes that only the members of a row know."""
    drawn = np.array([secrets.randbits(NUMBER_BITS) for _ in range(KEY_NUMBERS)], dtype=np.int64)
    total = row.sum(drawn, context="a key of the row")
    return hashlib.sha256(b"cgd row key" + total.astype("<i8").tobytes()).digest()


def align(records: TabularDataset, row: Peers, key: bytes) -> TabularDataset:
    """Return the records in the common order of the row.

    Raises:
        InputError: a member holds other records.
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
        subject = "we have" if error.peer == row.me else f"{error.peer} has"
        raise InputError(
            f"{subject} other records than most of the row ({len(ids)} here): the IDs must be the same in the files of "
            f"{', '.join(row.members)}; bring files with the same records, in any order"
        ) from None
    return records.take(order)


def shared_validation_split(records: TabularDataset, part: float, key: bytes) -> npt.NDArray[np.bool_]:
    """Return the mask of a row's validation records: about this part of them, the same ones at all its members."""
    threshold = int(part * 2**64)
    drawn = [hmac.digest(key, b"cgd validation" + each.encode(), "sha256")[:8] for each in _ids(records)]
    return np.array([int.from_bytes(each, "little") < threshold for each in drawn], dtype=np.bool_)


def validation_split(rows: int, part: float, seed: bytes) -> npt.NDArray[np.bool_]:
    """Return the mask of a participant's validation records: the same ones after every restart."""
    key = hmac.digest(seed, b"cgd validation", "sha256")
    mask: npt.NDArray[Any] = np.zeros(rows, dtype=np.bool_)
    shuffled = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little"))).permutation(rows)
    mask[shuffled[: validation_count(rows, part)]] = True
    return mask


def validation_count(rows: int, part: float) -> int:
    """Return how many of a participant's records are for validation: at least one is left to train on.

    In a grid with several columns, and with differential privacy, it is about this number.
    """
    return min(int(part * rows), rows - 1)


def _ids(records: TabularDataset) -> Sequence[str]:
    if records.ids is None:
        raise InputError("the records have no IDs; name the id column in [data], and include it in the file")
    return records.ids
