"""The display of `cgd join` and `cgd hub`: a live table in a terminal, lines elsewhere; an event log in JSON."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import stat
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
from cgd.files import open_private

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from cgd.federation.member import FederationMember

REFRESH_SECONDS = 0.25
PIPE_WIDTH = 1000
COLOURS = {"here": "green", "done": "green", "left": "yellow", "missing": "red", "refused": "red"}
# Attributes of an event besides its text: names, states and counts, never a value.
FIELDS = ("event", "peer", "state", "note", "what", "count", "epoch")


class JSONLines(logging.Formatter):
    """Format records as JSON, one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname, "text": record.getMessage()}
        line |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, "") != ""}
        if record.exc_info is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII, because logs are viewed in terminals


class PrintableLines(logging.Formatter):
    """Format records as text with terminal control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        return printable(super().format(record))


class EventFile(logging.handlers.RotatingFileHandler):
    """A rotating log file; if it can no longer be written, print one line, once."""

    _failed = False

    def _open(self) -> Any:
        """Open the file with mode 0600: privacy warnings contain the number of this participant's records."""
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=self._descriptor)

    def _descriptor(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags, 0o600)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not a terminal or /dev/null
            os.fchmod(descriptor, 0o600)  # it may have existed with another mode
        return descriptor

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's names
        """Report once that a line could not be written."""
        if not self._failed:
            self._failed = True
            typer.echo(f"cgd: {self.baseFilename} can no longer be written; events are lost", err=True)


class StateEventFile(EventFile):
    """A rotating log file in a state folder, where symbolic links are not followed."""

    def _descriptor(self, path: str, flags: int) -> int:
        return open_private(path, flags)


class TerminalHandler(logging.Handler):
    """Print records in a terminal, above the live table if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        typer.echo(f"cgd: {printable(record.getMessage())}", err=True)


def log_events(state: Path, chosen: Path | None = None) -> None:
    """Log events to a file that only its owner can read, and to standard error.

    Events contain no keys and no records, but privacy warnings contain the number of records.

    Args:
        state: the state folder; the file is `events.jsonl` in it.
        chosen: another file, named by the user.

    Raises:
        InputError: the file cannot be written.
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
        to_terminal = TerminalHandler()  # the table shows all other events
        to_terminal.addFilter(lambda record: getattr(record, "event", "") in ("privacy warning", "waiting", "waited"))
        logger.addHandler(to_terminal)
    else:
        to_screen = logging.StreamHandler()
        to_screen.setFormatter(PrintableLines("cgd: %(message)s"))
        # A stale message after a restart is rejected, which is normal.
        to_screen.addFilter(lambda record: record.levelno > logging.INFO or getattr(record, "event", "") != "refused")
        logger.addHandler(to_screen)


def report_console() -> Console:
    """Return the console for a table on standard output; in a pipe or a file, lines are as long as they need to be."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


class Live(ABC):
    """A context manager that shows a live view in a terminal, and nothing elsewhere."""

    def __init__(self) -> None:
        self._message = ""
        self._started = time.monotonic()
        self._console = Console(stderr=True)
        # Output of the program appears above the table, unless it is redirected.
        self._live = rich.live.Live(
            get_renderable=self.render,
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

    def show_message(self, message: str) -> None:
        """Show a message below the table, or as a line without a terminal."""
        self._message = message = printable(message)
        if not self._console.is_terminal:
            typer.echo(f"cgd: {message}", err=True)

    def _refresh(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS):
            self._live.refresh()

    @abstractmethod
    def render(self) -> Group:
        """Return the present view."""


class Display(Live):
    """Show the state of the peers.

    Args:
        member: the participant whose peers are shown.
    """

    def __init__(self, member: FederationMember) -> None:
        self._member = member
        super().__init__()

    def render(self) -> Group:
        """Return a row for each peer, and the progress of this participant's program."""
        member = self._member
        federation, traffic = member.federation, member.peers.traffic
        seconds = time.monotonic() - self._started
        title = f"{federation.name}, epoch {federation.epoch}, as {member.me}"
        table = Table("peer", "state", "latency", "note", title=title, title_justify="left")
        for report in member.runtime.report():
            latency = f"{1000 * report.latency:.0f} ms" if report.latency is not None else ""
            state = Text(report.state, style=COLOURS[report.state])
            table.add_row(report.name, state, latency, Text(report.note))
        pending = [member.runtime.membership.waiting_for(group) for group in member.groups]
        waiting = "; ".join(
            f"waiting for {', '.join(sorted(missing))} ({what})" for what, missing in pending if missing
        )
        sent = traffic.bytes_sent / 1e6
        step = member.runtime.membership.loop_step
        steps = f"step {step + 1} of {federation.training.steps}, " if step else ""
        progress = f"{steps}{traffic.sums} sums in {seconds:.0f} s, {sent:.1f} MB sent"
        activity = waiting or ("" if self._message else "computing")
        return Group(table, *(Text(line) for line in (progress, self._message, activity) if line))
