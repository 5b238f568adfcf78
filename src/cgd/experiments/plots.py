"""Plots of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cgd.experiments import theory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cgd.experiments.entry_result import EntryResult
    from cgd.experiments.experiment_file import Experiment
    from cgd.simulation.result import Evaluation

    Done = list[EntryResult]

METRICS: tuple[Literal["loss", "accuracy"], ...] = ("loss", "accuracy")


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
    groups = list(dict.fromkeys(each.entry.group for each in done if each.entry.group)) or [""]
    common = [each for each in done if not each.entry.group]
    metrics = [metric for metric in METRICS if any(each.spread(metric) for each in done)]
    figure.set_size_inches(5 * len(metrics), 3.2 * len(groups))
    panels = figure.subplots(len(groups), len(metrics), squeeze=False)
    for group, row in zip(groups, panels, strict=True):
        own = [each for each in done if each.entry.group == group and group]
        for metric, axes in zip(metrics, row, strict=True):
            for number, each in enumerate(common + own):
                draw_curve(axes, each, metric, each.entry.label, f"C{number}")
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


def draw_curve(axes: Axes, entry_result: EntryResult, metric: str, label: str, colour: str) -> None:
    """Draw the mean over the evaluated participants of all seeds, with a band from the worst to the best of them."""
    histories = [result.history.evaluations for result in entry_result.results]
    # All seeds are evaluated after the same steps.
    evaluations = [each for each in zip(*histories, strict=True) if getattr(each[0], metric)]
    steps = [each[0].step for each in evaluations]
    values = [_joined(each, metric) for each in evaluations]
    axes.plot(steps, [np.mean(each) for each in values], color=colour, label=label)
    axes.fill_between(steps, [min(each) for each in values], [max(each) for each in values], color=colour, alpha=0.2)
    for kind, name, style in (("fused", "fused rows", "--"), ("kept", "kept", ":")):
        others = [_joined(each, f"{kind}_{metric}") for each in evaluations]
        if others and others[0]:
            axes.plot(
                steps, [np.mean(each) for each in others], color=colour, linestyle=style, label=f"{label}, {name}"
            )


def _joined(evaluations: tuple[Evaluation, ...], metric: str) -> list[float]:
    return [value for each in evaluations for value in getattr(each, metric)]


def _sweep(figure: Figure, done: Done) -> None:
    """Draw the final metrics over δ; runs with a random δ per participant are horizontal lines."""
    figure.set_size_inches(10, 4)
    for axes, metric in zip(figure.subplots(1, 2), METRICS, strict=True):
        groups = list(dict.fromkeys(each.entry.group for each in done))
        for number, group in enumerate(groups):
            spreads = [(each.entry.run.delta, each.spread(metric)) for each in done if each.entry.group == group]
            own = [(delta, spread.mean) for delta, spread in spreads if spread is not None]
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
    groups = list(dict.fromkeys(each.entry.group for each in done))
    for number, group in enumerate(groups):
        final: list[tuple[float, float, float]] = []
        own = [each for each in done if each.entry.group == group]
        for line, each in enumerate(own):
            worst = theory.WorstCase.of(each.results)
            shade = 0.35 + 0.65 * (line + 1) / len(own)
            steps = np.arange(1, len(worst.regret) + 1)
            left.plot(steps, worst.regret, color=f"C{number}", alpha=shade, label=f"{group}: {each.entry.label}")
            final.append((worst.epsilon, worst.gap, sum(worst.terms)))
        epsilons, gaps, totals = zip(*final, strict=True)
        right.plot(epsilons, gaps, "o", color=f"C{number}", label=f"{group}: F(w_T) − F(w_*)")
        if all(totals):  # a network has no bound
            right.plot(epsilons, totals, "^", color=f"C{number}", label=f"{group}: sum of the bound's terms")
    left.set(xscale="log", yscale="log", xlabel="step T", ylabel="regret R of the worst participant")
    right.set(xscale="log", yscale="log", xlabel="ε/m of the worst participant", ylabel="after the last step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)  # below the panel


_PLOTS: dict[str, Callable[[Any, Done], None]] = {"curves": _curves, "sweep": _sweep, "regret": _regret}
