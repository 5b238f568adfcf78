"""Tables whose sum shows which elements all members have, and of the other elements nothing.

An element stands for `PLACES` cells of the table, one in each part. A member fills its table with random words, under
one condition: modulo 2⁶⁴, the cells of every element that it has add up to zero. Of the sum of all tables, the cells of
an element add up to zero if every member has it. If one member lacks it, they add up to a random word.

**The sum of all tables reveals the intersection and nothing else.** A table is uniform among those that fulfil the
conditions of its member. If the conditions of all members' elements together are independent of each other, the sum is
uniform among the tables that fulfil the conditions which *all* members have: it depends on the intersection alone, not
on pairs of members, whoever compares it with what. They are independent if they can be *peeled*: again and again, take
away an element that has a cell of its own. The table has 1.6 cells for each element of all members, and at least
`MIN_CELLS`, so peeling 5 cells per element fails with a probability of about 2⁻⁵⁰: the most probable obstacle is that
two elements have the same five cells.

It is the oblivious key-value store of Garimella, Pinkas, Rosulek, Trieu and Yanai (2021), with zero as every value; as
in Kolesnikov, Matania, Pinkas, Rosulek and Trieu (2017), zeros are what the members share.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cgd.errors import ProtocolError

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.psi.curve import Points

    Words = npt.NDArray[np.uint64]

PLACES = 5
CELLS_PER_ELEMENT = 1.6  # five cells per element can be peeled up to a load of 0.70, and this is 0.63
MIN_CELLS = 1 << 17
WORD_BYTES = 8


def cells_for(elements: int) -> int:
    """Return the number of cells of a table for this number of elements, those of all members added up."""
    return PLACES * -(-max(MIN_CELLS, int(CELLS_PER_ELEMENT * elements)) // PLACES)


def places_of(points: Points, cells: int, salt: bytes) -> npt.NDArray[np.int64]:
    """Return the cells of every element, one row for each."""
    digests = b"".join(
        hashlib.blake2b(point.tobytes(), key=salt, digest_size=PLACES * WORD_BYTES, person=b"cgd psi").digest()
        for point in points
    )
    part = cells // PLACES
    within = np.frombuffer(digests, dtype="<u8").reshape(-1, PLACES) % np.uint64(part)
    return within.astype(np.int64) + part * np.arange(PLACES)


def fill(places: npt.NDArray[np.int64], cells: int, key: bytes) -> Words:
    """Return a random table in which the cells of every element add up to zero; the same for the same key.

    Args:
        places: the cells of the elements.
        cells: the number of cells.
        key: 32 secret bytes, for this table only.

    Raises:
        ProtocolError: the conditions are not independent.
    """
    table = random_words(key, cells)
    for rows, pivots in reversed(_peel(places, cells)):
        table[pivots] = 0
        table[pivots] = -table[places[rows]].sum(axis=1, dtype=np.uint64)
    return table


def contains(table: Words, places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for every element whether its cells add up to zero: whether all members have it."""
    found: npt.NDArray[np.bool_] = table[places].sum(axis=1, dtype=np.uint64) == 0
    return found


def random_words(key: bytes, count: int) -> Words:
    """Return pseudorandom words: AES-256 in counter mode, from zero, so a key is used once."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(bytearray(encryptor.update(bytes(WORD_BYTES * count))), dtype="<u8")


def permutation(key: bytes, count: int) -> npt.NDArray[np.int64]:
    """Return a pseudorandom permutation: the order of random words."""
    return np.argsort(random_words(key, count), kind="stable").astype(np.int64)


def _peel(places: npt.NDArray[np.int64], cells: int) -> list[tuple[Any, Any]]:
    """Return the elements in the order in which they are taken away, with a cell that is then their own.

    Elements that are taken away at once are one pair of arrays. No element has the cell of an earlier one.
    """
    rounds = []
    flat = places.reshape(-1)
    count = np.bincount(flat, minlength=cells)
    # The numbers of the elements that have a cell, added up: of a cell with one element, this is its number.
    owner = np.bincount(flat, weights=np.repeat(np.arange(len(places), dtype=np.float64), PLACES), minlength=cells)
    left = np.ones(len(places), dtype=np.bool_)
    candidates = np.unique(flat)
    while len(candidates):
        single = candidates[count[candidates] == 1]
        rows, first = np.unique(owner[single].astype(np.int64), return_index=True)
        if not len(rows):
            break
        rounds.append((rows, single[first]))
        left[rows] = False
        gone = places[rows].reshape(-1)
        np.subtract.at(count, gone, 1)
        np.subtract.at(owner, gone, np.repeat(rows, PLACES).astype(np.float64))
        candidates = np.unique(gone)
    if left.any():
        raise ProtocolError(
            f"{int(left.sum())} elements cannot be told apart in the table of the intersection: a member has changed "
            "points; find out which participant runs a changed program"
        )
    return rounds
