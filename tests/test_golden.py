"""No bit of a result changes unnoticed: the digests of all kinds of runs are those in golden.json.

`python tests/golden.py` prints them, and rewrites the file with --write. The runs are in `support/golden.py`.
"""

from __future__ import annotations

import json

import pytest

from support.golden import EQUAL_RUNS, GOLDEN_FILE, PROCESS_RUNS, RUNS

golden = json.loads(GOLDEN_FILE.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_run_has_golden_digests(name: str) -> None:
    assert RUNS[name]() == golden[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESS_RUNS)
def test_run_of_processes_has_golden_digests(name: str) -> None:
    assert PROCESS_RUNS[name]() == golden[name]


def test_golden_file_has_all_runs_and_no_others() -> None:
    assert golden.keys() == RUNS.keys() | PROCESS_RUNS.keys()


@pytest.mark.parametrize("names", EQUAL_RUNS, ids=lambda names: names[-1])
def test_equivalent_runs_have_equal_digests(names: tuple[str, ...]) -> None:
    """A grid in threads and in the simulator, participants in threads and in processes, killed or not."""
    first, *others = (golden[name] for name in names)
    for other in others:
        common = first.keys() & other.keys()
        assert common
        assert {key: other[key] for key in common} == {key: first[key] for key in common}
