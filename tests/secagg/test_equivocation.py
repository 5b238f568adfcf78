"""A member that sends different statements to different members is identified before anything is revealed."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from hashlib import sha256
from unittest.mock import patch

import pytest

from cgd.errors import EquivocationError, RemoteProtocolError
from cgd.secagg.certificates import Terms
from cgd.secagg.codec import Frame, from_bytes, hello_content, ready_content, to_bytes
from cgd.secagg.federation_spec import PublicKeys
from cgd.secagg.messages import (
    NO_SIGNATURE,
    Confirm,
    Hello,
    JournalPosition,
    Message,
    Ready,
    RevealKey,
    SignedEvidence,
    Subtotal,
    Total,
)
from cgd.secagg.positions import PositionReport
from cgd.secagg.statements import slot_of
from support import summing_program
from support.adversary import ADVERSARY
from support.dishonest import DirectedSimulation
from support.member_simulation import MemberSimulation
from support.summing_program import Program, federation_spec


def check_equivocation_is_proved(simulation: DirectedSimulation) -> None:
    for me in simulation.honest:
        equivocation = simulation.programs[me].membership.equivocation
        assert isinstance(equivocation, EquivocationError)
        assert equivocation.peer == ADVERSARY


def test_different_reports_are_proved_to_all_before_sharing() -> None:
    simulation = DirectedSimulation()
    simulation.alter = simulation.two_positions
    simulation.settle()
    assert not simulation.observations.attempts
    check_equivocation_is_proved(simulation)


@pytest.mark.parametrize("changed", ["commitment", "head"])
def test_different_ready_statements_are_proved_to_all_before_a_key_is_revealed(changed: str) -> None:
    simulation = DirectedSimulation()

    def alter(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Ready) or to == "a":
            return frame.message
        settings, commitment, terms = frame.message.spec, frame.message.commitment, frame.message.terms
        if changed == "commitment":
            commitment = bytes(32)
        else:
            terms = replace(Terms.from_bytes(terms), head=bytes(32)).to_bytes()
        content = ready_content(settings, commitment, terms)
        slot = slot_of(simulation.view, "everyone", frame.number)
        return Ready(settings, commitment, terms, simulation.sign("ready", slot, content))

    simulation.alter = alter
    simulation.settle()
    assert not simulation.observations.any_revealed()
    check_equivocation_is_proved(simulation)


def test_different_unsigned_ready_is_attributed_before_a_key_is_revealed() -> None:
    simulation = DirectedSimulation()

    def alter(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Ready) or to == "a":
            return frame.message
        return replace(frame.message, commitment=bytes(32), signature=NO_SIGNATURE)

    simulation.alter = alter
    simulation.settle()
    assert not simulation.observations.any_revealed()
    assert "c: sent a ready statement without a valid signature of its own" in str(simulation.programs["b"].stopped)
    assert not any(simulation.programs[me].totals for me in simulation.honest)


def test_unsigned_confirm_reveals_nothing() -> None:
    simulation = DirectedSimulation()

    def alter(to: str, frame: Frame) -> Message:
        return replace(frame.message, signature=NO_SIGNATURE) if isinstance(frame.message, Confirm) else frame.message

    simulation.alter = alter
    simulation.settle()
    assert not simulation.observations.any_revealed()
    for me in simulation.honest:
        assert "c: sent a confirm statement without a valid signature" in str(simulation.programs[me].stopped)


def test_unreadable_terms_do_not_crash_members() -> None:
    simulation = DirectedSimulation()

    def alter(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Ready):
            return frame.message
        settings, commitment = frame.message.spec, frame.message.commitment
        terms = b"[" * 4000  # a RecursionError in json
        slot = slot_of(simulation.view, "everyone", frame.number)
        signature = simulation.sign("ready", slot, ready_content(settings, commitment, terms))
        return Ready(settings, commitment, terms, signature)

    simulation.alter = alter
    simulation.settle()
    for me in simulation.honest:
        assert "its terms cannot be read" in str(simulation.programs[me].stopped)


def test_different_ephemeral_keys_are_attributed_by_all() -> None:
    simulation = DirectedSimulation()
    other = Program(ADVERSARY, simulation.federation_spec, 2).membership._hellos.ephemeral.public

    def alter(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Hello) or to == "a":
            return frame.message
        hello = replace(frame.message, ephemeral=other)
        slot = slot_of(other, "hello", hello.epoch)
        return replace(hello, signature=simulation.sign("hello", slot, hello_content(hello)))

    simulation.alter = alter
    simulation.settle()
    assert not simulation.observations.attempts
    for me in simulation.honest:
        membership = simulation.programs[me].membership
        assert membership.waiting_for("everyone") == ("the same hello for all members", frozenset({ADVERSARY}))
        assert "another ephemeral key than this member" in membership.suspected()[ADVERSARY]


# Honest members are not accused.


def restarted_members() -> tuple[MemberSimulation, JournalPosition]:
    """Return members of which a does not know b's earlier process, and a report that shows this process to a."""
    simulation = MemberSimulation.idle()
    simulation.exchange()
    old = simulation.programs["c"].membership.hello("b")
    assert old is not None
    for me in "ba":
        simulation.kill(me, keep=True)
        assert simulation.exchange() == []
    return simulation, JournalPosition(b"[]", bytes(64), hellos=(("b", old.ephemeral, old.signature),))


