"""The first slice of a masked vector is sent with `Ready`: how many messages follow each other, and what it discloses.

With pairwise masks, a member sends each reducer the first slice of its part before it knows whether all members are
ready with the same settings. So a small sum takes one message less, a dishonest member has masked parts before it
announces its own settings, and a peer that has not started yet has to keep one slice of each member.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import RemoteProtocolError, SettingsError
from cgd.secagg import reduction
from cgd.secagg.codec import Frame, from_bytes, ready_content, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.messages import HUB, KeyShare, Message, Ready, RevealKey, Subtotal
from cgd.secagg.reduction import MAX_SLICE_BYTES
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.statements import slot_of
from support.adversary import ADVERSARY
from support.dishonest import DirectedSimulation, withhold
from support.summing_program import gradient_spec
from support.wire import Network, names, random_secrets, ring_total, sessions, spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import Buffer, Masking, Opening
    from cgd.secagg.session import Session

    Sent = tuple[int, str, str, Buffer]  # when it arrives, sender, recipient, frame

SESSION = b"s" * 16


# How long a sum takes.


def latencies(members: Mapping[str, Session], opening: Opening) -> int:
    """Deliver all frames, each one latency after it was sent, and return the latencies until all have the total.

    With the hub, a frame from one member to another takes two: it is relayed.
    """
    aggregator = HubAggregator({"everyone": list(members)})
    in_flight: list[Sent] = []
    for now in count():
        arrived = [each for each in in_flight if each[0] == now]
        in_flight = [each for each in in_flight if each[0] > now]
        for _, sender, to, frame in arrived:
            if to == HUB:
                if (added := aggregator.receive(sender, frame)) is not None:
                    in_flight += [(now + 1, HUB, member, added[1]) for member in added[0]]
            else:
                members[to].receive(sender, frame)
        if all(session.finished for session in members.values()):
            return now
        for sender, session in members.items():
            for to, frame in iter(session.next_outgoing, None):
                relayed = opening == "hub" and to != HUB
                in_flight.append((now + 1 + relayed, sender, to, frame))
    raise AssertionError


@pytest.mark.parametrize(
    ("opening", "masking", "size", "expected"),
    [
        ("mesh", "pairwise", 12, 4),
        ("mesh", "pairwise", 13, 5),  # a part has two slices, and the second waits until all members are ready
        ("mesh", "uniform", 12, 6),
        ("aggregator", "pairwise", 3, 4),
        ("aggregator", "pairwise", 4, 5),
        ("hub", "pairwise", 100, 8),
        ("hub", "pairwise", 1, 6),
    ],
)
@pytest.mark.parametrize("quorum", [None, 3])
def test_latencies_of_a_sum(
    monkeypatch: pytest.MonkeyPatch, opening: Opening, masking: Masking, size: int, expected: int, quorum: int | None
) -> None:
    monkeypatch.setattr(reduction, "SLICE_ELEMENTS", 3 if opening != "hub" else 65)
    members = sessions(4)
    secrets = random_secrets(random.Random(0), 4, size)
    for session, secret in zip(members.values(), secrets, strict=True):
        session._quorum = quorum
        session.start(spec(size, masking, opening), secret.copy())
    assert latencies(members, opening) == expected
    assert all(np.array_equal(session.total, ring_total(secrets)) for session in members.values())


# Members that are ahead.


@pytest.mark.parametrize("opening", ["mesh", "aggregator", "hub"])
def test_member_that_starts_last_uses_what_it_has_received(opening: Opening) -> None:
    members = sessions(4)
    rng = random.Random(0)
    secrets = random_secrets(rng, 4, size=6)
    for name, secret in zip(names(3), secrets, strict=False):
        members[name].start(spec(6, opening=opening, aggregator="p3"), secret.copy())
    network = Network(members, rng, duplicates=0.3)
    network.run()
    assert not any(session.finished for session in members.values())
    members["p3"].start(spec(6, opening=opening, aggregator="p3"), secrets[3].copy())
    network.run()
    assert all(np.array_equal(session.total, ring_total(secrets)) for session in members.values())


def ready(number: int = 1, size: int = 4) -> bytes:
    return to_bytes(Frame(SESSION, number, Ready(spec(size), bytes(32))))


def subtotal(start: int = 0, number: int = 1, size: int = 2) -> bytes:
    return to_bytes(Frame(SESSION, number, Subtotal(start, bytes(4 * size))))


@pytest.mark.parametrize(
    "frame",
    [
        subtotal(start=2),
        subtotal(size=1),
        subtotal(number=2),
        to_bytes(Frame(SESSION, 1, RevealKey(bytes(16)))),
    ],
    ids=["another slice", "another vector", "a later sum", "a key"],
)
def test_peer_that_is_ahead_sends_one_slice(frame: bytes) -> None:
    session = sessions(3)["p0"]
    session.receive("p1", ready())
    session.receive("p1", subtotal())
    session.receive("p1", subtotal())  # a duplicate
    with pytest.raises(RemoteProtocolError, match="p1: sent .* too early: this member is at sum 0"):
        session.receive("p1", frame)


def test_slice_of_a_peer_that_is_ahead_has_a_limited_size() -> None:
    session = sessions(3)["p0"]
    session.receive("p1", ready())
    with pytest.raises(RemoteProtocolError, match="p1: sent Subtotal of sum 1 too early"):
        session.receive("p1", subtotal(size=MAX_SLICE_BYTES // 4 + 1))
    session.receive("p1", subtotal(size=MAX_SLICE_BYTES // 4))


def test_member_keeps_one_slice_of_each_peer() -> None:
    """A peer that aborts sums can be ahead by many."""
    session = sessions(3)["p0"]
    for number in range(1, 50):
        for peer in ("p1", "p2"):
            session.receive(peer, ready(number))
            session.receive(peer, subtotal(number=number))
            session.receive(peer, to_bytes(Frame(SESSION, number, KeyShare(bytes(17)))))
    kept = [message for _, messages in session._ahead.values() for message in messages.values()]
    assert len(kept) == 6


def test_subtotal_before_ready_is_rejected() -> None:
    alone = SecureSum("p0", names(3), 1, masks=None)
    with pytest.raises(RemoteProtocolError, match="p1: sent Subtotal of sum 1 before its Ready"):
        alone.receive("p1", Subtotal(0, bytes(8)))
    members = sessions(3)
    members["p0"].start(spec(4), np.zeros(4, dtype="<u4"))
    with pytest.raises(RemoteProtocolError, match="p1: sent Subtotal of sum 1 before its Ready"):
        members["p0"].receive("p1", subtotal())


def test_honest_member_with_other_settings_is_not_accused_of_its_slice() -> None:
    """Its vector is longer, so its first slice is, too: that is no violation, and p2's settings decide."""
    members = sessions(3)
    for name, size in (("p0", 4), ("p1", 50), ("p2", 4)):
        members[name].start(spec(size), np.zeros(size, dtype="<u4"))
    frames = {
        name: [frame for to, frame in iter(members[name].next_outgoing, None) if to == "p0"] for name in ("p1", "p2")
    }
    assert [type(from_bytes(frame, "p1").message) for frame in frames["p1"]] == [Ready, Subtotal]
    while members["p0"].next_outgoing() is not None:
        pass
    for name in ("p1", "p2"):
        for frame in frames[name][: 2 if name == "p1" else 1]:
            if name == "p1":
                members["p0"].receive(name, frame)
            else:
                with pytest.raises(SettingsError, match="p1: its settings differ"):
                    members["p0"].receive(name, frame)


