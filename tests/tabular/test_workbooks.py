"""Excel workbooks as tables: every kind of cell, and clear errors for what has no clear meaning."""

from __future__ import annotations

import os
import posixpath
import re
import zipfile
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from xlsxwriter.utility import xl_cell_to_rowcol

from cgd import InputError
from cgd.federation.data_schema import Column, Data, parse_data
from cgd.tabular.dataset import locate_records, read_dataset
from cgd.tabular.schema import suggest_schema
from cgd.tabular.sources import open_source, parse_source
from cgd.tabular.workbook_marks import STYLES, WORKBOOK, cell_name
from cgd.tabular.workbooks import Sheet
from support.tabular import COLUMNS, DATA, table, write_csv
from support.workbooks import write_table, write_workbook

if TYPE_CHECKING:
    from pathlib import Path

NUMBER, WARD = Column("x", "number"), Column("ward", "category")


SHEET = posixpath.join("xl", "worksheets", "sheet1.xml")  # in the archive


def write_cells(path: Path, cells: dict[str, Any], *sheets: str, **options: Any) -> Path:
    """Write cells by name; a value may be a pair of a value and a format, or a triple of a formula."""

    def fill(workbook: Any, sheet: Any) -> None:
        for name, value in cells.items():
            row, column = xl_cell_to_rowcol(name)
            if isinstance(value, tuple) and value[0] == "formula":
                sheet.write_formula(row, column, value[1], None, value[2])
            elif isinstance(value, tuple):
                sheet.write_number(row, column, value[0], workbook.add_format({"num_format": value[1]}))
            elif isinstance(value, str):
                sheet.write_string(row, column, value)
            else:
                sheet.write(row, column, value)

    return write_workbook(path, *sheets, fill=fill, **options)


def columns_of(path: Path, sheet: str = "") -> dict[str, list[Any]]:
    made = open_source(Sheet(path, sheet) if sheet else path, [], [])
    (batch,) = made.batches(range(len(made.names)))
    return {name: array.to_pylist() for name, array in zip(made.names, batch, strict=True)}


def refused(path: Path, sheet: str = "") -> str:
    with pytest.raises(InputError) as error:
        columns_of(path, sheet)
    return str(error.value).replace(str(path), "FILE")


def test_workbook_gives_the_records_of_the_same_csv_file(tmp_path: Path) -> None:
    made = table(300, 1)
    content = {name: made[name] for name in ("age", "dose", "ward", "outcome")}
    content["dose"] = [round(value, 9) for value in content["dose"]]  # XlsxWriter stores 16 digits
    content["age"] = [None if value is None else round(value, 9) for value in content["age"]]
    found, notes = read_dataset(write_table(tmp_path / "a.xlsx", content), DATA, COLUMNS)
    same, same_notes = read_dataset(write_csv(tmp_path / "a.csv", content), DATA, COLUMNS)
    assert notes == same_notes
    for name in ("age", "dose"):
        assert np.array_equal(found.numbers[name], same.numbers[name], equal_nan=True)
    assert (found.categories["ward"].names, found.target.names) == (same.categories["ward"].names, same.target.names)  # type: ignore[union-attr]
    assert np.array_equal(found.categories["ward"].codes, same.categories["ward"].codes)
    assert suggest_schema(tmp_path / "a.xlsx", "outcome") == suggest_schema(tmp_path / "a.csv", "outcome")


