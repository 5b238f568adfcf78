"""The expected duration of a run, from measured durations of its parts.

`make duration-results` measures every kind of run of the paper's experiments for a few steps, and writes
`durations.json` in this package. A run takes a fixed time, a time for each step and a time for each evaluation. Runs
that differ only in settings without influence on these, such as δ or the step size, are of one kind. Times are those of
one processor core, which other programs on the machine hardly change; how much faster two cores are was measured once.
Reading the data set, and computing the features of CIFAR-10, happen once for all runs and are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from msgspec import Struct

from cgd.experiments.spec import POOLED_METHODS
from cgd.json_files import decode_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgd.experiments.spec import RunSpec

FILE = "durations.json"
MEASURED_STEPS, MEASURED_EVALUATIONS = 4, 2
MEASURED_EPSILON = 8.0


class RunDuration(Struct, frozen=True):
    """The measured seconds of one kind of run on one core.

    Attributes:
        fixed: for all that is done once, such as drawing origins.
        step: for a step.
        evaluation: for an evaluation.
    """

    fixed: float
    step: float
    evaluation: float


class Durations(Struct, frozen=True):
    """The measured durations.

    Attributes:
        cores: number of cores that minutes are stated for.
        speed_up: how many times faster they are than one core.
        kinds: durations, by the slug of the kind of run.
    """

    cores: int
    speed_up: float
    kinds: dict[str, RunDuration]


def kind(spec: RunSpec) -> RunSpec:
    """Return the short run that is measured for this run, and for all others of its kind."""
    pooled = spec.method in POOLED_METHODS
    uses_mode = spec.columns > 1 and not pooled and spec.method != "local"
    return replace(
        spec,
        steps=MEASURED_STEPS,
        evaluations=MEASURED_STEPS if spec.has_regret else MEASURED_EVALUATIONS,
        rows=1 if pooled else spec.rows,
        columns=1 if pooled else spec.columns,
        sample=1 if pooled else spec.sample,
        mode=spec.mode if uses_mode else "towers",
        skew=None,
        privacy=spec.privacy and replace(spec.privacy, epsilon=MEASURED_EPSILON, steps=MEASURED_STEPS),
        epsilon=MEASURED_EPSILON if spec.method == "dp-sgd" else 0.0,
        delta=0.1,
        lr=0.01,
        mu=0.0,
        hold=0,
        schedule="paper",
        momentum=0.0,
        rule="sgd",
        seed=0,
    )


def seconds(spec: RunSpec) -> float | None:
    """Return the expected seconds of a run on `cores()` idle cores; None if its kind was not measured."""
    table = _durations()
    measured = table.kinds.get(kind(spec).slug)
    if measured is None:
        return None
    evaluations = 1 + -(-spec.steps // spec.evaluation_interval)  # one before the first step, and one after the last
    on_one_core = measured.fixed + spec.steps * measured.step + evaluations * measured.evaluation
    return on_one_core / table.speed_up


def minutes(runs: Iterable[RunSpec]) -> str:
    """Return the expected minutes of runs as a text; equal runs, and steps that runs share, count once.

    Returns:
        A number, or "?" if a kind of run was not measured.
    """
    different = set(runs)
    parts = Counter(run.shared_part for run in different if run.shared_part)
    repeated = parts - Counter(parts.keys())
    expected = [seconds(run) for run in different]
    known = [each for each in expected if each is not None]
    if len(known) < len(expected):
        return "?"
    total = (sum(known) - sum(seconds(part) or 0.0 for part in repeated.elements())) / 60
    return f"{total:.0f}" if total >= 10 else f"{total:.1f}"


def cores() -> int:
    """Return the number of cores that minutes are stated for."""
    return _durations().cores


@cache
def _durations() -> Durations:
    return decode_json(files("cgd.experiments").joinpath(FILE).read_bytes(), Durations)
