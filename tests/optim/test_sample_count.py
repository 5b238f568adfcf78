"""The count of samples: wrong, overflowing and outdated counts are rejected."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import cgd
from cgd.errors import CGDError, InputError, PeerAbortedError, WeightError
from cgd.secagg.journal import OptimizerState
from cgd.transport.driver import NoRecovery

if TYPE_CHECKING:
    from cgd.peers import Peers

SAMPLES = [20, 2_000_000]


def train(peers: Peers, samples: int, displacements: list[torch.Tensor]) -> CGDError | None:
    """Take two steps, and return the error if one fails."""
    torch.manual_seed(samples % 1000)
    with cgd.public_seed(0):
        model = torch.nn.Linear(4, 2)
    cgd.confine(model, seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=samples)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(20, 4)).pow(2).mean().backward()
            optimizer.step()
            displacements.append(optimizer.displacement())
    except CGDError as error:
        return error
    return None


@pytest.mark.parametrize("claimed", [2**40, 2**50, 2**61])
def test_count_that_rounds_a_small_members_gradient_to_zero_is_rejected_before_sharing(claimed: int) -> None:
    """Otherwise the sum would be the large member's gradient alone."""
    displacements: list[torch.Tensor] = []
    with cgd.local_peers(3) as members:
        small, large, dishonest = members.run(
            lambda peers, samples: train(peers, samples, displacements), [*SAMPLES, claimed]
        )
    assert isinstance(small, InputError)
    assert "all our values round to zero in 32 bits" in str(small)
    assert isinstance(large, PeerAbortedError | InputError)
    assert isinstance(dishonest, PeerAbortedError | InputError)
    assert not displacements


class StoredState(NoRecovery):
    """Recovery from a state that another member has stored, with a forged number of samples."""

    def __init__(self, total_samples: int) -> None:
        counts = torch.tensor([total_samples, 0, 0, 0, 0])
        self.state = OptimizerState(1, safetensors.torch.save({"counts": counts, "0.displacement": torch.zeros(4)}))

    def load(self, slot: int) -> OptimizerState | None:
        return self.state


def errors_after_restoring(total_samples: int, samples: list[int], gradients: list[float]) -> list[CGDError | None]:
    """Let three members restore the same state and take two steps with these gradients; return their errors."""

    def work(peers: Peers, own: int, gradient: float) -> CGDError | None:
        peers.recovery = StoredState(total_samples)
        training = ScriptedGradients(peers, own)
        training.step(0.0)  # it is part of the stored state
        try:
            training.step(gradient)
            training.step(1e-7)
        except CGDError as error:
            return error
        return None

    with cgd.local_peers(3) as members:
        return members.run(work, samples, gradients)


def test_restored_count_that_rounds_a_small_members_gradient_to_zero_is_rejected_before_sharing() -> None:
    """The third member, which has stored the state, claims nearly all samples."""
    total = 10**9
    small, *others = errors_after_restoring(total, [1, 1000, total - 1001], [0.7, 0.3, 0.0])
    assert isinstance(small, InputError)
    assert "all our values round to zero in 32 bits" in str(small)
    assert all(isinstance(error, PeerAbortedError | InputError) for error in others)


def test_gradient_of_a_small_member_may_vanish_once_its_restored_weight_was_accepted() -> None:
    assert errors_after_restoring(436, [6, 230, 200], [1.0, 1.0, 1.0]) == [None] * 3


@pytest.mark.parametrize("total", [-5, 0, 1, 431])
def test_restored_count_below_our_own_samples_is_rejected(total: int) -> None:
    errors = errors_after_restoring(total, [430, 430, 430], [1.0, 1.0, 1.0])
    assert any(isinstance(error, WeightError) for error in errors)
    assert all(isinstance(error, WeightError | PeerAbortedError) for error in errors)


def test_count_that_overflows_is_rejected() -> None:
    def train_or_overflow(peers: Peers, samples: int) -> CGDError | None:
        if peers.me != peers.members[2]:
            return train(peers, samples, [])
        addend = np.zeros(4, dtype=np.int64)
        addend[0] = -(10**9)
        peers.sum(addend)
        return None

    with cgd.local_peers(3) as members:
        small, large, _ = members.run(train_or_overflow, [*SAMPLES, 1])
    assert isinstance(small, WeightError)
    assert isinstance(large, WeightError)
    assert "a member entered a value that is not a number of samples" in str(small)


def test_members_of_very_different_sizes_are_accepted() -> None:
    displacements: list[torch.Tensor] = []
    with cgd.local_peers(3) as members:
        errors = members.run(lambda peers, samples: train(peers, samples, displacements), [20, 2_000, 200_000])
    assert errors == [None] * 3
    assert len(displacements) == 6


def test_small_values_are_accepted() -> None:
    """Near a minimum all gradients are small, although every weight is honest."""
    tiny = np.full(5, 1e-12)
    with cgd.local_peers(3) as members:
        weights = [1 / 64, 31 / 64, 32 / 64]
        totals = members.run(lambda peers, weight: peers.sum(tiny, weight=weight), weights)
    assert not np.asarray(totals).any()


