"""Sums over small batches are separated into single records, without any knowledge of the batches.

In hundreds of steps, the gradient of a record hardly changes, and it is in a sum or not. So the sums are mixtures of
sources that are on or off, nearly independently of each other, which independent component analysis separates.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.ndimage import uniform_filter1d
from sklearn.decomposition import FastICA
from torch import nn

import cgd
from cgd.audit.embedded import samples

RECORDS, UNITS, LR, STEPS = 40, 16, 0.1, 400
MIN_COSINE = 0.99  # no two digits of which one is not trained on came closer


def watch(batches: int) -> torch.Tensor:
    """Return the sums of a training of two honest members, as the third sees them."""
    x, y = samples("digits")

    def train(peers: cgd.Peers, first: int) -> torch.Tensor:
        with cgd.public_seed(7):
            model = nn.Sequential(nn.Linear(x.shape[1], UNITS), nn.Tanh(), nn.Linear(UNITS, 10))
        cgd.confine(model, delta=0.1, seed=peers.me.encode().ljust(32))
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=LR, peers=peers, samples=RECORDS)
        sampler = cgd.BatchSampler(optimizer, batches)
        own_x, own_y = x[first : first + RECORDS], y[first : first + RECORDS]
        sums, before = [], optimizer.displacement()
        for step in range(STEPS):
            if step % batches == 0:
                sampler.set_epoch(step // batches)
                order = iter(sampler)
            optimizer.zero_grad()
            batch = next(order)
            if peers.me != "cleo":
                nn.functional.cross_entropy(model(own_x[batch]), own_y[batch]).backward()
            optimizer.step()
            sums.append((before - optimizer.displacement()) / LR)
            before = optimizer.displacement()
        return torch.stack(sums)

    with cgd.local_peers(["ada", "bob", "cleo"]) as members:
        return members.run(train, [0, RECORDS, 0])[2]


def records_read(sums: torch.Tensor, batches: int) -> tuple[int, int]:
    """Return how many records of the honest members, and of nobody, are found in the sums."""
    x, _ = samples("digits")
    changes = sums.double().numpy()
    changes -= uniform_filter1d(changes, size=2 * batches, axis=0, mode="nearest")  # training moves the mean slowly
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence
        analysis = FastICA(2 * RECORDS - 2, whiten="unit-variance", max_iter=400, random_state=0).fit(changes)
    first_layer = analysis.mixing_.T[:, : UNITS * x.shape[1]].reshape(-1, UNITS, x.shape[1])
    directions = np.linalg.svd(first_layer, full_matrices=False)[2][:, 0]
    cosines = np.abs(directions @ nn.functional.normalize(x.double()).numpy().T).max(0)
    read, wrong = (int((each > MIN_COSINE).sum()) for each in (cosines[: 2 * RECORDS], cosines[2 * RECORDS :]))
    return read, wrong


@pytest.mark.slow
def test_records_are_read_from_sums_over_small_batches_that_nobody_else_knows() -> None:
    """Without ReLU units, by watching 40 epochs of ten batches."""
    read, wrong = records_read(watch(10), 10)
    assert read >= 10  # of 80; 16 to 20 in three trainings
    assert wrong == 0


@pytest.mark.slow
def test_records_are_not_read_in_this_way_from_sums_over_all_records() -> None:
    assert records_read(watch(1), 1) == (0, 0)
