"""Members that die and come back at any moment: the totals are those of an undisturbed life, each opened once."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.errors import (
    InputError,
    LocalProtocolError,
    MembersChangedError,
    PeerAbortedError,
    RemoteProtocolError,
    SettingsError,
)
from cgd.secagg import hello as hello_module
from cgd.secagg.certificates import PendingReveal, kind_of
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.journal import FORMAT, Journal, Step
from cgd.secagg.membership import Membership
from cgd.secagg.messages import (
    HUB,
    Abort,
    Hello,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    Message,
    Reason,
    ResendRequest,
    RevealKey,
)
from cgd.secagg.positions import PositionReport
from cgd.secagg.statements import slot_of, statement
from support.histories import history
from support.identities import identity, public_keys
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.secagg.group import PendingSum
    from cgd.secagg.messages import Opening

MEMBERS = ("a", "b", "c", "d")
SIZE = 5


def federation_spec(members: tuple[str, ...] = MEMBERS, epoch: int = 1, **changes: Any) -> FederationSpec:
    groups, sections = {"everyone": members}, {"training": "x", "participants": "y"}
    return replace(FederationSpec("trial", epoch, members, groups, sections, "1.0", public_keys(members)), **changes)


def addend(member: str, number: int) -> npt.NDArray[Any]:
    seed = sum(map(ord, member)) * 1000 + number
    return np.frombuffer(random.Random(seed).randbytes(4 * SIZE), dtype="<u4").copy()


def expected(number: int, members: tuple[str, ...] = MEMBERS) -> bytes:
    return np.sum([addend(member, number) for member in members], axis=0, dtype=np.uint32).tobytes()


class Program:
    """A participant's process: an assembly, and a program that wants one sum after the other."""

    def __init__(
        self, me: str, held: FederationSpec, sums: int, journal: Journal | None = None, opening: Opening = "mesh"
    ) -> None:
        self.me, self.sums, self.opening = me, sums, opening
        self.membership = Membership(me, identity(me), held, {} if journal is None else {"everyone": journal})
        self.totals: list[bytes] = []

    def advance(self) -> None:
        pending = self.membership.group("everyone").pending
        if pending is not None and pending.fault is not None and not isinstance(pending.fault, MembersChangedError):
            raise pending.fault
        if pending is not None and pending.total is not None and len(self.totals) < pending.step.number + 1:  # type: ignore[union-attr]
            self.totals.append(pending.total.tobytes())
        waits = pending is not None and not pending.over
        if len(self.totals) < self.sums and not waits and self.membership.group("everyone").ready:
            number = len(self.totals)
            epoch = self.membership.group("everyone").next_epoch
            described = spec(SIZE, opening=self.opening)
            self.membership.start("everyone", described, lambda: addend(self.me, number), epoch, Step(0, number))


class World:
    """Processes and the wires between them; a wire keeps its order, and dies with a process at either end.

    What is for the hub survives its death, as links keep what it has not consumed.
    """

    def __init__(self, seed: int, sums: int, held: FederationSpec | None = None, opening: Opening = "mesh") -> None:
        self.rng = random.Random(seed)
        self.sums = sums
        self.federation_spec = held or federation_spec()
        self.opening = opening
        self.adder = HubAggregator(self.federation_spec.groups)
        self.programs = {
            me: Program(me, self.federation_spec, sums, opening=opening) for me in self.federation_spec.members
        }
        self.wires: dict[tuple[str, str], deque[bytes]] = {}
        self.opened: dict[bytes, set[str]] = {}

    def step(self) -> None:
        program = self.rng.choice(list(self.programs.values()))
        program.advance()
        while (outgoing := program.membership.next_outgoing()) is not None:
            self.wires.setdefault((program.me, outgoing[0]), deque()).append(outgoing[1])
        loaded = [ends for ends, wire in self.wires.items() if wire]
        if loaded:
            sender, to = self.rng.choice(loaded)
            frame = self.wires[sender, to].popleft()
            if to == HUB:
                members, total = self.adder.receive(sender, frame) or ((), b"")
                for member in members:
                    self.wires.setdefault((HUB, member), deque()).append(total)
            elif to in self.programs:
                self.programs[to].membership.receive(sender, frame)
                self.programs[to].advance()

    def kill(self, me: str, *, keep: bool) -> None:
        journal = self.programs[me].membership.group("everyone").journal if keep else None
        saved = Journal.from_bytes(journal.to_bytes()) if journal is not None else None
        for ends in list(self.wires):
            if me in ends:
                del self.wires[ends]
        self.programs[me] = Program(me, self.federation_spec, self.sums, saved, self.opening)

    def remove(self, me: str) -> None:
        del self.programs[me]
        for ends in list(self.wires):
            if me in ends:
                del self.wires[ends]

    def kill_hub(self) -> None:
        """Another hub, which has nothing, takes its place."""
        self.adder = HubAggregator(self.federation_spec.groups)
        for me in self.programs:
            self.wires[HUB, me] = deque([to_bytes(Frame(bytes(16), 0, ResendRequest()))])

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if all(len(program.totals) == self.sums for program in self.programs.values()):
                return
            self.step()
        raise AssertionError({me: program.membership.waiting_for("everyone") for me, program in self.programs.items()})


