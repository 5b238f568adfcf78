"""Entries with several seeds: settings, results, tables, findings and plots."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd import InputError
from cgd.experiments import experiment_file, plots, report_page, reproduce, tables
from cgd.experiments.entry_result import EntryResult
from cgd.experiments.experiment_file import Experiment, RunEntry
from cgd.experiments.runner import ResultStore, RunResult
from cgd.experiments.spec import RunSpec
from cgd.simulation.result import Evaluation, History

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.simulation.loop import OnStep

RUN = RunSpec(data="iris", rows=3, steps=2, seed=4)


def made_up(run: RunSpec, *accuracies: float, fused: bool = False) -> RunResult:
    loss = [1 - each for each in accuracies]
    towers: dict[str, Any] = {"fused_loss": loss, "fused_accuracy": list(accuracies)} if fused else {}
    evaluations = [Evaluation(step, loss, list(accuracies), **towers) for step in (0, 2)]
    return RunResult(run, History(["r0c0"] * len(accuracies), [1.0, 0.5], evaluations), "1", {})


def entry(seeds: int = 3, **settings: Any) -> RunEntry:
    return RunEntry("CGD", replace(RUN, **settings), "3×1", {"loss": 0.3, "accuracy": 0.8, "gap": 2.0}, seeds)


def three_seeds() -> EntryResult:
    own = entry()
    accuracies = ((0.9, 0.8), (0.7, 0.8), (0.6, 0.5))
    return EntryResult(own, tuple(made_up(run, *each) for run, each in zip(own.runs, accuracies, strict=True)))


def experiment(show: str, *entries: RunEntry) -> Experiment:
    return Experiment("study", "A study", "For a test.", show, {"paper": entries})


def read(folder: Path, text: str) -> Experiment:
    path = folder / "mine.toml"
    path.write_text(text)
    return experiment_file.read(path)


def test_an_entry_has_a_run_for_each_seed() -> None:
    own = entry()
    assert own.runs == tuple(replace(RUN, seed=seed) for seed in (4, 5, 6))
    assert len({run.slug for run in own.runs}) == 3
    assert [own.name_of(run) for run in own.runs] == ["3×1 CGD, seed 4", "3×1 CGD, seed 5", "3×1 CGD, seed 6"]


def test_a_single_seed_keeps_names_and_files() -> None:
    own = entry(seeds=1)
    assert own.runs == (RUN,)
    assert own.name_of(RUN) == own.name == "3×1 CGD"
    assert "seeds" not in RUN.as_json()


def test_seeds_are_read_from_common_settings_scales_and_runs(tmp_path: Path) -> None:
    scales = "[scale.quick]\nseeds = 2\n[scale.paper]\n"
    runs = "[[run]]\n[[run]]\nseeds = 5\n[[run]]\nquick = { seeds = 1 }\n"
    found = read(tmp_path, f"[common]\nseeds = 3\n{scales}{runs}").entries
    assert {scale: [each.seeds for each in own] for scale, own in found.items()} == {
        "quick": [2, 5, 1],
        "paper": [3, 5, 3],
    }


@pytest.mark.parametrize("value", ["0", "-1", "true", "2.0", "'3'", "[1, 2]", "1001"])
def test_other_numbers_of_seeds_are_rejected(value: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mine.toml, run 1: seeds is .*; it must be a whole number from 1 to 1000"):
        read(tmp_path, f"[[run]]\nseeds = {value}\n")


def test_the_table_has_the_mean_over_seeds_the_worst_of_all_and_the_spread() -> None:
    table = tables.result_table(experiment("table"), [three_seeds()])
    row = dict(zip(table.header, table.rows[0], strict=True))
    means = [0.85, 0.75, 0.55]
    assert row["seeds"] == "3"
    assert row["evaluated"] == "2 of 3"
    assert row["accuracy in % (worst)"] == f"{100 * fmean(means):.2f} (50.00)"
    assert row["loss (worst)"] == f"{1 - fmean(means):.3f} (0.500)"
    assert row["± sd over participants"] == "5.00"
    assert row["± sd over seeds: loss / accuracy"] == f"{stdev(means):.3f} / {100 * stdev(means):.2f}"
    assert row["ours − paper (worst)"] == f"{100 * (fmean(means) - 0.8):+.2f} (-30.00)"


def test_the_table_shows_the_seeds_that_have_results() -> None:
    whole, one_seed = three_seeds(), entry(seeds=1, rows=2)
    some = [
        EntryResult(whole.entry, whole.results[:2]),
        EntryResult(whole.entry, whole.results[1:2]),
        EntryResult(whole.entry, ()),
        EntryResult(one_seed, (made_up(one_seed.run, 0.5, 0.7),)),
    ]
    table = tables.result_table(experiment("table"), some)
    seeds, spread = (table.header.index(name) for name in ("seeds", "± sd over seeds: loss / accuracy"))
    assert [row[seeds] for row in table.rows] == ["2 of 3", "1 of 3", "0 of 3", "1"]
    assert [bool(row[spread]) for row in table.rows] == [True, False, False, False]
    assert table.rows[2][table.header.index("evaluated")] == tables.NOT_RUN


def test_the_table_of_single_seeds_has_no_columns_for_seeds() -> None:
    own = entry(seeds=1)
    table = tables.result_table(experiment("table"), [EntryResult(own, (made_up(own.run, 0.5, 0.7),))])
    assert table.header[2:6] == ("evaluated", "loss (worst)", "accuracy in % (worst)", "± sd")
    assert table.rows == (
        ("3×1", "CGD", "2 of 3", "0.400 (0.500)", "60.00 (50.00)", "10.00", "0.300 / 80.00", "-20.00 (-30.00)"),
    )


def test_fused_rows_are_means_over_seeds_too() -> None:
    own = entry(seeds=2, columns=2)
    results = (made_up(own.runs[0], 0.9, fused=True), made_up(own.runs[1], 0.7, fused=True))
    table = tables.result_table(experiment("table"), [EntryResult(own, results)])
    accuracy = table.header.index("accuracy in % (worst)")
    assert [row[accuracy] for row in table.rows] == ["80.00 (70.00)"] * 2
    assert table.rows[1][1] == f"CGD, {tables.FUSED}"


def test_gaps_are_differences_of_means_over_seeds() -> None:
    pooled = RunEntry("pooled", RunSpec("centralised", "iris", steps=2), seeds=2)
    baseline = EntryResult(pooled, (made_up(pooled.runs[0], 0.9), made_up(pooled.runs[1], 0.8)))
    table = tables.result_table(experiment("gaps"), [baseline, three_seeds()])
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["gap to centralised, points"] for row in rows] == ["0.00", f"{100 * (0.85 - 2.15 / 3):.2f}"]
    assert [row["seeds"] for row in rows] == ["2", "3"]
    assert rows[1]["± sd over seeds"] == f"{100 * stdev([0.85, 0.75, 0.55]):.2f}"


def test_findings_use_means_over_seeds() -> None:
    result = three_seeds()
    outcome = reproduce.ExperimentResult(experiment("table", result.entry), "paper", [result])
    assert list(report_page.findings(outcome)) == [
        f"Our mean differs from the paper by more than half a point: 3×1 CGD ({100 * (2.15 / 3 - 0.8):+.2f})."
    ]
    some = EntryResult(result.entry, result.results[:1])
    outcome = reproduce.ExperimentResult(experiment("table", result.entry), "paper", [some])
    assert list(report_page.findings(outcome))[-1] == "Not run with all seeds: 3×1 CGD (1 of 3)."


def test_the_band_of_a_curve_contains_the_participants_of_all_seeds(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots.draw_curve(axes, three_seeds(), "accuracy", "CGD", "C0")
    heights = np.asarray(axes.collections[0].get_paths()[0].vertices)[:, 1]
    assert (heights.min(), heights.max()) == (0.5, 0.9)
    assert axes.lines[0].get_ydata() == pytest.approx([2.15 / 3] * 2)


@pytest.mark.slow
def test_run_trains_all_seeds_and_only_those_that_are_missing(tmp_path: Path) -> None:
    text = '[common]\ndata = "iris"\nrows = 3\nhidden = []\nsteps = 3\nseeds = 3\n[[run]]\nlabel = "CGD"\n'
    study, store = read(tmp_path, text), ResultStore(tmp_path / "results")
    trained: list[str] = []

    def listener(own: RunEntry, run: RunSpec) -> OnStep:
        return lambda step, _: trained.append(own.name_of(run)) if step == 1 else None

    outcome = reproduce.run(study, "paper", store, None, listener)
    assert trained == ["CGD, seed 0", "CGD, seed 1", "CGD, seed 2"]
    assert len(list(store.folder.glob("*.json"))) == 3
    assert outcome.table.rows[0][outcome.table.header.index("seeds")] == "3"
    store.path(study.entries["paper"][0].runs[1]).unlink()
    found = reproduce.stored_results(study, "paper", store).found[0]
    assert [result.spec.seed for result in found.results] == [0, 2]
    reproduce.run(study, "paper", store, None, listener)
    assert trained[3:] == ["CGD, seed 1"]
    assert outcome.plot(tmp_path) == tmp_path / "mine.png"


@pytest.mark.slow
def test_regret_of_several_seeds_is_that_of_the_worst(tmp_path: Path) -> None:
    text = """
    show = "regret"
    [common]
    data = "iris"
    rows = 3
    hidden = []
    measure = "training"
    steps = 4
    evaluations = 4
    [[run]]
    seeds = 2
    [[run]]
    [[run]]
    seed = 1
    """
    study = read(tmp_path, text)
    outcome = reproduce.run(study, "paper", ResultStore(tmp_path / "results"), None, lambda *_: lambda *_: None)
    both, *single = (row[3:] for row in outcome.table.rows)
    assert [float(each) for each in both] == [max(map(float, each)) for each in zip(*single, strict=True)]
    assert "R is below the bound" in next(iter(report_page.findings(outcome)))
    assert outcome.plot(tmp_path) is not None


@pytest.mark.parametrize("scale", experiment_file.SCALES)
def test_entries_of_the_paper_that_share_a_run_have_the_same_seeds(scale: str) -> None:
    numbers: dict[RunSpec, set[int]] = {}
    for each in reproduce.experiments().values():
        for own in each.entries[scale]:
            numbers.setdefault(own.run, set()).add(own.seeds)
    assert [run.slug for run, found in numbers.items() if len(found) > 1] == []
    assert set.union(*numbers.values()) == ({1} if scale == "quick" else {1, 3})


def test_the_report_states_seeds_that_are_missing(tmp_path: Path) -> None:
    """Two of three planned seeds of a run have a result; tables 7 and 8 show it."""
    own = next(each for each in reproduce.get("table-8").entries["paper"] if each.name == "100×1 CGD")
    store = ResultStore(tmp_path)
    for run, accuracy in zip(own.runs[:2], (0.93, 0.95), strict=True):
        content = made_up(run, accuracy, accuracy).as_json()
        content["history"]["training_loss"] = [0.5] * run.steps
        content["history"]["evaluations"][-1]["step"] = run.steps
        store.path(run).write_text(json.dumps(content))
    page = report_page.write("paper", store).read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| 100×1 | ")]
    found = [(row[1], row[2], row[5], row[7]) for row in rows if "not run" not in row]
    metrics = ("2 of 3", "94.00 (93.00)", "0.014 / 1.41")
    assert found == [("δ 0.1", *metrics), ("CGD", *metrics)]
    assert page.count("Not run with all seeds: ") == 2
    assert "Not run with all seeds: 100×1 CGD (2 of 3).\n" in page
