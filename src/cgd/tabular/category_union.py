"""The union of all members' categories with their numbers of records, by secure sums, without disclosing their owners.

Sets cannot be summed, but an invertible Bloom lookup table can. Every member writes each of its categories into three
cells, chosen by a hash of the category: its number of records, its bytes times that number, and a checksum times that
number. The tables are added by a secure sum. A cell of the total with a single category is decodable: its bytes divided
by its count are the category, as the checksum confirms. Removing it from its other cells makes further cells decodable,
until the table is empty (peeling). If cells remain, all members see it alike and repeat with other hashes, and with a
larger table up to `MAX_TABLE_BYTES`. The first table is large enough to make that rare. A member that enters
inconsistent cells can prevent the decoding. Nobody sees who did it, so after `ATTEMPTS` tables all members stop.

Disclosed to every member: all categories that occur anywhere, with their total numbers of records, even a single one;
and, before that, the sum of the members' numbers of distinct categories. If that is too much, list the categories in
the federation file: then only their numbers of records are summed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, ProtocolError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES
from cgd.tabular.columns import MAX_CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.peers import Peers

    Entry = tuple[int, str]  # the index of the column, the category

PARTS = 3  # every entry has a cell in each; peeling works up to about 0.8 entries per cell
MIN_PART_CELLS = 64  # with fewer cells, a small number of entries would collide too often
ATTEMPTS = 3  # less than one first table in 500 fails, and a larger one even more rarely
MAX_ENTRIES = 1 << 18  # a table of 107 MB
# One table. The members' numbers of categories are not proved, so this bounds the memory whatever a member enters.
MAX_TABLE_BYTES = 128 << 20
# A limb times a count stays below 2⁶³ for counts up to 2³⁸, over all columns and members.
LIMB_BYTES = 3
KEY_BYTES = 2 + 1 + MAX_CATEGORY_BYTES  # column, length, text
LIMBS = -(-KEY_BYTES // LIMB_BYTES)
CHECK_LIMBS = 2
WIDTH = 1 + LIMBS + CHECK_LIMBS
MAX_PART_CELLS = MAX_TABLE_BYTES // (PARTS * WIDTH * np.dtype(np.int64).itemsize)


def learn_categories(
    peers: Peers, own: Mapping[str, Mapping[str, int]], context: str, limit: int | None = None
) -> dict[str, dict[str, int]]:
    """Return the categories of all members, and the total number of records of each.

    Args:
        peers: the members of the sum.
        own: this member's categories and their numbers of records, by column. All members have the same columns.
        context: a short text, the same at every member.
        limit: the most categories of a column; as many as the members' tables may have in total by default.

    Returns:
        The categories by column, sorted, with their total numbers of records.

    Raises:
        InputError: a category is too long (the sum is aborted for all members), or there are too many in total, or
            of one column (all members raise this).
        ProtocolError: the table cannot be decoded: a member entered inconsistent cells.
    """
    columns = sorted(own)  # entries refer to columns by their index in this order
    try:
        entries = _entries([own[name] for name in columns])
    except InputError:
        peers.abort_sum()
        raise
    total = int(peers.sum(np.array([len(entries)]), context=f"{context}: size")[0])
    if not 0 <= total <= MAX_ENTRIES:
        raise InputError(
            f"the members have {total:,} categories in total, and the maximum is {MAX_ENTRIES:,}; "
            "list the categories in the federation file, or leave out the columns with many categories"
        )
    for attempt in range(ATTEMPTS):
        part = _part_cells(total, attempt)
        salt = f"{context} {attempt}"
        cells = peers.sum(_table(entries, part, salt), context=f"{context}: table {attempt}")
        found = _peel(cells, part, salt, len(own))
        if found is not None:
            totals: dict[str, dict[str, int]] = {name: {} for name in own}
            for (column, text), count in sorted(found.items()):
                totals[columns[column]][text] = count
            _check_number(totals, MAX_CATEGORIES * len(peers) if limit is None else limit)
            return totals
    raise ProtocolError(
        f"the members' categories could not be decoded in {ATTEMPTS} attempts: a member enters inconsistent data, and "
        "the sums do not show which; list the categories in the schema of the federation file"
    )


def _check_number(totals: Mapping[str, Mapping[str, int]], limit: int) -> None:
    """Refuse a column with too many categories: each is a feature, or an output, of the model of every member."""
    for name, found in totals.items():
        if len(found) > limit:
            raise InputError(
                f"the members have {len(found):,} categories of {name!r} in total, and the maximum is {limit:,}; list "
                "them in the federation file, or find out which participant has so many"
            )


def _entries(own: Sequence[Mapping[str, int]]) -> dict[Entry, int]:
    entries = {}
    for column, categories in enumerate(own):
        for text, count in categories.items():
            if len(text.encode()) > MAX_CATEGORY_BYTES:
                raise InputError(f"the category {text[:20]!r}… has more than {MAX_CATEGORY_BYTES} bytes; shorten it")
            if count > 0:
                entries[column, text] = count
    return entries


def _part_cells(total: int, attempt: int) -> int:
    """Return the number of cells of a part: twice as many in each attempt, up to the limit."""
    return min((MIN_PART_CELLS + total // 2) << attempt, MAX_PART_CELLS)


def _table(entries: Mapping[Entry, int], part: int, salt: str) -> npt.NDArray[np.int64]:
    """Return one member's table: PARTS × part cells of count, limbs × count and checksum × count."""
    table = np.zeros((PARTS * part, WIDTH), dtype=np.int64)
    for entry, count in entries.items():
        row, places = _row(_key(entry), part, salt)
        table[places] += count * row
    return table