def test_an_undisturbed_life() -> None:
    world = World(0, sums=4)
    world.run()
    for program in world.programs.values():
        assert program.totals == [expected(number) for number in range(4)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_members_that_are_killed_at_any_moment_change_nothing(seed: int, kills: int, keep: bool) -> None:
    world = World(seed, sums=4)
    for _ in range(kills):
        for _ in range(world.rng.randrange(400)):
            world.step()
        # At least one must live to remember what was opened, or all begin anew, which is right as well.
        world.kill(world.rng.choice(MEMBERS), keep=keep)
    world.run()
    for program in world.programs.values():
        assert program.totals == [expected(number) for number in range(4)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 8), st.booleans())
def test_a_hub_that_is_killed_at_any_moment_changes_nothing(seed: int, kills: int, keep: bool) -> None:
    """And members with it."""
    world = World(seed, sums=4, opening="hub")
    for _ in range(kills):
        for _ in range(world.rng.randrange(300)):
            world.step()
        victim = world.rng.choice((HUB, HUB, *MEMBERS))
        if victim == HUB:
            world.kill_hub()
        else:
            world.kill(victim, keep=keep)
    world.run()
    for program in world.programs.values():
        assert program.totals == [expected(number) for number in range(4)]


def test_the_hub_has_no_business_to_say_anything_else() -> None:
    world = World(3, sums=2, opening="hub")
    for _ in range(100):
        world.step()
    membership = world.programs["a"].membership
    for message in (JournalRequest("everyone"), Abort(Reason.RANGE), RevealKey(bytes(16))):
        for session in (bytes(16), membership.view):
            with pytest.raises(RemoteProtocolError, match="the hub: sent .* no business to say"):
                membership.receive(HUB, to_bytes(Frame(session, 0, message)))
    world.run()
    assert world.programs["a"].totals == [expected(0), expected(1)]


def settled(world: World, steps: int = 3000) -> None:
    for _ in range(steps):
        world.step()


def test_a_total_that_one_member_finished_is_taken_over_and_not_opened_again() -> None:
    """Even if the one that comes back would add something else: nobody may see the difference."""
    for seed in range(40):
        world = World(seed, sums=1)
        while not any(program.totals for program in world.programs.values()):
            world.step()
        first = next(me for me, program in world.programs.items() if program.totals)
        lost = world.rng.choice([me for me in MEMBERS if me != first])
        world.kill(lost, keep=False)
        world.programs[lost].me = lost
        world.programs[lost].membership.me = lost
        altered = world.programs[lost]
        altered.advance = lambda: None  # type: ignore[method-assign]
        settled(world, 500)
        altered.membership.start("everyone", spec(SIZE), lambda: addend("x", 7), 1, Step(0, 0))
        settled(world)
        pending = altered.membership.group("everyone").pending
        assert pending is not None
        assert pending.total is not None
        assert pending.total.tobytes() == expected(0)
        for me, program in world.programs.items():
            assert me == lost or program.totals == [expected(0)]


def marked(world: World) -> bool:
    """Whether a key has left somebody in a sum that is not finished: with other members it is not run again."""
    return any(program.membership.group("everyone").journal.mark for program in world.programs.values())


def between_sums(world: World, last: str) -> bool:
    """Whether no key has left anybody in the sum that comes next, nor can before `last` is ready for it."""
    waiting = [program.membership.waiting_for("everyone") for me, program in world.programs.items() if me != last]
    return not marked(world) and any(what == "Ready" and last in missing for what, missing in waiting)


def test_a_new_epoch_begins_when_all_remaining_members_hold_it() -> None:
    world = World(1, sums=20)
    for _ in range(150):
        world.step()
    while not between_sums(world, "d"):
        world.step()
    world.remove("d")
    settled(world)
    assert not marked(world)
    done = {me: len(program.totals) for me, program in world.programs.items()}
    assert max(done.values()) < 20
    rest = ("a", "b", "c")
    for me in ("a", "b"):
        world.programs[me].membership.adopt(federation_spec(rest, epoch=2))
    settled(world)
    assert {me: len(program.totals) for me, program in world.programs.items()} == done  # c has not agreed
    assert "it needs the new federation file" in world.programs["a"].membership.problems()["c"]
    world.programs["c"].membership.adopt(federation_spec(rest, epoch=2))
    world.run()
    totals = [program.totals for program in world.programs.values()]
    assert totals[0] == totals[1] == totals[2]
    for number, total in enumerate(totals[0]):
        assert total in (expected(number), expected(number, rest))
    assert totals[0][-1] == expected(19, rest)


