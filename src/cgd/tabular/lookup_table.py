"""Sum sets of short byte strings: an invertible Bloom lookup table, which secure sums can add.

Sets cannot be summed, but these tables can. Every member writes each of its keys into three cells, chosen by a hash of
the key: a count, the bytes of the key times that count, and a checksum times that count. The tables are added by a
secure sum. A cell of the total with a single key is decodable: its bytes divided by its count are the key, as the
checksum confirms. Removing it from its other cells makes further cells decodable, until the table is empty (peeling).

If cells remain, all members see it alike and repeat with other hashes, and with a larger table up to `MAX_TABLE_BYTES`.
The first table is large enough to make that rare. A member that enters inconsistent cells can prevent the decoding.
Nobody sees who did it, so after `ATTEMPTS` tables all members stop.

Nothing here proves an entry: a member may enter any key, with any count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cgd.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from cgd.peers import Peers

Decoded = TypeVar("Decoded")

PARTS = 3  # every key has a cell in each; peeling works up to about 0.8 keys per cell
MIN_PART_CELLS = 64  # with fewer cells, a small number of keys would collide too often
ATTEMPTS = 3  # less than one first table in 500 fails, and a larger one even more rarely
# One table. The members' numbers of keys are not proved, so this bounds the memory whatever a member enters.
MAX_TABLE_BYTES = 128 << 20
# A limb times a count stays below 2⁶³ for counts up to 2³⁸, over all members.
LIMB_BYTES = 3
CHECK_LIMBS = 2


def sum_sets(
    peers: Peers,
    layout: Layout,
    total: int,
    context: str,
    entries: Callable[[int], Mapping[bytes, int]],
    decode: Callable[[int, Mapping[bytes, int]], Decoded | None],
) -> Decoded:
    """Add the members' sets in as many attempts as needed, and return what is decoded from their union.

    Args:
        peers: the members of the sum.
        layout: the layout of the table, the same at every member.
        total: the members' numbers of keys, added up; not proved.
        context: a short text, the same at every member.
        entries: returns our keys and their counts in an attempt, which is numbered from 0.
        decode: returns the result of an attempt from the keys and total counts, or None to try once more. It must
            depend on nothing that differs between members.

    Raises:
        ProtocolError: no table can be decoded: a member entered inconsistent cells.
    """
    for attempt in range(ATTEMPTS):
        part, salt = layout.part_cells(total, attempt), f"{context} {attempt}"
        cells = peers.sum(layout.table(entries(attempt), part, salt), context=salt)
        found = layout.peel(cells, part, salt)
        decoded = None if found is None else decode(attempt, found)
        if decoded is not None:
            return decoded
    raise ProtocolError(
        f"the members' categories could not be decoded in {ATTEMPTS} attempts: a member enters inconsistent data, and "
        "the sums do not show which; list the categories in the schema of the federation file"
    )


@dataclass(frozen=True)
class Layout:
    """The layout of tables of keys of one length.

    Attributes:
        key_bytes: the length of every key.
    """

    key_bytes: int

    @property
    def limbs(self) -> int:
        """The number of integers that hold a key."""
        return -(-self.key_bytes // LIMB_BYTES)

    @property
    def width(self) -> int:
        """The number of integers of a cell: count, key and checksum."""
        return 1 + self.limbs + CHECK_LIMBS

    @property
    def max_part_cells(self) -> int:
        """The largest number of cells of a part."""
        return MAX_TABLE_BYTES // (PARTS * self.width * np.dtype(np.int64).itemsize)

    def part_cells(self, total: int, attempt: int) -> int:
        """Return the number of cells of a part: twice as many in each attempt, up to the limit."""
        return min((MIN_PART_CELLS + total // 2) << attempt, self.max_part_cells)

    def table(self, entries: Mapping[bytes, int], part: int, salt: str) -> npt.NDArray[np.int64]:
        """Return one member's table: PARTS × part cells of count, limbs × count and checksum × count."""
        table = np.zeros((PARTS * part, self.width), dtype=np.int64)
        for key, count in entries.items():
            row, places = self.row(key, part, salt)
            table[places] += count * row
        return table

    def peel(self, table: npt.NDArray[np.int64], part: int, salt: str) -> dict[bytes, int] | None:
        """Decode the keys and counts of the summed table; return None if that fails."""
        table = table.copy()
        found: dict[bytes, int] = {}
        pending = list(range(len(table)))
        while pending:
            cell = pending.pop()
            count = int(table[cell, 0])
            if count <= 0 or np.any(table[cell] % count):
                continue
            limbs = table[cell] // count
            key = self._key(limbs[1 : 1 + self.limbs])
            if key is None or key in found:
                continue
            row, places = self.row(key, part, salt)
            if cell not in places or not np.array_equal(row, limbs):
                continue
            found[key] = count
            table[places] -= count * row
            pending += places
        return None if table.any() else found

    def row(self, key: bytes, part: int, salt: str) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Return the cell content of a key with the count 1, and its cells."""
        digest = hashlib.blake2b(key, key=hashlib.sha256(salt.encode()).digest()).digest()
        places = [
            part * number + int.from_bytes(digest[8 * number : 8 * number + 8], "little") % part
            for number in range(PARTS)
        ]
        row = np.empty(self.width, dtype=np.int64)
        row[0] = 1
        row[1:] = _limbs(key.ljust(self.limbs * LIMB_BYTES, b"\0") + digest[-CHECK_LIMBS * LIMB_BYTES :])
        return row, places

    def _key(self, limbs: npt.NDArray[np.int64]) -> bytes | None:
        if np.any((limbs < 0) | (limbs >= 1 << 8 * LIMB_BYTES)):
            return None
        data = b"".join(int(limb).to_bytes(LIMB_BYTES, "little") for limb in limbs)
        return None if any(data[self.key_bytes :]) else data[: self.key_bytes]


def _limbs(data: bytes) -> npt.NDArray[Any]:
    triples = np.frombuffer(data, dtype=np.uint8).reshape(-1, LIMB_BYTES).astype(np.int64)
    return triples @ (1 << 8 * np.arange(LIMB_BYTES))
