"""Suggest the sections `[data]` and `[model]` of a federation file from one participant's table.

The suggestion is a starting point for all participants to review: others may have other categories and missing values.
The text is sent to all participants, so it contains nothing of the table but names of columns, numbers of distinct
values, usual markers of missing values and, in comments that can be deleted, the classes, unless one has few records
or they may name persons. Columns that look like names, dates or identifiers are left out
(`cgd.tabular.identifiers`); the note has no values.

For differential privacy, categories, classes and ranges have to be in the file. The suggestion then has those of the
table, ranges rounded outward, and categories only if enough records have them. Each of these lines has a mark, and
`cgd federation new` refuses a file with marks: people must replace the values by what is known without looking at
records.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES, MISSING, OTHER, RARE
from cgd.federation.date_format import EXCEL
from cgd.federation.privacy_section import DAYS_QUESTION, PERSONS_QUESTION, REVIEW_MARK
from cgd.federation.toml_text import toml_key as _key
from cgd.federation.toml_text import toml_list as _list
from cgd.federation.toml_text import toml_text as _text
from cgd.tabular.arrow_arrays import nested_remedy
from cgd.tabular.cells import USUAL_MARKERS, MissingMarkers
from cgd.tabular.column_profile import MAX_CODES, MIN_RECORDS_OF_A_CATEGORY, ColumnProfile
from cgd.tabular.columns import MAX_CATEGORIES
from cgd.tabular.data_checks import looks_like_dates
from cgd.tabular.dataset import find_columns
from cgd.tabular.date_columns import usual_format
from cgd.tabular.decimal_commas import check_decimal, wrong_number_error
from cgd.tabular.headers import ADD_A_HEADER, names_a_person, record_in_header
from cgd.tabular.identifiers import EXCEL_DAYS, identifying_name, identifying_texts, tells_about_a_person
from cgd.tabular.model_choice import choose_model, model_lines
from cgd.tabular.sources import open_source
from cgd.tabular.written_numbers import COMMA, LIMIT, MINUS, PERCENT, POINT, THOUSANDS, UNIT

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from cgd.tabular.readers import Table
    from cgd.tabular.sources import TableSource

MIN_CATEGORIES_TO_NOTE = 100
MAX_CLASSES = 20  # a target of whole numbers with more distinct values is a regression
MAX_LISTED = 20  # values of a column in a suggestion for differential privacy; more of them may name persons
ALONE = "write the numbers alone, in one unit, on which all participants agree"
TOTAL = "the last row seems to be a total: remove it, if it is no record"
PERSONAL_NAME = "left out, its name looks like that of a person, or has a date. If it identifies nobody, rename it"
NAMES_OR_CONTACTS = "names of persons, or contain dates or phone numbers"
LIMITS = "are limits, with < or >: write a number instead, by a rule on which all participants agree"


def suggest_schema(
    source: str | os.PathLike[str] | TableSource, label: str, *, private: bool = False, decimal: str | None = None
) -> str:
    """Return the text of `[data]` and `[model]` for a table, to paste into a federation file.

    Args:
        source: a CSV, Parquet or Excel file, or another source of records.
        label: the column to predict.
        private: also suggest `[privacy]`, and list ranges, categories and classes, which it needs.
        decimal: the decimal sign of numbers, a point or a comma; None: a point, and a column of numbers with commas is
            an error.

    Raises:
        InputError: the file is not a table, has no header, has a duplicate name, lacks the label, has no column to
            predict from, or has numbers with thousands separators.
    """
    check_decimal(decimal or ".")
    table = open_source(source, [label], MISSING)
    missing = MissingMarkers(MISSING)
    if record := record_in_header(table):
        raise InputError(f"{table.title} has a record in place of its header: {record}; {ADD_A_HEADER}")
    names = [name for name in dict.fromkeys((*table.names, label)) if name]
    positions = dict(zip(names, find_columns(table, names, label), strict=True))
    profiles = {name: ColumnProfile(decimal or ".") for name in positions}
    nested: dict[str, str] = {}
    for arrays in table.batches(list(positions.values())):
        for name, array in zip(positions, arrays, strict=True):
            try:
                profiles[name].add_batch(array, missing)
            except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid, UnicodeDecodeError):  # lists, bytes, …
                nested[name] = nested_remedy(array.type)
    _refuse_other_signs(table, profiles, positions, missing, decimal)
    for name, position in positions.items():
        profiles[name].remark = table.remark(position)
    target = profiles.pop(label)
    if not target.present:
        raise InputError(f"{table.title}: no row has a label in column {label!r}; name the column to predict")
    if target.writings - {COMMA} and len(target.texts) + len(target.numbers) > MAX_CODES:
        raise wrong_number_error(table, label, positions[label], missing, target.decimal, target.writings)
    lines = [
        f"# column {positions[name] + 1}: {PERSONAL_NAME}"
        if names_a_person(name)
        else _column_line(name, each, nested.get(name, ""), private)
        for name, each in profiles.items()
    ]
    if all(line.startswith("#") for line in lines):
        raise InputError(
            f"{table.title} has no column to predict {label!r} from; these are its columns:\n" + "\n".join(lines)
        )
    markers = [text for each in (*profiles.values(), target) for text in each.markers]
    data = _data_lines(label, target, markers, profiles, private)
    model = model_lines(choose_model(target.present, regression=is_regression(target), private=private))
    return "\n".join([*data, "", "[data.columns]", *lines, "", *model, *(PRIVACY if private else ()), ""])


def _refuse_other_signs(
    table: Table,
    profiles: Mapping[str, ColumnProfile],
    positions: Mapping[str, int],
    missing: MissingMarkers,
    decimal: str | None,
) -> None:
    """Refuse numbers with thousands separators and, unless the decimal sign is stated, with decimal commas."""
    separated = []
    for name, profile in profiles.items():
        error = partial(wrong_number_error, table, name, positions[name], missing, profile.decimal)
        if decimal is None and profile.writings & {COMMA, THOUSANDS} == {COMMA}:
            raise InputError(f"{error((COMMA,))}. (If it is text and no number, add --decimal '.')")
        identifying = identifying_name(name, frequent=True) or identifying_texts(profile.texts)
        if THOUSANDS in profile.writings and POINT not in profile.writings and not identifying:
            separated.append((name, error))
    if separated:
        others = [repr(name) for name, _ in separated[1:]]
        same = f" The same holds for column{'s' * (len(others) > 1)} {', '.join(others)}" if others else ""
        kinds = (THOUSANDS,) if decimal else (THOUSANDS, COMMA)
        raise InputError(
            f"{separated[0][1](kinds)}. (If these are codes and no numbers, suggest from a copy of the file "
            f"without the column, and write its line by hand.){same}"
        )


PRIVACY = (
    "",
    "[privacy]",
    "epsilon = 1.0      # 1 is strong, 8 is weak protection of every record",
    "delta = 1e-6       # far below one divided by the number of all records",
    "clip = 1.0         # the largest norm of a record's gradient",
    "colluders = 1      # how many participants may collude, or leave out their noise",
    '# unit = "COLUMN"  # if persons have several records: the column that names them. Then (ε, δ) is for persons',
)
REVIEW = (
    f"# Lines with the mark {REVIEW_MARK} are taken from this table: ranges rounded outward, and values of at least",
    f"# {MIN_RECORDS_OF_A_CATEGORY} records. Nothing here is protected by noise. BEFORE you send this to anybody,",
    "# write what is known without looking at records, such as the range of a device, and delete the mark: `cgd",
    "# federation new` refuses it.",
)


def _data_lines(
    label: str, target: ColumnProfile, markers: Sequence[str], profiles: dict[str, ColumnProfile], private: bool
) -> list[str]:
    regression = is_regression(target)
    review = f"; {REVIEW_MARK}" if private else ""
    remarks = f"  # {_remarks(target, private)}{review}" if regression and target.remarks else ""
    if not regression and target.identifying:
        remarks = f"  # is it the column to predict? Its values look like {target.identifying}"
    if target.ends_with_total:
        remarks = f"{remarks}; {TOTAL}" if remarks else f"  # {TOTAL}"
    lines = [
        "# A suggestion from one participant's table. The same text goes to all participants: review it together,",
        "# and delete comments that disclose more about your table than you want.",
        *(REVIEW if private else ()),
        "[data]",
        f"target = {_text(label)}{remarks}",
        f'task = "{"regression" if regression else "classification"}"',
    ]
    if not regression and (_suspicion(label, target, listed=True) or (private and len(target.frequent) > MAX_LISTED)):
        lines.append("# classes = []  # list them only if all of you know them without a table, and they name nobody")
    elif private:
        listed = f"range = {_outward(target)}" if regression else f"classes = {_list(target.frequent)}"
        lines.append(f"{listed}  # {REVIEW_MARK}")
    elif not regression and len(target.values) <= MAX_CLASSES and not target.rare:
        lines.append(f"# classes = {_list(target.values)}  # as in this table; left out: learned by a secure sum")
    elif not regression and len(target.values) <= MAX_CLASSES:
        lines.append(f"# classes = []  # list them, if all of you know them; some have fewer than {RARE} records here")
    if markers:
        texts = list(dict.fromkeys((*MISSING, *markers)))
        more = len(texts) - len(MISSING)
        lines.append(f"missing = {_list(texts)}  # {more} more than the default: texts in columns of numbers{review}")
    ids = [name for name, each in profiles.items() if _is_id(name, each) and not names_a_person(name)]
    if ids:
        lines.append(
            f"# id = {_text(ids[0])}  # needed in a grid, where several participants hold parts of the same records"
        )
    return lines


def is_regression(target: ColumnProfile) -> bool:
    """Return whether a target is a number to predict, and not a class."""
    return target.numeric and (len(target.numbers) > MAX_CLASSES or not target.whole)


def _column_line(name: str, profile: ColumnProfile, nested: str, private: bool) -> str:
    """Return the line of a column, with a comment if the last row seems to be a total."""
    line = _limited_line(name, profile, nested, private)
    if not profile.ends_with_total:
        return line
    commented = line.startswith("#") or "  # " in line.removeprefix(_key(name))
    return f"{line}{'; ' if commented else '  # '}{TOTAL}"


def _limited_line(name: str, profile: ColumnProfile, nested: str, private: bool) -> str:
    """Return the line of a column; for differential privacy, with its range or its categories."""
    line, start = _type_line(name, profile, nested, private), f"{_key(name)} = "
    for kind in ("number", "category") if private else ():
        if line.startswith(f'{start}"{kind}"'):
            limits = _list(profile.frequent)
            if kind == "number":
                limits = f'{{ type = "number", range = {_outward(profile)} }}'
            elif why := _suspicion(name, profile, listed=True):
                return f"# {start}[]  # left out, {why}; list them if all know them, and they name nobody"
            elif not 2 <= len(profile.frequent) <= MAX_LISTED:
                if profile.frequent[MAX_LISTED:]:
                    return f"# {start}[]  # left out: many values; list them if all know them without a table"
                return f"# {start}[]  # left out: fewer than two values of enough records; list them if all know them"
            comment = line.removeprefix(f'{start}"{kind}"').removesuffix(f"; {REVIEW_MARK}")
            return f"{start}{limits}{f'{comment};' if comment else '  #'} {REVIEW_MARK}"
    return line


def _outward(profile: ColumnProfile) -> str:
    """Return a range around all numbers, rounded outward to a step of 1, 2 or 5 times a power of ten.

    Apart from 0, its ends are never those of the table.
    """
    low, high = profile.lowest, profile.highest
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    largest = max(abs(low), abs(high)) or 1.0
    finest = 10.0 ** (math.floor(math.log10(largest)) - 10)  # twelve digits are printed
    step = max(finest, next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= span))
    below, above = math.floor(low / step), math.ceil(high / step)
    # Products and quotients are rounded, so the ends are compared as they are printed.
    while low != 0 and float(f"{below * step:.12g}") >= low:
        below -= 1
    while high != 0 and float(f"{above * step:.12g}") <= high:
        above += 1
    return f"[{below * step:.12g}, {max(above, below + 1) * step:.12g}]"


def _type_line(name: str, profile: ColumnProfile, nested: str, private: bool) -> str:
    """Return the line of a column with its type; if `private`, without counts, which single records change."""
    key = _key(name)
    count = len(profile.texts) + len(profile.numbers)
    many = f"more than {MAX_CATEGORIES}" if count > MAX_CATEGORIES else str(count)
    if nested:
        return f"# {key}: left out, its type is neither number nor text: {nested}"
    if not profile.present:
        return f"# {key}: left out, all its values are missing"
    if why := _wrongly_written(name, profile):
        return f"# {key}: left out, {why}"
    if profile.id_like and profile.identifying != "dates":
        return f"# {key}: left out, all values are distinct: an ID?"
    suspicion = _suspicion(name, profile)
    if suspicion and (written := _date_settings(profile, private)):
        return f"# {key}: left out, {suspicion}. If it identifies nobody, write {key} = {written}"
    if suspicion:
        kind = "number" if profile.numeric else "category"
        return f'# {key}: left out, {suspicion}. If it identifies nobody, write {key} = "{kind}"'
    if count == 1:
        return f'# {key} = "category"  # left out, it has only one value'
    if profile.numeric and looks_like_dates(np.array(list(profile.numbers))):
        return f"# {key}: left out, all values are as days and months, such as 12.05: dates that were read as decimals?"
    if profile.numeric:
        if profile.whole and 2 < count <= MAX_CODES:
            found = "few" if private else count
            return f'{key} = "category"  # {found} whole numbers: a code? For counts or measurements, write "number"'
        remarks = list(filter(None, [_remarks(profile, private), profile.remark]))
        if profile.may_be_days:
            remarks.append(f"{DAYS_QUESTION}; {REVIEW_MARK}")
        return f'{key} = "number"' + (f"  # {'; '.join(remarks)}" if remarks else "")
    if count > MAX_CATEGORIES or profile.longest > MAX_CATEGORY_BYTES:
        if private:
            return f"# {key}: left out, many distinct or long values: free text?"
        return f"# {key}: left out, {many} distinct values of up to {profile.longest} bytes: free text?"
    found = "many" if private else count
    notes = [f"{found} distinct values, a feature for each"] if count > MIN_CATEGORIES_TO_NOTE else []
    if sign := _sign(profile):
        notes.append(f"its numbers have {sign}; for a measurement, {ALONE}")
    if profile.rare and not private:
        notes.append(f"values of fewer than {RARE} records, {profile.rare} in this table, count as {OTHER!r}")
    if profile.may_name_persons:
        notes.append(f"{PERSONS_QUESTION}; {REVIEW_MARK}")
    return f'{key} = "category"' + (f"  # {'; '.join(notes)}" if notes else "")


def _date_settings(profile: ColumnProfile, private: bool) -> str:
    """Return the settings of a column of dates, with a comment if its dates can be read in two ways; or nothing."""
    texts = [text for text in profile.texts if not USUAL_MARKERS.fullmatch(text)]
    if profile.numeric and profile.identifying != "dates":
        return ""
    formats = usual_format([*texts, *(f"{number:.0f}" for number in profile.numbers)])
    if formats is None:
        if not profile.numeric or not EXCEL_DAYS[0] <= profile.lowest <= profile.highest <= EXCEL_DAYS[1]:
            return ""
        formats = (EXCEL,)
    settings = ['type = "date"', *(f"format = {_text(each)}" for each in formats[:1])]
    settings += ['range = ["FIRST", "LAST"]'] if private else []
    others = ", ".join(map(_text, formats[1:]))
    return f"{{ {', '.join(settings)} }}{f' (or format = {others}: they can be read both ways)' if others else ''}"


def _is_id(name: str, profile: ColumnProfile) -> bool:
    """Return whether a column may be the id of the records; predictions would contain it."""
    named = profile.distinct and profile.present == profile.rows and "identifier" in _suspicion(name, profile)
    return (profile.id_like or named) and not tells_about_a_person(name, profile.identifying)


def _suspicion(name: str, profile: ColumnProfile, *, listed: bool = False) -> str:
    """Return why a column may identify persons, or an empty text.

    If its values are to be `listed`, a frequent one of a column such as `doctor` is still the name of somebody.
    """
    measured = profile.numeric and not profile.whole
    by_name = identifying_name(name, frequent=not listed and (measured or profile.rare == 0))
    look = profile.identifying or (NAMES_OR_CONTACTS if listed and profile.may_name_persons else "")
    return by_name or (f"its values look like {look}" if look else "")


def _sign(profile: ColumnProfile) -> str:
    """Return what the numbers of a column are written with, if it is a percent sign or a unit."""
    return "a percent sign" if PERCENT in profile.writings else "a unit" if UNIT in profile.writings else ""


def _wrongly_written(name: str, profile: ColumnProfile) -> str:
    """Return why a column of numbers is left out that are not written as numbers, or an empty text."""
    found, key = profile.writings, _key(name)
    if identifying_name(name, frequent=True):
        return ""
    if POINT in found:
        return (
            "its numbers have points, and decimals have commas in this file: write all of them in one way. If they are "
            f'codes, write {key} = "category"'
        )
    if COMMA in found and len(profile.texts) + len(profile.numbers) > MAX_CODES:
        return (
            "its numbers have commas: write them without thousands separators, or add --decimal ',' if these are "
            f'decimals. If they are codes, write {key} = "category"'
        )
    if MINUS in found:
        return "its numbers have a minus sign that is not '-': replace it"
    if (sign := _sign(profile)) and len(profile.texts) + len(profile.numbers) > MAX_CODES:
        return f'its numbers have {sign}: {ALONE}. If they are categories, write {key} = "category"'
    return f"some of its values {LIMITS}" if LIMIT in found and not profile.numeric else ""


def _remarks(profile: ColumnProfile, private: bool) -> str:
    """Return comments about texts in a column of numbers, or an empty text."""
    remarks = [f"some values {LIMITS}"] if LIMIT in profile.writings else []
    if profile.remarks and private:
        remarks.append("some texts are not numbers: correct the table, or list them as missing")
    elif profile.remarks:
        texts = "1 distinct text is" if profile.remarks == 1 else f"{profile.remarks} distinct texts are"
        remarks.append(f"{texts} not a number: correct the table, or list the text as missing")
    return "; ".join(remarks)
