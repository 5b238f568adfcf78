"""Compute the displacement of every step of a trace from the opened sums, bit for bit, by the rule of the optimiser.

A trace may lack the total of a step, if its participant was killed before it received the total. After the restart the
members sent it the state after that step. The replay continues from there, and computes the missing total from the two
states around it, up to their rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.lr_scheduler import inverse_square_factor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.federation.config import Training


@dataclass(repr=False)
class Replay:
    """The result of a replay.

    Attributes:
        final: the last displacement, with all sums.
        displacements: the displacement after each number of steps, flat; zeros after 0 steps. With a delay, it includes
            the sums of all these steps but the last ones, and so is that of the gradients of the next step.
        inferred: totals that were not recorded, computed from the states around them.
    """

    final: torch.Tensor
    displacements: dict[int, torch.Tensor] = field(default_factory=dict)
    inferred: dict[int, torch.Tensor] = field(default_factory=dict)

    def from_start(self, start: torch.Tensor) -> Replay:
        """Return it with the public start added to the displacements, which is what all models have in common."""
        moved = {step: start + each for step, each in self.displacements.items()}
        return Replay(start + self.final, moved, self.inferred)


def replay(
    training: Training,
    parameters: int,
    totals: Mapping[int, torch.Tensor],
    states: Mapping[int, Mapping[str, torch.Tensor]],
) -> Replay:
    """Move the displacement by the totals.

    Args:
        training: the settings of the optimiser.
        parameters: the number of parameters.
        totals: the opened sums by the number of the step, from 0; some may be missing.
        states: the displacement and the state of the optimiser after some numbers of sums.

    Raises:
        InputError: a state does not follow from the totals.
    """
    found = Replay(torch.zeros(parameters))
    displacement, state, known = torch.zeros(parameters), dict[str, Any](), 0
    # The steps at which anything is known; between them there may be millions, by the numbers in the files' names.
    for step in sorted({0, *totals, *(each + 1 for each in totals), *states}):
        if step in states:
            after = _parse_state(states[step])
            if known == step and not torch.equal(after["displacement"], displacement):
                raise InputError(
                    f"the displacement before step {step} does not follow from the recorded sums; the trace is "
                    "damaged, or of two runs: record again"
                )
            if known == step - 1:
                found.inferred[known] = _infer_total(update_rule(training, known), displacement, state, after)
            displacement, state, known = after.pop("displacement").clone(), after, step
        if known != step:
            continue
        found.final = found.displacements[step] = displacement.clone()
        if step in totals:
            update_rule(training, step).move(displacement, totals[step], state)
            known += 1
    if training.delay:
        found.displacements = _delayed(found.displacements, training.delay)
    return found


def _delayed(moved: Mapping[int, torch.Tensor], delay: int) -> dict[int, torch.Tensor]:
    """Return the displacement before each step, given that after each number of sums.

    The gradients of the first steps are all computed before the displacement moves.
    """
    before = dict.fromkeys(range(delay), moved[0]) if 0 in moved else {}
    return before | {sums + delay: each for sums, each in moved.items()}


def update_rule(training: Training, step: int) -> SGDRule | AdamRule:
    """Return the rule of a step, with its learning rate, as in `cgd.tabular.training`."""
    lr = training.lr * inverse_square_factor(step, training.mu, training.steps) if training.mu else training.lr
    return AdamRule(lr) if training.optimizer == "adam" else SGDRule(lr, training.momentum)


def _parse_state(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    if "displacement" not in state:
        raise InputError("a state of the trace has no displacement; it is damaged: record again")
    return {key: tuple(each.tolist()) if key == "powers" else each for key, each in state.items()}


def _infer_total(
    rule: SGDRule | AdamRule, displacement: torch.Tensor, before: Mapping[str, Any], after: Mapping[str, Any]
) -> torch.Tensor:
    """Return the total by which a rule moved from one state to the next."""
    if isinstance(rule, AdamRule):
        decayed = rule.betas[0] * before["mean"].double() if before else 0.0
        total = (after["mean"].double() - decayed) / (1 - rule.betas[0])
    elif rule.momentum:
        decayed = rule.momentum * before["momentum_buffer"].double() if before else 0.0
        total = after["momentum_buffer"].double() - decayed
    else:
        total = (displacement.double() - after["displacement"].double()) / rule.lr
    inferred: torch.Tensor = total.to(displacement.dtype)
    return inferred
