"""`cgd hub`: relay for participants that only dial out, and add up what they deposit."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import FAILED, INTERRUPTED, app
from cgd.cli.operations import FederationFile

if TYPE_CHECKING:
    from rich.console import Group

    from cgd.federation.hub_server import FederationHub

LOOK_SECONDS = 0.2


HubKeyFile = Annotated[
    Path | None, typer.Option(help="The hub's private key file (default: hub.key beside the federation file, or here).")
]
HubListen = Annotated[
    str | None,
    typer.Option(help="Where to listen, such as tcp://0.0.0.0:7000 (default: the port of the hub's address)."),
]
HubLog = Annotated[
    Path | None,
    typer.Option(help="Write events to this file, one JSON object a line (default: state/hub/events.jsonl)."),
]


@app.command()
def hub(path: FederationFile, key: HubKeyFile = None, listen: HubListen = None, log: HubLog = None) -> None:
    """Run the hub, until Ctrl-C: it relays for participants that only dial out, and adds up what it cannot read.

    It needs no data and no participant's key. Killed, it is started again with the same command, and all go on.
    """
    from cgd.cli.display import log_events
    from cgd.federation.hub_server import FederationHub

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    running = FederationHub(path, key=key, listen=listen)
    try:
        log_events(path.parent / "state" / "hub", log)
        _watch(running)
    except KeyboardInterrupt:
        typer.echo("cgd: the hub stops; participants wait until it is back", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        running.close()


def _watch(running: FederationHub) -> None:
    """Show, and log, who comes and goes."""
    import logging

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from cgd.cli.display import COLOURS, Live

    class HubDisplay(Live):
        """A row for each participant."""

        def picture(self) -> Group:
            federation, now = running.federation, time.monotonic()
            title = f"{federation.name}, epoch {federation.epoch}, the hub"
            table = Table("participant", "state", "latency", "relayed", "deposited", "lost", title=title)
            for each in running.hub.report():
                state = "here" if each.connected else "missing"
                latency = f"{1000 * each.latency:.0f} ms" if each.latency is not None and each.connected else ""
                counts = f"{each.relayed / 1e6:.1f} MB", f"{each.deposited / 1e6:.1f} MB", str(each.lost)
                table.add_row(each.name, Text(state, style=COLOURS[state]), latency, *counts)
            return Group(table, Text(f"{now - self._begun:.0f} s"))

    logger = logging.getLogger("cgd.hub")
    logger.info("the hub listens", extra={"event": "hub"})
    states: dict[str, bool] = {}
    with HubDisplay():
        while running.hub.failure is None:
            for each in running.hub.report():
                if states.get(each.name) is not each.connected:
                    states[each.name] = each.connected
                    state = "here" if each.connected else "missing"
                    extra = {"event": "peer", "peer": each.name, "state": state}
                    logger.info("%s is %s", each.name, state, extra=extra)
            time.sleep(LOOK_SECONDS)
    raise typer.Exit(FAILED)
