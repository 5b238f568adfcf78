"""No bit of a result changes unnoticed: the digests of runs of every kind are those that are kept in golden.json.

`python tests/golden.py` prints them, and with --write rewrites the file. `support/golden.py` has the runs.
"""

from __future__ import annotations

import json

import pytest

from support.golden import KEPT, OF_PROCESSES, RUNS, SAME

kept = json.loads(KEPT.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_the_bits_are_those_that_are_kept(name: str) -> None:
    assert RUNS[name]() == kept[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PROCESSES)
def test_the_bits_of_processes_are_those_that_are_kept(name: str) -> None:
    assert OF_PROCESSES[name]() == kept[name]


def test_all_runs_are_kept_and_no_others() -> None:
    assert kept.keys() == RUNS.keys() | OF_PROCESSES.keys()


@pytest.mark.parametrize("names", SAME, ids=lambda names: names[-1])
def test_runs_of_one_kind_and_another_end_in_the_same_bits(names: tuple[str, ...]) -> None:
    """A grid in threads and in the simulator, participants in threads and in processes, killed or not."""
    first, *others = (kept[name] for name in names)
    for other in others:
        common = first.keys() & other.keys()
        assert common
        assert {key: other[key] for key in common} == {key: first[key] for key in common}