def test_a_sum_that_may_have_been_opened_is_not_run_again_with_others() -> None:
    """Who has the key of everybody might have the total of before, and the difference would be an addend."""
    world = still()
    exchange(world)
    start_all(world)
    exchange(world, lambda _, __, message: None if isinstance(message, RevealKey) else message)
    assert set(finished(world).values()) == {0}
    assert marked(world)
    world.remove("d")
    rest = ("a", "b", "c")
    for me in rest:
        world.kill(me, keep=True)
        world.programs[me].advance = lambda: None  # type: ignore[method-assign]
        world.programs[me].membership.adopt(federation_spec(rest, epoch=2))
    exchange(world)
    for me in rest:
        pending = world.programs[me].membership.start("everyone", spec(SIZE), partial(addend, me, 0), 2)
        with pytest.raises(LocalProtocolError, match="sum 1 may have been opened with a, b, c, d, and the members are"):
            raise pending.fault or AssertionError
    assert exchange(world) == []
    assert set(finished(world).values()) == {0}
    for me in rest:  # all of before are there again
        world.programs[me].membership.adopt(federation_spec(epoch=3))
    world.programs["d"] = Program("d", federation_spec(epoch=3), 0)
    exchange(world)
    again = start_all(world, epoch=3)
    assert exchange(world) == []
    assert {each.total.tobytes() for each in again.values() if each.total is not None} == {expected(0)}
    assert set(finished(world).values()) == {1}
    assert not marked(world)


def test_a_sum_that_has_to_run_again_with_others_is_handed_back() -> None:
    world = World(2, sums=1)
    del world.programs["d"]
    for program in world.programs.values():
        program.membership.start("everyone", spec(SIZE), lambda: addend("a", 0), 1)
        program.membership.adopt(federation_spec(("a", "b", "c"), epoch=2))
        program.advance = lambda: None  # type: ignore[method-assign]
    settled(world, 500)
    for program in world.programs.values():
        pending = program.membership.group("everyone").pending
        assert pending is not None
        with pytest.raises(MembersChangedError, match="epoch 2 began during a sum of epoch 1; the members are a, b, c"):
            raise pending.fault or AssertionError


def test_a_late_joiner_gets_the_past() -> None:
    world = World(3, sums=2)
    world.run()
    five = (*MEMBERS, "e")
    world.sums = 3
    for program in world.programs.values():
        program.sums = 3
        program.membership.adopt(federation_spec(five, epoch=2))
    world.programs["e"] = Program("e", federation_spec(five, epoch=2), 3)
    world.run()
    for program in world.programs.values():
        assert program.totals == [expected(0), expected(1), expected(2, five)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"federation": "other"}, "another federation, 'other'; ours is 'trial'"),
        ({"version": "2.0"}, "it runs cgd 2.0 and we run 1.0"),
        ({"epoch": 2}, "of epoch 2 and ours of epoch 1: we need the new one"),
        ({"sections": {"training": "z", "participants": "y"}}, r"differs from ours in \[training\]"),
        ({"sections": {"participants": "y"}}, r"differs from ours in \[training\]"),
    ],
)
def test_another_charter_is_told_in_words_and_nothing_is_summed(changes: dict[str, Any], says: str) -> None:
    world = World(4, sums=1)
    world.programs["c"] = Program("c", federation_spec(**changes), 1)
    settled(world, 1000)
    for me in ("a", "b", "d"):
        assert set(world.programs[me].membership.problems()) == {"c"}
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(world.programs[me].membership.problems()["c"])
        assert world.programs[me].membership.waiting_for("everyone") == ("to be here", frozenset({"c"}))
    assert set(world.programs["c"].membership.problems()) == {"a", "b", "d"}
    assert not any(program.totals for program in world.programs.values())


def test_an_epoch_only_goes_up_and_needs_members() -> None:
    membership = Membership("a", identity("a"), federation_spec(epoch=3))
    with pytest.raises(InputError, match="an epoch only goes up"):
        membership.adopt(federation_spec(epoch=3))
    with pytest.raises(InputError, match="at least 3"):
        membership.adopt(federation_spec(("a", "b"), epoch=4))


def test_who_asks_for_another_groups_past_gets_nothing() -> None:
    groups = {"everyone": MEMBERS, "column-1": ("a", "b", "c")}
    world = World(5, sums=1, held=federation_spec(groups=groups))
    world.run()
    membership = world.programs["a"].membership
    frame = to_bytes(Frame(membership.view, 0, JournalRequest("column-1")))
    with pytest.raises(RemoteProtocolError, match="d: asked for the ledger of 'column-1', which it is not a member of"):
        membership.receive("d", frame)


