"""Differences between members are reported before anything is shared, and no member moves."""

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


def step_errors(build: Callable[[Peers], ConfinedOptimizer], steps: int = 1) -> list[str]:
    """Return the error of each member in one of these steps; check that nothing moved in that step."""

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

    with local_peers(3, timeout=60) as members:
        return members.run(work)


@pytest.mark.parametrize("odd", [{"lr": 0.1}, {"momentum": 0.5}])
def test_different_options_are_reported_before_anything_is_opened(odd: dict[str, Any]) -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        settings = {"lr": 0.5, **(odd if peers.me == "participant-3" else {})}
        return ConfinedSGD([nn.Parameter(torch.zeros(1))], peers=peers, samples=1, **settings)

    ((key, value),) = odd.items()
    for error in step_errors(build):
        assert "participant-3: " in error
        assert f"{key} {value}" in error


def test_different_lr_in_a_later_group_is_reported() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        later = 0.1 if peers.me == "participant-2" else 0.2
        one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [other], "lr": later}]
        return ConfinedSGD(groups, 0.5, peers=peers, samples=1)

    assert all("participant-2: " in error and "lr 0.5 0.1" in error for error in step_errors(build))


def test_different_optimiser_class_is_reported() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        kind = makers["adam" if peers.me == "participant-2" else "sgd"]
        return kind([nn.Parameter(torch.zeros(1))], peers=peers, samples=1)

    assert all("participant-2: " in error and "ConfinedAdam with" in error for error in step_errors(build))


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ([(9, 1)], [(3, 3)]),
        ([(2, 3), (3, 2)], [(3, 2), (2, 3)]),
    ],
)
def test_models_of_equal_size_and_different_shapes_are_reported(
    usual: list[tuple[int, ...]], odd: list[tuple[int, ...]]
) -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        shapes = odd if peers.me == "participant-3" else usual
        return ConfinedSGD([nn.Parameter(torch.zeros(shape)) for shape in shapes], 0.5, peers=peers, samples=1)

    assert all("participant-3: " in error and "model " in error for error in step_errors(build))


def test_different_frozen_layers_are_reported() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        one, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        (one if peers.me == "participant-3" else other).requires_grad_(False)
        return ConfinedSGD([one, other], 0.5, peers=peers, samples=1)

    assert all("participant-3: " in error for error in step_errors(build))


def test_equal_options_of_different_types_are_accepted() -> None:
    def build(peers: Peers) -> ConfinedOptimizer:
        lr, betas = {
            "participant-1": (1, (0.9, 0.99)),
            "participant-2": (np.float64(1.0), [0.9, 0.99]),
            "participant-3": (torch.tensor(1.0), (np.float64(0.9), 0.99)),
        }[peers.me]
        optimizer = ConfinedAdam([nn.Parameter(torch.zeros(1))], lr, peers=peers, samples=1, betas=betas)  # type: ignore[arg-type]
        optimizer.param_groups[0]["my own note"] = f"private to {peers.me}"
        return optimizer

    assert step_errors(build, steps=3) == ["no error"] * 3


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_member_with_a_lost_step_or_momentum_is_reported(kind: str) -> None:
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

    with local_peers(3) as members, pytest.raises(RemoteProtocolError, match="participant-1: .* state "):
        members.run(work)


# Several sums in one step, as in a grid.


@pytest.mark.parametrize("first_group", ["column", "everyone"])
def test_failure_in_one_cell_of_a_grid_moves_no_member(first_group: str) -> None:
    columns = [local_peers([f"r{row}c{column}" for row in range(3)]) for column in range(2)]
    everyone = local_peers([f"r{row}c{column}" for column in range(2) for row in range(3)])

    def work(peers: Peers, own: Peers) -> tuple[str, float, float]:
        first, rest = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [first], "peers": own}, {"params": [rest]}]
        optimizer = ConfinedSGD(groups if first_group == "column" else groups[::-1], 1.0, peers=peers, samples=4)
        outcome = "no error"
        for bad in (True, False):
            first.grad, rest.grad = torch.ones(1), torch.ones(1)
            if bad and peers.me == "r1c0":
                first.grad[0] = float("nan")
            try:
                optimizer.step()
            except CGDError as error:
                outcome = type(error).__name__
                assert not optimizer.displacement().any()
        return outcome, float(first.detach()), float(rest.detach())

    with everyone, columns[0], columns[1]:
        results = everyone.run(work, [*columns[0], *columns[1]])
    assert [outcome for outcome, _, _ in results] == ["PeerAbortedError", "RangeError"] + ["PeerAbortedError"] * 4
    assert all(values == pytest.approx([-1, -1], abs=1e-6) for _, *values in results)


def test_parameter_groups_use_their_own_options_and_peers() -> None:
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
def test_step_that_fails_before_its_sum_aborts_the_sum_for_all(fault: str) -> None:
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
        outcome = "no error"
        try:
            optimizer.step(closure)
        except (ZeroDivisionError, CGDError) as error:
            outcome = f"{type(error).__name__}: {error}"
        bad = False
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step(closure)
        return outcome, float(parameter.detach())

    with local_peers(3) as members:
        results = members.run(work)
    assert [value for _, value in results] == pytest.approx([-1.0] * 3)
    assert all("participant-2: aborted sum 1" in results[i][0] for i in (0, 2))


def test_closed_peers_do_not_hide_the_original_error() -> None:
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
