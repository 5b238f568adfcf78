"""Likely errors in one participant's records, found before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.federation.config import Federation
from cgd.federation.data_schema import Column, Data
from cgd.tabular.data_checks import counts_rows, find_notes, looks_like_dates, missing_codes, outliers
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.run import TabularRun
from support.tabular import SCHEMA, table, write_csv, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from cgd.tabular.dataset import TabularDataset


def pressures(count: int = 60) -> npt.NDArray[np.float64]:
    return np.random.default_rng(3).normal(130, 15, count).round()


def notes_of(values: Any, name: str = "trestbps") -> tuple[str, ...]:
    data = Data("outcome", (Column(name, "number"),), "regression")
    outcome = np.random.default_rng(4).normal(size=len(values))
    frame = {name: values, "outcome": outcome}
    return find_notes(dataset_from_frame(frame, data, data.columns, target=True)[0], "outcome")


def dataset(frame: dict[str, Any]) -> TabularDataset:
    columns = tuple(
        Column(name, "category" if isinstance(values[0], str) else "number")
        for name, values in frame.items()
        if name != "outcome"
    )
    data = Data("outcome", columns)
    return dataset_from_frame(frame, data, data.columns, target=True)[0]


def test_column_without_errors_has_no_notes() -> None:
    assert notes_of(pressures()) == ()


@pytest.mark.parametrize("code", [-1, -9, -99, -999, 999, 9999, 0])
def test_code_for_a_missing_value_is_noted_with_its_count(code: float) -> None:
    values = np.concatenate([pressures(), [code, code]])
    low, high = pressures().min(), pressures().max()
    (note,) = notes_of(values)
    assert note == (
        f"column 'trestbps': 2 values are {code}, and all other values are from {low:g} to {high:g}; if it stands for "
        f'a missing value, write {{ type = "number", missing = ["{code}"] }} in [data.columns] for all participants'
    )


def test_several_codes_in_one_column_are_found() -> None:
    assert missing_codes(np.concatenate([pressures(), [-9, -99, 0, 999]])) == [-9, -99, 0, 999]


def test_code_that_is_listed_as_missing_is_not_noted() -> None:
    data = Data("outcome", (Column("bp", "number", missing=("0",)),), "regression")
    frame = {"bp": [*pressures(), 0.0], "outcome": np.random.default_rng(4).normal(size=61)}
    assert find_notes(dataset_from_frame(frame, data, data.columns, target=True)[0], "outcome") == ()


@pytest.mark.parametrize(
    "values",
    [
        np.arange(-20, 20.0),  # temperatures: −9, −1 and 0 are among the others
        np.repeat(np.arange(8.0), 8),  # a count that begins at 0
        np.concatenate([np.zeros(80), np.linspace(500, 900, 20)]),  # a quantity that most records do not have
        np.concatenate([[0.0] * 10, np.arange(5, 105, 5.0)]),  # a dose, in steps of 5
        np.concatenate([np.linspace(20, 98, 60), [99.0]]),  # an age
        np.concatenate([np.random.default_rng(0).exponential(1.0, 200), [0.0]]),
    ],
    ids=["negative", "count", "mostly zero", "dose", "age", "continuous"],
)
def test_usual_value_is_not_taken_for_a_code(values: npt.NDArray[np.float64]) -> None:
    assert missing_codes(values) == []


def test_zeros_of_a_skin_fold_are_codes() -> None:
    assert missing_codes(np.array([0.0] * 12 + list(range(7, 60)))) == [0]


def test_typing_error_is_an_outlier_on_both_sides() -> None:
    assert outliers(np.concatenate([pressures(), [1380.0]])).tolist() == [1380]
    assert outliers(np.concatenate([pressures(), [-2000.0, 1380.0]])).tolist() == [-2000, 1380]


def test_metres_among_centimetres_are_outliers() -> None:
    heights = np.random.default_rng(2).normal(172, 9, 100)
    assert outliers(np.concatenate([heights, [1.72, 1.81]])).tolist() == [1.72, 1.81]


@pytest.mark.parametrize("seed", range(5))
def test_long_tail_has_no_outliers(seed: int) -> None:
    random = np.random.default_rng(seed)
    for values in (random.lognormal(0, 1.5, 2000), random.pareto(1.5, 2000), random.normal(size=2000)):
        assert outliers(values).size == 0


def test_outlier_is_noted_with_its_value() -> None:
    (note,) = notes_of(np.concatenate([pressures(), [1380.0]]))
    assert note.startswith("column 'trestbps': 1 value is far from all others: 1380, and the others are from ")


def test_index_is_noted() -> None:
    (note,) = notes_of(np.arange(1.0, 61.0), "Unnamed: 0")
    assert note.startswith("column 'Unnamed: 0': its values count the rows")
    assert counts_rows(np.arange(0.0, 30.0))
    assert counts_rows(np.delete(np.arange(0.0, 30.0), [3, 17]))  # rows without a label were left out
    assert not counts_rows(np.arange(0.0, 30.0)[::-1])
    assert not counts_rows(np.arange(0.0, 3000.0, 100))
    assert not counts_rows(np.sort(pressures()))


def test_dates_read_as_decimals_are_noted() -> None:
    dates = [3.10, 12.05, 24.12, 1.01, 17.06, 30.11, 8.03, 21.07, 2.02, 19.09]
    (note,) = notes_of(np.array(dates), "admission")
    assert note.startswith("column 'admission': all values are as days and months, such as 3.1: dates that were read")
    assert looks_like_dates(np.array([12.31, 1.01, 2.28, 3.15, 4.30, 5.05, 6.17, 7.22]))  # the month first
    assert not looks_like_dates(np.array([5.1, 5.25, 6.12, 7.3, 8.05, 9.11, 4.07, 3.99]))
    assert not looks_like_dates(np.array([1.1, 2.1, 3.1, 4.1, 5.1, 6.1, 7.1, 8.1]))  # one digit
    assert not looks_like_dates(np.array([*dates, 3.105]))


def test_dates_of_a_spreadsheet_as_age_are_noted() -> None:
    serial = np.random.default_rng(5).integers(20000, 45000, 40).astype(float)
    (note,) = notes_of(serial, "age")
    assert "as spreadsheets store dates (days since 1900); export it as an age or a year" in note
    assert notes_of(serial, "dosage") == ()


def test_duplicates_are_noted() -> None:
    random = np.random.default_rng(6)
    frame = {
        "chol": random.normal(240, 40, 100).tolist(),
        "age": random.normal(60, 9, 100).round().tolist(),
        "sex": [("f", "m")[each] for each in random.integers(2, size=100)],
        "outcome": [("well", "ill")[each] for each in random.integers(2, size=100)],
    }
    assert find_notes(dataset(frame), "outcome") == ()
    twice = {name: [*values, *values[:7]] for name, values in frame.items()}
    assert find_notes(dataset(twice), "outcome") == (
        "7 records are equal to others in all columns and in the target; are there duplicates in the file?",
    )


def test_missing_values_are_equal_in_duplicates() -> None:
    frame = table(50, 0)
    copied = {name: [*frame[name], *frame[name][:2]] for name in ("age", "dose", "ward", "outcome")}
    assert any("records are equal" in note for note in find_notes(dataset(copied), "outcome"))


def test_equal_records_of_few_categories_are_no_duplicates() -> None:
    random = np.random.default_rng(7)
    frame = {
        name: [("a", "b", "c")[each] for each in random.integers(3, size=500)] for name in ("x", "y", "z", "outcome")
    }
    assert find_notes(dataset(frame), "outcome") == ()


def test_category_that_is_a_code_and_categories_that_differ_by_case_are_noted() -> None:
    frame = {"sex": ["m", "f", "M ", "-9", "unknown"] * 4, "outcome": ["well", "ill"] * 10}
    remedy = "if it stands for a missing value, list it as missing in [data] for all participants"
    assert find_notes(dataset(frame), "outcome") == (
        f"column 'sex': 4 values are '-9', which is a category; {remedy}",
        f"column 'sex': 4 values are 'unknown', which is a category; {remedy}",
        "column 'sex': 'M', 'm' are different categories; agree on one spelling",
    )


def test_notes_are_part_of_a_prepared_run_and_change_no_record(tmp_path: Path) -> None:
    content = table(60, 0)
    content["age"][:2] = [-999, -999]
    write_csv(tmp_path / "ada.csv", content)
    federation = Federation.load(write_federation(tmp_path, ("ada", "bob", "cleo")))
    made = TabularRun.prepare(federation, "ada", tmp_path / "ada.csv", tmp_path / "run")
    assert any("column 'age': 2 values are -999" in note for note in made.notes)
    assert made.records.numbers["age"][0] == -999


def test_category_that_values_gives_is_no_missing_value(tmp_path: Path) -> None:
    content = {**table(60, 0), "ward": ["none"] * 30 + ["A"] * 30}
    write_csv(tmp_path / "ada.csv", content)
    mapped = SCHEMA.replace('ward = "category"', 'ward = { type = "category", values = { none = "none", A = "A" } }')
    mapped = mapped.replace('target = "outcome"', 'target = "outcome"\nvalues = { ill = "relapse", well = "none" }')
    notes = {}
    for name, schema in (("plain", SCHEMA), ("mapped", mapped)):
        (tmp_path / name).mkdir()
        federation = Federation.load(write_federation(tmp_path / name, ("ada", "bob", "cleo"), schema=schema))
        notes[name] = TabularRun.prepare(federation, "ada", tmp_path / "ada.csv", tmp_path / f"run-{name}").notes
    assert any("column 'ward': 30 values are 'none', which is a category" in note for note in notes["plain"])
    assert not any("which is a category" in note for note in notes["mapped"])


@pytest.mark.parametrize("word", ["Total", "Summe", "gesamt:"])
def test_last_row_of_totals_is_noted(word: str) -> None:
    ages = np.random.default_rng(2).normal(60, 9, 21).round(1)
    frame = {"ward": [*["A", "B"] * 10, word], "age": ages, "outcome": [*["ill", "well"] * 10, "ill"]}
    assert find_notes(dataset(frame), "outcome") == (
        f"column 'ward': the last record has {word!r}; remove the row if it is a total and no record",
    )
    assert find_notes(dataset({**frame, "ward": [word, *["A", "B"] * 10]}), "outcome") == ()
