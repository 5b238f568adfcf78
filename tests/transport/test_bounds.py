"""What others can make a process keep is bounded: memory, descriptors, and the hosts that it connects to."""

from __future__ import annotations

import logging
import socket
import struct
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest
import zmq

from cgd.errors import InputError
from cgd.secagg.messages import HUB
from cgd.transport import link
from cgd.transport.addresses import new_address
from cgd.transport.auth import RejectionLog
from cgd.transport.connections import MOVE_SECONDS, Connection, Contact
from cgd.transport.hub import HubClient
from cgd.transport.limits import MAX_FROM_A_PEER, ConnectionLimits
from cgd.transport.link import Datagram, DatagramKind
from cgd.transport.routes import RelayedRoute
from cgd.transport.zeromq import ZeroMQTransport
from support.bounded import Target, eventually
from support.hubs import MEMBERS, Town, addend
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

PART = bytes(1 << 20)
# A hostile sender tries 1000 of them. What is kept may be the limit of 48 MiB, what comes between two checks, and
# copies of that in ZeroMQ; far from what was sent.
MAX_GROWTH = 400 << 20


def ping() -> bytes:
    return Datagram(DatagramKind.PING, b"m" * 8, link.NOBODY).to_bytes()


@pytest.mark.parametrize(("name", "begin"), [("a", []), (HUB, [b"a"])])
@pytest.mark.parametrize("proved", [True, False])
def test_a_message_without_an_end_is_cut_off(name: str, begin: list[bytes], proved: bool) -> None:
    first = [b"", ping()] if name == HUB else [ping()]
    who = "c" if proved else "a stranger"
    with Target(name) as target, target.flood("c", first if proved else (), begin) as flood:
        before = target.look()["peak"]
        flood()
        eventually(lambda: sum(target.refused(who, what) for what in ("an endless message", "a malformed message")))
        after = target.look()["peak"]
        logging.getLogger(__name__).info("%s: peak %d -> %d MiB", name, before >> 20, after >> 20)
        assert after - before < MAX_GROWTH
        assert target.refused(who, "an endless message")
        eventually(lambda: any(f"refused an endless message from {who}" in line for line in target.log))


def test_an_answer_without_an_end_is_cut_off() -> None:
    """It comes by the connection that the participant itself has made."""
    with Target("a") as target, target.flood("c", listens=True) as flood:
        before = target.look()["peak"]
        flood()
        eventually(lambda: target.refused("c", "an endless message") > 0, 30)
        after = target.look()["peak"]
        logging.getLogger(__name__).info("our connection: peak %d -> %d MiB", before >> 20, after >> 20)
        assert after - before < MAX_GROWTH


