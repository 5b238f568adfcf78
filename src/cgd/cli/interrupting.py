"""Ctrl-C and SIGTERM as a clean stop: an exception in the midst of whatever the program does could leave a lock held.

The first signal lets the conductor leave, so that a program that waits for others, or asks for its next sum, gets an
error. A program that computes for longer is interrupted where it holds no lock of ours, after the others were told and
the state was saved. The second signal ends the process at once, which loses no more than a kill does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn, Self

from cgd.cli.base import INTERRUPTED
from cgd.errors import ClosedError

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from cgd.transport.runtime import FederationRuntime

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD = "interrupted; the same command goes on from here"
# How long a program may take to notice the stop by itself, and then to end when it is interrupted.
NOTICE_SECONDS, END_SECONDS = 1.0, 3.0
LOOK_SECONDS = 0.05
# Code that holds locks which other threads wait for.
HOLDS_LOCKS = ("cgd.transport", "threading", "logging", "rich")


class StoppedError(ClosedError):
    """The operator has stopped this participant."""


class Interruption:
    """Takes SIGINT and SIGTERM until it is left; to be used in the main thread.

    At first they raise `KeyboardInterrupt`, as usual. From `defer` on they do not, and from `attach` on they stop a
    conductor.

    Attributes:
        stopped: whether there was a signal.
        left: set when the program has ended, so that it is not interrupted any more.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.left = False
        self._deferred = False
        self._runtime: FederationRuntime | None = None
        self._stopping: threading.Thread | None = None
        self._starting = threading.Lock()
        self._nudging = False
        self._nudges_sent = self._nudges_seen = 0
        self._main = threading.get_ident()
        self._read, self._write = os.pipe()
        self._reader = threading.Thread(target=self._listen, name="cgd-signals", daemon=True)

    def __enter__(self) -> Self:
        os.set_blocking(self._write, False)
        self._before = [signal.signal(each, self._handle) for each in SIGNALS]
        # The number of a signal is written there at once, also while the main thread is in code that is not Python's.
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deferred = self.left = True
        if self._stopping is not None:
            self._stopping.join()
        signal.set_wakeup_fd(self._wakeup)
        for each, before in zip(SIGNALS, self._before, strict=True):
            signal.signal(each, before)
        os.write(self._write, b"\0")
        self._reader.join()
        os.close(self._read)
        os.close(self._write)

    def defer(self) -> None:
        """From now on a signal raises nothing where the program happens to be."""
        self._deferred = True

    def attach(self, runtime: FederationRuntime) -> None:
        """Stop this conductor at the first signal, or now if there was one since `defer`."""
        self._runtime = runtime
        if self.stopped:
            self._stop_once()

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        """Called in the main thread; `_listen` does what there is to do."""
        if not self._deferred or (self._nudging and not self.left and not _holds_locks(frame)):
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while (number := os.read(self._read, 1)[0]) != 0:
            if number not in SIGNALS:
                continue
            if self._nudges_seen < self._nudges_sent and number == signal.SIGINT:  # it was ours
                self._nudges_seen += 1
                continue
            if self.stopped:
                _end(f"interrupted again and ended at once; {TOLD.partition('; ')[2]}")
            self.stopped = True
            if self._runtime is not None:
                self._stop_once()

    def _stop_once(self) -> None:
        with self._starting:
            if self._stopping is None:
                self._stopping = threading.Thread(target=self._stop, name="cgd-stop", daemon=True)
                self._stopping.start()

    def _stop(self) -> None:
        assert self._runtime is not None  # noqa: S101 - for the type checker
        self._runtime.stop(StoppedError("the operator has stopped this participant"))
        if self._has_left(NOTICE_SECONDS):
            return
        self._runtime.close(done=False)  # the program computes, and may do so for long
        deadline = time.monotonic() + END_SECONDS
        self._nudging = True
        while not self._has_left(4 * LOOK_SECONDS):
            if time.monotonic() > deadline:
                _end(TOLD)
            self._nudges_sent += 1
            signal.pthread_kill(self._main, signal.SIGINT)

    def _has_left(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.left and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return self.left


def _holds_locks(frame: FrameType | None) -> bool:
    """Tell whether the main thread is in code that may hold a lock."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if any(name == each or name.startswith(f"{each}.") for each in HOLDS_LOCKS):
            return True
        frame = frame.f_back
    return False


def _end(message: str) -> NoReturn:
    """End the process at once, whatever its threads do and whatever locks they hold."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}cgd: {message}\n".encode())
    os._exit(INTERRUPTED)
