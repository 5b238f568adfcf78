"""Columns of dates: days, months and weekdays as features, and refusals of dates that may be several."""

from __future__ import annotations

import calendar
import re
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cgd
from cgd import InputError
from cgd.federation.config import Federation
from cgd.federation.data_schema import Column, DatePart, parse_data, parse_schema
from cgd.federation.date_format import EPOCH, day_number, readings
from cgd.tabular.dataset import dataset_from_frame, read_dataset
from cgd.tabular.date_columns import part_values, usual_format
from cgd.tabular.model import ConfinedModel, load_model
from cgd.tabular.run_inputs import RunOptions, read_inputs
from cgd.tabular.schema import suggest_schema
from cgd.tabular.schema_merge import merge_schemas
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import train
from support.tabular import run_members, table, tabular_settings, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.federation.data_schema import Data
    from cgd.tabular.dataset import TabularDataset

NAMES = ("ada", "bob", "cleo")
ISO = ["2020-01-31", "1956-02-29", "2000-01-01", ""]


def schema(missing: Sequence[str] = ("",), **settings: Any) -> Data:
    """Return a schema with the column `day`, a date."""
    return parse_data({"target": "y", "missing": list(missing), "columns": {"day": {"type": "date", **settings}}})


def read(values: Any, data: Data | None = None) -> TabularDataset:
    data = data or schema()
    frame = {"day": values, "y": ["a"] * len(values)}
    return dataset_from_frame(frame, data, data.input_columns, target=True)[0]


def days(values: Any, data: Data | None = None) -> list[str | None]:
    found = read(values, data).numbers["day days"]
    reference = day_number((data or schema()).columns[0].first_day)
    return [
        None if np.isnan(each) else (date(1970, 1, 1) + timedelta(int(each) + reference)).isoformat() for each in found
    ]


def refused(values: Any, data: Data | None = None) -> str:
    with pytest.raises(InputError) as error:
        read(values, data)
    return str(error.value)


def test_parts_of_dates() -> None:
    found = read(ISO)
    assert list(found.numbers) == ["day days"]
    assert list(found.categories) == ["day month", "day weekday"]
    assert np.array_equal(found.numbers["day days"], [7335, -16012, 0, np.nan], equal_nan=True)
    month, weekday = found.categories["day month"], found.categories["day weekday"]
    assert [*(month.names[code] for code in month.codes[:3]), month.codes[3]] == ["1", "2", "1", -1]
    assert [weekday.names[code] for code in weekday.codes[:3]] == ["Friday", "Wednesday", "Saturday"]
    assert weekday.codes[3] == -1


@given(st.dates())
def test_each_day_agrees_with_the_calendar(day: date) -> None:
    number = np.array([float(day.toordinal() - EPOCH)])
    parts = {each.part: part_values(each, number).to_pylist()[0] for each in _parts(Column("day", "date"))}
    assert parts["month"] == str(day.month)
    assert parts["weekday"] == calendar.day_name[day.weekday()]
    assert parts["days"] == (day - date(2000, 1, 1)).days


def _parts(column: Column) -> list[DatePart]:
    return [each for each in column.input_columns if isinstance(each, DatePart)]


@given(st.dates(), st.sampled_from(["%d.%m.%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y%m%d", "%d %b %Y"]))
def test_each_format_reads_what_strftime_writes(day: date, form: str) -> None:
    text = day.strftime(form.replace("%Y", "%%Y")).replace("%Y", f"{day.year:04}")
    assert readings(text, [form]) == {day.toordinal() - EPOCH}
    assert readings(day.isoformat(), [form]) == {day.toordinal() - EPOCH}  # a year first needs no format


@given(st.text(max_size=24), st.lists(st.sampled_from(["%d.%m.%Y", "%Y%m%d", "excel", "excel-1904", "%b %d, %Y"])))
def test_any_text_is_a_day_or_none(text: str, formats: list[str]) -> None:
    for day in readings(text, formats, UTC):
        assert date.min.toordinal() <= day + EPOCH <= date.max.toordinal()


