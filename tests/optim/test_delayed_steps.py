"""Steps with a delay: what moves the displacement, what overlaps, and what is refused."""

from __future__ import annotations

import copy
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn

import cgd
from cgd.errors import InputError, PeerAbortedError, RangeError, RemoteProtocolError, SettingsError
from cgd.optim.delayed_steps import MAX_DELAY
from cgd.optim.recovery import BestCheckpoint, read_digests
from cgd.optim.vertical import JointFirstLayer
from support.training import data, mse

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd import ConfinedOptimizer, Peers

NAMES = ["ada", "bob", "cleo"]
DEADLINE_SECONDS = 120.0


def small_model(peers: Peers) -> nn.Linear:
    with cgd.public_seed(7):
        model = nn.Linear(3, 1)
    cgd.confine(model, delta=0.1, seed=peers.me.encode().ljust(32, b"."))
    return model


def own_data(peers: Peers) -> tuple[torch.Tensor, torch.Tensor]:
    return data(sum(map(ord, peers.me)), 6 + len(peers.me))


def backward(optimizer: ConfinedOptimizer, model: nn.Module, peers: Peers) -> None:
    x, y = own_data(peers)
    optimizer.zero_grad()
    mse(model(x), y).backward()


def run(train: Callable[..., Any], *arguments: Any) -> list[Any]:
    with cgd.local_peers(NAMES, timeout=DEADLINE_SECONDS) as members:
        return members.run(train, *([each] * 3 for each in arguments))


@pytest.mark.parametrize("delay", [1, 2, 4])
@pytest.mark.parametrize("drained", [None, 5])
def test_step_moves_by_the_sum_that_was_entered_delay_steps_before(delay: int, drained: int | None) -> None:
    """The gradients of all members at the displacement of each step, computed again, with the lr of their step."""
    steps = 9

    def train(peers: Peers) -> tuple[list[torch.Tensor], nn.Module]:
        model = small_model(peers)
        optimizer = cgd.ConfinedSGD(
            model.parameters(), lr=0.2, peers=peers, samples=len(own_data(peers)[0]), delay=delay
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        seen = []
        for step in range(steps):
            seen.append(optimizer.displacement())
            backward(optimizer, model, peers)
            optimizer.step()
            schedule.step()
            if step + 1 == drained:
                optimizer.drain()
        optimizer.drain()
        return [*seen, optimizer.displacement()], model

    with cgd.local_peers(NAMES) as members:
        results = members.run(train)
        origins = [nn.utils.parameters_to_vector(model.parameters()) - seen[-1] for seen, model in results]
        samples = [own_data(each) for each in members]
    for seen, _ in results[1:]:
        assert all(map(torch.equal, seen, results[0][0]))
    displacements = results[0][0]
    total = sum(len(x) for x, _ in samples)

    def gradient(displacement: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(4)
        for origin, (x, y) in zip(origins, samples, strict=True):
            weights = (origin + displacement).detach().requires_grad_()
            mse(x @ weights[:3, None] + weights[3], y).backward()
            assert weights.grad is not None
            found += len(x) / total * weights.grad
        return found

    moved, entered = torch.zeros(4), list[tuple[float, torch.Tensor]]()
    for step in range(steps):
        assert torch.allclose(displacements[step], moved, atol=1e-6)
        entered.append((0.2 * 0.5**step, gradient(displacements[step])))
        while len(entered) > (0 if step + 1 == drained else delay):
            lr, total_gradient = entered.pop(0)
            moved = moved - lr * total_gradient
    for lr, total_gradient in entered:
        moved = moved - lr * total_gradient
    assert torch.allclose(displacements[-1], moved, atol=1e-6)
    assert displacements[-1].abs().max() > 0.05


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_member_that_is_late_by_the_delay_stops_nobody(delay: int) -> None:
    """Ada computes the gradient of step 2 for as long as the others can go on."""
    late_step, steps = 2, 8
    reached = dict.fromkeys(NAMES, 0)
    changed, waiting = threading.Condition(), threading.Event()

    def train(peers: Peers) -> torch.Tensor:
        model = small_model(peers)
        optimizer = cgd.ConfinedSGD(
            model.parameters(), lr=0.1, peers=peers, samples=len(own_data(peers)[0]), delay=delay
        )
        for step in optimizer.steps(steps):
            backward(optimizer, model, peers)
            with changed:
                reached[peers.me] = step
                changed.notify_all()
            if peers.me == "ada" and step == late_step:
                with changed:  # the others have computed the gradients of all steps up to late_step + delay
                    assert changed.wait_for(
                        lambda: min(reached["bob"], reached["cleo"]) == late_step + delay, DEADLINE_SECONDS
                    )
                waiting.set()
            optimizer.step()
            if peers.me != "ada" and step == late_step + delay:
                assert waiting.is_set()  # the others needed ada's gradient to get here
        return optimizer.displacement()

    one, two, three = run(train)
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def test_other_sums_of_a_program_come_after_those_in_progress() -> None:
    def train(peers: Peers) -> list[int]:
        model = small_model(peers)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=len(own_data(peers)[0]), delay=3)
        totals = []
        for _ in optimizer.steps(8):
            backward(optimizer, model, peers)
            optimizer.step()
            totals.append(int(peers.sum(torch.tensor([1]))))
        return totals

    assert run(train) == [[3] * 8] * 3


def test_program_that_forgets_the_last_sums_is_warned() -> None:
    def train(peers: Peers) -> None:
        model = small_model(peers)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=len(own_data(peers)[0]), delay=2)
        for _ in range(4):
            backward(optimizer, model, peers)
            optimizer.step()

    with pytest.warns(UserWarning, match=r"ends with 2 gradient sums that its model has not moved by.*drain\(\)"):
        run(train)


