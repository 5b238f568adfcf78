"""Members that differ in what must be the same are told before anything is shared, and nobody moves."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from cgd import CGDError, ClosedError, ConfinedAdam, ConfinedSGD, InputError, Peers, RemoteProtocolError, local_peers
from support.training import makers

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd import ConfinedOptimizer


def refusals(build: Callable[[Peers], ConfinedOptimizer], members: int = 3, steps: int = 1) -> list[str]:
    """What every member says when the last of some steps is refused; nothing moves in that step."""

    def work(peers: Peers) -> str:
        optimizer = build(peers)
        for _ in range(steps):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            before = optimizer.displacement()
            try:
                optimizer.step()
            except CGDError as error:
                assert torch.equal(optimizer.displacement(), before)
                return str(error)
        return "no error"

    with local_peers(members) as colony:
        return colony.run(work)


@pytest.mark.parametrize("odd", [{"lr": 0.1}, {"momentum": 0.5}])
def test_other_training_settings_are_told_before_anything_is_shared(odd: dict[str, float]) -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        settings = {"lr": 0.5, **(odd if peers.me == "participant-3" else {})}
        return ConfinedSGD([nn.Parameter(torch.zeros(1))], peers=peers, samples=1, **settings)

    ((key, value),) = odd.items()
    for said in refusals(build):
        assert "participant-3: " in said
        assert f"{key} {value}" in said


def test_another_lr_in_a_later_group_is_told() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        later = 0.1 if peers.me == "participant-2" else 0.2
        one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [other], "lr": later}]
        return ConfinedSGD(groups, 0.5, peers=peers, samples=1)

    assert all("participant-2: " in said and "lr 0.5 0.1" in said for said in refusals(build))


def test_another_kind_of_optimiser_is_told() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        kind = makers["adam" if peers.me == "participant-2" else "sgd"]
        return kind([nn.Parameter(torch.zeros(1))], peers=peers, samples=1)

    assert all("participant-2: " in said and "ConfinedAdam with" in said for said in refusals(build))


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ([(9, 1)], [(3, 3)]),
        ([(2, 3), (3, 2)], [(3, 2), (2, 3)]),
    ],
)
def test_models_of_the_same_length_and_another_shape_are_told(
    usual: list[tuple[int, ...]], odd: list[tuple[int, ...]]
) -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        shapes = odd if peers.me == "participant-3" else usual
        return ConfinedSGD([nn.Parameter(torch.zeros(shape)) for shape in shapes], 0.5, peers=peers, samples=1)

    assert all("participant-3: " in said and "model " in said for said in refusals(build))


def test_other_frozen_layers_are_told() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        one, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        (one if peers.me == "participant-3" else other).requires_grad_(False)
        return ConfinedSGD([one, other], 0.5, peers=peers, samples=1)

    assert all("participant-3: " in said for said in refusals(build))


def test_equal_options_are_equal_however_they_are_written() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        lr, betas = {
            "participant-1": (1, (0.9, 0.99)),
            "participant-2": (np.float64(1.0), [0.9, 0.99]),
            "participant-3": (torch.tensor(1.0), (np.float64(0.9), 0.99)),
        }[peers.me]
        optimizer = ConfinedAdam([nn.Parameter(torch.zeros(1))], lr, peers=peers, samples=1, betas=betas)  # type: ignore[arg-type]
        optimizer.param_groups[0]["my own note"] = f"private to {peers.me}"
        return optimizer

    assert refusals(build, steps=3) == ["no error"] * 3


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_a_member_that_lost_a_step_or_its_momentum_is_told(kind: str) -> None:
    def work(peers: Peers) -> str:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = makers[kind]([parameter], peers=peers, samples=1)
        for step in range(3):
            saved = copy.deepcopy(optimizer.state_dict())
            parameter.grad = torch.ones(1)
            optimizer.step()
            if step == 1 and peers.me == "participant-1":
                if kind == "sgd":
                    optimizer.load_state_dict(saved)
                else:
                    next(iter(optimizer.state.values())).pop("momentum_buffer" if kind == "momentum" else "square")
                    next(iter(optimizer.state.values())).pop("mean", None)
        return "no error"

    with local_peers(3) as colony, pytest.raises(RemoteProtocolError, match="participant-1: .* state "):
        colony.run(work)


# How n is counted, and when it no longer holds.


def saved_after_two_steps(members: int, samples: int = 4) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    def work(peers: Peers) -> tuple[dict[str, Any], torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = ConfinedSGD([parameter], 0.5, peers=peers, samples=samples)
        for _ in range(2):
            parameter.grad = torch.ones(2)
            optimizer.step()
        return copy.deepcopy(optimizer.state_dict()), optimizer.displacement()

    with local_peers(members) as colony:
        states, displacements = zip(*colony.run(work), strict=True)
    return list(states), list(displacements)


def resume(members: int, states: list[dict[str, Any]], samples: list[int], *, recount: bool) -> list[float | str]:
    def work(peers: Peers, state: dict[str, Any], own: int) -> float | str:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = ConfinedSGD([parameter], 0.5, peers=peers, samples=own)
        optimizer.load_state_dict(state)
        if recount:
            optimizer.recount()
        parameter.grad = torch.ones(2)
        try:
            optimizer.step()
        except CGDError as error:
            return f"{type(error).__name__}: {error}"
        return float(optimizer.displacement()[0])

    with local_peers(members) as colony:
        return colony.run(work, states, samples)


def test_the_same_step_with_fewer_members_is_refused() -> None:
    """Otherwise the difference of the two sums would be the gradient of the one who is missing."""
    states, _ = saved_after_two_steps(4)
    for said in resume(3, states[:3], [4] * 3, recount=False):
        assert "a step taken again with other members would show somebody's gradient" in str(said)
    assert resume(3, states[:3], [4] * 3, recount=True) == [-1.5] * 3


def test_another_number_of_samples_is_refused() -> None:
    states, _ = saved_after_two_steps(3)
    said = resume(3, states, [4, 4, 40], recount=False)
    assert "samples is 40 and was 4" in str(said[2])
    assert all("participant-3: gave up" in str(each) for each in said[:2])
    assert resume(3, states, [4, 4, 40], recount=True) == [-1.5] * 3


def test_a_wrong_count_is_noticed_by_everyone() -> None:
    states, displacements = saved_after_two_steps(3)
    forged = copy.deepcopy(states)
    forged[1]["param_groups"][0]["samples"] = 10
    said = resume(3, forged, [4, 10, 4], recount=False)
    assert all("WeightError: the members' weights sum to 1.5 instead of 1" in str(each) for each in said)
    assert float(displacements[0][0]) == -1.0


def test_the_number_of_own_samples_does_not_travel() -> None:
    """Neither in what is compared, nor in the pledges that are opened: those of equal numbers are not even alike."""
    seen: list[str] = []
    pledges: list[list[int]] = []

    def work(peers: Peers) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], 0.5, peers=peers, samples=98765)
        seen.append(optimizer._context(optimizer.param_groups))
        parameter.grad = torch.ones(1)
        optimizer.step()
        seen.append(optimizer._context(optimizer.param_groups))
        pledges.append(optimizer.param_groups[0]["pledges"])

    with local_peers(3) as colony:
        colony.run(work)
    assert len(seen) == 6
    assert all("98765" not in text for text in seen)
    assert pledges[0] == pledges[1] == pledges[2]
    assert len({*pledges[0], 98765}) == 4


# A grid: several sums in one step.


@pytest.mark.parametrize("first_group", ["column", "everyone"])
def test_if_one_cell_of_a_grid_fails_nobody_moves(first_group: str) -> None:
    columns = [local_peers([f"r{row}c{column}" for row in range(3)]) for column in range(2)]
    everyone = local_peers([f"r{row}c{column}" for column in range(2) for row in range(3)])

    def work(peers: Peers, own: Peers) -> tuple[str, float, float]:
        first, rest = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [first], "peers": own}, {"params": [rest]}]
        optimizer = ConfinedSGD(groups if first_group == "column" else groups[::-1], 1.0, peers=peers, samples=4)
        said = "no error"
        for bad in (True, False):
            first.grad, rest.grad = torch.ones(1), torch.ones(1)
            if bad and peers.me == "r1c0":
                first.grad[0] = float("nan")
            try:
                optimizer.step()
            except CGDError as error:
                said = type(error).__name__
                assert not optimizer.displacement().any()
        return said, float(first.detach()), float(rest.detach())

    with everyone, columns[0], columns[1]:
        results = everyone.run(work, [*columns[0], *columns[1]])
    assert [said for said, _, _ in results] == ["PeerAbortedError", "RangeError"] + ["PeerAbortedError"] * 4
    assert all(values == pytest.approx([-1, -1], abs=1e-6) for _, *values in results)


def test_parameter_groups_with_their_own_options_and_peers() -> None:
    """A grid of 3 × 2: the first layer is summed within the column group, the rest over everyone."""
    columns = [local_peers([f"r{row}c{column}" for row in range(3)]) for column in range(2)]
    everyone = local_peers([f"r{row}c{column}" for column in range(2) for row in range(3)])

    def work(peers: Peers, own: Peers, slope: float) -> tuple[float, float]:
        first, rest = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [first], "peers": own, "lr": 0.5}, {"params": [rest]}]
        optimizer = ConfinedSGD(groups, 1.0, peers=peers, samples=4)
        (slope * first + slope * rest).sum().backward()
        optimizer.step()
        assert "peers" not in optimizer.state_dict()["param_groups"][0]
        return round(-float(first.detach()), 5), round(-float(rest.detach()), 5)

    with everyone, columns[0], columns[1]:
        results = everyone.run(work, [*columns[0], *columns[1]], [1, 2, 3, 4, 5, 6])
    assert results == [(1.0, 3.5)] * 3 + [(2.5, 3.5)] * 3


@pytest.mark.parametrize("fault", ["closure", "lr"])
def test_a_step_that_fails_before_its_sum_is_told_to_the_others(fault: str) -> None:
    def work(peers: Peers) -> tuple[str, float]:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], 1.0, peers=peers, samples=1)
        bad = peers.me == "participant-2"

        def closure() -> float:
            parameter.grad = torch.ones(1)
            if bad and fault == "closure":
                raise ZeroDivisionError
            return 0.0

        if bad and fault == "lr":
            optimizer.param_groups[0]["lr"] = float("nan")
        said = "no error"
        try:
            optimizer.step(closure)
        except (ZeroDivisionError, CGDError) as error:
            said = f"{type(error).__name__}: {error}"
        bad = False
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step(closure)
        return said, float(parameter.detach())

    with local_peers(3) as colony:
        results = colony.run(work)
    assert [value for _, value in results] == pytest.approx([-1.0] * 3)
    assert all("participant-2: gave up sum 1" in results[i][0] for i in (0, 2))


def test_an_error_is_not_hidden_by_peers_that_are_closed() -> None:
    column, everyone = local_peers(3), local_peers(4)
    everyone.close()
    first, rest = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups: list[dict[str, Any]] = [{"params": [first], "peers": column[0]}, {"params": [rest], "peers": everyone[0]}]
    optimizer = ConfinedSGD(groups, 1.0, peers=everyone[0], samples=4)
    column.close()
    with pytest.raises(ClosedError, match="participant-1 is closed"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(InputError, match="lr is -1"):
        optimizer.step()
