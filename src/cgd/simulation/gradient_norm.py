"""The step size of the program that the paper's authors published: divided by a running norm of each layer's gradient.

The program multiplies the gradient of a weight matrix by lr/√(s + 10⁻³), where s is a running mean of the squared norms
of its gradients: s ← 0.9·s + 0.1·‖G‖², the sum over all elements of the matrix. s begins at 1, and is set back to 1
after the first step and then after every 20 steps. So after a reset the step size is at most 1.05·lr; while gradients
are small, it grows to 2.9·lr in 20 steps.

That is the formula. The program as published computes it in every step and appends the result to a list, of which it
always reads the first entries. So all its steps have the size of the first one, lr/√(0.9 + 0.1·‖G₁‖² + 10⁻³).
`first_only` gives this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cgd.errors import InputError

if TYPE_CHECKING:
    import torch

    from cgd.optim.displacement import ParameterState


@dataclass(frozen=True)
class GradientNormRule:
    """Gradient descent with a step size for each parameter that is divided by a running norm of its gradients.

    For simulations: no optimiser of real participants uses it.

    Attributes:
        lr: step size before the division.
        decay: part of the running mean that each step keeps, the γ of the published program.
        eps: number that is added to the running mean of the squared norms.
        period: number of steps after which the running mean is set back to 1.
        first_only: divide by the value of the first step in all steps.
    """

    scales_with_gradient: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    lr: float
    decay: float = 0.9
    eps: float = 1e-3
    period: int = 20
    first_only: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf:
            raise InputError(f"lr is {self.lr}; it must be a finite number, at least 0")
        if not 0 <= self.decay < 1 or not 0 < self.eps < math.inf:
            raise InputError(f"decay is {self.decay} and eps is {self.eps}; decay must be in [0, 1) and eps above 0")
        if self.period < 1:
            raise InputError(f"period is {self.period}; it must be at least 1, 20 is that of the paper's authors")

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move the `displacement` of one parameter in place; `state` holds the running mean and the divisor."""
        steps = state.get("steps", 0)
        if not (self.first_only and steps):
            # The published program resets after steps 0, 20, 40, …: its first period has one step.
            before = 1.0 if steps % self.period == 1 % self.period else state.get("square", 1.0)
            square = state["square"] = self.decay * before + (1.0 - self.decay) * _squared_norm(gradient_sum)
            state["divisor"] = math.sqrt(square + self.eps)
        state["steps"] = steps + 1
        displacement -= gradient_sum * (self.lr / state["divisor"])


def _squared_norm(values: torch.Tensor) -> float:
    """Return the sum of the squares, with the same bits on every processor and for any number of threads.

    The order of the additions in torch's sums depends on both. Here the second half is added to the first, element by
    element, until one number is left.
    """
    terms = values.reshape(-1).double()
    terms = terms * terms
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        rest = terms[half:]
        terms = terms[:half].clone()
        terms[: len(rest)] += rest
    return float(terms[0])