class ScriptedGradients:
    """Steps of one parameter with given gradients, and the error of the first step that fails."""

    def __init__(self, peers: Peers, samples: int) -> None:
        self.parameter = nn.Parameter(torch.zeros(4))
        self.optimizer = cgd.ConfinedSGD([self.parameter], 0.5, peers=peers, samples=samples)

    def step(self, gradient: float) -> None:
        self.parameter.grad = torch.full((4,), gradient)
        self.optimizer.step()


def test_gradient_of_a_small_member_may_vanish_once_its_weight_was_accepted() -> None:
    """Near a minimum, a small member's weighted gradient rounds to zero although all counts are true."""

    def work(peers: Peers, samples: int) -> dict[str, Any]:
        training = ScriptedGradients(peers, samples)
        for gradient in (1.0, 1e-7, 1e-7):
            training.step(gradient)
        return copy.deepcopy(training.optimizer.state_dict())

    def restarted(peers: Peers, samples: int, state: dict[str, Any]) -> int:
        training = ScriptedGradients(peers, samples)
        training.optimizer.load_state_dict(state)
        training.step(1e-7)
        return int(training.optimizer.param_groups[0]["steps"])

    with cgd.local_peers(3) as members:
        states = members.run(work, [6, 230, 200])
    with cgd.local_peers(3) as members:
        assert members.run(restarted, [6, 230, 200], states) == [4, 4, 4]


def test_weight_that_was_rejected_is_rejected_again() -> None:
    def work(peers: Peers, samples: int) -> list[CGDError]:
        training, errors = ScriptedGradients(peers, samples), []
        for _ in range(2):
            try:
                training.step(1.0)
            except CGDError as error:
                errors.append(error)
        return errors

    with cgd.local_peers(3) as members:
        small, *_ = members.run(work, [*SAMPLES, 2**50])
    assert ["all our values round to zero" in str(error) for error in small] == [True, True]


def state_dicts_after_two_steps(count: int, samples: int = 4) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    def work(peers: Peers) -> tuple[dict[str, Any], torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = cgd.ConfinedSGD([parameter], 0.5, peers=peers, samples=samples)
        for _ in range(2):
            parameter.grad = torch.ones(2)
            optimizer.step()
        return copy.deepcopy(optimizer.state_dict()), optimizer.displacement()

    with cgd.local_peers(count) as members:
        states, displacements = zip(*members.run(work), strict=True)
    return list(states), list(displacements)


def resume(count: int, states: list[dict[str, Any]], samples: list[int], *, recount: bool) -> list[float | str]:
    """Return the displacement of each of `count` members after one more step, or its error."""

    def work(peers: Peers, state: dict[str, Any], own: int) -> float | str:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = cgd.ConfinedSGD([parameter], 0.5, peers=peers, samples=own)
        optimizer.load_state_dict(state)
        if recount:
            optimizer.recount()
        parameter.grad = torch.ones(2)
        try:
            optimizer.step()
        except CGDError as error:
            return f"{type(error).__name__}: {error}"
        return float(optimizer.displacement()[0])

    with cgd.local_peers(count) as members:
        return members.run(work, states, samples)


def test_repeating_a_step_with_fewer_members_is_rejected() -> None:
    """Otherwise the difference of the two sums would be the gradient of the missing member."""
    states, _ = state_dicts_after_two_steps(4)
    for error in resume(3, states[:3], [4] * 3, recount=False):
        assert "repeating a step with other members would reveal a member's gradient" in str(error)
    assert resume(3, states[:3], [4] * 3, recount=True) == [-1.5] * 3


def test_resuming_with_a_different_number_of_samples_is_rejected() -> None:
    states, _ = state_dicts_after_two_steps(3)
    errors = resume(3, states, [4, 4, 40], recount=False)
    assert "samples is 40 and was 4" in str(errors[2])
    assert all("participant-3: aborted sum" in str(each) for each in errors[:2])
    assert resume(3, states, [4, 4, 40], recount=True) == [-1.5] * 3


def test_wrong_count_is_detected_by_all_members() -> None:
    states, displacements = state_dicts_after_two_steps(3)
    forged = copy.deepcopy(states)
    forged[1]["param_groups"][0]["samples"] = 10
    errors = resume(3, forged, [4, 10, 4], recount=False)
    assert all("WeightError: the members' weights sum to 1.5 instead of 1" in str(each) for each in errors)
    assert float(displacements[0][0]) == -1.0


@pytest.mark.parametrize("units", [2.0, 3.0])
@pytest.mark.parametrize("claimed", [23, 2**20])
def test_count_that_rounds_a_small_gradient_to_zero_is_rejected_before_sharing(units: float, claimed: int) -> None:
    """With equal weights, the gradient would be a few units of the ring: more than its rounding error."""
    displacements: list[torch.Tensor] = []

    def work(peers: Peers, samples: int) -> CGDError | None:
        gradient = 3 * units * peers.resolution if samples == 1 else 1.0
        training = ScriptedGradients(peers, samples)
        try:
            training.step(gradient)
        except CGDError as error:
            return error
        displacements.append(training.optimizer.displacement())
        return None

    with cgd.local_peers(3) as members:
        small, *_ = members.run(work, [1, 2, claimed - 3])
    assert isinstance(small, InputError)
    assert not displacements
