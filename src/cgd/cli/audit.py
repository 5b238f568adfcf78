"""`cgd audit`: run attacks and report which succeed."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import FAILED, INTERRUPTED, app
from cgd.cli.research import DataDir
from cgd.cli.tabular import Query, Sheet

if TYPE_CHECKING:
    from rich.progress import Progress

    from cgd.audit.runner import Part, PartResult


@app.command()
def audit(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE | SPEC.toml | RUN...]",
            help="Your own table (a file or a database, with --federation), a TOML spec of your own setting, or "
            "folders of a recorded run (default: embedded data).",
            show_default=False,
        ),
    ] = None,
    federation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table: the federation file that you want to join.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--label", metavar="COLUMN", help="Table: its column to predict, if it differs.")
    ] = None,
    decimal: Annotated[
        str | None,
        typer.Option(metavar="SIGN", help="Table: the decimal sign in your file, '.' (the default) or ','."),
    ] = None,
    sheet: Sheet = None,
    query: Query = None,
    coalition: Annotated[
        str, typer.Option(metavar="NAME,...", help="Recorded run: the participants that collude.")
    ] = "",
    label: Annotated[
        str | None, typer.Option("--run", metavar="LABEL", help="Spec: the run (default: the first CGD run).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Table, spec: how many steps to analyse (default: up to 300; 30).")
    ] = None,
    honest: Annotated[
        int | None,
        typer.Option(min=1, help="Table, spec: how many participants do not collude (default: all but one; 2)."),
    ] = None,
    data_dir: DataDir = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Table, recorded run: your function that builds the network."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ATTACK", help="Run only this attack; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of data, origins and noise.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the page, JSON and images.")] = Path("cgd-audit"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of processes (default: one per core).", show_default=False)
    ] = None,
) -> None:
    """Measure what other participants can learn: run attacks against CGD and its alternatives.

    `cgd audit my.csv --federation federation.toml` tries the attacks on your own records before you join; nothing is
    sent. Prints a table of attacks and schemes: the result, the result of guessing, and the verdict. Writes audit.json
    and audit.html, a page for a privacy officer with the recovered records. Takes a minute or two. Ctrl-C keeps the
    finished parts.
    """
    from rich.console import Console

    from cgd.audit import report, results, runner, sources, table, verdicts

    names = list(dict.fromkeys(name.strip() for name in coalition.split(",") if name.strip()))
    report.check(out)
    whole = sources.plan_for(
        what or [],
        names,
        sheet=sheet,
        query=query,
        federation=federation,
        target=target,
        decimal=decimal,
        label=label,
        rounds=rounds,
        honest=honest,
        data_dir=data_dir,
        function=function,
    )
    plan = whole.choose(only or [])
    with _progress() as progress:
        start = time.monotonic()
        finished = runner.run(plan, seed, jobs or _cores(), _ProgressReporter(progress, len(plan.parts)))
        seconds = time.monotonic() - start
    if not finished:
        typer.echo("cgd: interrupted before the first part was finished; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED)
    found = results.assemble(plan, finished, seed=seed, seconds=seconds, end=datetime.now(UTC))
    page = report.write(out, found)  # before the output, so that a closed terminal loses nothing
    console = Console()
    console.print(table.render(found), highlight=False)
    console.print(f"The page is {page}", soft_wrap=True, highlight=False)
    if not found.complete:
        typer.echo(f"cgd: interrupted; {len(found.unfinished)} of {len(plan.parts)} parts are missing", err=True)
        raise typer.Exit(INTERRUPTED)
    if found.failed or verdicts.failed_controls(found):
        raise typer.Exit(FAILED)


class _ProgressReporter:
    """Show progress: a bar in a terminal, elsewhere a line for each part."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._task = progress.add_task("starting", total=total)
        self._running: list[str] = []
        self._done = 0

    def began(self, part: Part) -> None:
        self._running.append(part.label)
        self._update()

    def ended(self, part: Part, result: PartResult) -> None:
        self._running.remove(part.label)
        self._done += 1
        self._progress.advance(self._task)
        self._update()
        if result.failure or not self._progress.console.is_terminal:
            outcome = (
                f"failed: {result.failure}" if result.failure else "not measured" if result.inapplicable else "done"
            )
            line = f"{part.label}: {outcome} ({self._done} of {self._total})"
            self._progress.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _update(self) -> None:
        self._progress.update(self._task, description=self._running[0] if self._running else "done")


def _progress() -> Progress:
    """Return a progress bar on standard error, so that standard output has the results only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
