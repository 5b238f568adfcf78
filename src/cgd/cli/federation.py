"""Commands for operators: `cgd keygen`, `cgd federation` and `cgd hub`."""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.absence import describe_absence, describe_quorum, read_absence
from cgd.cli.base import FAILED, INTERRUPTED, PEER_MISSING, app
from cgd.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, Group

    from cgd.federation.hub_server import FederationHub
    from cgd.federation.state import StateFolder
    from cgd.optim.grid import Cell
    from cgd.secagg.messages import Opening
    from cgd.transport.state_log import PeerReport


federation_app = typer.Typer(help="Create, show, check and change the federation file.", no_args_is_help=True)
app.add_typer(federation_app, name="federation")

SHOWN_DIGITS = 16  # of a digest in a table; members compare whole digests

FederationFile = Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation file.")]
AsName = Annotated[str, typer.Option("--as", metavar="NAME", help="The name of this participant.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="Your private key file (default: NAME.key next to the federation file, or in this folder)."),
]
Salt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With `intersection` and its `salt`: the file with the secret of your row."),
]
Listen = Annotated[
    str | None,
    typer.Option(help="The address to bind, such as tcp://0.0.0.0:7001 (default: the port of your address)."),
]
StateOption = Annotated[
    Path | None, typer.Option("--state", help="The state folder (default: state/NAME next to the federation file).")
]
ParticipantName = Annotated[str, typer.Argument(help="The name of the participant.")]
PublicKey = Annotated[str, typer.Option("--public-key", help="Its public key, from its NAME.pub.")]
Address = Annotated[
    str, typer.Option(help="Its address, such as tcp://host:7001; none if it only dials out, to the hub.")
]
CellOption = Annotated[str | None, typer.Option(help="Its row and column in a grid, such as 2,0.")]
NewQuorum = Annotated[
    int | None, typer.Option("--quorum", help="The new quorum, if the file has one that must change, too.")
]


@app.command()
def keygen(
    name: Annotated[str, typer.Argument(help="The participant that the keys are for.")],
    folder: Annotated[Path, typer.Option("--dir", help="The folder for the key files.")] = Path(),
    public_only: Annotated[
        bool, typer.Option("--public", help="Only write NAME.pub again, from the NAME.key in that folder.")
    ] = False,
) -> None:
    """Create a participant's keys: keep NAME.key secret, send NAME.pub to the other participants."""
    from cgd.federation.keys import Keys

    if public_only:
        keys = Keys.load(folder / f"{name}.key")
        if keys.name != name:
            raise InputError(f"{folder / f'{name}.key'} is the key file of {keys.name}; name it {keys.name}.key")
        typer.echo(f"{keys.save_public(folder, overwrite=True)}  public key {keys.public}, for the federation file")
        return
    keys = Keys.generate(name)
    private, public = keys.save(folder)
    typer.echo(f"{private}  secret: never send it; keep a copy, from which a participant can recover everything")
    typer.echo(f"{public}  public key {keys.public}, for the federation file")