# A dishonest member that announces its settings after it has masked parts of all others.


class LateReady(DirectedSimulation):
    """The dishonest member sends nothing of the first sum before it has the masked parts of all honest members."""

    def __init__(self, change: dict[str, dict[str, Any]]) -> None:
        super().__init__(sums=1)
        self.change = change
        self.held: list[tuple[str, Frame]] = []
        self.parts: set[str] = set()
        self.alter = self.hold

    def hold(self, to: str, frame: Frame) -> Message | None:
        if frame.number != 1 or self.parts == set(self.honest):
            return frame.message
        self.held.append((to, frame))
        return None

    def deliver(self, sender: str, to: str, data: bytes) -> None:
        super().deliver(sender, to, data)
        if to != ADVERSARY or not isinstance(from_bytes(data, sender).message, Subtotal):
            return
        self.parts.add(sender)
        if self.parts == set(self.honest):
            for recipient, frame in self.held:
                message = frame.message
                if isinstance(message, Ready):
                    message = self.signed(replace(message, **self.change.get(recipient, {})), frame.number)
                self.inject(recipient, frame.session, message, frame.number)
            self.held.clear()

    def signed(self, message: Ready, number: int) -> Ready:
        content = ready_content(message.spec, message.commitment, message.terms)
        return replace(message, signature=self.sign("ready", slot_of(self.view, "everyone", number), content))


def test_member_has_masked_parts_before_it_is_ready() -> None:
    simulation = LateReady({})
    simulation.settle()
    assert simulation.parts == set(simulation.honest)
    first, second = simulation.totals()
    assert first == second
    assert len(first) == 1


def test_no_key_is_revealed_before_the_last_member_is_ready() -> None:
    simulation = LateReady({})
    simulation.alter = withhold(Ready)
    simulation.settle()
    assert simulation.parts == set(simulation.honest)
    assert not simulation.observations.any_revealed()


@pytest.mark.parametrize("to", ["a", "b"])
def test_statements_chosen_after_the_masked_parts_reveal_nothing_if_they_differ(to: str) -> None:
    simulation = LateReady({to: {"commitment": bytes(32)}})
    simulation.settle()
    assert len(simulation.observations.attempts) >= 1
    assert not simulation.observations.any_revealed()
    for me in simulation.honest:
        assert simulation.programs[me].membership.equivocation is not None


def test_settings_chosen_after_the_masked_parts_make_the_sum_fail() -> None:
    """What the dishonest member has seen stays masked when the members sum again: `settle` checks the masks."""
    simulation = LateReady({})
    settings = replace(gradient_spec(), fraction_bits=3)
    simulation.change = {me: {"spec": settings} for me in simulation.honest}
    simulation.settle()
    assert not simulation.observations.any_revealed()
    for me in simulation.honest:
        stopped = simulation.programs[me].stopped
        assert isinstance(stopped, SettingsError)
        assert stopped.peer == ADVERSARY
    simulation.change = {}
    for me in (*simulation.honest, ADVERSARY):
        simulation.restart(me)
    simulation.settle()
    assert len(simulation.observations.attempts) >= 2
    first, second = simulation.totals()
    assert first == second
    assert len(first) == 1
