"""Local training and batches: both engines equal a program that trains with torch and adds the updates."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import JOINT_REVEALS_RECORDS, Cell, Grid, InputError, LocalTraining, RangeError, Ring, simulate
from cgd.dp.settings import PrivacySettings
from cgd.optim.displacement import AdamRule
from cgd.simulation.engines import choose_engine
from cgd.simulation.local_training import Work
from cgd.simulation.population import Participants
from support.networks import CLASSES, FEATURES, blocks, fully_connected, samples

if TYPE_CHECKING:
    from pathlib import Path

    from cgd import Block

build = fully_connected(FEATURES, 8, CLASSES)
LOCAL = LocalTraining(epochs=2, batch=4, lr=0.2, momentum=0.5)


def uneven_blocks(rows: int, *, sparse: bool = True) -> dict[Cell, Block]:
    """Return participants of which some have fewer records than a quarter of the features, and others more."""
    shares = [1.0 if row % 2 else 9.0 for row in range(rows)]
    return Grid(rows).split(*samples(60, sparse=sparse), row_shares=shares)


def train_with_torch(model: Any, split: Any, work: Work, rounds: int, lr: float) -> tuple[torch.Tensor, list[float]]:
    """Train in rounds with torch's optimiser: return the displacement, and the losses of the rounds."""
    participants = Participants(model, split)
    displacement = torch.zeros(participants.layout.size)
    losses = []
    for number in range(rounds):
        total, round_loss = torch.zeros_like(displacement), 0.0
        for cell, block in split.items():
            own = participants.model(cell, displacement)
            before = nn.utils.parameters_to_vector(own.parameters()).detach()
            local = work.local or LocalTraining(lr=1.0)
            optimizer = torch.optim.SGD(own.parameters(), lr=local.lr, momentum=local.momentum)
            seen = 0.0
            for batch in work.batches_of_row(participants, cell.row, number):
                optimizer.zero_grad()
                loss = functional.cross_entropy(own(block.x[batch]), block.y[batch])
                loss.backward()
                optimizer.step()
                seen += float(loss.detach()) * len(batch)
            count = sum(map(len, work.batches_of_row(participants, cell.row, number)))
            weight = block.samples / participants.total_samples
            total += weight * (before - nn.utils.parameters_to_vector(own.parameters()).detach())
            round_loss += weight * seen / count
        displacement -= lr * total
        losses.append(round_loss)
    return displacement, losses