def test_what_strangers_send_before_a_handshake_is_bounded() -> None:
    """Each begins a command of seven mebibytes; ZeroMQ keeps it until it is complete."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    command = b"\x06" + struct.pack(">Q", 8 * len(PART))
    with Target("a") as target, ExitStack() as stack:
        before = target.look()["peak"]
        for _ in range(100):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", target.port), 60))
            with suppress(OSError):  # it is cut in the middle
                raw.sendall(greeting + command)
                for _ in range(7):
                    raw.sendall(PART)
            time.sleep(0.02)  # it looks ten times a second, and the machine may be busy
        after = target.look()["peak"]
        logging.getLogger(__name__).info("strangers: peak %d -> %d MiB", before >> 20, after >> 20)
        assert after - before < MAX_GROWTH
        eventually(lambda: target.refused("a stranger", "an endless message") > 0)


def test_what_honest_peers_have_under_way_is_not_cut() -> None:
    with Target("a") as target:
        b = target.honest("b")
        frame, count = bytes(1 << 20), 200
        for _ in range(count):
            eventually(lambda: b.send("a", frame))
        eventually(lambda: len(target.look()["received"]) == count)
        assert not [each for each in target.look()["counts"] if "endless" in each[1]]


# Descriptors.


def test_a_crowd_at_the_door_leaves_descriptors_for_others() -> None:
    """Its program opens files meanwhile, and honest participants come in."""
    soft, hard = 100, 256
    with Target("a", (soft, hard)) as target, ExitStack() as crowd:
        assert target.look()["limit"] == hard
        for _ in range(20):  # few at a time, because it takes a moment to show them out
            for _ in range(40):
                crowd.enter_context(socket.create_connection(("127.0.0.1", target.port), 60))
            eventually(lambda: target.look()["descriptors"] < hard // 2)
        assert target.refused("a stranger", "an idle connection") > 0
        b = target.honest("b")
        assert b.send("a", b"may I?")
        eventually(lambda: target.look()["received"] == ["b"])


def test_a_listed_participant_has_few_connections_and_keeps_the_first() -> None:
    with Target("a", (256, 256)) as target:
        first = target.caller("c")
        first.send(ping())
        assert first.poll(60_000)
        first.recv()
        for _ in range(3 * MAX_FROM_A_PEER):
            target.caller("c").send(ping())
        eventually(lambda: target.refused("c", "a further connection") > 0)
        first.send(ping())
        assert first.poll(60_000)
        eventually(lambda: target.look()["descriptors"] < 128)


# Where a peer may send us.


@pytest.mark.parametrize(
    ("claimed", "source", "expected"),
    [
        ("tcp://a.example:7001", "192.0.2.7", "tcp://a.example:7001"),
        ("tcp://a.example:7005", "192.0.2.7", "tcp://a.example:7005"),
        ("tcp://A.example:7005", "192.0.2.7", "tcp://A.example:7005"),
        ("tcp://192.0.2.7:7001", "::ffff:192.0.2.7", "tcp://192.0.2.7:7001"),
        ("tcp://[2001:db8:0::7]:7001", "2001:db8::7", "tcp://[2001:db8::7]:7001"),
        ("tcp://b.example:7001", "192.0.2.7", "tcp://192.0.2.7:7001"),
        ("tcp://localhost:22", "2001:db8::7", "tcp://[2001:db8::7]:22"),
        ("tcp://0x7f000001:22", "192.0.2.7", "tcp://192.0.2.7:22"),
    ],
)
def test_a_peer_is_followed_to_its_listed_host_and_to_where_it_comes_from(
    claimed: str, source: str, expected: str
) -> None:
    assert new_address(claimed, "tcp://a.example:7001", source) == expected


@pytest.mark.parametrize(
    "claimed",
    [
        *("tcp://192.0.2.8:7001", "tcp://10.0.0.1:22", "tcp://127.0.0.1:22", "tcp://169.254.169.254:80"),
        *("tcp://[::1]:22", "tcp://[::ffff:10.0.0.1]:22", "tcp://[fe80::1%eth0]:22", "tcp://0.0.0.0:22"),
        *("ipc:///tmp/x", "tcp://eth0;192.0.2.7:1", "tcp://192.0.2.7:70000", "tcp://*:*", "tcp://", "x" * 1000),
        *("tcp://192.0.2.7:7001\n", "tcp://127.1:22"),
    ],
)
def test_a_peer_is_followed_nowhere_else(claimed: str) -> None:
    with pytest.raises(InputError):
        new_address(claimed, "tcp://a.example:7001", "192.0.2.7")


class Pair:
    """A participant, and somebody with the key of another."""

    def __init__(self) -> None:
        self.pairs = {name: zmq.curve_keypair() for name in ("a", "b", "c")}
        self.contacts = {
            name: Contact(f"tcp://127.0.0.1:{free_port()}", public) for name, (public, _) in self.pairs.items()
        }
        self.a = ZeroMQTransport("a", self.contacts, self.pairs["a"][1])
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.callers: list[zmq.Socket[bytes]] = []

    def caller(self) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.curve_serverkey = self.contacts["a"].public_key
        dealer.curve_publickey, dealer.curve_secretkey = self.pairs["c"]
        dealer.connect(self.contacts["a"].address)
        self.callers.append(dealer)
        return dealer

    def hello(self, address: str) -> None:
        caller = self.caller()
        caller.send(Datagram(DatagramKind.HELLO, b"m" * 8, link.NOBODY, 0, f"c\0{address}".encode()).to_bytes())
        assert caller.poll(60_000)

    def close(self) -> None:
        for each in self.callers:
            each.close(linger=0)
        self.context.destroy(linger=0)
        self.a.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_peer_cannot_make_us_connect_to_somebody_else(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.2", 0)) as stranger:
        address = f"tcp://127.0.0.2:{stranger.getsockname()[1]}"
        pair.hello(address)
        stranger.settimeout(1.0)
        with pytest.raises(TimeoutError):
            stranger.accept()
    assert pair.a.rejections.counts["c", "a new address"] == 1
    assert (
        f"refused a new address from c (it says that it is at {address}, and its connection comes from" in caplog.text
    )


def test_a_peer_that_has_moved_on_its_host_is_followed(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as new:
        new.settimeout(60)
        port = new.getsockname()[1]
        pair.hello(f"tcp://another-name.example:{port}")
        new.accept()[0].close()
    assert f"c is at tcp://127.0.0.1:{port} now" in caplog.text


def test_a_peer_cannot_send_us_from_port_to_port() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pair = zmq.curve_keypair()
    first, second, third = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    connection = Connection(context, zmq.Poller(), "c", Contact(first, pair[0]), pair, ConnectionLimits(RejectionLog()))
    connection.follow(second)
    connection.redial_if_due(100.0)
    assert connection.address == second
    connection.follow(first)
    connection.follow(third)
    connection.redial_if_due(100.0 + MOVE_SECONDS / 2)
    assert connection.address == second
    connection.redial_if_due(101.0 + MOVE_SECONDS)
    assert connection.address == third
    connection.close()
    context.destroy(linger=0)


# Whatever our own program fails on.


def fail(*_: object) -> None:
    raise RuntimeError("a fault in cgd")


FAILED = "a message that cgd failed on"


@pytest.mark.parametrize("where", ["on_data", "moved", "send_ack"])
def test_a_message_that_the_program_fails_on_stops_nobody(
    pair: Pair, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    vars(pair.a._routes["c"])[where] = fail
    caller = pair.caller()
    for _ in range(50):
        caller.send(Datagram(DatagramKind.HELLO, b"m" * 8, link.NOBODY, 0, b"c\0").to_bytes())
    eventually(lambda: pair.a.rejections.counts.get(("c", FAILED), 0) == 50)
    assert 1 <= caplog.text.count("RuntimeError: a fault in cgd") < 25  # one line in ten seconds, with its traceback
    b = ZeroMQTransport("b", pair.contacts, pair.pairs["b"][1])
    try:
        assert b.send("a", b"still here?")
        assert pair.a.receive(60) == ("b", b"still here?")
    finally:
        b.close()


def test_an_answer_that_the_program_fails_on_stops_nobody(pair: Pair) -> None:
    vars(pair.a._routes["b"])["on_ack"] = fail
    b = ZeroMQTransport("b", pair.contacts, pair.pairs["b"][1])
    try:
        eventually(lambda: pair.a.rejections.counts.get(("b", FAILED), 0) > 0)
        assert b.send("a", b"still here?")
        assert pair.a.receive(60) == ("b", b"still here?")
    finally:
        b.close()


def test_a_peer_that_nothing_can_be_sent_to_stops_nobody(pair: Pair) -> None:
    vars(pair.a._routes["c"])["has_room"] = fail
    b = ZeroMQTransport("b", pair.contacts, pair.pairs["b"][1])
    try:
        eventually(lambda: pair.a.rejections.counts.get(("c", FAILED), 0) > 0)
        assert b.send("a", b"still here?")
        assert pair.a.receive(60) == ("b", b"still here?")
        assert pair.a.send("b", b"yes")
        assert b.receive(60) == ("a", b"yes")
    finally:
        b.close()


@pytest.mark.parametrize("whose", [HubClient, RelayedRoute])
def test_a_few_failures_through_the_hub_cost_a_moment(
    whose: type[HubClient | RelayedRoute], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in = whose.on_data
    failures = 0

    def sometimes(self: HubClient | RelayedRoute, datagram: Datagram, channel: bytes) -> object:
        nonlocal failures
        if self.peer == "c" and failures < 5:
            failures += 1
            raise RuntimeError("a fault in cgd")
        return take_in(self, datagram, channel)  # type: ignore[arg-type]

    monkeypatch.setattr(whose, "on_data", sometimes)
    with Town() as town:
        hub = town.start_hub()
        town.start()
        totals, errors = town.sums({name: addend(name, 1) for name in MEMBERS})
        assert not errors
        assert len({total.tobytes() for total in totals.values()}) == 1
        assert failures == 5
        assert hub.failure is None
