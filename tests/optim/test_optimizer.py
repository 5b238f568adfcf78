from __future__ import annotations

import ast
import copy
import inspect
import io
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import cgd.optim.displacement
from cgd import (
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
from support.training import Network, data, descend, makers, mse, plain

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("kind", makers)
def test_displacements_are_bitwise_equal_and_origins_are_kept(kind: str) -> None:
    def work(peers: Peers, seed: int) -> tuple[torch.Tensor, bool]:
        model = Network()
        confine(model, delta=0.1, start="zeros")
        origins = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = makers[kind](model.parameters(), peers=peers, samples=8)
        descend(optimizer, model, *data(seed), steps=25)
        pieces = torch.split(optimizer.displacement(), [origin.numel() for origin in origins])
        placed = [origin + piece.reshape(origin.shape) for origin, piece in zip(origins, pieces, strict=True)]
        exact = all(torch.equal(own, model_) for own, model_ in zip(placed, model.parameters(), strict=True))
        return optimizer.displacement(), exact

    with local_peers(4) as members:
        results = members.run(work, range(4))
    first = results[0][0]
    assert first.abs().max() > 0.01
    for displacement, exact in results:
        assert displacement.numpy().tobytes() == first.numpy().tobytes()
        assert exact


@pytest.mark.parametrize("kind", makers)
def test_update_rules_agree_with_torch(kind: str) -> None:
    """With equal origins, a confined optimiser agrees with torch's on the pooled data, up to the fixed point."""
    start = Network(torch.float64)
    x, y = data(0, 24, torch.float64)

    def work(peers: Peers, i: int) -> torch.Tensor:
        model = copy.deepcopy(start)
        optimizer = makers[kind](model.parameters(), peers=peers, samples=8)
        descend(optimizer, model, x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8], steps=20)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    with local_peers(3, bound=8.0, ring_bits=64) as members:
        confined = members.run(work, range(3))[0]
    pooled = copy.deepcopy(start)
    descend(plain[kind](pooled.parameters()), pooled, x, y, steps=20)
    expected = nn.utils.parameters_to_vector(pooled.parameters()).detach()
    # Both use double precision and a ring of 64 bits, so they differ by accumulated rounding errors of about 1e-16. An
    # error in any term of a rule, such as a missing bias correction, makes a difference of more than 1e-3.
    torch.testing.assert_close(confined, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", makers)
def test_state_dict_saved_to_a_file_resumes_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    def work(peers: Peers, seed: int) -> None:
        x, y = data(seed, dtype=dtype)
        model = Network(dtype)
        confine(model, start="zeros")
        optimizer = makers[kind](model.parameters(), peers=peers, samples=8)
        schedule = InverseSquareLR(optimizer, mu=0.1, steps=20)
        for _ in range(5):
            descend(optimizer, model, x, y, steps=1)
            schedule.step()
        file = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
        file.seek(0)

        other = Network(dtype)  # not confined: the state contains the origin
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
        assert peers.traffic.sums == sums + 10  # the samples are not counted again
        assert_same_bits(model, other)

    with local_peers(3) as members:
        members.run(work, range(3))


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_frozen_and_unused_parameters_do_not_move() -> None:
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

    with local_peers(3) as members:
        results = members.run(work, range(3))
    assert all(torch.equal(results[0][0], displacement) for displacement, _ in results)


def test_missing_gradient_counts_as_zero() -> None:
    def work(peers: Peers) -> float:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], 1.0, peers=peers, samples=1)
        if peers.me == "participant-1":
            (3 * parameter).sum().backward()
        optimizer.step()
        return float(parameter.detach())

    with local_peers(3) as members:
        assert members.run(work) == pytest.approx([-1.0] * 3)


