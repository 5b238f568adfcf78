"""The paper's experiments: list them, run them, and build the report that compares the results with the paper."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.table import Table

from cgd.errors import CGDError, InputError
from cgd.experiments import plots, spec, tables, theory
from cgd.experiments.runner import ResultStore, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgd.experiments.runner import RunResult
    from cgd.experiments.spec import Experiment, RunEntry
    from cgd.simulation.loop import OnStep

    ProgressListener = Callable[[RunEntry], OnStep]

LARGE_DIFFERENCE = 0.005
"""Differences of accuracy above half a percentage point are listed in the report."""

_INTRODUCTION = """\
Built by `cgd reproduce report --scale {scale}` from the results in this folder, without training.
Losses and accuracies are those on the 10,000 test images after the last step, unless a section says otherwise. The
paper says that its figures are those of the worst participant, but the code published by its authors computes the mean.
Our figures are the mean over randomly chosen participants, with the worst of them in parentheses. *ours − paper* is in
percentage points of accuracy, for the mean and for the worst participant."""
_QUICK = """\
**This is the quick scale, with fewer samples and fewer steps than in the paper, to check that everything works. The
figures are not comparable with those of the paper.**"""


def experiments() -> dict[str, Experiment]:
    """Return all experiments of the paper, by name."""
    folder = resources.files("cgd.experiments") / "paper"
    files = sorted((Path(str(file)) for file in folder.iterdir() if file.name.endswith(".toml")), key=_sort_key)
    return {file.stem: spec.read(file) for file in files}


def get(name: str) -> Experiment:
    """Return an experiment by name.

    Raises:
        InputError: no experiment has this name.
    """
    known = experiments()
    if name not in known:
        raise InputError(f"there is no experiment {name!r}; `cgd reproduce list` shows them: {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class ExperimentResult:
    """An experiment and its results.

    Attributes:
        experiment: the experiment.
        scale: scale of its runs.
        found: its runs, with the result or None if there is none yet.
    """

    experiment: Experiment
    scale: str
    found: list[tuple[RunEntry, RunResult | None]]

    @property
    def done(self) -> list[tuple[RunEntry, RunResult]]:
        """The runs that have a result."""
        return [(entry, result) for entry, result in self.found if result is not None]

    @property
    def titled(self) -> Experiment:
        """The experiment, with a title that names the quick scale."""
        quick = " (quick scale, not the paper's size)" if self.scale == "quick" else ""
        return replace(self.experiment, title=self.experiment.title + quick)

    @property
    def table(self) -> tables.ResultTable:
        """The table of the results."""
        return tables.result_table(self.titled, self.found)

    def plot(self, folder: Path) -> Path | None:
        """Draw the plot to a folder and return its path; None if the experiment has none."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.experiment.name}.png"
        return path if plots.draw(self.titled, self.done, path) else None


def entries_of(experiment: Experiment, scale: str) -> tuple[RunEntry, ...]:
    """Return the runs of an experiment at this scale.

    Raises:
        InputError: the experiment does not have this scale.
    """
    if scale not in experiment.entries:
        known = ", ".join(experiment.entries)
        raise InputError(f"{experiment.name} has no scale {scale!r}; choose one of {known}")
    return experiment.entries[scale]


def stored_results(experiment: Experiment, scale: str, store: ResultStore) -> ExperimentResult:
    """Return the stored results of an experiment, without running anything."""
    return ExperimentResult(
        experiment, scale, [(entry, store.get(entry.run)) for entry in entries_of(experiment, scale)]
    )


def run(
    experiment: Experiment, scale: str, store: ResultStore, data_dir: Path | None, listener: ProgressListener
) -> ExperimentResult:
    """Run the runs that have no result yet, and return all results.

    Args:
        experiment: the experiment.
        scale: scale of its runs.
        store: folder of results.
        data_dir: folder to search first for data sets.
        listener: function of a run that returns the callback for its steps.
    """
    entries = entries_of(experiment, scale)
    for entry in entries:  # check all runs before the first is trained
        with _name_in_errors(entry):
            if not store.path(entry.run).exists():
                check(entry.run, data_dir)
    found: list[tuple[RunEntry, RunResult | None]] = []
    for entry in entries:
        with _name_in_errors(entry):
            found.append((entry, store.run(entry.run, data_dir, listener(entry))))
    return ExperimentResult(experiment, scale, found)


@contextmanager
def _name_in_errors(entry: RunEntry) -> Iterator[None]:
    """Prefix errors with the name of the run."""
    try:
        yield
    except CGDError as error:
        error.args = (f"{_entry_name(entry)}: {error}",)
        raise


def listing(out: Path) -> Table:
    """Return a table of all experiments, with the number of runs that have a result."""
    table = Table("name", "title", *(f"{scale} runs" for scale in spec.SCALES))
    for name, experiment in experiments().items():
        progress = []
        for scale in spec.SCALES:
            entries = experiment.entries.get(scale, ())
            ready = sum(ResultStore(out / scale).path(entry.run).exists() for entry in entries)
            progress.append(f"{ready} of {len(entries)}" if entries else "")
        table.add_row(name, experiment.title, *progress)
    return table


