"""The best model so far: kept by the members, restored by whoever was away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import cgd
from cgd.errors import InputError
from cgd.optim.best_checkpoint import BestCheckpoint
from cgd.secagg.journal import OptimizerState
from support.practice import together

if TYPE_CHECKING:
    from collections.abc import Callable


class Remembering:
    """What the members remember, between the lives of one."""

    def __init__(self, inner: Any, states: dict[int, OptimizerState]) -> None:
        self._inner, self.states = inner, states

    def recall(self, slot: int) -> OptimizerState | None:
        return self.states.get(slot) if slot else None  # slot 0 is the optimiser's

    def remember(self, slot: int, steps: int, content: Callable[[], bytes], *, fixed: bool = False) -> None:
        if slot:
            assert fixed  # members compare it
            self.states[slot] = OptimizerState(steps, content, fixed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def life(
    peers: cgd.Peers, states: dict[int, OptimizerState], keep_at: dict[int, int], lr: float = 1.0
) -> tuple[Any, ...]:
    """Five steps of −lr each; at some, the displacement is kept."""
    peers.memory = Remembering(peers.memory, states)
    model = torch.nn.Linear(2, 1, bias=False)
    cgd.confine(model, seed=b"s" * 32)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=lr, peers=peers, samples=1)
    best = BestCheckpoint(optimizer)
    for step in range(1, 6):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        if step in keep_at:
            best.keep(keep_at[step])
    best.restore()
    moved = model.weight - optimizer.state[model.weight]["origin"]
    return best.steps, moved.detach().round(decimals=3).tolist()[0]


def test_the_last_that_was_kept_is_restored() -> None:
    assert together(life, [{}] * 3, [{2: 2, 4: 4}] * 3)[0] == (4, [-4.0, -4.0])


def test_nothing_was_kept() -> None:
    assert together(life, [{}] * 3, [{}] * 3)[0] == (0, [-5.0, -5.0])


def test_who_was_away_gets_what_the_members_remember() -> None:
    """In its second life it passes over old steps with a newer displacement in place: here, one of another size."""
    states: list[dict[int, OptimizerState]] = [{}, {}, {}]
    together(life, states, [{3: 3}] * 3)
    assert [each[1].steps for each in states] == [3, 3, 3]
    again = together(life, states, [{1: 2, 2: 3}] * 3, [10.0] * 3)
    assert again[0] == (3, [-3.0, -3.0])
    newer = together(life, states, [{2: 3, 4: 4}] * 3, [10.0] * 3)
    assert newer[0] == (4, [-40.0, -40.0])
    assert states[0][1].steps == 4


def test_another_model_is_told() -> None:
    def wider(peers: cgd.Peers, states: dict[int, OptimizerState]) -> None:
        peers.memory = Remembering(peers.memory, states)
        model = torch.nn.Linear(3, 1, bias=False)
        cgd.confine(model)
        best = BestCheckpoint(cgd.ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=1))
        with pytest.raises(InputError, match="what the members remember of the best step does not fit this model"):
            best.keep(3)

    states: list[dict[int, OptimizerState]] = [{}, {}, {}]
    together(life, states, [{3: 3}] * 3)
    together(wider, states)
