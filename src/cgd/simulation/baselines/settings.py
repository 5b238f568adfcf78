"""Settings and result of a baseline."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from cgd.optim.displacement import SGDRule
from cgd.optim.flat_vectors import CPU
from cgd.optim.grid import Block, Cell
from cgd.optim.origin import confine
from cgd.optim.public_start import public_seed
from cgd.simulation.population import Participants, as_input, as_labels, participant_seed
from cgd.simulation.simulate import simulate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from cgd.dp.settings import PrivacySettings
    from cgd.optim.displacement import UpdateRule
    from cgd.optim.public_start import Start
    from cgd.simulation.local_training import LocalTraining
    from cgd.simulation.loop import OnStep
    from cgd.simulation.population import Delta, Loss, Mode
    from cgd.simulation.ray_cluster import RayCluster
    from cgd.simulation.result import History, SimulationResult
    from cgd.simulation.simulate import Schedule


@dataclass(frozen=True)
class BaselineSettings:
    """Data, model and training settings for all methods; the names are those of `cgd.simulate`.

    Attributes:
        build_model: function that builds the model for all features.
        blocks: data of all participants, from `Grid.split`.
        steps: number of steps, each on all samples (in DP-SGD on a batch).
        lr: step size.
        delta: standard deviation of the origins, one for all or a function of the cell.
        loss: loss function of outputs and labels, a mean over the samples.
        seed: seed of all origins and of all other random numbers.
        start: "model" or "zeros".
        test: held-out samples and labels.
        evaluate_every: steps between evaluations.
        device: where simulated models compute; baselines that are no simulation compute on the CPU.
        checkpoint: file to write to, and to resume from if it exists.
        on_step: callback after each step, with its number and the history.
        engine: engine of simulations.
    """

    build_model: Callable[[], torch.nn.Module]
    blocks: Mapping[Cell, Block]
    steps: int
    lr: float
    delta: Delta = 0.1
    loss: Loss = functional.cross_entropy
    seed: int = 0
    start: Start = "model"
    test: tuple[Any, Any] | None = None
    evaluate_every: int | None = None
    device: torch.device = CPU
    checkpoint: str | os.PathLike[str] | None = None
    on_step: OnStep = lambda *_: None
    engine: Literal["auto"] | RayCluster = "auto"

    def initial_model(self) -> torch.nn.Module:
        """Return the initial model for training on pooled data: the origin of r0c0 in a grid with one column."""
        with public_seed(self.seed):
            model = copy.deepcopy(self.build_model())  # a function that returns one module must not get it confined
        delta = self.delta(Cell(0, 0)) if callable(self.delta) else self.delta
        confine(model, delta, participant_seed(self.seed, Cell(0, 0)), start=self.start)
        return model

    def participants(self) -> Participants:
        """Return the participants, with the origins they have in CGD."""
        return Participants(self.build_model, self.blocks, "towers", self.delta, self.seed, start=self.start)

    def simulate(
        self,
        *,
        mode: Mode,
        accept: str = "",
        sample: int,
        arithmetic: Literal["float", "ring"] = "float",
        mu: float = 0.0,
        hold: int = 0,
        rule: Callable[[float], UpdateRule] = SGDRule,
        schedule: Schedule | None = None,
        batches: int = 1,
        local: LocalTraining | None = None,
        keep: float = 0.0,
        common_origin: bool = False,
        fresh_origins: bool = False,
        delay: int = 0,
        privacy: PrivacySettings | None = None,
    ) -> SimulationResult:
        """Run `cgd.simulate` with these settings; the arguments are those of `cgd.simulate`."""
        return simulate(
            self.build_model,
            self.blocks,
            steps=self.steps,
            lr=self.lr,
            delta=self.delta,
            loss=self.loss,
            mode=mode,
            accept=accept,
            mu=mu,
            hold=hold,
            rule=rule,
            schedule=schedule,
            batches=batches,
            local=local,
            keep=keep,
            seed=self.seed,
            start=self.start,
            common_origin=common_origin,
            fresh_origins=fresh_origins,
            delay=delay,
            arithmetic=arithmetic,
            privacy=privacy,
            engine=self.engine,
            test=self.test,
            evaluate_every=self.evaluate_every,
            sample=sample,
            device=self.device,
            checkpoint=self.checkpoint,
            progress=False,
            on_step=self.on_step,
        )

    def for_one_participant(self) -> BaselineSettings:
        """Return the same settings for one participant, r0c0, that has the samples of all."""
        return replace(self, blocks={Cell(0, 0): Block(Cell(0, 0), *self.pooled())})

    def pooled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples of all participants with all features, and their labels."""
        rows, columns = (1 + max(indices) for indices in zip(*self.blocks, strict=True))
        x = [
            torch.cat([torch.as_tensor(self.blocks[Cell(r, c)].x) for c in range(columns)], dim=1 if columns > 1 else 0)
            for r in range(rows)
        ]
        y = [torch.as_tensor(self.blocks[Cell(r, 0)].y) for r in range(rows)]
        dtype = next(self.build_model().parameters()).dtype
        return as_input(torch.cat(x), dtype), as_labels(torch.cat(y), dtype)


@dataclass(frozen=True)
class BaselineResult:
    """Result of a baseline.

    Attributes:
        models: trained models, by the names of their owners.
        history: losses and evaluations of the run.
    """

    models: dict[str, torch.nn.Module] = field(repr=False)
    history: History = field(repr=False)
