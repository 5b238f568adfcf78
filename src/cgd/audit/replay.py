"""The displacement of a recorded run again, from its opened sums, by the rule that moved it: the same bits.

A recording may lack the total of a step: its participant was killed before it had it. When it came back, the members
gave it the state after that step. So the replay goes on from there, and the missing total is told from the two states
that it lies between, up to the rounding of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.lr_scheduler import inverse_square

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.federation.config import Training


@dataclass(repr=False)
class Replayed:
    """What a replay found.

    Attributes:
        displacements: D after so many steps, flat; 0 steps are zeros.
        final: the last of them.
        inferred: totals that were not recorded, and follow from what came before and after.
    """

    final: torch.Tensor
    displacements: dict[int, torch.Tensor] = field(default_factory=dict)
    inferred: dict[int, torch.Tensor] = field(default_factory=dict)


def replay(
    training: Training,
    parameters: int,
    totals: Mapping[int, torch.Tensor],
    states: Mapping[int, Mapping[str, torch.Tensor]],
) -> Replayed:
    """Move the displacement by the totals.

    Args:
        training: by which rule.
        parameters: how many there are.
        totals: by the number of the step, from 0; some may be missing.
        states: the displacement and what the rule remembers after so many steps, where that is known.

    Raises:
        InputError: a state is not what the totals lead to.
    """
    found = Replayed(torch.zeros(parameters))
    displacement, memory, known = torch.zeros(parameters), dict[str, Any](), 0
    for step in range(max((*totals, *states), default=-1) + 2):
        if step in states:
            after = _memory(states[step])
            if known == step and not torch.equal(after["displacement"], displacement):
                raise InputError(
                    f"the displacement before step {step} is not what the recorded sums lead to; the recording is "
                    "damaged, or of two runs: record anew"
                )
            if known == step - 1:
                found.inferred[known] = _told(_rule(training, known), displacement, memory, after)
            displacement, memory, known = after.pop("displacement").clone(), after, step
        if known != step:
            continue
        found.final = found.displacements[step] = displacement.clone()
        if step in totals:
            _rule(training, step).move(displacement, totals[step], memory)
            known += 1
    return found


def _rule(training: Training, step: int) -> SGDRule | AdamRule:
    """As `training.py` has it, with the step size of this step."""
    lr = training.lr * inverse_square(step, training.mu, training.steps) if training.mu else training.lr
    return AdamRule(lr) if training.optimizer == "adam" else SGDRule(lr, training.momentum)


def _memory(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    if "displacement" not in state:
        raise InputError("a state of the recording has no displacement; it is damaged: record anew")
    return {key: tuple(each.tolist()) if key == "powers" else each for key, each in state.items()}


def _told(
    rule: SGDRule | AdamRule, displacement: torch.Tensor, before: Mapping[str, Any], after: Mapping[str, Any]
) -> torch.Tensor:
    """The total by which a rule got from one state to the next."""
    if isinstance(rule, AdamRule):
        kept = rule.betas[0] * before["mean"].double() if before else 0.0
        total = (after["mean"].double() - kept) / (1 - rule.betas[0])
    elif rule.momentum:
        kept = rule.momentum * before["momentum_buffer"].double() if before else 0.0
        total = after["momentum_buffer"].double() - kept
    else:
        total = (displacement.double() - after["displacement"].double()) / rule.lr
    told: torch.Tensor = total.to(displacement.dtype)
    return told
