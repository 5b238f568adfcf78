"""The records of one participant, read from a file, a database or a table in memory.

Only the columns that the federation file lists are read. All errors in the file are found here, before anything is
sent; messages give the line, the value and a remedy. They are shown to the owner of the data only.

Nothing here leaves the participant. `repr` shows names and sizes, never a value.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from cgd.errors import InputError
from cgd.federation.data_schema import DatePart
from cgd.federation.toml_validation import similar
from cgd.tabular.arrow_tables import DataFrameTable
from cgd.tabular.cells import MissingMarkers
from cgd.tabular.columns import MAX_LEARNED_CLASSES, Categorical, CategoryBuilder, to_texts
from cgd.tabular.date_columns import DateReader, part_values
from cgd.tabular.decimal_commas import check_decimal
from cgd.tabular.headers import ADD_A_HEADER, record_in_header
from cgd.tabular.number_columns import NumberBuilder
from cgd.tabular.sources import open_source

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.readers import Table
    from cgd.tabular.sources import TableSource

MAX_NAMES_SHOWN = 10
ID_OR_TEXT = "is it an ID or free text? Leave it out of [data.columns], group its values, or make it a number"
TOO_MANY_CLASSES = "is it a number to predict? Write task = 'regression' in [data]; or group its values"


@dataclass(frozen=True, repr=False, eq=False)
class TabularDataset:
    """The records of one participant.

    Attributes:
        rows: number of records.
        numbers: float64 values by column name; NaN for a missing value.
        categories: category codes by column name.
        target: values to predict, float64 or classes; None if not read.
        ids: IDs of the records; None if not read.
        units: the unit of privacy, such as the patient, that each record belongs to, without differences of case and
            spaces; None if every record is one.
        places: the rows of the table that the records come from, counted from 0; None if it is not known.
    """

    rows: int
    numbers: Mapping[str, npt.NDArray[np.float64]]
    categories: Mapping[str, Categorical]
    target: npt.NDArray[np.float64] | Categorical | None = None
    ids: tuple[str, ...] | None = None
    units: tuple[str, ...] | None = None
    places: npt.NDArray[np.int64] | None = None

    def unit_weights(self) -> npt.NDArray[np.float64]:
        """Return 1/k for each record, where k is the number of records of its unit: every unit has the weight 1."""
        if self.units is None:
            return np.ones(self.rows)
        sizes = Counter(self.units)
        return np.array([1 / sizes[each] for each in self.units])

    def take(self, indices: npt.ArrayLike) -> TabularDataset:
        """Return some of the records, in the given order.

        Args:
            indices: positions from 0, or a mask with one boolean for every record.
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
            units=None if self.units is None else tuple(self.units[place] for place in places),
            places=None if self.places is None else self.places[places],
        )

    def __repr__(self) -> str:
        names = ", ".join((*self.numbers, *self.categories))
        return f"TabularDataset({self.rows} rows of {names}{'' if self.target is None else ', with a target'})"


def read_dataset(
    source: str | os.PathLike[str] | TableSource,
    data: Data,
    columns: Sequence[Column],
    *,
    label: str | None = None,
    target: bool = True,
    ids: bool = False,
    unit: str = "",
    decimal: str = ".",
) -> tuple[TabularDataset, tuple[str, ...]]:
    """Read the records of a file or a database.

    Args:
        source: a CSV file, which may be gzipped, a Parquet file, an Excel workbook, or another source of records.
        data: the schema, as in the federation file.
        columns: the columns to read, with their types.
        label: the target's name in this file, if it is not `data.target`.
        target: read the target, and leave records without one out.
        ids: read the column `data.id`.
        unit: read this column as the unit of privacy of each record.
        decimal: the decimal sign of numbers in this file, a point or a comma.

    Returns:
        The records, and notes for the user about them.

    Raises:
        InputError: the records cannot be used; the message gives the place and a remedy.
        MissingExtraError: a library for this source is missing.
    """
    check_decimal(decimal)
    wanted = _wanted(data, columns, label or data.target if target else None, ids, unit)
    table = open_source(source, wanted, data.missing)
    return _load(table, data, columns, label=label, target=target, ids=ids, unit=unit, decimal=decimal)


