"""Predictions of a file: notes about values unlike those of the training, and scores of the rows with a label."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.experiments import organisations
from cgd.local import solo_peers
from cgd.tabular.dataset import read_dataset
from cgd.tabular.federated_stats import NumberStats, TargetStats
from cgd.tabular.model import ConfinedModel
from cgd.tabular.predict import load_inputs, predict
from cgd.tabular.preprocessing import Preprocessing
from cgd.tabular.training import train
from cgd.tabular.unit_checks import compare_with_training
from support.tabular import REGRESSION, records, table, tabular_settings, write_csv

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.federation.data_schema import Data
    from cgd.tabular.predict import Predictions

PROVENANCE = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}


def trained(data: Data | None = None) -> ConfinedModel:
    settings = tabular_settings(steps=10) if data is None else tabular_settings(data, steps=10)
    made = train(solo_peers(b"s" * 32), settings, records(table(200, 1), settings.data))
    return ConfinedModel.from_training(made, settings, PROVENANCE)


@pytest.fixture(scope="module")
def model() -> ConfinedModel:
    return trained()


def predicted(model: ConfinedModel, folder: Path, values: dict[str, list[Any]], *more: str) -> Predictions:
    names = ("age", "dose", "ward", "outcome", *more)
    return predict(model, load_inputs(model, write_csv(folder / "new.csv", values, names)))


def without_ages_missing(rows: int, seed: int = 7) -> dict[str, list[Any]]:
    values = table(rows, seed)
    return {**values, "age": [50.0 if each in (None, "") else each for each in values["age"]]}


@pytest.mark.parametrize("rows", [1, 4, 60, 400])
def test_records_as_in_the_training_have_no_notes(model: ConfinedModel, tmp_path: Path, rows: int) -> None:
    assert predicted(model, tmp_path, table(rows, 7)).notes == ()


def test_column_in_another_unit_is_noted_with_both_figures(model: ConfinedModel, tmp_path: Path) -> None:
    values = without_ages_missing(60)
    values["age"] = [each * 12 for each in values["age"]]
    own, (stats, *_) = np.array(values["age"]), model.preprocessing.columns
    assert isinstance(stats, NumberStats)
    (note,) = predicted(model, tmp_path, values).notes
    assert note.startswith(
        f"column 'age': our values have the mean {own.mean():.4g} and the deviation {own.std():.4g}, and those of the "
        f"training {stats.mean:.4g} and {stats.deviation:.4g}: ours are "
    )
    assert note.endswith("times larger, as with years and months: convert ours to the unit of the training.")


@pytest.mark.parametrize("rows", [1, 5, 60])
def test_single_value_far_outside_is_noted_with_its_line(model: ConfinedModel, tmp_path: Path, rows: int) -> None:
    values = without_ages_missing(rows)
    values["age"][rows // 2] = 5500
    (note,) = predicted(model, tmp_path, values).notes
    assert note.startswith("column 'age': 1 value is more than 20 deviations from the mean of the training, ")
    assert note.endswith(f": 5500 in line {rows // 2 + 2}; correct it if it is an error")


def test_first_of_several_values_far_outside_is_named(model: ConfinedModel, tmp_path: Path) -> None:
    values = without_ages_missing(60)
    values["age"][10], values["age"][20] = 5500, -7000
    (note,) = predicted(model, tmp_path, values).notes
    assert "2 values are more than 20 deviations" in note
    assert note.endswith(": the first is 5500 in line 12; correct them if they are errors")


def test_python_also_warns_of_values_far_outside(model: ConfinedModel) -> None:
    with pytest.warns(UserWarning, match=r"column 'age': 1 value is more than 20 deviations .* 5500 in row 2;"):
        model.predict({"age": [50.0, 5500.0], "dose": [1.0, 1.0], "ward": ["A", "B"]})


def test_long_tail_of_a_skewed_column_is_no_outlier() -> None:
    values = np.exp(np.random.default_rng(0).normal(0, 2.5, 20_000))
    stats = NumberStats("dose", values.size, 0, float(values.mean()), float(values.std()))
    assert values.max() > stats.mean + 20 * stats.deviation
    preprocessing = Preprocessing((stats,), TargetStats())
    asked = records(
        {"age": values.tolist(), "dose": values.tolist(), "ward": ["A"] * values.size, "outcome": ["ill"] * values.size}
    )
    assert compare_with_training(asked, preprocessing) == ()


@pytest.mark.parametrize("word", ["Total", "Summe: "])
def test_last_row_of_totals_is_noted_in_a_column_that_the_model_does_not_use(
    model: ConfinedModel, tmp_path: Path, word: str
) -> None:
    values = {"case": [str(each) for each in range(30)], **without_ages_missing(30)}
    totals = {"case": word, "age": sum(values["age"])}
    with_totals = {name: [*each, totals.get(name, "")] for name, each in values.items()}
    notes = predicted(model, tmp_path, with_totals, "case").notes
    assert any("column 'age': 1 value is more than 20 deviations" in note and "in line 32" in note for note in notes)
    expected = f"the last row has {word.strip()!r}, and is predicted; remove it if it is a total and no record"
    assert expected in notes
    assert expected not in predicted(model, tmp_path, values, "case").notes


LARGE = [pytest.param(each, marks=pytest.mark.slow) for each in ("adult", "credit-default")]


@pytest.mark.parametrize("dataset", ["breast-cancer", "diabetes", *LARGE])
def test_sample_tables_have_no_notes(dataset: str, tmp_path: Path) -> None:
    if dataset in ("adult", "credit-default") and not os.environ.get("CGD_DATA"):
        pytest.skip("needs the folder CGD_DATA")
    samples = organisations.split(dataset)
    *members, test = [read_dataset(each, samples.data, samples.data.columns)[0] for each in samples.write(tmp_path)]
    columns = []
    for name in test.numbers:
        every = np.concatenate([each.numbers[name] for each in members])
        present = every[~np.isnan(every)]
        columns.append(NumberStats(name, present.size, 0, float(present.mean()), float(present.std())))
    for asked in (*members, test):
        assert compare_with_training(asked, Preprocessing(tuple(columns), TargetStats())) == ()


@pytest.mark.parametrize("regression", [False, True])
def test_rows_with_a_label_are_scored(tmp_path: Path, regression: bool) -> None:
    model = trained(REGRESSION) if regression else trained()
    values = table(40, 7)
    if regression:
        values["outcome"] = [float(each) for each in range(40)]
    labelled = {name: each[2:] for name, each in values.items()}
    values["outcome"][:2] = ["", ""]
    found = predicted(model, tmp_path, values)
    assert found.notes == ("2 rows have no value of 'outcome', so the predictions are scored on 38 of 40 rows",)
    expected = records({**labelled, "score": labelled["outcome"]}, model.data)
    assert found.scores == model.scores(found.outputs[2:], expected)
