"""The report's charts as geometry: where every line, point, bar and label lies. The page's template draws them.

They are drawn as SVG by hand and not by matplotlib so that they take the page's font and colours, in the light and in
the dark. What is not finite, or nearly so, is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Points = Sequence[tuple[float, float]]

# Beyond this ratio of the largest to the smallest loss, small differences at the end cannot be seen on a linear axis.
LOGARITHMIC_FROM = 20.0
ENORMOUS = 1e100
LOSSES = {
    "validation_loss": ("own", "our validation records"),
    "everyone_validation_loss": ("everyone", "everybody's validation records"),
    "training_loss": ("training", "our training records"),
}


@dataclass(frozen=True)
class Axis:
    """From values to places on the picture.

    Attributes:
        low: the value at `start`.
        high: the value at `end`.
        ticks: values that get a label.
        label: what it says.
        logarithmic: equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    label: str
    logarithmic: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value lies if `low` lies at `start` and `high` at `end`."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return round(start + (value - low) / (high - low) * (end - start), 1)

    def told(self, value: float) -> str:
        """The label of a tick."""
        if self.logarithmic or max(abs(self.low), abs(self.high)) >= 1e6:
            return f"{value:g}".replace("-", "−")
        step = min((b - a for a, b in pairwise(self.ticks)), default=1.0)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{value:,.{decimals}f}".replace("-", "−") if decimals <= 5 else f"{value:g}"


@dataclass(frozen=True)
class Series:
    """A line of a chart, and what it is called."""

    style: str
    label: str
    path: str


@dataclass(frozen=True)
class Chart:
    """A picture, ready to be drawn.

    Attributes:
        name: for references inside the page.
        title: over the picture.
        told: what it shows, for those who cannot see it.
        x: the axis below.
        y: the axis on the left.
        width: of the picture, in its own units.
        height: of the picture.
        series: lines.
        cloud: a path with a dot for each point.
        bars: left, top, width, height.
        mark: where on the x axis a line stands, and what it says.
        top: where the y axis ends.
    """

    name: str
    title: str
    told: str
    x: Axis
    y: Axis
    width: int = 460
    height: int = 300
    series: tuple[Series, ...] = ()
    cloud: str = ""
    bars: tuple[tuple[float, float, float, float], ...] = ()
    mark: tuple[float, str] | None = None
    top: int = 26

    @property
    def left(self) -> int:
        """Where the x axis begins: there is room for the labels of the other one."""
        return 30 + 8 * max((len(self.y.told(tick)) for tick in self.y.ticks), default=1)

    @property
    def right(self) -> int:
        """Where the x axis ends."""
        return self.width - 14

    @property
    def bottom(self) -> int:
        """Where the x axis lies."""
        return self.height - 44

    def across(self, value: float) -> float:
        """Where a value of the x axis lies."""
        return self.x.place(value, self.left, self.right)

    def up(self, value: float) -> float:
        """Where a value of the y axis lies."""
        return self.y.place(value, self.bottom, self.top)


def loss_chart(run: dict[str, Any]) -> Chart | None:
    """The losses against steps; None if there are none."""
    found = {name: curve(run, name) for name in LOSSES}
    values = [value for points in found.values() for _, value in points]
    if not values:
        return None
    chart = Chart("loss", "Loss", _course(run, found), _steps(run), loss_axis(values), mark=_best(run))
    drawn = (Series(*LOSSES[name], _path(chart, points)) for name, points in found.items() if points)
    return replace(chart, series=tuple(drawn))


def score_chart(run: dict[str, Any]) -> Chart | None:
    """Accuracy or R² on our validation records against steps; None if there are no such records."""
    points = curve(run, "score")
    if not points:
        return None
    name = score_name(run)
    baseline = (run["validation"] or {}).get("baseline_accuracy")
    level = [] if baseline is None else [(points[0][0], baseline), (points[-1][0], baseline)]
    values = [value for _, value in (*points, *level)]
    axis = _linear(min(values), max(values), "")
    told = f"{name} on our validation records goes from {points[0][1]:.3f} to {points[-1][1]:.3f}."
    chart = Chart("score", name, told, _steps(run), axis, mark=_best(run))
    drawn = [Series("own", "our validation records", _path(chart, points))]
    if level:
        drawn.append(Series("baseline", "always the commonest class", _path(chart, level)))
    return replace(chart, series=tuple(drawn))


