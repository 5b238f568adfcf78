"""CSV files that a spreadsheet can open without running what is in them.

Spreadsheets take a cell that begins with =, +, -, @, a tab or a line break for a formula, and a formula can send the
table somewhere else. A class or category may be the text of another participant, so such a text gets an apostrophe in
front, as OWASP advises ("CSV injection"). So does a part of a text behind a comma, semicolon, tab, bar, quote or line
break: with the settings of another country it would be a cell of its own. Numbers stay as they are, negative ones too.
"""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

_FORMULA = re.compile(r"""(^|[,;|"'\t\r\n])(?=[=+\-@\t\r\n＝＋－＠])""")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def write_rows(file: TextIO, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as CSV, with all texts made harmless."""
    csv.writer(file, lineterminator="\n").writerows([harmless(each) for each in row] for row in rows)


def harmless(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula; what is no text, or a number, as it is.

    Examples:
        >>> harmless("=1+1"), harmless("-1.5"), harmless("a-b"), harmless("x;@y"), harmless(-2)
        ("'=1+1", '-1.5', 'a-b', "x;'@y", -2)
    """
    if not isinstance(cell, str) or _NUMBER.fullmatch(cell):
        return cell
    # A carriage return alone would not be quoted, and end the row.
    return _FORMULA.sub(r"\1'", cell.replace("\r\n", "\n").replace("\r", "\n"))
