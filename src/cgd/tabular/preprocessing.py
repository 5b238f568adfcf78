"""From `TabularDataset` to a matrix, alike at every member: numbers standardised, categories as one column each.

The statistics are those of all members' records together, by secure sums. What every member learns: how many values
each column has and lacks, its sum and its sum of squared distances from the mean, to the last bit; the categories, with
how many records each has; the same of the target. All of the whole federation, never of one member; but a column with a
single value anywhere shows that value.

On one table with everybody's records, scikit-learn's `StandardScaler`, `SimpleImputer(strategy="constant",
fill_value=0, add_indicator=True)` and `OneHotEncoder(handle_unknown="ignore")` give the same matrix.

The features are in the order of the columns. A number has one, its value. A category has one for each of its
categories, in order. Both have one more, `NAME missing`, if a value is missing anywhere in the federation.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.json_shapes import MisfitError
from cgd.json_shapes import fit as fit_shape
from cgd.tabular.federated_stats import Category, Number, Target, fit_columns, fit_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.json_shapes import Shape
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

__all__ = ["Preprocessing", "fit", "fit_columns", "fit_target"]

FORMAT = "cgd preparation 1"
NUMBER: Shape = {"type": "number", "name": str, "present": int, "missing": int, "mean": float, "deviation": float}
CATEGORY: Shape = {"type": "category", "name": str, "categories": [str], "counts": [int], "missing": int}
TARGET: Shape = {"classes": [str], "counts": [int], "mean": float, "deviation": float}
SHAPE: Shape = {"format": FORMAT, "columns": [(NUMBER, CATEGORY)], "target": TARGET}
# Rows prepared at a time: their part of the matrix stays in the processor's cache while the columns are filled in.
BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Preprocessing:
    """What turns records into a matrix, and predictions into values; the same at every member.

    Attributes:
        columns: the statistics of each column, in order.
        target: those of the target.
    """

    columns: tuple[Number | Category, ...]
    target: Target

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the matrix's columns."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of their numbers; none in a regression."""
        return self.target.classes

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for a record: one for each class, or the value."""
        return len(self.classes) or 1

    def notes(self, records: TabularDataset) -> tuple[str, ...]:
        """What a member should know of these statistics, beside its own records."""
        notes = [note for column in self.columns for note in column.notes()]
        return (*notes, *self.target.notes(records.target))

    def transform(self, records: TabularDataset) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
        """The matrix of some records, and what to know about it: what no member had when the statistics were made.

        A category that nobody had is zero in all columns, and so is a missing value where none was missing.

        Raises:
            InputError: a column was not read.
        """
        self._check(records)
        matrix = np.zeros((records.rows, len(self.features)), dtype=np.float32)
        fillers = [(column.filler(records), part) for column, part in self._parts()]
        for start in range(0, records.rows, BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            for fill, part in fillers:
                fill(matrix[rows, part], rows)
        return matrix, tuple(note for column in self.columns for note in column.surprises(records))

    def encode_target(self, records: TabularDataset) -> npt.NDArray[np.int64] | npt.NDArray[np.float32]:
        """The numbers of the classes; or, in a regression, values of mean 0 and deviation 1 over the federation.

        Raises:
            InputError: there is no target, or a class that nobody had.
        """
        return self.target.encode(records.target)

    def decode(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """In a regression, what a model's outputs mean in the target's own unit."""
        return self.target.decode(values)

    def class_weights(self) -> npt.NDArray[np.float32]:
        """Weights that make every class count the same: n/(k·n_c), and 0 for a class without records."""
        return self.target.class_weights()

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        columns = [{"type": type(column).__name__.lower(), **asdict(column)} for column in self.columns]
        return {"format": FORMAT, "columns": columns, "target": asdict(self.target)}

    @classmethod
    def from_dict(cls, content: Any) -> Preprocessing:
        """What `to_dict` gave, also after a way through JSON.

        Raises:
            InputError: it is something else.
        """
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise InputError(f"the preparation's format is {found!r} and not {FORMAT!r}; use the version that wrote it")
        try:
            read = fit_shape(content, SHAPE, "preparation")
            target = Target(**{name: read["target"][name] for name in TARGET})
            _check_moments("target", target.mean, target.deviation)
            _check_counts("target", target.classes, target.counts)
            return cls(tuple(map(_column, read["columns"])), target)
        except MisfitError as error:
            raise InputError(f"the preparation is damaged ({error}); restore the file from your copy") from None

    def _parts(self) -> Iterator[tuple[Number | Category, slice]]:
        first = 0
        for column in self.columns:
            yield column, slice(first, first + len(column.features))
            first += len(column.features)

    def _check(self, records: TabularDataset) -> None:
        for column in self.columns:
            there: Mapping[str, object] = records.numbers if isinstance(column, Number) else records.categories
            if column.name not in there:
                raise InputError(f"column {column.name!r} was not read; read all columns of the preparation")


def _column(read: dict[str, Any]) -> Number | Category:
    """Make a column of what a file says."""
    kind, shape = (Number, NUMBER) if read["type"] == "number" else (Category, CATEGORY)
    made = kind(**{name: read[name] for name in shape if name != "type"})
    if isinstance(made, Number):
        _check_moments(made.name, made.mean, made.deviation)
    else:
        _check_counts(made.name, made.categories, made.counts)
    return made


def _check_moments(name: str, mean: float, deviation: float) -> None:
    if not math.isfinite(mean) or not 0 <= deviation < math.inf:
        raise MisfitError(f"{name!r} has the mean {mean} and the deviation {deviation}")


def _check_counts(name: str, names: Sequence[str], counts: Sequence[int]) -> None:
    if len(names) != len(counts) or len(set(names)) != len(names) or min(counts, default=0) < 0:
        raise MisfitError(f"{name!r} has {len(names)} names, with doubles or not as many counts")


def fit(records: TabularDataset, data: Data, columns: Sequence[Column], peers: Peers) -> Preprocessing:
    """The statistics of all members' records, by secure sums: the target's first, then the columns'.

    Every member makes the same sums in the same order, whatever its records are.

    Args:
        records: this member's.
        data: what the federation file says of the tables.
        columns: those to prepare.
        peers: who has these columns: in a grid, the peers of the column, who have every record once.

    Raises:
        InputError: nothing can be learned: there are fewer than two classes, or all values of the target are equal.
            All members find this together.
    """
    target = fit_target(records, data, peers)
    return Preprocessing(fit_columns(records, columns, peers), target)
