"""`cgd demo`: hospitals train together with CGD, compared with training alone and with training on pooled data.

The results are presented as a table, a list of the disclosed values, and a plot.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

import cgd
from cgd.errors import InputError
from cgd.experiments import datasets
from cgd.local import local_peers
from cgd.optim.grid import Grid
from cgd.optim.origin import confine
from cgd.optim.public_start import public_seed
from cgd.optim.sgd import ConfinedSGD
from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

    from cgd.experiments.datasets import Dataset
    from cgd.optim.grid import Block
    from cgd.peers import Peers
    from cgd.transport.driver import Traffic


HIDDEN_UNITS = 32
MAX_CURVE_POINTS = 100
STATISTICS_BOUND = 2.0**40
"""Largest magnitude of Σx and Σx² over the records of one hospital."""

loss_function = torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo."""

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
            raise InputError(f"steps is {self.steps}; it must be at least 1")


@dataclass
class LearningCurve:
    """Loss and accuracy of a model on held-out data, over the steps."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DemoParticipant:
    """The results of one participant.

    Attributes:
        name: name of the participant.
        samples: number of its samples.
        alone: learning curve of the model trained on its own data only.
        confined: learning curve of its confined model.
        traffic: frames and bytes that it sent.
    """

    name: str
    samples: int
    alone: LearningCurve
    confined: LearningCurve
    traffic: Traffic


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo.

    Attributes:
        settings: settings of the demo.
        parameters: number of parameters of the model.
        features: number of features.
        held_out: number of held-out samples.
        participants: results of each participant.
        pooled: learning curve of one model trained on pooled data.
    """

    settings: DemoSettings
    parameters: int
    features: int
    held_out: int
    participants: list[DemoParticipant]
    pooled: LearningCurve

    @property
    def samples(self) -> int:
        """The number of samples of all participants."""
        return sum(each.samples for each in self.participants)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {"cgd": cgd.__version__, **asdict(self)}


def run(settings: DemoSettings, advance: Callable[[str], None] = lambda _: None) -> DemoResult:
    """Train one model on pooled data, one model per participant on its own data, and confined models together.

    Args:
        settings: settings of the demo.
        advance: callback after each step, with the part it belongs to: "pooled", "alone" or "together".
    """
    torch.set_num_threads(1)  # the matrix products are small, several threads per product would be slower
    names = [f"hospital-{i + 1}" for i in range(settings.participants)]
    data = datasets.load(settings.dataset, settings.seed)
    # Uneven sizes: the second has half as many samples as the first, the third a third, …
    shares = [1 / (i + 1) for i in range(settings.participants)]
    grid = Grid(settings.participants)
    blocks = list(grid.split(data.x, data.y, seed=settings.seed, row_shares=shares).values())
    with local_peers(names) as members:
        scale = members.run(federated_feature_scale, blocks)[0]
        trainer = DemoTrainer(settings, data, scale, advance)
        pooled = trainer.train_alone("pooled", data.x, data.y, "pooled")
        alone = [
            trainer.train_alone(name, block.x, block.y, "alone") for name, block in zip(names, blocks, strict=True)
        ]
        confined = members.run(trainer.train_together, blocks)
        participants = [
            DemoParticipant(name, block.samples, alone_curve, confined_curve, peers.traffic)
            for name, block, alone_curve, confined_curve, peers in zip(
                names, blocks, alone, confined, members, strict=True
            )
        ]
    parameters = sum(parameter.numel() for parameter in trainer.build_model("count").parameters())
    return DemoResult(settings, parameters, data.features, len(data.held_out_y), participants, pooled)


@dataclass(frozen=True)
class FeatureScale:
    """Mean and standard deviation of every feature."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the standardised features."""
        return ((x - self.mean) / self.deviation).float()


def federated_feature_scale(peers: Peers, block: Block) -> FeatureScale:
    """Compute mean and standard deviation of every feature over all hospitals by one secure sum."""
    ones = torch.ones(len(block.x), 1, dtype=block.x.dtype)
    own = torch.cat((ones, block.x, block.x**2), dim=1).sum(dim=0)
    total = peers.sum(own, bound=STATISTICS_BOUND, ring_bits=64)
    first, second = (total[1:] / total[0]).chunk(2)
    deviation = (second - first**2).clamp(min=0).sqrt()
    return FeatureScale(first, torch.where(deviation > 0, deviation, 1.0))


