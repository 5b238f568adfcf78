"""Statistics over all members' records by secure sums: counts, means, standard deviations, categories.

Sums of integers and wide sums are exact, so all members compute the same statistics, bit for bit. The deviation takes a
second sum, over (x − mean)²: computed from Σx² and Σx it would be inaccurate for a large mean. Every opened sum is
checked before it is used (`cgd.tabular.opened_counts`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cgd.errors import InputError
from cgd.federation.data_schema import OTHER
from cgd.tabular.category_union import learn_categories
from cgd.tabular.cells import values_are
from cgd.tabular.columns import MAX_LEARNED_CLASSES, Categorical
from cgd.tabular.opened_counts import check_counts, check_distance, check_mean, check_spread, is_included, refuse
from cgd.tabular.rare_values import count_categories, fold_rare_values, value_counts
from cgd.tabular.wide_sums import exact_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

    Floats = npt.NDArray[np.float64]
    FeatureWriter = Callable[[npt.NDArray[np.float32], slice], None]

# The largest ratio of two class weights. The numbers of records are not proved: without a limit, a member that invents
# records of one class makes the gradients of all members that have this class only negligible.
MAX_CLASS_RATIO = 10


class NumberStats(msgspec.Struct, frozen=True, tag_field="type", tag="number"):
    """Statistics of a column of numbers.

    Attributes:
        name: the column's name.
        present: number of values in the federation.
        missing: number of missing values.
        mean: mean of the values; 0 without values.
        deviation: standard deviation of the values; 0 if they are all equal, or without values.
    """

    name: str
    present: int
    missing: int
    mean: float
    deviation: float

    @property
    def constant(self) -> bool:
        """True if all values are equal; the feature is zero then."""
        return self.deviation == 0

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the column's features."""
        return (self.name, f"{self.name} missing") if self.missing else (self.name,)

    def notes(self) -> list[str]:
        """Return notes for the user."""
        if not self.present:
            return [f"column {self.name!r} has no value anywhere in the federation; its features are zero"]
        if self.constant:
            return [f"column {self.name!r} has the same value everywhere in the federation; its feature is zero"]
        return []

    def feature_writer(self, records: TabularDataset) -> FeatureWriter:
        """Return a function that writes the features of some rows into their part of a zero matrix."""
        values, missing = records.numbers[self.name], bool(self.missing)

        def write(matrix: npt.NDArray[np.float32], rows: slice) -> None:
            absent = np.isnan(values[rows])
            if not self.constant:
                scaled = values[rows] - self.mean
                scaled /= self.deviation
                scaled[absent] = 0
                matrix[:, 0] = scaled
            if missing:
                matrix[:, 1] = absent

        return write

    def unseen_notes(self, records: TabularDataset) -> list[str]:
        """Return notes about values that did not occur when the statistics were computed."""
        absent = 0 if self.missing else int(np.count_nonzero(np.isnan(records.numbers[self.name])))
        return [_missing_note(self.name, absent, "replaced by the mean")] if absent else []


class CategoryStats(msgspec.Struct, frozen=True, tag_field="type", tag="category"):
    """Statistics of a column of categories.

    Attributes:
        name: the column's name.
        categories: the categories, in order.
        counts: number of records of each category in the federation.
        missing: number of missing values.
    """

    name: str
    categories: tuple[str, ...]
    counts: tuple[int, ...]
    missing: int

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the column's features."""
        names = tuple(f"{self.name}={category}" for category in self.categories)
        return (*names, f"{self.name} missing") if self.missing else names

    def notes(self) -> list[str]:
        """Return notes for the user."""
        if not any(self.counts):
            return [f"column {self.name!r} has no value anywhere in the federation; its features are zero"]
        if self.categories == (OTHER,):
            fact = f"column {self.name!r}: all values count as {OTHER!r}, because no two participants have a value of"
            return [f"{fact} enough records; agree on one spelling, list its categories, or leave the column out"]
        return []

    def feature_writer(self, records: TabularDataset) -> FeatureWriter:
        """Return a function that writes the features of some rows into their part of a zero matrix."""
        values = records.categories[self.name]
        places = {category: place for place, category in enumerate(self.categories)}
        missing = len(self.categories) if self.missing else -1
        # The feature of each code of the table, or −1; the last element is for the code of a missing value.
        unknown = places.get(OTHER, -1)
        lookup = np.array([*(places.get(name, unknown) for name in values.names), missing])

        def write(matrix: npt.NDArray[np.float32], rows: slice) -> None:
            found = lookup[values.codes[rows]]
            known = np.flatnonzero(found >= 0)
            matrix[known, found[known]] = 1

        return write

    def unseen_notes(self, records: TabularDataset) -> list[str]:
        """Return notes about values that did not occur when the statistics were computed."""
        values = records.categories[self.name]
        counts = values.counts()
        unseen = {
            name: int(count) for name, count in zip(values.names, counts, strict=True) if name not in self.categories
        }
        notes = []
        if total := sum(unseen.values()):
            some = ", ".join(f"{name!r} ({unseen[name]:,})" for name in sorted(unseen) if unseen[name])
            effect = f"count as {OTHER!r}" if OTHER in self.categories else "no training record had"
            notes.append(f"column {self.name!r}: {values_are(total)} of categories that {effect}: {some}")
        absent = values.missing if not self.missing else 0
        if absent:
            notes.append(_missing_note(self.name, absent, "encoded without a category"))
        return notes


