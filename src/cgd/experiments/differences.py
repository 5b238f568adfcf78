"""Rows of the paper's tables from which our mean differs by more than half a point, with what was measured about them.

A row is explained by another run, which a spec names with `why`: the page shows what that run came out as. The results
of the row itself may explain it, too: the difference may be chance; our run may have had the paper's loss and accuracy
together at an earlier step; or the paper's figure may be that of one participant. If nothing of this was measured, the
row is listed as not explained. Two more figures are computed from the results of the row: the standard error of its
mean, and the step at which its mean had the paper's accuracy.
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
SAME_LOSS = 0.05
"""An evaluation has the paper's figures if its loss differs by at most this part, and its accuracy by half a point."""
DEVIATIONS = 2
"""The paper's figure may be that of one participant if it is at most this many standard deviations from our mean."""
NOT_EXPLAINED = "**not explained**"
PREFIX = "table-"
"""The beginning of the names of the paper's tables."""

_INTRODUCTION = """\
## Differences of more than half a point

Rows of the paper's tables from which our mean differs by more than half a percentage point. *± se* is the standard
error of our mean over the evaluated participants. *reached* is the first evaluated step at which our mean had the
paper's accuracy. *why* names another run and what it came out as, with its own difference from the paper in
parentheses; "in part" if that is more than half a point, too. Or it says what our own run shows: after fewer steps it
had the paper's loss (within 5 %) and accuracy (within half a point) together, as if the paper's steps were fewer or
smaller; or single participants differ so much (*sd*) that the paper's figure may be that of one of them. All of this
was measured; that it is the reason is not proved."""


@dataclass(frozen=True)
class Difference:
    """A row whose mean differs from the paper's figure.

    Attributes:
        experiment: name of the experiment.
        found: the row with its results.
        metric: "accuracy", or "gap" for the difference from the centralised model.
        paper: the paper's figure, as a fraction.
        ours: our mean.
        baseline: the row of the centralised model, for a gap.
    """

    experiment: str
    found: EntryResult
    metric: str
    paper: float
    ours: float
    baseline: EntryResult | None = None

    @property
    def is_large(self) -> bool:
        """True if it is to be listed."""
        return abs(self.ours - self.paper) > LARGE_DIFFERENCE


def of_experiment(outcome: ExperimentResult) -> Iterator[Difference]:
    """Yield the differences of all rows that have a result and a figure of the paper."""
    baseline = tables.baseline(outcome.found)
    for each in outcome.done:
        reported, accuracy = each.entry.reported, each.accuracy
        if accuracy is None:
            continue
        if "accuracy" in reported:
            yield Difference(outcome.experiment.name, each, "accuracy", reported["accuracy"], accuracy)
        elif "gap" in reported and baseline is not None and baseline.accuracy is not None:
            gap = baseline.accuracy - accuracy
            yield Difference(outcome.experiment.name, each, "gap", reported["gap"] / 100, gap, baseline)


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
    found, by = difference.found, abs(difference.ours - difference.paper)
    error, deviation = standard_error(found), _deviation(found)
    chance = "it is at most two standard errors, so it may be chance" if error is not None and by <= 2 * error else ""
    reasons = [chance, _other_run(difference, known), _earlier(difference)]
    if not any(reasons) and by <= DEVIATIONS * deviation:
        reasons.append(f"it may be the figure of one participant: ours have sd {100 * deviation:.2f}")
    return "; ".join(filter(None, reasons)) or NOT_EXPLAINED


def _earlier(difference: Difference) -> str:
    """Return the step at which our run was closest to the paper's figures, if it was close; or nothing."""
    means, steps = _means(difference.found), difference.found.entry.run.steps
    if difference.baseline is not None:
        pooled = _means(difference.baseline)
        # In the first half of a run the models have learned little, and a gap says nothing.
        gaps = {step: pooled[step][1] - means[step][1] for step in means if step in pooled and 2 * step >= steps}
        step = min(gaps, key=lambda each: abs(gaps[each] - difference.paper), default=None)
        if step is None or abs(gaps[step] - difference.paper) > LARGE_DIFFERENCE:
            return ""
        return f"our gap was {100 * gaps[step]:.2f} after {step} of {steps} steps"
    paper = difference.found.entry.reported.get("loss")
    if not paper:
        return ""
    distances = {
        step: abs(loss / paper - 1)
        for step, (loss, accuracy) in means.items()
        if abs(accuracy - difference.paper) <= LARGE_DIFFERENCE and abs(loss / paper - 1) <= SAME_LOSS
    }
    if not distances:
        return ""
    step = min(distances, key=distances.__getitem__)
    loss, accuracy = means[step]
    return (
        f"after {step} of {steps} steps ours was {100 * accuracy:.2f} %, with loss {loss:.3f} (the paper's {paper:.3f})"
    )


def _means(found: EntryResult) -> dict[int, tuple[float, float]]:
    """Return the mean loss and accuracy over participants and seeds, by step."""
    histories = (result.history.evaluations for result in found.results)
    return {
        evaluations[0].step: (
            fmean(fmean(each.loss) for each in evaluations),
            fmean(fmean(each.accuracy) for each in evaluations),
        )
        for evaluations in zip(*histories, strict=True)
    }


def _deviation(found: EntryResult) -> float:
    spread = found.spread("accuracy")
    return 0.0 if spread is None else spread.deviation


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
    steps = (step for step, (_, own) in _means(found).items() if own >= accuracy)
    return next((f"{step} of {found.entry.run.steps}" for step in steps), "never")
