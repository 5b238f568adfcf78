"""Texts in the cells of a table: markers of missing values, and texts for messages."""

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
