"""Small models, records and a step with clipped gradients, for tests of what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgd.optim.record_gradients import RecordGradients

if TYPE_CHECKING:
    from collections.abc import Callable

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def step(model: nn.Module, x: torch.Tensor = X, y: torch.Tensor = Y) -> torch.Tensor:
    clipping = RecordGradients(model, 1.0)
    try:
        nn.functional.cross_entropy(model(x), y).backward()
        return clipping.take().gradient
    finally:
        clipping.remove()


class Wrapped(nn.Module):
    """A model whose forward pass is a function of its modules and the input."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **modules: Any) -> None:
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)