def report(scale: str, store: ResultStore) -> Path:
    """Write the report that compares all results at this scale with the paper's, and return its path."""
    results = [stored_results(each, scale, store) for each in experiments().values() if scale in each.entries]
    parts = ["# The paper's results and ours", _INTRODUCTION.format(scale=scale)]
    parts += [_QUICK] if scale == "quick" else []
    parts.append(_one_column_table(results))
    for result in results:
        parts += list(_section(result, store.folder))
    page = store.folder / "report.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
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
    yield "\n".join(f"- {each}" for each in _findings(outcome))


def _findings(outcome: ExperimentResult) -> Iterator[str]:
    """Yield sentences that summarise the table."""
    if outcome.experiment.show == "curves":
        return
    large = [
        f"{_entry_name(entry)} ({100 * (_accuracy(result) - entry.reported['accuracy']):+.2f})"
        for entry, result in outcome.done
        if "accuracy" in entry.reported and abs(_accuracy(result) - entry.reported["accuracy"]) > LARGE_DIFFERENCE
    ]
    if any("accuracy" in entry.reported for entry, _ in outcome.done):
        yield f"Our mean differs from the paper by more than half a point: {', '.join(large) or 'none'}."
    if outcome.experiment.show == "sweep":
        yield from _rankings(outcome)
    if outcome.experiment.show == "regret":
        yield from _theorem_findings(outcome.done)
    missing = [_entry_name(entry) for entry, result in outcome.found if result is None]
    if missing:
        yield f"Not run at this scale: {', '.join(missing)}."


def _rankings(outcome: ExperimentResult) -> Iterator[str]:
    """Yield the order of the runs by accuracy, here and in the paper, for each complete group."""
    for group in dict.fromkeys(entry.group for entry, _ in outcome.found):
        own = [(entry, result) for entry, result in outcome.done if entry.group == group]
        if len(own) < 2 or len(own) < sum(entry.group == group for entry, _ in outcome.found):
            continue
        ours = [entry.label for entry, _ in sorted(own, key=lambda pair: -_accuracy(pair[1]))]
        sentence = f"{group}, best first: {' > '.join(ours)}"
        if all("accuracy" in entry.reported for entry, _ in own):
            ranked = sorted((entry for entry, _ in own), key=lambda entry: -entry.reported["accuracy"])
            theirs = [entry.label for entry in ranked]
            sentence += "; the paper has the same order" if theirs == ours else f"; the paper has {' > '.join(theirs)}"
        yield f"{sentence}."


def _theorem_findings(done: list[tuple[RunEntry, RunResult]]) -> Iterator[str]:
    """Yield sentences that compare the regret with the bound of Theorem 1."""
    ratios = []
    for entry, result in done:
        bound = theory.ConvergenceBound(**result.extra["theory"])
        worst = max(theory.regret(result.history, bound.optimum)[-1])
        ratios.append(worst / sum(bound.terms(entry.run.steps, entry.run.mu, entry.run.lr).values()))
    yield (
        f"R is {'below' if max(ratios) < 1 else 'NOT always below'} the bound: it is at most {max(ratios):.1%} of the "
        "sum of the bound's terms with the constants of the proof (D measured at the start and at the end of a run)."
    )
    fixed = sorted(
        (max(result.extra["theory"]["epsilon"]), max(result.last.loss) - result.extra["theory"]["optimum"])
        for entry, result in done
        if entry.run.mu == 0
    )
    if len(fixed) > 2:
        (_, base), (small, low), (large, high) = fixed[0], fixed[-2], fixed[-1]
        power = math.log((high - base) / (low - base)) / math.log(large / small)
        yield (
            f"With a fixed step, F(w_T) − F(w_*), minus its value for the smallest δ, grows like ε^{power:.1f} between "
            "the two largest δ; the bound is linear in ε."
        )
    printed = sorted(
        ((entry.run.steps, result) for entry, result in done if entry.group == "as printed"), key=lambda pair: pair[0]
    )
    if printed:
        regrets = []
        for steps, result in printed:
            bound = theory.ConvergenceBound(**result.extra["theory"])
            start = max(result.history.evaluations[0].loss) - bound.optimum
            worst = max(theory.regret(result.history, bound.optimum)[-1])
            regrets.append(f"{worst:.3g} of {start:.3g} after {steps} steps")
        yield (
            f"With the step size as printed, R is {', '.join(regrets)} (the second figure is F(w_1) − F(w_*)). "
            "The sum of all step sizes is at most α/(μT): the longer the run, the less the models move, and R does not "
            "decrease with T."
        )


def _one_column_table(outcomes: list[ExperimentResult]) -> str:
    """Return a table that compares `joint` grids with the runs that have the same rows and one column."""
    results = {entry.run: result for outcome in outcomes for entry, result in outcome.done}
    rows = []
    for run, result in results.items():
        one_column = results.get(replace(run, columns=1))
        if run.method != "cgd" or run.mode != "joint" or run.columns == 1 or one_column is None:
            continue
        joint, single = _accuracy(result), _accuracy(one_column)
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


def _entry_name(entry: RunEntry) -> str:
    return f"{entry.group} {entry.label}".strip()


def _accuracy(result: RunResult) -> float:
    return fmean(result.last.accuracy)


def _sort_key(file: Path) -> tuple[bool, bool, str]:
    """Sort tables first, then figures, then our own experiments."""
    return (not file.stem.startswith("table"), not file.stem.startswith("figure"), file.stem)
