"""Where the records of a participant are: in a file, on a sheet of a workbook, or in a database."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from cgd.errors import InputError
from cgd.tabular.databases import SQLITE, SQLITE_HEADER, Query, is_address
from cgd.tabular.query_records import check_same_records, in_fixed_order
from cgd.tabular.readers import open_table
from cgd.tabular.workbooks import SUFFIXES, Sheet, SheetTable, is_workbook

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.readers import Table

TableSource = Path | Sheet | Query
"""A CSV, Parquet or Excel file; a sheet of a workbook; or a query of a database."""

QUERY_SUFFIX = ".sql"
MAX_QUERY_BYTES = 1 << 20


def parse_source(data: str, sheet: str | None = None, query: str | None = None) -> TableSource:
    """Return the source that the options of the command line name.

    Args:
        data: a file, or the address of a database.
        sheet: the sheet of a workbook.
        query: the query of a database: SQL, or a file `NAME.sql` with it.

    Raises:
        InputError: the options do not fit together; see also `Query`.

    Examples:
        >>> parse_source("records.csv") == Path("records.csv")
        True
        >>> parse_source("postgresql://reader@db.example/hospital", query="SELECT * FROM stays").sql
        'SELECT * FROM stays'
    """
    address = is_address(data)
    path = Path(data)
    if address and query is None:
        Query(data, "SELECT")  # an address with a password is refused before all else
        raise InputError(f"{Query(data, 'SELECT').title} is a database; state with --query which records it is to give")
    if sheet is not None and (address or query is not None):
        raise InputError("--sheet is for a workbook, and --query for a database; omit one of them")
    if query is not None:
        return Query(data if address else f"{SQLITE}:///{_quoted(path)}", _read_query(query))
    if sheet is not None:
        return Sheet(path, sheet)
    return path


def open_source(
    source: str | os.PathLike[str] | TableSource, wanted: Collection[str], missing: Collection[str]
) -> Table:
    """Open a source as a table; see `cgd.tabular.readers.open_table`.

    Raises:
        InputError: it is not a table, or cannot be read.
        MissingExtraError: a library is missing.
    """
    if isinstance(source, Query):
        return source.table
    path = source.path if isinstance(source, Sheet) else Path(source)
    if isinstance(source, Sheet) and path.is_file() and not is_workbook(path):
        raise InputError(f"{path} is not an Excel workbook (.xlsx), which --sheet is for; omit --sheet")
    if path.is_file() and (is_workbook(path) or path.suffix.lower() in SUFFIXES):
        return SheetTable(path, source.name if isinstance(source, Sheet) else "")
    if path.is_file() and _is_sqlite(path):
        raise InputError(f"{path} is an SQLite database; state with --query which records it is to give")
    return open_table(path, wanted, missing)


def source_name(source: TableSource) -> str:
    """Return the name of a source for reports: of a file, without its folder; of a database, its address."""
    if isinstance(source, Query):
        return source.title
    return source.path.name if isinstance(source, Sheet) else source.name


def source_arguments(source: TableSource) -> list[str]:
    """Return the arguments of the command line that name a source; see `parse_source`."""
    if isinstance(source, Query):
        return [source.address, "--query", source.sql]
    return [str(source.path), "--sheet", source.name] if isinstance(source, Sheet) else [str(source)]


def budget_path(source: TableSource, budget: Path | None) -> Path:
    """Return the file with the privacy budget of the records: the named one, or the one beside their file.

    Raises:
        InputError: the records are in a database, and no file is named: the same records may be queried in many ways.
    """
    if budget is not None:
        return budget
    if isinstance(source, Query):
        raise InputError(
            f"the records of {source.title} need a privacy budget, and it has to be the same one for every query that "
            "gives records of the same persons: name its file with --budget, and always the same"
        )
    path = source.path if isinstance(source, Sheet) else source
    return path.with_name(f"{path.name}.budget")


def with_fixed_order(
    source: TableSource, records: TabularDataset, data: Data, columns: Sequence[Column]
) -> TabularDataset:
    """Return the records of a query in an order that does not depend on that of the database; others as they are."""
    return in_fixed_order(records, data, columns) if isinstance(source, Query) else records


def check_unchanged(source: TableSource, folder: Path, records: TabularDataset, *, write: bool) -> None:
    """Check that a query gives the records with which the run in a folder began; see `check_same_records`.

    Raises:
        InputError: they are others.
    """
    if isinstance(source, Query):
        check_same_records(folder, records, source.title, write=write)


def _read_query(query: str) -> str:
    if not query.strip().lower().endswith(QUERY_SUFFIX):
        return query
    path = Path(query)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_QUERY_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a file with one SELECT (--query)") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not in UTF-8; name a file with one SELECT (--query)") from None
    if len(content) > MAX_QUERY_BYTES:
        raise InputError(f"{path} is larger than {MAX_QUERY_BYTES >> 20} MiB; name a file with one SELECT (--query)")
    return text


def _quoted(path: Path) -> str:
    return quote(os.fsencode(path))


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE_HEADER)) == SQLITE_HEADER
    except OSError:
        return False