class TargetStats(msgspec.Struct, frozen=True):
    """Statistics of the target.

    Attributes:
        classes: the classes, in order; empty in a regression.
        counts: number of records of each class in the federation.
        mean: mean of all values in a regression.
        deviation: standard deviation of all values in a regression.
    """

    classes: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

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
                f"the class {name!r} is not one of the model's classes ({', '.join(map(repr, self.classes))}); "
                "leave its records out"
            )
        return encoded

    def decode(self, values: npt.NDArray[Any]) -> Floats:
        """See `Preprocessing.decode`."""
        if self.classes:
            raise InputError("the target is a class and has no unit; take the class with the largest output")
        return np.asarray(values, dtype=np.float64) * self.deviation + self.mean

    def class_weights(self) -> npt.NDArray[np.float32]:
        """See `Preprocessing.class_weights`."""
        counts = np.array(self.counts, dtype=np.float64)
        weighted_as = np.maximum(counts, counts.max() / MAX_CLASS_RATIO)
        weights: Floats = counts.sum() / (np.count_nonzero(counts) * weighted_as)
        return weights.astype(np.float32)

    def notes(self, values: Floats | Categorical | None) -> list[str]:
        """Return notes for a member with these values."""
        notes = []
        without = [name for name, count in zip(self.classes, self.counts, strict=True) if not count]
        if without:
            notes.append(f"no member has records of the class {', '.join(map(repr, without))}; it cannot be learned")
        if isinstance(values, Categorical):
            own = {name for name, count in zip(values.names, values.counts(), strict=True) if count}
            others = [name for name in self.classes if name not in own and name not in without]
            if others:
                notes.append(f"only other members have records of the class {', '.join(map(repr, others))}")
        return notes

    def weight_notes(self) -> list[str]:
        """Return notes about balanced class weights."""
        limit = max(self.counts) / MAX_CLASS_RATIO
        rare = [name for name, count in zip(self.classes, self.counts, strict=True) if 0 < count < limit]
        if not rare:
            return []
        names = ", ".join(map(repr, rare))
        note = f"a record weighs at most {MAX_CLASS_RATIO} times as much as one of another class"
        return [f"{note}, so the rare class {names} has less total weight than the others"]


def fit_columns(
    records: TabularDataset, data: Data, columns: Sequence[Column], peers: Peers
) -> tuple[NumberStats | CategoryStats, ...]:
    """Compute the statistics of the columns; see `cgd.tabular.preprocessing.fit`.

    Raises:
        InputError: there are rare values, and the schema has `other = false`, or our values are far from the others'.
    """
    try:
        records = fold_rare_values(records, data, columns)
    except InputError:
        peers.abort_sum()
        raise
    numbers = [each.name for each in columns if each.type == "number"]
    categories = _categories(records, data, columns, peers)
    present = [int(np.count_nonzero(~np.isnan(records.numbers[name]))) for name in numbers]
    absent = [records.categories[name].missing for name in categories]
    counts = [
        count for name, known in categories.items() for count in count_categories(records.categories[name], known)
    ]
    own = [records.rows, *present, *absent, *counts]
    included = is_included(peers)
    opened = peers.sum(np.array(own), context="count values").tolist()
    rows, totals = opened[0], iter(opened[1:])
    check_counts(peers, "records, values and categories", opened, own if included else None, limit=rows)
    lacking = [records.rows - count for count in present]
    check_counts(
        peers, "missing values", [rows - count for count in opened[1 : 1 + len(numbers)]], lacking if included else None
    )
    found: dict[str, NumberStats | CategoryStats] = {}
    values = {name: records.numbers[name] for name in numbers}
    moments = _moments(values, [next(totals) for _ in numbers], peers, "columns")
    for name, (count, mean, deviation) in zip(numbers, moments, strict=True):
        found[name] = NumberStats(name, count, rows - count, mean, deviation)
    missing = {name: next(totals) for name in categories}
    learned = {each.name for each in columns if each.is_learned}
    for name, known in categories.items():
        counted = {category: next(totals) for category in known}
        check_counts(peers, f"values of {name!r}", [sum(counted.values()) + missing[name]], None, limit=rows)
        if name in learned:  # without "other", if that has no records
            counted = {category: count for category, count in counted.items() if count}
        found[name] = CategoryStats(name, tuple(counted), tuple(counted.values()), missing[name])
    return tuple(found[each.name] for each in columns)


