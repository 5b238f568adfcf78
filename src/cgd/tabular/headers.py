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
from cgd.tabular.identifiers import PATTERNS
from cgd.tabular.ordinary_words import folded, is_ordinary, word_set
from cgd.tabular.person_names import has_given_name, has_surname_first, has_title, is_several_names, name_style
from cgd.tabular.written_dates import has_day, is_date

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
_MAIL = re.compile(r"\S@\S+\.\S")
_NUMBERS_BEHIND = re.compile(r"[ ,;(*†-]+[\d./-]+\)?$")  # a year or a number behind a name
# Words in names of measurements, such as behind a comma.
_KINDS = word_set(
    "absolute arterial blood calculated capillary conjugated corrected count diastolic direct fasting free glycated "
    "index indirect ionized ionised mean measured peripheral plasma random ratio reactive relative resting scale serum "
    "sign systolic test titre titer total urine venous volume weight whole antibody antigen gesamt direkt nüchtern "
    "frei plasmatique sérique libre totale sérico kg cm mm mg ml min max sec bpm mmhg years days hours jahre tage "
    "wochen stunden ans jours años días chest abdominal motor verbal eye"
)


def names_a_person(name: str) -> bool:
    """Return whether the name of a column looks like that of a person, or has a date or an e-mail address.

    Unlike in values, two words in small letters with a comma are a name only if one is a common given name.

    Examples:
        >>> names_a_person("Keller, Anna 1956"), names_a_person("Bilirubin, Total"), names_a_person("Heart Rate")
        (True, False, False)
        >>> names_a_person("Łuczak, A."), names_a_person("Anna Keller"), names_a_person("weight, kg")
        (True, True, False)
    """
    if has_day(name) or _MAIL.search(name) or has_title(name):
        return True
    plain = _NUMBERS_BEHIND.sub("", name)
    if not _KINDS.isdisjoint(folded(plain).replace(",", " ").replace("-", " ").split()):
        return False
    if has_surname_first(name) or has_surname_first(plain):
        return name_style(plain) != "lower" or has_given_name(plain)
    return has_given_name(plain) and is_several_names(plain) and not is_ordinary(plain)


def record_in_header(table: Table) -> str:
    """Return why the header of a table looks like a record, without its values; or an empty text.

    Dates and e-mail addresses name no columns. Numbers may, so two are needed, and years or numbers in turn do not
    count. Nor does a text that is also a value of its column, if it is the only one, as in `diabetes` or nothing.
    """
    dates = [place for place, name in enumerate(table.names, start=1) if is_date(name)]
    mails = [place for place, name in enumerate(table.names, start=1) if PATTERNS["e-mail addresses"].fullmatch(name)]
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
