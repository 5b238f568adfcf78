"""Suggest the sections `[data]` and `[model]` of a federation file from one participant's table.

The suggestion is a starting point for all participants to review: others may have other categories and missing values.
The text is sent to all participants, so it contains nothing of the table but names of columns, numbers of distinct
values, usual markers of missing values and, in comments that can be deleted, the classes, unless one has few records.
Columns that look like names, dates or identifiers are left out (`cgd.tabular.identifiers`); the note has no values.

For differential privacy, categories, classes and ranges have to be in the file. The suggestion then has those of the
table, ranges rounded outward, and categories only if enough records have them. Each of these lines has a mark, and
`cgd federation new` refuses a file with marks: people must replace the values by what is known without looking at
records.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES, MISSING, OTHER, RARE
from cgd.federation.privacy_section import REVIEW_MARK
from cgd.federation.toml_text import toml_key as _key
from cgd.federation.toml_text import toml_list as _list
from cgd.federation.toml_text import toml_text as _text
from cgd.federation.value_map import canonical
from cgd.tabular.arrow_arrays import nested_remedy
from cgd.tabular.cells import USUAL_MARKERS, MissingMarkers, has_decimal_comma, is_number
from cgd.tabular.columns import MAX_CATEGORIES
from cgd.tabular.data_checks import looks_like_dates
from cgd.tabular.dataset import find_columns
from cgd.tabular.decimal_commas import check_decimal, decimal_comma_error, numbers_with_points
from cgd.tabular.identifiers import are_persons, identifying_name, identifying_numbers, identifying_texts, rare_share
from cgd.tabular.model_choice import choose_model, model_lines
from cgd.tabular.number_columns import MAX_NUMBER
from cgd.tabular.readers import open_table

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

MAX_CODES = 8  # whole numbers with at most this many distinct values are probably codes
MIN_CATEGORIES_TO_NOTE = 100
MAX_MARKER_TEXTS = 3  # so few distinct texts in a column of numbers probably mark missing values
MAX_RARE_SHARE = 1 / 3  # with more of the records in rare values, texts are names or remarks
MAX_CLASSES = 20  # a target of whole numbers with more distinct values is a regression
MAX_LISTED = 20  # values of a column in a suggestion for differential privacy; more of them may name persons
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
    def decimal_commas(self) -> bool:
        """True if the values are numbers of which some have a decimal comma, apart from markers of missing values."""
        others = [text for text in self.texts if not has_decimal_comma(text)]
        usual = all(is_number(text) or USUAL_MARKERS.fullmatch(text) for text in others)
        return usual and len(others) < len(self.texts)

    @property
    def id_like(self) -> bool:
        """True if the values look like IDs of records."""
        text = not self.numbers and self.present > MAX_CODES
        return self.distinct and self.present == self.rows > 2 and (text or (self.whole and self.rising))

    @property
    def rare_share(self) -> float:
        """The part of the records whose value has few records."""
        return rare_share((*self.texts.values(), *self.numbers.values()))

    @property
    def rare(self) -> int:
        """The number of distinct values that few records have."""
        return sum(count < RARE for found in (self.texts, self.numbers) for count in found.values())

    @property
    def identifying(self) -> str:
        """What the values look like, if that identifies persons or records: dates, names, numbers; else empty."""
        if self.numeric:
            complete = self.present == self.rows and not self.texts
            return identifying_numbers(self.numbers, distinct=self.distinct and complete) if self.whole else ""
        found = identifying_texts(self.texts) if not self.numbers else ""
        if found or self.rare_share > MAX_RARE_SHARE:
            return found or "texts of few records each, as names are"
        return "persons with several records: many values, none frequent" if are_persons(self.texts) else ""

    @property
    def markers(self) -> list[str]:
        """The texts in a column of numbers that are usual markers of missing values."""
        return sorted(filter(USUAL_MARKERS.fullmatch, self.texts)) if self.numeric else []

    @property
    def remarks(self) -> int:
        """The number of other distinct texts in a column of numbers."""
        return len(self.texts) - len(self.markers) if self.numeric else 0


def suggest_schema(
    path: str | os.PathLike[str], label: str, *, private: bool = False, decimal: str | None = None
) -> str:
    """Return the text of `[data]` and `[model]` for a table, to paste into a federation file.

    Args:
        path: a CSV or Parquet file.
        label: the column to predict.
        private: also suggest `[privacy]`, and list ranges, categories and classes, which it needs.
        decimal: the decimal sign of numbers, a point or a comma; None: a point, and a column of numbers with commas is
            an error.

    Raises:
        InputError: the file is not a table, has a duplicate name, lacks the label, or has no column to predict from.
    """
    check_decimal(decimal or ".")
    table = open_table(path, [label], MISSING)
    missing = MissingMarkers(MISSING)
    names = [name for name in dict.fromkeys((*table.names, label)) if name]
    positions = dict(zip(names, find_columns(table, names, label), strict=True))
    profiles = {name: ColumnProfile() for name in positions}
    nested: dict[str, str] = {}
    for arrays in table.batches(list(positions.values())):
        for name, array in zip(positions, arrays, strict=True):
            try:
                profiles[name].add_batch(numbers_with_points(array) if decimal == "," else array, missing)
            except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid, UnicodeDecodeError):  # lists, bytes, …
                nested[name] = nested_remedy(array.type)
    if decimal is None:
        for name, profile in profiles.items():
            if profile.decimal_commas:
                raise decimal_comma_error(table, name, positions[name], missing)
    target = profiles.pop(label)
    if not target.present:
        raise InputError(f"{table.title}: no row has a label in column {label!r}; name the column to predict")
    lines = [_column_line(name, each, nested.get(name, ""), private) for name, each in profiles.items()]
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
    '# unit = "COLUMN"  # if persons have several records: the column that names them. Then (ε, δ) is for persons',
)
REVIEW = (
    f"# Lines with the mark {REVIEW_MARK} are taken from this table: ranges rounded outward, and values of at least",
    f"# {MIN_RECORDS_OF_A_CATEGORY} records. Nothing here is protected by noise. BEFORE you send this to anybody,",
    "# write what is known without looking at records, such as the range of a device, and delete the mark: `cgd",
    "# federation new` refuses it.",
)


def _data_lines(
    label: str, target: ColumnProfile, markers: Sequence[str], profiles: dict[str, ColumnProfile], private: bool
) -> list[str]:
    regression = _is_regression(target)
    review = f"; {REVIEW_MARK}" if private else ""
    remarks = f"  # {_remarks(target, private)}{review}" if regression and target.remarks else ""
    if not regression and target.identifying:
        remarks = f"  # is it the column to predict? Its values look like {target.identifying}"
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
    elif not regression and len(target.values) <= MAX_CLASSES and not target.rare:
        lines.append(f"# classes = {_list(target.values)}  # as in this table; left out: learned by a secure sum")
    elif not regression and len(target.values) <= MAX_CLASSES:
        lines.append(f"# classes = []  # list them, if all of you know them; some have fewer than {RARE} records here")
    if markers:
        texts = list(dict.fromkeys((*MISSING, *markers)))
        more = len(texts) - len(MISSING)
        lines.append(f"missing = {_list(texts)}  # {more} more than the default: texts in columns of numbers{review}")
    ids = [name for name, each in profiles.items() if _is_id(name, each)]
    if ids:
        lines.append(
            f"# id = {_text(ids[0])}  # needed in a grid, where several participants hold parts of the same records"
        )
    return lines


def _is_regression(target: ColumnProfile) -> bool:
    return target.numeric and (len(target.numbers) > MAX_CLASSES or not target.whole)


def _column_line(name: str, profile: ColumnProfile, nested: str, private: bool) -> str:
    """Return the line of a column; for differential privacy, with its range or its categories."""
    line, start = _type_line(name, profile, nested, private), f"{_key(name)} = "
    for kind in ("number", "category") if private else ():
        if line.startswith(f'{start}"{kind}"'):
            limits = _list(profile.frequent)
            if kind == "number":
                limits = f'{{ type = "number", range = {_outward(profile)} }}'
            elif not 2 <= len(profile.frequent) <= MAX_LISTED:
                if profile.frequent[MAX_LISTED:]:
                    return f"# {start}[]  # left out: many values; list them if all know them without a table"
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
    largest = max(abs(low), abs(high)) or 1.0
    finest = 10.0 ** (math.floor(math.log10(largest)) - 10)  # twelve digits are printed
    step = max(finest, next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= span))
    below, above = math.floor(low / step), math.ceil(high / step)
    # Products and quotients are rounded, so the ends are compared as they are printed.
    while low != 0 and float(f"{below * step:.12g}") >= low:
        below -= 1
    while high != 0 and float(f"{above * step:.12g}") <= high:
        above += 1
    return f"[{below * step:.12g}, {max(above, below + 1) * step:.12g}]"


def _type_line(name: str, profile: ColumnProfile, nested: str, private: bool) -> str:
    """Return the line of a column with its type; if `private`, without counts, which single records change."""
    key = _key(name)
    count = len(profile.texts) + len(profile.numbers)
    many = f"more than {MAX_CATEGORIES}" if count > MAX_CATEGORIES else str(count)
    if nested:
        return f"# {key}: left out, its type is neither number nor text: {nested}"
    if not profile.present:
        return f"# {key}: left out, all its values are missing"
    if profile.id_like and profile.identifying != "dates":
        return f"# {key}: left out, all values are distinct: an ID?"
    suspicion = _suspicion(name, profile)
    if suspicion:
        kind = "number" if profile.numeric else "category"
        return f'# {key}: left out, {suspicion}. If it identifies nobody, write {key} = "{kind}"'
    if count == 1:
        return f'# {key} = "category"  # left out, it has only one value'
    if profile.numeric and looks_like_dates(np.array(list(profile.numbers))):
        return f"# {key}: left out, all values are as days and months, such as 12.05: dates that were read as decimals?"
    if profile.numeric:
        if profile.whole and 2 < count <= MAX_CODES:
            found = "few" if private else count
            return f'{key} = "category"  # {found} whole numbers: a code? For counts or measurements, write "number"'
        return f'{key} = "number"' + (f"  # {_remarks(profile, private)}" if profile.remarks else "")
    if count > MAX_CATEGORIES or profile.longest > MAX_CATEGORY_BYTES:
        if private:
            return f"# {key}: left out, many distinct or long values: free text?"
        return f"# {key}: left out, {many} distinct values of up to {profile.longest} bytes: free text?"
    found = "many" if private else count
    notes = [f"{found} distinct values, a feature for each"] if count > MIN_CATEGORIES_TO_NOTE else []
    if profile.rare and not private:
        notes.append(f"values of fewer than {RARE} records, {profile.rare} in this table, count as {OTHER!r}")
    return f'{key} = "category"' + (f"  # {'; '.join(notes)}" if notes else "")


def _is_id(name: str, profile: ColumnProfile) -> bool:
    """Return whether a column may be the id of the records."""
    named = profile.distinct and profile.present == profile.rows and "identifier" in _suspicion(name, profile)
    return (profile.id_like or named) and profile.identifying != "dates"


def _suspicion(name: str, profile: ColumnProfile) -> str:
    """Return why a column may identify persons, or an empty text."""
    measured = profile.numeric and not profile.whole
    by_name = identifying_name(name, frequent=measured or profile.rare == 0)
    return by_name or (f"its values look like {profile.identifying}" if profile.identifying else "")


def _remarks(profile: ColumnProfile, private: bool) -> str:
    if private:
        return "some texts are not numbers: correct the table, or list them as missing"
    texts = "1 distinct text is" if profile.remarks == 1 else f"{profile.remarks} distinct texts are"
    return f"{texts} not a number: correct the table, or list the text as missing"


def _count(found: Counter[Any], values: Sequence[Any], counts: Any) -> None:
    """Count some more distinct values, if there are not too many."""
    for value, count in zip(values[: MAX_CATEGORIES + 1], counts.tolist(), strict=False):
        found[value] += count
