"""Members that die and come back at any moment: the totals are those of an undisturbed life, each opened once."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.errors import InputError, LocalProtocolError, MembersChangedError, PeerAbortedError, RemoteProtocolError
from cgd.protocol.assembly import Assembly
from cgd.protocol.charter import Charter
from cgd.protocol.frames import Frame, from_bytes, to_bytes
from cgd.protocol.ledger import Ledger, Step
from cgd.protocol.messages import Ask, Hello, Piece, Reason
from support.wire import spec

if TYPE_CHECKING:
    import numpy.typing as npt

MEMBERS = ("a", "b", "c", "d")
SIZE = 5


def charter(members: tuple[str, ...] = MEMBERS, epoch: int = 1, **changes: Any) -> Charter:
    groups = {"everyone": members}
    return replace(Charter("trial", epoch, members, groups, {"training": "x", "participants": "y"}, "1.0"), **changes)


def addend(member: str, number: int) -> npt.NDArray[Any]:
    seed = sum(map(ord, member)) * 1000 + number
    return np.frombuffer(random.Random(seed).randbytes(4 * SIZE), dtype="<u4").copy()


def expected(number: int, members: tuple[str, ...] = MEMBERS) -> bytes:
    return np.sum([addend(member, number) for member in members], axis=0, dtype=np.uint32).tobytes()


class Program:
    """A participant's process: an assembly, and a program that wants one sum after the other."""

    def __init__(self, me: str, held: Charter, sums: int, ledger: Ledger | None = None) -> None:
        self.me, self.sums = me, sums
        self.assembly = Assembly(me, held, {"everyone": ledger} if ledger else {})
        self.totals: list[bytes] = []

    def advance(self) -> None:
        pending = self.assembly.group("everyone").pending
        if pending is not None and pending.fault is not None and not isinstance(pending.fault, MembersChangedError):
            raise pending.fault
        if pending is not None and pending.total is not None and len(self.totals) < pending.step.number + 1:  # type: ignore[union-attr]
            self.totals.append(pending.total.tobytes())
        waits = pending is not None and not pending.over
        if len(self.totals) < self.sums and not waits and self.assembly.group("everyone").ready:
            number = len(self.totals)
            epoch = self.assembly.group("everyone").next_epoch
            self.assembly.start("everyone", spec(SIZE), lambda: addend(self.me, number), epoch, Step(0, number))


class World:
    """Processes and the wires between them; a wire keeps its order, and dies with a process at either end."""

    def __init__(self, seed: int, sums: int, held: Charter | None = None) -> None:
        self.rng = random.Random(seed)
        self.sums = sums
        self.charter = held or charter()
        self.programs = {me: Program(me, self.charter, sums) for me in self.charter.members}
        self.wires: dict[tuple[str, str], deque[bytes]] = {}
        self.opened: dict[bytes, set[str]] = {}

    def step(self) -> None:
        program = self.rng.choice(list(self.programs.values()))
        program.advance()
        while (outgoing := program.assembly.next_outgoing()) is not None:
            self.wires.setdefault((program.me, outgoing[0]), deque()).append(outgoing[1])
        loaded = [ends for ends, wire in self.wires.items() if wire]
        if loaded:
            sender, to = self.rng.choice(loaded)
            frame = self.wires[sender, to].popleft()
            if to in self.programs:
                self.programs[to].assembly.receive(sender, frame)
                self.programs[to].advance()

    def kill(self, me: str, *, keep: bool) -> None:
        ledger = self.programs[me].assembly.group("everyone").ledger if keep else None
        saved = Ledger.from_bytes(ledger.to_bytes()) if ledger is not None else None
        for ends in list(self.wires):
            if me in ends:
                del self.wires[ends]
        self.programs[me] = Program(me, self.charter, self.sums, saved)

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if all(len(program.totals) == self.sums for program in self.programs.values()):
                return
            self.step()
        raise AssertionError({me: program.assembly.waiting_for("everyone") for me, program in self.programs.items()})


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
        world.programs[lost].assembly.me = lost
        altered = world.programs[lost]
        altered.advance = lambda altered=altered: None  # type: ignore[method-assign]
        settled(world, 500)
        altered.assembly.start("everyone", spec(SIZE), lambda: addend("x", 7), 1, Step(0, 0))
        settled(world)
        pending = altered.assembly.group("everyone").pending
        assert pending is not None
        assert pending.total is not None
        assert pending.total.tobytes() == expected(0)
        for me, program in world.programs.items():
            assert me == lost or program.totals == [expected(0)]


def test_a_new_epoch_begins_when_all_remaining_members_hold_it() -> None:
    world = World(1, sums=3)
    for _ in range(150):
        world.step()
    del world.programs["d"]
    settled(world)
    done = {me: len(program.totals) for me, program in world.programs.items()}
    assert max(done.values()) < 3
    rest = ("a", "b", "c")
    for me in ("a", "b"):
        world.programs[me].assembly.adopt(charter(rest, epoch=2))
    settled(world)
    assert {me: len(program.totals) for me, program in world.programs.items()} == done  # c has not agreed
    assert "it needs the new federation file" in world.programs["a"].assembly.trouble()["c"]
    world.programs["c"].assembly.adopt(charter(rest, epoch=2))
    world.run()
    totals = [program.totals for program in world.programs.values()]
    assert totals[0] == totals[1] == totals[2]
    for number, total in enumerate(totals[0]):
        assert total in (expected(number), expected(number, rest))
    assert totals[0][-1] == expected(2, rest)


