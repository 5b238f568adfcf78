"""Origins that are drawn again in every step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import Cell, Grid, InputError, LocalTraining, Skew, simulate
from cgd.simulation.population import Participants
from support.networks import CLASSES, FEATURES, blocks, fully_connected, samples

if TYPE_CHECKING:
    from pathlib import Path

build = fully_connected(FEATURES, 8, CLASSES)
run = partial(simulate, build, progress=False, fresh_origins=True)


def test_origins_of_steps_differ_and_repeat() -> None:
    participants = Participants(build, blocks(2), fresh_origins=True)
    drawn = [participants.draw_origin(Cell(0, 0), step)["0.weight"] for step in (0, 1, 1)]
    assert torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], dict(participants.origin(Cell(0, 0)).draw())["0.weight"].float())
    constant = Participants(build, blocks(2))
    assert torch.equal(*(constant.draw_origin(Cell(0, 0), step)["0.weight"] for step in (0, 1)))


@pytest.mark.parametrize("engine", ["auto", "modules"])
def test_gradients_are_those_at_the_origins_of_the_step(engine: Any) -> None:
    split = blocks(3)
    result = run(split, steps=4, lr=0.5, engine=engine)
    participants = Participants(build, split, fresh_origins=True)
    displacement = torch.zeros(participants.layout.size)
    model = build()
    for step in range(4):
        total = torch.zeros_like(displacement)
        for cell, block in split.items():
            origin = torch.cat([each.reshape(-1) for each in participants.draw_origin(cell, step).values()])
            nn.utils.vector_to_parameters(origin + displacement, model.parameters())
            gradient = torch.autograd.grad(functional.cross_entropy(model(block.x), block.y), list(model.parameters()))
            total += block.samples / 60 * torch.cat([each.reshape(-1) for each in gradient])
        displacement -= 0.5 * total
    assert torch.allclose(result.flat_displacement, displacement, atol=1e-6)
    constant = simulate(build, split, steps=4, lr=0.5, engine=engine, progress=False)
    assert not torch.allclose(result.flat_displacement, constant.flat_displacement, atol=1e-3)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("local", [None, LocalTraining(batch=4, momentum=0.5)], ids=["gradients", "local"])
def test_engines_agree_and_resume(columns: int, local: LocalTraining | None, tmp_path: Path) -> None:
    engines: tuple[Any, Any] = ("auto", "modules")
    settings: dict[str, Any] = {"lr": 0.5, "local": local}
    found = [run(blocks(4, columns), steps=4, engine=engine, **settings) for engine in engines]
    assert torch.allclose(found[0].flat_displacement, found[1].flat_displacement, atol=1e-5)
    for engine, whole in zip(engines, found, strict=True):
        path = tmp_path / f"{engine}.pt"
        run(blocks(4, columns), steps=2, engine=engine, checkpoint=path, **settings)
        resumed = run(blocks(4, columns), steps=4, engine=engine, checkpoint=path, **settings)
        assert torch.equal(resumed.flat_displacement, whole.flat_displacement)


def test_displacement_does_not_adapt_to_the_origins_of_participants_with_different_classes() -> None:
    x, y = samples(600)
    split = Grid(12).split(x[:400], y[:400], skew=Skew(classes=1))
    settings: dict[str, Any] = {
        "steps": 150,
        "lr": 0.3,
        "momentum": 0.9,
        "delta": 0.5,
        "sample": 12,
        "evaluate_every": 150,
    }
    fresh, constant = (
        simulate(build, split, fresh_origins=each, test=(x[400:], y[400:]), progress=False, **settings)
        for each in (True, False)
    )
    accuracies = [torch.tensor(each.history.evaluations[-1].accuracy).mean() for each in (fresh, constant)]
    assert accuracies[0] > accuracies[1] + 0.1


def test_fresh_origins_are_refused_with_a_common_origin(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="common_origin and fresh_origins are both True"):
        run(blocks(3), steps=1, lr=0.1, common_origin=True)
    run(blocks(3), steps=1, lr=0.1, checkpoint=tmp_path / "run.pt")
    with pytest.raises(InputError, match="origins was fresh, is None"):
        simulate(build, blocks(3), steps=2, lr=0.1, checkpoint=tmp_path / "run.pt", progress=False)
