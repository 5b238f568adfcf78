"""The command for privacy officers: run attacks, and show what gets through."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import FAILED, INTERRUPTED, app
from cgd.cli.research import DataDir

if TYPE_CHECKING:
    from rich.progress import Progress

    from cgd.audit.plan import Part
    from cgd.audit.runner import Done


@app.command()
def audit(
    what: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SPEC.toml | RUN...]",
            help="A spec of a setting of your own, or folders of a recorded run (default: embedded data).",
            show_default=False,
        ),
    ] = None,
    coalition: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of a recorded run, who pools what they saw.")
    ] = "",
    label: Annotated[
        str | None, typer.Option("--run", metavar="LABEL", help="Of a spec, which run (default: the first by cgd).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Of a spec, how many steps are looked at (default: 30).")
    ] = None,
    honest: Annotated[
        int | None, typer.Option(min=1, help="Of a spec, how many participants do not collude (default: 2).")
    ] = None,
    data_dir: DataDir = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Of a recorded run, your own function that made its network."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ATTACK", help="Only this attack; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Decides data, origins and noise.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the page, JSON and pictures.")] = Path(
        "cgd-audit"
    ),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="How many processes (default: one for each core).", show_default=False)
    ] = None,
) -> None:
    """What can the others learn? Run attacks against CGD and its alternatives, and measure it.

    Prints a table of attacks and schemes: what each came to, what guessing gives, and the verdict. Writes audit.json,
    pictures of recovered records, and audit.html, one page for a privacy officer. Takes a minute or two. Ctrl-C keeps
    what is done.
    """
    from rich.console import Console

    from cgd.audit import folder, results, runner, sources, table, verdicts

    names = list(dict.fromkeys(name.strip() for name in coalition.split(",") if name.strip()))
    folder.check(out)
    whole = sources.plan_for(
        what or [], names, label=label, rounds=rounds, honest=honest, data_dir=data_dir, function=function
    )
    plan = whole.choose(only or [])
    with _progress() as progress:
        outcome = runner.run(plan, seed, jobs or _cores(), _Watch(progress, len(plan.parts)))
    if not outcome.done:
        typer.echo("cgd: interrupted before anything was found; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED)
    said, pictures = results.content(plan, outcome, seed, datetime.now(UTC))
    page = folder.write(out, said, pictures)  # files first: whatever becomes of the terminal, they are there
    found = results.load(out)
    console = Console()
    console.print(table.show(found), highlight=False)
    console.print(f"The page is {page}", soft_wrap=True, highlight=False)
    if not found["complete"]:
        typer.echo(f"cgd: interrupted; {len(found['unfinished'])} of {len(plan.parts)} parts are missing", err=True)
        raise typer.Exit(INTERRUPTED)
    if found["failed"] or verdicts.loud(found):
        raise typer.Exit(FAILED)


class _Watch:
    """Shows what runs: a bar in a terminal, a line for each part elsewhere."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._task = progress.add_task("starting", total=total)
        self._running: list[str] = []
        self._done = 0

    def began(self, part: Part) -> None:
        self._running.append(part.label)
        self._tell()

    def ended(self, part: Part, done: Done) -> None:
        self._running.remove(part.label)
        self._done += 1
        self._progress.advance(self._task)
        self._tell()
        if done.failure or not self._progress.console.is_terminal:
            how = f"failed: {done.failure}" if done.failure else "done"
            line = f"{part.label}: {how} ({self._done} of {self._total})"
            self._progress.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _tell(self) -> None:
        self._progress.update(self._task, description=self._running[0] if self._running else "done")


def _progress() -> Progress:
    """A bar on standard error, so that standard output holds the results and nothing else."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _cores() -> int:
    """Those that this process may use."""
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
