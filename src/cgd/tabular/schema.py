"""Suggest the sections `[data]` and `[model]` of a federation file from one participant's table.

The suggestion is a starting point for all participants to review: others may have other categories and missing values.
The text is sent to all participants, so it contains nothing of the table but names of columns, numbers of distinct
values, usual markers of missing values and, in comments that can be deleted, the classes.

For differential privacy, categories, classes and ranges have to be in the file. The suggestion then has those of the
table, ranges rounded outward, and categories only if enough records have them. Each of these lines has a mark, and
`cgd federation new` refuses a file with marks: people must replace the values by what is known without looking at
records.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES, MISSING
from cgd.federation.privacy_section import REVIEW_MARK
from cgd.tabular.columns import MAX_CATEGORIES, MAX_NUMBER, MissingMarkers, canonical, is_number
from cgd.tabular.dataset import find_column
from cgd.tabular.model_choice import choose_model, model_lines
from cgd.tabular.readers import open_table

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

MAX_CODES = 8  # whole numbers with at most this many distinct values are probably codes
MIN_CATEGORIES_TO_NOTE = 100
MAX_MARKER_TEXTS = 3  # so few distinct texts in a column of numbers probably mark missing values
# Texts that are suggested as missing values. Any other text in a column of numbers may be a remark about a person, and
# is only counted.
USUAL_MARKERS = re.compile(
    r"[-.*#/+]{1,3}|#?n[./]?[adkr]\.?|nan|nil|none|null|unk|unknown|missing|empty|blank|invalid|error|no data"
    r"|not (available|applicable|known|done|recorded|measured|tested)",
    re.IGNORECASE,
)
MAX_CLASSES = 20  # a target of whole numbers with more distinct values is a regression
MIN_RECORDS_OF_A_CATEGORY = 10  # for differential privacy; the only record of a category is not to be published


@dataclass
class ColumnProfile:
    """A summary of a column, updated batch by batch.

    Attributes:
        rows: number of values, including missing ones.
        present: number of values that are not missing.
        numbers: distinct numbers, at most one more than a column may have categories, with how often they occur.
        texts: distinct texts that are not numbers, with the same limit.
        whole: whether all numbers are whole.
        rising: whether the numbers are strictly increasing.
        distinct: whether no value occurred twice in a batch.
        longest: bytes of the longest text.
        lowest: the lowest number.
        highest: the highest number.
    """

    rows: int = 0
    present: int = 0
    numbers: Counter[float] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    whole: bool = True
    rising: bool = True
    distinct: bool = True
    longest: int = 0
    lowest: float = np.inf
    highest: float = -np.inf
    _last: float = -np.inf

    def add_batch(self, array: Any, missing: MissingMarkers) -> None:
        """Update the summary with some more values."""
        encoded = missing.trim(array).dictionary_encode()
        values, places = encoded.dictionary.to_pylist(), encoded.indices.drop_null().to_numpy()
        self.rows += len(array)
        self.present += len(places)
        self.distinct &= len(places) == len(values)
        if not values:
            return
        counts = np.bincount(places, minlength=len(values))
        try:
            numbers = encoded.dictionary.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
        except pyarrow.ArrowInvalid:
            is_text = np.array([len(self.texts) > MAX_MARKER_TEXTS or not is_number(text) for text in values])
            self._add_texts([text for text, found in zip(values, is_text, strict=True) if found], counts[is_text])
            numbers = np.array([float(text) for text, found in zip(values, is_text, strict=True) if not found])
            self._add_numbers(numbers, counts[~is_text])
            self.rising = False
            return
        in_order = np.concatenate([[self._last], numbers[places]])
        self.rising = self.rising and bool(np.all(np.diff(in_order) > 0))
        self._last = float(in_order[-1])
        self._add_numbers(numbers, counts)

    def _add_numbers(self, values: Any, counts: Any) -> None:
        self.whole = self.whole and bool(np.all(values == np.floor(values)))
        finite = values[np.isfinite(values)]
        if finite.size:
            self.lowest, self.highest = min(self.lowest, float(finite.min())), max(self.highest, float(finite.max()))
        if len(self.numbers) <= MAX_CATEGORIES:
            _count(self.numbers, values.tolist(), counts)

    def _add_texts(self, texts: Sequence[str], counts: Any) -> None:
        self.longest = max([self.longest, *(len(text.encode()) for text in texts)])
        if len(self.texts) <= MAX_CATEGORIES:
            _count(self.texts, texts, counts)

    @property
    def values(self) -> list[str]:
        """The distinct values as texts, sorted."""
        return self._values(1)

    @property
    def frequent(self) -> list[str]:
        """The values that enough records have."""
        return self._values(MIN_RECORDS_OF_A_CATEGORY)

    def _values(self, least: int) -> list[str]:
        numbers, texts = ([each for each, n in found.items() if n >= least] for found in (self.numbers, self.texts))
        return [canonical(number) for number in sorted(numbers)] + sorted(map(canonical, texts))

    @property
    def numeric(self) -> bool:
        """True if the values are numbers, apart from a few texts that may mark missing values."""
        few = len(self.texts) <= MAX_MARKER_TEXTS and len(self.numbers) > MAX_CODES
        finite = all(abs(number) <= MAX_NUMBER for number in self.numbers)
        return bool(self.numbers) and (not self.texts or few) and finite

    @property
    def id_like(self) -> bool:
        """True if the values look like IDs of records."""
        text = not self.numbers and self.present > MAX_CODES
        return self.distinct and self.present == self.rows > 2 and (text or (self.whole and self.rising))

    @property
    def mostly_distinct(self) -> bool:
        """True if more than half of the values of a column of texts are distinct, as with names."""
        distinct = len(self.texts) + len(self.numbers)
        return not self.numeric and bool(self.texts) and MAX_CODES < self.present < 2 * distinct

    @property
    def markers(self) -> list[str]:
        """The texts in a column of numbers that are usual markers of missing values."""
        return sorted(filter(USUAL_MARKERS.fullmatch, self.texts)) if self.numeric else []

    @property
    def remarks(self) -> int:
        """The number of other distinct texts in a column of numbers."""
        return len(self.texts) - len(self.markers) if self.numeric else 0


def suggest_schema(path: str | os.PathLike[str], label: str, *, private: bool = False) -> str:
    """Return the text of `[data]` and `[model]` for a table, to paste into a federation file.

    Args:
        path: a CSV or Parquet file.
        label: the column to predict.
        private: also suggest `[privacy]`, and list ranges, categories and classes, which it needs.

    Raises:
        InputError: the file is not a table, has a duplicate name, lacks the label, or has no column to predict from.
    """
    table = open_table(path, [label], MISSING)
    missing = MissingMarkers(MISSING)
    positions = {name: find_column(table, name, label) for name in dict.fromkeys((*table.names, label)) if name}
    profiles = {name: ColumnProfile() for name in positions}
    nested: set[str] = set()
    for arrays in table.batches(list(positions.values())):
        for name, array in zip(positions, arrays, strict=True):
            try:
                profiles[name].add_batch(array, missing)
            except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid, UnicodeDecodeError):  # lists, bytes, …
                nested.add(name)
    target = profiles.pop(label)
    if not target.present:
        raise InputError(f"{table.title}: no row has a label in column {label!r}; name the column to predict")
    lines = [_column_line(name, each, name in nested, private) for name, each in profiles.items()]
    if all(line.startswith("#") for line in lines):
        raise InputError(
            f"{table.title} has no column to predict {label!r} from; these are its columns:\n" + "\n".join(lines)
        )
    markers = [text for each in (*profiles.values(), target) for text in each.markers]
    data = _data_lines(label, target, markers, profiles, private)
    model = model_lines(choose_model(target.present, regression=_is_regression(target), private=private))
    return "\n".join([*data, "", "[data.columns]", *lines, "", *model, *(PRIVACY if private else ()), ""])


PRIVACY = (
    "",
    "[privacy]",
    "epsilon = 1.0      # 1 is strong, 8 is weak protection of every record",
    "delta = 1e-6       # far below one divided by the number of all records",
    "clip = 1.0         # the largest norm of a record's gradient",
    "colluders = 1      # how many participants may collude, or leave out their noise",
)
REVIEW = (
    f"# Lines with the mark {REVIEW_MARK} are taken from this table: ranges rounded outward, and values of at least",
    f"# {MIN_RECORDS_OF_A_CATEGORY} records. Nothing here is protected by noise. Write what is known without looking",
    "# at records instead, such as the range of a device, and delete the mark: `cgd federation new` refuses it.",
)


def _data_lines(
    label: str, target: ColumnProfile, markers: Sequence[str], profiles: dict[str, ColumnProfile], private: bool
) -> list[str]:
    regression = _is_regression(target)
    review = f"; {REVIEW_MARK}" if private else ""
    remarks = f"  # {_remarks(target)}{review}" if regression and target.remarks else ""
    lines = [
        "# A suggestion from one participant's table. The same text goes to all participants: review it together,",
        "# and delete comments that disclose more about your table than you want.",
        *(REVIEW if private else ()),
        "[data]",
        f"target = {_text(label)}{remarks}",
        f'task = "{"regression" if regression else "classification"}"',
    ]
    if private:
        listed = f"range = {_outward(target)}" if regression else f"classes = {_list(target.frequent)}"
        lines.append(f"{listed}  # {REVIEW_MARK}")
    elif not regression and len(target.values) <= MAX_CLASSES:
        lines.append(f"# classes = {_list(target.values)}  # as in this table; left out: learned by a secure sum")
    if markers:
        texts = list(dict.fromkeys((*MISSING, *markers)))
        more = len(texts) - len(MISSING)
        lines.append(f"missing = {_list(texts)}  # {more} more than the default: texts in columns of numbers{review}")
    ids = [name for name, each in profiles.items() if each.id_like]
    if ids:
        lines.append(
            f"# id = {_text(ids[0])}  # needed in a grid, where several participants hold parts of the same records"
        )
    return lines


def _is_regression(target: ColumnProfile) -> bool:
    return target.numeric and (len(target.numbers) > MAX_CLASSES or not target.whole)


def _column_line(name: str, profile: ColumnProfile, nested: bool, private: bool) -> str:
    """Return the line of a column; for differential privacy, with its range or its categories."""
    line, start = _type_line(name, profile, nested, private), f"{_key(name)} = "
    for kind in ("number", "category") if private else ():
        if line.startswith(f'{start}"{kind}"'):
            limits = _list(profile.frequent)
            if kind == "number":
                limits = f'{{ type = "number", range = {_outward(profile)} }}'
            elif len(profile.frequent) < 2:
                return f"# {start}[]  # left out: fewer than two values of enough records; list them if all know them"
            comment = line.removeprefix(f'{start}"{kind}"')
            return f"{start}{limits}{f'{comment};' if comment else '  #'} {REVIEW_MARK}"
    return line


def _outward(profile: ColumnProfile) -> str:
    """Return a range around all numbers, rounded outward to a step of 1, 2 or 5 times a power of ten.

    Apart from 0, its ends are never those of the table.
    """
    low, high = profile.lowest, profile.highest
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= span)
    below = math.floor(low / step) - (low % step == 0 and low != 0)
    above = math.ceil(high / step) + (high % step == 0 and high != 0)
    return f"[{below * step:.12g}, {max(above, below + 1) * step:.12g}]"


def _type_line(name: str, profile: ColumnProfile, nested: bool, private: bool) -> str:
    key = _key(name)
    count = len(profile.texts) + len(profile.numbers)
    many = f"more than {MAX_CATEGORIES}" if count > MAX_CATEGORIES else str(count)
    if nested:
        return f"# {key}: left out, its type is neither number nor text"
    if not profile.present:
        return f"# {key}: left out, all its values are missing"
    if profile.id_like:
        return f"# {key}: left out, all values are distinct: an ID?"
    if profile.mostly_distinct:
        return f"# {key}: left out, more than half of its texts are distinct: names? All participants see them"
    if count == 1:
        return f'# {key} = "category"  # left out, it has only one value'
    if profile.numeric:
        if profile.whole and 2 < count <= MAX_CODES:
            return f'{key} = "category"  # {count} whole numbers: a code? For counts or measurements, write "number"'
        return f'{key} = "number"' + (f"  # {_remarks(profile)}" if profile.remarks else "")
    if count > MAX_CATEGORIES or profile.longest > MAX_CATEGORY_BYTES:
        if private:  # the numbers may be those of one record
            return f"# {key}: left out, many distinct or long values: free text?"
        return f"# {key}: left out, {many} distinct values of up to {profile.longest} bytes: free text?"
    if count > MIN_CATEGORIES_TO_NOTE:
        return f'{key} = "category"  # {count} distinct values, a feature for each'
    return f'{key} = "category"'


def _remarks(profile: ColumnProfile) -> str:
    texts = "1 distinct text is" if profile.remarks == 1 else f"{profile.remarks} distinct texts are"
    return f"{texts} not a number: correct the table, or list the text as missing"


def _count(found: Counter[Any], values: Sequence[Any], counts: Any) -> None:
    """Count some more distinct values, if there are not too many."""
    for value, count in zip(values[: MAX_CATEGORIES + 1], counts.tolist(), strict=False):
        found[value] += count


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _text(name)


def _text(text: str) -> str:
    # JSON strings are TOML strings, except for one character that TOML requires to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, texts))}]"
