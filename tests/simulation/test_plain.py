"""Centralised, local and federated training, compared with explicit loops."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from cgd import (
    JOINT_REVEALS_RECORDS,
    Cell,
    DivergenceError,
    InputError,
    LocalTraining,
    confine,
    participant_seed,
    public_seed,
)
from cgd.optim.displacement import SGDRule
from cgd.optim.vertical import build_tower
from cgd.simulation.baselines import BaselineSettings, centralised, federated_averaging, federated_sgd, local
from support.networks import CLASSES, FEATURES, blocks, fully_connected, samples

if TYPE_CHECKING:
    from pathlib import Path

build = fully_connected(FEATURES, 8, CLASSES)
TEST = samples(50, seed=7)


def make_settings(rows: int = 4, columns: int = 1, **changes: Any) -> BaselineSettings:
    values = {"steps": 15, "lr": 0.3, "test": TEST, "evaluate_every": 5, **changes}
    return BaselineSettings(build, blocks(rows, columns), **values)


def train_reference(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 15, momentum: float = 0.0
) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def initialise(cell: Cell, features: int | None = None) -> torch.nn.Module:
    """Return the initial model, or the tower for a number of features."""
    with public_seed(0):
        model = build() if features is None else build_tower(build(), features)
    confine(model, 0.1, participant_seed(0, cell))
    return model


def are_close(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("columns", [1, 3])
def test_centralised_trains_on_all_samples_and_features(columns: int) -> None:
    settings = make_settings(columns=columns)
    trained = centralised(settings)
    x, y = settings.pooled()
    assert x.shape == (60, FEATURES)
    assert are_close(trained.model(Cell(0, 0)), train_reference(initialise(Cell(0, 0)), x, y))
    assert [each.step for each in trained.history.evaluations] == [0, 5, 10, 15]
    outputs = trained.model(Cell(0, 0))(TEST[0])
    accuracy = float((outputs.argmax(dim=1) == TEST[1]).float().mean())
    assert trained.history.evaluations[-1].accuracy == pytest.approx([accuracy])


def test_momentum_is_that_of_torch_and_survives_a_kill(tmp_path: Path) -> None:
    rule = partial(SGDRule, momentum=0.9)
    settings = make_settings()
    trained = centralised(settings, rule=rule).model(Cell(0, 0))
    expected = train_reference(initialise(Cell(0, 0)), *settings.pooled(), momentum=0.9)
    assert are_close(trained, expected)
    for steps in (7, 15):
        resumed = centralised(make_settings(steps=steps, checkpoint=tmp_path / "run.pt"), rule=rule)
    for one, other in zip(resumed.model(Cell(0, 0)).parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 3])
def test_local_trains_each_participant_on_its_own_data(columns: int) -> None:
    settings = make_settings(columns=columns)
    trained = local(settings)
    assert list(trained.models) == [str(cell) for cell in settings.blocks]
    for cell, block in settings.blocks.items():
        initial = initialise(cell, None if columns == 1 else 4)
        assert are_close(trained.models[str(cell)], train_reference(initial, block.x, block.y))
    cell = Cell(1, columns - 1)
    own = TEST[0] if columns == 1 else TEST[0][:, 8:]
    accuracy = float((trained.models[str(cell)](own).argmax(dim=1) == TEST[1]).float().mean())
    assert trained.history.evaluations[-1].accuracy[list(settings.blocks).index(cell)] == pytest.approx(accuracy)


def test_local_sample_trains_the_same_models_as_all() -> None:
    everyone, some = local(make_settings(10)), local(make_settings(10), sample=3)
    assert len(some.models) == 3
    assert all(are_close(model, everyone.models[name]) for name, model in some.models.items())


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_federated_sgd_equals_centralised_training(secure: bool) -> None:
    settings = make_settings()
    result = federated_sgd(settings, secure=secure)
    central = centralised(settings).model(Cell(0, 0))
    for cell in result.cells:
        assert are_close(result.model(cell), central)


def test_federated_sgd_has_batches_and_rules() -> None:
    settings = make_settings()
    rule = partial(SGDRule, momentum=0.9)
    assert are_close(
        federated_sgd(settings, rule=rule).model(Cell(0, 0)), centralised(settings, rule=rule).model(Cell(0, 0))
    )
    full, batched = federated_sgd(settings), federated_sgd(settings, batches=3)
    assert not are_close(full.model(Cell(0, 0)), batched.model(Cell(0, 0)))
    assert batched.history.training_loss[-1] < batched.history.training_loss[0]


def test_federated_averaging_has_one_model_that_moves_by_the_mean_update() -> None:
    """With one local step on all records and lr 1, federated averaging is federated SGD with the local step size."""
    one_step = LocalTraining(lr=0.3)
    averaged = federated_averaging(make_settings(lr=1.0), one_step)
    for cell in averaged.cells:
        assert are_close(averaged.model(cell), federated_sgd(make_settings()).model(Cell(0, 0)))
    several = federated_averaging(make_settings(lr=1.0), LocalTraining(epochs=3, batch=5, lr=0.3))
    assert several.history.training_loss[-1] < averaged.history.training_loss[-1]


def test_federated_averaging_without_local_training_is_refused() -> None:
    with pytest.raises(InputError, match="local is a NoneType; .* or use federated_sgd without it"):
        federated_averaging(make_settings(), None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_federated_sgd_in_a_grid_has_one_common_model() -> None:
    result = federated_sgd(make_settings(3, 3), mode="joint", accept=JOINT_REVEALS_RECORDS)
    models = {cell: dict(result.model(cell).named_parameters()) for cell in result.cells}
    for cell, parameters in models.items():
        assert torch.equal(parameters["2.weight"], models[Cell(0, 0)]["2.weight"])
        assert torch.equal(parameters["0.weight"], models[Cell(0, cell.column)]["0.weight"])
    assert not torch.equal(models[Cell(0, 0)]["0.weight"], models[Cell(0, 1)]["0.weight"])


def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    uninterrupted = local(make_settings())
    path = tmp_path / "run.pt"
    local(make_settings(steps=10, checkpoint=str(path)))
    resumed = local(make_settings(checkpoint=str(path)))
    assert resumed.history == uninterrupted.history
    for name, model in uninterrupted.models.items():
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), resumed.models[name].parameters(), strict=True)
        )


def test_models_that_are_trained_in_parallel_have_the_same_bits() -> None:
    alone = local(make_settings())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = local(make_settings())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert together.history == alone.history
    for name, model in alone.models.items():
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), together.models[name].parameters(), strict=True)
        )


def test_divergence_raises_an_error() -> None:
    with pytest.raises(DivergenceError, match=r"after \d+ steps; lower lr \(it is 1e\+38\)"):
        centralised(make_settings(lr=1e38))
