"""Normalisation of records for private training: a clipped gradient then says more about a record than its scale.

- "unit": each record is scaled to norm 1, by its own features alone.
- "centred": the records of norm 1 are centred by their mean, and scaled to norm 1 again. In a private run, the mean is
  opened with noise and charged: one vector (x, 1) of every record, so that the sum of all changes by at most √2 with a
  record. It has the part `statistics_share` of the budget; in dp-sgd, 0.02. Other runs use the exact mean.

Both keep the magnitudes of features from being clipped away. No statistic of private records is used except through
noise that is accounted for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from cgd.experiments import privacy_table
from cgd.simulation.private_engine import NoisySum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.dp.accountant import Spent
    from cgd.dp.mechanism import NoisyEncoding
    from cgd.dp.settings import PrivacySettings
    from cgd.experiments.datasets import Dataset
    from cgd.experiments.spec import RunSpec
    from cgd.optim.grid import Block, Cell

STATISTICS_OPENING = -1
"""The number of the opening of the mean; those of a simulation are counted from 0."""
ROUNDING_MARGIN = 1e-6


def normalise(data: Dataset, spec: RunSpec) -> Dataset:
    """Return the data with records normalised as the run demands."""
    if spec.normalise == "none":
        return data
    x, held_out_x = (functional.normalize(each.flatten(1)) for each in (data.x, data.held_out_x))
    if spec.normalise == "centred":
        mean = _mean(x, spec)
        x, held_out_x = (functional.normalize(each - mean) for each in (x, held_out_x))
    return replace(data, x=x, held_out_x=held_out_x)


def mean_encoding(spec: RunSpec, privacy: PrivacySettings, features: int) -> NoisyEncoding:
    """Return the encoding of the sum of all records and of their number, which gives the mean."""
    members, colluders = (spec.rows, privacy.colluders) if spec.method == "cgd" else (1, 0)
    clip = math.sqrt(2) * (1 + ROUNDING_MARGIN)
    return replace(privacy, colluders=colluders).sum_encoding(members, features + 1, clip, privacy.statistics_mu)


def mean_mu(spec: RunSpec, privacy: PrivacySettings, blocks: Mapping[Cell, Block]) -> float:
    """Return μ of the mean of centred records."""
    features = sum(block.x.shape[1] for cell, block in blocks.items() if cell.row == 0)
    return mean_encoding(spec, privacy, features).mu


def spent_with_mean(spec: RunSpec, privacy: PrivacySettings, blocks: Mapping[Cell, Block], training: Spent) -> Spent:
    """Return what was spent by a training, and by the mean of all records if it was opened."""
    if spec.normalise != "centred":
        return training
    budget = privacy.budget()
    budget.charge(mean_mu(spec, privacy, blocks) ** 2, "the mean")
    budget.charge(training.mu**2, "the training")
    return budget.spent()._replace(openings=1 + training.openings)


def _mean(x: torch.Tensor, spec: RunSpec) -> torch.Tensor:
    total = np.append(x.sum(dim=0, dtype=torch.float64).numpy(), float(len(x)))
    privacy = privacy_table.of_statistics(spec)
    if privacy is not None:
        encoding = mean_encoding(spec, privacy, x.shape[1])
        noisy_sum = NoisySum(encoding, spec.seed, STATISTICS_OPENING, in_ring=False)
        noisy_sum.add(total)
        total = noisy_sum.total()
    return torch.from_numpy(total[:-1] / max(1.0, total[-1])).float()
