"""The list of differences from the paper: which rows are on it, and what it says about each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgd.experiments import differences, reproduce
from cgd.experiments.entry_result import EntryResult
from cgd.experiments.experiment_file import Experiment, Explanation, RunEntry
from cgd.experiments.reproduce import ExperimentResult
from cgd.experiments.runner import RunResult
from cgd.experiments.spec import RunSpec
from cgd.simulation.result import Evaluation, History

PAGE = (Path(__file__).parents[2] / "results" / "paper" / "report.md").read_text()
RUN = RunSpec(data="iris", rows=3, steps=4)
OTHER = Explanation("with another step", "schedule", "3×1 smaller")


def entry(label: str, reported: float | None = None, why: Explanation | None = None, **settings: Any) -> RunEntry:
    known = {} if reported is None else {"accuracy": reported}
    return RunEntry(label, replace(RUN, **settings), "3×1", known, why=why)


def with_result(own: RunEntry, *accuracies: float, losses: tuple[float, float, float] = (1, 1, 1)) -> EntryResult:
    """Return an entry that had half of these accuracies at step 2, and these losses at steps 0, 2 and 4."""
    values = {0: [0.0] * len(accuracies), 2: [each / 2 for each in accuracies], 4: list(accuracies)}
    evaluations = [
        Evaluation(step, [loss] * len(accuracies), each)
        for loss, (step, each) in zip(losses, values.items(), strict=True)
    ]
    return EntryResult(own, (RunResult(own.run, History([], [], evaluations), "1", {}),))


def outcome(name: str, *found: EntryResult, show: str = "table") -> ExperimentResult:
    entries = tuple(each.entry for each in found)
    return ExperimentResult(Experiment(name, name, "", show, {"paper": entries}), "paper", list(found))


def cells(page: str) -> list[list[str]]:
    """Return the rows of the list: table, row, why, paper, ours, difference, error, reached."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def why(own: EntryResult, *others: EntryResult) -> str:
    ((*_, text, _, _, _, _, _),) = cells(differences.section([outcome("table-3", own), outcome("schedule", *others)]))
    return text


def test_differences_of_more_than_half_a_point_are_listed() -> None:
    found = [
        with_result(entry("near", 0.8, lr=0.1), 0.8049),
        with_result(entry("above", 0.8, lr=0.2), 0.8051),
        with_result(entry("below", 0.8, lr=0.3), 0.7949),
        with_result(entry("without a figure", lr=0.4), 0.1),
        EntryResult(entry("not run", 0.8, lr=0.5), ()),
    ]
    page = differences.section([outcome("table-3", *found)])
    assert [row[:2] + row[3:6] for row in cells(page)] == [
        ["3", "3×1 above", "80.00 %", "80.51 %", "+0.51"],
        ["3", "3×1 below", "80.00 %", "79.49 %", "-0.51"],
    ]
    assert differences.section([outcome("table-3", found[0])]) == ""


def test_equal_rows_are_listed_once_and_experiments_of_ours_not_at_all() -> None:
    own = with_result(entry("CGD", 0.8), 0.9)
    other_figure = with_result(entry("CGD", 0.7), 0.9)
    tables = [outcome(name, own) for name in ("table-3", "figure-4", "schedule", "table-8")]
    page = differences.section([*tables, outcome("table-7", other_figure)])
    assert [(row[0], row[3]) for row in cells(page)] == [("3", "80.00 %"), ("7", "70.00 %")]


def test_gaps_are_compared_with_gaps() -> None:
    pooled = EntryResult(RunEntry("pooled", replace(RUN, method="centralised")), ())
    gap = RunEntry("CGD", RUN, "3×1", {"gap": 2.0})
    assert differences.section([outcome("table-4", pooled, with_result(gap, 0.9), show="gaps")]) == ""
    page = differences.section(
        [outcome("table-4", with_result(pooled.entry, 0.96), with_result(gap, 0.9), show="gaps")]
    )
    assert [row[1:6] for row in cells(page)] == [["3×1 CGD, gap", "**not explained**", "2.00", "6.00", "+4.00"]]


def test_a_gap_that_was_the_papers_in_the_second_half_of_the_run_is_named() -> None:
    gap = RunEntry("CGD", RUN, "3×1", {"gap": 2.0})
    for reached, expected in ((0.938, "our gap was 1.60 after 3 of 4 steps"), (0.91, "**not explained**")):
        own = with_result(gap, 0.9)
        evaluations = own.results[0].history.evaluations
        evaluations.insert(2, Evaluation(3, [1.0], [reached]))
        pooled = with_result(RunEntry("pooled", replace(RUN, method="centralised")), 0.96)
        pooled.results[0].history.evaluations.insert(2, Evaluation(3, [1.0], [0.954]))
        ((_, _, text, *_),) = cells(differences.section([outcome("table-4", pooled, own, show="gaps")]))
        assert text == expected


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (0.601, "with another step: 60.10 % in schedule, 3×1 smaller (+0.10)"),
        (0.62, "in part, with another step: 62.00 % in schedule, 3×1 smaller (+2.00)"),
        (0.58, "in part, with another step: 58.00 % in schedule, 3×1 smaller (-2.00)"),
        (0.71, "**not explained**"),
        (0.45, "**not explained**"),
        (None, "**not explained**"),
    ],
)
def test_a_row_is_explained_by_a_run_that_comes_closer(other: float | None, expected: str) -> None:
    own = with_result(entry("CGD", 0.6, OTHER), 0.7)
    smaller = entry("smaller", 0.6, lr=0.1)
    assert why(own, EntryResult(smaller, ()) if other is None else with_result(smaller, other)) == expected


