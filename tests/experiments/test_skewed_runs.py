"""Runs of specs whose participants have different classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd import InputError, Skew
from cgd.experiments import experiment_file, reproduce, runner
from cgd.experiments.runner import ResultStore
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
[common]
data = "iris"
rows = 6
columns = 2
hidden = [8]
steps = 3
evaluations = 1
skew = { classes = 1 }

[[run]]
label = "CGD"

[[run]]
label = "local"
method = "local"
skew = { dirichlet = 0.1 }
"""


def test_spec_divides_the_classes_of_its_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    first, second = (entry.run for entry in experiment_file.read(tmp_path / "mine.toml").entries["paper"])
    assert first.skew == Skew(classes=1)
    assert second.skew == Skew(dirichlet=0.1)
    data = runner.load_data(first, None)
    blocks = runner.split_data(first, data)
    assert len(blocks) == 12
    assert {len(block.y.unique()) for block in blocks.values()} == {1}
    assert sum(block.samples for block in blocks.values()) == 2 * len(data.y)
    sizes = [block.samples for block in runner.split_data(second, data).values()]
    assert np.ptp(sizes) > 10
    other_seed = runner.split_data(replace(second, seed=1), data).values()
    assert [block.samples for block in other_seed] != sizes


def test_skew_is_part_of_the_result_and_of_its_name(tmp_path: Path) -> None:
    store, even = ResultStore(tmp_path), RunSpec(data="iris", rows=6, hidden=(4,), steps=2, evaluations=1)
    few, mixed = replace(even, skew=Skew(classes=2)), replace(even, skew=Skew(dirichlet=0.5))
    digests = {store.run(each).extra["displacement"] for each in (even, few, mixed)}
    assert len(digests) == 3
    assert few.slug.startswith("iris-cgd-6x1-classes2-d0.1-t2-")
    assert mixed.slug.startswith("iris-cgd-6x1-dirichlet0.5-d0.1-t2-")
    assert replace(few, method="centralised").slug.startswith("iris-centralised-d0.1-t2-")
    stored = store.get(few)
    assert stored is not None
    assert stored.spec == few
    assert runner.execute(few).extra == stored.extra


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "diabetes", "skew": Skew(classes=2)}, "run 1: the labels have the type float32.*leave the skew out"),
        ({"data": "iris", "skew": Skew(classes=4)}, "run 1: each row is to have 4 classes and there are 3; set fewer"),
        ({"data": "iris", "rows": 2, "skew": Skew(classes=1)}, "run 1: 2 rows of 1 classes each hold at most 2 of 3"),
        ({"data": "iris", "rows": 200, "skew": Skew(dirichlet=1.0)}, "run 1: rows is 200 and there are 112 samples"),
    ],
)
def test_data_that_do_not_suffice_are_an_error_before_training(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    run = RunSpec(**{"rows": 5, **settings})  # type: ignore[arg-type]
    study = experiment_file.Experiment("study", "", "", "table", {"paper": (experiment_file.RunEntry("run 1", run),)})

    def fail(*_: object) -> None:
        raise AssertionError("a run was trained")

    with pytest.raises(InputError, match=message):
        reproduce.run(study, "paper", ResultStore(tmp_path), None, lambda *_: fail)
