"""Five processes with a quorum, over sockets: members are stopped, killed and cut off, and the others go on."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from cgd.federation.absence_section import MIN_PATIENCE
from support.cut_proxy import CutProxy
from support.federations import NAMES
from support.quorum_processes import FAULTS, QuorumProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT = int(os.environ.get("CGD_FAULTS", "6"))
"""The number of faults; `make quorum-soak` does 30."""
MARGIN_SECONDS = 4.0
"""Beyond the patience; a member that would go on has done so by then."""


@pytest.fixture
def federation(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[QuorumProcesses]:
    found = QuorumProcesses(tmp_path, request.param)
    for name in NAMES:
        found.run(name)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("federation", [4], indirect=True)
def test_others_go_on_whatever_happens_to_one(federation: QuorumProcesses) -> None:
    """One is stopped, killed or cut off at random moments, again and again; at the end all have the same bits."""
    rng = random.Random(19)
    with CutProxy(federation.ports) as proxy:
        federation.advance(NAMES, 2)
        for number in range(COUNT):
            federation.fail_and_repair(FAULTS[number % len(FAULTS)], rng, proxy)
        federation.finish()


@pytest.mark.slow
@pytest.mark.parametrize("federation", [3], indirect=True)
@pytest.mark.parametrize(
    ("parts", "going_on"),
    [((NAMES[:3], NAMES[3:]), NAMES[:3]), ((NAMES[:2], NAMES[2:4], NAMES[4:]), ())],
    ids=["3 + 2", "2 + 2 + 1"],
)
def test_at_most_one_side_of_a_cut_network_goes_on(
    federation: QuorumProcesses, parts: tuple[tuple[str, ...], ...], going_on: tuple[str, ...]
) -> None:
    with CutProxy(federation.ports) as proxy:
        federation.advance(NAMES, 2)
        proxy.cut(*parts)
        if going_on:
            federation.advance(going_on, 4)
        else:
            time.sleep(MIN_PATIENCE + MARGIN_SECONDS)
        waiting = [name for name in NAMES if name not in going_on]
        before = {name: federation.step(name) for name in waiting}
        if going_on:
            federation.advance(going_on, 4)
        else:
            time.sleep(1.0)
        assert {name: federation.step(name) for name in waiting} == before
        proxy.cut()
        federation.advance(NAMES, 3)
        federation.finish()
