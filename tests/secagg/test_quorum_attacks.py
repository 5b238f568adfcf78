"""What a dishonest member gains by lies about who is present: nothing but time."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from cgd.secagg.attendance import MAX_LEAP, AttendanceExchange
from cgd.secagg.codec import MAX_ATTENDANCE, Frame, to_bytes
from cgd.secagg.membership import NO_VIEW
from cgd.secagg.messages import Attendance, CompleteSum, Confirm, PositionsGathered, RevealKey
from cgd.secagg.positions import Participation
from support import summing_program
from support.ideal import ideal_cryptography
from support.quorum import DirectedQuorum, QuorumObservations, QuorumSimulation, quorum_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgd.secagg.completion import InterruptedSum
    from cgd.secagg.group import Group
    from cgd.secagg.messages import Message
    from cgd.secagg.positions import GroupPosition

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


def claims(simulation: DirectedQuorum, members: tuple[str, ...]) -> None:
    """Restart c, which reports from now on that a sum of these members may have been opened at the next place."""
    simulation.kill("c")
    place = len(simulation.programs["a"].journal)
    simulation.start("c")
    group = simulation.programs["c"].membership.group("everyone")
    position = group.position

    def claimed(commitment: bytes, *, states: bool) -> GroupPosition:
        true = position(commitment, states=states)
        if true.length != place or true.attendance is None:
            return true
        period = true.attendance.started + 1
        lie = Participation(period, revealed_in=period, members=members, material=None, has_total=False)
        return replace(true, pending_reveal=bytes(31) + b"7", attendance=lie)

    group.position = claimed  # type: ignore[method-assign]


@pytest.mark.parametrize("members", [("a", "b", "c", "d"), ("a", "b", "c"), ("c",)], ids="".join)
def test_invented_sum_leaves_nobody_out(members: tuple[str, ...]) -> None:
    """Its members would have to repeat it alone: without e, or with fewer members than the quorum, as c chooses."""
    simulation = DirectedQuorum(sums=1)
    simulation.exchange()
    for program in simulation.programs.values():
        program.sums = 3
    simulation.sums = 3
    claims(simulation, members)
    simulation.exchange(ticks=6)
    assert simulation.sizes == {5}
    simulation.kill("c")
    simulation.exchange(ticks=6)
    assert simulation.sizes <= {5, 4}  # without c, not without e
    assert {len(simulation.programs[me].totals) for me in HONEST} == {3}
    assert {simulation.programs[me].journal.head for me in HONEST} == {simulation.programs["a"].journal.head}
    simulation.observations.check()


def test_sum_of_fewer_members_than_the_quorum_is_not_proposed() -> None:
    exchange = AttendanceExchange("a", quorum_spec(5, 4), number=1)
    exchange.begun = True
    for peer in "bcde":
        exchange.receive(peer, Attendance(1, FIVE, PROCESSES, (), begun=True))
    exchange.restrict(frozenset("abc"))
    exchange.update(lambda _: PROCESSES)
    assert "".join(exchange.own.members) == "abcde"
    exchange.restrict(frozenset("abcd"))
    exchange.update(lambda _: PROCESSES)
    assert "".join(exchange.own.members) == "abcd"


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


# Two dishonest members, b and c, of five with a quorum of four.


class Coalition(DirectedQuorum):
    """The dishonest members b and c follow the protocol, and a test forges their reports and drops their messages."""

    def __init__(self) -> None:
        super().__init__(sums=1)
        self.learned = self.observations = QuorumObservations(4, "bc")
        self.lie: Callable[[Participation], tuple[bytes | None, Participation]] | None = None
        self.exchange()
        for me in self.programs:
            self.programs[me].sums = 2
        for me in "bc":
            group = self.group(me)
            group.position = partial(self.forged, group.position)  # type: ignore[method-assign]

    def group(self, me: str) -> Group:
        return self.programs[me].membership.group("everyone")

    def forged(self, position: Callable[..., GroupPosition], commitment: bytes, *, states: bool) -> GroupPosition:
        true = position(commitment, states=states)
        if self.lie is None or true.attendance is None:
            return true
        pending, attendance = self.lie(true.attendance)
        return replace(true, pending_reveal=pending, revealed=(), attendance=attendance)

    def forget(self) -> None:
        """Let the dishonest members delete their records."""
        for me in "bc":
            group = self.group(me)
            group.interrupted = group.journal.pending_reveal = None
            group.journal.revealed_steps.clear()

    def interrupt(self) -> InterruptedSum:
        """Let all confirm a step; b and c alone have all confirms, and reveal nothing. Return what they have of it."""
        length = len(self.group("a").journal)
        self.lost = lambda _sender, to, message: (
            len(self.group(to).journal) == length
            and (isinstance(message, RevealKey) or (isinstance(message, Confirm) and to not in "bc"))
        )
        self.exchange()
        group = self.group("b")
        assert group.session is not None
        assert group.reports is not None
        found = group.session.interrupted(group.reports.view)
        assert found is not None
        self.forget()
        return found


def test_member_that_went_on_alone_and_two_that_lie_do_not_open_a_step_twice() -> None:
    """Otherwise the difference of the two sums would be the gradient of e."""
    simulation = Coalition()
    own = simulation.interrupt()
    nothing = Participation(own.epoch)
    # a goes on without e. For d, b has not announced that it has all reports, so d does not.
    simulation.lie = lambda _: (None, nothing)
    simulation.stopped = {"e"}
    simulation.lost = lambda sender, to, message: isinstance(message, PositionsGathered) and (sender, to) == ("b", "d")
    simulation.exchange()
    assert simulation.group("a").journal.started > own.epoch == simulation.group("d").journal.started
    simulation.forget()
    # d and e hand out their keys and shares, to complete the step of all five. b and c keep theirs.
    helpful = Participation(own.epoch, own.epoch, FIVE, own.attempt, has_total=True)
    simulation.lie = lambda _: (own.attempt, helpful)

    def collect(sender: str, to: str, message: Message) -> bool:
        if isinstance(message, CompleteSum) and to in "bc" and sender in "de":
            simulation.learned.add_completion(message.content)
        return isinstance(message, CompleteSum) and (to in "bc" or sender in "bc")

    simulation.stopped, simulation.lost = {"a"}, collect
    simulation.exchange(ticks=1)
    proof = CompleteSum("everyone", json.dumps(own.proof.to_json()).encode())
    for me in "de":
        simulation.deliver("b", me, to_bytes(Frame(simulation.programs["b"].membership.view, 0, proof)))
    simulation.exchange(ticks=1)
    assert simulation.group("d").journal.pending_reveal is not None
    assert simulation.group("e").journal.pending_reveal is not None
    # Without e, b and c say that they have gone on, and a has. That must not void the pending reveal of d.
    simulation.forget()
    simulation.lie = lambda _: (None, Participation(own.epoch + 9))
    simulation.stopped, simulation.lost = {"e"}, lambda *_: False
    simulation.exchange()
    assert set(simulation.steps().values()) == {1}
    assert simulation.group("d").journal.pending_reveal is not None
    simulation.observations.check()
    # All are back, and b and c do not lie any more: the step is made by all five.
    simulation.stopped, simulation.lie = set(), None
    simulation.exchange()
    assert set(simulation.steps().values()) == {2}
    assert len({simulation.programs[me].totals[1] for me in FIVE}) == 1
    simulation.observations.check()
