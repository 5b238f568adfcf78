"""A dishonest member claims totals, states or a history that no other member has: findings 2 and 4 of a review."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from cgd.secagg.certificates import Certificate, Terms, describe_sum
from cgd.secagg.codec import Frame, spec_bytes
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import JournalEntry
from cgd.secagg.messages import JournalChunk, Message, RevealKey, SumSpec
from cgd.secagg.statements import slot_of
from support.adversary import ADVERSARY
from support.dishonest import DirectedSimulation, withhold
from support.summing_program import federation_spec

HUGE = SumSpec((1 << 38,), "float32", 32, 20, "pairwise", "mesh")


def claim_another_total(simulation: DirectedSimulation, totals: dict[str, bytes]) -> None:
    """Let the dishonest member alone finish a sum, and send these totals of it to some members."""
    simulation.alter = withhold(RevealKey)
    simulation.settle()
    assert simulation.totals() == [[], []]
    simulation.restart(ADVERSARY, simulation.saved_journal(ADVERSARY))

    def replace_total(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, JournalChunk) or to not in totals:
            return frame.message
        content = bytearray(frame.message.words)
        content[-12:] = totals[to]
        content[:32] = sha256(content[32:]).digest()
        return replace(frame.message, words=bytes(content))

    simulation.alter = replace_total


def test_sum_finished_by_one_member_is_accepted_with_its_proof() -> None:
    simulation = DirectedSimulation()
    claim_another_total(simulation, {})
    simulation.settle()
    assert [len(totals) for totals in simulation.totals()] == [2, 2]
    assert simulation.totals()[0] == simulation.totals()[1]


@pytest.mark.parametrize("totals", [{"a": b"x" * 12}, {"a": b"x" * 12, "b": b"y" * 12}])
def test_total_that_was_not_signed_is_rejected(totals: dict[str, bytes]) -> None:
    simulation = DirectedSimulation()
    claim_another_total(simulation, totals)
    simulation.settle()
    for me in totals:
        error = "c: sent an invalid journal: a total is not the one that was signed"
        assert error in map(str, simulation.errors[me])
        assert simulation.programs[me].totals == simulation.programs["b"].totals  # b received the true total, or none
    assert bool(simulation.programs["b"].totals) == ("b" not in totals)


def test_certificate_without_the_signatures_of_others_is_rejected() -> None:
    simulation = DirectedSimulation(sums=1)
    simulation.settle()
    journal = simulation.saved_journal(ADVERSARY)
    simulation.adversary.rng.seed(1)
    while len(journal) < 2:
        simulation.adversary._certify_another_total(journal)
    for me in simulation.honest:
        simulation.programs[me].sums = 2
    simulation.restart(ADVERSARY, journal, sums=2)
    simulation.settle()
    for me in simulation.honest:
        assert len(simulation.programs[me].journal) == 1
        assert any("the signature of" in str(error) for error in simulation.errors[me])


def test_member_without_state_accepts_only_states_that_all_others_have() -> None:
    simulation = DirectedSimulation(sums=1)
    simulation.settle()
    forged = simulation.saved_journal(ADVERSARY)
    forged.save_state(0, 1, b"another displacement")
    simulation.restart(ADVERSARY, forged, sums=0)
    simulation.restart("b")
    simulation.settle()
    assert len(simulation.programs["b"].journal) == 0  # a and c have different states
    simulation.restart(ADVERSARY, Journal())
    simulation.settle()
    assert simulation.totals()[0] == simulation.totals()[1]
    states = [simulation.programs[me].journal.states[0].content for me in ("a", "b")]
    assert states[0] == states[1]


def test_state_of_one_member_is_not_copied_while_another_can_catch_up_without_states() -> None:
    """Only the dishonest member has finished the last sum; a can finish it with its own state, b has lost its state."""
    simulation = DirectedSimulation(sums=2)
    simulation.alter = lambda _, frame: (
        None if isinstance(frame.message, RevealKey) and frame.number == 2 else frame.message
    )
    simulation.settle()
    assert [len(totals) for totals in simulation.totals()] == [1, 1]
    assert len(simulation.programs[ADVERSARY].journal) == 2
    forged = simulation.saved_journal(ADVERSARY)
    forged.save_state(0, 2, b"another displacement")
    simulation.alter = lambda _, frame: frame.message
    simulation.restart(ADVERSARY, forged, sums=0)
    simulation.restart("b")
    simulation.settle()
    assert len(simulation.programs["a"].totals) == 2
    assert len(simulation.programs["b"].journal) == 0  # a and c have different states
    simulation.restart(ADVERSARY, Journal())
    simulation.settle()
    states = [simulation.programs[me].journal.states[0].content for me in ("a", "b")]
    assert states[0] == states[1]
    simulation.check_invariants()


def test_final_digests_are_compared_after_the_last_step() -> None:
    simulation = DirectedSimulation(sums=1)
    simulation.settle()
    simulation.programs[ADVERSARY].journal.save_state(0, 1, b"another displacement")
    for program in simulation.programs.values():
        program.membership.send_goodbye(True)
    simulation.settle()
    for me in simulation.honest:
        assert simulation.programs[me].membership.differences().keys() == {ADVERSARY}


def append_huge_sum(simulation: DirectedSimulation, journal: Journal) -> None:
    """Append a sum of 1 TiB of an earlier epoch, signed by the dishonest member and two invented ones."""
    terms = Terms(1, len(journal), journal.head, 0, None, bytes(32)).to_bytes()
    keys = {name: bytes(16) for name in (ADVERSARY, "x", "y")}
    draft = Certificate(bytes(32), 1, spec_bytes(HUGE), terms, bytes(32), keys, {})
    signature = simulation.sign("confirm", slot_of(bytes(32), "everyone", 1), draft.attempt)
    certificate = replace(draft, signatures=dict.fromkeys(keys, signature))
    fields = describe_sum(HUGE), 1, 0, None, 4 * HUGE.size, 3, draft.attempt, memoryview(bytes(8)), certificate
    journal._append_entry(JournalEntry(*fields))


def test_history_signed_by_its_source_alone_occupies_no_memory() -> None:
    simulation = DirectedSimulation(sums=1)
    simulation.settle()
    simulation.federation_spec = federation_spec(simulation.federation_spec.members, 2)
    for me in simulation.honest:
        simulation.programs[me].membership.adopt(simulation.federation_spec)
    journal = simulation.saved_journal(ADVERSARY)
    append_huge_sum(simulation, journal)
    sent: list[JournalChunk] = []

    def announce_whole_size(_: str, frame: Frame) -> Message:
        message = frame.message
        if not isinstance(message, JournalChunk):
            return message
        sent.append(replace(message, size=len(message.words) - 8 + 4 * HUGE.size))
        return sent[-1]

    simulation.alter = announce_whole_size
    simulation.restart(ADVERSARY, journal, sums=2)
    simulation.settle()
    for number in range(8):
        start = len(sent[0].words) + number * (1 << 20)
        simulation.inject("a", simulation.view[:16], JournalChunk(start, "everyone", sent[0].size, bytes(1 << 20)))
    simulation.settle()
    for me in simulation.honest:
        transfer = simulation.group(me).journal_transfer
        assert transfer is not None
        assert not transfer._received
        assert len(simulation.programs[me].journal) == 1
        suspected = simulation.programs[me].membership.suspected()
        assert suspected == {ADVERSARY: "is the only present member that signed its history"}


def test_attempt_followed_by_another_is_not_accepted_under_a_changed_name() -> None:
    """A certificate does not prove the names of its members: with another name, b does not find itself in it.

    The dishonest member has finished an attempt at the second sum alone, and denied it. The sum was repeated, and d has
    finished it. D is removed, and a has lost its state. B revealed its key in the later attempt, so the first is void.
    """
    simulation = DirectedSimulation(honest=3)
    simulation.alter = lambda _, frame: (
        None if isinstance(frame.message, RevealKey) and frame.number == 2 else frame.message
    )
    simulation.settle()
    first_attempt = simulation.saved_journal(ADVERSARY)
    assert [len(first_attempt), *map(len, simulation.totals())] == [2, 1, 1, 1]
    simulation.restart(ADVERSARY)
    simulation.alter = lambda to, frame: None if isinstance(frame.message, RevealKey) and to != "d" else frame.message
    simulation.settle()
    assert {me: len(simulation.programs[me].journal) for me in simulation.honest} == {"a": 1, "b": 1, "d": 2}
    finished_by_d = simulation.saved_journal("d")

    def rename_b(_: str, frame: Frame) -> Message:
        message = frame.message
        if not isinstance(message, JournalChunk):
            return message
        content = bytes(message.words)[32:]
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length].replace(b'"b": [', b'"bb": [')
        body = len(header).to_bytes(8, "little") + header + content[8 + length :]
        return replace(message, size=32 + len(body), words=sha256(body).digest() + body)

    simulation.federation_spec = federation_spec(("a", "b", ADVERSARY), 2)
    simulation.honest = ("a", "b")
    simulation.replace("d", simulation.programs["d"])
    del simulation.programs["d"]
    simulation.alter = rename_b
    simulation.restart("a")
    simulation.restart(ADVERSARY, first_attempt)
    simulation.programs["b"].membership.adopt(simulation.federation_spec)
    simulation.settle()
    common = min(len(simulation.programs["b"].journal), len(finished_by_d))
    assert simulation.programs["b"].journal.heads[common] == finished_by_d.heads[common]
