"""The displacement of a confined model, and the update rules that move it (paper, Alg. 1, last line).

A confined model is `origin + displacement`. The origin is private. The displacement is the same at every member: an
update rule computes it from opened sums alone, so that every model descends by the same α_k·Σg.

To compute the same *bits* on every processor, each operation here rounds once. For this reason no rule uses
`add_(alpha=)`, `addcmul_` or `lerp_`: a processor may fuse their multiplication and addition into one rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    ParameterState = dict[str, Any]


class UpdateRule(Protocol):
    """One step of the displacement, given an opened sum.

    Attributes:
        scales_with_gradient: True if a gradient twice as large makes a step twice as large.
    """

    scales_with_gradient: ClassVar[bool]

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move `displacement` in place; `state` holds the rule's buffers between steps."""


@dataclass(frozen=True)
class SGDRule:
    """Gradient descent, with optional momentum: v ← momentum·v + G, D ← D − lr·v."""

    scales_with_gradient: ClassVar[bool] = True

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum is {self.momentum}; it must be at least 0 and below 1")

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move `displacement` in place by one step; `state` holds the momentum buffer."""
        velocity = gradient_sum
        if self.momentum != 0:
            previous = state.get("momentum_buffer")
            velocity = gradient_sum.clone() if previous is None else previous * self.momentum + gradient_sum
            state["momentum_buffer"] = velocity
        displacement -= velocity * self.lr


@dataclass(frozen=True)
class AdamRule:
    """Adam (Kingma and Ba, 2015) on the opened sums."""

    scales_with_gradient: ClassVar[bool] = False

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        if not all(0 <= beta < 1 for beta in self.betas) or not 0 < self.eps < math.inf:
            raise InputError(f"betas are {self.betas} and eps is {self.eps}; betas must be in [0, 1) and eps above 0")

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move `displacement` in place by one step; `state` holds the two moments."""
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
        denominator = torch.sqrt(square * (1.0 / (1.0 - power_2))) + self.eps
        displacement -= mean * (1.0 / (1.0 - power_1)) / denominator * self.lr


def working_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type in which a parameter is moved: at least single precision, so that small steps are not lost."""
    return torch.promote_types(parameter.dtype, torch.float32)


def initial_state(parameter: torch.Tensor) -> ParameterState:
    """Return the state of a parameter before its first step: its value becomes the origin."""
    origin = parameter.detach().to(working_dtype(parameter), copy=True)
    return {"origin": origin, "displacement": torch.zeros_like(origin)}


def place(parameter: torch.Tensor, origin: torch.Tensor, displacement: torch.Tensor) -> None:
    """Set a parameter to origin + displacement. No other code of a training writes private weights."""
    parameter.copy_(origin + displacement)


def reject_weight_decay(weight_decay: float) -> None:
    """Reject weight decay, the only option of torch's optimisers that reads the weights.

    Raises:
        InputError: it is not zero.
    """
    if weight_decay != 0:
        raise InputError(
            f"weight_decay is {weight_decay}; it would pull every member by its own private weights, and the members "
            "would no longer move together. Leave it at 0; stop early or use a smaller model instead"
        )


def _check_lr(lr: float) -> None:
    if not 0 <= lr < math.inf:
        raise InputError(f"lr is {lr}; it must be a finite number, at least 0")
