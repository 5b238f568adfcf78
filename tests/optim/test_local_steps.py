"""Rounds of local steps: the members' updates are summed in place of gradients."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import cgd
from cgd import CGDError, ConfinedAdam, ConfinedSGD, InputError, Peers, UnconfinedWarning, confine, local_peers
from cgd.optim.vertical import JointFirstLayer
from support.training import Network, data, descend, makers, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd import ConfinedOptimizer

SAMPLES = (4, 8, 12)


def train_locally(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 3) -> None:
    descend(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, x, y, steps)


def take_rounds(optimizer: ConfinedOptimizer, model: nn.Module, x: torch.Tensor, y: torch.Tensor, rounds: int) -> None:
    for _ in range(rounds):
        with optimizer.local_steps():
            train_locally(model, x, y)


@pytest.mark.parametrize("kind", makers)
def test_displacement_moves_by_the_weighted_mean_of_the_updates(kind: str) -> None:
    """The reference: from the origin of each member plus D, mean updates as the gradients of torch's optimiser."""
    rounds, lr = 4, 0.01 if kind in {"adam", "amsgrad"} else 1.0

    def work(peers: Peers, number: int) -> tuple[nn.Module, nn.Module, torch.Tensor]:
        model = Network(torch.float64)
        confine(model, delta=0.1, start="zeros")
        start = copy.deepcopy(model)
        optimizer = makers[kind](model.parameters(), peers=peers, samples=SAMPLES[number])
        optimizer.param_groups[0]["lr"] = lr
        take_rounds(optimizer, model, *data(number, SAMPLES[number], torch.float64), rounds)
        return start, model, optimizer.displacement()

    with local_peers(3, bound=8.0, ring_bits=64) as members:
        results = members.run(work, range(3))

    displacement = Network(torch.float64)
    nn.utils.vector_to_parameters(torch.zeros_like(results[0][2]), displacement.parameters())
    reference = plain[kind](displacement.parameters())
    reference.param_groups[0]["lr"] = lr
    for _ in range(rounds):
        reference.zero_grad()
        for number, (start, _, _) in enumerate(results):
            local = copy.deepcopy(start)
            for mine, moved in zip(local.parameters(), displacement.parameters(), strict=True):
                mine.data += moved.data
            before = copy.deepcopy(local)
            train_locally(local, *data(number, SAMPLES[number], torch.float64))
            for moved, first, last in zip(
                displacement.parameters(), before.parameters(), local.parameters(), strict=True
            ):
                update = (first - last).detach() * SAMPLES[number] / sum(SAMPLES)
                moved.grad = update if moved.grad is None else moved.grad + update
        reference.step()
    expected = nn.utils.parameters_to_vector(displacement.parameters()).detach()
    assert expected.abs().max() > 0.01
    # Double precision and a ring of 64 bits: the two differ by accumulated rounding errors.
    torch.testing.assert_close(results[0][2], expected, rtol=1e-9, atol=1e-9)
    for start, model, moved_by in results:
        assert torch.equal(moved_by, results[0][2])
        weights = nn.utils.parameters_to_vector(start.parameters()) + moved_by
        assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_put_back_and_gradients_are_reset_after_the_block(dtype: torch.dtype) -> None:
    def work(peers: Peers) -> None:
        model = Network(dtype)
        confine(model, start="zeros")
        origin = copy.deepcopy(model)
        optimizer = ConfinedSGD(model.parameters(), lr=0.0, peers=peers, samples=8)
        x, y = data(0, dtype=dtype)
        with optimizer.local_steps():
            train_locally(model, x, y)
            assert not torch.equal(model.first.weight, origin.first.weight)
        for mine, first in zip(model.parameters(), origin.parameters(), strict=True):
            assert torch.equal(mine, first)
            assert mine.grad is None

    with local_peers(3) as members:
        members.run(work)


def test_steps_with_gradients_and_rounds_can_alternate() -> None:
    def work(peers: Peers, seed: int) -> torch.Tensor:
        model = Network()
        confine(model, start="zeros")
        optimizer = ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=8)
        x, y = data(seed)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for _ in range(2):
            descend(optimizer, model, x, y, steps=1)
            schedule.step()
            take_rounds(optimizer, model, x, y, rounds=1)
            schedule.step()
        assert optimizer.param_groups[0]["steps"] == 4
        return optimizer.displacement()

    with local_peers(3) as members:
        results = members.run(work, range(3))
    assert all(torch.equal(results[0], each) for each in results)


