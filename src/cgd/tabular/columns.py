"""Convert Arrow arrays to numbers and category codes, batch by batch.

Category texts are made canonical, because two organisations may export the same column differently: surrounding spaces
are dropped, a whole number written as a float ("3.0") becomes the whole number ("3"), and True, TRUE and true are one.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.compute

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES
from cgd.federation.toml_validation import similar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Range

    Locate = Callable[[int], str]

MAX_CATEGORIES = 1000
MAX_LEARNED_CLASSES = 200
MISSING_CODE = -1
OTHERS = "…"
# The sum of its square over 2³¹ records still fits in a wide sum.
MAX_NUMBER = 2.0**80

_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")
_TRUTH = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:([.,'’ \u00a0\u202f])[0-9]{3})(?:\1[0-9]{3})*(?:[.,][0-9]*)?")


@dataclass(frozen=True, repr=False, eq=False)
class Categorical:
    """A column of categories: the position of each record's category in `names`, or −1 for a missing value.

    Attributes:
        codes: int32, one for each record.
        names: the categories; some may not occur.
    """

    codes: npt.NDArray[np.int32]
    names: tuple[str, ...]

    @property
    def missing(self) -> int:
        """The number of missing values."""
        return int(np.count_nonzero(self.codes < 0))

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of records of each category, in the order of `names`."""
        # One bin in front for the missing ones: a mask would copy the codes.
        return np.bincount(self.codes.astype(np.int64) + 1, minlength=len(self.names) + 1)[1:]

    def total_weights(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum of the weights of each category's records, in the order of `names`; first, of missing ones."""
        totals: npt.NDArray[Any] = np.bincount(self.codes.astype(np.int64) + 1, weights, len(self.names) + 1)
        return totals

    def take(self, indices: npt.NDArray[Any]) -> Categorical:
        """Return some of the values, in the given order."""
        return Categorical(self.codes[indices], self.names)

    def __repr__(self) -> str:
        return f"Categorical({len(self.codes)} values, {len(self.names)} categories)"


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


class NumberBuilder:
    """Build a column of numbers batch by batch.

    Args:
        name: the column's name.
        missing: the markers of missing values.
        title: the table's name in messages.
        locate: function that returns the place of a row, such as "line 17".
        limits: the range of the values, if there is one; values outside are cut to it.
    """

    def __init__(
        self, name: str, missing: MissingMarkers, title: str, locate: Locate, limits: Range | None = None
    ) -> None:
        self._name, self._missing, self._title, self._locate, self._limits = name, missing, title, locate, limits
        self._chunks: list[npt.NDArray[np.float64]] = []
        self.outside = 0

    def convert(self, array: Any, first: int) -> npt.NDArray[np.float64]:
        """Convert a batch to floats, NaN for missing values.

        Args:
            array: the batch.
            first: the row number of its first value.

        Raises:
            InputError: a value is not a number, or too large.
        """
        with _conversion(self._name, self._title):
            values: npt.NDArray[np.float64] = self._floats(_decoded(array), first).to_numpy(zero_copy_only=False)
        for number in self._missing.numbers:
            values = np.where(values == number, np.nan, values)
        with np.errstate(invalid="ignore"):
            large = np.flatnonzero(np.abs(values) > MAX_NUMBER)
        if large.size:
            place = int(large[0])
            value = float(values[place])
            fact = "is infinite" if np.isinf(value) else f"is beyond ±{MAX_NUMBER:.0e}"
            remedy = "correct it; if it stands for a missing value, list it as missing in [data]"
            raise self._error(first + place, f"{_shorten(array[place].as_py())} {fact}; {remedy}")
        return values

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Append converted numbers, cut to the range if there is one."""
        if self._limits is not None:
            cut = np.clip(values, *self._limits)
            self.outside += int(np.count_nonzero((cut != values) & ~np.isnan(values)))
            values = cut
        self._chunks.append(values)

    def finish(self) -> npt.NDArray[np.float64]:
        """Return the whole column and release the batches."""
        chunks, self._chunks = self._chunks, []
        return np.concatenate(chunks) if chunks else np.empty(0)

    def _floats(self, array: Any, first: int) -> Any:
        kind = array.type
        if _is_text(kind):
            try:
                return array.cast(pyarrow.float64())
            except pyarrow.ArrowInvalid:  # spaces, markers of missing values, or not a number
                texts = self._missing.trim(array)
            try:
                return texts.cast(pyarrow.float64())
            except pyarrow.ArrowInvalid:
                raise self._not_a_number(texts, first) from None
        types = pyarrow.types
        if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind) or types.is_float16(kind):
            return array.cast(pyarrow.float64(), safe=False)
        if types.is_floating(kind) or types.is_decimal(kind):
            return array.cast(pyarrow.float64())
        raise InputError(
            f"{self._title}: column {self._name!r} is of type {kind}, and a number is needed; convert it, "
            "or make it a category in [data.columns]"
        )

    def _not_a_number(self, texts: Any, first: int) -> InputError:
        place, text = next((place, text) for place, text in enumerate(texts.to_pylist()) if not is_number(text))
        return self._error(first + place, f"{_shorten(text)} is not a number; {_remedy(text)}")

    def _error(self, row: int, fact: str) -> InputError:
        return InputError(f"{self._title}, {self._locate(row)}, column {self._name!r}: {fact}")


class CategoryBuilder:
    """Build a column of categories batch by batch.

    Args:
        name: the column's name.
        missing: the markers of missing values.
        title: the table's name in messages.
        locate: function that returns the place of a row, such as "line 17".
        listed: the allowed categories, if they are fixed; other values count as missing.
        remedy: advice for a column with too many categories.
        limit: the most categories, if they are not listed.
    """

    def __init__(
        self,
        name: str,
        missing: MissingMarkers,
        title: str,
        locate: Locate,
        listed: Sequence[str] = (),
        remedy: str = "",
        limit: int = MAX_CATEGORIES,
    ) -> None:
        self._name, self._missing, self._title, self._locate = name, missing, title, locate
        self._listed, self._remedy, self._limit = tuple(listed), remedy, limit
        self._codes = self._listed_codes()
        self._chunks: list[npt.NDArray[np.int32]] = []
        self.unlisted: Counter[str] = Counter()

    def convert(self, array: Any, first: int) -> npt.NDArray[np.int32]:
        """Convert a batch to codes.

        Args:
            array: the batch.
            first: the row number of its first value.

        Raises:
            InputError: a category is too long, or there are too many.
        """
        distinct, places = _distinct(array, self._name, self._title)
        codes = np.full(len(distinct) + 1, MISSING_CODE, dtype=np.int32)  # the last element is for null
        unlisted: dict[int, str] = {}
        for place, value in enumerate(distinct):
            text = canonical(value)
            if value is None or value != value or text in self._missing.canonical:
                continue
            code = self._codes.get(text)
            if code is None and self._listed:
                unlisted[place] = text
                continue
            codes[place] = self._add_category(text, first, places, place) if code is None else code
        if unlisted:
            counts = np.bincount(places + 1, minlength=len(distinct) + 1)[1:]
            for place, text in unlisted.items():
                # There may be a million: keep the names of the first ones only, and count the rest.
                known = text in self.unlisted or len(self.unlisted) < MAX_CATEGORIES
                self.unlisted[text if known else OTHERS] += int(counts[place])
        row_codes: npt.NDArray[np.int32] = codes[places]
        return row_codes

    def add(self, codes: npt.NDArray[np.int32]) -> None:
        """Append converted codes."""
        self._chunks.append(codes)

    def finish(self) -> Categorical:
        """Return the whole column and release the batches."""
        chunks, self._chunks = self._chunks, []
        names = self._listed or tuple(self._codes)
        return Categorical(np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32), names)

    def refuse_unlisted(self, codes: npt.NDArray[np.int32], array: Any, first: int) -> None:
        """Refuse a batch of a target with a value that is not a listed class.

        Raises:
            InputError: there is one.
        """
        if not self.unlisted:
            return
        for place in np.flatnonzero(codes < 0):
            value = array[int(place)].as_py()
            text = "" if value is None else canonical(value)
            if text in self.unlisted:
                raise InputError(
                    f"{self._title}, {self._locate(first + int(place))}, column {self._name!r}: {text!r}"
                    f"{similar(text, self._listed)} is not one of the classes {', '.join(map(repr, self._listed))}; "
                    "correct it, or add it to classes in [data] for all participants"
                )

    def _listed_codes(self) -> dict[str, int]:
        codes: dict[str, int] = {}
        for code, text in enumerate(self._listed):
            if canonical(text) in self._missing.canonical:
                raise InputError(
                    f"[data] lists {text!r} for {self._name!r}, which stands for a missing value; remove it from the "
                    "list `missing`"
                )
            if codes.setdefault(canonical(text), code) != code:
                other = self._listed[codes[canonical(text)]]
                raise InputError(
                    f"[data] lists {other!r} and {text!r} for {self._name!r}, which are the same category; remove one"
                )
        return codes

    def _add_category(self, text: str, first: int, places: npt.NDArray[Any], place: int) -> int:
        if len(text.encode()) > MAX_CATEGORY_BYTES:
            row = first + int(np.flatnonzero(places == place)[0])
            raise InputError(
                f"{self._title}, {self._locate(row)}, column {self._name!r}: the category {text[:20]!r}… has "
                f"{len(text.encode())} bytes, and {MAX_CATEGORY_BYTES} is the most; shorten it, or leave the column out"
            )
        if len(self._codes) == self._limit:
            raise InputError(
                f"{self._title}: column {self._name!r} has more than {self._limit} different values; {self._remedy}"
            )
        return self._codes.setdefault(text, len(self._codes))


def to_texts(array: Any, missing: MissingMarkers, name: str, title: str) -> list[str | None]:
    """Return canonical texts, None for missing values; for IDs."""
    distinct, places = _distinct(array, name, title)
    texts = [None if value is None or value != value else canonical(value) for value in distinct]
    known = [None if text in missing.canonical else text for text in texts]
    known.append(None)
    return [known[place] for place in places]


def _distinct(array: Any, name: str, title: str) -> tuple[list[Any], npt.NDArray[Any]]:
    """Return the distinct values of an array, and each row's position among them; −1 for null."""
    with _conversion(name, title):
        return _encoded(array, name, title)


def _encoded(array: Any, name: str, title: str) -> tuple[list[Any], npt.NDArray[Any]]:
    array, kind, types = _decoded(array), _decoded(array).type, pyarrow.types
    plain = _is_text(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    if types.is_floating(kind):
        array = array.cast(pyarrow.float64())
    elif types.is_temporal(kind) or types.is_null(kind):
        array = array.cast(pyarrow.string())
    elif not plain:
        raise InputError(
            f"{title}: column {name!r} is of type {kind}, which is not a category; "
            "export it as text, or leave the column out"
        )
    encoded = array.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy()


@contextmanager
def _conversion(name: str, title: str) -> Iterator[None]:
    """Turn errors of Arrow into an InputError that names the column."""
    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"{title}: column {name!r} cannot be converted ({str(error).partition(chr(10))[0]}); export it again as "
            "text in UTF-8 or as numbers, or leave the column out"
        ) from None


def _decoded(array: Any) -> Any:
    return array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_number(text: str | None) -> bool:
    """Return whether Arrow converts this text to a number; true for None."""
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


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:38]}…"


def _remedy(text: str) -> str:
    if _THOUSANDS.fullmatch(text):
        return "write it without thousands separators, and decimals with a point, as in 1234.5"
    if _DECIMAL_COMMA.fullmatch(text):
        return "write decimals with a point, as in 1.5"
    return "correct it, list it as missing in [data], or make the column a category"


def values_are(count: int) -> str:
    """Return the beginning of a sentence about some values: "3 values are"."""
    return "1 value is" if count == 1 else f"{count:,} values are"


def unlisted_note(name: str, unlisted: Mapping[str, int]) -> str:
    """Return the note about values that are not among the listed categories."""
    total = sum(unlisted.values())
    some = ", ".join(_shorten(text) for text in sorted(unlisted)[:5]) + (", …" if len(unlisted) > 5 else "")
    return f"column {name!r}: {values_are(total)} not among its listed categories and treated as missing: {some}"
