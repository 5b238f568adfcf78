"""Specs with batches, local training, kept models and federated averaging."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from matplotlib.figure import Figure

from cgd import InputError, LocalTraining
from cgd.experiments import experiment_file, plots, tables
from cgd.experiments.entry_result import EntryResult
from cgd.experiments.runner import ResultStore
from cgd.experiments.spec import RunSpec
from cgd.federation import training_section
from cgd.simulation import local_training

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
[common]
data = "iris"
rows = 6
hidden = [8]
steps = 4
evaluations = 2
lr = 1.0

[[run]]
label = "CGD"
local = { epochs = 2, batch = 5, lr = 0.1, momentum = 0.9 }
momentum = 0.5
keep = 0.2

[[run]]
label = "FedAvg"
method = "fedavg"
local = { batch = 5 }

[[run]]
label = "batches"
lr = 0.1
batches = 3

[[run]]
label = "Adam"
lr = 0.01
rule = "adam"
"""
SMALL = RunSpec(data="iris", rows=6, hidden=(4,), steps=3, evaluations=1)


def test_file_with_local_training_runs_and_shows_confined_and_kept_models(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    experiment = experiment_file.read(tmp_path / "mine.toml")
    entries = experiment.entries["paper"]
    assert entries[0].run.local == LocalTraining(2, 5, 0.1, 0.9)
    store = ResultStore(tmp_path / "results")
    found = [EntryResult(entry, (store.run(entry.run),)) for entry in entries]
    last = found[0].results[0].last
    assert len(last.kept_accuracy) == len(last.accuracy) == len(last.origin_scale) == 6
    assert found[1].results[0].last.kept_loss == []
    axes = Figure().subplots()
    plots.draw_curve(axes, found[0], "accuracy", "CGD", "C0")
    assert [line.get_label() for line in axes.lines] == ["CGD", "CGD, kept"]
    shown: Any = axes.lines[1].get_ydata()
    assert shown[-1] == pytest.approx(sum(last.kept_accuracy) / 6)
    table = tables.result_table(experiment, found)
    labels = [row[1] for row in table.rows]
    assert labels == ["CGD, confined", "CGD, kept", "FedAvg", "batches", "Adam"]
    accuracy = table.header.index("accuracy in % (worst)")
    spread = found[0].spread("kept_accuracy")
    assert spread is not None
    assert table.rows[1][accuracy] == f"{100 * spread.mean:.2f} ({100 * spread.worst:.2f})"


def test_each_setting_gives_another_result(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    changes: list[dict[str, Any]] = [
        {},
        {"batches": 2},
        {"keep": 0.3},
        {"local": LocalTraining()},
        {"local": LocalTraining(momentum=0.5)},
        {"rule": "adam"},
        {"rule": "amsgrad", "steps": 4},
        {"momentum": 0.5, "nesterov": True},
        {"fresh_origins": True},
        {"momentum": 0.5},
        {"method": "fedavg", "local": LocalTraining()},
    ]
    specs = [replace(SMALL, **each) for each in changes]
    assert len({store.run(each).extra["displacement"] for each in specs}) == len(changes)
    for each in specs:
        assert store.get(each) is not None


def test_settings_are_left_out_of_results_that_do_not_use_them() -> None:
    assert not {"batches", "local", "keep", "nesterov", "fresh_origins"} & RunSpec().as_json().keys()
    table = RunSpec(local=LocalTraining(lr=1)).as_json()["local"]
    assert table == {"epochs": 1, "batch": 0, "lr": 1.0, "momentum": 0.0}
    assert RunSpec(local=LocalTraining(lr=1)).slug == RunSpec(local=LocalTraining(lr=1.0)).slug


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"local": 3}, "local is 3; it must be a table: local = { epochs = 1, batch = 10 }"),
        ({"local": {"epoch": 1}}, "local: the setting is 'epoch' \\(did you mean 'epochs'\\?\\); choose one of epochs"),
        ({"local": {"epochs": 0}}, "local: epochs of the local training is 0"),
        ({"local": {}, "batches": 2}, "batches is 2 and there is a local training"),
        ({"local": {}, "method": "fedsgd"}, "the method is fedsgd; only cgd and fedavg use it"),
        ({"method": "fedavg"}, "the method is fedavg and there is no local training"),
        ({"local": {}, "privacy": {"epsilon": 1.0, "delta": 1e-5}}, "privacy is set with a local training or batches"),
        ({"keep": 1.0}, "keep is 1.0"),
        ({"keep": 0.1, "columns": 2}, "keep is 0.1 and columns is 2"),
        ({"keep": 0.1, "method": "local"}, "only cgd uses it"),
        ({"fresh_origins": True, "method": "fedsgd"}, "only cgd uses it"),
        ({"nesterov": True}, "nesterov is true and momentum is 0"),
        ({"batches": 0}, "batches is 0; it must be at least 1"),
        ({"batches": 10**12}, "batches is 1000000000000; .*, at most 10,000"),
        ({"local": {"epochs": 1001}}, "epochs of the local training is 1001; it must be at most 1,000"),
        ({"rule": "adam", "momentum": 0.9}, "only the rule sgd uses it"),
        (
            {"local": {}, "columns": 2, "mode": "joint", "accept": "joint reveals raw records"},
            "local training and the mode is joint",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_a_run(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunSpec.from_table(table, "here")


def test_limits_are_those_of_a_federation_file() -> None:
    for name in ("MAX_BATCHES", "MAX_LOCAL_EPOCHS"):
        assert getattr(local_training, name) == getattr(training_section, name)