@pytest.mark.parametrize("delay", [-1, True, 1.0, "1", None, MAX_DELAY + 1])
def test_invalid_delay_is_rejected(delay: Any) -> None:
    with cgd.local_peers(3) as members, pytest.raises(InputError, match="delay is .*; it is the number of steps"):
        cgd.ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=members[0], samples=1, delay=delay)


def test_delay_must_be_below_the_number_of_steps() -> None:
    with cgd.local_peers(3) as members:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = cgd.ConfinedSGD([parameter], lr=0.1, peers=members[0], samples=1, delay=5)
        with pytest.raises(InputError, match="delay is 5 and there are 5 steps: all gradients would be those of the"):
            next(optimizer.steps(5))


def test_sums_of_a_grid_cannot_be_delayed() -> None:
    with cgd.local_peers(3) as column, cgd.local_peers(3) as everyone:
        groups = [{"params": [nn.Parameter(torch.zeros(2))], "peers": column[0]}]
        with pytest.raises(InputError, match="delay is 1, and the participants form a grid"):
            cgd.ConfinedSGD(groups, lr=0.1, peers=everyone[0], samples=1, delay=1)
        with pytest.raises(InputError, match="JointFirstLayer: its row sums the activations"):
            layer = JointFirstLayer(nn.Linear(2, 3), column[0], accept=cgd.JOINT_REVEALS_RECORDS)
            cgd.ConfinedSGD(layer.parameters(), lr=0.1, peers=everyone[0], samples=1, delay=1)


def test_state_has_no_sums_in_progress() -> None:
    def train(peers: Peers) -> list[torch.Tensor]:
        model = small_model(peers)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "peers": peers, "samples": len(own_data(peers)[0])}
        optimizer = cgd.ConfinedSGD(model.parameters(), delay=2, **options)
        for _ in range(4):
            backward(optimizer, model, peers)
            optimizer.step()
        for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(InputError, match=r"2 steps are in progress, because delay is 2; call optimizer.drain"):
                call()
        optimizer.drain()
        state = copy.deepcopy(optimizer.state_dict())
        ends = []
        for each in (optimizer, None):
            if each is None:
                model = small_model(peers)
                each = cgd.ConfinedSGD(model.parameters(), delay=2, **options)
                each.load_state_dict(state)
            for _ in range(4):
                backward(each, model, peers)
                each.step()
            each.drain()
            ends.append(each.displacement())
        return ends

    for ends in run(train):
        assert torch.equal(*ends)


def test_layers_do_not_change_while_sums_are_in_progress() -> None:
    def train(peers: Peers) -> None:
        model = small_model(peers)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=len(own_data(peers)[0]), delay=1)
        for _ in range(3):
            backward(optimizer, model, peers)
            optimizer.step()
        model.bias.requires_grad_(False)
        backward(optimizer, model, peers)
        optimizer.step()

    with pytest.raises(InputError, match=r"1 steps were entered with the former ones; call optimizer.drain\(\) before"):
        run(train)


def test_another_delay_is_reported_before_anything_is_opened() -> None:
    def train(peers: Peers) -> None:
        model, delay = small_model(peers), 2 if peers.me == "bob" else 1
        optimizer = cgd.ConfinedSGD(
            model.parameters(), lr=0.1, peers=peers, samples=len(own_data(peers)[0]), delay=delay
        )
        for _ in optimizer.steps(4):
            backward(optimizer, model, peers)
            optimizer.step()

    with pytest.raises(SettingsError, match="delayed by 2"):
        run(train)


