"""The states of the peers: since when they last, and a log of their changes at a limited rate."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from cgd.transport.base import SETTLE_SECONDS

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
        since: the local time at which it left, was refused, or otherwise became absent, or present again.
        seen: whether it was present before, since this process was started.
    """

    name: PeerId
    state: str
    note: str = ""
    latency: float | None = None
    since: datetime | None = None
    seen: bool = False

    @property
    def absent(self) -> bool:
        """True if no sum can be made with the peer at the moment."""
        return self.state in ("missing", "refused", "left")


def local_time() -> datetime:
    """Return the local time with its zone."""
    return datetime.now().astimezone()


class StateHistory:
    """Records since when each peer is absent or present."""

    def __init__(self, clock: Callable[[], datetime] = local_time) -> None:
        self._clock = clock
        self._latest: dict[PeerId, PeerReport] = {}

    def add(self, reports: Iterable[PeerReport]) -> list[PeerReport]:
        """Return the present reports of all peers with `since` and `seen`."""
        now, latest = self._clock(), {}
        for report in reports:
            before = self._latest.get(report.name)
            since, seen = (now, False) if before is None else (before.since, before.seen or not before.absent)
            # A peer that stopped, or was refused, and is then missing has been absent since then.
            happened = report.state in ("left", "refused") and before is not None and before.state != report.state
            if happened or (before is not None and before.absent != report.absent):
                since = now
            latest[report.name] = replace(report, since=since, seen=seen)
        self._latest = latest  # without the peers that are not members any more
        return list(latest.values())


@dataclass
class _LoggedState:
    """The last line about a peer, the lines that it has left at a time, and since when it is missing."""

    state: tuple[str, str] | None
    lines: float
    time: float
    missing_since: float | None = None


class StateLog:
    """Logs a line for every change of a peer's state or note.

    Changes that come too fast are left out. The last one is logged later, if the peer then still is in that state. That
    a peer is missing is not logged in the first seconds: it may not be started yet, or be back at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[PeerId, _LoggedState] = {}

    def add(self, reports: Iterable[PeerReport]) -> None:
        """Log what has changed since the last line about each peer; call it again and again."""
        now = self._clock()
        for report in reports:
            logged = self._logged.setdefault(report.name, _LoggedState(None, MAX_LINES_AT_ONCE, now))
            if report.state != "missing":
                logged.missing_since = None
            elif logged.missing_since is None:
                logged.missing_since = now
            if logged.state == (report.state, report.note):
                continue
            if logged.missing_since is not None and now - logged.missing_since < SETTLE_SECONDS:
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
