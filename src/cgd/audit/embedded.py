"""Data for demonstrations of attacks: data sets of scikit-learn, split over a few participants.

All random choices follow from a seed, so an audit can be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from cgd.audit.scenario import Scenario
from cgd.errors import InputError
from cgd.experiments.datasets import read_bundled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.audit.scenario import Sample

Name = Literal["breast-cancer", "diabetes", "digits"]


def samples(name: Name, seed: int = 0) -> Sample:
    """Return a data set in random order: pixels in 0…1, other features and regression targets standardised."""
    x, y = (torch.from_numpy(each) for each in read_bundled(name))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
    return x.float(), ((y - y.mean()) / y.std()).float().reshape(-1, 1) if y.is_floating_point() else y.long()


def split(data: Sample, counts: Mapping[str, int]) -> tuple[dict[str, Sample], Sample]:
    """Split samples over participants, and return each one's and the remaining ones.

    Raises:
        InputError: there are fewer samples than the counts add up to.
    """
    x, y = data
    if sum(counts.values()) > len(x):
        raise InputError(f"{sum(counts.values())} samples are requested and there are {len(x)}; request fewer")
    parts, start = {}, 0
    for name, count in counts.items():
        parts[name] = x[start : start + count], y[start : start + count]
        start += count
    return parts, (x[start:], y[start:])


def participants(honest: int, each: int, coalition: int = 2, own: int = 30) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the number of samples of each participant by name, and the names of the colluders."""
    colluders = tuple(f"colluder-{place + 1}" for place in range(coalition))
    counts = {f"honest-{place + 1}": each for place in range(honest)} | dict.fromkeys(colluders, own)
    return counts, colluders


def digit_scenario(
    records: int,
    *,
    honest: int = 2,
    rounds: int = 1,
    hidden: int = 256,
    smooth: bool = False,
    lr: float = 0.1,
    delta: float = 0.1,
    seed: int = 0,
) -> Scenario:
    """Return a scenario of one colluder and some honest participants, who train a network with one hidden layer.

    Args:
        records: the number of each honest participant's records; the colluder has as many as all of them, at least 20.
        honest: the number of honest participants.
        rounds: the number of steps.
        hidden: the number of hidden units; 256 in the paper.
        smooth: use tanh units instead of ReLU.
        lr: the learning rate.
        delta: δ of the origins.
        seed: the seed of everything.
    """
    x, y = samples("digits", seed)
    sizes = [max(20, honest * records), *[records] * honest]
    parts = zip(x.split([*sizes, len(y) - sum(sizes)]), y.split([*sizes, len(y) - sum(sizes)]), strict=True)
    names = ["curious", *(f"honest-{place}" for place in range(1, honest + 1))]

    def build_model() -> torch.nn.Module:
        activation = torch.nn.Tanh() if smooth else torch.nn.ReLU()
        return torch.nn.Sequential(torch.nn.Linear(64, hidden), activation, torch.nn.Linear(hidden, 10))

    data = dict(zip(names, parts, strict=False))
    return Scenario(data, build_model, ["curious"], rounds=rounds, lr=lr, delta=delta, seed=seed)
