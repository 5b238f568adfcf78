"""`cgd hub`: relay messages for participants that only dial out, and add up their masked values."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import FAILED, INTERRUPTED, app
from cgd.cli.federation import FederationFile

if TYPE_CHECKING:
    from rich.console import Group

    from cgd.federation.hub_server import FederationHub

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
