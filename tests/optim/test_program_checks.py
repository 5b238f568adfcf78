"""What a program may do between steps: errors come before anything is shared, at all members, with a remedy."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import cgd
from cgd import (
    CGDError,
    ConfinedOptimizer,
    ConfinedSGD,
    InputError,
    PeerLeftError,
    Peers,
    RangeError,
    SettingsError,
    confine,
    local_peers,
)
from cgd.optim.displacement import SGDRule
from cgd.optim.program_checks import check_unwritten
from support import in_process
from support.in_process import InProcessFederation, new_federation
from support.training import Network, data, descend, mse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.in_process import MemberProcess


def train(peers: Peers, between: Callable[[Network, ConfinedSGD], None]) -> tuple[str, bool]:
    """Take a step, run `between`, take another; return the error, and whether nothing was summed in that step."""
    model = Network()
    confine(model, delta=0.1, start="zeros")
    optimizer = ConfinedSGD(model.named_parameters(), lr=0.5, peers=peers, samples=8)
    descend(optimizer, model, *data(0), steps=1)
    before, sums = optimizer.displacement(), peers.traffic.sums
    optimizer.zero_grad()
    mse(model(data(0)[0]), data(0)[1]).backward()
    between(model, optimizer)
    try:
        optimizer.step()
    except CGDError as error:
        untouched = torch.equal(optimizer.displacement(), before) and peers.traffic.sums == sums
        return f"{type(error).__name__}: {error}", untouched
    return "no error", False


# Weights that the program writes.


@torch.no_grad()
def clamp(model: Network, _: ConfinedSGD) -> None:
    model.last.weight.clamp_(0.01, 0.02)


def write_data(model: Network, _: ConfinedSGD) -> None:
    model.last.weight.data[0, 2] += 2.0**-18


def load_weights(model: Network, _: ConfinedSGD) -> None:
    weights = model.state_dict()
    weights["last.weight"] = torch.ones(1, 4)
    model.load_state_dict(weights)


def renormalise(model: Network, _: ConfinedSGD) -> None:
    model.last.weight.data = nn.functional.normalize(model.last.weight.data)


def swap_in_an_average(model: Network, _: ConfinedSGD) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
        parameter.data = mean.data + (0.125 if parameter is model.last.weight else 0)


@pytest.mark.parametrize("between", [clamp, write_data, load_weights, renormalise, swap_in_an_average])
def test_written_weights_are_reported_before_anything_is_shared(between: Callable[..., None]) -> None:
    def work(peers: Peers) -> tuple[str, bool]:
        return train(peers, between if peers.me == "participant-2" else lambda *_: None)

    with local_peers(3) as members:
        results = members.run(work)
    assert all(untouched for _, untouched in results)
    assert results[1][0].startswith("InputError: the program has written into parameter last.weight since the last")
    assert "put the weights back before step()" in results[1][0]
    assert all("PeerAbortedError: participant-2: aborted" in results[i][0] for i in (0, 2))


def test_weights_that_are_put_back_are_accepted() -> None:
    def swap(model: Network, optimizer: ConfinedSGD) -> None:
        kept = copy.deepcopy(model.state_dict())
        load_weights(model, optimizer)
        model.load_state_dict(kept)

    with local_peers(3) as members:
        assert members.run(train, [swap] * 3) == [("no error", False)] * 3


def test_weights_may_be_written_while_they_are_frozen_or_before_the_first_step() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        optimizer = ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=8)
        load_weights(model, optimizer)
        model.first.requires_grad_(False)
        descend(optimizer, model, *data(0), steps=2)
        model.first.weight.data += 1
        descend(optimizer, model, *data(0), steps=1)

    with local_peers(3) as members:
        members.run(work)


def test_nan_in_a_diverging_model_does_not_count_as_written() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, float("nan"), 2.0]))
    state = {"origin": torch.zeros(3), "displacement": parameter.detach().clone()}
    groups: list[dict[str, Any]] = [{"params": [parameter]}]
    check_unwritten(groups, {parameter: state})
    parameter.data[2] = 3.0
    with pytest.raises(InputError, match=r"since the last step \(1 of 3 values\)"):
        check_unwritten(groups, {parameter: state})


def test_weights_written_before_local_steps_are_reported() -> None:
    def work(peers: Peers) -> str:
        model = Network()
        optimizer = ConfinedSGD(model.named_parameters(), lr=1.0, peers=peers, samples=8)
        descend(optimizer, model, *data(0), steps=1)
        clamp(model, optimizer)
        try:
            with optimizer.local_steps():
                pytest.fail("the block was entered")
        except CGDError as error:
            return str(error)

    with local_peers(3) as members:
        assert any("has written into parameter last.weight" in error for error in members.run(work))


# GradScaler.


def scaled_step(peers: Peers, scale: float, infinite: bool, unscale: bool) -> tuple[float, float]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = ConfinedSGD([parameter], lr=1.0, peers=peers, samples=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale((3 * parameter).sum()).backward()
    assert parameter.grad is not None
    if infinite:
        parameter.grad[0] = float("inf")
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return float(parameter.detach()), scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True])
def test_scaled_gradients_are_unscaled(unscale: bool) -> None:
    with local_peers(3) as members:
        results = members.run(scaled_step, [1024.0, 65536.0, 3.0], [False] * 3, [unscale] * 3)
    assert [value for value, _ in results] == pytest.approx([-3.0] * 3)


@pytest.mark.parametrize("unscale", [False, True])
def test_member_with_an_infinite_gradient_takes_part_with_zeros(unscale: bool) -> None:
    with local_peers(3) as members, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = members.run(scaled_step, [1024.0] * 3, [False, True, False], [unscale] * 3)
    assert [value for value, _ in results] == pytest.approx([-2.0] * 3)
    assert [scale for _, scale in results] == [1024.0, 512.0, 1024.0]
    assert [str(each.message)[:47] for each in caught if "GradScaler" in str(each.message)] == [
        "the gradient is infinite with the scale of the "
    ]


def test_gradient_that_is_infinite_without_a_scale_is_an_error() -> None:
    def work(peers: Peers) -> str:
        try:
            scaled_step(peers, 1.0, peers.me == "participant-2", False)
        except CGDError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    with local_peers(3) as members:
        errors = members.run(work)
    assert "RangeError: the gradient of parameter number 0, of shape (1,), at index (0,) is inf" in errors[1]
    assert all("PeerAbortedError" in errors[i] for i in (0, 2))


def test_scaler_can_be_used_again_after_a_step_that_failed() -> None:
    def work(peers: Peers) -> float:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], lr=1.0, peers=peers, samples=1)
        for attempt in range(2):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            optimizer.zero_grad()
            scaler.scale((3 * parameter).sum()).backward()
            assert parameter.grad is not None
            if attempt == 0:
                parameter.grad[0] = 1e6  # beyond the bound
                with pytest.raises((RangeError, CGDError)):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
        return float(parameter.detach())

    with local_peers(3) as members:
        assert members.run(work) == pytest.approx([-3.0] * 3)


def test_scaler_is_refused_with_privacy() -> None:
    def work(peers: Peers) -> str:
        model = nn.Linear(2, 1)
        confine(model, start="zeros")
        privacy = cgd.Privacy(model, epsilon=8.0, delta=1e-3, steps=5)
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=4, privacy=privacy)
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 2)).mean()).backward()
        try:
            scaler.step(optimizer)
        except CGDError as error:
            return str(error)
        return "no error"

    with local_peers(3) as members:
        assert any("train without a GradScaler" in error for error in members.run(work))


# Programs that differ.


def errors_of(work: Callable[[Peers], object]) -> list[CGDError | None]:
    def caught(peers: Peers) -> CGDError | None:
        try:
            work(peers)
        except CGDError as error:
            return error
        return None

    with local_peers(3) as members:
        return members.run(caught)


def one_step(peers: Peers, steps: int = 1) -> ConfinedSGD:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = ConfinedSGD([parameter], lr=1.0, peers=peers, samples=1)
    for _ in range(steps):
        parameter.grad = torch.ones(1)
        optimizer.step()
    return optimizer


def test_member_that_ends_earlier_is_reported_with_the_remedy() -> None:
    def work(peers: Peers) -> None:
        with peers:
            one_step(peers, steps=2 if peers.me == "participant-2" else 3)

    errors = errors_of(work)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLeftError)
        assert "participant-2: left the session before sum 4" in str(error)
        assert "the same number of steps; if epochs have different numbers of batches, divide them with" in str(error)


def test_member_that_ends_earlier_in_a_federation_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "LINGER_SECONDS", 0.0)  # bob would stay for the others, which end with errors

    def program(process: MemberProcess) -> None:
        with process.peers as peers:
            one_step(peers, steps=2 if process.name == "bob" else 3)

    with InProcessFederation(new_federation(tmp_path, ("ada", "bob", "cleo")), tmp_path / "state") as federation:
        federation.start_all(program)
        errors = federation.errors("ada", "cleo")
    assert all("bob: is done" in str(error) and "cgd.BatchSampler" in str(error) for error in errors.values())


def test_member_in_another_sum_is_reported_with_the_remedy() -> None:
    def work(peers: Peers) -> None:
        optimizer = one_step(peers)
        if peers.me == "participant-3":
            peers.sum(torch.ones(1))
        else:
            optimizer.step()

    for error in errors_of(work)[:2]:
        assert isinstance(error, SettingsError)
        assert error.peer == "participant-3"
        assert "A member takes a step while another makes another sum" in str(error)


@pytest.mark.parametrize("own", [True, False])
def test_scheduler_that_follows_the_own_loss_is_reported_with_the_remedy(own: bool) -> None:
    def work(peers: Peers) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], lr=1.0, peers=peers, samples=1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(4):
            parameter.grad = torch.ones(1)
            optimizer.step()
            loss = torch.tensor([1.0 if peers.me == "participant-2" else 1 / (step + 1)])
            schedule.step(loss if own else peers.sum(loss))

    errors = errors_of(work)
    if not own:
        assert errors == [None] * 3
        return
    for error in errors:
        assert isinstance(error, SettingsError)
        assert error.peer == "participant-2"
        assert "lr 0.1, momentum" in str(error)
        assert "give ReduceLROnPlateau a loss that all members have, such as peers.sum(loss)" in str(error)


def test_local_steps_of_some_members_are_reported_with_the_remedy() -> None:
    def work(peers: Peers) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], lr=1.0, peers=peers, samples=1)
        if peers.me == "participant-2":
            with optimizer.local_steps(), torch.no_grad():
                parameter.add_(1)
        else:
            optimizer.step()

    assert all("Use local_steps() at all members in the same rounds, or at none" in str(e) for e in errors_of(work))


# Models and rules that cannot be used.


def test_lazy_modules_are_rejected_until_they_have_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1))
    with local_peers(3) as members:
        for parameters in (model.parameters(), model.named_parameters()):
            with pytest.raises(InputError, match="of a lazy module has no shape yet; run one batch through the model"):
                ConfinedSGD(parameters, lr=0.1, peers=members[0], samples=1)
        model(torch.ones(2, 3))
        ConfinedSGD(model.parameters(), lr=0.1, peers=members[0], samples=1)


class IncompleteRule:
    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: dict[str, Any]) -> None:
        displacement -= gradient_sum


@pytest.mark.parametrize(
    ("rule", "missing"), [(IncompleteRule(), "scales_with_gradient, elementwise"), (3, "move, scales_with_gradient")]
)
def test_rule_without_its_attributes_is_rejected(rule: Any, missing: str) -> None:
    class OwnOptimizer(ConfinedOptimizer):
        def _rule(self, group: dict[str, Any]) -> Any:
            return rule if group["lr"] else SGDRule(0.1)

    with local_peers(3) as members:
        parameter = nn.Parameter(torch.zeros(1))
        with pytest.raises(InputError, match=f"{type(rule).__name__} has no {missing}"):
            OwnOptimizer([parameter], {"lr": 1.0}, peers=members[0], samples=1)
        OwnOptimizer([parameter], {"lr": 0.0}, peers=members[0], samples=1)
