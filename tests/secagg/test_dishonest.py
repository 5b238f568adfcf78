"""One dishonest member learns no honest member's gradient: the findings of a review, and random schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cgd.errors import LocalProtocolError, PeerLeftError
from cgd.secagg.codec import Frame, hello_content, to_bytes
from cgd.secagg.key_agreement import EphemeralKey, MembershipView, derive_pair_keys
from cgd.secagg.messages import (
    Goodbye,
    Hello,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    Message,
    RevealKey,
)
from cgd.secagg.statements import slot_of
from support import summing_program
from support.adversary import ADVERSARY
from support.dishonest import DirectedSimulation, Simulation, withhold
from support.ideal import ideal_cryptography
from support.summing_program import Program, federation_spec

SCHEDULES = 75


def test_honest_members_finish() -> None:
    simulation = DirectedSimulation()
    simulation.settle()
    assert [len(totals) for totals in simulation.totals()] == [2, 2]
    assert simulation.errors == {"a": [], "b": []}


# Finding 1: another member's ephemeral key.


@pytest.mark.parametrize("top_bit", [False, True])
def test_copied_ephemeral_key_is_rejected_before_sharing(top_bit: bool) -> None:
    simulation = DirectedSimulation()
    stolen = simulation.programs["b"].membership._hellos.ephemeral.public
    key = bytes([*stolen[:31], stolen[31] ^ (0x80 if top_bit else 0)])

    def copy_key(_: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Hello):
            return frame.message
        hello = replace(frame.message, ephemeral=key)
        slot = slot_of(key, "hello", hello.epoch)
        return replace(hello, signature=simulation.sign("hello", slot, hello_content(hello)))

    simulation.alter = copy_key
    simulation.settle()
    assert not simulation.observations.attempts
    for me in ("a", "b"):
        membership = simulation.programs[me].membership
        assert membership.waiting_for("everyone") == ("its report", frozenset({ADVERSARY}))


def test_copied_ephemeral_key_cannot_be_proved_in_the_view() -> None:
    """The dishonest member knows everything except the private half of the key that it announces."""
    simulation = DirectedSimulation()
    stolen = simulation.programs["b"].membership._hellos.ephemeral.public
    simulation.programs[ADVERSARY].membership._hellos.ephemeral.public = stolen
    simulation.settle()
    assert not simulation.observations.attempts
    assert [str(error) for error in simulation.errors["a"]] == [
        "c: cannot prove that the ephemeral key it announced is its own: it may be another member's"
    ]


def test_pair_keys_depend_on_names_keys_and_view() -> None:
    """Two names with one key, as in the finding, have unrelated masks."""
    members = ("a", "b", "c")
    held = federation_spec(members, 1)
    ephemerals = {name: EphemeralKey() for name in members}
    keys = {name: ephemerals[name].public for name in members}
    view = MembershipView.of(held, keys)
    a, b = summing_program._identity("a"), summing_program._identity("b")
    mine = derive_pair_keys("a", a, ephemerals["a"], "b", held, view)
    theirs = derive_pair_keys("b", b, ephemerals["b"], "a", held, view)
    assert (mine.mask_key, mine.own_tag, mine.peer_tag) == (theirs.mask_key, theirs.peer_tag, theirs.own_tag)
    copied = MembershipView.of(held, keys | {"c": keys["b"]})
    same_statics = replace(held, keys={**held.keys, "c": held.keys["b"]})
    others = [
        derive_pair_keys("a", a, ephemerals["a"], "b", held, copied),
        derive_pair_keys("a", a, ephemerals["a"], "c", held, copied),
        derive_pair_keys("a", a, ephemerals["a"], "c", same_statics, copied),
    ]
    assert len({each.mask_key for each in (mine, *others)}) == 4


# Finding 5: unexpected messages.


def test_chunk_instead_of_a_report_is_rejected() -> None:
    simulation = DirectedSimulation()
    simulation.alter = lambda _, frame: (
        JournalChunk(0, "everyone", 8, bytes(8)) if isinstance(frame.message, JournalPosition) else frame.message
    )
    simulation.settle()
    assert [str(error) for error in simulation.errors["a"]] == [
        "c: sent a chunk of the journal of 'everyone' without a request"
    ]


# Finding 10: a key that is revealed to some members only.


def test_sum_that_one_member_may_have_revealed_is_not_repeated_with_other_members() -> None:
    simulation = DirectedSimulation(honest=3, sums=1)
    simulation.alter = withhold(RevealKey)
    simulation.settle()
    assert len(simulation.programs[ADVERSARY].journal) == 1  # only the dishonest member has revealed the sum
    simulation.federation_spec = federation_spec(("a", "b", ADVERSARY), 2)
    simulation.honest = ("a", "b")
    simulation.replace("d", simulation.programs["d"])
    del simulation.programs["d"]
    simulation.restart(ADVERSARY)
    for me in simulation.honest:
        simulation.programs[me].membership.adopt(simulation.federation_spec)
    simulation.settle()
    for me in simulation.honest:
        stopped = simulation.programs[me].stopped
        assert isinstance(stopped, LocalProtocolError)
        text = "sum 1 may have been revealed with the members a, b, c, d, and the members are a, b, c now"
        assert text in str(stopped)


def test_pending_reveal_survives_the_process() -> None:
    simulation = DirectedSimulation(honest=3, sums=1)
    simulation.alter = withhold(RevealKey)
    simulation.settle()
    simulation.durable = "a"
    simulation.kill("a")
    pending_reveal = simulation.programs["a"].journal.pending_reveal
    assert pending_reveal is not None
    assert pending_reveal.members == ("a", "b", "c", "d")


def test_sum_revealed_to_one_member_is_finished_by_all() -> None:
    simulation = DirectedSimulation(sums=1)
    simulation.alter = lambda to, frame: None if isinstance(frame.message, RevealKey) and to != "a" else frame.message
    simulation.settle()
    assert [len(totals) for totals in simulation.totals()] == [1, 0]
    simulation.alter = lambda _, frame: frame.message
    simulation.restart(ADVERSARY)  # it claims to have lost its state
    simulation.settle()
    assert simulation.totals()[0] == simulation.totals()[1] != []


def test_attempt_followed_by_another_cannot_finish_the_sum() -> None:
    """Otherwise a would have the total of the first attempt, and b that of the second."""
    simulation = DirectedSimulation(sums=1)
    simulation.alter = withhold(RevealKey)
    simulation.settle()
    first = simulation.saved_journal(ADVERSARY)
    assert len(first) == 1
    simulation.restart(ADVERSARY)  # it denies that it has revealed the sum: all members repeat it
    simulation.settle()
    pending = [simulation.group(me).journal.pending_reveal for me in ("a", "b")]
    assert all(each is not None and each.attempt != first.entries[0].attempt for each in pending)
    simulation.alter = lambda _, frame: frame.message
    simulation.restart(ADVERSARY, first)
    simulation.settle()
    for me in ("a", "b"):
        assert simulation.programs[me].totals == []
        assert simulation.programs[me].membership.waiting_for("everyone")[0] == "agreement on the history"
        assert ADVERSARY in simulation.programs[me].membership.suspected()


def test_reports_older_than_an_action_in_another_view_are_not_used() -> None:
    """The dishonest member leads a and b through two views, in opposite orders; the model checker found this."""
    simulation = DirectedSimulation(sums=1)
    simulation.alter = withhold(RevealKey)
    simulation.settle()
    finished = simulation.saved_journal(ADVERSARY)
    one = Program(ADVERSARY, simulation.federation_spec, 1, finished)  # claims the sum
    other = Program(ADVERSARY, simulation.federation_spec, 1)  # denies it
    a, b = simulation.programs["a"].membership, simulation.programs["b"].membership
    hellos = {each: dict(iter(each.membership.next_outgoing, None)) for each in (one, other)}
    for each, to in ((one, a), (other, a), (other, b), (one, b)):
        to.receive(ADVERSARY, hellos[each][to.me])
        for sender, receiver in ((a, b), (b, a)):
            for recipient, data in list(iter(sender.next_outgoing, None)):
                if recipient == receiver.me:
                    receiver.receive(sender.me, data)
                else:
                    one.membership.receive(sender.me, data)
    # b is in the view with `one` now, and has the report of a in it; but a is in the view with `other`.
    assert b.view == one.membership.view != a.view
    for _ in range(10):  # `one` proves to b that the sum is finished, and a, which has left that view, sends nothing
        for recipient, data in list(iter(one.membership.next_outgoing, None)):
            if recipient == "b":
                b.receive(ADVERSARY, data)
        for recipient, data in list(iter(b.next_outgoing, None)):
            if recipient == ADVERSARY:
                one.membership.receive("b", data)
    assert b.waiting_for("everyone")[0] in ("its report", "all reports")
    assert len(b.group("everyone").journal) == 0


# Finding 11: a Ready after a Goodbye.


def test_ready_after_goodbye_is_rejected() -> None:
    simulation = DirectedSimulation(sums=1)
    simulation.settle()
    for me in (*simulation.honest, ADVERSARY):
        simulation.programs[me].sums = 2
    for me in simulation.honest:
        simulation.inject(me, bytes(16), Goodbye(True))
    simulation.settle()
    for me in simulation.honest:
        assert isinstance(simulation.programs[me].stopped, PeerLeftError)
        assert len(simulation.programs[me].journal) == 1
        assert not simulation.group(me).session.running  # type: ignore[union-attr]


# Denial of service.


def test_early_report_does_not_prevent_the_adoption_of_a_new_epoch() -> None:
    """The dishonest member knows all keys, and so the next view."""
    simulation = DirectedSimulation(honest=3, sums=1)
    simulation.settle()
    later = federation_spec(simulation.federation_spec.members, 2)
    a = simulation.programs["a"].membership
    for me in ("b", "d", ADVERSARY):
        simulation.programs[me].membership.adopt(later)
    simulation.settle()
    next_view = MembershipView.of(later, a._hellos.ephemeral_keys(a.others))
    a.receive(ADVERSARY, to_bytes(Frame(next_view.digest[:16], 0, JournalPosition(b"[]", bytes(64)))))
    a.adopt(later)
    assert a.federation_spec.epoch == 2


def test_repeated_journal_requests_do_not_fill_the_memory() -> None:
    simulation = DirectedSimulation(sums=1)
    simulation.settle()
    a = simulation.programs["a"].membership
    for number in range(200):
        simulation.programs["a"].journal.save_state(0, number, bytes(1 << 16))
        a.receive(ADVERSARY, to_bytes(Frame(a.view, 0, JournalRequest("everyone", 0, number % 2 == 0))))
    queued = sum(len(data) for _, data in iter(a.next_outgoing, None))
    assert queued < 1 << 20


# Random schedules.


@pytest.mark.parametrize(
    ("honest", "first"),
    [
        (2, 0),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((3, 0), (4, 0), *((m, SCHEDULES) for m in (2, 3, 4)))
        ),
    ],
)
def test_invariants_hold_in_random_schedules(honest: int, first: int) -> None:
    with ideal_cryptography():
        summing_program._identity.cache_clear()
        for seed in range(first, first + SCHEDULES):
            Simulation(1_000_000 * honest + seed, honest).run(400)
    summing_program._identity.cache_clear()


def test_invariants_hold_with_real_cryptography() -> None:
    for seed in range(20):
        Simulation(seed, 2).run(400)