def test_each_kind_of_cell(tmp_path: Path) -> None:
    cells = {
        "A1": "number",
        "B1": "text",
        "C1": "mixed",
        "D1": "truth",
        "E1": "day",
        "F1": "moment",
        "G1": "formula",
        "A2": 1,
        "B2": "x",
        "C2": "007",
        "D2": True,
        "E2": (43831, "yyyy-mm-dd"),
        "G2": ("formula", "=1+1", 2),
        "A3": 2.5,
        "B3": " y ",
        "C3": 7.5,
        "D3": False,
        "E3": (43861.0, "d.m.yy"),
        "G3": ("formula", "=A3", 2.5),
        "A4": -3,
        "B4": "  ",
        "C4": 3,
        "F4": (43831.5, "yyyy-mm-dd hh:mm"),
        "E4": (1, "yyyy-mm-dd"),
    }
    assert columns_of(write_cells(tmp_path / "a.xlsx", cells)) == {
        "number": [1.0, 2.5, -3.0],
        "text": ["x", " y ", None],
        "mixed": ["007", "7.5", "3"],
        "truth": [True, False, None],
        "day": [date(2020, 1, 1), date(2020, 1, 31), date(1900, 1, 1)],
        "moment": [None, None, datetime(2020, 1, 1, 12)],
        "formula": [2.0, 2.5, None],
    }


