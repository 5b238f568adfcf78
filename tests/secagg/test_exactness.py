"""For any members, masking, opening and order of messages, all members get the exact total in the ring."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.errors import DisagreementError, LocalProtocolError, PeerAbortedError, PeerLeftError, RemoteProtocolError
from cgd.secagg import reduction
from cgd.secagg.codec import from_bytes
from cgd.secagg.messages import MASKINGS, OPENINGS, Confirm, RevealKey, Total
from support.wire import MEMBER_OPENINGS, Network, random_secrets, ring_total, sessions, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.secagg.messages import Masking, Message, Opening

member_counts = st.integers(3, 8)
sharings = st.sampled_from(MASKINGS)
openings = st.sampled_from(OPENINGS)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)


@pytest.fixture(autouse=True, scope="module")
def short_slices() -> Iterator[None]:
    """Cut vectors of a few elements into several slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "SLICE_ELEMENTS", 3)
        yield


@given(member_counts, sharings, openings, sizes, st.sampled_from([16, 32, 64]), seeds)
def test_total_is_exact_in_any_order_with_duplicates(
    count: int, masking: Masking, opening: Opening, size: int, ring_bits: int, seed: int
) -> None:
    rng = random.Random(seed)
    members = sessions(count)
    secrets = random_secrets(rng, count, size, ring_bits)
    expected = ring_total(secrets)
    aggregator = rng.choice(list(members))
    for session, secret in zip(members.values(), secrets, strict=True):
        session.start(spec(size, masking, opening, ring_bits, aggregator), secret.copy())
    Network(members, rng, duplicates=0.3).run()
    assert all(np.array_equal(session.total, expected) for session in members.values())


@given(member_counts, openings, sizes, seeds)
def test_both_maskings_give_the_same_bits(count: int, opening: Opening, size: int, seed: int) -> None:
    totals = []
    for masking in MASKINGS:
        rng = random.Random(seed)
        members = sessions(count)
        for session, secret in zip(members.values(), random_secrets(rng, count, size), strict=True):
            session.start(spec(size, masking, opening), secret)
        Network(members, rng).run()
        totals.append([session.total.tobytes() for session in members.values()])
    assert totals[0] == totals[1]
    assert len(set(totals[0])) == 1


@pytest.mark.slow
@given(member_counts, sharings, openings, seeds)
def test_several_sums_are_exact_with_stale_and_early_messages(
    count: int, masking: Masking, opening: Opening, seed: int
) -> None:
    """Members are ahead as far as the barrier permits, and duplicates of old frames arrive sums later."""
    rng = random.Random(seed)
    members = sessions(count)
    rounds = [random_secrets(rng, count, size=5) for _ in range(4)]
    totals: dict[str, list[bytes]] = {name: [] for name in members}
    waiting = {name: [each[i] for each in rounds] for i, name in enumerate(members)}
    network = Network(members, rng, duplicates=0.3)

    def start_some() -> None:
        for name, session in members.items():
            if session.running:
                continue
            if session.number > len(totals[name]):
                totals[name].append(session.total.tobytes())
            if waiting[name] and rng.random() < 0.5:
                session.start(spec(5, masking, opening), waiting[name].pop(0).copy())

    while any(len(done) < 4 for done in totals.values()):
        start_some()
        network.collect()
        if network.in_flight:
            network.deliver_one()
    network.run()
    expected = [ring_total(secrets).tobytes() for secrets in rounds]
    assert all(done == expected for done in totals.values())


@given(member_counts, sharings, openings, seeds, st.data())
def test_altered_header_gives_the_exact_total_or_an_error_that_names_the_sender(
    count: int, masking: Masking, opening: Opening, seed: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    members = sessions(count)
    secrets = random_secrets(rng, count, size=7)
    for session, secret in zip(members.values(), secrets, strict=True):
        session.start(spec(7, masking, opening), secret.copy())
    network = Network(members, rng)
    for _ in range(data.draw(st.integers(0, 30))):
        network.collect()
        if network.in_flight:
            network.deliver_one()
    network.collect()
    victim = data.draw(st.integers(0, len(network.in_flight) - 1)) if network.in_flight else None
    if victim is not None:
        sender, to, frame = network.in_flight[victim]
        altered = bytearray(frame)
        altered[data.draw(st.integers(0, 47))] ^= data.draw(st.integers(1, 255))
        network.in_flight[victim] = (sender, to, bytes(altered))
    errors = network.run_past_faults()
    for name, session in members.items():
        if name in errors:
            # The recipient of the altered frame accuses its sender; the others receive the aborts.
            error = errors[name]
            assert isinstance(error, RemoteProtocolError)
            direct = not isinstance(error, (PeerAbortedError, PeerLeftError))
            assert not direct or (name == to and error.peer == sender)
        elif session.running:  # the frame became a stale one: it counts as lost, and the missing peers are known
            assert session.waiting_for[1]
        else:
            assert np.array_equal(session.total, ring_total(secrets))


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_reducer_that_sends_different_totals_is_detected_by_all(masking: Masking, opening: Opening) -> None:
    rng = random.Random(1)
    members = sessions(5)
    for session, secret in zip(members.values(), random_secrets(rng, 5, size=10), strict=True):
        session.start(spec(10, masking, opening), secret)
    network = Network(members, rng)
    network.run(until=lambda: any(_is_total(each, by="p0", to="p3") for each in network.in_flight))
    altered = next(i for i, each in enumerate(network.in_flight) if _is_total(each, by="p0", to="p3"))
    sender, to, frame = network.in_flight[altered]
    network.in_flight[altered] = (sender, to, frame[:-1] + bytes([frame[-1] ^ 1]))
    errors = network.run_past_faults()
    assert set(errors) == set(members)
    assert all(not session.running for session in members.values())
    for name, error in errors.items():  # the dishonest member cannot be known, so none is named
        assert isinstance(error, DisagreementError)
        assert not hasattr(error, "peer")
        others = "p0, p1, p2, p4" if name == "p3" else "p3"
        assert str(error).startswith(f"the masked total of sum 1 differs between this member and {others}: ")
    # No key was revealed, so no member knows a total.
    assert not any(isinstance(from_bytes(data, by).message, RevealKey) for by, _, data in network.delivered)


def _is_total(sent: tuple[str, str, bytes], by: str, to: str) -> bool:
    return sent[:2] == (by, to) and isinstance(from_bytes(sent[2], by).message, Total)


@pytest.mark.parametrize("kind", [Confirm, RevealKey])
def test_no_member_has_a_total_before_all_digests_and_keys_are_received(kind: type[Message]) -> None:
    rng = random.Random(2)
    members = sessions(3)
    for session, secret in zip(members.values(), random_secrets(rng, 3, size=4), strict=True):
        session.start(spec(4), secret)
    network = Network(members, rng)
    withheld: list[tuple[str, str, bytes]] = []
    network.collect()
    while network.in_flight:
        network.deliver_one()
        network.collect()
        from_p0 = [
            each
            for each in network.in_flight
            if isinstance(from_bytes(each[2], each[0]).message, kind) and each[0] == "p0"
        ]
        withheld += from_p0
        network.in_flight = [each for each in network.in_flight if each not in from_p0]
    for name in ("p1", "p2"):
        assert members[name].waiting_for == (kind.__name__, frozenset({"p0"}))
        with pytest.raises(LocalProtocolError, match="it has a total when it is FINISHED"):
            _ = members[name].total
    for sender, to, frame in withheld:
        members[to].receive(sender, frame)
    network.run()
    assert not any(session.running for session in members.values())
