"""An intersection in which a member is killed: the same command continues, with the same IDs only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import InputError
from cgd.secagg.journal import MAX_KEPT_BYTES
from cgd.secagg.messages import Message, Ready, RevealKey
from cgd.tabular.intersection import intersect
from support.in_process import InProcessFederation, MemberProcess, new_federation
from support.intersections import COMMON, DATA, SETS, records_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
KINDS = ("announce", "points", "table", "shuffles", "positions")


class IntersectionProgram:
    """A program that finds the common records of its row, here of all members, and then makes a sum."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __call__(self, process: MemberProcess) -> Any:
        found = intersect(records_of(self.numbers), process.peers, DATA, b"")
        process.peers.sum(np.ones(1, dtype=np.int64), context="after")
        return found.records.numbers["x"].tolist()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[InProcessFederation]:
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as made:
        yield made


def kill_cleo_in(federation: InProcessFederation, kind: str, message: type[Message], *, lose_state: bool) -> None:
    """Kill cleo when it has sent its first message of this type in a step of this kind, and nobody has received it."""
    contexts: list[str] = []

    def matches(each: Message) -> bool:
        if isinstance(each, Ready):
            contexts.append(each.spec.context)
        prefix = "intersection: salt" if kind == "announce" else f"intersection: {kind}"
        return isinstance(each, message) and bool(contexts) and contexts[-1].startswith(prefix)

    hold = federation.network.hold("cleo", {"ada", "bob"}, matches)
    for name, numbers in zip(NAMES, SETS, strict=True):
        federation.start(name, IntersectionProgram(numbers))
    federation.wait_until(lambda: len(hold.reached) == 2)
    federation.kill("cleo", lose_state=lose_state)
    federation.network.release(hold)


@pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])
@pytest.mark.parametrize("message", [Ready, RevealKey])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_member_continues(
    federation: InProcessFederation, kind: str, message: type[Message], lose_state: bool
) -> None:
    kill_cleo_in(federation, kind, message, lose_state=lose_state)
    federation.start("cleo", IntersectionProgram(SETS[2]))
    results: dict[str, Any] = federation.results()
    assert all(set(each) == COMMON for each in results.values())


@pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])
def test_restart_with_other_ids_is_refused_and_the_others_wait(
    federation: InProcessFederation, lose_state: bool
) -> None:
    kill_cleo_in(federation, "table", Ready, lose_state=lose_state)
    federation.start("cleo", IntersectionProgram([*SETS[2], 1]))
    error = federation.errors("cleo")["cleo"]
    assert isinstance(error, InputError), error
    assert "our IDs, or our key file, are not those with which an earlier process of ours began" in str(error)
    assert Ready not in federation["cleo"].connection.sent
    assert not federation["ada"].finished
    federation["cleo"].stop()
    federation.start("cleo", IntersectionProgram(SETS[2]))
    assert all(set(each) == COMMON for each in federation.results().values())


def test_all_killed_after_the_intersection_do_not_repeat_it(federation: InProcessFederation) -> None:
    holds = [
        federation.network.hold(
            name, set(NAMES) - {name}, lambda each: isinstance(each, Ready) and each.spec.context == "after"
        )
        for name in NAMES
    ]
    for name, numbers in zip(NAMES, SETS, strict=True):
        federation.start(name, IntersectionProgram(numbers))
    federation.wait_until(lambda: all(len(hold.reached) == 2 for hold in holds))
    federation.kill(*NAMES)
    for hold in holds:
        federation.network.release(hold)
    for name, numbers in zip(NAMES, SETS, strict=True):
        federation.start(name, IntersectionProgram(numbers))
    assert all(set(each) == COMMON for each in federation.results().values())
    state = federation["ada"].journal().states[0]
    assert len(state.content) < 1000 < MAX_KEPT_BYTES  # the lists are not kept
    assert not any(entry.words for entry in federation["ada"].journal().entries[:-2])
