"""Recognise a record in place of a header, and names of columns that name persons.

The names of columns go to all participants. So a table without a header would publish its first record, and a table
with a column for each patient the names of patients. No message contains a name.
"""

from __future__ import annotations

import re
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow

from cgd.federation.data_schema import MISSING
from cgd.federation.value_map import canonical
from cgd.tabular.cells import MissingMarkers
from cgd.tabular.identifiers import identifying_texts, word_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.tabular.readers import Table

ADD_A_HEADER = (
    "add a first line with the names of the columns. If these are names, rename them, such as 2019 to year_2019"
)
MIN_CELLS = 2  # one number, or one text that is also a value, may be the name of a column
MIN_SEQUENCE = 3
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?")
_YEAR = re.compile(r"(?:19|20)\d{2}")
# Unlike in values, two words with a comma are a name only if both begin with a capital letter.
_PERSON = re.compile(
    r"(?:Dr|Prof|Mr|Mrs|Ms|Herr|Frau)\.? [A-ZÀ-Þ].*|[A-ZÀ-Þ][^\W\d_'’ -]+(?:['’ -][^\W\d_]+)*, ([A-ZÀ-Þ][^\W\d_]+)"
    r"(?:[ ,(*-]+[\d./-]+\)?)?"
)
_DATE_OR_MAIL = re.compile(r"(?<!\d)(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})(?!\d)|\S@\S+\.\S")
# Words behind a comma in names of measurements.
_KINDS = word_set(
    "absolute arterial blood calculated capillary conjugated corrected count diastolic direct fasting free high "
    "indirect ionized left low mean measured oral peripheral plasma random rectal right serum systolic total urine "
    "venous whole"
)


def names_a_person(name: str) -> bool:
    """Return whether the name of a column looks like that of a person, or has a date or an e-mail address.

    Examples:
        >>> names_a_person("Keller, Anna 1956"), names_a_person("Bilirubin, Total"), names_a_person("Heart Rate")
        (True, False, False)
    """
    found = _PERSON.fullmatch(name)
    person = found is not None and (found[1] or "").lower() not in _KINDS
    return person or _DATE_OR_MAIL.search(name) is not None


def record_in_header(table: Table) -> str:
    """Return why the header of a table looks like a record, without its values; or an empty text.

    Dates and e-mail addresses name no columns. Numbers may, so two are needed, and years or numbers in turn do not
    count. Nor does a text that is also a value of its column, if it is the only one, as in `diabetes` or nothing.
    """
    looks = {place: identifying_texts([name]) for place, name in enumerate(table.names, start=1)}
    dates = [place for place, look in looks.items() if look == "dates"]
    mails = [place for place, look in looks.items() if look == "e-mail addresses"]
    numbers = [place for place, name in enumerate(table.names, start=1) if _NUMBER.fullmatch(name)]
    in_turn = _are_in_turn([table.names[place - 1] for place in numbers])
    values = [place for place in _own_values(table) if place not in (*dates, *mails, *numbers)]
    if not numbers and len(values) == len(list(filter(None, table.names))):
        return ""  # the header is in the file twice
    found = {
        ("a date", "dates"): dates,
        ("an e-mail address", "e-mail addresses"): mails,
        ("a number", "numbers"): [] if in_turn else numbers,
        ("a value of the same column", "values of the same column"): values,
    }
    if not dates and not mails and sum(map(len, found.values())) < MIN_CELLS:
        return ""
    return ", ".join(
        f"{what[len(places) > 1]} (column{'s' * (len(places) > 1)} {', '.join(map(str, places))})"
        for what, places in found.items()
        if places
    )


def _are_in_turn(names: Sequence[str]) -> bool:
    """Return whether the numbers in a header are years, or counted from 0 or 1."""
    if all(map(_YEAR.fullmatch, names)):
        return True
    counted = [list(map(str, range(first, first + len(names)))) for first in (0, 1)]
    return len(names) >= MIN_SEQUENCE and list(names) in counted


def _own_values(table: Table) -> list[int]:
    """Return the columns whose name is one of several values that they have in the first batch, counted from 1."""
    missing, found = MissingMarkers(MISSING), []
    with closing(table.batches(range(len(table.names)))) as batches:  # type: ignore[type-var]
        arrays = next(batches, [])
    for place, (name, array) in enumerate(zip(table.names, arrays, strict=False), start=1):
        try:
            texts = set(map(canonical, missing.trim(array).unique().drop_null().to_pylist()))
        except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid, UnicodeDecodeError):  # lists, bytes, …
            continue
        if name and len(texts) > 1 and canonical(name) in texts:
            found.append(place)
    return found
