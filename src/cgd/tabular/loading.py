"""From a participant's file to `TabularDataset`: the columns that the federation file lists, and no others.

Everything that is wrong with the file is found here, before anything is sent to anybody, and said with the line, the
value and what to do about it. These messages are for the person who owns the data; they never travel.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from cgd.errors import InputError
from cgd.federation.keys import similar
from cgd.tabular.columns import Categories, Missing, Numbers, note_of_unlisted, texts_of
from cgd.tabular.dataset import TabularDataset
from cgd.tabular.readers import DataFrameTable, open_table

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.readers import Table

MAX_NAMES_SHOWN = 10
ID_OR_TEXT = "is it an ID or free text? Leave it out of [data.columns], group its values, or make it a number"
TOO_MANY_CLASSES = "is it a number to predict? Write task = 'regression' in [data]; or group its values"


def read(
    path: str | os.PathLike[str],
    data: Data,
    columns: Sequence[Column],
    *,
    label: str | None = None,
    target: bool = True,
    ids: bool = False,
) -> tuple[TabularDataset, tuple[str, ...]]:
    """Read the records of a CSV or Parquet file.

    Args:
        path: of the file; a CSV file may be gzipped.
        data: what the federation file says of the tables.
        columns: those to read, with the types to read them as.
        label: the target's name in this file, if it is not `data.target`.
        target: whether to read the target; records without one are left out then.
        ids: whether to read the column `data.id`.

    Returns:
        The records, and what the person should know about them.

    Raises:
        InputError: the file cannot be used; the message says where and what to do.
    """
    wanted = [each.name for each in columns] + [label or data.target] * target + [data.id] * ids
    return _records(open_table(path, wanted, data.missing), data, columns, label=label, target=target, ids=ids)


def from_frame(
    frame: Any,
    data: Data,
    columns: Sequence[Column],
    *,
    label: str | None = None,
    target: bool = False,
    ids: bool = False,
) -> tuple[TabularDataset, tuple[str, ...]]:
    """The same from a table in memory: a dictionary of columns, a data frame of pandas or polars, or an Arrow table."""
    return _records(DataFrameTable(frame), data, columns, label=label, target=target, ids=ids)


def _records(
    table: Table, data: Data, columns: Sequence[Column], *, label: str | None, target: bool, ids: bool
) -> tuple[TabularDataset, tuple[str, ...]]:
    if ids and not data.id:
        raise InputError("[data] names no id column, and records are to be told apart; add id = 'NAME'")
    label = label or data.target
    if target and label in (each.name for each in columns):
        raise InputError(f"the label is {label!r}, which is a column to predict from; name another label")
    wanted = [each.name for each in columns] + [label] * target + [data.id] * ids
    positions = [position(table, name, label if target else None) for name in wanted]
    reader = _Reader(table, data, columns, label if target else None, ids)
    for arrays in table.batches(positions):
        reader.take_in(arrays)
    finished = reader.finish(_note_of_unread(table, {*wanted, data.target, data.id}))
    pyarrow.default_memory_pool().release_unused()  # Arrow keeps the room of its batches, as much as the records take
    return finished


class _Reader:
    """Takes in a table batch by batch; what is kept of a batch is numbers and codes."""

    def __init__(self, table: Table, data: Data, columns: Sequence[Column], label: str | None, ids: bool) -> None:
        self._title, self._place = table.title, table.place
        self._missing = Missing(data.missing)
        self._id = data.id
        self._columns = {each.name: self._column(each) for each in columns}
        self._target: Numbers | Categories | None = None
        if label is not None and data.task == "regression":
            self._target = Numbers(label, self._missing, self._title, self._place)
        elif label is not None:
            of_table = (label, self._missing, self._title, self._place)
            self._target = Categories(*of_table, data.classes, TOO_MANY_CLASSES)
        self._label = label
        self._ids: dict[str, int] | None = {} if ids else None
        self._rows, self._kept = 0, 0

    def take_in(self, arrays: Sequence[Any]) -> None:
        """One batch: the columns, then the target, then the ids."""
        rest = list(arrays)
        rows = len(rest[0])
        values = [column.convert(rest.pop(0), self._rows) for column in self._columns.values()]
        keep = None if self._target is None else self._labels(self._target, rest.pop(0))
        if self._ids is not None:
            self._identify(self._ids, rest.pop(0), keep)
        for column, some in zip(self._columns.values(), values, strict=True):
            column.add(some if keep is None else some[keep])  # type: ignore[arg-type]
        self._rows += rows
        self._kept += rows if keep is None else int(np.count_nonzero(keep))

    def finish(self, notes: Sequence[str]) -> tuple[TabularDataset, tuple[str, ...]]:
        """Everything that was taken in."""
        if not self._rows:
            raise InputError(f"{self._title} has no rows; export it with its records")
        if not self._kept:
            raise InputError(
                f"{self._title}: no row has a label in column {self._label!r}; name the column to predict with --label"
            )
        notes = list(notes)
        if self._kept < self._rows:
            without = self._rows - self._kept
            notes.append(f"{_rows(without)} without a label {'is' if without == 1 else 'are'} left out")
        notes += [
            note_of_unlisted(name, each.unlisted)
            for name, each in self._columns.items()
            if isinstance(each, Categories) and each.unlisted
        ]
        # One column after the other: only one of them is there twice.
        finished = {name: (column, column.finish()) for name, column in self._columns.items()}
        records = TabularDataset(
            rows=self._kept,
            numbers={name: made for name, (_, made) in finished.items() if isinstance(made, np.ndarray)},
            categories={name: made for name, (_, made) in finished.items() if not isinstance(made, np.ndarray)},
            target=None if self._target is None else self._target.finish(),
            ids=None if self._ids is None else tuple(self._ids),
        )
        return records, tuple(notes)

    def _column(self, column: Column) -> Numbers | Categories:
        of_table = (column.name, self._missing, self._title, self._place)
        if column.type == "number":
            return Numbers(*of_table)
        return Categories(*of_table, column.categories, ID_OR_TEXT)

    def _labels(self, target: Numbers | Categories, array: Any) -> npt.NDArray[np.bool_] | None:
        """Take in the labels of a batch; which rows have one (None: all)."""
        keep: npt.NDArray[np.bool_]
        if isinstance(target, Numbers):
            numbers = target.convert(array, self._rows)
            keep = ~np.isnan(numbers)
            target.add(numbers[keep])
        else:
            codes = target.convert(array, self._rows)
            target.refuse_unlisted(codes, array, self._rows)
            keep = codes >= 0
            target.add(codes[keep])
        return None if keep.all() else keep

    def _identify(self, ids: dict[str, int], array: Any, keep: npt.NDArray[np.bool_] | None) -> None:
        for place, text in enumerate(texts_of(array, self._missing, self._id, self._title)):
            row = self._rows + place
            if keep is not None and not keep[place]:
                continue
            if text is None:
                raise InputError(
                    f"{self._title}, {self._place(row)}: the id in column {self._id!r} is missing; every record has one"
                )
            other = ids.setdefault(text, row)
            if other != row:
                raise InputError(
                    f"{self._title}: the id {text!r} in column {self._id!r} is in {self._place(other)} and "
                    f"{self._place(row)}; a record is there once"
                )


def position(table: Table, name: str, label: str | None) -> int:
    """Where a column is in the header.

    Raises:
        InputError: it is not there, or twice.
    """
    count = Counter(table.names)[name]
    if count == 1:
        return table.names.index(name)
    if count > 1:
        raise InputError(f"{table.title} has {count} columns called {name!r}; rename all but the one that is meant")
    remedy = "name the column to predict with --label" if name == label else "rename the column that is meant"
    raise InputError(
        f"{table.title} has no column {name!r}{similar(name, table.names)}; {remedy}. Its header is "
        f"{_some(table.names)}"
    )


def _note_of_unread(table: Table, known: set[str]) -> list[str]:
    unread = [name for name in table.names if name not in known]
    return [f"columns not in the schema are not read: {_some(unread)}"] if unread else []


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name or "(no name)" for name in names[:MAX_NAMES_SHOWN])
    more = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"