def test_whoever_asks_again_is_given_nothing_more() -> None:
    world = World(5, sums=1)
    world.run()
    settled(world, 300)
    membership = world.programs["a"].membership
    for _ in range(3):
        membership.receive("b", to_bytes(Frame(membership.view, 0, JournalRequest("everyone"))))
    pieces = [
        to
        for to, frame in iter(membership.next_outgoing, None)
        if isinstance(from_bytes(frame, "a").message, JournalChunk)
    ]
    assert pieces == ["b"]


def test_a_refusal_fails_the_sum_for_all_and_the_next_one_works() -> None:
    world = World(6, sums=1)
    settled(world, 0)
    for program in world.programs.values():
        program.advance = lambda: None  # type: ignore[method-assign]
    settled(world, 400)
    for me, program in world.programs.items():
        if me == "b":
            program.membership.group("everyone").refuse(Reason.RANGE)
        else:
            program.membership.start("everyone", spec(SIZE), lambda me=me: addend(me, 0), 1)  # type: ignore[misc]
    settled(world, 400)
    for me in ("a", "c", "d"):
        pending = world.programs[me].membership.group("everyone").pending
        assert pending is not None
        assert isinstance(pending.fault, PeerAbortedError)
        assert pending.fault.peer == "b"
    for me, program in world.programs.items():
        program.membership.start("everyone", spec(SIZE), lambda me=me: addend(me, 0), 1)  # type: ignore[misc]
    settled(world, 600)
    for program in world.programs.values():
        pending = program.membership.group("everyone").pending
        assert pending is not None
        assert pending.total is not None
        assert pending.total.tobytes() == expected(0)


def test_strangers_and_nonsense_are_refused_and_change_nothing() -> None:
    world = World(7, sums=2)
    for _ in range(200):
        world.step()
    membership = world.programs["a"].membership
    with pytest.raises(RemoteProtocolError, match="mallory: is not a member"):
        membership.receive("mallory", b"")
    for nonsense in (b"", b"CGD", bytes(100), to_bytes(Frame(bytes(16), 0, JournalRequest("x")))[:-1]):
        with pytest.raises(RemoteProtocolError, match="b: sent"):
            membership.receive("b", nonsense)
    world.run()
    assert world.programs["a"].totals == [expected(0), expected(1)]


def test_a_program_that_asks_for_something_else_than_before_is_told() -> None:
    world = World(8, sums=1)
    world.run()
    world.kill("b", keep=True)
    membership = world.programs["b"].membership
    membership.start("everyone", spec(SIZE + 1), lambda: addend("b", 0), 1)
    pending = membership.group("everyone").pending
    assert pending is not None
    with pytest.raises(LocalProtocolError, match="sum 1 was of float32.5. in 32 bits when it was made"):
        raise pending.fault or AssertionError


def test_hello_is_repeated_to_whoever_does_not_know_us() -> None:
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


# Members that send what they should not. Here programs start nothing by themselves, and all frames are delivered.


def still(sums: dict[str, int] | None = None, **changes: Any) -> World:
    """Members that have finished so many sums each, none if it is not told, and want no other."""
    world = World(0, sums=0, held=federation_spec(**changes))
    for me, count in (sums or {}).items():
        world.programs[me] = Program(me, world.federation_spec, 0, past(count))
    for program in world.programs.values():
        program.advance = lambda: None  # type: ignore[method-assign]
    return world


def past(count: int) -> Journal:
    return history(spec(SIZE), map(expected, range(count)), MEMBERS)


def exchange(
    world: World, bend: Callable[[str, str, Message], Message | None] = lambda _sender, _to, message: message
) -> list[RemoteProtocolError]:
    """Deliver what `bend` makes of each message, until nobody has anything to say; what was refused on the way."""
    refused: list[RemoteProtocolError] = []
    while True:
        frames = [
            (me, to, data)
            for me, program in world.programs.items()
            for to, data in iter(program.membership.next_outgoing, None)
        ]
        if not frames:
            return refused
        for sender, to, data in frames:
            frame = from_bytes(data, sender)
            message = bend(sender, to, frame.message)
            if message is None or to not in world.programs:
                continue
            try:
                world.programs[to].membership.receive(sender, to_bytes(replace(frame, message=message)))
            except RemoteProtocolError as error:
                refused.append(error)


def start_all(world: World, number: int = 0, epoch: int = 1) -> dict[str, PendingSum]:
    """Everybody's program wants its next sum."""
    return {
        me: program.membership.start("everyone", spec(SIZE), partial(addend, me, number), epoch)
        for me, program in world.programs.items()
    }


def finished(world: World) -> dict[str, int]:
    return {me: len(program.membership.group("everyone").journal) for me, program in world.programs.items()}


def is_current(world: World, me: str) -> bool:
    return world.programs[me].membership.group("everyone").current


NONSENSE = b"nothing of the kind".center(100)


def from_b(content: bytes) -> Callable[[str, str, Message], Message]:
    """Instead of its ledger, b gives this."""

    def bend(sender: str, _to: str, message: Message) -> Message:
        if sender != "b" or not isinstance(message, JournalChunk):
            return message
        return JournalChunk(0, message.group, len(content), content)

    return bend


