"""Comparisons of models: scores agree with scikit-learn, intervals with a bootstrap of repeated records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn import metrics

from cgd.tabular import comparison
from cgd.tabular.comparison import (
    compare_classifiers,
    compare_regressions,
    weighted_auc,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def outputs(target: NDArray[np.int64], classes: int, skill: float, seed: int) -> NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    p = np.exp(generator.normal(size=(len(target), classes)) + skill * np.eye(classes)[target])
    rounded: NDArray[np.float64] = (p / p.sum(axis=1, keepdims=True)).round(2)  # some outputs are equal
    return rounded


@pytest.mark.parametrize("classes", [2, 3])
def test_weighted_scores_are_those_of_scikit_learn(classes: int) -> None:
    generator = np.random.default_rng(1)
    target = np.arange(200) % classes
    p = outputs(target, classes, 1.0, 2)
    weights = generator.integers(0, 3, 200).astype(np.float64)
    found = weighted_auc(p, target)(weights)
    areas = [
        metrics.roc_auc_score(target == each, p[:, each], sample_weight=weights)
        for each in ([1] if classes == 2 else range(classes))
    ]
    assert found == pytest.approx(np.mean(areas), rel=1e-12)


def test_log_loss_is_that_of_scikit_learn_and_its_gain_is_what_is_saved() -> None:
    target = np.arange(400) % 3
    models = {name: outputs(target, 3, skill, 3) for name, skill in (("alone", 0.5), ("together", 2.0))}
    normalised = {name: each / each.sum(axis=1, keepdims=True) for name, each in models.items()}
    alone, together = compare_classifiers(normalised, target)
    losses = [metrics.log_loss(target, each) for each in normalised.values()]
    scores = [each["scores"]["log_loss"] for each in (alone, together)]
    assert [each["value"] for each in scores] == pytest.approx(losses, rel=1e-12)
    assert together["gains"]["log_loss"]["value"] == pytest.approx(losses[0] - losses[1])
    assert 0 < together["gains"]["log_loss"]["low"] < losses[0] - losses[1] < together["gains"]["log_loss"]["high"]
    for each in compare_classifiers(normalised, target, probabilities=False):
        assert "log_loss" not in each["scores"]


def test_drawn_records_that_do_not_define_a_score_give_nan() -> None:
    target = np.array([0, 0, 1])
    score = weighted_auc(outputs(target, 2, 1.0, 1), target)
    assert np.isnan(score(np.array([1.0, 2.0, 0.0])))


def test_better_model_has_a_gain_whose_interval_excludes_zero() -> None:
    target = np.arange(1000) % 2
    models = {name: outputs(target, 2, skill, 3) for name, skill in (("alone", 0.5), ("together", 2.0))}
    alone, together = compare_classifiers(models, target)
    assert (alone["name"], alone["gains"]) == ("alone", None)
    for name in ("accuracy", "auc"):
        gain = together["gains"][name]
        assert gain["value"] == pytest.approx(together["scores"][name]["value"] - alone["scores"][name]["value"])
        assert 0 < gain["low"] < gain["value"] < gain["high"]
        for each in (alone, together):
            score = each["scores"][name]
            assert score["low"] < score["value"] < score["high"]
    assert together["scores"]["auc"]["value"] == pytest.approx(metrics.roc_auc_score(target, models["together"][:, 1]))
    assert json.loads(json.dumps([alone, together], allow_nan=False)) == [alone, together]
    assert compare_classifiers(models, target) == [alone, together]  # the same resamples


def test_gain_of_equal_models_contains_zero_and_is_narrower_than_the_scores() -> None:
    """Both models are scored on the same records, so what makes these easy or hard cancels."""
    target = np.arange(400) % 2
    p = outputs(target, 2, 1.0, 3)
    near = (p + 0.02 * outputs(target, 2, 0.0, 4)) / 1.02
    alone, together = compare_classifiers({"alone": p, "together": near}, target)
    gain, score = together["gains"]["auc"], alone["scores"]["auc"]
    assert gain["low"] <= 0 <= gain["high"]
    assert gain["high"] - gain["low"] < (score["high"] - score["low"]) / 4


def test_interval_is_that_of_a_bootstrap_of_repeated_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RESAMPLES", 200)
    target = np.arange(60) % 2
    models = {name: outputs(target, 2, skill, seed) for name, skill, seed in (("alone", 0.5, 3), ("b", 1.0, 4))}
    _, found = compare_classifiers(models, target)
    generator = np.random.default_rng(comparison.SEED)
    gains = []
    for _ in range(200):
        drawn = generator.integers(60, size=60)
        scores = [metrics.roc_auc_score(target[drawn], each[drawn, 1]) for each in models.values()]
        gains.append(scores[1] - scores[0])
    expected = np.percentile(gains, [2.5, 97.5])
    assert [found["gains"]["auc"][end] for end in ("low", "high")] == pytest.approx(expected, rel=1e-9)


def regressions(target: NDArray[np.float64], spreads: tuple[float, float], seed: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    models = {
        name: (target + spread * generator.normal(size=len(target)))[:, None]
        for name, spread in zip(("alone", "together"), spreads, strict=True)
    }
    found = compare_regressions(models, target)
    for each in found:
        predicted = models[each["name"]][:, 0]
        assert each["scores"]["r2"]["value"] == pytest.approx(metrics.r2_score(target, predicted))
        assert each["scores"]["rmse"]["value"] == pytest.approx(metrics.root_mean_squared_error(target, predicted))
    return found


@pytest.mark.parametrize("records", [10, *(pytest.param(each, marks=pytest.mark.slow) for each in (20, 40))])
def test_intervals_of_few_records_are_wide_enough(records: int) -> None:
    """A bootstrap of 10 records covers the error in 84 %, and calls equal models different in 14 %."""
    covered, unclear = {"r2": 0, "rmse": 0}, {"r2": 0, "rmse": 0}
    repeats = 400
    for seed in range(repeats):
        _, found = regressions(np.random.default_rng(10_000 + seed).normal(size=records), (1.0, 1.0), seed)
        for metric, expected in (("r2", 0.0), ("rmse", 1.0)):
            score, gain = found["scores"][metric], found["gains"][metric]
            covered[metric] += score["low"] <= expected <= score["high"]
            unclear[metric] += gain["low"] <= 0 <= gain["high"]
    assert min(covered.values()) >= 0.92 * repeats
    assert min(unclear.values()) >= 0.94 * repeats
    assert unclear["r2"] == unclear["rmse"]  # the same differences


def test_intervals_of_many_records_are_those_of_a_bootstrap() -> None:
    target = np.random.default_rng(1).normal(size=2000)
    alone, together = regressions(target, (1.0, 0.7), 2)
    generator = np.random.default_rng(2)
    models = [target + spread * generator.normal(size=2000) for spread in (1.0, 0.7)]
    draws = [generator.integers(2000, size=2000) for _ in range(1000)]
    kinds = {"r2": (metrics.r2_score, 1), "rmse": (metrics.root_mean_squared_error, -1)}
    for metric, (score, sign) in kinds.items():
        first, second = (np.array([score(target[each], model[each]) for each in draws]) for model in models)
        for estimate, drawn in (
            (alone["scores"][metric], first),
            (together["scores"][metric], second),
            (together["gains"][metric], sign * (second - first)),
        ):
            low, high = np.percentile(drawn, [2.5, 97.5])
            assert estimate["low"] == pytest.approx(low, abs=0.15 * (high - low))
            assert estimate["high"] == pytest.approx(high, abs=0.15 * (high - low))


def test_regression_of_very_few_records_or_without_errors_has_no_interval() -> None:
    for target, noise in ((np.array([1.0, 2.0, 4.0, 7.0]), 1.0), (np.arange(10.0), 0.0)):
        for each in regressions(target, (noise, noise), 1):
            estimates = [*each["scores"].values(), *(each["gains"] or {}).values()]
            assert all((value["low"], value["high"]) == (None, None) for value in estimates)


def test_very_different_errors_give_finite_numbers() -> None:
    """As large as a network's outputs can be, in 32 bits; and an error of a single record."""
    target = np.arange(10.0)
    one = target + 1e-9 * (target == 3)
    found = compare_regressions({"alone": one[:, None], "together": (target * 3e37)[:, None]}, target)
    json.dumps(found, allow_nan=False)


