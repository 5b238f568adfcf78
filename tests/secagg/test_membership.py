"""Members that are killed and restarted at any moment get the same totals, and each total is revealed once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.errors import InputError, LocalProtocolError, MembersChangedError, RemoteProtocolError, SettingsError
from cgd.secagg import hello as hello_module
from cgd.secagg.certificates import PendingReveal
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.journal_entry import Step
from cgd.secagg.membership import Membership
from cgd.secagg.messages import (
    HUB,
    Abort,
    Attendance,
    CompleteSum,
    Hello,
    JournalRequest,
    KeyShare,
    Ready,
    Reason,
    RevealKey,
)
from support.identities import identity
from support.member_simulation import (
    MEMBERS,
    SIZE,
    MemberSimulation,
    Program,
    addend,
    expected_total,
    federation_spec,
    totals_of,
)
from support.wire import spec

# Restarts.


def test_undisturbed_members_get_all_totals() -> None:
    simulation = MemberSimulation(0, sums=4)
    simulation.run()
    for program in simulation.programs.values():
        assert program.totals == [expected_total(number) for number in range(4)]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_killing_members_at_any_moment_does_not_change_totals(seed: int, kills: int, keep: bool) -> None:
    simulation = MemberSimulation(seed, sums=4)
    for _ in range(kills):
        simulation.steps(simulation.rng.randrange(400))
        # If no member keeps the journal, all start again, which is correct as well.
        simulation.kill(simulation.rng.choice(MEMBERS), keep=keep)
    simulation.run()
    for program in simulation.programs.values():
        assert program.totals == [expected_total(number) for number in range(4)]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 8), st.booleans())
def test_killing_hub_and_members_at_any_moment_does_not_change_totals(seed: int, kills: int, keep: bool) -> None:
    simulation = MemberSimulation(seed, sums=4, opening="hub")
    for _ in range(kills):
        simulation.steps(simulation.rng.randrange(300))
        victim = simulation.rng.choice((HUB, HUB, *MEMBERS))
        if victim == HUB:
            simulation.kill_hub()
        else:
            simulation.kill(victim, keep=keep)
    simulation.run()
    for program in simulation.programs.values():
        assert program.totals == [expected_total(number) for number in range(4)]


def test_finished_total_is_copied_and_not_revealed_again() -> None:
    """A restarted member may have another addend: the difference of two totals must not be revealed."""
    for seed in range(40):
        simulation = MemberSimulation(seed, sums=1)
        while not any(program.totals for program in simulation.programs.values()):
            simulation.step()
        first = next(me for me, program in simulation.programs.items() if program.totals)
        restarted = simulation.rng.choice([me for me in MEMBERS if me != first])
        simulation.kill(restarted, keep=False)
        program = simulation.programs[restarted]
        program.idle = True
        simulation.steps(500)
        pending = program.membership.start("everyone", spec(SIZE), lambda: addend("x", 7), 1, Step(0, 0))
        simulation.steps(3000)
        assert totals_of({restarted: pending}) == {expected_total(0)}
        for me, other in simulation.programs.items():
            assert me == restarted or other.totals == [expected_total(0)]


def test_restarted_program_must_request_the_same_sums() -> None:
    simulation = MemberSimulation(8, sums=1)
    simulation.run()
    simulation.kill("b", keep=True)
    membership = simulation.programs["b"].membership
    pending = membership.start("everyone", spec(SIZE + 1), lambda: addend("b", 0), 1)
    with pytest.raises(LocalProtocolError, match="sum 1 was of float32.5. in 32 bits when it was made"):
        raise pending.fault or AssertionError


# Epochs.


def is_between_sums(simulation: MemberSimulation, last: str) -> bool:
    """Return whether no member has revealed its key in the next sum, nor can before `last` is ready for it."""
    waiting = [program.waiting_for() for me, program in simulation.programs.items() if me != last]
    return not simulation.has_pending_reveal() and any(what == "Ready" and last in missing for what, missing in waiting)


def test_new_epoch_starts_when_all_remaining_members_adopted_it() -> None:
    simulation = MemberSimulation(1, sums=20)
    simulation.steps(150)
    while not is_between_sums(simulation, "d"):
        simulation.step()
    simulation.remove("d")
    simulation.steps(3000)
    assert not simulation.has_pending_reveal()
    done = {me: len(program.totals) for me, program in simulation.programs.items()}
    assert max(done.values()) < 20
    rest = ("a", "b", "c")
    for me in ("a", "b"):
        simulation.programs[me].membership.adopt(federation_spec(rest, epoch=2))
    simulation.steps(3000)
    assert {me: len(program.totals) for me, program in simulation.programs.items()} == done  # c has not adopted it
    assert "it needs the new federation file" in simulation.programs["a"].membership.problems()["c"]
    simulation.programs["c"].membership.adopt(federation_spec(rest, epoch=2))
    simulation.run()
    totals = [program.totals for program in simulation.programs.values()]
    assert totals[0] == totals[1] == totals[2]
    for number, total in enumerate(totals[0]):
        assert total in (expected_total(number), expected_total(number, rest))
    assert totals[0][-1] == expected_total(19, rest)


def test_sum_that_may_have_been_revealed_is_not_repeated_with_other_members() -> None:
    """A member with all keys may know the first total, and the difference of the totals would be an addend."""
    simulation = MemberSimulation.idle()
    simulation.exchange()
    simulation.start_all()
    simulation.exchange(lambda _, __, message: None if isinstance(message, RevealKey) else message)
    assert set(simulation.finished().values()) == {0}
    assert simulation.has_pending_reveal()
    simulation.remove("d")
    rest = ("a", "b", "c")
    for me in rest:
        simulation.kill(me, keep=True)
        simulation.programs[me].membership.adopt(federation_spec(rest, epoch=2))
    simulation.exchange()
    for me in rest:
        pending = simulation.programs[me].start(0, epoch=2)
        with pytest.raises(LocalProtocolError, match="sum 1 may have been revealed with the members a, b, c, d, and"):
            raise pending.fault or AssertionError
    assert simulation.exchange() == []
    assert set(simulation.finished().values()) == {0}
    for me in rest:  # with all earlier members
        simulation.programs[me].membership.adopt(federation_spec(epoch=3))
    simulation.programs["d"] = Program("d", federation_spec(epoch=3), 0)
    simulation.exchange()
    repeated = simulation.start_all(epoch=3)
    assert simulation.exchange() == []
    assert totals_of(repeated) == {expected_total(0)}
    assert set(simulation.finished().values()) == {1}
    assert not simulation.has_pending_reveal()


def test_sum_that_must_be_repeated_with_other_members_is_returned_to_the_caller() -> None:
    simulation = MemberSimulation(2, sums=1)
    simulation.remove("d")
    for program in simulation.programs.values():
        program.start(0)
        program.membership.adopt(federation_spec(("a", "b", "c"), epoch=2))
        program.idle = True
    simulation.steps(500)
    for program in simulation.programs.values():
        pending = program.group.pending
        assert pending is not None
        with pytest.raises(MembersChangedError, match="epoch 2 began during a sum of epoch 1; the members are a, b, c"):
            raise pending.fault or AssertionError


def test_new_member_gets_the_journal() -> None:
    simulation = MemberSimulation(3, sums=2)
    simulation.run()
    five = (*MEMBERS, "e")
    simulation.sums = 3
    for program in simulation.programs.values():
        program.sums = 3
        program.membership.adopt(federation_spec(five, epoch=2))
    simulation.programs["e"] = Program("e", federation_spec(five, epoch=2), 3)
    simulation.run()
    for program in simulation.programs.values():
        assert program.totals == [expected_total(0), expected_total(1), expected_total(2, five)]


def test_group_that_was_absent_in_an_epoch_continues_its_journal() -> None:
    """Its key may have been sent for a sum that was not finished."""
    members, groups = ("a", "b", "c"), ("everyone", "row-0")
    membership = Membership("a", identity("a"), federation_spec(groups=dict.fromkeys(groups, MEMBERS)))
    row = membership.group("row-0")
    row.journal.pending_reveal, row.next_index = PendingReveal(0, MEMBERS, bytes(32)), 1
    membership.adopt(federation_spec(members, 2))
    assert membership.groups == ("everyone",)
    membership.adopt(federation_spec(members, 3, groups=dict.fromkeys(groups, members)))
    row = membership.group("row-0")
    assert row.journal.pending_reveal == PendingReveal(0, MEMBERS, bytes(32))
    assert (row.next_index, row.members, row.epoch) == (1, members, 3)


def test_epoch_must_increase_and_have_enough_members() -> None:
    membership = Membership("a", identity("a"), federation_spec(epoch=3))
    with pytest.raises(InputError, match="the epoch must increase"):
        membership.adopt(federation_spec(epoch=3))
    with pytest.raises(InputError, match="at least 3"):
        membership.adopt(federation_spec(("a", "b"), epoch=4))


# Hellos.


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"federation": "other"}, "another federation, 'other'; ours is 'trial'"),
        ({"version": "2.0"}, "it runs cgd 2.0 and this member runs 1.0"),
        ({"epoch": 2}, "has epoch 2 and ours has epoch 1: this member needs the new federation file"),
        ({"sections": {"training": "z", "participants": "y"}}, "differs from ours in [training]"),
        ({"sections": {"participants": "y"}}, "differs from ours in [training]"),
    ],
)
def test_different_federation_spec_is_described_and_nothing_is_summed(changes: dict[str, Any], problem: str) -> None:
    simulation = MemberSimulation(4, sums=1)
    simulation.programs["c"] = Program("c", federation_spec(**changes), 1)
    simulation.steps(1000)
    for me in ("a", "b", "d"):
        problems = simulation.programs[me].membership.problems()
        assert problems.keys() == {"c"}
        assert problem in problems["c"]
        assert simulation.programs[me].waiting_for() == ("its hello", frozenset({"c"}))
    assert simulation.programs["c"].membership.problems().keys() == {"a", "b", "d"}
    assert not any(program.totals for program in simulation.programs.values())


def test_hello_is_answered_if_its_sender_does_not_know_our_key() -> None:
    one = Membership("a", identity("a"), federation_spec())
    while one.next_outgoing() is not None:
        pass
    other = Membership("b", identity("b"), federation_spec())
    frames = dict(iter(other.next_outgoing, None))
    one.receive("b", frames["a"])
    to, answer = one.next_outgoing() or ("", b"")
    assert to == "b"
    hello = from_bytes(answer, "a").message
    assert isinstance(hello, Hello)
    theirs = from_bytes(frames["a"], "b").message
    assert isinstance(theirs, Hello)
    assert hello.knows == theirs.ephemeral


def test_member_that_restarts_too_often_is_rejected_until_others_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its ephemeral keys must be remembered, in bounded memory."""
    monkeypatch.setattr(hello_module, "MAX_INCARNATIONS", 3)
    simulation = MemberSimulation.idle()
    simulation.exchange()
    for _ in range(3):
        simulation.kill("b", keep=False)
        assert simulation.exchange() == []
        assert simulation.up_to_date() == set(MEMBERS)
    simulation.kill("b", keep=False)
    errors = simulation.exchange()
    assert set(map(str, errors)) == {"b: was restarted more than 3 times; restart this member, too"}
    assert set(simulation.programs["b"].membership.problems()) == {"a", "c", "d"}
    for me in "acd":
        simulation.kill(me, keep=True)
    simulation.exchange()
    assert simulation.up_to_date() == set(MEMBERS)
    pending = simulation.start_all()
    simulation.exchange()
    assert totals_of(pending) == {expected_total(0)}


