"""Commands for operators: keys, the federation file, taking part."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgd.cli.base import PEER_MISSING, app
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.optim.grid import Cell
    from cgd.secagg.messages import Opening
    from cgd.transport.runtime import PeerReport

federation_app = typer.Typer(help="Make, look at and change the federation file.", no_args_is_help=True)
app.add_typer(federation_app, name="federation")

SHOWN_DIGITS = 16  # of a digest, where a whole one has no room; the members themselves compare whole ones

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
    again: Annotated[
        bool, typer.Option("--public", help="Only write NAME.pub anew, from the NAME.key in that folder.")
    ] = False,
) -> None:
    """Make a participant's keys: NAME.key stays secret, NAME.pub goes to the others."""
    from cgd.federation.keys import Keys

    if again:
        keys = Keys.load(folder / f"{name}.key")
        if keys.name != name:
            raise InputError(f"{folder / f'{name}.key'} is the key file of {keys.name}; name it {keys.name}.key")
        typer.echo(f"{keys.save_public(folder, anew=True)}  public key {keys.public}, for the federation file")
        return
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
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What to learn from tables, as `cgd schema` suggests it."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps to train (default: 200; with tables 300).")] = None,
    lr: Annotated[float | None, typer.Option(help="The step size (default: 0.5; with tables 0.01, by Adam).")] = None,
    hub: Annotated[
        str | None, typer.Option(help="ADDRESS=PUBLIC-KEY-FILE of a hub, which then adds up the sums.")
    ] = None,
) -> None:
    """Write a federation file from everybody's public keys."""
    from cgd.federation import config, config_edit
    from cgd.files import read_text

    participants = []
    for each in participant:
        parts = each.split("=")
        if len(parts) not in (3, 4):
            raise InputError(f"--participant is {each!r}; it is NAME=ADDRESS=PUBLIC-KEY-FILE, or that and =ROW,COLUMN")
        cell = _cell(parts[3]) if len(parts) == 4 else None
        participants.append(config.Participant(parts[0], parts[1], _public_key(parts[2], parts[0]), cell))
    site = None
    if hub is not None:
        address, separator, key = hub.partition("=")
        if not separator:
            raise InputError(f"--hub is {hub!r}; it is ADDRESS=PUBLIC-KEY-FILE, such as tcp://hub.example:7000=hub.pub")
        site = config.HubSite(address, _public_key(key))
    usual = config.Training() if schema is None else config.FOR_TABLES
    opening: Opening = "mesh" if site is None else "hub"
    training = replace(usual, steps=steps or usual.steps, lr=lr or usual.lr, opening=opening)
    config_edit.new(path, name, participants, training, site, None if schema is None else read_text(schema))
    typer.echo(f"{path} is written; give everybody the same file")


@federation_app.command()
def add(
    path: FederationFile, name: WhichName, public_key: PublicKey, address: Address = "", cell: CellOption = None
) -> None:
    """Add a participant: the next epoch. It begins when everybody has made the same change."""
    from cgd.federation import config, config_edit

    place = None if cell is None else _cell(cell)
    config_edit.with_participant(path, config.Participant(name, address, _public_key(public_key, name), place))
    _tell_epoch(path)


@federation_app.command()
def remove(path: FederationFile, name: WhichName) -> None:
    """Remove a participant for good: the next epoch. It begins when all who remain have made the same change."""
    from cgd.federation import config_edit

    config_edit.without(path, name)
    _tell_epoch(path)


@federation_app.command()
def show(path: FederationFile) -> None:
    """Show what the file says, with its digests."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from cgd.federation.config import Federation
    from cgd.federation.keys import HALF_CHARACTERS

    federation = Federation.load(path)
    console = Console()
    table = Table("participant")
    table.add_column("address", overflow="fold")
    table.add_column("public key", no_wrap=True, min_width=HALF_CHARACTERS)  # whole, to be compared
    if federation.grid is not None:
        table.add_column("cell")
    for each in federation.participants:
        cell = (f"{each.cell.row}, {each.cell.column}",) if each.cell is not None else ()
        key = f"{each.key[:HALF_CHARACTERS]}\n{each.key[HALF_CHARACTERS:]}"
        table.add_row(*map(Text, (each.name, each.address or "dials out", key, *cell)))  # a key may look like markup
    training = ", ".join(f"{key} {value}" for key, value in vars(federation.training).items() if value != "")
    sections = ", ".join(f"{name} {digest}" for name, digest in federation.sections().items())
    head = f"{federation.name}, epoch {federation.epoch}, digest {federation.digest}"
    console.print(head, soft_wrap=True, highlight=False)
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

    from cgd.federation.config import digest_of
    from cgd.federation.member import FederationMember

    if not 0 < wait < float("inf"):
        raise InputError(f"--wait is {wait}; it is a number of seconds above 0")
    with _no_state() as state:
        membership = FederationMember(path, name, key=key, listen=listen, state=state)
        deadline = time.monotonic() + wait
        reports: dict[str, PeerReport] = {}
        try:
            while time.monotonic() < deadline:
                for report in membership.runtime.report():  # whoever was here once has answered
                    if report.name not in reports or reports[report.name].state != "here" or report.state == "here":
                        reports[report.name] = report
                if all(report.state == "here" and report.latency for report in reports.values()):
                    break
                time.sleep(0.1)
            table = Table("peer", "state", "latency", "version", "digest", "note")
            for report in reports.values():
                hello = membership.runtime.membership.hello(report.name)
                latency = f"{1000 * report.latency:.1f} ms" if report.latency is not None else ""
                known = (
                    (hello.version, digest_of(hello.epoch, dict(hello.sections))[:SHOWN_DIGITS])
                    if hello is not None
                    else ("", "")
                )
                table.add_row(report.name, report.state, latency, *map(Text, (*known, report.note)))
        finally:
            membership.peers.close()
    console = Console()
    head = f"{membership.federation.name}, digest {membership.federation.digest}"
    console.print(head, soft_wrap=True, highlight=False)
    console.print(table)
    if any(report.state != "here" for report in reports.values()):
        raise typer.Exit(PEER_MISSING)


def _cell(text: str) -> Cell:
    from cgd.optim.grid import Cell

    try:
        row, column = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"the cell is {text!r}; it is a row and a column, such as 2,0") from None
    return Cell(row, column)


def _public_key(text: str, name: str | None = None) -> str:
    """A public key as such, or from a NAME.pub file, which must be of the participant if one is named."""
    from cgd.federation.keys import public_key

    return public_key(text, name)


def _tell_epoch(path: Path) -> None:
    from cgd.federation.config import Federation

    federation = Federation.load(path)
    names = ", ".join(sorted(federation.contacts))
    typer.echo(f"{path} is of epoch {federation.epoch} now: {names}")
    typer.echo("Everybody in it must hold the same file; running participants notice the change by themselves.")


def _no_state() -> Any:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="cgd-check-")
