"""Summarise a column of a table while it is read, to suggest its type."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from cgd.federation.data_schema import RARE
from cgd.federation.value_map import canonical
from cgd.tabular.arrow_arrays import decoded, is_text
from cgd.tabular.cells import USUAL_MARKERS, MissingMarkers
from cgd.tabular.columns import MAX_CATEGORIES
from cgd.tabular.decimal_commas import with_points
from cgd.tabular.identifiers import (
    are_persons,
    identifying_numbers,
    identifying_texts,
    may_be_days,
    may_name_persons,
    rare_share,
)
from cgd.tabular.number_columns import MAX_NUMBER
from cgd.tabular.written_numbers import LIMIT, NUMBER, OTHER_TEXT, UNIT, is_number, is_total, unit_of, writing

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CODES = 8  # whole numbers with at most this many distinct values are probably codes
MAX_MARKER_TEXTS = 3  # so few distinct texts in a column of numbers probably mark missing values
MAX_RARE_SHARE = 1 / 3  # with more of the records in rare values, texts are names or remarks
REMARKS_RATIO = 4  # as many numbers as this for each remark
MAX_UNITS = 3  # numbers before more different texts are addresses, or remarks
MIN_RECORDS_OF_A_CATEGORY = 10  # for differential privacy; the only record of a category is not to be published


@dataclass
class ColumnProfile:
    """A summary of a column, updated batch by batch.

    Attributes:
        decimal: the decimal sign of numbers in texts, a point or a comma.
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
        end: the last value.
        remark: what to know about how its numbers are written.
    """

    decimal: str = "."
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
    end: str = ""
    remark: str = ""
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
        self.end = values[places[-1]]
        counts = np.bincount(places, minlength=len(values))
        comma = self.decimal == "," and is_text(decoded(array).type)
        readable = with_points(encoded.dictionary) if comma else encoded.dictionary
        numbers = _floats(readable)
        if numbers is None:
            self._add_mixed(values, readable.to_pylist(), counts)
            self.rising = False
            return
        in_order = np.concatenate([[self._last], numbers[places]])
        self.rising = self.rising and bool(np.all(np.diff(in_order) > 0))
        self._last = float(in_order[-1])
        self._add_numbers(numbers, counts)

    def _add_mixed(self, values: Sequence[str], readable: Sequence[str | None], counts: Any) -> None:
        """Add values of which some are texts; `readable` are those that may be numbers, with decimal points."""
        numbers = [
            float(text) if len(self.texts) <= MAX_MARKER_TEXTS and text is not None and is_number(text) else None
            for text in readable
        ]
        found = np.array([number is None for number in numbers])
        self._add_texts([text for text, number in zip(values, numbers, strict=True) if number is None], counts[found])
        self._add_numbers(np.array([number for number in numbers if number is not None]), counts[~found])

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

    @cached_property
    def writings(self) -> frozenset[str]:
        """How the numbers are written, if not as plain numbers (`writing`); empty if the column has other texts.

        Markers of missing values, and as few remarks, do not count as other texts.
        """
        texts = [text for text in self.texts if not USUAL_MARKERS.fullmatch(text) and not is_total(text)]
        found = Counter(writing(text, self.decimal) for text in texts)
        remarks = found.pop(OTHER_TEXT, 0)
        units = len({unit_of(text) for text in texts} - {""})
        # A unit comes with several numbers, other than the town in "8001 Zürich".
        if units > MAX_UNITS or (1 < units == found[UNIT] and not self.numbers):
            remarks += found.pop(UNIT, 0)
        plain = len(self.numbers) + found.pop(NUMBER, 0)
        if plain <= MAX_CODES:  # "<40" and ">40" are two categories
            remarks += found.pop(LIMIT, 0)
        few = remarks <= MAX_MARKER_TEXTS and REMARKS_RATIO * remarks <= found.total() + plain
        return frozenset(found) if few else frozenset()

    @property
    def ends_with_total(self) -> bool:
        """True if the last value is a word for a total, and no other record has it."""
        return is_total(self.end) and self.texts[self.end] <= 1

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
            return identifying_numbers(self.numbers, distinct=self.distinct and complete)
        found = identifying_texts(self.texts) if not self.numbers else ""
        if found or self.rare_share > MAX_RARE_SHARE:
            return found or "texts of few records each, as names are"
        return "persons with several records: many values, none frequent" if are_persons(self.texts) else ""

    @property
    def may_name_persons(self) -> bool:
        """True if the values may name persons, which only people can tell."""
        return not self.numeric and may_name_persons(self.texts)

    @property
    def may_be_days(self) -> bool:
        """True if the values may be dates as Excel counts days, which only people can tell."""
        return self.numeric and may_be_days(self.numbers)

    @property
    def markers(self) -> list[str]:
        """The texts in a column of numbers that are usual markers of missing values."""
        return sorted(filter(USUAL_MARKERS.fullmatch, self.texts)) if self.numeric else []

    @property
    def remarks(self) -> int:
        """The number of other distinct texts in a column of numbers, apart from limits and a word for a total."""
        limits = sum(writing(text, self.decimal) == LIMIT for text in self.texts)
        return len(self.texts) - len(self.markers) - limits - self.ends_with_total if self.numeric else 0


def _count(found: Counter[Any], values: Sequence[Any], counts: Any) -> None:
    """Count some more distinct values, if there are not too many."""
    for value, count in zip(values[: MAX_CATEGORIES + 1], counts.tolist(), strict=False):
        found[value] += count


def _floats(texts: Any) -> Any:
    """Return an array of texts as floats, or None if some are null or no numbers."""
    try:
        return None if texts.null_count else texts.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    except pyarrow.ArrowInvalid:
        return None
