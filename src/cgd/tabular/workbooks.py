"""Tables in Excel workbooks (.xlsx): one sheet, with a header in its first row that is not empty.

calamine reads the values. Of a formula, that is the value that the workbook has stored; of a date, a day or a time, by
the workbook's own system of dates (1900 or 1904). It does not tell errors such as #DIV/0! from empty cells, nor 12 %
from 0.12. So the XML of the sheet is read, too (`cgd.tabular.workbook_marks`).

A column of numbers, of days or of truth values is one, and a column with different kinds of values is text, as in a CSV
file: also numbers that are stored as text. Rows without any value are skipped, as in a CSV file; places in messages are
those that Excel shows. Merged cells are refused, because only the first one has the value.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow

from cgd.errors import InputError
from cgd.extras import require
from cgd.federation.toml_validation import similar
from cgd.federation.value_map import canonical
from cgd.tabular.workbook_marks import WORKBOOK, cell_name, find_marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ZIP = b"PK\x03\x04"
BATCH_ROWS = 1 << 14
MAX_NAMED = 10
LEAP_YEAR_OF_EXCEL = 1900
MISSING_ERROR = "#N/A"  # a cell with this error has no value; others are mistakes


@dataclass(frozen=True)
class Sheet:
    """A sheet of a workbook, as a source of records.

    Attributes:
        path: the workbook.
        name: the name of the sheet.
    """

    path: Path
    name: str


SUFFIXES = (".xlsx", ".xlsm")


def is_workbook(path: Path) -> bool:
    """Return whether a file is an Excel workbook of today's format."""
    try:
        with path.open("rb") as file:
            if file.read(len(ZIP)) != ZIP:
                return False
        with zipfile.ZipFile(path) as archive:
            return WORKBOOK in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


