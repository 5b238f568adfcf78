"""Tables of Arrow: Parquet files, and tables in memory. See `cgd.tabular.readers.Table`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BATCH_ROWS = 1 << 16


class NumberedRows:
    """The places in a table whose rows have a number only. See `cgd.tabular.readers.Table`."""

    def locate(self, row: int) -> str:
        """See `Table`."""
        return f"row {row + 1}"

    def locate_all(self, rows: Sequence[int]) -> list[str]:
        """See `Table`."""
        return [self.locate(row) for row in rows]

    def remark(self, position: int) -> str:  # noqa: ARG002
        """See `Table`."""
        return ""


class ParquetTable(NumberedRows):
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        self.title = str(path)
        try:
            self._file = pyarrow.parquet.ParquetFile(open_file(path))
        except (pyarrow.ArrowException, OSError) as error:
            raise self._damaged(error) from None
        schema = self._file.schema_arrow
        _check_not_empty(self.title, schema)
        self._stored = schema.names
        self.names = tuple(name.strip() for name in schema.names)

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """See `Table`."""
        names = [self._stored[position] for position in positions]
        try:
            for batch in self._file.iter_batches(BATCH_ROWS, columns=names):
                yield [batch.column(name) for name in names]
        except (pyarrow.ArrowException, OSError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> InputError:
        return InputError(f"{self.title} is not a Parquet file, or is damaged ({_first_line(error)}); export it again")


class DataFrameTable(NumberedRows):
    """A table in memory: anything `pyarrow.table` accepts, such as a dictionary of arrays or a data frame."""

    def __init__(self, frame: Any) -> None:
        self.title = "the table"
        try:
            self._table = frame if isinstance(frame, pyarrow.Table) else pyarrow.table(frame)
        except (pyarrow.ArrowException, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"a {type(frame).__name__} is not a table ({_first_line(error)}); "
                "pass a dictionary of columns, a data frame of pandas or polars, or an Arrow table"
            ) from None
        _check_not_empty(self.title, self._table.schema)
        self.names = tuple(str(name).strip() for name in self._table.column_names)

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """See `Table`."""
        for batch in self._table.select(list(positions)).to_batches(max_chunksize=BATCH_ROWS):
            yield batch.columns


def _check_not_empty(title: str, schema: Any) -> None:
    if not schema.names:
        raise InputError(f"{title} has no columns; export it again, with a column for each property")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def open_file(path: Path) -> Any:
    """Open a file for Arrow, which cannot convert a name that is not UTF-8 from a text."""
    return pyarrow.OSFile(os.fsencode(path))
