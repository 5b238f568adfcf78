from __future__ import annotations

import ast
import copy
import inspect
import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import cgd.learning.displacement
from cgd import (
    CGDError,
    ConfinedAdam,
    ConfinedSGD,
    InputError,
    InverseSquareLR,
    Peers,
    RangeError,
    RemoteProtocolError,
    UnconfinedWarning,
    confine,
    local_peers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.learning.optimizer import ConfinedOptimizer

mse = nn.functional.mse_loss


class Network(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=dtype)
        self.last = nn.Linear(4, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x).tanh())
        return output


def data(seed: int, samples: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=dtype)
    return x, x.sum(dim=1, keepdim=True).tanh()


def descend(optimizer: torch.optim.Optimizer, model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()


makers: dict[str, Callable[..., ConfinedOptimizer]] = {
    "sgd": lambda params, **more: ConfinedSGD(params, 0.2, **more),
    "momentum": lambda params, **more: ConfinedSGD(params, 0.2, momentum=0.9, **more),
    "adam": lambda params, **more: ConfinedAdam(params, 0.01, **more),
}
plain: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.2),
    "momentum": lambda params: torch.optim.SGD(params, 0.2, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
}


@pytest.mark.parametrize("kind", makers)
def test_all_members_move_by_the_same_bits_and_stay_as_far_apart_as_they_began(kind: str) -> None:
    def work(peers: Peers, seed: int) -> tuple[torch.Tensor, bool]:
        model = Network()
        confine(model, delta=0.1)
        origins = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = makers[kind](model.parameters(), peers=peers, samples=8)
        descend(optimizer, model, *data(seed), steps=25)
        pieces = torch.split(optimizer.displacement(), [origin.numel() for origin in origins])
        placed = [origin + piece.reshape(origin.shape) for origin, piece in zip(origins, pieces, strict=True)]
        exact = all(torch.equal(own, model_) for own, model_ in zip(placed, model.parameters(), strict=True))
        return optimizer.displacement(), exact

    with local_peers(4) as colony:
        results = colony.run(work, range(4))
    first = results[0][0]
    assert first.abs().max() > 0.01
    for displacement, exact in results:
        assert displacement.numpy().tobytes() == first.numpy().tobytes()
        assert exact


@pytest.mark.parametrize("kind", makers)
def test_the_rules_are_torchs(kind: str) -> None:
    """With equal origins and data, a confined optimiser is torch's own on the pooled data, up to the fixed point."""
    start = Network(torch.float64)
    x, y = data(0, 24, torch.float64)

    def work(peers: Peers, i: int) -> torch.Tensor:
        model = copy.deepcopy(start)
        optimizer = makers[kind](model.parameters(), peers=peers, samples=8)
        descend(optimizer, model, x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8], steps=20)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    with local_peers(3, bound=8.0, ring_bits=64) as colony:
        confined = colony.run(work, range(3))[0]
    pooled = copy.deepcopy(start)
    descend(plain[kind](pooled.parameters()), pooled, x, y, steps=20)
    expected = nn.utils.parameters_to_vector(pooled.parameters()).detach()
    # Both are in double precision and the ring has 64 bits, so they differ by accumulated roundings of some 1e-16. A
    # rule that is wrong in any term (a missing bias correction, say) is off by more than 1e-3.
    torch.testing.assert_close(confined, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", makers)
def test_a_state_goes_through_a_file_and_on_to_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    def work(peers: Peers, seed: int) -> None:
        x, y = data(seed, dtype=dtype)
        model = Network(dtype)
        confine(model)
        optimizer = makers[kind](model.parameters(), peers=peers, samples=8)
        schedule = InverseSquareLR(optimizer, mu=0.1, steps=20)
        for _ in range(5):
            descend(optimizer, model, x, y, steps=1)
            schedule.step()
        file = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
        file.seek(0)

        other = Network(dtype)  # not even confined: the state brings the origin along
        resumed = makers[kind](other.parameters(), peers=peers, samples=8)
        rates = InverseSquareLR(resumed, mu=0.1, steps=20)
        saved = torch.load(file, weights_only=True)
        resumed.load_state_dict(saved["optimizer"])
        rates.load_state_dict(saved["schedule"])
        assert_same_bits(model, other)
        sums = peers.traffic.sums
        for _ in range(5):
            descend(optimizer, model, x, y, steps=1)
            schedule.step()
            descend(resumed, other, x, y, steps=1)
            rates.step()
        assert peers.traffic.sums == sums + 10  # n is not asked for again
        assert_same_bits(model, other)

    with local_peers(3) as colony:
        colony.run(work, range(3))


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_frozen_and_unused_parameters() -> None:
    def work(peers: Peers, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = Network()
        unused = nn.Parameter(torch.ones(2))
        model.first.requires_grad_(False)
        before = model.first.weight.clone()
        optimizer = ConfinedSGD([*model.parameters(), unused], 0.2, peers=peers, samples=8)
        descend(optimizer, model, *data(seed), steps=3)
        assert torch.equal(model.first.weight, before)
        assert torch.equal(unused, torch.ones(2))
        model.first.requires_grad_(True)
        descend(optimizer, model, *data(seed), steps=1)
        assert not torch.equal(model.first.weight, before)
        return optimizer.displacement(), model.first.bias

    with local_peers(3) as colony:
        results = colony.run(work, range(3))
    assert all(torch.equal(results[0][0], displacement) for displacement, _ in results)


def test_a_gradient_that_only_some_have_counts_for_all() -> None:
    def work(peers: Peers) -> float:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], 1.0, peers=peers, samples=1)
        if peers.me == "participant-1":
            (3 * parameter).sum().backward()
        optimizer.step()
        return float(parameter.detach())

    with local_peers(3) as colony:
        assert colony.run(work) == pytest.approx([-1.0] * 3)


