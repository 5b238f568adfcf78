"""Measure the cost of clipping each record's gradient: `python benchmarks/record_gradients.py`.

A private step (forward, backward, clip) is compared with a plain one (forward, backward) in the same run, in turns, by
the time of the only thread's processor, so that other programs matter less; the median of the ratios is printed. The
peak memory is that of a process of its own for each kind of step, minus that of a process without steps. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from cgd.optim.record_gradients import RecordGradients

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDS, REPEATS = 2048, 15


def mlp() -> nn.Module:
    """Return the network of MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


MODELS = {"784-256-10": mlp, "small CNN": cnn}
KINDS = ("none", "plain", "private")


def step(name: str, kind: str, records: int) -> Callable[[], float]:
    """Return a function that takes one step and returns its seconds."""
    torch.manual_seed(0)
    model = MODELS[name]()
    clipping = RecordGradients(model, clip=1.0) if kind == "private" else None
    x, y = torch.randn(records, 1, 28, 28), torch.randint(10, (records,))

    def run() -> float:
        start = time.thread_time()
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if clipping is not None:
            clipping.take()
        return time.thread_time() - start

    return run


def peak_memory(name: str, kind: str, records: int) -> int:
    """Return the maximum resident size in bytes of a process that takes some steps."""
    command = [sys.executable, __file__, "--memory", kind, "--model", name, "--records", str(records)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--memory", choices=KINDS, help="print the memory of one kind of step")
    parser.add_argument("--model", choices=MODELS, default=next(iter(MODELS)))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        run = step(arguments.model, arguments.memory, arguments.records)
        for _ in range(0 if arguments.memory == "none" else 3):
            run()
        status = Path("/proc/self/status").read_text()  # getrusage would give the parent's peak if that is higher
        print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
        return
    table = Table("model", "plain, ms", "private, ms", "ratio", "plain, MB", "private, MB")
    for name in MODELS:
        runs = [step(name, kind, arguments.records) for kind in KINDS[1:]]
        for run in runs:
            run()  # the first step also makes the checks
        seconds = [[run() for run in runs] for _ in range(arguments.repeats)]
        times = [f"{1000 * median(each):.0f}" for each in zip(*seconds, strict=True)]
        ratio = median(private / plain for plain, private in seconds)
        empty, *sizes = (peak_memory(name, kind, arguments.records) for kind in KINDS)
        table.add_row(name, *times, f"{ratio:.2f}", *(f"{(size - empty) / 1e6:.0f}" for size in sizes))
    Console().print(table)


if __name__ == "__main__":
    main()
