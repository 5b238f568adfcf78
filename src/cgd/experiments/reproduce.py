"""The paper's experiments: which there are, running them, and the page that shows what came out."""

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

    from cgd.experiments.runner import Result
    from cgd.experiments.spec import Experiment, RunEntry
    from cgd.simulation.loop import OnStep

    ProgressListener = Callable[[RunEntry], OnStep]

HALF_A_POINT = 0.005
_INTRODUCTION = """\
Built by `cgd reproduce report --scale {scale}` from the results beside this page; nothing is trained for it.
Losses and accuracies are on the 10,000 test images after the last step, save where a section says otherwise. The paper
says that its figures are the worst participant's, but the code its authors published takes the mean. Ours are the mean
over the participants that were evaluated, drawn at random, and in parentheses the worst of them. *ours − paper* is in
points of accuracy, again for the mean and for the worst."""
_QUICK = """\
**This is the quick scale: fewer samples and fewer steps than the paper's, to see that everything works. The figures are
not comparable with the paper's.**"""


def experiments() -> dict[str, Experiment]:
    """All experiments of the paper, by name."""
    folder = resources.files("cgd.experiments") / "paper"
    files = sorted((Path(str(file)) for file in folder.iterdir() if file.name.endswith(".toml")), key=_in_order)
    return {file.stem: spec.read(file) for file in files}


