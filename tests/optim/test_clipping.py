"""Clipping of opened sums: the norm is exact, the same at all members, and over all parameters of one sum."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cgd import ConfinedAdam, ConfinedSGD, InputError, Peers, SettingsError, local_peers
from cgd.optim import clipping

if TYPE_CHECKING:
    from cgd import ConfinedOptimizer


@given(st.lists(st.floats(width=32, min_value=-16, max_value=16), min_size=1, max_size=30), st.integers(1, 7))
def test_norm_is_the_rounded_root_of_the_rounded_exact_sum(values: list[float], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "CHUNK", chunk)
        found = clipping.norm(torch.tensor(values, dtype=torch.float32))
    assert found == math.sqrt(float(sum(Fraction(value) ** 2 for value in values)))


def test_norm_does_not_depend_on_the_order() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 1, 50_000)
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(2))]
    assert clipping.norm(values) == clipping.norm(shuffled)
    sums = {float(part.square().sum()) for part in (values, shuffled, values.flip(0))}
    assert len(sums) > 1  # torch's sum depends on it


def one_step(optimizer: ConfinedOptimizer, *gradients: float) -> list[float]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor([gradient])
    optimizer.step()
    return [float(parameter.detach()) for parameter in parameters]


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


@pytest.mark.parametrize(("size", "expected"), [(1.0, [-0.6, -0.8]), (0.1, [-0.3, -0.4])])
def test_sum_is_clipped_over_all_groups_that_are_summed_together(size: float, expected: list[float]) -> None:
    def work(peers: Peers) -> list[float]:
        one, other = parameters(2)
        optimizer = ConfinedSGD([{"params": [one]}, {"params": [other]}], 1.0, peers=peers, samples=1, max_norm=1.0)
        factor = 30 * size if peers.me == "participant-2" else 0.0  # the gradient of one member may be larger
        return one_step(optimizer, 0.3 * factor, 0.4 * factor)

    with local_peers(3) as members:
        results = members.run(work)
    assert results == [pytest.approx(expected, abs=1e-6)] * 3


def test_each_sum_of_a_grid_is_clipped_by_itself() -> None:
    columns = [local_peers([f"r{row}c{column}" for row in range(3)]) for column in range(2)]
    everyone = local_peers([f"r{row}c{column}" for column in range(2) for row in range(3)])

    def work(peers: Peers, own: Peers) -> list[float]:
        first, rest = parameters(2)
        groups: list[dict[str, Any]] = [{"params": [first], "peers": own}, {"params": [rest]}]
        return one_step(ConfinedSGD(groups, 1.0, peers=peers, samples=1, max_norm=1.0), 3.0, 4.0)

    with everyone, columns[0], columns[1]:
        results = everyone.run(work, [*columns[0], *columns[1]])
    assert results == [pytest.approx([-1.0, -1.0], abs=1e-6)] * 6


def test_mean_update_of_local_steps_is_clipped() -> None:
    def work(peers: Peers) -> float:
        (parameter,) = parameters(1)
        optimizer = ConfinedSGD([parameter], 1.0, peers=peers, samples=1, max_norm=0.5)
        with optimizer.local_steps(), torch.no_grad():
            parameter.sub_(3.0)
        return float(parameter.detach())

    with local_peers(3) as members:
        assert members.run(work) == pytest.approx([-0.5] * 3)


def test_different_max_norm_is_reported_before_anything_is_opened() -> None:
    def work(peers: Peers) -> str:
        (parameter,) = parameters(1)
        max_norm = {"participant-1": 1, "participant-2": 1.0}.get(peers.me)
        optimizer = ConfinedAdam([parameter], 0.1, peers=peers, samples=1, max_norm=max_norm)
        try:
            one_step(optimizer, 1.0)
        except SettingsError as error:
            assert not optimizer.displacement().any()
            return str(error)
        return "no error"

    with local_peers(3) as members:
        errors = members.run(work)
    assert all("participant-3: " in error and "'ConfinedAdam clipped to 1.0 with" in error for error in errors)


@pytest.mark.parametrize(
    "max_norm", [0.0, -1.0, float("nan"), float("inf"), "1", True, False, (1.0,), torch.tensor(1.0)], ids=repr
)
def test_invalid_max_norm_is_rejected(max_norm: Any) -> None:
    with local_peers(3) as members, pytest.raises(InputError, match=re.escape(f"max_norm is {max_norm!r}; ")):
        ConfinedSGD(parameters(1), 1.0, peers=members[0], samples=1, max_norm=max_norm)