def test_member_that_returns_to_an_old_ephemeral_key_is_rejected_until_it_restarts() -> None:
    simulation = MemberSimulation.idle()
    simulation.exchange()
    old = simulation.programs["b"]
    simulation.kill("b", keep=False)
    simulation.exchange()
    simulation.programs["b"] = old
    hello = simulation.programs["b"].membership.hello("a")
    assert hello is not None
    old.membership.receive("a", to_bytes(Frame(bytes(16), 0, replace(hello, knows=bytes(32)))))
    errors = simulation.exchange()
    assert set(map(str, errors)) == {"b: returned to the ephemeral key of an earlier incarnation; restart it"}
    simulation.kill("b", keep=False)
    assert simulation.exchange() == []
    pending = simulation.start_all()
    simulation.exchange()
    assert totals_of(pending) == {expected_total(0)}


# Frames from the wrong sender.


def test_hub_may_not_send_other_messages() -> None:
    simulation = MemberSimulation(3, sums=2, opening="hub")
    simulation.steps(100)
    membership = simulation.programs["a"].membership
    for message in (JournalRequest("everyone"), Abort(Reason.RANGE), RevealKey(bytes(16))):
        for session in (bytes(16), membership.view):
            with pytest.raises(RemoteProtocolError, match="the hub: sent .*, which the hub may not send"):
                membership.receive(HUB, to_bytes(Frame(session, 0, message)))
    simulation.run()
    assert simulation.programs["a"].totals == [expected_total(0), expected_total(1)]


