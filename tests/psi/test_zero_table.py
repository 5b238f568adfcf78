"""Tables whose sum shows the intersection: what it contains, and that nothing else is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import ProtocolError
from cgd.psi import zero_table
from cgd.psi.zero_table import MIN_CELLS, PLACES, _peel, cells_for, contains, fill, permutation, places_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]

SALT = b"salt"


def points(*numbers: int) -> npt.NDArray[np.uint8]:
    """Return made-up points, which are random to a table."""
    return np.array([np.random.default_rng(number).integers(256, size=32) for number in numbers], dtype=np.uint8)


def solve(places: Places, values: Words, cells: int, seed: int) -> Words:
    """Return a random table in which the cells of each element add up to a value of its own."""
    table: Words = np.random.default_rng(seed).integers(2**64, size=cells, dtype=np.uint64)
    for rows, pivots in reversed(_peel(places, cells)):
        table[pivots] = 0
        table[pivots] = values[rows] - table[places[rows]].sum(axis=1, dtype=np.uint64)
    return table


def value_in(table: Words, places: Places) -> Words:
    found: Words = table[places].sum(axis=1, dtype=np.uint64)
    return found


@pytest.mark.parametrize("count", [1, 2, 100, 3000])
def test_table_is_random_except_for_its_conditions(count: int) -> None:
    cells = cells_for(count)
    places = places_of(points(*range(count)), cells, SALT)
    one, other = fill(places, cells, b"a" * 32), fill(places, cells, b"b" * 32)
    assert contains(one, places).all()
    assert contains(other, places).all()
    assert not (one == other).any()
    assert np.array_equal(one, fill(places, cells, b"a" * 32))
    assert not contains(one, places_of(points(*range(10_000, 10_100)), cells, SALT)).any()
    # Each bit of the cells is one with probability 1/2: seven standard deviations, 64 bits.
    bits = np.unpackbits(one.view(np.uint8)).reshape(cells, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 7 * 0.5 / np.sqrt(cells)


def test_sum_is_uniform_given_the_intersection() -> None:
    """Any sum of tables for some sets is one for all other sets with the same intersection, equally often.

    Conditions of all elements together can be solved for any values, so the tables of a member are as many whatever the
    others have. Here: from the sum of three tables, three tables for quite other sets are computed, with the same sum.
    """
    cells = cells_for(600)
    common, everybody = {1, 2, 3}, list(range(400))
    places = places_of(points(*everybody), cells, SALT)
    sets = [common | {*range(10, 110)}, common | {*range(10, 110)}, common | {*range(300, 350)}]  # a pair with 103
    total: Words = sum(
        (fill(places[sorted(each)], cells, bytes([n]) * 32) for n, each in enumerate(sets)), np.zeros(cells, np.uint64)
    )
    others = [common | {*range(10, 60)}, common | {*range(60, 160)}, common | {*range(200, 400)}]  # no pair with more
    wanted: list[Any] = []
    rest = value_in(total, places)
    for number, each in enumerate(others[:2]):
        values = np.random.default_rng(number).integers(2**64, size=len(everybody), dtype=np.uint64)
        values[sorted(each)] = 0
        if number == 1:  # where the third has the element, these two must add up to the value of the total
            only = [x for x in sorted(others[2]) if x not in each]
            values[only] = rest[only] - value_in(wanted[0], places)[only]
            both = sorted(others[2] & each)
            assert not (rest[both] - value_in(wanted[0], places)[both]).any()
        wanted.append(solve(places, values, cells, number))
    wanted.append(total - wanted[0] - wanted[1])
    for table, each in zip(wanted, others, strict=True):
        assert contains(table, places[sorted(each)]).all()
    assert contains(total, places).sum() == len(common)


@pytest.mark.parametrize("count", [10, 1000, 30_000])
def test_conditions_of_all_members_together_are_independent(count: int) -> None:
    cells = cells_for(count)
    assert cells >= MIN_CELLS
    places = np.random.default_rng(count).integers(cells // PLACES, size=(count, PLACES))
    rounds = _peel(places + cells // PLACES * np.arange(PLACES), cells)
    assert sum(len(rows) for rows, _ in rounds) == count


def test_elements_with_the_same_cells_are_refused() -> None:
    places = places_of(points(1, 2, 1), cells_for(3), SALT)
    with pytest.raises(ProtocolError, match="2 elements cannot be told apart"):
        fill(places, cells_for(3), b"k" * 32)


def test_permutation() -> None:
    order = permutation(b"k" * 32, 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(order, permutation(b"l" * 32, 1000))
    assert np.array_equal(order, permutation(b"k" * 32, 1000))
    assert zero_table.permutation(b"k" * 32, 1).tolist() == [0]