def locate_records(
    source: str | os.PathLike[str] | TableSource,
    data: Data,
    columns: Sequence[Column],
    rows: Sequence[int],
    *,
    label: str | None = None,
) -> list[str]:
    """Return where rows of a source are, such as "line 17", given their `TabularDataset.places`."""
    table = open_source(source, _wanted(data, columns, label or data.target, ids=False, unit=""), data.missing)
    return table.locate_all(rows)


def dataset_from_frame(
    frame: Any,
    data: Data,
    columns: Sequence[Column],
    *,
    label: str | None = None,
    target: bool = False,
    ids: bool = False,
    unit: str = "",
) -> tuple[TabularDataset, tuple[str, ...]]:
    """Convert a dictionary of columns, a pandas or polars data frame, or an Arrow table; see `read_dataset`."""
    return _load(DataFrameTable(frame), data, columns, label=label, target=target, ids=ids, unit=unit)


def _wanted(data: Data, columns: Sequence[Column], label: str | None, ids: bool, unit: str) -> list[str]:
    """Return the names of the columns to read, in the order of `_DatasetBuilder.add_batch`."""
    more = ([] if label is None else [label]) + [data.id] * ids + [unit] * bool(unit)
    return list(dict.fromkeys(each.source for each in columns)) + more


def _load(
    table: Table,
    data: Data,
    columns: Sequence[Column],
    *,
    label: str | None,
    target: bool,
    ids: bool,
    unit: str,
    decimal: str = ".",
) -> tuple[TabularDataset, tuple[str, ...]]:
    if ids and not data.id:
        raise InputError("[data] names no id column, which is needed to identify records; add id = 'NAME'")
    label = label or data.target
    if target and label in (each.source for each in columns):
        raise InputError(f"the label is {label!r}, which is a column to predict from; name another label")
    if target and label == data.id:
        raise InputError(
            f"the label is {label!r}, which is the id column of [data], and classes are disclosed to all participants; "
            "name the column to predict with --label"
        )
    if target and label == unit:
        raise InputError(
            f"the label is {label!r}, which is the unit in [privacy], and names persons; name the column to predict "
            "with --label"
        )
    wanted = _wanted(data, columns, label if target else None, ids, unit)
    positions = find_columns(table, wanted, label if target else None, keys=(data.id, unit))
    builder = _DatasetBuilder(table, data, columns, label if target else None, ids, unit, decimal)
    for arrays in table.batches(positions):
        builder.add_batch(arrays)
    remarks = [
        f"column {name!r}: {remark}"
        for name, place in zip(wanted, positions, strict=True)
        if (remark := table.remark(place))
    ]
    finished = builder.finish([*_unread_columns_note(table, {*wanted, data.target, data.id}), *remarks])
    pyarrow.default_memory_pool().release_unused()  # Arrow caches its batches, as much memory as the records take
    return finished


