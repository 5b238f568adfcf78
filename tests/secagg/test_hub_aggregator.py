"""A hub that adds rightly tells what it should; one that does not is caught before anything is opened."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import CGDError, HubError, InputError, PeerAbortedError, ProtocolError, RemoteProtocolError
from cgd.secagg import hub_aggregator, partition, reduction
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.mac import TAGS
from cgd.secagg.messages import HUB, Confirm, Deposit, Leave, Reason, RevealKey, Total
from cgd.secagg.reduction import AHEAD
from support.wire import Wire, names, random_secrets, ring_total, sessions, spec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.secagg.session import Session

    Words = npt.NDArray[Any]
    Bend = Callable[[Words, int], None]  # what becomes of a total, and of which slice

SIZE = 300
GROUPS = {"everyone": ("p0", "p1", "p2"), "column": ("p0", "p1", "p3")}


def frame(message: Any, session: bytes = b"s" * 16, number: int = 1) -> bytes:
    return to_bytes(Frame(session, number, message))


def deposit(value: int = 1, start: int = 0, group: str = "everyone", bits: int = 32, size: int = 4) -> Deposit:
    return Deposit(start, group, bits, np.full(size, value, dtype=f"<u{bits // 8}").tobytes())


class TamperingAggregator(HubAggregator):
    """Adds up and then changes what it tells; `only`: to one member."""

    def __init__(self, count: int, bend: Bend, bits: int, only: str = "") -> None:
        super().__init__({"everyone": names(count)})
        self.bend, self.bits, self.only = bend, bits, only

    def bent(self, to: str, data: bytes) -> bytes:
        told = from_bytes(data, HUB)
        assert isinstance(told.message, Total)
        words = np.frombuffer(told.message.words, dtype=f"<u{self.bits // 8}").copy()
        if self.only in ("", to):
            self.bend(words, told.message.start)
        return to_bytes(Frame(told.session, told.number, Total(told.message.start, words.tobytes())))


def run(bend: Bend, bits: int = 32, only: str = "") -> tuple[dict[str, Session], dict[str, ProtocolError], Wire]:
    rng = random.Random(1)
    colony = sessions(4)
    wire = Wire(colony, rng)
    adder = TamperingAggregator(4, bend, bits, only)
    wire.adder = adder
    for session, secret in zip(colony.values(), random_secrets(rng, 4, SIZE, bits), strict=True):
        session.start(spec(SIZE, opening="hub", ring_bits=bits), secret)
    deliver = wire.deliver_one

    def bending() -> None:
        deliver()
        wire.flying = [
            (sender, to, adder.bent(to, data))
            if sender == HUB and (sender, to, data) not in told
            else (sender, to, data)
            for sender, to, data in wire.flying
        ]
        told.extend(each for each in wire.flying if each[0] == HUB)

    told: list[tuple[str, str, bytes]] = []
    wire.deliver_one = bending  # type: ignore[method-assign]
    return colony, dict(wire.run_past_faults()), wire


def flip(*places: int, bit: int) -> Bend:
    def bend(words: Words, _: int) -> None:
        for place in places:
            words[place] ^= words.dtype.type(1 << bit)

    return bend


def zero_tags(words: Words, _: int) -> None:
    words[-TAGS:] = 0


def zero(words: Words, _: int) -> None:
    words[:] = 0


def swap(words: Words, _: int) -> None:
    words[[0, 1]] = words[[1, 0]]


def honest(_words: Words, _start: int) -> None:
    pass


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("only", ["", "p2"])
@pytest.mark.parametrize(
    "kind", ["one bit", "the top bit", "two top bits", "a tag's top bit", "no tags", "nothing", "two words swapped"]
)
def test_a_hub_that_adds_wrongly_is_caught_and_nothing_is_opened(kind: str, only: str, bits: int) -> None:
    bends: dict[str, Bend] = {
        "one bit": flip(7, bit=0),
        "the top bit": flip(7, bit=bits - 1),
        "two top bits": flip(7, 200, bit=bits - 1),
        "a tag's top bit": flip(SIZE + 5, bit=bits - 1),
        "no tags": zero_tags,
        "nothing": zero,
        "two words swapped": swap,
    }
    colony, errors, wire = run(bends[kind], bits, only)
    assert set(errors) == set(colony)
    told = [error for error in errors.values() if isinstance(error, HubError)]
    assert told
    assert all("does not fit its tags: the hub added wrongly" in str(error) for error in told)
    others = [error for error in errors.values() if not isinstance(error, HubError)]
    assert all(isinstance(error, PeerAbortedError) and "it saw the hub break" in str(error) for error in others)
    if only:
        assert len(told) == 1
    said = [type(from_bytes(data, sender).message) for sender, _, data in wire.delivered]
    assert RevealKey not in said
    assert only or Confirm not in said


@pytest.mark.parametrize("bits", [32, 64])
def test_a_hub_that_does_not_is_not_blamed(bits: int) -> None:
    colony, errors, _ = run(honest, bits)
    assert not errors
    expected = ring_total(random_secrets(random.Random(1), 4, SIZE, bits))
    assert all(np.array_equal(session.total, expected) for session in colony.values())


def test_a_total_of_another_length_or_place_is_the_hubs_fault() -> None:
    colony = sessions(3)
    wire = Wire(colony, random.Random(1))
    for session in colony.values():
        session.start(spec(5, opening="hub"), np.zeros(5, dtype="<u4"))
    wire.run(until=lambda: any(sender == HUB for sender, _, _ in wire.flying))
    for start, length in ((0, 4), (1, 4 * (5 + TAGS))):
        with pytest.raises(RemoteProtocolError, match="the hub: sent a Total of"):
            colony[names(3)[start]].receive(HUB, frame(Total(start, bytes(length))))


def test_without_a_hub_there_is_no_opening_by_it() -> None:
    colony = sessions(3)
    colony["p0"].hub = None
    with pytest.raises(InputError, match=r"opening is 'hub', and there is none here; .* in \[hub\]"):
        colony["p0"].start(spec(5, opening="hub"), np.zeros(5, dtype="<u4"))


def test_the_hub_is_not_heard_in_a_sum_that_the_members_add_up() -> None:
    colony = sessions(3)
    for session in colony.values():
        session.start(spec(5), np.zeros(5, dtype="<u4"))
    with pytest.raises(HubError, match="sent Total, which it has no business to say"):
        colony["p0"].receive(HUB, frame(Total(0, bytes(8))))


def test_a_total_of_a_sum_that_we_have_refused_is_not_heard() -> None:
    colony = sessions(3)
    colony["p0"].refuse(Reason.RANGE)
    colony["p0"].receive(HUB, frame(Total(0, bytes(8))))
    assert colony["p0"].fault is None


# The adder by itself.


def test_a_slice_is_told_to_all_when_it_has_come_from_all() -> None:
    adder = HubAggregator(GROUPS)
    assert adder.receive("p0", frame(deposit(1))) is None
    assert adder.receive("p0", frame(deposit(9))) is None  # a copy changes nothing
    assert adder.receive("p1", frame(deposit(2))) is None
    told = adder.receive("p2", frame(deposit(2**32 - 2)))
    assert told is not None
    assert told[0] == {"p0", "p1", "p2"}
    message = from_bytes(told[1], HUB).message
    assert isinstance(message, Total)
    assert np.frombuffer(message.words, dtype="<u4").tolist() == [1, 1, 1, 1]
    assert adder.receive("p1", frame(deposit(3))) is None  # nor does one that comes later


def test_groups_sums_and_sessions_are_kept_apart() -> None:
    adder = HubAggregator(GROUPS)
    for member in ("p0", "p1"):
        adder.receive(member, frame(deposit()))
        assert adder.receive(member, frame(deposit(group="column"))) is None
    assert adder.receive("p2", frame(deposit(), number=2)) is None
    assert adder.receive("p2", frame(deposit(), session=b"t" * 16)) is None
    assert adder.receive("p3", frame(deposit(group="column"))) is not None


def test_what_is_late_of_another_session_does_not_disturb_the_present_one() -> None:
    adder = HubAggregator(GROUPS)
    adder.receive("p0", frame(deposit(), session=b"n" * 16))
    adder.receive("p1", frame(deposit(start=4), session=b"o" * 16))
    adder.receive("p1", frame(deposit(), session=b"n" * 16))
    assert adder.receive("p2", frame(deposit(), session=b"n" * 16)) is not None


def test_there_are_never_more_sums_than_members() -> None:
    adder = HubAggregator(GROUPS)
    for number in range(1, 500):
        for member in ("p0", "p1"):
            adder.receive(member, frame(deposit(), session=random.Random(number).randbytes(16), number=number))
    assert len(adder._tallies) == 1
    assert adder.receive("p0", frame(deposit(), number=3)) is None
    assert len(adder._tallies) == 2


@pytest.mark.parametrize(
    ("sender", "message", "says"),
    [
        ("p3", deposit(), "p3: deposits in the group 'everyone', which it is not a member of"),
        ("p9", deposit(), "p9: deposits in the group 'everyone', which it is not a member of"),
        ("p0", deposit(group="row"), "p0: deposits in the group 'row', which it is not a member of"),
        ("p0", Leave(), "p0: sent the hub Leave, and it takes deposits only"),
        ("p0", deposit(size=5), "p0: deposits 20 bytes of 32-bit words at 0, and others 16 of 32"),
        ("p0", deposit(bits=64, size=2), "p0: deposits 16 bytes of 64-bit words at 0, and others 16 of 32"),
        ("p0", deposit(start=9, size=partition.SLICE + 1), "more than a slice has"),
    ],
)
def test_what_may_not_be_deposited_is_refused(sender: str, message: Any, says: str) -> None:
    adder = HubAggregator(GROUPS)
    adder.receive("p1", frame(deposit()))
    with pytest.raises(RemoteProtocolError, match=says):
        adder.receive(sender, frame(message))
    for member in ("p0", "p2"):
        told = adder.receive(member, frame(deposit()))
    assert told is not None  # it changed nothing


def test_nobody_fills_the_memory() -> None:
    adder = HubAggregator(GROUPS)
    for start in range(2 * AHEAD):
        adder.receive("p0", frame(deposit(start=start)))
    with pytest.raises(RemoteProtocolError, match=f"p0: deposits more than {2 * AHEAD} slices ahead of the others"):
        adder.receive("p0", frame(deposit(start=2 * AHEAD)))
    adder.receive("p1", frame(deposit(start=2 * AHEAD)))  # others are not held up
    adder.receive("p0", frame(deposit(), number=2))
    assert sum(len(tally.slices) for tally in adder._tallies.values()) <= 2 * AHEAD + 2


def test_members_do_not_deposit_too_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((partition, "SLICE"), (hub_aggregator, "SLICE"), (reduction, "AHEAD")):
        monkeypatch.setattr(module, name, 8)
    colony = sessions(3)
    wire = Wire(colony, random.Random(1))
    secrets = random_secrets(random.Random(2), 3, 8 * 40)
    for session, secret in zip(colony.values(), secrets, strict=True):
        session.start(spec(8 * 40, opening="hub"), secret.copy())
    most = 0
    while any(session.running for session in colony.values()):
        wire.collect()
        wire.deliver_one()
        open_slices = [tally.slices for tally in wire.adder._tallies.values()]
        most = max([most, *(len(each) for each in open_slices)])
    assert 2 <= most <= 8
    assert np.array_equal(colony["p1"].total, ring_total(secrets))


def test_a_group_that_changes_begins_anew_and_the_others_go_on() -> None:
    adder = HubAggregator(GROUPS)
    for member in ("p0", "p1"):
        adder.receive(member, frame(deposit()))
        adder.receive(member, frame(deposit(group="column")))
    adder.adopt(GROUPS | {"everyone": ("p0", "p1", "p2", "p4")})
    assert adder.receive("p3", frame(deposit(group="column"))) is not None
    for member in ("p2", "p4"):
        assert adder.receive(member, frame(deposit())) is None


def test_nonsense_is_an_error_that_names_its_sender() -> None:
    for nonsense in (b"", bytes(60), frame(deposit())[:-1], frame(deposit())[:-2] + b"\xff\x20"):
        with pytest.raises(CGDError, match="p0: sent"):
            HubAggregator(GROUPS).receive("p0", nonsense)