def roc_chart(scores: dict[str, Any]) -> Chart | None:
    """The ROC curve of two classes, if there is one."""
    if not scores["roc"]:
        return None
    points = _finite(zip(scores["roc"]["fpr"], scores["roc"]["tpr"], strict=True))
    name = scores["classes"][1]
    x, y = _linear(0, 1, "false alarms (1 − specificity)"), _linear(0, 1, "found (sensitivity)")
    area = "" if scores["auc"] is None else f"; the area under it is {scores['auc']:.3f}"
    told = f"The ROC curve of {name}: the part of its records that is found, against the part of false alarms{area}."
    chart = Chart("roc", f"ROC curve of {shortened(name)}", told, x, y, height=380)
    chance = Series("baseline", "guessing", _path(chart, [(0, 0), (1, 1)]))
    return replace(chart, series=(Series("own", "the model", _path(chart, points)), chance))


def scatter_chart(scores: dict[str, Any]) -> Chart | None:
    """Predicted against actual values, if they are there."""
    points = _finite(zip(scores["actual"] or [], scores["predicted"] or [], strict=True))
    if not points:
        return None
    values = [value for point in points for value in point]
    x, y = (_linear(min(values), max(values), label) for label in ("actual", "predicted"))
    told = f"Predicted against actual values of {len(points)} validation records; on the line, both are the same."
    chart = Chart("scatter", "Predicted and actual", told, x, y, height=380)
    same = Series("baseline", "predicted = actual", _path(chart, [(x.low, x.low), (x.high, x.high)]))
    cloud = "".join(f"M{chart.across(a)} {chart.up(b)}h0" for a, b in points)
    return replace(chart, series=(same,), cloud=cloud)


def residual_chart(scores: dict[str, Any]) -> Chart | None:
    """How far off the predictions are, as a histogram."""
    points = _finite(zip(scores["actual"] or [], scores["predicted"] or [], strict=True))
    if not points:
        return None
    errors = sorted(predicted - actual for actual, predicted in points)
    counts, x = _histogram(errors, "predicted − actual")
    y = _linear(0, max(counts), "records")
    low = sum(error < 0 for error in errors)
    told = f"{low} of {len(errors)} predictions are too low, {sum(error > 0 for error in errors)} too high."
    chart = Chart("residuals", "Errors", told, x, y, height=380, mark=(0, ""))
    width = (x.high - x.low) / len(counts)
    bars = []
    for i, count in enumerate(counts):
        left, right, top = chart.across(x.low + i * width), chart.across(x.low + (i + 1) * width), chart.up(count)
        bars.append((round(left + 0.5, 1), top, round(right - left - 1, 1), round(chart.bottom - top, 1)))
    return replace(chart, bars=tuple(bars))


def curve(run: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """A quantity of the history against steps."""
    return _finite((each["step"], each[name]) for each in run["history"] if each[name] is not None)


def score_name(run: dict[str, Any]) -> str:
    """What the history's score is."""
    return "Accuracy" if run["data"]["task"] == "classification" else "R²"


def shortened(name: str, most: int = 24) -> str:
    """A name that fits where there is little room."""
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"


def loss_axis(values: Sequence[float]) -> Axis:
    """A linear axis; a logarithmic one if the losses differ by much."""
    low, high = min(values), max(values)
    if low <= 0 or high / low < LOGARITHMIC_FROM:
        return _linear(low, high, "")
    parts = (1, 2, 5) if high / low < 1000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for tick in (part * 10.0**decade for decade in decades for part in parts) if low <= tick <= high]
    return Axis(low / 1.05, high * 1.05, tuple(ticks[:: math.ceil(len(ticks) / 10)]), "", True)


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(a, b) for a, b in points if abs(a) < ENORMOUS and abs(b) < ENORMOUS]  # NaN is not


def _linear(low: float, high: float, label: str, most: int = 6) -> Axis:
    """An axis that begins and ends at round numbers."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        around = abs(low) / 10 or 1.0
        low, high = low - around, high + around
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(part * power for part in (1, 2, 5, 10) if part * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, label)


def _steps(run: dict[str, Any]) -> Axis:
    last = max(1, *(each["step"] for each in run["history"]))
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


def _best(run: dict[str, Any]) -> tuple[float, str] | None:
    best = (run["outcome"] or {}).get("best_step")
    last = max((each["step"] for each in run["history"]), default=0)
    return (best, f"step {best:,}, kept") if best is not None and 0 <= best <= last else None


def _course(run: dict[str, Any], found: dict[str, list[tuple[float, float]]]) -> str:
    told = [
        f"on {LOSSES[name][1]} from {points[0][1]:.3f} to {points[-1][1]:.3f}"
        for name, points in found.items()
        if points
    ]
    kept = _best(run)
    return f"The loss goes {', '.join(told)}." + (f" {kept[1].capitalize()}." if kept else "")


def _path(chart: Chart, points: Points) -> str:
    places = [f"{chart.across(a)} {chart.up(b)}" for a, b in points]
    return "M" + "L".join(places) + ("h0" if len(places) == 1 else "")  # a line through one point is a dot