def test_types_of_columns_that_hold_dates() -> None:
    moments = [datetime(1956, 2, 29, 23, 59), datetime(2020, 1, 31), None]
    plain = ["1956-02-29", "2020-01-31", None]
    assert days(pa.array(moments, pa.timestamp("us"))) == plain
    assert days(pa.array([each.date() if each else None for each in moments], pa.date32())) == plain
    assert days(pa.array([each.date() if each else None for each in moments], pa.date64())) == plain
    assert days(pa.array(["1956-02-29", "2020-01-31 10:00", None]).dictionary_encode()) == plain
    assert days(pa.nulls(2)) == [None, None]
    assert "is of type bool, and dates are needed; export it as dates, or as text" in refused([True, False])
    assert "is of type list<item: int64>, and dates are needed; export each element" in refused([[1], [2]])
    assert "is of type time64[us], and dates are needed" in refused(pa.array([1], pa.time64("us")))


def test_date_that_may_be_two_days_is_refused_without_a_format() -> None:
    message = refused(["2020-01-31", "01/02/2020"])
    assert "row 2, column 'day': '01/02/2020' may be 2020-01-02 or 2020-02-01; write " in message
    assert 'format = "%d/%m/%Y" or format = "%m/%d/%Y" in [data.columns] for all participants' in message
    certain = refused(["31.12.2020"])
    assert "'31.12.2020' needs a format; write format = \"%d.%m.%Y\" in [data.columns]" in certain
    assert days(["01/02/2020"], schema(format="%d/%m/%Y")) == ["2020-02-01"]
    assert days(["01/02/2020"], schema(format="%m/%d/%Y")) == ["2020-01-02"]


def test_formats_that_contradict_each_other_refuse_only_what_they_disagree_about() -> None:
    both = schema(format=["%d/%m/%Y", "%m/%d/%Y"])
    assert days(["13/02/2020", "02/13/2020", "02/02/2020"], both) == ["2020-02-13", "2020-02-13", "2020-02-02"]
    message = refused(["01/02/2020"], both)
    assert "'01/02/2020' is 2020-01-02 or 2020-02-01 by the formats of [data]; state one of them" in message
    several = schema(format=["%d.%m.%Y", "%b %d, %Y"])
    assert days(["3.4.2020", "April 3, 2020", "Apr. 3, 2020", "2020/04/03"], several) == ["2020-04-03"] * 4


@pytest.mark.parametrize(
    "text",
    ["31.02.2020", "29.02.1900", "2.13.2020", "0.1.2020", "1.1.20", "1.1.20201", "high", "2020", "1.1.2020 25:00"],
)
def test_what_is_no_date_of_the_format_is_refused(text: str) -> None:
    message = refused([text], schema(format="%d.%m.%Y"))
    assert f"row 1, column 'day': {text!r} is not a date of the format in [data]; write it as 2020-01-31" in message
    assert "or list it as missing" in message


def test_markers_of_missing_values() -> None:
    assert days(["unknown", "9999-12-31", "2020-01-31"], schema(["unknown", "9999-12-31"])) == [
        None,
        None,
        "2020-01-31",
    ]
    typed = pa.array([date(9999, 12, 31), date(2020, 1, 31)])
    assert days(typed, schema(["9999-12-31"])) == [None, "2020-01-31"]
    own = schema(["unknown"])
    assert days(["-", "unknown"], parse_data({"target": "y", "missing": ["unknown"], "columns": {
        "day": {"type": "date", "missing": ["-"]}}})) == [None, None]  # fmt: skip
    assert "'-' is not a date; write it as 2020-01-31, state a format" in refused(["-"], own)


def test_numbers_are_days_of_excel_only_if_the_format_says_so() -> None:
    assert "'43861' is a number, and not a date" in refused([43861])
    assert "'43861' is a number, and not a date" in refused(["43861"])
    assert days([43861, 59, 61, 1], schema(format="excel")) == ["2020-01-31", "1900-02-28", "1900-03-01", "1900-01-01"]
    assert days(["43861.75", "42399"], schema(format="excel")) == ["2020-01-31", "2016-01-30"]
    assert days([42399, 0], schema(format="excel-1904")) == ["2020-01-31", "1904-01-01"]
    assert days([43861.75, None], schema(format="excel")) == ["2020-01-31", None]
    for number in (60, 0, -1, 2_958_466):  # 29 February 1900, and days that Excel has not
        assert f"'{number}' is not a date of the format in [data]" in refused([number], schema(format="excel"))
    assert days([20200131], schema(format="%Y%m%d")) == ["2020-01-31"]


