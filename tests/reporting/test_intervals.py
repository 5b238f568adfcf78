"""Intervals of scores: their definitions, and the cases in which the simplest intervals have no width."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cgd.reporting.intervals import Z, auc_interval, mean_interval, paired_interval, student_quantile, wilson_interval


@given(st.floats(0, 1), st.integers(1, 100_000))
def test_interval_contains_the_accuracy_and_narrows(part: float, records: int) -> None:
    low, high = wilson_interval(part, records)
    assert 0 <= low <= part + 1e-12
    assert part - 1e-12 <= high <= 1
    wider = wilson_interval(part, max(1, records // 2))
    assert wider[1] - wider[0] >= high - low - 1e-12


def test_interval_is_the_wilson_interval() -> None:
    assert wilson_interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)


def hanley_mcneil(auc: float, positives: int, negatives: int) -> float:
    """The standard error of an AUC, with the mean of both numbers in place of each, as Newcombe's method 5 has it."""
    others = (positives + negatives) / 2 - 1
    first, second = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + others * (first - auc**2) + others * (second - auc**2)
    return math.sqrt(variance / (positives * negatives))


@given(st.floats(0, 1), st.integers(1, 3000), st.integers(1, 3000))
def test_ends_of_the_interval_of_an_auc_are_two_standard_errors_away(
    auc: float, positives: int, negatives: int
) -> None:
    low, high = auc_interval(auc, positives, negatives)
    assert 0 <= low <= auc <= high <= 1
    assert high > low  # also of a perfect AUC
    for end in (low, high):
        if 1e-6 < end < 1 - 1e-6 and abs(end - auc) > 1e-9:
            assert abs(auc - end) == pytest.approx(Z * hanley_mcneil(end, positives, negatives), rel=1e-6)
    assert auc_interval(1 - auc, negatives, positives) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_interval_of_an_auc_of_one_negative_record_is_wide() -> None:
    low, high = auc_interval(1.0, 56, 1)
    assert low < 0.5
    assert high == 1


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 5000))
def test_interval_of_a_paired_difference_contains_it_and_has_a_width(better: int, worse: int, equal: int) -> None:
    records = better + worse + equal
    if not records:
        return
    low, high = paired_interval(better, worse, records)
    assert -1 <= low < high <= 1
    assert low - 0.02 <= (better - worse) / records <= high + 0.02  # its middle is moved towards 0
    assert paired_interval(worse, better, records) == pytest.approx((-high, -low))


def test_paired_difference_of_many_records_is_that_of_the_normal_distribution() -> None:
    better, worse, records = 3000, 1000, 100_000
    difference = (better - worse) / records
    error = math.sqrt(better + worse - (better - worse) ** 2 / records) / records
    expected = (difference - Z * error, difference + Z * error)
    assert paired_interval(better, worse, records) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("degrees", [4, 9, 30, 399, 10**6])
def test_quantile_is_that_of_students_distribution(degrees: int) -> None:
    assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3 if degrees < 9 else 1e-5)


@pytest.mark.parametrize("records", [5, 10, 400])
def test_interval_of_a_mean_is_students(records: int) -> None:
    expected = stats.t.interval(0.95, records - 1, loc=3, scale=2 / math.sqrt(records))
    assert mean_interval(3.0, 2.0, records) == pytest.approx(expected, rel=2e-3)


def test_interval_of_few_absolute_errors_covers_their_mean() -> None:
    """10 records, as a subgroup may have; the normal quantile gives 0.90."""
    random = np.random.default_rng(1)
    errors = np.abs(random.standard_normal((20_000, 10)))
    ends = [mean_interval(each.mean(), each.std(ddof=1), 10) for each in errors]
    covered = np.mean([low <= math.sqrt(2 / math.pi) <= high for low, high in ends])
    assert covered > 0.925