def test_towers_sum_the_updates_of_their_columns() -> None:
    """A grid of 3 × 2: the first layer's update is the mean of the column, that of the rest the mean of everyone."""
    columns = [local_peers([f"r{row}c{column}" for row in range(3)]) for column in range(2)]
    everyone = local_peers([f"r{row}c{column}" for column in range(2) for row in range(3)])

    def work(peers: Peers, own: Peers, size: float) -> tuple[float, float]:
        first, rest = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [first], "peers": own}, {"params": [rest]}]
        optimizer = ConfinedSGD(groups, 1.0, peers=peers, samples=4)
        with optimizer.local_steps(), torch.no_grad():
            first.sub_(size)
            rest.sub_(2 * size)
        return round(-float(first.detach()), 5), round(-float(rest.detach()), 5)

    with everyone, columns[0], columns[1]:
        results = everyone.run(work, [*columns[0], *columns[1]], [1, 2, 3, 4, 5, 6])
    assert results == [(2.0, 7.0)] * 3 + [(5.0, 7.0)] * 3


# Refusals and errors.


def failures(work: Callable[[Peers], object]) -> list[str]:
    """Return the error of each member, caught in its own function so that the others go on."""

    def caught(peers: Peers) -> str:
        try:
            work(peers)
        except CGDError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    with local_peers(3) as members:
        return members.run(caught)


def test_member_with_gradients_among_updates_is_reported_before_anything_is_opened() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        confine(model, start="zeros")
        before = copy.deepcopy(model)
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=8)
        sums = peers.traffic.sums
        try:
            if peers.me == "participant-3":
                descend(optimizer, model, *data(0), steps=1)
            else:
                take_rounds(optimizer, model, *data(0), rounds=1)
        finally:
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
            assert not optimizer.displacement().any()
            assert peers.traffic.sums == sums + 1  # that of the samples

    for error in failures(work):
        assert error.startswith("SettingsError: participant-3: ")
        assert "'ConfinedSGD with lr" in error
        assert "'ConfinedSGD of updates with lr" in error


def test_privacy_is_refused_with_updates() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        confine(model, start="zeros")
        privacy = cgd.Privacy(model, epsilon=8.0, delta=1e-3, steps=5)
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=8, privacy=privacy)
        with optimizer.local_steps():
            pytest.fail("the block was entered")

    assert all("no such bound. Call step() with gradients" in error for error in failures(work))


def test_joint_layer_is_refused_with_updates() -> None:
    def work(peers: Peers) -> None:
        layer = JointFirstLayer(nn.Linear(2, 3), peers, accept=cgd.JOINT_REVEALS_RECORDS)
        optimizer = ConfinedSGD(layer.parameters(), lr=1.0, peers=peers, samples=8)
        with optimizer.local_steps():
            pytest.fail("the block was entered")

    assert all("JointFirstLayer, whose row sums in every forward pass" in error for error in failures(work))


def test_step_inside_the_block_is_an_error_and_puts_the_weights_back() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        confine(model, start="zeros")
        before = copy.deepcopy(model)
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=8)
        try:
            with optimizer.local_steps():
                train_locally(model, *data(0))
                optimizer.step()
        finally:
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
        pytest.fail("no error")

    errors = failures(work)
    assert any("requested inside local_steps(); step the local optimiser there" in error for error in errors)


def test_error_inside_the_block_aborts_the_sum_for_all_and_the_members_can_continue() -> None:
    def work(peers: Peers) -> tuple[str, torch.Tensor]:
        model = Network()
        confine(model, start="zeros")
        before = copy.deepcopy(model)
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=8)
        outcome = "no error"
        try:
            with optimizer.local_steps():
                train_locally(model, *data(0))
                if peers.me == "participant-2":
                    raise ZeroDivisionError
        except (ZeroDivisionError, CGDError) as error:
            outcome = f"{type(error).__name__}: {error}"
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
        take_rounds(optimizer, model, *data(0), rounds=1)
        return outcome, optimizer.displacement()

    with local_peers(3) as members:
        results = members.run(work)
    assert results[1][0] == "ZeroDivisionError: "
    assert all("participant-2: aborted sum 1" in results[i][0] for i in (0, 2))
    assert all(torch.equal(results[0][1], displacement) for _, displacement in results)


def test_update_beyond_the_bound_is_located() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        confine(model, start="zeros")
        optimizer = ConfinedSGD(model.named_parameters(), lr=1.0, peers=peers, samples=8)
        with optimizer.local_steps(), torch.no_grad():
            model.last.weight[0, 3] += 100 if peers.me == "participant-2" else 1

    errors = failures(work)
    assert "RangeError: the update of parameter last.weight at index (0, 3) is -100" in errors[1]


def test_frozen_parameters_may_not_change_inside_the_block() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=8)
        with optimizer.local_steps():
            model.first.requires_grad_(False)
            train_locally(model, *data(0))

    assert any("requires_grad of a parameter was changed inside" in error for error in failures(work))