def test_earlier_process_of_an_honest_member_is_no_accusation() -> None:
    """c shows it as if it had left the view, and continues in the view."""
    simulation, report = restarted_members()
    a = simulation.programs["a"].membership
    for number in range(2):
        a.receive("c", to_bytes(Frame(b"no view has this", 0, report)))
        assert a.suspected().keys() == ({"b"} if number == 0 else set())  # c is not believed twice
        pending = simulation.start_all(number)
        assert simulation.exchange() == []
        assert all(each.total is not None for each in pending.values())
        assert a.suspected() == {}


def test_reason_of_a_suspicion_names_the_member_that_caused_it() -> None:
    """While c is silent, it cannot be known whether b or c is dishonest."""
    simulation, report = restarted_members()
    a = simulation.programs["a"].membership
    a.receive("c", to_bytes(Frame(b"no view has this", 0, report)))
    reason = "it sent c another ephemeral key than this member: it was restarted just now, or one of the two is"
    assert a.suspected()["b"].startswith(reason)


def test_one_hello_of_each_member_is_verified_in_a_report() -> None:
    simulation, report = restarted_members()
    hellos = tuple((name, os.urandom(32), bytes(64)) for name in "bd" for _ in range(1000))
    data = to_bytes(Frame(b"no view has this", 0, replace(report, hellos=hellos)))
    with patch.object(PublicKeys, "verify", autospec=True, return_value=False) as verify:
        simulation.programs["a"].membership.receive("c", data)
    assert verify.call_count == 2


def test_forged_evidence_proves_nothing() -> None:
    simulation = DirectedSimulation()
    slot = slot_of(simulation.view, "everyone", 1)
    forged = [("b", os.urandom(32), simulation.sign("ready", slot, each)) for each in (b"1", b"2")]
    simulation.settle()
    simulation.inject("a", bytes(16), SignedEvidence("ready", slot, tuple(forged)))
    simulation.settle()
    assert simulation.programs["a"].membership.equivocation is None


def test_hellos_of_two_epochs_prove_nothing() -> None:
    """An honest member that adopted a new epoch has signed two hellos with one ephemeral key."""
    simulation = DirectedSimulation(honest=3, sums=1)
    simulation.settle()
    b = simulation.programs["b"].membership._hellos
    hellos = [b.make_hello("a")]
    simulation.programs["b"].membership.adopt(federation_spec(simulation.federation_spec.members, 2))
    hellos.append(b.make_hello("a"))
    statements = tuple(("b", sha256(hello_content(each)).digest(), each.signature) for each in hellos)
    for slot in (slot_of(each.ephemeral, "hello", each.epoch) for each in hellos):
        simulation.inject("a", bytes(16), SignedEvidence("hello", slot, statements))
    simulation.settle()
    assert simulation.programs["a"].membership.equivocation is None


