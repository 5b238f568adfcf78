"""The data that attacks are shown on: sets that come with scikit-learn, cut for a few participants.

Everything is drawn from a seed, so that an audit says the same twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.privacy.schemes import Sample

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
