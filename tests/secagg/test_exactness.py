"""For any members, share kind, opening and order of messages: the exact total in the ring, the same for everyone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.errors import DisagreementError, LocalProtocolError, PeerAbortedError, PeerLeftError, RemoteProtocolError
from cgd.secagg import partition as cutting
from cgd.secagg.codec import from_bytes
from cgd.secagg.messages import OPENINGS, SHARINGS, Confirm, RevealKey, Total
from support.wire import MEMBER_OPENINGS, Wire, random_secrets, ring_total, sessions, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.secagg.messages import Message, Opening, Sharing

members = st.integers(3, 8)
sharings = st.sampled_from(SHARINGS)
openings = st.sampled_from(OPENINGS)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)


@pytest.fixture(autouse=True, scope="module")
def short_slices() -> Iterator[None]:
    """Vectors of a few elements travel in several slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "SLICE", 3)
        yield


@given(members, sharings, openings, sizes, st.sampled_from([32, 64]), seeds)
def test_any_order_with_copies_gives_the_exact_total(
    count: int, sharing: Sharing, opening: Opening, size: int, ring_bits: int, seed: int
) -> None:
    rng = random.Random(seed)
    colony = sessions(count)
    secrets = random_secrets(rng, count, size, ring_bits)
    expected = ring_total(secrets)
    aggregator = rng.choice(list(colony))
    for session, secret in zip(colony.values(), secrets, strict=True):
        session.start(spec(size, sharing, opening, ring_bits, aggregator), secret.copy())
    Wire(colony, rng, copies=0.3).run()
    assert all(np.array_equal(session.total, expected) for session in colony.values())


@given(members, openings, sizes, seeds)
def test_both_share_kinds_give_the_same_bits(count: int, opening: Opening, size: int, seed: int) -> None:
    totals = []
    for sharing in SHARINGS:
        rng = random.Random(seed)
        colony = sessions(count)
        for session, secret in zip(colony.values(), random_secrets(rng, count, size), strict=True):
            session.start(spec(size, sharing, opening), secret)
        Wire(colony, rng).run()
        totals.append([session.total.tobytes() for session in colony.values()])
    assert totals[0] == totals[1]
    assert len(set(totals[0])) == 1


@given(members, sharings, openings, seeds)
def test_several_sums_with_stale_and_early_messages(count: int, sharing: Sharing, opening: Opening, seed: int) -> None:
    """Members run ahead as far as the barrier lets them, and copies of old frames arrive sums later."""
    rng = random.Random(seed)
    colony = sessions(count)
    rounds = [random_secrets(rng, count, size=5) for _ in range(4)]
    totals: dict[str, list[bytes]] = {name: [] for name in colony}
    waiting = {name: [each[i] for each in rounds] for i, name in enumerate(colony)}
    wire = Wire(colony, rng, copies=0.3)

    def begin_some() -> None:
        for name, session in colony.items():
            if session.running:
                continue
            if session.number > len(totals[name]):
                totals[name].append(session.total.tobytes())
            if waiting[name] and rng.random() < 0.5:
                session.start(spec(5, sharing, opening), waiting[name].pop(0).copy())

    while any(len(done) < 4 for done in totals.values()):
        begin_some()
        wire.collect()
        if wire.flying:
            wire.deliver_one()
    wire.run()
    expected = [ring_total(secrets).tobytes() for secrets in rounds]
    assert all(done == expected for done in totals.values())


@given(members, sharings, openings, seeds, st.data())
def test_a_mangled_header_gives_the_exact_total_or_an_error_that_names_the_peer(
    count: int, sharing: Sharing, opening: Opening, seed: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    colony = sessions(count)
    secrets = random_secrets(rng, count, size=7)
    for session, secret in zip(colony.values(), secrets, strict=True):
        session.start(spec(7, sharing, opening), secret.copy())
    wire = Wire(colony, rng)
    for _ in range(data.draw(st.integers(0, 30))):
        wire.collect()
        if wire.flying:
            wire.deliver_one()
    wire.collect()
    victim = data.draw(st.integers(0, len(wire.flying) - 1)) if wire.flying else None
    if victim is not None:
        sender, to, frame = wire.flying[victim]
        mangled = bytearray(frame)
        mangled[data.draw(st.integers(0, 47))] ^= data.draw(st.integers(1, 255))
        wire.flying[victim] = (sender, to, bytes(mangled))
    errors = wire.run_past_faults()
    for name, session in colony.items():
        if name in errors:
            # The one who got the mangled frame blames its sender; the others are told by those who gave up.
            error = errors[name]
            assert isinstance(error, RemoteProtocolError)
            direct = not isinstance(error, (PeerAbortedError, PeerLeftError))
            assert not direct or (name == to and error.peer == sender)
        elif session.running:  # the frame turned into a stale one: it counts as lost, and we say whom we wait for
            assert session.waiting_for[1]
        else:
            assert np.array_equal(session.total, ring_total(secrets))


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_a_reducer_that_tells_two_stories_is_caught_by_everybody(sharing: Sharing, opening: Opening) -> None:
    rng = random.Random(1)
    colony = sessions(5)
    for session, secret in zip(colony.values(), random_secrets(rng, 5, size=10), strict=True):
        session.start(spec(10, sharing, opening), secret)
    wire = Wire(colony, rng)
    wire.run(until=lambda: any(_is_total(each, by="p0", to="p3") for each in wire.flying))
    lie = next(i for i, each in enumerate(wire.flying) if _is_total(each, by="p0", to="p3"))
    sender, to, frame = wire.flying[lie]
    wire.flying[lie] = (sender, to, frame[:-1] + bytes([frame[-1] ^ 1]))
    errors = wire.run_past_faults()
    assert set(errors) == set(colony)
    assert all(not session.running for session in colony.values())
    for name, error in errors.items():  # who lied cannot be known, so nobody is named as the one who did
        assert isinstance(error, DisagreementError)
        assert not hasattr(error, "peer")
        differ = "p0, p1, p2, p4" if name == "p3" else "p3"
        assert str(error).startswith(f"{differ} and we have different totals of sum 1")
    # No key was shown, so nobody has opened anything.
    assert not any(isinstance(from_bytes(data, by).message, RevealKey) for by, _, data in wire.delivered)


def _is_total(flying: tuple[str, str, bytes], by: str, to: str) -> bool:
    return flying[:2] == (by, to) and isinstance(from_bytes(flying[2], by).message, Total)


@pytest.mark.parametrize("kind", [Confirm, RevealKey])
def test_nobody_has_a_total_before_all_digests_agree_and_all_seals_are_open(kind: type[Message]) -> None:
    rng = random.Random(2)
    colony = sessions(3)
    for session, secret in zip(colony.values(), random_secrets(rng, 3, size=4), strict=True):
        session.start(spec(4), secret)
    wire = Wire(colony, rng)
    held: list[tuple[str, str, bytes]] = []
    wire.collect()
    while wire.flying:
        wire.deliver_one()
        wire.collect()
        from_p0 = [
            each for each in wire.flying if isinstance(from_bytes(each[2], each[0]).message, kind) and each[0] == "p0"
        ]
        held += from_p0
        wire.flying = [each for each in wire.flying if each not in from_p0]
    for name in ("p1", "p2"):
        assert colony[name].waiting_for == (kind.__name__, frozenset({"p0"}))
        with pytest.raises(LocalProtocolError, match="its total is there when it is FINISHED"):
            _ = colony[name].total
    for sender, to, frame in held:
        colony[to].receive(sender, frame)
    wire.run()
    assert not any(session.running for session in colony.values())
