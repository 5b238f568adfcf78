"""The vectors by which a colluder moves the displacement of everybody to a target.

The rule that moves the displacement is known, and so is its state, because it follows from opened sums. The colluder
computes the sum that would move to the target in one step, and enters as much of it as the bound allows. It takes its
own vectors for the whole sum: they are far larger than gradients, and the next step corrects the difference.

Adam moves a weight by about its learning rate in a step, however large the sum is. So the colluder enters the largest
number until the target is near. After that, the large squares in Adam's state make the gradients of the others
negligible for hundreds of steps, and the colluder alone decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cgd.optim.displacement import AdamRule, SGDRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.optim.displacement import UpdateRule

# The denominator of Adam depends on the sum itself; a few repetitions find both.
ADAM_ITERATIONS = 4


@dataclass
class Steering:
    """A colluder that moves the displacement.

    Attributes:
        rule: returns the rule of a round.
        limit: the largest magnitude that it may enter.
    """

    rule: Callable[[int], UpdateRule]
    limit: float
    _state: dict[str, Any] = field(default_factory=dict)

    def vector(self, number: int, distance: torch.Tensor) -> torch.Tensor:
        """Return the vector of a round, given the distance of the displacement from the target."""
        rule = self.rule(number)
        found = _needed(rule, distance, self._state, self.limit).clamp(-self.limit, self.limit)
        rule.move(torch.zeros_like(found), found, self._state)
        return found


def speed(rule: UpdateRule, limit: float) -> float:
    """Return how far a weight moves in a step at most, if the same number is entered again and again."""
    if isinstance(rule, AdamRule):
        return rule.lr
    momentum = rule.momentum if isinstance(rule, SGDRule) else 0.0
    return _lr(rule) * limit / (1 - momentum)


def _needed(rule: UpdateRule, distance: torch.Tensor, state: dict[str, Any], limit: float) -> torch.Tensor:
    """Return the sum that moves by a distance in one step."""
    if isinstance(rule, AdamRule):
        return _needed_by_adam(rule, distance, state, limit)
    needed = distance / _lr(rule)
    if "momentum_buffer" in state and isinstance(rule, SGDRule):
        needed = needed - rule.momentum * state["momentum_buffer"]
    return needed


def _needed_by_adam(rule: AdamRule, distance: torch.Tensor, state: dict[str, Any], limit: float) -> torch.Tensor:
    beta_1, beta_2 = rule.betas
    power_1, power_2 = state.get("powers", (1.0, 1.0))
    mean, square = (state.get(name, torch.zeros_like(distance)) for name in ("mean", "square"))
    scale = rule.lr / (1 - power_1 * beta_1) * math.sqrt(1 - power_2 * beta_2)
    needed = limit * distance.sign()
    for _ in range(ADAM_ITERATIONS):
        root = torch.sqrt(square * beta_2 + needed.square() * (1 - beta_2)) + rule.eps
        needed = ((distance * root / scale - beta_1 * mean) / (1 - beta_1)).clamp(-limit, limit)
    return needed


def _lr(rule: UpdateRule) -> float:
    """Return the learning rate of gradient descent, which is above zero but for the end of a schedule."""
    return max(getattr(rule, "lr", 0.0), 1e-12)