def test_gradients_are_weighted_by_samples() -> None:
    def work(peers: Peers, samples: int, slope: float) -> float:
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = ConfinedSGD([parameter], 1.0, peers=peers, samples=samples)
        (slope * parameter).sum().backward()
        optimizer.step()
        return -float(parameter.detach())

    with local_peers(3) as colony:
        results = colony.run(work, [10, 30, 60], [1.0, 2.0, -1.0])
    assert results == pytest.approx([0.1 * 1 + 0.3 * 2 - 0.6] * 3, abs=3 * 2.0**-27)


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


def test_a_closure_and_sparse_gradients() -> None:
    def work(peers: Peers) -> float:
        table = nn.Embedding(5, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = ConfinedSGD(table.parameters(), 1.0, peers=peers, samples=1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = table(torch.tensor([1])).sum()
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) == 0.0
        return float(table.weight.detach().sum())

    with local_peers(3) as colony:
        assert colony.run(work) == pytest.approx([-2.0] * 3)


def test_a_bad_gradient_is_located_and_nothing_is_applied() -> None:
    def work(peers: Peers) -> tuple[Exception | None, bool, bool]:
        model = Network()
        before = copy.deepcopy(model)
        optimizer = ConfinedSGD(model.named_parameters(), 0.1, peers=peers, samples=8)
        mse(model(data(0)[0]), data(0)[1]).backward()
        if peers.me == "participant-2":
            assert model.last.weight.grad is not None
            model.last.weight.grad[0, 3] = float("nan")
        error = None
        try:
            optimizer.step()
        except (RangeError, RemoteProtocolError) as caught:
            error = caught
        untouched = all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
        optimizer.zero_grad()
        mse(model(data(0)[0]), data(0)[1]).backward()
        optimizer.step()  # the colony goes on
        moved = not all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
        return error, untouched, moved

    with local_peers(3) as colony:
        results = colony.run(work)
    assert all(untouched and moved for _, untouched, moved in results)
    assert isinstance(results[1][0], RangeError)
    assert "the gradient of parameter last.weight at index (0, 3) is nan" in str(results[1][0])
    assert all("participant-2" in str(results[i][0]) for i in (0, 2))


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
    seen: list[str] = []

    def work(peers: Peers) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], 0.5, peers=peers, samples=98765)
        seen.append(optimizer._context(optimizer.param_groups, [parameter]))
        parameter.grad = torch.ones(1)
        optimizer.step()
        seen.append(optimizer._context(optimizer.param_groups, [parameter]))

    with local_peers(3) as colony:
        colony.run(work)
    assert len(seen) == 6
    assert all("98765" not in text for text in seen)


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


# Confinement.


def test_a_model_that_was_not_confined_is_warned_of() -> None:
    def work(peers: Peers, confined: bool) -> int:
        model = Network()
        if confined:
            confine(model)
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            descend(optimizer, model, *data(0), steps=2)
        return sum(issubclass(each.category, UnconfinedWarning) for each in caught)

    for confined, expected in ((True, 0), (False, 1)):
        with local_peers(3) as colony:
            # warnings are caught for the whole process: look at one member at a time
            counts = colony.run(lambda peers, confined=confined: work(peers, confined))
        assert (sum(counts) > 0) == (expected > 0)


def test_a_first_step_that_fails_does_not_settle_the_origin() -> None:
    def work(peers: Peers) -> bool:
        model = Network()
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=8)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        with pytest.raises((RangeError, RemoteProtocolError)):
            optimizer.step()
        confine(model)
        start = copy.deepcopy(model)
        descend(optimizer, model, *data(0), steps=1)
        return all(
            bool((after - before).abs().max() < 1)
            for after, before in zip(model.parameters(), start.parameters(), strict=True)
        ) and torch.equal(next(iter(optimizer.state.values()))["origin"], next(start.parameters()))

    with local_peers(3) as colony:
        assert all(colony.run(work))


