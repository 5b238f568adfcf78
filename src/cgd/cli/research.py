"""Commands for researchers: `cgd demo`, `cgd reproduce`, `cgd simulate`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import app
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress

    from cgd.experiments.experiment_file import Experiment, RunEntry
    from cgd.experiments.runner import ResultStore
    from cgd.experiments.spec import RunSpec
    from cgd.simulation.loop import OnStep
    from cgd.simulation.ray_cluster import RayCluster, WorkerReport
    from cgd.simulation.result import History


class DatasetName(StrEnum):
    """Data sets that need no download."""

    breast_cancer = "breast-cancer"
    digits = "digits"


class Scale(StrEnum):
    """The scale of the experiments."""

    quick = "quick"
    paper = "paper"


@app.command()
def demo(
    participants: Annotated[int, typer.Option(help="The number of hospitals.")] = 5,
    steps: Annotated[int, typer.Option(help="The number of steps of gradient descent.")] = 300,
    dataset: Annotated[
        DatasetName, typer.Option(help="The data set, included in scikit-learn.")
    ] = DatasetName.breast_cancer,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data split and of the models' origins.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    plot_file: Annotated[Path, typer.Option("--plot", help="Write the curves to this PNG file.")] = Path(
        "cgd-demo.png"
    ),
) -> None:
    """Compare hospitals with uneven data that train together by CGD, alone, and on pooled data."""
    for path in filter(None, (json_file, plot_file)):
        _check_writable(path)
    if plot_file.suffix.lower() != ".png":
        raise InputError(f"the plot is {plot_file}; it is a PNG file, so choose a name that ends with .png")

    from rich.console import Console

    from cgd.experiments import demo as experiment

    settings = experiment.DemoSettings(dataset.value, participants, steps, seed)
    console = Console()
    with _progress() as progress:
        tasks = {
            "pooled": progress.add_task("all data pooled", total=steps),
            "alone": progress.add_task("each alone", total=steps * participants),
            "together": progress.add_task("together, confined", total=steps * participants),
        }
        result = experiment.run(settings, advance=lambda part: progress.advance(tasks[part]))
    # Files before output, so that a closed terminal loses nothing.
    written = [f"The curves are in {plot_file}"]
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        written.append(f"The results are in {json_file}")
    experiment.plot(result, plot_file)
    console.print(experiment.table(result))
    console.print(experiment.disclosure(result), highlight=False)
    console.print("\n".join(written), soft_wrap=True, markup=False)


DataDir = Annotated[
    Path | None, typer.Option(help="The first folder to search for data sets (then: CGD_DATA, caches).")
]

Only = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Run only what has this text in its group and label, such as 10x7.")
]


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help="`list`, `report`, `claims`, `all`, or an experiment such as table-3.")],
    name: Annotated[str | None, typer.Argument(help="With `list`: an experiment, to list its runs.")] = None,
    scale: Annotated[Scale, typer.Option(help="Small and quick, or the paper's sizes.")] = Scale.quick,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Continue from existing results, or start again.")
    ] = True,
    out: Annotated[Path, typer.Option(help="The folder for results; it has a folder for each scale.")] = Path(
        "results"
    ),
    data_dir: DataDir = None,
    only: Only = None,
) -> None:
    """Reproduce the paper's experiments, and show the results next to the paper's.

    Results are saved as JSON files and computed once. An interrupted or killed run continues from its last checkpoint.
    With `all`, experiments whose data are missing are left out and named at the end.
    """
    from rich.console import Console

    from cgd.experiments import report_page
    from cgd.experiments import reproduce as paper
    from cgd.experiments.runner import ResultStore

    console = Console()
    store = ResultStore(out / scale.value)
    if only is not None and what in ("list", "report", "claims"):
        raise InputError(f"--only is {only!r}, but `{what}` runs nothing; name an experiment, or leave --only out")
    if name is not None and what != "list":
        raise InputError(f"there are two names, {what!r} and {name!r}; only `list` takes another one, leave it out")
    if what == "list":
        console.print(paper.listing(out) if name is None else paper.listing_of(paper.get(name), out))
        return
    if what == "report":
        console.print(f"The page is {report_page.write(scale.value, store)}", soft_wrap=True, markup=False)
        return
    if what == "claims":
        console.print(f"The page is {_write_claims(scale.value, store)}", soft_wrap=True, markup=False)
        return
    chosen = list(paper.experiments().values()) if what == "all" else [paper.get(what)]
    chosen = chosen if only is None else paper.select(chosen, scale.value, only)
    entries = [entry for experiment in chosen for entry in paper.entries_of(experiment, scale.value)]
    store.prepare([run for entry in entries for run in entry.runs], fresh=not resume)
    lacking = paper.without_data(chosen, scale.value, store, data_dir) if what == "all" else {}
    for experiment in chosen:
        if not any(experiment in users for users in lacking.values()):
            _run_experiment(experiment, scale.value, store, data_dir, plot=only is None)
    if lacking:
        reasons = (f"{', '.join(each.name for each in users)}: {error}" for error, users in lacking.items())
        raise InputError(
            f"these experiments were not run, because their data are missing. {'. '.join(reasons)}. With the data, the "
            "same command runs them"
        )


def _write_claims(scale: str, store: ResultStore) -> Path:
    """Write the page of the paper's claims, and return its path."""
    from cgd.audit import privacy_claims
    from cgd.experiments import accuracy_claims, claims, influence_claims

    stored = privacy_claims.claims(store.folder.parent)
    return claims.write((*accuracy_claims.CLAIMS, *influence_claims.CLAIMS, *stored), scale, store)


