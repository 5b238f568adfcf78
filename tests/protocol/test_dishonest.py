"""One dishonest member reads nobody's gradient: what a review found, one by one, and random schedules."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from cgd.errors import EquivocationError, LocalProtocolError, PeerLeftError, RemoteProtocolError
from cgd.protocol.ephemeral import Ephemeral, View, pair
from cgd.protocol.frames import Frame, from_bytes, hello_content, ready_content, to_bytes
from cgd.protocol.history import Terms
from cgd.protocol.ledger import Ledger
from cgd.protocol.messages import (
    NO_SIGNATURE,
    Ask,
    Confirm,
    Farewell,
    Hello,
    Message,
    Piece,
    Ready,
    Seen,
    Standing,
    Subtotal,
    Total,
    Unseal,
)
from cgd.protocol.standings import Report
from cgd.protocol.statements import slot_of, statement
from support import dishonest
from support.dishonest import LIAR, World, charter
from support.ideal import ideal_cryptography
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.protocol.group import Group

SCHEDULES = 150


MAX_ROUNDS = 200


class Directed(World):
    """A world in which all frames are delivered, but for those of the dishonest member that a test replaces."""

    def __init__(self, honest: int = 2, sums: int = 2) -> None:
        super().__init__(0, honest, sums)
        self.liar.rate, self.liar.withholds = 0.0, False
        self.errors: dict[str, list[Exception]] = {me: [] for me in self.honest}
        self.says: Callable[[str, Frame], Message | None] = lambda _, frame: frame.message
        """What the dishonest member sends to somebody instead; None for nothing."""

    def settle(self) -> None:
        """Deliver everything."""
        with self.observations.watching():
            for _ in range(30):  # programs may want the next sum
                for me in self.charter.members:
                    self.let_speak(me)
                rounds = 0
                while any(self.wires.values()):
                    rounds += 1
                    assert rounds < MAX_ROUNDS, "the members do not come to an end"
                    for (sender, to), wire in list(self.wires.items()):
                        while wire:
                            self.deliver(sender, to, wire.popleft())
        self.observations.check()

    def let_speak(self, me: str) -> None:
        if me not in self.programs:
            return
        program = self.programs[me]
        self.guarded(me, program.advance)
        while (outgoing := program.assembly.next_outgoing()) is not None:
            to, data = outgoing
            if me == LIAR:
                frame = from_bytes(data, me)
                message = self.says(to, frame)
                if message is None:
                    continue
                data = to_bytes(replace(frame, message=message))
            self.wires.setdefault((me, to), deque()).append(data)

    def guarded(self, me: str, action: Callable[[], object]) -> None:
        try:
            action()
        except RemoteProtocolError as error:
            if me in self.errors:
                self.errors[me].append(error)

    def group(self, me: str) -> Group:
        return self.programs[me].assembly.group("everyone")

    def totals(self) -> list[list[bytes]]:
        return [self.programs[me].totals for me in self.honest]

    def sign(self, kind: str, slot: bytes, content: bytes) -> bytes:
        return self.liar.identity.sign(statement(kind, slot, sha256(content).digest()))

    @property
    def view(self) -> bytes:
        view = self.programs[LIAR].assembly._view
        return b"" if view is None else view.digest

    def inject(self, to: str, session: bytes, message: Message, number: int = 0) -> None:
        self.wires.setdefault((LIAR, to), deque()).append(to_bytes(Frame(session, number, message)))


def withhold(*kinds: type[Message]) -> Callable[[str, Frame], Message | None]:
    return lambda _, frame: None if isinstance(frame.message, kinds) else frame.message


def test_honest_members_finish() -> None:
    world = Directed()
    world.settle()
    assert [len(totals) for totals in world.totals()] == [2, 2]
    assert world.errors == {"a": [], "b": []}


# Finding 1: an ephemeral key of another member's.


@pytest.mark.parametrize("top_bit", [False, True])
def test_a_copied_ephemeral_key_is_refused_before_anything_is_shared(top_bit: bool) -> None:
    world = Directed()
    stolen = world.programs["b"].assembly._greetings.ephemeral.public
    key = bytes([*stolen[:31], stolen[31] ^ (0x80 if top_bit else 0)])

    def copied(_: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Hello):
            return frame.message
        hello = replace(frame.message, ephemeral=key)
        return replace(hello, signature=world.sign("hello", slot_of(key, "hello", hello.epoch), hello_content(hello)))

    world.says = copied
    world.settle()
    assert not world.observations.attempts
    for me in ("a", "b"):
        program = world.programs[me].assembly
        assert program.waiting_for("everyone") == ("its report", frozenset({LIAR}))


def test_who_copies_a_key_and_forms_the_view_cannot_prove_that_it_is_its_own() -> None:
    """The dishonest member knows everything but the secret half of the key that it announces."""
    world = Directed()
    stolen = world.programs["b"].assembly._greetings.ephemeral.public
    world.programs[LIAR].assembly._greetings.ephemeral.public = stolen
    world.settle()
    assert not world.observations.attempts
    assert [str(error) for error in world.errors["a"]] == [
        "c: cannot prove that the ephemeral key it announced is its own: it may be another member's"
    ]


def test_the_keys_of_a_pair_depend_on_names_keys_and_view() -> None:
    """Two names for one key, as in the finding, give streams that have nothing in common."""
    members = ("a", "b", "c")
    held = charter(members, 1)
    lives = {name: Ephemeral() for name in members}
    keys = {name: lives[name].public for name in members}
    view = View.of(held, keys)
    mine = pair("a", dishonest._identity("a"), lives["a"], "b", held, view)
    theirs = pair("b", dishonest._identity("b"), lives["b"], "a", held, view)
    assert (mine.mask_key, mine.own_tag, mine.peer_tag) == (theirs.mask_key, theirs.peer_tag, theirs.own_tag)
    copied = View.of(held, keys | {"c": keys["b"]})
    same_statics = replace(held, keys={**held.keys, "c": held.keys["b"]})
    others = [
        pair("a", dishonest._identity("a"), lives["a"], "b", held, copied),
        pair("a", dishonest._identity("a"), lives["a"], "c", held, copied),
        pair("a", dishonest._identity("a"), lives["a"], "c", same_statics, copied),
    ]
    assert len({each.mask_key for each in (mine, *others)}) == 4


# Findings 2 and 4: a history that did not happen.


def claims_more(world: Directed, total: dict[str, bytes]) -> None:
    """Let the dishonest member come back with one more sum than there was, another one for each member."""
    world.says = withhold(Unseal)
    world.settle()
    assert world.totals() == [[], []]
    ledger = Ledger.from_bytes(world.programs[LIAR].ledger.to_bytes())
    world.says = lambda _, frame: frame.message
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 2, ledger))

    def told(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Piece) or to not in total:
            return frame.message
        content = bytearray(frame.message.words)
        content[-12:] = total[to]
        content[:32] = sha256(content[32:]).digest()
        return replace(frame.message, words=bytes(content))

    world.says = told


def test_a_sum_that_others_did_not_finish_is_taken_over_if_it_is_proved() -> None:
    world = Directed()
    claims_more(world, {})
    world.settle()
    assert [len(totals) for totals in world.totals()] == [2, 2]
    assert world.totals()[0] == world.totals()[1]


@pytest.mark.parametrize("told", [{"a": b"x" * 12}, {"a": b"x" * 12, "b": b"y" * 12}])
def test_another_total_than_the_one_that_was_signed_is_refused(told: dict[str, bytes]) -> None:
    world = Directed()
    claims_more(world, told)
    world.settle()
    for me in told:
        assert "c: gave us its past, and a total is not the one that was signed" in map(str, world.errors[me])
        assert world.programs[me].totals == world.programs["b"].totals  # b was told the truth, or nobody was
    assert bool(world.programs["b"].totals) == ("b" not in told)


def test_a_certificate_without_the_others_signatures_is_refused() -> None:
    world = Directed(sums=1)
    world.settle()
    ledger = Ledger.from_bytes(world.programs[LIAR].ledger.to_bytes())
    world.liar.rng.seed(1)
    while len(ledger) < 2:
        world.liar._certify_another_total(ledger)
    for me in world.honest:
        world.programs[me].sums = 2
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 2, ledger))
    world.settle()
    for me in world.honest:
        assert len(world.programs[me].ledger) == 1
        assert any("the signature of" in str(error) for error in world.errors[me])


def test_who_has_lost_everything_takes_over_what_all_others_hold_and_not_what_one_claims() -> None:
    world = Directed(sums=1)
    world.settle()
    forged = Ledger.from_bytes(world.programs[LIAR].ledger.to_bytes())
    forged.remember(0, 1, lambda: b"another displacement")
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 0, forged))
    world.replace("b", dishonest.Program("b", world.charter, 1))
    world.settle()
    assert len(world.programs["b"].ledger) == 0  # a and c remember different states
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 1, Ledger()))
    world.settle()
    assert world.totals()[0] == world.totals()[1]
    assert world.programs["b"].ledger.states[0].content() == world.programs["a"].ledger.states[0].content()


def test_a_state_that_only_one_member_has_is_not_taken_over_while_another_can_catch_up_without() -> None:
    """The dishonest member alone has finished the last sum; a can finish it with its own state, b has lost its own."""
    world = Directed(sums=2)
    world.says = lambda _, frame: None if isinstance(frame.message, Unseal) and frame.number == 2 else frame.message
    world.settle()
    assert [len(totals) for totals in world.totals()] == [1, 1]
    assert len(world.programs[LIAR].ledger) == 2
    forged = Ledger.from_bytes(world.programs[LIAR].ledger.to_bytes())
    forged.remember(0, 2, lambda: b"another displacement")
    world.says = lambda _, frame: frame.message
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 0, forged))
    world.replace("b", dishonest.Program("b", world.charter, 2))
    world.settle()
    assert len(world.programs["a"].totals) == 2
    assert len(world.programs["b"].ledger) == 0  # a and c have different states
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 2, Ledger()))
    world.settle()
    assert world.programs["b"].ledger.states[0].content() == world.programs["a"].ledger.states[0].content()
    world.check_laws()


def test_what_members_end_with_is_compared_after_the_last_step() -> None:
    world = Directed(sums=1)
    world.settle()
    world.programs[LIAR].ledger.remember(0, 1, lambda: b"another displacement")
    for program in world.programs.values():
        program.assembly.farewell(True)
    world.settle()
    assert set(world.programs["a"].assembly.differences()) == {LIAR}
    assert set(world.programs["b"].assembly.differences()) == {LIAR}


# Finding 5: messages out of place.


def test_a_piece_in_place_of_a_report_is_refused() -> None:
    world = Directed()
    world.says = lambda _, frame: (
        Piece(0, "everyone", 8, bytes(8)) if isinstance(frame.message, Standing) else frame.message
    )
    world.settle()
    assert [str(error) for error in world.errors["a"]] == ["c: gave us a piece of the ledger of 'everyone', unasked"]


# Finding 10: a key that is shown selectively.


def selectively_opened(world: Directed, to: str) -> None:
    """Run a sum whose key the dishonest member shows to one member only, while it opens it itself."""
    world.says = lambda name, frame: None if isinstance(frame.message, Unseal) and name != to else frame.message
    world.settle()


def test_a_sum_that_somebody_may_have_opened_is_not_opened_with_other_members() -> None:
    world = Directed(honest=3, sums=1)
    world.says = withhold(Unseal)
    world.settle()
    assert len(world.programs[LIAR].ledger) == 1  # it alone has opened the sum
    world.charter = charter(("a", "b", LIAR), 2)
    world.honest = ("a", "b")
    world.replace("d", world.programs["d"])
    del world.programs["d"]
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 1))
    for me in world.honest:
        world.programs[me].assembly.adopt(world.charter)
    world.settle()
    for me in world.honest:
        stopped = world.programs[me].stopped
        assert isinstance(stopped, LocalProtocolError)
        assert "sum 1 may have been opened with a, b, c, d, and the members are a, b, c now" in str(stopped)


def test_the_mark_of_a_key_that_was_shown_outlives_the_process() -> None:
    world = Directed(honest=3, sums=1)
    world.says = withhold(Unseal)
    world.settle()
    world.keeper = "a"
    world.kill("a")
    mark = world.programs["a"].ledger.mark
    assert mark is not None
    assert mark.members == ("a", "b", "c", "d")


def test_a_sum_that_one_member_was_shown_is_finished_by_all() -> None:
    world = Directed(sums=1)
    selectively_opened(world, "a")
    assert [len(totals) for totals in world.totals()] == [1, 0]
    world.says = lambda _, frame: frame.message
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 1))  # it has lost everything, it says
    world.settle()
    assert world.totals()[0] == world.totals()[1] != []


def test_an_attempt_that_was_followed_by_another_cannot_finish_the_sum_later() -> None:
    """Else a would have the total of the first attempt, and b that of the second."""
    world = Directed(sums=1)
    world.says = withhold(Unseal)
    world.settle()
    first = Ledger.from_bytes(world.programs[LIAR].ledger.to_bytes())
    assert len(first) == 1
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 1))  # it denies to have opened it: all run it again
    world.settle()
    marks = [world.group(me).ledger.mark for me in ("a", "b")]
    assert all(mark is not None and mark.opening != first.entries[0].opening for mark in marks)
    world.says = lambda _, frame: frame.message
    world.replace(LIAR, dishonest.Program(LIAR, world.charter, 1, first))
    world.settle()
    for me in ("a", "b"):
        assert world.programs[me].totals == []
        assert world.programs[me].assembly.waiting_for("everyone")[0] == "an agreement about the past"
        assert LIAR in world.programs[me].assembly.doubts()


def test_reports_that_a_member_made_before_it_went_on_in_another_view_are_not_used() -> None:
    """The dishonest member leads a and b through two views, in the opposite order; the model found this."""
    world = Directed(sums=1)
    world.says = withhold(Unseal)
    world.settle()
    opened = Ledger.from_bytes(world.programs[LIAR].ledger.to_bytes())
    one = dishonest.Program(LIAR, world.charter, 1, opened)  # claims the sum
    other = dishonest.Program(LIAR, world.charter, 1)  # denies it
    a, b = world.programs["a"].assembly, world.programs["b"].assembly
    outboxes = {each: list(iter(each.assembly.next_outgoing, None)) for each in (one, other)}
    hello = {each: dict(outboxes[each]) for each in outboxes}
    for each, to in ((one, a), (other, a), (other, b), (one, b)):
        to.receive(LIAR, hello[each][to.me])
        for sender, receiver in ((a, b), (b, a)):
            for recipient, data in list(iter(sender.next_outgoing, None)):
                if recipient == receiver.me:
                    receiver.receive(sender.me, data)
                else:
                    one.assembly.receive(sender.me, data)
    # b is in the view with `one` now, and has the report that a made in it; but a is in the view with `other`.
    assert b.view == one.assembly.view != a.view
    for _ in range(
        10
    ):  # `one` proves to b that the sum is finished, and a, which is in that view no more, says nothing
        for recipient, data in list(iter(one.assembly.next_outgoing, None)):
            if recipient == "b":
                b.receive(LIAR, data)
        for recipient, data in list(iter(b.next_outgoing, None)):
            if recipient == LIAR:
                one.assembly.receive("b", data)
    assert b.waiting_for("everyone")[0] in ("its report", "all reports")
    assert len(b.group("everyone").ledger) == 0


# Finding 11: a farewell followed by readiness.


def test_who_said_farewell_is_ready_for_nothing() -> None:
    world = Directed(sums=1)
    world.settle()
    for me in (*world.honest, LIAR):
        world.programs[me].sums = 2
    for me in world.honest:
        world.inject(me, bytes(16), Farewell(True))
    world.settle()
    for me in world.honest:
        assert isinstance(world.programs[me].stopped, PeerLeftError)
        assert len(world.programs[me].ledger) == 1
        assert not world.group(me).session.running  # type: ignore[union-attr]


# Members that are told different things.


def test_who_reports_different_things_is_convicted_by_all_before_anything_is_shared() -> None:
    world = Directed()

    def differs(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Standing) or to == "a":
            return frame.message
        report = Report.from_bytes(frame.message.content)
        row = replace(report.groups["everyone"], mark=bytes(32))
        content = replace(report, groups={"everyone": row}).to_bytes()
        return replace(frame.message, content=content, signature=world.sign("standing", slot_of(report.view), content))

    world.says = differs
    world.settle()
    assert not world.observations.attempts
    for me in world.honest:
        conviction = world.programs[me].assembly.conviction
        assert isinstance(conviction, EquivocationError)
        assert conviction.peer == LIAR


@pytest.mark.parametrize("what", ["seal", "head"])
def test_who_is_ready_with_different_things_is_convicted_by_all_before_anything_is_opened(what: str) -> None:
    world = Directed()

    def differs(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Ready) or to == "a":
            return frame.message
        spec, seal, terms, _ = frame.message.spec, frame.message.seal, frame.message.terms, None
        if what == "seal":
            seal = bytes(32)
        else:
            terms = replace(Terms.from_bytes(terms), head=bytes(32)).to_bytes()
        content = ready_content(spec, seal, terms)
        slot = slot_of(world.view, "everyone", frame.number)
        return Ready(spec, seal, terms, world.sign("ready", slot, content))

    world.says = differs
    world.settle()
    assert not any(each.shown for attempt in world.observations.attempts.values() for each in attempt.values())
    for me in world.honest:
        conviction = world.programs[me].assembly.conviction
        assert conviction is not None
        assert conviction.peer == LIAR


def test_who_is_ready_with_something_else_and_unsigned_is_named_before_anything_is_opened() -> None:
    world = Directed()

    def differs(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Ready) or to == "a":
            return frame.message
        return replace(frame.message, seal=bytes(32), signature=NO_SIGNATURE)

    world.says = differs
    world.settle()
    assert not any(each.shown for attempt in world.observations.attempts.values() for each in attempt.values())
    assert "c: sent a ready statement without a valid signature of its own" in str(world.programs["b"].stopped)
    assert not any(world.programs[me].totals for me in world.honest)


def test_a_confirmation_without_a_signature_opens_nothing() -> None:
    world = Directed()

    def unsigned(to: str, frame: Frame) -> Message:
        return replace(frame.message, signature=NO_SIGNATURE) if isinstance(frame.message, Confirm) else frame.message

    world.says = unsigned
    world.settle()
    assert not any(each.shown for attempt in world.observations.attempts.values() for each in attempt.values())
    for me in world.honest:
        assert "c: sent a confirm statement without a valid signature" in str(world.programs[me].stopped)


def test_terms_that_nobody_can_read_crash_nobody() -> None:
    world = Directed()

    def deep(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Ready):
            return frame.message
        spec, seal, terms = frame.message.spec, frame.message.seal, b"[" * 4000  # RecursionError in json
        slot = slot_of(world.view, "everyone", frame.number)
        return Ready(spec, seal, terms, world.sign("ready", slot, ready_content(spec, seal, terms)))

    world.says = deep
    world.settle()
    for me in world.honest:
        assert "its terms cannot be read" in str(world.programs[me].stopped)


def test_who_greets_with_different_keys_is_named_by_all() -> None:
    world = Directed()
    other = dishonest.Program(LIAR, world.charter, 2).assembly._greetings.ephemeral.public

    def differs(to: str, frame: Frame) -> Message:
        if not isinstance(frame.message, Hello) or to == "a":
            return frame.message
        hello = replace(frame.message, ephemeral=other)
        return replace(hello, signature=world.sign("hello", slot_of(other, "hello", hello.epoch), hello_content(hello)))

    world.says = differs
    world.settle()
    assert not world.observations.attempts
    for me in world.honest:
        assembly = world.programs[me].assembly
        assert assembly.waiting_for("everyone") == ("the same greeting for all", frozenset({LIAR}))
        assert "with another key than us" in assembly.doubts()[LIAR]


def test_nobody_is_convicted_by_made_up_statements() -> None:
    world = Directed()
    slot = slot_of(world.view, "everyone", 1)
    forged = [("b", os.urandom(32), world.sign("ready", slot, each)) for each in (b"1", b"2")]
    world.settle()
    world.inject("a", bytes(16), Seen("ready", slot, tuple(forged)))
    world.settle()
    assert world.programs["a"].assembly.conviction is None


def test_a_lying_reducer_is_not_blamed_on_the_member_that_it_lied_to() -> None:
    """With three members, most may be one honest member and the liar."""
    world = Directed()

    def differs(to: str, frame: Frame) -> Message:
        if isinstance(frame.message, Subtotal) and to == "b":
            return replace(frame.message, words=bytes(len(frame.message.words)))
        return frame.message

    world.says = differs
    world.settle()
    for me in world.honest:
        assert not world.errors[me]
        assert not isinstance(world.programs[me].stopped, RemoteProtocolError)


def test_greetings_of_two_epochs_convict_nobody() -> None:
    """An honest member that lived through a change of the file has signed two greetings with one ephemeral key."""
    world = Directed(honest=3, sums=1)
    world.settle()
    b = world.programs["b"].assembly._greetings
    greetings = [b.greeting("a")]
    world.programs["b"].assembly.adopt(charter(world.charter.members, 2))
    greetings.append(b.greeting("a"))
    said = tuple(("b", sha256(hello_content(each)).digest(), each.signature) for each in greetings)
    for slot in (slot_of(each.ephemeral, "hello", each.epoch) for each in greetings):
        world.inject("a", bytes(16), Seen("hello", slot, said))
    world.settle()
    assert world.programs["a"].assembly.conviction is None


def test_who_was_told_a_made_up_total_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dishonest member adds up; it answers one at once, and is not ready for the other."""
    monkeypatch.setattr(dishonest, "spec", lambda size: replace(spec(size), opening="aggregator", aggregator=LIAR))
    world = Directed(sums=1)
    world.says = lambda to, frame: None if to == "b" and isinstance(frame.message, Ready) else frame.message
    deliver = world.deliver

    def answer_at_once(sender: str, to: str, data: bytes) -> None:
        frame = from_bytes(data, sender)
        if to == LIAR and sender == "a" and isinstance(frame.message, Subtotal):
            world.inject("a", frame.session, Total(0, bytes(4 * dishonest.SIZE)), frame.number)
        deliver(sender, to, data)

    monkeypatch.setattr(world, "deliver", answer_at_once)
    world.settle()
    for me in world.honest:
        assert not isinstance(world.programs[me].stopped, RemoteProtocolError)


