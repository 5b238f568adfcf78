"""Ordinary training in one place: on everybody's data (centralised), or on one participant's (local)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def train_plainly(
    model: torch.nn.Module,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    steps: int,
    lr: float,
    after_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Train a model by full-batch gradient descent.

    Args:
        model: is trained in place.
        loss_function: of predictions and labels, a mean over the samples.
        x: the samples.
        y: their labels.
        steps: how many.
        lr: the step size.
        after_step: is called with the number of each step done, from 1.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_function(model(x), y).backward()
        optimizer.step()
        after_step(step)
