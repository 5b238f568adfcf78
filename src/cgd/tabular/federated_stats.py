"""What the members find out together about their columns: counts, means, deviations, categories.

Sums of integers and of wide numbers are exact, so all members have the same statistics, bit for bit. Deviations take a
second sum, over (x − mean)²: from Σx² and Σx they could not be had when the mean is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.tabular import category_union
from cgd.tabular.dataset import Categorical, values_are
from cgd.tabular.wide_sums import exact_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

    Floats = npt.NDArray[np.float64]
    Filler = Callable[[npt.NDArray[np.float32], slice], None]


@dataclass(frozen=True)
class Number:
    """A column of numbers.

    Attributes:
        name: of the column.
        present: how many values there are in the federation.
        missing: how many are missing.
        mean: of those that are present; 0 if there are none.
        deviation: the standard deviation of all that are present; 0 if they are all equal, or none.
    """

    name: str
    present: int
    missing: int
    mean: float
    deviation: float

    @property
    def constant(self) -> bool:
        """Whether all values are equal: they become zeros then."""
        return self.deviation == 0

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features."""
        return (self.name, f"{self.name} missing") if self.missing else (self.name,)

    def notes(self) -> list[str]:
        """What to know about it."""
        if not self.present:
            return [f"column {self.name!r} has no value anywhere in the federation; it becomes zeros"]
        if self.constant:
            return [f"column {self.name!r} has the same value everywhere in the federation; it becomes zeros"]
        return []

    def filler(self, records: TabularDataset) -> Filler:
        """Writes the features of some rows into their part of the matrix, which is zero."""
        values, missing = records.numbers[self.name], bool(self.missing)

        def fill(matrix: npt.NDArray[np.float32], rows: slice) -> None:
            absent = np.isnan(values[rows])
            if not self.constant:
                scaled = values[rows] - self.mean
                scaled /= self.deviation
                scaled[absent] = 0
                matrix[:, 0] = scaled
            if missing:
                matrix[:, 1] = absent

        return fill

    def surprises(self, records: TabularDataset) -> list[str]:
        """What was not so when the statistics were made."""
        absent = 0 if self.missing else int(np.count_nonzero(np.isnan(records.numbers[self.name])))
        return [_note_of_missing(self.name, absent, "taken for the mean")] if absent else []


