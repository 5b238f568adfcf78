"""Experiments: from a TOML file to results, tables, plots and the report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from cgd import InputError
from cgd.experiments import claims, durations, experiment_file, report_page, reproduce, tables
from cgd.experiments.runner import ResultStore, RunResult, check, execute
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.experiments.experiment_file import Experiment, RunEntry
    from cgd.simulation.loop import OnStep
    from cgd.simulation.result import History

RESULTS = Path(__file__).parents[2] / "results" / "paper"
FILE = """
title = "A study"
about = "For a test."
show = "{show}"

[common]
data = "iris"
hidden = [8]
steps = 30
evaluations = 3
samples = {samples}

[scale.quick]
[scale.paper]
steps = 40

[[run]]
label = "pooled"
method = "centralised"
reported = {{ loss = 0.3, accuracy = 0.90 }}

[[run]]
label = "CGD"
group = "5×1"
rows = 5
delta = 0.01
reported = {{ loss = 0.5, accuracy = 0.20 }}

[[run]]
label = "towers"
group = "5×2"
rows = 5
columns = 2
delta = [0.01, 0.1]

[[run]]
label = "alone"
group = "5×1"
method = "local"
rows = 5
sample = 3
"""


def read_experiment(folder: Path, show: str = "table", samples: int = 0) -> Experiment:
    path = folder / "study.toml"
    path.write_text(FILE.format(show=show, samples=samples))
    return experiment_file.read(path)


def no_listener(entry: RunEntry, run: RunSpec) -> OnStep:
    return lambda *_: None


@pytest.mark.slow
def test_run_returns_the_table_of_an_experiment(tmp_path: Path) -> None:
    study, store = read_experiment(tmp_path), ResultStore(tmp_path / "results")
    steps: dict[str, int] = {}

    def listener(entry: RunEntry, run: RunSpec) -> OnStep:
        def on_step(step: int, history: History) -> None:
            steps[entry.label] = step

        return on_step

    outcome = reproduce.run(study, "quick", store, None, listener)
    assert steps == {"pooled": 30, "CGD": 30, "towers": 30, "alone": 30}
    rows = outcome.table.rows
    assert [row[:3] for row in rows] == [
        ("", "pooled", "1 of 1"),
        ("5×1", "CGD", "5 of 5"),
        ("5×2", f"towers, {tables.ALONE}", "10 of 10"),
        ("5×2", f"towers, {tables.FUSED}", "4 rows of 5"),
        ("5×1", "alone", "3 of 5"),
    ]
    result = outcome.done[1].results[0]
    assert rows[1][3].startswith(f"{sum(result.last.loss) / 5:.3f} (")
    assert f"({100 * min(result.last.accuracy):.2f})" in rows[1][4]
    assert rows[1][6] == "0.500 / 20.00"
    mean_gap, worst_gap = 100 * (sum(result.last.accuracy) / 5 - 0.2), 100 * (min(result.last.accuracy) - 0.2)
    assert rows[1][7] == f"{mean_gap:+.2f} ({worst_gap:+.2f})"
    page = outcome.table.to_markdown().splitlines()
    assert len(page) == 2 + len(rows)
    assert page[0].count("|") == len(outcome.table.header) + 1


@pytest.mark.slow
def test_run_does_not_repeat_stored_runs(tmp_path: Path) -> None:
    study, store = read_experiment(tmp_path), ResultStore(tmp_path / "results")
    reproduce.run(study, "quick", store, None, no_listener)
    before = {path.name: path.read_bytes() for path in store.folder.glob("*.json")}
    assert len(before) == 4

    def fail_on_step(entry: RunEntry, run: RunSpec) -> OnStep:
        def on_step(step: int, history: History) -> None:
            raise AssertionError(f"{entry.label} was trained again")

        return on_step

    again = reproduce.run(read_experiment(tmp_path, "curves"), "quick", store, None, fail_on_step)
    assert again.plot(tmp_path / "plots") == tmp_path / "plots" / "study.png"
    assert reproduce.stored_results(study, "paper", store).done == []
    store.prepare([entry.run for entry in study.entries["quick"]], fresh=True)
    assert list(store.folder.glob("*.json")) == []
    with pytest.raises(AssertionError, match="pooled was trained again"):
        reproduce.run(study, "quick", store, None, fail_on_step)
    reproduce.run(study, "quick", store, None, no_listener)
    assert {path.name: path.read_bytes() for path in store.folder.glob("*.json")} == before


@pytest.mark.slow
@pytest.mark.parametrize("show", ["curves", "sweep"])
def test_plot_writes_a_png_file(show: str, tmp_path: Path) -> None:
    outcome = reproduce.run(
        read_experiment(tmp_path, show), "quick", ResultStore(tmp_path / "results"), None, no_listener
    )
    plot = outcome.plot(tmp_path)
    assert plot is not None
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
def test_result_file_contains_spec_history_and_digest(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    run = RunSpec(data="iris", rows=4, hidden=(5,), steps=12, evaluations=4)
    result = store.run(run)
    content = json.loads(store.path(run).read_text())
    assert content["spec"] == run.as_json()
    assert content["cgd"]
    assert len(content["history"]["training_loss"]) == 12
    assert [each["step"] for each in content["history"]["evaluations"]] == [0, 3, 6, 9, 12]
    assert len(content["displacement"]) == 64
    assert RunResult.read(store.path(run)) == result
    assert str(tmp_path) not in store.path(run).read_text()


def test_runs_with_different_mu_share_their_fixed_steps(tmp_path: Path) -> None:
    store, taken = ResultStore(tmp_path / "shared"), []
    base = RunSpec(data="iris", rows=4, hidden=(4,), steps=20, evaluations=4, sample=1, hold=10)
    for mu in (0.1, 0.0, 1.0):
        spec = replace(base, mu=mu)
        together = store.run(spec, on_step=lambda step, _: taken.append(step))
        assert together.as_json() == execute(spec).as_json()  # as one run with all steps
    assert taken == [*range(1, 21), *range(11, 21), *range(11, 21)]
    assert replace(base, hold=9).shared_part is None  # an evaluation would be at another step
    store.prepare([base], fresh=True)
    assert not list((tmp_path / "shared").rglob("*.pt"))


def test_store_rejects_a_file_that_is_not_a_result(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    run = RunSpec(data="iris", steps=2)
    for content in ("", "{}", '{"format": "other"}', "[1]"):
        store.path(run).write_text(content)
        with pytest.raises(InputError, match="is not a result that cgd wrote"):
            store.run(run)


def test_store_rejects_the_result_of_another_run(tmp_path: Path) -> None:
    stored = next(RESULTS.glob("*.json"))
    store, run = ResultStore(tmp_path), RunSpec(data="iris", steps=2)
    store.path(run).write_bytes(stored.read_bytes())
    with pytest.raises(InputError, match="is the result of another run; move it away to run it again"):
        store.run(run)
    assert store.path(run).read_bytes() == stored.read_bytes()


def test_store_deletes_results_and_checkpoints_only_of_the_runs_that_begin_anew(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    mine, other = RunSpec(data="iris", steps=2), RunSpec(data="iris", steps=3)
    store.prepare([mine, other])
    files = [path for run in (mine, other) for path in (store.path(run), store.checkpoint(run))]
    for path in files:
        path.write_text("")
    store.prepare([mine], fresh=True)
    assert [path.exists() for path in files] == [False, False, True, True]
    assert sorted(path.name for path in tmp_path.rglob("try-*")) == []


def test_store_rejects_an_unwritable_folder_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        ResultStore(tmp_path / "file").run(RunSpec(data="iris", steps=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 200}, "112 samples are too few for 200 parts"),
        ({"columns": 9}, "4 features are too few for 9 parts"),
        ({"samples": 1000}, "samples is 1000"),
    ],
)
def test_execute_rejects_too_small_data(settings: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        execute(RunSpec(data="iris", steps=2, **settings))  # type: ignore[arg-type]


def test_experiments_include_all_tables_and_figures() -> None:
    known = reproduce.experiments()
    assert {"table-3", "table-4", "table-7", "table-8"} < set(known)
    assert {"figure-4", "figure-6", "figure-7", "figure-8", "figure-9"} < set(known)
    for each in known.values():
        assert set(each.entries) == set(experiment_file.SCALES)
        assert each.about
    with pytest.raises(InputError, match="no experiment 'table-9'.*table-8"):
        reproduce.get("table-9")
    with pytest.raises(InputError, match="has no scale 'huge'"):
        reproduce.entries_of(known["table-3"], "huge")


def test_select_keeps_the_entries_with_a_text(tmp_path: Path) -> None:
    study = read_experiment(tmp_path)
    (found,) = reproduce.select([study], "quick", "5X1  c")
    assert [entry.name for entry in found.entries["quick"]] == ["5×1 CGD"]
    (found,) = reproduce.select([read_experiment(tmp_path, "gaps")], "quick", "towers")
    assert [entry.name for entry in found.entries["quick"]] == ["pooled", "5×2 towers"]
    with pytest.raises(InputError, match=r"--only is 'PGD', and no run .* are: pooled; 5×1 CGD; 5×2 towers; 5×1 al"):
        reproduce.select([study], "quick", "PGD")
    known = list(reproduce.experiments().values())
    assert "table-3" in {each.name for each in reproduce.select(known, "paper", "1000×112 local")}
    for text in ("", " \t"):
        with pytest.raises(InputError, match="an empty text; name a row, or leave --only out to run all"):
            reproduce.select([study], "quick", text)


def test_the_whole_name_of_an_entry_selects_only_this_one() -> None:
    """Table 5 has another row whose name contains "centralised"."""
    (found,) = reproduce.select([reproduce.get("table-5")], "paper", "Centralised")
    assert [entry.name for entry in found.entries["paper"]] == ["centralised"]
    (found,) = reproduce.select([reproduce.get("table-5")], "paper", "centralised,")
    assert [entry.label for entry in found.entries["paper"]] == ["centralised, plain"]


def test_a_network_that_does_not_fit_into_memory_is_rejected_before_it_is_built() -> None:
    message = r"hidden is \[10000000000000\], and the network has at least 70000000000000 numbers, .* use fewer units"
    with pytest.raises(InputError, match=message):
        check(RunSpec(data="iris", hidden=(10**13,), steps=2))


@pytest.mark.parametrize(
    ("page", "write"), [("report.md", report_page.write), ("claims.md", partial(claims.write, ()))]
)
def test_a_page_that_cannot_be_written_is_reported(
    page: str, write: Callable[[str, ResultStore], Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=rf"file/{page} cannot be written \(.+\); name another folder with --out"):
        write("paper", ResultStore(tmp_path / "file"))


def test_error_names_the_run_before_any_run_is_trained(tmp_path: Path) -> None:
    study = read_experiment(tmp_path, samples=1000)
    with pytest.raises(InputError, match="^pooled: samples is 1000"):
        reproduce.run(study, "quick", ResultStore(tmp_path / "results"), None, no_listener)
    assert not (tmp_path / "results").exists()


def test_listing_counts_the_stored_results(tmp_path: Path) -> None:
    known = reproduce.experiments()
    run = known["table-8"].entries["quick"][0].run
    path = ResultStore(tmp_path / "quick").path(run)
    path.parent.mkdir()
    path.write_text("")
    shown = Console(width=200, file=io.StringIO(), record=True)
    shown.print(reproduce.listing(tmp_path))
    lines = {line.split()[1]: line for line in shown.export_text().splitlines() if line.startswith("│")}
    assert set(lines) == {*known, "all"}
    quick, paper = (
        {run for entry in known["table-8"].entries[scale] for run in entry.runs} for scale in ("quick", "paper")
    )
    cells = [cell.strip() for cell in lines["table-8"].split("│")]
    assert cells[3:7] == [
        f"1 of {len(quick)}",
        f"{durations.minutes(quick - {run})} of {durations.minutes(quick)}",
        f"0 of {len(paper)}",
        f"{durations.minutes(paper)} of {durations.minutes(paper)}",
    ]
    assert [cell.strip() for cell in lines["figure-9"].split("│")][3:7] == cells[3:7]  # it shows the same runs
    every = {run for each in known.values() for entry in each.entries["quick"] for run in entry.runs}
    assert f" 1 of {len(every)} " in lines["all"]
    assert f" of {durations.minutes(every)} " in lines["all"]


def test_listing_of_an_experiment_has_the_minutes_of_each_run(tmp_path: Path) -> None:
    table_8 = reproduce.get("table-8")
    first, second = (entry.run for entry in table_8.entries["quick"][:2])
    path = ResultStore(tmp_path / "quick").path(first)
    path.parent.mkdir()
    path.write_text("")
    shown = Console(width=200, file=io.StringIO(), record=True)
    shown.print(reproduce.listing_of(table_8, tmp_path))
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in shown.export_text().splitlines() if "│" in line]
    assert [row[0] for row in rows] == [entry.name for entry in table_8.entries["quick"]]
    assert rows[0][1] == "done"
    assert rows[1][1:] == [durations.minutes([second]), durations.minutes(table_8.entries["paper"][1].runs)]


def test_report_without_results_names_the_commands(tmp_path: Path) -> None:
    page = report_page.write("quick", ResultStore(tmp_path)).read_text()
    for name, experiment in reproduce.experiments().items():
        assert f"## {experiment.title}" in page
        assert f"Not run yet: `cgd reproduce {name} --scale quick`." in page
    assert "Joint grids and the same rows" not in page
    assert not (tmp_path / "plots").exists()


def test_table_is_the_same_on_the_terminal_and_in_the_report() -> None:
    table = tables.ResultTable("A study", ("", "method", "loss"), (("5×1", "CGD", "0.500"), ("", "pooled", "0.300")))
    shown = Console(width=80, file=io.StringIO(), record=True)
    shown.print(table.to_rich())
    terminal = shown.export_text()
    for text in (table.title, *table.header, *(cell for row in table.rows for cell in row)):
        assert text in terminal
    assert table.to_markdown().splitlines()[2:] == ["| 5×1 | CGD | 0.500 |", "|  | pooled | 0.300 |"]


@pytest.mark.slow
def test_regret_is_below_the_bound_of_theorem_1(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    study = reproduce.get("theory")
    outcome = reproduce.run(study, "quick", store, None, no_listener)
    for found in outcome.done:
        entry, (result,) = found.entry, found.results
        known = result.extra["theory"]
        assert known["optimum"] == pytest.approx(0.0458, abs=5e-4)  # computed by another solver, without regularisation
        assert min(min(each.loss) for each in result.history.evaluations) > known["optimum"]
        if entry.group == "fixed step":
            # The norm of a normal vector of 15 numbers minus the mean of ten such vectors.
            assert max(known["epsilon"]) == pytest.approx(entry.run.delta * 13.5**0.5, rel=0.4)
    page = report_page.write("quick", store).read_text()
    assert "R is below the bound" in page
    assert "Not run yet: `cgd reproduce table-3 --scale quick`" in page
    assert (tmp_path / "plots" / "theory.png").exists()
    assert page == report_page.write("quick", store).read_text()
