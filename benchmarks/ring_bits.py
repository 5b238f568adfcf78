"""Measure what sums in 16 bits cost in accuracy: `make ring-results`.

The paper's MNIST network is trained by 100 simulated participants, with the ring of the real protocol and the same
number of steps: in 32 and in 16 bits, with several bounds. The largest gradient coordinate decides how small a bound
may be, and the bound how fine 16 bits are. `to the nearest` shows what would happen without rounding at random.

`results/ring-bits.json` has the accuracies. The runs are stored one by one, and a program that was stopped continues.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import cgd
from cgd.experiments import datasets
from cgd.files import write_file
from cgd.secagg.fixed_point import FixedPoint
from cgd.simulation import module_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(__file__).parent.parent / "results" / "ring-bits.json"
PARTICIPANTS, IMAGES, STEPS, LR, DELTA = 100, 10_000, 100, 0.5, 0.02
RUNS = ((32, 16.0, True), (16, 16.0, True), (16, 1.0, True), (16, 16.0, False), (16, 1.0, False))
"""Bits, bound, and whether values are rounded at random in 16 bits."""


def label(bits: int, bound: float, *, random: bool) -> str:
    """Return the name of a run."""
    return f"{bits} bits, bound {bound:g}" + ("" if random else ", to the nearest")


def build() -> torch.nn.Module:
    """Build the paper's network."""
    return torch.nn.Sequential(
        torch.nn.Linear(784, 256, bias=False), torch.nn.ReLU(), torch.nn.Linear(256, 10, bias=False)
    )


def train(bits: int, bound: float, *, random: bool) -> dict[str, Any]:
    """Return the held-out accuracy of eight participants after a training, and the training loss."""
    data = datasets.load("mnist").scaled().first(IMAGES)
    blocks = cgd.Grid(PARTICIPANTS).split(data.x, data.y)
    ring = cgd.Ring(bound=bound, ring_bits=bits)
    options: dict[str, Any] = {} if random else {"keystream": lambda *_: None}
    with mock.patch.multiple(module_engine, **options) if options else mock.MagicMock():
        result = cgd.simulate(
            build,
            blocks,
            steps=STEPS,
            lr=LR,
            delta=DELTA,
            arithmetic="ring",
            ring=ring,
            test=(data.held_out_x, data.held_out_y),
            evaluate_every=STEPS,
            progress=False,
        )
    accuracy = fmean(result.history.evaluations[-1].accuracy)
    return {"accuracy": round(accuracy, 4), "loss": round(result.history.training_loss[-1], 4)}


def rows(stored: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for bits, bound, random in RUNS:
        found = stored[label(bits, bound, random=random)]
        step = FixedPoint.for_weighted_sum(addends=PARTICIPANTS, bound=bound, ring_bits=bits).resolution
        rounding = "to the nearest" if bits == 32 or not random else "at random"
        accuracy = f"{100 * found['accuracy']:.1f} %"
        yield str(bits), f"{bound:g}", f"2^{math.log2(step):.0f}", rounding, accuracy, f"{found['loss']:.3f}"


def main() -> None:
    """Run what is missing, store it, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE, help="file with the results")
    file: Path = parser.parse_args().out
    torch.set_num_threads(1)
    stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for bits, bound, random in RUNS:
        name = label(bits, bound, random=random)
        if name not in stored:
            stored[name] = train(bits, bound, random=random)
            write_file(file, json.dumps(stored, indent=1) + "\n")
    table = Table("bits", "bound", "distance of values", "rounding", "accuracy", "loss")
    for row in rows(stored):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