def _categories(
    records: TabularDataset, data: Data, columns: Sequence[Column], peers: Peers
) -> dict[str, tuple[str, ...]]:
    """Return the categories of every category column: those of the file, or learned ones."""
    known = {each.name: each.categories for each in columns if each.type == "category"}
    learned = [each for each in columns if each.is_learned]
    if learned:
        values = {each.name: value_counts(records.categories[each.name]) for each in learned}
        own = {name: [value for value in counts if value != OTHER] for name, counts in values.items()}
        scope = [each.name for each in columns]
        union = learn_categories(peers, own, "categories", scope=scope, needs_two=not data.other)
        if any(OTHER in found for found in union.values()):  # nobody claims it: its count would replace the real one
            raise refuse(peers, f"{OTHER!r} was opened as the text of a category")
        known |= {name: (*found, OTHER) for name, found in union.items()}
    return known


def fit_target(records: TabularDataset, data: Data, columns: Sequence[Column], peers: Peers) -> TargetStats:
    """Compute the statistics of the target; see `cgd.tabular.preprocessing.fit`.

    Raises:
        InputError: there are fewer than two classes, or all values are equal; all members raise this.
    """
    values = records.target
    if isinstance(values, Categorical):
        return _fit_classes(values, data, [each.name for each in columns], peers)
    if values is not None:
        included = is_included(peers)
        count = int(peers.sum(np.array([len(values)]), context="count targets")[0])
        check_counts(peers, "values of the target", [count], [len(values)] if included else None)
        ((_, mean, deviation),) = _moments({data.target: values}, [count], peers, "target")
        if not deviation:
            raise InputError(
                f"all values of {data.target!r} in the federation are equal; there is nothing to predict: check "
                "that the target is the right column"
            )
        return TargetStats(mean=mean, deviation=deviation)
    peers.abort_sum()
    raise InputError("the target was not read; read the file with its label")


def _fit_classes(values: Categorical, data: Data, scope: Sequence[str], peers: Peers) -> TargetStats:
    classes = data.classes
    if not classes:
        own = {data.target: list(value_counts(values))}
        union = learn_categories(peers, own, "classes", scope=scope, limit=MAX_LEARNED_CLASSES, needs_two=True)
        classes = union[data.target]
    part = [value_counts(values).get(name, 0) for name in classes]
    included = is_included(peers)
    totals = peers.sum(np.array(part, dtype=np.int64), context="count classes").tolist()
    check_counts(peers, "records of a class", totals, part if included else None)
    occurring = [name for name, count in zip(classes, totals, strict=True) if count]
    if len(occurring) < 2:
        raise InputError(
            f"all records of the federation have the same class of {data.target!r}, {''.join(occurring)!r}; "
            "there is nothing to predict: check that the target is the right column"
        )
    return TargetStats(tuple(classes), tuple(totals))


def _moments(
    columns: Mapping[str, Floats], counts: Sequence[int], peers: Peers, what: str
) -> Iterable[tuple[int, float, float]]:
    """Return count, mean and standard deviation of each column over all members' values."""
    if not columns:
        return []
    sums = exact_sum(peers, [_sum(values) for values in columns.values()], f"sums of {what}")
    means = [_quotient(total, count) for total, count in zip(sums, counts, strict=True)]
    for name, mean in zip(columns, means, strict=True):
        check_mean(peers, name, mean)
    squares = [_squares(values, mean) for values, mean in zip(columns.values(), means, strict=True)]
    included = is_included(peers)
    spreads = exact_sum(peers, squares, f"squares of {what}")
    deviations = [_deviation(*each) for each in zip(sums, spreads, counts, means, strict=True)]
    if included:
        for (name, values), spread, own, deviation in zip(columns.items(), spreads, squares, deviations, strict=True):
            check_spread(peers, name, spread, own)
            check_distance(peers, name, own, int(np.count_nonzero(~np.isnan(values))), deviation)
    return list(zip(counts, means, deviations, strict=True))


def _sum(values: Floats) -> Fraction:
    """Return Σx, summed around the mean, so that rounding errors are relative to the spread of the values."""
    present = values[~np.isnan(values)]
    if not present.size:
        return Fraction(0)
    center = float(np.mean(present))
    present -= center
    return Fraction(center) * present.size + Fraction(float(np.sum(present)))


def _squares(values: Floats, mean: float) -> float:
    distances = values[~np.isnan(values)]
    distances -= mean
    return float(np.dot(distances, distances))


def _deviation(total: Fraction, spread: Fraction, count: int, mean: float) -> float:
    """Return the standard deviation from Σ(x − mean)², corrected for the rounding of the mean."""
    if not count:
        return 0.0
    error = total / count - Fraction(mean)
    variance = float(spread / count - error * error)
    deviation = math.sqrt(max(variance, 0.0))
    # Equal values may differ from their mean in its last bit.
    return deviation if deviation > abs(mean) * np.finfo(np.float64).eps else 0.0


def _quotient(total: Fraction, count: int) -> float:
    return float(total / count) if count else 0.0


def _missing_note(name: str, count: int, treatment: str) -> str:
    return f"column {name!r}: {values_are(count)} missing and {treatment}; none was missing in the training records"