@dataclass(frozen=True)
class Category:
    """A column of categories.

    Attributes:
        name: of the column.
        categories: in order.
        counts: how many records each has in the federation.
        missing: how many values are missing.
    """

    name: str
    categories: tuple[str, ...]
    counts: tuple[int, ...]
    missing: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "categories", tuple(self.categories))
        object.__setattr__(self, "counts", tuple(self.counts))

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features."""
        names = tuple(f"{self.name}={category}" for category in self.categories)
        return (*names, f"{self.name} missing") if self.missing else names

    def notes(self) -> list[str]:
        """What to know about it."""
        if not any(self.counts):
            return [f"column {self.name!r} has no value anywhere in the federation; it becomes zeros"]
        return []

    def filler(self, records: TabularDataset) -> Filler:
        """Writes the features of some rows into their part of the matrix, which is zero."""
        values = records.categories[self.name]
        places = {category: place for place, category in enumerate(self.categories)}
        missing = len(self.categories) if self.missing else -1
        # By the code of a table's category, the place of its feature, or −1; the code of a missing value is the last.
        lookup = np.array([*(places.get(name, -1) for name in values.names), missing])

        def fill(matrix: npt.NDArray[np.float32], rows: slice) -> None:
            found = lookup[values.codes[rows]]
            known = np.flatnonzero(found >= 0)
            matrix[known, found[known]] = 1

        return fill

    def surprises(self, records: TabularDataset) -> list[str]:
        """What was not so when the statistics were made."""
        values = records.categories[self.name]
        counts = values.counts()
        unseen = {
            name: int(count) for name, count in zip(values.names, counts, strict=True) if name not in self.categories
        }
        notes = []
        if total := sum(unseen.values()):
            some = ", ".join(f"{name!r} ({unseen[name]:,})" for name in sorted(unseen) if unseen[name])
            notes.append(f"column {self.name!r}: {values_are(total)} of categories that nobody had: {some}")
        absent = values.missing if not self.missing else 0
        if absent:
            notes.append(_note_of_missing(self.name, absent, "of no category"))
        return notes


@dataclass(frozen=True)
class Target:
    """What is to be predicted.

    Attributes:
        classes: in order; none in a regression.
        counts: how many records each has in the federation.
        mean: in a regression, of all values.
        deviation: in a regression, their standard deviation.
    """

    classes: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        object.__setattr__(self, "counts", tuple(self.counts))

    def encode(self, values: Floats | Categorical | None) -> npt.NDArray[np.int64] | npt.NDArray[np.float32]:
        """See `Preprocessing.encode_target`."""
        if values is None:
            raise InputError("the target was not read; read the file with its label")
        if not isinstance(values, Categorical):
            return ((values - self.mean) / self.deviation).astype(np.float32)
        places = {name: place for place, name in enumerate(self.classes)}
        lookup = np.array([*(places.get(name, -1) for name in values.names), -1], dtype=np.int64)
        encoded: npt.NDArray[np.int64] = lookup[values.codes]
        if np.any(encoded < 0):
            name = values.names[values.codes[int(np.flatnonzero(encoded < 0)[0])]]
            raise InputError(
                f"the class {name!r} was nobody's when the model was trained ({', '.join(map(repr, self.classes))}); "
                "leave its records out"
            )
        return encoded

    def decode(self, values: npt.NDArray[Any]) -> Floats:
        """See `Preprocessing.decode`."""
        if self.classes:
            raise InputError("a classification has classes and no unit; take the class of the largest output")
        return np.asarray(values, dtype=np.float64) * self.deviation + self.mean

    def class_weights(self) -> npt.NDArray[np.float32]:
        """See `Preprocessing.class_weights`."""
        counts = np.array(self.counts, dtype=np.float64)
        occurring = np.count_nonzero(counts)
        weights = np.zeros_like(counts)
        np.divide(counts.sum(), occurring * counts, out=weights, where=counts > 0)
        return weights.astype(np.float32)

    def notes(self, values: Floats | Categorical | None) -> list[str]:
        """What a member should know about it, beside its own values."""
        notes = []
        nobody = [name for name, count in zip(self.classes, self.counts, strict=True) if not count]
        if nobody:
            notes.append(f"nobody has records of the class {', '.join(map(repr, nobody))}; it cannot be learned")
        if isinstance(values, Categorical):
            own = {name for name, count in zip(values.names, values.counts(), strict=True) if count}
            others = [name for name in self.classes if name not in own and name not in nobody]
            if others:
                notes.append(f"only others have records of the class {', '.join(map(repr, others))}")
        return notes


def fit_columns(records: TabularDataset, columns: Sequence[Column], peers: Peers) -> tuple[Number | Category, ...]:
    """The statistics of the columns. See `cgd.tabular.preprocessing.fit`."""
    numbers = [each.name for each in columns if each.type == "number"]
    listed = [each for each in columns if each.categories]
    learned = [each.name for each in columns if each.type == "category" and not each.categories]
    present = [int(np.count_nonzero(~np.isnan(records.numbers[name]))) for name in numbers]
    absent = [records.categories[each.name].missing for each in columns if each.type == "category"]
    counts = [count for each in listed for count in records.categories[each.name].counts().tolist()]
    totals = iter(peers.sum(np.array([records.rows, *present, *absent, *counts]), context="count values").tolist())
    rows = next(totals)
    found: dict[str, Number | Category] = {}
    moments = _moments([records.numbers[name] for name in numbers], [next(totals) for _ in numbers], peers, "columns")
    for name, (count, mean, deviation) in zip(numbers, moments, strict=True):
        found[name] = Number(name, count, rows - count, mean, deviation)
    missing = {each.name: next(totals) for each in columns if each.type == "category"}
    for each in listed:
        found[each.name] = Category(
            each.name, each.categories, tuple(next(totals) for _ in each.categories), missing[each.name]
        )
    if learned:
        own = {name: _counts(records.categories[name]) for name in learned}
        for name, categories in category_union.learn(peers, own, "categories").items():
            found[name] = Category(name, tuple(categories), tuple(categories.values()), missing[name])
    return tuple(found[each.name] for each in columns)


def fit_target(records: TabularDataset, data: Data, peers: Peers) -> Target:
    """The statistics of the target. See `cgd.tabular.preprocessing.fit`.

    Raises:
        InputError: there are fewer than two classes, or all values are equal; all members find this together.
    """
    values = records.target
    if isinstance(values, Categorical):
        return _fit_classes(values, data, peers)
    if values is not None:
        count = int(peers.sum(np.array([len(values)]), context="count targets")[0])
        ((_, mean, deviation),) = _moments([values], [count], peers, "target")
        if not deviation:
            raise InputError(
                f"all values of {data.target!r} in the federation are equal; there is nothing to predict: see whether "
                "the target is the right column"
            )
        return Target(mean=mean, deviation=deviation)
    peers.decline()
    raise InputError("the target was not read; read the file with its label")


def _fit_classes(values: Categorical, data: Data, peers: Peers) -> Target:
    own = _counts(values)
    if data.classes:
        totals = peers.sum(np.array([own.get(name, 0) for name in data.classes]), context="count classes").tolist()
        counted = dict(zip(data.classes, totals, strict=True))
    else:
        counted = category_union.learn(peers, {data.target: own}, "classes")[data.target]
    occurring = [name for name, count in counted.items() if count]
    if len(occurring) < 2:
        raise InputError(
            f"all records of the federation are of one class of {data.target!r}, {''.join(occurring)!r}; "
            "there is nothing to tell apart: see whether the target is the right column"
        )
    return Target(tuple(counted), tuple(counted.values()))


def _moments(
    columns: Sequence[Floats], counts: Sequence[int], peers: Peers, what: str
) -> Iterable[tuple[int, float, float]]:
    """Count, mean and deviation of each column, of all members' values that are present."""
    if not columns:
        return []
    sums = exact_sum(peers, [_sum(values) for values in columns], f"sums of {what}")
    means = [_quotient(total, count) for total, count in zip(sums, counts, strict=True)]
    squares = [_squares(values, mean) for values, mean in zip(columns, means, strict=True)]
    spreads = exact_sum(peers, squares, f"squares of {what}")
    return [
        (count, mean, _deviation(total, spread, count, mean))
        for total, spread, count, mean in zip(sums, spreads, counts, means, strict=True)
    ]


