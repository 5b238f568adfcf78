"""Trainings on tables whose networks compute on a device: the same bits, and everything that is kept is on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import cgd
from cgd.cli import app
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.model_section import Model
from cgd.optim.flat_vectors import CPU
from cgd.optim.random_numbers import own_random_numbers
from cgd.tabular import run_inputs
from cgd.tabular.adaptation import METHODS
from cgd.tabular.models import check_on_device
from cgd.tabular.run import TabularRun
from cgd.tabular.run_inputs import RunOptions, read_inputs
from cgd.tabular.training import TrainingResult, train
from support.fake_device import FAKE, FakeDevice, like_a_device
from support.private_tables import PRIVATE_DATA, PRIVATE_SCHEMA, private_settings
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
