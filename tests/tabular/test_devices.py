"""Trainings on tables whose networks compute on a device: the same bits, and everything that is kept is on the CPU."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import cgd
from cgd.cli import app
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.local import solo_peers
from cgd.optim.flat_vectors import CPU
from cgd.optim.random_numbers import own_random_numbers
from cgd.tabular import training_loop
from cgd.tabular.dry_run import describe_dry_run
from cgd.tabular.model import ConfinedModel
from cgd.tabular.run import TabularRun
from cgd.tabular.run_inputs import RunOptions, read_inputs
from cgd.tabular.training import TrainingResult, train
from cgd.tabular.training_loop import TrainingLoop
from support.fake_device import FAKE, FakeDevice, like_a_device
from support.private_tables import PRIVATE_SCHEMA, private_settings
from support.tabular import records, run_grid, run_members, table, tabular_settings, write_csv, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.peers import Peers
    from cgd.reporting.run_file import AnyRun
    from cgd.tabular.settings import TabularSettings

NAMES = ("ada", "bob", "cleo")
MODES: dict[str, dict[str, Any]] = {
    "gradients": {},
    "batches": {"batches": 3},
    "local epochs": {"optimizer": "sgd", "lr": 1.0, "local_epochs": 1, "batches": 3, "local_lr": 0.05},
    "early stop": {"patience": 1, "lr": 0.5, "steps": 12},
}


@pytest.fixture(autouse=True)
def parameters_stay_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    like_a_device(monkeypatch)


def train_all(settings: TabularSettings, devices: tuple[torch.device, ...] = (CPU,) * 3) -> list[TrainingResult]:
    """Train with one device for each member; return the results with the numbers of transfers."""

    def member(peers: Peers, place: int) -> TrainingResult:
        peers.seed = bytes([place + 1]) * 32
        own = records(table(60, place))
        if devices[place] == CPU:
            return train(peers, settings, own)
        with FakeDevice() as device:
            trained = train(peers, replace(settings, device=FAKE), own)
        assert device.transfers
        return trained

    return run_members(member, range(3))


def same(one: TrainingResult, other: TrainingResult) -> bool:
    states = one.network.state_dict(), other.network.state_dict()
    assert all(each.device == CPU for state in states for each in state.values())
    assert one.displacement is not None
    assert other.displacement is not None
    return (
        all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        and all(torch.equal(one.displacement[name], other.displacement[name]) for name in one.displacement)
        and one.evaluations == other.evaluations
    )


@pytest.mark.parametrize("mode", MODES)
def test_members_with_a_device_train_with_one_without_it_to_the_bits_of_the_cpu(mode: str) -> None:
    """The fake device computes with the bits of the CPU, and rejects tensors that were left there."""
    settings = tabular_settings(**{"steps": 4, "patience": 0, "validate_every": 2, **MODES[mode]})
    expected, found = train_all(settings), train_all(settings, (FAKE, CPU, FAKE))
    assert all(same(*each) for each in zip(found, expected, strict=True))


def test_columns_of_a_grid_are_trained_on_devices() -> None:
    numbers = (Column("age", "number", held_by=0), Column("dose", "number", held_by=1))
    columns = (*numbers, Column("ward", "category", held_by=2))
    data = Data("outcome", columns, id="id", validation=0.25)
    settings = tabular_settings(data, steps=2, patience=0)

    def member(peers: Peers, row: int, column: int) -> TrainingResult:
        own = replace(settings, column=column, columns=3, device=CPU if row == 1 else FAKE)
        with FakeDevice() as device:
            trained = train(peers, own, records(table(12, row), replace(data, columns=own.own_columns)))
        assert bool(device.transfers) == (row != 1)
        return trained

    found = run_grid(3, 3, member)
    assert all(each.device == CPU for trained in found.values() for each in trained.network.parameters())
    for (_, column), trained in found.items():
        assert trained.displacement is not None
        for name, moved in trained.displacement.items():
            other = found[0, column if name.startswith("0.") else 0].displacement
            assert other is not None
            assert torch.equal(moved, other[name])
            assert moved.abs().max() > 0


def networks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a module with networks of a user's own."""
    (folder / "device_networks.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def dropping(features, outputs):\n"
        "    return nn.Sequential(nn.Linear(features, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, outputs))\n"
        "class Left(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x + torch.zeros(x.shape[1]))\n"
        "def left(features, outputs):\n"
        "    return Left(features, outputs)\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_random_numbers_of_a_network_follow_from_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks(tmp_path, monkeypatch)
    settings = tabular_settings(model=Model(function="device_networks:dropping"), steps=3, patience=0)
    own = records(table(40, 1))
    expected = train(solo_peers(b"s" * 32), settings, own)
    with FakeDevice():
        found = train(solo_peers(b"s" * 32), replace(settings, device=FAKE), own)
    assert same(found, expected)


def run_all(federation: Federation, out: str, device: Any = "cpu") -> list[AnyRun]:
    folder = federation.path.parent

    def member(peers: Peers, name: str) -> AnyRun:
        peers.seed = name.encode().ljust(32)
        with FakeDevice():
            run = TabularRun.prepare(
                *(federation, name, folder / f"{name}.csv", folder / out / name),
                record=folder / out / f"trace of {name}",
                device=device,
            )
            assert run.trace_writer is not None
            with run.trace_writer:
                return run.run(peers)

    with cgd.local_peers(NAMES) as group:
        return group.run(member, NAMES)


@pytest.mark.slow
def test_model_that_is_kept_and_all_scores_are_those_of_the_cpu(tmp_path: Path) -> None:
    for name in NAMES:  # classes of ada are less frequent than the columns explain, so that its model is adapted
        write_csv(tmp_path / f"{name}.csv", table(150, len(name), rare=2.0 if name == "ada" else 0.0))
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=20, patience=0))
    expected, found = run_all(federation, "cpu"), run_all(federation, "device", FAKE)
    assert found[0].kept is not None
    assert found[0].kept.method is not None
    for one, other in zip(found, expected, strict=True):
        assert (one.validation, one.kept, one.comparison) == (other.validation, other.kept, other.comparison)
        assert one.history == other.history
    files = sorted((tmp_path / "cpu").rglob("*.safetensors"))
    assert len(files) > 3 * 20  # models, and what the traces have of each step
    for path in files:
        assert (tmp_path / "device" / path.relative_to(tmp_path / "cpu")).read_bytes() == path.read_bytes()


