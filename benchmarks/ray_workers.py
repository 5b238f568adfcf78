"""Cost of a step on Ray workers of this machine, relative to the plain engine with one thread: `make ray-bench`.

Wall-clock times need an idle machine with as many processors as workers. Processor times do not: a step then takes that
of this process, which sends and adds, and that of the slowest worker. The fastest steps count. The data are MNIST's
60,000 images, or random numbers of the same shape, for 1000 participants.

The last table has the terms of the cost of larger simulations, from the plain engine with one thread: processor time
per sample and per participant, and bytes between nodes.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import cgd
from cgd.simulation.engines import choose_engine
from cgd.simulation.local_training import Work
from cgd.simulation.population import Participants
from simulation import build, load

if TYPE_CHECKING:
    from cgd.simulation.engines import Engine

MIN_SPEED_UP, MAX_OVERHEAD = 1.6, 1.2
DATA = "mnist"


def engine_of(participants: Participants, workers: int | None) -> Engine:
    """Return the engine with this number of workers; None for the plain engine."""
    cluster = None if workers is None else cgd.RayCluster(workers=workers)
    loss: Any = functional.cross_entropy
    return choose_engine(participants, loss, None, 4e9, work=Work(), privacy=None, kernels=True, cluster=cluster)


def measure(engine: Engine, size: int, steps: int) -> tuple[float, float]:
    """Return the least wall-clock and processor time of a step; the first step compiles and is not measured."""
    displacement = torch.zeros(size)
    wall, processor = [], []
    with engine.running():
        engine.gradient_sum(displacement)
        for _ in range(steps):
            before = [each.seconds for each in engine.workers]
            clocks = time.perf_counter(), time.process_time()
            engine.gradient_sum(displacement)
            wall.append(time.perf_counter() - clocks[0])
            own = time.process_time() - clocks[1]
            used = [each.seconds - start for each, start in zip(engine.workers, before, strict=True)]
            processor.append(own + max(used, default=0.0))
    return min(wall), min(processor)


def main() -> None:
    """Measure, print the tables, and fail if a limit is exceeded by processor times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="number of measured steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name, x, y = load(DATA)
    participants = Participants(lambda: build(DATA), cgd.Grid(1000).split(x, y))
    size = participants.layout.size
    plain_wall, plain = measure(engine_of(participants, None), size, options.steps)
    table = Table("workers", "plain / step, wall clock", "plain / step, processor time", title=f"{name}, 1000×1")
    ratios = {}
    with cgd.RayCluster("local", workers=2).connected():
        for workers in (1, 2):
            wall, processor = measure(engine_of(participants, workers), size, options.steps)
            ratios[workers] = plain / processor
            table.add_row(str(workers), f"{plain_wall / wall:.2f}", f"{ratios[workers]:.2f}")
    console = Console()
    console.print(table)
    many = Participants(lambda: build(DATA), cgd.Grid(10_000).split(x, y))
    started = time.process_time()
    engine = engine_of(many, None)
    set_up = time.process_time() - started
    _, many_step = measure(engine, size, options.steps)
    per_participant = max(0.0, many_step - plain) / 9_000
    terms = Table("term", "value", title="the plain engine, one thread")
    terms.add_row("step, per sample", f"{(plain - 1000 * per_participant) / len(x) * 1e6:.1f} µs")
    terms.add_row("step, per participant", f"{per_participant * 1e6:.1f} µs")
    terms.add_row("start, per participant", f"{set_up / 10_000 * 1e3:.2f} ms")
    terms.add_row("to each node, per step", f"{size * 4 / 1e6:.2f} MB")
    terms.add_row("from the workers, per step and part", f"{size * 4 / 1e6:.2f} MB")
    console.print(terms)
    if 1 / ratios[1] > MAX_OVERHEAD or ratios[2] < MIN_SPEED_UP:
        raise SystemExit(f"limits exceeded: overhead {1 / ratios[1]:.2f}, speed-up {ratios[2]:.2f}")


if __name__ == "__main__":
    main()
