"""The best checkpoint: saved at every member, restored after a restart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cgd
from cgd.errors import InputError
from cgd.optim.recovery import BestCheckpoint
from cgd.secagg.journal import OptimizerState
from support.tabular import run_members


class StoredStates:
    """A recovery store that survives a restart of the members."""

    def __init__(self, inner: Any, states: dict[int, OptimizerState]) -> None:
        self._inner, self.states = inner, states

    def load(self, slot: int) -> OptimizerState | None:
        return self.states.get(slot) if slot else None  # slot 0 is the optimiser's

    def save(self, slot: int, steps: int, content: bytes, *, fixed: bool = False) -> None:
        if slot:
            assert fixed  # members compare it
            self.states[slot] = OptimizerState(steps, content, fixed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def train(
    peers: cgd.Peers, states: dict[int, OptimizerState], save_at: dict[int, int], lr: float = 1.0
) -> tuple[Any, ...]:
    """Take five steps of −lr each; save the checkpoint after some of them, as if after other numbers of steps."""
    peers.recovery = StoredStates(peers.recovery, states)
    model = torch.nn.Linear(2, 1, bias=False)
    cgd.confine(model, seed=b"s" * 32, start="zeros")
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=lr, peers=peers, samples=1)
    best = BestCheckpoint(optimizer)
    for step in range(1, 6):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        if step in save_at:
            best.save(save_at[step])
    best.restore()
    moved = model.weight - optimizer.state[model.weight]["origin"]
    return best.steps, moved.detach().round(decimals=3).tolist()[0]


def test_restore_uses_the_latest_checkpoint() -> None:
    assert run_members(train, [{}] * 3, [{2: 2, 4: 4}] * 3)[0] == (4, [-4.0, -4.0])


def test_restore_without_a_checkpoint_changes_nothing() -> None:
    assert run_members(train, [{}] * 3, [{}] * 3)[0] == (0, [-5.0, -5.0])


def test_restarted_member_uses_the_stored_checkpoint() -> None:
    """While it skips old steps, its displacement is already a newer one: here, one of another size."""
    states: list[dict[int, OptimizerState]] = [{}, {}, {}]
    run_members(train, states, [{3: 3}] * 3)
    assert [each[1].steps for each in states] == [3, 3, 3]
    restarted = run_members(train, states, [{1: 2, 2: 3}] * 3, [10.0] * 3)
    assert restarted[0] == (3, [-3.0, -3.0])
    newer = run_members(train, states, [{2: 3, 4: 4}] * 3, [10.0] * 3)
    assert newer[0] == (4, [-40.0, -40.0])
    assert states[0][1].steps == 4


def test_stored_checkpoint_of_a_different_model_is_rejected() -> None:
    def train_wider_model(peers: cgd.Peers, states: dict[int, OptimizerState]) -> None:
        peers.recovery = StoredStates(peers.recovery, states)
        model = torch.nn.Linear(3, 1, bias=False)
        cgd.confine(model, start="zeros")
        best = BestCheckpoint(cgd.ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=1))
        with pytest.raises(
            InputError, match="the best checkpoint that the members have stored does not fit this model"
        ):
            best.save(3)

    states: list[dict[int, OptimizerState]] = [{}, {}, {}]
    run_members(train, states, [{3: 3}] * 3)
    run_members(train_wider_model, states)
