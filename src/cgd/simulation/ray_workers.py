"""Workers on a Ray cluster: each has the samples of some consecutive parts, draws their origins, and sums them.

In a step, the displacement goes to all workers, and the sums of the parts come back and are added in order, so the bits
are those of one machine. A worker has no state that a step changes: if it is lost, another one is started from the same
samples and seeds, and computes the same step.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cgd
from cgd.errors import ClusterError
from cgd.simulation.fused_rows import rows_of
from cgd.simulation.ray_cluster import WorkerReport, reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.simulation.fused_engine import RowsFactory
    from cgd.simulation.fused_rows import Chunks, Floats, Part, Sums
    from cgd.simulation.ray_cluster import RayCluster

log = logging.getLogger("cgd.simulation")

START_SECONDS = 300.0
"""Most time until all workers have started: a cluster may start machines first."""
ROOM_SECONDS = 15.0
"""Most time until a replacement has a processor of its own; afterwards it shares one."""
MAX_LOSSES = 5
"""How often a worker is lost in one step before the simulation ends: what kills it may be its own need of memory."""


class Worker:
    """Computes the sums of some parts, in a process of the cluster.

    Args:
        factory: creates the rows.
        chunks: the parts, by chunks.
        samples: samples and targets of the rows.
    """

    def __init__(self, factory: RowsFactory, chunks: Chunks, samples: tuple[Floats, Floats]) -> None:
        torch.set_num_threads(1)
        x, targets = samples  # in the object store, where numba does not accept them: they cannot be written
        self._rows = factory.create(chunks, (np.array(x), np.array(targets)))
        self._seconds = 0.0

    def versions(self) -> dict[str, str]:
        """Return the versions of what decides the bits."""
        return versions()

    def part_sums(self, displacement: Floats, step: int) -> tuple[list[Sums], dict[str, Any]]:
        """Return the sums of the parts in a step, and what this process has used so far."""
        import ray

        started = time.process_time()
        sums = list(self._rows.part_sums(np.array(displacement), step))
        self._seconds += time.process_time() - started
        unit = 1 if sys.platform == "darwin" else 1024
        return sums, {
            "node": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "process": os.getpid(),
            "seconds": self._seconds,
            "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        }


def versions() -> dict[str, str]:
    """Return the versions of cgd, and of the libraries that compute with it."""
    libraries = {name: version(name) for name in ("numba", "numpy", "scipy")}
    return {"cgd": cgd.__version__, "Python": platform.python_version().rpartition(".")[0], **libraries}


class _Place:
    """A worker as the driver sees it: its parts, the process that has them now, and its answer in this step."""

    def __init__(self, number: int, chunks: list[list[Part]]) -> None:
        self.number, self.chunks = number, chunks
        self.actor: Any = None
        self.versions: Any = None  # a reference: the answer of a process that has started; None once it was read
        self.answer: Any = None
        self.losses = self.losses_in_step = 0
        self.used: dict[str, Any] = {}

    def report(self) -> WorkerReport:
        parts = [part for chunk in self.chunks for part in chunk]
        samples = parts[-1].end - parts[0].start
        return WorkerReport(
            self.number, participants=len(rows_of(self.chunks)), samples=samples, losses=self.losses, **self.used
        )


class RayWorkers:
    """Computes the sums of all parts on a cluster.

    Args:
        cluster: the cluster.
        factory: creates rows from their samples.
        chunks: all parts, by chunks.
    """

    def __init__(self, cluster: RayCluster, factory: RowsFactory, chunks: Chunks) -> None:
        self._cluster, self._factory, self._chunks = cluster, factory, chunks
        self._places: list[_Place] = []
        self.workers: tuple[WorkerReport, ...] = ()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Connect to the cluster and start the workers; stop them at the end.

        Raises:
            InputError: the cluster cannot be reached.
            ClusterError: the workers cannot be started.
        """
        with self._cluster.connected():
            try:
                self._start()
                yield
            finally:
                for place in self._places:
                    self._stop(place)

    def part_sums(self, displacement: Floats, step: int) -> Iterator[Sums]:
        """Yield the gradient sums of the parts, in order.

        Raises:
            ClusterError: a worker is lost again and again.
        """
        import ray

        sent = ray.put(displacement)
        for place in self._places:
            place.losses_in_step = 0
            place.answer = place.actor.part_sums.remote(sent, step)
        for place in self._places:
            sums, place.used = self._answer(place, sent, step)
            place.answer = None
            yield from sums
        self.workers = tuple(place.report() for place in self._places)
        self._cluster.on_report(self.workers)

    def _start(self) -> None:

        parts = [(number, part) for number, chunk in enumerate(self._chunks) for part in chunk]
        workers = self._cluster.workers or _processors()
        ends = np.linspace(0, len(parts), min(workers, len(parts)) + 1).astype(int)
        for number, (start, end) in enumerate(pairwise(ends)):
            chunks = [[part for _, part in own] for _, own in groupby(parts[start:end], key=lambda each: each[0])]
            self._places.append(_Place(number, chunks))
        deadline = time.monotonic() + START_SECONDS
        for place in self._places:
            self._create(place, processors=1)
        for place in self._places:
            if not self._has_started(place, deadline):
                raise ClusterError(
                    f"worker {place.number} of {len(self._places)} has not started in {START_SECONDS:g} s, and the "
                    f"cluster has {_processors()} processors; ask for fewer workers (workers=, --workers), or add nodes"
                )

    def _create(self, place: _Place, processors: int) -> None:
        """Send the samples of a worker to the cluster, and start its process there."""
        import ray

        rows = rows_of(place.chunks)
        factory = replace(self._factory, participants=self._factory.participants.without_data(rows))
        samples = ray.put(self._factory.samples(rows))
        # Ray must not restart the process by itself: its samples are no longer in the object store.
        actor = ray.remote(Worker).options(num_cpus=processors, max_restarts=0, max_task_retries=0)
        place.actor = actor.remote(factory, place.chunks, samples)
        place.versions = place.actor.versions.remote()

    def _has_started(self, place: _Place, deadline: float) -> bool:
        """Wait until the process of a worker has started; return False if it has not at the deadline."""
        import ray

        while place.versions is not None:
            try:
                found = ray.get(place.versions, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                return False
            except ray.exceptions.RayError as error:
                self._replace(place, error)
                continue
            place.versions = None
            differences = [
                f"{name} {own} here, {found[name]} there" for name, own in versions().items() if own != found[name]
            ]
            if differences:
                raise ClusterError(
                    f"the versions of worker {place.number} differ ({', '.join(differences)}), so the bits may; "
                    "install the same versions on all nodes"
                )
        return True

    def _answer(self, place: _Place, sent: Any, step: int) -> tuple[list[Sums], dict[str, Any]]:
        """Return the answer of a worker in a step; replace it as often as it is lost."""
        import ray

        while True:
            try:
                answer: tuple[list[Sums], dict[str, Any]] = ray.get(place.answer)
                return answer
            except ray.exceptions.RayTaskError:
                raise  # an error of the computation, which another worker would have, too
            except ray.exceptions.RayError as error:
                lost = [place, *(each for each in self._places[place.number + 1 :] if _is_lost(each))]
                for each in lost:
                    self._replace(each, error)
                deadline = time.monotonic() + ROOM_SECONDS
                for each in lost:
                    if not self._has_started(each, deadline):
                        self._stop(each)
                        self._create(each, processors=0)
                    each.answer = each.actor.part_sums.remote(sent, step)

    def _replace(self, place: _Place, error: Exception) -> None:
        """Start another process for a worker that was lost."""
        place.losses += 1
        place.losses_in_step += 1
        if place.losses_in_step > MAX_LOSSES:
            raise ClusterError(
                f"worker {place.number} was lost {place.losses_in_step} times in one step ({reason(error)}); use more "
                "workers, so that each needs less memory, or look for the cause in the logs of Ray"
            )
        log.warning("worker %d was lost (%s); another one computes its parts", place.number, reason(error))
        self._stop(place)
        self._create(place, processors=1)

    def _stop(self, place: _Place) -> None:
        import ray

        with suppress(ray.exceptions.RayError, ValueError, ConnectionError):
            if place.actor is not None:
                ray.kill(place.actor, no_restart=True)


def _processors() -> int:
    import ray

    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return max(1, int(resources.get("CPU", 1)))


def _is_lost(place: _Place) -> bool:
    """Return True if the answer of a worker will not come."""
    import ray

    try:
        ray.get(place.answer, timeout=0)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayTaskError):
        return False
    except ray.exceptions.RayError:
        return True
    return False
