"""Members that are behind get the missing journal entries, whatever other members send instead of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from cgd.errors import RemoteProtocolError
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.membership import Membership
from cgd.secagg.messages import Hello, JournalChunk, JournalPosition, JournalRequest, Message
from cgd.secagg.positions import GroupPosition, PositionReport
from cgd.secagg.statements import slot_of, statement
from cgd.secagg.view_change import MAX_TRANSFERS
from support.histories import append_certified
from support.identities import identity
from support.member_simulation import (
    MEMBERS,
    SIZE,
    MemberSimulation,
    addend,
    expected_total,
    federation_spec,
    make_journal,
    totals_of,
)
from support.wire import spec

INVALID = b"not a journal".center(100)


def invalid_journal_of_b(sender: str, _to: str, message: Message) -> Message:
    """Replace the journal chunks of b by invalid bytes."""
    if sender != "b" or not isinstance(message, JournalChunk):
        return message
    return JournalChunk(0, message.group, len(INVALID), INVALID)


def test_invalid_journal_is_requested_from_another_member() -> None:
    simulation = MemberSimulation.idle({"b": 3, "c": 3})
    errors = simulation.exchange(invalid_journal_of_b)
    assert set(map(str, errors)) == {
        "b: sent an invalid journal: a header of 2314885530818453536 bytes is too long for its entries"
    }
    assert len(errors) == 2  # a and d
    assert set(simulation.finished().values()) == {3}
    assert simulation.up_to_date() == set(MEMBERS)


def test_member_with_the_longest_invalid_journal_is_waited_for() -> None:
    """A sum that a member finished is not repeated, even if its journal is not available."""
    simulation = MemberSimulation.idle({"a": 2, "b": 6, "c": 5})
    errors = simulation.exchange(invalid_journal_of_b)
    assert [error.peer for error in errors] == ["b"] * 3
    assert simulation.finished() == {"a": 2, "b": 6, "c": 5, "d": 0}
    assert simulation.up_to_date() <= {"b"}
    for me in "acd":
        assert simulation.programs[me].waiting_for() == ("its journal", frozenset({"b"}))
    simulation.kill("b", keep=False)
    assert simulation.exchange() == []  # now the journal of c is the longest reported one, and valid
    assert set(simulation.finished().values()) == {5}
    assert simulation.up_to_date() == set(MEMBERS)


def test_only_source_with_an_invalid_journal_is_waited_for() -> None:
    simulation = MemberSimulation.idle({"b": 3})
    errors = simulation.exchange(invalid_journal_of_b)
    assert [error.peer for error in errors] == ["b"] * 3
    for me in "acd":
        assert simulation.programs[me].waiting_for() == ("its journal", frozenset({"b"}))


# Reports.


def altered_report(me: str, message: JournalPosition, **changes: Any) -> JournalPosition:
    """Return another report of a member, with its signature."""
    report = PositionReport.from_bytes(message.content)
    number = changes.pop("number", report.number)
    positions = {name: replace(position, **changes) for name, position in report.groups.items()}
    content = replace(report, number=number, groups=positions).to_bytes()
    signed = statement("standing", slot_of(report.view, "", number), sha256(content).digest())
    return replace(message, content=content, signature=identity(me).sign(signed))


def test_claim_of_too_many_sums_is_rejected_until_the_member_restarts() -> None:
    simulation = MemberSimulation.idle({"a": 5, "b": 5, "c": 6, "d": 6})
    group = simulation.programs["b"].group
    honest = group.position
    claim: dict[str, Any] = {"length": 99, "commitment": sha256(bytes(32)).digest(), "states": ()}
    group.position = lambda *_, **__: replace(honest(bytes(32), states=False), **claim)  # type: ignore[method-assign]
    contributions = (("everyone", bytes(32)),)

    def contribute(sender: str, _to: str, message: Message) -> Message:
        if sender == "b" and isinstance(message, JournalPosition):
            return replace(message, contributions=contributions if message.contributions else ())
        return message

    errors = simulation.exchange(contribute)
    assert "b: sent an invalid journal: it has 5 sums, but 99 were reported" in map(str, errors)
    assert simulation.finished()["a"] == 5
    assert simulation.programs["a"].waiting_for() == ("its journal", frozenset({"b"}))
    simulation.kill("b", keep=True)
    assert simulation.exchange() == []
    assert set(simulation.finished().values()) == {6}
    assert simulation.up_to_date() == set(MEMBERS)


def test_repeated_and_unsigned_reports_are_rejected_and_the_sum_continues() -> None:
    reports: list[JournalPosition] = []

    def record(sender: str, to: str, message: Message) -> Message:
        if (sender, to) == ("b", "a") and isinstance(message, JournalPosition):
            reports.append(message)
        return message

    simulation = MemberSimulation.idle()
    simulation.exchange(record)
    pending = simulation.start_all()
    membership = simulation.programs["a"].membership
    (first,) = reports

    def send(report: JournalPosition) -> None:
        membership.receive("b", to_bytes(Frame(membership.view, 0, report)))

    for repeated in (first, altered_report("b", first, length=7), altered_report("b", first, number=2)):
        with pytest.raises(RemoteProtocolError, match="b: sent its report . out of order"):
            send(repeated)
    with pytest.raises(RemoteProtocolError, match="b: sent a standing statement without a valid signature of its own"):
        send(replace(altered_report("b", first, number=1, length=7), signature=bytes(64)))
    send(altered_report("b", first, number=1, length=7))  # no member was behind, so it has no effect
    assert simulation.exchange() == []
    assert totals_of(pending) == {expected_total(0)}
    assert set(simulation.finished().values()) == {1}


# Requests and chunks.


def test_journal_of_a_group_is_sent_to_its_members_only() -> None:
    groups = {"everyone": MEMBERS, "column-1": ("a", "b", "c")}
    simulation = MemberSimulation(5, sums=1, held=federation_spec(groups=groups))
    simulation.run()
    membership = simulation.programs["a"].membership
    frame = to_bytes(Frame(membership.view, 0, JournalRequest("column-1")))
    with pytest.raises(RemoteProtocolError, match="d: requested the journal of 'column-1', but is not a member of it"):
        membership.receive("d", frame)


def test_repeated_request_is_answered_but_not_without_limit() -> None:
    """An honest member repeats it if our states changed while its request was on the way."""
    simulation = MemberSimulation(5, sums=1)
    simulation.run()
    simulation.steps(300)
    membership = simulation.programs["a"].membership
    for _ in range(3 * MAX_TRANSFERS):
        membership.receive("b", to_bytes(Frame(membership.view, 0, JournalRequest("everyone"))))
    recipients = [
        to
        for to, frame in iter(membership.next_outgoing, None)
        if isinstance(from_bytes(frame, "a").message, JournalChunk)
    ]
    assert recipients == ["b"] * MAX_TRANSFERS


def test_journal_is_requested_again_after_the_state_changed_while_the_request_was_on_the_way() -> None:
    """What arrives first has a state that b has not reported yet, so d drops it."""
    simulation = MemberSimulation.idle({"a": 3, "b": 3, "c": 3})
    requested: list[str] = []

    def save_state(me: str) -> None:
        simulation.programs[me].group.journal.save_state(0, 3, b"the state after three steps")
        simulation.programs[me].membership.state_saved()

    def alter(sender: str, to: str, message: Message) -> Message:
        if sender == "d" and isinstance(message, JournalRequest):
            requested.append(to)
            if len(requested) == 1:
                save_state(to)
        return message

    simulation.exchange(alter)
    assert simulation.finished()["d"] == 0
    for me in "abc":
        save_state(me)
    assert simulation.exchange(alter) == []
    assert requested == ["a", "a"]
    assert simulation.finished()["d"] == 3
    assert simulation.programs["d"].group.journal.states[0].steps == 3


def test_unrequested_and_unordered_chunks_have_no_effect() -> None:
    simulation = MemberSimulation.idle({"b": 3})
    membership = simulation.programs["a"].membership
    simulation.exchange(lambda _, to, message: None if to == "a" and isinstance(message, JournalChunk) else message)
    assert membership.waiting_for("everyone") == ("its journal", frozenset({"b"}))

    def send(sender: str, start: int, words: bytes, size: int) -> None:
        membership.receive(sender, to_bytes(Frame(membership.view, 0, JournalChunk(start, "everyone", size, words))))

    requested, other = (make_journal(sums).export_since(0, states=True) for sums in (3, 7))
    for content in (other, requested):
        with pytest.raises(RemoteProtocolError, match="c: sent a chunk of the journal of 'everyone' without a request"):
            send("c", 0, content, len(content))
    send("b", 5, other[5:9], len(other))
    send("b", 10**15, other, 2 * 10**15)
    assert simulation.finished()["a"] == 0
    send("b", 0, requested[:100], len(requested))
    send("b", 0, requested[:100], len(requested))
    send("b", 100, requested[100:], len(requested))
    assert simulation.finished()["a"] == 3
    assert "a" in simulation.up_to_date()
    send("b", 0, other, len(other))
    assert simulation.finished()["a"] == 3


def test_repeated_restarts_of_a_member_do_not_fill_the_memory() -> None:
    """It requests the journal each time and reads nothing; another member is absent."""
    simulation = MemberSimulation.idle({"a": 3})
    simulation.exchange()
    membership = simulation.programs["a"].membership
    for _ in range(50):
        simulation.kill("b", keep=False)
        for to, data in iter(simulation.programs["b"].membership.next_outgoing, None):
            if to == "a":
                membership.receive("b", data)
        membership.receive("b", to_bytes(Frame(membership.view, 0, JournalRequest("everyone"))))
        while membership.next_outgoing({"b", "d"}) is not None:
            pass
    waiting = [from_bytes(data, "a").message for to, data in iter(membership.next_outgoing, None) if to == "b"]
    assert [type(each) for each in waiting] == [Hello, JournalPosition, JournalChunk]


# Honest members are not accused.


COLUMN = ("a", "b", "c")
GROUPS = {"everyone": MEMBERS, "column-0": COLUMN}


def two_sums(group: str) -> Journal:
    journal = Journal()
    for number in range(2):
        total = np.frombuffer(expected_total(number, GROUPS[group]), dtype="<u4").copy()
        append_certified(journal, spec(SIZE), total, GROUPS[group], group=group)
    return journal


def claim_one_sum(membership: Membership, name: str) -> None:
    """Make a member report that it lacks the second sum of a group."""
    group = membership.group(name)
    position = group.position

    def claim(commitment: bytes, *, states: bool) -> GroupPosition:
        return replace(position(commitment, states=states), length=1, head=group.journal.heads[1])

    group.position = claim  # type: ignore[method-assign]


def test_report_for_one_group_does_not_claim_a_sum_that_another_group_has_finished_since() -> None:
    """c claims to be behind in two groups, and sums with one of them; b then reports again for the other one."""
    simulation = MemberSimulation.idle(groups=GROUPS)
    for me, program in simulation.programs.items():
        journals = {name: two_sums(name) for name, members in GROUPS.items() if me in members}
        program.membership = Membership(me, identity(me), simulation.federation_spec, journals)
    for name in GROUPS:
        claim_one_sum(simulation.programs["c"].membership, name)
    assert simulation.exchange() == []
    pending = {}
    for me in COLUMN:
        membership = simulation.programs[me].membership
        membership.group("column-0").next_index = 2
        pending[me] = membership.start("column-0", spec(SIZE), partial(addend, me, 2), 1, Step(0, 2))
    assert simulation.exchange() == []
    assert totals_of(pending) == {expected_total(2, COLUMN)}
    b = simulation.programs["b"].membership
    b.group("everyone").journal.save_state(0, 3, b"state")
    b.state_saved()
    assert simulation.exchange() == []
    for me in "abd":
        assert simulation.programs[me].membership.suspected() == {}
