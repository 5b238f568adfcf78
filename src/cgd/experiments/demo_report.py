"""How the demo's result is shown: a table, what was revealed, a plot."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from cgd.experiments.demo import Curve, DemoResult


def table(result: DemoResult) -> Table:
    """Every participant alone, every confined model, all data pooled; loss and accuracy on held-out data."""
    shown = Table(title=f"{result.settings.dataset}: loss and accuracy on {result.held_out} held-out samples")
    shown.add_column("participant", no_wrap=True)
    for heading in ("samples", "alone\nloss", "alone\naccuracy", "confined\nloss", "confined\naccuracy"):
        shown.add_column(heading, justify="right")
    for each in result.participants:
        shown.add_row(each.name, str(each.samples), *_final([each.alone]), *_final([each.confined]))
    shown.add_section()
    alone, confined = [each.alone for each in result.participants], [each.confined for each in result.participants]
    shown.add_row("mean", "", *_final(alone), *_final(confined))
    shown.add_section()
    shown.add_row("all data pooled", str(result.samples), "", "", *_final([result.pooled]))
    return shown


def revealed(result: DemoResult) -> str:
    """What left the participants and what did not."""
    most = max((each.traffic for each in result.participants), key=lambda traffic: traffic.bytes_sent)
    return f"""\
Revealed to every participant, by {most.sums} secure sums:
  the number of all samples ({result.samples}),
  the mean and the deviation of {result.features} features,
  {result.settings.steps} gradient sums of {result.parameters} coordinates.
Sent by each participant: at most {most.bytes_sent / 1e6:.2f} MB in {most.frames_sent} frames,
  all of it secret shares, opened sums, digests and settings.
Not revealed: any record, any model or its origin, anybody's own gradient.
Mind that the sums are exact. Over many steps they can betray something of
the data behind them, the more the fewer records there are; no noise is added."""


def plot(result: DemoResult, path: Path) -> None:
    """Save the curves as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    marker = "o" if len(result.pooled.steps) < 10 else ""  # a line through one point cannot be seen
    for quantity, axis in zip(("loss", "accuracy"), axes, strict=True):

        def draw(curve: Curve, style: str, label: str | None, quantity: str = quantity, axis: Axes = axis) -> None:
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


def _final(curves: list[Curve]) -> tuple[str, str]:
    """The mean loss and accuracy at the end of these curves."""
    return f"{mean(curve.loss[-1] for curve in curves):.3f}", f"{mean(curve.accuracy[-1] for curve in curves):.1%}"