def test_a_report_for_a_view_to_come_does_not_keep_a_new_file_from_being_adopted() -> None:
    """The dishonest member knows all keys, and so the view that the new file will make."""
    world = Directed(honest=3, sums=1)
    world.settle()
    later = charter(world.charter.members, 2)
    a = world.programs["a"].assembly
    for me in ("b", "d", LIAR):
        world.programs[me].assembly.adopt(later)
    world.settle()
    coming = View.of(later, a._greetings.keys(a.others))
    a.receive(LIAR, to_bytes(Frame(coming.digest[:16], 0, Standing(b"[]", bytes(64)))))
    a.adopt(later)
    assert a.charter.epoch == 2


def test_who_asks_again_and_again_does_not_fill_our_memory() -> None:
    world = Directed(sums=1)
    world.settle()
    a = world.programs["a"].assembly
    for number in range(200):
        world.programs["a"].ledger.remember(0, number, lambda: bytes(1 << 16))
        a.receive(LIAR, to_bytes(Frame(a.view, 0, Ask("everyone", 0, number % 2 == 0))))
    waiting = sum(len(data) for _, data in iter(a.next_outgoing, None))
    assert waiting < 1 << 20


# All of it at random.


@pytest.mark.parametrize("honest", [2, 3, 4])
def test_no_law_is_broken_in_random_schedules(honest: int) -> None:
    with ideal_cryptography():
        dishonest._identity.cache_clear()
        for seed in range(SCHEDULES):
            World(1_000_000 * honest + seed, honest).run(400)
    dishonest._identity.cache_clear()


def test_no_law_is_broken_with_real_cryptography() -> None:
    for seed in range(20):
        World(seed, 2).run(400)