@federation_app.command()
def new(
    path: FederationFile,
    participant: Annotated[
        list[str],
        typer.Option(
            help="NAME=ADDRESS=PUBLIC-KEY-FILE, once for each participant; in a grid, followed by =ROW,COLUMN. "
            "NAME==PUBLIC-KEY-FILE for one that only dials out, to the hub."
        ),
    ],
    name: Annotated[str, typer.Option(help="The federation's name; a new training needs a new name.")] = "federation",
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The sections `data`, `model` and `privacy`, as `cgd schema` suggests them."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="The number of steps (default: 200; with tables 300, with tables and `privacy` 200)."),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="The step size (default: 0.5; for Adam, with tables 0.01, with tables and `privacy` 0.02)."),
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option(help="ADDRESS=PUBLIC-KEY-FILE of a hub, which then computes the sums; only relays with --quorum."),
    ] = None,
    quorum: Annotated[
        int | None,
        typer.Option(help="At least so many go on without silent members; more than half (default: wait for all)."),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With --quorum: the silence after which they go on without a member."),
    ] = None,
    accept_absence: Annotated[
        str,
        typer.Option(help="With --quorum, unless there is `privacy`: 'absence reveals gradients', if you accept this."),
    ] = "",
) -> None:
    """Create a federation file from the public keys of all participants."""
    from cgd.federation import config, config_edit
    from cgd.federation.data_schema import parse_schema
    from cgd.federation.toml_validation import at
    from cgd.files import read_text

    participants = []
    for each in participant:
        parts = each.split("=")
        if len(parts) not in (3, 4):
            raise InputError(
                f"--participant is {each!r}; write NAME=ADDRESS=PUBLIC-KEY-FILE, in a grid with =ROW,COLUMN"
            )
        cell = _cell(parts[3]) if len(parts) == 4 else None
        participants.append(config.Participant(parts[0], parts[1], _public_key(parts[2], parts[0]), cell))
    site = None
    if hub is not None:
        address, separator, key = hub.partition("=")
        if not separator:
            raise InputError(f"--hub is {hub!r}; write ADDRESS=PUBLIC-KEY-FILE, such as tcp://hub.example:7000=hub.pub")
        site = config.HubSite(address, _public_key(key))
    text = None if schema is None else read_text(schema)
    default = config.Training()
    if text is not None:
        with at(f"{path} is not written: "):
            default = config.FOR_TABLES if parse_schema(text, schema)[2] is None else config.FOR_PRIVATE_TABLES
    absence = read_absence(quorum, patience, accept_absence)
    opening: Opening = "mesh" if site is None or absence is not None else "hub"
    training = replace(
        default,
        steps=default.steps if steps is None else steps,
        lr=default.lr if lr is None else lr,
        opening=opening,
    )
    made = config_edit.create_federation(path, name, participants, training, site, text, absence)
    typer.echo(f"{path} is written; send the same file to every participant")
    if absence is not None:
        typer.echo(describe_absence(made))


@federation_app.command()
def add(
    path: FederationFile,
    name: ParticipantName,
    public_key: PublicKey,
    address: Address = "",
    cell: CellOption = None,
    quorum: NewQuorum = None,
) -> None:
    """Add a participant; the next epoch begins when all participants have made the same change."""
    from cgd.federation import config, config_edit

    place = None if cell is None else _cell(cell)
    config_edit.add_participant(path, config.Participant(name, address, _public_key(public_key, name), place), quorum)
    _print_epoch(path)


@federation_app.command()
def remove(path: FederationFile, name: ParticipantName, quorum: NewQuorum = None) -> None:
    """Remove a participant; the next epoch begins when all remaining participants have made the same change."""
    from cgd.federation import config_edit

    config_edit.remove_participant(path, name, quorum)
    _print_epoch(path)


