"""The paper's experiments, and those of users: list them and run them."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cgd.errors import CGDError, InputError
from cgd.experiments import durations, experiment_file, plots, tables
from cgd.experiments.entry_result import EntryResult
from cgd.experiments.runner import ResultStore, check, load_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cgd.experiments.experiment_file import Experiment, RunEntry
    from cgd.experiments.spec import RunSpec
    from cgd.simulation.loop import OnStep
    from cgd.simulation.ray_cluster import RayCluster

    ProgressListener = Callable[[RunEntry, RunSpec], OnStep]


@cache
def experiments() -> Mapping[str, Experiment]:
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

    If the text is the whole group and label of entries, only these are returned. Capitals do not matter, and "x" also
    finds "×". A table of gaps keeps the centralised run, which gaps refer to.

    Raises:
        InputError: the text is empty, no entry contains it, or an experiment does not have this scale.
    """
    if not _simple(only):
        raise InputError(f"--only is {only!r}, an empty text; name a row, or leave --only out to run all")
    selected = []
    for experiment in chosen:
        entries = entries_of(experiment, scale)
        found = [entry for entry in entries if _simple(only) == _simple(entry.name)]
        found = found or [entry for entry in entries if _simple(only) in _simple(entry.name)]
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
    experiment: Experiment,
    scale: str,
    store: ResultStore,
    data_dir: Path | None,
    listener: ProgressListener,
    cluster: RayCluster | None = None,
) -> ExperimentResult:
    """Run the runs that have no result yet, and return all results.

    Args:
        experiment: the experiment.
        scale: scale of its runs.
        store: folder of results.
        data_dir: folder to search first for data sets.
        listener: function of an entry and one of its runs that returns the callback for the steps of the run.
        cluster: Ray cluster that computes, see `runner.CLUSTER_METHODS`; None to compute in this process.
    """
    entries = entries_of(experiment, scale)
    for entry in entries:  # check all runs before the first is trained
        with _name_in_errors(entry):
            for each in entry.runs:
                if not store.path(each).exists():
                    each.check_device(store.device)
                    check(each, data_dir)
                    _check_classes(experiment, each, data_dir)
    found = []
    for entry in entries:
        with _name_in_errors(entry):
            results = [store.run(each, data_dir, listener(entry, each), cluster) for each in entry.runs]
            found.append(EntryResult(entry, tuple(results)))
    return ExperimentResult(experiment, scale, found)


def _check_classes(experiment: Experiment, run_spec: RunSpec, data_dir: Path | None) -> None:
    """Raise InputError for numbers to predict, which a file may have, if the table is of accuracies only."""
    if experiment.show == "gaps" and not load_data(run_spec, data_dir).classes:
        raise InputError(
            f"the labels of {run_spec.data} are numbers and have no accuracy to show gaps of; show a table or curves"
        )


def without_data(
    chosen: Sequence[Experiment], scale: str, store: ResultStore, data_dir: Path | None
) -> dict[str, list[Experiment]]:
    """Return the experiments that cannot be run because data cannot be loaded, by the error that has the remedy."""
    needed: dict[str, tuple[RunSpec, list[Experiment]]] = {}
    for experiment in chosen:
        for run_spec in sorted(_runs([experiment], scale), key=lambda each: each.slug):
            if not store.path(run_spec).exists():
                _, users = needed.setdefault(run_spec.data, (run_spec, []))
                users += [experiment] if experiment not in users else []
    found = {}
    for run_spec, users in needed.values():
        try:
            load_data(run_spec, data_dir)
        except InputError as error:
            found[str(error)] = users
    return found


@contextmanager
def _name_in_errors(entry: RunEntry) -> Iterator[None]:
    """Prefix errors with the name of the entry."""
    try:
        yield
    except CGDError as error:
        error.args = (f"{entry.name}: {error}",)
        raise


def listing(out: Path) -> Table:
    """Return a table of all experiments, with the runs that have a result, and the minutes that the others take."""
    scales = experiment_file.SCALES
    table = Table("name", "title", *(f"{scale} {column}" for scale in scales for column in ("runs", "minutes left")))
    known = list(experiments().values())
    rows = [*((each.name, each.title, [each]) for each in known), ("all", "all experiments, each run once", known)]
    for name, title, chosen in rows:
        progress = (_progress(_runs(chosen, scale), out / scale) for scale in scales)
        table.add_row(name, title, *itertools.chain(*progress), end_section=chosen == known[-1:])
    table.caption = _caption()
    return table


def listing_of(experiment: Experiment, out: Path) -> Table:
    """Return a table of the runs of an experiment, with the minutes of each that has no result."""
    table = Table("run", *(f"{scale} minutes" for scale in experiment.entries), title=experiment.title)
    for entries in zip(*experiment.entries.values(), strict=True):
        cells = []
        for scale, entry in zip(experiment.entries, entries, strict=True):
            missing = [run for run in entry.runs if not ResultStore(out / scale).path(run).exists()]
            cells.append(durations.minutes(missing) if missing else "done")
        table.add_row(Text(entries[0].name), *cells)
    table.caption = _caption()
    return table


def _caption() -> str:
    return (
        f"Minutes are for {durations.cores()} idle cores, without the features of CIFAR-10, which are computed once. "
        "Runs that have a result take none."
    )


def _runs(chosen: Iterable[Experiment], scale: str) -> set[RunSpec]:
    """Return the different runs of experiments at a scale."""
    return {run for experiment in chosen for entry in experiment.entries.get(scale, ()) for run in entry.runs}


def _progress(runs: set[RunSpec], folder: Path) -> tuple[str, str]:
    """Return the number of runs that have a result, and the minutes of the others, each "of" all."""
    store = ResultStore(folder)
    missing = [run for run in runs if not store.path(run).exists()]
    minutes = f"{durations.minutes(missing)} of {durations.minutes(runs)}"
    return (f"{len(runs) - len(missing)} of {len(runs)}", minutes) if runs else ("", "")


def _sort_key(file: Path) -> tuple[bool, bool, str]:
    """Sort tables first, then figures, then our own experiments."""
    return (not file.stem.startswith("table"), not file.stem.startswith("figure"), file.stem)