def test_a_row_without_a_reason_is_listed_as_not_explained() -> None:
    assert why(with_result(entry("CGD", 0.6), 0.7)) == "**not explained**"


def test_a_difference_within_two_standard_errors_may_be_chance() -> None:
    spread = (0.4, 0.6, 0.8, 1.0)  # mean 0.7, standard error 0.129
    chance = "it is at most two standard errors, so it may be chance"
    assert why(with_result(entry("CGD", 0.45), *spread)) == chance
    assert not why(with_result(entry("CGD", 0.44), *spread)).startswith(chance)
    smaller = with_result(entry("smaller", 0.45, lr=0.1), 0.46)
    assert why(with_result(entry("CGD", 0.45, OTHER), *spread), smaller).startswith(f"{chance}; in part, with another")


@pytest.mark.parametrize(
    ("accuracy", "loss", "losses", "expected"),
    [
        (0.4, 0.5, (2, 0.51, 0.1), "after 2 of 4 steps ours was 40.00 %, with loss 0.510 (the paper's 0.500)"),
        (0.404, 0.5, (2, 0.51, 0.1), "after 2 of 4 steps ours was 40.00 %, with loss 0.510 (the paper's 0.500)"),
        (0.41, 0.5, (2, 0.51, 0.1), "**not explained**"),
        (0.4, 0.5, (2, 0.53, 0.1), "**not explained**"),
        (0.4, 0.5, (0.5, 0.7, 0.1), "**not explained**"),
    ],
    ids=["both", "nearly both", "loss only", "accuracy only", "at different steps"],
)
def test_an_earlier_step_with_the_papers_loss_and_accuracy_is_named(
    accuracy: float, loss: float, losses: tuple[float, float, float], expected: str
) -> None:
    own = replace(entry("CGD"), reported={"accuracy": accuracy, "loss": loss})
    assert why(with_result(own, 0.8, losses=losses)) == expected


def test_a_figure_within_two_deviations_may_be_that_of_one_participant() -> None:
    accuracies = (0.69, 0.71) * 50  # standard error 0.001, standard deviation 0.01
    expected = "it may be the figure of one participant: ours have sd 1.00"
    assert why(with_result(entry("CGD", 0.681), *accuracies)) == expected
    assert why(with_result(entry("CGD", 0.679), *accuracies)) == "**not explained**"


def test_the_step_at_which_our_mean_had_the_papers_accuracy() -> None:
    found = [with_result(entry("CGD", reported, lr=reported), 0.6, 0.8) for reported in (0.35, 0.36, 0.9)]
    page = differences.section([outcome("table-3", *found)])
    assert [row[-1] for row in cells(page)] == ["2 of 4", "4 of 4", "never"]


# The stored page


def tables_of_the_page() -> dict[str, list[dict[str, str]]]:
    """Return the rows of tables 3 to 8 on the stored page, by table."""
    found = {}
    for number, text in re.findall(r"^## Table (\d): .*?\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL):
        lines = [re.split(r" ?\| ?", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
        found[number] = [dict(zip(lines[0], row, strict=True)) for row in lines[2:]]
    return found


def test_every_stored_row_with_a_large_difference_is_on_the_page() -> None:
    listed = cells(PAGE.partition("## Differences of more than half a point")[2].partition("\n## ")[0])
    known = {tuple(row[3:6]) for row in listed}
    large = set()
    for rows in tables_of_the_page().values():
        for row in rows:
            if row.get("ours − paper (worst)"):
                by, ours = (row[name].split()[0] for name in ("ours − paper (worst)", "accuracy in % (worst)"))
                large |= {(f"{row['paper: loss / accuracy in %'].split()[-1]} %", f"{ours} %", by)}
            elif row.get("paper: gap to its baseline, points") and row["gap to centralised, points"]:
                paper, gap = row["paper: gap to its baseline, points"], row["gap to centralised, points"]
                large |= {(paper, gap, f"{float(gap) - float(paper):+.2f}")}
    large = {each for each in large if abs(float(each[2])) > 0.5}
    assert len(tables_of_the_page()) == 6
    assert len(large) > 5
    assert {(paper, ours) for paper, ours, _ in large} <= {(paper, ours) for paper, ours, _ in known}
    assert all(row[2] for row in listed)


def test_explanations_name_rows_that_exist() -> None:
    known = reproduce.experiments()
    explained = [own for each in known.values() for own in each.entries["paper"] if own.why is not None]
    assert explained
    for own in explained:
        assert own.reported
        assert own.why is not None
        assert own.why.row in {each.name for each in known[own.why.experiment].entries["paper"]}