@dataclass(frozen=True)
class DemoTrainer:
    """Trains the same model on the same scaled features, alone or together with others."""

    settings: DemoSettings
    data: Dataset
    scale: FeatureScale
    advance: Callable[[str], None]

    def build_model(self, name: str) -> torch.nn.Module:
        """Return the model of a participant at its origin."""
        with public_seed(self.settings.seed):
            model = torch.nn.Sequential(
                torch.nn.Linear(self.data.features, HIDDEN_UNITS),
                torch.nn.ReLU(),
                torch.nn.Linear(HIDDEN_UNITS, self.data.classes),
            )
        # A fixed seed makes the demo reproducible. In real training leave it out: `confine` then draws a random one.
        seed = hashlib.sha256(f"cgd demo {self.settings.seed} {name}".encode()).digest()
        confine(model, self.settings.delta, seed)
        return model

    def train_alone(self, name: str, x: torch.Tensor, y: torch.Tensor, part: str) -> LearningCurve:
        """Train a model on this data only."""
        model = self.build_model(name)
        return self._train(model, torch.optim.SGD(model.parameters(), self.settings.lr), x, y, part)

    def train_together(self, peers: Peers, block: Block) -> LearningCurve:
        """Train the confined model of one participant, together with the others."""
        model = self.build_model(peers.me)
        optimizer = ConfinedSGD(model.parameters(), self.settings.lr, peers=peers, samples=block.samples)
        return self._train(model, optimizer, block.x, block.y, "together")

    def _train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, part: str
    ) -> LearningCurve:
        """Run an ordinary torch training loop with the given optimiser."""
        curve = LearningCurve()
        scaled = self.scale(x)
        for step in range(1, self.settings.steps + 1):
            optimizer.zero_grad()
            loss_function(model(scaled), y).backward()
            optimizer.step()
            self._record(model, curve, step, part)
        return curve

    def _record(self, model: torch.nn.Module, curve: LearningCurve, step: int, part: str) -> None:
        if step % max(1, self.settings.steps // MAX_CURVE_POINTS) == 0 or step == self.settings.steps:
            with torch.no_grad():
                output = model(self.scale(self.data.held_out_x))
            labels = self.data.held_out_y
            curve.steps.append(step)
            curve.loss.append(float(loss_function(output, labels)))
            curve.accuracy.append(float((output.argmax(dim=1) == labels).float().mean()))
        self.advance(part)


def table(result: DemoResult) -> Table:
    """Return the table of losses and accuracies on held-out data: alone, confined and pooled."""
    table = Table(title=f"{result.settings.dataset}: loss and accuracy on {result.held_out} held-out samples")
    table.add_column("participant", no_wrap=True)
    for heading in ("samples", "alone\nloss", "alone\naccuracy", "confined\nloss", "confined\naccuracy"):
        table.add_column(heading, justify="right")
    for each in result.participants:
        table.add_row(each.name, str(each.samples), *_final([each.alone]), *_final([each.confined]))
    table.add_section()
    alone, confined = [each.alone for each in result.participants], [each.confined for each in result.participants]
    table.add_row("mean", "", *_final(alone), *_final(confined))
    table.add_section()
    table.add_row("all data pooled", str(result.samples), "", "", *_final([result.pooled]))
    return table


def disclosure(result: DemoResult) -> str:
    """Return a text on what each participant revealed and sent, and what it did not."""
    largest = max((each.traffic for each in result.participants), key=lambda traffic: traffic.bytes_sent)
    return f"""\
Revealed to every participant, by {largest.sums} secure sums:
  the number of all samples ({result.samples}),
  the mean and the standard deviation of {result.features} features,
  {result.settings.steps} gradient sums of {result.parameters} coordinates.
Sent by each participant: at most {largest.bytes_sent / 1e6:.2f} MB in {largest.frames_sent} frames,
  all of it secret shares, opened sums, digests and settings.
Not revealed: records, models, origins, the gradient of a single participant.
Privacy risk: the sums are exact, without noise. Over many steps they can
reveal information about the records, and more if there are few records."""


def plot(result: DemoResult, path: Path) -> None:
    """Save the learning curves as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    marker = "o" if len(result.pooled.steps) < 10 else ""  # a line through one point is invisible
    for quantity, axis in zip(("loss", "accuracy"), axes, strict=True):

        def draw(
            curve: LearningCurve, style: str, label: str | None, quantity: str = quantity, axis: Axes = axis
        ) -> None:
            axis.plot(curve.steps, getattr(curve, quantity), style, marker=marker, lw=1.2, label=label)

        for i, each in enumerate(result.participants):
            draw(each.alone, "tab:orange", "alone, one line each" if i == 0 else None)
        for i, each in enumerate(result.participants):
            draw(each.confined, "tab:blue", "confined, one line each" if i == 0 else None)
        draw(result.pooled, "k--", "all data pooled")
        axis.set(xlabel="step", ylabel=f"held-out {quantity}")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend()
    settings = result.settings
    figure.suptitle(f"{settings.dataset}, {settings.participants} participants, δ = {settings.delta}")
    figure.savefig(path, dpi=150)


def _final(curves: list[LearningCurve]) -> tuple[str, str]:
    """Return the mean final loss and accuracy of these curves."""
    return f"{mean(curve.loss[-1] for curve in curves):.3f}", f"{mean(curve.accuracy[-1] for curve in curves):.1%}"
