"""The training loop: steps, evaluations, checkpoints, and resuming from a checkpoint."""

from __future__ import annotations

import hashlib
import math
import re
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from cgd.errors import DivergenceError, InputError
from cgd.optim.option_checks import check_whole
from cgd.simulation import checkpoint as checkpoints
from cgd.simulation.result import History

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd.simulation.result import Evaluation

    OnStep = Callable[[int, History], None]

CHECKPOINT_INTERVAL_SECONDS = 20.0


class TrainingLoop(Protocol):
    """A training procedure that runs step by step and can be saved and resumed."""

    def step(self, number: int) -> float:
        """Run the step with this number, counted from 0, and return the training loss before it."""

    def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate on held-out data after `step` steps; None if there is no held-out data."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state that a step changes."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


def evaluation_interval(steps: int, evaluate_every: int | None) -> int:
    """Return the number of steps between evaluations; by default a hundredth of all steps.

    Raises:
        InputError: `evaluate_every` is less than one.
    """
    return max(1, steps // 100) if evaluate_every is None else check_whole("evaluate_every", evaluate_every, 1)


def describe_loss(loss: Any) -> str:
    """Return a text that identifies a loss function and is the same in every process."""
    if isinstance(loss, partial):
        return f"partial({describe_loss(loss.func)}, {loss.args}, {sorted(loss.keywords.items())})"
    if isinstance(loss, torch.nn.Module):
        options = {name: value for name, value in vars(loss).items() if not name.startswith("_") and name != "training"}
        return f"{type(loss).__qualname__}({options}, {dict(loss.named_buffers())})"
    code = getattr(loss, "__code__", None)
    body = ""
    if code is not None:
        captured = [cell.cell_contents for cell in loss.__closure__ or ()]
        content = repr((code.co_consts, code.co_names, loss.__defaults__, captured))
        content = re.sub(" at 0x[0-9a-f]+", "", content)  # memory addresses differ between processes
        body = hashlib.sha256(code.co_code + content.encode()).hexdigest()[:12]
    return f"{getattr(loss, '__qualname__', type(loss).__qualname__)} {body}".strip()


def data_digest(test: tuple[Any, Any] | None) -> str:
    """Return a digest of held-out samples and labels; "none" if there are none."""
    if test is None:
        return "none"
    state = hashlib.sha256()
    for part in test:
        state.update(np.ascontiguousarray(np.asarray(part)).data)
    return state.hexdigest()[:16]


def run_loop(
    loop: TrainingLoop,
    history: History,
    *,
    steps: int,
    lr: float,
    evaluate_every: int,
    checkpoint: Path | None,
    settings: dict[str, str],
    on_step: OnStep,
    fixed_steps: int = 0,
    drain: Callable[[], None] | None = None,
) -> None:
    """Run all steps, or those that remain after the checkpoint; `history` is filled in place.

    Args:
        loop: training procedure.
        history: empty history.
        steps: total number of steps.
        lr: step size, named in the error if the training diverges.
        evaluate_every: steps between evaluations; there is also one before the first step and one after the last.
        checkpoint: file to resume from and to write every `CHECKPOINT_INTERVAL_SECONDS` and at the end; None for none.
        settings: settings that a checkpoint must have been written with.
        on_step: callback after each step, with its number (from 1) and the history.
        fixed_steps: number of first steps with a fixed step size, see `checkpoint.load`.
        drain: applies the last steps of a training with a delay, after the last checkpoint; None without a delay.

    Raises:
        InputError: the checkpoint cannot be written, or was written with other settings.
        DivergenceError: a loss is not finite; the last checkpoint holds an earlier, finite state.
    """
    with nullcontext() if checkpoint is None else checkpoints.lock(checkpoint):
        saved = None if checkpoint is None else checkpoints.load(checkpoint, settings, fixed_steps)
        if saved is not None and checkpoint is not None:
            try:
                before = History.from_json(saved["history"])
                loop.load_state_dict(saved)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise checkpoints.invalid(checkpoint, error) from None
            history.training_loss[:], history.evaluations[:] = before.training_loss, before.evaluations
            if len(history.training_loss) > steps:
                raise InputError(
                    f"{checkpoint} is at step {len(history.training_loss)}, beyond the {steps} asked for; "
                    "ask for more steps, or name another file"
                )

        def save() -> None:
            if checkpoint is not None:
                checkpoints.save(checkpoint, settings, {**loop.state_dict(), "history": history.as_json()})

        def evaluate(step: int) -> None:
            evaluated = history.evaluations and history.evaluations[-1].step == step
            if not evaluated and (step % evaluate_every == 0 or step == steps):
                evaluation = loop.evaluate(step)
                if evaluation is not None:
                    check_finite(max(evaluation.loss), step)
                    history.evaluations.append(evaluation)

        def check_finite(loss: float, step: int) -> None:
            if not math.isfinite(loss):
                remedy = f"lower lr (it is {lr})" if step else "look for bad values in the data and the labels"
                raise DivergenceError(f"the loss is {loss} after {step} steps; {remedy}")

        def end_step(step: int) -> None:
            if step == steps and drain is not None:
                save()  # before it: a run with more steps can resume from here
                drain()
            evaluate(step)

        first = len(history.training_loss)
        end_step(first)
        last_saved = time.monotonic()
        for number in range(first, steps):
            loss = loop.step(number)
            check_finite(loss, number)
            history.training_loss.append(loss)
            end_step(number + 1)
            drained = drain is not None and number + 1 == steps  # `end_step` has saved the state before
            if time.monotonic() - last_saved > CHECKPOINT_INTERVAL_SECONDS and not drained:
                save()
                last_saved = time.monotonic()
            on_step(number + 1, history)
        if drain is None:
            save()
