"""The geometry of the report's charts: positions of lines, points, bars and labels. The template draws them as SVG.

Hand-written SVG, and not matplotlib, so that the charts use the page's font and colours in light and dark mode, and the
package needs no plotting library. Values that are not finite, or enormous, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from cgd.reporting.intervals import wilson_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cgd.reporting.run_file import AnyRun
    from cgd.reporting.run_scores import ClassificationScores, RegressionScores

    Points = Sequence[tuple[float, float]]

# Above this ratio of the largest to the smallest loss, a linear axis hides the small differences at the end.
MIN_LOGARITHMIC_RATIO = 20.0
MAX_VALUE = 1e100
# A smaller range, in proportion to the values, is drawn as a constant: it may come from rounding.
MIN_RANGE = 1e-6
MAX_DECIMALS = 9
LOSSES = {
    "validation_loss": ("own", "our validation records"),
    "everyone_validation_loss": ("everyone", "all validation records"),
    "training_loss": ("training", "our training records"),
}


@dataclass(frozen=True)
class Axis:
    """An axis: the mapping of values to positions.

    Attributes:
        low: the smallest value.
        high: the largest value.
        ticks: values with a label.
        label: the name of the axis.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    label: str
    logarithmic: bool = False

    def position(self, value: float, start: float, end: float) -> float:
        """Return the position of a value, with `low` at `start` and `high` at `end`."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return round(start + (value - low) / (high - low) * (end - start), 1)

    def tick_label(self, value: float) -> str:
        """Return the label of a tick, with as many digits as all ticks need to differ."""
        return f"{value:{self._format}}".replace("-", "−")

    @cached_property
    def _format(self) -> str:
        step = min((b - a for a, b in pairwise(self.ticks)), default=1.0)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if not self.logarithmic and max(abs(self.low), abs(self.high)) < 1e6 and decimals <= MAX_DECIMALS:
            return f",.{decimals}f"
        formats = (f".{digits}g" for digits in range(6, 18))
        return next(each for each in formats if len({f"{tick:{each}}" for tick in self.ticks}) == len(self.ticks))


@dataclass(frozen=True)
class Series:
    """A line of a chart: CSS class, label and SVG path."""

    style: str
    label: str
    path: str


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn.

    Attributes:
        name: identifier inside the page.
        title: heading.
        description: text for screen readers.
        x: horizontal axis.
        y: vertical axis.
        width: width in SVG units.
        height: height in SVG units.
        series: lines.
        cloud: SVG path with a dot for each point.
        bars: left, top, width and height of each bar.
        spans: SVG path with a vertical line for the interval of each point.
        dots: name of the points in the legend.
        mark: value on the x axis of a vertical line, and its label.
        top: position of the upper end of the y axis.
    """

    name: str
    title: str
    description: str
    x: Axis
    y: Axis
    width: int = 460
    height: int = 300
    series: tuple[Series, ...] = ()
    cloud: str = ""
    bars: tuple[tuple[float, float, float, float], ...] = ()
    spans: str = ""
    dots: str = "a record"
    mark: tuple[float, str] | None = None
    top: int = 26

    @property
    def left(self) -> int:
        """Position of the left end of the x axis, beside the labels of the y axis."""
        return 30 + 8 * max((len(self.y.tick_label(tick)) for tick in self.y.ticks), default=1)

    @property
    def right(self) -> int:
        """Position of the right end of the x axis."""
        return self.width - 14

    @property
    def bottom(self) -> int:
        """Vertical position of the x axis."""
        return self.height - 44

    def x_position(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return self.x.position(value, self.left, self.right)

    def y_position(self, value: float) -> float:
        """Return the vertical position of a value."""
        return self.y.position(value, self.bottom, self.top)


def loss_chart(run: AnyRun) -> Chart | None:
    """Return the chart of losses against steps; None without losses."""
    curves = {name: curve(run, name) for name in LOSSES}
    values = [value for points in curves.values() for _, value in points]
    if not values:
        return None
    chart = Chart(
        "loss", "Loss", _describe_losses(run, curves), _step_axis(run), loss_axis(values), mark=_best_mark(run)
    )
    series = (Series(*LOSSES[name], _path(chart, points)) for name, points in curves.items() if points)
    return replace(chart, series=tuple(series))


def score_chart(run: AnyRun) -> Chart | None:
    """Return the chart of accuracy or R² on our validation records against steps; None without such records."""
    points = curve(run, "score")
    if not points:
        return None
    name = score_name(run)
    baseline = getattr(run.validation, "baseline_accuracy", None)
    level = [] if baseline is None else [(points[0][0], baseline), (points[-1][0], baseline)]
    values = [value for _, value in (*points, *level)]
    axis = _linear(min(values), max(values), "", limits=(0.0, 1.0) if name == "Accuracy" else None)
    description = f"{name} on our validation records goes from {points[0][1]:.3f} to {points[-1][1]:.3f}."
    chart = Chart("score", name, description, _step_axis(run), axis, mark=_best_mark(run))
    series = [Series("own", "our validation records", _path(chart, points))]
    if level:
        series.append(Series("baseline", "always the most common class", _path(chart, level)))
    return replace(chart, series=tuple(series))


def roc_chart(scores: ClassificationScores) -> Chart | None:
    """Return the ROC curve of two classes; None without one."""
    if scores.roc is None:
        return None
    points = _finite(zip(scores.roc.fpr, scores.roc.tpr, strict=True))
    name = scores.classes[1]
    x, y = _linear(0, 1, "false positive rate (1 − specificity)"), _linear(0, 1, "true positive rate (sensitivity)")
    area = "" if scores.auc is None else f"; the area under it is {scores.auc:.3f}"
    description = f"The ROC curve of {name}: true positive rate against false positive rate{area}."
    chart = Chart("roc", f"ROC curve of {shorten(name)}", description, x, y, height=380)
    chance = Series("baseline", "guessing", _path(chart, [(0, 0), (1, 1)]))
    return replace(chart, series=(Series("own", "the model", _path(chart, points)), chance))


def calibration_chart(scores: ClassificationScores) -> Chart | None:
    """Return observed fractions against mean predicted probabilities, with intervals; None without bins."""
    bins = [] if scores.calibration is None else scores.calibration.bins
    usable = [each for each in bins if each.records > 0 and 0 <= each.predicted <= 1 and 0 <= each.observed <= 1]
    if not usable:
        return None
    name = f"of {shorten(scores.classes[1])}" if len(scores.classes) == 2 else "of the predicted class"
    texts = (f"{each.predicted:.2f} predicted, {each.observed:.2f} observed" for each in usable)
    description = f"Observed fractions against mean predicted probabilities {name}: {'; '.join(texts)}."
    x, y = _linear(0, 1, "predicted probability"), _linear(0, 1, "observed fraction")
    chart = Chart("calibration", f"Calibration {name}", description, x, y, height=380)
    points = [(chart.x_position(each.predicted), chart.y_position(each.observed)) for each in usable]
    intervals = [wilson_interval(each.observed, each.records) for each in usable]
    spans = "".join(
        f"M{at} {chart.y_position(low)}V{chart.y_position(high)}"
        for (at, _), (low, high) in zip(points, intervals, strict=True)
    )
    sizes = sorted({each.records for each in usable})
    count = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    diagonal = Series("baseline", "predicted = observed", _path(chart, [(0, 0), (1, 1)]))
    cloud = "".join(f"M{left} {top}h0" for left, top in points)
    dots = f"{count} records, with the 95 % interval"
    return replace(chart, series=(diagonal,), cloud=cloud, spans=spans, dots=dots)


def scatter_chart(scores: RegressionScores) -> Chart | None:
    """Return the chart of predicted against actual values; None without values."""
    points = _finite(zip(scores.actual or [], scores.predicted or [], strict=True))
    if not points:
        return None
    values = [value for point in points for value in point]
    x, y = (_linear(min(values), max(values), label) for label in ("actual", "predicted"))
    description = f"Predicted against actual values of {len(points)} validation records; on the line, both are equal."
    chart = Chart("scatter", "Predicted and actual", description, x, y, height=380)
    diagonal = Series("baseline", "predicted = actual", _path(chart, [(x.low, x.low), (x.high, x.high)]))
    cloud = "".join(f"M{chart.x_position(a)} {chart.y_position(b)}h0" for a, b in points)
    return replace(chart, series=(diagonal,), cloud=cloud)


def residual_chart(scores: RegressionScores) -> Chart | None:
    """Return the histogram of the prediction errors; None without values."""
    points = _finite(zip(scores.actual or [], scores.predicted or [], strict=True))
    if not points:
        return None
    errors = sorted(predicted - actual for actual, predicted in points)
    counts, x = _histogram(errors, "predicted − actual")
    y = _linear(0, max(counts), "records")
    low, high = sum(error < 0 for error in errors), sum(error > 0 for error in errors)
    description = f"{low} of {len(errors)} predictions are too low, {high} too high."
    chart = Chart("residuals", "Errors", description, x, y, height=380, mark=(0, ""))
    width = (x.high - x.low) / len(counts)
    bars = []
    for i, count in enumerate(counts):
        left, right, top = (
            chart.x_position(x.low + i * width),
            chart.x_position(x.low + (i + 1) * width),
            chart.y_position(count),
        )
        bars.append((round(left + 0.5, 1), top, round(right - left - 1, 1), round(chart.bottom - top, 1)))
    return replace(chart, bars=tuple(bars))


def curve(run: AnyRun, name: str) -> list[tuple[float, float]]:
    """Return the points of a quantity of the history against steps."""
    values = ((each.step, getattr(each, name)) for each in run.history)
    return _finite((step, value) for step, value in values if value is not None)


def score_name(run: AnyRun) -> str:
    """Return the name of the history's score."""
    return "Accuracy" if run.data.task == "classification" else "R²"


def shorten(name: str, max_length: int = 24) -> str:
    """Return a name of limited length."""
    return name if len(name) <= max_length else name[: max_length - 1].rstrip() + "…"


def loss_axis(values: Sequence[float]) -> Axis:
    """Return a linear axis, or a logarithmic one for losses of very different sizes."""
    low, high = min(values), max(values)
    if low <= 0 or high / low < MIN_LOGARITHMIC_RATIO:
        return _linear(low, high, "")
    parts = (1, 2, 5) if high / low < 1000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for tick in (part * 10.0**decade for decade in decades for part in parts) if low <= tick <= high]
    return Axis(low / 1.05, high * 1.05, tuple(ticks[:: math.ceil(len(ticks) / 10)]), "", True)


