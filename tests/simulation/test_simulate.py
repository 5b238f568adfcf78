from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import (
    JOINT_REVEALS_RECORDS,
    Block,
    Cell,
    DivergenceError,
    Grid,
    History,
    InputError,
    RangeError,
    Ring,
    Spread,
    confine,
    participant_seed,
    public_seed,
    simulate,
)
from cgd.optim.displacement import SGDRule
from support.networks import CLASSES, FEATURES, blocks, fully_connected, samples

if TYPE_CHECKING:
    from pathlib import Path

    from cgd import SimulationResult

build = fully_connected(FEATURES, 8, CLASSES)


def run(split: Any = None, model: Any = build, **settings: Any) -> SimulationResult:
    arguments = {"steps": 5, "lr": 0.5, "progress": False, **settings}
    return simulate(model, blocks(4) if split is None else split, **arguments)


# Models and displacement


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "modules"])
def test_single_participant_equals_plain_training(engine: Any) -> None:
    """origin + displacement is rounded once more per step than a weight.

    With this lr a step of gradient descent does not increase distances, so after T steps each coordinate differs by at
    most T rounding errors of a weight, times a small factor for those of the gradients.
    """
    x, y = samples(40)
    steps = 30
    result = run(Grid(1).split(x, y, seed=None), steps=steps, lr=0.1, engine=engine)
    with public_seed(0):
        model = build()
    confine(model, 0.1, participant_seed(0, Cell(0, 0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    for ours, theirs in zip(result.model(Cell(0, 0)).parameters(), model.parameters(), strict=True):
        assert float((ours - theirs).detach().abs().max()) < 4 * steps * 2**-24
    assert result.history.training_loss == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
def test_models_are_origin_plus_displacement() -> None:
    result = run(blocks(3, 2), mode="joint", accept=JOINT_REVEALS_RECORDS, start="zeros")
    assert len(result) == 6
    for cell in result.cells:
        displacement = result.displacement(cell.column)
        for name, origin in result.origin(cell).draw():
            parameter = dict(result.model(cell).named_parameters())[name]
            assert torch.equal(parameter, origin.float() + displacement[name])
    first, second = result.displacement(0), result.displacement(1)
    assert torch.equal(first["2.weight"], second["2.weight"])
    assert not torch.equal(first["0.weight"], second["0.weight"])


@pytest.mark.slow
def test_delta_may_differ_between_participants() -> None:
    result = run(blocks(3), steps=0, start="zeros", delta=lambda cell: 0.01 * 10.0**cell.row)
    spreads = [float(result.model(Cell(row, 0)).get_parameter("0.weight").detach().std()) for row in range(3)]
    assert spreads == pytest.approx([0.01, 0.1, 1.0], rel=0.4)


@pytest.mark.slow
def test_common_origin_equals_federated_sgd() -> None:
    split = blocks(4)
    common = run(split, common_origin=True, steps=20)
    models = [common.model(cell) for cell in common.cells]
    assert all(torch.equal(models[0][0].weight, model[0].weight) for model in models)  # type: ignore[index]
    x, y = (torch.cat([getattr(block, part) for block in split.values()]) for part in ("x", "y"))
    pooled = run(Grid(1).split(x, y, seed=None), steps=20)
    for name, moved in common.displacement().items():
        assert torch.allclose(moved, pooled.displacement()[name], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "times"), [("mean", 1), ("sum", 3), (None, 3)])
def test_shared_sums_or_averages_gradients_of_shared_layers(shared: Any, times: int) -> None:
    split = blocks(2, 3)
    one = run(split, steps=1, mode="towers", shared="mean").displacement()
    other = run(split, steps=1, mode="towers", shared=shared).displacement()
    assert torch.allclose(other["2.weight"], times * one["2.weight"], rtol=1e-5)
    assert torch.equal(other["0.weight"], one["0.weight"])


@pytest.mark.slow
def test_evaluation_of_sampled_participants_and_fused_rows() -> None:
    x, y = samples(300, seed=3)
    result = run(Grid(10, 3).split(x[:200], y[:200]), steps=60, sample=6, evaluate_every=25, test=(x[200:], y[200:]))
    history = result.history
    assert [each.step for each in history.evaluations] == [0, 25, 50, 60]
    last = history.evaluations[-1]
    assert len(last.loss) == len(last.accuracy) == len(history.participants) == 6
    assert len(last.fused_accuracy) == 4
    cell = next(cell for cell in result.cells if str(cell) == history.participants[2])
    outputs = result.model(cell)(x[200:, 4 * cell.column : 4 * cell.column + 4])
    assert last.accuracy[2] == pytest.approx(float((outputs.argmax(dim=1) == y[200:]).float().mean()))
    assert (
        sum(last.fused_accuracy) / 4 > sum(last.accuracy) / 6 + 0.1
    )  # a row has more information than one of its columns
    assert History.from_json(json.loads(json.dumps(history.as_json()))) == history
    spread = Spread.of_accuracies(last.accuracy)
    assert spread.worst == min(last.accuracy) <= spread.mean
    assert Spread.of_losses(last.loss).worst == max(last.loss)


@pytest.mark.slow
def test_joint_row_predicts_like_one_network() -> None:
    """In `joint` the row adds its pre-activations, so its first layers side by side form one layer."""
    result = run(blocks(3, 3), mode="joint", accept=JOINT_REVEALS_RECORDS, steps=10)
    x, _ = samples(20, seed=8)
    full_model = build()
    parts = [result.model(Cell(1, column))[0] for column in range(3)]  # type: ignore[index]
    with torch.no_grad():
        full_model[0].weight.copy_(torch.cat([part.weight for part in parts], dim=1))  # type: ignore[operator]
        full_model[0].bias.copy_(sum(part.bias for part in parts))  # type: ignore[operator]
        for name in ("2.weight", "2.bias"):
            full_model.get_parameter(name).copy_(result.model(Cell(1, 2)).get_parameter(name))
        assert torch.allclose(result.outputs(Cell(1, 2), x), full_model(x), atol=1e-5)


@pytest.mark.slow
def test_mu_decreases_the_step_size() -> None:
    fixed, shrinking = (run(steps=40, mu=mu, hold=10) for mu in (0.0, 0.001))
    assert fixed.history.training_loss[:12] == shrinking.history.training_loss[:12]
    assert fixed.history.training_loss[-1] < shrinking.history.training_loss[-1]


def test_run_with_mu_continues_a_run_with_a_fixed_step_size(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run(steps=4, checkpoint=path)
    whole, continued = (run(steps=9, mu=0.5, hold=4, checkpoint=each) for each in (None, path))
    assert torch.equal(whole.flat_displacement, continued.flat_displacement)
    assert whole.history.training_loss == continued.history.training_loss
    run(steps=5, checkpoint=tmp_path / "later.pt")
    with pytest.raises(InputError, match="schedule was 'fixed', is"):
        run(steps=9, mu=0.5, hold=4, checkpoint=tmp_path / "later.pt")
    with pytest.raises(InputError, match="is 'fixed'"):
        run(steps=9, checkpoint=path)


# Modules and losses


@pytest.mark.slow
def test_simulate_convolutional_network() -> None:
    images = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 2
    images[labels == 0, :, :, :4] += 1  # the left half is brighter
    images[labels == 1, :, :, 4:] += 1

    def convolutional() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 16),
            nn.Dropout(0.1),
            nn.Linear(16, 2),
        )

    result = run(Grid(5).split(images, labels), convolutional, steps=150, lr=0.3, test=(images, labels))
    assert min(result.history.evaluations[-1].accuracy) > 0.8
    again = run(Grid(5).split(images, labels), convolutional, steps=150, lr=0.3, test=(images, labels))
    assert again.history == result.history  # including dropout


@pytest.mark.slow
def test_simulate_autoencoder() -> None:
    """Unsupervised training: the samples are the labels."""
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        2, 6, generator=torch.Generator().manual_seed(1)
    )
    autoencoder = fully_connected(6, 4, 2, 4, 6, activation=nn.Tanh)
    result = run(Grid(6).split(x, x), autoencoder, loss=functional.mse_loss, steps=600, lr=0.2, test=(x, x))
    first, last = result.history.evaluations[0], result.history.evaluations[-1]
    assert max(last.loss) < 0.4 * min(first.loss)
    assert last.accuracy == []


