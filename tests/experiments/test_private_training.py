"""The search for settings of private training, on a small data set."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cgd.experiments import experiment_file, reproduce
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
BENCHMARK, CHOICES = ROOT / "benchmarks" / "private_training.py", ROOT / "results" / "private-training"
TABLES = {"mnist": "table-4", "cifar10-features": "table-6"}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, BENCHMARK.stem, module)
    found.loader.exec_module(module)
    choices = {"lr": (0.01, 1.0), "steps": (2, 8), "clip": (1.0,), "delta": (0.05,)}
    monkeypatch.setitem(module.TASKS, "digits", module.Task(8, 0.02, (8.0, 2.0), choices, 1348))
    return module


def test_search_varies_one_setting_after_the_other(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def accuracy(_: object, setting: Any) -> float:
        tried.append(setting)
        return float(-abs(setting.lr - 3) - abs(setting.steps - 7) / 10 + setting.delta)

    monkeypatch.setattr(program.Search, "accuracy", accuracy)
    first = program.Setting(8.0, 1.0, 5, 1.0, 0.1)
    search = program.Search(tmp_path, "digits", 0, 0)
    best = search.best(first, {"lr": (1.0, 2.5, 4.0), "steps": (9, 6), "delta": (0.2,)})
    assert best == program.Setting(8.0, 2.5, 6, 1.0, 0.2)
    assert len(set(tried)) == 6


def test_program_chooses_on_training_records_and_prints_runs(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main(["digits", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "choice.json").read_text())
    assert len(content["tried"]) == 2 * 3
    for epsilon, chosen in zip((8.0, 2.0), content["chosen"], strict=True):
        own = [each for each in content["tried"] if each["epsilon"] == epsilon]
        assert {**chosen, "accuracy": max(each["accuracy"] for each in own)} in own
    results = list(tmp_path.glob("digits-*.json"))
    assert len(results) == 6
    assert all(json.loads(path.read_text())["spec"]["measure"] == "validation" for path in results)
    printed = capsys.readouterr().out
    (tmp_path / "runs.toml").write_text("[[run]]" + printed.split("[[run]]", 1)[1])
    one, confined, opacus, *_ = (entry.run for entry in experiment_file.read(tmp_path / "runs.toml").entries["paper"])
    assert (one.method, one.measure, confined.method, confined.rows) == ("private-centralised", "held-out", "cgd", 5)
    assert (one.privacy, one.lr, one.steps) == (confined.privacy, confined.lr, confined.steps)
    assert (one.delta, confined.delta, one.bias) == (0.05, 0.02, False)
    assert (opacus.method, opacus.epsilon, opacus.dp_delta, opacus.batch) == ("dp-sgd", 8.0, 1e-5, 1348)
    names = ("normalise", "hidden", "bias", "delta", "steps", "lr", "momentum", "schedule")
    assert all(getattr(opacus, name) == getattr(one, name) for name in names)
    stamps = {path: path.stat().st_mtime_ns for path in results}
    program.main(["digits", "--out", str(tmp_path)])  # continues, and has nothing left to run
    assert capsys.readouterr().out == printed
    assert {path: path.stat().st_mtime_ns for path in results} == stamps


def test_an_epsilon_may_have_values_of_its_own(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(program.TASKS["digits"], own={2.0: {"lr": (0.3,), "steps": (2,)}})
    monkeypatch.setitem(program.TASKS, "digits", task)
    program.main(["digits", "--out", str(tmp_path)])
    tried = [
        (each["epsilon"], each["lr"], each["steps"])
        for each in json.loads((tmp_path / "choice.json").read_text())["tried"]
    ]
    assert len(tried) == 4
    assert [each for each in tried if each[0] == 2.0] == [(2.0, 0.3, 2)]


def test_private_runs_of_a_table_have_the_chosen_settings(program: ModuleType) -> None:
    """The settings in the tables of the paper are those that the program chose, not others."""
    for path in sorted(CHOICES.glob("*.json")):
        content = json.loads(path.read_text())
        chosen = [program.Setting(**each) for each in content["chosen"]]
        expected = {
            RunSpec.from_table(run, path.name)
            for setting in chosen
            for run in (setting.as_run(content["data"]), setting.as_confined_run(content["data"]))
        }
        entries = reproduce.get(TABLES[content["data"]]).entries["paper"]
        assert {entry.run for entry in entries if entry.run.privacy is not None} == expected
        by_opacus = {RunSpec.from_table(each.as_opacus_run(content["data"]), path.name) for each in chosen}
        assert {entry.run for entry in entries if entry.run.method == "dp-sgd"} == by_opacus
        for setting in chosen:
            own = {each["accuracy"] for each in content["tried"] if each["epsilon"] == setting.epsilon}
            assert {**asdict(setting), "accuracy": max(own)} in content["tried"]
