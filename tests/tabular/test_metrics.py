from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from cgd.errors import InputError
from cgd.tabular.metrics import classification_scores, regression_scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMES = tuple("abcdefghij")


def predictions(records: int, classes: int, seed: int = 1) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return probabilities better than chance, and targets with every class."""
    generator = np.random.default_rng(seed)
    target = np.arange(records) % classes
    logits = generator.normal(size=(records, classes)) + 1.5 * np.eye(classes)[target]
    p = np.exp(logits)
    return p / p.sum(axis=1, keepdims=True), target


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_classification_agrees_with_scikit_learn(classes: int) -> None:
    p, target = predictions(500, classes)
    found = classification_scores(p, target, NAMES[:classes])
    predicted = p.argmax(axis=1)
    assert found["records"] == 500
    assert found["accuracy"] == metrics.accuracy_score(target, predicted)
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(target, predicted), rel=1e-12)
    auc = metrics.roc_auc_score(target, p[:, 1] if classes == 2 else p, multi_class="ovr")
    assert found["auc"] == pytest.approx(auc, rel=1e-12)
    assert found["log_loss"] == pytest.approx(metrics.log_loss(target, p), rel=1e-12)
    assert found["confusion"] == metrics.confusion_matrix(target, predicted).tolist()
    assert found["baseline_accuracy"] == np.bincount(target).max() / 500
    assert (found["roc"] is not None) == (classes == 2)
    assert json.loads(json.dumps(found)) == found


def test_roc_curve_is_thinned_with_almost_the_same_area() -> None:
    p, target = predictions(20_000, 2)
    found = classification_scores(p, target, ("no", "yes"))
    roc = found["roc"]
    assert 100 < len(roc["fpr"]) <= 200
    assert len(metrics.roc_curve(target, p[:, 1])[0]) > 1000  # the full curve is longer
    assert (roc["fpr"][0], roc["tpr"][0], roc["fpr"][-1], roc["tpr"][-1]) == (0, 0, 1, 1)
    # Neighbours are at most 2/199 apart along the curve (and one record), so what is cut off lies in triangles of that
    # length: less than half of 0.0101 in all.
    assert metrics.auc(roc["fpr"], roc["tpr"]) == pytest.approx(found["auc"], abs=0.0051)


@pytest.mark.parametrize("classes", [2, 3])
def test_calibration_compares_predicted_and_observed_fractions(classes: int) -> None:
    p, target = predictions(537, classes)
    found = classification_scores(p, target, NAMES[:classes])["calibration"]
    predicted, observed = (p[:, 1], target == 1) if classes == 2 else (p.max(axis=1), p.argmax(axis=1) == target)
    assert sorted({each["records"] for each in found["bins"]}) == [53, 54]
    assert len(found["bins"]) == 10
    assert sum(each["records"] * each["predicted"] for each in found["bins"]) == pytest.approx(predicted.sum())
    assert sum(each["records"] * each["observed"] for each in found["bins"]) == pytest.approx(observed.sum())
    assert [each["predicted"] for each in found["bins"]] == sorted(each["predicted"] for each in found["bins"])
    assert (found["predicted"], found["observed"]) == pytest.approx((predicted.mean(), observed.mean()))
    distances = [each["records"] * abs(each["predicted"] - each["observed"]) for each in found["bins"]]
    assert found["error"] == pytest.approx(sum(distances) / 537)
    brier = metrics.brier_score_loss(target, p[:, 1]) if classes == 2 else None
    assert found["brier"] == (None if brier is None else pytest.approx(brier))


def test_records_with_the_same_prediction_are_in_one_bin() -> None:
    """The file may be sorted by class: then a bin of a part of them would have one class only."""
    target = np.repeat([0, 1], [140, 60])
    p = np.tile([0.7, 0.3], (200, 1)) + 1e-8 * target[:, None]  # the last digits of single precision say nothing
    found = classification_scores(p, target, ("no", "yes"))["calibration"]
    assert [each["records"] for each in found["bins"]] == [200]
    assert found["error"] == pytest.approx(0, abs=1e-6)
    three = np.repeat([0.1, 0.5, 0.9], [100, 15, 85])
    hits = np.concatenate([np.repeat([0, 1], n) for n in ((90, 10), (7, 8), (8, 77))])
    found = classification_scores(np.column_stack([1 - three, three]), hits, ("no", "yes"))["calibration"]
    assert [(each["records"], each["predicted"]) for each in found["bins"]] == [
        (count, pytest.approx(mean)) for count, mean in ((100, 0.1), (15, 0.5), (85, 0.9))
    ]
    few = np.repeat([0.1, 0.9], [95, 5])  # too few for a bin of their own
    found = classification_scores(np.column_stack([1 - few, few]), few.round().astype(int), ("no", "yes"))
    assert [each["records"] for each in found["calibration"]["bins"]] == [100]


def test_few_records_have_few_bins_or_none() -> None:
    for records, bins in ((19, None), (20, 2), (46, 4), (300, 10)):
        found = classification_scores(*predictions(records, 2), ("no", "yes"))["calibration"]
        assert (found and len(found["bins"])) == bins


def test_thresholds_count_the_records_above() -> None:
    p, target = predictions(300, 2)
    p = p.round(2)  # some probabilities are equal to a threshold
    found = classification_scores(p, target, ("no", "yes"))
    normalised = p[:, 1] / p.sum(axis=1)
    for hundredth in range(101):
        above = normalised > hundredth / 100
        assert found["thresholds"]["true_positives"][hundredth] == np.sum(above & (target == 1))
        assert found["thresholds"]["false_positives"][hundredth] == np.sum(above & (target == 0))
    confusion = found["confusion"]
    assert found["thresholds"]["true_positives"][50] == confusion[1][1]
    assert found["thresholds"]["false_positives"][50] == confusion[0][1]
    assert classification_scores(*predictions(30, 3), NAMES[:3])["thresholds"] is None


def test_single_precision_probabilities_are_accepted() -> None:
    p, target = predictions(300, 3)
    found = classification_scores(p.astype(np.float32), target, NAMES[:3])
    assert found["log_loss"] == pytest.approx(metrics.log_loss(target, p), rel=1e-5)


def test_one_class_has_no_auc_and_no_roc_curve() -> None:
    found = classification_scores([[0.9, 0.1], [0.4, 0.6]], [0, 0], ("no", "yes"))
    assert (found["auc"], found["roc"]) == (None, None)
    assert (found["accuracy"], found["balanced_accuracy"], found["baseline_accuracy"]) == (0.5, 0.5, 1.0)
    assert found["confusion"] == [[1, 1], [0, 0]]


def test_one_record_can_be_scored() -> None:
    found = classification_scores([[0.2, 0.3, 0.5]], [1], NAMES[:3])
    assert (found["records"], found["accuracy"], found["auc"]) == (1, 0.0, None)
    assert found["log_loss"] == pytest.approx(-np.log(0.3))


def test_class_without_records_counts_only_in_the_confusion_matrix() -> None:
    p, target = predictions(200, 4)
    present = target < 2
    found = classification_scores(p[present], target[present], NAMES[:4])
    predicted = p[present].argmax(axis=1)
    assert {2, 3} & set(predicted.tolist())  # although no record has them
    assert np.shape(found["confusion"]) == (4, 4)
    assert np.sum(found["confusion"]) == present.sum()
    recalls = [np.mean(predicted[target[present] == each] == each) for each in (0, 1)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    aucs = [metrics.roc_auc_score(target[present] == each, p[present][:, each]) for each in (0, 1)]
    assert found["auc"] == pytest.approx(np.mean(aucs))


@pytest.mark.slow
@given(st.integers(2, 6), st.integers(1, 40), st.integers(0, 10_000))
def test_any_records_can_be_scored(classes: int, records: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.full(classes, 0.3), size=records)
    target = generator.integers(0, classes, size=records)
    found = classification_scores(p, target, NAMES[:classes])
    assert np.trace(found["confusion"]) == pytest.approx(found["accuracy"] * records)
    assert np.sum(found["confusion"], axis=1).max() == pytest.approx(found["baseline_accuracy"] * records)
    assert (found["auc"] is None) == (len(set(target.tolist())) == 1)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("p", "target", "classes", "message"),
    [
        ([[1.0]], [0], ("a",), "two or more"),
        (np.zeros((0, 2)), np.zeros(0, dtype=int), ("a", "b"), "no records"),
        ([[0.5, 0.5]], [0], ("a", "b", "c"), r"shape \(1, 2\)"),
        ([[0.5, np.nan]], [0], ("a", "b"), "not finite"),
        ([[-0.5, 1.5]], [0], ("a", "b"), "negative"),
        ([[0.0, 0.0]], [0], ("a", "b"), "zeros only"),
        ([[0.5, 0.5]], [2], ("a", "b"), "from 0 to 1"),
        ([[0.5, 0.5]], [0.0], ("a", "b"), "whole numbers"),
    ],
)
def test_invalid_classification_is_refused(p: object, target: object, classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        classification_scores(p, target, classes)  # type: ignore[arg-type]


def test_regression_agrees_with_scikit_learn() -> None:
    generator = np.random.default_rng(2)
    actual = generator.normal(50, 10, size=5000)
    predicted = actual + generator.normal(0, 3, size=5000)
    found = regression_scores(predicted, actual)
    assert found["records"] == 5000
    assert found["r2"] == metrics.r2_score(actual, predicted)
    assert found["rmse"] == metrics.root_mean_squared_error(actual, predicted)
    assert found["mae"] == metrics.mean_absolute_error(actual, predicted)
    assert len(found["actual"]) == len(found["predicted"]) == 1000
    assert set(zip(found["actual"], found["predicted"], strict=True)) < set(
        zip(actual.tolist(), predicted.tolist(), strict=True)
    )
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("actual", [[3.0], [3.0, 3.0]])
def test_r2_is_none_for_equal_values(actual: list[float]) -> None:
    found = regression_scores([4.0] * len(actual), actual)
    assert (found["r2"], found["rmse"], found["mae"]) == (None, 1.0, 1.0)
    assert found["actual"] == actual


@pytest.mark.parametrize(
    ("predicted", "actual", "message"),
    [([1.0], [1.0, 2.0], "1 predictions for 2"), ([], [], "at least one"), ([np.inf], [1.0], "not finite")],
)
def test_invalid_regression_is_refused(predicted: list[float], actual: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        regression_scores(predicted, actual)