@pytest.mark.parametrize("engine", ["auto", "modules"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_local_training_equals_torch(engine: Any, momentum: float, sparse: bool) -> None:
    split = uneven_blocks(6, sparse=sparse)
    local = LocalTraining(epochs=2, batch=2, lr=0.2, momentum=momentum)
    result = simulate(build, split, steps=3, lr=0.7, local=local, engine=engine, progress=False)
    expected, losses = train_with_torch(build, split, Work(local=local), 3, 0.7)
    assert torch.allclose(result.flat_displacement, expected, atol=2e-6)
    assert float(expected.abs().max()) > 0.1
    assert result.history.training_loss == pytest.approx(losses, rel=1e-5)
    assert result.engine == ("fused" if engine == "auto" else "modules")


@pytest.mark.parametrize("engine", ["auto", "modules"])
@pytest.mark.parametrize(
    "model",
    [
        fully_connected(FEATURES, CLASSES),
        fully_connected(FEATURES, 8, CLASSES, bias=False),
        fully_connected(FEATURES, 8, 6, CLASSES, activation=nn.Tanh),
    ],
    ids=["linear", "no bias", "deep"],
)
def test_local_training_of_other_networks_equals_torch(engine: Any, model: Any) -> None:
    split = uneven_blocks(4)
    result = simulate(model, split, steps=2, lr=1.0, local=LOCAL, engine=engine, progress=False)
    expected, _ = train_with_torch(model, split, Work(local=LOCAL), 2, 1.0)
    assert torch.allclose(result.flat_displacement, expected, atol=2e-6)


@pytest.mark.parametrize("engine", ["auto", "modules"])
def test_batches_equal_torch(engine: Any) -> None:
    split = uneven_blocks(4)
    assert min(block.samples for block in split.values()) < 5
    result = simulate(build, split, steps=7, lr=0.5, batches=5, engine=engine, progress=False)
    expected, losses = train_with_torch(build, split, Work(batches=5), 7, 0.5)
    assert torch.allclose(result.flat_displacement, expected, atol=2e-6)
    assert result.history.training_loss == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("kernels", [True, False])
def test_batches_of_an_epoch_have_the_full_gradient_on_average(kernels: bool) -> None:
    """All participants have batches of equal size, so the mean over an epoch is exact up to rounding."""
    participants = Participants(build, blocks(4, count=40))
    displacement = torch.full((participants.layout.size,), 0.01)
    make = partial(choose_engine, participants, functional.cross_entropy, None, 1e9, privacy=None, kernels=kernels)
    full, loss = make(work=Work()).gradient_sum(displacement)
    engine = make(work=Work(batches=5))
    parts = [engine.gradient_sum(displacement) for _ in range(5)]
    assert torch.allclose(torch.stack([part for part, _ in parts]).mean(dim=0), full, atol=1e-6)
    assert sum(value for _, value in parts) / 5 == pytest.approx(loss, rel=1e-5)
    assert not torch.allclose(parts[0][0], full, atol=1e-3)  # a single batch has another gradient


def test_every_record_is_in_one_batch_of_an_epoch_and_epochs_differ() -> None:
    participants = Participants(build, blocks(3, count=31))
    work = Work(batches=4)
    epochs = [
        [int(i) for step in range(4 * epoch, 4 * epoch + 4) for i in work.batches_of_row(participants, 0, step)[0]]
        for epoch in range(2)
    ]
    assert [sorted(each) for each in epochs] == [list(range(11))] * 2
    assert epochs[0] != epochs[1]
    assert work.batches_of_row(participants, 1, 0)[0].tolist() != work.batches_of_row(participants, 2, 0)[0].tolist()


@pytest.mark.parametrize("settings", [{"local": LOCAL}, {"batches": 3}], ids=["local", "batches"])
@pytest.mark.parametrize("engine", ["auto", "modules"])
def test_interrupted_run_has_the_same_bits(engine: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    run = partial(simulate, build, uneven_blocks(5), lr=0.5, momentum=0.9, engine=engine, progress=False, **settings)
    whole = run(steps=8)
    run(steps=4, checkpoint=tmp_path / "run.pt")
    resumed = run(steps=8, checkpoint=tmp_path / "run.pt")
    assert torch.equal(whole.flat_displacement, resumed.flat_displacement)
    assert whole.history.training_loss == resumed.history.training_loss


@pytest.mark.parametrize("settings", [{"local": LOCAL}, {"batches": 3}], ids=["local", "batches"])
def test_number_of_threads_does_not_change_bits(settings: dict[str, Any]) -> None:
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            result = simulate(build, uneven_blocks(20), steps=3, lr=0.5, progress=False, **settings)
            found.append(result.flat_displacement)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_origins_that_do_not_fit_in_memory_change_only_the_last_digits() -> None:
    one, other = (
        simulate(build, uneven_blocks(20), steps=3, lr=0.5, local=LOCAL, memory=memory, progress=False)
        for memory in (4e9, 2000)
    )
    assert torch.allclose(one.flat_displacement, other.flat_displacement, atol=1e-6)


def test_checkpoint_of_another_local_training_is_refused(tmp_path: Path) -> None:
    run = partial(simulate, build, blocks(3), steps=2, lr=1.0, checkpoint=tmp_path / "run.pt", progress=False)
    run(local=LOCAL)
    with pytest.raises(InputError, match="work was .*momentum=0.5.*is .*momentum=0.0"):
        run(local=LocalTraining(epochs=2, batch=4, lr=0.2))


@pytest.mark.parametrize("settings", [{"local": LOCAL}, {"batches": 4}], ids=["local", "batches"])
def test_ring_is_close_to_floats(settings: dict[str, Any]) -> None:
    run = partial(simulate, build, blocks(4), steps=3, lr=0.5, progress=False, **settings)
    plain, ring = run(), run(arithmetic="ring")
    assert torch.allclose(plain.flat_displacement, ring.flat_displacement, atol=1e-5)
    assert not torch.equal(plain.flat_displacement, ring.flat_displacement)
    with pytest.raises(RangeError):
        run(arithmetic="ring", ring=Ring(bound=1e-4))


def test_towers_train_locally_and_joint_rows_use_the_same_batch() -> None:
    grid = blocks(3, 2)
    towers = simulate(build, grid, steps=20, lr=1.0, local=LOCAL, progress=False)
    assert towers.engine == "modules"
    assert towers.history.training_loss[-1] < 0.8 * towers.history.training_loss[0]
    joint = simulate(
        build, grid, steps=60, lr=0.5, batches=4, mode="joint", accept=JOINT_REVEALS_RECORDS, progress=False
    )
    assert sum(joint.history.training_loss[-4:]) < 0.8 * sum(joint.history.training_loss[:4])


def test_momentum_and_rules_move_the_displacement() -> None:
    run = partial(simulate, build, blocks(3), steps=5, progress=False)
    assert run(lr=0.1, momentum=0.9).history.training_loss[-1] < run(lr=0.1).history.training_loss[-1]
    assert run(lr=0.1, momentum=0.9, nesterov=True).history.training_loss[-1] < run(lr=0.1).history.training_loss[-1]
    with pytest.raises(InputError, match="nesterov is True and momentum is 0"):
        run(lr=0.1, nesterov=True)
    adam = run(lr=0.05, rule=AdamRule, local=LocalTraining(batch=5, lr=0.1))
    assert adam.history.training_loss[-1] < adam.history.training_loss[0]
    with pytest.raises(InputError, match="momentum is 0.9 and the rule is .*AdamRule"):
        run(lr=0.1, momentum=0.9, rule=AdamRule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local": LOCAL, "batches": 2}, "batches is 2 and there is a local training"),
        ({"local": 3}, "local is a int; pass LocalTraining"),
        ({"batches": 0}, "batches is 0"),
        ({"batches": 2.0}, "batches is 2.0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(build, blocks(3), steps=2, lr=1.0, progress=False, **settings)


def test_local_training_is_refused_with_joint_and_privacy() -> None:
    with pytest.raises(InputError, match="local training and the mode is joint"):
        simulate(
            build,
            blocks(3, 2),
            steps=2,
            lr=1.0,
            local=LOCAL,
            mode="joint",
            accept=JOINT_REVEALS_RECORDS,
            progress=False,
        )
    privacy = PrivacySettings(epsilon=8.0, delta=1e-5, steps=2, clip=1.0, colluders=1)
    for work, named in (({"local": LOCAL}, "a local training"), ({"batches": 3}, "3 batches")):
        with pytest.raises(InputError, match=f"privacy is given with {named}"):
            simulate(build, blocks(3), steps=2, lr=1.0, privacy=privacy, progress=False, **work)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs of the local training is 0"),
        ({"batch": 1.5}, "batch of the local training is 1.5"),
        ({"lr": -1.0}, "lr of the local training is -1.0"),
        ({"momentum": 1.0}, "momentum of the local training is 1.0; it must be at least 0 and below 1"),
    ],
)
def test_local_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LocalTraining(**settings)
