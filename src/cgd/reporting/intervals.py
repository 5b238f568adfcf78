"""95 % intervals of scores, also of few records.

Those of an accuracy and of an AUC also hold for perfect scores, where the simplest ones have no width. Those of a mean
assume that it varies as one of normally distributed values: of few records whose errors differ much, they are too
narrow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Interval = tuple[float, float]

Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""
MIN_RECORDS = 5
"""A mean of fewer records has no interval."""
BISECTIONS = 60


def wilson_interval(part: float, records: int) -> Interval:
    """Return Wilson's interval of a fraction of some records.

    Examples:
        >>> [round(each, 3) for each in wilson_interval(1.0, 10)]
        [0.722, 1.0]
    """
    spread = Z * math.sqrt(part * (1 - part) / records + Z * Z / (4 * records * records))
    middle, scale = part + Z * Z / (2 * records), 1 + Z * Z / records
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def auc_interval(auc: float, positives: int, negatives: int) -> Interval:
    """Return Newcombe's interval of an AUC: the values that differ from it by at most 1.96 of their standard errors.

    It is method 5 of Newcombe (2006), "Confidence intervals for an effect size measure based on the Mann-Whitney
    statistic", with the variance of Hanley and McNeil.

    Args:
        auc: the area under the ROC curve, from 0 to 1.
        positives: the number of records of the class.
        negatives: the number of other records.

    Examples:
        >>> [round(each, 3) for each in auc_interval(1.0, 1, 56)]
        [0.431, 1.0]
        >>> [round(each, 3) for each in auc_interval(0.9, 500, 500)]
        [0.878, 0.918]
    """
    average = (positives + negatives) / 2 - 1

    def error(value: float) -> float:
        ratio = 1 + average * (1 - value) / (2 - value) + average * value / (1 + value)
        return math.sqrt(value * (1 - value) * ratio / (positives * negatives))

    low = _first(lambda value: auc - value <= Z * error(value), 0.0, auc)
    high = 1 - _first(lambda value: (1 - value) - auc <= Z * error(1 - value), 0.0, 1 - auc)
    return low, high


def paired_interval(better: int, worse: int, records: int) -> Interval:
    """Return the interval of the difference of two models' accuracies on the same records (Agresti and Min, 2005).

    Args:
        better: the number of records that only the first model predicts correctly.
        worse: the number that only the second one does.
        records: the number of all records.

    Examples:
        >>> [round(each, 3) for each in paired_interval(0, 0, 46)]
        [-0.041, 0.041]
    """
    first, second, total = better + 0.5, worse + 0.5, records + 2
    difference = (first - second) / total
    spread = Z * math.sqrt(first + second - (first - second) ** 2 / total) / total
    return max(-1.0, difference - spread), min(1.0, difference + spread)


def mean_interval(mean: float, deviation: float, records: int) -> Interval:
    """Return Student's interval of a mean from the standard deviation of its values; it needs `MIN_RECORDS`."""
    spread = student_quantile(records - 1) * deviation / math.sqrt(records)
    return mean - spread, mean + spread


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, for 4 degrees of freedom or more, within 0.1 %.

    It is the expansion 26.7.5 of Abramowitz and Stegun (1964).

    Examples:
        >>> round(student_quantile(9), 3)
        2.262
    """
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))


def _first(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the lowest value at which a condition holds that does not hold below it, and holds at `high`."""
    if holds(low):
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
