"""Simulations with a delay. `test_protocol.py` compares their bits with those of real participants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import cgd
from cgd.errors import InputError
from cgd.experiments.spec import RunSpec
from cgd.experiments.theory import ConvergenceBound

if TYPE_CHECKING:
    from pathlib import Path

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def simulate(steps: int, columns: int = 1, **options: Any) -> cgd.SimulationResult:
    blocks = cgd.Grid(rows=3, columns=columns).split(X, Y)
    return cgd.simulate(
        lambda: torch.nn.Sequential(torch.nn.Linear(3, 2)), blocks, steps=steps, lr=0.5, progress=False, **options
    )


def test_resumed_run_is_that_of_one_process(tmp_path: Path) -> None:
    """Also after the end, where the last sums have moved the model: the checkpoint is of the state before."""
    options: dict[str, Any] = {"momentum": 0.5, "delay": 3, "test": (X, Y), "evaluate_every": 1}
    whole = simulate(10, **options)
    for steps in (6, 6, 10, 10):
        resumed = simulate(steps, checkpoint=tmp_path / "run.checkpoint", **options)
    assert torch.equal(resumed.flat_displacement, whole.flat_displacement)
    assert resumed.history.as_json() == whole.history.as_json()
    assert torch.equal(simulate(6, **options).flat_displacement, simulate(6, **options).flat_displacement)


def test_model_moves_after_the_delay_and_by_all_sums() -> None:
    losses = simulate(6, delay=2).history.training_loss
    assert losses[0] == losses[1] == losses[2] != losses[3]
    linear = simulate(2, delay=1)
    first = simulate(1).flat_displacement
    assert torch.allclose(linear.flat_displacement, 2 * first)  # both gradients are those of the start


def test_checkpoint_of_another_delay_is_rejected(tmp_path: Path) -> None:
    simulate(4, delay=1, checkpoint=tmp_path / "run.checkpoint")
    with pytest.raises(InputError, match="delay"):
        simulate(4, delay=2, checkpoint=tmp_path / "run.checkpoint")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": -1}, "delay is -1; it is the number of steps"),
        ({"delay": True}, "delay is True; it is the number of steps"),
        ({"delay": 1.5}, "delay is 1.5; it is the number of steps"),
        ({"delay": 4}, "delay is 4 and there are 4 steps: all gradients would be those of the start"),
        ({"delay": 1, "columns": 3}, "delay is 1 and there are 3 columns"),
        ({"delay": 1, "fresh_origins": True}, "delay is 1 and there are fresh origins"),
    ],
)
def test_delays_that_cannot_be_used_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(4, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": -1}, "delay is -1"),
        ({"delay": 5, "steps": 5}, "delay is 5 and there are 5 steps"),
        ({"delay": 1, "rows": 3, "columns": 2}, "a delay is for one column"),
        ({"delay": 1, "method": "fedsgd"}, "only cgd uses it"),
        ({"delay": 1, "fresh_origins": True}, "delay is 1 and fresh_origins is true"),
    ],
)
def test_specs_of_delays_that_cannot_be_used_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunSpec(**options)


def test_delay_is_a_part_of_a_stored_spec_only_if_there_is_one() -> None:
    assert "delay" not in RunSpec().as_json()
    assert RunSpec.from_table(RunSpec(delay=2).as_json(), "a spec").delay == 2


def test_bound_of_theorem_1_grows_with_the_delay() -> None:
    bound = ConvergenceBound(optimum=0.1, epsilon=[0.5], distance=2.0, gradient=3.0, lipschitz=0.25)
    without, with_two = bound.terms(100, 0.01, 0.5), bound.terms(100, 0.01, 0.5, delay=2)
    assert {name: with_two[name] for name in without} == without
    assert with_two["τ"] == pytest.approx(2 * bound.terms(100, 0.01, 0.5, delay=1)["τ"])
    assert bound.terms(100, 0.0, 0.5, delay=1)["τ"] == pytest.approx(0.5 * 3.0 * 2.0 * 0.25)  # α·G·D·L
