"""The expected durations of runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cgd import Skew
from cgd.experiments import durations, experiment_file, reproduce
from cgd.experiments.durations import Durations, RunDuration
from cgd.experiments.runner import execute
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable

RUN = RunSpec(data="iris", rows=3, hidden=(4,), steps=100, evaluations=10)
MAX_QUICK_MINUTES = 15


@pytest.fixture
def store_durations(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the stored durations."""

    def store(speed_up: float = 1.0, **parts: float) -> None:
        table = Durations(2, speed_up, {durations.kind(RUN).slug: RunDuration(**parts)})
        monkeypatch.setattr(durations, "_durations", lambda: table)

    return store


def runs_of(scale: str) -> set[RunSpec]:
    return {run for each in reproduce.experiments().values() for entry in each.entries[scale] for run in entry.runs}


def test_every_run_of_the_paper_was_measured() -> None:
    kinds = {durations.kind(run).slug for scale in experiment_file.SCALES for run in runs_of(scale)}
    assert set(durations._durations().kinds) == kinds, "run `make duration-results`"


def test_quick_scale_ends_in_a_quarter_of_an_hour() -> None:
    assert float(durations.minutes(runs_of("quick"))) < MAX_QUICK_MINUTES


def test_settings_without_influence_on_the_duration_are_of_one_kind() -> None:
    for other in (
        replace(RUN, delta=(0.01, 0.1), lr=3.0, seed=4, steps=7, evaluations=2),
        replace(RUN, mu=0.1, hold=50),
        replace(RUN, momentum=0.9, schedule="linear"),
        replace(RUN, rule="running-norm", skew=Skew(classes=2)),
    ):
        assert durations.kind(other) == durations.kind(RUN)
    for other in (replace(RUN, rows=4), replace(RUN, hidden=(5,)), replace(RUN, sample=2), replace(RUN, samples=90)):
        assert durations.kind(other) != durations.kind(RUN)
    pooled = replace(RUN, method="centralised")
    assert durations.kind(replace(pooled, rows=50, columns=2)) == durations.kind(pooled) != durations.kind(RUN)


def test_seconds_add_up_the_parts(store_durations: Callable[..., None]) -> None:
    store_durations(speed_up=2.0, fixed=8.0, step=0.5, evaluation=2.0)
    assert durations.seconds(RUN) == (8 + 100 * 0.5 + 11 * 2) / 2
    assert durations.seconds(replace(RUN, rows=4)) is None


@pytest.mark.parametrize(("steps", "evaluations"), [(6, 2), (7, 3), (5, 50), (9, 1), (1, 1)])
def test_evaluations_are_counted_as_they_are_made(
    steps: int, evaluations: int, store_durations: Callable[..., None]
) -> None:
    store_durations(fixed=0.0, step=0.0, evaluation=1.0)
    run = replace(RUN, steps=steps, evaluations=evaluations)
    assert durations.seconds(run) == len(execute(run).history.evaluations)


def test_minutes_count_equal_runs_once(store_durations: Callable[..., None]) -> None:
    store_durations(fixed=90.0, step=0.0, evaluation=0.0)
    assert durations.minutes([RUN]) == durations.minutes([RUN, replace(RUN)]) == "1.5"
    assert durations.minutes([RUN, replace(RUN, seed=1)]) == "3.0"
    assert durations.minutes(replace(RUN, seed=seed) for seed in range(8)) == "12"
    assert durations.minutes([]) == "0.0"
    assert durations.minutes([RUN, replace(RUN, rows=7)]) == "?"


def test_minutes_count_shared_steps_once(store_durations: Callable[..., None]) -> None:
    store_durations(speed_up=1.0, fixed=0.0, step=60.0, evaluation=0.0)
    runs = [replace(RUN, mu=mu, hold=60) for mu in (0.0, 0.1, 0.2)]
    assert durations.minutes(runs[:1]) == "100"
    assert durations.minutes(runs) == str(60 + 3 * 40)