def test_if_ones_past_is_none_another_is_asked() -> None:
    world = still({"b": 3, "c": 3})
    refused = exchange(world, from_b(NONSENSE))
    assert {str(error) for error in refused} == {
        "b: gave us its past, and a header of 2314885530818453536 bytes is too long for its entries"
    }
    assert len(refused) == 2  # a and d
    assert set(finished(world).values()) == {3}
    assert all(is_current(world, me) for me in MEMBERS)


def test_if_only_a_shorter_past_is_sound_the_other_is_named_and_waited_for() -> None:
    """A sum that somebody has finished is not run again, even if it cannot be had."""
    world = still({"a": 2, "b": 6, "c": 5})
    refused = exchange(world, from_b(NONSENSE))
    assert [error.peer for error in refused] == ["b"] * 3
    assert finished(world) == {"a": 2, "b": 6, "c": 5, "d": 0}
    for me in "acd":
        assert not is_current(world, me)
        assert world.programs[me].membership.waiting_for("everyone") == ("the past", frozenset({"b"}))
    world.kill("b", keep=False)
    world.programs["b"].advance = lambda: None  # type: ignore[method-assign]
    assert exchange(world) == []  # now the shorter one is the longest that anybody tells of, and proved
    assert set(finished(world).values()) == {5}
    assert all(is_current(world, me) for me in MEMBERS)


def test_a_past_that_nobody_can_give_is_named() -> None:
    world = still({"b": 3})
    refused = exchange(world, from_b(NONSENSE))
    assert [error.peer for error in refused] == ["b"] * 3
    for me in "acd":
        assert world.programs[me].membership.waiting_for("everyone") == ("the past", frozenset({"b"}))


def reported(me: str, standing: JournalPosition, **changes: Any) -> JournalPosition:
    """What a member would say if it reported something else, signed by itself."""
    report = PositionReport.from_bytes(standing.content)
    number = changes.pop("number", report.number)
    rows = {name: replace(row, **changes) for name, row in report.groups.items()}
    content = replace(report, number=number, groups=rows).to_bytes()
    said = statement("standing", slot_of(report.view, "", number), hashlib.sha256(content).digest())
    return replace(standing, content=content, signature=identity(me).sign(said))


def test_who_says_that_it_has_more_than_it_has_is_caught_and_the_rest_is_had_from_others() -> None:
    world = still({"a": 5, "b": 5, "c": 6, "d": 6})
    group = world.programs["b"].membership.group("everyone")
    honest = group.row
    group.row = lambda *_, **__: replace(honest(bytes(32), states=False), **boast)  # type: ignore[method-assign]
    boast: dict[str, Any] = {"length": 99, "commitment": hashlib.sha256(bytes(32)).digest(), "states": ()}
    contributed = {"everyone": bytes(32)}

    def contribute(sender: str, _to: str, message: Message) -> Message:
        if sender == "b" and isinstance(message, JournalPosition):
            return replace(message, contributions=tuple(contributed.items()) if message.contributions else ())
        return message

    refused = exchange(world, contribute)
    assert "b: gave us its past, and it has 5 sums, not the 99 it told of" in {str(error) for error in refused}
    assert finished(world)["a"] == 5
    assert world.programs["a"].membership.waiting_for("everyone") == ("the past", frozenset({"b"}))
    world.kill("b", keep=True)
    world.programs["b"].advance = lambda: None  # type: ignore[method-assign]
    assert exchange(world) == []
    assert set(finished(world).values()) == {6}
    assert all(is_current(world, me) for me in MEMBERS)


def test_who_tells_twice_where_it_stands_is_refused_and_the_sum_goes_on() -> None:
    standings: list[JournalPosition] = []

    def overhear(sender: str, to: str, message: Message) -> Message:
        if (sender, to) == ("b", "a") and isinstance(message, JournalPosition):
            standings.append(message)
        return message

    world = still()
    exchange(world, overhear)
    pending = start_all(world)
    membership = world.programs["a"].membership
    (first,) = standings

    def tell(standing: JournalPosition) -> None:
        membership.receive("b", to_bytes(Frame(membership.view, 0, standing)))

    for again in (first, reported("b", first, length=7), reported("b", first, number=2)):
        with pytest.raises(RemoteProtocolError, match="b: sent its report . out of order"):
            tell(again)
    with pytest.raises(RemoteProtocolError, match="b: sent a standing statement without a valid signature of its own"):
        tell(replace(reported("b", first, number=1, length=7), signature=bytes(64)))
    tell(reported("b", first, number=1, length=7))  # nobody was behind: it is late for that, and changes nothing
    assert exchange(world) == []
    assert {each.total.tobytes() for each in pending.values() if each.total is not None} == {expected(0)}
    assert set(finished(world).values()) == {1}


