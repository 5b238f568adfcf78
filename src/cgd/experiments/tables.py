"""Tables of our results and the paper's, for the terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cgd.experiments import theory
from cgd.experiments.spec import POOLED_METHODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.experiments.entry_result import EntryResult, SeedSpread
    from cgd.experiments.experiment_file import Experiment
    from cgd.experiments.spec import RunSpec

NOT_RUN = "not run"
ALONE, FUSED = "own features alone", "the row, late fusion"
CONFINED, KEPT = "confined", "kept"


@dataclass(frozen=True)
class ResultTable:
    """A table of texts, independent of its presentation."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def without(self, *names: str) -> ResultTable:
        """Return the table without the columns of these names."""
        kept = [number for number, name in enumerate(self.header) if name not in names]
        rows = tuple(tuple(row[number] for number in kept) for row in self.rows)
        return ResultTable(self.title, tuple(self.header[number] for number in kept), rows)

    def to_rich(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=Text(self.title, style="table.title"))  # Text, because a label may look like markup
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def to_markdown(self, texts: int = 2) -> str:
        """Return the table as Markdown; the first `texts` columns are aligned to the left, the others to the right."""
        marks = tuple("---" if number < texts else "--:" for number in range(len(self.header)))
        lines = [self.header, marks, *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def result_table(experiment: Experiment, found: Sequence[EntryResult]) -> ResultTable:
    """Return the table of an experiment; runs without a result are shown as not run."""
    if experiment.show == "gaps":
        return _gap_table(experiment, found)
    if experiment.show == "regret":
        return _regret_table(experiment, found)
    several = _have_several_seeds(found)
    paper = ("paper: loss / accuracy in %", "ours − paper (worst)")
    seeds = ("seeds", "± sd over seeds: loss / accuracy")
    header = (
        *("setting", "method", seeds[0], "evaluated", "loss (worst)", "accuracy in % (worst)"),
        *("± sd over participants" if several else "± sd", seeds[1], *paper),
    )
    table = ResultTable(experiment.title, header, tuple(row for each in found for row in _rows(each)))
    table = table if several else table.without(*seeds)
    return table if any(each.entry.reported for each in found) else table.without(*paper)


def _rows(found: EntryResult) -> list[tuple[str, ...]]:
    entry = found.entry
    paper = " / ".join(filter(None, (_number(entry.reported.get("loss")), _percent(entry.reported.get("accuracy")))))
    if not found.results:
        return [(entry.group, entry.label, found.seeds, NOT_RUN, "", "", "", "", paper, "")]
    last = found.results[0].last
    has_fused = bool(last.fused_accuracy)
    label = f"{entry.label}, {ALONE}" if has_fused else entry.label
    label = f"{entry.label}, {CONFINED}" if last.kept_loss else label
    evaluated = f"{len(last.loss)} of {_participants(entry.run)}"
    accuracy = found.spread("accuracy")
    metrics = _metrics(found.spread("loss"), accuracy)
    difference = _difference(accuracy, entry.reported.get("accuracy"))
    rows: list[tuple[str, ...]] = [(entry.group, label, found.seeds, evaluated, *metrics, paper, difference)]
    if has_fused:
        evaluated = f"{len(last.fused_loss)} rows of {entry.run.rows}"
        metrics = _metrics(found.spread("fused_loss"), found.spread("fused_accuracy"))
        rows.append((entry.group, f"{entry.label}, {FUSED}", found.seeds, evaluated, *metrics, "", ""))
    if last.kept_loss:
        metrics = _metrics(found.spread("kept_loss"), found.spread("kept_accuracy"))
        rows.append((entry.group, f"{entry.label}, {KEPT}", found.seeds, evaluated, *metrics, "", ""))
    return rows


def _gap_table(experiment: Experiment, found: Sequence[EntryResult]) -> ResultTable:
    """Return the gap of each run to the centralised run, in percentage points of accuracy."""
    pooled = baseline(found)
    pooled_accuracy = None if pooled is None else pooled.accuracy
    rows = []
    for each in found:
        accuracy, entry = each.spread("accuracy"), each.entry
        gap = "" if accuracy is None or pooled_accuracy is None else f"{100 * (pooled_accuracy - accuracy.mean):.2f}"
        reported = entry.reported.get("gap")
        cells = ("" if each.results else NOT_RUN, "")
        if accuracy is not None:
            cells = _percent(accuracy.mean), _percent(accuracy.seed_deviation)
        paper = "" if reported is None else f"{reported:.2f}"
        rows.append((entry.group, entry.label, each.seeds, *cells, gap, paper))
    header = (
        *("", "method", "seeds", "accuracy in %", "± sd over seeds", "gap to centralised, points"),
        "paper: gap to its baseline, points",
    )
    table = ResultTable(experiment.title, header, tuple(rows))
    return table if _have_several_seeds(found) else table.without("seeds", "± sd over seeds")


def baseline(found: Sequence[EntryResult]) -> EntryResult | None:
    """Return the centralised entry, which gaps refer to; None if it has no accuracy yet."""
    pooled = (each for each in found if each.entry.run.method == "centralised")
    return next((each for each in pooled if each.accuracy is not None), None)


def _regret_table(experiment: Experiment, found: Sequence[EntryResult]) -> ResultTable:
    """Return the regret of the worst participant of all seeds, and the terms of the bound of Theorem 1, if known."""
    bound: tuple[str, ...] = ("bound: term in ε", "in 1/(μT+1)", "in ln(μT+1)/T")
    if any(each.entry.run.delay for each in found):
        bound += ("in the delay",)
    convex = not any(each.entry.run.hidden for each in found)
    rows = []
    for each in found:
        entry = each.entry
        if not each.results:
            rows.append((entry.group, entry.label, each.seeds, NOT_RUN, *[""] * (2 + len(bound))))
            continue
        worst = theory.WorstCase.of(each.results)
        numbers = (worst.epsilon, worst.regret[-1], worst.gap, *worst.terms)
        cells = [f"{number:.3g}" for number in numbers]
        rows.append((entry.group, entry.label, each.seeds, *cells, *[""] * (3 + len(bound) - len(cells))))
    header = ("", "run", "seeds", "ε/m", "R", "F(w_T) − F(w_*)", *bound)
    table = ResultTable(experiment.title, header, tuple(rows))
    table = table if convex else table.without(*bound)
    return table if _have_several_seeds(found) else table.without("seeds")


def _have_several_seeds(found: Sequence[EntryResult]) -> bool:
    return any(each.entry.seeds > 1 for each in found)


def _participants(spec: RunSpec) -> int:
    return 1 if spec.method in POOLED_METHODS else spec.rows * spec.columns


def _metrics(loss: SeedSpread | None, accuracy: SeedSpread | None) -> tuple[str, str, str, str]:
    """Return the cells for mean and worst loss, mean and worst accuracy, and the deviations."""
    loss_cell = "" if loss is None else f"{loss.mean:.3f} ({loss.worst:.3f})"
    over_seeds = "" if loss is None else _number(loss.seed_deviation)
    if accuracy is None:
        return loss_cell, "", "", over_seeds
    accuracy_cell = f"{100 * accuracy.mean:.2f} ({100 * accuracy.worst:.2f})"
    over_seeds = " / ".join(filter(None, (over_seeds, _percent(accuracy.seed_deviation))))
    return loss_cell, accuracy_cell, f"{100 * accuracy.deviation:.2f}", over_seeds


def _difference(accuracy: SeedSpread | None, reported: float | None) -> str:
    if reported is None or accuracy is None:
        return ""
    return f"{100 * (accuracy.mean - reported):+.2f} ({100 * (accuracy.worst - reported):+.2f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"
