"""`cgd join --notify`: tell somebody outside that a member is missing or back, or that the training has ended.

A message contains names, states and times. It contains nothing about records, losses or the model, because it leaves
the organisation; and no text that a peer has written, so that no peer can decide what it says.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Self

import typer

from cgd.cli.base import INTERRUPTED, exit_code
from cgd.cli.notify_targets import Notification, NotSentError, parse_target
from cgd.errors import InputError
from cgd.files import write_private
from cgd.transport.state_log import local_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import TracebackType

    from cgd.cli.notify_targets import Target
    from cgd.federation.member import FederationMember
    from cgd.transport.state_log import PeerReport

log = logging.getLogger("cgd.cli")

POLL_SECONDS = 1.0
MIN_AFTER_SECONDS = 1.0
# A webhook is tried again after these pauses, unless it rejects the message.
RETRY_SECONDS = (2.0, 5.0)
# How long the process stays at most for the last message; a service manager stops a process after 30 seconds.
END_SECONDS = 20.0
PATIENCE_SECONDS = 2.0
# A member can come and go as often as it likes, and make our sums fail after every restart.
MAX_MESSAGES = 3
WINDOW_SECONDS = 1800.0
LAST_OF_ITS_KIND = f"; this is the last message of this kind within {WINDOW_SECONDS / 60:g} minutes"


class RateLimit:
    """Allows `MAX_MESSAGES` in any `WINDOW_SECONDS`.

    Args:
        times: the times of earlier messages.
    """

    def __init__(self, times: Iterable[float] = ()) -> None:
        self.times = list(times)

    def take(self, now: float) -> bool:
        """Return whether a message may be sent now, and count it."""
        self.times = [each for each in self.times if now - WINDOW_SECONDS < each <= now]
        if self.exhausted:
            return False
        self.times.append(now)
        return True

    @property
    def exhausted(self) -> bool:
        """True if the next message has to wait."""
        return len(self.times) >= MAX_MESSAGES


class Absence:
    """The absences of one member: when the present one began, and whether there was a message about it."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.reported = False
        self.limit = RateLimit()