def ledger_bytes(
    entries: Any = (), states: Any = (), *, mark: Any = None, header: bytes | None = None, rest: bytes = b""
) -> bytes:
    """What looks like a ledger, with a right digest."""
    written = header or json.dumps({"format": FORMAT, "entries": entries, "states": states, "mark": mark}).encode()
    body = struct.pack("<Q", len(written)) + written + rest
    return hashlib.sha256(body).digest() + body


KIND = kind_of(spec(SIZE))
OPENING = bytes(32).hex()
ENTRY = [[KIND, 1, 0, [0, 1], 8, 4, OPENING], False, None]
TOTAL = b"12345678"


def entry(place: int, value: Any, *, kept: bool = False) -> list[Any]:
    """An entry with another value in this field."""
    fields: Any = ENTRY[0]
    return [[*fields[:place], value, *fields[place + 1 :]], kept, None]


NO_LEDGERS = {
    "nothing": b"",
    "less than a digest": bytes(31),
    "zeros": bytes(100),
    "cut off": ledger_bytes()[:-1],
    "endless brackets": ledger_bytes(header=b"[" * 100_000),
    "a list": ledger_bytes(header=b"[]"),
    "a number": ledger_bytes(header=b"7"),
    "no text": ledger_bytes(header=b"\xff"),
    "another format": ledger_bytes(header=b'{"format": "cgd-ledger-2", "entries": [], "states": [], "mark": null}'),
    "no mark": ledger_bytes(header=f'{{"format": "{FORMAT}", "entries": [], "states": []}}'.encode()),
    "half a mark": ledger_bytes(mark=[0, ["a"]]),
    "a mark at no place": ledger_bytes(mark=["0", ["a"], OPENING, None]),
    "a mark of no members": ledger_bytes(mark=[0, [7], OPENING, None]),
    "a mark with half a rerun": ledger_bytes(mark=[0, ["a"], OPENING, [OPENING, 1]]),
    "a mark with a rerun of no number": ledger_bytes(mark=[0, ["a"], OPENING, [OPENING, True, {}, {}]]),
    "an entry with a field too few": ledger_bytes([[ENTRY[0][:6], *ENTRY[1:]]]),  # type: ignore[index]
    "an entry that is not told to be kept": ledger_bytes([[ENTRY[0], None]]),
    "an entry with half a certificate": ledger_bytes([[*ENTRY[:2], [OPENING, 1]]]),
    "an entry with a certificate of no number": ledger_bytes([[*ENTRY[:2], [OPENING, "1", "", "", "", {}]]]),
    "an entry with a certificate of short keys": ledger_bytes(
        [[*ENTRY[:2], [OPENING, 1, "", "", "", {"a": ["", ""]}]]]
    ),
    "an entry whose total is cut off": ledger_bytes([entry(4, 8, kept=True)], rest=TOTAL[:-1]),
    "an entry with an empty total": ledger_bytes([entry(4, 0, kept=True)]),
    "an entry with a total of negative size": ledger_bytes([entry(4, -4, kept=True)], rest=TOTAL),
    "an entry of no kind": ledger_bytes([entry(0, 7)]),
    "an entry whose epoch is a text": ledger_bytes([entry(1, "1")]),
    "an entry with half a step": ledger_bytes([entry(3, [0])]),
    "an entry whose step is a text": ledger_bytes([entry(3, [0, "1"])]),
    "an entry with an empty step": ledger_bytes([entry(3, [])]),
    "an entry whose step is false": ledger_bytes([entry(3, False)]),
    "an entry without an opening": ledger_bytes([entry(6, None)]),
    "a state that is cut off": ledger_bytes([ENTRY], [[0, 1, 8, False]], rest=TOTAL[:-1]),
    "a state of negative size": ledger_bytes([ENTRY], [[0, 1, -1, False]], rest=TOTAL[:-1]),
    "a state after no number of steps": ledger_bytes([ENTRY], [[0, "1", 8, False]], rest=TOTAL),
    "a state in no slot": ledger_bytes([ENTRY], [["0", 1, 8, False]], rest=TOTAL),
    "a state in a list": ledger_bytes([ENTRY], [[[], 1, 8, False]], rest=TOTAL),
}


def test_what_these_differ_from_is_a_ledger() -> None:
    rows = [entry(4, 8, kept=True), ENTRY], [[0, 1, 8, False]]
    journal = Journal.from_bytes(ledger_bytes(*rows, mark=[2, ["a"], OPENING], rest=2 * TOTAL))
    assert [bytes(each.words or b"") for each in journal.entries] == [TOTAL, b""]
    assert journal.states[0].content() == TOTAL
    assert journal.mark == PendingReveal(2, ("a",), bytes(32))


@pytest.mark.parametrize("content", NO_LEDGERS.values(), ids=NO_LEDGERS)
def test_what_is_not_a_ledger_is_refused_whatever_it_is(content: bytes) -> None:
    with pytest.raises(InputError, match="this is not a ledger that cgd made"):
        Journal.from_bytes(content)


