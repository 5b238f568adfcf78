"""The regret of Theorem 1 for networks, and how it grows with ε."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from cgd.experiments import reproduce, tables, theory
from cgd.experiments.entry_result import EntryResult
from cgd.experiments.experiment_file import Experiment, RunEntry
from cgd.experiments.report_page import findings
from cgd.experiments.runner import RunResult, execute
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Sequence


def case(epsilon: float, gap: float, regret: Sequence[float] = (1.0, 0.5)) -> theory.WorstCase:
    return theory.WorstCase(epsilon, list(regret), [1.0, gap], [])


@pytest.fixture(scope="module")
def network() -> RunResult:
    """Return a run of a small network on iris that is evaluated before every step."""
    spec = RunSpec(
        data="iris", rows=3, hidden=(2,), activation="tanh", measure="training", steps=20, evaluations=20, sample=3
    )
    assert spec.has_regret
    return execute(spec)


@pytest.mark.slow
def test_network_is_compared_with_the_lowest_loss_from_several_starts(network: RunResult) -> None:
    reference = network.extra["theory"]
    assert set(reference) == {"optimum", "epsilon"}  # no constants of the bound
    # Two tanh units do better than a linear model, whose minimum is 0.0458, and cannot separate the samples.
    assert 0.01 < reference["optimum"] < 0.0458
    assert min(min(each.loss) for each in network.history.evaluations) > reference["optimum"]
    parameters = 4 * 2 + 2 + 2 * 3 + 3
    expected = 0.1 * math.sqrt(parameters * (1 - 1 / 3))  # a normal vector minus the mean of three
    assert max(reference["epsilon"]) == pytest.approx(expected, rel=0.5)


@pytest.mark.slow
def test_worst_case_of_a_network_has_a_regret_and_no_bound(network: RunResult) -> None:
    worst = theory.WorstCase.of([network])
    losses = [max(each.loss) for each in network.history.evaluations]
    optimum = network.extra["theory"]["optimum"]
    assert worst.terms == []
    assert worst.gap == pytest.approx(losses[-1] - optimum)
    assert worst.halfway_gap == pytest.approx(losses[10] - optimum)
    assert worst.regret[0] == pytest.approx(losses[0] - optimum)
    assert worst.falls_with_steps


@pytest.mark.slow
def test_table_and_findings_of_a_network_do_not_mention_a_bound(network: RunResult) -> None:
    entry = RunEntry("δ 0.1", network.spec, "fixed step")
    missing = RunEntry("δ 0.2", network.spec, "fixed step")
    found = [EntryResult(entry, (network,)), EntryResult(missing, ())]
    study = Experiment("mine", "Mine", "", "regret", {"paper": (entry, missing)})
    table = tables.result_table(study, found)
    assert table.header == ("", "run", "ε/m", "R", "F(w_T) − F(w_*)")
    assert [row[2] == tables.NOT_RUN for row in table.rows] == [False, True]
    said = " ".join(findings(reproduce.ExperimentResult(study, "paper", found)))
    assert "fixed step: R decreases in the second half of the steps in 1 of 1 runs" in said
    assert f"taken for F(w_*) is at most {network.extra['theory']['optimum']:.1g}" in said
    assert "bound" not in said


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_growth_is_the_power_of_epsilon(power: float) -> None:
    cases = [case(epsilon, 0.3 + (epsilon**power if epsilon > 1 else 0.0)) for epsilon in (30.0, 1.0, 10.0)]
    assert theory.growth_with_epsilon(cases) == pytest.approx(power)


@pytest.mark.parametrize(
    "cases",
    [
        [case(1, 0.1), case(2, 0.2)],
        [case(1, 0.1), case(1, 0.2), case(1, 0.3)],
        [case(1, 0.2), case(2, 0.1), case(3, 0.3)],
    ],
    ids=["two", "equal epsilons", "not growing"],
)
def test_growth_is_unknown_without_growing_cases(cases: list[theory.WorstCase]) -> None:
    assert theory.growth_with_epsilon(cases) is None


@pytest.mark.parametrize(("regret", "falls"), [([1.0, 0.9, 0.8, 0.7], True), ([1.0, 0.5, 0.5, 0.6], False)])
def test_regret_falls_if_it_is_lower_after_all_steps(regret: list[float], falls: bool) -> None:
    assert case(1, 0.1, regret).falls_with_steps is falls


def test_network_on_a_large_data_set_has_no_regret() -> None:
    settings = {"measure": "training", "steps": 5, "evaluations": 5}
    assert RunSpec(data="mnist", hidden=(), **settings).has_regret  # type: ignore[arg-type]
    assert not RunSpec(data="mnist", hidden=(16,), **settings).has_regret  # type: ignore[arg-type]
