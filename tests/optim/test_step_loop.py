"""A loop over `steps` takes one step in each pass: a step that a member leaves out is told when it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cgd import BatchSampler, CGDError, ConfinedSGD, InputError, Peers, confine, local_peers
from cgd.optim.flat_vectors import flatten_gradients
from support.training import Network, data, descend, mse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from cgd import ConfinedOptimizer

    Pass = Callable[[ConfinedOptimizer, nn.Module], None]

STEPS, ODD, PASS = 5, "participant-2", 2


def build(peers: Peers) -> tuple[nn.Module, ConfinedOptimizer]:
    model = Network()
    confine(model, start="zeros")
    return model, ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=8)


def step(optimizer: ConfinedOptimizer, model: nn.Module) -> None:
    descend(optimizer, model, *data(0), steps=1)


def round_of_local_steps(optimizer: ConfinedOptimizer, model: nn.Module) -> None:
    with optimizer.local_steps():
        descend(torch.optim.SGD(model.parameters(), lr=0.1), model, *data(0), steps=2)


def round_and_step(optimizer: ConfinedOptimizer, model: nn.Module) -> None:
    round_of_local_steps(optimizer, model)
    step(optimizer, model)


@pytest.mark.parametrize(
    ("usual", "odd", "message"),
    [
        (step, lambda *_: None, f"pass {PASS} of the loop over steps() took 0 steps"),
        (round_of_local_steps, lambda *_: None, f"pass {PASS} of the loop over steps() took 0 steps"),
        (round_of_local_steps, round_and_step, "Use local_steps() at all members in the same rounds"),
    ],
    ids=["left out", "round left out", "step after a round"],
)
def test_pass_without_its_step_stops_all_members_when_it_happens(usual: Pass, odd: Pass, message: str) -> None:
    passes: dict[str, int] = {}

    def train(peers: Peers) -> str:
        model, optimizer = build(peers)
        try:
            for number in optimizer.steps(STEPS):
                passes[peers.me] = number
                (odd if (peers.me, number) == (ODD, PASS) else usual)(optimizer, model)
        except CGDError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    with local_peers(3) as members:
        errors = members.run(train)
    assert passes[ODD] == PASS
    assert max(passes.values()) <= PASS + 1
    assert message in errors[1]
    assert all(error != "no error" for error in errors)


def test_pass_with_two_steps_is_an_error_though_all_members_take_them() -> None:
    """After a restart, its numbers would not be those of the steps."""

    def train(peers: Peers) -> None:
        model, optimizer = build(peers)
        for _ in optimizer.steps(STEPS):
            step(optimizer, model)
            step(optimizer, model)

    with local_peers(3) as members, pytest.raises(InputError, match="pass 0 of the loop over steps.. took 2 steps"):
        members.run(train)


def test_batch_without_its_step_is_told_at_once() -> None:
    def train(peers: Peers) -> None:
        model, optimizer = build(peers)
        sampler = BatchSampler(optimizer, batches=4)
        loader = DataLoader(TensorDataset(*data(0)), batch_sampler=sampler)
        for number, _ in sampler.steps(loader, epochs=2):
            if number == PASS:
                continue  # for example because torch's GradScaler was asked whether the gradient is finite
            step(optimizer, model)
        raise AssertionError

    with local_peers(3) as members, pytest.raises(InputError, match="pass 2 of the loop over steps.. took 0 steps"):
        members.run(train)


def test_scheduler_that_could_not_be_set_after_a_restart_is_rejected_before_the_first_step() -> None:
    with local_peers(3) as members:
        _, optimizer = build(members[0])
        with pytest.raises(InputError, match=r"ReduceLROnPlateau cannot continue .* loop over range\(count\)"):
            next(optimizer.steps(STEPS, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)))
        with pytest.raises(InputError, match=r"a function was given to steps\(\) as a scheduler"):
            next(optimizer.steps(STEPS, build))  # type: ignore[arg-type]


def test_last_pass_is_checked_too() -> None:
    def train(peers: Peers) -> None:
        model, optimizer = build(peers)
        for number in optimizer.steps(STEPS):
            if number < STEPS - 1:
                step(optimizer, model)

    with local_peers(3) as members, pytest.raises(InputError, match=f"pass {STEPS - 1} of the loop"):
        members.run(train)


@pytest.mark.parametrize("take", [step, round_of_local_steps])
def test_program_may_go_on_after_a_step_that_failed(take: Pass) -> None:
    def train(peers: Peers) -> tuple[int, torch.Tensor]:
        model, optimizer = build(peers)
        failed = 0
        for number in optimizer.steps(STEPS):
            try:
                if (peers.me, number) == (ODD, PASS):
                    with optimizer.local_steps():
                        raise ZeroDivisionError
                take(optimizer, model)
            except (CGDError, ZeroDivisionError):
                failed += 1
        return failed, optimizer.displacement()

    with local_peers(3) as members:
        results = members.run(train)
    assert [failed for failed, _ in results] == [1, 1, 1]
    assert all(torch.equal(results[0][1], displacement) for _, displacement in results)


def test_sum_with_zeros_is_the_gradient_of_the_others() -> None:
    """One of three takes a step without records, and another watches: it has the gradient of the third."""

    def train(peers: Peers) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = build(peers)
        own = torch.zeros(0)
        if peers.me == ODD:
            x, y = data(0)
            mse(model(x), y).backward()
            own = flatten_gradients(list(model.parameters()))
        optimizer.step()
        return own, -3 * optimizer.displacement() / 0.1

    with local_peers(3) as members:
        found = dict(zip([each.me for each in members], members.run(train), strict=True))
    own, _ = found.pop(ODD)
    for _, seen in found.values():
        torch.testing.assert_close(seen, own, atol=1e-6, rtol=0)
