"""A small neural network, its data, and the optimisers under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd import ConfinedAdam, ConfinedSGD

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd import ConfinedOptimizer

mse = nn.functional.mse_loss


class Network(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=dtype)
        self.last = nn.Linear(4, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x).tanh())
        return output


def data(seed: int, samples: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=dtype)
    return x, x.sum(dim=1, keepdim=True).tanh()


def descend(optimizer: torch.optim.Optimizer, model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()


makers: dict[str, Callable[..., ConfinedOptimizer]] = {
    "sgd": lambda params, **more: ConfinedSGD(params, 0.2, **more),
    "momentum": lambda params, **more: ConfinedSGD(params, 0.2, momentum=0.9, **more),
    "nesterov": lambda params, **more: ConfinedSGD(params, 0.2, momentum=0.9, nesterov=True, **more),
    "adam": lambda params, **more: ConfinedAdam(params, 0.01, **more),
    "amsgrad": lambda params, **more: ConfinedAdam(params, 0.01, betas=(0.5, 0.6), amsgrad=True, **more),
}
plain: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.2),
    "momentum": lambda params: torch.optim.SGD(params, 0.2, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, 0.2, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, 0.01, betas=(0.5, 0.6), amsgrad=True),
}
