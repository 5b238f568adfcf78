"""The results that are kept in the repository."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import pytest

from cgd import JOINT_REVEALS_RECORDS
from cgd.experiments import reproduce
from cgd.experiments.runner import Result, ResultStore
from cgd.experiments.spec import RunSpec

RESULTS = Path(__file__).parents[2] / "results" / "paper"


def test_the_page_is_the_one_the_results_give(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    page = reproduce.report("paper", ResultStore(tmp_path))
    assert page.read_text() == (RESULTS / "report.md").read_text(), "run `cgd reproduce report --scale paper`"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_is_whole_and_belongs_to_an_experiment(path: Path) -> None:
    result = Result.read(path)
    assert path.name == f"{result.spec.slug}.json"
    assert len(result.history.training_loss) == result.spec.steps
    assert result.last.step == result.spec.steps
    assert path.stat().st_size < 120_000
    runs = {entry.run for each in reproduce.experiments().values() for entry in each.entries["paper"]}
    assert result.spec in runs


def test_a_thousand_participants_reach_what_the_paper_reports() -> None:
    accepted = RunSpec(data="mnist", rows=1000, mode="joint", accept=JOINT_REVEALS_RECORDS, bias=False, steps=2000)
    result = ResultStore(RESULTS).get(accepted)
    assert result is not None
    assert fmean(result.last.accuracy) == pytest.approx(0.937, abs=0.004)
