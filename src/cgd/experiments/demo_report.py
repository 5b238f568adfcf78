"""Presentation of the demo's results: a table, the disclosed values, a plot."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from cgd.experiments.demo import DemoResult, LearningCurve


def table(result: DemoResult) -> Table:
    """Return the table of losses and accuracies on held-out data: alone, confined and pooled."""
    table = Table(title=f"{result.settings.dataset}: loss and accuracy on {result.held_out} held-out samples")
    table.add_column("participant", no_wrap=True)
    for heading in ("samples", "alone\nloss", "alone\naccuracy", "confined\nloss", "confined\naccuracy"):
        table.add_column(heading, justify="right")
    for each in result.participants:
        table.add_row(each.name, str(each.samples), *_final([each.alone]), *_final([each.confined]))
    table.add_section()
    alone, confined = [each.alone for each in result.participants], [each.confined for each in result.participants]
    table.add_row("mean", "", *_final(alone), *_final(confined))
    table.add_section()
    table.add_row("all data pooled", str(result.samples), "", "", *_final([result.pooled]))
    return table


def disclosure(result: DemoResult) -> str:
    """Return a text on what each participant revealed and sent, and what it did not."""
    largest = max((each.traffic for each in result.participants), key=lambda traffic: traffic.bytes_sent)
    return f"""\
Revealed to every participant, by {largest.sums} secure sums:
  the number of all samples ({result.samples}),
  the mean and the standard deviation of {result.features} features,
  {result.settings.steps} gradient sums of {result.parameters} coordinates.
Sent by each participant: at most {largest.bytes_sent / 1e6:.2f} MB in {largest.frames_sent} frames,
  all of it secret shares, opened sums, digests and settings.
Not revealed: records, models, origins, the gradient of a single participant.
Privacy risk: the sums are exact, without noise. Over many steps they can
reveal information about the records, and more if there are few records."""


def plot(result: DemoResult, path: Path) -> None:
    """Save the learning curves as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    marker = "o" if len(result.pooled.steps) < 10 else ""  # a line through one point is invisible
    for quantity, axis in zip(("loss", "accuracy"), axes, strict=True):

        def draw(
            curve: LearningCurve, style: str, label: str | None, quantity: str = quantity, axis: Axes = axis
        ) -> None:
            axis.plot(curve.steps, getattr(curve, quantity), style, marker=marker, lw=1.2, label=label)

        for i, each in enumerate(result.participants):
            draw(each.alone, "tab:orange", "alone, one line each" if i == 0 else None)
        for i, each in enumerate(result.participants):
            draw(each.confined, "tab:blue", "confined, one line each" if i == 0 else None)
        draw(result.pooled, "k--", "all data pooled")
        axis.set(xlabel="step", ylabel=f"held-out {quantity}")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend()
    settings = result.settings
    figure.suptitle(f"{settings.dataset}, {settings.participants} participants, δ = {settings.delta}")
    figure.savefig(path, dpi=150)


def _final(curves: list[LearningCurve]) -> tuple[str, str]:
    """Return the mean final loss and accuracy of these curves."""
    return f"{mean(curve.loss[-1] for curve in curves):.3f}", f"{mean(curve.accuracy[-1] for curve in curves):.1%}"
