"""Small neural networks and data for the tests of simulations."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd import Cell, Grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd import Block

FEATURES, CLASSES = 12, 3


def fully_connected(
    *widths: int, bias: bool = True, activation: type[nn.Module] = nn.ReLU, dtype: torch.dtype = torch.float32
) -> Callable[[], nn.Sequential]:
    """Return a function that builds a network with these layer widths; the first is the number of features."""

    def build() -> nn.Sequential:
        layers: list[nn.Module] = []
        for wide_in, wide_out in itertools.pairwise(widths):
            layers += [nn.Linear(wide_in, wide_out, bias=bias, dtype=dtype), activation()]
        return nn.Sequential(*layers[:-1])

    return build


def samples(count: int = 60, *, sparse: bool = True, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features, many of them zero as in images, and classes that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    if sparse:
        x = x * (torch.rand(count, FEATURES, generator=generator) < 0.4)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    return x, (x @ teacher).argmax(dim=1)


def blocks(rows: int, columns: int = 1, count: int = 60) -> dict[Cell, Block]:
    return Grid(rows, columns).split(*samples(count))
