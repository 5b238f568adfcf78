"""A member may enter any number of samples. Nobody else's gradient may be read by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import cgd
from cgd.errors import CGDError, InputError, PeerAbortedError, WeightError

if TYPE_CHECKING:
    from cgd.peers import Peers

SAMPLES = [20, 2_000_000]


def train(peers: Peers, samples: int, sums: list[Any]) -> CGDError | None:
    torch.manual_seed(samples % 1000)
    model = torch.nn.Linear(4, 2)
    cgd.confine(model, seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=samples)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(20, 4)).pow(2).mean().backward()
            optimizer.step()
            sums.append(optimizer.displacement())
    except CGDError as error:
        return error
    return None


@pytest.mark.parametrize("claimed", [2**40, 2**50, 2**61])
def test_a_count_that_leaves_nothing_of_a_small_members_gradient_stops_it_before_it_shares(claimed: int) -> None:
    """Else the sums would be the large member's gradients."""
    sums: list[Any] = []
    with cgd.local_peers(3) as colony:
        small, large, liar = colony.run(lambda peers, samples: train(peers, samples, sums), [*SAMPLES, claimed])
    assert isinstance(small, InputError)
    assert "leaves nothing of our values in 32 bits" in str(small)
    assert isinstance(large, PeerAbortedError | InputError)
    assert isinstance(liar, PeerAbortedError | InputError)
    assert not sums


def test_a_count_that_wraps_around_is_refused() -> None:
    def enter(peers: Peers, samples: int) -> CGDError | None:
        if peers.me != peers.members[2]:
            return train(peers, samples, [])
        ballot = np.zeros(4, dtype=np.int64)
        ballot[0] = -(10**9)
        peers.sum(ballot)
        return None

    with cgd.local_peers(3) as colony:
        small, large, _ = colony.run(enter, [*SAMPLES, 1])
    assert isinstance(small, WeightError)
    assert isinstance(large, WeightError)
    assert "some member entered what is no number of samples" in str(small)


def test_uneven_members_are_not_refused() -> None:
    sums: list[Any] = []
    with cgd.local_peers(3) as colony:
        assert colony.run(lambda peers, samples: train(peers, samples, sums), [20, 2_000, 200_000]) == [None] * 3
    assert len(sums) == 6


def test_values_that_are_small_by_themselves_are_not_refused() -> None:
    """Near a minimum all gradients are small; that is nobody's doing."""
    tiny = np.full(5, 1e-12)
    with cgd.local_peers(3) as colony:
        weights = [1 / 64, 31 / 64, 32 / 64]
        totals = colony.run(lambda peers, weight: peers.sum(tiny, weight=weight), weights)
    assert not np.asarray(totals).any()
