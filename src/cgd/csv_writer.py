"""Write CSV files that no spreadsheet takes for formulas.

Spreadsheets evaluate a cell that begins with =, +, -, @, a tab or a line break as a formula, and a formula can send the
table to a server. A class or category may be a text that another participant chose, so such a text gets an apostrophe
in front, as OWASP advises ("CSV injection"). So does a part of a text after a comma, semicolon, tab, bar, quote or line
break, which would be a cell of its own under another locale's separator. Numbers, also negative ones, are unchanged.
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
    """Write rows as CSV, with formulas in texts escaped."""
    csv.writer(file, lineterminator="\n").writerows([escape_formula(each) for each in row] for row in rows)


def escape_formula(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula; numbers, also as text, are returned unchanged.

    Examples:
        >>> escape_formula("=1+1"), escape_formula("-1.5"), escape_formula("a-b"), escape_formula("x;@y")
        ("'=1+1", '-1.5', 'a-b', "x;'@y")
        >>> escape_formula(-2)
        -2
    """
    if not isinstance(cell, str) or _NUMBER.fullmatch(cell):
        return cell
    # The csv module does not quote a lone carriage return, and readers would end the row there.
    return _FORMULA.sub(r"\1'", cell.replace("\r\n", "\n").replace("\r", "\n"))
