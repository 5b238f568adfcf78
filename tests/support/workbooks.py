"""Excel workbooks, written by XlsxWriter, which stores the values of formulas that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xlsxwriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


def write_workbook(path: Path, *sheets: str, fill: Callable[[Any, Any], None], **options: Any) -> Path:
    """Write a workbook; `fill` gets the workbook and its first sheet."""
    with xlsxwriter.Workbook(str(path), options) as workbook:
        made = [workbook.add_worksheet(name) for name in sheets or ("Sheet1",)]
        fill(workbook, made[0])
    return path


def write_table(path: Path, content: Mapping[str, Sequence[Any]]) -> Path:
    """Write a table of numbers, texts and empty cells."""

    def fill(_: Any, sheet: Any) -> None:
        sheet.write_row(0, 0, list(content))
        for row, values in enumerate(zip(*content.values(), strict=True), start=1):
            sheet.write_row(row, 0, values)

    return write_workbook(path, fill=fill)
