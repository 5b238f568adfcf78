"""The contract of `Transport`: every transport passes this suite. Add a new one to `connectors`."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zmq

from cgd.errors import ClosedError, MembershipError
from cgd.transport import memory
from cgd.transport.base import MAX_FRAME_BYTES
from cgd.transport.connections import Contact
from cgd.transport.tap import TappedReconnectingTransport, TappedTransport
from cgd.transport.zeromq import ZeroMQTransport
from support.ports import free_port
from support.transports import custom_peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cgd.transport.base import Transport

MEMBERS = ("c", "a", "b")  # not sorted


def connect_sockets(members: Sequence[str]) -> list[ZeroMQTransport]:
    pairs = {member: zmq.curve_keypair() for member in members}
    contacts = {member: Contact(f"tcp://127.0.0.1:{free_port()}", pairs[member][0]) for member in members}
    return [ZeroMQTransport(member, contacts, pairs[member][1]) for member in members]


def connect_tapped(members: Sequence[str]) -> list[TappedTransport]:
    return [TappedTransport(each, lambda sender, frame: None) for each in memory.connect(members)]


def connect_tapped_sockets(members: Sequence[str]) -> list[TappedReconnectingTransport]:
    return [TappedReconnectingTransport(each, lambda sender, frame: None) for each in connect_sockets(members)]


connectors: dict[str, Callable[[Sequence[str]], Sequence[Transport]]] = {
    "memory": memory.connect,
    "zeromq": connect_sockets,
    "tapped memory": connect_tapped,
    "tapped zeromq": connect_tapped_sockets,
}


@pytest.fixture(params=connectors)
def transports(request: pytest.FixtureRequest) -> Iterator[dict[str, Transport]]:
    connected = dict(zip(MEMBERS, connectors[request.param](MEMBERS), strict=True))
    yield connected
    for transport in connected.values():
        transport.close()


def test_transport_has_the_names_of_its_members(transports: dict[str, Transport]) -> None:
    for name, transport in transports.items():
        assert transport.me == name
        assert transport.members == ("a", "b", "c")


def test_frames_are_delivered_whole_with_their_sender(transports: dict[str, Transport]) -> None:
    assert transports["a"].send("b", b"from a")
    assert transports["c"].send("b", b"")
    assert transports["a"].send("c", bytes(1_000_000))
    received = {transports["b"].receive(5), transports["b"].receive(5)}
    assert received == {("a", b"from a"), ("c", b"")}
    assert transports["c"].receive(5) == ("a", bytes(1_000_000))


def test_received_frame_cannot_be_changed(transports: dict[str, Transport]) -> None:
    assert transports["a"].send("b", b"from a")
    received = transports["b"].receive(5)
    assert received is not None
    assert memoryview(received[1]).readonly


def test_empty_queue_accepts_the_largest_frame(transports: dict[str, Transport]) -> None:
    assert transports["a"].send("b", bytes(MAX_FRAME_BYTES))
    assert transports["b"].receive(5) == ("a", bytes(MAX_FRAME_BYTES))


def test_frames_of_one_sender_keep_their_order(transports: dict[str, Transport]) -> None:
    for i in range(100):
        assert transports["a"].send("b", bytes([i]))
    assert [transports["b"].receive(5) for _ in range(100)] == [("a", bytes([i])) for i in range(100)]


def test_receive_returns_none_after_the_timeout(transports: dict[str, Transport]) -> None:
    started = time.monotonic()
    assert transports["a"].receive(0.05) is None
    assert 0.05 <= time.monotonic() - started < 5
    assert transports["a"].receive(0.0) is None


def test_frame_ends_a_blocked_receive(transports: dict[str, Transport]) -> None:
    threading.Timer(0.05, lambda: transports["a"].send("b", b"hello")).start()
    assert transports["b"].receive(None) == ("a", b"hello")


def test_send_returns_false_when_the_queue_is_full_and_no_frame_is_lost(transports: dict[str, Transport]) -> None:
    megabyte = bytes(1 << 20)
    sent = 0
    while sent < 1000 and transports["a"].send("b", megabyte):
        sent += 1
    assert 1 <= sent < 1000
    read = 0
    while not transports["a"].send("b", b"now there is room"):  # the acknowledgement may take a moment
        assert read < sent
        assert transports["b"].receive(5) == ("a", megabyte)
        read += 1
        time.sleep(0.1)
    received = [transports["b"].receive(5) for _ in range(sent - read + 1)]
    assert received == [("a", megabyte)] * (sent - read) + [("a", b"now there is room")]


def test_wakeup_ends_one_receive(transports: dict[str, Transport]) -> None:
    threading.Timer(0.05, transports["a"].wakeup).start()
    assert transports["a"].receive(None) is None
    transports["a"].wakeup()
    transports["b"].send("a", b"first")
    received = [transports["a"].receive(5), transports["a"].receive(5)]
    assert ("b", b"first") in received
    assert None in received  # the wakeup is not lost because a frame was there
    started = time.monotonic()
    assert transports["a"].receive(0.05) is None
    assert time.monotonic() - started >= 0.05


def test_close_ends_a_blocked_receive_and_later_calls_raise(transports: dict[str, Transport]) -> None:
    threading.Timer(0.05, transports["a"].close).start()
    with pytest.raises(ClosedError, match="closed"):
        transports["a"].receive(None)
    with pytest.raises(ClosedError, match="closed"):
        transports["a"].receive(0.0)
    transports["a"].close()
    assert transports["b"].send("a", b"dropped")


def test_frame_that_was_sent_before_close_is_delivered(transports: dict[str, Transport]) -> None:
    assert transports["a"].send("b", bytes(1_000_000))
    transports["a"].close()
    assert transports["b"].receive(5) == ("a", bytes(1_000_000))


def test_frame_that_is_sent_after_close_is_dropped(transports: dict[str, Transport]) -> None:
    assert transports["a"].send("b", b"before")
    transports["a"].close()
    assert transports["a"].send("b", b"after")
    assert transports["b"].receive(5) == ("a", b"before")
    assert transports["b"].receive(0.2) is None


def test_frames_of_a_closed_peer_are_received_after_frames_to_it_were_dropped(
    transports: dict[str, Transport],
) -> None:
    frames = [bytes([i]) * 100_000 for i in range(10)]
    assert all(transports["a"].send("b", frame) for frame in frames)
    transports["a"].close()
    for _ in range(20):
        assert transports["b"].send("a", b"dropped")
        time.sleep(0.01)
    assert [transports["b"].receive(5) for _ in frames] == [("a", frame) for frame in frames]


def test_send_to_a_name_that_is_not_a_peer_raises(transports: dict[str, Transport]) -> None:
    for name in ("x", "a"):
        with pytest.raises(MembershipError, match=f"{name} is not a peer"):
            transports["a"].send(name, b"")


def test_members_sum_over_the_transport(transports: dict[str, Transport]) -> None:
    with custom_peers(list(transports.values()), timeout=60) as members:
        totals = members.run(lambda peers, number: peers.sum(np.full(100_000, number)), [1.0, 2.0, 3.0])
    assert all(np.array_equal(total, np.full(100_000, 6.0)) for total in totals)