def test_gradients_are_weighted_by_samples() -> None:
    def work(peers: Peers, samples: int, slope: float) -> float:
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = ConfinedSGD([parameter], 1.0, peers=peers, samples=samples)
        (slope * parameter).sum().backward()
        optimizer.step()
        return -float(parameter.detach())

    with local_peers(3) as members:
        results = members.run(work, [10, 30, 60], [1.0, 2.0, -1.0])
    assert results == pytest.approx([0.1 * 1 + 0.3 * 2 - 0.6] * 3, abs=3 * 2.0**-27)


def test_step_accepts_a_closure_and_sparse_gradients() -> None:
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

    with local_peers(3) as members:
        assert members.run(work) == pytest.approx([-2.0] * 3)


def test_invalid_gradient_is_located_and_nothing_moves() -> None:
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
        optimizer.step()  # the members can continue
        moved = not all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
        return error, untouched, moved

    with local_peers(3) as members:
        results = members.run(work)
    assert all(untouched and moved for _, untouched, moved in results)
    assert isinstance(results[1][0], RangeError)
    assert "the gradient of parameter last.weight at index (0, 3) is nan" in str(results[1][0])
    assert all("participant-2" in str(results[i][0]) for i in (0, 2))


# Confinement.


@pytest.mark.parametrize("confined", [True, False])
def test_unconfined_model_causes_a_warning(confined: bool) -> None:
    def work(peers: Peers) -> None:
        model = Network()
        if confined:
            confine(model, start="zeros")
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=8)
        for _ in range(2):
            mse(model(data(0)[0]), data(0)[1]).backward()
            optimizer.step()

    with local_peers(3) as members, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        members.run(work)
    unconfined = [each for each in caught if issubclass(each.category, UnconfinedWarning)]
    assert len(unconfined) == (0 if confined else 3)  # once for each member
    assert all(each.filename == __file__ for each in unconfined)  # the warning points at the caller's line


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8),
    ],
)
def test_torch_schedulers_set_the_lr(build: Callable[..., torch.optim.lr_scheduler.LRScheduler]) -> None:
    def work(peers: Peers) -> tuple[torch.Tensor, list[float]]:
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = makers["momentum"]([parameter], peers=peers, samples=1)
        reference = torch.optim.SGD([nn.Parameter(torch.zeros(1, dtype=torch.float64))], 0.2, momentum=0.9)
        schedules = [build(optimizer), build(reference)]
        rates = []
        for _ in range(6):
            for each, schedule in zip((optimizer, reference), schedules, strict=True):
                each.param_groups[0]["params"][0].grad = torch.ones(1, dtype=torch.float64)
                each.step()
                schedule.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        # The rounding error of a sum of three thirds is below three units of the fixed point.
        difference = optimizer.displacement() - reference.param_groups[0]["params"][0].detach()
        assert float(difference.abs()) < 1e-6
        return optimizer.displacement(), rates

    with local_peers(3) as members:
        results = members.run(work)
    assert all(torch.equal(results[0][0], displacement) for displacement, _ in results)
    assert len(set(results[0][1])) > 1


def test_failed_first_step_does_not_fix_the_origin() -> None:
    def work(peers: Peers) -> bool:
        model = Network()
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=8)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        with pytest.raises((RangeError, RemoteProtocolError)):
            optimizer.step()
        confine(model, start="zeros")
        start = copy.deepcopy(model)
        descend(optimizer, model, *data(0), steps=1)
        return all(
            bool((after - before).abs().max() < 1)
            for after, before in zip(model.parameters(), start.parameters(), strict=True)
        ) and torch.equal(next(iter(optimizer.state.values()))["origin"], next(start.parameters()))

    with local_peers(3) as members:
        assert all(members.run(work))


@pytest.fixture
def peers() -> Peers:
    return local_peers(3)[0]


