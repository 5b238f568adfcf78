"""Tables whose numbers have decimal commas, as spreadsheets of many countries export them.

The decimal sign is a property of one participant's file, as its delimiter is. But it cannot be recognised: "1,234" may
be a number above 1000. So the owner of the file states it, with --decimal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute

from cgd.errors import InputError
from cgd.tabular.written_numbers import not_a_number, writing

if TYPE_CHECKING:
    from collections.abc import Collection

    from cgd.tabular.cells import MissingMarkers
    from cgd.tabular.readers import Table

DECIMALS = (".", ",")


def check_decimal(decimal: str) -> None:
    """Check that a text is one of the two decimal signs.

    Raises:
        InputError: it is not.
    """
    if decimal not in DECIMALS:
        raise InputError(f"the decimal sign is {decimal!r}; choose '.' or ','")


def with_points(texts: Any) -> Any:
    """Return an Arrow array of texts in which decimal commas are points.

    A text with a point becomes null: in such a table it is a thousands separator, or a date, and no decimal sign.
    """
    pointless = pyarrow.compute.invert(pyarrow.compute.match_substring(texts, "."))
    none = pyarrow.scalar(None, pyarrow.string())
    return pyarrow.compute.if_else(pointless, pyarrow.compute.replace_substring(texts, ",", "."), none)


def wrong_number_error(
    table: Table, name: str, position: int, missing: MissingMarkers, decimal: str, kinds: Collection[str]
) -> InputError:
    """Return the error about the first number of a column that is written in one of these ways (`writing`)."""
    row = 0
    for (array,) in table.batches([position]):
        for text in missing.trim(array).to_pylist():
            if text is not None and writing(text, decimal) in kinds:
                return InputError(f"{table.title}, {table.locate(row)}, column {name!r}: {not_a_number(text, decimal)}")
            row += 1
    raise AssertionError("a column with such numbers has a first one")
