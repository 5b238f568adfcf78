"""The data that attacks are shown on: sets that come with scikit-learn, cut for a few participants.

Everything is drawn from a seed, so that an audit says the same twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from cgd.audit.schemes import Scenario
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.audit.schemes import Sample

Name = Literal["breast-cancer", "diabetes", "digits"]


def samples(name: Name, seed: int = 0) -> Sample:
    """A whole set in random order: pixels in 0…1, other features and values to predict standardised."""
    from sklearn import datasets

    load = {"breast-cancer": "load_breast_cancer", "diabetes": "load_diabetes", "digits": "load_digits"}[name]
    x, y = (torch.from_numpy(each) for each in getattr(datasets, load)(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
    return x.float(), ((y - y.mean()) / y.std()).float().reshape(-1, 1) if y.is_floating_point() else y.long()


def dealt(whole: Sample, counts: Mapping[str, int]) -> tuple[dict[str, Sample], Sample]:
    """The first so many samples for each participant, and those that are left for nobody.

    Raises:
        InputError: there are not so many.
    """
    x, y = whole
    if sum(counts.values()) > len(x):
        raise InputError(f"{sum(counts.values())} samples are asked for, and there are {len(x)}; ask for fewer")
    given, start = {}, 0
    for name, count in counts.items():
        given[name] = x[start : start + count], y[start : start + count]
        start += count
    return given, (x[start:], y[start:])


def participants(honest: int, each: int, coalition: int = 2, own: int = 30) -> tuple[dict[str, int], tuple[str, ...]]:
    """How many samples everybody has, by name, and who colludes."""
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
    x, y = samples("digits", seed)
    sizes = [max(20, honest * records), *[records] * honest]
    parts = zip(x.split([*sizes, len(y) - sum(sizes)]), y.split([*sizes, len(y) - sum(sizes)]), strict=True)
    names = ["curious", *(f"honest-{place}" for place in range(1, honest + 1))]

    def build_model() -> torch.nn.Module:
        activation = torch.nn.Tanh() if smooth else torch.nn.ReLU()
        return torch.nn.Sequential(torch.nn.Linear(64, hidden), activation, torch.nn.Linear(hidden, 10))

    data = dict(zip(names, parts, strict=False))
    return Scenario(data, build_model, ["curious"], rounds=rounds, lr=lr, delta=delta, seed=seed)
