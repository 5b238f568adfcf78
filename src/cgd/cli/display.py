"""What `cgd join` and `cgd hub` show while they run: a live table in a terminal, lines elsewhere; events as JSON."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import rich.live
import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cgd.cli.base import printable
from cgd.errors import InputError
from cgd.federation.state import open_private

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from cgd.federation.member import FederationMember

REFRESH_SECONDS = 0.25
COLOURS = {"here": "green", "done": "green", "left": "yellow", "missing": "red", "refused": "red"}
# What an event may say besides its text: names, states and counts, never a value.
FIELDS = ("event", "peer", "state", "note", "what", "count", "epoch")


class JSONLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname, "text": record.getMessage()}
        line |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, "") != ""}
        if record.exc_info is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII: logs are looked at in terminals


class PrintableLines(logging.Formatter):
    """Lines for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return printable(super().format(record))


class EventFile(logging.handlers.RotatingFileHandler):
    """A log that complains once, and in one line, if it cannot be written any more."""

    _complained = False

    def _open(self) -> Any:
        """For its owner alone: a caution says how many records we have."""
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=self._descriptor)

    def _descriptor(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's names
        """Called when a line could not be written."""
        if not self._complained:
            self._complained = True
            typer.echo(f"cgd: {self.baseFilename} cannot be written any more; events are lost", err=True)


class StateEventFile(EventFile):
    """The same in a state folder, where a link is not followed."""

    def _descriptor(self, path: str, flags: int) -> int:
        return open_private(path, flags)


class AboveTheTable(logging.Handler):
    """Shows a line in a terminal; while there is a live table, above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Called with every line."""
        typer.echo(f"cgd: {printable(record.getMessage())}", err=True)


def log_events(state: Path, chosen: Path | None = None) -> None:
    """Write what happens to a file for its owner: no keys and no records, but in cautions how many we have.

    Args:
        state: the state folder, in which it is `events.jsonl`.
        chosen: another file, which the user named.

    Raises:
        InputError: it cannot be written.
    """
    path, kind = (state / "events.jsonl", StateEventFile) if chosen is None else (chosen, EventFile)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        to_file = kind(path, maxBytes=10 << 20, backupCount=3)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another place with --log") from None
    to_file.setFormatter(JSONLines())
    logger = logging.getLogger("cgd")
    logger.setLevel(logging.INFO)
    logger.addHandler(to_file)
    logger.propagate = False
    if sys.stderr.isatty():
        above = AboveTheTable()  # the table has the rest
        above.addFilter(lambda record: getattr(record, "event", "") == "caution")
        logger.addHandler(above)
    else:
        to_screen = logging.StreamHandler()
        to_screen.setFormatter(PrintableLines("cgd: %(message)s"))
        # A stale message after a restart is nothing to worry about.
        to_screen.addFilter(lambda record: record.levelno > logging.INFO or getattr(record, "event", "") != "refused")
        logger.addHandler(to_screen)


class Live(ABC):
    """Shows a picture in a terminal until it is left, and nothing elsewhere."""

    def __init__(self) -> None:
        self._message = ""
        self._begun = time.monotonic()
        self._console = Console(stderr=True)
        # What the program prints stays above the table, unless it goes elsewhere.
        self._live = rich.live.Live(
            get_renderable=self.picture,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="cgd-display", daemon=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._console.is_terminal:
            self._thread.join()
            self._live.stop()
            if self._message:
                typer.echo(f"cgd: {self._message}", err=True)

    def say(self, message: str) -> None:
        """Show a message below the table, or as a line."""
        self._message = message = printable(message)
        if not self._console.is_terminal:
            typer.echo(f"cgd: {message}", err=True)

    def _refresh(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS):
            self._live.refresh()

    @abstractmethod
    def picture(self) -> Group:
        """What to show at the moment."""


class Display(Live):
    """Shows the peers' state.

    Args:
        membership: whose.
    """

    def __init__(self, membership: FederationMember) -> None:
        self._membership = membership
        super().__init__()

    def picture(self) -> Group:
        """A row for each peer, and what our own program does."""
        membership = self._membership
        federation, traffic = membership.federation, membership.peers.traffic
        seconds = time.monotonic() - self._begun
        title = f"{federation.name}, epoch {federation.epoch}, as {membership.me}"
        table = Table("peer", "state", "latency", "note", title=title, title_justify="left")
        for report in membership.runtime.report():
            latency = f"{1000 * report.latency:.0f} ms" if report.latency is not None else ""
            state = Text(report.state, style=COLOURS[report.state])
            table.add_row(report.name, state, latency, Text(report.note))
        waits = [membership.runtime.membership.waiting_for(group) for group in membership.groups]
        waits = [(what, missing) for what, missing in waits if missing]
        waiting = "; ".join(f"waiting for {', '.join(sorted(missing))} ({what})" for what, missing in waits)
        sent = traffic.bytes_sent / 1e6
        step = membership.runtime.membership.clock
        steps = f"step {step + 1} of {federation.training.steps}, " if step else ""
        done = f"{steps}{traffic.sums} sums in {seconds:.0f} s, {sent:.1f} MB sent"
        doing = waiting or ("" if self._message else "computing")
        return Group(table, *(Text(line) for line in (done, self._message, doing) if line))
