"""The table `privacy` of a spec: parsing, defaults, refused values, and a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cgd import InputError
from cgd.experiments import experiment_file
from cgd.experiments.runner import ResultStore, RunResult
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
[common]
data = "iris"
rows = 3
hidden = []
steps = 4

[privacy]
epsilon = 2
delta = 1e-5

[[run]]
label = "private"

[[run]]
label = "weaker"
privacy = { epsilon = 8.0, colluders = 2 }

[[run]]
label = "one model"
method = "private-centralised"

[[run]]
label = "exact"
method = "centralised"
"""


def test_runs_of_a_file_take_the_table_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "private.toml"
    path.write_text(FILE)
    private, weaker, one, exact = (entry.run for entry in experiment_file.read(path).entries["paper"])
    assert private.privacy is not None
    assert weaker.privacy is not None
    assert (private.privacy.epsilon, private.privacy.steps, private.privacy.colluders) == (2.0, 4, 1)
    assert (weaker.privacy.epsilon, weaker.privacy.delta, weaker.privacy.colluders) == (8.0, 1e-5, 2)
    assert one.privacy == private.privacy
    assert exact.privacy is None
    assert len({each.slug for each in (private, weaker, one, exact)}) == 4
    assert "-eps2-" in private.slug


def test_run_without_privacy_keeps_its_name_and_format() -> None:
    run = RunSpec(data="iris", rows=3, start="zeros")
    assert "privacy" not in run.as_json()
    assert run.slug == "iris-cgd-3x1-d0.1-t500-020d03f6"


@pytest.mark.parametrize("method", ["cgd", "private-centralised"])
def test_result_has_what_was_spent(method: str, tmp_path: Path) -> None:
    run = RunSpec.from_table(
        {
            "method": method,
            "data": "iris",
            "rows": 3,
            "hidden": [],
            "steps": 4,
            "privacy": {"epsilon": 2, "delta": 1e-5},
        },
        "test",
    )
    store = ResultStore(tmp_path)
    result = store.run(run)
    assert result.extra["spent"]["openings"] == 5
    assert 1 < result.extra["spent"]["epsilon"] <= 2
    assert RunResult.read(store.path(run)).spec == run
    assert json.loads(store.path(run).read_text())["spec"]["privacy"]["reruns"] == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": 2.0}, "must be a table"),
        ({"privacy": {"epsilon": 2.0}}, "delta is missing"),
        ({"privacy": {"epsilon": 2.0, "delta": 1e-5, "noise": 1}}, "no setting 'noise'"),
        ({"privacy": {"epsilon": "2", "delta": 1e-5}}, "epsilon is '2'; it must be a number"),
        ({"privacy": {"epsilon": 2.0, "delta": 1e-5, "steps": 10**400}}, "steps is beyond 1000000000"),
        ({"privacy": {"epsilon": -(10**400), "delta": 1e-5}}, "epsilon is beyond"),
        ({"privacy": {"epsilon": 0, "delta": 1e-5}}, "epsilon is 0.0; it must be a positive number"),
        ({"privacy": {"epsilon": 2, "delta": 1e-5, "steps": 3}}, "steps is 4, and the noise of privacy is for 3"),
        ({"privacy": {"epsilon": 2, "delta": 1e-5, "colluders": 3}}, "colluders is 3, and there are 3 members"),
        ({"privacy": {"epsilon": 2, "delta": 1e-5}, "columns": 2}, "one column"),
        ({"privacy": {"epsilon": 2, "delta": 1e-5}, "method": "local"}, "the method is local"),
        ({"method": "private-centralised"}, "needs a table privacy"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunSpec.from_table({"data": "iris", "rows": 3, "steps": 4, **settings}, "test")
