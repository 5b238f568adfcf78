"""Compare models on the same records: each score with its 95 % interval, and its gain over the first model.

A gain is the difference of two models' scores on the same records, so what makes these records easy or hard affects
both. Gains of accuracy have the interval of Agresti and Min. Those of the AUC come from a paired bootstrap: records are
drawn with replacement, always with the same seed, and all models are scored on the drawn ones. The AUC of more than two
classes has an interval from the same bootstrap, of its logit: percentiles near 1 are too high. A log loss is a
mean over records, with Student's interval.

In a regression, a bootstrap of few records is too narrow. Gains have Student's interval of the differences of squared
errors, so R² and the error agree on whether a difference is clear. The scores themselves have an interval from a
jackknife: from the logarithms of the errors without each record.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.reporting.intervals import MIN_RECORDS, Z, auc_interval, mean_interval, paired_interval, wilson_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]
    # The score of one model, given how often each record was drawn; NaN if these records do not define it.
    WeightedScore = Callable[[Floats], float]

RESAMPLES, MIN_RESAMPLES = 1000, 200
# Draws of a record over all resamples: with many records, intervals are narrow, and fewer resamples are enough.
MAX_DRAWS = 10**8
SEED = 20210427
# More classes have no interval of their mean AUC: a bootstrap of it takes time in proportion.
MAX_AUC_CLASSES = 20

Estimate = dict[str, float | None]
"""A score, or a difference of two, under `value`; its interval is `low` to `high`, or None without one."""


def compare_classifiers(
    outputs: Mapping[str, Floats], target: Integers, *, probabilities: bool = True
) -> list[dict[str, Any]]:
    """Return accuracy, AUC and log loss of each model, and its gains over the first.

    Args:
        outputs: for each model, by its name, the probability of every class for every record.
        target: the class of every record.
        probabilities: false if the outputs are not meant as probabilities, as with class weights: then there is no log
            loss.

    Returns:
        For each model a dictionary for JSON: name, scores, gains (None for the first model). A score that these records
        do not define is left out. A gain is positive if a model is better, so that of the log loss is the first model's
        log loss minus its own.
    """
    correct = {name: each.argmax(axis=1) == target for name, each in outputs.items()}
    first = next(iter(correct.values()))
    found: list[dict[str, Any]] = []
    for name, hits in correct.items():
        accuracy = float(hits.mean())
        scores = {"accuracy": _estimate(accuracy, wilson_interval(accuracy, len(hits)))}
        better, worse = int((hits & ~first).sum()), int((first & ~hits).sum())
        gain = _estimate(accuracy - float(first.mean()), paired_interval(better, worse, len(hits)))
        found.append({"name": name, "scores": scores, "gains": {"accuracy": gain}})
    classes = np.unique(target)
    if len(classes) > 1:
        areas = {name: weighted_auc(each, target) for name, each in outputs.items()}
        drawn = _bootstrap(areas, len(target)) if len(classes) <= MAX_AUC_CLASSES else None
        for each in found:
            value = areas[each["name"]](np.ones(len(target)))
            interval = _logit_interval(value, drawn[each["name"]]) if drawn else None
            if next(iter(outputs.values())).shape[1] == 2:
                positives = int((target == 1).sum())
                interval = auc_interval(value, positives, len(target) - positives)
            each["scores"]["auc"] = _estimate(value, interval)
        _add_gains(found, drawn, "auc")
    if probabilities:
        losses = {name: _log_losses(each, target) for name, each in outputs.items()}
        for each in found:
            own = losses[each["name"]]
            each["scores"]["log_loss"] = _mean(own)
            each["gains"]["log_loss"] = _mean(next(iter(losses.values())) - own)
    return _without_own_gains(found)


def compare_regressions(outputs: Mapping[str, Floats], target: Floats) -> list[dict[str, Any]]:
    """Return R² and the root mean squared error of each model, and its gains over the first; as for classifiers.

    A gain is positive if a model is better, so that of the error is the first model's error minus its own.
    """
    squares = {name: np.square(each[:, 0] - target) for name, each in outputs.items()}
    first = next(iter(squares.values()))
    records, spread = len(target), np.square(target - target.mean())
    found: list[dict[str, Any]] = []
    for name, own in squares.items():
        each: dict[str, Any] = {"name": name, "scores": {}, "gains": {}}
        others = own.sum() - own  # without each record
        if np.ptp(target) and spread.sum():
            part = float(own.sum() / spread.sum())  # of the variance, which is not explained
            interval = _jackknife(part, others, spread.sum() - spread * records / (records - 1))
            each["scores"]["r2"] = _estimate(1 - part, interval and (1 - interval[1], 1 - interval[0]))
            each["gains"]["r2"] = _squares_gain(first, own, 1 / float(spread.mean()))
        error, first_error = math.sqrt(own.mean()), math.sqrt(first.mean())
        each["scores"]["rmse"] = _estimate(error, _jackknife(error, np.sqrt(others)))
        sum_of_errors = (error + first_error) or 1.0  # (a² - b²) / (a + b) = a - b
        each["gains"]["rmse"] = _squares_gain(first, own, 1 / sum_of_errors)
        found.append(each)
    return _without_own_gains(found)


def weighted_auc(outputs: Floats, target: Integers) -> WeightedScore:
    """Return a function for the AUC as in `cgd.tabular.metrics`, for many weights: the outputs are sorted once."""
    parts = []
    for each in [1] if outputs.shape[1] == 2 else np.unique(target).tolist():
        order = np.argsort(outputs[:, each], kind="stable")
        ordered = outputs[order, each]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))  # of equal outputs
        parts.append((order, (target[order] == each).astype(np.float64), starts))

    def score(weights: Floats) -> float:
        areas = [_area(weights[order], hits, starts) for order, hits, starts in parts]
        defined = [each for each in areas if each is not None]
        return float(np.mean(defined)) if defined else float("nan")

    return score


def _squares_gain(first: Floats, own: Floats, scale: float) -> Estimate:
    """Return the mean of the first model's squared errors minus our own, times a scale, with Student's interval."""
    return _mean((first - own) * scale)


def _log_losses(probabilities: Floats, target: Integers) -> Floats:
    """Return the log loss of each record; a probability of 0 counts as the smallest step from 1, as in scikit-learn."""
    own: Floats = probabilities[np.arange(len(target)), target]
    return -np.log(np.maximum(own, np.finfo(np.float64).eps))


def _mean(values: Floats) -> Estimate:
    """Return the mean of some records' values with Student's interval.

    There is none of too few records, or if all values are equal: it would look like certainty.
    """
    value = float(values.mean())
    if len(values) < MIN_RECORDS or not np.isfinite(values).all() or not np.ptp(values):
        return _estimate(value, None)
    return _estimate(value, mean_interval(value, float(values.std(ddof=1)), len(values)))


def _jackknife(value: float, others: Floats, scale: Floats | float = 1.0) -> tuple[float, float] | None:
    """Return the interval of a positive value from its values without each record, `others / scale`.

    Their logarithms are used, because errors of few records vary by factors; so a constant factor has no effect.
    Returns None if there are too few records, if a value is zero or undefined, or if all are equal.
    """
    records = len(others)
    with np.errstate(all="ignore"):
        logs = np.log(others / scale)
        if records < MIN_RECORDS or not np.isfinite(logs).all() or not np.ptp(logs):
            return None
        low, high = mean_interval(math.log(value), (records - 1) * float(logs.std(ddof=1)), records)
        interval = float(np.exp(low)), float(np.exp(high))
    return interval if math.isfinite(interval[1]) else None


def _area(weights: Floats, hits: Floats, starts: Integers) -> float | None:
    """Return the probability that a record of the class has a higher score than another one; half of it if equal."""
    positives = np.add.reduceat(weights * hits, starts)
    others = np.add.reduceat(weights * (1 - hits), starts)
    pairs = positives.sum() * others.sum()
    return float(positives @ (np.cumsum(others) - others / 2) / pairs) if pairs else None


def _bootstrap(measures: Mapping[str, WeightedScore], records: int) -> dict[str, Floats]:
    """Return the scores of all models on resamples of the records, the same ones for all models."""
    generator = np.random.default_rng(SEED)
    resamples = int(np.clip(MAX_DRAWS // records, MIN_RESAMPLES, RESAMPLES))
    drawn = {name: np.empty(resamples) for name in measures}
    for place in range(resamples):
        weights = np.bincount(generator.integers(records, size=records), minlength=records).astype(np.float64)
        for name, measure in measures.items():
            drawn[name][place] = measure(weights)
    return drawn


def _add_gains(found: list[dict[str, Any]], drawn: Mapping[str, Floats] | None, metric: str) -> None:
    first = found[0]
    for each in found:
        difference = each["scores"][metric]["value"] - first["scores"][metric]["value"]
        interval = _percentiles(drawn[each["name"]] - drawn[first["name"]]) if drawn else None
        each["gains"][metric] = _estimate(difference, interval)


def _percentiles(values: Floats) -> tuple[float, float] | None:
    """Return the middle 95 % of resampled scores; None if most are undefined, or all are equal."""
    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or not np.ptp(defined):
        return None
    low, high = np.percentile(defined, [2.5, 97.5]).tolist()
    return low, high


def _logit_interval(value: float, drawn: Floats) -> tuple[float, float] | None:
    """Return the interval of an AUC from the deviation of resampled ones, on the scale of log(AUC / (1 − AUC)).

    None of a perfect score, whose resamples are all equal, and if most are undefined.
    """
    defined = drawn[np.isfinite(drawn)]
    if 2 * len(defined) < len(drawn) or not np.ptp(defined) or not 0 < value < 1:
        return None
    factor = math.exp(-Z * float(defined.std(ddof=1)) / (value * (1 - value)))  # of the odds, at the lower end
    return value * factor / (value * factor + 1 - value), value / (value + (1 - value) * factor)


def _estimate(value: float, interval: tuple[float, float] | None) -> Estimate:
    low, high = (None, None) if interval is None else interval
    return {"value": value, "low": low, "high": high}


def _without_own_gains(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found[0]["gains"] = None
    return found
