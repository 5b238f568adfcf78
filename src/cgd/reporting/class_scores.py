"""Remarks about the scores of classes: few records, calibration, and the results at several thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.reporting.charts import shorten
from cgd.reporting.html import decimals
from cgd.reporting.intervals import auc_interval
from cgd.reporting.run_scores import ClassificationScores

if TYPE_CHECKING:
    from cgd.reporting.run_file import AnyRun
    from cgd.reporting.run_scores import Calibration

MIN_CLASS_RECORDS = 10
"""With fewer records of a class, scores that rest on it get a remark."""
DEFAULT_THRESHOLD = 0.5
SHOWN_THRESHOLDS = (10, 20, 30, 40, 50, 60, 70, 80, 90)


@dataclass(frozen=True)
class ThresholdRow:
    """The result of predicting the second class above a threshold; a fraction of no records is None."""

    threshold: float
    predicted: int
    sensitivity: float | None
    specificity: float | None
    ppv: float | None
    npv: float | None


def rare_classes(scores: ClassificationScores) -> list[tuple[str, int]]:
    """Return the classes with a few validation records, but at least one, and their numbers."""
    return [(name, count) for name, count in _class_counts(scores) if 0 < count < MIN_CLASS_RECORDS]


def describe_lack(scores: ClassificationScores) -> str:
    """Return why the validation records cannot decide which model is better; empty if they can.

    Records of one class only do not show whether a model tells it from another one: the AUC is undefined, and a model
    that always predicts this class has the lowest loss.
    """
    counts, rare = _class_counts(scores), rare_classes(scores)
    present = [(name, count) for name, count in counts if count]
    if len(present) > 1 and not rare:
        return ""
    shown = counts if len(counts) == 2 else present if len(present) < 2 else rare[:3]
    texts = [f"{count:,} of {shorten(name)}" for name, count in shown]
    if len(present) > 1:
        texts += [f"few of {len(rare) - 3} others"] if len(shown) < len(rare) else []
        needed = f"at least {MIN_CLASS_RECORDS} of each class are needed"
    else:
        texts += [f"0 of {len(counts) - len(shown)} others"] if len(shown) < len(counts) else []
        needed = "records of two classes are needed"
    listed = f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else "".join(texts)
    return f"there are {listed}; {needed}"


def _class_counts(scores: ClassificationScores) -> list[tuple[str, int]]:
    return [(name, sum(row)) for name, row in zip(scores.classes, scores.confusion, strict=True)]


def describe_rare_classes(scores: ClassificationScores) -> str:
    """Return a remark if an AUC rests on a few records of a class; empty otherwise."""
    rare = rare_classes(scores)
    if scores.auc is None or not rare:
        return ""
    counts = ", ".join(f"{shorten(name)} ({count})" for name, count in rare[:3])
    more = f" and of {len(rare) - 3} more classes" if len(rare) > 3 else ""
    return (
        f"There are few validation records of {counts}{more}. The AUC, the balanced accuracy and what is stated about "
        f"{'this class' if len(rare) == 1 else 'these classes'} rest on them."
    )


def describe_auc_interval(scores: ClassificationScores) -> str:
    """Return the interval of the AUC of two classes; empty without one."""
    counts = [sum(row) for row in scores.confusion]
    if scores.auc is None or len(counts) != 2 or min(counts) < 1 or not 0 <= scores.auc <= 1:
        return ""
    low, high = auc_interval(scores.auc, counts[1], counts[0])
    return f"95 % interval {decimals(low)} to {decimals(high)}"


def describe_calibration(scores: ClassificationScores, *, balanced: bool) -> list[str]:
    """Return sentences about predicted probabilities and observed fractions."""
    found: Calibration | None = scores.calibration
    if found is None:
        return []
    if len(scores.classes) == 2:
        name = shorten(scores.classes[1])
        first = f"The mean probability of {name} is {decimals(found.predicted)}; {decimals(found.observed)} are {name}."
    else:
        first = (
            f"The predicted class has a mean probability of {decimals(found.predicted)}; it is right in "
            f"{decimals(found.observed)} of the records."
        )
    second = (
        f"Over the points, the two differ by {decimals(found.error)} on average (expected calibration error; by chance "
        "it is above 0, the more so with few records)."
    )
    sentences = [first, second]
    if found.brier is not None:
        sentences.append(
            f"The Brier score, the mean squared difference of probability and outcome, is {decimals(found.brier)}; "
            f"always predicting the observed fraction gives {decimals(found.observed * (1 - found.observed))}."
        )
    if balanced:
        sentences.append(
            "Class weights are balanced: the probabilities are those of a population in which all classes are equally "
            "frequent, so the points are not expected on the line."
        )
    return sentences


def threshold_rows(scores: ClassificationScores, chosen: int) -> list[ThresholdRow]:
    """Return the results at several thresholds, and at a chosen one in hundredths; none without two classes."""
    found = scores.thresholds
    if found is None or len(scores.classes) != 2:
        return []
    negatives, positives = (sum(row) for row in scores.confusion)
    rows = []
    for hundredth in sorted({*SHOWN_THRESHOLDS, chosen}):
        hits, alarms = found.true_positives[hundredth], found.false_positives[hundredth]
        predicted, rest = hits + alarms, positives + negatives - hits - alarms
        rows.append(
            ThresholdRow(
                hundredth / 100,
                predicted,
                hits / positives if positives else None,
                (negatives - alarms) / negatives if negatives else None,
                hits / predicted if predicted else None,
                (negatives - alarms) / rest if rest else None,
            )
        )
    return rows


def confusion_at(scores: ClassificationScores, hundredth: int) -> list[list[int]]:
    """Return the confusion matrix of two classes at a threshold in hundredths."""
    if scores.thresholds is None or hundredth == round(100 * DEFAULT_THRESHOLD):
        return scores.confusion
    negatives, positives = (sum(row) for row in scores.confusion)
    hits, alarms = scores.thresholds.true_positives[hundredth], scores.thresholds.false_positives[hundredth]
    return [[negatives - alarms, alarms], [positives - hits, hits]]


def check_threshold(run: AnyRun, threshold: float) -> int:
    """Return a threshold in hundredths.

    Raises:
        InputError: it is not a hundredth between 0 and 1, or the run has no numbers for thresholds.
    """
    hundredth = round(100 * threshold) if 0 < threshold < 1 else 0
    if not 1 <= hundredth <= 99 or abs(hundredth - 100 * threshold) > 1e-9:
        raise InputError(f"the threshold is {threshold:g}; it is a probability from 0.01 to 0.99 with two decimals")
    scores = run.validation
    if threshold != DEFAULT_THRESHOLD and (not isinstance(scores, ClassificationScores) or scores.thresholds is None):
        raise InputError(
            f"this run has no results at the threshold {threshold:g}: they exist for two classes, with validation "
            "records, and for runs of this version of cgd; omit --threshold"
        )
    return hundredth
