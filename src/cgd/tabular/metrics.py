"""How well a model does on records that were kept back: the `validation` part of a run's file.

The figures are scikit-learn's. What cannot be said from these records is None: a classification with one class among
them has no AUC, and a regression on one record has no R². A class that no record has counts in nothing but the
confusion matrix and the log loss.
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


def classification_scores(probabilities: ArrayLike, target: ArrayLike, classes: Sequence[str]) -> dict[str, Any]:
    """Scores of a classification.

    The AUC is that of the second class if there are two. If there are more it is the mean, over the classes that some
    record has, of that class against the rest. The ROC curve is for two classes, with at most 200 points.

    Args:
        probabilities: for every record (rows) and class (columns).
        target: the right class of every record, as its number in `classes`, from 0.
        classes: their names.

    Returns:
        What can be written as JSON: records, accuracy, balanced_accuracy, auc, log_loss, classes, confusion (rows are
        right classes, columns predicted ones), roc, baseline_accuracy (of always saying the class that is commonest
        among these records).

    Raises:
        InputError: the shapes do not fit, there are no records, or a value cannot be.
    """
    from sklearn import metrics

    p, y = _classified(probabilities, target, classes)
    numbers, said = np.arange(len(classes)), p.argmax(axis=1)
    counts = np.bincount(y, minlength=len(classes))
    present = numbers[counts > 0]
    varied = len(present) > 1
    return {
        "records": len(y),
        "accuracy": float(metrics.accuracy_score(y, said)),
        "balanced_accuracy": float(metrics.recall_score(y, said, labels=present, average="macro", zero_division=0)),
        "auc": _auc(p, y, present) if varied else None,
        "log_loss": float(metrics.log_loss(y, p, labels=numbers)),
        "classes": list(classes),
        "confusion": metrics.confusion_matrix(y, said, labels=numbers).tolist(),
        "roc": _roc(p[:, 1], y) if varied and len(classes) == 2 else None,
        "baseline_accuracy": float(counts.max() / len(y)),
    }


def regression_scores(predicted: ArrayLike, actual: ArrayLike) -> dict[str, Any]:
    """Scores of a regression.

    Args:
        predicted: what the model says of every record.
        actual: what is true.

    Returns:
        What can be written as JSON: records, r2 (None if all actual values are the same), rmse, mae, and the pairs
        themselves, predicted and actual: of more than 1000 records, 1000 at equal distances.

    Raises:
        InputError: the shapes do not fit, there are no records, or a value is not finite.
    """
    from sklearn import metrics

    said, true = _vector("predicted", predicted), _vector("actual", actual)
    if len(said) != len(true):
        raise InputError(f"there are {len(said)} predictions of {len(true)} records; pass one for each")
    shown = np.unique(np.linspace(0, len(true) - 1, MAX_SCATTER_POINTS).round().astype(int))
    return {
        "records": len(true),
        "r2": float(metrics.r2_score(true, said)) if np.ptp(true) > 0 else None,
        "rmse": float(metrics.root_mean_squared_error(true, said)),
        "mae": float(metrics.mean_absolute_error(true, said)),
        "actual": true[shown].tolist(),
        "predicted": said[shown].tolist(),
    }


def _classified(probabilities: ArrayLike, target: ArrayLike, classes: Sequence[str]) -> tuple[Floats, Integers]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(target)
    if len(classes) < 2:
        raise InputError(f"there are {len(classes)} classes; two or more are needed to tell apart")
    if not len(y):
        raise InputError("there are no records to score; leave the scores out if none were kept back")
    if p.shape != (len(y), len(classes)) or y.ndim != 1:
        raise InputError(
            f"the probabilities have shape {p.shape}, for {len(y)} records and {len(classes)} classes; "
            "pass a row for each record and a column for each class"
        )
    if not np.isfinite(p).all() or (p < 0).any() or (p.sum(axis=1) <= 0).any():
        raise InputError("a probability is negative or not finite, or a row has zeros only; pass probabilities")
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= len(classes):
        raise InputError(f"the target is no number of a class; pass whole numbers from 0 to {len(classes) - 1}")
    # Single precision sums to one up to its own rounding; scikit-learn looks more closely.
    return p / p.sum(axis=1, keepdims=True), y.astype(np.int64)


def _vector(name: str, values: ArrayLike) -> Floats:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or not len(vector):
        raise InputError(f"{name} has shape {vector.shape}; pass one value for each record, and at least one")
    if not np.isfinite(vector).all():
        raise InputError(f"{name} has a value that is not finite; look for a diverging loss or bad data")
    return vector


def _auc(p: Floats, y: Integers, present: Integers) -> float:
    from sklearn.metrics import roc_auc_score

    if p.shape[1] == 2:
        return float(roc_auc_score(y, p[:, 1]))
    return float(np.mean([roc_auc_score(y == each, p[:, each]) for each in present]))


def _roc(p: Floats, y: Integers) -> dict[str, list[float]]:
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(y, p)
    # At equal distances along the curve, from (0, 0) to (1, 1), not along the thresholds.
    kept = np.unique(np.searchsorted(fpr + tpr, np.linspace(0, 2, MAX_ROC_POINTS)))
    return {"fpr": fpr[kept].tolist(), "tpr": tpr[kept].tolist()}
