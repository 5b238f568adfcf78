"""Commands for operators: keys, the federation file, taking part."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cgd.cli.base import BAD_INPUT, FAILED, INTERRUPTED, PEER_MISSING, app
from cgd.errors import CGDError, InputError, RangeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.learning.grid import Cell
    from cgd.network.conductor import PeerReport

federation_app = typer.Typer(help="Make, look at and change the federation file.", no_args_is_help=True)
app.add_typer(federation_app, name="federation")

FederationFile = Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The file that all participants hold.")]
AsName = Annotated[str, typer.Option("--as", metavar="NAME", help="Which participant you are.")]
KeyFile = Annotated[
    Path | None, typer.Option(help="Your private key file (default: NAME.key beside the federation file, or here).")
]
Listen = Annotated[
    str | None, typer.Option(help="Where to listen, such as tcp://0.0.0.0:7001 (default: the port of your address).")
]
WhichName = Annotated[str, typer.Argument(help="Which participant.")]
PublicKey = Annotated[str, typer.Option("--public-key", help="Its public key, from its NAME.pub.")]
Address = Annotated[
    str, typer.Option(help="Where the others reach it, such as tcp://host:7001; none if it only dials out, to the hub.")
]
CellOption = Annotated[str | None, typer.Option(help="Its row and column in a grid, such as 2,0.")]


@app.command()
def keygen(
    name: Annotated[str, typer.Argument(help="The participant the keys are for.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to put them.")] = Path(),
) -> None:
    """Make a participant's keys: NAME.key stays secret, NAME.pub goes to the others."""
    from cgd.federation.keys import Keys

    keys = Keys.generate(name)
    private, public = keys.save(folder)
    typer.echo(f"{private}  secret: back it up, with it a lost participant recovers; never send it")
    typer.echo(f"{public}  public key {keys.public}, for the federation file")


@federation_app.command()
def new(
    path: FederationFile,
    participant: Annotated[
        list[str],
        typer.Option(
            help="NAME=ADDRESS=PUBLIC-KEY-FILE, once for each; in a grid, =ROW,COLUMN behind it. "
            "NAME==PUBLIC-KEY-FILE for one that only dials out, to the hub."
        ),
    ],
    name: Annotated[str, typer.Option(help="The federation's name; a new training needs a new name.")] = "federation",
    steps: Annotated[int, typer.Option(help="How many steps to train.")] = 200,
    lr: Annotated[float, typer.Option(help="The step size.")] = 0.5,
    hub: Annotated[
        str | None, typer.Option(help="ADDRESS=PUBLIC-KEY-FILE of a hub, which then adds up the sums.")
    ] = None,
) -> None:
    """Write a federation file from everybody's public keys."""
    from cgd.federation import editing, file

    participants = []
    for each in participant:
        parts = each.split("=")
        if len(parts) not in (3, 4):
            raise InputError(f"--participant is {each!r}; it is NAME=ADDRESS=PUBLIC-KEY-FILE, or that and =ROW,COLUMN")
        cell = _cell(parts[3]) if len(parts) == 4 else None
        participants.append(file.Participant(parts[0], parts[1], _public_key(parts[2]), cell))
    site = None
    if hub is not None:
        address, separator, key = hub.partition("=")
        if not separator:
            raise InputError(f"--hub is {hub!r}; it is ADDRESS=PUBLIC-KEY-FILE, such as tcp://hub.example:7000=hub.pub")
        site = file.HubSite(address, _public_key(key))
    training = file.Training(steps=steps, lr=lr, opening="mesh" if site is None else "hub")
    editing.new(path, name, participants, training, site)
    typer.echo(f"{path} is written; give everybody the same file")


@federation_app.command()
def add(
    path: FederationFile, name: WhichName, public_key: PublicKey, address: Address = "", cell: CellOption = None
) -> None:
    """Add a participant: the next epoch. It begins when everybody has made the same change."""
    from cgd.federation import editing, file

    place = None if cell is None else _cell(cell)
    editing.with_participant(path, file.Participant(name, address, _public_key(public_key), place))
    _tell_epoch(path)


@federation_app.command()
def remove(path: FederationFile, name: WhichName) -> None:
    """Remove a participant for good: the next epoch. It begins when all who remain have made the same change."""
    from cgd.federation import editing

    editing.without(path, name)
    _tell_epoch(path)