def _sum(values: Floats) -> Fraction:
    """Σx. Around a value in their midst: the rounding of a sum is as small as their spread, however large they are."""
    present = values[~np.isnan(values)]
    if not present.size:
        return Fraction(0)
    midst = float(np.mean(present))
    present -= midst
    return Fraction(midst) * present.size + Fraction(float(np.sum(present)))


def _squares(values: Floats, mean: float) -> float:
    distances = values[~np.isnan(values)]
    distances -= mean
    return float(np.dot(distances, distances))


def _deviation(total: Fraction, spread: Fraction, count: int, mean: float) -> float:
    """The standard deviation, from Σ(x − mean)² and what the rounded mean is off by."""
    if not count:
        return 0.0
    off = total / count - Fraction(mean)
    variance = float(spread / count - off * off)
    deviation = math.sqrt(max(variance, 0.0))
    # Values that are equal may differ from their mean by its last bit.
    return deviation if deviation > abs(mean) * np.finfo(np.float64).eps else 0.0


def _quotient(total: Fraction, count: int) -> float:
    return float(total / count) if count else 0.0


def _counts(values: Categorical) -> Mapping[str, int]:
    return {name: int(count) for name, count in zip(values.names, values.counts(), strict=True) if count}


def _note_of_missing(name: str, count: int, what: str) -> str:
    return f"column {name!r}: {values_are(count)} missing and {what}; none was missing when the statistics were made"
