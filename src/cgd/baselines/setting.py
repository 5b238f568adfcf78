"""What every baseline is given, and the loop that those in plain torch share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from cgd.errors import DivergenceError
from cgd.learning.grid import Cell
from cgd.simulation import checkpoint as checkpoints
from cgd.simulation.history import Evaluation, History
from cgd.simulation.participants import Participants, as_input, as_labels
from cgd.simulation.simulate import SECONDS_BETWEEN_CHECKPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from cgd.learning.grid import Block
    from cgd.simulation.modules import Loss
    from cgd.simulation.participants import Delta

OnStep = Callable[[int, History], None]


@dataclass(frozen=True)
class Setting:
    """The same data, model and measures for all methods; the names are those of `cgd.simulate`."""

    build_model: Callable[[], torch.nn.Module]
    blocks: Mapping[Cell, Block]
    steps: int
    lr: float
    delta: Delta = 0.1
    loss: Loss = functional.cross_entropy
    seed: int = 0
    test: tuple[Any, Any] | None = None
    evaluate_every: int | None = None
    checkpoint: Path | None = None
    on_step: OnStep = lambda *_: None

    def participants(self) -> Participants:
        """The participants, with the origins they would have in CGD."""
        return Participants(self.build_model, self.blocks, "towers", self.delta, self.seed)

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
class Trained:
    """What a baseline returns: the models by the names of those who hold them, and the course of the run."""

    models: dict[str, torch.nn.Module]
    history: History


@dataclass(frozen=True)
class Learner:
    """One model, trained by plain gradient descent on its own samples; of tests it sees `features` (None: all)."""

    model: torch.nn.Module
    x: torch.Tensor
    y: torch.Tensor
    features: slice | None = None


def descend(setting: Setting, learners: dict[str, Learner]) -> Trained:
    """Train all learners side by side, each by full-batch gradient descent; resumes if there is a checkpoint."""
    every = setting.evaluate_every or max(1, setting.steps // 100)
    optimizers = [torch.optim.SGD(each.model.parameters(), lr=setting.lr) for each in learners.values()]
    settings = {"lr": repr(setting.lr), "evaluation": repr((every, setting.test is not None)), **_digests(learners)}
    history = History(list(learners))
    saved = None if setting.checkpoint is None else checkpoints.load(setting.checkpoint, settings)
    if saved is not None:
        history = History.from_json(saved["history"])
        for learner, state in zip(learners.values(), saved["models"], strict=True):
            learner.model.load_state_dict(state)

    def save() -> None:
        if setting.checkpoint is not None:
            models = [each.model.state_dict() for each in learners.values()]
            checkpoints.save(setting.checkpoint, settings, {"models": models, "history": history.as_json()})

    last_saved = time.monotonic()
    with _side_by_side(len(learners)) as each:
        for step in range(len(history.training_loss), setting.steps + 1):
            due = step % every == 0 or step == setting.steps
            if setting.test is not None and due and not (history.evaluations and history.evaluations[-1].step == step):
                history.evaluations.append(_evaluate(setting, list(learners.values()), step))
            if step == setting.steps:
                break
            losses = list(each(partial(_step, setting.loss), learners.values(), optimizers))
            if not np.isfinite(losses).all():
                raise DivergenceError(
                    f"a training loss is not finite at step {step + 1}; lower lr (it is {setting.lr})"
                )
            history.training_loss.append(float(np.mean(losses)))
            if time.monotonic() - last_saved > SECONDS_BETWEEN_CHECKPOINTS:
                save()
                last_saved = time.monotonic()
            setting.on_step(step + 1, history)
    save()
    return Trained({name: learner.model for name, learner in learners.items()}, history)


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
def _evaluate(setting: Setting, learners: list[Learner], step: int) -> Evaluation:
    if setting.test is None:
        return Evaluation(step, [])
    losses, accuracies = [], []
    for learner in learners:
        dtype = next(learner.model.parameters()).dtype
        x, y = as_input(setting.test[0], dtype), as_labels(setting.test[1], dtype)
        learner.model.eval()
        outputs = learner.model(x if learner.features is None else x[:, learner.features])
        learner.model.train()
        losses.append(float(setting.loss(outputs, y)))
        if not y.is_floating_point() and outputs.ndim == 2:
            accuracies.append(float((outputs.argmax(dim=1) == y).float().mean()))
    return Evaluation(step, losses, accuracies)


def _digests(learners: dict[str, Learner]) -> dict[str, str]:
    """So that a checkpoint is not taken up with other learners or other data."""
    digests = {}
    for name, learner in learners.items():
        digest = hashlib.sha256(str(learner.model).encode())
        digest.update(learner.x.contiguous().numpy().data)
        digest.update(learner.y.contiguous().numpy().data)
        digests[name] = digest.hexdigest()[:16]
    return digests
