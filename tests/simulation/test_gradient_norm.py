"""Step sizes divided by the norm of each layer's gradient, compared with explicit loops."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from cgd import JOINT_REVEALS_RECORDS, Cell, InputError, confine, participant_seed, public_seed, simulate
from cgd.simulation.baselines import BaselineSettings, centralised, local
from cgd.simulation.gradient_norm import GradientNormRule
from support.networks import CLASSES, FEATURES, blocks, fully_connected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

STEPS, LR = 25, 0.3  # one step, a period of 20, and 4 steps after it
build = fully_connected(FEATURES, 8, CLASSES)
first_only = pytest.mark.parametrize("first_only", [False, True], ids=["running", "first"])


def move_all(values: Sequence[torch.Tensor], gradients: Callable[[], Sequence[torch.Tensor]], first_only: bool) -> None:
    """Move tensors by 25 steps of the formula, written out as the authors' program describes it."""
    squares = [1.0] * len(values)
    sizes: list[float] = []
    for step in range(STEPS):
        current = gradients()
        for i, gradient in enumerate(current):
            squares[i] = 0.9 * squares[i] + 0.1 * float((gradient**2).sum())
            sizes.append(LR / math.sqrt(squares[i] + 1e-3))
            with torch.no_grad():
                values[i].sub_(sizes[i if first_only else -1] * gradient)
        if step % 20 == 0:
            squares = [1.0] * len(values)


def train_alone(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, first_only: bool) -> torch.nn.Module:
    parameters = list(model.parameters())

    def gradients() -> Sequence[torch.Tensor]:
        return torch.autograd.grad(functional.cross_entropy(model(x), y), parameters)

    move_all(parameters, gradients, first_only)
    return model


def initialise(cell: Cell) -> torch.nn.Module:
    with public_seed(0):
        model = build()
    confine(model, 0.1, participant_seed(0, cell))
    return model


