"""What a dishonest member gains by lies about who is present: nothing but time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.secagg.attendance import MAX_LEAP, AttendanceExchange
from cgd.secagg.codec import MAX_ATTENDANCE, Frame, to_bytes
from cgd.secagg.membership import NO_VIEW
from cgd.secagg.messages import Attendance
from support import summing_program
from support.ideal import ideal_cryptography
from support.quorum import QuorumSimulation, quorum_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIVE = ("a", "b", "c", "d", "e")
HONEST = ("a", "b", "d", "e")
PROCESSES = bytes(range(32))


@pytest.fixture(autouse=True)
def ideal() -> Iterator[None]:
    with ideal_cryptography():
        summing_program._identity.cache_clear()
        yield
    summing_program._identity.cache_clear()


def run_until(simulation: QuorumSimulation, condition: Callable[[], bool], deliveries: int = 20_000) -> None:
    with simulation.observations.recording():
        for count in range(deliveries):
            if count % 50 == 0:
                for me in simulation.programs:
                    simulation.tick(me)
                if condition():
                    break
            simulation.deliver_one()
    assert condition(), {me: each.membership.waiting_for("everyone") for me, each in simulation.programs.items()}


def steps(simulation: QuorumSimulation, *names: str) -> int:
    return min(len(simulation.programs[me].totals) for me in names)


@pytest.mark.parametrize("number", [MAX_ATTENDANCE - 1, 1 << 31, MAX_LEAP + 10])
def test_huge_number_of_a_member_that_then_vanishes_does_not_stop_the_others(number: int) -> None:
    """If the others followed it, there would be no larger number for the view without that member."""
    simulation = QuorumSimulation(1, 5, 4, sums=4)
    with simulation.observations.recording():
        for me in FIVE:
            simulation.advance(me)
    run_until(simulation, lambda: steps(simulation, *FIVE) >= 1)
    attendance = simulation.programs["c"].membership._attendance
    assert attendance is not None
    lie = Attendance(number, attendance.own.members, attendance.own.processes, (), begun=True)
    with simulation.observations.recording():
        for me in HONEST:
            simulation.deliver("c", me, to_bytes(Frame(NO_VIEW, 0, lie)))
    simulation.stopped = {"c"}
    run_until(simulation, lambda: steps(simulation, *HONEST) == 4)
    for me in HONEST:
        entered = simulation.programs[me].membership._attendance
        assert entered is not None
        assert entered.own.number < MAX_LEAP
    simulation.check_invariants()


def test_returning_member_follows_the_others_however_far_they_are() -> None:
    exchange = AttendanceExchange("e", quorum_spec(5, 4), number=1)
    exchange.begun = True
    for peer in "abcd":
        exchange.receive(peer, Attendance(5000, FIVE, PROCESSES, (), begun=True))
    assert exchange.update(lambda _: PROCESSES) is not None
    assert exchange.own.number == 5001
    tolerated = quorum_spec(5, 4).tolerated
    assert tolerated == 2
    alone = AttendanceExchange("e", quorum_spec(5, 4), number=1)
    for peer in "abcd"[:tolerated]:  # they may all be dishonest
        alone.receive(peer, Attendance(5000, FIVE, PROCESSES, (), begun=True))
    alone.update(lambda _: PROCESSES)
    assert alone.own.number == 2
