"""The sums of a member that its program does not wait for: they run one after the other, in a thread of their own."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class QueuedSum(Generic[Result]):
    """A function that runs one or several sums, in its turn.

    Attributes:
        run: the function.
        error: the error of its last attempt, until it is tried again.
        reported: whether that error was raised in the program's thread.
        done: whether it has returned.
        taken: whether the program has its result, or wants none.
    """

    def __init__(self, run: Callable[[], Result], *, taken: bool = False) -> None:
        self.run = run
        self.error: BaseException | None = None
        self.reported = self.done = False
        self.taken = taken
        self._result: Result | None = None

    def attempt(self) -> None:
        """Run the function; keep its result or its error."""
        try:
            self._result = self.run()
            self.done = True
        except BaseException as error:  # it is raised in the program's thread
            self.error, self.reported = error, False

    def take(self) -> Result:
        """Return the result of a function that is done."""
        self.taken = True
        return self._result  # type: ignore[return-value]


class SumQueue:
    """Runs sums in the order in which they were submitted, while the program continues.

    A sum that fails stops the queue, so that the order is the same at all members. Its error is raised by the next call
    that waits for it or for a later one, once. The call after that tries the sum again, with the same addend, as a
    program does that repeats a step.

    Examples:
        >>> queue = SumQueue("a")
        >>> first, second = queue.submit(lambda: 1), queue.submit(lambda: 2)
        >>> queue.result(second), queue.result(first)
        (2, 1)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[QueuedSum[Any]] = deque()
        self._untaken: deque[QueuedSum[Any]] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], Result], *, wanted: bool = True) -> QueuedSum[Result]:
        """Run a function after all that were submitted before; `wanted` says whether its result will be taken."""
        queued = QueuedSum(run, taken=not wanted)
        with self._changed:
            self._waiting.append(queued)
            if wanted:
                self._untaken.append(queued)
            self._start()
        return queued

    def in_order(self, run: Callable[[], object]) -> None:
        """Run a function after all that were submitted before: now if there are none, or if one of them calls this."""
        if self._is_busy():
            self.submit(run, wanted=False)
        else:
            run()

    def result(self, queued: QueuedSum[Result]) -> Result:
        """Wait until a function is done, and return its result.

        Raises:
            Exception: the error of this sum, or of an earlier one.
        """
        with self._changed:
            self._wait(lambda: queued.done)
            result = queued.take()
            while self._untaken and self._untaken[0].taken:
                self._untaken.popleft()
            return result

    def wait(self) -> None:
        """Wait until all sums are done, unless one of them calls this; errors are as for `result`."""
        if self._is_busy():
            with self._changed:
                self._wait(lambda: not self._waiting)

    def finish(self) -> None:
        """Wait for the sums at the end of a program, and warn if the program has not taken their results."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)
            self._waiting.clear()
            left = sum(not each.taken for each in self._untaken)
            self._untaken.clear()
        if left:
            warnings.warn(
                f"{self._name} ends with {left} gradient sum{'s' * (left > 1)} that its model has not moved by: "
                "the optimiser has a delay. Call optimizer.drain() after the last step, or loop over optimizer.steps()",
                stacklevel=3,
            )

    def _is_busy(self) -> bool:
        with self._changed:
            return bool(self._waiting) and threading.current_thread() is not self._thread

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait, with the lock, until a condition holds; raise the error that stopped the queue before that."""
        if self._waiting and self._waiting[0].error is not None and self._waiting[0].reported:
            self._waiting[0].error = None
            self._start()
        self._changed.wait_for(lambda: condition() or (self._thread is None and self._waiting))
        if not condition():
            failed = self._waiting[0]
            failed.reported = True
            assert failed.error is not None  # noqa: S101 - for the type checker
            raise failed.error

    def _start(self) -> None:
        """Start the thread, with the lock, unless it runs or a sum has failed."""
        if self._thread is None and self._waiting[0].error is None:
            self._thread = threading.Thread(target=self._run, name=f"cgd-sums-{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._waiting[0].error is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                first = self._waiting[0]
            first.attempt()
            with self._changed:
                if first.done:
                    self._waiting.popleft()
                self._changed.notify_all()
