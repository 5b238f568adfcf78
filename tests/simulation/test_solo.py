"""A single participant without peers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cgd
from cgd.errors import ClosedError, RangeError
from cgd.local import solo_peers


def test_sum_of_a_single_participant_is_rounded_to_fixed_point() -> None:
    peers = solo_peers()
    assert peers.members == ("alone",)
    assert peers.sum(np.array([2**60, -3])).tolist() == [2**60, -3]
    (value,) = peers.sum(np.array([1 / 3]), weight=1.0).tolist()
    assert value != 1 / 3
    assert abs(value - 1 / 3) <= peers.resolution / 2
    with pytest.raises(RangeError):
        peers.sum(np.array([17.0]))
    peers.close()
    with pytest.raises(ClosedError):
        peers.sum(np.array([1.0]))


def test_solo_training_equals_plain_torch() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)
    confined, plain = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    peers = solo_peers(b"s" * 32, ring_bits=64)
    cgd.confine(confined, seed=peers.seed, start="zeros")
    plain.load_state_dict(confined.state_dict())
    for model, optimizer in (
        (confined, cgd.ConfinedSGD(confined.parameters(), lr=0.1, peers=peers, samples=20)),
        (plain, torch.optim.SGD(plain.parameters(), lr=0.1)),
    ):
        for _ in range(30):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    for ours, theirs in zip(confined.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=30 * 0.1 * 8 * torch.finfo(torch.float32).eps)
