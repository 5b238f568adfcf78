"""Convert Arrow arrays to a column of numbers, batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from cgd.errors import InputError
from cgd.tabular.arrow_arrays import conversion, decoded, is_text, nested_remedy
from cgd.tabular.cells import MissingMarkers, shorten, values_are
from cgd.tabular.decimal_commas import with_points
from cgd.tabular.written_numbers import is_number, not_a_number

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.federation.data_schema import Range

    Locate = Callable[[int], str]

# The sum of its square over 2³¹ records still fits in a wide sum.
MAX_NUMBER = 2.0**80


class NumberBuilder:
    """Build a column of numbers batch by batch.

    Args:
        name: the column's name.
        missing: the markers of missing values.
        title: the table's name in messages.
        locate: function that returns the place of a row, such as "line 17".
        limits: the range of the values, if there is one; values outside are cut to it.
        decimal: the decimal sign of texts, a point or a comma.

    Attributes:
        outside: the number of values outside of the range.
    """

    def __init__(
        self,
        name: str,
        missing: MissingMarkers,
        title: str,
        locate: Locate,
        limits: Range | None = None,
        decimal: str = ".",
    ) -> None:
        self._name, self._missing, self._title, self._locate = name, missing, title, locate
        self._limits, self._decimal = limits, decimal
        self._chunks: list[npt.NDArray[np.float64]] = []
        self.outside = 0
        self._lowest, self._highest = np.inf, -np.inf

    def convert(self, array: Any, first: int) -> npt.NDArray[np.float64]:
        """Convert a batch to floats, NaN for missing values.

        Args:
            array: the batch.
            first: the row number of its first value.

        Raises:
            InputError: a value is not a number, or too large.
        """
        with conversion(self._name, self._title):
            values: npt.NDArray[np.float64] = self._floats(decoded(array), first).to_numpy(zero_copy_only=False)
        for number in self._missing.numbers:
            values = np.where(values == number, np.nan, values)
        with np.errstate(invalid="ignore"):
            large = np.flatnonzero(np.abs(values) > MAX_NUMBER)
        if large.size:
            place = int(large[0])
            value = float(values[place])
            fact = "is infinite" if np.isinf(value) else f"is beyond ±{MAX_NUMBER:.0e}"
            remedy = "correct it; if it stands for a missing value, list it as missing in [data]"
            raise self._error(first + place, f"{shorten(array[place].as_py())} {fact}; {remedy}")
        return values

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Append converted numbers, cut to the range if there is one."""
        if self._limits is not None:
            cut = np.clip(values, *self._limits)
            outside = values[(cut != values) & ~np.isnan(values)]
            if outside.size:
                self.outside += outside.size
                self._lowest = min(self._lowest, float(outside.min()))
                self._highest = max(self._highest, float(outside.max()))
            values = cut
        self._chunks.append(values)

    def finish(self) -> npt.NDArray[np.float64]:
        """Return the whole column and release the batches."""
        chunks, self._chunks = self._chunks, []
        return np.concatenate(chunks) if chunks else np.empty(0)

    def notes(self) -> list[str]:
        """Return notes about the values."""
        if not self.outside:
            return []
        low, high = f"{self._lowest:g}", f"{self._highest:g}"
        which = low if low == high else f"from {low} to {high}"
        return [f"column {self._name!r}: {values_are(self.outside)} outside of its range and cut to it: {which}"]

    def _floats(self, array: Any, first: int) -> Any:
        kind = array.type
        if is_text(kind):
            return self._parse(array, first)
        types = pyarrow.types
        if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind) or types.is_float16(kind):
            return array.cast(pyarrow.float64(), safe=False)
        if types.is_floating(kind) or types.is_decimal(kind):
            return array.cast(pyarrow.float64())
        remedy = (
            "convert it, or make it a category in [data.columns]"
            if types.is_temporal(kind)
            else f"{nested_remedy(kind)}, or leave the column out"
        )
        raise InputError(f"{self._title}: column {self._name!r} is of type {kind}, and a number is needed; {remedy}")

    def _parse(self, array: Any, first: int) -> Any:
        if self._decimal == ",":
            trimmed = self._missing.trim(array)
            texts = with_points(trimmed)
            refused = np.flatnonzero((texts.is_null().to_numpy(False)) & trimmed.is_valid().to_numpy(False))
            if refused.size:
                raise self._not_a_number(trimmed[int(refused[0])].as_py(), first + int(refused[0]))
        else:
            try:
                return array.cast(pyarrow.float64())
            except pyarrow.ArrowInvalid:  # spaces, markers of missing values, or not a number
                trimmed = texts = self._missing.trim(array)
        try:
            return texts.cast(pyarrow.float64())
        except pyarrow.ArrowInvalid:
            place = next(place for place, text in enumerate(texts.to_pylist()) if not is_number(text))
            raise self._not_a_number(trimmed[place].as_py(), first + place) from None

    def _not_a_number(self, text: str, row: int) -> InputError:
        return self._error(row, not_a_number(text, self._decimal))

    def _error(self, row: int, fact: str) -> InputError:
        return InputError(f"{self._title}, {self._locate(row)}, column {self._name!r}: {fact}")
