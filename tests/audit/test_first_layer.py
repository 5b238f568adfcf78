"""The privacy warning about ReLU units states what `results/first-layer.json` has, some of which is measured again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cgd.audit.attacks.records import EXACT, count_exact
from cgd.audit.view import Truth
from cgd.optim import privacy_warnings
from cgd.optim.privacy_warnings import FirstLayer, find_warnings
from support.pages import DOCS, ROOT, load_script

if TYPE_CHECKING:
    from collections.abc import Iterable

first_layer = load_script("first_layer", "benchmarks")
STORED: dict[str, list[dict[str, int]]] = json.loads(first_layer.FILE.read_text())
RELU = [name for name in first_layer.MODELS if name.startswith("relu")]
OTHERS = [name for name in first_layer.MODELS if name not in RELU]
SETTINGS = [(table, records) for table, sizes in first_layer.RECORDS.items() for records in sizes]


def draws(settings: Iterable[tuple[str, int]], models: Iterable[str]) -> list[dict[str, int]]:
    """All trainings of some tables, numbers of records and models."""
    return [each for setting in settings for model in models for each in STORED[first_layer.name(*setting, model)]]


def leaking(found: list[dict[str, int]]) -> int:
    """The number of trainings in which at least one record came out."""
    return sum(each["read"] > 0 for each in found)


def relu_figure() -> str:
    """The text of the warning, from the stored results."""
    adult = [each for each in SETTINGS if each[0] == "adult"]
    parts: list[str] = []
    for setting in (*adult, ("adult", 24_000)):
        found = draws([setting], ["relu 32"])
        trainings = f" of {len(found)} trainings" * (not parts) or f" of {len(found)}" * (len(found) != 10)
        parts.append(f"of {found[0]['honest']:,} in {leaking(found)}{trainings}")
    tables = [each for each in SETTINGS if each[0] != "adult"]
    most = max(each["read"] for each in draws(adult, ["relu 32"]))
    few, elsewhere, none = (
        f"in {leaking(found)} of {len(found)}"
        for found in (draws(adult, ["relu 4"]), draws(tables, RELU), draws(SETTINGS, OTHERS))
    )
    return (
        f"one of four members read records of the others: on UCI Adult with 32 units, some {', '.join(parts)}, and up "
        f"to {most} in one training; with 4 units {few}; on four other tables {elsewhere}; with tanh, GELU or sigmoid "
        f"units or no hidden layer {none}"
    )


def test_results_have_all_settings_and_seeds() -> None:
    names = {first_layer.name(table, records, model) for table, records, model, _ in first_layer.runs()}
    assert set(STORED) == names
    assert {len(draws([each], [model])) for each in SETTINGS for model in first_layer.MODELS} == {10}
    assert {each["inputs"] for each in draws(SETTINGS, RELU)} >= {11, 30, 33, 64, 99}


def test_figure_of_the_warning_is_that_of_the_results() -> None:
    assert relu_figure() == privacy_warnings.RELU_FIGURE
    [warning] = find_warnings(500, FirstLayer(30, 32))
    assert warning.figure == privacy_warnings.RELU_FIGURE


def test_no_number_of_units_or_records_that_was_measured_prevents_it() -> None:
    """So the warning does not depend on them; and the activations of its remedy read nothing in any training."""
    for model in RELU:
        assert leaking(draws(SETTINGS, [model])) > 0, model
    for records in (*first_layer.RECORDS["adult"], *first_layer.LARGE["adult"]):
        assert leaking(draws([("adult", records)], ["relu 32"])) > 0, records
    for model in OTHERS:
        assert leaking(draws(SETTINGS, [model])) == 0, model
    rarer = [leaking(draws(SETTINGS, [f"relu {units}"])) for units in (64, 32, 8, 4)]
    assert rarer == sorted(rarer, reverse=True)  # as the remedy states


def test_pages_have_the_figures() -> None:
    [row] = [
        line
        for line in (DOCS / "tables.md").read_text().splitlines()
        if line.startswith("| ReLU units in the first layer")
    ]
    assert privacy_warnings.RELU_FIGURE in row
    text = " ".join((DOCS / "threat-model.md").read_text().split())
    found = draws([("adult", 1600)], ["relu 32"])
    assert f"of {found[0]['honest']:,} records of UCI Adult at least one in {leaking(found)} of 10 trainings" in text
    assert "first-layer-results:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(("model", "reads"), [("relu 64", True), ("tanh 32", False), ("logistic", False)])
def test_training_is_measured_again(model: str, reads: bool) -> None:
    """The training on diabetes from which most records were read."""
    stored = STORED[first_layer.name("diabetes", 353, "relu 64")]
    seed = max(range(len(stored)), key=lambda each: stored[each]["read"])
    found = first_layer.measure("diabetes", 353, model, seed)
    assert (found["read"] > 0) == reads
    assert (found["honest"], found["inputs"]) == (stored[seed]["honest"], stored[seed]["inputs"])


@pytest.mark.parametrize(("error", "expected"), [(0.9 * EXACT, 2), (1.1 * EXACT, 1)])
def test_record_counts_if_every_feature_is_exact(error: float, expected: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    rows: Any = torch.cat([x, torch.ones(5, 1)], dim=1).double()
    rows = torch.stack([-3 * rows[0], rows[1] + rows[2], 2 * rows[3]])
    rows[2, 1] += 2 * error
    assert count_exact(rows, Truth({"ada": x}, {"ada": torch.zeros(5)}, {})) == expected
