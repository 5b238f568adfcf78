"""The suggested model: it depends on the table, nothing is read from it by watching, and it is about the best."""

from __future__ import annotations

import json
import re
import tomllib
from statistics import fmean
from typing import Any

import pytest

from cgd.federation.model_section import Model, parse_model
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


def exceptions() -> list[tuple[str, int]]:
    """The settings in which another candidate is better by more than that."""
    return [each for each in SETTINGS if shortfall(*each) > MAX_SHORTFALL]


def exception_text() -> str:
    return " and ".join(f"{records} records of {table} ({shortfall(table, records):.4f})"
                        for table, records in exceptions())  # fmt: skip


def worst_shortfall() -> float:
    return max(shortfall(*each) for each in SETTINGS if each not in exceptions())


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


def test_suggested_model_is_about_as_good_as_the_best_candidate() -> None:
    """With 100 records of a regression, a linear model is better; it would disclose covariances, so it is no choice."""
    assert exceptions() == [("diabetes", 100)]
    means = {name: fmean(scores) for name, scores in STORED["scores"][key("diabetes", 100)].items()}
    assert max(means, key=lambda name: means[name]) == "logistic"  # which is linear in a regression
    linear = FirstLayer.from_model(build(Model("linear"), 11, 1))
    assert [each.kind for each in find_warnings(100_000, linear)] == ["second moments"]
    del means["logistic"]
    assert max(means.values()) == means[suggestion("diabetes", 100)]


def test_page_has_the_figures() -> None:
    [section] = re.findall(r"^### Which model is suggested$(.*?)^###", (DOCS / "tables.md").read_text(), re.M | re.S)
    text = " ".join(section.split())
    assert f"by at most {worst_shortfall():.4f}, except on {exception_text()}." in text
    watched, steered = read("watching"), read("steering")
    assert f"it read none in {len(watched)} trainings" in text
    assert f"in {sum(each > 0 for each in steered)} of {len(steered)} trainings; in 3,000 steps" in text
    longer = [each for runs in STORED["long"].values() for each in runs]
    assert len(longer) == 9
    assert f"in {sum(each > 0 for each in longer)} of {len(longer)} trainings, up to {max(longer)} records" in text
    for table, records in SETTINGS:
        means = {name: fmean(scores) for name, scores in STORED["scores"][key(table, records)].items()}
        name, best = suggestion(table, records), max(means, key=lambda each: means[each])
        assert f"| {table} | {records:,} | {name} | {means[name]:.4f} | {means[best]:.4f}, {best} |" in section


def test_member_that_steers_long_enough_reads_records_from_suggested_models() -> None:
    """As the pages state: no model prevents it."""
    assert {name.rsplit(", ", 1)[1] for name in STORED["long"]} == {"tanh 8", "gelu 16", "sigmoid 16"}
    assert all(sum(runs) > 0 for runs in STORED["long"].values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("table", "records"), [("breast-cancer", 455), ("diabetes", 353)])
def test_attack_is_measured_again(table: str, records: int, seed: int) -> None:
    """With other seeds; the same steering reads records from ReLU units, so it works."""
    assert suggested_models.attack(table, records, suggestion(table, records), 1000 + seed)["watching"] == 0
    assert suggested_models.attack(table, records, "relu 32", 1000 + seed)["steering"] > 0


@pytest.mark.parametrize("candidate", ["logistic", "tanh 8"])
def test_score_is_measured_again(candidate: str) -> None:
    """Other processors round differently, which changes the step of early stopping at most."""
    stored = STORED["scores"][key("breast-cancer", 200)][candidate][0]
    assert suggested_models.score("breast-cancer", 200, candidate, 0) == pytest.approx(stored, abs=0.01)
