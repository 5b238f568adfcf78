"""Tables of our results and the paper's, for the terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cgd.experiments import theory
from cgd.experiments.spec import POOLED_METHODS
from cgd.simulation.result import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.experiments.runner import RunResult
    from cgd.experiments.spec import Experiment, RunEntry

    Found = Sequence[tuple[RunEntry, RunResult | None]]

NOT_RUN = "not run"
ALONE, FUSED = "own features alone", "the row, late fusion"


@dataclass(frozen=True)
class ResultTable:
    """A table of texts, independent of its presentation."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_rich(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=Text(self.title, style="table.title"))  # Text, because a label may look like markup
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.header, tuple("---" if number < 2 else "--:" for number in range(len(self.header))), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def result_table(experiment: Experiment, found: Found) -> ResultTable:
    """Return the table of an experiment; runs without a result are shown as not run."""
    if experiment.show == "gaps":
        return _gap_table(experiment, found)
    if experiment.show == "regret":
        return _regret_table(experiment, found)
    header: tuple[str, ...] = (
        *("setting", "method", "evaluated", "loss (worst)", "accuracy in % (worst)", "± sd"),
        *("paper: loss / accuracy in %", "ours − paper (worst)"),
    )
    rows = [row for entry, result in found for row in _rows(entry, result)]
    if not any(entry.reported for entry, _ in found):
        header, rows = header[:-2], [row[:-2] for row in rows]
    return ResultTable(experiment.title, header, tuple(rows))


def _rows(entry: RunEntry, result: RunResult | None) -> list[tuple[str, ...]]:
    paper = " / ".join(filter(None, (_number(entry.reported.get("loss")), _percent(entry.reported.get("accuracy")))))
    if result is None:
        return [(entry.group, entry.label, NOT_RUN, "", "", "", paper, "")]
    last = result.last
    has_fused = bool(last.fused_accuracy)
    label = f"{entry.label}, {ALONE}" if has_fused else entry.label
    evaluated = f"{len(last.loss)} of {_participants(result)}"
    difference = _difference(last.accuracy, entry.reported.get("accuracy"))
    rows: list[tuple[str, ...]] = [
        (entry.group, label, evaluated, *_metrics(last.loss, last.accuracy), paper, difference)
    ]
    if has_fused:
        evaluated = f"{len(last.fused_loss)} rows of {result.spec.rows}"
        rows.append(
            (entry.group, f"{entry.label}, {FUSED}", evaluated, *_metrics(last.fused_loss, last.fused_accuracy), "", "")
        )
    return rows


def _gap_table(experiment: Experiment, found: Found) -> ResultTable:
    """Return the gap of each run to the centralised run, in percentage points of accuracy."""
    baseline = next((_mean(result) for entry, result in found if entry.run.method == "centralised" and result), None)
    rows = []
    for entry, result in found:
        mean = None if result is None else _mean(result)
        gap = "" if mean is None or baseline is None else f"{100 * (baseline - mean):.2f}"
        reported = entry.reported.get("gap")
        accuracy = NOT_RUN if mean is None else _percent(mean)
        rows.append((entry.group, entry.label, accuracy, gap, "" if reported is None else f"{reported:.2f}"))
    header = ("", "method", "accuracy in %", "gap to centralised, points", "paper: gap to its baseline, points")
    return ResultTable(experiment.title, header, tuple(rows))


def _regret_table(experiment: Experiment, found: Found) -> ResultTable:
    """Return the regret of the worst participant and the terms of the bound of Theorem 1."""
    rows = []
    for entry, result in found:
        if result is None:
            rows.append((entry.group, entry.label, NOT_RUN, *[""] * 5))
            continue
        bound = theory.ConvergenceBound(**result.extra["theory"])
        worst = max(theory.regret(result.history, bound.optimum)[-1])
        terms = bound.terms(result.spec.steps, result.spec.mu, result.spec.lr).values()
        epsilon = f"{max(bound.epsilon):.3g}"
        gap = max(result.last.loss) - bound.optimum
        rows.append(
            (entry.group, entry.label, epsilon, f"{worst:.3g}", f"{gap:.3g}", *(f"{each:.3g}" for each in terms))
        )
    header = ("", "run", "ε/m", "R", "F(w_T) − F(w_*)", "bound: term in ε", "in 1/(μT+1)", "in ln(μT+1)/T")
    return ResultTable(experiment.title, header, tuple(rows))


def _participants(result: RunResult) -> int:
    spec = result.spec
    return 1 if spec.method in POOLED_METHODS else spec.rows * spec.columns


def _metrics(losses: list[float], accuracies: list[float]) -> tuple[str, str, str]:
    """Return the cells for mean and worst loss, mean and worst accuracy, and the deviation of the accuracy."""
    loss = Spread.of_losses(losses)
    loss_cell = f"{loss.mean:.3f} ({loss.worst:.3f})"
    if not accuracies:
        return loss_cell, "", ""
    accuracy = Spread.of_accuracies(accuracies)
    return (
        loss_cell,
        f"{100 * accuracy.mean:.2f} ({100 * accuracy.worst:.2f})",
        f"{100 * accuracy.deviation:.2f}",
    )


def _difference(accuracies: list[float], reported: float | None) -> str:
    if reported is None or not accuracies:
        return ""
    accuracy = Spread.of_accuracies(accuracies)
    return f"{100 * (accuracy.mean - reported):+.2f} ({100 * (accuracy.worst - reported):+.2f})"


def _mean(result: RunResult) -> float:
    return Spread.of_accuracies(result.last.accuracy).mean


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"
