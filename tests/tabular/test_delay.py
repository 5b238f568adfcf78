"""Trainings on tables with a delay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import cgd
from cgd.audit.own_table import check_without_delay
from cgd.errors import InputError
from cgd.federation.config import Federation, Training
from cgd.federation.model_section import Model
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import TrainingResult, train
from support.private_tables import private_settings
from support.tabular import records, run_members, table, tabular_settings, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.peers import Peers
    from cgd.tabular.settings import TabularSettings


def train_all(settings: TabularSettings, rows: int = 120) -> list[TrainingResult]:
    def member(peers: Peers, place: int) -> TrainingResult:
        peers.seed = bytes([place + 1]) * 32
        return train(peers, settings, records(table(rows, place)))

    return run_members(member, range(3))


@pytest.mark.parametrize(
    "mode",
    [
        {"patience": 0},
        {"patience": 1, "validate_every": 2, "lr": 0.3},
        {"batches": 4, "patience": 0},
        {"optimizer": "sgd", "lr": 0.4, "local_epochs": 1, "batches": 4, "patience": 0},
    ],
    ids=["all steps", "early stopping", "batches", "local epochs"],
)
def test_models_learn_and_members_agree(mode: dict[str, Any]) -> None:
    settings = tabular_settings(model=Model("logistic"), **{"steps": 30, "delay": 2, **mode})
    fresh = records(table(400, 9))
    results = train_all(settings)
    displacements = [
        torch.cat([each.flatten() for each in (trained.displacement or {}).values()]) for trained in results
    ]
    assert all(torch.equal(each, displacements[0]) for each in displacements)
    if settings.training.patience:
        assert results[0].steps < 30
    for trained in results:
        model = ConfinedModel.from_training(trained, settings, {})
        assert model.scores(model.outputs(fresh), fresh)["auc"] > 0.9


def test_last_evaluation_is_of_the_model_with_all_sums() -> None:
    """With one step more than the delay, the model would have moved by one sum."""
    without = train_all(tabular_settings(model=Model("logistic"), optimizer="sgd", lr=0.05, steps=2, patience=0))
    settings = tabular_settings(model=Model("logistic"), optimizer="sgd", lr=0.05, steps=2, patience=0, delay=1)
    results = train_all(settings)
    assert results[0].displacement is not None
    assert without[0].displacement is not None
    for name, moved in results[0].displacement.items():  # twice the gradient of the start
        assert torch.allclose(moved, without[0].displacement[name], rtol=0.1, atol=1e-3)
    assert results[0].best_step == 2


def test_every_opening_is_charged() -> None:
    settings = private_settings()
    plain, delayed = (replace(settings, training=replace(settings.training, delay=each)) for each in (0, 2))
    ledgers = [train_all(each)[0].ledger for each in (plain, delayed)]
    openings = [ledger.spent().openings for ledger in ledgers if ledger is not None]
    assert openings[0] == openings[1] > settings.training.steps


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="delay is -1; it is the number of steps"):
        Training(delay=-1)
    with pytest.raises(InputError, match="delay is 64 and there are 64 steps"):
        Training(delay=64, steps=64)
    cells = [cgd.Cell(row, 0) for row in range(3)]
    with pytest.raises(InputError, match="delay is 1, and the participants form a grid"):
        Federation.load(write_federation(tmp_path, ["a", "b", "c"], cells, delay=1))
    with pytest.raises(InputError, match=r"delay is 1, and \[model\] has fresh_origins"):
        Training(delay=1).check_use(private=False, vertical=False, grid=False, fresh=True)
    with pytest.raises(InputError, match="an audit of a table simulates trainings without a delay"):
        check_without_delay(Training(delay=1))


def test_digests_of_files_without_a_delay_are_as_before() -> None:
    stored = Training().as_stored()
    assert "delay" not in stored
    assert Training(delay=2).as_stored() == {**stored, "delay": 2}
    assert Training.from_stored(Training(delay=2).as_stored()) == Training(delay=2)