def test_pieces_that_nobody_asked_for_or_that_do_not_fit_change_nothing() -> None:
    world = still({"b": 3})
    membership = world.programs["a"].membership
    exchange(world, lambda _, to, message: None if to == "a" and isinstance(message, JournalChunk) else message)
    assert membership.waiting_for("everyone") == ("the past", frozenset({"b"}))

    def give(sender: str, start: int, words: bytes, size: int) -> None:
        membership.receive(sender, to_bytes(Frame(membership.view, 0, JournalChunk(start, "everyone", size, words))))

    def unwanted(sender: str, content: bytes) -> None:
        with pytest.raises(RemoteProtocolError, match=f"{sender}: gave us a piece of .*, unasked"):
            give(sender, 0, content, len(content))

    right, other = past(3).gift(0, states=True), past(7).gift(0, states=True)
    unwanted("c", other)
    unwanted("c", right)
    give("b", 5, other[5:9], len(other))
    give("b", 10**15, other, 2 * 10**15)
    assert finished(world)["a"] == 0
    give("b", 0, right[:100], len(right))
    give("b", 0, right[:100], len(right))
    give("b", 100, right[100:], len(right))
    assert finished(world)["a"] == 3
    assert is_current(world, "a")
    give("b", 0, other, len(other))
    assert finished(world)["a"] == 3


def test_a_member_that_is_started_again_and_again_does_not_fill_our_memory() -> None:
    """It asks for the past each time, and reads nothing; another one is away."""
    world = still({"a": 3})
    exchange(world)
    membership = world.programs["a"].membership
    for _ in range(50):
        world.kill("b", keep=False)
        for to, data in iter(world.programs["b"].membership.next_outgoing, None):
            if to == "a":
                membership.receive("b", data)
        membership.receive("b", to_bytes(Frame(membership.view, 0, JournalRequest("everyone"))))
        while membership.next_outgoing({"b", "d"}) is not None:
            pass
    waiting = [from_bytes(data, "a").message for to, data in iter(membership.next_outgoing, None) if to == "b"]
    assert [type(each) for each in waiting] == [Hello, JournalPosition, JournalChunk]


