"""The results stored in the repository."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from cgd import JOINT_REVEALS_RECORDS
from cgd.audit import privacy_claims
from cgd.experiments import accuracy_claims, claims, influence_claims, report_page, reproduce
from cgd.experiments.runner import ResultStore, RunResult
from cgd.experiments.spec import RunSpec

RESULTS = Path(__file__).parents[2] / "results" / "paper"


@pytest.mark.slow
def test_report_matches_the_stored_results(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    page = report_page.write("paper", ResultStore(tmp_path))
    assert page.read_text() == (RESULTS / "report.md").read_text(), "run `cgd reproduce report --scale paper`"


def test_page_of_claims_matches_the_stored_results(tmp_path: Path) -> None:
    for path in (*RESULTS.glob("*.json"), *RESULTS.parent.glob("audit/*/audit.json"), RESULTS.parent / "leverage.json"):
        copy = tmp_path / path.relative_to(RESULTS.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    stored = privacy_claims.claims(tmp_path)
    listed = (*accuracy_claims.CLAIMS, *influence_claims.CLAIMS, *stored)
    page = claims.write(listed, "paper", ResultStore(tmp_path / "paper"))
    assert page.read_text() == (RESULTS / "claims.md").read_text(), "run `cgd reproduce claims --scale paper`"


@cache
def paper_runs() -> frozenset[RunSpec]:
    entries = [entry for each in reproduce.experiments().values() for entry in each.entries["paper"]]
    return frozenset(run for entry in entries for run in entry.runs)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_result_is_complete_and_belongs_to_an_experiment(path: Path) -> None:
    result = RunResult.read(path)
    assert path.name == f"{result.spec.slug}.json"
    assert len(result.history.training_loss) == result.spec.steps
    assert result.last.step == result.spec.steps
    assert path.stat().st_size < 120_000
    assert result.spec in paper_runs()


def test_a_thousand_participants_reach_the_accuracy_of_the_paper() -> None:
    spec = RunSpec(
        data="mnist", rows=1000, mode="joint", accept=JOINT_REVEALS_RECORDS, bias=False, steps=2000, start="zeros"
    )
    result = ResultStore(RESULTS).get(spec)
    assert result is not None
    assert fmean(result.last.accuracy) == pytest.approx(0.937, abs=0.004)
