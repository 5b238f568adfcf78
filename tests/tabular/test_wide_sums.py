from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cgd
from cgd import InputError, PeerAbortedError, Peers, RangeError
from cgd.tabular import wide_sums
from cgd.tabular.wide_sums import (
    BASE,
    DIGITS,
    FRACTION_BITS,
    MAX_VALUE,
    _carry_bits,
    _digits,
    _integer,
    _move_carries,
    exact_sum,
    wide_sum,
)

UNIT = Fraction(1, 1 << FRACTION_BITS)

numbers = st.floats(min_value=-MAX_VALUE, max_value=MAX_VALUE)
tables = st.integers(3, 5).flatmap(
    lambda members: st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=members, max_size=members)
    )
)


def summed(table: list[list[float]]) -> list[np.ndarray]:
    with cgd.local_peers(len(table)) as group:
        return group.run(lambda peers, own: wide_sum(peers, np.array(own), "test"), table)


@given(tables)
@settings(max_examples=40)
def test_wide_sum_is_exact_and_rounded_once(table: list[list[float]]) -> None:
    """Each addend is rounded to a multiple of the unit; the total is the double closest to the exact sum."""
    expected = [
        float(sum(round(Fraction(value) / UNIT) for value in column) * UNIT) for column in zip(*table, strict=False)
    ]
    for total in summed(table):
        assert total.dtype == np.float64
        assert total.tolist() == expected


@given(st.lists(st.integers(-(2**190), 2**190), min_size=3, max_size=3))
@settings(max_examples=20)
def test_fractions_are_summed_exactly(steps: list[int]) -> None:
    with cgd.local_peers(3) as group:
        totals = group.run(lambda peers, own: exact_sum(peers, [own * UNIT], "test"), steps)
    assert totals == [[sum(steps) * UNIT]] * 3


def test_wide_sum_avoids_cancellation_of_doubles() -> None:
    table = [[1e30, 1e-15], [1.0, 1e-30], [-1e30, -1e-15]]
    assert float(np.sum([row[0] for row in table])) != 1.0  # a plain sum cancels
    assert all(total.tolist() == [1.0, pytest.approx(1e-30, rel=2**-20)] for total in summed(table))


@pytest.mark.parametrize("value", [MAX_VALUE, -MAX_VALUE, 0.0, 2.0**-FRACTION_BITS, 5e-324])
def test_limits_of_the_range_are_accepted(value: float) -> None:
    expected = 3 * value if abs(value) >= 2.0**-FRACTION_BITS else 0.0
    assert summed([[value]] * 3)[0].tolist() == [expected]


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (float("nan"), InputError, "nan; leave missing values out"),
        (float("inf"), RangeError, "is inf"),
        (np.nextafter(MAX_VALUE, np.inf), RangeError, "beyond the bound"),
    ],
)
def test_value_out_of_range_aborts_the_sum(value: float, kind: type, message: str) -> None:
    def attempt(peers: Peers, own: float) -> str:
        try:
            wide_sum(peers, np.array([1.0, own]), "test")
        except (InputError, PeerAbortedError) as error:
            first = f"{type(error).__name__}: {error}"
        # The session continues with the next sum.
        return f"{first}, then {wide_sum(peers, np.array([1.0]), 'next')[0]}"

    with cgd.local_peers(3) as group:
        refused, *messages = group.run(attempt, [value, 1.0, 2.0])
    assert refused.startswith(kind.__name__)
    assert message in refused
    assert "index (1,)" in refused
    assert refused.endswith("then 3.0")
    assert all(each.startswith("PeerAborted") and each.endswith("then 3.0") for each in messages)


def test_sent_bytes_do_not_depend_on_the_size_of_a_number() -> None:
    def traffic(peers: Peers, own: float) -> int:
        wide_sum(peers, np.array([own]), "test")
        return peers.traffic.bytes_sent

    with cgd.local_peers(3) as group:
        small = group.run(traffic, [0.0] * 3)
    with cgd.local_peers(3) as group:
        large = group.run(traffic, [1e50] * 3)
    assert small == large
    assert small[0] > 8 * DIGITS


def test_opened_digits_show_nothing_but_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two members are honest; whether one of them has a negative number does not follow from their sum."""
    opened: list[np.ndarray] = []
    plain_sum = Peers.sum

    def recorded_sum(self: Peers, values: np.ndarray, **options: Any) -> np.ndarray:
        total = plain_sum(self, values, **options)
        if self.me == self.members[-1]:
            opened.append(total)
        return total

    monkeypatch.setattr(Peers, "sum", recorded_sum)
    carries = []
    for honest in ([0.5, 0.5], [-0.5, 1.5]):
        opened.clear()
        for _ in range(8):
            assert all(total.tolist() == [1.0] for total in summed([[honest[0]], [honest[1]], [0.0], [0.0]]))
        place = FRACTION_BITS // 32 - 1  # the digit of the first 32 bits after the point
        carries.append({int(total[0, place]) >> 32 for total in opened})
    assert carries[0] & carries[1] or len(carries[0]) > 1


@pytest.mark.parametrize("addends", [1, 2, 3, 5, 100, 1000, 10**6])
@pytest.mark.parametrize("value", [0.0, -1.5, MAX_VALUE, -MAX_VALUE])
def test_random_carries_keep_the_number_and_fit(addends: int, value: float) -> None:
    digits = np.array([_digits(value, 0)])
    moved = [_move_carries(digits, addends) for _ in range(20)]
    assert all(Fraction(_integer(each[0].tolist()), 1 << FRACTION_BITS) == Fraction(value) for each in moved)
    assert BASE + (BASE + 1) * 2 ** (_carry_bits(addends) - 1) <= (2**63 - 1) // addends
    carry = moved[0][0, 0] >> 4
    assert any(each[0, 0] >> 4 != carry for each in moved)


@pytest.mark.parametrize(("members", "bits"), [(3, 48), (5, 48), (100, 40)])
def test_statistical_distance_of_opened_digits_is_as_documented(members: int, bits: int) -> None:
    assert Fraction((DIGITS - 1) * (members - 1), 2 ** _carry_bits(members)) < Fraction(1, 2**bits)


@pytest.mark.parametrize(("bits", "low", "high"), [(1, 0.46, 0.54), (4, 0.0, 0.13)])
def test_true_carries_are_hidden_by_random_ones(
    monkeypatch: pytest.MonkeyPatch, bits: int, low: float, high: float
) -> None:
    """With random carries of so few bits the distance is visible, and at most as large as the formula states: 2⁻ˢ.

    With 1 bit it is exactly 1/2. 20,000 samples estimate it with an error below 0.04, except with probability 10⁻⁹.
    """
    monkeypatch.setattr(wide_sums, "_carry_bits", lambda _addends: bits)
    place = FRACTION_BITS // 4 + 1  # the carry into this digit is observed: 0 in 0 + 0, and 1 in 15 + 1

    def carries(values: list[float]) -> np.ndarray:
        total = np.sum([_move_carries(np.array([_digits(value, 0)] * 20_000), 2) for value in values], axis=0)
        lower = (total[:, :place].astype(object) * [16**each for each in range(place)]).sum(axis=1)
        return np.bincount([int(each >> 4 * place) + 32 for each in lower], minlength=64) / len(lower)

    assert low <= np.abs(carries([0.5, 0.5]) - carries([-0.5, 1.5])).sum() / 2 <= high
