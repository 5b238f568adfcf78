"""`cgd demo`: hospitals that may not share their records train together, beside the two alternatives they have."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import cgd
from cgd.errors import InputError
from cgd.experiments import datasets
from cgd.local import local_peers
from cgd.optim.grid import Grid
from cgd.optim.optimizer import ConfinedSGD
from cgd.optim.origin import confine
from cgd.secagg.partition import MIN_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.experiments.datasets import Dataset
    from cgd.optim.grid import Block
    from cgd.peers import Peers
    from cgd.transport.driver import Traffic

HIDDEN = 32
POINTS = 100  # at most so many on a curve
STATISTICS_BOUND = 2.0**40  # of Σx and Σx² of one hospital's raw features

loss_function = torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class DemoSettings:
    """What the demo runs."""

    dataset: str = "breast-cancer"
    participants: int = 5
    steps: int = 300
    seed: int = 0
    lr: float = 0.5
    delta: float = 0.1

    def __post_init__(self) -> None:
        if self.participants < MIN_MEMBERS:
            raise InputError(f"participants is {self.participants}; a secure sum needs at least {MIN_MEMBERS}")
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}; train for at least 1")


@dataclass
class Curve:
    """A model's loss and accuracy on the held-out data, over the steps."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DemoParticipant:
    """What one participant has at the end: a model trained alone, and its confined model."""

    name: str
    samples: int
    alone: Curve
    confined: Curve
    traffic: Traffic


@dataclass(frozen=True)
class DemoResult:
    """Everything the table and the plot show."""

    settings: DemoSettings
    parameters: int
    features: int
    held_out: int
    participants: list[DemoParticipant]
    pooled: Curve

    @property
    def samples(self) -> int:
        """The number of all participants' samples."""
        return sum(each.samples for each in self.participants)

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {"cgd": cgd.__version__, **asdict(self)}


def run(settings: DemoSettings, advance: Callable[[str], None] = lambda _: None) -> DemoResult:
    """Train on all data pooled, on every participant's alone, and together.

    Args:
        settings: what to run.
        advance: is called with "pooled", "alone" or "together" after each step of that part.
    """
    torch.set_num_threads(1)  # many small products: threads within them cost more than they bring
    names = [f"hospital-{i + 1}" for i in range(settings.participants)]
    data = datasets.load(settings.dataset, settings.seed)
    # Uneven shares: the second has half as many samples as the first, the third a third, …
    shares = [1 / (i + 1) for i in range(settings.participants)]
    grid = Grid(settings.participants)
    blocks = list(grid.split(data.x, data.y, seed=settings.seed, row_shares=shares).values())
    with local_peers(names) as colony:
        scale = colony.run(agree_on_scale, blocks)[0]
        trial = Trial(settings, data, scale, advance)
        pooled = trial.plainly("pooled", data.x, data.y, "pooled")
        alone = [trial.plainly(name, block.x, block.y, "alone") for name, block in zip(names, blocks, strict=True)]
        confined = colony.run(trial.together, blocks)
        participants = [
            DemoParticipant(name, block.samples, by_itself, with_others, peers.traffic)
            for name, block, by_itself, with_others, peers in zip(names, blocks, alone, confined, colony, strict=True)
        ]
    parameters = sum(parameter.numel() for parameter in trial.build("count").parameters())
    return DemoResult(settings, parameters, data.features, len(data.held_out_y), participants, pooled)


@dataclass(frozen=True)
class FeatureScale:
    """How features are standardised."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The features x, standardised."""
        return ((x - self.mean) / self.deviation).float()


def agree_on_scale(peers: Peers, block: Block) -> FeatureScale:
    """The mean and deviation of every feature over all hospitals, from one secure sum: no record is pooled for it."""
    ones = torch.ones(len(block.x), 1, dtype=block.x.dtype)
    own = torch.cat((ones, block.x, block.x**2), dim=1).sum(dim=0)
    total = peers.sum(own, bound=STATISTICS_BOUND, ring_bits=64)
    first, second = (total[1:] / total[0]).chunk(2)
    deviation = (second - first**2).clamp(min=0).sqrt()
    return FeatureScale(first, torch.where(deviation > 0, deviation, 1.0))


@dataclass(frozen=True)
class Trial:
    """One model, one data set, one scale: what the three ways to train have in common."""

    settings: DemoSettings
    data: Dataset
    scale: FeatureScale
    advance: Callable[[str], None]

    def build(self, name: str) -> torch.nn.Module:
        """The model of a participant, at its origin."""
        model = torch.nn.Sequential(
            torch.nn.Linear(self.data.features, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, self.data.classes)
        )
        # For a demo that can be repeated. Leave the seed out and it comes from the operating system, as it should.
        seed = hashlib.sha256(f"cgd demo {self.settings.seed} {name}".encode()).digest()
        confine(model, self.settings.delta, seed)
        return model

    def plainly(self, name: str, x: torch.Tensor, y: torch.Tensor, part: str) -> Curve:
        """Train on this data alone."""
        model = self.build(name)
        return self._train(model, torch.optim.SGD(model.parameters(), self.settings.lr), x, y, part)

    def together(self, peers: Peers, block: Block) -> Curve:
        """Train one participant's confined model with the others."""
        model = self.build(peers.me)
        optimizer = ConfinedSGD(model.parameters(), self.settings.lr, peers=peers, samples=block.samples)
        return self._train(model, optimizer, block.x, block.y, "together")

    def _train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, part: str
    ) -> Curve:
        """The loop of any user of torch, whoever the optimiser talks to."""
        curve = Curve()
        scaled = self.scale(x)
        for step in range(1, self.settings.steps + 1):
            optimizer.zero_grad()
            loss_function(model(scaled), y).backward()
            optimizer.step()
            self._record(model, curve, step, part)
        return curve

    def _record(self, model: torch.nn.Module, curve: Curve, step: int, part: str) -> None:
        if step % max(1, self.settings.steps // POINTS) == 0 or step == self.settings.steps:
            with torch.no_grad():
                output = model(self.scale(self.data.held_out_x))
            labels = self.data.held_out_y
            curve.steps.append(step)
            curve.loss.append(float(loss_function(output, labels)))
            curve.accuracy.append(float((output.argmax(dim=1) == labels).float().mean()))
        self.advance(part)
