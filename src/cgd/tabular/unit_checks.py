"""Compare our own values of a column with those of others: in a training, and of records to predict with its model.

In a training, they are compared with those of the other participants, as soon as the first sums are opened.

A column in another unit, dates in place of ages, or zeros for missing values have a mean or a spread far from that of
the others. The opened sums and our own values give the mean and the deviation of all others together, so nothing more
is sent. What is found is a note for the owner of the records alone, and never stops a run.

The values of all members include ours: with a quarter of all records, our mean is never more than 1.7 deviations from
the mean of all. Therefore ours are compared with those of the others. If one participant's values are wrong, those of
the others together have a large deviation from the point of view of a third one: so its mean is not far from theirs,
and a spread that is smaller than theirs says nothing.

Records to predict are compared with the statistics of the training, which the model has. These also show single values
that no training record can have had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cgd.tabular.cells import values_are
from cgd.tabular.data_checks import SERIAL_DATES, behind_gap
from cgd.tabular.federated_stats import CategoryStats, NumberStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.preprocessing import Preprocessing

    Floats = npt.NDArray[np.float64]

MIN_VALUES = 10  # of ours, and of the others
MAX_DISTANCE = 3.0  # of our mean from that of the others, in deviations of the others
MAX_SPREAD_RATIO = 5.0
# Of the others, in deviations of all: rounding or noise in the statistics may make it smaller. Values that are wrong
# make the deviation of all larger, but not so much that this would hide them.
MIN_DEVIATION = 0.2
MIN_VALUES_FOR_SPREAD = 20
MIN_UNIT_DISTANCE = 1.5  # if the ratio of the means and that of the spreads are those of two units
MAX_DATED_MEAN = 5000.0  # ages, years and lengths of stay are below
MIN_ZEROS = 0.1
MAX_SINGLE_DISTANCE = 20.0  # of a single value to predict from the mean of the training, in its deviations

UNITS = (
    (2.2046, "kg and lb"),
    (2.54, "inch and cm"),
    (2.8, "mmol/l and mg/dl of urea nitrogen"),
    (7.5006, "kPa and mmHg"),
    (10.0, "two units of which one is ten times the other, such as g/dl and g/l, or cm and mm"),
    (12.0, "years and months"),
    (17.1, "mg/dl and µmol/l of bilirubin"),
    (18.02, "mmol/l and mg/dl of glucose"),
    (38.67, "mmol/l and mg/dl of cholesterol"),
    (60.0, "hours and minutes, or minutes and seconds"),
    (88.4, "mg/dl and µmol/l of creatinine"),
    (88.57, "mmol/l and mg/dl of triglycerides"),
    (100.0, "two units of which one is a hundred times the other, such as m and cm, or a fraction and per cent"),
    (365.25, "years and days"),
    (1000.0, "two units of which one is a thousand times the other, such as g and mg"),
)
# Scale, shift, and between which means those of the others are temperatures of bodies.
TEMPERATURES = (
    (1.8, 32.0, 30.0, 45.0, "°F, and theirs in °C"),
    (1 / 1.8, -32 / 1.8, 86.0, 113.0, "°C, and theirs in °F"),
)


@dataclass(frozen=True)
class Moments:
    """Number, mean and standard deviation of some values."""

    count: float
    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Floats) -> Moments:
        """Return those of an array."""
        return cls(values.size, float(np.mean(values)), float(np.std(values)))

    def without(self, part: Moments) -> Moments | None:
        """Return those of all values but some of them; None if they are too few."""
        count = self.count - part.count
        if count < MIN_VALUES:
            return None
        mean = self.mean + part.count / count * (self.mean - part.mean)
        squares = self.count * (self.deviation**2 + (self.mean - mean) ** 2)
        squares -= part.count * (part.deviation**2 + (part.mean - mean) ** 2)
        return Moments(count, mean, math.sqrt(max(0.0, squares / count)))


@dataclass(frozen=True)
class _Wording:
    """The parts of a note that depend on what our values are compared with."""

    others: str
    unit_remedy: str
    zeros_remedy: str
    end: str


PARTICIPANTS = _Wording(
    "the other participants", "agree on one unit", "list it as missing for this column, or make it empty",
    " Only you see this note",
)  # fmt: skip
TRAINING = _Wording("the training", "convert ours to the unit of the training", "make it empty", "")


def compare_with_others(
    records: TabularDataset, preprocessing: Preprocessing, target: str, *, noise: bool = False
) -> tuple[str, ...]:
    """Return notes about columns of numbers whose values are far from those of the other members.

    Args:
        records: our records, which are part of the statistics.
        preprocessing: the statistics of all members' records.
        target: the name of the target.
        noise: whether the statistics have noise; then the spread alone says nothing.
    """
    compared = [
        (each.name, records.numbers[each.name], Moments(each.present, each.mean, each.deviation))
        for each in preprocessing.columns
        if isinstance(each, NumberStats)
    ]
    if isinstance(records.target, np.ndarray):
        rows = max(_rows(each) for each in preprocessing.columns)
        stats = Moments(rows, preprocessing.target.mean, preprocessing.target.deviation)
        compared.append((target, records.target, stats))
    found = (_note(name, values[~np.isnan(values)], everyone, noise=noise) for name, values, everyone in compared)
    return tuple(note for note in found if note)


def compare_with_training(
    records: TabularDataset, preprocessing: Preprocessing, locate: Callable[[int], str] | None = None
) -> tuple[str, ...]:
    """Return notes about columns of numbers, and single values, that are far from those of the training.

    Args:
        records: records to predict.
        preprocessing: the statistics of the training.
        locate: function that returns the place of a row of their table, such as "line 17".
    """
    notes: list[str] = []
    for each in preprocessing.columns:
        if isinstance(each, NumberStats) and each.present >= MIN_VALUES and not each.constant:
            stats = Moments(each.present, each.mean, each.deviation)
            notes += _training_notes(each.name, records, stats, locate or (lambda row: f"row {row + 1}"))
    return tuple(notes)


def _training_notes(
    name: str, records: TabularDataset, training: Moments, locate: Callable[[int], str]
) -> Iterator[str]:
    values = records.numbers[name]
    present = values[~np.isnan(values)]
    limit = _single_limit(present, training)
    far = np.abs(values - training.mean) / training.deviation >= limit
    count = int(np.count_nonzero(far))
    if count and (2 * count < present.size or present.size < MIN_VALUES):
        first = int(np.flatnonzero(far)[0])
        place = locate(first if records.places is None else int(records.places[first]))
        yield (
            f"column {name!r}: {values_are(count)} more than {MAX_SINGLE_DISTANCE:.0f} deviations from the mean of the "
            f"training, {training.mean:.4g} with the deviation {training.deviation:.4g}: "
            f"{'' if count == 1 else 'the first is '}{values[first]:.6g} in {place}; correct "
            f"{'it if it is an error' if count == 1 else 'them if they are errors'}"
        )
        present = values[~np.isnan(values) & ~far]
    if present.size >= MIN_VALUES:
        note = _describe(name, present, training, training, TRAINING)
        if note:
            yield note


def _single_limit(values: Floats, training: Moments) -> float:
    """Return the distance, in deviations, from which single values are far away from all others; infinite if none is.

    Quantities such as amounts of money, of which no value is negative and the deviation is larger than the mean, have a
    few values that are many deviations away. So a larger distance is needed there, and everywhere a gap before it.
    """
    skewed = values.size > 0 and values.min() >= 0 and training.mean > 0
    limit = MAX_SINGLE_DISTANCE * (max(1.0, training.deviation / training.mean) if skewed else 1.0)
    ordered = np.concatenate([[0.0], np.sort(np.abs(values - training.mean) / training.deviation)])
    inside = int(np.searchsorted(ordered, limit, side="right"))
    beyond = behind_gap(ordered[:inside], ordered[inside:])
    return float(beyond[0]) if beyond.size else math.inf


def _rows(column: NumberStats | CategoryStats) -> int:
    return column.missing + (column.present if isinstance(column, NumberStats) else sum(column.counts))


def _note(name: str, values: Floats, everyone: Moments, *, noise: bool) -> str:
    if values.size < MIN_VALUES:
        return ""
    others = everyone.without(Moments.of(values))
    if others is None or not everyone.deviation:
        return ""
    return _describe(name, values, others, everyone, PARTICIPANTS, noise=noise)


def _describe(
    name: str, values: Floats, others: Moments, everyone: Moments, wording: _Wording, *, noise: bool = False
) -> str:
    """Return a note if our values are far from those of the others; an empty text if not."""
    own = Moments.of(values)
    scale = max(others.deviation, MIN_DEVIATION * everyone.deviation)
    distance = abs(own.mean - others.mean) / scale
    unit = _unit(own, others) if distance > MIN_UNIT_DISTANCE else ""
    if not (distance > MAX_DISTANCE or unit or (not noise and _is_wide(values, own, others, everyone))):
        return ""
    zeros = _zeros(values)
    causes = [
        *([f"{unit}: {wording.unit_remedy}."] if unit else []),
        *_dates(values, others),
        *([f"{zeros}: if that stands for a missing value, {wording.zeros_remedy}."] if zeros else []),
    ]
    return (
        f"column {name!r}: our values have the mean {own.mean:.4g} and the deviation {own.deviation:.4g}, and those of "
        f"{wording.others} {others.mean:.4g} and {others.deviation:.4g}: "
        + ("; ".join(causes) or "do they mean something else, or have another unit?")
        + wording.end
    )


def _is_wide(values: Floats, own: Moments, others: Moments, everyone: Moments) -> bool:
    """Return whether our spread is unusual; not if the others have one value, or ours are yes and no in numbers."""
    if values.size < MIN_VALUES_FOR_SPREAD or others.deviation < 1e-6 * everyone.deviation:
        return False
    return own.deviation > MAX_SPREAD_RATIO * others.deviation and np.unique(values).size > 2


def _unit(own: Moments, others: Moments) -> str:
    """Return the two units that explain both ratios, that of the means and that of the spreads; empty if none do."""
    if not own.mean * others.mean > 0 or not own.deviation or not others.deviation:
        return ""
    means, spreads = own.mean / others.mean, own.deviation / others.deviation
    for scale, shift, low, high, name in TEMPERATURES:
        near = abs(own.mean - (scale * others.mean + shift)) < 0.5 * scale * others.deviation
        if near and low < others.mean < high and 0.7 < spreads / scale < 1.4:
            return f"ours seem to be in {name}"
    for factor, name in sorted(UNITS, key=lambda each: abs(math.log(each[0]) - abs(math.log(means)))):
        ratio = factor if means > 1 else 1 / factor
        if 0.9 < means / ratio < 1.1 and 0.7 < spreads / ratio < 1.4:
            times = f"{max(means, 1 / means):.3g} times {'larger' if means > 1 else 'smaller'}"
            return f"ours are {times}, as with {name}"
    return ""


def _dates(values: Floats, others: Moments) -> list[str]:
    low, high = SERIAL_DATES
    if abs(others.mean) < MAX_DATED_MEAN and np.all((values >= low) & (values <= high)):
        return ["ours are as spreadsheets store dates (days since 1900): export the age or the year."]
    return []


def _zeros(values: Floats) -> str:
    zeros = int(np.count_nonzero(values == 0))
    if zeros < MIN_ZEROS * values.size:
        return ""
    which = "all ours are" if zeros == values.size else f"{zeros:,} of our {values.size:,} values are"
    return f"{which} 0"
