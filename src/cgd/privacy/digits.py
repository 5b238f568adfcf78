"""Small colonies on handwritten digits, to show an attack on: 8 × 8 pixels in 0…1, written by 43 people."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from cgd.privacy.schemes import Colony

if TYPE_CHECKING:
    from cgd.privacy.schemes import Sample

PIXELS, CLASSES = 64, 10


def digits(seed: int = 0) -> Sample:
    """All 1797 digits and their labels, in an order of the seed."""
    x, y = _embedded()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return x[order], y[order]


def digit_colony(
    records: int,
    *,
    honest: int = 2,
    rounds: int = 1,
    hidden: int = 256,
    smooth: bool = False,
    lr: float = 0.1,
    delta: float = 0.1,
    seed: int = 0,
) -> Colony:
    """A curious participant beside honest ones, who train a network with one hidden layer.

    Args:
        records: how many each honest participant has; the curious one has as many as all honest ones, or 20.
        honest: how many are honest.
        rounds: how many steps.
        hidden: units of the hidden layer; the paper has 256.
        smooth: tanh units instead of ReLU.
        lr: the step size.
        delta: δ of the origins.
        seed: decides everything.
    """
    x, y = digits(seed)
    sizes = [max(20, honest * records), *[records] * honest]
    parts = zip(x.split([*sizes, len(y) - sum(sizes)]), y.split([*sizes, len(y) - sum(sizes)]), strict=True)
    names = ["curious", *(f"honest-{place}" for place in range(1, honest + 1))]

    def build_model() -> torch.nn.Module:
        activation = torch.nn.Tanh() if smooth else torch.nn.ReLU()
        return torch.nn.Sequential(torch.nn.Linear(PIXELS, hidden), activation, torch.nn.Linear(hidden, CLASSES))

    data = dict(zip(names, parts, strict=False))
    return Colony(data, build_model, ["curious"], rounds=rounds, lr=lr, delta=delta, seed=seed)


@cache
def _embedded() -> Sample:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float() / 16, torch.from_numpy(y).long()
