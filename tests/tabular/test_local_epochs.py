"""Batches and local epochs in trainings on tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import cgd
from cgd.errors import InputError
from cgd.federation.config import Federation, Training
from cgd.federation.model_section import Model
from cgd.optim import minibatches
from cgd.optim.minibatches import draw_batches
from cgd.tabular import training_loop
from cgd.tabular.disclosure import disclosed_sums, early_privacy_warnings
from cgd.tabular.few_records import batch_notes
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import TrainingResult, train
from support.private_tables import private_settings
from support.tabular import DATA, VERTICAL_SCHEMA, records, run_members, table, tabular_settings, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.optim.grid import Cell
    from cgd.peers import Peers
    from cgd.tabular.settings import TabularSettings

LOCAL: dict[str, Any] = {"optimizer": "sgd", "lr": 1.0, "local_epochs": 1, "batches": 4, "local_lr": 0.05}
MODES: list[dict[str, Any]] = [LOCAL, {"batches": 4}, {"batches": 4, "optimizer": "sgd", "lr": 0.2, "momentum": 0.9}]


def train_all(settings: TabularSettings, rows: int = 120) -> list[TrainingResult]:
    def member(peers: Peers, place: int) -> TrainingResult:
        peers.seed = bytes([place + 1]) * 32
        return train(peers, settings, records(table(rows, place)))

    return run_members(member, range(3))


@pytest.mark.parametrize("mode", MODES, ids=["local epochs", "batches, adam", "batches, momentum"])
def test_models_learn(mode: dict[str, Any]) -> None:
    settings = tabular_settings(model=Model("logistic"), **{"steps": 30, "patience": 0, **mode})
    fresh = records(table(400, 9))
    results = train_all(settings)
    for trained in results:
        model = ConfinedModel.from_training(trained, settings, {})
        assert model.scores(model.outputs(fresh), fresh)["auc"] > 0.95
    moved = [torch.cat([each.detach().flatten() for each in trained.network.parameters()]) for trained in results]
    assert not torch.equal(moved[0], moved[1])


def test_no_feature_divides_few_records_of_a_batch_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A category of six training records is that of one record in many batches."""
    frame = {**table(60, 0), "ward": ["C" if place < 6 else "AB"[place % 2] for place in range(60)]}
    data = replace(DATA, validation=0.0)
    settings = tabular_settings(data, Model("logistic"), batches=4, steps=8, patience=0)
    seen: list[torch.Tensor] = []
    add_gradient = training_loop.add_gradient

    def watch(network: torch.nn.Module, data: training_loop.EncodedDataset) -> float:
        seen.append(data.x.clone())
        return add_gradient(network, data)

    monkeypatch.setattr(training_loop, "add_gradient", watch)
    results = run_members(lambda peers, _: train(peers, settings, records(frame, data)), range(3))
    names = results[0].preprocessing.features
    wards = [place for place, name in enumerate(names) if name.startswith("ward")]
    counts = torch.stack([x[:, wards].sum(dim=0) for x in seen])
    assert (len(wards), len(seen), {len(x) for x in seen}) == (3, 3 * 8, {15})
    assert ((counts == 0) | (counts >= 5)).all()
    assert (counts.amax(dim=1) < 15).any()  # there is still something to learn


def test_note_says_that_batches_are_too_small() -> None:
    (note,) = batch_notes(tabular_settings(batches=20), 60)
    assert note.startswith("batches is 20, so a batch has 3 of our 60 training records; features that fewer than 5")
    modes: list[dict[str, Any]] = [{"batches": 12}, {"batches": 1}, {"batches": 20, "local_epochs": 1}]
    for mode in modes:
        assert batch_notes(tabular_settings(**mode), 60) == ()
    (note,) = batch_notes(tabular_settings(batches=61, local_epochs=1), 60)
    assert note.startswith("batches is 61, and we have 60 training records: each of our batches is a single record")