@pytest.mark.parametrize("bad", [math.nan, 99.0])
def test_gradient_out_of_range_is_an_error_of_its_own_step_and_the_step_can_be_repeated(bad: float) -> None:
    errors: dict[str, list[BaseException]] = {name: [] for name in NAMES}

    def train(peers: Peers, disturbed: bool) -> torch.Tensor:
        model = small_model(peers)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=len(own_data(peers)[0]), delay=2)

        def retry(call: Callable[[], Any]) -> None:
            for _ in range(3):
                try:
                    call()
                    return
                except (RangeError, RemoteProtocolError) as error:
                    errors[peers.me].append(error)
                    if isinstance(error, RangeError):
                        backward(optimizer, model, peers)
            raise AssertionError(errors)

        for step in range(6):
            backward(optimizer, model, peers)
            if disturbed and step == 3 and peers.me == "bob":
                gradient = model.bias.grad
                assert gradient is not None
                gradient.fill_(bad)
            retry(optimizer.step)
        retry(optimizer.drain)
        return optimizer.displacement()

    expected = run(train, False)
    assert errors == {name: [] for name in NAMES}
    disturbed = run(train, True)
    assert all(map(torch.equal, disturbed, expected))
    assert [type(each) for each in errors["bob"]] == [RangeError]
    assert "the gradient of parameter number 1" in str(errors["bob"][0])
    for name in ("ada", "cleo"):
        assert [type(each) for each in errors[name]] == [PeerAbortedError]


def test_noise_is_charged_for_each_sum() -> None:
    def train(peers: Peers) -> tuple[int, torch.Tensor]:
        model = small_model(peers)
        x, y = data(sum(map(ord, peers.me)), 60)
        privacy = cgd.Privacy(model, epsilon=8.0, delta=1e-4, steps=6)
        options: dict[str, Any] = {"peers": peers, "samples": len(x), "privacy": privacy}
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, delay=2, **options)
        for _ in optimizer.steps(6):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
        return privacy.spent().openings, optimizer.displacement()

    (one, first), (two, second), (three, third) = run(train)
    assert (one, two, three) == (7, 7, 7)  # the number of records, and six steps
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize(("delay", "lr", "stable"), [(1, 0.9, True), (1, 1.1, False), (2, 0.55, True), (2, 0.7, False)])
def test_updates_of_local_steps_need_a_smaller_step_size(delay: int, lr: float, stable: bool) -> None:
    """Members that train until nothing is left to learn: stable below 2·sin(π/(2·(2τ + 1))), as the docs say."""
    assert stable == (lr < 2 * math.sin(math.pi / (2 * (2 * delay + 1))))

    def train(peers: Peers) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = cgd.ConfinedSGD([parameter], lr=lr, peers=peers, samples=1, delay=delay)
        for _ in optimizer.steps(60):
            with optimizer.local_steps(), torch.no_grad():
                parameter.fill_(0.01)  # the minimum of the loss
        return optimizer.displacement()

    with cgd.local_peers(NAMES, bound=1e6, ring_bits=64) as members:
        end = members.run(train)[0].item()
    assert (abs(end - 0.01) < 0.005) == stable


def test_best_checkpoint_is_saved_between_sums() -> None:
    def train(peers: Peers) -> tuple[torch.Tensor, torch.Tensor]:
        model = small_model(peers)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=len(own_data(peers)[0]), delay=2)
        best, seen = BestCheckpoint(optimizer), torch.zeros(0)
        for step in optimizer.steps(7):
            backward(optimizer, model, peers)
            optimizer.step()
            if step == 4:
                best.save(step + 1)
                seen = optimizer.displacement()
        best.restore()
        origin = torch.cat([optimizer.state[each]["origin"].flatten() for each in model.parameters()])
        return seen, nn.utils.parameters_to_vector(model.parameters()).detach() - origin

    for seen, restored in run(train):
        assert torch.allclose(seen, restored, atol=1e-6)


def test_stored_digests_are_checked() -> None:
    good = torch.zeros(2, 32, dtype=torch.uint8)
    stored = safetensors.torch.save({"digests": good})
    assert read_digests(stored, 2) == [bytes(32)] * 2
    with pytest.raises(InputError, match="delay of at least 2, and delay is 1; continue with the delay"):
        read_digests(stored, 1)
    for bad in (torch.zeros(2, 31, dtype=torch.uint8), torch.zeros(2, 32), torch.zeros(64, dtype=torch.uint8)):
        with pytest.raises(InputError, match="digests of earlier states are malformed"):
            read_digests(safetensors.torch.save({"digests": bad}), 2)
