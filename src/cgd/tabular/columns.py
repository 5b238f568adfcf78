"""From Arrow arrays to numbers and codes, batch by batch.

Texts of categories are canonical, because two organisations export the same column in different ways: spaces around
them are dropped, a whole number written as a float ("3.0") is the whole number ("3"), and True, TRUE and true are one.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.compute

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_LENGTH
from cgd.federation.keys import similar
from cgd.tabular.dataset import MISSING_CODE, Categorical, values_are

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    Place = Callable[[int], str]

MAX_CATEGORIES = 1000
OTHERS = "…"
# Its square, added up over 2³¹ records, is still within a wide sum.
MAX_NUMBER = 2.0**80

_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")
_TRUTH = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:([.,'’ \u00a0\u202f])[0-9]{3})(?:\1[0-9]{3})*(?:[.,][0-9]*)?")


def canonical(value: Any) -> str:
    """The text of a category, however it was exported.

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


class Missing:
    """What stands for a missing value, in texts and in numbers: "-9" is also -9.0."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text.strip() for text in texts) | {""}
        self.canonical = frozenset(map(canonical, self.texts)) | self.texts
        self.numbers = tuple(sorted({number for text in self.texts if (number := _finite(text)) is not None}))
        self._array = pyarrow.array(sorted(self.texts), pyarrow.string())

    def trimmed(self, array: Any) -> Any:
        """Texts without spaces around them, and null where they stand for a missing value."""
        texts = pyarrow.compute.utf8_trim_whitespace(array.cast(pyarrow.string()))
        none = pyarrow.scalar(None, pyarrow.string())
        return pyarrow.compute.if_else(pyarrow.compute.is_in(texts, self._array), none, texts)


class Numbers:
    """A column of numbers that grows batch by batch.

    Args:
        name: of the column.
        missing: what stands for a missing value.
        title: of the table, for messages.
        place: says where a row is found.
    """

    def __init__(self, name: str, missing: Missing, title: str, place: Place) -> None:
        self._name, self._missing, self._title, self._place = name, missing, title, place
        self._chunks: list[npt.NDArray[np.float64]] = []

    def convert(self, array: Any, first: int) -> npt.NDArray[np.float64]:
        """Numbers, NaN where they are missing.

        Raises:
            InputError: something else is there, or something infinite.
        """
        values: npt.NDArray[np.float64] = self._floats(_decoded(array), first).to_numpy(zero_copy_only=False)
        for number in self._missing.numbers:
            values = np.where(values == number, np.nan, values)
        with np.errstate(invalid="ignore"):
            large = np.flatnonzero(np.abs(values) > MAX_NUMBER)
        if large.size:
            place = int(large[0])
            value = float(values[place])
            fact = "is infinite" if np.isinf(value) else f"is beyond ±{MAX_NUMBER:.0e}"
            remedy = "mend it; if it stands for a missing value, list it as missing in [data]"
            raise self._error(first + place, f"{_shown(array[place].as_py())} {fact}; {remedy}")
        return values

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Keep these numbers."""
        self._chunks.append(values)

    def finish(self) -> npt.NDArray[np.float64]:
        """All of them; the column is used up."""
        chunks, self._chunks = self._chunks, []
        return np.concatenate(chunks) if chunks else np.empty(0)

    def _floats(self, array: Any, first: int) -> Any:
        kind = array.type
        if _is_text(kind):
            try:
                return array.cast(pyarrow.float64())
            except pyarrow.ArrowInvalid:  # spaces, other texts that stand for a missing value, or no number
                texts = self._missing.trimmed(array)
            try:
                return texts.cast(pyarrow.float64())
            except pyarrow.ArrowInvalid:
                raise self._no_number(texts, first) from None
        types = pyarrow.types
        if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind) or types.is_float16(kind):
            return array.cast(pyarrow.float64(), safe=False)
        if types.is_floating(kind) or types.is_decimal(kind):
            return array.cast(pyarrow.float64())
        raise InputError(
            f"{self._title}: column {self._name!r} is of type {kind}, and a number is needed; convert it, "
            "or make it a category in [data.columns]"
        )

    def _no_number(self, texts: Any, first: int) -> InputError:
        place, text = next((place, text) for place, text in enumerate(texts.to_pylist()) if not is_number(text))
        return self._error(first + place, f"{_shown(text)} is no number; {_remedy(text)}")

    def _error(self, row: int, fact: str) -> InputError:
        return InputError(f"{self._title}, {self._place(row)}, column {self._name!r}: {fact}")