def test_local_epochs_need_fewer_sums() -> None:
    """Fifteen rounds of one local epoch beat fifteen steps with the same rule."""
    losses = []
    for mode in ({**LOCAL, "batches": 6}, {"optimizer": "sgd", "lr": 0.5}):
        trained = train_all(tabular_settings(model=Model("logistic"), steps=15, patience=0, validate_every=15, **mode))
        losses.append(trained[0].evaluations[-1].everyone_validation_loss or 0.0)
    assert losses[0] < losses[1] - 0.03


@pytest.mark.parametrize("mode", [LOCAL, {"batches": 4}], ids=["local epochs", "batches"])
def test_batches_depend_on_our_seed_and_the_step_only(mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So a participant that was killed continues with the same bits."""
    settings = tabular_settings(**{"steps": 6, "patience": 0, **mode})
    drawn: list[Any] = []

    def spy(seed: bytes, epoch: int, samples: int, batches: int) -> list[list[int]]:
        found = draw(seed, epoch, samples, batches)
        drawn.append((seed[0], epoch, samples, batches, found))
        return found

    draw = draw_batches
    monkeypatch.setattr(minibatches, "draw_batches", spy)
    first, second = train_all(settings)[0], train_all(settings)[0]
    weights = [[each.detach().numpy() for each in run.network.parameters()] for run in (first, second)]
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
    epochs = sorted({epoch for seed, epoch, *_ in drawn if seed == 1})
    assert epochs == (list(range(6)) if mode is LOCAL else [0, 1])
    for _, _, samples, _, found in drawn:
        assert samples == 96
        assert sorted(place for batch in found for place in batch) == list(range(96))


def test_update_is_clipped_to_the_bound() -> None:
    settings = tabular_settings(**{"steps": 3, "patience": 0, **LOCAL, "local_lr": 500.0, "bound": 4.0})
    trained = train_all(settings)[0]
    assert trained.clipped
    assert any("our update exceeded the bound 4 and was clipped" in note for note in trained.notes)


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batches is 0; it must be at least 1"):
        Training(batches=0)
    for name, most in (("batches", 10_000), ("local_epochs", 1_000)):
        assert getattr(Training.from_stored({name: most}), name) == most
        with pytest.raises(InputError, match=f"{name} is {most + 1}; it must be at least . and at most {most:,}"):
            Training.from_stored({name: most + 1})
    with pytest.raises(InputError, match=r"local_lr is 0\.0; it must be a positive, finite number"):
        Training(local_lr=0.0)
    private = private_settings()
    for name, changed in (
        ("batches", replace(private.training, batches=3)),
        ("local_epochs", replace(private.training, local_epochs=3)),
    ):
        with pytest.raises(InputError, match=rf"{name} is 3, and there is a \[privacy\].*; remove {name}, or"):
            changed.check_use(private=True, vertical=False, grid=False, fresh=False)
    names = [f"p{row}{column}" for row in range(3) for column in range(3)]
    cells = [cgd.Cell(row, column) for row in range(3) for column in range(3)]
    with pytest.raises(InputError, match="batches is 4, and the participants hold different columns"):
        Federation.load(write_vertical(tmp_path, names, cells))


def write_vertical(folder: Path, names: list[str], cells: list[Cell]) -> Path:
    return write_federation(folder, names, cells, VERTICAL_SCHEMA, batches=4)


def test_digests_of_files_without_these_keys_are_as_before() -> None:
    stored = Training().as_stored()
    assert not {"batches", "local_epochs", "local_lr"} & stored.keys()
    assert Training(batches=4).as_stored() == {**stored, "batches": 4}
    assert Training.from_stored(Training(batches=4).as_stored()) == Training(batches=4)


def test_warnings_and_the_list_of_sums_know_of_batches(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, ["ada", "bob", "cleo"]))
    own = records(table(60, 1))
    found = {}
    for batches, epochs in ((1, 0), (20, 0), (20, 1)):
        settings = tabular_settings(batches=batches, local_epochs=epochs)
        found[batches, epochs] = {each.kind for each in early_privacy_warnings(federation, settings, own)}
    assert found[1, 0] == found[20, 1]
    assert "few records" in found[20, 0] - found[1, 0]
    settings = tabular_settings(**{"steps": 2, **LOCAL})
    trained = train_all(settings)[0]
    assert "the sum of all updates of local steps" in disclosed_sums(settings, trained)[0].what
