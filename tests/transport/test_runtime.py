"""No frame of a peer stops the runtime of a participant."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from cgd.errors import ClosedError, InputError, LocalProtocolError, MembershipError
from cgd.secagg.codec import Frame, hello_content, to_bytes
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.membership import Membership
from cgd.secagg.messages import Hello
from cgd.secagg.statements import slot_of, statement
from cgd.transport import runtime as runtime_module
from cgd.transport import state_log
from cgd.transport.base import PeerStatus
from cgd.transport.driver import SessionDriver
from cgd.transport.group_driver import GroupDriver
from cgd.transport.runtime import FederationRuntime
from cgd.transport.tap import TappedReconnectingTransport
from support.identities import identity, public_keys
from support.transports import MEMBERS, connected, eventually
from support.wire import sessions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cgd.secagg.messages import Buffer
    from cgd.transport.zeromq import ZeroMQTransport
    from support.transports import ZeroMQNetwork

TURNS = 5
SPEC = FederationSpec("trial", 1, MEMBERS, {"everyone": MEMBERS}, {"training": "x"}, "1.0", public_keys(MEMBERS))


class ScriptedTransport:
    """A transport that delivers the given frames and drops what is sent."""

    me = "a"
    members: tuple[str, ...] = MEMBERS

    def __init__(self, frames: list[tuple[str, bytes]]) -> None:
        self.frames = deque(frames)
        self.closed = False
        self._woken = threading.Event()

    def receive(self, timeout: float | None) -> tuple[str, bytes] | None:
        if self.frames:
            return self.frames.popleft()
        self._woken.wait(timeout)
        self._woken.clear()
        return None

    def send(self, to: str, frame: Buffer) -> bool:
        return True

    def wakeup(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self.closed = True

    def status(self) -> dict[str, Any]:
        return {}

    def update(self, contacts: Any) -> None:
        """Do nothing."""

    def backlog(self, *, connected: bool) -> int:
        return 0


def test_unexpected_error_in_the_handling_of_a_frame_is_logged_and_the_frame_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    membership, handled = Membership("a", identity("a"), SPEC), threading.Event()

    def receive(sender: str, data: bytes) -> None:
        if data == b"the second":
            handled.set()
        raise KeyError("an unexpected error")

    monkeypatch.setattr(membership, "receive", receive)
    transport = ScriptedTransport([("b", b"the first"), ("c", b"the second")])
    with caplog.at_level(logging.WARNING, "cgd.transport"):
        runtime = FederationRuntime(transport, membership)
        assert handled.wait(60)
        runtime.close(done=False)
    assert "KeyError: 'an unexpected error'" in caplog.text
    assert "a message that cgd failed on from b" in caplog.text
    assert "a message that cgd failed on from c" in caplog.text


def test_invalid_frame_is_dropped_with_the_name_of_its_sender(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FederationRuntime(ScriptedTransport([("b", b"not a frame")]), Membership("a", identity("a"), SPEC))
    eventually(lambda: "refused a frame from b" in caplog.text)
    assert is_running(runtime)
    runtime.close(done=False)


def test_missing_members_are_not_logged_when_our_program_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cgd")
    monkeypatch.setattr(state_log, "SETTLE_SECONDS", 0.0)
    transport, reports = ScriptedTransport([]), list[dict[str, PeerStatus]]()

    def status() -> dict[str, PeerStatus]:
        reports.append({"b": PeerStatus(False, None, f"note {len(reports)}")})
        return reports[-1]

    monkeypatch.setattr(transport, "status", status)
    runtime = FederationRuntime(transport, Membership("a", identity("a"), SPEC))
    eventually(lambda: "b is missing: note" in caplog.text)
    runtime.announce_done()
    for _ in range(2):  # the first time, a report may have been made before
        caplog.clear()
        reports.clear()
        eventually(lambda: len(reports) > 2)
    assert "is missing" not in caplog.text
    runtime.close(done=False)


# Transports that fail, or are full.


class FullTransport(ScriptedTransport):
    """A transport whose queue to b accepts every third frame, and in which c is not a member any more."""

    members = ("a", "b")

    def __init__(self) -> None:
        super().__init__([])
        self.attempts: list[bytes] = []
        self.sent: list[tuple[str, bytes]] = []

    def send(self, to: str, frame: Buffer) -> bool:
        self.attempts.append(bytes(frame))
        if len(self.attempts) % 3:
            return False
        self.sent.append((to, bytes(frame)))
        return True


def test_frame_for_a_full_queue_is_sent_later_and_for_a_removed_peer_never() -> None:
    transport = FullTransport()
    runtime = FederationRuntime(transport, Membership("a", identity("a"), SPEC))
    eventually(lambda: transport.sent)
    runtime.close(done=False)
    assert transport.attempts[:3] == [transport.sent[0][1]] * 3  # the same frame until it is accepted
    assert {to for to, _ in transport.sent} == {"b"}
    assert runtime.traffic.frames_sent == len(transport.sent)


class FailingTransport(ScriptedTransport):
    """A transport that raises an error instead of receiving."""

    def __init__(self, error: Exception) -> None:
        super().__init__([])
        self.error = error

    def receive(self, timeout: float | None) -> tuple[str, bytes] | None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RuntimeError("a fault"), LocalProtocolError, "the runtime of a stopped: a fault"),
        (InputError("the trace cannot be written"), InputError, "^the trace cannot be written$"),
    ],
)
def test_error_of_the_transport_is_raised_where_the_program_waits(
    error: Exception, raised: type[Exception], message: str
) -> None:
    runtime = FederationRuntime(FailingTransport(error), Membership("a", identity("a"), SPEC))
    with pytest.raises(raised, match=message), runtime.locked():
        runtime.wait("everyone", lambda: False)
    runtime.close(done=True)  # does not wait for the other members


def test_closed_runtime_refuses_to_wait_and_can_be_closed_again() -> None:
    transport = ScriptedTransport([])
    runtime = FederationRuntime(transport, Membership("a", identity("a"), SPEC))
    runtime.close(done=False)
    runtime.close(done=True)
    assert transport.closed
    with pytest.raises(ClosedError, match="the connection of a is closed; join again"), runtime.locked():
        runtime.wait("everyone", lambda: False)


def test_member_whose_peers_do_not_finish_waits_no_longer_than_told() -> None:
    transport = ScriptedTransport([])
    runtime = FederationRuntime(transport, Membership("a", identity("a"), SPEC), linger=0.0)
    runtime.close(done=True)
    assert transport.closed


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(InputError, match=f"timeout is {timeout}; it is a number of seconds above 0, or None"):
        FederationRuntime(ScriptedTransport([]), Membership("a", identity("a"), SPEC), timeout)


def test_transport_of_another_member_is_rejected() -> None:
    with pytest.raises(MembershipError, match="the transport belongs to a, the session to p0"):
        SessionDriver(ScriptedTransport([]), sessions(3)["p0"])


def test_second_sum_of_a_member_at_the_same_time_is_rejected() -> None:
    runtime = FederationRuntime(ScriptedTransport([]), Membership("a", identity("a"), SPEC))
    driver = GroupDriver(runtime, "everyone")
    with driver.exclusive(), pytest.raises(LocalProtocolError, match="a is in a sum already"), driver.exclusive():
        raise AssertionError("two sums were admitted")
    with driver.exclusive():
        assert driver.number == 0
    runtime.close(done=False)


# Frames of a listed peer, or of a process with its key.


class CountingMembership(Membership):
    """A membership that counts the frames that it has processed, by sender, and the runtime's turns."""

    def __init__(self) -> None:
        super().__init__("a", identity("a"), SPEC)
        self.processed: Counter[str] = Counter()
        self.turns = 0

    def receive(self, sender: str, data: Buffer) -> None:
        try:
            super().receive(sender, data)
        finally:
            self.processed[sender] += 1

    def next_outgoing(self, blocked: Collection[str] = ()) -> tuple[str, Buffer] | None:
        outgoing = super().next_outgoing(blocked)
        self.turns += outgoing is None
        return outgoing