@pytest.mark.parametrize("optimizer", [ConfinedSGD, ConfinedAdam])
def test_weight_decay_is_rejected(optimizer: Callable[..., object], peers: Peers) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    with pytest.raises(InputError, match="its own private weights"):
        optimizer([parameter], 0.1, peers=peers, samples=1, weight_decay=0.01)
    with pytest.raises(InputError, match="its own private weights"):
        optimizer([{"params": [parameter], "weight_decay": 0.01}], 0.1, peers=peers, samples=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"samples": 2.5}, "samples is 2.5"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0"),
    ],
)
def test_invalid_options_are_rejected(settings: dict[str, Any], message: str, peers: Peers) -> None:
    with pytest.raises(InputError, match=message):
        ConfinedSGD([nn.Parameter(torch.zeros(1))], **{"lr": 0.1, "samples": 1, "peers": peers, **settings})


def test_integer_parameters_are_rejected(peers: Peers) -> None:
    with pytest.raises(InputError, match="torch.int64"):
        ConfinedSGD([torch.zeros(1, dtype=torch.int64)], 0.1, peers=peers, samples=1)


def test_state_dict_that_does_not_fit_is_rejected_and_nothing_changes(peers: Peers) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = ConfinedSGD([parameter], 0.1, peers=peers, samples=1)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.3, momentum=0.9)
    foreign.param_groups[0]["params"][0].grad = torch.ones(2)
    foreign.step()
    with pytest.raises(InputError, match="it is not that of a ConfinedSGD"):
        optimizer.load_state_dict(foreign.state_dict())
    larger = ConfinedSGD([nn.Parameter(torch.ones(3))], 0.1, peers=peers, samples=1).state_dict()
    larger["state"][0] = {"origin": torch.ones(3), "displacement": torch.zeros(3)}
    with pytest.raises(InputError, match=r"does not fit a parameter of shape \(2,\)"):
        optimizer.load_state_dict(larger)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(parameter, torch.ones(2))


def test_state_dict_of_another_optimiser_class_is_rejected(peers: Peers) -> None:
    state = ConfinedSGD([nn.Parameter(torch.ones(2))], 0.1, peers=peers, samples=1).state_dict()
    with pytest.raises(InputError, match="the state has no betas, eps: it is not that of a ConfinedAdam"):
        ConfinedAdam([nn.Parameter(torch.ones(2))], peers=peers, samples=1).load_state_dict(state)


def test_state_dict_restores_frozen_parameters() -> None:
    def work(peers: Peers) -> None:
        model, other = Network(), Network()
        confine(model, start="zeros")
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=8)
        descend(optimizer, model, *data(0), steps=2)
        for each in (model, other):
            each.first.requires_grad_(False)
        resumed = ConfinedSGD(other.parameters(), 0.1, peers=peers, samples=8)
        resumed.load_state_dict(optimizer.state_dict())
        assert_same_bits(model, other)

    with local_peers(3) as members:
        members.run(work)


def test_loaded_state_is_a_copy() -> None:
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

    with local_peers(3) as members:
        members.run(work)


def test_optimiser_cannot_be_copied(peers: Peers) -> None:
    optimizer = ConfinedSGD([nn.Parameter(torch.ones(2))], 0.1, peers=peers, samples=1)
    with pytest.raises(TypeError, match="copy its state_dict"):
        copy.deepcopy(optimizer)


def test_rejected_parameter_group_is_not_added(peers: Peers) -> None:
    optimizer = ConfinedSGD([nn.Parameter(torch.ones(2))], 0.1, peers=peers, samples=1)
    for group in (
        {"params": [torch.zeros(1, dtype=torch.int64)]},
        {"params": [nn.Parameter(torch.ones(1))], "momentum": 7.0},
        {"params": [nn.Parameter(torch.ones(1))], "lr": -1.0},
    ):
        with pytest.raises(InputError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_update_rules_use_only_operations_that_round_once() -> None:
    """One processor cannot show which operations another fuses, so the test inspects the source."""
    source = inspect.getsource(cgd.optim.displacement)
    called = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not called & {"add_", "sub_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp", "lerp_", "pow", "pow_"}
    assert not any(isinstance(node, ast.Pow) for node in ast.walk(ast.parse(source)))
