"""Running the parts of an audit in a few processes, each with one thread.

An attack that raises, or whose process dies, has failed: it is reported, and the others go on. Ctrl-C keeps what is
done. A pool of the standard library would lose all that wait when one process is killed, so this has its own: every
worker has a pipe, gets one part at a time, and is replaced if it dies.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from cgd.audit.plan import Part, Plan
    from cgd.audit.view import Finding, Inapplicable, Scheme

MAX_REASON_LENGTH = 300
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_CONTEXT = multiprocessing.get_context("spawn")  # a fork would take torch's threads with it, and hang


@dataclass(frozen=True)
class Measured:
    """A finding without tensors: its pictures are PNG files already.

    Attributes:
        attack: the name of what was tried.
        scheme: against what.
        metric: what was measured.
        value: how well it did.
        chance: how well guessing does.
        succeeds: whether it is clearly better than that.
        setting: in a few words.
        detail: what else is worth knowing.
        control: whether it shows what the measurement is worth.
        undecided: whether there was too little to tell.
        must_succeed: of a control, how it must come out.
        pictures: by caption.
    """

    attack: str
    scheme: Scheme
    metric: str
    value: float
    chance: float
    succeeds: bool
    setting: str
    detail: str
    control: bool
    undecided: bool
    must_succeed: bool
    pictures: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Done:
    """What came of a part.

    Attributes:
        findings: what it measured, and why it could not, by the attack's id.
        failure: what went wrong, if something did.
    """

    findings: Mapping[str, tuple[Measured | Inapplicable, ...]] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a whole plan.

    Attributes:
        done: by a part's place in the plan; those are missing that were not finished.
        seconds: how long it took.
    """

    done: Mapping[int, Done]
    seconds: float


class ProgressListener(Protocol):
    """Whoever wants to see how it goes."""

    def began(self, part: Part) -> None:
        """A process has taken it."""

    def ended(self, part: Part, done: Done) -> None:
        """It is done."""


def run(plan: Plan, seed: int, jobs: int, watch: ProgressListener) -> Outcome:
    """Run all parts, at most `jobs` at a time. After an interrupt, what is done by then."""
    begun = time.monotonic()
    pool = _Pool(plan, seed, watch)
    try:
        pool.work(min(jobs, len(plan.parts)))
    except KeyboardInterrupt:
        pass
    finally:
        pool.stop()
    return Outcome(pool.done, time.monotonic() - begun)


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    place: int  # of the part that it has


class _Pool:
    def __init__(self, plan: Plan, seed: int, watch: ProgressListener) -> None:
        self.done: dict[int, Done] = {}
        self._plan, self._seed, self._watch = plan, seed, watch
        self._waiting = iter(range(len(plan.parts)))
        self._workers: list[_Worker] = []

    def work(self, jobs: int) -> None:
        for _ in range(jobs):
            self._hire()
        while self._workers:
            ready = wait([each.pipe for each in self._workers])
            for worker in [each for each in self._workers if each.pipe in ready]:
                self._hear(worker)

    def stop(self) -> None:
        """End the processes that are left: they are ours, and what they still work on is lost."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5)
            worker.process.kill()
            worker.pipe.close()
        self._workers = []

    def _hear(self, worker: _Worker) -> None:
        """A worker has something to say, or is dead."""
        try:
            done: Done = pickle.loads(worker.pipe.recv_bytes())  # noqa: S301 - a process of our own
        except (EOFError, OSError):
            self._dismiss(worker)
            code = worker.process.exitcode or 0
            how = f"was killed by signal {-code}; was there enough memory?" if code < 0 else f"ended with code {code}"
            self._end(worker.place, Done(failure=f"the process {how}"))
            self._hire()
            return
        self._end(worker.place, done)
        if not self._give(worker):
            self._dismiss(worker)

    def _hire(self) -> None:
        """Start a process for the next part, if there is one."""
        place = next(self._waiting, None)
        if place is None:
            return
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_work, args=(theirs,), daemon=True)
        with _deaf():
            process.start()
        theirs.close()  # so that the pipe ends with the process
        worker = _Worker(process, ours, place)
        self._workers.append(worker)
        self._hand_over(worker, place)

    def _give(self, worker: _Worker) -> bool:
        place = next(self._waiting, None)
        if place is None:
            return False
        self._hand_over(worker, place)
        return True

    def _hand_over(self, worker: _Worker, place: int) -> None:
        worker.place = place
        self._watch.began(self._plan.parts[place])
        with suppress(OSError):  # if it is dead, its pipe says so when it is listened to
            worker.pipe.send_bytes(pickle.dumps((self._plan.parts[place], self._seed)))

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()  # it leaves when nothing can come any more
        worker.process.join()

    def _end(self, place: int, done: Done) -> None:
        self.done[place] = done
        self._watch.ended(self._plan.parts[place], done)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that start meanwhile do not hear Ctrl-C: a terminal tells it to all, and only we should act on it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(pipe: Connection) -> None:
    """What a process does until there is nothing more to do."""
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))  # before anything is loaded that would look
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            asked = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(pickle.dumps(_attempt(asked)))


def _attempt(asked: bytes) -> Done:
    try:
        part, seed = pickle.loads(asked)  # noqa: S301 - from the process that started this one
        found = part.run(seed)
        return Done({attack: tuple(_measured(each) for each in findings) for attack, findings in found.items()})
    except Exception as error:
        return Done(failure=_reason(error))


def _measured(finding: Finding | Inapplicable) -> Measured | Inapplicable:
    from cgd.audit.pictures import strip
    from cgd.audit.view import Inapplicable

    if isinstance(finding, Inapplicable):
        return finding

    return Measured(
        finding.attack,
        finding.scheme,
        finding.metric,
        float(finding.value),
        float(finding.chance),
        bool(finding.succeeds),
        finding.setting,
        finding.detail,
        finding.control,
        finding.undecided,
        finding.must_succeed,
        {caption: strip(stack) for caption, stack in finding.images.items() if len(stack)},
    )


def _reason(error: Exception) -> str:
    """What happened and where, in a line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    told = " ".join(f"{type(error).__name__}: {error}".split())
    told = told if len(told) <= MAX_REASON_LENGTH else f"{told[:MAX_REASON_LENGTH]}…"
    return f"{told} ({Path(last.filename).name}, line {last.lineno})"