class Categories:
    """A column of categories that grows batch by batch.

    Args:
        name: of the column.
        missing: what stands for a missing value.
        title: of the table, for messages.
        place: says where a row is found.
        listed: the categories, if they are fixed; what is not listed has the code of a missing value then.
        remedy: what to do if there are too many.
    """

    def __init__(
        self, name: str, missing: Missing, title: str, place: Place, listed: Sequence[str] = (), remedy: str = ""
    ) -> None:
        self._name, self._missing, self._title, self._place = name, missing, title, place
        self._listed, self._remedy = tuple(listed), remedy
        self._codes = self._listed_codes()
        self._chunks: list[npt.NDArray[np.int32]] = []
        self.unlisted: Counter[str] = Counter()

    def convert(self, array: Any, first: int) -> npt.NDArray[np.int32]:
        """The code of every value.

        Raises:
            InputError: a category is too long, or there are too many.
        """
        distinct, places = _distinct(array, self._name, self._title)
        codes = np.full(len(distinct) + 1, MISSING_CODE, dtype=np.int32)  # the last one for null
        strange: dict[int, str] = {}
        for place, value in enumerate(distinct):
            text = canonical(value)
            if value is None or value != value or text in self._missing.canonical:
                continue
            code = self._codes.get(text)
            if code is None and self._listed:
                strange[place] = text
                continue
            codes[place] = self._enter(text, first, places, place) if code is None else code
        if strange:
            often = np.bincount(places + 1, minlength=len(distinct) + 1)[1:]
            for place, text in strange.items():
                # There may be a million: those beyond a number are counted, and not told.
                known = text in self.unlisted or len(self.unlisted) < MAX_CATEGORIES
                self.unlisted[text if known else OTHERS] += int(often[place])
        of_rows: npt.NDArray[np.int32] = codes[places]
        return of_rows

    def add(self, codes: npt.NDArray[np.int32]) -> None:
        """Keep these codes."""
        self._chunks.append(codes)

    def finish(self) -> Categorical:
        """The whole column; it is used up."""
        chunks, self._chunks = self._chunks, []
        names = self._listed or tuple(self._codes)
        return Categorical(np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32), names)

    def refuse_unlisted(self, codes: npt.NDArray[np.int32], array: Any, first: int) -> None:
        """For a target, whose classes are all there is.

        Raises:
            InputError: a value was not listed.
        """
        if not self.unlisted:
            return
        for place in np.flatnonzero(codes < 0):
            value = array[int(place)].as_py()
            text = "" if value is None else canonical(value)
            if text in self.unlisted:
                raise InputError(
                    f"{self._title}, {self._place(first + int(place))}, column {self._name!r}: {text!r}"
                    f"{similar(text, self._listed)} is none of the classes {', '.join(map(repr, self._listed))}; "
                    "mend it, or list it in classes of [data], for everybody"
                )

    def _listed_codes(self) -> dict[str, int]:
        codes: dict[str, int] = {}
        for code, text in enumerate(self._listed):
            if canonical(text) in self._missing.canonical:
                raise InputError(
                    f"[data] lists {text!r} for {self._name!r}, which stands for a missing value; give missing a list "
                    "of texts without it"
                )
            if codes.setdefault(canonical(text), code) != code:
                other = self._listed[codes[canonical(text)]]
                raise InputError(
                    f"[data] lists {other!r} and {text!r} for {self._name!r}, which are the same; take one away"
                )
        return codes

    def _enter(self, text: str, first: int, places: npt.NDArray[Any], place: int) -> int:
        if len(text.encode()) > MAX_CATEGORY_LENGTH:
            row = first + int(np.flatnonzero(places == place)[0])
            raise InputError(
                f"{self._title}, {self._place(row)}, column {self._name!r}: the category {text[:20]!r}… has "
                f"{len(text.encode())} bytes, and {MAX_CATEGORY_LENGTH} is the most; shorten it, or leave the column out"
            )
        if len(self._codes) == MAX_CATEGORIES:
            raise InputError(
                f"{self._title}: column {self._name!r} has more than {MAX_CATEGORIES} different values; {self._remedy}"
            )
        return self._codes.setdefault(text, len(self._codes))


def texts_of(array: Any, missing: Missing, name: str, title: str) -> list[str | None]:
    """Canonical texts, None where they are missing: for ids."""
    distinct, places = _distinct(array, name, title)
    texts = [None if value is None or value != value else canonical(value) for value in distinct]
    known = [None if text in missing.canonical else text for text in texts]
    known.append(None)
    return [known[place] for place in places]


def _distinct(array: Any, name: str, title: str) -> tuple[list[Any], npt.NDArray[Any]]:
    """The different values of an array, and for every row its value's place among them (the last place: null)."""
    array, kind, types = _decoded(array), _decoded(array).type, pyarrow.types
    plain = _is_text(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    if types.is_floating(kind):
        array = array.cast(pyarrow.float64())
    elif types.is_temporal(kind) or types.is_null(kind):
        array = array.cast(pyarrow.string())
    elif not plain:
        raise InputError(
            f"{title}: column {name!r} is of type {kind}, which is no category; "
            "export it as text, or leave the column out"
        )
    encoded = array.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy()


def _decoded(array: Any) -> Any:
    return array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_number(text: str | None) -> bool:
    """Whether Arrow takes this text for a number; null is none that is missing."""
    try:
        pyarrow.scalar(text, pyarrow.string()).cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return False
    return True


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:38]}…"


def _remedy(text: str) -> str:
    if _THOUSANDS.fullmatch(text):
        return "write it without thousands separators, and decimals with a point, as in 1234.5"
    if _DECIMAL_COMMA.fullmatch(text):
        return "write decimals with a point, as in 1.5"
    return "mend it, list it as missing in [data], or make the column a category"


def note_of_unlisted(name: str, unlisted: Mapping[str, int]) -> str:
    """What to tell the person about values that are not among the listed categories."""
    total = sum(unlisted.values())
    some = ", ".join(_shown(text) for text in sorted(unlisted)[:5]) + (", …" if len(unlisted) > 5 else "")
    return f"column {name!r}: {values_are(total)} not among its listed categories, and taken for missing: {some}"