def test_prediction_is_computed_where_the_network_is(tmp_path: Path) -> None:
    trained = train(solo_peers(b"s" * 32), tabular_settings(steps=2), records(table(40, 1)))
    model = ConfinedModel.from_training(trained, tabular_settings(), {})
    fresh = records(table(30, 2))
    expected = model.predict_proba(fresh)
    with FakeDevice() as device:
        moved = replace(model, network=copy.deepcopy(model.network).to(FAKE))
        device.transfers.clear()
        assert np.array_equal(moved.predict_proba(fresh), expected)
    assert device.transfers == [("to the device", 30 * len(trained.preprocessing.features)), ("to the CPU", 30 * 2)]


def test_commitment_to_the_records_names_another_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is repeated on another one has another gradient, if the network draws random numbers."""
    digests: list[bytes] = []
    monkeypatch.setattr(TrainingLoop, "run", lambda loop, *_: digests.append(loop.optimizer.records_digest))
    for device in (CPU, CPU, FAKE):
        with FakeDevice(), pytest.raises(KeyError):  # no step was taken, so there is no displacement
            train(solo_peers(b"s" * 32), replace(tabular_settings(), device=device), records(table(40, 1)))
    assert digests[0] == digests[1] != digests[2]


def write_all(folder: Path, **options: Any) -> Path:
    write_csv(folder / "ada.csv", table(60, 1))
    return write_federation(folder, NAMES, steps=4, patience=0, **options)


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:99", ""])
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_device_that_is_not_here_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, dry_run: tuple[str, ...]
) -> None:
    path = write_all(tmp_path, schema=PRIVATE_SCHEMA)
    before = sorted(tmp_path.rglob("*"))
    command = ["join", str(path), "--as", "ada", "--data", str(tmp_path / "ada.csv"), "--device", name, *dry_run]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, InputError), error  # `main` makes it one line
    assert f"device is {name!r}, which torch cannot use here" in str(error)
    assert "\n" not in str(error)
    assert sorted(tmp_path.rglob("*")) == before


def test_name_of_the_cpu_changes_nothing(tmp_path: Path) -> None:
    path = write_all(tmp_path)
    command = ["join", str(path), "--as", "ada", "--data", str(tmp_path / "ada.csv"), "--dry-run"]
    plain, named = (CliRunner().invoke(app, [*command, *more]) for more in ((), ("--device", "cpu")))
    assert plain.exit_code == 0, plain.output
    assert named.output == plain.output


def test_dry_run_checks_the_network_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks(tmp_path, monkeypatch)
    federation = Federation.load(write_all(tmp_path))
    data = tmp_path / "ada.csv"
    with FakeDevice():
        inputs = read_inputs(federation, "ada", data, RunOptions(device=FAKE))
        lines = [*describe_dry_run(federation, "ada", inputs, tmp_path / "runs", data, RunOptions(device=FAKE))]
        assert "our models would be trained on the device 'meta'" in lines
        own = Model(function="device_networks:left")
        custom = replace(federation, model=own)
        with pytest.raises(InputError, match=r"the network of \[model\] fails on the device 'meta'.*device=x.device"):
            read_inputs(custom, "ada", data, RunOptions(function=own.function, device=FAKE))
    read_inputs(custom, "ada", data, RunOptions(function=own.function))


def test_memory_that_is_not_enough_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1.00 GiB.")

    monkeypatch.setattr(training_loop, "add_gradient", fill)
    with FakeDevice(), pytest.raises(InputError) as error:
        train(solo_peers(b"s" * 32), replace(tabular_settings(), device=FAKE), records(table(40, 1)))
    assert str(error.value).startswith("device is 'meta', and its memory is not enough (CUDA out of memory); end other")
    assert "\n" not in str(error.value)


def test_differential_privacy_is_for_the_cpu() -> None:
    with pytest.raises(InputError, match=r"device is 'meta' and the federation has \[privacy\]"):
        replace(private_settings(), device=FAKE)


ACCELERATORS = [
    name
    for name, available in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()))
    if available
]


@pytest.mark.skipif(not ACCELERATORS, reason="torch finds no CUDA and no MPS device here")
def test_accelerator_trains_with_members_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks(tmp_path, monkeypatch)
    dropping = Model(function="device_networks:dropping")
    for model in (Model("mlp", (8,)), dropping):
        settings = tabular_settings(model=model, steps=20, patience=0, batches=2)

        def member(peers: Peers, place: int, device: str, settings: TabularSettings = settings) -> TrainingResult:
            peers.seed = bytes([place + 1]) * 32
            return train(peers, replace(settings, device=torch.device(device)), records(table(120, place)))

        found = run_members(member, range(3), [ACCELERATORS[0], "cpu", ACCELERATORS[-1]])
        assert all(each.device == CPU for trained in found for each in trained.network.parameters())
        fresh = records(table(400, 9))
        for trained in found:  # members compare the displacement in every step
            kept = ConfinedModel.from_training(trained, settings, {})
            assert kept.scores(kept.outputs(fresh), fresh)["auc"] > 0.9
    for device in map(torch.device, ACCELERATORS):
        drawn = []
        for _ in range(2):
            with own_random_numbers(7, device):
                drawn.append(torch.rand(5, device=device).cpu())
        assert torch.equal(*drawn)