def test_times_with_a_time_zone() -> None:
    zurich = schema(time_zone="Europe/Zurich")
    texts = ["2020-01-31T23:30:00Z", "2020-07-31 22:30+00:00", "2020-01-31 23:30", "2020-01-31 23:30:10.5-0500"]
    assert days(texts, zurich) == ["2020-02-01", "2020-08-01", "2020-01-31", "2020-02-01"]
    message = refused(texts[:1])
    assert "'2020-01-31T23:30:00Z' has a time zone, and the day depends on it; state for all participants" in message
    assert 'time_zone = "Europe/Zurich" in [data.columns]' in message
    moment = datetime(2020, 7, 31, 22, 30, tzinfo=UTC)
    typed = pa.array([moment, moment.astimezone(ZoneInfo("America/New_York"))], pa.timestamp("ms", "UTC"))
    assert days(typed, zurich) == ["2020-08-01", "2020-08-01"]
    assert days(typed, schema(time_zone="America/New_York")) == ["2020-07-31", "2020-07-31"]
    assert "column 'day' has times with a time zone, and the day depends on it" in refused(typed)
    assert "the time zone 'Europe/Zürich' of" not in refused(typed)
    unknown = refused(texts, schema(time_zone="Europe/Nowhere"))
    assert "the time zone 'Europe/Nowhere' of column 'day' is not known on this machine" in unknown


