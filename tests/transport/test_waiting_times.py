"""How long a member waited, and for whom: what is counted, and what a dishonest member can make of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.errors import InputError, MembershipError
from cgd.secagg.messages import RevealKey, SumSpec
from cgd.secagg.session import Session
from cgd.transport.waiting_times import PeerTimes, WaitingClock, WaitingTimes
from support.in_process import InProcessFederation, new_federation
from support.withheld_keys import DISHONEST, NAMES, train

if TYPE_CHECKING:
    from pathlib import Path

SPEC = SumSpec((2,), "float32", 32, 20, "uniform", "mesh")


@dataclass
class Seconds:
    """A clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Waited:
    """The part of a membership that is measured, as a test sets it."""

    what: str = "nothing"
    missing: frozenset[str] = frozenset()
    sessions: dict[str, Session | None] = field(default_factory=dict)
    gone: bool = False

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.sessions)

    def group(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(session=self.sessions[name])

    def waiting_for(self, group: str) -> tuple[str, frozenset[str]]:
        if self.gone:
            raise MembershipError(f"there is no group {group}")
        return self.what, self.missing


class Measured:
    """A clock under test; `idle` lets seconds pass in which our runtime has nothing to do."""

    def __init__(self) -> None:
        self.seconds = Seconds()
        self.clock = WaitingClock(self.seconds)

    def pass_busy(self, seconds: float) -> None:
        self.seconds.now += seconds

    def idle(self, seconds: float, membership: Waited) -> None:
        self.clock.idle(membership)  # type: ignore[arg-type]
        self.seconds.now += seconds
        self.clock.busy()


def test_every_second_of_a_run_belongs_to_one_kind_and_a_wait_to_all_that_are_missing() -> None:
    run = Measured()
    run.pass_busy(5)
    with run.clock.in_sum("everyone"):
        run.idle(8, Waited("Ready", frozenset("bc")))
        run.idle(4, Waited("Ready", frozenset("c")))
        run.pass_busy(0.5)  # masks
        run.idle(2, Waited("Subtotal", frozenset("b")))
        run.idle(1, Waited())  # our own frames are on their way
    run.pass_busy(3)
    times = run.clock.times()
    assert asdict(times) == {
        "computing": 8,
        "summing": 1.5,
        "waiting": 14,
        "kept": 0,
        "peers": {
            "b": {"computing": 8, "summing": 2, "away": 0, "alone": 2},
            "c": {"computing": 12, "summing": 0, "away": 0, "alone": 4},
        },
    }
    assert times.computing + times.summing + times.waiting == run.seconds.now
    assert [name for name, _ in times.ordered()] == ["c", "b"]


def test_wait_for_a_peer_that_is_not_connected_or_has_no_hello_is_counted_as_away() -> None:
    run = Measured()
    run.clock.absent = frozenset("b")
    with run.clock.in_sum("everyone"):
        run.idle(2, Waited("Ready", frozenset("bc")))
        run.idle(3, Waited("its hello", frozenset("d")))
    peers = run.clock.times().peers
    assert (peers["b"].away, peers["c"].away, peers["d"].away) == (2, 0, 3)
    assert peers["c"].computing == 2


def test_absence_counts_only_while_our_program_waits() -> None:
    run = Measured()
    run.clock.absent = frozenset("b")
    run.idle(60, Waited("Ready", frozenset("b")))
    assert run.clock.times() == WaitingTimes(computing=60)


def test_computing_while_all_others_are_ready_is_counted_as_keeping_them() -> None:
    run = Measured()
    ours, b, c = (Session(name, "abc", bytes(16)) for name in "abc")
    for each in (b, c):
        run.idle(3, Waited(sessions={"row-0": None, "everyone": ours}))
        each.start(SPEC, np.ones(2, np.uint32))
        while (outgoing := each.next_outgoing()) is not None:
            if outgoing[0] == "a":
                ours.receive(each.me, outgoing[1])
    run.idle(2, Waited(sessions={"row-0": None, "everyone": ours}))
    assert run.clock.times() == WaitingTimes(computing=8, kept=2)
    ours.start(SPEC, np.ones(2, np.uint32))
    assert not ours.keeps_others_waiting


def test_nothing_is_counted_after_the_end_of_our_program_or_for_a_group_that_is_gone() -> None:
    run = Measured()
    with run.clock.in_sum("everyone"):
        run.idle(2, Waited(gone=True))
    run.clock.stop()
    run.pass_busy(100)
    assert run.clock.times() == WaitingTimes(summing=2)


def test_stored_times_can_be_read_and_damaged_ones_are_refused() -> None:
    times = WaitingTimes(1.23456, 2, 3, 0.5, {"b": PeerTimes(1, 2, 3, 0.25)})
    stored = json.dumps(times.stored()).encode()
    assert WaitingTimes.from_json(stored) == WaitingTimes(1.235, 2, 3, 0.5, {"b": PeerTimes(1, 2, 3, 0.25)})
    for damaged in (b"", b"[]", b"{}", b'{"peers": []}', b'{"peers": {"b": {"computing": "long"}}}', stored[:-3]):
        with pytest.raises(InputError, match="does not contain waiting times"):
            WaitingTimes.from_json(damaged)


# A dishonest member, among real ones.


def test_member_that_is_made_late_by_a_withheld_message_shows_by_whom(tmp_path: Path) -> None:
    """Cleo sends her key to all but bob. The others count their wait for bob, and bob counts his for cleo."""
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        hold = federation.network.hold(DISHONEST, ["bob"], lambda message: isinstance(message, RevealKey))
        federation.start_all(lambda process: train(process, 1))
        federation.wait_until(lambda: times(federation, "ada").peers["bob"].computing > 0)
        federation.wait_until(lambda: times(federation, "bob").peers[DISHONEST].summing > 0)
        federation.network.release(hold)
        federation.wait_until(lambda: all(each.finished for each in federation))
        assert [each.error for each in federation] == [None] * 4
        assert times(federation, "bob").peers[DISHONEST].summing > 0


def test_times_of_the_last_run_are_saved_in_the_state_folder(tmp_path: Path) -> None:
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        federation.start_all(lambda process: train(process, 1))
        federation.wait_until(lambda: all(each.finished for each in federation))
        folder = federation["ada"].member.state
        assert folder.load_waiting_times() is None
        federation["ada"].stop()
        found = folder.load_waiting_times()
        assert found is not None
        assert found[0].waiting + found[0].summing > 0
        assert set(found[0].peers) <= set(NAMES) - {"ada"}
        (file,) = folder.folder.glob("*waiting.json")
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_text("{")
        with pytest.raises(
            InputError, match=r"waiting\.json is damaged: it does not contain waiting times .* delete it"
        ):
            folder.load_waiting_times()


def times(federation: InProcessFederation, name: str) -> WaitingTimes:
    """Return the times of a member, with an entry for every peer."""
    found = federation[name].peers.waiting
    assert found is not None
    assert set(found.peers) <= set(NAMES) - {name}
    found.peers = {peer: PeerTimes() for peer in NAMES} | found.peers
    return found
