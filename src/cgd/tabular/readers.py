"""Tables on disk or in memory, read in batches of Arrow arrays, whatever their format.

A table has a header, yields the requested columns batch by batch, and returns the place of a row for messages. At most
one batch of a file is in memory. A file that is not a table raises `InputError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow
import pyarrow.parquet

from cgd.errors import InputError
from cgd.tabular.csv_reader import CsvTable

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Sequence

BATCH_ROWS = 1 << 16

# Common kinds of files by their first bytes.
PARQUET = b"PAR1"
UNSUPPORTED = {
    b"PK\x03\x04": "an Excel workbook or another zip archive; save the sheet as CSV (UTF-8)",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save the sheet as CSV (UTF-8)",
    b"\xff\xfe": "text in UTF-16; save it as CSV (UTF-8)",
    b"\xfe\xff": "text in UTF-16; save it as CSV (UTF-8)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it, or use gzip",
    b"BZh": "compressed by bzip2; decompress it, or use gzip",
    b"\xfd7zXZ": "compressed by xz; decompress it, or use gzip",
    b"ARROW1": "an Arrow file; save it as Parquet or CSV",
}


class Table(Protocol):
    """A table that is read batch by batch.

    Attributes:
        title: the table's name in messages.
        names: the header.
    """

    title: str
    names: tuple[str, ...]

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """Yield Arrow arrays of the columns at these positions of the header, some rows at a time."""

    def locate(self, row: int) -> str:
        """Return the place of a row, counted from 0, such as "line 17"."""


def open_table(path: str | os.PathLike[str], wanted: Collection[str], missing: Collection[str]) -> Table:
    """Open a CSV file (gzipped or not) or a Parquet file.

    Args:
        path: the file.
        wanted: names expected in the header; they help to recognise the delimiter.
        missing: texts of a CSV file to read as null.

    Raises:
        InputError: the file does not exist, or is not a table.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        fact = "is a folder" if path.is_dir() else f"cannot be read ({error.strerror})"
        raise InputError(f"{path} {fact}; name a CSV or Parquet file") from None
    if not head:
        raise InputError(
            f"{path} is empty; name a CSV file with a header and a row for every record, or a Parquet file"
        )
    if head.startswith(PARQUET):
        return ParquetTable(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        raise InputError(f"{path} is not a Parquet file, although its name says so; export it again")
    for magic, description in UNSUPPORTED.items():
        if head.startswith(magic):
            raise InputError(f"{path} is {description}")
    return CsvTable(path, wanted, missing)


class ParquetTable:
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        self.title = str(path)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
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

    def locate(self, row: int) -> str:
        """See `Table`."""
        return f"row {row + 1}"

    def _damaged(self, error: Exception) -> InputError:
        return InputError(f"{self.title} is not a Parquet file, or is damaged ({_first_line(error)}); export it again")


class DataFrameTable:
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

    def locate(self, row: int) -> str:
        """See `Table`."""
        return f"row {row + 1}"


def _check_not_empty(title: str, schema: Any) -> None:
    if not schema.names:
        raise InputError(f"{title} has no columns; export it again, with a column for each property")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
