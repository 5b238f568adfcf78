"""Run the parts of an audit in a few processes, each with one thread.

A part that raises, or whose process is killed, is a failed part; the others continue. An interrupt (Ctrl-C) keeps the
finished parts. The pool has a pipe to every worker, which gets one part at a time and is replaced if it is killed.
Pools of libraries share a queue: when a process is killed, `concurrent.futures` gives up all waiting tasks, and
`pebble` 5.2 blocks if the process was just receiving one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shlex
import signal
import threading
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cgd.audit.results import Inapplicable
from cgd.audit.view import SCHEMES
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from cgd.audit.registry import Attack
    from cgd.audit.results import AttackResult, Source
    from cgd.audit.view import Scheme

MAX_REASON_LENGTH = 300
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_CONTEXT = multiprocessing.get_context("spawn")  # a forked process would inherit locks of torch's threads, and hang


class Part(Protocol):
    """A unit of work for one process, to which it is sent by pickle."""

    @property
    def label(self) -> str:
        """The name that progress shows."""

    @property
    def attack(self) -> str:
        """The id of the attack."""

    @property
    def scheme(self) -> Scheme:
        """The scheme that is attacked."""

    @property
    def control(self) -> bool:
        """True if the part runs controls."""

    def run(self, seed: int) -> Sequence[AttackResult | Inapplicable]:
        """Run the attack. The same seed gives the same results."""


@dataclass(frozen=True)
class Plan:
    """An audit to run.

    Attributes:
        source: the data that is attacked.
        attacks: the attacks, in the order of the report.
        parts: the work.
        arguments: the arguments of `cgd audit` that name the source.
        only: the ids of the chosen attacks; empty for all.
        schemes: the names of the schemes that are attacked, and of others, in the order of the report.
    """

    source: Source
    attacks: tuple[Attack, ...]
    parts: tuple[Part, ...]
    arguments: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    schemes: Mapping[Scheme, str] = field(default_factory=lambda: SCHEMES)

    def choose(self, ids: Sequence[str]) -> Plan:
        """Return the plan with these attacks only, or with all if none is given.

        Raises:
            InputError: an id is unknown.
        """
        known = [each.id for each in self.attacks]
        for unknown in (each for each in ids if each not in known):
            raise InputError(f"there is no attack {unknown!r} here; choose from {', '.join(known)}")
        if not ids:
            return self
        return replace(
            self,
            attacks=tuple(each for each in self.attacks if each.id in ids),
            parts=tuple(each for each in self.parts if each.attack in ids),
            only=tuple(each for each in known if each in ids),
        )

    def command(self, seed: int) -> str:
        """Return the command that repeats the audit."""
        chosen = [word for each in self.only for word in ("--only", each)]
        return shlex.join(["cgd", "audit", *self.arguments, *chosen, "--seed", str(seed)])


@dataclass(frozen=True)
class PartResult:
    """The results of a finished part.

    Attributes:
        results: the results, and the reasons where the attack does not apply.
        failure: the error that ended the part; empty if there was none.
    """

    results: tuple[AttackResult | Inapplicable, ...] = ()
    failure: str = ""

    @property
    def inapplicable(self) -> bool:
        """True if the attack does not apply, by none of its methods."""
        return bool(self.results) and all(isinstance(each, Inapplicable) for each in self.results)


class ProgressListener(Protocol):
    """Receives the progress of a run."""

    def began(self, part: Part) -> None:
        """Called when a process starts a part."""

    def ended(self, part: Part, result: PartResult) -> None:
        """Called when a part is finished, or has failed."""


def run(plan: Plan, seed: int, jobs: int, progress: ProgressListener) -> dict[int, PartResult]:
    """Run all parts, at most `jobs` at a time, and return their results by their place in the plan.

    After an interrupt, return those of the parts that were finished by then.
    """
    pool = _Pool(plan, seed, progress)
    try:
        pool.run(min(jobs, len(plan.parts)))
    except KeyboardInterrupt:
        pass
    finally:
        pool.terminate()
    return pool.finished


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    place: int  # of its current part


class _Pool:
    def __init__(self, plan: Plan, seed: int, progress: ProgressListener) -> None:
        self.finished: dict[int, PartResult] = {}
        self._plan, self._seed, self._progress = plan, seed, progress
        self._places = iter(range(len(plan.parts)))
        self._workers: list[_Worker] = []

    def run(self, jobs: int) -> None:
        for _ in range(jobs):
            self._start_worker()
        while self._workers:
            ready = wait([each.pipe for each in self._workers])
            for worker in [each for each in self._workers if each.pipe in ready]:
                self._receive(worker)

    def terminate(self) -> None:
        """End the remaining processes; their current parts are lost."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5)
            worker.process.kill()
            worker.pipe.close()
        self._workers = []

    def _start_worker(self) -> None:
        """Start a process for the next part, if there is one."""
        if (place := next(self._places, None)) is None:
            return
        pipe, worker_pipe = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(worker_pipe,), daemon=True)
        with _interrupts_ignored():
            process.start()
        worker_pipe.close()  # so that the pipe ends with the process
        worker = _Worker(process, pipe, place)
        self._workers.append(worker)
        self._send(worker, place)

    def _send(self, worker: _Worker, place: int) -> None:
        part = self._plan.parts[place]
        worker.place = place
        self._progress.began(part)
        with suppress(OSError):  # a dead process is noticed by the end of its pipe
            worker.pipe.send_bytes(pickle.dumps((part, self._seed)))

    def _receive(self, worker: _Worker) -> None:
        """Take the result of a worker's part, or notice that the process died, and give out the next part."""
        try:
            result: PartResult = pickle.loads(worker.pipe.recv_bytes())  # noqa: S301 - from a process of our own
        except (EOFError, OSError):
            self._remove(worker)
            code = worker.process.exitcode or 0
            how = f"was killed by signal {-code}; was there enough memory?" if code < 0 else f"ended with code {code}"
            self._finish(worker.place, PartResult(failure=f"the process {how}"))
            self._start_worker()
            return
        self._finish(worker.place, result)
        if (place := next(self._places, None)) is None:
            self._remove(worker)
        else:
            self._send(worker, place)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()  # the process exits when its pipe is closed
        worker.process.join()

    def _finish(self, place: int, result: PartResult) -> None:
        self.finished[place] = result
        self._progress.ended(self._plan.parts[place], result)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that start here ignore SIGINT: a terminal sends it to all, and only the main process acts on it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection) -> None:
    """Run parts in a worker process until the pipe is closed."""
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))  # before a library is loaded that reads them
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(pickle.dumps(_attempt(request)))


def _attempt(request: bytes) -> PartResult:
    try:
        part, seed = pickle.loads(request)  # noqa: S301 - from the process that started this one
        return PartResult(tuple(part.run(seed)))
    except Exception as error:
        return PartResult(failure=_describe(error))


def _describe(error: Exception) -> str:
    """Return the error and its place in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]}…"
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"
