"""Encode a `TabularDataset` as a matrix, in the same way at every member: standardised numbers, one-hot categories.

The statistics are computed over all members' records by secure sums. Every member learns, over the whole federation and
never of a single member: the number of present and missing values of each column, its sum and its sum of squared
distances from the mean, to the last bit; the number of records of each category; the same of the target. Categories
that are learned are disclosed if two members have them with enough records, and are "other" if not
(`cgd.tabular.rare_values`). A column with a single value in the whole federation discloses that value.

On one table with all records, scikit-learn's `StandardScaler`, `SimpleImputer(strategy="constant", fill_value=0,
add_indicator=True)` and `OneHotEncoder(handle_unknown="ignore")` produce the same matrix, if that table has "other" in
the same places.

The features are in the order of the columns. A number has one feature, its value. A category has one for each of its
categories, in order. Both have one more, `NAME missing`, if a value is missing anywhere in the federation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cgd.errors import InputError
from cgd.json_files import convert, convert_complete
from cgd.tabular.federated_stats import CategoryStats, NumberStats, TargetStats, fit_columns, fit_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

__all__ = ["Preprocessing", "fit", "fit_columns", "fit_target"]

FORMAT = "cgd preparation 1"
# Rows encoded at a time: their part of the matrix stays in the processor's cache while the columns are filled in.
BLOCK_ROWS = 4096


class _Document(msgspec.Struct):
    """The `preparation` object of model.json."""

    format: str
    columns: tuple[NumberStats | CategoryStats, ...]
    target: dict[str, Any]


@dataclass(frozen=True)
class Preprocessing:
    """Encode records as a matrix, and decode predictions; the same at every member.

    Attributes:
        columns: the statistics of each column, in order.
        target: the statistics of the target.
    """

    columns: tuple[NumberStats | CategoryStats, ...]
    target: TargetStats

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the matrix's columns."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of their indices; empty in a regression."""
        return self.target.classes

    @property
    def outputs(self) -> int:
        """The number of a model's outputs: one for each class, or one for a number."""
        return len(self.classes) or 1

    def notes(self, records: TabularDataset) -> tuple[str, ...]:
        """Return notes about the statistics for a member with these records."""
        notes = [note for column in self.columns for note in column.notes()]
        return (*notes, *self.target.notes(records.target))

    def transform(self, records: TabularDataset) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
        """Return the matrix of some records, and notes about values that no training record had.

        An unknown category is "other" if the column has that category, and otherwise zero in all features; so is a
        missing value where none was missing in training.

        Raises:
            InputError: a column was not read.
        """
        self._check_columns(records)
        matrix = np.zeros((records.rows, len(self.features)), dtype=np.float32)
        writers = [(column.feature_writer(records), part) for column, part in self.parts()]
        for start in range(0, records.rows, BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            for write, part in writers:
                write(matrix[rows, part], rows)
        return matrix, tuple(note for column in self.columns for note in column.unseen_notes(records))

    def encode_target(self, records: TabularDataset) -> npt.NDArray[np.int64] | npt.NDArray[np.float32]:
        """Return the indices of the classes; in a regression, values of mean 0 and deviation 1 over the federation.

        Raises:
            InputError: the target was not read, or has an unknown class.
        """
        return self.target.encode(records.target)

    def decode(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return a regression model's outputs in the unit of the target."""
        return self.target.decode(values)

    def class_weights(self) -> npt.NDArray[np.float32]:
        """Return weights that balance the classes: n/(k·n_c), where a rare class counts as a tenth of the largest."""
        return self.target.class_weights()

    def to_dict(self) -> dict[str, Any]:
        """Return the object that model.json stores."""
        target = msgspec.to_builtins(self.target)
        document: dict[str, Any] = msgspec.to_builtins(_Document(FORMAT, self.columns, target))
        return document

    @classmethod
    def from_dict(cls, content: Any) -> Preprocessing:
        """Restore from the output of `to_dict`, also after it was written as JSON and read.

        Raises:
            InputError: the content is of another format, or damaged.
        """
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise InputError(
                f"the format of the preprocessing is {found!r} and not {FORMAT!r}; use the version of cgd that wrote it"
            )
        try:
            document = convert(content, _Document)
            target = convert_complete(document.target, TargetStats, "target")
            _check_statistics(document.columns, target)
        except InputError as error:
            raise InputError(f"the preprocessing is damaged ({error}); restore the file from your copy") from None
        return cls(document.columns, target)

    def parts(self) -> Iterator[tuple[NumberStats | CategoryStats, slice]]:
        """Yield each column with the place of its features in the matrix."""
        first = 0
        for column in self.columns:
            yield column, slice(first, first + len(column.features))
            first += len(column.features)

    def _check_columns(self, records: TabularDataset) -> None:
        for column in self.columns:
            known: Mapping[str, object] = records.numbers if isinstance(column, NumberStats) else records.categories
            if column.name not in known:
                raise InputError(f"column {column.name!r} was not read; read all columns of the preprocessing")


def _check_statistics(columns: Sequence[NumberStats | CategoryStats], target: TargetStats) -> None:
    _check_moments("target", target.mean, target.deviation)
    _check_counts("target", target.classes, target.counts)
    for column in columns:
        if isinstance(column, NumberStats):
            _check_moments(column.name, column.mean, column.deviation)
        else:
            _check_counts(column.name, column.categories, column.counts)


def _check_moments(name: str, mean: float, deviation: float) -> None:
    if not math.isfinite(mean) or not 0 <= deviation < math.inf:
        raise InputError(f"{name!r} has the mean {mean} and the deviation {deviation}")


def _check_counts(name: str, names: Sequence[str], counts: Sequence[int]) -> None:
    if len(names) != len(counts) or len(set(names)) != len(names) or min(counts, default=0) < 0:
        raise InputError(f"{name!r} has {len(names)} names, with duplicates or another number of counts")


def fit(records: TabularDataset, data: Data, columns: Sequence[Column], peers: Peers) -> Preprocessing:
    """Compute the statistics of all members' records by secure sums, the target's first.

    Every member takes part in the same sums in the same order, whatever its records are.

    Args:
        records: this member's records.
        data: the schema, as in the federation file.
        columns: the columns to encode.
        peers: the members that hold these columns: in a grid, the peers of the grid column.

    Raises:
        InputError: there are fewer than two classes, or all values of the target are equal (all members raise this);
            or our values are very far from those of the others.
        ProtocolError: a member entered a wrong number; see `cgd.tabular.opened_counts`.
    """
    target = fit_target(records, data, columns, peers)
    return Preprocessing(fit_columns(records, data, columns, peers), target)