class Absences:
    """Decides when a member is absent for so long that there is a message, and when it is back.

    There is one message for each absence, and one for the return if the absence had one.

    Args:
        after: the number of seconds after which a member counts as missing.
        clock: measures the time.
    """

    def __init__(self, after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after, self._clock = after, clock
        self._members: dict[str, Absence] = {}

    def add(self, reports: Iterable[PeerReport]) -> list[tuple[str, PeerReport, bool]]:
        """Return new events, "missing" or "back", their members, and whether the limit is reached with them."""
        now, events = self._clock(), []
        for report in reports:
            absence = self._members.setdefault(report.name, Absence())
            if not report.absent:
                if absence.reported:
                    events.append(("back", report, absence.limit.exhausted))
                absence.since, absence.reported = None, False
                continue
            absence.since = now if absence.since is None else absence.since
            if not absence.reported and now - absence.since >= self._after and absence.limit.take(now):
                absence.reported = True
                events.append(("missing", report, False))
        return events


class FailureLimit:
    """A `RateLimit` in a file: a service manager restarts a process that has failed, again and again.

    Args:
        path: the file.
        clock: the time of day in seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock

    def take(self) -> tuple[bool, bool]:
        """Return whether a message may be sent now, and whether it is the last one for some time."""
        try:
            limit = RateLimit(float(line) for line in self._path.read_text(encoding="ascii").split()[:MAX_MESSAGES])
        except (OSError, ValueError):  # none so far, or damaged
            limit = RateLimit()
        allowed = limit.take(self._clock())
        try:
            write_private(self._path, "".join(f"{each}\n" for each in limit.times).encode())
        except (OSError, InputError) as error:
            log.warning("%s cannot be written: %s", self._path, error, extra={"event": "notification"})
        return allowed, limit.exhausted


class Notifier:
    """A context manager that sends messages from a thread of its own, while a participant runs and when it ends.

    Nothing here can fail or delay the training. Only the end of the process waits for the last message.

    Args:
        target: the recipient; without one, nothing is done.
        after: the number of seconds after which a member counts as missing.
    """

    def __init__(self, target: Target | None, after: float) -> None:
        self._target = target
        self._absences = Absences(after)
        self._member: FederationMember | None = None
        self._stop = threading.Event()
        self._ended = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="cgd-notify", daemon=True)

    @classmethod
    def from_options(cls, notify: str | None, after: float | None, default: float) -> Self:
        """Return the notifier for the options of the command line.

        Raises:
            InputError: an option cannot be used.
        """
        if notify is None and after is not None:
            raise InputError("--notify-after needs --notify TARGET, a URL or a command")
        after = default if after is None else after
        if not MIN_AFTER_SECONDS <= after < math.inf:  # also NaN
            raise InputError(f"--notify-after is {after:g}; it is a number of seconds, at least {MIN_AFTER_SECONDS:g}")
        return cls(None if notify is None else parse_target(notify), after)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(exit_code(error))

    def watch(self, member: FederationMember) -> None:
        """Send messages about the peers of this participant from now on, and about its end."""
        self._member = member
        if self._target is not None:
            self._thread.start()

    def end(self, code: int) -> None:
        """Send the last message, with this exit code, and wait some seconds for that; a second call does nothing."""
        if self._member is None or self._target is None or not self._ended.acquire(blocking=False):
            return
        self._stop.set()
        last = threading.Thread(target=partial(self._send_last, self._member, code), name="cgd-notify-end", daemon=True)
        last.start()
        try:
            last.join(PATIENCE_SECONDS)
            if last.is_alive():
                typer.echo(f"cgd: notifying {self._target} of the end (Ctrl-C leaves immediately)", err=True)
                last.join(END_SECONDS - PATIENCE_SECONDS)
            if last.is_alive():
                note = f"cgd: no answer within {END_SECONDS:g} s; the last notification may not have arrived"
                typer.echo(note, err=True)
        except KeyboardInterrupt:
            typer.echo("cgd: left before the last notification was sent", err=True)

    def _send_last(self, member: FederationMember, code: int) -> None:
        self._thread.join()  # the messages stay in order
        me, ending = member.me, ""
        if code == 0:
            event, text = "done", f"{me} is done with the training"
        elif code == INTERRUPTED:
            event, text = "interrupted", f"{me} was interrupted; the same command continues the training"
        else:
            event, text = "failed", f"{me} has ended with an error, exit code {code}; its own output says which"
            allowed, is_last = FailureLimit(member.state.folder / "notified").take()
            if not allowed:
                log.info("not notified, because there were %d failures", MAX_MESSAGES, extra={"event": "notification"})
                return
            ending = LAST_OF_ITS_KIND if is_last else ""
        self._send(member, event, text + ending, threading.Event(), exit_code=code)

    def _watch(self) -> None:
        assert self._member is not None  # noqa: S101 - for the type checker
        while not self._stop.wait(POLL_SECONDS):
            try:
                for event, report, is_last in self._absences.add(self._member.runtime.report()):
                    text = describe(event, report, self._member.me)
                    ending = LAST_OF_ITS_KIND if is_last else ""
                    self._send(self._member, event, text + ending, self._stop, report.name)
            except Exception:  # the thread must survive any error
                log.exception("a notification failed", extra={"event": "notification"})

    def _send(
        self,
        sender: FederationMember,
        event: str,
        text: str,
        stop: threading.Event,
        member: str = "",
        exit_code: int | None = None,
    ) -> None:
        """Send a message; try again if that may help, until `stop` is set."""
        assert self._target is not None  # noqa: S101 - for the type checker
        federation, when = sender.federation.name, local_time().isoformat(timespec="seconds")
        message = Notification(federation, sender.me, event, member, when, f"cgd: {federation}: {text}", exit_code)
        for pause in (*RETRY_SECONDS, None):
            try:
                self._target.send(message)
            except NotSentError as error:
                if error.again and pause is not None and not stop.wait(pause):
                    continue
                log.warning("%s was not notified (%s): %s", self._target, error, text, extra={"event": "notification"})
            else:
                log.info("notified %s: %s", self._target, text, extra={"event": "notification"})
            return


def describe(event: str, report: PeerReport, me: str) -> str:
    """Return a sentence about a member, without the note, which contains addresses and words of the peer.

    It is read elsewhere, so the time has its offset.
    """
    if event == "back":
        return f"{report.name} is back at {me}"
    since = "" if report.since is None else f" since {report.since.isoformat(timespec='seconds')}"
    known = {
        "left": "its program has stopped",
        "refused": f"it is connected and refused, and the log of {me} says why",
    }.get(report.state, "it was here before" if report.seen else "it has not been here yet")
    return f"{report.name} is missing at {me}{since}: {known}"