def test_recipient_of_a_wrong_subtotal_is_not_accused() -> None:
    """With three members, the majority may be one honest member and the dishonest one."""
    simulation = DirectedSimulation()

    def alter(to: str, frame: Frame) -> Message:
        if isinstance(frame.message, Subtotal) and to == "b":
            return replace(frame.message, words=bytes(len(frame.message.words)))
        return frame.message

    simulation.alter = alter
    simulation.settle()
    for me in simulation.honest:
        assert not simulation.errors[me]
        assert not isinstance(simulation.programs[me].stopped, RemoteProtocolError)


def test_recipient_of_a_forged_total_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dishonest aggregator sends one member a total at once, and the other nothing."""
    settings = replace(summing_program.gradient_spec(), opening="aggregator", aggregator=ADVERSARY)
    monkeypatch.setattr(summing_program, "gradient_spec", lambda: settings)
    simulation = DirectedSimulation(sums=1)
    simulation.alter = lambda to, frame: (
        None if to == "b" and isinstance(frame.message, Ready | Total | Confirm | RevealKey) else frame.message
    )
    deliver = simulation.deliver

    confirmed = []

    def add_total(sender: str, to: str, data: bytes) -> None:
        frame = from_bytes(data, sender)
        deliver(sender, to, data)
        if sender == ADVERSARY and to == "a" and isinstance(frame.message, Ready):
            simulation.inject("a", frame.session, Total(0, bytes(4 * summing_program.SIZE)), frame.number)
        if sender == "a" and to == "b" and isinstance(frame.message, Confirm):
            confirmed.append(frame)

    monkeypatch.setattr(simulation, "deliver", add_total)
    simulation.settle()
    assert len(confirmed) == 1
    for me in simulation.honest:
        assert not isinstance(simulation.programs[me].stopped, RemoteProtocolError)


def test_different_ready_statements_are_proved_also_after_many_reports() -> None:
    """The dishonest member sends hundreds of reports after its `Ready`, to push that out of the members' memory."""
    simulation = DirectedSimulation()
    flooded: set[tuple[str, int]] = set()
    numbers = {me: itertools.count(1) for me in simulation.honest}

    def send_reports(to: str) -> None:
        first = simulation.programs[ADVERSARY].membership._view_change
        assert first is not None
        positions = first.reports.latest[ADVERSARY].groups
        for number in itertools.islice(numbers[to], 300):
            content = PositionReport(simulation.view, number, positions).to_bytes()
            signature = simulation.sign("standing", slot_of(simulation.view, "", number), content)
            simulation.inject(to, simulation.view[:16], JournalPosition(content, signature))

    def alter(to: str, frame: Frame) -> Message | None:
        if frame.number > 3:  # it has prevented three sums; the programs would try again without end
            return None
        if isinstance(frame.message, Subtotal | Confirm) and (to, frame.number) not in flooded:
            flooded.add((to, frame.number))
            send_reports(to)
        if not isinstance(frame.message, Ready) or to == "a":
            return frame.message
        settings, commitment, terms = frame.message.spec, bytes(32), frame.message.terms
        slot = slot_of(simulation.view, "everyone", frame.number)
        return Ready(
            settings, commitment, terms, simulation.sign("ready", slot, ready_content(settings, commitment, terms))
        )

    simulation.alter = alter
    simulation.settle()
    assert {to for to, _ in flooded} == set(simulation.honest)
    assert not simulation.observations.any_revealed()
    check_equivocation_is_proved(simulation)