def test_a_sum_that_has_to_run_again_with_others_is_handed_back() -> None:
    world = World(2, sums=1)
    del world.programs["d"]
    for program in world.programs.values():
        program.assembly.start("everyone", spec(SIZE), lambda: addend("a", 0), 1)
        program.assembly.adopt(charter(("a", "b", "c"), epoch=2))
        program.advance = lambda: None  # type: ignore[method-assign]
    settled(world, 500)
    for program in world.programs.values():
        pending = program.assembly.group("everyone").pending
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
        program.assembly.adopt(charter(five, epoch=2))
    world.programs["e"] = Program("e", charter(five, epoch=2), 3)
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
    world.programs["c"] = Program("c", charter(**changes), 1)
    settled(world, 1000)
    for me in ("a", "b", "d"):
        assert set(world.programs[me].assembly.trouble()) == {"c"}
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(world.programs[me].assembly.trouble()["c"])
        assert world.programs[me].assembly.waiting_for("everyone") == ("to be here", frozenset({"c"}))
    assert set(world.programs["c"].assembly.trouble()) == {"a", "b", "d"}
    assert not any(program.totals for program in world.programs.values())


def test_an_epoch_only_goes_up_and_needs_members() -> None:
    assembly = Assembly("a", charter(epoch=3))
    with pytest.raises(InputError, match="an epoch only goes up"):
        assembly.adopt(charter(epoch=3))
    with pytest.raises(InputError, match="at least 3"):
        assembly.adopt(charter(("a", "b"), epoch=4))


def test_who_asks_for_another_groups_past_gets_nothing() -> None:
    groups = {"everyone": MEMBERS, "column-1": ("a", "b", "c")}
    world = World(5, sums=1, held=charter(groups=groups))
    world.run()
    assembly = world.programs["a"].assembly
    frame = to_bytes(Frame(assembly.view, 0, Ask("column-1")))
    with pytest.raises(RemoteProtocolError, match="d: asked for the ledger of 'column-1', which it is not a member of"):
        assembly.receive("d", frame)


def test_whoever_asks_again_is_given_nothing_more() -> None:
    world = World(5, sums=1)
    world.run()
    settled(world, 300)
    assembly = world.programs["a"].assembly
    for _ in range(3):
        assembly.receive("b", to_bytes(Frame(assembly.view, 0, Ask("everyone"))))
    pieces = [
        to for to, frame in iter(assembly.next_outgoing, None) if isinstance(from_bytes(frame, "a").message, Piece)
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
            program.assembly.group("everyone").refuse(Reason.RANGE)
        else:
            program.assembly.start("everyone", spec(SIZE), lambda me=me: addend(me, 0), 1)  # type: ignore[misc]
    settled(world, 400)
    for me in ("a", "c", "d"):
        pending = world.programs[me].assembly.group("everyone").pending
        assert pending is not None
        assert isinstance(pending.fault, PeerAbortedError)
        assert pending.fault.peer == "b"
    for me, program in world.programs.items():
        program.assembly.start("everyone", spec(SIZE), lambda me=me: addend(me, 0), 1)  # type: ignore[misc]
    settled(world, 600)
    for program in world.programs.values():
        pending = program.assembly.group("everyone").pending
        assert pending is not None
        assert pending.total is not None
        assert pending.total.tobytes() == expected(0)


def test_strangers_and_nonsense_are_refused_and_change_nothing() -> None:
    world = World(7, sums=2)
    for _ in range(200):
        world.step()
    assembly = world.programs["a"].assembly
    with pytest.raises(RemoteProtocolError, match="mallory: is not a member"):
        assembly.receive("mallory", b"")
    for nonsense in (b"", b"CGD", bytes(100), to_bytes(Frame(bytes(16), 0, Ask("x")))[:-1]):
        with pytest.raises(RemoteProtocolError, match="b: sent"):
            assembly.receive("b", nonsense)
    world.run()
    assert world.programs["a"].totals == [expected(0), expected(1)]


def test_a_program_that_asks_for_something_else_than_before_is_told() -> None:
    world = World(8, sums=1)
    world.run()
    world.kill("b", keep=True)
    assembly = world.programs["b"].assembly
    assembly.start("everyone", spec(SIZE + 1), lambda: addend("b", 0), 1)
    pending = assembly.group("everyone").pending
    assert pending is not None
    with pytest.raises(LocalProtocolError, match="sum 1 was of float32.5. in 32 bits when it was made"):
        raise pending.fault or AssertionError


def test_hello_is_repeated_to_whoever_does_not_know_us() -> None:
    one = Assembly("a", charter())
    while one.next_outgoing() is not None:
        pass
    other = Assembly("b", charter())
    frames = dict(iter(other.next_outgoing, None))
    one.receive("b", frames["a"])
    to, answer = one.next_outgoing() or ("", b"")
    assert to == "b"
    hello = from_bytes(answer, "a").message
    assert isinstance(hello, Hello)
    theirs = from_bytes(frames["a"], "b").message
    assert isinstance(theirs, Hello)
    assert hello.knows == theirs.ephemeral