def test_dates_of_workbooks_from_1904(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.xlsx", {"A1": "day", "A2": (60, "yyyy-mm-dd")}, date_1904=True)
    assert columns_of(path) == {"day": [date(1904, 3, 1)]}


def test_day_that_excel_invented_is_refused(tmp_path: Path) -> None:
    cells = {"A1": "x", "A2": 60, "B1": "day", "B2": (59, "yyyy-mm-dd"), "B3": (60, "yyyy-mm-dd")}
    path = write_cells(tmp_path / "a.xlsx", cells)
    assert refused(path) == "FILE, cell B3, column 'day': it is 29 February 1900, which was not a day; correct it"
    assert columns_of(write_cells(path, {"A1": "x", "A2": 60})) == {"x": [60.0]}


def test_blank_rows_and_columns_around_the_table_are_skipped_and_places_are_those_of_excel(tmp_path: Path) -> None:
    cells = {"C4": "x", "D4": "outcome", "C6": 1, "D6": "a", "C9": "high", "D9": "b"}
    path = write_cells(tmp_path / "a.xlsx", cells)
    assert columns_of(path) == {"x": ["1", "high"], "outcome": ["a", "b"]}
    data = Data("outcome", (NUMBER,))
    with pytest.raises(InputError, match="row 9, column 'x': 'high' is not a number"):
        read_dataset(path, data, data.columns)
    assert locate_records(path, data, data.columns, [1, 0]) == ["row 9", "row 6"]


def test_numbers_stored_as_text_are_numbers_and_others_are_refused_as_in_a_csv_file(tmp_path: Path) -> None:
    cells = {"A1": "x", "B1": "outcome", "A2": "12", "A3": 12.5, "A4": "?", "B2": "a", "B3": "b", "B4": "b"}
    data = Data("outcome", (NUMBER,))
    found, _ = read_dataset(write_cells(tmp_path / "a.xlsx", cells), data, data.columns)
    assert np.array_equal(found.numbers["x"], [12, 12.5, np.nan], equal_nan=True)
    path = write_cells(tmp_path / "a.xlsx", {**cells, "A4": "12 %"})
    with pytest.raises(InputError, match=r"row 4, column 'x': '12 %' is not a number; write it without the percent"):
        read_dataset(path, data, data.columns)


def test_percentages_are_fractions_and_said_to_be(tmp_path: Path) -> None:
    cells = {"B1": "x", "C1": "outcome", "B2": (0.12, "0.0%"), "B3": (0.2, '0"%"'), "C2": "a", "C3": "b"}
    data = Data("outcome", (NUMBER,))
    path = write_cells(tmp_path / "a.xlsx", cells)
    found, notes = read_dataset(path, data, data.columns)
    assert found.numbers["x"].tolist() == [0.12, 0.2]
    assert notes == ("column 'x': Excel shows percentages, and the values are fractions: 12 % is 0.12",)
    assert read_dataset(write_cells(path, {**cells, "B2": (0.12, "0.00")}), data, data.columns)[1] == ()
    many = {f"A{row}": (row / 100, "0%") for row in range(2, 60)}
    labels = {f"B{row}": "ab"[row % 2] for row in range(2, 60)}
    text = suggest_schema(write_cells(path, {"A1": "part", "B1": "outcome", **many, **labels}), "outcome")
    assert 'part = "number"  # Excel shows percentages, and the values are fractions: 12 % is 0.12\n' in text


def test_cells_with_errors(tmp_path: Path) -> None:
    cells = {"A1": "x", "A2": 1, "A3": ("formula", "=NA()", "#N/A"), "A4": ("formula", "=1/0", "#DIV/0!"), "B1": "y"}
    path = write_cells(tmp_path / "a.xlsx", cells)
    assert refused(path) == (
        "FILE, cell A4, column 'x': it has the error #DIV/0!; correct it, or leave it empty if there is no value"
    )
    del cells["A4"]
    assert columns_of(write_cells(path, cells))["x"] == [1.0, None]  # not available


def test_row_with_an_error_only_is_not_skipped(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.xlsx", {"A1": "x", "A2": 1, "A3": ("formula", "=B9", "#REF!"), "A4": 2})
    assert "cell A3, column 'x': it has the error #REF!" in refused(path)


def test_formula_whose_value_is_not_stored_is_refused(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.xlsx", {"A1": "x", "A2": ("formula", "=1+1", ""), "A3": 1})
    edit(path, SHEET, rb"<f>1\+1</f><v></v>", b"<f>1+1</f>")
    assert "cell A2, column 'x': the value of its formula is not stored; open the workbook in a" in refused(path)


def edit(path: Path, part: str, pattern: bytes, text: bytes) -> None:
    """Replace bytes in a part of a workbook."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts[part], count = re.subn(pattern, text, parts[part])
    assert count, parts[part]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            "A1:B1",
            "the cells A1:B1 of its first row are merged; the header must be the first row, with a name in every",
        ),
        ("A2:A3", "the cells A2:A3 are merged, and only the first one has a value; divide them, and write the value"),
    ],
)
def test_merged_cells_are_refused(tmp_path: Path, cells: str, message: str) -> None:
    def fill(_: Any, sheet: Any) -> None:
        sheet.write_row(0, 0, ["x", "y"])
        sheet.write_row(3, 0, [1, 2])
        sheet.merge_range(cells, 5)

    assert message in refused(write_workbook(tmp_path / "a.xlsx", fill=fill))


def test_merged_cells_beside_the_table_are_allowed(tmp_path: Path) -> None:
    def fill(_: Any, sheet: Any) -> None:
        sheet.write_column(0, 0, ["x", 1, 2])
        sheet.merge_range("F2:G3", "")

    assert columns_of(write_workbook(tmp_path / "a.xlsx", fill=fill))["x"] == [1.0, 2.0]


def test_sheets(tmp_path: Path) -> None:
    def fill(workbook: Any, first: Any) -> None:
        first.write_column(0, 0, ["x", 1])
        hidden = workbook.add_worksheet("hidden")
        hidden.write_column(0, 0, ["y", 2])
        hidden.hide()

    path = write_workbook(tmp_path / "a.xlsx", "data", "empty", fill=fill)
    assert columns_of(path) == {"x": [1.0]}  # the only visible one with values
    assert columns_of(path, "hidden") == {"y": [2.0]}
    assert refused(path, "date") == (
        "FILE has no sheet 'date' (did you mean 'data'?); its sheets are 'data', 'empty', 'hidden': name one with "
        "--sheet"
    )
    assert "sheet is empty; a table needs a header" in refused(path, "empty")

    def fill_both(workbook: Any, first: Any) -> None:
        first.write_column(0, 0, ["x", 1])
        workbook.add_worksheet("two").write_column(0, 0, ["y", 2])

    path = write_workbook(tmp_path / "b.xlsx", "one", fill=fill_both)
    assert refused(path) == "FILE has the sheets 'one', 'two'; name the one with the records with --sheet"
    assert columns_of(path, "two") == {"y": [2.0]}
    write_workbook(path, "one", fill=lambda book, _: book.add_worksheet("two").write_column(0, 0, ["y", "high"]))
    with pytest.raises(InputError, match=re.escape("b.xlsx, sheet 'two', row 2, column 'y': 'high' is not")):
        read_dataset(Sheet(path, "two"), Data("z", (Column("y", "number"),)), (Column("y", "number"),), target=False)
    empty = write_workbook(tmp_path / "c.xlsx", fill=lambda *_: None)
    assert "has no visible sheet with values" in refused(empty)
    header = write_workbook(tmp_path / "d.xlsx", fill=lambda _, sheet: sheet.write(0, 0, "x"))
    assert refused(header) == "FILE has a header and no rows; export it with its records"


def test_record_in_place_of_the_header_is_refused(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.xlsx", {"A1": 61, "B1": 1.5, "C1": "ill", "A2": 40, "B2": 2, "C2": "ill"})
    with pytest.raises(InputError, match="has a record in place of its header"):
        suggest_schema(path, "ill")


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.xlsx", {"A1": "x", "A2": 1})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "FILE cannot be read as a workbook (" in refused(path)
    path.write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    assert "FILE cannot be read as a workbook (" in refused(path)
    other = tmp_path / "a.bin"
    other.write_bytes(path.read_bytes())
    assert "FILE is an old Excel workbook, or one with a password; save it as .xlsx" in refused(other)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("notes.txt", "x")
    assert "FILE is a zip archive, and no Excel workbook (.xlsx)" in refused(other)
    write_csv(tmp_path / "a.csv", table(5, 1))
    assert "is not an Excel workbook (.xlsx), which --sheet is for; omit --sheet" in refused(tmp_path / "a.csv", "one")
    assert "cannot be read (No such file or directory)" in refused(tmp_path / "nowhere.xlsx")


@pytest.mark.parametrize("part", [SHEET, STYLES, WORKBOOK])
@pytest.mark.parametrize(
    ("pattern", "text"), [(rb">", b""), (rb'r="A1"', b'r="?"'), (rb"[0-9]+", b"x"), (rb"<", b"&x;<")]
)
def test_damaged_xml_is_an_error_or_makes_no_difference(tmp_path: Path, part: str, pattern: bytes, text: bytes) -> None:
    path = write_cells(tmp_path / "a.xlsx", {"A1": "x", "A2": (1, "0%")})
    if re.search(pattern, zipfile.ZipFile(path).read(part)):
        edit(path, part, pattern, text)
    try:
        columns_of(path)
    except InputError as error:
        assert str(path) in str(error)


def test_names_of_cells() -> None:
    for name in ("A1", "Z9", "AA10", "XFD1048576"):
        assert cell_name(xl_cell_to_rowcol(name)) == name


def test_dates_of_a_workbook_are_features(tmp_path: Path) -> None:
    cells: dict[str, Any] = {"A1": "day", "B1": "outcome", "A2": (43831, "yyyy-mm-dd"), "B2": "a", "B3": "b"}
    data = parse_data({"target": "outcome", "columns": {"day": {"type": "date", "reference": "2019-12-31"}}})
    path = write_cells(tmp_path / "a.xlsx", {**cells, "A3": "2020-02-03"})  # a date, and a text
    found, _ = read_dataset(path, data, data.input_columns)
    assert found.numbers["day days"].tolist() == [1.0, 34.0]
    path = write_cells(path, {**cells, "A3": 43831})
    with pytest.raises(InputError, match="row 3, column 'day': '43831' is a number, and not a date; write it as 2020"):
        read_dataset(path, data, data.input_columns)


def test_path_with_other_characters(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "Ärzte & Co. #1?.xlsx", {"A1": "x", "A2": 1})
    assert columns_of(path) == {"x": [1.0]}
    assert parse_source(os.fspath(path), sheet="Sheet1") == Sheet(path, "Sheet1")
