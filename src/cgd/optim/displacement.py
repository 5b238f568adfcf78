"""How the common displacement moves (paper, Alg. 1, last line).

All confined models descend by the same α_k·Σg, so a model is `origin + displacement`, and the displacement is the same
for everyone: it is made from opened sums alone. Any rule may drive it that reads nothing else.

To be the same *bits* for everyone, on any processor, every operation here rounds once. That is why nothing uses
`add_(alpha=)`, `addcmul_` or `lerp_`: a processor may fuse their multiplication and addition into one rounding, or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    OptimizerState = dict[str, Any]


class UpdateRule(Protocol):
    """One step of the displacement under an opened sum.

    Attributes:
        follows_scale: whether twice the gradient makes twice the step.
    """

    follows_scale: ClassVar[bool]

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: OptimizerState) -> None:
        """Move `displacement` in place; `state` keeps what the rule must remember from step to step."""


@dataclass(frozen=True)
class SGDRule:
    """Gradient descent, with momentum if asked for: v ← momentum·v + G, D ← D − lr·v."""

    follows_scale: ClassVar[bool] = True

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum is {self.momentum}; it must be at least 0 and below 1")

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: OptimizerState) -> None:
        """Move `displacement` in place by one step; `state` keeps the velocity."""
        velocity = gradient_sum
        if self.momentum != 0:
            before = state.get("momentum_buffer")
            velocity = gradient_sum.clone() if before is None else before * self.momentum + gradient_sum
            state["momentum_buffer"] = velocity
        displacement -= velocity * self.lr


@dataclass(frozen=True)
class AdamRule:
    """Adam (Kingma and Ba, 2015) on the opened sums."""

    follows_scale: ClassVar[bool] = False

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        if not all(0 <= beta < 1 for beta in self.betas) or not 0 < self.eps < math.inf:
            raise InputError(f"betas are {self.betas} and eps is {self.eps}; betas must be in [0, 1) and eps above 0")

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: OptimizerState) -> None:
        """Move `displacement` in place by one step; `state` keeps the two moments."""
        if "mean" not in state:
            state["mean"] = torch.zeros_like(displacement)
            state["square"] = torch.zeros_like(displacement)
            # β^k as a running product: pow() may differ in the last bit from one system to the next.
            state["powers"] = (1.0, 1.0)
        beta_1, beta_2 = self.betas
        power_1, power_2 = state["powers"]
        power_1, power_2 = state["powers"] = (power_1 * beta_1, power_2 * beta_2)
        mean = state["mean"] = state["mean"] * beta_1 + gradient_sum * (1.0 - beta_1)
        square = state["square"] = state["square"] * beta_2 + gradient_sum * gradient_sum * (1.0 - beta_2)
        size = torch.sqrt(square * (1.0 / (1.0 - power_2))) + self.eps
        displacement -= mean * (1.0 / (1.0 - power_1)) / size * self.lr


def _check_lr(lr: float) -> None:
    if not 0 <= lr < math.inf:
        raise InputError(f"lr is {lr}; it must be a finite number, at least 0")


def refuse_weight_decay(weight_decay: float) -> None:
    """The one option of torch's optimisers that looks at the weights.

    Raises:
        InputError: it is not zero.
    """
    if weight_decay != 0:
        raise InputError(
            f"weight_decay is {weight_decay}; it would pull every member by its own private weights, and the members "
            "would no longer move together. Leave it at 0; stop early or use a smaller model instead"
        )