def _peel(table: npt.NDArray[np.int64], part: int, salt: str, columns: int) -> dict[Entry, int] | None:
    """Decode the entries and counts of the summed table; return None if that fails."""
    table = table.copy()
    found: dict[Entry, int] = {}
    pending = list(range(len(table)))
    while pending:
        cell = pending.pop()
        count = int(table[cell, 0])
        if count <= 0 or np.any(table[cell] % count):
            continue
        limbs = table[cell] // count
        key = _bytes(limbs[1 : 1 + LIMBS])
        entry = None if key is None else _entry(key, columns)
        if key is None or entry is None or entry in found:
            continue
        row, places = _row(key, part, salt)
        if cell not in places or not np.array_equal(row, limbs):
            continue
        found[entry] = count
        table[places] -= count * row
        pending += places
    return None if table.any() else found


def _row(key: bytes, part: int, salt: str) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the cell content of a single record with this key, and its cells."""
    digest = hashlib.blake2b(key, key=hashlib.sha256(salt.encode()).digest()).digest()
    places = [
        part * number + int.from_bytes(digest[8 * number : 8 * number + 8], "little") % part for number in range(PARTS)
    ]
    row = np.empty(WIDTH, dtype=np.int64)
    row[0] = 1
    row[1:] = _limbs(key.ljust(LIMBS * LIMB_BYTES, b"\0") + digest[-CHECK_LIMBS * LIMB_BYTES :])
    return row, places


def _key(entry: Entry) -> bytes:
    column, text = entry[0], entry[1].encode()
    return column.to_bytes(2, "little") + bytes([len(text)]) + text.ljust(MAX_CATEGORY_BYTES, b"\0")


def _entry(key: bytes, columns: int) -> Entry | None:
    """Decode a key; return None if it is invalid."""
    column, length, text = int.from_bytes(key[:2], "little"), key[2], key[3:]
    if column >= columns or any(text[length:]):
        return None
    try:
        return column, text[:length].decode()
    except UnicodeDecodeError:
        return None


def _limbs(data: bytes) -> npt.NDArray[Any]:
    triples = np.frombuffer(data, dtype=np.uint8).reshape(-1, LIMB_BYTES).astype(np.int64)
    return triples @ (1 << 8 * np.arange(LIMB_BYTES))


def _bytes(limbs: npt.NDArray[np.int64]) -> bytes | None:
    if np.any((limbs < 0) | (limbs >= 1 << 8 * LIMB_BYTES)):
        return None
    data = b"".join(int(limb).to_bytes(LIMB_BYTES, "little") for limb in limbs)
    return None if any(data[KEY_BYTES:]) else data[:KEY_BYTES]