@pytest.fixture
def someone() -> Peers:
    return local_peers(3)[0]


@pytest.mark.parametrize("optimizer", [ConfinedSGD, ConfinedAdam])
def test_weight_decay_is_refused_with_the_reason(optimizer: Callable[..., object], someone: Peers) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    with pytest.raises(InputError, match="its own private weights"):
        optimizer([parameter], 0.1, peers=someone, samples=1, weight_decay=0.01)
    with pytest.raises(InputError, match="its own private weights"):
        optimizer([{"params": [parameter], "weight_decay": 0.01}], 0.1, peers=someone, samples=1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"samples": 2.5}, "samples is 2.5"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], says: str, someone: Peers) -> None:
    with pytest.raises(InputError, match=says):
        ConfinedSGD([nn.Parameter(torch.zeros(1))], **{"lr": 0.1, "samples": 1, "peers": someone, **settings})


def test_integer_parameters_are_refused(someone: Peers) -> None:
    with pytest.raises(InputError, match="torch.int64"):
        ConfinedSGD([torch.zeros(1, dtype=torch.int64)], 0.1, peers=someone, samples=1)


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(someone: Peers) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = ConfinedSGD([parameter], 0.1, peers=someone, samples=1)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.3, momentum=0.9)
    foreign.param_groups[0]["params"][0].grad = torch.ones(2)
    foreign.step()
    with pytest.raises(InputError, match="it is not that of a ConfinedSGD"):
        optimizer.load_state_dict(foreign.state_dict())
    states, _ = saved_after_two_steps(3)
    states[0]["state"][0]["displacement"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"does not fit a parameter of shape \(2,\)"):
        optimizer.load_state_dict(states[0])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(parameter, torch.ones(2))


def test_a_state_of_another_kind_is_refused(someone: Peers) -> None:
    state = ConfinedSGD([nn.Parameter(torch.ones(2))], 0.1, peers=someone, samples=1).state_dict()
    with pytest.raises(InputError, match="the state has no betas, eps: it is not that of a ConfinedAdam"):
        ConfinedAdam([nn.Parameter(torch.ones(2))], peers=someone, samples=1).load_state_dict(state)


def test_a_frozen_parameter_comes_back_too() -> None:
    def work(peers: Peers) -> None:
        model, other = Network(), Network()
        confine(model)
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=8)
        descend(optimizer, model, *data(0), steps=2)
        for each in (model, other):
            each.first.requires_grad_(False)
        resumed = ConfinedSGD(other.parameters(), 0.1, peers=peers, samples=8)
        resumed.load_state_dict(optimizer.state_dict())
        assert_same_bits(model, other)

    with local_peers(3) as colony:
        colony.run(work)


def test_a_loaded_state_is_a_copy() -> None:
    def work(peers: Peers) -> None:
        model, other = Network(), Network()
        optimizer = makers["momentum"](model.parameters(), peers=peers, samples=8)
        descend(optimizer, model, *data(0), steps=2)
        state = optimizer.state_dict()
        before = copy.deepcopy(state)
        resumed = makers["momentum"](other.parameters(), peers=peers, samples=8)
        resumed.load_state_dict(state)
        descend(resumed, other, *data(0), steps=2)
        for index, values in before["state"].items():
            for key, value in values.items():
                assert torch.equal(state["state"][index][key], value)

    with local_peers(3) as colony:
        colony.run(work)


def test_it_cannot_be_copied_with_its_connection(someone: Peers) -> None:
    optimizer = ConfinedSGD([nn.Parameter(torch.ones(2))], 0.1, peers=someone, samples=1)
    with pytest.raises(TypeError, match="copy its state_dict"):
        copy.deepcopy(optimizer)


def test_a_group_that_is_refused_is_not_added(someone: Peers) -> None:
    optimizer = ConfinedSGD([nn.Parameter(torch.ones(2))], 0.1, peers=someone, samples=1)
    for group in (
        {"params": [torch.zeros(1, dtype=torch.int64)]},
        {"params": [nn.Parameter(torch.ones(1))], "momentum": 7.0},
        {"params": [nn.Parameter(torch.ones(1))], "lr": -1.0},
    ):
        with pytest.raises(InputError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_the_rules_use_only_operations_that_round_once() -> None:
    """One processor cannot show what another would fuse, so the source is looked at."""
    source = inspect.getsource(cgd.learning.displacement)
    called = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not called & {"add_", "sub_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp", "lerp_", "pow", "pow_"}
    assert not any(isinstance(node, ast.Pow) for node in ast.walk(ast.parse(source)))