@pytest.mark.slow
def test_simulate_linear_regression() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    result = run(
        Grid(5).split(x, y),
        lambda: nn.Linear(3, 1, dtype=torch.float64),
        loss=functional.mse_loss,
        steps=300,
        lr=0.2,
        delta=1e-3,
    )
    found = result.model(Cell(2, 0)).get_parameter("weight")
    assert torch.allclose(found, torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64), atol=0.01)


@pytest.mark.slow
def test_buffers_differ_between_participants() -> None:
    def with_norm() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))

    result = run(blocks(3), with_norm, steps=20)
    means = [result.model(cell).get_buffer("1.running_mean") for cell in result.cells]
    assert not torch.equal(means[0], means[1])
    assert all(mean.abs().sum() > 0 for mean in means)


# Invalid input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"delta": 0}, "delta is 0"),
        ({"delta": "small"}, "delta is 'small'"),
        ({"mode": "tower"}, "choose towers or joint"),
        (
            {"mode": "joint"},
            r"one colluder in each column computes raw records .* accept = 'joint reveals raw records'",
        ),
        ({"mode": "joint", "accept": "yes"}, "accept is 'yes'"),
        ({"accept": True}, "accept is True"),
        ({"arithmetic": "rings"}, "arithmetic is 'rings'"),
        ({"shared": "median"}, "mean or sum"),
        ({"mu": -1.0}, "mu is -1.0"),
        ({"mu": None}, "mu is None"),
        ({"hold": -1}, "hold is -1"),
        ({"hold": float("nan")}, "hold is nan; it must be a whole number"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"evaluate_every": 1.5}, "evaluate_every is 1.5; it must be a whole number"),
        ({"sample": 0}, "sample is 0"),
        ({"sample": 2.5}, "sample is 2.5; it must be a whole number"),
        ({"seed": -1}, "seed is -1; it must be a whole number, at least 0"),
        ({"momentum": "0.9"}, "momentum is '0.9'; it must be a finite number"),
        ({"momentum": 0.9, "nesterov": "no"}, "nesterov is 'no'; it must be True or False"),
        ({"fresh_origins": "false"}, "fresh_origins is 'false'; it must be True or False"),
        ({"common_origin": float("nan")}, "common_origin is nan"),
        ({"memory": float("inf")}, "memory is inf; it must be a finite number"),
        ({"device": 10**30}, "device is 1000000000000000000000000000000, which torch cannot use here"),
        ({"ring": Ring()}, "set arithmetic='ring'"),
        ({"split": {}}, "there are no blocks"),
        ({"model": fully_connected(5, 3)}, "takes 5 features and the columns hold 12"),
        ({"model": lambda: nn.Linear(FEATURES, 3)}, "Sequential that begins with a torch.nn.Linear"),
        ({"model": lambda: build().requires_grad_(False)}, "no trainable parameter"),
        ({"model": lambda: build().half()}, "torch.float16"),
        ({"model": lambda: nn.Sequential(nn.LazyLinear(3))}, "a parameter of a lazy module has no shape yet"),
        ({"rule": SGDRule(0.1)}, "rule is SGDRule; pass a function of the step size"),
        ({"rule": lambda lr: print}, "the update rule .* has no move, scales_with_gradient, elementwise"),
    ],
)
def test_simulate_rejects_invalid_input(settings: dict[str, Any], message: str) -> None:
    arguments = {"split": blocks(3, 2), "model": build, **settings}
    with pytest.raises(InputError, match=message):
        run(arguments.pop("split"), arguments.pop("model"), **arguments)


