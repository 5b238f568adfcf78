"""Results as tables: ours beside the paper's, on a terminal or on a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from cgd.experiments import theory
from cgd.simulation.result import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.experiments.runner import Result
    from cgd.experiments.spec import Experiment, RunEntry

    Found = Sequence[tuple[RunEntry, Result | None]]

MISSING = "not run"
ALONE, FUSED = "own features alone", "the row, late fusion"


@dataclass(frozen=True)
class Sheet:
    """A table, whoever shows it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def for_terminal(self) -> Table:
        """Drawn by rich."""
        table = Table(title=self.title)
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*row)
        return table

    def for_page(self) -> str:
        """As Markdown."""
        lines = [self.header, tuple("---" if number < 2 else "--:" for number in range(len(self.header))), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sheet(experiment: Experiment, found: Found) -> Sheet:
    """The table of an experiment; runs that are not there are shown as missing."""
    if experiment.show == "gaps":
        return _gaps(experiment, found)
    if experiment.show == "regret":
        return _regrets(experiment, found)
    header: tuple[str, ...] = (
        *("setting", "method", "evaluated", "loss (worst)", "% right (worst)", "± sd"),
        *("paper: loss / % right", "ours − paper (worst)"),
    )
    rows = [row for entry, result in found for row in _rows(entry, result)]
    if not any(entry.reported for entry, _ in found):
        header, rows = header[:-2], [row[:-2] for row in rows]
    return Sheet(experiment.title, header, tuple(rows))


def _rows(entry: RunEntry, result: Result | None) -> list[tuple[str, ...]]:
    paper = " / ".join(filter(None, (_number(entry.reported.get("loss")), _percent(entry.reported.get("accuracy")))))
    if result is None:
        return [(entry.group, entry.label, MISSING, "", "", "", paper, "")]
    last = result.last
    several = bool(last.fused_accuracy)
    label = f"{entry.label}, {ALONE}" if several else entry.label
    evaluated = f"{len(last.loss)} of {_participants(result)}"
    difference = _difference(last.accuracy, entry.reported.get("accuracy"))
    rows: list[tuple[str, ...]] = [
        (entry.group, label, evaluated, *_judged(last.loss, last.accuracy), paper, difference)
    ]
    if several:
        evaluated = f"{len(last.fused_loss)} rows of {result.spec.rows}"
        rows.append(
            (entry.group, f"{entry.label}, {FUSED}", evaluated, *_judged(last.fused_loss, last.fused_accuracy), "", "")
        )
    return rows


def _gaps(experiment: Experiment, found: Found) -> Sheet:
    """How far each falls behind the centralised run of its own kind, in points of accuracy."""
    baseline = next((_mean(result) for entry, result in found if entry.run.method == "centralised" and result), None)
    rows = []
    for entry, result in found:
        mean = None if result is None else _mean(result)
        gap = "" if mean is None or baseline is None else f"{100 * (baseline - mean):.1f}"
        reported = entry.reported.get("gap")
        shown = MISSING if mean is None else _percent(mean)
        rows.append((entry.group, entry.label, shown, gap, "" if reported is None else f"{reported:.1f}"))
    header = ("", "method", "% right", "behind centralised, points", "paper: behind its baseline, points")
    return Sheet(experiment.title, header, tuple(rows))


def _regrets(experiment: Experiment, found: Found) -> Sheet:
    """Theorem 1: the regret of the worst participant beside the terms of the bound."""
    rows = []
    for entry, result in found:
        if result is None:
            rows.append((entry.group, entry.label, MISSING, *[""] * 5))
            continue
        known = theory.Theory(**result.extra["theory"])
        worst = max(theory.regret(result.history, known.optimum)[-1])
        terms = known.terms(result.spec.steps, result.spec.mu, result.spec.lr).values()
        epsilon = f"{max(known.epsilon):.3g}"
        gap = max(result.last.loss) - known.optimum
        rows.append(
            (entry.group, entry.label, epsilon, f"{worst:.3g}", f"{gap:.3g}", *(f"{each:.3g}" for each in terms))
        )
    header = ("", "run", "ε/m", "R", "F(w_T) − F(w_*)", "bound: term in ε", "in 1/(μT+1)", "in ln(μT+1)/T")
    return Sheet(experiment.title, header, tuple(rows))


def _participants(result: Result) -> int:
    spec = result.spec
    return 1 if spec.method in ("centralised", "dp-sgd") else spec.rows * spec.columns


def _judged(losses: list[float], accuracies: list[float]) -> tuple[str, str, str]:
    loss = Spread.of_losses(losses)
    losses_told = f"{loss.mean:.3f} ({loss.worst:.3f})"
    if not accuracies:
        return losses_told, "", ""
    accuracy = Spread.of_accuracies(accuracies)
    return (
        losses_told,
        f"{100 * accuracy.mean:.2f} ({100 * accuracy.worst:.2f})",
        f"{100 * accuracy.deviation:.2f}",
    )


def _difference(accuracies: list[float], reported: float | None) -> str:
    if reported is None or not accuracies:
        return ""
    accuracy = Spread.of_accuracies(accuracies)
    return f"{100 * (accuracy.mean - reported):+.2f} ({100 * (accuracy.worst - reported):+.2f})"


def _mean(result: Result) -> float:
    return Spread.of_accuracies(result.last.accuracy).mean


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"
