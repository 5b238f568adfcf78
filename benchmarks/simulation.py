"""Cost of a step of the simulator, relative to a step of centralised training: `make bench`.

Each case runs in its own process and alternates with a step of centralised full-batch training by torch on the same
data, with the paper's network for them. The ratio is that of the fastest runs, because the machine may be busy. The
data are MNIST's 60,000 images, and the features of CIFAR-10's 50,000 images, if they are available; else random numbers
of the same shapes, of which a fifth of MNIST's are not zero.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from cgd import Grid, InputError
from cgd.experiments import cifar, datasets
from cgd.simulation.engines import choose_engine
from cgd.simulation.local_training import LocalTraining, Work
from cgd.simulation.population import Participants

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.simulation.population import Mode

GIGABYTE = 1e9
MAX_MEMORY_GB = 6.0


@dataclass(frozen=True)
class Case:
    """A grid to simulate, and the largest accepted ratio to a centralised step; None for no limit."""

    rows: int
    columns: int
    mode: Mode
    max_ratio: float | None = None
    data: str = "mnist"
    local: LocalTraining | None = None

    @property
    def name(self) -> str:
        """The name in the table."""
        mode = f" {self.mode}" if self.columns > 1 else ""
        local = f", local epoch in batches of {self.local.batch}" if self.local else ""
        return f"{self.rows}×{self.columns}{mode}{local}"


@dataclass(frozen=True)
class Task:
    """The shape of a data set of the paper, the fraction that is not zero, and the width of the paper's network."""

    samples: int
    features: int
    nonzero: float
    hidden: int


TASKS = {"mnist": Task(60_000, 784, 0.19, 256), cifar.NAME: Task(50_000, 64, 1.0, 1024)}


CASES = (
    Case(1, 1, "joint"),
    Case(10, 1, "joint"),
    Case(100, 1, "joint"),
    Case(1000, 1, "joint", 1.3),
    Case(10_000, 1, "joint"),
    *(
        Case(rows, 1, "joint", limit, local=LocalTraining(batch=batch, momentum=0.9))
        for rows, batch, limit in ((10, 60, None), (100, 30, None), (1000, 10, 5.0))
    ),
    Case(1000, 112, "joint", 5.0),
    Case(1000, 112, "towers", 5.0),
    *(Case(rows, columns, "joint", data=cifar.NAME) for rows, columns in ((10, 2), (100, 16), (1000, 32))),
)


def load(data: str) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the name of the data, samples and labels."""
    try:
        found = datasets.load(data).scaled()
    except InputError:
        task, generator = TASKS[data], torch.Generator().manual_seed(0)
        shape = (task.samples, task.features)
        x = torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) < task.nonzero)
        return f"random numbers as {data}", x, torch.arange(task.samples) % 10
    return data, found.x, found.y


def build(data: str) -> nn.Sequential:
    """Build the paper's network."""
    task = TASKS[data]
    return nn.Sequential(
        nn.Linear(task.features, task.hidden, bias=False), nn.ReLU(), nn.Linear(task.hidden, 10, bias=False)
    )


def measure(case: Case, repeats: int, results: Any) -> None:
    """Put the ratio of the times, the set-up time in centralised steps and the peak memory into the queue."""
    name, x, y = load(case.data)
    participants = Participants(partial(build, case.data), Grid(case.rows, case.columns).split(x, y), case.mode)
    started = time.perf_counter()
    work = Work(local=case.local)
    engine = choose_engine(
        participants, functional.cross_entropy, None, 4 * GIGABYTE, work=work, privacy=None, kernels=True
    )
    set_up = time.perf_counter() - started
    displacement = torch.zeros(participants.layout.size)
    model = build(case.data)

    def centralised() -> None:
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()

    def simulated() -> None:
        engine.gradient_sum(displacement)

    simulated()  # compiles the kernels
    times = [(seconds(centralised), seconds(simulated)) for _ in range(repeats)]
    reference, own = (min(each) for each in zip(*times, strict=True))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
    results.put((name, own / reference, set_up / reference, memory / GIGABYTE))


def seconds(function: Callable[[], None]) -> float:
    """Return the run time of a function."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def plot(ratios: dict[int, float], path: Path) -> None:
    """Plot the ratio over the number of rows, on the same data."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(list(ratios), list(ratios.values()), "o-")
    axes.axhline(1.0, color="black", linestyle=":", label="centralised, torch")
    axes.set(xscale="log", xlabel="participants", ylabel="step / centralised step", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Measure all cases, print a table, draw the plot, and fail if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="number of timed runs per case")
    parser.add_argument("--plot", type=Path, default=Path("cgd-bench.png"), help="file of the plot")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    table = Table("data", "grid", "step / centralised step", "limit", "set-up / centralised step", "peak memory, GB")
    exceeded, ratios = [], {}
    for case in CASES:
        results = context.SimpleQueue()
        process = context.Process(target=measure, args=(case, options.repeats, results))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{case.name}: the process ended with {process.exitcode}")
        data, ratio, set_up, memory = results.get()
        if case.columns == 1 and case.data == "mnist" and case.local is None:
            ratios[case.rows] = ratio
        limit = "" if case.max_ratio is None else f"≤ {case.max_ratio:g}"
        table.add_row(data, case.name, f"{ratio:.2f}", limit, f"{set_up:.0f}", f"{memory:.1f}")
        if (case.max_ratio is not None and ratio > case.max_ratio) or memory > MAX_MEMORY_GB:
            exceeded.append(f"{case.name}: {ratio:.2f} times, {memory:.1f} GB")
    table.title = f"one step, {torch.get_num_threads()} threads"
    Console().print(table)
    plot(ratios, options.plot)
    print(f"The plot is {options.plot}")
    if exceeded:
        raise SystemExit(f"limits exceeded: {'; '.join(exceeded)}")


if __name__ == "__main__":
    main()