def test_unknown_senders_and_malformed_frames_are_rejected() -> None:
    simulation = MemberSimulation(7, sums=2)
    simulation.steps(200)
    membership = simulation.programs["a"].membership
    with pytest.raises(RemoteProtocolError, match="mallory: is not a member"):
        membership.receive("mallory", b"")
    for malformed in (b"", b"CGD", bytes(100), to_bytes(Frame(bytes(16), 0, JournalRequest("x")))[:-1]):
        with pytest.raises(RemoteProtocolError, match="b: sent"):
            membership.receive("b", malformed)
    simulation.run()
    assert simulation.programs["a"].totals == [expected_total(0), expected_total(1)]


def test_only_members_of_a_group_can_send_to_its_session() -> None:
    column = ("a", "b", "c")
    simulation = MemberSimulation.idle(groups={"everyone": MEMBERS, "column-0": column})
    simulation.exchange()
    pending = {
        me: simulation.programs[me].membership.start("column-0", spec(SIZE), partial(addend, me, 0), 1) for me in column
    }
    membership = simulation.programs["a"].membership
    session = membership.group("column-0").session
    assert session is not None
    with pytest.raises(RemoteProtocolError, match="d: is not a member of this group"):
        membership.receive("d", to_bytes(Frame(session.session, 1, Abort(Reason.PEER))))
    assert simulation.exchange() == []
    assert totals_of(pending) == {expected_total(0, column)}


