"""What breaks the rules is told, names the peer, and leaves nobody waiting."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cgd.errors import (
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
from support.wire import Wire, names, random_secrets, ring_total, sessions, spec

SESSION = b"s" * 16


def kind_of(frame: bytes) -> type[Message]:
    return type(from_bytes(frame, "anyone").message)


def started(count: int = 3, size: int = 4) -> dict[str, Session]:
    colony = sessions(count)
    for session, secret in zip(colony.values(), random_secrets(random.Random(0), count, size), strict=True):
        session.start(spec(size), secret)
    return colony


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_members_are_refused(count: int) -> None:
    with pytest.raises(MembershipError, match="at least 3"):
        Session("p0", names(count), SESSION)
    with pytest.raises(MembershipError, match="at least 3"):
        SecureSum("p0", names(count), 1)


def test_members_must_be_members() -> None:
    with pytest.raises(MembershipError, match="named twice"):
        Session("a", ["a", "b", "b"], SESSION)
    with pytest.raises(MembershipError, match="x is not a member"):
        Session("x", ["a", "b", "c"], SESSION)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": (5,)}, r"shape \(5,\) instead of \(4,\)"),
        ({"fraction_bits": 24}, "fraction_bits 24 instead of 20"),
        ({"ring_bits": 64}, "ring_bits 64 instead of 32"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"sharing": "uniform"}, "sharing 'uniform'"),
        ({"opening": "aggregator", "aggregator": "p0"}, "opening 'aggregator'"),
    ],
)
def test_other_settings_are_told_on_every_side_before_anything_is_shared(change: dict[str, object], says: str) -> None:
    colony = sessions(3)
    odd = replace(spec(4), **change)  # type: ignore[arg-type]
    for name, session in colony.items():
        mine = odd if name == "p1" else spec(4)
        dtype = f"<u{mine.ring_bits // 8}"
        session.start(mine, np.zeros(mine.shape, dtype=dtype))
    wire = Wire(colony, random.Random(0))
    errors = wire.run_past_faults()
    assert set(errors) == set(colony)
    for name, error in errors.items():  # everybody names the same one, that one too
        assert isinstance(error, SettingsError)
        assert error.peer == "p1"
        assert ("this member sums" in str(error)) == (name == "p1")
        with pytest.raises(SettingsError, match=says):
            raise error
    assert {kind_of(frame) for _, _, frame in wire.delivered} == {Ready, Abort}


def test_without_a_majority_everybody_still_names_the_same_ones() -> None:
    colony = sessions(3)
    for session, size in zip(colony.values(), (4, 5, 6), strict=True):
        session.start(spec(size), np.zeros(size, dtype="<u4"))
    errors = Wire(colony, random.Random(0)).run_past_faults()
    for error in errors.values():
        assert isinstance(error, SettingsError)
        assert error.peer == "p1"
        assert "(so do p2)" in str(error)


def test_after_a_refused_sum_the_next_one_works() -> None:
    colony = sessions(3)
    rng = random.Random(0)
    colony["p1"].refuse(Reason.RANGE)
    wire = Wire(colony, rng)
    for name in ("p0", "p2"):
        colony[name].start(spec(4), np.zeros(4, dtype="<u4"))
    wire.collect()
    for name in ("p0", "p2"):
        with pytest.raises(PeerAbortedError, match="p1: gave up sum 1: one of its values is not finite"):
            while True:
                wire.flying.sort(key=lambda each: each[:2] != ("p1", name))
                sender, to, frame = wire.flying.pop(0)
                colony[to].receive(sender, frame)
    secrets = random_secrets(rng, 3, size=4)
    for session, secret in zip(colony.values(), secrets, strict=True):
        session.start(spec(4), secret.copy())
    wire.run()
    assert all(np.array_equal(session.total, ring_total(secrets)) for session in colony.values())


def test_an_abort_that_comes_early_waits_for_its_sum() -> None:
    colony = sessions(3)
    colony["p1"].refuse(Reason.RANGE)
    to, frame = next(out for out in iter(colony["p1"].next_outgoing, None) if out[0] == "p0")
    colony[to].receive("p1", frame)
    with pytest.raises(PeerAbortedError, match="p1: gave up sum 1"):
        colony["p0"].start(spec(4), np.zeros(4, dtype="<u4"))


def test_a_fault_after_our_key_was_shown_ends_the_session_for_all() -> None:
    colony = started()
    wire = Wire(colony, random.Random(0))
    wire.run(until=lambda: any(kind_of(frame) is RevealKey and sender == "p0" for sender, _, frame in wire.flying))
    with pytest.raises(FrameError, match="p2: sent .* truncated"):
        colony["p0"].receive("p2", b"CGD")
    with pytest.raises(LocalProtocolError, match=r"this session has ended \(p2: sent"):
        colony["p0"].start(spec(4), np.zeros(4, dtype="<u4"))
    wire.flying.clear()
    wire.collect()
    assert {(sender, to) for sender, to, _ in wire.flying if sender == "p0"} == {("p0", "p1"), ("p0", "p2")}
    for sender, to, frame in wire.flying:
        if sender == "p0":
            with pytest.raises(PeerLeftError, match="p0: has left the session before sum 1"):
                colony[to].receive(sender, frame)


def test_whoever_leaves_after_a_sum_does_not_spoil_it() -> None:
    colony = started()
    wire = Wire(colony, random.Random(3))
    wire.run(until=lambda: not all(session.running for session in colony.values()))
    first = next(session for session in colony.values() if not session.running)
    first.end("done")
    wire.run()
    assert all(not session.running and session.total.any() for session in colony.values())
    other = next(session for session in colony.values() if session is not first)
    with pytest.raises(PeerLeftError, match=f"{first.me}: has left the session before sum 2"):
        other.start(spec(4), np.zeros(4, dtype="<u4"))


@pytest.mark.parametrize("kind", [Share, Total])
def test_what_comes_too_soon_is_an_error(kind: type[Share] | type[Total]) -> None:
    colony = sessions(3)
    frame = to_bytes(Frame(SESSION, 1, kind(0, bytes(16))))
    with pytest.raises(RemoteProtocolError, match=f"p1: sent {kind.__name__} of sum 1 while we are at 0: too soon"):
        colony["p0"].receive("p1", frame)
    alone = SecureSum("p0", names(3), 1)
    with pytest.raises(RemoteProtocolError, match=f"p1: sent {kind.__name__} of sum 1 while we are IDLE: too soon"):
        alone.receive("p1", kind(0, bytes(16)))
    with pytest.raises(RemoteProtocolError, match="p1: sent"):  # the sum that was spoilt does not begin
        alone.start(spec(4), np.zeros(4, dtype="<u4"))


def test_whoever_is_further_ahead_has_given_up_the_sums_between() -> None:
    colony = sessions(3)
    colony["p0"].receive("p1", to_bytes(Frame(SESSION, 3, Ready(spec(4), bytes(32)))))
    for number in (1, 2):
        with pytest.raises(PeerAbortedError, match=f"p1: gave up sum {number}: it is at a later sum already"):
            colony["p0"].start(spec(4), np.zeros(4, dtype="<u4"))
    colony["p0"].start(spec(4), np.zeros(4, dtype="<u4"))
    assert colony["p0"].waiting_for == ("Ready", frozenset({"p2"}))


@pytest.mark.parametrize("seed", range(30))
def test_a_member_that_refuses_and_goes_on_spoils_nothing(seed: int) -> None:
    """It passes no barrier when it refuses, so it can be two sums ahead of a peer that waits for a last word."""
    rng = random.Random(seed)
    colony = sessions(4)
    secrets = [random_secrets(rng, 4, size=6) for _ in range(2)]
    wire = Wire(colony, rng)
    for session, secret in zip(colony.values(), secrets[0], strict=True):
        session.start(spec(6), secret.copy())
    wire.run(until=lambda: not colony["p1"].running)
    for _ in range(2):
        colony["p1"].refuse(Reason.RANGE)
    colony["p1"].start(spec(6), secrets[1][1].copy())
    assert wire.run_past_faults() == {}
    for name, secret in zip(colony, secrets[1], strict=True):
        assert name == "p1" or np.array_equal(colony[name].total, ring_total(secrets[0]))
        while name != "p1":
            try:
                colony[name].start(spec(6), secret.copy())
                break
            except PeerAbortedError as error:
                assert error.peer == "p1"
    assert wire.run_past_faults() == {}
    assert all(np.array_equal(session.total, ring_total(secrets[1])) for session in colony.values())


def test_whoever_did_not_finish_what_we_did_is_told() -> None:
    colony = started()
    wire = Wire(colony, random.Random(0))
    wire.run()
    colony["p1"].receive("p0", to_bytes(Frame(SESSION, 0, Leave())))
    with pytest.raises(PeerLeftError, match="it did not finish sum 1, which we did"):
        colony["p1"].start(spec(4), np.zeros(4, dtype="<u4"))


def test_another_session_and_strangers_are_refused() -> None:
    colony = started()
    with pytest.raises(FrameError, match="another session"):
        colony["p0"].receive("p1", to_bytes(Frame(b"t" * 16, 1, Ready(spec(4), bytes(32)))))
    with pytest.raises(RemoteProtocolError, match="mallory: is not a peer"):
        started()["p0"].receive("mallory", to_bytes(Frame(SESSION, 1, Ready(spec(4), bytes(32)))))


def test_vectors_of_the_wrong_length_are_refused() -> None:
    colony = started()
    wire = Wire(colony, random.Random(0))
    wire.run(until=lambda: any(kind_of(frame) is Subtotal and to == "p0" for _, to, frame in wire.flying))
    sender, to, frame = next(each for each in wire.flying if each[1] == "p0" and kind_of(each[2]) is Subtotal)
    longer = frame[:40] + (len(frame) - 48 + 4).to_bytes(8, "little") + frame[48:] + bytes(4)
    with pytest.raises(RemoteProtocolError, match=f"{sender}: sent a Subtotal of 12 bytes from element 0 on, not 8"):
        colony[to].receive(sender, longer)


def test_only_a_reducer_gets_subtotals_and_gives_totals() -> None:
    for kind, frame_of, says in ((3, "p1", "we add up no part"), (4, "p1", "it adds up no part")):
        colony = sessions(3)
        for session in colony.values():
            session.start(spec(4, opening="aggregator"), np.zeros(4, dtype="<u4"))
        wire = Wire(colony, random.Random(0))
        flying = wire.flying
        wire.run(until=lambda flying=flying: all(frame[4] > 2 for _, _, frame in flying))  # type: ignore[misc]
        body = bytes(16)
        header = bytearray(to_bytes(Frame(SESSION, 1, Total(0, body))))
        header[4] = kind
        with pytest.raises(RemoteProtocolError, match=says):
            colony["p2"].receive(frame_of, bytes(header))


def test_calls_out_of_order_are_told() -> None:
    session = sessions(3)["p0"]
    with pytest.raises(LocalProtocolError, match="no sum was started"):
        _ = session.total
    session.start(spec(4), np.zeros(4, dtype="<u4"))
    with pytest.raises(LocalProtocolError, match="still running"):
        session.start(spec(4), np.zeros(4, dtype="<u4"))
    with pytest.raises(LocalProtocolError, match="READYING; its total is there when"):
        _ = session.total


def test_a_secret_that_does_not_fit_the_settings_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"the secret is uint32\[3\], the settings say uint32\[4\]"):
        sessions(3)["p0"].start(spec(4), np.zeros(3, dtype="<u4"))
    with pytest.raises(InputError, match="empty"):
        sessions(3)["p0"].start(spec(0), np.zeros(0, dtype="<u4"))
    with pytest.raises(MembershipError, match="aggregator 'x' is not a member"):
        sessions(3)["p0"].start(spec(4, opening="aggregator", aggregator="x"), np.zeros(4, dtype="<u4"))
    for keys in (None, {}, {"p1": bytes(16)}):
        with pytest.raises(LocalProtocolError, match="needs a pair key with every peer"):
            Session("p0", names(3), SESSION, keys).start(spec(4), np.zeros(4, dtype="<u4"))


def test_the_tables_are_whole() -> None:
    ends = {State.FINISHED, State.FAILED}
    assert set(EXPECTED) == set(State) - ends
    assert {state for state, _ in TRANSITIONS} == set(State) - ends
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert all((state, Event.FAULT) in TRANSITIONS for state in EXPECTED)
    reached = {State.IDLE} | set(TRANSITIONS.values())
    assert reached == set(State)
