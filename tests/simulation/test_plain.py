"""Centralised, local and federated training, against loops written out here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from cgd import JOINT_REVEALS_RECORDS, Cell, DivergenceError, confine, participant_seed
from cgd.optim.vertical import narrow
from cgd.simulation.baselines import BaselineSettings, centralised, federated_sgd, local
from support.networks import CLASSES, FEATURES, blocks, fully_connected, samples

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

build = fully_connected(FEATURES, 8, CLASSES)
TEST = samples(50, seed=7)


def setting(rows: int = 4, columns: int = 1, **changes: Any) -> BaselineSettings:
    given = {"steps": 15, "lr": 0.3, "test": TEST, "evaluate_every": 5, **changes}
    return BaselineSettings(build, blocks(rows, columns), **given)


def by_hand(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 15) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def started(model: torch.nn.Module, cell: Cell) -> torch.nn.Module:
    confine(model, 0.1, participant_seed(0, cell))
    return model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("columns", [1, 3])
def test_centralised_sees_all_samples_and_features(columns: int) -> None:
    given = setting(columns=columns)
    trained = centralised(given)
    x, y = given.pooled()
    assert x.shape == (60, FEATURES)
    assert same(trained.models["centralised"], by_hand(started(build(), Cell(0, 0)), x, y))
    assert [each.step for each in trained.history.evaluations] == [0, 5, 10, 15]
    outputs = trained.models["centralised"](TEST[0])
    accuracy = float((outputs.argmax(dim=1) == TEST[1]).float().mean())
    assert trained.history.evaluations[-1].accuracy == pytest.approx([accuracy])


@pytest.mark.parametrize("columns", [1, 3])
def test_local_is_everybody_alone(columns: int) -> None:
    given = setting(columns=columns)
    trained = local(given)
    assert list(trained.models) == [str(cell) for cell in given.blocks]
    for cell, block in given.blocks.items():
        start = build() if columns == 1 else narrow(build(), 4)
        assert same(trained.models[str(cell)], by_hand(started(start, cell), block.x, block.y))
    cell = Cell(1, columns - 1)
    own = TEST[0] if columns == 1 else TEST[0][:, 8:]
    accuracy = float((trained.models[str(cell)](own).argmax(dim=1) == TEST[1]).float().mean())
    assert trained.history.evaluations[-1].accuracy[list(given.blocks).index(cell)] == pytest.approx(accuracy)


def test_a_sample_of_participants_trains_as_if_all_did() -> None:
    everyone, some = local(setting(10)), local(setting(10), sample=3)
    assert len(some.models) == 3
    assert all(same(model, everyone.models[name]) for name, model in some.models.items())


@pytest.mark.parametrize("secure", [False, True])
def test_federated_sgd_is_centralised_training_of_one_model(secure: bool) -> None:
    given = setting()
    colony = federated_sgd(given, secure=secure)
    central = centralised(given).models["centralised"]
    for cell in colony.cells:
        assert same(colony.model(cell), central)


def test_federated_sgd_in_a_grid_has_one_model_for_all() -> None:
    colony = federated_sgd(setting(3, 3), mode="joint", accept=JOINT_REVEALS_RECORDS)
    models = {cell: dict(colony.model(cell).named_parameters()) for cell in colony.cells}
    for cell, parameters in models.items():
        assert torch.equal(parameters["2.weight"], models[Cell(0, 0)]["2.weight"])
        assert torch.equal(parameters["0.weight"], models[Cell(0, cell.column)]["0.weight"])
    assert not torch.equal(models[Cell(0, 0)]["0.weight"], models[Cell(0, 1)]["0.weight"])


@pytest.mark.parametrize("method", [centralised, local])
def test_it_resumes_to_the_same_bits(method: Any, tmp_path: Path) -> None:
    whole = method(setting())
    path = tmp_path / "run.pt"
    method(setting(steps=10, checkpoint=str(path)))
    resumed = method(setting(checkpoint=str(path)))
    assert resumed.history == whole.history
    for name, model in whole.models.items():
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), resumed.models[name].parameters(), strict=True)
        )


def test_divergence_is_told() -> None:
    with pytest.raises(DivergenceError, match=r"after \d+ steps; lower lr \(it is 1e\+38\)"):
        centralised(setting(lr=1e38))
