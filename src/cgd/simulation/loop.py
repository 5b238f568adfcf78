"""The course of a training: step by step, with evaluations and checkpoints on the way, and resumed where it stopped."""

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
from cgd.simulation import checkpoint as checkpoints
from cgd.simulation.result import History

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd.simulation.result import Evaluation

    OnStep = Callable[[int, History], None]

SECONDS_BETWEEN_CHECKPOINTS = 20.0


class TrainingLoop(Protocol):
    """A training that goes step by step, and can be put aside and taken up again."""

    def step(self, number: int) -> float:
        """Take the step with this number, from 0; the training loss before it."""

    def evaluate(self, taken: int) -> Evaluation | None:
        """On held-out data, after so many steps; None if there is nothing to evaluate on."""

    def state(self) -> dict[str, Any]:
        """All that a step changes."""

    def load_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""


def evaluations_every(steps: int, wanted: int | None) -> int:
    """How many steps lie between evaluations; by default a hundredth of all.

    Raises:
        InputError: it is less than one.
    """
    if wanted is not None and wanted < 1:
        raise InputError(f"evaluate_every is {wanted}; it must be at least 1")
    return wanted or max(1, steps // 100)


def told(loss: Any) -> str:
    """A loss as a text that is the same for the same loss, in another process, too."""
    if isinstance(loss, partial):
        return f"partial({told(loss.func)}, {loss.args}, {sorted(loss.keywords.items())})"
    if isinstance(loss, torch.nn.Module):
        options = {name: value for name, value in vars(loss).items() if not name.startswith("_") and name != "training"}
        return f"{type(loss).__qualname__}({options}, {dict(loss.named_buffers())})"
    code = getattr(loss, "__code__", None)
    body = ""
    if code is not None:
        held = [cell.cell_contents for cell in loss.__closure__ or ()]
        content = repr((code.co_consts, code.co_names, loss.__defaults__, held))
        content = re.sub(" at 0x[0-9a-f]+", "", content)  # where something lies in memory says nothing
        body = hashlib.sha256(code.co_code + content.encode()).hexdigest()[:12]
    return f"{getattr(loss, '__qualname__', type(loss).__qualname__)} {body}".strip()


def digest_of(test: tuple[Any, Any] | None) -> str:
    """Of held-out data."""
    if test is None:
        return "none"
    state = hashlib.sha256()
    for part in test:
        state.update(np.ascontiguousarray(np.asarray(part)).data)
    return state.hexdigest()[:16]


def follow(
    course: TrainingLoop,
    history: History,
    *,
    steps: int,
    lr: float,
    every: int,
    checkpoint: Path | None,
    settings: dict[str, str],
    on_step: OnStep,
) -> None:
    """Take all steps, or those that are left after the checkpoint; `history` is filled in place.

    Args:
        course: what to follow.
        history: is empty before.
        steps: how many steps there are in all.
        lr: the size of the first, to be told if the training diverges.
        every: how many lie between evaluations; there is one before the first step and one after the last.
        checkpoint: where to resume from, and where to save to every now and then and at the end.
        settings: what a checkpoint must have been made with.
        on_step: is called after each step with its number, from 1.

    Raises:
        InputError: the checkpoint cannot be written, or is of other settings.
        DivergenceError: a training loss is no longer finite; the checkpoint is from before.
    """
    with nullcontext() if checkpoint is None else checkpoints.claimed(checkpoint):
        saved = None if checkpoint is None else checkpoints.load(checkpoint, settings)
        if saved is not None and checkpoint is not None:
            try:
                before = History.from_json(saved["history"])
                course.load_state(saved)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise checkpoints.damaged(checkpoint, error) from None
            history.training_loss[:], history.evaluations[:] = before.training_loss, before.evaluations
            if len(history.training_loss) > steps:
                raise InputError(
                    f"{checkpoint} is at step {len(history.training_loss)}, beyond the {steps} asked for; "
                    "ask for more steps, or name another file"
                )

        def save() -> None:
            if checkpoint is not None:
                checkpoints.save(checkpoint, settings, {**course.state(), "history": history.as_json()})

        def evaluate(taken: int) -> None:
            done = history.evaluations and history.evaluations[-1].step == taken
            if not done and (taken % every == 0 or taken == steps):
                evaluation = course.evaluate(taken)
                if evaluation is not None:
                    check(max(evaluation.loss), taken)
                    history.evaluations.append(evaluation)

        def check(loss: float, taken: int) -> None:
            if not math.isfinite(loss):
                remedy = f"lower lr (it is {lr})" if taken else "look for bad values in the data and the labels"
                raise DivergenceError(f"the loss is {loss} after {taken} steps; {remedy}")

        first = len(history.training_loss)
        evaluate(first)
        last_saved = time.monotonic()
        for number in range(first, steps):
            loss = course.step(number)
            check(loss, number)
            history.training_loss.append(loss)
            evaluate(number + 1)
            if time.monotonic() - last_saved > SECONDS_BETWEEN_CHECKPOINTS:
                save()
                last_saved = time.monotonic()
            on_step(number + 1, history)
        save()