def assert_close(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def settings(**changes: Any) -> BaselineSettings:
    return BaselineSettings(build, blocks(4), **{"steps": STEPS, "lr": LR, **changes})


@first_only
def test_baselines_move_as_the_formula_says(first_only: bool) -> None:
    rule = partial(GradientNormRule, first_only=first_only)
    pooled = settings().pooled()
    trained = centralised(settings(), rule=rule).model(Cell(0, 0))
    assert_close(trained, train_alone(initialise(Cell(0, 0)), *pooled, first_only))
    alone = local(settings(), 2, rule=rule).models
    for cell, block in settings().blocks.items():
        if str(cell) in alone:
            assert_close(alone[str(cell)], train_alone(initialise(cell), block.x, block.y, first_only))


@first_only
@pytest.mark.parametrize("engine", ["auto", "modules"])
def test_simulation_has_one_norm_for_each_parameter(first_only: bool, engine: Any) -> None:
    split = blocks(4)
    rule = partial(GradientNormRule, first_only=first_only)
    result = simulate(build, split, steps=STEPS, lr=LR, rule=rule, engine=engine, progress=False)
    models = {cell: initialise(cell) for cell in split}
    displacement = [torch.zeros_like(each) for each in build().parameters()]

    def mean_gradients() -> list[torch.Tensor]:
        total = [torch.zeros_like(each) for each in displacement]
        for cell, block in split.items():
            origin = list(models[cell].parameters())
            moved = [(a + b).detach().requires_grad_() for a, b in zip(origin, displacement, strict=True)]
            names = [name for name, _ in models[cell].named_parameters()]
            outputs = torch.func.functional_call(models[cell], dict(zip(names, moved, strict=True)), (block.x,))
            gradients = torch.autograd.grad(functional.cross_entropy(outputs, block.y), moved)
            total = [a + b * block.samples / 60 for a, b in zip(total, gradients, strict=True)]
        return total

    move_all(displacement, mean_gradients, first_only)
    for ours, expected in zip(result.displacement().values(), displacement, strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


def test_each_column_of_a_joint_grid_has_its_own_norm() -> None:
    rule = partial(GradientNormRule, first_only=True)
    same: dict[str, Any] = {"lr": LR, "mode": "joint", "accept": JOINT_REVEALS_RECORDS, "progress": False}
    plain = simulate(build, blocks(3, 2), steps=1, **same)
    scaled = simulate(build, blocks(3, 2), steps=1, rule=rule, **same)
    lengths = [each.numel() for each in (*[torch.empty(8, 6), torch.empty(8)] * 2, torch.empty(3, 8), torch.empty(3))]
    parts = zip(plain.flat_displacement.split(lengths), scaled.flat_displacement.split(lengths), strict=True)
    for step, scaled_step in parts:
        gradient = -step / LR
        size = LR / math.sqrt(0.9 + 0.1 * float((gradient**2).sum()) + 1e-3)
        assert torch.allclose(scaled_step, -size * gradient, atol=1e-6)


@pytest.mark.parametrize("arithmetic", ["float", "ring"])
def test_resumed_simulation_has_the_same_bits(arithmetic: Any, tmp_path: Path) -> None:
    same: dict[str, Any] = {"lr": LR, "rule": GradientNormRule, "arithmetic": arithmetic, "progress": False}
    whole = simulate(build, blocks(4), steps=STEPS, **same)
    for steps in (1, 7, 22, STEPS):
        resumed = simulate(build, blocks(4), steps=steps, checkpoint=tmp_path / "run.pt", **same)
    assert torch.equal(resumed.flat_displacement, whole.flat_displacement)
    with pytest.raises(InputError, match="rule was GradientNormRule.*is SGDRule"):
        simulate(build, blocks(4), steps=STEPS, lr=LR, arithmetic=arithmetic, checkpoint=tmp_path / "run.pt")


@first_only
def test_resumed_baseline_has_the_same_bits(first_only: bool, tmp_path: Path) -> None:
    rule = partial(GradientNormRule, first_only=first_only)
    whole = local(settings(), 2, rule=rule)
    for steps in (1, 7, 22, STEPS):
        resumed = local(settings(steps=steps, checkpoint=tmp_path / "run.pt"), 2, rule=rule)
    for name, model in whole.models.items():
        for ours, expected in zip(resumed.models[name].parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, expected)
    with pytest.raises(InputError, match="checkpoint of another run"):
        local(settings(checkpoint=tmp_path / "run.pt"), 2)


def test_baseline_resumes_from_a_checkpoint_of_a_former_version(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    local(settings(steps=7, checkpoint=path), 1)
    content = torch.load(path, weights_only=True)
    del content["optimizers"]
    torch.save(content, path)
    (resumed,) = local(settings(checkpoint=path), 1).models.values()
    (whole,) = local(settings(), 1).models.values()
    for ours, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=70))
def test_squared_norm_is_the_sum_of_the_squares(values: list[float]) -> None:
    state: dict[str, Any] = {}
    GradientNormRule(1.0, decay=0.0).move(torch.zeros(len(values)), torch.tensor(values), state)
    assert state["square"] == pytest.approx(math.fsum(each * each for each in values), rel=1e-14)


def test_size_of_the_steps_grows_until_the_reset() -> None:
    gradient, state = torch.full((2, 2), 1e-6), dict[str, Any]()
    divisors = []
    for _ in range(42):
        GradientNormRule(LR).move(torch.zeros(2, 2), gradient, state)
        divisors.append(state["divisor"])
    growing = [math.sqrt(0.9**k + 1e-3) for k in range(1, 21)]
    assert divisors == pytest.approx([growing[0], *growing, *growing, growing[0]], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": math.nan}, "lr is nan; it must be a finite number"),
        ({"lr": 0.5, "decay": 1.0}, "decay is 1.0"),
        ({"lr": 0.5, "eps": 0.0}, "eps is 0.0; .*above 0"),
        ({"lr": 0.5, "period": 0}, "period is 0; it must be at least 1"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GradientNormRule(**options)


def test_sum_over_columns_is_rejected() -> None:
    with pytest.raises(InputError, match="GradientNormRule .* sum over 2 columns; .* set shared='mean'"):
        simulate(build, blocks(3, 2), steps=1, lr=LR, rule=GradientNormRule, progress=False)
    simulate(build, blocks(3, 2), steps=1, lr=LR, rule=GradientNormRule, shared="mean", progress=False)
