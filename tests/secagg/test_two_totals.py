"""A dishonest member tries to give two honest members different totals of one sum, in ways that models/views.pml found.

`c` alone reveals the second sum, by withholding its key, and has a certificate that no other member has.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import ProtocolError
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.membership import Membership
from cgd.secagg.messages import Confirm, JournalChunk, JournalPosition, Message, Ready, RevealKey
from cgd.secagg.positions import GroupPosition, PositionReport
from cgd.secagg.statements import slot_of, statement
from support.identities import identity, public_keys
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Callable

    Alter = Callable[[str, str, Message], Message | None]  # sender, recipient, message

GROUP = "everyone"
SIZE = 3


def federation_spec(members: str, epoch: int) -> FederationSpec:
    names = tuple(members)
    return FederationSpec("trial", epoch, names, {GROUP: names}, {}, "1.0", public_keys(names))


class Simulation:
    """Memberships, whose messages a test can alter or withhold."""

    def __init__(self, members: str) -> None:
        self.memberships = {name: Membership(name, identity(name), federation_spec(members, 1)) for name in members}

    def journal(self, name: str) -> Journal:
        return self.memberships[name].group(GROUP).journal

    def lengths(self) -> dict[str, int]:
        return {name: len(self.journal(name)) for name in self.memberships}

    def restart(self, name: str, held: FederationSpec, journal: bytes | None = None) -> None:
        journals = {} if journal is None else {GROUP: Journal.from_bytes(journal)}
        self.memberships[name] = Membership(name, identity(name), held, journals)

    def start(self, name: str, value: int, number: int) -> None:
        addend = np.full(SIZE, value, dtype=np.uint32)
        membership = self.memberships[name]
        membership.start(GROUP, spec(SIZE), addend.copy, membership.group(GROUP).next_epoch, Step(0, number))

    def start_all(self, number: int, **values: int) -> None:
        for name, value in values.items():
            self.start(name, value, number)

    def exchange(self, alter: Alter = lambda _sender, _to, message: message) -> None:
        """Deliver all messages, as altered or dropped by `alter`, until there are none; errors are printed."""
        while frames := [
            (name, to, data)
            for name, membership in self.memberships.items()
            for to, data in iter(membership.next_outgoing, None)
        ]:
            for sender, to, data in frames:
                frame = from_bytes(data, sender)
                message = alter(sender, to, frame.message)
                if message is not None:
                    self.deliver(sender, to, replace(frame, message=message))

    def deliver(self, sender: str, to: str, frame: Frame) -> None:
        if to in self.memberships:
            try:
                self.memberships[to].receive(sender, to_bytes(frame))
            except ProtocolError as error:
                print(f"{to} rejects: {error}")  # noqa: T201 - shown if a test fails

    def totals(self, names: str) -> list[list[int]]:
        return [self.journal(name).total(1, spec(SIZE)).tolist() for name in names if len(self.journal(name)) > 1]


def withhold_keys_of_c(sender: str, _to: str, message: Message) -> Message | None:
    return None if sender == "c" and isinstance(message, RevealKey) else message


def second_sum_revealed_by_c_alone() -> tuple[Simulation, bytes]:
    """All have finished the first sum, and c the second; return also the journal that c had before."""
    simulation = Simulation("abc")
    simulation.exchange()
    simulation.start_all(0, a=1, b=2, c=3)
    simulation.exchange()
    before = simulation.journal("c").to_bytes()
    simulation.start_all(1, a=10, b=20, c=30)
    simulation.exchange(withhold_keys_of_c)
    assert simulation.lengths() == {"a": 1, "b": 1, "c": 2}
    return simulation, before


def report_of_c(view: bytes, number: int, position: GroupPosition) -> JournalPosition:
    content = PositionReport(view, number, {GROUP: position}).to_bytes()
    signed = statement("standing", slot_of(view, "", number), sha256(content).digest())
    return JournalPosition(content, identity("c").sign(signed))


def repeat_the_second_sum(simulation: Simulation) -> None:
    """Let a, b and c repeat the second sum, c with another addend."""
    for name, value in {"a": 10, "b": 20}.items():
        pending = simulation.memberships[name].group(GROUP).pending
        assert pending is not None
        if pending.done:  # returned to the caller, because the epoch has changed
            simulation.start(name, value, 1)
    simulation.start("c", 0, 0)
    simulation.start("c", 99, 1)
    simulation.exchange()
    assert simulation.totals("ab") == [[129] * SIZE] * 2


def test_sum_that_is_being_repeated_is_not_accepted_from_a_journal() -> None:
    simulation, _ = second_sum_revealed_by_c_alone()
    revealed = simulation.journal("c")
    simulation.restart("c", federation_spec("abc", 1))  # it claims to have nothing, so that the members are not level
    withheld: list[Message] = []

    def send_ready_to_a_only(sender: str, to: str, message: Message) -> Message | None:
        if (
            sender == "c"
            and isinstance(message, JournalPosition)
            and PositionReport.from_bytes(message.content).number > 0
        ):
            return None
        if sender == "c" and to == "b" and isinstance(message, Ready):
            withheld.append(message)
            return None
        return message

    simulation.exchange(send_ready_to_a_only)
    simulation.start("c", 0, 0)
    simulation.start("c", 99, 1)
    simulation.exchange(send_ready_to_a_only)

    # a has started another attempt; b, which is ready, has not. Now c reports to b that it has finished the first one,
    # and proves it.
    c = simulation.memberships["c"].group(GROUP)
    assert c.session is not None
    assert c.reports is not None
    claim = report_of_c(c.reports.view, 1, GroupPosition(2, revealed.head, None, bytes(32)))
    content = revealed.export_since(1, states=False)

    def send_revealed_sum(sender: str, to: str, message: Message) -> Message | None:
        if isinstance(message, JournalPosition):
            return None  # delayed
        return (
            JournalChunk(0, GROUP, len(content), content)
            if (sender, to, type(message)) == ("c", "b", JournalChunk)
            else message
        )

    simulation.deliver("c", "b", Frame(simulation.memberships["c"].view, 0, claim))
    simulation.exchange(send_revealed_sum)
    for message in withheld:  # then it continues with the repeated sum
        simulation.deliver("c", "b", Frame(c.session.session, c.session.number, message))
    simulation.exchange(send_revealed_sum)
    totals = simulation.totals("ab")
    assert all(total == totals[0] for total in totals)


def test_member_that_took_no_part_accepts_a_sum_only_if_it_is_not_repeated() -> None:
    simulation, before = second_sum_revealed_by_c_alone()
    second = federation_spec("abcd", 2)
    for name in "ab":
        simulation.memberships[name].adopt(second)
    simulation.restart("c", second, simulation.journal("c").to_bytes())
    simulation.restart("d", second)
    # c reports to all that it has finished the sum, and sends its journal to d, but not to a and b.
    simulation.exchange(
        lambda sender, to, message: (
            None if sender == "c" and to in "ab" and isinstance(message, JournalChunk) else message
        )
    )

    # d leaves again, and the others repeat the sum with its members.
    d = simulation.memberships.pop("d").group(GROUP).journal
    third = federation_spec("abc", 3)
    for name in "ab":
        simulation.memberships[name].adopt(third)
    simulation.restart("c", third, before)
    simulation.exchange()
    repeat_the_second_sum(simulation)
    assert len(d) < 2 or d.total(1, spec(SIZE)).tolist() == [129] * SIZE


def test_sum_of_a_later_epoch_is_not_accepted() -> None:
    """a and b are in the next epoch, which d has not adopted: their reports to d are outdated."""
    simulation = Simulation("abcd")
    simulation.exchange()
    simulation.start_all(0, a=1, b=2, c=3, d=4)
    simulation.exchange()
    before = simulation.journal("c").to_bytes()

    # A view in which c reports two sums in its first report, and sends no later one.
    forged = Journal.from_bytes(before)
    forged.append(spec(SIZE), np.zeros(SIZE, dtype=np.uint32), 1, 0, Step(0, 1), 3)
    simulation.restart("c", federation_spec("abcd", 1), forged.to_bytes())

    def send_first_reports_only(sender: str, _: str, message: Message) -> Message | None:
        later = isinstance(message, JournalPosition) and PositionReport.from_bytes(message.content).number > 0
        return None if sender == "c" and later else message

    simulation.exchange(send_first_reports_only)
    reports = simulation.memberships["d"].group(GROUP).reports
    assert reports is not None
    assert reports.agreed

    # d is removed without notice. The others sum without it, and c alone reveals the sum.
    for name in "ab":
        simulation.memberships[name].adopt(federation_spec("abc", 2))
    simulation.restart("c", federation_spec("abc", 2), before)
    simulation.exchange()
    simulation.start_all(1, a=10, b=20)
    simulation.start("c", 0, 0)
    simulation.start("c", 30, 1)
    simulation.exchange(withhold_keys_of_c)
    assert simulation.lengths() == {"a": 1, "b": 1, "c": 2, "d": 1}

    # It sends that sum to d, in the earlier view.
    revealed, view = simulation.journal("c"), simulation.memberships["d"].view
    claim = report_of_c(reports.view, 1, GroupPosition(2, revealed.head, None, bytes(32), revealed.state_summaries()))
    simulation.deliver("c", "d", Frame(view, 0, claim))
    content = revealed.export_since(1, states=True)
    simulation.deliver("c", "d", Frame(view, 0, JournalChunk(0, GROUP, len(content), content)))

    simulation.restart("c", federation_spec("abc", 2), before)
    simulation.exchange()
    repeat_the_second_sum(simulation)
    d = simulation.journal("d")
    assert len(d) < 2 or d.total(1, spec(SIZE)).tolist() == [129] * SIZE


def two_absent_members() -> tuple[Simulation, dict[str, bytes]]:
    """a, b and c have summed without d and e; return the earlier journals of these. No member is dishonest here."""
    simulation = Simulation("abcde")
    simulation.exchange()
    simulation.start_all(0, a=1, b=2, c=3, d=4, e=5)
    simulation.exchange()
    absent = {name: simulation.journal(name).to_bytes() for name in "de"}
    for name in "de":
        del simulation.memberships[name]
    for name in "abc":
        simulation.memberships[name].adopt(federation_spec("abc", 2))
    simulation.exchange()
    simulation.start_all(1, a=1, b=2, c=3)
    simulation.exchange()
    for name in "abc":
        simulation.memberships[name].adopt(federation_spec("abcde", 3))
    return simulation, absent


def test_two_members_absent_together_wait_for_each_other() -> None:
    """A dishonest member could have forged a sum that neither has signed, with unknown members."""
    simulation, absent = two_absent_members()
    for name, journal in absent.items():
        simulation.restart(name, federation_spec("abcde", 3), journal)
    simulation.exchange()
    assert simulation.lengths() == {"a": 2, "b": 2, "c": 2, "d": 1, "e": 1}
    for name, other in ("de", "ed"):
        group = simulation.memberships[name].group(GROUP)
        assert not group.up_to_date
        assert other in simulation.memberships[name].suspected()
        assert simulation.memberships[name].equivocation is None


def test_two_members_absent_together_catch_up_with_an_empty_state() -> None:
    simulation, absent = two_absent_members()
    for name in absent:
        simulation.restart(name, federation_spec("abcde", 3))
    simulation.exchange()
    assert simulation.lengths() == dict.fromkeys("abcde", 2)
    assert simulation.totals("abcde") == [[6] * SIZE] * 5


def removed_after_it_alone_repeated_a_sum() -> Simulation:
    """d has revealed its key in the second attempt at a sum, the others only in the first, which they accept."""
    simulation = Simulation("abcd")
    simulation.exchange()
    simulation.start_all(0, a=1, b=2, c=3, d=4)
    simulation.exchange()
    before = simulation.journal("c").to_bytes()
    simulation.start_all(1, a=10, b=20, c=30, d=40)
    simulation.exchange(withhold_keys_of_c)
    revealed = simulation.journal("c").to_bytes()
    first = simulation.journal("d").pending_reveal
    simulation.restart("c", federation_spec("abcd", 1), before)
    simulation.exchange()
    simulation.start("c", 0, 0)
    simulation.start("c", 99, 1)
    simulation.exchange(
        lambda sender, to, message: (
            None
            if (sender == "c" and to != "d" and isinstance(message, Confirm)) or isinstance(message, RevealKey)
            else message
        )
    )
    assert first is not None
    assert [simulation.journal(name).pending_reveal == first for name in "abd"] == [True, True, False]
    for name in "ab":
        simulation.memberships[name].adopt(federation_spec("abc", 2))
    simulation.restart("c", federation_spec("abc", 2), revealed)
    simulation.exchange()
    assert simulation.lengths() == {"a": 2, "b": 2, "c": 2, "d": 1}
    for name in "ab":
        simulation.memberships[name].adopt(federation_spec("abcd", 3))
    simulation.restart("c", federation_spec("abcd", 3), revealed)
    return simulation


def test_removed_member_that_repeated_a_sum_does_not_accept_the_earlier_attempt() -> None:
    """The wedge of models/views.pml: no invariant is violated, but d waits, and names the members it waits for."""
    simulation = removed_after_it_alone_repeated_a_sum()
    simulation.restart("d", federation_spec("abcd", 3), simulation.journal("d").to_bytes())
    simulation.exchange()
    d = simulation.memberships["d"]
    assert len(simulation.journal("d")) == 1
    assert d.suspected()
    assert d.equivocation is None


def test_removed_member_that_repeated_a_sum_catches_up_with_an_empty_state() -> None:
    simulation = removed_after_it_alone_repeated_a_sum()
    simulation.restart("d", federation_spec("abcd", 3))
    simulation.exchange()
    assert simulation.totals("abcd") == [[100] * SIZE] * 4
