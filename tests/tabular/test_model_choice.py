"""The suggested model: it depends on the table, nothing is read from it by watching, and it is about the best."""

from __future__ import annotations

import json
import re
import tomllib
from statistics import fmean
from typing import Any

import pytest

from cgd.federation.data_schema import parse_model
from cgd.optim.privacy_warnings import FirstLayer, find_warnings
from cgd.tabular.model_choice import MIN_RECORDS_FOR_GELU, choose_model, model_lines
from cgd.tabular.models import build
from support.pages import DOCS, load_script

suggested_models = load_script("suggested_models", "benchmarks")
STORED: dict[str, Any] = json.loads(suggested_models.FILE.read_text())
SETTINGS = [(table, records) for table, sizes in suggested_models.RECORDS.items() for records in sizes]
LARGEST_PART = 0.4
MAX_SHORTFALL = 0.005


def key(table: str, records: int) -> str:
    return f"{table}, {records} records"


def suggestion(table: str, records: int) -> str:
    """The candidate that the participant with the most records gets."""
    model = choose_model(round(LARGEST_PART * records), regression=table == "diabetes")
    [name] = [str(name) for name, each in suggested_models.CANDIDATES.items() if each == model]
    return name


def shortfall(table: str, records: int) -> float:
    """The mean score of the suggested model below that of the best candidate."""
    means = {name: fmean(scores) for name, scores in STORED["scores"][key(table, records)].items()}
    return max(means.values()) - means[suggestion(table, records)]


def read(how: str) -> list[int]:
    """The numbers of records read from suggested models, of all trainings."""
    return [run[how] for models in STORED["attacks"].values() for runs in models.values() for run in runs]


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("records", [1, 10, MIN_RECORDS_FOR_GELU - 1, MIN_RECORDS_FOR_GELU, 1_000_000])
def test_suggested_model_gets_no_warning_about_its_units(records: int, regression: bool) -> None:
    model = choose_model(records, regression=regression)
    layer = FirstLayer.from_model(build(model, 30, 1 if regression else 2))
    assert find_warnings(100_000, layer, members=4, total_records=400_000) == ()
    assert parse_model(tomllib.loads("\n".join(model_lines(model)))["model"]) == model


def test_suggestion_with_noise_does_not_depend_on_records() -> None:
    """It is sent to others without noise."""
    models = {choose_model(records, regression=each, private=True) for records in (1, 10**6) for each in (False, True)}
    assert len(models) == 1
    assert "watches" not in "".join(model_lines(models.pop()))


def test_results_have_all_settings() -> None:
    assert set(STORED["scores"]) == set(STORED["attacks"]) == {key(*each) for each in SETTINGS}
    for table, records in SETTINGS:
        scores = STORED["scores"][key(table, records)]
        assert set(scores) == set(suggested_models.CANDIDATES)
        assert {len(each) for each in scores.values()} == {suggested_models.seeds(records)}
        attacked = STORED["attacks"][key(table, records)]
        assert suggestion(table, records) in attacked
        assert {len(runs) for runs in attacked.values()} == {suggested_models.ATTACKED_SEEDS} == {10}


def test_no_record_is_read_from_a_suggested_model_by_watching() -> None:
    assert len(read("watching")) >= 10 * len(SETTINGS)
    assert set(read("watching")) == {0}


@pytest.mark.parametrize(("table", "records"), SETTINGS)
def test_suggested_model_is_about_as_good_as_the_best_candidate(table: str, records: int) -> None:
    assert shortfall(table, records) <= MAX_SHORTFALL


def test_page_has_the_figures() -> None:
    [section] = re.findall(r"^### Which model is suggested$(.*?)^###", (DOCS / "tables.md").read_text(), re.M | re.S)
    text = " ".join(section.split())
    worst = max(SETTINGS, key=lambda each: shortfall(*each))
    assert f"at most {shortfall(*worst):.4f}" in text
    assert f"none in {len(read('watching'))} trainings" in text
    steered = read("steering")
    assert f"in {sum(each > 0 for each in steered)} of {len(steered)} trainings" in text
    assert f"up to {max(steered)} records" in text
    for table, records in SETTINGS:
        means = {name: fmean(scores) for name, scores in STORED["scores"][key(table, records)].items()}
        row = f"| {table} | {records:,} | {suggestion(table, records)} | {means[suggestion(table, records)]:.4f} |"
        assert row in section


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("table", "records"), [("breast-cancer", 455), ("diabetes", 353)])
def test_attack_is_measured_again(table: str, records: int, seed: int) -> None:
    """With other seeds; and the same attacks read records from ReLU units, so they can."""
    again = suggested_models.attack(table, records, suggestion(table, records), 1000 + seed)
    assert again["watching"] == 0
    scores = STORED["scores"][key(table, records)][suggestion(table, records)]
    found = suggested_models.score(table, records, suggestion(table, records), 0)
    assert found == pytest.approx(scores[0], abs=0.02)