def get(name: str) -> Experiment:
    """An experiment by name.

    Raises:
        InputError: there is none of this name.
    """
    known = experiments()
    if name not in known:
        raise InputError(f"there is no experiment {name!r}; `cgd reproduce list` shows them: {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class ExperimentResult:
    """An experiment with the results that are there."""

    experiment: Experiment
    scale: str
    found: list[tuple[RunEntry, Result | None]]

    @property
    def done(self) -> list[tuple[RunEntry, Result]]:
        """Those that have run."""
        return [(entry, result) for entry, result in self.found if result is not None]

    @property
    def titled(self) -> Experiment:
        """The experiment, with a title that says if this is not its real size."""
        quick = " (quick scale, not the paper's size)" if self.scale == "quick" else ""
        return replace(self.experiment, title=self.experiment.title + quick)

    @property
    def sheet(self) -> tables.Sheet:
        """The table."""
        return tables.sheet(self.titled, self.found)

    def plot(self, folder: Path) -> Path | None:
        """Draw the picture into a folder; None if the experiment has none."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.experiment.name}.png"
        return path if plots.draw(self.titled, self.done, path) else None


def entries_of(experiment: Experiment, scale: str) -> tuple[RunEntry, ...]:
    """The runs of an experiment at this scale.

    Raises:
        InputError: it does not have this scale.
    """
    if scale not in experiment.entries:
        known = ", ".join(experiment.entries)
        raise InputError(f"{experiment.name} has no scale {scale!r}; choose one of {known}")
    return experiment.entries[scale]


def look_up(experiment: Experiment, scale: str, store: ResultStore) -> ExperimentResult:
    """What is there of an experiment, without running anything."""
    return ExperimentResult(
        experiment, scale, [(entry, store.get(entry.run)) for entry in entries_of(experiment, scale)]
    )


def run(
    experiment: Experiment, scale: str, store: ResultStore, data_dir: Path | None, watch: ProgressListener
) -> ExperimentResult:
    """Run what is not there yet."""
    entries = entries_of(experiment, scale)
    for entry in entries:  # before the first is trained, see whether all can be
        with _called_by_name(entry):
            if not store.path(entry.run).exists():
                check(entry.run, data_dir)
    found: list[tuple[RunEntry, Result | None]] = []
    for entry in entries:
        with _called_by_name(entry):
            found.append((entry, store.run(entry.run, data_dir, watch(entry))))
    return ExperimentResult(experiment, scale, found)


@contextmanager
def _called_by_name(entry: RunEntry) -> Iterator[None]:
    """An error says in which run it happened."""
    try:
        yield
    except CGDError as error:
        error.args = (f"{_called(entry)}: {error}",)
        raise


def listing(out: Path) -> Table:
    """All experiments, and how much of each has been run."""
    table = Table("name", "what", *(f"{scale} runs" for scale in spec.SCALES))
    for name, experiment in experiments().items():
        there = []
        for scale in spec.SCALES:
            entries = experiment.entries.get(scale, ())
            ready = sum(ResultStore(out / scale).path(entry.run).exists() for entry in entries)
            there.append(f"{ready} of {len(entries)}" if entries else "")
        table.add_row(name, experiment.title, *there)
    return table


def report(scale: str, store: ResultStore) -> Path:
    """One page with everything that has run at this scale, the paper beside ours; returns its path."""
    outcomes = [look_up(each, scale, store) for each in experiments().values() if scale in each.entries]
    parts = ["# The paper's MNIST results, and ours", _INTRODUCTION.format(scale=scale)]
    parts += [_QUICK] if scale == "quick" else []
    parts.append(_twins(outcomes))
    for outcome in outcomes:
        parts += list(_section(outcome, store.folder))
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
        yield outcome.sheet.for_page()
    picture = outcome.plot(folder / "plots")
    if picture is not None:
        yield f"![{experiment.title}](plots/{picture.name})"
    yield "\n".join(f"- {each}" for each in _findings(outcome))


def _findings(outcome: ExperimentResult) -> Iterator[str]:
    """What the table says, in sentences."""
    if outcome.experiment.show == "curves":
        return
    far = [
        f"{_called(entry)} ({100 * (_accuracy(result) - entry.reported['accuracy']):+.2f})"
        for entry, result in outcome.done
        if "accuracy" in entry.reported and abs(_accuracy(result) - entry.reported["accuracy"]) > HALF_A_POINT
    ]
    if any("accuracy" in entry.reported for entry, _ in outcome.done):
        yield f"Our mean is more than half a point from the paper: {', '.join(far) if far else 'none'}."
    if outcome.experiment.show == "sweep":
        yield from _orders(outcome)
    if outcome.experiment.show == "regret":
        yield from _of_the_theorem(outcome.done)
    missing = [_called(entry) for entry, result in outcome.found if result is None]
    if missing:
        yield f"Not run at this scale: {', '.join(missing)}."


def _orders(outcome: ExperimentResult) -> Iterator[str]:
    """Of each group that has run as a whole: which settings are the best, here and in the paper."""
    for group in dict.fromkeys(entry.group for entry, _ in outcome.found):
        own = [(entry, result) for entry, result in outcome.done if entry.group == group]
        if len(own) < 2 or len(own) < sum(entry.group == group for entry, _ in outcome.found):
            continue
        ours = [entry.label for entry, _ in sorted(own, key=lambda pair: -_accuracy(pair[1]))]
        said = f"{group}, best first: {' > '.join(ours)}"
        if all("accuracy" in entry.reported for entry, _ in own):
            ranked = sorted((entry for entry, _ in own), key=lambda entry: -entry.reported["accuracy"])
            theirs = [entry.label for entry in ranked]
            said += "; the paper has the same order" if theirs == ours else f"; the paper has {' > '.join(theirs)}"
        yield f"{said}."


def _of_the_theorem(done: list[tuple[RunEntry, Result]]) -> Iterator[str]:
    """Does the regret behave as Theorem 1 says?"""
    share = []
    for entry, result in done:
        known = theory.Theory(**result.extra["theory"])
        worst = max(theory.regret(result.history, known.optimum)[-1])
        share.append(worst / sum(known.terms(entry.run.steps, entry.run.mu, entry.run.lr).values()))
    yield (
        f"R lies {'below' if max(share) < 1 else 'NOT always below'} the bound: it is at most {max(share):.1%} of the "
        "sum of the bound's terms with the constants of the proof (D taken at the start and at the end of a run)."
    )
    fixed = sorted(
        (max(result.extra["theory"]["epsilon"]), max(result.last.loss) - result.extra["theory"]["optimum"])
        for entry, result in done
        if entry.run.mu == 0
    )
    if len(fixed) > 2:
        (_, rest), (small, low), (large, high) = fixed[0], fixed[-2], fixed[-1]
        power = math.log((high - rest) / (low - rest)) / math.log(large / small)
        yield (
            f"With a fixed step, what F(w_T) − F(w_*) has beyond that of the smallest δ grows like ε^{power:.1f} "
            "between the two largest δ; the bound is linear in ε."
        )
    printed = sorted((entry.run.steps, entry, result) for entry, result in done if entry.group == "as printed")
    if printed:
        told = []
        for steps, _, result in printed:
            known = theory.Theory(**result.extra["theory"])
            start = max(result.history.evaluations[0].loss) - known.optimum
            worst = max(theory.regret(result.history, known.optimum)[-1])
            told.append(f"{worst:.3g} of {start:.3g} after {steps} steps")
        yield (
            f"With the step as printed, R is {', '.join(told)} (F(w_1) − F(w_*) is the second figure). The sum of "
            "all steps is at most α/(μT): the longer the run, the less the models move, and R does not fall with T."
        )


def _twins(outcomes: list[ExperimentResult]) -> str:
    """`joint` grids beside the colonies with the same rows and one column."""
    results = {entry.run: result for outcome in outcomes for entry, result in outcome.done}
    rows = []
    for run, result in results.items():
        twin = results.get(replace(run, columns=1))
        if run.method != "cgd" or run.mode != "joint" or run.columns == 1 or twin is None:
            continue
        ours, theirs = _accuracy(result), _accuracy(twin)
        delta = "own" if isinstance(run.delta, tuple) else f"{run.delta:g}"
        row = (f"{run.rows}×{run.columns}", delta, f"{100 * ours:.2f} %", f"{100 * theirs:.2f} %")
        rows.append((*row, f"{100 * (ours - theirs):+.2f}"))
    if not rows:
        return ""
    header = ("joint grid", "δ", "accuracy", "m^h×1 twin", "difference, points")
    return "## Joint grids beside their m^h×1 twins\n\n" + tables.Sheet("", header, tuple(rows)).for_page()


def _called(entry: RunEntry) -> str:
    return f"{entry.group} {entry.label}".strip()


def _accuracy(result: Result) -> float:
    return fmean(result.last.accuracy)


def _in_order(file: Path) -> tuple[bool, bool, str]:
    """Tables first, then figures, then what is ours."""
    return (not file.stem.startswith("table"), not file.stem.startswith("figure"), file.stem)
