"""`StateLog`: logs the states of the peers when they change, at a limited rate."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cgd.secagg.messages import PeerId

log = logging.getLogger("cgd.transport")

# A peer can change its state and its note as often as it likes, and old lines are removed when the log is full. So a
# peer has this many lines at once, and then one line in this time.
MAX_LINES_AT_ONCE = 10
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class PeerReport:
    """The status of one peer, for display.

    Attributes:
        name: the name of the peer, or of the hub.
        state: "here", "done", "left", "missing" or "refused".
        note: the reason if it is not here, or what is wrong with the connection.
        latency: the round-trip time in seconds, if known.
    """

    name: PeerId
    state: str
    note: str = ""
    latency: float | None = None


@dataclass
class _LoggedState:
    """The last line about a peer, and the lines that it has left at a time."""

    state: tuple[str, str] | None
    lines: float
    time: float


class StateLog:
    """Logs a line for every change of a peer's state or note.

    Changes that come too fast are left out. The last one is logged later, if the peer then still is in that state.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[PeerId, _LoggedState] = {}

    def add(self, reports: Iterable[PeerReport]) -> None:
        """Log what has changed since the last line about each peer; call it again and again."""
        now = self._clock()
        for report in reports:
            logged = self._logged.setdefault(report.name, _LoggedState(None, MAX_LINES_AT_ONCE, now))
            if logged.state == (report.state, report.note):
                continue
            lines = min(MAX_LINES_AT_ONCE, logged.lines + (now - logged.time) / SECONDS_BETWEEN_LINES)
            logged.lines, logged.time = lines, now
            if lines < 1:
                continue
            logged.state, logged.lines = (report.state, report.note), lines - 1
            log.info(
                "%s is %s%s", report.name, report.state, f": {report.note}" if report.note else "",
                extra={"event": "peer", "peer": report.name, "state": report.state, "note": report.note},
            )  # fmt: skip
