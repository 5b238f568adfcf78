"""The benchmark of rounds: its specs are valid, and its page shows the stored results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cgd.experiments.entry_result import EntryResult
from cgd.experiments.experiment_file import Experiment, RunEntry
from cgd.experiments.reproduce import ExperimentResult
from cgd.experiments.runner import RunResult
from cgd.experiments.spec import RunSpec
from cgd.simulation.local_training import LocalTraining
from cgd.simulation.result import Evaluation, History
from support.pages import load_script

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

rounds = load_script("rounds", "benchmarks")
SPEC = RunSpec(data="mnist", rows=4, steps=20, keep=0.1)


def make_result(spec: RunSpec, *points: tuple[int, list[float], list[float]]) -> RunResult:
    evaluations = [Evaluation(step, [1.0], confined, kept_accuracy=kept) for step, confined, kept in points]
    return RunResult(spec, History(["r0c0"], [], evaluations), "0", {})


def test_rounds_are_counted_until_the_mean_of_the_kept_models_has_the_accuracy() -> None:
    found = make_result(
        SPEC, (0, [0.1, 0.1], [0.1, 0.1]), (10, [0.8, 0.9], [0.9, 0.96]), (20, [0.9, 0.94], [0.95, 0.97])
    )
    assert rounds.rounds_to(found, 0.9, "accuracy") == 20
    assert rounds.rounds_to(found, 0.9, "kept_accuracy") == 10
    assert rounds.rounds_to(found, 0.97, "kept_accuracy") is None
    entry = RunEntry("all", SPEC, "δ 0.1")
    shown = rounds.table(
        ExperimentResult(Experiment("x", "X", "", "table", {}), "paper", [EntryResult(entry, (found,))])
    )
    megabytes = 20 * 2 * 4 * (785 * 256 + 257 * 10) / 1e6
    expected = ("δ 0.1", "all", "10", "20", "–", f"{megabytes:,.0f}", "20", "92.00 (90.00)", "96.00 (95.00)")
    assert shown.rows == (expected,)


def test_methods_without_kept_models_are_shown_by_their_accuracy() -> None:
    spec = RunSpec(method="centralised", data="mnist", steps=20)
    entry, result = RunEntry("pooled", spec), make_result(spec, (20, [0.96], []))
    entries = [EntryResult(entry, (result,)), EntryResult(RunEntry("later", spec), ())]
    shown = rounds.table(ExperimentResult(Experiment("x", "X", "", "table", {}), "paper", entries))
    assert shown.rows[0] == ("", "pooled", "20", "20", "–", "–", "20", "96.00", "")
    assert shown.rows[1][:3] == ("", "later", "not run")


def test_ratios_are_those_to_averaging_with_the_same_local_training() -> None:
    local = LocalTraining(epochs=1, batch=10, lr=0.1, momentum=0.9)
    average = RunSpec(method="fedavg", data="mnist", rows=4, steps=20, local=local)
    results = [
        ("FedAvg", average, (10, [0.96], [])),
        ("FedAvg with momentum", average, (20, [0.94], [])),
        ("and both", replace(SPEC, local=local), (15, [0.8], [0.95])),
        ("never", replace(SPEC, local=local), (15, [0.96], [0.9])),
        ("without local training", SPEC, (5, [0.8], [0.95])),
    ]
    entries = [EntryResult(RunEntry(name, spec), (make_result(spec, point),)) for name, spec, point in results]
    found = ExperimentResult(Experiment("x", "X", "", "table", {}), "paper", entries)
    assert rounds.ratio_table([found]).rows == (("X", ", and both", "15", "1.50", "–"),)


def test_the_page_shows_the_stored_results() -> None:
    page = rounds.PAGE.read_text()
    found = rounds.stored()
    assert rounds.with_figures(page, found) == page, "run python benchmarks/rounds.py --page"
    assert {each.experiment.name for each in found} >= {"mnist-10", "mnist-100", "mnist-1000", rounds.TRIED}


def test_settings_were_not_chosen_on_test_samples() -> None:
    tried = {entry.run.measure for each in rounds.read([rounds.TRIED]) for entry in each.entries[rounds.SCALE]}
    assert tried == {"validation"}
    others = [each for each in rounds.read() if each.name != rounds.TRIED]
    assert {entry.run.measure for each in others for entry in each.entries[rounds.SCALE]} == {"held-out"}


def test_program_continues_and_updates_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = tmp_path / "specs"
    specs.mkdir()
    common = 'data = "digits"\nrows = 3\nhidden = [4]\nsteps = 2\nevaluations = 1\nsample = 1'
    (specs / "small.toml").write_text(
        f'[common]\n{common}\n[[run]]\nlabel = "one"\n[[run]]\nlabel = "two"\nkeep = 0.2\n'
    )
    page = tmp_path / "page.md"
    page.write_text(f"before\n{rounds.BEGIN}\n{rounds.END}\nafter\n")
    changes: dict[str, Any] = {
        "SPECS": specs,
        "RESULTS": tmp_path / "results",
        "PAGE": page,
        "PLOT": tmp_path / "p.png",
    }
    changes |= {"TARGETS": {"digits": (0.0, 0.5, 0.9)}, "WIDTHS": {"digits": (64, 10)}}
    for name, value in changes.items():
        monkeypatch.setattr(rounds, name, value)
    monkeypatch.setattr("sys.argv", ["rounds.py", "small", "--only", "one"])
    rounds.main()
    assert page.read_text().count("not run") == 1
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").glob("*.json")}
    assert len(stored) == 1
    monkeypatch.setattr("sys.argv", ["rounds.py"])
    rounds.main()
    assert "not run" not in page.read_text()
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert (tmp_path / "p.png").exists()
    assert all(path.stat().st_mtime_ns == before for path, before in stored.items())  # not run again
