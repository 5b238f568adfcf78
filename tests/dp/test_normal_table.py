"""The table of the rounded normal distribution equals exact values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from cgd.dp.normal_table import TABLE_DISTANCE, TABLE_SIGMA, thresholds

mpmath = pytest.importorskip("mpmath")  # torch installs it
K = len(thresholds()) // 2
ONE = 2**128


def exact(k: int) -> Any:
    """Return 2¹²⁸·F(k + ½), with 300 bits; of the smaller tail, because mpmath loses bits in the other."""
    with mpmath.workprec(300):
        size = abs(mpmath.mpf(2 * k + 1)) / (2 * TABLE_SIGMA)
        tail = mpmath.erfc(size / mpmath.sqrt(2)) / 2
        return ONE * (tail if k < 0 else 1 - tail)


@pytest.mark.parametrize("first", range(8))
def test_thresholds_are_exact_to_half_a_unit(first: int) -> None:
    table = thresholds()
    with mpmath.workprec(300):
        for k in range(first * 61 - K, K, 8 * 61):
            assert abs(table[k + K] - exact(k)) < 0.51


@pytest.mark.parametrize("sigmas", [1, 2, 3, 4, 5, 6, 8, 10, 12, 13])
def test_tail_probabilities_are_exact(sigmas: int) -> None:
    table = thresholds()
    with mpmath.workprec(300):
        tail = exact(-sigmas * TABLE_SIGMA)
        assert abs(table[K - sigmas * TABLE_SIGMA] - tail) < 0.51
        if sigmas <= 6:  # 2¹⁰⁰ units: relative to the probability nothing can be seen
            assert abs(table[K - sigmas * TABLE_SIGMA] / tail - 1) < 2.0**-96


def test_table_is_complete_symmetric_and_sorted() -> None:
    table = thresholds()
    assert all(low <= high for low, high in pairwise(table))
    assert all(low + high == ONE for low, high in zip(table, reversed(table), strict=True))
    assert 0 < table[0] <= 2  # the next one outside would be rounded to 0
    assert exact(-K - 1) < 0.51
    # All thresholds, and both tails beyond them.
    assert (0.51 * len(table) + 1) * 2.0**-128 <= TABLE_DISTANCE
