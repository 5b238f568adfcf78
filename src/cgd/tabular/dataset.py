"""The records of one participant, by column: what was read from its file, as numbers and codes.

Nothing here leaves the participant. `repr` shows names and sizes, never a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

MISSING_CODE = -1


def values_are(count: int) -> str:
    """The beginning of a sentence about some values, for messages."""
    return "1 value is" if count == 1 else f"{count:,} values are"


@dataclass(frozen=True, repr=False, eq=False)
class Categorical:
    """A column of categories: for every record the place of its category in `names`, or −1 if it is missing.

    Attributes:
        codes: int32, one for every record.
        names: the categories; some may not occur.
    """

    codes: npt.NDArray[np.int32]
    names: tuple[str, ...]

    @property
    def missing(self) -> int:
        """How many values are missing."""
        return int(np.count_nonzero(self.codes < 0))

    def counts(self) -> npt.NDArray[np.int64]:
        """How many records each category has, in the order of `names`."""
        # One bin in front for the missing ones: a mask would copy the codes.
        return np.bincount(self.codes.astype(np.int64) + 1, minlength=len(self.names) + 1)[1:]

    def take(self, indices: npt.NDArray[Any]) -> Categorical:
        """Some of the values, in this order."""
        return Categorical(self.codes[indices], self.names)

    def __repr__(self) -> str:
        return f"Categorical({len(self.codes)} values, {len(self.names)} categories)"


@dataclass(frozen=True, repr=False, eq=False)
class TabularDataset:
    """The records of one participant.

    Attributes:
        rows: how many.
        numbers: float64 by the name of the column; NaN is missing.
        categories: by the name of the column.
        target: what is to be predicted: float64, or the class; None if it was not read.
        ids: what identifies the records; None if it was not read.
    """

    rows: int
    numbers: Mapping[str, npt.NDArray[np.float64]]
    categories: Mapping[str, Categorical]
    target: npt.NDArray[np.float64] | Categorical | None = None
    ids: tuple[str, ...] | None = None

    def take(self, indices: npt.ArrayLike) -> TabularDataset:
        """Some of the records, in this order.

        Args:
            indices: their places, from 0; or a mask, with one truth value for every record.
        """
        places = np.asarray(indices)
        if places.dtype == np.bool_:
            places = np.flatnonzero(places)
        places = places.astype(np.int64, copy=False)
        target = self.target
        return TabularDataset(
            rows=len(places),
            numbers={name: values[places] for name, values in self.numbers.items()},
            categories={name: values.take(places) for name, values in self.categories.items()},
            target=target.take(places)
            if isinstance(target, Categorical)
            else None
            if target is None
            else target[places],
            ids=None if self.ids is None else tuple(self.ids[place] for place in places),
        )

    def __repr__(self) -> str:
        names = ", ".join((*self.numbers, *self.categories))
        return f"Records({self.rows} rows of {names}{'' if self.target is None else ', with a target'})"
