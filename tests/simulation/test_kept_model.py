"""The model that a participant keeps: start + displacement + c·origin."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import Block, Cell, Grid, History, InputError, Spread, simulate
from cgd.simulation.kept_model import ORIGIN_SCALES, first_not_worse, hold_out
from support.networks import CLASSES, FEATURES, blocks, fully_connected, samples

if TYPE_CHECKING:
    from pathlib import Path

build = fully_connected(FEATURES, 8, CLASSES)
run = partial(simulate, build, progress=False, lr=0.5)


@pytest.mark.parametrize("start", ["model", "zeros"])
def test_model_has_a_multiple_of_the_origin(start: Any) -> None:
    result = run(blocks(3), steps=4, start=start)
    cell = Cell(1, 0)
    confined, half, common = (dict(result.model(cell, scale).named_parameters()) for scale in (1.0, 0.5, 0.0))
    origin = dict(result.origin(cell).draw())
    for name, values in confined.items():
        assert torch.equal(values, result.model(cell).get_parameter(name))
        assert torch.allclose(values - half[name], 0.5 * origin[name].float(), atol=1e-6)
        assert torch.allclose(values - common[name], origin[name].float(), atol=1e-6)
    for name, values in result.model(Cell(2, 0), 0.0).named_parameters():
        assert torch.equal(values, common[name])  # one model for all
        if start == "zeros":
            assert torch.equal(values, result.displacement()[name])


def test_held_out_records_are_not_trained_on() -> None:
    split = blocks(4, count=42)
    training, validation = hold_out(split, 0.2, seed=3)
    for cell, block in split.items():
        assert validation[cell].samples == 2
        together = torch.cat((training[cell].x, validation[cell].x))
        assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, block.x.tolist()))
        assert len(training[cell].y) == block.samples - 2
    assert not torch.equal(hold_out(split, 0.2, seed=4)[1][Cell(0, 0)].x, validation[Cell(0, 0)].x)
    kept = run(split, steps=5, keep=0.2, seed=3)
    assert torch.equal(kept.flat_displacement, run(training, steps=5, seed=3).flat_displacement)


@torch.no_grad()
def test_participants_choose_by_their_own_loss_and_evaluations_have_the_kept_models() -> None:
    x, y = samples(600)
    split, test = Grid(8).split(x[:400], y[:400]), (x[400:], y[400:])
    result = run(split, steps=60, delta=0.6, keep=0.4, test=test, evaluate_every=60, sample=3)
    last = result.history.evaluations[-1]
    cells = [cell for cell in result.cells if str(cell) in result.history.participants]
    _, validation = hold_out(split, 0.4, seed=0)
    for index, cell in enumerate(cells):
        own = validation[cell]
        losses = torch.stack(
            [functional.cross_entropy(result.model(cell, c)(own.x), own.y, reduction="none") for c in ORIGIN_SCALES]
        )
        chosen = ORIGIN_SCALES[first_not_worse(losses.double().numpy())]
        assert last.origin_scale[index] == chosen == result.choose_origin_scale(cell)
        kept = functional.cross_entropy(result.model(cell, chosen)(test[0]), test[1])
        assert last.kept_loss[index] == pytest.approx(float(kept), rel=1e-6)
    common = functional.cross_entropy(result.model(cells[0], 0.0)(test[0]), test[1])
    assert last.common_loss == pytest.approx([float(common)], rel=1e-6)
    assert len(last.kept_accuracy) == 3
    assert len(last.common_accuracy) == 1
    assert any(scale < 1 for scale in last.origin_scale)  # these origins are large
    assert Spread.of_losses(last.kept_loss).mean < Spread.of_losses(last.loss).mean
    assert History.from_json(result.history.as_json()) == result.history


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ([[1.0, 1.0], [0.5, 0.5]], 1),  # clearly better: no deviation
        ([[0.6, 0.8, 0.7, 0.7], [0.5, 0.5, 0.5, 0.5]], 1),  # 0.2 more, and an error of 0.041: 4.9 errors, limit 4.54
        ([[0.6, 0.8, 0.7, 0.6], [0.5, 0.5, 0.5, 0.5]], 0),  # 0.175 more, and an error of 0.048: 3.7 errors
        ([[0.2, 0.3], [0.5, 0.5]], 0),
        ([[9.0], [0.5]], 0),  # one record does not tell
        ([[9.0, 9.1], [0.2, 0.8], [0.4, 0.4]], 1),  # of those that are not worse, the smallest c
    ],
)
def test_the_smallest_scale_that_is_not_significantly_worse_is_chosen(losses: list[list[float]], chosen: int) -> None:
    assert first_not_worse(np.array(losses)) == chosen


def test_the_common_model_is_left_by_mistake_as_rarely_as_stated() -> None:
    """With equal candidates, one in a hundred is found worse; more than 30 of 1,000 with a probability below 1e-6."""
    losses = np.random.default_rng(0).normal(size=(1000, 2, 6))
    assert sum(first_not_worse(each) for each in losses) <= 30


def test_without_keep_there_is_nothing_to_choose_by() -> None:
    result = run(blocks(3), steps=1, test=samples(10))
    assert result.history.evaluations[-1].kept_loss == []
    with pytest.raises(InputError, match="no records were held out"):
        result.choose_origin_scale(Cell(0, 0))


def test_resumed_run_keeps_the_same_models(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"keep": 0.2, "test": samples(20), "evaluate_every": 2}
    whole = run(blocks(4), steps=6, **settings)
    run(blocks(4), steps=2, checkpoint=tmp_path / "run.pt", **settings)
    resumed = run(blocks(4), steps=6, checkpoint=tmp_path / "run.pt", **settings)
    assert resumed.history == whole.history
    with pytest.raises(InputError, match="keep was 0.2, is 0.3|data was"):
        run(blocks(4), steps=6, checkpoint=tmp_path / "run.pt", **{**settings, "keep": 0.3})


def test_kept_models_have_the_buffers_of_their_participant() -> None:
    def with_statistics() -> nn.Sequential:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))

    result = simulate(with_statistics, blocks(2), steps=3, lr=0.1, keep=0.2, progress=False)
    one, other = (dict(result.model(cell, 0.0).named_buffers()) for cell in result.cells)
    assert not torch.equal(one["1.running_mean"], other["1.running_mean"])


@pytest.mark.parametrize(
    ("split", "settings", "message"),
    [
        (blocks(3), {"keep": 1.0}, "keep is 1.0"),
        (blocks(3), {"keep": -0.1}, "keep is -0.1"),
        (blocks(3), {"keep": True}, "keep is True"),
        (blocks(3, 2), {"keep": 0.1}, "several columns"),
        (blocks(3), {"keep": 0.1, "common_origin": True}, "common origin"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(split: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(split, steps=1, **settings)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), None, "half", True])
def test_factor_of_the_origin_that_is_no_number_is_refused(scale: Any) -> None:
    """NaN would give a model whose every prediction is NaN, without an error."""
    with pytest.raises(InputError, match=f"origin_scale is {scale!r}; it must be a finite number"):
        run(blocks(3), steps=1).model(Cell(0, 0), scale)


def test_participant_that_is_not_in_the_grid_has_no_kept_model() -> None:
    with pytest.raises(InputError, match="r9c0 is not in a grid of 3 × 1"):
        run(blocks(3), steps=1, keep=0.2).choose_origin_scale(Cell(9, 0))


def test_a_participant_with_one_record_is_refused() -> None:
    x, y = samples(20)
    split = {Cell(0, 0): Block(Cell(0, 0), x[:19], y[:19]), Cell(1, 0): Block(Cell(1, 0), x[19:], y[19:])}
    with pytest.raises(InputError, match="r1c0 has one record"):
        run(split, steps=1, keep=0.1)
