"""Plots of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.experiments import theory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cgd.experiments.runner import RunResult
    from cgd.experiments.spec import Experiment, RunEntry

    Done = list[tuple[RunEntry, RunResult]]


def draw(experiment: Experiment, done: Done, path: Path) -> bool:
    """Draw the plot of an experiment to a PNG file; return False if it has no plot or no results."""
    draw_plot = _PLOTS.get(experiment.show)
    if draw_plot is None or not done:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    draw_plot(figure, done)
    figure.suptitle(experiment.title)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def _curves(figure: Figure, done: Done) -> None:
    """Draw loss and accuracy over the steps, a row of panels for each group, with the centralised run in each."""
    groups = list(dict.fromkeys(entry.group for entry, _ in done if entry.group)) or [""]
    common = [(entry, result) for entry, result in done if not entry.group]
    metrics = [metric for metric in ("loss", "accuracy") if any(getattr(result.last, metric) for _, result in done)]
    figure.set_size_inches(5 * len(metrics), 3.2 * len(groups))
    panels = figure.subplots(len(groups), len(metrics), squeeze=False)
    for group, row in zip(groups, panels, strict=True):
        own = [(entry, result) for entry, result in done if entry.group == group and group]
        for metric, axes in zip(metrics, row, strict=True):
            for number, (entry, result) in enumerate(common + own):
                _curve(axes, result, metric, entry.label, f"C{number}")
            axes.set(xlabel="step", ylabel=metric, title=group)
            axes.grid(alpha=0.3)
            if metric == "loss":
                _set_log_scale(axes)
        row[-1].legend(fontsize="small")


def _set_log_scale(axes: Axes) -> None:
    """Set a logarithmic y axis with plain numbers: 0.2, not 2 × 10⁻¹."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))


def _curve(axes: Axes, result: RunResult, metric: str, label: str, colour: str) -> None:
    """Draw the mean over the evaluated participants, with a band from the worst to the best."""
    evaluations = [each for each in result.history.evaluations if getattr(each, metric)]
    steps = [each.step for each in evaluations]
    values = [getattr(each, metric) for each in evaluations]
    axes.plot(steps, [np.mean(each) for each in values], color=colour, label=label)
    axes.fill_between(steps, [min(each) for each in values], [max(each) for each in values], color=colour, alpha=0.2)
    fused = [getattr(each, f"fused_{metric}") for each in evaluations]
    if fused and fused[0]:
        axes.plot(steps, [np.mean(each) for each in fused], color=colour, linestyle="--", label=f"{label}, fused rows")


def _sweep(figure: Figure, done: Done) -> None:
    """Draw the final metrics over δ; runs with a random δ per participant are horizontal lines."""
    figure.set_size_inches(10, 4)
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        groups = list(dict.fromkeys(entry.group for entry, _ in done))
        for number, group in enumerate(groups):
            own = [
                (entry.run.delta, np.mean(getattr(result.last, metric)))
                for entry, result in done
                if entry.group == group
            ]
            fixed = sorted((delta, value) for delta, value in own if not isinstance(delta, tuple))
            if fixed:
                axes.plot(*zip(*fixed, strict=True), "o-", color=f"C{number}", label=group)
                axes.set_xscale("log")
            for _, value in (each for each in own if isinstance(each[0], tuple)):
                axes.axhline(value, color=f"C{number}", linestyle=":", label=f"{group}, δ random")
        axes.set(xlabel="δ", ylabel=metric)
        axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _regret(figure: Figure, done: Done) -> None:
    """Draw the regret of Theorem 1 over the steps, and its final value over ε."""
    figure.set_size_inches(10, 6)
    left, right = figure.subplots(1, 2)
    groups = list(dict.fromkeys(entry.group for entry, _ in done))
    for number, group in enumerate(groups):
        final: list[tuple[float, float, float]] = []
        own = [(entry, result) for entry, result in done if entry.group == group]
        for line, (entry, result) in enumerate(own):
            bound = theory.ConvergenceBound(**result.extra["theory"])
            regrets = [max(each) for each in theory.regret(result.history, bound.optimum)]
            shade = 0.35 + 0.65 * (line + 1) / len(own)
            steps = np.arange(1, len(regrets) + 1)
            left.plot(steps, regrets, color=f"C{number}", alpha=shade, label=f"{group}: {entry.label}")
            gap = max(result.last.loss) - bound.optimum
            total = sum(bound.terms(result.spec.steps, result.spec.mu, result.spec.lr).values())
            final.append((max(bound.epsilon), gap, total))
        epsilons, gaps, totals = zip(*final, strict=True)
        right.plot(epsilons, gaps, "o", color=f"C{number}", label=f"{group}: F(w_T) − F(w_*)")
        right.plot(epsilons, totals, "^", color=f"C{number}", label=f"{group}: sum of the bound's terms")
    left.set(xscale="log", yscale="log", xlabel="step T", ylabel="regret R of the worst participant")
    right.set(xscale="log", yscale="log", xlabel="ε/m of the worst participant", ylabel="after the last step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)  # below the panel


_PLOTS: dict[str, Callable[[Any, Done], None]] = {"curves": _curves, "sweep": _sweep, "regret": _regret}
