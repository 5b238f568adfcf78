"""Protocol violations are reported, name the peer, and leave no member waiting."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from cgd.errors import (
    CGDError,
    FrameError,
    InputError,
    LocalProtocolError,
    MembershipError,
    PeerAbortedError,
    PeerLeftError,
    RemoteProtocolError,
    SettingsError,
)
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.messages import Abort, Leave, Message, Ready, Reason, RevealKey, Share, Subtotal, Total
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.session import Session
from cgd.secagg.states import EXPECTED, TRANSITIONS, Event, State
from support.member_simulation import MemberSimulation
from support.wire import Network, names, random_secrets, ring_total, sessions, spec

SESSION = b"s" * 16


def message_type(frame: bytes) -> type[Message]:
    return type(from_bytes(frame, "anyone").message)


def started(count: int = 3, size: int = 4) -> dict[str, Session]:
    members = sessions(count)
    for session, secret in zip(members.values(), random_secrets(random.Random(0), count, size), strict=True):
        session.start(spec(size), secret)
    return members


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_members_are_rejected(count: int) -> None:
    with pytest.raises(MembershipError, match="at least 3"):
        Session("p0", names(count), SESSION)
    with pytest.raises(MembershipError, match="at least 3"):
        SecureSum("p0", names(count), 1)


def test_member_names_must_be_unique_and_include_this_member() -> None:
    with pytest.raises(MembershipError, match="named twice"):
        Session("a", ["a", "b", "b"], SESSION)
    with pytest.raises(MembershipError, match="x is not a member"):
        Session("x", ["a", "b", "c"], SESSION)


@pytest.mark.parametrize(
    ("change", "error_text"),
    [
        ({"shape": (5,)}, r"shape \(5,\) instead of \(4,\)"),
        ({"fraction_bits": 24}, "fraction_bits 24 instead of 20"),
        ({"ring_bits": 64}, "ring_bits 64 instead of 32"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"masking": "uniform"}, "masking 'uniform'"),
        ({"opening": "aggregator", "aggregator": "p0"}, "opening 'aggregator'"),
    ],
)
def test_all_members_report_different_settings_before_anything_is_opened(
    change: dict[str, object], error_text: str
) -> None:
    members = sessions(3)
    deviating = replace(spec(4), **change)  # type: ignore[arg-type]
    for name, session in members.items():
        mine = deviating if name == "p1" else spec(4)
        dtype = f"<u{mine.ring_bits // 8}"
        session.start(mine, np.zeros(mine.shape, dtype=dtype))
    network = Network(members, random.Random(0))
    errors = network.run_past_faults()
    assert set(errors) == set(members)
    for name, error in errors.items():  # all members name the same one, including itself
        assert isinstance(error, SettingsError)
        assert error.peer == "p1"
        assert ("this member's settings" in str(error)) == (name == "p1")
        with pytest.raises(SettingsError, match=error_text):
            raise error
    assert {message_type(frame) for _, _, frame in network.delivered} == {Ready, Subtotal, Abort}


def test_all_members_name_the_same_member_without_a_majority() -> None:
    members = sessions(3)
    for session, size in zip(members.values(), (4, 5, 6), strict=True):
        session.start(spec(size), np.zeros(size, dtype="<u4"))
    errors = Network(members, random.Random(0)).run_past_faults()
    for error in errors.values():
        assert isinstance(error, SettingsError)
        assert error.peer == "p1"
        assert "(so do those of p2)" in str(error)


def test_next_sum_works_after_a_refused_one() -> None:
    members = sessions(3)
    rng = random.Random(0)
    members["p1"].refuse(Reason.RANGE)
    network = Network(members, rng)
    for name in ("p0", "p2"):
        members[name].start(spec(4), np.zeros(4, dtype="<u4"))
    network.collect()
    for name in ("p0", "p2"):
        with pytest.raises(PeerAbortedError, match="p1: aborted sum 1: one of its values is not finite"):
            while True:
                network.in_flight.sort(key=lambda each: each[:2] != ("p1", name))
                sender, to, frame = network.in_flight.pop(0)
                members[to].receive(sender, frame)
    secrets = random_secrets(rng, 3, size=4)
    for session, secret in zip(members.values(), secrets, strict=True):
        session.start(spec(4), secret.copy())
    network.run()
    assert all(np.array_equal(session.total, ring_total(secrets)) for session in members.values())


def test_early_abort_is_kept_for_its_sum() -> None:
    members = sessions(3)
    members["p1"].refuse(Reason.RANGE)
    to, frame = next(out for out in iter(members["p1"].next_outgoing, None) if out[0] == "p0")
    members[to].receive("p1", frame)
    with pytest.raises(PeerAbortedError, match="p1: aborted sum 1"):
        members["p0"].start(spec(4), np.zeros(4, dtype="<u4"))


def test_fault_after_our_key_was_revealed_ends_the_session_for_all() -> None:
    members = started()
    network = Network(members, random.Random(0))
    network.run(
        until=lambda: any(message_type(frame) is RevealKey and sender == "p0" for sender, _, frame in network.in_flight)
    )
    with pytest.raises(FrameError, match="p2: sent .* truncated"):
        members["p0"].receive("p2", b"CGD")
    with pytest.raises(LocalProtocolError, match=r"this session has ended \(p2: sent"):
        members["p0"].start(spec(4), np.zeros(4, dtype="<u4"))
    network.in_flight.clear()
    network.collect()
    assert {(sender, to) for sender, to, _ in network.in_flight if sender == "p0"} == {("p0", "p1"), ("p0", "p2")}
    for sender, to, frame in network.in_flight:
        if sender == "p0":
            with pytest.raises(PeerLeftError, match="p0: left the session before sum 1"):
                members[to].receive(sender, frame)


def test_leaving_after_a_sum_does_not_affect_it() -> None:
    members = started()
    network = Network(members, random.Random(3))
    network.run(until=lambda: not all(session.running for session in members.values()))
    first = next(session for session in members.values() if not session.running)
    first.end("done")
    network.run()
    assert all(not session.running and session.total.any() for session in members.values())
    other = next(session for session in members.values() if session is not first)
    with pytest.raises(PeerLeftError, match=f"{first.me}: left the session before sum 2"):
        other.start(spec(4), np.zeros(4, dtype="<u4"))


@pytest.mark.parametrize("kind", [Share, Total])
def test_early_message_is_rejected(kind: type[Share] | type[Total]) -> None:
    members = sessions(3)
    frame = to_bytes(Frame(SESSION, 1, kind(0, bytes(16))))
    with pytest.raises(
        RemoteProtocolError, match=f"p1: sent {kind.__name__} of sum 1 too early: this member is at sum 0"
    ):
        members["p0"].receive("p1", frame)
    alone = SecureSum("p0", names(3), 1)
    with pytest.raises(RemoteProtocolError, match=f"p1: sent {kind.__name__} of sum 1 too early: this member is IDLE"):
        alone.receive("p1", kind(0, bytes(16)))
    with pytest.raises(RemoteProtocolError, match="p1: sent"):  # the failed sum does not start
        alone.start(spec(4), np.zeros(4, dtype="<u4"))


def test_peer_further_ahead_has_aborted_the_sums_between() -> None:
    members = sessions(3)
    members["p0"].receive("p1", to_bytes(Frame(SESSION, 3, Ready(spec(4), bytes(32)))))
    for number in (1, 2):
        with pytest.raises(PeerAbortedError, match=f"p1: aborted sum {number}: it is already at a later sum"):
            members["p0"].start(spec(4), np.zeros(4, dtype="<u4"))
    members["p0"].start(spec(4), np.zeros(4, dtype="<u4"))
    assert members["p0"].waiting_for == ("Ready", frozenset({"p2"}))


@pytest.mark.parametrize("seed", range(30))
def test_member_that_refuses_sums_and_continues_does_not_affect_others(seed: int) -> None:
    """A refused sum has no barrier, so it can be two sums ahead of a peer that waits for its last message."""
    rng = random.Random(seed)
    members = sessions(4)
    secrets = [random_secrets(rng, 4, size=6) for _ in range(2)]
    network = Network(members, rng)
    for session, secret in zip(members.values(), secrets[0], strict=True):
        session.start(spec(6), secret.copy())
    network.run(until=lambda: not members["p1"].running)
    for _ in range(2):
        members["p1"].refuse(Reason.RANGE)
    members["p1"].start(spec(6), secrets[1][1].copy())
    assert network.run_past_faults() == {}
    for name, secret in zip(members, secrets[1], strict=True):
        assert name == "p1" or np.array_equal(members[name].total, ring_total(secrets[0]))
        while name != "p1":
            try:
                members[name].start(spec(6), secret.copy())
                break
            except PeerAbortedError as error:
                assert error.peer == "p1"
    assert network.run_past_faults() == {}
    assert all(np.array_equal(session.total, ring_total(secrets[1])) for session in members.values())


def test_peer_that_left_before_our_last_sum_is_named() -> None:
    members = started()
    network = Network(members, random.Random(0))
    network.run()
    members["p1"].receive("p0", to_bytes(Frame(SESSION, 0, Leave())))
    with pytest.raises(PeerLeftError, match="it did not finish sum 1, which this member did"):
        members["p1"].start(spec(4), np.zeros(4, dtype="<u4"))


def test_frames_of_another_session_and_unknown_senders_are_rejected() -> None:
    members = started()
    with pytest.raises(FrameError, match="another session"):
        members["p0"].receive("p1", to_bytes(Frame(b"t" * 16, 1, Ready(spec(4), bytes(32)))))
    with pytest.raises(RemoteProtocolError, match="mallory: is not a peer"):
        started()["p0"].receive("mallory", to_bytes(Frame(SESSION, 1, Ready(spec(4), bytes(32)))))


def test_vector_of_wrong_length_is_rejected() -> None:
    members = started()
    ready, subtotal = (bytes(frame) for to, frame in iter(members["p1"].next_outgoing, None) if to == "p0")
    longer = subtotal[:40] + (len(subtotal) - 48 + 4).to_bytes(8, "little") + subtotal[48:] + bytes(4)
    members["p0"].receive("p1", ready)
    with pytest.raises(RemoteProtocolError, match="p1: sent a Subtotal of 12 bytes from element 0 on, not 8"):
        members["p0"].receive("p1", longer)


def test_only_a_reducer_receives_subtotals_and_sends_totals() -> None:
    for kind, sender, error_text in ((3, "p1", "this member, which adds no part"), (4, "p1", "it adds no part")):
        members = sessions(3)
        for session in members.values():
            session.start(spec(4, opening="aggregator"), np.zeros(4, dtype="<u4"))
        network = Network(members, random.Random(0))
        in_flight = network.in_flight
        network.run(until=lambda in_flight=in_flight: all(frame[4] > 2 for _, _, frame in in_flight))  # type: ignore[misc]
        body = bytes(16)
        header = bytearray(to_bytes(Frame(SESSION, 1, Total(0, body))))
        header[4] = kind
        with pytest.raises(RemoteProtocolError, match=error_text):
            members["p2"].receive(sender, bytes(header))


def test_calls_out_of_order_are_rejected() -> None:
    session = sessions(3)["p0"]
    with pytest.raises(LocalProtocolError, match="no sum was started"):
        _ = session.total
    session.start(spec(4), np.zeros(4, dtype="<u4"))
    with pytest.raises(LocalProtocolError, match="still running"):
        session.start(spec(4), np.zeros(4, dtype="<u4"))
    with pytest.raises(LocalProtocolError, match="PREPARING; it has a total when"):
        _ = session.total


def test_secret_that_does_not_match_the_settings_is_rejected() -> None:
    with pytest.raises(LocalProtocolError, match=r"the secret is uint32\[3\], the settings require uint32\[4\]"):
        sessions(3)["p0"].start(spec(4), np.zeros(3, dtype="<u4"))
    with pytest.raises(InputError, match="empty"):
        sessions(3)["p0"].start(spec(0), np.zeros(0, dtype="<u4"))
    with pytest.raises(MembershipError, match="aggregator 'x' is not a member"):
        sessions(3)["p0"].start(spec(4, opening="aggregator", aggregator="x"), np.zeros(4, dtype="<u4"))
    for keys in (None, {}, {"p1": bytes(16)}):
        with pytest.raises(LocalProtocolError, match="needs a pair key with every peer"):
            Session("p0", names(3), SESSION, keys).start(spec(4), np.zeros(4, dtype="<u4"))


def test_state_tables_are_complete() -> None:
    ends = {State.FINISHED, State.FAILED}
    assert set(EXPECTED) == set(State) - ends
    assert {state for state, _ in TRANSITIONS} == set(State) - ends
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert all((state, Event.FAULT) in TRANSITIONS for state in EXPECTED)
    reached = {State.IDLE} | set(TRANSITIONS.values())
    assert reached == set(State)


def test_failed_sum_is_announced_once_whatever_a_peer_sends_afterwards() -> None:
    """c does not read its frames, so an abort for every malformed frame would fill the queue without bound."""
    simulation = MemberSimulation.idle()
    simulation.exchange()
    pending = simulation.start_all()
    membership, session = simulation.programs["a"].membership, simulation.programs["a"].group.session
    assert session is not None
    malformed = bytearray(to_bytes(Frame(session.session, 1, RevealKey(bytes(16)))))
    malformed[40] = 1  # the length of the body
    for _ in range(100):
        with suppress(CGDError):
            membership.receive("c", bytes(malformed))
        while membership.next_outgoing(blocked={"c"}) is not None:
            pass
    assert pending["a"].fault is not None
    assert len(session._outbox) <= 2
