"""Rows of the paper's tables from which our mean differs by more than half a point, with what was measured about them.

A row is explained by another run, which a spec names with `why`: the page shows what that run came out as. Without its
result, if it comes no closer, or without `why`, the row is listed as not explained. Two more figures are computed from
the results of the row itself: the standard error of its mean, and the step at which its mean had the paper's accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from cgd.experiments import tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cgd.experiments.entry_result import EntryResult
    from cgd.experiments.reproduce import ExperimentResult

LARGE_DIFFERENCE = 0.005
"""Differences of accuracy above half a percentage point are listed."""
NOT_EXPLAINED = "**not explained**"
PREFIX = "table-"
"""The beginning of the names of the paper's tables."""

_INTRODUCTION = """\
## Differences of more than half a point

Rows of the paper's tables from which our mean differs by more than half a percentage point. *± se* is the standard
error of our mean over the evaluated participants. *reached* is the first evaluated step at which our mean had the
paper's accuracy. *why* names another run and what it came out as, with its own difference from the paper in
parentheses; "in part" if that is more than half a point, too. That it comes closer was measured; that it is the reason
is not proved."""


@dataclass(frozen=True)
class Difference:
    """A row whose mean differs from the paper's figure.

    Attributes:
        experiment: name of the experiment.
        found: the row with its results.
        metric: "accuracy", or "gap" for the difference from the centralised model.
        paper: the paper's figure, as a fraction.
        ours: our mean.
    """

    experiment: str
    found: EntryResult
    metric: str
    paper: float
    ours: float

    @property
    def is_large(self) -> bool:
        """True if it is to be listed."""
        return abs(self.ours - self.paper) > LARGE_DIFFERENCE


def of_experiment(outcome: ExperimentResult) -> Iterator[Difference]:
    """Yield the differences of all rows that have a result and a figure of the paper."""
    baseline = tables.baseline_accuracy(outcome.found)
    for each in outcome.done:
        reported, accuracy = each.entry.reported, each.accuracy
        if accuracy is None:
            continue
        if "accuracy" in reported:
            yield Difference(outcome.experiment.name, each, "accuracy", reported["accuracy"], accuracy)
        elif "gap" in reported and baseline is not None:
            yield Difference(outcome.experiment.name, each, "gap", reported["gap"] / 100, baseline - accuracy)


def section(outcomes: list[ExperimentResult]) -> str:
    """Return the section of the page that lists the large differences; equal rows of several tables are listed once."""
    known = {outcome.experiment.name: outcome for outcome in outcomes}
    listed: dict[object, Difference] = {}
    for name, outcome in known.items():
        if name.startswith(PREFIX):
            for each in of_experiment(outcome):
                listed.setdefault((each.found.entry.run, each.metric, each.paper), each)
    rows = tuple(_row(each, known) for each in listed.values() if each.is_large)
    if not rows:
        return ""
    header = ("table", "row", "why", "paper", "ours", "difference, points", "± se", "reached")
    return f"{_INTRODUCTION}\n\n{tables.ResultTable('', header, rows).to_markdown(texts=3)}"


def _row(difference: Difference, known: Mapping[str, ExperimentResult]) -> tuple[str, ...]:
    found, is_gap = difference.found, difference.metric == "gap"
    error = standard_error(found)
    return (
        difference.experiment.removeprefix(PREFIX),
        f"{found.entry.name}{', gap' if is_gap else ''}",
        _why(difference, known),
        *(f"{100 * value:.2f}{'' if is_gap else ' %'}" for value in (difference.paper, difference.ours)),
        f"{100 * (difference.ours - difference.paper):+.2f}",
        "" if error is None else f"{100 * error:.2f}",
        "" if is_gap else _reached(found, difference.paper),
    )


def _why(difference: Difference, known: Mapping[str, ExperimentResult]) -> str:
    error, by = standard_error(difference.found), abs(difference.ours - difference.paper)
    chance = "it is at most two standard errors, so it may be chance" if error is not None and by <= 2 * error else ""
    return "; ".join(filter(None, (chance, _other_run(difference, known)))) or NOT_EXPLAINED


def _other_run(difference: Difference, known: Mapping[str, ExperimentResult]) -> str:
    """Return what the run that explains a difference came out as; nothing if it has no result, or comes no closer."""
    why = difference.found.entry.why
    if why is None:
        return ""
    other = next(each for each in known[why.experiment].found if each.entry.name == why.row)
    if other.accuracy is None:
        return ""
    figures = f"{why.text}: {100 * other.accuracy:.2f} % in {why.experiment}, {why.row}"
    reported = other.entry.reported.get("accuracy")
    if reported is None:
        return figures
    left = other.accuracy - reported
    if abs(left) >= abs(difference.ours - difference.paper):
        return ""
    part = "in part, " if abs(left) > LARGE_DIFFERENCE else ""
    return f"{part}{figures} ({100 * left:+.2f})"


def standard_error(found: EntryResult) -> float | None:
    """Return the standard error of the mean accuracy over all evaluated participants; None for a single one."""
    values = [value for result in found.results for value in result.last.accuracy]
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _reached(found: EntryResult, accuracy: float) -> str:
    """Return the first evaluated step at which the mean over participants and seeds was at least `accuracy`."""
    histories = (result.history.evaluations for result in found.results)
    for evaluations in zip(*histories, strict=True):
        if fmean(fmean(each.accuracy) for each in evaluations) >= accuracy:
            return f"{evaluations[0].step} of {found.entry.run.steps}"
    return "never"
