"""`cgd join`: take part in a federation, with a table or with a training function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cgd.cli.base import BAD_INPUT, FAILED, INTERRUPTED, app, printable
from cgd.cli.federation import AsName, FederationFile, KeyFile, Listen
from cgd.cli.interrupt import MESSAGE, Interruption
from cgd.errors import CGDError, InputError, RangeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.federation.config import Federation
    from cgd.federation.member import FederationMember
    from cgd.peers import Peers
    from cgd.reporting.run_file import AnyRun
    from cgd.tabular.run import TabularRun

    Program = Callable[[Peers], Any]

Delta = Annotated[
    float | None,
    typer.Option(help="With --data: the standard deviation of your model's origin (default: as in the file)."),
]
Function = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="With --data: the function in `model` that builds the network, if there is one; it is run here.",
    ),
]
BudgetPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --data: the privacy budget of your records, if sums have noise (default: beside them, DATA.budget).",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="With --data: record everything that you receive, and your records, for `cgd audit`. Keep it secret.",
    ),
]
Alone = Annotated[
    bool,
    typer.Option(
        "--alone/--no-alone",
        help="With --data: compare with a model of your own records alone, in the report. It is trained here, after "
        "the training together.",
    ),
]


@app.command()
def join(
    path: FederationFile,
    name: AsName,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your records, a CSV or Parquet file; no programming needed.")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="With --data: the column to predict, if its name differs in your file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --data: folder for model and report (default: runs/NAME).")
    ] = None,
    delta: Delta = None,
    function: Function = None,
    record: Record = None,
    budget: BudgetPath = None,
    alone: Alone = True,
    run: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your training function; it is called with the peers.")
    ] = None,
    key: KeyFile = None,
    address: Annotated[
        str | None,
        typer.Option(help="Your present address, if it is not the one in the file, for example after a move."),
    ] = None,
    listen: Listen = None,
    state: Annotated[
        Path | None, typer.Option(help="The state folder (default: state/NAME next to the federation file).")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Stop after this many seconds without received data (default: never).")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Write events to this file, one JSON object a line.")] = None,
) -> None:
    """Take part in a federation with a table (--data), or with your own training function (--run).

    After a crash, start it again with the same command; it continues with the other participants.
    """
    if (data is None) == (run is None):
        raise InputError("give one of --data FILE (your records) and --run MODULE:FUNCTION (your own program)")
    if data is None:
        if record is not None:
            raise InputError(
                "--record needs --data, because the data and model of your own program are not known here; try your "
                "setting with `cgd audit` on a table, or on a spec"
            )
        if (label, out, delta, function, budget) != (None, None, None, None, None) or not alone:
            raise InputError(
                "--label, --out, --delta, --function, --budget and --no-alone need --data; a program of your own sets "
                "these itself"
            )
    with Interruption() as interruption:  # SIGTERM from a service manager stops as cleanly as Ctrl-C
        try:  # errors in the records are found before any peer is contacted
            from cgd.federation.config import Federation

            program = _load_program(run) if run is not None else None
            federation = Federation.load(path)
            table = (
                None
                if data is None
                else _prepare_table(federation, name, data, label, out, delta, record, function, budget, alone=alone)
            )
        except KeyboardInterrupt:
            typer.echo("cgd: interrupted before any peer was contacted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        interruption.defer()
        from cgd.federation.member import FederationMember

        sink = table.trace_writer.frame if table is not None and table.trace_writer is not None else None
        member = FederationMember(
            federation,
            name,
            key=key,
            address=address,
            listen=listen,
            state=state,
            timeout=timeout,
            linger=None,
            sink=sink,
            watch=True,
        )
        interruption.attach(member.runtime)
        result, failure = _run(member, program, table, interruption, log)
    if failure is not None:
        _fail(failure, run or f"training on {data}", name)
    sums = member.peers.traffic.sums
    typer.echo(f"cgd: {name} is done after {sums} sum{'s' if sums != 1 else ''}", err=True)
    if table is not None:
        typer.echo(printable(_describe_result(table, result)))


def _run(
    member: FederationMember,
    program: Program | None,
    table: TabularRun | None,
    interruption: Interruption,
    log: Path | None,
) -> tuple[Any, Exception | None]:
    """Run the program and leave the federation cleanly; return the program's result, or its error."""
    from cgd.cli.display import Display, log_events

    failure: Exception | None = None
    result: Any = None
    log_events(member.state.folder, log)
    with Display(member) as display:
        try:
            try:
                if program is not None:
                    result = program(member.peers)
                elif table is not None:
                    result = table.run(member.peers, display.show_message, member.runtime.announce_done)
            finally:
                interruption.program_ended = True
        except (KeyboardInterrupt, Exception) as error:
            interruption.program_ended = True
            if interruption.stopped or isinstance(error, KeyboardInterrupt):
                display.show_message(MESSAGE)
                raise typer.Exit(INTERRUPTED) from None
            failure = error
        else:
            display.show_message("done; waiting for peers that may need us to recover (Ctrl-C leaves immediately)")
            member.runtime.close(done=True)
        finally:
            member.runtime.close(done=False)
            if table is not None and table.trace_writer is not None:
                table.trace_writer.close()
    return result, failure