@pytest.mark.parametrize("in_block", [True, False], ids=["local steps", "second optimiser"])
def test_layer_that_the_confined_optimiser_does_not_have_may_not_change(in_block: bool) -> None:
    """Each member would train it alone, and a restarted one would repeat a step with another gradient."""

    def work(peers: Peers, moved: slice) -> str:
        with cgd.public_seed(7):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        confine(model, delta=0.1, seed=peers.seed)
        optimizer = ConfinedSGD(model[1].parameters(), 1.0, peers=peers, samples=8)
        x, y = torch.ones(8, 3), torch.ones(8, 1)
        descend(optimizer, model, x, y, steps=1)
        before = copy.deepcopy(model[1].state_dict())
        other = torch.optim.SGD(model[moved].parameters(), lr=0.1)
        try:
            if in_block:
                with optimizer.local_steps():
                    descend(other, model, x, y, steps=2)
            else:
                optimizer.zero_grad()
                model[0](x).sum().backward()
                other.step()
                optimizer.step()
        except InputError as error:
            assert not in_block or all(torch.equal(each, before[name]) for name, each in model[1].state_dict().items())
            return str(error)
        return ""

    with local_peers(3) as members:
        errors = members.run(work, [slice(0, 2 if in_block else 1)] * 3)
        if in_block:
            assert members.run(work, [slice(1, 2)] * 3) == ["", "", ""]
    assert all("0.weight has changed since cgd.confine, and the confined optimiser does not have" in e for e in errors)


def test_two_confined_optimisers_may_share_a_model() -> None:
    def work(peers: Peers) -> None:
        with cgd.public_seed(7):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        confine(model, delta=0.1, seed=peers.seed)
        optimizers = [ConfinedSGD(layer.parameters(), 0.1, peers=peers, samples=8) for layer in model]
        for optimizer in (*optimizers, *optimizers):
            descend(optimizer, model, torch.ones(8, 3), torch.ones(8, 1), steps=1)

    with local_peers(3) as members:
        members.run(work)


def test_block_without_a_local_step_is_a_zero_update_with_a_warning() -> None:
    def work(peers: Peers) -> torch.Tensor:
        model = Network()
        confine(model, start="zeros")
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=8)
        with optimizer.local_steps(), torch.no_grad():
            if peers.me != "participant-2":
                model.last.bias.add_(3)
        return optimizer.displacement()

    with local_peers(3) as members, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = members.run(work)
    assert all(float(each[-1]) == pytest.approx(2.0, abs=1e-6) for each in results)
    (warning,) = [each for each in caught if not issubclass(each.category, UnconfinedWarning)]
    assert "no weight was changed inside local_steps()" in str(warning.message)
    assert warning.filename == __file__


def test_unconfined_model_causes_one_warning_at_the_block() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=8)
        take_rounds(optimizer, model, *data(0), rounds=2)

    with local_peers(3) as members, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        members.run(work)
    assert [each.category for each in caught] == [UnconfinedWarning] * 3
    assert all(each.filename == __file__ for each in caught)


@pytest.mark.parametrize("gradient", [False, True])
def test_step_without_a_gradient_after_local_steps_is_warned_of_once(gradient: bool) -> None:
    """Out of habit: the end of the block has taken the step, and another one only applies the momentum again."""

    def work(peers: Peers) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = ConfinedSGD([parameter], lr=1.0, peers=peers, samples=4)
        optimizer.step()  # a member may have no gradient
        for _ in range(2):
            with optimizer.local_steps(), torch.no_grad():
                parameter.sub_(0.125)
            if gradient:
                parameter.grad = torch.ones(2)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.displacement()

    with warnings.catch_warnings(record=True) as caught, local_peers(3) as members:
        warnings.simplefilter("always")
        members.run(work)
    found = [str(each.message) for each in caught if "no parameter has a gradient" in str(each.message)]
    assert len(found) == (0 if gradient else 3)  # one at each member
    assert all("leave step() out" in each for each in found)


@pytest.mark.parametrize(("kind", "moved"), [("local steps", 16.0), ("adam", 0.01)])
def test_one_member_moves_a_weight_by_as_much_as_the_rule_allows(kind: str, moved: float) -> None:
    """What a member that steers gains in one sum (N5); it has all of the weight here, as it may claim."""

    def work(peers: Peers, number: int) -> torch.Tensor:
        model = Network()
        confine(model, start="zeros")
        build = ConfinedSGD if kind == "local steps" else ConfinedAdam
        lr = 1.0 if kind == "local steps" else moved
        optimizer = build(model.parameters(), lr=lr, peers=peers, samples=10**6 if number == 0 else 1)
        if kind == "adam":
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 15.99 if number == 0 else 0.001)
            optimizer.step()
            return optimizer.displacement()
        with optimizer.local_steps(), torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(15.99 if number == 0 else 0.001)
        return optimizer.displacement()

    with local_peers(3, ring_bits=64) as members:
        displacement = members.run(work, range(3))[0]
    torch.testing.assert_close(displacement.abs(), torch.full_like(displacement, moved), rtol=0.01, atol=0)
