"""`cgd join`: take part in a federation, with a table or with a program of your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cgd.cli.base import BAD_INPUT, FAILED, INTERRUPTED, app, printable
from cgd.cli.interrupting import TOLD, Interruption
from cgd.cli.operations import AsName, FederationFile, KeyFile, Listen
from cgd.errors import CGDError, InputError, RangeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.cli.display import Display
    from cgd.federation.config import Federation
    from cgd.federation.member import FederationMember
    from cgd.tabular.trace_writer import TraceWriter

    Work = Callable[[FederationMember, Display], Any]

Delta = Annotated[
    float | None, typer.Option(help="With --data: the spread of your model's origin (default: that of the file).")
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="With --data: write down everything that you see, your records too, for `cgd audit`. Keep it secret.",
    ),
]


@app.command()
def join(
    path: FederationFile,
    name: AsName,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your records, a CSV or Parquet file: nothing to program.")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="With --data: your column to predict, if its name differs."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --data: for the model and report (default: runs/NAME).")
    ] = None,
    delta: Delta = None,
    record: Record = None,
    run: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own training function; it gets the peers.")
    ] = None,
    key: KeyFile = None,
    address: Annotated[
        str | None, typer.Option(help="Where the others reach you now, if not where the file says: after a move.")
    ] = None,
    listen: Listen = None,
    state: Annotated[
        Path | None, typer.Option(help="Where to keep what outlives this process (default: state/NAME by the file).")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Give up after so many seconds without a word (default: never).")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Write events to this file, one JSON object a line.")] = None,
) -> None:
    """Take part in a federation: with a table (--data), or with a training function of your own (--run).

    Killed, it can be started again with the same command, and goes on where the others are.
    """
    if (data is None) == (run is None):
        raise InputError("give one of --data FILE (your records) and --run MODULE:FUNCTION (your own program)")
    if data is None:
        if record is not None:
            raise InputError(
                "--record goes with --data: what a program of your own learns, and from what, is not known here; try "
                "your setting with `cgd audit` on a table, or on a spec"
            )
        if (label, out, delta) != (None, None, None):
            raise InputError("--label, --out and --delta go with --data; a program of your own decides for itself")
    with Interruption() as interruption:  # a service manager's stop is as clean as Ctrl-C
        try:
            work: Work
            recorder: TraceWriter | None = None
            if data is not None:  # everything that may be wrong with the records is found before anybody hears of us
                work, recorder = _practice(path, name, data, label, out, delta, record)
            else:
                work = _own_program(str(run))
        except KeyboardInterrupt:
            typer.echo("cgd: interrupted before anybody has heard of us", err=True)
            raise typer.Exit(INTERRUPTED) from None
        interruption.defer()
        from cgd.federation.member import FederationMember

        sink = None if recorder is None else recorder.frame
        membership = FederationMember(
            path, name, key=key, address=address, listen=listen, state=state, timeout=timeout, linger=None, sink=sink
        )
        interruption.attach(membership.runtime)
        result, failure = _take_part(membership, work, recorder, interruption, log)
    if failure is not None:
        _fail(failure, run or f"training on {data}", name)
    sums = membership.peers.traffic.sums
    typer.echo(f"cgd: {name} is done after {sums} sum{'s' if sums != 1 else ''}", err=True)
    if data is not None:
        typer.echo(printable(result))


def _take_part(
    membership: FederationMember, work: Work, recorder: TraceWriter | None, interruption: Interruption, log: Path | None
) -> tuple[Any, Exception | None]:
    """Do the work, and leave in order; what came of it, or why it failed."""
    from cgd.cli.display import Display, log_events

    failure: Exception | None = None
    result: Any = None
    log_events(membership.state.folder, log)
    with Display(membership) as display:
        try:
            try:
                result = work(membership, display)
            finally:
                interruption.left = True
        except (KeyboardInterrupt, Exception) as error:
            interruption.left = True
            if interruption.stopped or isinstance(error, KeyboardInterrupt):
                display.say(TOLD)
                raise typer.Exit(INTERRUPTED) from None
            failure = error
        else:
            display.say("done; waiting for the others, who may need us to catch up (Ctrl-C leaves at once)")
            membership.runtime.close(done=True)
        finally:
            membership.runtime.close(done=False)
            if recorder is not None:
                recorder.close()
    return result, failure


def _own_program(where: str) -> Work:
    from cgd.tabular.user_functions import load_function

    function = load_function(where, "--run", ("the peers",))
    return lambda membership, _: function(membership.peers)


def _practice(
    path: Path, name: str, data: Path, label: str | None, out: Path | None, delta: float | None, record: Path | None
) -> tuple[Callable[[FederationMember, Display], str], TraceWriter | None]:
    """Read the records; what to do with them when the others are there, and what records it, if we do."""
    from cgd.federation.config import Federation
    from cgd.optim.origin import check_delta
    from cgd.tabular.foresight import foreseen
    from cgd.tabular.loading import read
    from cgd.tabular.models import SIZES
    from cgd.tabular.run import DataSource, RunFolder, run, summary
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.trace_writer import refuse_columns
    from cgd.tabular.user_functions import load_function

    federation = Federation.load(path)
    setting = TabularSettings.of(federation, name)
    if delta is not None:
        check_delta(delta)
    if record is not None:
        refuse_columns(setting)
    if setting.model.function:
        load_function(setting.model.function, "function in [model]", SIZES)
    records, notes = read(data, setting.data, setting.own_columns, label=label, ids=setting.in_columns)
    folder = RunFolder(out or path.parent / "runs" / name, federation, name)
    plural = "" if records.rows == 1 else "s"
    typer.echo(f"cgd: {records.rows:,} record{plural} of {data.name}", err=True)
    if folder.finished:
        where = folder.folder
        typer.echo(
            f"cgd: this training is finished, and {where} has its model and report, which stay as they are; a new one "
            "needs a new name",
            err=True,
        )
        typer.echo("cgd: we join again for whoever has to catch up (Ctrl-C leaves)", err=True)
    for note in notes:
        typer.echo(f"cgd: {printable(note)}", err=True)
    for caution in foreseen(federation, setting, records):
        typer.echo(f"cgd: caution, from our own table alone: {caution}", err=True)
    source = DataSource(data.name, records, notes)
    recorder = None if record is None else _recorder(record, federation, name)

    def work(membership: FederationMember, display: Display) -> str:
        content = run(
            membership.peers,
            membership.federation,
            name,
            source,
            folder,
            delta=delta,
            say=display.say,
            recorder=recorder,
        )
        noted = content["notes"] or ()
        told = [note for note in noted if note in notes or note.startswith("caution: ")]  # at the start
        more = "".join(f"\n  note: {note}" for note in noted if note not in told)
        where = folder.folder
        row = f" --federation {path}" if setting.in_columns else ""
        own = f" --function {setting.model.function}" if setting.model.function else ""
        used = f"`cgd predict {where} --data FILE{row}{own}` uses it"
        return f"{summary(content)}{more}\n  {where}/report.html has it all; {used}"

    return work, recorder


def _recorder(folder: Path, federation: Federation, name: str) -> TraceWriter:
    from cgd.tabular.trace_writer import TraceWriter, bytes_per_parameter

    recorder = TraceWriter(folder, name, federation.name)
    size = bytes_per_parameter(federation.training, len(federation.names))
    typer.echo(
        f"cgd: recording into {folder} your prepared records, origin, gradients, and what you see: keep it as secret "
        f"as the records; about {10 * size:.0f} kB a step for each 10,000 parameters of the network",
        err=True,
    )
    return recorder


def _fail(error: Exception, what: str, name: str) -> NoReturn:
    """End with the code that tells whether it was this participant's program or data."""
    from cgd.tabular.user_functions import print_users_part

    own = isinstance(error, RangeError) or (isinstance(error, SettingsError) and error.peer == name)
    if isinstance(error, CGDError) and not own:
        raise error
    if not own:
        print_users_part(error)
    told = f"cgd: {error}" if own else f"cgd: {what} failed: {type(error).__name__}: {error}"
    typer.echo(printable(told), err=True)
    raise typer.Exit(BAD_INPUT if own else FAILED)