def _load_program(where: str) -> Program:
    from cgd.user_functions import load_function

    return load_function(where, "--run", ("the peers",))


def _prepare_table(
    federation: Federation,
    name: str,
    data: Path,
    label: str | None,
    out: Path | None,
    delta: float | None,
    record: Path | None,
    function: str | None = None,
    budget: Path | None = None,
    *,
    alone: bool = True,
) -> TabularRun:
    """Read and check the records and settings, and print notes about them."""
    from cgd.tabular.run import TabularRun, early_privacy_warnings
    from cgd.tabular.trace_writer import bytes_per_parameter

    folder = out or federation.path.parent / "runs" / name
    table = TabularRun.prepare(
        federation,
        name,
        data,
        folder,
        label=label,
        delta=delta,
        record=record,
        function=function,
        budget=budget,
        alone=alone,
    )
    plural = "" if table.records.rows == 1 else "s"
    typer.echo(f"cgd: {table.records.rows:,} record{plural} of {printable(data.name)}", err=True)
    if table.folder.finished_run() is not None:
        typer.echo(
            f"cgd: this training is finished; its model and report in {folder} are not changed. A new training needs a "
            "new name",
            err=True,
        )
        typer.echo("cgd: joining again for peers that need to recover (Ctrl-C leaves)", err=True)
    for note in table.notes:
        typer.echo(f"cgd: {printable(note)}", err=True)
    for warning in early_privacy_warnings(federation, table.settings, table.records):
        typer.echo(f"cgd: privacy warning, from our own table alone: {warning}", err=True)
    if record is not None:
        size = bytes_per_parameter(federation.training, len(federation.names))
        typer.echo(
            f"cgd: recording your prepared records, origin, gradients and everything received into {record}: keep it "
            f"as secret as the records; about {10 * size:.0f} kB per step for every 10,000 parameters of the network",
            err=True,
        )
    return table


def _describe_result(table: TabularRun, run: AnyRun) -> str:
    from cgd.reporting.training_report import describe_result
    from cgd.tabular.training import WARNING_PREFIX

    new = [note for note in run.notes or () if note not in table.notes and not note.startswith(WARNING_PREFIX)]
    notes = "".join(f"\n  note: {note}" for note in new)  # that were not printed at the start
    folder, settings = table.folder.path, table.settings
    row = f" --federation {table.federation.path}" if settings.vertical else ""
    function = f" --function {settings.model.function}" if settings.model.function else ""
    usage = f"predict with `cgd predict {folder} --data FILE{row}{function}`"
    result = "\n  ".join(describe_result(run))
    return f"{result}{notes}\n  the report is {folder}/report.html; {usage}"


def _fail(error: Exception, what: str, name: str) -> NoReturn:
    """Exit with a code that shows whether this participant's program or data caused the error."""
    from cgd.user_functions import print_user_traceback

    own = isinstance(error, RangeError) or (isinstance(error, SettingsError) and error.peer == name)
    if isinstance(error, CGDError) and not own:
        raise error
    if not own:
        print_user_traceback(error)
    message = f"cgd: {error}" if own else f"cgd: {what} failed: {type(error).__name__}: {error}"
    typer.echo(printable(message), err=True)
    raise typer.Exit(BAD_INPUT if own else FAILED)
