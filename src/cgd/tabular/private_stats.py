"""Statistics over all members' training records in one opening with noise, for differential privacy.

Each training record has one vector, and the sum of all vectors is opened once:

    1                                  the number of records
    of every number column:            1 if the value is missing, else 0;  u;  u²     (0 and 0 if it is missing)
    of every category column:          1 at the record's category, or at the last place if it is missing
    of a target with classes:          1 at the record's class
    of a target that is a number:      u;  u²

u is the value, cut to the range of the federation file and scaled so that the range becomes −1 to 1. If `unit` in
[privacy] names persons, the vector of each of a person's k records is divided by k: every person has the mean vector of
its records, whose norm is at most that of the longest, and all numbers below are about persons.

**Sensitivity.** A data set with one record more has another sum, by the vector of this record. Its squared norm is a
sum over its parts. The first part is 1. A number column has either 1² (missing) or u² + u⁴ ≤ 2. A category column has
one 1. Classes have one 1, and a target that is a number has u² + u⁴ ≤ 2. So with p number columns and q category
columns

    Δ² = 1 + 2·p + q + (1 with classes, 2 in a regression)

and a record with all its numbers at an end of their ranges reaches it. Sums of doubles are rounded: with the margin of
10⁻⁶, Δ covers rounding of up to 67,000 records in the worst order of additions, and of far more in NumPy's.

What is derived from the opened sum costs nothing. No check compares it with our own records, and no error depends on
them: a number below its smallest possible value is replaced by that. A column whose variance is hidden by the noise, or
is zero, is scaled by the noise instead, so it is never lost. Every column has a feature for missing values.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import InputError, MembersChangedError
from cgd.tabular.columns import Categorical
from cgd.tabular.federated_stats import CategoryStats, NumberStats, TargetStats
from cgd.tabular.preprocessing import Preprocessing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data, Range
    from cgd.optim.privacy_ledger import PrivacyLedger
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

    Floats = npt.NDArray[np.float64]

ROUNDING_MARGIN = 1e-6


def sensitivity(data: Data, columns: Sequence[Column]) -> float:
    """Return Δ, by how much one record changes the sum at most, in the Euclidean norm.

    Examples:
        >>> from cgd.federation.data_schema import Column, Data
        >>> columns = (Column("age", "number", range=(0, 120)), Column("sex", "category", ("f", "m")))
        >>> round(sensitivity(Data("ill", columns, classes=("no", "yes")), columns) ** 2, 3)  # 1 + 2 + 1 + 1
        5.0
    """
    numbers = sum(each.type == "number" for each in columns)
    target = 2 if data.task == "regression" else 1
    squared = 1 + 2 * numbers + (len(columns) - numbers) + target
    return math.sqrt(squared) * (1 + ROUNDING_MARGIN)


def private_fit(
    records: TabularDataset, data: Data, columns: Sequence[Column], peers: Peers, ledger: PrivacyLedger
) -> tuple[Preprocessing, bytes]:
    """Compute the statistics of all members' training records with noise.

    Args:
        records: this member's training records.
        data: the schema, with listed classes or the range of the target.
        columns: the columns to encode, with listed categories and ranges.
        peers: the members.
        ledger: charges the opening.

    Returns:
        The statistics, and a digest of the opened sum: another one, by its noise, in every training.

    Raises:
        RevealError: the budget is spent, or the charge cannot be written.
    """
    own = own_sums(records, data, columns)
    clip, settings = sensitivity(data, columns), ledger.settings
    while True:
        epoch, members = peers.next_round()
        encoding = settings.sum_encoding(members, own.size, clip, settings.statistics_mu)
        with suppress(MembersChangedError):  # for the new members, with fresh noise
            context = f"statistics, {settings.describe()}"
            opened = ledger.open(peers, own, encoding, "statistics", context=context, epoch=epoch)
            digest = hashlib.sha256(np.asarray(opened, dtype="<f8").tobytes()).digest()
            return from_opened(opened, encoding.sigma_total, data, columns), digest


def own_sums(records: TabularDataset, data: Data, columns: Sequence[Column]) -> Floats:
    """Return a member's part of the sum."""
    return np.array(list(_own_sums(records, data, columns)))


def from_opened(opened: Floats, noise: float, data: Data, columns: Sequence[Column]) -> Preprocessing:
    """Return the statistics that the opened sum implies; `noise` is the standard deviation of each of its elements."""
    return _preprocessing(iter(opened.tolist()), noise, data, columns)


def _own_sums(records: TabularDataset, data: Data, columns: Sequence[Column]) -> Iterator[float]:
    """Yield the elements of our sum, in the order of the module's docstring."""
    weights = records.unit_weights()
    yield float(weights.sum())
    for column in columns:
        if column.type == "number":
            values = records.numbers[column.name]
            yield float(weights[np.isnan(values)].sum())
            yield from _moments(values, weights, _known(column.range))
        else:
            missing, *counts = records.categories[column.name].total_weights(weights).tolist()
            yield from (*counts, missing)
    target = records.target
    if target is None:
        raise InputError("the target was not read; read the file with its label")
    if isinstance(target, Categorical):
        yield from target.total_weights(weights)[1:].tolist()
    else:
        yield from _moments(target, weights, _known(data.range))


def _moments(values: Floats, weights: Floats, limits: Range) -> tuple[float, float]:
    """Return Σu and Σu² of the values that are not missing, weighted."""
    low, high = limits
    present = ~np.isnan(values)
    u = (np.clip(values[present], low, high) - low) * (2 / (high - low)) - 1
    np.clip(u, -1, 1, out=u)  # rounding
    weighted = u * weights[present]
    return float(weighted.sum()), float((weighted * u).sum())


def _preprocessing(opened: Iterator[float], noise: float, data: Data, columns: Sequence[Column]) -> Preprocessing:
    rows = max(1.0, next(opened))
    found: list[NumberStats | CategoryStats] = []
    for column in columns:
        if column.type == "number":
            missing = min(max(1.0, next(opened)), rows)
            present = max(1.0, rows - missing)
            moments = _scaled_back(next(opened), next(opened), present, noise, _known(column.range))
            found.append(NumberStats(column.name, round(present), round(missing), *moments))
        else:
            counts = tuple(_count(next(opened)) for _ in column.categories)
            found.append(CategoryStats(column.name, column.categories, counts, max(1, _count(next(opened)))))
    if data.task == "classification":
        # At least 1: class weights divide by it.
        target = TargetStats(data.classes, tuple(max(1, _count(next(opened))) for _ in data.classes))
    else:
        mean, deviation = _scaled_back(next(opened), next(opened), rows, noise, _known(data.range))
        target = TargetStats(mean=mean, deviation=deviation)
    return Preprocessing(tuple(found), target)


def _scaled_back(total: float, squares: float, count: float, noise: float, limits: Range) -> tuple[float, float]:
    """Return mean and standard deviation in the unit of the column.

    A variance below the standard deviation of its noise is set to that: divided by less, the noise of the mean, and
    values far from it, would become huge features. Where noise hides the variance, the column remains a feature.
    """
    mean = min(max(total / count, -1.0), 1.0)
    variance = min(squares / count, 1.0) - mean * mean
    deviation = math.sqrt(min(max(variance, noise / count), 1.0))
    half = (limits[1] - limits[0]) / 2
    return limits[0] + (mean + 1) * half, deviation * half


def _count(value: float) -> int:
    return max(0, round(value))


def _known(limits: Range | None) -> Range:
    """Return a range; the federation file was refused if there is none."""
    if limits is None:
        raise InputError("a number has no range; list one in [data], as [privacy] needs it")
    return limits
