"""Recognise dates in texts, in the formats and with the months of common languages."""

from __future__ import annotations

import re

# The beginnings of the names of months: English, German, French, Spanish, Italian, Portuguese, Dutch, Scandinavian,
# Polish, Czech, Turkish, Russian and Ukrainian.
_MONTHS = (
    "jan jän feb fév fev mar mär már maa mrt apr avr abr may mai maj mei mag maio jun juin giu jul juil lug aug aoû "
    "ago set sep oct okt out ott nov dec déc dic dez des ene gen gev led úno bře dub kvě čer srp zář říj lis pro sty "
    "lut kwi cze lip sie wrz paź paz gru oca şub nis haz tem ağu eyl eki kas ara янв фев мар апр мая май июн июл авг "
    "сен окт ноя дек січ лют бер кві тра чер лип сер вер жов лис гру"
)
_MONTH = rf"(?<![^\W\d_])(?:{'|'.join(_MONTHS.split())})[^\W\d_]{{0,9}}"
_IN = r"(?:[.,\s-]|\b(?:de|of|del|d['’])\b)+"
_DAY_NUMBER, _MONTH_NUMBER = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:0?[1-9]|1[0-2])"
_DAY_AND_MONTH = rf"(?:{_DAY_NUMBER}[-/.]{_MONTH_NUMBER}|{_MONTH_NUMBER}[-/.]{_DAY_NUMBER})"
_TIME = r"(?:[T ]\d{1,2}(?::\d{2}(?::\d{2}(?:[.,]\d+)?)?)?(?:\s?[AaPp][Mm])?(?:Z|\s?[+-]\d{2}:?\d{2})?)?"
_ALONE = r"(?<!\d)(?<!\d\.)", r"(?!\.?\d)"  # not a part of a longer number
_DAY = (
    rf"(?:\d{{4}}[-/.]{_MONTH_NUMBER}[-/.]{_DAY_NUMBER}(?!\d)|{_DAY_AND_MONTH}[-/.]\d{{4}}(?!\d)"
    rf"|(?<!\d[-/.]){_DAY_AND_MONTH}[-/.]\d{{2}}(?![-/.]?\d)"
    rf"|\d{{1,2}}(?:st|nd|rd|th|er|º|ª)?{_IN}{_MONTH}{_IN}\d{{2,4}}(?!\d)|{_MONTH}[.\s-]+\d{{1,2}}(?:st|nd|rd|th)?,?[\s-]+\d{{4}}"
    rf"|\d{{4}}[.\s-]+{_MONTH}[.\s-]+\d{{1,2}}(?!\d)|\d{{4}}\s?[年년]\s?\d{{1,2}}\s?[月월]\s?\d{{1,2}}\s?[日일号號]?)"
)
_YEAR = r"(?:19|20)\d{2}"
_MONTH_OR_WEEK = (
    rf"(?:{_YEAR}[-/.](?:0[1-9]|1[0-2])|{_MONTH_NUMBER}[-/.]{_YEAR}|{_YEAR}-?W[0-5]\d(?:-?[1-7])?|{_MONTH}{_IN}{_YEAR}"
    rf"|{_YEAR}[.\s-]+{_MONTH}|{_YEAR}\s?[年년]\s?\d{{1,2}}\s?[月월])"
)
_WHOLE = re.compile(_DAY + _TIME, re.IGNORECASE)
_DAY_INSIDE = re.compile(_ALONE[0] + _DAY + _ALONE[1], re.IGNORECASE)
_ANY_INSIDE = re.compile(rf"{_ALONE[0]}(?:{_DAY}|{_MONTH_OR_WEEK}){_ALONE[1]}", re.IGNORECASE)


def is_date(text: str) -> bool:
    """Return whether a text is a day, perhaps with a time.

    Examples:
        >>> is_date("3/4/1999 10:30"), is_date("15-ene-2020"), is_date("2020年3月5日"), is_date("born 3/4/1999")
        (True, True, True, False)
    """
    return _WHOLE.fullmatch(text) is not None


def has_day(text: str) -> bool:
    """Return whether a text contains a day of a year.

    Examples:
        >>> has_day("geb. 03.04.1956"), has_day("1.2.2020-5.2.2020"), has_day("03/1956"), has_day("10.1.2.20")
        (True, True, False, False)
    """
    return _DAY_INSIDE.search(text) is not None


def has_date(text: str) -> bool:
    """Return whether a text contains a day, a week or a month of a year.

    Examples:
        >>> has_date("Mo, 03.02.2020"), has_date("2020-W12"), has_date("since 04/1956"), has_date("März 1956")
        (True, True, True, True)
        >>> has_date("2010-2020"), has_date("Stage 2"), has_date("1990")
        (False, False, False)
    """
    return _ANY_INSIDE.search(text) is not None