@federation_app.command()
def show(path: FederationFile) -> None:
    """Show the content of the file and its digests."""
    from rich.table import Table
    from rich.text import Text

    from cgd.cli.display import report_console
    from cgd.federation.config import Federation
    from cgd.federation.keys import HALF_CHARACTERS

    federation = Federation.load(path)
    console = report_console()
    table = Table()
    table.add_column("participant", overflow="fold")
    table.add_column("address", overflow="fold")
    table.add_column("public key", no_wrap=True, min_width=HALF_CHARACTERS)  # whole, for comparison
    if federation.grid is not None:
        table.add_column("cell")
    for each in federation.participants:
        cell = (f"{each.cell.row}, {each.cell.column}",) if each.cell is not None else ()
        key = f"{each.key[:HALF_CHARACTERS]}\n{each.key[HALF_CHARACTERS:]}"
        table.add_row(
            *map(Text, (each.name, each.address or "dials out", key, *cell))
        )  # Text, because a key may look like markup
    training = ", ".join(f"{key} {value}" for key, value in federation.training.written().items() if value != "")
    sections = ", ".join(f"{name} {digest}" for name, digest in federation.sections().items())
    head = f"{federation.name}, epoch {federation.epoch}, digest {federation.digest}"
    console.print(head, soft_wrap=True, highlight=False)
    console.print(table)
    if federation.hub is not None:
        console.print(Text(f"Hub: {federation.hub.address}, public key {federation.hub.key}"), soft_wrap=True)
    console.print(f"Training: {training}", soft_wrap=True, highlight=False)
    if federation.privacy is not None:
        chosen = {key: value for key, value in vars(federation.privacy).items() if value not in ("", -1)}
        privacy = ", ".join(f"{key} {value}" for key, value in chosen.items())
        console.print(Text(f"Privacy: {privacy}"), soft_wrap=True)
    if federation.absence is not None:
        console.print(Text(describe_absence(federation)), soft_wrap=True)
    if federation.data is not None and federation.data.intersection is not None:
        console.print(Text(f"Intersection: {federation.data.intersection.describe()}"), soft_wrap=True)
    console.print(f"Digests: {sections}", soft_wrap=True, highlight=False)


@federation_app.command()
def check(
    path: FederationFile,
    name: AsName,
    key: KeyFile = None,
    listen: Listen = None,
    wait: Annotated[float, typer.Option(help="The number of seconds to wait for answers.")] = 5.0,
    state: StateOption = None,
) -> None:
    """Check which peers answer, with latency, version and digest. The exit code is 3 if one does not.

    If this participant has trained before, a second table shows for whom its last run waited.
    """
    from rich.table import Table
    from rich.text import Text

    from cgd.cli.display import report_console
    from cgd.federation.config import digest_of
    from cgd.federation.member import FederationMember, state_folder

    if not 0 < wait < float("inf"):
        raise InputError(f"--wait is {wait}; it must be a number of seconds above 0")
    with tempfile.TemporaryDirectory(prefix="cgd-check-") as empty:
        member = FederationMember(path, name, key=key, listen=listen, state=empty)
        deadline = time.monotonic() + wait
        reports: dict[str, PeerReport] = {}
        try:
            while time.monotonic() < deadline:
                for report in member.runtime.report():  # a peer that was connected once has answered
                    if report.name not in reports or reports[report.name].state != "here" or report.state == "here":
                        reports[report.name] = report
                if all(report.state == "here" and report.latency for report in reports.values()):
                    break
                time.sleep(0.1)
            table = Table()
            for column in ("peer", "state", "latency", "version", "digest", "note"):
                table.add_column(column, overflow="fold")
            for report in reports.values():
                hello = member.runtime.membership.hello(report.name)
                latency = f"{1000 * report.latency:.1f} ms" if report.latency is not None else ""
                known = (
                    (hello.version, digest_of(hello.epoch, dict(hello.sections))[:SHOWN_DIGITS])
                    if hello is not None
                    else ("", "")
                )
                table.add_row(report.name, report.state, latency, *map(Text, (*known, report.note)))
        finally:
            member.peers.close()
    console = report_console()
    head = f"{member.federation.name}, digest {member.federation.digest}"
    console.print(head, soft_wrap=True, highlight=False)
    console.print(table)
    if member.federation.absence is not None:
        here = sum(each.state == "here" for each in reports.values())
        console.print(Text(describe_quorum(member.federation, 1 + here)), soft_wrap=True)
    _print_waiting_times(console, state_folder(member.federation, name, state))
    if any(report.state != "here" for report in reports.values()):
        raise typer.Exit(PEER_MISSING)


