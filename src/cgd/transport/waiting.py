"""Texts about peers that our program waits for: who, since when, why, and what helps."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from cgd.errors import PeerTimeoutError
from cgd.transport.state_log import local_time

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from datetime import datetime

    from cgd.secagg.messages import PeerId
    from cgd.transport.state_log import PeerReport

# The times of reminders after the start of a wait; then one in each of the last intervals.
REMINDER_SECONDS = (30.0, 60.0, 120.0, 300.0)
INTERVAL_SECONDS = REMINDER_SECONDS[-1]
COMPUTING = "connected; its program has not reached this sum yet: it computes, or repeats earlier steps"


class Wait:
    """A wait for peers: its start, and the times of reminders.

    Args:
        clock: measures the time since the start.
        local_clock: the time that is displayed.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, local_clock: Callable[[], datetime] = local_time
    ) -> None:
        self._clock, self._local_clock = clock, local_clock
        self._started = clock()
        self._next = REMINDER_SECONDS[0]

    def reminder_is_due(self) -> bool:
        """Return whether the time of the next reminder has come; each is reported once."""
        seconds = self._clock() - self._started
        if seconds < self._next:
            return False
        later = [each for each in REMINDER_SECONDS if each > seconds]
        self._next = later[0] if later else INTERVAL_SECONDS * (seconds // INTERVAL_SECONDS + 1)
        return True

    def reminder(self, reports: Iterable[PeerReport], waited_for: Collection[PeerId], what: str) -> str:
        """Return the text of a reminder; empty if all peers are here and the wait is not long.

        Args:
            reports: the present states of all peers.
            waited_for: the peers that have to send something.
            what: what they have to send.
        """
        named = [each for each in reports if each.absent or each.name in waited_for]
        seconds = self._clock() - self._started
        if not named or not (seconds >= INTERVAL_SECONDS or any(each.absent for each in named)):
            return ""
        now = self._local_clock()
        start = time_of_day(now - timedelta(seconds=seconds), now)
        reasons = "; ".join(f"{each.name}: {reason(each, what, now)}" for each in named)
        return f"{now:%H:%M:%S %Z}, waiting since {start} for {reasons}"


def reason(report: PeerReport, what: str, now: datetime) -> str:
    """Return why a peer is waited for, as far as it is known here."""
    when = time_of_day(report.since, now) if report.since is not None else "the start"
    note = f": {report.note}" if report.note else ""
    if report.state == "left":
        return f"at {when} {report.note}"
    if report.state == "refused":
        return f"refused since {when}{note}"
    if report.state == "missing":
        return f"missing since {when}, was here before{note}" if report.seen else f"not here yet{note}"
    if report.note:  # present, and something is wrong with the connection
        return report.note
    if what == "Ready":
        return COMPUTING
    return f"connected; we wait for {what}"


def remedy(reports: Iterable[PeerReport], missing: Collection[PeerId], what: str) -> str:
    """Return what helps after a timeout: a longer one only if the peers are here, and only their programs are slow."""
    waited_for = [each for each in reports if each.name in missing]
    absent = [each.name for each in waited_for if each.absent]
    refused = [each.name for each in waited_for if each.state == "refused"]
    disturbed = [each.name for each in waited_for if each.note and not each.absent]
    if refused:
        return f"remove the reason for which {', '.join(refused)} cannot take part, then start again"
    if absent:
        names = ", ".join(absent)
        return f"start {names}, or remove the reason why it is not connected; then start again with the same command"
    if disturbed:
        return f"repair the connection with {', '.join(disturbed)}, then start again with the same command"
    if what in ("Ready", "its journal"):
        return "if its steps, or the transfer of its journal, take longer than this, raise the timeout"
    return "it is connected and does not continue: look at its own output, and restart it"


def timeout_error(
    reports: Sequence[PeerReport], missing: Collection[PeerId], what: str, seconds: float
) -> PeerTimeoutError:
    """Return the error of a program that has waited for too long."""
    notes = {each.name: each.note for each in reports if each.note}
    reasons = "; ".join(f"{peer}: {notes[peer]}" for peer in sorted(missing) if peer in notes)
    text = f"{what}{'; ' + reasons if reasons else ''}"
    return PeerTimeoutError(missing, seconds, text, remedy(reports, missing, what))


def time_of_day(moment: datetime, now: datetime) -> str:
    """Return the time of a moment, with the date if that is not today.

    Examples:
        >>> from datetime import datetime
        >>> time_of_day(datetime(2026, 11, 17, 9, 30), datetime(2026, 11, 17, 12, 0))
        '09:30:00'
        >>> time_of_day(datetime(2026, 11, 17, 9, 30), datetime(2026, 11, 18, 12, 0))
        '2026-11-17 09:30:00'
    """
    return f"{moment:%H:%M:%S}" if moment.date() == now.date() else f"{moment:%Y-%m-%d %H:%M:%S}"
