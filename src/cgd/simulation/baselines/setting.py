"""What every baseline is given, and the loop that those in plain torch share."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.nn import functional

from cgd.optim.grid import Cell
from cgd.optim.origin import confine
from cgd.simulation.loop import digest_of, evaluations_every, follow, told
from cgd.simulation.population import Participants, as_input, as_labels, judge, participant_seed
from cgd.simulation.result import Evaluation, History
from cgd.simulation.simulate import simulate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from cgd.optim.grid import Block
    from cgd.simulation.colony import SimulationResult
    from cgd.simulation.loop import OnStep, TrainingLoop
    from cgd.simulation.population import Delta, Loss, Mode


@dataclass(frozen=True)
class BaselineSettings:
    """The same data, model and measures for all methods; the names are those of `cgd.simulate`.

    Attributes:
        build_model: makes the model, for all features.
        blocks: everybody's data, from `Grid.split`.
        steps: how many, each on all samples (in DP-SGD on a batch).
        lr: the step size.
        delta: the standard deviation of origins, for all or by cell.
        loss: of outputs and labels, a mean over the samples.
        seed: decides all origins, and whatever else is drawn.
        test: held-out samples and labels.
        evaluate_every: how many steps lie between evaluations.
        checkpoint: where to resume from, and where to save to.
        on_step: is called after each step with its number and the history.
    """

    build_model: Callable[[], torch.nn.Module]
    blocks: Mapping[Cell, Block]
    steps: int
    lr: float
    delta: Delta = 0.1
    loss: Loss = functional.cross_entropy
    seed: int = 0
    test: tuple[Any, Any] | None = None
    evaluate_every: int | None = None
    checkpoint: str | os.PathLike[str] | None = None
    on_step: OnStep = lambda *_: None

    def origin(self) -> torch.nn.Module:
        """The model of one who trains on everybody's data: it starts where r0c0 of a colony without columns does."""
        model = self.build_model()
        delta = self.delta(Cell(0, 0)) if callable(self.delta) else self.delta
        confine(model, delta, participant_seed(self.seed, Cell(0, 0)))
        return model

    def participants(self) -> Participants:
        """The participants, with the origins they would have in CGD."""
        return Participants(self.build_model, self.blocks, "towers", self.delta, self.seed)

    def colony(
        self,
        *,
        mode: Mode,
        accept: str = "",
        sample: int,
        arithmetic: Literal["float", "ring"] = "float",
        mu: float = 0.0,
        hold: int = 0,
        common_origin: bool = False,
    ) -> SimulationResult:
        """Simulate the colony in this setting; the arguments are those of `cgd.simulate`."""
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
            seed=self.seed,
            common_origin=common_origin,
            arithmetic=arithmetic,
            test=self.test,
            evaluate_every=self.evaluate_every,
            sample=sample,
            checkpoint=self.checkpoint,
            progress=False,
            on_step=self.on_step,
        )

    def pooled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All samples with all features, in one place."""
        rows, columns = (1 + max(place) for place in zip(*self.blocks, strict=True))
        x = [
            torch.cat([torch.as_tensor(self.blocks[Cell(r, c)].x) for c in range(columns)], dim=1 if columns > 1 else 0)
            for r in range(rows)
        ]
        y = [torch.as_tensor(self.blocks[Cell(r, 0)].y) for r in range(rows)]
        dtype = next(self.build_model().parameters()).dtype
        return as_input(torch.cat(x), dtype), as_labels(torch.cat(y), dtype)


@dataclass(frozen=True)
class BaselineResult:
    """What a baseline returns.

    Attributes:
        models: by the names of those who hold them.
        history: the course of the run.
    """

    models: dict[str, torch.nn.Module] = field(repr=False)
    history: History = field(repr=False)


@dataclass(frozen=True)
class Learner:
    """One model, trained by plain gradient descent on its own samples; of tests it sees `features` (None: all)."""

    model: torch.nn.Module
    x: torch.Tensor
    y: torch.Tensor
    features: slice | None = None


def descend(setting: BaselineSettings, learners: dict[str, Learner]) -> BaselineResult:
    """Train all learners side by side, each by full-batch gradient descent; resumes if there is a checkpoint."""
    with _side_by_side(len(learners)) as each:
        history = follow_learners(setting, learners, _Descent(setting, list(learners.values()), each), {})
    return BaselineResult({name: learner.model for name, learner in learners.items()}, history)


def follow_learners(
    setting: BaselineSettings, learners: dict[str, Learner], course: TrainingLoop, settings: dict[str, str]
) -> History:
    """Follow a course of these learners; `settings` are those that this kind of training has besides the usual ones."""
    every = evaluations_every(setting.steps, setting.evaluate_every)
    usual = {
        "lr": repr(setting.lr),
        "seed": repr(setting.seed),
        "loss": told(setting.loss),
        "evaluation": f"test data {digest_of(setting.test)}",
    }
    history = History(list(learners))
    follow(
        course,
        history,
        steps=setting.steps,
        lr=setting.lr,
        every=every,
        checkpoint=None if setting.checkpoint is None else Path(setting.checkpoint),
        settings={**usual, **_digests(learners), **settings},
        on_step=setting.on_step,
    )
    return history


class _Descent:
    """The course of plain gradient descent."""

    def __init__(self, setting: BaselineSettings, learners: list[Learner], each: Callable[..., Iterable[Any]]) -> None:
        self._setting, self._learners, self._each = setting, learners, each
        self._optimizers = [torch.optim.SGD(learner.model.parameters(), lr=setting.lr) for learner in learners]

    def step(self, number: int) -> float:  # noqa: ARG002
        """Every learner takes one."""
        return float(np.mean(list(self._each(partial(_step, self._setting.loss), self._learners, self._optimizers))))

    def evaluate(self, taken: int) -> Evaluation | None:
        """Every learner."""
        return evaluate(self._setting, self._learners, taken)

    def state(self) -> dict[str, Any]:
        """The models."""
        return {"models": [learner.model.state_dict() for learner in self._learners]}

    def load_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""
        for learner, saved in zip(self._learners, state["models"], strict=True):
            learner.model.load_state_dict(saved)


def _step(loss_function: Loss, learner: Learner, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = loss_function(learner.model(learner.x), learner.y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@contextmanager
def _side_by_side(learners: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` over learners: with several, a thread for each rather than several threads for one small product."""
    threads = torch.get_num_threads()
    if learners == 1 or threads == 1:
        yield map
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def evaluate(setting: BaselineSettings, learners: list[Learner], step: int) -> Evaluation | None:
    """Losses and accuracies on held-out data, if there are any."""
    if setting.test is None:
        return None
    judged = []
    for learner in learners:
        dtype = next(learner.model.parameters()).dtype
        x, y = as_input(setting.test[0], dtype), as_labels(setting.test[1], dtype)
        learner.model.eval()
        judged.append(judge(setting.loss, learner.model(x if learner.features is None else x[:, learner.features]), y))
        learner.model.train()
    return Evaluation(step, [loss for loss, _ in judged], [accuracy for _, accuracy in judged if accuracy is not None])


def _digests(learners: dict[str, Learner]) -> dict[str, str]:
    """So that a checkpoint is not taken up with other learners or other data."""
    digests = {}
    for name, learner in learners.items():
        digest = hashlib.sha256(str(learner.model).encode())
        for part, values in learner.model.state_dict().items():  # where it starts
            digest.update(part.encode() + values.contiguous().numpy().tobytes())
        digest.update(learner.x.contiguous().numpy().data)
        digest.update(learner.y.contiguous().numpy().data)
        digests[name] = digest.hexdigest()[:16]
    return digests