def test_gain_of_an_error_is_positive_if_the_error_is_smaller() -> None:
    actual = np.linspace(0, 10, 50)
    noise = np.random.default_rng(1).normal(size=50)
    alone, together = compare_regressions(
        {"alone": (actual + 2 * noise)[:, None], "together": (actual + noise)[:, None]}, actual
    )
    assert together["gains"]["rmse"]["value"] == pytest.approx(together["scores"]["rmse"]["value"])
    assert together["gains"]["rmse"]["low"] > 0
    assert together["gains"]["r2"]["low"] > 0
    assert alone["scores"]["r2"]["value"] == pytest.approx(metrics.r2_score(actual, actual + 2 * noise))


@pytest.mark.slow
def test_interval_of_a_high_auc_of_three_classes_covers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 tables, it should miss 10. It misses 6, and percentiles of the resamples missed 27."""
    monkeypatch.setattr(comparison, "RESAMPLES", 300)
    classes, skill, missed = 3, 2.5, 0

    def drawn(records: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        generator = np.random.default_rng(seed)
        target = generator.integers(classes, size=records)
        p = np.exp(generator.normal(size=(records, classes)) + skill * np.eye(classes)[target])
        return p / p.sum(axis=1, keepdims=True), target

    many, target = drawn(200_000, 0)
    truth = weighted_auc(many, target)(np.ones(len(target)))
    assert 0.98 < truth < 0.995
    for seed in range(1, 201):
        p, target = drawn(60, seed)
        (found,) = compare_classifiers({"alone": p}, target)
        low, high = found["scores"]["auc"]["low"], found["scores"]["auc"]["high"]
        missed += low is not None and not low <= truth <= high
        assert low is None or 0 < low < found["scores"]["auc"]["value"] < high < 1
    assert missed <= 15


def test_perfect_models_have_no_interval_of_their_gain_in_auc() -> None:
    """A bootstrap of them has no width, which would look like certainty."""
    target = np.array([0, 1, 1, 1, 1])
    p = np.stack([0.9 - 0.8 * target, 0.1 + 0.8 * target], axis=1)
    alone, together = compare_classifiers({"alone": p, "together": p}, target)
    assert together["gains"]["auc"] == {"value": 0.0, "low": None, "high": None}
    assert alone["scores"]["auc"]["low"] < 0.7
    assert together["gains"]["accuracy"]["low"] < -0.1


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (np.zeros(6, dtype=np.int64), {"accuracy", "log_loss"}),
        (np.arange(6) % 3, {"accuracy", "auc", "log_loss"}),
    ],
)
def test_score_that_the_records_do_not_define_is_left_out(target: Any, names: set[str]) -> None:
    p = outputs(target, 3, 1.0, 1)
    for each in compare_classifiers({"alone": p, "together": p}, target):
        assert set(each["scores"]) == names
    alone, _ = compare_regressions({"alone": np.ones((4, 1)), "together": np.ones((4, 1))}, np.full(4, 2.0))
    assert set(alone["scores"]) == {"rmse"}
    tiny = np.linspace(0, 1e-200, 6)  # its squares are zero
    alone, _ = compare_regressions({"alone": np.ones((6, 1)), "together": np.zeros((6, 1))}, tiny)
    assert set(alone["scores"]) == {"rmse"}


def test_many_classes_have_no_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_bootstrap", lambda *_: pytest.fail("it would take long"))
    target = np.arange(60) % 30
    p = outputs(target, 30, 1.0, 1)
    _, together = compare_classifiers({"alone": p, "together": p}, target)
    assert together["gains"]["auc"] == {"value": 0.0, "low": None, "high": None}
