"""Convert Arrow arrays to category codes, batch by batch.

Category texts are made canonical, because two organisations may export the same column differently: surrounding spaces
are dropped, a whole number written as a float ("3.0") becomes the whole number ("3"), and True, TRUE and true are one.
Then `values` of the federation file may map them to other categories.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES
from cgd.federation.toml_validation import similar
from cgd.federation.value_map import EVERY_OTHER, ValueMap, canonical
from cgd.tabular.arrow_arrays import distinct_values
from cgd.tabular.cells import MissingMarkers, shorten, unlisted_note

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    Locate = Callable[[int], str]

MAX_CATEGORIES = 1000
MAX_LEARNED_CLASSES = 200
MAX_SIMILAR = 5
MISSING_CODE = -1
OTHERS = "…"


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
        values: the category of each value; empty: the value itself.
        fixed: whether the federation file can no longer change, because the model is trained.

    Attributes:
        unlisted: the values that are not listed, with the number of each.
        removed: whether the mapping has made a value a missing one.
    """

    removed = False

    def __init__(
        self,
        name: str,
        missing: MissingMarkers,
        title: str,
        locate: Locate,
        listed: Sequence[str] = (),
        remedy: str = "",
        limit: int = MAX_CATEGORIES,
        values: Mapping[str, str] | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self._name, self._missing, self._title, self._locate = name, missing, title, locate
        self._listed, self._remedy, self._limit, self._fixed = tuple(listed), remedy, limit, fixed
        self._values = ValueMap(values) if values else None
        self._check_values(values or {})
        self._codes = self._listed_codes()
        self._chunks: list[npt.NDArray[np.int32]] = []
        self.unlisted: Counter[str] = Counter()

    def convert(self, array: Any, first: int) -> npt.NDArray[np.int32]:
        """Convert a batch to codes.

        Args:
            array: the batch.
            first: the row number of its first value.

        Raises:
            InputError: a category is too long, or there are too many, or a value is not in the mapping.
        """
        distinct, places = distinct_values(array, self._name, self._title)
        codes = np.full(len(distinct) + 1, MISSING_CODE, dtype=np.int32)  # the last element is for null
        unlisted: dict[int, str] = {}
        for place, value in enumerate(distinct):
            text = canonical(value)
            if value is None or value != value or text in self._missing.canonical:
                continue
            if self._values is not None:
                text = self._mapped(self._values, text, first, places, place)
                if not text:
                    self.removed = True
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

    def notes(self) -> list[str]:
        """Return notes about the values."""
        if not self.unlisted:
            return []
        found = {text: similar(text, self._listed) for text in sorted(self.unlisted)[:MAX_SIMILAR]}
        return [unlisted_note(self._name, self.unlisted, found)]

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

    def _check_values(self, values: Mapping[str, str]) -> None:
        for key in values:
            if key != EVERY_OTHER and canonical(key) in self._missing.canonical:
                raise InputError(
                    f"[data] has {key!r} in values of {self._name!r}, and it stands for a missing value, which is not "
                    "mapped; remove it there, or from the list `missing`"
                )

    def _mapped(self, values: ValueMap, text: str, first: int, places: npt.NDArray[Any], place: int) -> str:
        category = values.get(text)
        if category is None:
            row = first + int(np.flatnonzero(places == place)[0])
            remedy = (
                f"add it there for all participants ({EVERY_OTHER!r} is every other value, and "
                '"" makes it a missing one)'
            )
            if self._fixed:
                remedy = "leave the field empty: then it counts as missing"
            raise InputError(
                f"{self._title}, {self._locate(row)}, column {self._name!r}: {shorten(text)}"
                f"{similar(text, values.keys)} is not in values of [data]; correct it, or {remedy}"
            )
        return category

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
    distinct, places = distinct_values(array, name, title)
    texts = [None if value is None or value != value else canonical(value) for value in distinct]
    known = [None if text in missing.canonical else text for text in texts]
    known.append(None)
    return [known[place] for place in places]
