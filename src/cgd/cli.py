"""The command line. Heavy imports are inside the commands: `cgd --help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import cgd
from cgd.errors import CGDError, InputError

app = typer.Typer(
    help="Federated learning in which nobody shares data or a model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DatasetName(StrEnum):
    """The data sets that need no download."""

    breast_cancer = "breast-cancer"
    digits = "digits"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cgd {cgd.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning in which nobody shares data or a model."""


@app.command()
def demo(
    participants: Annotated[int, typer.Option(help="How many hospitals train together.")] = 5,
    steps: Annotated[int, typer.Option(help="How many steps of gradient descent.")] = 300,
    dataset: Annotated[
        DatasetName, typer.Option(help="The data, embedded in scikit-learn.")
    ] = DatasetName.breast_cancer,
    seed: Annotated[int, typer.Option(min=0, help="Decides the split of the data and the models' origins.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    plot_file: Annotated[Path, typer.Option("--plot", help="Write the curves to this PNG file.")] = Path(
        "cgd-demo.png"
    ),
) -> None:
    """Hospitals with uneven data train together by CGD, beside each alone and all data pooled."""
    for path in filter(None, (json_file, plot_file)):
        _check_writable(path)
    if plot_file.suffix.lower() != ".png":
        raise InputError(f"the plot is {plot_file}; it is a PNG, give it a name that ends with .png")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from cgd.experiments import demo as experiment
    from cgd.experiments import demo_report

    settings = experiment.DemoSettings(dataset.value, participants, steps, seed)
    console = Console()
    progress_console = Console(stderr=True)  # so that standard output holds the results and nothing else
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress_console) as progress:
        tasks = {
            "pooled": progress.add_task("all data pooled", total=steps),
            "alone": progress.add_task("each alone", total=steps * participants),
            "together": progress.add_task("together, confined", total=steps * participants),
        }
        result = experiment.run(settings, advance=lambda part: progress.advance(tasks[part]))
    # Files first: whatever becomes of the terminal, they are there.
    written = [f"The curves are in {plot_file}"]
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        written.append(f"The results are in {json_file}")
    demo_report.plot(result, plot_file)
    console.print(demo_report.table(result))
    console.print(demo_report.revealed(result), highlight=False)
    console.print("\n".join(written), soft_wrap=True)


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before an hour of work depends on it."""
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another place") from None
    if not existed:
        path.unlink()


def main() -> None:
    """Run the command line; an error of ours is one line on standard error, not a traceback."""
    try:
        app()
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (CGDError, OSError) as error:
        typer.echo(f"cgd: {error}", err=True)
        sys.exit(2 if isinstance(error, InputError) else 1)