class SheetTable:
    """A sheet of a workbook. See `cgd.tabular.readers.Table`.

    Args:
        path: the workbook.
        sheet: the name of the sheet; empty: the only visible one with values.

    Raises:
        InputError: the file is damaged, there is no such sheet, or the table has merged cells or no rows.
        MissingExtraError: calamine is not installed.
    """

    def __init__(self, path: Path, sheet: str = "") -> None:
        require("xlsx", "reading Excel workbooks")
        import python_calamine

        self.title = str(path)
        try:
            workbook = python_calamine.CalamineWorkbook.from_path(path)
            self._sheet = workbook.get_sheet_by_name(_choose(workbook, sheet, path))
            self._marks = find_marks(path, self._sheet.name)
            self._header, header = next(self._filled_rows())
            merged = self._sheet.merged_cell_ranges or ()
        except InputError:
            raise
        except BaseException as error:
            raise _damaged(path, error) from None
        if workbook.sheet_names != [self._sheet.name]:
            self.title = f"{path}, sheet {self._sheet.name!r}"
        self._first_column = (self._sheet.start or (0, 0))[1]
        self.names = tuple(str(_plain(each)).strip() for each in header)
        self._refuse_merged(merged)
        if next(self._records(), None) is None:
            raise InputError(f"{self.title} has a header and no rows; export it with its records")

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """See `Table`."""
        records = self._records()
        while rows := list(islice(records, BATCH_ROWS)):
            yield [self._column(position, rows) for position in positions]

    def remark(self, position: int) -> str:
        """See `Table`."""
        count = self._marks.percent.get(self._first_column + position, 0)
        return "Excel shows percentages, and the values are fractions: 12 % is 0.12" if count else ""

    def locate(self, row: int) -> str:
        """See `Table`."""
        return self.locate_all([row])[0]

    def locate_all(self, rows: Sequence[int]) -> list[str]:
        """See `Table`."""
        wanted = set(rows)
        found = {place: row for place, (row, _) in enumerate(self._records()) if place in wanted}
        return [f"row {found[row] + 1}" for row in rows]

    def _filled_rows(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the rows that have a value, or an error, with their numbers from 0."""
        errors = {row for row, _ in (*self._marks.errors, *self._marks.unsaved)}
        for row, values in enumerate(self._sheet.iter_rows()):
            if row in errors or any(
                value != "" and not (isinstance(value, str) and value.isspace()) for value in values
            ):
                yield row, values

    def _records(self) -> Iterator[tuple[int, list[Any]]]:
        return islice(self._filled_rows(), 1, None)

    def _refuse_merged(self, merged: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        for first, last in merged:
            named = range(self._first_column, self._first_column + len(self.names))
            if last[0] < self._header or last[1] < named.start or first[1] >= named.stop:
                continue
            cells = f"{cell_name(first)}:{cell_name(last)}"
            if first[0] <= self._header:
                raise InputError(
                    f"{self.title}: the cells {cells} of its first row are merged; the header must be the first row, "
                    "with a name in every column: remove a title above it, and divide merged cells"
                )
            raise InputError(
                f"{self.title}: the cells {cells} are merged, and only the first one has a value; divide them, and "
                "write the value into each that it is meant for"
            )

    def _column(self, position: int, rows: Sequence[tuple[int, list[Any]]]) -> Any:
        """Return the values of a column as an Arrow array."""
        column = self._first_column + position
        if self._marks.errors or self._marks.unsaved or self._marks.leap_days:
            for row, values in rows:
                self._refuse_cell((row, column), values[position], self.names[position])
        values = [_plain(row[position]) for _, row in rows]
        kinds = {type(value) for value in values} - {type(None)}
        if kinds <= {float}:
            return pyarrow.array(values, pyarrow.float64())
        if kinds == {bool}:
            return pyarrow.array(values, pyarrow.bool_())
        if kinds == {date}:
            return pyarrow.array(values, pyarrow.date32())
        if kinds <= {date, datetime}:
            moments = [datetime(*value.timetuple()[:6]) if value is not None else None for value in values]
            return pyarrow.array(moments, pyarrow.timestamp("s"))
        return pyarrow.array([None if value is None else _text(value) for value in values], pyarrow.string())

    def _refuse_cell(self, cell: tuple[int, int], value: Any, name: str) -> None:
        place = f"{self.title}, cell {cell_name(cell)}, column {name!r}: "
        error = self._marks.errors.get(cell, MISSING_ERROR)
        if error != MISSING_ERROR:
            raise InputError(f"{place}it has the error {error}; correct it, or leave it empty if there is no value")
        if cell in self._marks.unsaved:
            raise InputError(
                f"{place}the value of its formula is not stored; open the workbook in a spreadsheet program, and save "
                "it there"
            )
        if cell in self._marks.leap_days and isinstance(value, date) and value.year == LEAP_YEAR_OF_EXCEL:
            raise InputError(f"{place}it is 29 February 1900, which was not a day; correct it")


def _choose(workbook: Any, wanted: str, path: Path) -> str:
    """Return the name of the sheet to read."""
    import python_calamine

    names = list(workbook.sheet_names)
    if wanted and wanted not in names:
        raise InputError(
            f"{path} has no sheet {wanted!r}{similar(wanted, names)}; its sheets are {_listed(names)}: name one with "
            "--sheet"
        )
    if wanted:
        return wanted
    visible = [
        each.name
        for each in workbook.sheets_metadata
        if each.visible == python_calamine.SheetVisibleEnum.Visible
        and each.typ == python_calamine.SheetTypeEnum.WorkSheet
    ]
    filled: list[str] = [name for name in visible if workbook.get_sheet_by_name(name).height]
    if len(filled) > 1:
        raise InputError(f"{path} has the sheets {_listed(filled)}; name the one with the records with --sheet")
    if not filled:
        raise InputError(f"{path} has no visible sheet with values; a table needs a header and a row for every record")
    return filled[0]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(map(repr, names[:MAX_NAMED])) + more


def _damaged(path: Path, error: BaseException) -> BaseException:
    """Return the error to raise for one of calamine or of the XML; a defect in calamine ends in a panic."""
    if isinstance(error, StopIteration):
        return InputError(f"{path}: the sheet is empty; a table needs a header and a row for every record")
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    reason = str(error).partition("\n")[0] or type(error).__name__
    return InputError(
        f"{path} cannot be read as a workbook ({reason}); save it again, or save the sheet as CSV (UTF-8)"
    )


def _plain(value: Any) -> Any:
    """Return a value of calamine as None, a float, a bool, a date, a datetime or a text."""
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, datetime):
        return (
            value + timedelta(microseconds=500_000) - timedelta(microseconds=(value.microsecond + 500_000) % 1_000_000)
        )
    if isinstance(value, (time, timedelta)):
        return str(value)
    return float(value) if type(value) is int else value


def _text(value: Any) -> str:
    return str(canonical(value)) if isinstance(value, (float, bool)) else str(value)