@app.command()
def simulate(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The runs; see docs/simulation.md.")],
    scale: Annotated[Scale | None, typer.Option(help="The scale, if the file has several.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Continue from existing results, or start again.")
    ] = True,
    out: Annotated[Path, typer.Option(help="The folder for results.")] = Path("cgd-simulation"),
    data_dir: DataDir = None,
    only: Only = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Compute on a Ray cluster: local, auto, HOST:PORT, ray://HOST:PORT."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="With --ray: the number of workers [all processors].")] = None,
    device: Annotated[
        str, typer.Option(help="Where models of missing results compute: 'cpu', 'cuda', 'cuda:1' or 'mps'.")
    ] = "cpu",
) -> None:
    """Simulate the federations that a TOML file describes; write a table, a plot and JSON files."""
    if workers is not None and ray is None:
        raise InputError(f"--workers is {workers} and there is no --ray; add --ray local, or leave --workers out")
    if ray is not None and device != "cpu":
        raise InputError(f"--device is {device} and --ray is {ray}; a cluster computes on processors, leave one out")
    from cgd.experiments import experiment_file
    from cgd.experiments import reproduce as paper
    from cgd.experiments.runner import ResultStore
    from cgd.optim.flat_vectors import check_device

    place = check_device(device)
    experiment = experiment_file.read(spec_file)
    chosen = scale.value if scale else next(iter(experiment.entries))
    store = ResultStore(out / chosen if len(experiment.entries) > 1 else out, place)
    if only is not None:
        (experiment,) = paper.select([experiment], chosen, only)
    runs = [run for entry in paper.entries_of(experiment, chosen) for run in entry.runs]
    store.prepare(runs, fresh=not resume)
    if ray is None:
        _run_experiment(experiment, chosen, store, data_dir, plot=only is None)
        return
    from cgd.simulation.ray_cluster import RayCluster

    last: list[WorkerReport] = []

    def keep(reports: Sequence[WorkerReport]) -> None:
        last[:] = reports

    with RayCluster(ray, workers).connected():  # once for all runs
        cluster = RayCluster(workers=workers, on_report=keep)
        _run_experiment(experiment, chosen, store, data_dir, plot=only is None, cluster=cluster)
    if last:
        _print_workers(last)


def _print_workers(workers: Sequence[WorkerReport]) -> None:
    """Print what the workers of the last run have used, on standard error."""
    from rich.console import Console
    from rich.table import Table

    table = Table("worker", "node", "participants", "samples", "processor time", "peak memory", "losses")
    for each in workers:
        used = f"{each.seconds:.1f} s", f"{each.peak_memory / 1e9:.2f} GB", str(each.losses)
        table.add_row(str(each.number), each.node, f"{each.participants:,}", f"{each.samples:,}", *used)
    Console(stderr=True).print(table)


def _run_experiment(
    experiment: Experiment,
    scale: str,
    store: ResultStore,
    data_dir: Path | None,
    *,
    plot: bool,
    cluster: RayCluster | None = None,
) -> None:
    """Run the missing runs, then print the table; draw the plot, unless it would replace that of all runs."""
    from rich.console import Console

    from cgd.experiments import reproduce as paper

    entries = paper.entries_of(experiment, scale)
    with _progress() as progress:
        tasks = {
            run: progress.add_task(
                entry.name_of(run), total=run.steps, completed=run.steps if store.path(run).exists() else 0
            )
            for entry in entries
            for run in entry.runs
        }

        def watch(entry: RunEntry, run: RunSpec) -> OnStep:
            name, tenth = entry.name_of(run), max(1, run.steps // 10)

            def on_step(step: int, history: History) -> None:
                progress.update(tasks[run], completed=step)
                if not progress.console.is_terminal and (step % tenth == 0 or step == run.steps):
                    loss = history.training_loss[-1]
                    typer.echo(f"{name}: step {step} of {run.steps}, loss {loss:.4f}", err=True)

            return on_step

        try:
            outcome = paper.run(experiment, scale, store, data_dir, watch, cluster)
        except KeyboardInterrupt:
            typer.echo("interrupted; the same command continues from the last checkpoint", err=True)
            raise
    console = Console()
    console.print(outcome.table.to_rich())
    picture = outcome.plot(store.folder / "plots") if plot else None
    if picture is not None:
        console.print(f"The plot is {picture}", soft_wrap=True, markup=False)
    console.print(f"The results are in {store.folder}", soft_wrap=True, markup=False)


def _progress() -> Progress:
    """Return progress bars on standard error, so that standard output has the results only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def _check_writable(path: Path) -> None:
    """Raise InputError if a file cannot be written, before the computation starts."""
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another place") from None
    if not existed:
        path.unlink()
