"""Baselines by plain gradient descent: centralised (on pooled data), local (on one participant's), and federated.

In federated SGD and federated averaging all participants hold the same model, which moves by the weighted
sum of all gradients, or of all updates. That is CGD with one common origin, so it is simulated by the same code.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from cgd.errors import InputError
from cgd.optim.displacement import SGDRule
from cgd.optim.grid import Cell
from cgd.simulation.baselines.settings import BaselineResult
from cgd.simulation.local_training import LocalTraining
from cgd.simulation.loop import data_digest, describe_loss, evaluation_interval, run_loop
from cgd.simulation.population import as_input, as_labels, loss_and_accuracy, sample_cells
from cgd.simulation.result import Evaluation, History

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cgd.optim.displacement import UpdateRule
    from cgd.simulation.baselines.settings import BaselineSettings
    from cgd.simulation.loop import TrainingLoop
    from cgd.simulation.population import Loss, Mode
    from cgd.simulation.result import SimulationResult

    Rule = Callable[[float], UpdateRule]


def centralised(settings: BaselineSettings, *, rule: Rule = SGDRule) -> SimulationResult:
    """Train one model on all samples with all features, the reference of every comparison.

    It is the simulation of one participant that has all samples, so the same kernels compute it.

    Args:
        settings: data, model and training settings.
        rule: update rule, as a function of the step size.

    Returns:
        The result with one participant, r0c0.
    """
    return settings.for_one_participant().simulate(mode="towers", sample=1, rule=rule)


def local(settings: BaselineSettings, sample: int | None = None, *, rule: Rule = SGDRule) -> BaselineResult:
    """Train each participant's model on its own data alone, from the origin it has in CGD.

    Args:
        settings: data, model and training settings.
        sample: number of participants to train, drawn at random; by default all.
        rule: update rule, as a function of the step size.
    """
    participants = settings.participants()
    cells = list(participants.grid.cells)
    if sample is not None:
        cells = sample_cells(cells, sample, settings.seed)
    no_displacement = torch.zeros(participants.layout.size, dtype=participants.dtype)
    tasks = {}
    for cell in cells:
        end = sum(participants.blocks[Cell(0, column)].x.shape[1] for column in range(cell.column + 1))
        width = participants.blocks[cell].x.shape[1]
        features = slice(end - width, end) if participants.grid.columns > 1 else None
        tasks[str(cell)] = TrainingTask(participants.model(cell, no_displacement), *participants.data(cell), features)
    return _train(settings, tasks, rule)


@dataclass(frozen=True)
class TrainingTask:
    """A model and its training data.

    Attributes:
        model: model to train.
        x: training samples.
        y: labels.
        features: features of the test samples that the model takes; None for all.
    """

    model: torch.nn.Module
    x: torch.Tensor
    y: torch.Tensor
    features: slice | None = None


def run_baseline_loop(
    settings: BaselineSettings, tasks: dict[str, TrainingTask], loop: TrainingLoop, method_settings: dict[str, str]
) -> History:
    """Run the training loop of a baseline and return its history.

    Args:
        settings: data, model and training settings.
        tasks: models in training, by name.
        loop: training procedure.
        method_settings: settings of this method that a checkpoint must also match.
    """
    checkpoint_settings = {
        "lr": repr(settings.lr),
        "seed": repr(settings.seed),
        "loss": describe_loss(settings.loss),
        "evaluation": f"test data {data_digest(settings.test)}",
        **_digests(tasks),
        **method_settings,
    }
    history = History(list(tasks))
    run_loop(
        loop,
        history,
        steps=settings.steps,
        lr=settings.lr,
        evaluate_every=evaluation_interval(settings.steps, settings.evaluate_every),
        checkpoint=None if settings.checkpoint is None else Path(settings.checkpoint),
        settings=checkpoint_settings,
        on_step=settings.on_step,
    )
    return history


@torch.no_grad()
def evaluate(settings: BaselineSettings, tasks: Iterable[TrainingTask], step: int) -> Evaluation | None:
    """Return losses and accuracies on held-out data; None if there is none."""
    if settings.test is None:
        return None
    scores = []
    for task in tasks:
        dtype = next(task.model.parameters()).dtype
        x, y = as_input(settings.test[0], dtype), as_labels(settings.test[1], dtype)
        own_x = x if task.features is None else x[:, task.features]
        task.model.eval()
        scores.append(loss_and_accuracy(settings.loss, task.model(own_x), y))
        task.model.train()
    return Evaluation(step, [loss for loss, _ in scores], [accuracy for _, accuracy in scores if accuracy is not None])


def _train(settings: BaselineSettings, tasks: dict[str, TrainingTask], rule: Rule) -> BaselineResult:
    """Train all models in parallel, each by full-batch gradient descent; resume if there is a checkpoint."""
    with _parallel_map(len(tasks)) as parallel_map:
        loop = _GradientDescentLoop(settings, list(tasks.values()), parallel_map, rule)
        history = run_baseline_loop(settings, tasks, loop, {} if rule is SGDRule else {"rule": repr(rule(settings.lr))})
    return BaselineResult({name: task.model for name, task in tasks.items()}, history)


class _GradientDescentLoop:
    """The training loop of full-batch gradient descent."""

    def __init__(
        self,
        settings: BaselineSettings,
        tasks: list[TrainingTask],
        parallel_map: Callable[..., Iterable[Any]],
        rule: Rule,
    ) -> None:
        self._settings, self._tasks, self._map = settings, tasks, parallel_map
        # SGDRule rounds twice where torch's optimiser may round once, and stored results have the bits of the latter.
        build: Callable[..., torch.optim.Optimizer] = partial(_RuleOptimizer, rule=rule(settings.lr))
        if rule is SGDRule:
            build = partial(torch.optim.SGD, lr=settings.lr)
        self._optimizers = [build(task.model.parameters()) for task in tasks]

    def step(self, number: int) -> float:  # noqa: ARG002
        """Run one step of every model and return the mean of their losses."""
        return float(np.mean(list(self._map(partial(_step, self._settings.loss), self._tasks, self._optimizers))))

    def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate every model."""
        return evaluate(self._settings, self._tasks, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every model and every optimiser."""
        return {
            "models": [task.model.state_dict() for task in self._tasks],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for task, saved in zip(self._tasks, state["models"], strict=True):
            task.model.load_state_dict(saved)
        # Checkpoints of former versions have no states of optimisers, and those of gradient descent are empty.
        for optimizer, saved in zip(self._optimizers, state.get("optimizers", ()), strict=False):
            optimizer.load_state_dict(saved)


class _RuleOptimizer(torch.optim.Optimizer):
    """Moves the parameters of one model by an update rule."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rule: UpdateRule) -> None:
        super().__init__(parameters, {})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Move each parameter by its gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self._rule.move(parameter, parameter.grad, self.state[parameter])


def _step(loss_function: Loss, task: TrainingTask, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = loss_function(task.model(task.x), task.y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@contextmanager
def _parallel_map(models: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield a `map` function that uses one thread per model: faster than several threads per small matrix product."""
    threads = torch.get_num_threads()
    if models == 1 or threads == 1:
        yield map
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(threads)


def _digests(tasks: dict[str, TrainingTask]) -> dict[str, str]:
    """Return a digest of each initial model and its data, so that another run does not resume from the checkpoint."""
    digests = {}
    for name, task in tasks.items():
        digest = hashlib.sha256(str(task.model).encode())
        for key, values in task.model.state_dict().items():
            digest.update(key.encode() + values.contiguous().numpy().tobytes())
        digest.update(task.x.contiguous().numpy().data)
        digest.update(task.y.contiguous().numpy().data)
        digests[name] = digest.hexdigest()[:16]
    return digests


def federated_sgd(
    settings: BaselineSettings,
    *,
    secure: bool = False,
    mode: Mode = "towers",
    accept: str = "",
    rule: Rule = SGDRule,
    batches: int = 1,
) -> SimulationResult:
    """Train one common model on the data of all participants without moving the data.

    Args:
        settings: data, model and training settings.
        secure: sum gradients by secure aggregation, in the fixed point of the ring, so that a server sees the sum only;
            otherwise the server sees each participant's gradient.
        mode: "towers" or "joint" for grids with several columns, see `cgd.optim.vertical`.
        accept: `cgd.JOINT_REVEALS_RECORDS` if the mode is "joint", see `cgd.simulate`.
        rule: update rule, as a function of the step size.
        batches: number of batches of an epoch, of which each step uses one.

    Returns:
        The result of the simulation; all participants have the same model.
    """
    arithmetic: Literal["float", "ring"] = "ring" if secure else "float"
    # All participants have the same model, so evaluating one is enough.
    return settings.simulate(
        mode=mode, accept=accept, sample=1, arithmetic=arithmetic, rule=rule, batches=batches, common_origin=True
    )


def federated_averaging(settings: BaselineSettings, local: LocalTraining, *, rule: Rule = SGDRule) -> SimulationResult:
    """Train one common model by federated averaging (McMahan et al. 2017): CGD with local training, from one origin.

    Args:
        settings: data, model and training settings; with `lr` 1 the common model moves by the mean update.
        local: local training of every participant in each round.
        rule: update rule, as a function of the step size; with momentum or Adam, the server's optimiser.

    Returns:
        The result of the simulation; all participants have the same model.

    Raises:
        InputError: there is no local training.
    """
    if not isinstance(local, LocalTraining):
        raise InputError(f"local is a {type(local).__name__}; pass LocalTraining(…), or use federated_sgd without it")
    return settings.simulate(mode="towers", sample=1, rule=rule, local=local, common_origin=True)