def test_simulate_rejects_inconsistent_blocks() -> None:
    split = blocks(2, 2)
    missing = {cell: block for cell, block in split.items() if cell != Cell(0, 1)}
    with pytest.raises(InputError, match="r0c1 is missing"):
        run(missing)
    other = {**split, Cell(1, 1): Block(Cell(1, 1), split[Cell(1, 1)].x, split[Cell(0, 0)].y)}
    with pytest.raises(InputError, match="r1c0 and r1c1 are in one row and have different labels"):
        run(other)
    narrow = {**split, Cell(1, 1): Block(Cell(1, 1), split[Cell(1, 1)].x[:, :2], split[Cell(1, 1)].y)}
    with pytest.raises(InputError, match="r1c1 has features of shape"):
        run(narrow)
    empty = {**blocks(2), Cell(2, 0): Block(Cell(2, 0), torch.empty(0, FEATURES), torch.empty(0).long())}
    with pytest.raises(InputError, match="r2c0 has no samples; leave this row out, and number the others from 0"):
        run(empty)
    with pytest.raises(InputError, match="r7c0 is not in a grid"):
        run(split, steps=0, engine="modules").model(Cell(7, 0))


@pytest.mark.slow
def test_divergence_raises_an_error_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    split = Grid(2).split(x, x.sum(dim=1, keepdim=True))
    settings: dict[str, Any] = {"model": fully_connected(3, 1), "loss": functional.mse_loss, "lr": 100.0}
    run(split, steps=2, checkpoint=path, **settings)
    with pytest.raises(DivergenceError, match=r"loss is (inf|nan) after \d+ steps; lower lr \(it is 100.0\)"):
        run(split, steps=100, checkpoint=path, **settings)
    assert run(split, steps=2, checkpoint=path, **settings).steps == 2
    with pytest.raises(RangeError, match="beyond the bound 16"):
        run(split, steps=100, arithmetic="ring", **settings)


