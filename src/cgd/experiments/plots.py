"""Results as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.experiments import theory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cgd.experiments.runner import Result
    from cgd.experiments.spec import Experiment, RunEntry

    Done = list[tuple[RunEntry, Result]]


def draw(experiment: Experiment, done: Done, path: Path) -> bool:
    """Draw what an experiment shows into a PNG file; False if it shows nothing but its table."""
    drawing = _DRAWINGS.get(experiment.show)
    if drawing is None or not done:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    drawing(figure, done)
    figure.suptitle(experiment.title)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def _curves(figure: Figure, done: Done) -> None:
    """Loss and accuracy against steps, a row of panels for each grid, with the centralised run in all of them."""
    groups = list(dict.fromkeys(entry.group for entry, _ in done if entry.group)) or [""]
    common = [(entry, result) for entry, result in done if not entry.group]
    told = [what for what in ("loss", "accuracy") if any(getattr(result.last, what) for _, result in done)]
    figure.set_size_inches(5 * len(told), 3.2 * len(groups))
    panels = figure.subplots(len(groups), len(told), squeeze=False)
    for group, row in zip(groups, panels, strict=True):
        own = [(entry, result) for entry, result in done if entry.group == group and group]
        for what, axes in zip(told, row, strict=True):
            for number, (entry, result) in enumerate(common + own):
                _curve(axes, result, what, entry.label, f"C{number}")
            axes.set(xlabel="step", ylabel=what, title=group)
            axes.grid(alpha=0.3)
            if what == "loss":
                _plain_log(axes)
        row[-1].legend(fontsize="small")


def _plain_log(axes: Axes) -> None:
    """A logarithmic axis with numbers people read: 0.2, not 2 × 10⁻¹."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))


def _curve(axes: Axes, result: Result, what: str, label: str, colour: str) -> None:
    """The mean over the participants that were evaluated, with a band from the worst to the best."""
    evaluations = [each for each in result.history.evaluations if getattr(each, what)]
    steps = [each.step for each in evaluations]
    values = [getattr(each, what) for each in evaluations]
    axes.plot(steps, [np.mean(each) for each in values], color=colour, label=label)
    axes.fill_between(steps, [min(each) for each in values], [max(each) for each in values], color=colour, alpha=0.2)
    fused = [getattr(each, f"fused_{what}") for each in evaluations]
    if fused and fused[0]:
        axes.plot(steps, [np.mean(each) for each in fused], color=colour, linestyle="--", label=f"{label}, fused rows")


def _sweep(figure: Figure, done: Done) -> None:
    """Where each run ends, against δ; runs in which everybody drew its own δ are horizontal lines."""
    figure.set_size_inches(10, 4)
    for axes, what in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        groups = list(dict.fromkeys(entry.group for entry, _ in done))
        for number, group in enumerate(groups):
            own = [
                (entry.run.delta, np.mean(getattr(result.last, what))) for entry, result in done if entry.group == group
            ]
            fixed = sorted((delta, value) for delta, value in own if not isinstance(delta, tuple))
            if fixed:
                axes.plot(*zip(*fixed, strict=True), "o-", color=f"C{number}", label=group)
                axes.set_xscale("log")
            for _, value in (each for each in own if isinstance(each[0], tuple)):
                axes.axhline(value, color=f"C{number}", linestyle=":", label=f"{group}, everybody its own δ")
        axes.set(xlabel="δ", ylabel=what)
        axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _regret(figure: Figure, done: Done) -> None:
    """Theorem 1: the regret as the run goes on, and where it ends against ε."""
    figure.set_size_inches(10, 6)
    left, right = figure.subplots(1, 2)
    groups = list(dict.fromkeys(entry.group for entry, _ in done))
    for number, group in enumerate(groups):
        ends: list[tuple[float, float, float]] = []
        own = [(entry, result) for entry, result in done if entry.group == group]
        for line, (entry, result) in enumerate(own):
            known = theory.Theory(**result.extra["theory"])
            course = [max(each) for each in theory.regret(result.history, known.optimum)]
            shade = 0.35 + 0.65 * (line + 1) / len(own)
            steps = np.arange(1, len(course) + 1)
            left.plot(steps, course, color=f"C{number}", alpha=shade, label=f"{group}: {entry.label}")
            gap = max(result.last.loss) - known.optimum
            bound = sum(known.terms(result.spec.steps, result.spec.mu, result.spec.lr).values())
            ends.append((max(known.epsilon), gap, bound))
        epsilons, gaps, bounds = zip(*ends, strict=True)
        right.plot(epsilons, gaps, "o", color=f"C{number}", label=f"{group}: F(w_T) − F(w_*)")
        right.plot(epsilons, bounds, "^", color=f"C{number}", label=f"{group}: the bound's terms, summed")
    left.set(xscale="log", yscale="log", xlabel="step T", ylabel="regret R of the worst participant")
    right.set(xscale="log", yscale="log", xlabel="ε/m of the worst participant", ylabel="after the last step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)  # below the panel


_DRAWINGS: dict[str, Callable[[Any, Done], None]] = {"curves": _curves, "sweep": _sweep, "regret": _regret}
