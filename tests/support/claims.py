"""Made-up results of the paper's experiments, to test how claims are judged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cgd.experiments import accuracy_claims, claims, influence_claims, reproduce
from cgd.experiments.entry_result import EntryResult
from cgd.experiments.reproduce import ExperimentResult
from cgd.experiments.runner import ResultStore, RunResult
from cgd.simulation.result import Evaluation, History

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from cgd.experiments.claims import JudgedClaim
    from cgd.experiments.experiment_file import Experiment, RunEntry

    World = Callable[[str, RunEntry], list[Evaluation] | None]

CLAIMS = (*accuracy_claims.CLAIMS, *influence_claims.CLAIMS)
BASE = 0.9754
"""The accuracy of centralised training in made-up results."""


def judge(world: World, monkeypatch: pytest.MonkeyPatch, *, bound: float = 100.0) -> dict[str, JudgedClaim]:
    """Return the claims about experiments, by text, if a world says what came out of each run.

    Args:
        world: evaluations of an entry of an experiment, or None if it has not been run.
        monkeypatch: replaces the stored results.
        bound: the constant D of Theorem 1, which makes its bound large or small.
    """

    def stored(experiment: Experiment, scale: str, _: ResultStore) -> ExperimentResult:
        found = []
        for entry in experiment.entries[scale]:
            evaluations = world(experiment.name, entry)
            results = () if evaluations is None else (_result(entry, evaluations, bound),)
            found.append(EntryResult(entry, results))
        return ExperimentResult(experiment, scale, found)

    monkeypatch.setattr(reproduce, "stored_results", stored)
    found = claims.judge(CLAIMS, "paper", ResultStore(Path("nowhere/paper")))
    return {each.claim.text: each for each in found}


def _result(entry: RunEntry, evaluations: list[Evaluation], bound: float) -> RunResult:
    delta = max(entry.run.delta) if isinstance(entry.run.delta, tuple) else entry.run.delta
    reference = {"optimum": 0.0, "epsilon": [delta]}
    convex = {"distance": bound, "gradient": 1.0, "lipschitz": 1.0}
    theory = reference if entry.run.hidden else reference | convex
    history = History(["r0c0"], [], evaluations)
    return RunResult(entry.run, history, "0", {"theory": theory})


def last(*accuracies: float, loss: float = 0.1) -> list[Evaluation]:
    """Return the evaluation of participants with these accuracies, after the last step."""
    return [Evaluation(1, [loss] * len(accuracies), list(accuracies), [loss], list(accuracies))]


def as_reported(experiment: str, entry: RunEntry) -> list[Evaluation]:
    """Return what the paper reports, and for its theory and its curves what it says in words."""
    run, reported = entry.run, entry.reported
    if experiment.startswith("theory"):
        share = 1 / run.steps if entry.group == "as printed" else 1.0
        largest = max(run.delta) if isinstance(run.delta, tuple) else run.delta
        return [Evaluation(step, [loss * share]) for step, loss in enumerate((2.0, 1.0, largest))]
    if experiment == "figure-8":
        soon = run.mu >= 0.01 if run.rows == 100 else run.mu > 0.05
        return [Evaluation(step, [0.1], [0.9 if step < 12_000 and not soon else 0.95]) for step in (0, 9000, 12_000)]
    if "gap" in reported:
        return last(BASE - reported["gap"] / 100)
    if not reported:
        return last(BASE if run.method == "centralised" or experiment == "towers" else 0.5)
    return last(reported["accuracy"], loss=reported["loss"])


def opposite(experiment: str, entry: RunEntry) -> list[Evaluation]:
    """Return the opposite: confined models fail and differ, local and private ones do not, losses grow."""
    run = entry.run
    if experiment.startswith("theory"):
        share = run.steps if entry.group == "as printed" else 1.0
        largest = max(run.delta) if isinstance(run.delta, tuple) else run.delta
        return [Evaluation(step, [loss * share]) for step, loss in enumerate((1.0, 2.0, 1 / largest))]
    if experiment == "figure-8":
        soon = run.mu < 0.01 if run.rows == 100 else run.mu <= 0.05
        curve = (0.9, 0.95, 0.99) if soon else (0.9, 0.9, 0.95)
        return [Evaluation(step, [0.1], [accuracy]) for step, accuracy in zip((0, 9000, 12_000), curve, strict=True)]
    if run.method == "cgd" and run.privacy is None:
        delta = max(run.delta) if isinstance(run.delta, tuple) else run.delta
        return last(0.2 + delta / 5, 0.4 + delta / 5, loss=2.0)
    return last(0.85 if run.method == "centralised" else 0.8)


def as_centralised(experiment: str, entry: RunEntry) -> list[Evaluation]:
    """Return about the same accuracy everywhere, and less with noise; theory and curves are as reported."""
    if experiment == "figure-8" or experiment.startswith("theory"):
        return as_reported(experiment, entry)
    losses = {"centralised": 0.0, "cgd": 0.001, "local": 0.001}
    return last(BASE - losses.get(entry.run.method, 0.1))
