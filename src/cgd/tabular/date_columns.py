"""Convert Arrow arrays to days, batch by batch, and days to what a model learns from: a number, a month, a weekday.

A date that can be read in two ways is refused, and so is one whose day depends on a time zone that is not stated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow
import pyarrow.compute

from cgd.errors import InputError
from cgd.federation.data_schema import MONTHS, WEEKDAYS, DatePart
from cgd.federation.date_format import EXAMPLES, MissingZoneError, day_number, day_text, readings
from cgd.tabular.arrow_arrays import conversion, decoded, is_text, nested_remedy
from cgd.tabular.cells import shorten
from cgd.tabular.written_dates import is_date

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.cells import MissingMarkers
    from cgd.tabular.dataset import TabularDataset

    Days = npt.NDArray[np.float64]
    Locate = Callable[[int], str]

FIRST_DAY, LAST_DAY = day_number("0001-01-01"), day_number("9999-12-31")
FIRST_WEEKDAY = 3  # 1970-01-01 was a Thursday
DAY_AND_MONTH = ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%m.%d.%Y", "%d-%m-%Y", "%m-%d-%Y")
USUAL_FORMATS = (*DAY_AND_MONTH, "%d %b %Y", "%d-%b-%Y", "%b %d, %Y", "%d.%b.%Y", "%Y%m%d")


class DateReader:
    """Convert the values of one date column to days, from 1970-01-01.

    Args:
        column: the column, of type "date".
        missing: the markers of missing values.
        title: the table's name in messages.
        locate: function that returns the place of a row, such as "line 17".
    """

    def __init__(self, column: Column, missing: MissingMarkers, title: str, locate: Locate) -> None:
        self._column, self._missing, self._title, self._locate = column, missing, title, locate
        self._zone = _time_zone(column) if column.time_zone else None
        found = [readings(text, ()) for text in missing.texts]
        self._missing_days = np.array([day for days in found for day in days], dtype=np.float64)

    def convert(self, array: Any, first: int) -> Days:
        """Return the days of a batch, NaN for missing values.

        Args:
            array: the batch.
            first: the row number of its first value.

        Raises:
            InputError: a value is no date, or may be several.
        """
        array = decoded(array)
        kind, types = array.type, pyarrow.types
        with conversion(self._column.name, self._title):
            if types.is_null(kind):
                return np.full(len(array), np.nan)
            if is_text(kind):
                return self._texts(self._missing.trim(array), first)
            if types.is_integer(kind) or types.is_floating(kind):
                return self._texts(self._missing.trim(_whole(array).cast(pyarrow.string())), first)
            if types.is_date(kind):
                days = array.cast(pyarrow.date32()).cast(pyarrow.int32())
            elif types.is_timestamp(kind):
                days = self._local_days(array)
            else:
                remedy = nested_remedy(kind) if types.is_nested(kind) else "export it as dates, or as text"
                raise InputError(
                    f"{self._title}: column {self._column.name!r} is of type {kind}, and dates are needed; {remedy}, "
                    "or leave the column out"
                )
            numbers: Days = days.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
        outside = np.flatnonzero((numbers < FIRST_DAY) | (numbers > LAST_DAY))
        if outside.size:
            place = first + int(outside[0])
            raise self._error(place, "it is infinite, or not in the years 1 to 9999; correct it, or leave it empty")
        return np.where(np.isin(numbers, self._missing_days), np.nan, numbers)

    def _local_days(self, array: Any) -> Any:
        kind = array.type
        if kind.tz is not None:
            if self._zone is None:
                raise InputError(
                    f"{self._title}: column {self._column.name!r} has times with a time zone, and the day depends on "
                    f"it; {self._zone_remedy()}"
                )
            local = array.cast(pyarrow.timestamp(kind.unit, self._column.time_zone))
            array = pyarrow.compute.local_timestamp(local)
        return pyarrow.compute.floor_temporal(array, unit="day").cast(pyarrow.date32()).cast(pyarrow.int32())

    def _texts(self, texts: Any, first: int) -> Days:
        encoded = texts.dictionary_encode()
        days = np.full(len(encoded.dictionary) + 1, np.nan)  # the last element is for null
        places = encoded.indices.fill_null(-1).to_numpy()
        for code, text in enumerate(encoded.dictionary.to_pylist()):
            try:
                found = readings(text, self._column.format, self._zone)
            except MissingZoneError:
                fact = f"{shorten(text)} has a time zone, and the day depends on it; {self._zone_remedy()}"
                raise self._error(first + _row_of(places, code), fact) from None
            if len(found) != 1:
                raise self._error(first + _row_of(places, code), self._unreadable(text, found))
            days[code] = found.pop()
        found_days: Days = days[places]
        return found_days

    def _unreadable(self, text: str, found: set[int]) -> str:
        if found:
            both = " or ".join(map(day_text, sorted(found)))
            return f"{shorten(text)} is {both} by the formats of [data]; state one of them, and write this date by it"
        days = _usual_readings(text)
        if not self._column.format and days:
            may_be = f"may be {' or '.join(map(day_text, sorted(days)))}; " if len(days) > 1 else "needs a format; "
            formats = " or ".join(f'format = "{each}"' for each in _usual_formats(text))
            return f"{shorten(text)} {may_be}write {formats} in [data.columns] for all participants"
        fact = "is not a date of the format in [data]" if self._column.format else "is not a date"
        if not is_date(text) and not self._column.format and text.replace(".", "", 1).isdigit():
            fact = "is a number, and not a date"
        return (
            f"{shorten(text)} {fact}; write it as 2020-01-31, state a format such as {EXAMPLES} in [data.columns] for "
            "all participants, or list it as missing"
        )

    def _zone_remedy(self) -> str:
        return (
            'state for all participants where its days are meant, such as time_zone = "Europe/Zurich" in '
            "[data.columns], or export dates without times"
        )

    def _error(self, row: int, fact: str) -> InputError:
        return InputError(f"{self._title}, {self._locate(row)}, column {self._column.name!r}: {fact}")


def part_values(part: DatePart, days: Days) -> Any:
    """Return an Arrow array of a part of days: numbers, or names of months or weekdays."""
    absent = np.isnan(days)
    if part.part == "days":
        return pyarrow.array(days - day_number(part.of.first_day), pyarrow.float64(), mask=absent)
    whole = np.where(absent, 0, days).astype(np.int64)
    if part.part == "month":
        codes = whole.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % len(MONTHS)
        names = MONTHS
    else:
        codes, names = (whole + FIRST_WEEKDAY) % len(WEEKDAYS), WEEKDAYS
    indices = pyarrow.array(codes.astype(np.int32), mask=absent)
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(names)).dictionary_decode()


def rare_day_notes(records: TabularDataset, data: Data, columns: Sequence[Column]) -> list[str]:
    """Return notes about date columns whose days few of our records share: a day tells nearly as much as a name."""
    notes = []
    for column in columns:
        if isinstance(column, DatePart) and column.part == "days":
            values = records.numbers[column.name]
            present = values[~np.isnan(values)]
            counts = np.unique(present, return_counts=True)[1]
            few = int(counts[counts < data.rare].sum())
            if few:
                notes.append(
                    f"column {column.of.name!r}: {few:,} of {present.size:,} records have a day that fewer than "
                    f"{data.rare} of our records have. Who knows it of a person may find the record by it; sums about "
                    'few records disclose it as any number. parts = ["month", "weekday"] leaves the day out'
                )
    return notes


def usual_format(texts: Sequence[str]) -> tuple[str, ...] | None:
    """Return the usual formats by which all texts are dates; empty if they need none, None if there is none.

    Examples:
        >>> usual_format(["31.12.2020", "01.02.2020"]), usual_format(["2020-12-31"]), usual_format(["Monday"])
        (('%d.%m.%Y',), (), None)
        >>> usual_format(["01/02/2020", "03/04/2020"])
        ('%d/%m/%Y', '%m/%d/%Y')
    """
    if texts and all(_is_day(text, ()) for text in texts):
        return ()
    fitting = tuple(each for each in USUAL_FORMATS if texts and all(_is_day(text, (each,)) for text in texts))
    return fitting or None


def _is_day(text: str, formats: Sequence[str]) -> bool:
    try:
        return bool(readings(text, formats))
    except MissingZoneError:
        return True


def _usual_readings(text: str) -> set[int]:
    try:
        return readings(text, USUAL_FORMATS)
    except MissingZoneError:
        return set()


def _usual_formats(text: str) -> list[str]:
    return [each for each in USUAL_FORMATS if _is_day(text, (each,))]


def _whole(array: Any) -> Any:
    """Return numbers without a fraction, which is a time of the day, as whole numbers."""
    if not pyarrow.types.is_floating(array.type):
        return array
    return pyarrow.compute.floor(array.cast(pyarrow.float64())).cast(pyarrow.int64(), safe=True)


def _row_of(places: npt.NDArray[Any], code: int) -> int:
    return int(np.flatnonzero(places == code)[0])


def _time_zone(column: Column) -> ZoneInfo:
    try:
        return ZoneInfo(column.time_zone)
    except Exception:  # not found, or not a file of a time zone
        raise InputError(
            f"the time zone {column.time_zone!r} of column {column.name!r} is not known on this machine; correct "
            "time_zone in [data.columns], or install the system's time zones (tzdata)"
        ) from None
