"""Tables of scores with intervals: alone and together, subgroups; and of what a model depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgd.reporting.charts import interval_axis
from cgd.reporting.class_scores import MIN_CLASS_RECORDS, describe_lack
from cgd.reporting.html import decimals, figure
from cgd.reporting.run_scores import ClassificationScores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cgd.reporting.charts import Axis
    from cgd.reporting.run_file import AnyRun
    from cgd.reporting.run_scores import ComparedModel, Estimate, Subgroup

MAX_ROWS = 15
UNIT = (0.0, 1.0)


@dataclass(frozen=True)
class Metric:
    """The name and the format of a score.

    Attributes:
        name: its name, in a heading.
        write: formats a value.
        limits: the lowest and highest possible value, if there are.
    """

    name: str
    write: Callable[[float | None], str] = decimals
    limits: tuple[float, float] | None = None


METRICS = {
    "accuracy": Metric("Accuracy", limits=UNIT),
    "auc": Metric("AUC", limits=UNIT),
    "log_loss": Metric("Log loss"),
    "r2": Metric("R²"),
    "rmse": Metric("Root mean square error", figure),
    "mae": Metric("Mean absolute error", figure),
}


@dataclass(frozen=True)
class Row:
    """A line of a table of scores with intervals.

    Attributes:
        name: its first cell.
        records: the number of records, if it is shown.
        value: the formatted score.
        interval: the formatted interval.
        low: the lower end of the interval, as a percentage of the axis; None without one.
        at: the score.
        high: the upper end.
        kind: "model", "gain", "group" or "others", for the page's style.
        extra: a second score and its interval.
    """

    name: str
    records: int | None
    value: str
    interval: str
    low: float | None = None
    at: float | None = None
    high: float | None = None
    kind: str = "model"
    extra: tuple[str, str] | None = None


@dataclass(frozen=True)
class Table:
    """Scores with intervals on one axis.

    Attributes:
        title: the heading.
        rows: the lines.
        ends: the labels of both ends of the axis; empty without an axis.
        overall: the position of a score to compare with, as a percentage of the axis.
        extra: the heading of the second score, if there is one.
    """

    title: str
    rows: list[Row]
    ends: tuple[str, str] | None = None
    overall: float | None = None
    extra: str = ""


# Alone and together.

LOWER_IS_BETTER = ("log_loss", "rmse")


def describe_comparison(run: AnyRun, *, kept_only: bool = False) -> list[str]:
    """Return a sentence for each score of the comparison with a model of our own records alone.

    Args:
        run: the run.
        kept_only: leave out the other models than the one that is kept, which is the last.
    """
    comparison = run.comparison
    if comparison is None:
        return []
    missing = []
    if comparison.unavailable or not comparison.models:
        reason = comparison.unavailable or "unknown"
        missing = [f"There is no model of our own records alone to compare with: {reason}."]
    if not comparison.models:
        return missing
    first, *others = comparison.models
    found = [
        f"{_named(metric)} is {METRICS[metric].write(model.scores[metric].value)} {model.name} and "
        f"{METRICS[metric].write(first.scores[metric].value)} {first.name}: {_describe_gain(metric, gain, run)}."
        for model in (others[-1:] if kept_only else others)
        for metric, gain in (model.gains or {}).items()
        if metric in METRICS and metric in model.scores and metric in first.scores
    ]
    on = f"On our {comparison.records:,} validation record{'' if comparison.records == 1 else 's'}, the "
    return [*missing, *(f"{'The ' if place else on}{text}" for place, text in enumerate(found))]


def comparison_tables(run: AnyRun) -> list[Table]:
    """Return a table for each score: the models with their intervals, and the gains over the first."""
    models = run.comparison.models if run.comparison else []
    metrics = [name for name in METRICS if any(name in each.scores for each in models)]
    return [_comparison_table(metric, models) for metric in metrics]


def _comparison_table(metric: str, models: Sequence[ComparedModel]) -> Table:
    shape = METRICS[metric]
    scored = [(each.name, each.scores[metric]) for each in models if metric in each.scores]
    axis = _axis((estimate for _, estimate in scored), shape)
    rows = [_row(name, estimate, shape, axis) for name, estimate in scored]
    first = models[0].name
    for each in models:
        if metric in (each.gains or {}):
            order = f"{first} − {each.name}" if metric in LOWER_IS_BETTER else f"{each.name} − {first}"
            gain = (each.gains or {})[metric]
            rows.append(Row(order, None, _plus(gain.value, shape.write), _interval(gain, shape), kind="gain"))
    return Table(shape.name, rows, _ends(axis))


def _describe_gain(metric: str, gain: Estimate, run: AnyRun) -> str:
    write = METRICS[metric].write
    if not math.isfinite(gain.value):
        return "no comparison"
    size = write(abs(gain.value))
    change = "equal" if size == write(0.0) else f"{'better' if gain.value > 0 else 'worse'} by {size}"
    if gain.low is None or gain.high is None:
        return f"{change}; no interval"
    verdict = "no clear difference" if gain.low <= 0 <= gain.high else "a clear difference"
    if lack_of_records(run):
        verdict = "these records cannot decide"
    return f"{change} (95 % interval {_interval(gain, METRICS[metric])}), {verdict}"


def lack_of_records(run: AnyRun) -> str:
    """Return why the validation records cannot decide whether a difference is clear; empty if they can."""
    scores = run.validation
    if scores is None:
        return "there are none"
    if isinstance(scores, ClassificationScores) and (lack := describe_lack(scores)):
        return lack
    if scores.records < MIN_CLASS_RECORDS:
        count = f"there {'is' if scores.records == 1 else 'are'} {scores.records}"
        return f"{count}; at least {MIN_CLASS_RECORDS} are needed"
    return ""


def _named(metric: str) -> str:
    """Return the name of a score within a sentence."""
    name = METRICS[metric].name
    return name if metric in ("auc", "r2") else name.lower()


# Subgroups.


def subgroup_tables(run: AnyRun) -> list[Table]:
    """Return a table of groups for each category column."""
    metric = "mae" if run.data.task == "regression" else "accuracy"
    shape = METRICS[metric]
    tables = []
    for column in run.subgroups or []:
        groups = [*column.groups, *([column.others] if column.others else [])]
        known = [each.scores[metric] for each in groups if metric in each.scores]
        axis = _axis(known, shape)
        rows = [_group_row(each, each is column.others, metric, shape, axis) for each in groups]
        with_auc = any("auc" in each.scores for each in groups)
        tables.append(Table(column.column, rows, _ends(axis), _overall(run, metric, axis), "AUC" if with_auc else ""))
    return tables


def _group_row(group: Subgroup, others: bool, metric: str, shape: Metric, axis: Axis | None) -> Row:
    name = group.name if group.name is not None else "missing"
    if others:
        name = f"{group.groups:,} other{'' if group.groups == 1 else 's'}"
    area = group.scores.get("auc")
    extra = None if area is None else (decimals(area.value), _interval(area, METRICS["auc"]))
    kind = "others" if others else "group"
    if metric not in group.scores:
        return Row(name, group.records, "–", "too few", kind=kind)
    return _row(name, group.scores[metric], shape, axis, records=group.records, kind=kind, extra=extra)


def _overall(run: AnyRun, metric: str, axis: Axis | None) -> float | None:
    value = getattr(run.validation, metric, None)
    return None if axis is None or value is None or not axis.low <= value <= axis.high else _percent(axis, value)


# What the model depends on.


@dataclass(frozen=True)
class Weight:
    """A column or feature and its weight: as a text, and as a percentage of the largest."""

    name: str
    value: str
    size: float
    negative: bool = False


def importance_rows(run: AnyRun) -> list[Weight]:
    """Return the permutation importance of the columns, the largest first."""
    write = _unit_format(run)
    found = run.importance or []
    return _weights(
        [(each.column, each.rise, f"{_plus(each.rise, write)} ± {write(each.deviation)}") for each in found]
    )


def coefficient_rows(run: AnyRun) -> list[Weight]:
    """Return the coefficients, the largest first."""
    write = _unit_format(run)
    return _weights([(each.feature, each.value, _plus(each.value, write)) for each in run.coefficients or []])


def _unit_format(run: AnyRun) -> Callable[[float | None], str]:
    """Return the format of values in the unit of the target, which may have any size; others have decimals."""
    return figure if run.data.task == "regression" else decimals


def _weights(found: Iterable[tuple[str, float, str]]) -> list[Weight]:
    finite = [each for each in found if math.isfinite(each[1])]
    largest = max((abs(value) for _, value, _ in finite), default=0.0) or 1.0
    return [Weight(name, text, round(100 * abs(value) / largest, 1), value < 0) for name, value, text in finite]


# Rows.


def _row(
    name: str,
    estimate: Estimate,
    shape: Metric,
    axis: Axis | None,
    records: int | None = None,
    kind: str = "model",
    extra: tuple[str, str] | None = None,
) -> Row:
    low, at, high = (
        None if axis is None or value is None or not math.isfinite(value) else _percent(axis, value)
        for value in (estimate.low, estimate.value, estimate.high)
    )
    interval = _interval(estimate, shape)
    return Row(name, records, shape.write(estimate.value), interval, low, at, high, kind, extra)


def _axis(estimates: Iterable[Estimate], shape: Metric) -> Axis | None:
    values = [value for each in estimates for value in (each.low, each.value, each.high) if value is not None]
    return interval_axis(values, shape.limits)


def _ends(axis: Axis | None) -> tuple[str, str] | None:
    return None if axis is None else (axis.tick_label(axis.low), axis.tick_label(axis.high))


def _percent(axis: Axis, value: float) -> float:
    return min(100.0, max(0.0, axis.position(value, 0, 100)))


def _interval(estimate: Estimate, shape: Metric) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{shape.write(estimate.low)} to {shape.write(estimate.high)}"


def _plus(value: float, write: Callable[[float | None], str]) -> str:
    """Return a difference with its sign, unless it is shown as zero."""
    text = write(value)
    return f"+{text}" if value > 0 and text != write(0.0) else text
