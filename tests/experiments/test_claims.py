"""How the paper's claims are judged: every criterion can be satisfied, and can be missed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cgd.experiments import claims
from cgd.experiments.claims import CONFIRMED, NOT_CONFIRMED, NOT_RUN, Claim, Finding, Judgement
from cgd.experiments.runner import ResultStore
from support.claims import BASE, CLAIMS, as_centralised, as_reported, judge, last, opposite

if TYPE_CHECKING:
    from cgd.experiments.experiment_file import RunEntry
    from cgd.simulation.result import Evaluation

ROOT = Path(__file__).parents[2]
DECIDED = [each.text for each in CLAIMS if each.ran and not each.ran[0].startswith("pytest")]


def beginning(judged: dict[str, claims.JudgedClaim], text: str) -> claims.JudgedClaim:
    """Return the claim that begins with a text."""
    (found,) = (each for start, each in judged.items() if start.startswith(text))
    return found


def test_every_claim_about_runs_can_be_confirmed_and_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [judge(world, monkeypatch) for world in (as_reported, as_centralised)]
    refuted = judge(opposite, monkeypatch, bound=1e-9)
    assert [text for text in DECIDED if CONFIRMED not in {each[text].verdict for each in worlds}] == []
    assert [text for text in DECIDED if refuted[text].verdict != NOT_CONFIRMED] == []


def test_every_claim_is_listed_once() -> None:
    assert len({each.text for each in CLAIMS}) == len(CLAIMS)


def test_the_papers_own_figures_do_not_confirm_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have 8 of 21 grids within 1 point, counted by hand; so have results that are the same."""
    found = beginning(judge(as_reported, monkeypatch), "In most grids, the accuracy")
    assert found.verdict == NOT_CONFIRMED
    counts = re.match(r"(\d+) of (\d+) grids .* by the paper's own tables, (\d+) of these (\d+)$", found.figures)
    assert counts is not None
    assert counts[1] == counts[3] == "8"
    assert counts[2] == counts[4] == "21"


@pytest.mark.parametrize(("gap", "verdict"), [(0.0399, CONFIRMED), (0.0401, NOT_CONFIRMED)])
def test_largest_grid_is_compared_with_the_limit(gap: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def world(experiment: str, entry: RunEntry) -> list[Evaluation]:
        large = (entry.run.rows, entry.run.columns, entry.run.method) == (1000, 112, "cgd")
        return last(BASE - gap) if large else as_reported(experiment, entry)

    found = beginning(judge(world, monkeypatch), "With 112,000 participants")
    assert found.verdict == verdict
    assert f"{100 * gap:.2f} points below (paper: 3.80)" in found.figures


def test_missing_runs_are_named_and_leave_a_claim_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def world(experiment: str, entry: RunEntry) -> list[Evaluation] | None:
        return None if entry.run.rows == 1000 else as_reported(experiment, entry)

    found = judge(world, monkeypatch)
    grids = beginning(found, "All confined models")
    assert grids.verdict == NOT_RUN
    assert grids.figures.endswith("*missing:* table-3 (1000×112 CGD); table-8 (1000×1 CGD); table-5 (1000×32 CGD)")
    assert beginning(found, "With 112,000 participants").figures == "*missing:* table-3 (1000×112 CGD)"


def test_counterexample_decides_although_runs_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def world(experiment: str, entry: RunEntry) -> list[Evaluation] | None:
        if entry.run.rows == 1000:
            return None
        return last(0.5, 0.9) if entry.group == "10×7" else as_reported(experiment, entry)

    assert beginning(judge(world, monkeypatch), "All confined models").verdict == NOT_CONFIRMED


def test_without_results_no_claim_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge(lambda *_: None, monkeypatch)
    assert {found[text].verdict for text in DECIDED} == {NOT_RUN}
    assert all("*missing:*" in found[text].figures for text in DECIDED)


def test_private_models_are_compared_with_the_grid_of_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def world(experiment: str, entry: RunEntry) -> list[Evaluation] | None:
        return None if entry.group == "10×7" else as_reported(experiment, entry)

    found = beginning(judge(world, monkeypatch), "On MNIST, CGD loses less")
    assert found.figures.startswith("100×49: 3.30, ε = 2: 3.30 (paper: 3.3 and 3.3); 1000×112: 3.80, ε = 0.5: 8.30")
    assert found.verdict == NOT_CONFIRMED  # 3.3 is not less than 3.3


def test_claim_without_a_run_in_its_experiment_is_a_defect() -> None:
    evidence = claims.Evidence("paper", Path(), claims.experiment_results("paper", ResultStore(Path("nowhere"))))
    with pytest.raises(LookupError, match="no run of table-3 at the scale paper is about this claim"):
        evidence.select("table-3", lambda entry: entry.run.rows == 77)


@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_every_claim_has_runs_at_both_scales(scale: str, tmp_path: Path) -> None:
    found = claims.judge(CLAIMS, scale, ResultStore(tmp_path / scale))
    assert len(found) == len(CLAIMS)


def test_page_has_every_claim_with_its_command_and_verdict(tmp_path: Path) -> None:
    command = "cgd reproduce table-3 --scale {scale}"
    mine = Claim("Mine", "It works.", "§9", "it does", (command,), lambda _: Judgement(holds=True, figures="1.5"))
    page = claims.write([mine], "quick", ResultStore(tmp_path / "quick")).read_text()
    row = "| It works. | §9 | it does | `cgd reproduce table-3 --scale quick` | 1.5 | **confirmed** |"
    assert row in page.splitlines()
    assert (
        "Of 1 claims: 1 confirmed, 0 not confirmed, 0 confirmed by tests, 0 cannot be checked, 0 not run yet." in page
    )
    assert "**This is the quick scale" in page


@pytest.mark.parametrize(("holds", "final"), [([True, True], False), ([True, False], True), ([], False)])
def test_every_needs_all_findings(holds: list[bool], final: bool) -> None:
    judgement = claims.every([Finding(each, str(each)) for each in holds])
    assert judgement == Judgement(all(holds), "; ".join(map(str, holds)), final=final)


def test_tests_that_claims_name_exist() -> None:
    page = (ROOT / "results/paper/claims.md").read_text()
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page)
    assert named
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
