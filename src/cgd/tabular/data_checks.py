"""Look for likely errors in one participant's records, before anything is sent.

These are codes for missing values, outliers, duplicates, a column that counts the rows, dates read as decimals, and a
last row of totals. Every finding is a note for the owner of the records alone. Nothing here stops a run, and nothing is
sent. The rules are chosen so that a false alarm is rare, because notes that are often wrong are not read: a code or an
outlier must also be far away from all other values, and records that are equal must be more than chance explains.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.tabular.cells import USUAL_MARKERS, values_are
from cgd.tabular.columns import Categorical
from cgd.tabular.written_numbers import is_total

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cgd.tabular.dataset import TabularDataset

    Floats = npt.NDArray[np.float64]

MIN_VALUES = 10  # a column with fewer values is not judged
MIN_DISTINCT = 5
MIN_DATES = 8
LOW_CODES = (-1.0, -9.0, -99.0, -999.0, -9999.0)
HIGH_CODES = (99.0, 999.0, 9999.0, 99999.0)
TEXT_CODES = frozenset(f"{code:.0f}" for code in (*LOW_CODES, *HIGH_CODES))
MIN_GAPS_OF_ZERO = 5  # zero is as far from the next value as this many usual steps between small values
OUTLIER_SPREADS = 10  # interquartile ranges beyond a quartile
OUTLIER_GAP = 4  # from the nearest other value, in widths of all other values together
SAMPLE_ROWS = 20_000
MAX_CHANCE_PAIRS = 0.1  # pairs of equal records that are expected if the columns are independent
SERIAL_DATES = (20_000.0, 60_000.0)  # days since 1900, as spreadsheets store dates: the years 1954 to 2064
DATED_NAME = re.compile(r"(?<![a-z])(age|year|date|dob|birth|born|day)(?![a-z]{2})", re.IGNORECASE)


def find_notes(
    records: TabularDataset, target: str, chosen: Mapping[str, Collection[str]] | None = None
) -> tuple[str, ...]:
    """Return notes about likely errors in the records.

    Args:
        records: one participant's records.
        target: the name of the target.
        chosen: by column, the categories that `values` of the federation file gives: none of them is a missing value.
    """
    chosen = chosen or {}
    notes = [note for name, values in records.numbers.items() for note in _number_notes(name, values)]
    if isinstance(records.target, np.ndarray):
        notes += _number_notes(target, records.target)
    for name, values in records.categories.items():
        notes += _category_notes(name, values, chosen.get(name, ()))
    if isinstance(records.target, Categorical):
        notes += _category_notes(target, records.target, chosen.get(target, ()))
    return (*notes, *_duplicate_notes(records))


def _number_notes(name: str, column: Floats) -> Iterator[str]:
    values = column[~np.isnan(column)]
    if values.size < MIN_VALUES:
        return
    place = f"column {name!r}: "
    if counts_rows(values):
        yield f"{place}its values count the rows; an index says nothing about a record: leave it out of [data.columns]"
        return
    if looks_like_dates(values):
        yield (
            f"{place}all values are as days and months, such as {_shown(values[0])}: dates that were read as decimals? "
            "Export them as text or as numbers of days"
        )
        return
    if DATED_NAME.search(name) and _within(values, *SERIAL_DATES) and _whole(values):
        yield (
            f"{place}its values are from {_shown(values.min())} to {_shown(values.max())}, as spreadsheets store dates "
            "(days since 1900); export it as an age or a year"
        )
        return
    codes = missing_codes(values)
    for code in codes:
        count, others = int(np.count_nonzero(values == code)), values[~np.isin(values, codes)]
        yield (
            f"{place}{values_are(count)} {_shown(code)}, and all other values are from {_shown(others.min())} to "
            f"{_shown(others.max())}; if it stands for a missing value, write "
            f'{{ type = "number", missing = ["{_shown(code)}"] }} in [data.columns] for all participants'
        )
    found = outliers(values[~np.isin(values, codes)])
    if found.size:
        ends = f"{_shown(found.min())}" + (f" to {_shown(found.max())}" if found.size > 1 else "")
        rest = values[~np.isin(values, [*codes, *found.tolist()])]
        yield (
            f"{place}{values_are(found.size)} far from all others: {ends}, and the others are from "
            f"{_shown(rest.min())} to {_shown(rest.max())}; correct {'it' if found.size == 1 else 'them'} if it is an "
            "error, or agree on a range"
        )


def missing_codes(values: Floats) -> list[float]:
    """Return the numbers that probably stand for a missing value: usual codes, and zero, far from all other values.

    Examples:
        >>> missing_codes(np.array([120.0, 135, 118, 0, 142, 127, 999, 131, 0, 125, 138, 122]))
        [0.0, 999.0]
    """
    candidates = [code for code in (*LOW_CODES, 0.0, *HIGH_CODES) if np.any(values == code)]
    if not candidates:
        return []
    others = values[~np.isin(values, candidates)]
    distinct = np.unique(others)
    if distinct.size < MIN_DISTINCT:
        return []
    low, high = float(distinct[0]), float(distinct[-1])
    spread = _spread(others)
    # Zero is far from all others; or, among whole numbers, behind a wider gap than the usual steps of small values. If
    # most values are 0, it is a quantity that most records do not have.
    step = float(np.median(np.diff(distinct[:11]))) if _whole(distinct) else np.inf
    rare = np.count_nonzero(values == 0) <= values.size / 2
    rules = {
        **{code: low >= 0 or low - code >= max(spread, -low) for code in LOW_CODES},
        0.0: rare and low > 0 and low >= min(spread, MIN_GAPS_OF_ZERO * step),
        **{code: code - high >= max(spread, (high - low) / 2) for code in HIGH_CODES},
    }
    return [code for code in candidates if rules[code]]


def outliers(values: Floats) -> Floats:
    """Return the values that are far from all others: beyond the quartiles, and behind a gap.

    Examples:
        >>> outliers(np.array([120.0, 135, 118, 142, 127, 131, 125, 1380, 122, 119]))
        array([1380.])
    """
    nothing = np.empty(0)
    if values.size < MIN_VALUES:
        return nothing
    first, third = np.quantile(values, (0.25, 0.75))
    margin = OUTLIER_SPREADS * (third - first)
    if not margin or _within(values, first - margin, third + margin):
        return nothing
    ordered = np.sort(values)
    low, high = np.searchsorted(ordered, first - margin), np.searchsorted(ordered, third + margin, side="right")
    # A metre among centimetres is no large distance, but a large factor: positive values are compared by both.
    scales = [ordered, np.log(ordered)] if ordered[0] > 0 else [ordered]
    above = max(behind_gap(scale[low:high], scale[high:]).size for scale in scales)
    below = max(behind_gap(-scale[low:high][::-1], -scale[:low][::-1]).size for scale in scales)
    return np.concatenate([ordered[:below], ordered[ordered.size - above :]])


def behind_gap(inside: Floats, beyond: Floats) -> Floats:
    """Return the part of the sorted values `beyond` that begins behind a gap much wider than everything before it."""
    before = np.concatenate([inside[-1:], beyond[:-1]])
    wide = np.flatnonzero(beyond - before > OUTLIER_GAP * (before - inside[0]))
    return beyond[wide[0] :] if wide.size else beyond[:0]


def looks_like_dates(values: Floats) -> bool:
    """Return whether all numbers are a day and a month: 3.1 for 3 October, 12.05 for 12 May.

    Examples:
        >>> looks_like_dates(np.array([3.1, 12.05, 24.12, 1.01, 17.06, 30.11, 8.03, 21.07]))
        True
        >>> looks_like_dates(np.array([3.1, 12.05, 24.12, 1.01, 17.06, 30.11, 8.03, 21.77]))
        False
    """
    if not _within(values, 1.0, 32.0):
        return False
    distinct = np.unique(values)
    if distinct.size < MIN_DATES:
        return False
    hundredths = np.rint(100 * distinct)
    if np.any(np.abs(100 * distinct - hundredths) > 1e-6):
        return False
    before, behind = hundredths // 100, hundredths % 100
    if np.unique(behind).size < 3:  # such as 36.1, 36.2
        return False
    day_first = _within(before, 1, 31) and _within(behind, 1, 12)
    return bool(day_first or (_within(before, 1, 12) and _within(behind, 1, 31)))


def counts_rows(values: Floats) -> bool:
    """Return whether whole numbers, in the order of the rows, are an index: increasing, with few gaps."""
    if values.size < MIN_VALUES or not _whole(values) or values[0] < 0:
        return False
    return bool(np.all(np.diff(values) > 0)) and float(values[-1] - values[0]) < 2 * values.size


def _category_notes(name: str, values: Categorical, chosen: Collection[str]) -> Iterator[str]:
    counts = {text: int(count) for text, count in zip(values.names, values.counts(), strict=True) if count}
    place = f"column {name!r}: "
    for text, count in counts.items():
        if text not in chosen and (text in TEXT_CODES or USUAL_MARKERS.fullmatch(text)):
            yield (
                f"{place}{values_are(count)} {text!r}, which is a category; if it stands for a missing value, list it "
                "as missing in [data] for all participants"
            )
        if is_total(text) and count == 1 and values.codes[-1] == values.names.index(text):
            yield f"{place}the last record has {text!r}; remove the row if it is a total and no record"
    spellings: dict[str, list[str]] = {}
    for text in counts:
        spellings.setdefault(" ".join(text.casefold().replace("_", " ").split()), []).append(text)
    for same in spellings.values():
        if len(same) > 1:
            yield f"{place}{', '.join(map(repr, sorted(same)))} are different categories; agree on one spelling"


def _duplicate_notes(records: TabularDataset) -> Iterator[str]:
    """Yield a note if more records are equal in all columns than chance explains."""
    if records.rows < 2:
        return
    columns = _all_columns(records)
    hashes: npt.NDArray[np.uint64] = np.zeros(records.rows, dtype=np.uint64)
    for column in columns:
        hashes = _mixed(hashes, column.view(np.uint64))
    _, first = np.unique(hashes, return_index=True)
    copies = records.rows - first.size
    if not copies:
        return
    sample = first[:: 1 + first.size // SAMPLE_ROWS]  # without the copies, which are not due to chance
    chance = records.rows * (records.rows - 1) / 2
    for column in columns:
        # Two records agree in all columns with the product of these probabilities, if the columns are independent.
        _, counts = np.unique(column[sample], return_counts=True)
        chance *= float(np.sum(counts * (counts - 1))) / max(1, sample.size * (sample.size - 1))
    if chance <= MAX_CHANCE_PAIRS:
        are = "1 record is equal to another one" if copies == 1 else f"{copies:,} records are equal to others"
        yield f"{are} in all columns and in the target; are there duplicates in the file?"


def _all_columns(records: TabularDataset) -> Sequence[npt.NDArray[Any]]:
    targets = [] if records.target is None else [records.target]
    columns = (*records.numbers.values(), *records.categories.values(), *targets)
    # In 64 bits; a NaN has many representations, and so has zero.
    return [
        each.codes.astype(np.int64) if isinstance(each, Categorical) else np.where(np.isnan(each), np.nan, each + 0.0)
        for each in columns
    ]


def _mixed(hashes: npt.NDArray[np.uint64], codes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return hashes of pairs: the finaliser of SplitMix64, of which equal results by chance are negligible."""
    mixed = hashes * np.uint64(0x9E3779B97F4A7C15) + codes + np.uint64(1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _spread(values: Floats) -> float:
    first, third = np.quantile(values, (0.25, 0.75))
    return float(third - first)


def _within(values: npt.NDArray[Any], low: float, high: float) -> bool:
    return bool(np.all((values >= low) & (values <= high)))


def _whole(values: Floats) -> bool:
    return bool(np.all(values == np.floor(values)))


def _shown(value: float) -> str:
    return f"{value:.6g}"