@pytest.mark.parametrize("last", MEMBERS)
def test_all_members_name_the_member_with_other_settings(last: str) -> None:
    simulation = MemberSimulation.idle()
    simulation.exchange()
    deviating = replace(spec(SIZE), context="another lr")
    pending = {}
    for me in sorted(MEMBERS, key=lambda me: me == last):
        if me == last:
            simulation.exchange()
        wanted = deviating if me == "c" else spec(SIZE)
        pending[me] = simulation.programs[me].membership.start("everyone", wanted, partial(addend, me, 0), 1)
    simulation.exchange()
    for each in pending.values():
        assert isinstance(each.fault, SettingsError), each.fault
        assert each.fault.peer == "c"


def test_messages_of_a_quorum_are_rejected_without_one() -> None:
    simulation = MemberSimulation.idle()
    simulation.exchange()
    simulation.start_all()
    program = simulation.programs["a"]
    session = program.group.session.session  # type: ignore[union-attr]
    with pytest.raises(RemoteProtocolError, match="b: sent its part in a sum of 'everyone', and should not"):
        program.membership.receive("b", to_bytes(Frame(program.membership.view, 0, CompleteSum("everyone", b"[]"))))
    program.membership.receive("b", to_bytes(Frame(bytes(16), 0, Attendance(1, ("a",), bytes(32), (), begun=True))))
    program.membership.receive("b", to_bytes(Frame(session, 1, Ready(spec(SIZE), bytes(32)))))
    program.membership.receive("b", to_bytes(Frame(session, 1, KeyShare(bytes(17)))))
    assert "there is no quorum" in str(program.group.pending.fault)  # type: ignore[union-attr]