class _DatasetBuilder:
    """Convert a table batch by batch, keeping only numbers and codes."""

    def __init__(
        self, table: Table, data: Data, columns: Sequence[Column], label: str | None, ids: bool, unit: str, decimal: str
    ) -> None:
        self._title, self._locate, self._decimal = table.title, table.locate, decimal
        self._missing = MissingMarkers(data.missing)
        self._id, self._label = data.id, label
        self._schema = tuple(columns)
        self._columns = {each.name: self._column_builder(each) for each in columns}
        self._sources = tuple(dict.fromkeys(each.source for each in columns))
        dates = {each.source: each.of for each in columns if isinstance(each, DatePart)}
        self._dates = {
            name: DateReader(each, self._markers(each), self._title, self._locate) for name, each in dates.items()
        }
        self._target: NumberBuilder | CategoryBuilder | None = None
        if label is not None and data.task == "regression":
            self._target = NumberBuilder(label, self._missing, self._title, self._locate, data.range, decimal)
        elif label is not None:
            source = (label, self._missing, self._title, self._locate)
            self._target = CategoryBuilder(*source, data.classes, TOO_MANY_CLASSES, MAX_LEARNED_CLASSES, data.values)
        self._ids: dict[str, int] | None = {} if ids else None
        self._unit, self._units = unit, list[str]()
        self._rows_read, self._rows_kept = 0, 0
        self._places: list[npt.NDArray[np.int64]] = []

    def add_batch(self, arrays: Sequence[Any]) -> None:
        """Add one batch: the columns, then the target, then the IDs, then the units of privacy."""
        rows = len(arrays[0])
        values = self._convert(dict(zip(self._sources, arrays, strict=False)))
        rest = list(arrays[len(self._sources) :])
        keep = None if self._target is None else self._add_labels(self._target, rest.pop(0))
        if self._ids is not None:
            self._add_ids(self._ids, rest.pop(0), keep)
        if self._unit:
            self._units += [_unit_name(text) for _, text in self._names(rest.pop(0), "unit", self._unit, keep)]
        for column, some in zip(self._columns.values(), values, strict=True):
            column.add(some if keep is None else some[keep])
        kept = np.arange(rows, dtype=np.int64) if keep is None else np.flatnonzero(keep)
        self._places.append(self._rows_read + kept)
        self._rows_read += rows
        self._rows_kept += len(kept)

    def finish(self, notes: Sequence[str]) -> tuple[TabularDataset, tuple[str, ...]]:
        """Return the records of all batches, and the notes."""
        if not self._rows_read:
            raise InputError(f"{self._title} has no rows; export it with its records")
        if not self._rows_kept:
            remedy = "; name the column to predict with --label"
            if isinstance(self._target, CategoryBuilder) and self._target.removed:
                remedy = ", because `values` in [data] makes its values missing; write there the class that each means"
            raise InputError(f"{self._title}: no row has a label in column {self._label!r}{remedy}")
        notes = list(notes)
        if self._rows_kept < self._rows_read:
            without = self._rows_read - self._rows_kept
            notes.append(f"{_rows(without)} without a label {'is' if without == 1 else 'are'} left out")
        builders = (*self._columns.values(), *([] if self._target is None else [self._target]))
        notes += [note for each in builders for note in each.notes()]
        # One column after the other, so that only one of them is in memory twice.
        finished = {name: column.finish() for name, column in self._columns.items()}
        dataset = TabularDataset(
            rows=self._rows_kept,
            numbers={name: made for name, made in finished.items() if isinstance(made, np.ndarray)},
            categories={name: made for name, made in finished.items() if not isinstance(made, np.ndarray)},
            target=None if self._target is None else self._target.finish(),
            ids=None if self._ids is None else tuple(self._ids),
            units=tuple(self._units) if self._unit else None,
            places=np.concatenate(self._places),
        )
        return dataset, tuple(notes)

    def _convert(self, arrays: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Return the values of a batch for every column, given the arrays of the columns of the table."""
        days = {name: reader.convert(arrays[name], self._rows_read) for name, reader in self._dates.items()}
        return [
            builder.convert(
                part_values(column, days[column.source]) if isinstance(column, DatePart) else arrays[column.source],
                self._rows_read,
            )
            for column, builder in zip(self._schema, self._columns.values(), strict=True)
        ]

    def _markers(self, column: Column) -> MissingMarkers:
        return MissingMarkers((*self._missing.texts, *column.missing)) if column.missing else self._missing

    def _column_builder(self, column: Column) -> NumberBuilder | CategoryBuilder:
        missing = MissingMarkers(()) if isinstance(column, DatePart) else self._markers(column)
        source = (column.name, missing, self._title, self._locate)
        if column.type == "number":
            return NumberBuilder(*source, column.range, self._decimal)
        # Records without a label are predicted, by a model that is trained.
        fixed = self._label is None
        return CategoryBuilder(*source, column.categories, ID_OR_TEXT, values=column.values, fixed=fixed)

    def _add_labels(self, target: NumberBuilder | CategoryBuilder, array: Any) -> npt.NDArray[np.bool_] | None:
        """Add the labels of a batch; return the mask of rows that have one (None: all)."""
        keep: npt.NDArray[np.bool_]
        if isinstance(target, NumberBuilder):
            numbers = target.convert(array, self._rows_read)
            keep = ~np.isnan(numbers)
            target.add(numbers[keep])
        else:
            codes = target.convert(array, self._rows_read)
            target.refuse_unlisted(codes, array, self._rows_read)
            keep = codes >= 0
            target.add(codes[keep])
        return None if keep.all() else keep

    def _add_ids(self, ids: dict[str, int], array: Any, keep: npt.NDArray[np.bool_] | None) -> None:
        for row, text in self._names(array, "id", self._id, keep):
            other = ids.setdefault(text, row)
            if other != row:
                raise InputError(
                    f"{self._title}: the id {text!r} in column {self._id!r} is in {self._locate(other)} and "
                    f"{self._locate(row)}; every record must have its own id"
                )

    def _names(
        self, array: Any, what: str, column: str, keep: npt.NDArray[np.bool_] | None
    ) -> Iterator[tuple[int, str]]:
        """Yield the rows of a batch that are kept, and their values, none of which may be missing."""
        for place, text in enumerate(to_texts(array, self._missing, column, self._title)):
            row = self._rows_read + place
            if keep is not None and not keep[place]:
                continue
            if text is None:
                raise InputError(
                    f"{self._title}, {self._locate(row)}: the {what} in column {column!r} is missing; every record "
                    "needs one: fill it in, or remove the row"
                )
            yield row, text


def _unit_name(text: str) -> str:
    """Return the name of a unit without differences of case and spaces.

    Two units that are taken for one share one weight, so both are protected; one that is taken for two is not.
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def find_columns(table: Table, names: Sequence[str], label: str | None, keys: Collection[str] = ()) -> list[int]:
    """Return the positions of columns in the header.

    Args:
        table: the table.
        names: the columns.
        label: which of them is the column to predict.
        keys: which of them must have a value in every row, as IDs have.

    Raises:
        InputError: some are missing, all of which the message names, or one occurs more than once.
    """
    counts = Counter(table.names)
    for name in names:
        if counts[name] > 1:
            raise InputError(
                f"{table.title} has {counts[name]} columns called {name!r}; rename all but the one that is meant"
            )
    missing = [name for name in dict.fromkeys(names) if not counts[name]]
    if missing:
        if record := record_in_header(table):  # not shown: it may be a patient's
            names_missing = f"column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
            raise InputError(
                f"{table.title} has no {names_missing}, and perhaps no header: where the names should be, it has "
                f"{record}; {ADD_A_HEADER}"
            )
        others = [name for name in table.names if name not in names] or table.names  # all may be wanted
        listed = ", ".join(f"{name!r}{similar(name, others)}" for name in missing)
        inputs = [name for name in missing if name != label]
        remedies = []
        if inputs:
            them = "the column that is meant" if len(inputs) == 1 else "the columns that are meant"
            empty = "" if set(inputs) <= set(keys) else ", or add an empty one for what you do not measure"
            remedies.append(f"rename {them}{empty}")
        if label in missing:
            remedies.append("name the column to predict with --label")
        # No other delimiter gave more names, so it may be a title.
        title = " (the header must be the first line: remove what is above it)" if len(table.names) == 1 else ""
        raise InputError(
            f"{table.title} has no column{'s' if len(missing) > 1 else ''} {listed}; {'; '.join(remedies)}. Its header "
            f"is {_list_names(table.names)}{title}"
        )
    return [table.names.index(name) for name in names]


def _unread_columns_note(table: Table, known: set[str]) -> list[str]:
    unread = [name for name in table.names if name not in known]
    return [f"columns not in the schema are not read: {_list_names(unread)}"] if unread else []


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(name or "(no name)" for name in names[:MAX_NAMES_SHOWN])
    more = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"
