"""`cgd join`: take part in a federation, with a table or with a training function."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cgd.cli.base import BAD_INPUT, FAILED, INTERRUPTED, app, printable
from cgd.cli.federation import AsName, FederationFile, KeyFile, Listen, Salt, StateOption
from cgd.cli.interrupt import MESSAGE, Interruption
from cgd.cli.tabular import SOURCE_HELP, Query, Sheet
from cgd.errors import CGDError, InputError, RangeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.cli.notify import Notifier
    from cgd.cli.track import RunTracking
    from cgd.federation.config import Federation
    from cgd.federation.member import FederationMember
    from cgd.peers import Peers
    from cgd.reporting.run_file import AnyRun
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.run import TabularRun
    from cgd.tabular.run_inputs import RunOptions
    from cgd.tabular.sources import TableSource

    Program = Callable[[Peers], Any]

Decimal = Annotated[
    str | None,
    typer.Option(metavar="SIGN", help="With --data: the decimal sign in your file, '.' (the default) or ','."),
]
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
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --data: where your models are trained: 'cpu' (the default), 'cuda', 'cuda:1' or 'mps'. It is your "
        "own choice; the others need not have the same.",
    ),
]
NOTIFY_SECONDS = 120.0
Notify = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        envvar="CGD_NOTIFY",
        help="Notify a URL (https://…, by a POST of JSON) or a command (with the text as its last argument) when a "
        "member is missing or back, and when the training ends.",
    ),
]
NotifyAfter = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help=f"With --notify: a member is missing after this many seconds (default: {NOTIFY_SECONDS:g}).",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TARGET",
        help="With --data: also show losses, score, privacy spent and waiting times in tensorboard:DIR or "
        "mlflow:https://HOST. What goes to another machine leaves your organisation; repeatable.",
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
Keep = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="With --data: the model to keep, by your own validation records: 'personalised' (adapted to your records "
        "if that helps there; the default), 'scaled' (with the part of the origin that suits best; the default with "
        "`privacy`), or 'confined' (as it was trained). Nobody learns of it.",
    ),
]


@app.command()
def join(
    path: FederationFile,
    name: AsName,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help=f"Your records: {SOURCE_HELP}; no programming needed.")
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
    keep: Keep = None,
    device: Device = None,
    salt: Salt = None,
    run: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your training function; it is called with the peers.")
    ] = None,
    key: KeyFile = None,
    address: Annotated[
        str | None,
        typer.Option(help="Your present address, if it is not the one in the file, for example after a move."),
    ] = None,
    listen: Listen = None,
    state: StateOption = None,
    timeout: Annotated[
        float | None, typer.Option(help="Stop after this many seconds without received data (default: never).")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Write events to this file, one JSON object a line.")] = None,
    notify: Notify = None,
    notify_after: NotifyAfter = None,
    track: Track = None,
    decimal: Decimal = None,
    sheet: Sheet = None,
    query: Query = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="With --data: read and check everything, and show what would happen; connect to nobody."
        ),
    ] = False,
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
        own_table = label, out, delta, function, budget, decimal, sheet, query, keep, device, salt, track
        if any(each is not None for each in own_table) or dry_run or not alone:
            raise InputError(
                "--label, --out, --delta, --function, --budget, --decimal, --sheet, --query, --keep, --device, --salt, "
                "--track, --dry-run and --no-alone need --data; a program of your own sets these itself"
            )
    from cgd.cli import ranks
    from cgd.cli.notify import Notifier
    from cgd.cli.track import RunTracking

    if ranks.rank_in_job(data) > 0 and run is not None:
        ranks.follow(name, run)
        return
    notifier = Notifier.from_options(notify, notify_after, NOTIFY_SECONDS)
    tracking = RunTracking.from_options(track or [])
    # In this order: a signal ends the process at once while it waits for the other ranks of its job. From then on,
    # SIGTERM from a service manager stops as cleanly as Ctrl-C.
    with ranks.job(run) as job, notifier, tracking, Interruption() as interruption:
        try:  # errors in the records are found before any peer is contacted
            from cgd.federation.config import Federation

            program = ranks.load_program(run) if run is not None else None
            federation = Federation.load(path)
            table = None
            if data is not None:
                from cgd.tabular.run_inputs import RunOptions
                from cgd.tabular.sources import parse_source

                source = parse_source(data, sheet, query)
                place = "cpu" if device is None else device
                options = RunOptions(label, delta, record, function, budget, decimal or ".", keep, place, salt)
                if dry_run:
                    for caution in tracking.cautions:
                        typer.echo(f"without --dry-run: {printable(caution)}")
                    _dry_run(federation, name, source, out, options, key=key, address=address, state=state)
                    return
                table = _prepare_table(federation, name, source, out, options, alone=alone)
                tracking.begin(federation.name, name, table.folder.path)
        except KeyboardInterrupt:
            typer.echo("cgd: interrupted before any peer was contacted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        interruption.defer()
        from cgd.cli.display import log_events
        from cgd.federation.member import FederationMember, lead_ranks

        connect = partial(
            FederationMember,
            federation,
            name,
            key=key,
            address=address,
            listen=listen,
            state=state,
            timeout=timeout,
            linger=None,
            sink=table.trace_writer.frame if table is not None and table.trace_writer is not None else None,
            watch=True,
            before_connecting=lambda folder: log_events(folder, log),  # the first states of peers are logged, too
            ranks=job,
        )
        member = lead_ranks(job, name, connect)
        interruption.attach(member.runtime)
        interruption.before_exit = partial(_end, tracking, notifier)
        notifier.watch(member)
        result, failure = _run(member, program, table, interruption, tracking)
        if failure is not None:
            _fail(failure, run or f"training on {table.file if table is not None else data}", name)
        sums = member.peers.traffic.sums
        typer.echo(f"cgd: {name} is done after {sums} sum{'s' if sums != 1 else ''}", err=True)
        if table is not None:
            typer.echo(printable(_describe_result(table, result)))


def _end(tracking: RunTracking, notifier: Notifier) -> None:
    """Write and send what is left, before an interrupted process ends."""
    tracking.end(INTERRUPTED)
    notifier.end(INTERRUPTED)


def _run(
    member: FederationMember,
    program: Program | None,
    table: TabularRun | None,
    interruption: Interruption,
    tracking: RunTracking,
) -> tuple[Any, Exception | None]:
    """Run the program and leave the federation cleanly; return the program's result, or its error."""
    from cgd.cli.display import Display

    failure: Exception | None = None
    result: Any = None
    with Display(member) as display:
        try:
            try:
                if program is not None:
                    result = program(member.peers)
                elif table is not None:
                    result = table.run(
                        member.peers,
                        show_message=display.show_message,
                        show_note=_print_note,
                        after_sums=member.runtime.announce_done,
                        track=tracking.track,
                    )
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