def _print_waiting_times(console: Console, folder: StateFolder) -> None:
    """Print for whom our last run waited, if it is known."""
    from rich.table import Table
    from rich.text import Text

    found = folder.load_waiting_times()
    if found is None:
        return
    times, ended = found
    own = times.describe()[0]
    console.print(f"The last run here ended at {ended:%Y-%m-%d %H:%M:%S %Z}: {own}", soft_wrap=True, highlight=False)
    table = Table("waited for", "computing", "summing", "away", "for it alone")
    for peer, each in times.ordered():
        table.add_row(Text(peer), *(f"{x:.1f} s" for x in (each.computing, each.summing, each.away, each.alone)))
    if times.peers:
        console.print(table)


def _cell(text: str) -> Cell:
    from cgd.optim.grid import Cell

    try:
        row, column = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"the cell is {text!r}; write a row and a column, such as 2,0") from None
    return Cell(row, column)


def _public_key(text: str, name: str | None = None) -> str:
    """Return a public key, given as such or as a NAME.pub file, which must belong to the named participant."""
    from cgd.federation.keys import read_public_key

    return read_public_key(text, name)


def _print_epoch(path: Path) -> None:
    from cgd.federation.config import Federation

    federation = Federation.load(path)
    names = ", ".join(sorted(federation.contacts))
    typer.echo(f"{path} has epoch {federation.epoch} now: {names}")
    typer.echo("Every participant in it must have the same file; running participants reload it automatically.")


POLL_SECONDS = 0.2


HubKeyFile = Annotated[
    Path | None,
    typer.Option(help="The hub's private key file (default: hub.key next to the federation file, or in this folder)."),
]
HubListen = Annotated[
    str | None,
    typer.Option(help="The address to bind, such as tcp://0.0.0.0:7000 (default: the port of the hub's address)."),
]
HubLog = Annotated[
    Path | None,
    typer.Option(help="Write events to this file, one JSON object a line (default: state/hub/events.jsonl)."),
]


@app.command()
def hub(path: FederationFile, key: HubKeyFile = None, listen: HubListen = None, log: HubLog = None) -> None:
    """Run the hub until Ctrl-C: it relays for participants that only dial out, and adds up masked values.

    It needs no data and no participant's key. After a crash, start it again with the same command; the participants
    continue.
    """
    from cgd.cli.display import log_events
    from cgd.federation.hub_server import FederationHub

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    running = FederationHub(path, key=key, listen=listen)
    try:
        log_events(path.parent / "state" / "hub", log)
        _watch(running)
    except KeyboardInterrupt:
        typer.echo("cgd: the hub has stopped; participants wait until it is restarted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        running.close()


def _watch(running: FederationHub) -> None:
    """Show which participants are connected, and log changes."""
    import logging

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from cgd.cli.display import COLOURS, Live

    class HubDisplay(Live):
        """A table with a row for each participant."""

        def render(self) -> Group:
            federation, now = running.federation, time.monotonic()
            title = f"{federation.name}, epoch {federation.epoch}, the hub"
            table = Table("participant", "state", "latency", "relayed", "deposited", "lost", title=title)
            for each in running.hub.report():
                state = "here" if each.connected else "missing"
                latency = f"{1000 * each.latency:.0f} ms" if each.latency is not None and each.connected else ""
                counts = f"{each.relayed / 1e6:.1f} MB", f"{each.deposited / 1e6:.1f} MB", str(each.lost)
                table.add_row(each.name, Text(state, style=COLOURS[state]), latency, *counts)
            return Group(table, Text(f"{now - self._started:.0f} s"))

    logger = logging.getLogger("cgd.hub")
    logger.info("the hub is listening", extra={"event": "hub"})
    states: dict[str, bool] = {}
    with HubDisplay():
        while running.hub.failure is None:
            for each in running.hub.report():
                if states.get(each.name) is not each.connected:
                    states[each.name] = each.connected
                    state = "here" if each.connected else "missing"
                    extra = {"event": "peer", "peer": each.name, "state": state}
                    logger.info("%s is %s", each.name, state, extra=extra)
            time.sleep(POLL_SECONDS)
    raise typer.Exit(FAILED)
