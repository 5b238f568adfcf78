"""Which categories there are anywhere, and how many records each has, by secure sums: nobody learns who has which.

A set cannot be added up, but a table of cells can. Every member writes each of its categories into three cells that a
hash of the category chooses: its number of records, its bytes times that number, and a checksum times that number. The
tables are added by a secure sum. A cell of the total that one category alone has written to gives it away: its bytes
are those of the cell divided by its count, and the checksum says so. Taken out of its other cells too, it lays others
bare, until all is found (an invertible Bloom lookup table). If something is left, everybody sees it alike, and all
begin anew with a larger table and other cells. The first table is large enough to make that rare.

What it reveals, to every member: all categories that occur anywhere and the number of records each has in all, be it a
single one; and beforehand, how many different categories the members have, added up. If that is too much, list the
categories in the federation file: then only their numbers of records are summed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, ProtocolError
from cgd.federation.data_schema import MAX_CATEGORY_LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.peers import Peers

    Entry = tuple[int, str]  # the place of the column, the category

PARTS = 3  # every entry has a cell in each: more than two thirds of the cells may be written to before peeling fails
SLACK = 64  # cells of a part whatever the number of entries: few entries would meet too often otherwise
ATTEMPTS = 8
MAX_ENTRIES = 1 << 18  # a table of 100 megabytes
# A limb times a count stays below 2⁶³ for a count of up to 2³⁸, over all columns and members.
LIMB_BYTES = 3
KEY_BYTES = 2 + 1 + MAX_CATEGORY_LENGTH  # column, length, text
LIMBS = -(-KEY_BYTES // LIMB_BYTES)
CHECK_LIMBS = 2
WIDTH = 1 + LIMBS + CHECK_LIMBS


def learn(peers: Peers, own: Mapping[str, Mapping[str, int]], context: str) -> dict[str, dict[str, int]]:
    """The categories of all members, and how many records each has in all.

    Args:
        peers: with whom.
        own: by column, this member's categories and their numbers of records. The columns are the same at every member.
        context: a short text, the same at every member.

    Returns:
        By column, the categories in the order of their texts, with their numbers of records.

    Raises:
        InputError: a category is too long (the others are told that there will be no sum), or there are too many in all
            (everybody finds this together).
        ProtocolError: the tables cannot be taken apart: a member did not enter what it should.
    """
    columns = sorted(own)  # they go by their place in this order
    try:
        entries = _entries([own[name] for name in columns])
    except InputError:
        peers.decline()
        raise
    total = int(peers.sum(np.array([len(entries)]), context=f"{context}: size")[0])
    if not 0 <= total <= MAX_ENTRIES:
        raise InputError(
            f"the members have {total:,} categories, added up, and {MAX_ENTRIES:,} is the most; "
            "list the categories in the federation file, or leave the columns out that have many"
        )
    for attempt in range(ATTEMPTS):
        part = _size(total, attempt)
        salt = f"{context} {attempt}"
        cells = peers.sum(_table(entries, part, salt), context=f"{context}: table {attempt}")
        found = _peel(cells, part, salt, len(own))
        if found is not None:
            totals: dict[str, dict[str, int]] = {name: {} for name in own}
            for (column, text), count in sorted(found.items()):
                totals[columns[column]][text] = count
            return totals
    raise ProtocolError(
        f"the members' categories could not be put together in {ATTEMPTS} attempts: some member enters something else; "
        "list the categories in the federation file"
    )


def _entries(own: Sequence[Mapping[str, int]]) -> dict[Entry, int]:
    entries = {}
    for column, categories in enumerate(own):
        for text, count in categories.items():
            if len(text.encode()) > MAX_CATEGORY_LENGTH:
                raise InputError(f"the category {text[:20]!r}… has more than {MAX_CATEGORY_LENGTH} bytes; shorten it")
            if count > 0:
                entries[column, text] = count
    return entries


def _size(total: int, attempt: int) -> int:
    """How many cells a part has."""
    return (SLACK + total // 2) << attempt


def _table(entries: Mapping[Entry, int], part: int, salt: str) -> npt.NDArray[np.int64]:
    """One member's table: PARTS × part cells of a count, limbs times the count, and a checksum times the count."""
    table = np.zeros((PARTS * part, WIDTH), dtype=np.int64)
    for entry, count in entries.items():
        row, places = _row(_key(entry), part, salt)
        table[places] += count * row
    return table


def _peel(table: npt.NDArray[np.int64], part: int, salt: str, columns: int) -> dict[Entry, int] | None:
    """The entries and counts of a table of all members; None if it cannot be taken apart."""
    table = table.copy()
    found: dict[Entry, int] = {}
    doubtful = list(range(len(table)))
    while doubtful:
        cell = doubtful.pop()
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
        doubtful += places
    return None if table.any() else found


def _row(key: bytes, part: int, salt: str) -> tuple[npt.NDArray[np.int64], list[int]]:
    """What a record with this key writes, and into which cells."""
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
    return column.to_bytes(2, "little") + bytes([len(text)]) + text.ljust(MAX_CATEGORY_LENGTH, b"\0")


def _entry(key: bytes, columns: int) -> Entry | None:
    """What a key stands for; None if it is none."""
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