@federation_app.command()
def show(path: FederationFile) -> None:
    """Show what the file says, with its digests."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from cgd.federation.file import Federation

    federation = Federation.load(path)
    console = Console()
    table = Table("participant", "address")
    table.add_column("public key", no_wrap=True, min_width=40)  # whole, to be compared
    if federation.grid is not None:
        table.add_column("cell")
    for each in federation.participants:
        cell = (f"{each.cell.row}, {each.cell.column}",) if each.cell is not None else ()
        table.add_row(
            *map(Text, (each.name, each.address or "dials out", each.key, *cell))
        )  # a key may look like markup
    training = ", ".join(f"{key} {value}" for key, value in vars(federation.training).items() if value != "")
    sections = ", ".join(f"{name} {digest}" for name, digest in federation.sections().items())
    console.print(f"{federation.name}, epoch {federation.epoch}, digest {federation.digest}", highlight=False)
    console.print(table)
    if federation.hub is not None:
        console.print(Text(f"Hub: {federation.hub.address}, public key {federation.hub.key}"), soft_wrap=True)
    console.print(f"Training: {training}", soft_wrap=True, highlight=False)
    console.print(f"Digests: {sections}", soft_wrap=True, highlight=False)


@federation_app.command()
def check(
    path: FederationFile,
    name: AsName,
    key: KeyFile = None,
    listen: Listen = None,
    wait: Annotated[float, typer.Option(help="How many seconds to wait for answers.")] = 5.0,
) -> None:
    """See which peers answer: with latency, version and digest. Exit code 3 if one does not."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from cgd.federation.file import digest_of
    from cgd.federation.joining import Membership

    if not 0 < wait < float("inf"):
        raise InputError(f"--wait is {wait}; it is a number of seconds above 0")
    with _no_state() as state:
        membership = Membership(path, name, key=key, listen=listen, state=state)
        deadline = time.monotonic() + wait
        reports: dict[str, PeerReport] = {}
        try:
            while time.monotonic() < deadline:
                for report in membership.conductor.report():  # whoever was here once has answered
                    if report.name not in reports or reports[report.name].state != "here" or report.state == "here":
                        reports[report.name] = report
                if all(report.state == "here" and report.latency for report in reports.values()):
                    break
                time.sleep(0.1)
            table = Table("peer", "state", "latency", "version", "digest", "note")
            for report in reports.values():
                hello = membership.conductor.assembly.hello(report.name)
                latency = f"{1000 * report.latency:.1f} ms" if report.latency is not None else ""
                known = (
                    (hello.version, digest_of(hello.epoch, dict(hello.sections))[:12])
                    if hello is not None
                    else ("", "")
                )
                table.add_row(report.name, report.state, latency, *map(Text, (*known, report.note)))
        finally:
            membership.peers.close()
    console = Console()
    console.print(f"{membership.federation.name}, digest {membership.federation.digest}", highlight=False)
    console.print(table)
    if any(report.state != "here" for report in reports.values()):
        raise typer.Exit(PEER_MISSING)


@app.command()
def join(
    path: FederationFile,
    name: AsName,
    run: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="Your training function; it gets the peers.")],
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
    """Take part in a federation: run your training function with connected peers.

    Killed, it can be started again with the same command, and goes on where the others are.
    """
    from cgd.cli.display import Display, log_events
    from cgd.federation.joining import Membership

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's stop is as clean as Ctrl-C
    function = _function(run)
    membership = Membership(
        path, name, key=key, address=address, listen=listen, state=state, timeout=timeout, linger=None
    )
    log_events(log or membership.state.folder / "events.jsonl")
    failure: Exception | None = None
    with Display(membership) as display:
        try:
            function(membership.peers)
        except KeyboardInterrupt:
            display.say("interrupted; the same command goes on from here")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            failure = error
        else:
            display.say("done; waiting for the others, who may need us to catch up (Ctrl-C leaves at once)")
            with suppress(KeyboardInterrupt):
                membership.conductor.close(done=True)
        finally:
            membership.conductor.close(done=False)
    if failure is not None:
        _fail(failure, run, name)
    sums = membership.peers.traffic.sums
    typer.echo(f"cgd: {name} is done after {sums} sum{'s' if sums != 1 else ''}", err=True)


def _function(place: str) -> Callable[[Any], Any]:
    module, _, name = place.partition(":")
    if not module or not name:
        raise InputError(f"--run is {place!r}; it is MODULE:FUNCTION, such as train:main for main in train.py")
    if module.endswith(".py"):
        raise InputError(f"--run is {place!r}; name the module without .py: {module.removesuffix('.py')}:{name}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            raise InputError(f"there is no module {module!r} here or installed; --run is MODULE:FUNCTION") from None
        _print_users_part(error)
        raise InputError(f"module {module} cannot be imported: {error}") from None
    if not callable(function):
        raise InputError(f"module {module} has no function {name!r}; --run is MODULE:FUNCTION")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InputError(f"{place} is called with one argument, the peers, and cannot be: {error}") from None
    except ValueError:  # of some functions Python does not know what they take
        pass
    return function  # type: ignore[no-any-return]


def _fail(error: Exception, run: str, name: str) -> NoReturn:
    """End with the code that tells whether it was this participant's program or data."""
    own = isinstance(error, RangeError) or (isinstance(error, SettingsError) and error.peer == name)
    if isinstance(error, CGDError) and not own:
        raise error
    if not own:
        _print_users_part(error)
    typer.echo(f"cgd: {error}" if own else f"cgd: {run} failed: {type(error).__name__}: {error}", err=True)
    raise typer.Exit(BAD_INPUT if own else FAILED)


def _print_users_part(error: Exception) -> None:
    """The traceback from where the user's code begins."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _is_ours(filename: str) -> bool:
    return filename in (__file__, importlib.__file__) or filename.startswith("<frozen importlib")


def _cell(text: str) -> Cell:
    from cgd.learning.grid import Cell

    try:
        row, column = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"the cell is {text!r}; it is a row and a column, such as 2,0") from None
    return Cell(row, column)


def _public_key(text: str) -> str:
    """A public key as such, or from a NAME.pub file."""
    from cgd.federation.keys import public_key

    return public_key(text)


def _tell_epoch(path: Path) -> None:
    from cgd.federation.file import Federation

    federation = Federation.load(path)
    names = ", ".join(sorted(federation.contacts))
    typer.echo(f"{path} is of epoch {federation.epoch} now: {names}")
    typer.echo("Everybody in it must hold the same file; running participants notice the change by themselves.")


def _no_state() -> Any:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="cgd-check-")
