"""Measure the durations of the paper's experiments: `make duration-results`.

Each kind of run (`cgd.experiments.durations`) is trained for a few steps by one thread. A step, and an evaluation, have
the shortest of their processor times, because the machine may be busy. The speed-up by two cores is that of one kind,
with the shortest of many steps. On a busy machine it is too small, and the expected minutes are too many; so it is
measured each time, and the largest is kept. The table is written after every kind, and kinds that it has are not
measured again; `--fresh` measures all.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

import cgd.experiments
from cgd.errors import InputError
from cgd.experiments import durations, experiment_file, reproduce
from cgd.experiments.durations import Durations, RunDuration
from cgd.experiments.runner import execute, load_data
from cgd.experiments.spec import RunSpec
from cgd.optim.vertical import JOINT_REVEALS_RECORDS

if TYPE_CHECKING:
    from cgd.simulation.result import History

CORES = 2
SPEED_UP_RUN = RunSpec(data="mnist", rows=100, samples=3000, steps=400, evaluations=1)
PATH = Path(cgd.experiments.__file__).parent / durations.FILE


def measure(run: RunSpec) -> RunDuration:
    """Train one kind of run by one thread, and return the seconds of its parts."""
    torch.set_num_threads(1)
    load_data(run, None)  # once for all runs, so it is not counted
    ends: list[tuple[float, int]] = []

    def on_step(_: int, history: History) -> None:
        ends.append((time.process_time(), len(history.evaluations)))

    started = time.process_time()
    execute(run, on_step=on_step)
    whole = time.process_time() - started
    evaluated: list[float] = []
    plain: list[float] = []
    for (before, count), (after, next_count) in pairwise(ends):
        (evaluated if next_count > count else plain).append(after - before)
    step = min(plain or evaluated)
    evaluation = max(0.0, min(evaluated) - step)
    fixed = whole - run.steps * step - ends[-1][1] * evaluation
    return RunDuration(*(float(f"{max(0.0, each):.3g}") for each in (fixed, step, evaluation)))


def measure_speed_up() -> float:
    """Return how many times faster a step is with all cores than with one."""
    shortest = []
    for threads, clock in ((1, time.process_time), (CORES, time.perf_counter)):
        torch.set_num_threads(threads)
        ends: list[float] = []
        execute(SPEED_UP_RUN, on_step=lambda *_, ends=ends, clock=clock: ends.append(clock()))
        shortest.append(min(after - before for before, after in pairwise(ends)))
    return round(min(float(CORES), max(1.0, shortest[0] / shortest[1])), 2)


def kinds() -> dict[str, RunSpec]:
    """Return the kinds of all runs of the paper's experiments, by slug; the quick scale first."""
    known = reproduce.experiments().values()
    runs = (
        run for scale in experiment_file.SCALES for each in known for entry in each.entries[scale] for run in entry.runs
    )
    return {kind.slug: kind for kind in map(durations.kind, runs)}


def write(speed_up: float, measured: dict[str, RunDuration]) -> None:
    """Write the table."""
    table = msgspec.to_builtins(Durations(CORES, speed_up, dict(sorted(measured.items()))))
    PATH.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    """Measure the kinds that the table does not have, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="measure all kinds again")
    options = parser.parse_args()
    for columns in (1, 2):  # compile the kernels
        execute(RunSpec(columns=columns, mode="joint", accept=JOINT_REVEALS_RECORDS, rows=2, steps=1))
    stored = Durations(CORES, 1.0, {})
    if PATH.exists() and not options.fresh:
        stored = msgspec.json.decode(PATH.read_bytes(), type=Durations)
    speed_up = max(stored.speed_up, measure_speed_up())
    known = kinds()
    measured = {slug: each for slug, each in stored.kinds.items() if slug in known}
    write(speed_up, measured)
    for slug, kind in known.items():
        if slug in measured:
            continue
        try:
            measured[slug] = measure(kind)
        except InputError as error:
            raise SystemExit(f"{slug}: {error}") from None
        write(speed_up, measured)
        print(slug, measured[slug], flush=True)


if __name__ == "__main__":
    main()