@contextmanager
def running(network: ZeroMQNetwork) -> Iterator[tuple[FederationRuntime, ZeroMQTransport, ZeroMQTransport]]:
    """Run participant a; the test sends the frames of b and c."""
    runtime = FederationRuntime(network.open("a"), CountingMembership())
    b, c = network.open("b"), network.open("c")
    try:
        eventually(lambda: connected(b, "a") and connected(c, "a"))
        yield runtime, b, c
    finally:
        runtime.close(done=False)


def hello(name: str, ephemeral: bytes) -> bytes:
    message = Hello(ephemeral, bytes(32), "1.0", "trial", 1, (("training", "x"),))
    signed = statement("hello", slot_of(ephemeral, "hello", message.epoch), sha256(hello_content(message)).digest())
    return to_bytes(Frame(bytes(16), 0, replace(message, signature=identity(name).sign(signed))))


def has_hello(runtime: FederationRuntime, peer: str) -> bool:
    return runtime.membership.hello(peer) is not None


def is_running(runtime: FederationRuntime) -> bool:
    with runtime.locked():
        return runtime._thread.is_alive()


def wait_until_processed(runtime: FederationRuntime, sender: str, frames: int) -> None:
    """Wait until these frames are processed, and for some turns of the runtime after them."""
    membership = runtime.membership
    assert isinstance(membership, CountingMembership)
    eventually(lambda: membership.processed[sender] == frames)
    turns = membership.turns + TURNS
    eventually(lambda: membership.turns >= turns)


