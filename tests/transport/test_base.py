"""The contract of the seam: every transport passes this suite. A new one adds itself to `connectors`."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from cgd.errors import ClosedError, MembershipError
from cgd.transport import memory
from cgd.transport.connections import Contact
from cgd.transport.tap import TappedReconnectingTransport, TappedTransport
from cgd.transport.zeromq import ZeroMQTransport
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cgd.transport.base import Transport

MEMBERS = ("a", "b", "c")


def connect_sockets(members: Sequence[str]) -> list[ZeroMQTransport]:
    pairs = {member: zmq.curve_keypair() for member in members}
    contacts = {member: Contact(f"tcp://127.0.0.1:{free_port()}", pairs[member][0]) for member in members}
    return [ZeroMQTransport(member, contacts, pairs[member][1]) for member in members]


def connect_recorded(members: Sequence[str]) -> list[TappedTransport]:
    return [TappedTransport(each, lambda sender, frame: None) for each in memory.connect(members)]


def connect_recorded_sockets(members: Sequence[str]) -> list[TappedReconnectingTransport]:
    return [TappedReconnectingTransport(each, lambda sender, frame: None) for each in connect_sockets(members)]


connectors: dict[str, Callable[[Sequence[str]], Sequence[Transport]]] = {
    "memory": memory.connect,
    "zeromq": connect_sockets,
    "recorded memory": connect_recorded,
    "recorded zeromq": connect_recorded_sockets,
}


@pytest.fixture(params=connectors)
def transports(request: pytest.FixtureRequest) -> Iterator[dict[str, Transport]]:
    connected = dict(zip(MEMBERS, connectors[request.param](MEMBERS), strict=True))
    yield connected
    for transport in connected.values():
        transport.close()


def test_it_knows_its_members(transports: dict[str, Transport]) -> None:
    for name, transport in transports.items():
        assert transport.me == name
        assert transport.members == MEMBERS


def test_frames_arrive_whole_with_their_sender(transports: dict[str, Transport]) -> None:
    assert transports["a"].send("b", b"from a")
    assert transports["c"].send("b", b"")
    assert transports["a"].send("c", bytes(1_000_000))
    received = {transports["b"].receive(5), transports["b"].receive(5)}
    assert received == {("a", b"from a"), ("c", b"")}
    assert transports["c"].receive(5) == ("a", bytes(1_000_000))


def test_one_senders_frames_keep_their_order(transports: dict[str, Transport]) -> None:
    for i in range(100):
        assert transports["a"].send("b", bytes([i]))
    assert [transports["b"].receive(5) for _ in range(100)] == [("a", bytes([i])) for i in range(100)]


def test_receiving_waits_no_longer_than_told(transports: dict[str, Transport]) -> None:
    begun = time.monotonic()
    assert transports["a"].receive(0.05) is None
    assert 0.05 <= time.monotonic() - begun < 5
    assert transports["a"].receive(0.0) is None


def test_a_frame_wakes_whoever_waits(transports: dict[str, Transport]) -> None:
    threading.Timer(0.05, lambda: transports["a"].send("b", b"hello")).start()
    assert transports["b"].receive(None) == ("a", b"hello")


def test_a_full_way_says_so_and_loses_nothing(transports: dict[str, Transport]) -> None:
    megabyte = bytes(1 << 20)
    sent = 0
    while sent < 1000 and transports["a"].send("b", megabyte):
        sent += 1
    assert 1 <= sent < 1000
    read = 0
    while not transports["a"].send("b", b"now there is room"):  # word of it may take a moment to get back
        assert read < sent
        assert transports["b"].receive(5) == ("a", megabyte)
        read += 1
        time.sleep(0.1)
    received = [transports["b"].receive(5) for _ in range(sent - read + 1)]
    assert received == [("a", megabyte)] * (sent - read) + [("a", b"now there is room")]


def test_waking_lets_a_receiver_go_on_once(transports: dict[str, Transport]) -> None:
    threading.Timer(0.05, transports["a"].wake).start()
    assert transports["a"].receive(None) is None
    transports["a"].wake()
    transports["b"].send("a", b"first")
    received = [transports["a"].receive(5), transports["a"].receive(5)]
    assert ("b", b"first") in received
    assert None in received  # the call is not lost for a frame that was there
    begun = time.monotonic()
    assert transports["a"].receive(0.05) is None
    assert time.monotonic() - begun >= 0.05


def test_closing_wakes_and_refuses(transports: dict[str, Transport]) -> None:
    threading.Timer(0.05, transports["a"].close).start()
    with pytest.raises(ClosedError, match="closed"):
        transports["a"].receive(None)
    with pytest.raises(ClosedError, match="closed"):
        transports["a"].receive(0.0)
    transports["a"].close()
    assert transports["b"].send("a", b"nobody reads this")


def test_only_peers_can_be_sent_to(transports: dict[str, Transport]) -> None:
    for stranger in ("x", "a"):
        with pytest.raises(MembershipError, match=f"{stranger} is not a peer"):
            transports["a"].send(stranger, b"")