def _dry_run(
    federation: Federation, name: str, data: TableSource, out: Path | None, options: RunOptions, **member: Any
) -> None:
    """Read and check everything, and print what would happen."""
    from cgd.federation.member import check_join
    from cgd.tabular.dry_run import describe_dry_run
    from cgd.tabular.run_inputs import read_inputs

    check_join(federation, name, **member)
    inputs = read_inputs(federation, name, data, options)
    typer.echo(f"{federation.name}, epoch {federation.epoch}, digest {federation.digest}, as {name}")
    typer.echo(printable(_count_records(inputs.records, data)))
    folder = _run_folder(federation, name, out)
    for line in describe_dry_run(federation, name, inputs, folder, data, options):
        typer.echo(printable(line))
    if options.record is not None:
        typer.echo(f"without --dry-run: {printable(_describe_recording(federation, options.record))}")
    typer.echo("nothing was sent or written; join without --dry-run to train")


def _print_note(note: str) -> None:
    """Print a note about our records; in a terminal, above the live table."""
    typer.echo(f"cgd: {printable(note)}", err=True)


def _run_folder(federation: Federation, name: str, out: Path | None) -> Path:
    return out or federation.path.parent / "runs" / name


def _count_records(records: TabularDataset, data: TableSource) -> str:
    from cgd.tabular.sources import source_name

    return f"{records.rows:,} record{'' if records.rows == 1 else 's'} of {source_name(data)}"


def _prepare_table(
    federation: Federation, name: str, data: TableSource, out: Path | None, options: RunOptions, *, alone: bool
) -> TabularRun:
    """Read and check the records and settings, and print notes about them."""
    from cgd.tabular.disclosure import early_privacy_warnings
    from cgd.tabular.run import TabularRun

    folder, record = _run_folder(federation, name, out), options.record
    table = TabularRun.prepare(federation, name, data, folder, **vars(options), alone=alone)
    typer.echo(f"cgd: {printable(_count_records(table.records, data))}", err=True)
    if (finished := table.folder.finished_run()) is not None:
        typer.echo(
            f"cgd: this training is finished; its model and report in {folder} are not changed. A new training needs a "
            "new name",
            err=True,
        )
        for message in table.unapplied_keep(finished):
            typer.echo(f"cgd: {printable(message)}", err=True)
        typer.echo("cgd: joining again for peers that need to recover (Ctrl-C leaves)", err=True)
    for note in table.notes:
        _print_note(note)
    for warning in early_privacy_warnings(federation, table.settings, table.records):
        typer.echo(f"cgd: privacy warning, from our own table alone: {warning}", err=True)
    if record is not None:
        typer.echo(f"cgd: {_describe_recording(federation, record)}", err=True)
    return table


def _describe_recording(federation: Federation, record: Path) -> str:
    from cgd.tabular.trace_writer import bytes_per_parameter

    size = bytes_per_parameter(federation.training, len(federation.names))
    return (
        f"recording your prepared records, origin, gradients and everything received into {record}: keep it as secret "
        f"as the records; about {10 * size:.0f} kB per step for every 10,000 parameters of the network"
    )


def _describe_result(table: TabularRun, run: AnyRun) -> str:
    from cgd.reporting.training_report import describe_result
    from cgd.tabular.training import WARNING_PREFIX

    new = [note for note in run.notes or () if note not in table.notes and not note.startswith(WARNING_PREFIX)]
    notes = "".join(f"\n  note: {note}" for note in new)  # those of the file alone were printed before the first sum
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
