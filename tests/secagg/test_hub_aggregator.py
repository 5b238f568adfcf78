"""A correct hub sends correct totals; a wrong total is detected before any key is revealed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import CGDError, HubError, InputError, PeerAbortedError, ProtocolError, RemoteProtocolError
from cgd.secagg import hub_aggregator, reduction
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.mac import TAGS
from cgd.secagg.messages import HUB, Confirm, Deposit, Leave, Reason, RevealKey, Total
from cgd.secagg.reduction import MAX_SLICES_AHEAD
from support.wire import Network, names, random_secrets, ring_total, sessions, spec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.secagg.session import Session

    Words = npt.NDArray[Any]
    Alter = Callable[[Words, int], None]  # changes a total in place, given the start of its slice

SIZE = 300
GROUPS = {"everyone": ("p0", "p1", "p2"), "column": ("p0", "p1", "p3")}


def frame(message: Any, session: bytes = b"s" * 16, number: int = 1) -> bytes:
    return to_bytes(Frame(session, number, message))


def deposit(value: int = 1, start: int = 0, group: str = "everyone", bits: int = 32, size: int = 4) -> Deposit:
    return Deposit(start, group, bits, np.full(size, value, dtype=f"<u{bits // 8}").tobytes())


class TamperingAggregator(HubAggregator):
    """Alters the totals that it sends; with `only`, those for one member."""

    def __init__(self, count: int, alter: Alter, bits: int, only: str = "") -> None:
        super().__init__({"everyone": names(count)})
        self.alter, self.bits, self.only = alter, bits, only

    def altered(self, to: str, data: bytes) -> bytes:
        frame = from_bytes(data, HUB)
        assert isinstance(frame.message, Total)
        words = np.frombuffer(frame.message.words, dtype=f"<u{self.bits // 8}").copy()
        if self.only in ("", to):
            self.alter(words, frame.message.start)
        return to_bytes(replace(frame, message=Total(frame.message.start, words.tobytes())))


def run(alter: Alter, bits: int = 32, only: str = "") -> tuple[dict[str, Session], dict[str, ProtocolError], Network]:
    rng = random.Random(1)
    members = sessions(4)
    network = Network(members, rng)
    aggregator = TamperingAggregator(4, alter, bits, only)
    network.aggregator = aggregator
    for session, secret in zip(members.values(), random_secrets(rng, 4, SIZE, bits), strict=True):
        session.start(spec(SIZE, opening="hub", ring_bits=bits), secret)
    deliver = network.deliver_one

    def deliver_altered() -> None:
        deliver()
        network.in_flight = [
            (sender, to, aggregator.altered(to, data))
            if sender == HUB and (sender, to, data) not in sent
            else (sender, to, data)
            for sender, to, data in network.in_flight
        ]
        sent.extend(each for each in network.in_flight if each[0] == HUB)

    sent: list[tuple[str, str, bytes]] = []
    network.deliver_one = deliver_altered  # type: ignore[method-assign]
    return members, dict(network.run_past_faults()), network


def flip(*indices: int, bit: int) -> Alter:
    def alter(words: Words, _: int) -> None:
        for index in indices:
            words[index] ^= words.dtype.type(1 << bit)

    return alter


def zero_tags(words: Words, _: int) -> None:
    words[-TAGS:] = 0


def zero(words: Words, _: int) -> None:
    words[:] = 0


def swap(words: Words, _: int) -> None:
    words[[0, 1]] = words[[1, 0]]


def honest(_words: Words, _start: int) -> None:
    pass


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("only", ["", "p2"])
@pytest.mark.parametrize(
    "kind", ["one bit", "the top bit", "two top bits", "a tag's top bit", "no tags", "all zeros", "two words swapped"]
)
def test_wrong_total_of_the_hub_is_detected_and_nothing_is_revealed(kind: str, only: str, bits: int) -> None:
    alterations: dict[str, Alter] = {
        "one bit": flip(7, bit=0),
        "the top bit": flip(7, bit=bits - 1),
        "two top bits": flip(7, 200, bit=bits - 1),
        "a tag's top bit": flip(SIZE + 5, bit=bits - 1),
        "no tags": zero_tags,
        "all zeros": zero,
        "two words swapped": swap,
    }
    members, errors, network = run(alterations[kind], bits, only)
    assert set(errors) == set(members)
    detected = [error for error in errors.values() if isinstance(error, HubError)]
    assert detected
    assert all("does not match its MAC tags: the hub added wrongly" in str(error) for error in detected)
    others = [error for error in errors.values() if not isinstance(error, HubError)]
    assert all(
        isinstance(error, PeerAbortedError) and "it detected that the hub violated" in str(error) for error in others
    )
    if only:
        assert len(detected) == 1
    types = [type(from_bytes(data, sender).message) for sender, _, data in network.delivered]
    assert RevealKey not in types
    assert only or Confirm not in types


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_correct_hub_is_not_accused(bits: int) -> None:
    members, errors, _ = run(honest, bits)
    assert not errors
    expected = ring_total(random_secrets(random.Random(1), 4, SIZE, bits))
    assert all(np.array_equal(session.total, expected) for session in members.values())


def test_total_of_wrong_length_or_start_is_a_fault_of_the_hub() -> None:
    members = sessions(3)
    network = Network(members, random.Random(1))
    for session in members.values():
        session.start(spec(5, opening="hub"), np.zeros(5, dtype="<u4"))
    network.run(until=lambda: any(sender == HUB for sender, _, _ in network.in_flight))
    for start, length in ((0, 4), (1, 4 * (5 + TAGS))):
        with pytest.raises(RemoteProtocolError, match="the hub: sent a Total of"):
            members[names(3)[start]].receive(HUB, frame(Total(start, bytes(length))))


def test_opening_by_the_hub_needs_a_hub() -> None:
    members = sessions(3)
    members["p0"].hub = None
    with pytest.raises(InputError, match=r"opening is 'hub', but there is no hub; .* in \[hub\]"):
        members["p0"].start(spec(5, opening="hub"), np.zeros(5, dtype="<u4"))


def test_total_of_the_hub_is_rejected_if_the_members_add() -> None:
    members = sessions(3)
    for session in members.values():
        session.start(spec(5), np.zeros(5, dtype="<u4"))
    with pytest.raises(HubError, match="sent Total, which the hub may not send here"):
        members["p0"].receive(HUB, frame(Total(0, bytes(8))))


def test_total_of_a_refused_sum_is_ignored() -> None:
    members = sessions(3)
    members["p0"].refuse(Reason.RANGE)
    members["p0"].receive(HUB, frame(Total(0, bytes(8))))
    assert members["p0"].fault is None


# The aggregator alone.


def test_total_of_a_slice_is_sent_when_all_have_deposited_it() -> None:
    aggregator = HubAggregator(GROUPS)
    assert aggregator.receive("p0", frame(deposit(1))) is None
    assert aggregator.receive("p0", frame(deposit(9))) is None  # a duplicate has no effect
    assert aggregator.receive("p1", frame(deposit(2))) is None
    sent = aggregator.receive("p2", frame(deposit(2**32 - 2)))
    assert sent is not None
    assert sent[0] == {"p0", "p1", "p2"}
    message = from_bytes(sent[1], HUB).message
    assert isinstance(message, Total)
    assert np.frombuffer(message.words, dtype="<u4").tolist() == [1, 1, 1, 1]
    assert aggregator.receive("p1", frame(deposit(3))) is None  # nor has a later one


def test_groups_sums_and_sessions_are_separate() -> None:
    aggregator = HubAggregator(GROUPS)
    for member in ("p0", "p1"):
        aggregator.receive(member, frame(deposit()))
        assert aggregator.receive(member, frame(deposit(group="column"))) is None
    assert aggregator.receive("p2", frame(deposit(), number=2)) is None
    assert aggregator.receive("p2", frame(deposit(), session=b"t" * 16)) is None
    assert aggregator.receive("p3", frame(deposit(group="column"))) is not None


def test_late_deposit_of_another_session_does_not_affect_the_present_one() -> None:
    aggregator = HubAggregator(GROUPS)
    aggregator.receive("p0", frame(deposit(), session=b"n" * 16))
    aggregator.receive("p1", frame(deposit(start=4), session=b"o" * 16))
    aggregator.receive("p1", frame(deposit(), session=b"n" * 16))
    assert aggregator.receive("p2", frame(deposit(), session=b"n" * 16)) is not None


def test_hub_keeps_at_most_as_many_sums_as_members() -> None:
    aggregator = HubAggregator(GROUPS)
    for number in range(1, 500):
        for member in ("p0", "p1"):
            aggregator.receive(member, frame(deposit(), session=random.Random(number).randbytes(16), number=number))
    assert len(aggregator._sums) == 1
    assert aggregator.receive("p0", frame(deposit(), number=3)) is None
    assert len(aggregator._sums) == 2


@pytest.mark.parametrize(
    ("sender", "message", "error_text"),
    [
        ("p3", deposit(), "p3: deposits in the group 'everyone', but is not a member of it"),
        ("p9", deposit(), "p9: deposits in the group 'everyone', but is not a member of it"),
        ("p0", deposit(group="row"), "p0: deposits in the group 'row', but is not a member of it"),
        ("p0", Leave(), "p0: sent Leave to the hub, which accepts only Deposit"),
        (
            "p0",
            deposit(size=5),
            "p0: deposits 20 bytes of 32-bit words at 0, but others deposited 16 bytes of 32-bit words",
        ),
        (
            "p0",
            deposit(bits=64, size=2),
            "p0: deposits 16 bytes of 64-bit words at 0, but others deposited 16 bytes of 32-bit words",
        ),
        ("p0", deposit(start=9, size=reduction.SLICE_ELEMENTS + 1), "more than a slice has"),
    ],
)
def test_invalid_deposit_is_rejected(sender: str, message: Any, error_text: str) -> None:
    aggregator = HubAggregator(GROUPS)
    aggregator.receive("p1", frame(deposit()))
    with pytest.raises(RemoteProtocolError, match=error_text):
        aggregator.receive(sender, frame(message))
    for member in ("p0", "p2"):
        sent = aggregator.receive(member, frame(deposit()))
    assert sent is not None  # it had no effect


def test_deposits_ahead_of_others_are_bounded() -> None:
    aggregator = HubAggregator(GROUPS)
    for start in range(2 * MAX_SLICES_AHEAD):
        aggregator.receive("p0", frame(deposit(start=start)))
    with pytest.raises(
        RemoteProtocolError, match=f"p0: deposits more than {2 * MAX_SLICES_AHEAD} slices ahead of the others"
    ):
        aggregator.receive("p0", frame(deposit(start=2 * MAX_SLICES_AHEAD)))
    aggregator.receive("p1", frame(deposit(start=2 * MAX_SLICES_AHEAD)))  # others are not affected
    aggregator.receive("p0", frame(deposit(), number=2))
    assert sum(len(partial.slices) for partial in aggregator._sums.values()) <= 2 * MAX_SLICES_AHEAD + 2


def test_members_deposit_a_bounded_number_of_slices_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (reduction, "SLICE_ELEMENTS"),
        (hub_aggregator, "SLICE_ELEMENTS"),
        (reduction, "MAX_SLICES_AHEAD"),
    ):
        monkeypatch.setattr(module, name, 8)
    members = sessions(3)
    network = Network(members, random.Random(1))
    secrets = random_secrets(random.Random(2), 3, 8 * 40)
    for session, secret in zip(members.values(), secrets, strict=True):
        session.start(spec(8 * 40, opening="hub"), secret.copy())
    largest = 0
    while any(session.running for session in members.values()):
        network.collect()
        network.deliver_one()
        open_slices = [partial.slices for partial in network.aggregator._sums.values()]
        largest = max([largest, *(len(each) for each in open_slices)])
    assert 2 <= largest <= 8
    assert np.array_equal(members["p1"].total, ring_total(secrets))


def test_changed_group_starts_again_and_others_continue() -> None:
    aggregator = HubAggregator(GROUPS)
    for member in ("p0", "p1"):
        aggregator.receive(member, frame(deposit()))
        aggregator.receive(member, frame(deposit(group="column")))
    aggregator.adopt(GROUPS | {"everyone": ("p0", "p1", "p2", "p4")})
    assert aggregator.receive("p3", frame(deposit(group="column"))) is not None
    for member in ("p2", "p4"):
        assert aggregator.receive(member, frame(deposit())) is None


def test_malformed_frame_names_its_sender() -> None:
    for malformed in (b"", bytes(60), frame(deposit())[:-1], frame(deposit())[:-2] + b"\xff\x20"):
        with pytest.raises(CGDError, match="p0: sent"):
            HubAggregator(GROUPS).receive("p0", malformed)
