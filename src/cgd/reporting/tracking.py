"""`cgd join --track`: show the figures of a run in a tool for experiments, while it trains.

What is tracked is what the participant's own history and log have: losses, score, privacy spent, and how long the
program computed and waited. Nothing else: no settings, no file names, no names of other members.

A thread of its own writes to each target. `track` never waits, and no failure there reaches the training: figures stay
in a queue of limited length and are tried again, with one warning. The history of the run has them in any case, and a
later process of the same run adds those that are missing.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self

from cgd.files import write_private
from cgd.reporting.tracking_targets import Row, TrackedRun, parse_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from cgd.reporting.run_file import EvalRecord
    from cgd.reporting.tracking_targets import Store, Target

log = logging.getLogger("cgd.reporting")

ID_FILE = "tracked"
FIGURES = ("training_loss", "validation_loss", "everyone_validation_loss", "score")
"""Those of an `EvalRecord`, with the names of metrics.csv."""
MAX_ROWS = 10_000
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
END_SECONDS = 5.0
"""Seconds that the end of the process waits for the last figures, for all targets together; see `cgd.cli.notify`."""


class Tracker:
    """Writes the rows of one run to one target, in a thread of its own.

    Args:
        target: the target.
        run: the names of the run.

    Attributes:
        unwritten: the number of rows that are not written.
    """

    def __init__(self, target: Target, run: TrackedRun) -> None:
        self.target, self._run = target, run
        self._rows: deque[Row] = deque()
        self._dropped = 0
        self._warned = False
        self._status = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="cgd-track", daemon=True)
        self._thread.start()

    @property
    def unwritten(self) -> int:
        """The number of rows that were added and are not written."""
        with self._changed:
            return len(self._rows) + self._dropped

    def add(self, row: Row) -> None:
        """Write a row as soon as possible; return at once."""
        with self._changed:
            if len(self._rows) < MAX_ROWS:
                self._rows.append(row)
            else:
                self._dropped += 1
            self._changed.notify()

    def stop(self, status: str) -> None:
        """Let the thread end after one more attempt to write what is left, and mark the run as "done" and so on."""
        with self._changed:
            self._status = self._status or status
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)

    def _work(self) -> None:
        store: Store | None = None
        pause = PAUSE_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._status)
                rows, status = list(self._rows), self._status
            try:
                if store is None:
                    store = self.target.open(self._run)
                self._write(store, rows)
                if status:
                    store.end(status)
                    return
                pause = PAUSE_SECONDS
            except Exception as error:  # whatever it is: the library is not ours, and the training must go on
                store = None  # after an error, only the target knows what has arrived
                if status:
                    return
                self._warn(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._status, pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _write(self, store: Store, rows: list[Row]) -> None:
        missing = [
            row._replace(
                figures={name: each for name, each in row.figures.items() if (name, row.step) not in store.known}
            )
            for row in rows
        ]
        missing = [row for row in missing if row.figures]
        if missing:
            store.write(missing)
            store.known |= {(name, row.step) for row in missing for name in row.figures}
        with self._changed:
            for _ in rows:
                self._rows.popleft()

    def _warn(self, error: Exception) -> None:
        """Log the kind of an error, once; its text may contain addresses and secrets."""
        if not self._warned:
            self._warned = True
            log.warning(
                "%s cannot be reached or written (%s); training continues, and figures are written as soon as possible",
                self.target, type(error).__name__, extra={"event": "not tracked"},
            )  # fmt: skip


class Tracking:
    """A context manager for the targets of a run; without targets, it does nothing.

    Args:
        targets: the targets.
    """

    def __init__(self, targets: Iterable[Target] = ()) -> None:
        self.targets = tuple(targets)
        self._trackers: list[Tracker] = []

    @classmethod
    def from_options(cls, track: Iterable[str]) -> Self:
        """Return the tracking for the values of `--track`.

        Raises:
            InputError: one cannot be used.
            MissingExtraError: the library of one is not installed.
        """
        return cls(map(parse_target, dict.fromkeys(track)))

    def begin(self, federation: str, participant: str, folder: Path) -> None:
        """Track a run from now on.

        Args:
            federation: the name of the federation.
            participant: our name.
            folder: the folder of the run, which remembers the identity of the run.

        Raises:
            InputError: the folder cannot be written.
        """
        if self.targets:
            run = TrackedRun(federation, participant, _run_id(folder / ID_FILE))
            self._trackers = [Tracker(each, run) for each in self.targets]

    def track(self, evaluation: EvalRecord, more: Mapping[str, float]) -> None:
        """Write the figures of an evaluation, and more of the same step; return at once."""
        figures = {name: getattr(evaluation, name) for name in FIGURES} | dict(more)
        known = {name: float(value) for name, value in figures.items() if value is not None}
        for each in self._trackers:
            each.add(Row(evaluation.step, time.time(), known))

    def end(self, status: str) -> list[str]:
        """Write what is left, for some seconds at most; return a sentence for each target that lacks something.

        Args:
            status: "done", "interrupted" or "failed".
        """
        trackers, self._trackers = self._trackers, []
        for each in trackers:
            each.stop(status)
        deadline = time.monotonic() + END_SECONDS
        for each in trackers:
            each.join(max(0.0, deadline - time.monotonic()))
        return [
            f"{each.target} lacks the figures of {count:,} evaluation{'s' if count != 1 else ''}; the history of the "
            "run has them, and the same command adds them"
            for each in trackers
            if (count := each.unwritten)
        ]


def _run_id(path: Path) -> str:
    """Return the identity of a run, which is drawn once and written to its folder."""
    try:
        found = path.read_text().strip()
    except (OSError, ValueError):
        found = ""
    if re.fullmatch("[0-9a-f]{32}", found):
        return found
    made = secrets.token_hex(16)
    write_private(path, f"{made}\n".encode())
    return made