def test_who_is_started_too_often_is_refused_and_the_rest_goes_on_when_we_are_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of its keys may be forgotten, and they must not fill the memory."""
    monkeypatch.setattr(hello_module, "MAX_INCARNATIONS", 3)
    world = still()
    exchange(world)
    for _ in range(3):
        world.kill("b", keep=False)
        assert exchange(world) == []
        assert all(is_current(world, me) for me in MEMBERS)
    world.kill("b", keep=False)
    refused = exchange(world)
    assert {str(error) for error in refused} == {"b: was started more than 3 times; start us again, too"}
    assert set(world.programs["b"].membership.problems()) == {"a", "c", "d"}
    for me in "acd":
        world.kill(me, keep=True)
    for program in world.programs.values():
        program.advance = lambda: None  # type: ignore[method-assign]
    exchange(world)
    assert all(is_current(world, me) for me in MEMBERS)
    pending = start_all(world)
    exchange(world)
    assert {each.total.tobytes() for each in pending.values() if each.total is not None} == {expected(0)}


def test_a_member_that_goes_back_to_an_old_life_is_refused_until_it_is_started_again() -> None:
    world = still()
    exchange(world)
    old = world.programs["b"]
    world.kill("b", keep=False)
    exchange(world)
    world.programs["b"] = old
    old.membership.receive("a", to_bytes(Frame(bytes(16), 0, hello_of(world, "a"))))
    refused = exchange(world)
    assert {str(error) for error in refused} == {"b: goes back to an ephemeral key of before; it must be started again"}
    world.kill("b", keep=False)
    assert exchange(world) == []
    pending = start_all(world)
    exchange(world)
    assert {each.total.tobytes() for each in pending.values() if each.total is not None} == {expected(0)}


def hello_of(world: World, me: str) -> Hello:
    """What a member says to one that it does not know."""
    other = next(peer for peer in world.programs if peer != me)
    hello = world.programs[other].membership.hello(me)
    assert hello is not None
    return replace(hello, knows=bytes(32))


def test_who_is_not_of_a_group_cannot_disturb_its_sums() -> None:
    column = ("a", "b", "c")
    world = still(groups={"everyone": MEMBERS, "column-0": column})
    exchange(world)
    pending = {
        me: world.programs[me].membership.start("column-0", spec(SIZE), partial(addend, me, 0), 1) for me in column
    }
    membership = world.programs["a"].membership
    session = membership.group("column-0").session
    assert session is not None
    with pytest.raises(RemoteProtocolError, match="d: is not a member of this group"):
        membership.receive("d", to_bytes(Frame(session.session, 1, Abort(Reason.PEER))))
    assert exchange(world) == []
    assert {each.total.tobytes() for each in pending.values() if each.total is not None} == {expected(0, column)}


@pytest.mark.parametrize("last", MEMBERS)
def test_other_settings_are_told_to_everybody_whoever_is_last(last: str) -> None:
    world = still()
    exchange(world)
    odd = replace(spec(SIZE), context="another lr")
    pending = {}
    for me in sorted(MEMBERS, key=lambda me: me == last):
        if me == last:
            exchange(world)
        wanted = odd if me == "c" else spec(SIZE)
        program = world.programs[me]
        pending[me] = program.membership.start("everyone", wanted, partial(addend, me, 0), 1)
    exchange(world)
    for each in pending.values():
        assert isinstance(each.fault, SettingsError), each.fault
        assert each.fault.peer == "c"


# Refusals, and sums that nobody waits for.


def test_a_refusal_before_we_know_where_we_are_is_told_when_we_do() -> None:
    world = still()
    world.programs["b"].membership.group("everyone").refuse(Reason.STOPPED)
    exchange(world)
    pending = {
        me: world.programs[me].membership.start("everyone", spec(SIZE), partial(addend, me, 0), 1) for me in "acd"
    }
    exchange(world)
    for each in pending.values():
        assert isinstance(each.fault, PeerAbortedError)
        assert each.fault.peer == "b"
    again = start_all(world)
    exchange(world)
    assert {each.total.tobytes() for each in again.values() if each.total is not None} == {expected(0)}


def test_a_refusal_of_a_sum_that_turns_out_to_be_of_the_past_is_not_told() -> None:
    world = still({"a": 1, "c": 1, "d": 1})
    world.programs["b"].membership.group("everyone").refuse(Reason.STOPPED)
    exchange(world)
    for me in "acd":
        world.programs[me].membership.group("everyone").place = 1
    assert exchange(world) == []
    (first,) = (start_all(world, 1)[me] for me in "b")
    assert first.total is not None
    assert first.total.tobytes() == expected(0)
    second = world.programs["b"].membership.start("everyone", spec(SIZE), lambda: addend("b", 1), 1)
    exchange(world)
    assert second.total is not None
    assert second.total.tobytes() == expected(1)


@pytest.mark.parametrize("finished_before", [False, True])
def test_a_sum_that_was_abandoned_is_the_next_one_that_is_asked_for(finished_before: bool) -> None:
    world = still()
    exchange(world)
    pending = start_all(world)
    group = world.programs["a"].membership.group("everyone")
    if finished_before:
        exchange(world)
    group.abandon()
    exchange(world)
    assert all(each.total is not None for each in pending.values())
    assert (len(group.journal), group.place) == (1, 0)
    asked = world.programs["a"].membership.start("everyone", spec(SIZE), lambda: addend("x", 7), 1)
    assert asked.total is not None
    assert asked.total.tobytes() == expected(0)
    assert (len(group.journal), group.place) == (1, 1)


def test_a_sum_that_was_abandoned_and_that_others_finished_is_the_next_one_that_is_asked_for() -> None:
    """Its total comes from the past, while nobody waits for it."""
    world = still()
    exchange(world)
    start_all(world)
    exchange(world, lambda _, to, message: None if to == "a" and isinstance(message, RevealKey) else message)
    assert finished(world) == {"a": 0, "b": 1, "c": 1, "d": 1}
    group = world.programs["a"].membership.group("everyone")
    group.abandon()
    world.kill("b", keep=True)
    exchange(world)
    assert (len(group.journal), group.place) == (1, 0)
    asked = world.programs["a"].membership.start("everyone", spec(SIZE), lambda: addend("x", 7), 1)
    assert asked.total is not None
    assert asked.total.tobytes() == expected(0)
    assert (len(group.journal), group.place) == (1, 1)


def test_an_abandoned_sum_shares_the_same_addend_in_the_next_view() -> None:
    """Whatever has become of the values by then."""
    world = still()
    exchange(world)
    values = addend("a", 0)
    world.programs["a"].membership.start("everyone", spec(SIZE), values.copy, 1)
    world.programs["a"].membership.group("everyone").abandon()
    values[:] = 0
    world.kill("b", keep=False)
    exchange(world)
    for me in "bcd":
        world.programs[me].membership.start("everyone", spec(SIZE), partial(addend, me, 0), 1)
    exchange(world)
    assert bytes(world.programs["c"].membership.group("everyone").journal.entries[0].words or b"") == expected(0)


def test_no_other_sum_is_begun_while_an_abandoned_one_runs() -> None:
    world = still()
    exchange(world)
    membership = world.programs["a"].membership
    membership.start("everyone", spec(SIZE), lambda: addend("a", 0), 1)
    membership.group("everyone").abandon()
    with pytest.raises(LocalProtocolError, match="a sum is still running"):
        membership.start("everyone", spec(SIZE + 1), lambda: addend("a", 0), 1)