@pytest.mark.slow
def test_fused_outputs_require_towers() -> None:
    for result in (run(blocks(3), steps=1), run(blocks(3, 2), steps=1, mode="joint", accept=JOINT_REVEALS_RECORDS)):
        with pytest.raises(InputError, match="nothing to fuse"):
            result.fused_outputs(0, samples(2)[0])


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"arithmetic": "ring"},
        {"rule": lambda lr: SGDRule(lr, 0.9)},
        {"mode": "joint", "accept": JOINT_REVEALS_RECORDS},
    ],
)
def test_resumed_run_has_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    split = blocks(3, 2)
    x, y = samples(30, seed=1)
    common = {"test": (x, y), "evaluate_every": 4, **settings}
    uninterrupted = run(split, steps=20, **common)

    class StopRun(BaseException):
        pass

    def stop(step: int, history: History) -> None:
        if step == 7:
            raise StopRun

    path = tmp_path / "run.pt"
    run(split, steps=5, checkpoint=path, **common)
    with pytest.raises(StopRun):
        run(split, steps=20, checkpoint=path, on_step=stop, **common)
    resumed = run(split, steps=20, checkpoint=path, **common)
    assert all(
        torch.equal(resumed.displacement()[name], uninterrupted.displacement()[name])
        for name in uninterrupted.displacement()
    )
    assert resumed.history.training_loss == uninterrupted.history.training_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"lr": 0.4}, "lr was"),
        ({"seed": 2}, "seed was 0, is 2"),
        ({"delta": 0.2}, "delta was 0.1, is 0.2"),
        ({"arithmetic": "ring"}, "arithmetic was"),
        ({"split": blocks(5)}, "grid was 3×1, is 5×1"),
        ({"mu": 0.1}, "schedule was"),
    ],
)
def test_checkpoint_of_another_run_is_rejected(settings: dict[str, Any], difference: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run(blocks(3), steps=2, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=f"is a checkpoint of another run .*{difference}"):
        run(**{"split": blocks(3), "steps": 2, "checkpoint": path, **settings})
    assert path.read_bytes() == before
