"""A quorum of members goes on without absent ones: every step is opened once, and there is one history."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import LocalProtocolError, RemoteProtocolError
from cgd.secagg.attendance import AttendanceExchange, number_of, period_of
from cgd.secagg.codec import Frame, to_bytes
from cgd.secagg.completion import find_open_sums
from cgd.secagg.journal import Journal
from cgd.secagg.key_shares import deal, recover
from cgd.secagg.messages import (
    Attendance,
    CompleteSum,
    Confirm,
    KeyShare,
    PositionsGathered,
    Ready,
    RevealKey,
    Subtotal,
)
from cgd.secagg.positions import GroupPosition, OpenStep, Participation
from support import summing_program
from support.ideal import ideal_cryptography
from support.quorum import DirectedQuorum, QuorumProgram, QuorumSimulation, quorum_spec
from support.summing_program import addend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.secagg.messages import Message

SCHEDULES = 15
MANY = 100
PERIOD = period_of(1, 7)


@pytest.fixture(autouse=True)
def ideal() -> Iterator[None]:
    with ideal_cryptography():
        summing_program._identity.cache_clear()
        yield
    summing_program._identity.cache_clear()


def gradient_total(members: str, step: int) -> bytes:
    return np.sum([addend(name, step) for name in members], axis=0, dtype=np.uint32).tobytes()


def started(steps: int, **options: Any) -> DirectedQuorum:
    """Return members that have taken one step together, and request so many in all."""
    simulation = DirectedQuorum(sums=1, **options)
    simulation.exchange()
    for program in simulation.programs.values():
        program.sums = steps
    return simulation


# Random schedules.


@pytest.mark.parametrize(
    ("count", "quorum", "first", "schedules"),
    [
        (5, 4, 0, SCHEDULES),
        (5, 3, 0, SCHEDULES),
        *(pytest.param(*each, 1000, MANY, marks=pytest.mark.slow) for each in ((5, 4), (5, 3), (4, 3), (7, 5))),
    ],
)
def test_members_that_come_and_go_end_with_one_history(count: int, quorum: int, first: int, schedules: int) -> None:
    """Members are killed, stopped and cut off at random; at the end all are back, and no program has failed."""
    sizes: set[int] = set()
    for seed in range(first, first + schedules):
        simulation = QuorumSimulation(seed, count, quorum)
        simulation.run(1500)
        simulation.settle()
        sizes |= simulation.sizes
        assert not [each.stopped for each in simulation.programs.values() if each.stopped is not None]
        assert {len(each.totals) for each in simulation.programs.values()} == {simulation.sums}
    assert min(sizes) < count  # sums were made without absent members


@pytest.mark.parametrize(
    ("count", "quorum", "dishonest", "first", "schedules"),
    [
        (5, 4, "c", 0, SCHEDULES),
        (5, 4, "cd", 0, SCHEDULES),
        *(
            pytest.param(*each, 1000, MANY, marks=pytest.mark.slow)
            for each in ((5, 4, "c"), (5, 4, "cd"), (4, 3, "c"), (7, 5, "cd"))
        ),
    ],
)
def test_dishonest_members_gain_nothing_in_random_schedules(
    count: int, quorum: int, dishonest: str, first: int, schedules: int
) -> None:
    assert len(dishonest) <= quorum_spec(count, quorum).tolerated
    for seed in range(first, first + schedules):
        QuorumSimulation(seed, count, quorum, dishonest=dishonest).run(1500)


# Who goes on.


def test_quorum_goes_on_without_a_silent_member_which_comes_back() -> None:
    simulation = DirectedQuorum(sums=1)
    simulation.exchange()
    simulation.remove("e")
    for program in simulation.programs.values():
        program.sums = 3
    simulation.exchange()
    assert simulation.steps() == dict.fromkeys("abcd", 3)
    assert simulation.programs["a"].totals[1:] == [gradient_total("abcd", step) for step in (1, 2)]
    simulation.sums = 3
    simulation.start("e")
    simulation.exchange()
    assert simulation.steps() == dict.fromkeys("abcde", 3)
    for program in simulation.programs.values():
        program.sums = 4
    simulation.exchange()
    assert {each.totals[3] for each in simulation.programs.values()} == {gradient_total("abcde", 3)}
    assert len({each.journal.final_digest() for each in simulation.programs.values()}) == 1


def test_stopped_program_continues_without_a_restart() -> None:
    simulation = started(steps=6)
    simulation.lost = lambda sender, _to, message: sender == "b" and isinstance(message, RevealKey)
    simulation.exchange(ticks=1)
    simulation.lost = lambda *_: False
    before = simulation.programs["b"]
    simulation.stopped.add("b")
    simulation.exchange()
    assert simulation.steps() == {"a": 6, "b": 2, "c": 6, "d": 6, "e": 6}
    simulation.stopped.clear()
    simulation.exchange()
    assert simulation.programs["b"] is before
    assert len(before.totals) == 6
    assert before.totals[-1] == simulation.programs["a"].totals[-1]


@pytest.mark.parametrize(
    ("parts", "going_on"), [(("abc", "de"), "abc"), (("ab", "cd", "e"), ""), (("abcd", "e"), "abcd")]
)
def test_at_most_one_side_of_a_cut_network_goes_on(parts: tuple[str, ...], going_on: str) -> None:
    simulation = DirectedQuorum(quorum=3, sums=1)
    simulation.exchange()
    for program in simulation.programs.values():
        program.sums = 3
    simulation.cuts = {frozenset((x, y)) for part in parts for x in part for y in "abcde" if y not in part}
    simulation.exchange()
    assert {me for me, steps in simulation.steps().items() if steps == 3} == set(going_on)
    simulation.cuts.clear()
    simulation.exchange()
    assert set(simulation.steps().values()) == {3}
    assert len({each.journal.head for each in simulation.programs.values()}) == 1


def test_members_that_do_not_hear_each_other_are_not_in_one_view() -> None:
    simulation = started(steps=2)
    simulation.cuts = {frozenset("ac")}
    simulation.exchange()
    assert simulation.steps() == {"a": 2, "b": 2, "c": 1, "d": 2, "e": 2}
    simulation.cuts.clear()
    simulation.exchange()
    assert set(simulation.steps().values()) == {2}


def test_member_alone_cannot_exclude_another_one() -> None:
    exchange = AttendanceExchange("a", quorum_spec(5, 4), 0)
    exchange.begun = True
    exchange.receive("e", Attendance(1, (), bytes(32), (), begun=True))
    exchange.receive("c", Attendance(1, (), bytes(32), ("e",), begun=True))
    assert exchange._target() == tuple("abcde")
    exchange.receive("e", Attendance(1, (), bytes(32), ("c",), begun=True))
    assert exchange._target() == tuple("abcd")


def test_too_few_members_propose_nothing() -> None:
    exchange = AttendanceExchange("a", quorum_spec(5, 4), 0)
    exchange.begun = True
    for absent, members in (("e", tuple("abcd")), ("de", ())):
        exchange.absent = frozenset(absent)
        exchange.update(lambda _: bytes(32))
        assert exchange.own.members == members


def test_first_sum_of_an_epoch_is_made_by_all() -> None:
    simulation = DirectedQuorum(sums=1)
    simulation.remove("e")
    simulation.exchange()
    assert simulation.steps() == dict.fromkeys("abcd", 0)
    assert simulation.programs["a"].membership.waiting_for("everyone")[1] == frozenset("e")
    simulation.start("e")
    simulation.exchange()
    assert max(simulation.steps().values()) == 1


def test_member_never_enters_a_view_again_or_an_earlier_one() -> None:
    exchange = AttendanceExchange("a", quorum_spec(4, 3), 5)
    exchange.begun = True
    exchange.absent = frozenset("d")
    mine = exchange.update(lambda _: bytes(32))
    assert mine is not None
    assert mine.number == 6
    for peer in "bc":
        exchange.receive(peer, mine)
    assert exchange.agreed() == mine
    exchange.enter()
    assert exchange.agreed() is None
    for peer in "bc":  # the same members again, under an earlier number
        exchange.receive(peer, Attendance(4, mine.members, bytes(32), (), begun=True))
    exchange.renew()
    later = exchange.update(lambda _: bytes(32))
    assert later is not None
    assert later.number == 7
    assert exchange.agreed() is None


def test_member_remembers_the_number_of_its_last_view_after_a_restart() -> None:
    simulation = DirectedQuorum(sums=1)
    simulation.exchange()
    number = simulation.programs["a"].membership._attendance._entered  # type: ignore[union-attr]
    simulation.kill("a")
    simulation.start("a")
    assert simulation.programs["a"].membership._attendance.own.number >= number  # type: ignore[union-attr]


# A step is opened once.


def withholds_key(member: str) -> Any:
    return lambda sender, _to, message: sender == member and isinstance(message, RevealKey)


def test_sum_that_was_being_opened_is_completed_without_the_absent_member() -> None:
    """All have confirmed, and e has every key but does not send its own: it alone may know the total of all five."""
    simulation = started(steps=3)
    simulation.lost = withholds_key("e")
    simulation.exchange(ticks=1)
    assert simulation.steps() == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 2}
    finished_by_e = simulation.programs["e"].totals[1]
    simulation.lost = lambda *_: False
    simulation.kill("e")
    simulation.exchange()
    assert simulation.steps() == dict.fromkeys("abcd", 3)
    for program in simulation.programs.values():
        assert program.totals[1] == finished_by_e == gradient_total("abcde", 1)
        assert program.totals[2] == gradient_total("abcd", 2)
        assert program.journal.entries[2].addends == 5
    simulation.start("e")
    simulation.exchange()
    assert simulation.programs["e"].totals[-1] == gradient_total("abcd", 2)


def confirmed_by_all_to(first: str) -> Any:
    """Let all confirms reach one member only."""
    return lambda _sender, to, message: to != first and isinstance(message, Confirm)


def test_sum_that_one_present_member_may_reveal_is_completed() -> None:
    """Only a has all confirms; it has recorded its pending reveal and sent its key."""
    simulation = started(steps=3)
    simulation.lost = confirmed_by_all_to("a")
    simulation.exchange(ticks=1)
    simulation.lost = lambda *_: False
    simulation.kill("e")
    simulation.exchange()
    assert simulation.programs["b"].totals[1:] == [gradient_total("abcde", 1), gradient_total("abcd", 2)]


def test_sum_that_no_present_member_may_reveal_is_made_by_those_present() -> None:
    """Only e has all confirms. It can never open that sum: the others delete their keys before they go on."""
    simulation = started(steps=2)
    simulation.lost = confirmed_by_all_to("e")
    simulation.exchange(ticks=1)
    simulation.lost = lambda *_: False
    assert simulation.programs["e"].journal.pending_reveal is not None
    simulation.stopped.add("e")
    simulation.exchange()
    assert simulation.programs["a"].totals[1] == gradient_total("abcd", 1)
    assert all(simulation.programs[me].membership.group("everyone").interrupted is None for me in "abcd")
    simulation.stopped.clear()
    simulation.exchange()
    e = simulation.programs["e"]
    assert e.totals[1] == gradient_total("abcd", 1)
    assert e.journal.pending_reveal is None
    simulation.observations.check()


def test_member_that_went_on_alone_takes_over_what_the_others_completed() -> None:
    """It was the only one that had all announcements of its view, and so the only one that went on."""
    simulation = started(steps=2)
    confirmed = confirmed_by_all_to("e")
    simulation.lost = lambda *frame: confirmed(*frame) or isinstance(frame[2], RevealKey)
    simulation.exchange()
    incomplete = {("b", "c"), ("b", "d"), ("c", "b")}
    simulation.lost = lambda sender, to, message: isinstance(message, PositionsGathered) and (sender, to) in incomplete
    simulation.stopped = {"e"}
    simulation.exchange()
    numbers = {me: simulation.programs[me].journal.started for me in "abcd"}
    assert numbers["a"] > numbers["b"] == numbers["c"] == numbers["d"]
    simulation.lost = lambda *_: False
    simulation.stopped = {"a"}
    simulation.exchange()
    assert simulation.steps() == {"a": 1, "b": 2, "c": 2, "d": 2, "e": 2}
    simulation.stopped.clear()
    simulation.exchange()
    assert {each.totals[1] for each in simulation.programs.values()} == {gradient_total("abcde", 1)}
    simulation.observations.check()


def test_pending_reveal_is_void_once_a_quorum_has_started_another_sum() -> None:
    """The others have started a sum without g, and not finished it: g can go on with them although it has a mark."""
    simulation = started(steps=2, count=7, quorum=5)
    simulation.lost = confirmed_by_all_to("g")
    simulation.exchange(ticks=1)
    simulation.stopped.add("g")
    simulation.lost = lambda _sender, _to, message: isinstance(message, Confirm)
    simulation.exchange()
    assert set(simulation.steps().values()) == {1}
    simulation.lost = lambda *_: False
    simulation.stopped = {"f"}
    simulation.exchange()
    assert {simulation.programs[me].totals[1] for me in "abcdeg"} == {gradient_total("abcdeg", 1)}
    simulation.observations.check()


def test_tolerated_members_cannot_void_a_pending_reveal() -> None:
    """Three of five say that they have gone on without the sum that a may have revealed; a fourth one is needed.

    Two of them may lie. The third one may have gone on alone, while the other two handed out their keys.
    """
    mine = participation(started=PERIOD, revealed_in=PERIOD, members=tuple("abcde"))
    positions = {"a": position(mine, bytes(32)), "e": position(participation(started=PERIOD))}
    gone_on = {name: position(participation(started=PERIOD + 2)) for name in "bcd"}
    spec = quorum_spec(5, 4)
    assert find_open_sums(positions | gone_on, spec).void == frozenset()
    gone_on["e"] = position(participation(started=PERIOD + 2))
    assert find_open_sums(positions | gone_on, spec).void == {"a"}
    assert find_open_sums(positions | gone_on, replace(spec, epoch=2)).void == frozenset()  # of another quorum
    repeating = participation(started=PERIOD + 2, revealed_in=PERIOD, members=tuple("abcde"))
    gone_on["e"] = position(repeating, bytes(32))  # it has started the same sum anew
    assert find_open_sums(positions | gone_on, spec).void == frozenset()


def test_those_outside_of_a_sum_cannot_void_it() -> None:
    """All that were not in the sum of a, b, c and d may have gone on, and two dishonest members say so, too."""
    mine = participation(started=PERIOD, revealed_in=PERIOD, members=tuple("abcd"))
    positions = {name: position(participation(started=PERIOD + 2)) for name in "bce"}
    spec = quorum_spec(5, 4)
    assert find_open_sums({"a": position(mine, bytes(32)), **positions}, spec).void == frozenset()
    positions["d"] = position(participation(started=PERIOD + 2))
    assert find_open_sums({"a": position(mine, bytes(32)), **positions}, spec).void == {"a"}


def participation(**fields: Any) -> Participation:
    return Participation(**fields)


def position(attendance: Participation, pending: bytes | None = None) -> GroupPosition:
    return GroupPosition(3, bytes(32), pending, bytes(32), attendance=attendance)


def test_all_members_killed_while_a_sum_was_opened_repeat_it_before_another_one_comes_back() -> None:
    """Nobody has the masked total any more. Only a, b, c and d can repeat their sum; e is there again, and waits."""
    simulation = DirectedQuorum(sums=1)
    simulation.exchange()
    simulation.kill("e")
    for program in simulation.programs.values():
        program.sums = 2
    simulation.lost = lambda sender, _to, message: isinstance(message, RevealKey)
    simulation.exchange()
    assert all(each.journal.pending_reveal is not None for each in simulation.programs.values())
    simulation.lost = lambda *_: False
    simulation.remove(*"abcd")
    simulation.sums = 2
    for me in "abcde":
        simulation.start(me)
    simulation.exchange(ticks=15)
    assert {each.totals[1] for each in simulation.programs.values()} == {gradient_total("abcd", 1)}
    simulation.observations.check()


def repeating(step: bool) -> DirectedQuorum:
    """Return members a to d that repeat their sum as above, until confirms are lost; then e comes, and d goes.

    Args:
        step: the sum is that of a step, so they count before they repeat it. Otherwise it is the count itself.
    """
    simulation = DirectedQuorum(sums=1)
    simulation.exchange()
    simulation.kill("e")
    for program in simulation.programs.values():
        program.sums = 2

    def lose(kind: type[Message]) -> Any:
        length = len(simulation.programs["a"].journal) + step
        return lambda sender, to, message: (
            isinstance(message, kind) and all(len(simulation.programs[me].journal) >= length for me in (sender, to))
        )

    simulation.lost = lose(RevealKey)
    simulation.exchange()
    simulation.remove(*"abcd")
    simulation.sums = 2
    for me in "abcd":
        simulation.start(me)
    simulation.lost = lose(Confirm)
    simulation.exchange()
    assert all(each.membership.waiting_for("everyone")[0] == "Confirm" for each in simulation.programs.values())
    simulation.lost = lambda *_: False
    simulation.stopped = {"d"}
    simulation.start("e")
    simulation.exchange(ticks=15)
    assert max(simulation.steps().values()) == 1
    assert {me for me, each in simulation.programs.items() if each.stopped is not None} == set()
    return simulation


def test_repetition_that_was_begun_and_interrupted_is_repeated_again() -> None:
    """The members that repeat the sum have deleted what they had of it, except that all confirmed it."""
    simulation = repeating(step=False)
    simulation.stopped.clear()
    simulation.exchange(ticks=30)
    assert {each.totals[1] for each in simulation.programs.values()} == {gradient_total("abcd", 1)}
    simulation.observations.check()


def test_step_is_repeated_by_the_same_members_also_if_they_have_counted_before() -> None:
    """The count takes the place of the step in the journal, and d is away before the step itself is repeated."""
    simulation = repeating(step=True)
    assert all(simulation.programs[me].journal.step_reveal is not None for me in "abcd")
    for me in "abc":  # the record is kept on the disk
        assert Journal.from_bytes(simulation.programs[me].saved).step_reveal is not None
    simulation.stopped.clear()
    simulation.exchange(ticks=30)
    assert {each.totals[1] for each in simulation.programs.values()} == {gradient_total("abcd", 1)}
    assert all(each.journal.step_reveal is None for each in simulation.programs.values())
    simulation.observations.check()


def test_sum_that_cannot_be_proved_is_not_waited_for() -> None:
    """It was revealed before there was a quorum, or with a former member: the member with its record stops."""
    provable = participation(started=PERIOD, revealed_in=PERIOD, members=tuple("abcd"))
    for mine, only in (
        (provable, frozenset("abcd")),
        (replace(provable, revealed_in=0), frozenset()),
        (replace(provable, members=tuple("abcdz")), frozenset()),
    ):
        others = {name: position(participation(started=PERIOD)) for name in "bcde"}
        found = find_open_sums({"a": position(mine, bytes(32)), **others}, quorum_spec(5, 4))
        assert found.only == only


def test_members_that_count_before_they_repeat_a_step_do_not_void_it() -> None:
    """Two of four say that they have gone on, and may lie; the third one has revealed the step, too."""
    spec, members = quorum_spec(5, 4), tuple("abcd")
    step = OpenStep(0, 3, bytes(32), PERIOD, members)
    mine = participation(started=PERIOD, revealed_in=PERIOD, members=members, step=step)
    liars = {name: position(participation(started=PERIOD + 2)) for name in "cd"}
    counted = participation(started=PERIOD + 2, step=step)
    positions = {"a": position(mine, bytes(32)), "b": position(counted), **liars}
    assert find_open_sums(positions, spec).void_steps == frozenset()
    positions["b"] = position(participation(started=PERIOD + 2))
    assert find_open_sums(positions, spec).void_steps == {"a"}
    assert find_open_sums(positions, spec, lambda slot, number: (slot, number) == (0, 3)).void_steps == frozenset()


def test_training_stops_if_a_member_of_a_sum_that_may_have_been_opened_is_removed() -> None:
    """The others cannot complete it, because the file has not the key any more that e signed with."""
    simulation = started(steps=2)
    simulation.lost = lambda _sender, _to, message: isinstance(message, RevealKey)
    simulation.exchange(ticks=1)
    simulation.lost = lambda *_: False
    simulation.kill("e")
    simulation.federation_spec = replace(quorum_spec(4, 3), epoch=2)
    for program in simulation.programs.values():
        program.membership.adopt(simulation.federation_spec)
    simulation.exchange()
    for program in simulation.programs.values():
        assert isinstance(program.stopped, LocalProtocolError)
        assert "may have been revealed with the members a, b, c, d, e" in str(program.stopped)
    simulation.observations.check()


def test_step_whose_place_a_count_has_taken_is_repeated_before_another_one_comes_back() -> None:
    """As above, but a, b and c are killed again when they have counted, before they have repeated their step.

    The count has taken the place of their pending reveals. So d sums with them, and they refuse: their records of the
    step name other members.
    """
    simulation = DirectedQuorum(count=4, quorum=3, sums=1)
    simulation.exchange()
    simulation.kill("d")
    for program in simulation.programs.values():
        program.sums = 2

    def is_of_the_step(sender: str, message: object) -> bool:
        reveal = simulation.programs[sender].journal.pending_reveal
        return isinstance(message, RevealKey) and reveal is not None and reveal.index == 3

    simulation.lost = lambda sender, _to, message: is_of_the_step(sender, message)
    simulation.exchange(ticks=15)
    pending = [each.journal.pending_reveal for each in simulation.programs.values()]
    assert [each is not None and each.index for each in pending] == [3] * 3
    simulation.remove(*"abc")
    simulation.sums = 2
    simulation.lost = lambda sender, _to, message: (
        isinstance(message, Ready | KeyShare | Subtotal) and len(simulation.programs[sender].journal) == 4
    )
    for me in "abc":
        simulation.start(me)
    simulation.exchange(ticks=15)
    simulation.remove(*"abc")
    simulation.lost = lambda *_: False
    for me in "abcd":
        simulation.start(me)
    simulation.exchange(ticks=15)
    assert [each.stopped for each in simulation.programs.values()] == [None] * 4


def test_nothing_is_handed_out_without_a_proof_that_all_confirmed() -> None:
    """The dishonest member c reports that it may have revealed a sum that b and d have not confirmed."""
    simulation = started(steps=2)
    simulation.lost = lambda sender, _to, message: sender in "bd" and isinstance(message, Confirm)
    simulation.exchange(ticks=1)
    c, sent = simulation.programs["c"], []
    group = c.membership.group("everyone")
    own = group.session.interrupted(group.reports.view)  # type: ignore[union-attr]
    assert own is not None
    group.record_completion(own)
    simulation.kill("e")

    def watch(sender: str, _to: str, message: Message) -> bool:
        if isinstance(message, CompleteSum) and sender != "c":
            sent.append(sender)
        return False

    simulation.lost = watch
    simulation.exchange()
    assert sent == []
    assert {simulation.steps()[me] for me in "abd"} == {1}


def test_budget_is_charged_before_others_can_complete_the_sum() -> None:
    """A member that has confirmed cannot prevent the others from opening the sum."""
    simulation = DirectedQuorum(sums=0)
    simulation.exchange()
    charged: list[str] = []
    for me, program in simulation.programs.items():
        charge = partial(charged.append, me)
        settings, period = summing_program.gradient_spec(), program.membership.group("everyone").epoch
        program.membership.start("everyone", settings, partial(addend, me, 0), period, before_reveal=charge)

    def lose(sender: str, _to: str, message: Message) -> bool:
        if isinstance(message, Confirm):
            assert sender in charged
        return isinstance(message, Confirm)

    simulation.lost = lose
    simulation.exchange(ticks=1)
    assert sorted(charged) == list("abcde")


def test_member_confirms_only_when_it_has_the_shares_of_all_keys() -> None:
    simulation = DirectedQuorum(sums=1)
    confirmed: set[str] = set()

    def lose(sender: str, to: str, message: Message) -> bool:
        if isinstance(message, Confirm):
            confirmed.add(sender)
        return (sender, to) == ("b", "a") and isinstance(message, KeyShare)

    simulation.lost = lose
    simulation.exchange(ticks=1)
    assert confirmed == set("bcde")
    assert simulation.programs["a"].membership.waiting_for("everyone") == ("KeyShare", frozenset("b"))


def test_history_of_fewer_members_than_the_quorum_is_not_taken_over() -> None:
    """Three of five members, who are no quorum, have a certificate of a sum of their own."""
    simulation = DirectedQuorum(quorum=3, sums=1)
    simulation.exchange()
    simulation.remove(*"de")
    for program in simulation.programs.values():
        program.sums = 2
    simulation.exchange()
    saved = simulation.programs["a"].journal.to_bytes()
    strict = DirectedQuorum(quorum=4, sums=2)
    for me in "abcde":
        strict.programs[me] = QuorumProgram(
            me, strict.federation_spec, 2, Journal.from_bytes(saved) if me in "ab" else None
        )
    errors: list[RemoteProtocolError] = []
    real_call = strict.call
    strict.call = lambda me, action: errors.extend(caught(action)) if me in "cde" else real_call(me, action)  # type: ignore[method-assign]
    strict.exchange()
    assert any("its last sum has 3 members, and the quorum is 4" in str(error) for error in errors)
    assert len(strict.programs["c"].journal) == 0


def caught(action: Any) -> list[RemoteProtocolError]:
    try:
        action()
    except RemoteProtocolError as error:
        return [error]
    return []


# The bound on dishonest members.


@pytest.mark.parametrize(
    ("quorum", "dishonest", "sides", "both_go_on"),
    [
        (3, "c", ("ab", "de"), True),  # 2·3 − 5 − 1 = 0 are tolerated, and this is one
        (4, "cd", ("ab", "e"), False),  # 2·4 − 5 − 1 = 2 are tolerated
        (4, "cde", ("a", "b"), True),
    ],
)
def test_two_sides_go_on_only_with_more_dishonest_members_than_tolerated(
    quorum: int, dishonest: str, sides: tuple[str, str], both_go_on: bool
) -> None:
    """The dishonest members take part on both sides of a cut network, each with two processes."""
    assert (quorum_spec(5, quorum).tolerated < len(dishonest)) == both_go_on
    whole = DirectedQuorum(quorum=quorum, sums=1)
    whole.exchange()
    totals = []
    for side in sides:
        simulation = DirectedQuorum(quorum=quorum, sums=2)
        for me in "abcde":
            if me in side + dishonest:
                saved = Journal.from_bytes(whole.programs[me].journal.to_bytes())
                simulation.programs[me] = QuorumProgram(me, simulation.federation_spec, 2, saved)
            else:
                del simulation.programs[me]
        simulation.exchange()
        totals.append({each.totals[1] for each in simulation.programs.values() if len(each.totals) == 2})
    assert all(totals) == both_go_on
    if both_go_on:
        assert totals[0] != totals[1]  # one step was opened over two sets of members


# Shares of keys.


def test_fewer_shares_than_the_threshold_say_nothing() -> None:
    """For every other key there is a polynomial through the same shares: another last share leads to it."""
    names = list("abcde")
    shares = deal(bytes(16), names, 4)
    three = {name: shares[name] for name in "abc"}
    found = {recover({**three, "d": number.to_bytes(17, "little")}, names) for number in range(50)}
    assert len(found) == 50
    assert recover({name: shares[name] for name in "bcde"}, names) == bytes(16)


def test_wrong_share_is_left_out_if_enough_others_are_right() -> None:
    simulation = started(steps=2)
    simulation.lost = withholds_key("e")
    simulation.exchange(ticks=1)
    own = simulation.programs["a"].membership.group("everyone").session.interrupted(bytes(32))  # type: ignore[union-attr]
    assert own is not None
    for me in "bcde":
        theirs = simulation.programs[me].membership.group("everyone").session.interrupted(bytes(32))  # type: ignore[union-attr]
        if theirs is not None:
            own.add(me, theirs)
    own.keys.pop("e", None)
    own.shares["e"]["b"] = bytes(17)
    own.shares["e"]["e"] = own.shares["a"].get("e", bytes(17))
    assert not own.recover_keys(4)
    own.shares["e"].pop("e")
    assert not own.recover_keys(4)  # a, c and d alone are too few


# Messages.


def test_announcement_of_others_than_members_is_rejected() -> None:
    simulation = DirectedQuorum(sums=1)
    simulation.exchange()
    frame = Frame(bytes(16), 0, Attendance(1, ("a", "z"), bytes(32), (), begun=True))
    with pytest.raises(RemoteProtocolError, match="with others than the members"):
        simulation.programs["a"].membership.receive("b", to_bytes(frame))


def test_periods_order_views_of_an_epoch() -> None:
    assert number_of(period_of(2, 9)) == 9
    assert number_of(2) == 0
