"""The page that compares the stored results with the paper's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.experiments import differences, reproduce, tables, theory
from cgd.files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from cgd.experiments.entry_result import EntryResult
    from cgd.experiments.reproduce import ExperimentResult
    from cgd.experiments.runner import ResultStore
    from cgd.experiments.spec import RunSpec

_INTRODUCTION = """\
Built by `cgd reproduce report --scale {scale}` from the results in this folder, without training.
Losses and accuracies are those on the 10,000 test images after the last step, unless a section says otherwise. The
paper says that its figures are those of the worst participant, but the code published by its authors computes the mean.
Our figures are the mean over randomly chosen participants, with the worst of them in parentheses. *ours − paper* is in
percentage points of accuracy, for the mean and for the worst participant."""
_SEEDS = """\
If a table has a column *seeds*, figures are the mean over the seeds of the mean over participants, the worst of all,
and the standard deviation over the seeds of the means over participants. Runs that take minutes have three seeds, most
longer ones have one; "1 of 3" means that two of the planned seeds have not been run yet."""
QUICK_SCALE = """\
**This is the quick scale, with fewer samples and fewer steps than in the paper, to check that everything works. The
figures are not comparable with those of the paper.**"""


def write(scale: str, store: ResultStore) -> Path:
    """Write the page of all results at this scale, and return its path."""
    known = [each for each in reproduce.experiments().values() if scale in each.entries]
    results = [reproduce.stored_results(each, scale, store) for each in known]
    several = any(each.entry.seeds > 1 for result in results for each in result.done)
    parts = ["# The paper's results and ours", _INTRODUCTION.format(scale=scale)]
    parts += [_SEEDS] if several else []
    parts += [QUICK_SCALE] if scale == "quick" else []
    parts.append(_one_column_table(results))
    parts += [differences.section(results)] if scale == "paper" else []
    for result in results:
        parts += list(_section(result, store.folder))
    return save(store.folder / "report.md", parts)


def save(page: Path, parts: Iterable[str]) -> Path:
    """Write a page of several parts, without the empty ones, and return its path.

    Raises:
        InputError: it cannot be written.
    """
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(page, "\n\n".join(filter(None, parts)) + "\n")
    except OSError as error:
        raise InputError(f"{page} cannot be written ({error.strerror}); name another folder with --out") from None
    return page


def _section(outcome: ExperimentResult, folder: Path) -> Iterator[str]:
    experiment = outcome.experiment
    yield f"## {experiment.title}"
    yield experiment.about
    if not outcome.done:
        yield f"Not run yet: `cgd reproduce {experiment.name} --scale {outcome.scale}`."
        return
    if experiment.show != "curves":
        yield outcome.table.to_markdown()
    plot = outcome.plot(folder / "plots")
    if plot is not None:
        yield f"![{experiment.title}](plots/{plot.name})"
    yield "\n".join(f"- {each}" for each in findings(outcome))


def findings(outcome: ExperimentResult) -> Iterator[str]:
    """Yield sentences that summarise the table."""
    if outcome.experiment.show == "curves":
        return
    compared = list(differences.of_experiment(outcome))
    if compared:
        large = [
            f"{each.found.entry.name} ({100 * (each.ours - each.paper):+.2f})" for each in compared if each.is_large
        ]
        yield f"Our mean differs from the paper by more than half a point: {', '.join(large) or 'none'}."
    if outcome.experiment.show == "sweep":
        yield from _rankings(outcome)
    if outcome.experiment.show == "regret":
        networks = [each for each in outcome.done if each.entry.run.hidden]
        convex = [each for each in outcome.done if not each.entry.run.hidden]
        yield from _theorem_findings(convex) if convex else ()
        yield from _network_findings(networks)
    missing = [each.entry.name for each in outcome.found if not each.results]
    if missing:
        yield f"Not run at this scale: {', '.join(missing)}."
    partly = [f"{each.entry.name} ({each.seeds})" for each in outcome.done if each.missing]
    if partly:
        yield f"Not run with all seeds: {', '.join(partly)}."


def _rankings(outcome: ExperimentResult) -> Iterator[str]:
    """Yield the order of the runs by accuracy, here and in the paper, for each complete group."""
    for group in dict.fromkeys(each.entry.group for each in outcome.found):
        accuracies = {each.entry.label: each.accuracy for each in outcome.found if each.entry.group == group}
        known = {label: accuracy for label, accuracy in accuracies.items() if accuracy is not None}
        if len(known) < 2 or len(known) < len(accuracies):
            continue
        ours = sorted(known, key=lambda label: -known[label])
        sentence = f"{group}, best first: {' > '.join(ours)}"
        paper = {each.entry.label: each.entry.reported for each in outcome.found if each.entry.group == group}
        if all("accuracy" in reported for reported in paper.values()):
            theirs = sorted(paper, key=lambda label: -paper[label]["accuracy"])
            sentence += "; the paper has the same order" if theirs == ours else f"; the paper has {' > '.join(theirs)}"
        yield f"{sentence}."


def _theorem_findings(done: list[EntryResult]) -> Iterator[str]:
    """Yield sentences that compare the regret with the bound of Theorem 1."""
    single = [theory.WorstCase.of([result]) for each in done for result in each.results]
    ratios = [each.regret[-1] / sum(each.terms) for each in single]
    yield (
        f"R is {'below' if max(ratios) < 1 else 'NOT always below'} the bound: it is at most {max(ratios):.1%} of the "
        "sum of the bound's terms with the constants of the proof (D measured at the start and at the end of a run)."
    )
    worst = [(each.entry, theory.WorstCase.of(each.results)) for each in done]
    power = theory.growth_with_epsilon([each for entry, each in worst if entry.run.mu == 0 and not entry.run.delay])
    if power is not None:
        yield (
            f"With a fixed step, F(w_T) − F(w_*), minus its value for the smallest δ, grows like ε^{power:.1f} between "
            "the two largest δ; the bound is linear in ε."
        )
    printed = sorted((entry.run.steps, each.regret) for entry, each in worst if entry.group == "as printed")
    if printed:
        # After one step, R is the excess loss before it.
        regrets = [f"{regret[-1]:.3g} of {regret[0]:.3g} after {steps} steps" for steps, regret in printed]
        yield (
            f"With the step size as printed, R is {', '.join(regrets)} (the second figure is F(w_1) − F(w_*)). "
            "The sum of all step sizes is at most α/(μT): the longer the run, the less the models move, and R does not "
            "decrease with T."
        )


def _network_findings(done: list[EntryResult]) -> Iterator[str]:
    """Yield sentences about the regret of networks, for each group: does it decrease with the steps, and with ε?"""
    if done:
        lowest = max(theory.reference(result).optimum for each in done for result in each.results)
        yield f"The loss that is taken for F(w_*) is at most {lowest:.1g}."
    for group in dict.fromkeys(each.entry.group for each in done):
        own = [each for each in done if each.entry.group == group]
        worst = [theory.WorstCase.of(each.results) for each in own]
        falling = sum(each.falls_with_steps for each in worst)
        ratios = [
            f"{entry.entry.label}: {each.regret[-1] / each.halfway_regret:.2f} and {each.gap / each.halfway_gap:.2f}"
            for entry, each in zip(own, worst, strict=True)
        ]
        yield (
            f"{group}: R decreases in the second half of the steps in {falling} of {len(worst)} runs. R and "
            f"F(w_T) − F(w_*) after all steps, divided by those after half of them: {'; '.join(ratios)}."
        )
        power = theory.growth_with_epsilon(worst)
        if power is not None:
            yield (
                f"{group}: F(w_T) − F(w_*), minus its value for the smallest δ, grows like ε^{power:.1f} between the "
                "two largest δ; the theorem's bound, for a convex F, is linear in ε."
            )


def _one_column_table(outcomes: list[ExperimentResult]) -> str:
    """Return a table that compares `joint` grids with the runs that have the same rows and one column."""
    accuracies = _accuracies(outcomes)
    rows = []
    for run, joint in accuracies.items():
        single = accuracies.get(replace(run, columns=1))
        if run.method != "cgd" or run.mode != "joint" or run.columns == 1 or single is None:
            continue
        delta = "random" if isinstance(run.delta, tuple) else f"{run.delta:g}"
        row = (f"{run.rows}×{run.columns}", delta, f"{100 * joint:.2f} %", f"{100 * single:.2f} %")
        rows.append((*row, f"{100 * (joint - single):+.2f}"))
    if not rows:
        return ""
    header = ("joint grid", "δ", "accuracy", "accuracy with one column", "difference, points")
    return (
        "## Joint grids and the same rows with one column\n\n"
        + tables.ResultTable("", header, tuple(rows)).to_markdown()
    )


def _accuracies(outcomes: list[ExperimentResult]) -> dict[RunSpec, float]:
    """Return the mean accuracy over the seeds by first run; if entries share it, that over the most seeds."""
    done = sorted((each for outcome in outcomes for each in outcome.done), key=lambda each: len(each.results))
    return {each.entry.run: each.accuracy for each in done if each.accuracy is not None}