def test_days_outside_of_the_range_are_cut_to_it() -> None:
    data = schema(range=["2020-01-01", "2020-12-31"], reference="2020-01-01")
    found, notes = dataset_from_frame({"day": ["1905-01-01", "2020-01-02", "2031-01-01"]}, data, data.input_columns)
    assert found.numbers["day days"].tolist() == [0, 1, 365]
    assert any("column 'day days': 2 values are outside of its range and cut to it" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "%d/%m/%y"}, "a year of two digits has no century: write years with four, and %Y"),
        ({"format": "%d/%m"}, "format is '%d/%m'; it has %d, %m (or %b) and %Y once, such as"),
        ({"format": "%d.%d.%m.%Y"}, "it has %d, %m (or %b) and %Y once"),
        ({"format": "%d.%m.%Y %H:%M"}, "it has %d, %m (or %b) and %Y once"),
        ({"format": "day first"}, "it has %d, %m (or %b) and %Y once"),
        ({"format": 7}, "format is 7; it must be a list of texts"),
        ({"reference": "01.01.2000"}, "reference: '01.01.2000' is not a date; write it as 2020-01-31"),
        ({"reference": 2000}, "reference is 2000"),
        ({"time_zone": "../../etc/passwd"}, "time_zone is '../../etc/passwd'; it must be a name such as"),
        ({"parts": ["year"]}, "parts is 'year'; choose one of days, month, weekday"),
        ({"parts": ["days", "days"]}, "parts has 'days' twice"),
        ({"range": [0, "x"]}, "it must be the first and the last day, such as ['1920-01-01', '2025-12-31']"),
        ({"range": ["2020-01-02", "2020-01-01"]}, "it must be the first and the last day"),
        ({"range": ["1.1.2020", "2.1.2020"]}, "range: '1.1.2020' is not a date"),
        ({"categories": ["a"]}, "it is a date and has categories"),
        ({"values": {"a": "b"}}, "it is a date and has values"),
        ({"rare": 3}, "rare is for categories that are learned"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        schema(**settings)
    assert message in str(error.value)
    assert "column 'day'" in str(error.value)


@pytest.mark.parametrize("kind", ["number", "category"])
def test_settings_of_dates_are_for_dates(kind: str) -> None:
    with pytest.raises(InputError, match=f"it is a {kind} and has format, reference, time_zone or parts"):
        parse_data({"target": "y", "columns": {"x": {"type": kind, "parts": ["days"]}}})


def test_names_of_parts_are_not_those_of_other_columns() -> None:
    with pytest.raises(InputError, match="'day month' is a part of a date and another column; rename that column"):
        parse_data({"target": "y", "columns": {"day": "date", "day month": "number"}})
    parse_data({"target": "y", "columns": {"day": {"type": "date", "parts": ["days"]}, "day month": "number"}})


def test_dates_of_toml_need_no_quotes() -> None:
    day = "{ type = 'date', range = [1920-01-01, 2025-12-31], reference = 2000-01-01 }"
    data, *_ = parse_schema(f"[data]\ntarget = 'y'\n[data.columns]\nday = {day}\n[model]\nkind = 'logistic'\n")
    assert data.columns[0].range == (float(day_number("1920-01-01")), float(day_number("2025-12-31")))
    assert data.columns[0].reference == "2000-01-01"


def test_dates_in_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("day,y,more\n31.01.2020,a,1\n,b,2\n1.2.2020,a,3\n")
    data = schema(format="%d.%m.%Y", parts=["weekday", "days"])
    found, notes = read_dataset(path, data, data.input_columns)
    assert notes == ("columns not in the schema are not read: more",)
    assert np.array_equal(found.numbers["day days"], [7335, np.nan, 7336], equal_nan=True)
    assert list(found.categories) == ["day weekday"]
    with pytest.raises(InputError, match="the label is 'day', which is a column to predict from"):
        read_dataset(path, data, data.input_columns, label="day")
    with pytest.raises(InputError, match=re.escape("line 2, column 'day': '31.01.2020' needs a format")):
        read_dataset(path, schema(), schema().input_columns)


# Suggestions


def test_suggestion_leaves_dates_out_and_says_how_to_use_them(tmp_path: Path) -> None:
    rows = 200
    made = [date(2019, 1, 1) + timedelta(7 * row % 500) for row in range(rows)]
    content: dict[str, list[Any]] = {
        "iso": [each.isoformat() for each in made],
        "points": [each.strftime("%d.%m.%Y") for each in made],
        "slashes": [each.strftime("%m/%d/%Y") for each in made],
        "both": [f"{1 + row % 12:02}/{1 + row % 11:02}/2020" for row in range(rows)],
        "words": [f"{each.day} {('Jan', 'Mai', 'Okt')[each.month % 3]} 2020" for each in made],
        "serial": [43466 + 7 * row % 500 for row in range(rows)],
        "age": [20 + row % 60 for row in range(rows)],
        "y": ["ab"[row % 2] for row in range(rows)],
    }
    path = write_csv(tmp_path / "a.csv", content, tuple(content))
    lines = {line.partition(":")[0].removeprefix("# "): line for line in suggest_schema(path, "y").splitlines()}
    start = "left out, its values look like dates. If it identifies nobody, write"
    assert lines["iso"] == f'# iso: {start} iso = {{ type = "date" }}'
    assert lines["points"] == f'# points: {start} points = {{ type = "date", format = "%d.%m.%Y" }}'
    assert lines["slashes"] == f'# slashes: {start} slashes = {{ type = "date", format = "%m/%d/%Y" }}'
    assert lines["both"] == (
        f'# both: {start} both = {{ type = "date", format = "%d/%m/%Y" }} (or format = "%m/%d/%Y": they can be '
        "read both ways)"
    )
    assert lines["words"] == f'# words: {start} words = "category"'  # months of other languages
    assert lines["serial"] == f'# serial: {start} serial = {{ type = "date", format = "excel" }}'
    private = suggest_schema(path, "y", private=True)
    assert 'iso = { type = "date", range = ["FIRST", "LAST"] }' in private
    for text in ("2019", "2020"):
        assert text not in private


def test_suggestions_with_dates_are_joined(tmp_path: Path) -> None:
    def suggestion(name: str, settings: str) -> Path:
        path = tmp_path / name
        path.write_text(
            f'[data]\ntarget = "y"\n[data.columns]\nage = "number"\nday = {settings}\n[model]\nkind = "logistic"\n'
        )
        return path

    one = suggestion("a.toml", '{ type = "date", format = "%d.%m.%Y", range = ["1950-01-01", "2020-01-01"] }')
    two = suggestion("b.toml", '{ type = "date", format = "%d.%m.%Y", range = ["1960-01-01", "2025-01-01"] }')
    joined = merge_schemas([one, two])
    assert 'day = { type = "date", range = ["1950-01-01", "2025-01-01"], format = ["%d.%m.%Y"] }' in joined
    assert merge_schemas([suggestion("c.toml", '"date"'), suggestion("d.toml", '"date"')]).count('day = "date"') == 1
    three = suggestion("e.toml", '{ type = "date", format = "%m/%d/%Y" }')
    assert "# day: left out, its format differs" in merge_schemas([one, three])


def test_usual_formats() -> None:
    assert usual_format([]) is None
    assert usual_format(["1.1.2020", "1.1.2020 10:00", "1.1.2020 10:00Z"]) == ("%d.%m.%Y", "%m.%d.%Y")


# Trainings


def dated(rows: int, seed: int) -> dict[str, list[Any]]:
    """Return records whose outcome depends on the time since a day, and on the weekday."""
    random = np.random.default_rng(seed)
    made = [date(2015, 1, 1) + timedelta(int(each)) for each in random.integers(0, 3000, rows)]
    score = np.array([(each - date(2019, 2, 9)).days / 800 + (each.weekday() > 4) for each in made])
    return {
        "day": [each.isoformat() if random.random() < 0.95 else "" for each in made],
        "y": ["ill" if each > 0 else "well" for each in score + random.normal(0, 0.3, rows)],
    }


def test_training_and_predictions_with_dates(tmp_path: Path) -> None:
    data = schema(format="%d.%m.%Y")
    tables = [dated(200, seed) for seed in range(3)]
    members = [dataset_from_frame(each, data, data.input_columns, target=True)[0] for each in tables]
    settings = tabular_settings(data, steps=60)
    trained = run_members(lambda peers, records: train(peers, settings, records), members)[0]
    assert trained.preprocessing.features == (
        *("day days", "day days missing", *(f"day month={month}" for month in range(1, 13)), "day month missing"),
        *(f"day weekday={name}" for name in calendar.day_name),
        "day weekday missing",
    )
    origin = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}
    made = ConfinedModel.from_training(trained, settings, origin)
    made.save(tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    new = dated(300, 9)
    european = {"day": [".".join(reversed(each.split("-"))) for each in new["day"]]}
    assert np.array_equal(loaded.predict_proba(new), made.predict_proba(european))
    assert np.mean(loaded.predict(new) == np.array(new["y"])) > 0.8
    assert loaded.feature_names_in_.tolist() == ["day"]
    estimator = cgd.ConfinedClassifier(tmp_path / "run")
    assert (estimator.n_features_in_, estimator.feature_names_in_.tolist()) == (1, ["day"])
    assert np.array_equal(estimator.predict_proba(pandas.DataFrame({"day": new["day"]})), loaded.predict_proba(new))
    assert loaded.data == data
    with pytest.raises(InputError, match="has no column 'day'"):
        loaded.predict({"days": new["day"]})


def test_days_of_few_records_are_said_and_few_days_are_missing(tmp_path: Path) -> None:
    text = "[data]\ntarget = 'y'\n[data.columns]\nday = 'date'\nage = 'number'\n[model]\nkind = 'logistic'\n"
    federation = Federation.load(write_federation(tmp_path, NAMES, schema=text))
    content = {**dated(60, 1), "age": table(60, 1)["age"]}
    content["day"] = [*["2020-01-31"] * 30, *[f"2020-02-{day:02}" for day in range(1, 21)], *[""] * 10]
    inputs = read_inputs(federation, "ada", write_csv(tmp_path / "a.csv", content, tuple(content)), RunOptions())
    (note,) = (each for each in inputs.notes if each.startswith("column 'day':"))
    assert note.startswith("column 'day': 20 of 50 records have a day that fewer than 5 of our records have. Who knows")
    assert 'parts = ["month", "weekday"] leaves the day out' in note
    content["day"] = [*["2020-01-31"] * 3, *[""] * 57]  # as other numbers of few records
    inputs = read_inputs(federation, "ada", write_csv(tmp_path / "b.csv", content, tuple(content)), RunOptions())
    assert any(
        "count as missing, because sums could disclose them: 'day days' (3 records)" in each for each in inputs.notes
    )


def test_privacy_needs_a_range_of_dates(tmp_path: Path) -> None:
    def load(name: str, settings: str) -> Federation:
        text = (
            "[data]\ntarget = 'y'\nclasses = ['ill', 'well']\n[data.columns]\n"
            f"day = {settings}\n[model]\nkind = 'logistic'\n[privacy]\nepsilon = 8.0\ndelta = 1e-5\n"
        )
        (tmp_path / name).mkdir()
        return Federation.load(write_federation(tmp_path / name, NAMES, schema=text, steps=5, patience=0))

    with pytest.raises(InputError, match="the date 'day' has no range, and noise needs one; write in"):
        load("a", '"date"')
    load("b", '{ type = "date", parts = ["month", "weekday"] }')
    federation = load("c", '{ type = "date", range = ["2015-01-01", "2024-01-01"] }')
    settings = TabularSettings.from_federation(federation, "ada")
    first, *others = settings.own_columns
    assert first.range == (5479.0, 8766.0)
    assert [each.categories[0] for each in others] == ["1", "Monday"]
    members = [
        dataset_from_frame(dated(200, seed), settings.data, settings.own_columns, target=True)[0] for seed in range(3)
    ]
    trained = run_members(lambda peers, records: train(peers, settings, records), members)[0]
    assert trained.steps == 5
    assert len(trained.preprocessing.features) == 2 + 13 + 8
