"""Scores of a model on validation records: the `validation` part of a run's file.

The scores are computed by scikit-learn. A score that these records do not define is None: the AUC with only one class
among them, R² with a single record. A class without records counts in the confusion matrix and the log loss only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

MAX_ROC_POINTS = 200
MAX_SCATTER_POINTS = 1000
MIN_CALIBRATION_RECORDS = 20
MAX_BINS, MIN_BIN_RECORDS = 10, 10
EQUAL_DIGITS = 6  # predictions that differ less are equal: a network's outputs are in single precision


def classification_scores(probabilities: ArrayLike, target: ArrayLike, classes: Sequence[str]) -> dict[str, Any]:
    """Return the scores of a classification.

    With two classes, the AUC is that of the second. With more, it is the mean of one-versus-rest AUCs over the classes
    with records. The ROC curve exists for two classes only, with at most 200 points.

    Args:
        probabilities: a row for every record, a column for every class.
        target: the true class of every record, as its index in `classes`.
        classes: the names of the classes.

    Returns:
        A dictionary for JSON: records, accuracy, balanced_accuracy, auc, log_loss, classes, confusion (rows are true
        classes, columns predicted ones), roc, baseline_accuracy (of always predicting the most common class of these
        records), calibration, thresholds.

    Raises:
        InputError: the shapes do not fit, there are no records, or a value is invalid.
    """
    from sklearn import metrics

    p, y = _check_classification(probabilities, target, classes)
    labels, predicted = np.arange(len(classes)), p.argmax(axis=1)
    counts = np.bincount(y, minlength=len(classes))
    present = labels[counts > 0]
    several = len(present) > 1
    return {
        "records": len(y),
        "accuracy": float(metrics.accuracy_score(y, predicted)),
        "balanced_accuracy": float(
            metrics.recall_score(y, predicted, labels=present, average="macro", zero_division=0)
        ),
        "auc": auc(p, y) if several else None,
        "log_loss": float(metrics.log_loss(y, p, labels=labels)),
        "classes": list(classes),
        "confusion": metrics.confusion_matrix(y, predicted, labels=labels).tolist(),
        "roc": _roc(p[:, 1], y) if several and len(classes) == 2 else None,
        "baseline_accuracy": float(counts.max() / len(y)),
        "calibration": _calibration(p, y),
        "thresholds": _thresholds(p[:, 1], y) if len(classes) == 2 else None,
    }


def regression_scores(predicted: ArrayLike, actual: ArrayLike) -> dict[str, Any]:
    """Return the scores of a regression.

    Args:
        predicted: the model's value for every record.
        actual: the true value of every record.

    Returns:
        A dictionary for JSON: records, r2 (None if all actual values are the same), rmse, mae, and the pairs actual and
        predicted: of more than 1000 records, 1000 evenly spaced ones.

    Raises:
        InputError: the shapes do not fit, there are no records, or a value is not finite.
    """
    from sklearn import metrics

    p, y = _check_vector("predicted", predicted), _check_vector("actual", actual)
    if len(p) != len(y):
        raise InputError(f"there are {len(p)} predictions for {len(y)} records; pass one for each")
    sample = np.unique(np.linspace(0, len(y) - 1, MAX_SCATTER_POINTS).round().astype(int))
    return {
        "records": len(y),
        "r2": float(metrics.r2_score(y, p)) if np.ptp(y) > 0 else None,
        "rmse": float(metrics.root_mean_squared_error(y, p)),
        "mae": float(metrics.mean_absolute_error(y, p)),
        "actual": y[sample].tolist(),
        "predicted": p[sample].tolist(),
    }


def auc(probabilities: Floats, target: Integers) -> float:
    """Return the AUC of the second of two classes, or the mean of one-versus-rest AUCs over the classes with records.

    There must be records of two classes or more.
    """
    from sklearn.metrics import roc_auc_score

    if probabilities.shape[1] == 2:
        return float(roc_auc_score(target, probabilities[:, 1]))
    return float(np.mean([roc_auc_score(target == each, probabilities[:, each]) for each in np.unique(target)]))


def _check_classification(
    probabilities: ArrayLike, target: ArrayLike, classes: Sequence[str]
) -> tuple[Floats, Integers]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(target)
    if len(classes) < 2:
        raise InputError(f"there are {len(classes)} classes; a classification needs two or more")
    if not len(y):
        raise InputError("there are no records to score; leave the scores out without a validation split")
    if p.shape != (len(y), len(classes)) or y.ndim != 1:
        raise InputError(
            f"the probabilities have shape {p.shape}, for {len(y)} records and {len(classes)} classes; "
            "pass a row for each record and a column for each class"
        )
    if not np.isfinite(p).all() or (p < 0).any() or (p.sum(axis=1) <= 0).any():
        raise InputError("a probability is negative or not finite, or a row has zeros only; pass probabilities")
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= len(classes):
        raise InputError(f"the target is not the index of a class; pass whole numbers from 0 to {len(classes) - 1}")
    # Normalised again in double precision, because scikit-learn checks that the rows sum to one.
    return p / p.sum(axis=1, keepdims=True), y.astype(np.int64)


def _check_vector(name: str, values: ArrayLike) -> Floats:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or not len(vector):
        raise InputError(f"{name} has shape {vector.shape}; pass one value for each record, and at least one")
    if not np.isfinite(vector).all():
        raise InputError(f"{name} has a value that is not finite; check for a diverging loss or bad data")
    return vector


def _roc(p: Floats, y: Integers) -> dict[str, list[float]]:
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(y, p)
    # Evenly spaced along the curve from (0, 0) to (1, 1), not along the thresholds.
    sample = np.unique(np.searchsorted(fpr + tpr, np.linspace(0, 2, MAX_ROC_POINTS)))
    return {"fpr": fpr[sample].tolist(), "tpr": tpr[sample].tolist()}


def _calibration(p: Floats, y: Integers) -> dict[str, Any] | None:
    """Return mean predicted against observed fractions, in bins of about equally many records; None with few records.

    With two classes, they are those of the second class. With more, they are those of the predicted class: how probable
    it was, and how often it was correct. Records with the same prediction are in one bin: their order in the file,
    perhaps by class, says nothing.
    """
    if len(y) < MIN_CALIBRATION_RECORDS:
        return None
    binary = p.shape[1] == 2
    predicted, observed = (p[:, 1], y == 1) if binary else (p.max(axis=1), y == p.argmax(axis=1))
    bins = _bins(predicted.round(EQUAL_DIGITS), min(MAX_BINS, len(y) // MIN_BIN_RECORDS))
    means = [(len(each), float(predicted[each].mean()), float(observed[each].mean())) for each in bins]
    return {
        "bins": [dict(zip(("records", "predicted", "observed"), each, strict=True)) for each in means],
        "predicted": float(predicted.mean()),
        "observed": float(observed.mean()),
        "error": sum(count * abs(mean - part) for count, mean, part in means) / len(y),
        "brier": float(np.square(predicted - observed).mean()) if binary else None,
    }


def _bins(values: Floats, number: int) -> list[Integers]:
    """Divide the places of values into parts of about equal size, in the order of the values; equal ones stay together.

    No part is smaller than `MIN_BIN_RECORDS`, so there may be fewer.
    """
    order = np.argsort(values, kind="stable")
    ordered, cuts = values[order], [0]
    for end in np.cumsum([len(each) for each in np.array_split(order, number)])[:-1]:
        start, stop = (int(np.searchsorted(ordered, ordered[end - 1], side)) for side in ("left", "right"))
        cut = stop if stop - end <= end - start else start
        if min(cut - cuts[-1], len(values) - cut) >= MIN_BIN_RECORDS:
            cuts.append(cut)
    return np.split(order, cuts[1:])


def _thresholds(p: Floats, y: Integers) -> dict[str, list[int]]:
    """Return how many records of each of two classes are above each hundredth, from 0.00 to 1.00."""
    hundredths = np.arange(101) / 100
    above = {}
    for name, each in (("true_positives", 1), ("false_positives", 0)):
        ordered = np.sort(p[y == each])
        above[name] = (len(ordered) - np.searchsorted(ordered, hundredths, side="right")).tolist()
    return above
