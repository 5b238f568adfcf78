"""Formats of the dates in tables, as in `[data.columns]`, and days as numbers.

    admission = { type = "date", format = "%d.%m.%Y" }

Days are counted from 1970-01-01. Dates with the year first, such as 2020-01-31, need no format; all others do, because
01/02/2020 is a day in January or in February. A format has `%d`, `%m` (or `%b`, the English name of the month) and
`%Y`, as `strptime` knows them, or is "excel" for the numbers by which Excel counts days, or "excel-1904" for those of
workbooks with the system of dates from 1904. A time may follow, and only matters if it has a time zone.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from functools import lru_cache
from typing import TYPE_CHECKING

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo

EPOCH = date(1970, 1, 1).toordinal()
EXCEL, EXCEL_1904 = "excel", "excel-1904"
LEAP_DAY_OF_EXCEL = 60  # 29 February 1900, which was not a day; Excel counts it
EXAMPLES = '"%d.%m.%Y", "%m/%d/%Y" or "excel"'
_FIELDS = {"%Y": r"(?P<Y>\d{4})", "%m": r"(?P<m>\d{1,2})", "%d": r"(?P<d>\d{1,2})", "%b": r"(?P<b>[A-Za-z]{3,9})\.?"}
_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_TIME = (
    r"(?:[T ]\s?(?P<H>\d{1,2})(?::(?P<M>\d{2})(?::(?P<S>\d{2})(?:[.,]\d+)?)?)?\s?(?P<p>[AaPp][Mm])?"
    r"\s?(?P<z>Z|UTC|[+-]\d{2}(?::?\d{2})?)?)?"
)
_YEAR_FIRST = re.compile(rf"(?P<Y>\d{{4}})(?P<s>[-/.])(?P<m>\d{{1,2}})(?P=s)(?P<d>\d{{1,2}}){_TIME}")
_DIGITS = re.compile(r"(\d{1,7})(?:\.\d*)?")
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+/-]{1,63}")


class MissingZoneError(ValueError):
    """A time has a time zone, and the column states none in which it is a day."""


def check_format(text: str) -> str:
    """Check a format.

    Raises:
        InputError: it is none.

    Examples:
        >>> check_format("%d/%m/%Y"), check_format("excel")
        ('%d/%m/%Y', 'excel')
        >>> check_format("%d/%m/%y")
        Traceback (most recent call last):
        cgd.errors.InputError: format is '%d/%m/%y'; a year of two digits has no century: write years with four, and %Y
    """
    if text in (EXCEL, EXCEL_1904):
        return text
    if "%y" in text:
        raise InputError(f"format is {text!r}; a year of two digits has no century: write years with four, and %Y")
    found = re.findall(r"%.?", text)
    if sorted(found) not in (["%Y", "%d", "%m"], ["%Y", "%b", "%d"]):
        raise InputError(f"format is {text!r}; it has %d, %m (or %b) and %Y once, such as {EXAMPLES}")
    return text


def check_time_zone(name: str) -> str:
    """Check the form of the name of a time zone; whether it is known depends on the machine.

    Raises:
        InputError: it is no name.
    """
    if name and not _ZONE.fullmatch(name):
        raise InputError(f"time_zone is {name!r}; it must be a name such as 'Europe/Zurich'")
    return name


def day_number(text: str) -> int:
    """Return the day of a text with the year first, from 1970-01-01.

    Raises:
        InputError: it is no such text.

    Examples:
        >>> day_number("1970-01-31"), day_number("1969-12-31")
        (30, -1)
    """
    try:
        return date.fromisoformat(text).toordinal() - EPOCH
    except ValueError:
        raise InputError(f"{text!r} is not a date; write it as 2020-01-31") from None


def day_text(day: float) -> str:
    """Return a day as a text with the year first.

    Examples:
        >>> day_text(30.0)
        '1970-01-31'
    """
    return date.fromordinal(int(day) + EPOCH).isoformat()


def readings(text: str, formats: Sequence[str], zone: tzinfo | None = None) -> set[int]:
    """Return the days that a text may be, from 1970-01-01: none, one, or several if formats contradict each other.

    Args:
        text: a text without surrounding spaces.
        formats: the formats, besides those with the year first.
        zone: the time zone in which a time with a zone is a day.

    Raises:
        MissingZoneError: the time has a time zone, and `zone` is None.

    Examples:
        >>> readings("1970-01-31 23:10", []), readings("02/01/1970", ["%d/%m/%Y", "%m/%d/%Y"])
        ({30}, {1, 31})
        >>> readings("31.02.1970", ["%d.%m.%Y"]), readings("60", ["excel"]), readings("61", ["excel"])
        (set(), set(), {-25508})
    """
    found = set()
    for pattern in (_YEAR_FIRST, *map(_pattern, formats)):
        if isinstance(pattern, str):
            day = _serial_day(text, pattern)
        else:
            matched = pattern.fullmatch(text)
            day = None if matched is None else _day(matched.groupdict(), zone)
        if day is not None:
            found.add(day)
    return found


@lru_cache(maxsize=64)
def _pattern(text: str) -> re.Pattern[str] | str:
    if text in (EXCEL, EXCEL_1904):
        return text
    parts = re.split(r"(%[Ymdb])", text)
    # Digits that follow each other without a separator have a fixed length.
    fixed = "".join(parts[2:-1:2]) == ""
    pattern = "".join(_FIELDS.get(part, re.escape(part)) for part in parts)
    return re.compile((pattern.replace("{1,2}", "{2}") if fixed else pattern) + _TIME)


def _serial_day(text: str, system: str) -> int | None:
    """Return the day of a number by which Excel counts days; None for none, such as 29 February 1900."""
    matched = _DIGITS.fullmatch(text)
    if matched is None:
        return None
    number = int(matched[1])
    if system == EXCEL_1904:
        first = date(1904, 1, 1)
    elif number in (0, LEAP_DAY_OF_EXCEL):
        return None
    else:
        first = date(1899, 12, 31) if number < LEAP_DAY_OF_EXCEL else date(1899, 12, 30)
    day = first.toordinal() + number
    return day - EPOCH if day <= date.max.toordinal() else None


def _day(found: dict[str, str | None], zone: tzinfo | None) -> int | None:
    month = _month(found["b"]) if found.get("b") else int(found.get("m") or 0)
    try:
        day = date(int(found["Y"] or 0), month, int(found["d"] or 0))
        hour = int(found["H"] or 0)
        if found["p"]:
            hour = hour % 12 + 12 * (found["p"].lower() == "pm")
        hours, minutes, seconds = hour, int(found["M"] or 0), min(int(found["S"] or 0), 59)
        moment = datetime(day.year, day.month, day.day, hours % 24, minutes, seconds, tzinfo=UTC)
        if hours > 24 or (hours == 24 and (minutes, seconds) != (0, 0)):
            return None
        if found["z"]:
            if zone is None:
                raise MissingZoneError
            day = moment.replace(tzinfo=_offset(found["z"])).astimezone(zone).date()
    except MissingZoneError:
        raise
    except (ValueError, OverflowError):
        return None
    return day.toordinal() - EPOCH


def _month(name: str | None) -> int:
    """Return the month of an English name, which may be cut to three letters; 0 for none."""
    found = [place for place, each in enumerate(_MONTHS, start=1) if each.startswith((name or "").lower())]
    return found[0] if len(found) == 1 else 0


def _offset(text: str) -> timezone:
    if text in ("Z", "UTC"):
        return UTC
    digits = text[1:].replace(":", "").ljust(4, "0")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-offset if text[0] == "-" else offset)
