"""The paper's experiments, and those of users: list them and run them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from cgd.errors import CGDError, InputError
from cgd.experiments import experiment_file, plots, tables
from cgd.experiments.entry_result import EntryResult
from cgd.experiments.runner import ResultStore, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cgd.experiments.experiment_file import Experiment, RunEntry
    from cgd.experiments.spec import RunSpec
    from cgd.simulation.loop import OnStep

    ProgressListener = Callable[[RunEntry, RunSpec], OnStep]


def experiments() -> dict[str, Experiment]:
    """Return all experiments of the paper, by name."""
    folder = resources.files("cgd.experiments") / "paper"
    files = sorted((Path(str(file)) for file in folder.iterdir() if file.name.endswith(".toml")), key=_sort_key)
    return {file.stem: experiment_file.read(file) for file in files}


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
        found: its entries, with the results that exist so far.
    """

    experiment: Experiment
    scale: str
    found: list[EntryResult]

    @property
    def done(self) -> list[EntryResult]:
        """The entries that have a result, of at least one seed."""
        return [each for each in self.found if each.results]

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
    """Return the entries of an experiment at this scale.

    Raises:
        InputError: the experiment does not have this scale.
    """
    if scale not in experiment.entries:
        known = ", ".join(experiment.entries)
        raise InputError(f"{experiment.name} has no scale {scale!r}; choose one of {known}")
    return experiment.entries[scale]


def select(chosen: Sequence[Experiment], scale: str, only: str) -> list[Experiment]:
    """Return the experiments with only those entries whose group and label contain a text.

    Capitals do not matter, and "x" also finds "×". A table of gaps keeps the centralised run, which gaps refer to.

    Raises:
        InputError: no entry contains the text, or an experiment does not have this scale.
    """
    selected = []
    for experiment in chosen:
        entries = entries_of(experiment, scale)
        found = [entry for entry in entries if _simple(only) in _simple(entry.name)]
        if found:
            baseline = experiment.show == "gaps"
            kept = (entry for entry in entries if entry in found or (baseline and entry.run.method == "centralised"))
            selected.append(replace(experiment, entries={scale: tuple(kept)}))
    if not selected:
        names = dict.fromkeys(entry.name for each in chosen for entry in entries_of(each, scale))
        raise InputError(f"--only is {only!r}, and no run has this text in its name; the runs are: {'; '.join(names)}")
    return selected


def _simple(text: str) -> str:
    return " ".join(text.replace("×", "x").casefold().split())


def stored_results(experiment: Experiment, scale: str, store: ResultStore) -> ExperimentResult:
    """Return the stored results of an experiment, without running anything."""
    found = []
    for entry in entries_of(experiment, scale):
        results = (store.get(each) for each in entry.runs)
        found.append(EntryResult(entry, tuple(result for result in results if result is not None)))
    return ExperimentResult(experiment, scale, found)


def run(
    experiment: Experiment, scale: str, store: ResultStore, data_dir: Path | None, listener: ProgressListener
) -> ExperimentResult:
    """Run the runs that have no result yet, and return all results.

    Args:
        experiment: the experiment.
        scale: scale of its runs.
        store: folder of results.
        data_dir: folder to search first for data sets.
        listener: function of an entry and one of its runs that returns the callback for the steps of the run.
    """
    entries = entries_of(experiment, scale)
    for entry in entries:  # check all runs before the first is trained
        with _name_in_errors(entry):
            for each in entry.runs:
                if not store.path(each).exists():
                    check(each, data_dir)
    found = []
    for entry in entries:
        with _name_in_errors(entry):
            results = [store.run(each, data_dir, listener(entry, each)) for each in entry.runs]
            found.append(EntryResult(entry, tuple(results)))
    return ExperimentResult(experiment, scale, found)


@contextmanager
def _name_in_errors(entry: RunEntry) -> Iterator[None]:
    """Prefix errors with the name of the entry."""
    try:
        yield
    except CGDError as error:
        error.args = (f"{entry.name}: {error}",)
        raise


def listing(out: Path) -> Table:
    """Return a table of all experiments, with the number of runs that have a result."""
    table = Table("name", "title", *(f"{scale} runs" for scale in experiment_file.SCALES))
    for name, experiment in experiments().items():
        progress = []
        for scale in experiment_file.SCALES:
            runs = [run for entry in experiment.entries.get(scale, ()) for run in entry.runs]
            ready = sum(ResultStore(out / scale).path(run).exists() for run in runs)
            progress.append(f"{ready} of {len(runs)}" if runs else "")
        table.add_row(name, experiment.title, *progress)
    return table


def _sort_key(file: Path) -> tuple[bool, bool, str]:
    """Sort tables first, then figures, then our own experiments."""
    return (not file.stem.startswith("table"), not file.stem.startswith("figure"), file.stem)
