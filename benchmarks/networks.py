"""Train a transformer and a CNN, confined and not: `python benchmarks/networks.py`.

Three members of `local_peers` divide 1,400 digits of scikit-learn, and train by `ConfinedAdam` with the full batch.
Each network is compared with the same one trained by torch on all 1,400, from the same start and with the same number
of steps, on 397 held-out digits. With `zeros`, origins are around zero, as in the paper. Seeds draw the split, the
start and the origins.

`results/networks.json` has the accuracies. The runs are stored one by one, and a program that was stopped continues.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import cgd
from cgd.files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.optim.public_start import Start

FILE = Path(__file__).parent.parent / "results" / "networks.json"
MEMBERS, TRAINING_DIGITS, SEEDS = 3, 1400, 3
CONFINED: tuple[tuple[Start, float], ...] = (("model", 0.05), ("model", 0.02), ("zeros", 0.05), ("zeros", 0.02))
"""Starts and δ of the confined trainings."""


class Transformer(nn.Module):
    """Two encoder layers over the eight rows of a digit."""

    steps, lr = 300, 3e-3

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Linear(8, 32)
        self.positions = nn.Parameter(0.1 * torch.randn(8, 32))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outputs = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for digits of 64 pixels."""
        rows = self.embedding(x.view(-1, 8, 8)) + self.positions
        outputs: torch.Tensor = self.outputs(self.encoder(rows).mean(dim=1))
        return outputs


class CNN(nn.Sequential):
    """Two convolutions with group normalisation, and a linear layer."""

    steps, lr = 100, 5e-3

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


NETWORKS: dict[str, type[Transformer | CNN]] = {"transformer": Transformer, "cnn": CNN}


class Task:
    """The digits of a seed, and the trainings on them."""

    def __init__(self, network: str, seed: int, steps: int | None = None) -> None:
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        self.x, self.y = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
        self.build, self.seed = NETWORKS[network], seed
        self.steps = steps or self.build.steps

    def initial(self) -> nn.Module:
        """Return the network with its public start."""
        with cgd.public_seed(self.seed):
            return self.build()

    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy on held-out digits."""
        with torch.no_grad():
            outputs = model(self.x[TRAINING_DIGITS:])
        return float((outputs.argmax(dim=1) == self.y[TRAINING_DIGITS:]).float().mean())

    def descend(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take all steps."""
        for _ in range(self.steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def plain(self) -> list[float]:
        """Return the accuracy of a training on all digits without confinement."""
        model = self.initial()
        x, y = self.x[:TRAINING_DIGITS], self.y[:TRAINING_DIGITS]
        self.descend(model, torch.optim.Adam(model.parameters(), self.build.lr), x, y)
        return [self.accuracy(model)]

    def confined(self, start: Start, delta: float) -> list[float]:
        """Return the accuracies of all members' confined networks."""

        def train(peers: cgd.Peers, x: torch.Tensor, y: torch.Tensor, number: int) -> float:
            model = self.initial()
            cgd.confine(model, delta, cgd.participant_seed(self.seed, cgd.Cell(number, 0)), start=start)
            optimizer = cgd.ConfinedAdam(model.parameters(), self.build.lr, peers=peers, samples=len(x))
            self.descend(model, optimizer, x, y)
            return self.accuracy(model)

        parts = [each[:TRAINING_DIGITS].chunk(MEMBERS) for each in (self.x, self.y)]
        with cgd.local_peers(MEMBERS, ring_bits=64) as members:  # Adam enlarges small gradients
            return members.run(train, *parts, range(MEMBERS))


def runs() -> dict[str, Callable[[Task], list[float]]]:
    """Return the trainings of a task by name."""
    confined: dict[str, Any] = {
        f"{start}, δ {delta:g}": lambda task, start=start, delta=delta: task.confined(start, delta)
        for start, delta in CONFINED
    }
    return {"not confined": Task.plain, **confined}


def main() -> None:
    """Run what is missing, store it, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE, help="file with the results")
    file: Path = parser.parse_args().out
    torch.set_num_threads(1)
    stored: dict[str, list[float]] = json.loads(file.read_text()) if file.exists() else {}
    table = Table("network", "training", "mean accuracy", "worst member", "seeds")
    for network in NETWORKS:
        for name, run in runs().items():
            found = []
            for seed in range(SEEDS):
                key = f"{network}, {name}, seed {seed}"
                if key not in stored:
                    stored[key] = [round(each, 4) for each in run(Task(network, seed))]
                    write_file(file, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
                found.append(stored[key])
            flat = [each for seed in found for each in seed]
            table.add_row(network, name, f"{fmean(flat):.1%}", f"{min(flat):.1%}", str(SEEDS))
    Console().print(table)


if __name__ == "__main__":
    main()
