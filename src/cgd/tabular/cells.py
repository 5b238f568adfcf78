"""Texts in the cells of a table: markers of missing values, numbers, and texts for messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.compute

from cgd.federation.value_map import canonical

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Texts that usually mark a missing value. `cgd schema` suggests them; any other text in a column of numbers may be a
# remark about a person, and is only counted.
USUAL_MARKERS = re.compile(
    r"[-.*#/+]{1,3}|#?n[./]?[adkr]\.?|nan|nil|none|null|unk|unknown|missing|empty|blank|invalid|error|no data"
    r"|not (available|applicable|known|done|recorded|measured|tested)",
    re.IGNORECASE,
)

_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:([.,'’ \u00a0\u202f])[0-9]{3})(?:\1[0-9]{3})*(?:[.,][0-9]*)?")


class MissingMarkers:
    """The texts and numbers that stand for a missing value: "-9" also matches -9.0."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text.strip() for text in texts) | {""}
        self.canonical = frozenset(map(canonical, self.texts)) | self.texts
        self.numbers = tuple(sorted({number for text in self.texts if (number := _finite(text)) is not None}))
        self._array = pyarrow.array(sorted(self.texts), pyarrow.string())

    def trim(self, array: Any) -> Any:
        """Return the texts without surrounding spaces, and null for those that stand for a missing value."""
        texts = pyarrow.compute.utf8_trim_whitespace(array.cast(pyarrow.string()))
        none = pyarrow.scalar(None, pyarrow.string())
        return pyarrow.compute.if_else(pyarrow.compute.is_in(texts, self._array), none, texts)


def is_number(text: str | None) -> bool:
    """Return whether Arrow converts this text to a number; true for None."""
    try:
        pyarrow.scalar(text, pyarrow.string()).cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return False
    return True


def has_decimal_comma(text: str) -> bool:
    """Return whether a text is a number with a decimal comma, or maybe with commas between thousands."""
    return _DECIMAL_COMMA.fullmatch(text) is not None


def not_a_number(text: str, decimal: str = ".") -> str:
    """Return the fact and the remedy about a text where a number is needed.

    Examples:
        >>> not_a_number("63,5")
        "'63,5' is not a number; write decimals with a point, as in 1.5, or add --decimal ','"
        >>> not_a_number("1.063", decimal=",")
        "'1.063' is not a number, because decimals have a comma here; write it without thousands separators"
    """
    fact = f"{shorten(text)} is not a number"
    if decimal == ",":
        if is_number(text):
            return f"{fact}, because decimals have a comma here; write it without thousands separators"
        return f"{fact}; correct it, list it as missing in [data], or make the column a category"
    if _THOUSANDS.fullmatch(text):
        decimal = text.replace(",", ".")  # that would be read, without a further word
        option = f". Only if it means {decimal}, add --decimal ','" if has_decimal_comma(text) else ""
        return f"{fact}; write it without thousands separators, and decimals with a point, as in 1234.5{option}"
    if has_decimal_comma(text):
        return f"{fact}; write decimals with a point, as in 1.5, or add --decimal ','"
    return f"{fact}; correct it, list it as missing in [data], or make the column a category"


def shorten(value: Any) -> str:
    """Return a value in quotes, of at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:38]}…"


def values_are(count: int) -> str:
    """Return the beginning of a sentence about some values: "3 values are"."""
    return "1 value is" if count == 1 else f"{count:,} values are"


def unlisted_note(name: str, unlisted: Mapping[str, int], similar: Mapping[str, str]) -> str:
    """Return the note about values that are not among the listed categories.

    Args:
        name: the column's name.
        unlisted: the values, with the number of each.
        similar: " (did you mean …?)" for a value, if a category is similar.
    """
    total = sum(unlisted.values())
    some = ", ".join(f"{shorten(text)}{similar.get(text, '')}" for text in sorted(unlisted)[:5])
    more = ", …" if len(unlisted) > 5 else ""
    return f"column {name!r}: {values_are(total)} not among its listed categories and treated as missing: {some}{more}"


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None
