"""Handle Ctrl-C and SIGTERM as a clean stop, because an exception at an arbitrary place could leave a lock held.

The first signal stops the runtime, so that a program that waits for peers, or starts its next sum, gets an error. A
program that computes for longer is interrupted where it holds no lock of `cgd`, after the peers were notified and the
state was saved. The second signal ends the process immediately, which loses no more than a crash does.
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
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from cgd.transport.runtime import FederationRuntime

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CONTINUE = "the same command continues from here"
MESSAGE = f"interrupted; {CONTINUE}"
# The time for a program to notice the stop by itself, and then to end after it is interrupted.
NOTICE_SECONDS, END_SECONDS = 1.0, 3.0
POLL_SECONDS = 0.05
# Packages whose code holds locks that other threads wait for.
HOLDS_LOCKS = ("cgd.transport", "threading", "logging", "rich")


class StoppedError(ClosedError):
    """The operator has stopped this participant."""


class Interruption:
    """A context manager that handles SIGINT and SIGTERM; for the main thread.

    Before `defer`, they raise `KeyboardInterrupt`, as usual. After it they do not, and after `attach` they stop a
    runtime.

    Attributes:
        stopped: whether a signal was received.
        program_ended: set when the program has ended, so that it is not interrupted any more.
        before_exit: called before the process is ended because the program does not end by itself.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.program_ended = False
        self.before_exit: Callable[[], None] = lambda: None
        self._deferred = False
        self._runtime: FederationRuntime | None = None
        self._stopping: threading.Thread | None = None
        self._stopping_lock = threading.Lock()
        self._interrupting = False
        self._own_signals_sent = self._own_signals_seen = 0
        self._main = threading.get_ident()
        self._read, self._write = os.pipe()
        self._reader = threading.Thread(target=self._read_signals, name="cgd-signals", daemon=True)

    def __enter__(self) -> Self:
        os.set_blocking(self._write, False)
        self._before = [signal.signal(each, self._handle) for each in SIGNALS]
        # Python writes a signal's number to this pipe immediately, even while the main thread runs native code.
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deferred = self.program_ended = True
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
        """Stop raising `KeyboardInterrupt` in the main thread."""
        self._deferred = True

    def attach(self, runtime: FederationRuntime) -> None:
        """Stop this runtime at the first signal, or now if there was one since `defer`."""
        self._runtime = runtime
        if self.stopped:
            self._stop_once()

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        """Raise `KeyboardInterrupt` in the main thread if that is safe; `_read_signals` does the rest."""
        if not self._deferred or (self._interrupting and not self.program_ended and not _holds_locks(frame)):
            raise KeyboardInterrupt

    def _read_signals(self) -> None:
        while (number := os.read(self._read, 1)[0]) != 0:
            if number not in SIGNALS:
                continue
            if self._own_signals_seen < self._own_signals_sent and number == signal.SIGINT:  # sent by `_stop`
                self._own_signals_seen += 1
                continue
            if self.stopped:
                _exit_now(f"interrupted again and ended immediately; {CONTINUE}")
            self.stopped = True
            if self._runtime is not None:
                self._stop_once()

    def _stop_once(self) -> None:
        with self._stopping_lock:
            if self._stopping is None:
                self._stopping = threading.Thread(target=self._stop, name="cgd-stop", daemon=True)
                self._stopping.start()

    def _stop(self) -> None:
        assert self._runtime is not None  # noqa: S101 - for the type checker
        self._runtime.stop(StoppedError("the operator has stopped this participant"))
        if self._wait_for_program(NOTICE_SECONDS):
            return
        self._runtime.close(done=False)  # the program is computing, possibly for a long time
        deadline = time.monotonic() + END_SECONDS
        self._interrupting = True
        while not self._wait_for_program(4 * POLL_SECONDS):
            if time.monotonic() > deadline:
                self.before_exit()
                _exit_now(MESSAGE)
            self._own_signals_sent += 1
            signal.pthread_kill(self._main, signal.SIGINT)

    def _wait_for_program(self, seconds: float) -> bool:
        """Return whether the program ends within this time."""
        deadline = time.monotonic() + seconds
        while not self.program_ended and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.program_ended


def _holds_locks(frame: FrameType | None) -> bool:
    """Return whether the main thread runs code that may hold a lock."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if any(name == each or name.startswith(f"{each}.") for each in HOLDS_LOCKS):
            return True
        frame = frame.f_back
    return False


def _exit_now(message: str) -> NoReturn:
    """End the process immediately, regardless of its threads and the locks they hold."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}cgd: {message}\n".encode())
    os._exit(INTERRUPTED)
