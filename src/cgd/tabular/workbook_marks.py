"""What the XML of a sheet says about its cells besides their values: errors, formulas without a value, percentages.

Only the standard library is used, which expands no external entities. The cells are read in one pass, and only what is
special about them is kept.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.parsers import expat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Cell = tuple[int, int]  # the row and the column, from 0

# Parts of a workbook's archive.
WORKBOOK, STYLES = posixpath.join("xl", "workbook.xml"), posixpath.join("xl", "styles.xml")
RELATIONS = posixpath.join("xl", "_rels", "workbook.xml.rels")
PERCENT_FORMATS = (9, 10)  # built in: 0 % and 0.00 %
LEAP_DAY = (60.0, 61.0)  # 29 February 1900 in the system of dates from 1900, a day that was not
_LITERALS = re.compile(r'"[^"]*"|\\.|\[[^\]]*\]')  # in the format of a number


@dataclass
class Marks:
    """Special cells of a sheet.

    Attributes:
        errors: the errors of cells, such as "#DIV/0!".
        unsaved: cells with a formula whose value is not stored.
        leap_days: cells whose number may be 29 February 1900.
        percent: how many numbers of each column are shown as percentages.
    """

    errors: dict[Cell, str] = field(default_factory=dict)
    unsaved: set[Cell] = field(default_factory=set)
    leap_days: set[Cell] = field(default_factory=set)
    percent: dict[int, int] = field(default_factory=dict)


def find_marks(path: Path, sheet: str) -> Marks:
    """Read the special cells of a sheet.

    Raises:
        KeyError, expat.ExpatError, OSError, ValueError, zipfile.BadZipFile: the workbook is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        parse = partial(_parse, archive)
        reader = _CellReader(_percent_styles(parse) if STYLES in archive.namelist() else frozenset())
        parse(_sheet_part(parse, sheet), reader.start, reader.end, reader.text)
    return reader.marks


def cell_name(cell: Cell) -> str:
    """Return the name of a cell, as spreadsheets show it.

    Examples:
        >>> cell_name((0, 0)), cell_name((16, 27))
        ('A1', 'AB17')
    """
    row, column = cell
    letters = ""
    number = column + 1
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return f"{letters}{row + 1}"


def _position(name: str) -> Cell:
    """Return the position of a cell.

    Examples:
        >>> _position("AB17")
        (16, 27)
    """
    letters = name.rstrip("0123456789")
    column = 0
    for letter in letters:
        column = 26 * column + ord(letter) - ord("A") + 1
    return int(name[len(letters) :]) - 1, column - 1


class _CellReader:
    """Handle the elements of a sheet's XML."""

    def __init__(self, percent_styles: frozenset[int]) -> None:
        self.marks = Marks()
        self._percent_styles = percent_styles
        self._row, self._column = -1, -1
        self._cell: dict[str, str] = {}
        self._formula = self._in_value = False
        self._value: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "row":
            self._row = int(attributes["r"]) - 1 if "r" in attributes else self._row + 1
            self._column = -1
        elif name == "c":
            self._cell, self._formula, self._value = attributes, False, []
            self._column += 1
            if "r" in attributes:
                self._row, self._column = _position(attributes["r"])
        elif name == "f":
            self._formula = True
        elif name in ("v", "t"):  # a text may be in the cell itself, as <is><t>
            self._in_value = True

    def text(self, text: str) -> None:
        if self._in_value:
            self._value.append(text)

    def end(self, name: str) -> None:
        if name in ("v", "t"):
            self._in_value = False
        elif name == "c":
            self._end_cell((self._row, self._column), "".join(self._value))

    def _end_cell(self, cell: Cell, value: str) -> None:
        kind = self._cell.get("t", "n")
        if kind == "e":
            self.marks.errors[cell] = value
        elif self._formula and not value and kind != "str":
            self.marks.unsaved.add(cell)
        elif kind == "n" and value:
            if value.startswith("60") and LEAP_DAY[0] <= float(value) < LEAP_DAY[1]:
                self.marks.leap_days.add(cell)
            if int(self._cell.get("s", 0)) in self._percent_styles:
                self.marks.percent[cell[1]] = self.marks.percent.get(cell[1], 0) + 1


def _sheet_part(parse: Callable[..., None], sheet: str) -> str:
    """Return the name of the file of a sheet in the archive."""
    found: dict[str, str] = {}
    targets: dict[str, str] = {}

    def add_sheet(name: str, attributes: dict[str, str]) -> None:
        if name == "sheet":
            found[attributes["name"]] = attributes["id"]

    def add_target(name: str, attributes: dict[str, str]) -> None:
        if name == "Relationship":
            targets[attributes["Id"]] = attributes["Target"]

    parse(WORKBOOK, add_sheet)
    parse(RELATIONS, add_target)
    return posixpath.normpath(posixpath.join("/xl", targets[found[sheet]])).lstrip("/")


def _percent_styles(parse: Callable[..., None]) -> frozenset[int]:
    """Return the numbers of the styles that show numbers as percentages."""
    formats: dict[int, bool] = dict.fromkeys(PERCENT_FORMATS, True)
    styles: list[int] = []
    inside: list[str] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        inside.append(name)
        if name == "numFmt":
            formats[int(attributes["numFmtId"])] = "%" in _LITERALS.sub("", attributes["formatCode"])
        elif name == "xf" and "cellXfs" in inside:
            styles.append(int(attributes.get("numFmtId", 0)))

    parse(STYLES, start, lambda _: inside.pop())
    return frozenset(place for place, each in enumerate(styles) if formats.get(each, False))


def _parse(
    archive: zipfile.ZipFile,
    part: str,
    start: Callable[[str, dict[str, str]], Any],
    end: Callable[[str], Any] = lambda _: None,
    text: Callable[[str], Any] | None = None,
) -> None:
    """Parse a file of the archive; handlers get names without namespaces."""
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler = lambda name, attributes: start(
        name.rpartition(" ")[2], {key.rpartition(" ")[2]: value for key, value in attributes.items()}
    )
    parser.EndElementHandler = lambda name: end(name.rpartition(" ")[2])
    if text is not None:
        parser.CharacterDataHandler = text
    with archive.open(part) as file:
        parser.ParseFile(file)