def interval_axis(values: Iterable[float], limits: tuple[float, float] | None = None) -> Axis | None:
    """Return an axis for scores and their intervals; None without finite values."""
    finite = [each for each in values if abs(each) < MAX_VALUE]
    return _linear(min(finite), max(finite), "", max_intervals=4, limits=limits) if finite else None


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(a, b) for a, b in points if abs(a) < MAX_VALUE and abs(b) < MAX_VALUE]  # false for NaN


def _linear(
    low: float, high: float, label: str, max_intervals: int = 6, limits: tuple[float, float] | None = None
) -> Axis:
    """Return an axis that begins and ends at round numbers, within the limits of the values if there are any."""
    if high - low < MIN_RANGE * max(abs(low), abs(high), 1e-9):
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
        if limits is not None and limits[0] <= low + margin <= limits[1]:
            low, high = max(low, limits[0]), min(high, limits[1])
    rough = (high - low) / max_intervals
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(part * power for part in (1, 2, 5, 10) if part * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, label)


def _step_axis(run: AnyRun) -> Axis:
    last = max(1, *(each.step for each in run.history))
    whole = tuple(tick for tick in _linear(0, last, "step").ticks if tick == int(tick) and tick <= last)
    return Axis(0, last, whole, "step")


def _histogram(ordered: Sequence[float], label: str) -> tuple[list[int], Axis]:
    axis = _linear(ordered[0], ordered[-1], label)
    bins = (len(axis.ticks) - 1) * (4 if len(ordered) >= 100 else 2)
    width = (axis.high - axis.low) / bins
    counts = [0] * bins
    for value in ordered:
        counts[min(bins - 1, int((value - axis.low) / width))] += 1
    return counts, axis


def _best_mark(run: AnyRun) -> tuple[float, str] | None:
    best = run.outcome.best_step if run.outcome else None
    last = max((each.step for each in run.history), default=0)
    return (best, f"best step: {best:,}") if best is not None and 0 <= best <= last else None


def _describe_losses(run: AnyRun, curves: dict[str, list[tuple[float, float]]]) -> str:
    parts = [
        f"on {LOSSES[name][1]} from {points[0][1]:.3f} to {points[-1][1]:.3f}"
        for name, points in curves.items()
        if points
    ]
    mark = _best_mark(run)
    return f"The loss goes {', '.join(parts)}." + (f" {mark[1].capitalize()}." if mark else "")


def _path(chart: Chart, points: Points) -> str:
    positions = [f"{chart.x_position(a)} {chart.y_position(b)}" for a, b in points]
    return "M" + "L".join(positions) + ("h0" if len(positions) == 1 else "")  # a single point is drawn as a dot
