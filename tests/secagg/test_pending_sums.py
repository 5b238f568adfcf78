"""Sums that a program refuses to take part in, and sums that it no longer waits for."""

from __future__ import annotations

from functools import partial

import pytest

from cgd.errors import LocalProtocolError, PeerAbortedError
from cgd.secagg.codec import from_bytes
from cgd.secagg.messages import Goodbye, Ready, Reason, RevealKey, Subtotal
from support.member_simulation import SIZE, MemberSimulation, addend, expected_total, totals_of
from support.wire import spec

# Refused sums.


@pytest.mark.parametrize("before_the_view", [False, True])
def test_refused_sum_fails_for_all_and_the_next_one_works(before_the_view: bool) -> None:
    """A refusal before the view change is sent after it."""
    simulation = MemberSimulation.idle()
    refuse = partial(simulation.programs["b"].group.refuse, Reason.RANGE)
    for act in (refuse, simulation.exchange) if before_the_view else (simulation.exchange, refuse):
        act()
    failed = {me: simulation.programs[me].start(0) for me in "acd"}
    simulation.exchange()
    for each in failed.values():
        assert isinstance(each.fault, PeerAbortedError)
        assert each.fault.peer == "b"
    pending = simulation.start_all()
    simulation.exchange()
    assert totals_of(pending) == {expected_total(0)}


def test_refusal_of_a_sum_in_the_journal_is_not_sent() -> None:
    simulation = MemberSimulation.idle({"a": 1, "c": 1, "d": 1})
    simulation.programs["b"].group.refuse(Reason.STOPPED)
    simulation.exchange()
    for me in "acd":
        simulation.programs[me].group.next_index = 1
    assert simulation.exchange() == []
    first = simulation.start_all(1)["b"]
    assert totals_of({"b": first}) == {expected_total(0)}
    second = simulation.programs["b"].start(1)
    simulation.exchange()
    assert totals_of({"b": second}) == {expected_total(1)}


# Abandoned sums.


def assert_total_is_returned_by_the_next_start(simulation: MemberSimulation) -> None:
    """Start a's sum again with other values: it returns the stored total, once."""
    group = simulation.programs["a"].group
    assert (len(group.journal), group.next_index) == (1, 0)
    again = simulation.programs["a"].membership.start("everyone", spec(SIZE), lambda: addend("x", 7), 1)
    assert totals_of({"a": again}) == {expected_total(0)}
    assert (len(group.journal), group.next_index) == (1, 1)


@pytest.mark.parametrize("finished_before", [False, True])
def test_abandoned_sum_is_returned_by_the_next_start(finished_before: bool) -> None:
    simulation = MemberSimulation.idle()
    simulation.exchange()
    pending = simulation.start_all()
    if finished_before:
        simulation.exchange()
    simulation.programs["a"].group.abandon()
    simulation.exchange()
    assert all(each.total is not None for each in pending.values())
    assert_total_is_returned_by_the_next_start(simulation)


def test_abandoned_sum_that_others_finished_is_returned_by_the_next_start() -> None:
    """Its total comes with the journal of another member, while our program does not wait."""
    simulation = MemberSimulation.idle()
    simulation.exchange()
    simulation.start_all()
    simulation.exchange(lambda _, to, message: None if to == "a" and isinstance(message, RevealKey) else message)
    assert simulation.finished() == {"a": 0, "b": 1, "c": 1, "d": 1}
    simulation.programs["a"].group.abandon()
    simulation.kill("b", keep=True)
    simulation.exchange()
    assert_total_is_returned_by_the_next_start(simulation)


def test_abandoned_sum_is_encoded_again_in_the_next_view() -> None:
    """So that noise is never repeated."""
    simulation = MemberSimulation.idle()
    simulation.exchange()
    addends = [addend("a", 0), addend("x", 8), addend("x", 7)]
    simulation.programs["a"].membership.start("everyone", spec(SIZE), addends.pop, 1)
    simulation.programs["a"].group.abandon()
    for _ in range(2):
        simulation.kill("b", keep=False)
        simulation.exchange()
    assert not addends
    for me in "bcd":
        simulation.programs[me].start(0)
    simulation.exchange()
    assert bytes(simulation.programs["c"].group.journal.entries[0].words or b"") == expected_total(0)


def test_other_sum_cannot_start_while_an_abandoned_one_runs() -> None:
    simulation = MemberSimulation.idle()
    simulation.exchange()
    program = simulation.programs["a"]
    program.start(0)
    program.group.abandon()
    with pytest.raises(LocalProtocolError, match="a sum is still running"):
        program.membership.start("everyone", spec(SIZE + 1), lambda: addend("a", 0), 1)


def test_abandoned_sum_is_not_started_again_after_the_goodbye() -> None:
    """Others would name this member: no Ready may follow a Goodbye."""
    simulation = MemberSimulation.idle()
    simulation.exchange()
    program = simulation.programs["b"]
    program.start(0)
    simulation.exchange()
    program.group.abandon()
    program.membership.send_goodbye(True)
    simulation.exchange()
    simulation.kill("c", keep=True)
    assert simulation.exchange() == []
    assert program.group.up_to_date


def test_goodbye_does_not_overtake_a_ready() -> None:
    """c did not read, so what belongs to the Ready of an abandoned sum has not been sent to it."""
    simulation = MemberSimulation.idle()
    simulation.exchange()
    program = simulation.programs["b"]
    program.start(0)
    program.group.abandon()
    program.membership.send_goodbye(True)
    while program.membership.next_outgoing(blocked={"c"}) is not None:
        pass
    sent = [from_bytes(data, "b").message for _, data in iter(program.membership.next_outgoing, None)]
    assert [type(each) for each in sent] == [Ready, Subtotal, Goodbye]
