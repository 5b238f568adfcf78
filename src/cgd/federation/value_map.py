"""Texts of categories: the canonical text of a value, and the mapping of values that `values` in `[data]` describes.

    num = { type = "category", values = { "0" = "no", "1-4" = "yes" } }

Every key is a value of the tables, as its canonical text. A key of two whole numbers with a hyphen is also the range
of all whole numbers between them, and `"*"` is every other value. The text behind it is the category; an empty text
makes the value a missing one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

EVERY_OTHER = "*"

_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")
_TRUTH = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
_RANGE = re.compile(r"(-?[0-9]{1,18}) *- *(-?[0-9]{1,18})")
_INTEGER = re.compile(r"-?[0-9]{1,18}")


def canonical(value: Any) -> str:
    """Return the canonical text of a category.

    Examples:
        >>> [canonical(value) for value in (" a ", "3.0", 3, 3.0, 2.5, True, "TRUE", "1.50")]
        ['a', '3', '3', '3', '2.5', 'true', 'true', '1.50']
    """
    text = str(value).strip()
    if isinstance(value, float) and value.is_integer():
        text = str(int(value))
    whole = _WHOLE.fullmatch(text)
    if whole:
        text = whole[1].removeprefix("+")
    return "0" if text == "-0" else _TRUTH.get(text, text)


class ValueMap:
    """A mapping of canonical texts to categories.

    Args:
        values: the mapping, as in the federation file.

    Raises:
        InputError: two keys are the same value, or two ranges have a value in common.

    Examples:
        >>> stages = ValueMap({"0": "no", "1-4": "yes", "9": ""})
        >>> [stages.get(text) for text in ("0", "3", "9", "5")]
        ['no', 'yes', '', None]
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._exact: dict[str, str] = {}
        keys: dict[str, str] = {}
        ranges: list[tuple[int, int, str, str]] = []
        for key, category in values.items():
            text = canonical(key)
            if text in keys:
                raise InputError(f"values has {keys[text]!r} and {key!r}, which are the same value; remove one")
            keys[text], self._exact[text] = key, canonical(category)
            found = _RANGE.fullmatch(text)
            if found:
                first, last = int(found[1]), int(found[2])
                if first > last:
                    raise InputError(f"values has the range {key!r}; write the lower number first")
                ranges.append((first, last, key, canonical(category)))
        self._other = self._exact.pop(EVERY_OTHER, None)
        ranges.sort()
        for (_, last, one, _), (first, _, other, _) in pairwise(ranges):
            if first <= last:
                raise InputError(f"values has the ranges {one!r} and {other!r}, which have {first} in common")
        self._firsts = [each[0] for each in ranges]
        self._ranges = ranges

    def get(self, text: str) -> str | None:
        """Return the category of a canonical text, "" for a missing value, or None if the mapping does not have it."""
        category = self._exact.get(text)
        if category is None and self._ranges and _INTEGER.fullmatch(text):
            place = bisect_right(self._firsts, int(text)) - 1
            if place >= 0 and int(text) <= self._ranges[place][1]:
                category = self._ranges[place][3]
        return self._other if category is None else category

    @property
    def keys(self) -> tuple[str, ...]:
        """The values that are named one by one, for messages."""
        return tuple(self._exact)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The first and the last whole number of each range, in order."""
        return tuple((first, last) for first, last, _, _ in self._ranges)


def check_values_table(values: Any) -> dict[str, str]:
    """Return the content of a key `values`, in the order of its keys.

    Raises:
        InputError: it is not a table of texts, or ambiguous.
    """
    if not isinstance(values, dict) or not all(isinstance(each, str) for each in (*values, *values.values())):
        raise InputError(
            f"values is {values!r}; write the value of the tables, and the category that it stands for, both in "
            'quotes: values = { "0" = "no", "1-4" = "yes" }'
        )
    if "" in (key.strip() for key in values):
        raise InputError("values has an empty key, and an empty field is always missing; remove it")
    ValueMap(values)
    return dict(sorted(values.items()))


def listed_categories(what: str, listed: tuple[str, ...], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the listed categories, or those that a mapping can give if none are listed.

    Args:
        what: the name of the list in messages.
        listed: the list; empty if there is none.
        values: the mapping; empty if there is none.

    Raises:
        InputError: the mapping gives a category that is not in the list.
    """
    given = {canonical(each) for each in values.values()} - {""}
    if listed:
        unlisted = sorted(given - {canonical(each) for each in listed})
        if unlisted:
            raise InputError(
                f"values gives {unlisted[0]!r}, which is not one of the {what} {', '.join(map(repr, listed))}; add it "
                "there, or correct it"
            )
        return listed
    return tuple(sorted(given))
