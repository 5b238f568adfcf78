"""The privacy warning about leverage states the curve of `results/leverage.json`, which is measured again here."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from cgd.audit.attacks.membership import MIN_AUC
from cgd.optim import privacy_warnings
from cgd.optim.privacy_warnings import FirstLayer

if TYPE_CHECKING:
    from types import ModuleType


def load_benchmark(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses
    spec.loader.exec_module(module)
    return module


leverage = load_benchmark("leverage")
SETTINGS = {each.name: each for each in leverage.SETTINGS}


@dataclass(frozen=True)
class Point:
    """A point of the curve: the mean AUC and its standard error."""

    per_input: float
    auc: float
    error: float
    strangers_auc: float
    strangers_error: float
    seeds: int


def to_point(stored: dict[str, Any]) -> Point:
    names = ("per_input", "auc", "standard_error", "strangers_auc", "strangers_standard_error", "seeds")
    return Point(*(stored[name] for name in names))


CURVES = {
    each["setting"]: [to_point(point) for point in each["points"]] for each in json.loads(leverage.FILE.read_text())
}
POINTS = [(setting, point) for setting, points in CURVES.items() for point in points]


def at(setting: str, per_input: float) -> Point:
    """The point nearest to a number of honest records for each input."""
    return min(CURVES[setting], key=lambda point: abs(point.per_input - per_input))


def test_curve_has_all_settings_and_enough_seeds() -> None:
    assert set(CURVES) == set(SETTINGS)
    assert all(point.seeds >= 20 for _, point in POINTS)
    assert max(point.per_input for _, point in POINTS) == 24


@pytest.mark.parametrize(
    ("setting", "figure"),
    [
        ("tumours", privacy_warnings.LEVERAGE_FIGURE),
        ("tumours, linear model", privacy_warnings.LINEAR_LEVERAGE_FIGURE),
    ],
)
def test_figures_of_the_warning_are_those_of_the_curve(setting: str, figure: str) -> None:
    points = {per_input: at(setting, per_input) for per_input in (1.5, 3, 6, 12)}
    assert all(abs(point.per_input - per_input) < 0.05 for per_input, point in points.items())
    first, *others = (f"{point.auc:.2f} with {per_input:g}" for per_input, point in points.items())
    text = ", ".join([f"mean AUC {first} honest records for each input", *others])
    text += f", standard errors up to {max(point.error for point in points.values()):.3f}"
    if setting == "tumours":
        few, many = at("normal", 8), at("normal", 24)
        text += f"; on normally distributed records {few.auc:.2f} with 8 and still {many.auc:.2f} with 24"
        assert f"{few.error:.3f}" == f"{many.error:.3f}"
        text += f", standard error {many.error:.3f}"
    else:
        text += f", after {SETTINGS[setting].steps} steps of a linear model with two outputs"
    assert text == figure


def test_warning_states_the_figures() -> None:
    network, linear = FirstLayer(30, 32, relu=False), FirstLayer.from_model(nn.Sequential(nn.Linear(30, 2)))
    for layer, figure in (
        (network, privacy_warnings.LEVERAGE_FIGURE),
        (linear, privacy_warnings.LINEAR_LEVERAGE_FIGURE),
    ):
        [warning] = privacy_warnings.find_warnings(40, layer)
        assert (warning.kind, warning.figure) == ("leverage", figure)
        assert "at least 124 records" in warning.remedy
        assert "reduces the advantage, and does not remove it" in warning.remedy
        assert privacy_warnings.find_warnings(124, layer) == ()


def test_remedy_is_the_audits_threshold_of_success() -> None:
    """With so many records of each of two honest participants, no setting reaches an AUC of 0.6; with 3, one does."""
    enough = 2 * privacy_warnings.MIN_RECORDS_PER_INPUT
    for setting in CURVES:
        point = at(setting, enough)
        assert point.per_input == pytest.approx(enough, abs=0.05)
        assert point.auc + 3 * point.error < MIN_AUC, setting
    fewer = at("normal", enough - 2)
    assert fewer.per_input == pytest.approx(enough - 2, abs=0.05)
    assert fewer.auc - 3 * fewer.error > MIN_AUC


def test_advantage_is_above_chance_at_every_size_and_strangers_are_not() -> None:
    """Except the last point of the linear model, with 33 strangers, which is 2.9 standard errors above chance."""
    undecided = [(setting, point.per_input) for setting, point in POINTS if (point.auc - 0.5) / point.error < 3]
    assert undecided == [("tumours, linear model", 16.0)]
    # One of 38 points is beyond 4 standard errors by chance once in 400 times.
    assert all(abs(point.strangers_auc - 0.5) < 4 * point.strangers_error for _, point in POINTS)


def test_advantage_about_halves_when_records_double() -> None:
    for setting in ("tumours", "digits", "normal"):
        for per_input in (4, 6, 8):
            few, many = at(setting, per_input), at(setting, 2 * per_input)
            ratio = (many.auc - 0.5) / (few.auc - 0.5)
            error = (many.error**2 + (ratio * few.error) ** 2) ** 0.5 / (few.auc - 0.5)
            assert abs(ratio - 0.5) < 0.08 + error, (setting, per_input, ratio)


def test_threat_model_has_the_figures_of_the_curve() -> None:
    page = (Path(__file__).parents[2] / "docs" / "threat-model.md").read_text()
    for setting, per_input in (("tumours", 6), ("digits", 24), ("normal", 24)):
        point = at(setting, per_input)
        assert f"{point.auc:.3f} ± {point.error:.3f}" in page, setting


@pytest.mark.parametrize(("setting", "per_input"), [("tumours", 6), ("digits", 6), ("normal", 24)])
def test_point_of_the_curve_is_measured_again(setting: str, per_input: float) -> None:
    """With other seeds, within 4 standard errors of the difference: a false alarm once in 16,000 times."""
    stored = at(setting, per_input)
    measured = leverage.point(SETTINGS[setting], per_input, range(1000, 1020))
    assert measured is not None
    again = to_point(measured)
    assert abs(again.auc - stored.auc) < 4 * (again.error**2 + stored.error**2) ** 0.5
    assert again.auc - 0.5 > 3 * again.error