@pytest.mark.slow
def test_backlog_of_invalid_frames_does_not_stop_the_runtime(
    network: ZeroMQNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(runtime_module, "MAX_FRAMES_PER_TURN", 1)  # with 32, it would take 32,000 frames
    with running(network) as (runtime, b, c):
        with runtime.locked():
            for _ in range(2000):
                assert b.send("a", b"invalid")
            eventually(lambda: len(network.transports[0]._inbox) > 1900)
        c.send("a", hello("c", os.urandom(32)))
        eventually(lambda: has_hello(runtime, "c"), 3)
        assert is_running(runtime)


@pytest.mark.slow
def test_invalid_ephemeral_key_does_not_stop_the_runtime(
    network: ZeroMQNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(runtime_module, "POLL_SECONDS", 0.01)  # for short turns
    with running(network) as (runtime, b, c):
        b.send("a", hello("b", os.urandom(32)))
        eventually(lambda: has_hello(runtime, "b"))
        c.send("a", hello("c", bytes(32)))
        wait_until_processed(runtime, "c", 1)
        assert is_running(runtime)
        c.send("a", hello("c", os.urandom(32)))
        eventually(lambda: runtime.membership.view != bytes(16), 5)


@pytest.mark.slow
def test_reuse_of_an_earlier_ephemeral_key_does_not_stop_the_runtime(
    network: ZeroMQNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(runtime_module, "POLL_SECONDS", 0.01)  # for short turns
    with running(network) as (runtime, b, c):
        b.send("a", hello("b", os.urandom(32)))
        eventually(lambda: has_hello(runtime, "b"))
        keys = os.urandom(32), os.urandom(32)
        for key in (*keys, keys[0]):
            c.send("a", hello("c", key))
        wait_until_processed(runtime, "c", 3)
        assert is_running(runtime)
        c.send("a", hello("c", os.urandom(32)))
        eventually(lambda: not runtime.membership.problems(), 5)


def version_hello(name: str, ephemeral: bytes, version: str) -> bytes:
    message = Hello(ephemeral, bytes(32), version, "trial", 1, (("training", "x"),))
    signed = statement("hello", slot_of(ephemeral, "hello", message.epoch), sha256(hello_content(message)).digest())
    return to_bytes(Frame(bytes(16), 0, replace(message, signature=identity(name).sign(signed))))


@pytest.mark.slow
def test_peer_that_keeps_changing_its_hello_does_not_flood_the_log(
    network: ZeroMQNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every change of a peer's note is a line; the peer writes the note, and old lines are rotated away."""
    monkeypatch.setattr(runtime_module, "POLL_SECONDS", 0.01)  # 20 times as fast: hours of a flood in a few seconds
    caplog.set_level(logging.INFO, "cgd")
    with running(network) as (runtime, b, _):
        ephemeral = os.urandom(32)
        for number in range(100):
            b.send("a", version_hello("b", ephemeral, f"{number:03}".ljust(200, "x")))
            wait_until_processed(runtime, "b", number + 1)
        lines = [record for record in caplog.records if getattr(record, "event", "") == "peer"]
    assert len([record for record in lines if getattr(record, "peer", "") == "b"]) < 20


def test_invalid_frames_do_not_fill_the_disk_of_a_participant_that_records(caplog: pytest.LogCaptureFixture) -> None:
    """`cgd join --record` writes every frame before it is checked: a peer that sends garbage fills the disk."""
    caplog.set_level(logging.CRITICAL)
    frames = [("b", bytes(100_000))] * 1000
    transport, recorded = ScriptedTransport(frames), Counter[str]()
    tapped = TappedReconnectingTransport(transport, lambda sender, frame: recorded.update({sender: len(frame)}))
    runtime = FederationRuntime(tapped, Membership("a", identity("a"), SPEC))
    eventually(lambda: not transport.frames)
    runtime.close(done=False)
    assert recorded["b"] < 10_000_000
