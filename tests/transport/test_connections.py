"""Connections: addresses that cannot be used, reported problems, reconnections, and limits for strangers."""

from __future__ import annotations

import itertools
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cgd.errors import InputError, MembershipError, TransportError
from cgd.transport import connections, zeromq
from cgd.transport import limits as limits_module
from cgd.transport.auth import CONNECT_FAILURES, CONNECTION_LOST, NO_REPLY, NOT_CGD, RejectionLog
from cgd.transport.base import MAX_FRAME_BYTES
from cgd.transport.connections import MIN_SECONDS_BETWEEN_MOVES, RECONNECT_SECONDS, Connection, Contact, HubConnection
from cgd.transport.hub import Hub
from cgd.transport.limits import MAX_CONNECTIONS_PER_PEER, ConnectionLimits
from cgd.transport.zeromq import ZeroMQTransport
from support.ports import free_port
from support.transports import MEMBERS, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.transports import ZeroMQNetwork

CONNECTED, LOST = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


# Addresses.


@pytest.mark.parametrize("listen", ["7001", "tcp://127.0.0.1", "ipc:///tmp/socket", "tcp://:port"])
def test_address_to_listen_at_must_have_a_host_and_a_port(listen: str, network: ZeroMQNetwork) -> None:
    with pytest.raises(InputError, match="write tcp://HOST:PORT, such as tcp://0.0.0.0:7001"):
        ZeroMQTransport("a", network.contacts, network.pairs["a"][1], listen)


def test_port_in_use_is_reported_with_the_remedy(network: ZeroMQNetwork) -> None:
    address, (_, secret) = network.contacts["a"].address, network.pairs["a"]
    with socket.create_server(("127.0.0.1", network.port("a"))):
        for use in (
            lambda: ZeroMQTransport("a", network.contacts, secret),
            lambda: Hub(network.contacts, {"everyone": MEMBERS}, secret, address),
        ):
            with pytest.raises(TransportError) as caught:
                use()
            assert f"cannot listen at {address}: Address already in use; stop what listens there" in str(caught.value)
    network.open("a")  # the failed attempts have not kept the port


def test_address_of_another_machine_cannot_be_listened_at(network: ZeroMQNetwork) -> None:
    with pytest.raises(TransportError, match="cannot listen at tcp://192.0.2.1:7001: .*; choose another"):
        ZeroMQTransport("a", network.contacts, network.pairs["a"][1], "tcp://192.0.2.1:7001")


def test_participant_without_an_address_needs_a_hub_and_cannot_listen(network: ZeroMQNetwork) -> None:
    contacts = network.contacts | {"a": Contact("", network.contacts["a"].public_key)}
    with pytest.raises(InputError, match="b or a has no address, and there is no hub; give both one"):
        ZeroMQTransport("a", contacts, network.pairs["a"][1])
    with pytest.raises(InputError, match="a has no address in the federation file: it only dials out, and cannot lis"):
        ZeroMQTransport("a", contacts, network.pairs["a"][1], "tcp://127.0.0.1:7001")


def test_address_of_a_peer_that_cannot_be_used_is_reported(network: ZeroMQNetwork) -> None:
    contacts = network.contacts | {"b": Contact("udp://127.0.0.1:7001", network.contacts["b"].public_key)}
    with pytest.raises(InputError, match="the address of b, 'udp://127.0.0.1:7001', cannot be used: "):
        ZeroMQTransport("a", contacts, network.pairs["a"][1])


def test_frame_beyond_the_limit_is_not_sent(network: ZeroMQNetwork) -> None:
    a = network.open("a")
    with pytest.raises(InputError, match=f"a frame has {MAX_FRAME_BYTES + 1} bytes; the limit over the network is"):
        a.send("b", bytes(MAX_FRAME_BYTES + 1))
    assert a.backlog(connected=False) == 0


def test_removed_peer_is_not_a_member_any_more_and_its_frames_are_dropped(
    network: ZeroMQNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "CLOSE_SECONDS", 0.0)  # do not wait for peers that do not run
    a = network.open("a")
    assert a.send("c", b"nobody receives this")
    assert a.backlog(connected=False) == 1
    a.update({name: contact for name, contact in network.contacts.items() if name != "c"})
    assert a.members == ("a", "b")
    assert set(a.status()) == {"b"}
    assert a.backlog(connected=False) == 0
    with pytest.raises(MembershipError, match="c is not a peer of a"):
        a.send("c", b"to a former member")
    a.update(network.contacts)
    assert a.send("c", b"to a member again")
    assert a.backlog(connected=True) == 0  # it does not run
    assert a.backlog(connected=False) == 1
    a.close()


# Reported problems and reconnections. The test reports the events of ZeroMQ and decides the time.


@pytest.fixture
def sockets() -> Iterator[Any]:
    """The arguments of a connection to a peer that does not run."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    contact = Contact(f"tcp://127.0.0.1:{free_port()}", zmq.curve_keypair()[0])
    yield context, zmq.Poller(), "b", contact, zmq.curve_keypair(), ConnectionLimits(RejectionLog())
    context.destroy(linger=0)


def test_problem_of_a_connection_is_the_reason_that_was_reported_first(sockets: Any) -> None:
    connection = Connection(*sockets)
    where = f"({connection.address})"
    assert (connection.problem, connection.connected) == ("not reached yet", False)
    connection.on_event(LOST, 0.0)
    assert connection.problem == f"{NOT_CGD} {where}"
    connection.on_event(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 0.0)
    connection.on_event(LOST, 0.0)
    assert connection.problem == f"{CONNECT_FAILURES[zmq.EVENT_HANDSHAKE_FAILED_AUTH]} {where}"
    connection.on_event(CONNECTED, 0.0)
    assert connection.connected
    connection.on_event(LOST, 0.0)
    assert (connection.problem, connection.connected) == (CONNECTION_LOST, False)
    connection.on_event(zmq.EVENT_CONNECT_RETRIED, 0.0)  # of the connection that was lost
    assert connection.problem == CONNECTION_LOST
    connection.on_event(zmq.EVENT_CONNECT_RETRIED, 0.0)
    assert connection.problem == f"{CONNECT_FAILURES[zmq.EVENT_CONNECT_RETRIED]} {where}"


def test_connection_without_any_reply_is_told_from_a_refused_one(sockets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue of a listening socket drops connections, as a firewall does."""
    monkeypatch.setattr(connections, "HANDSHAKE_MILLISECONDS", 200)

    def problem(address: str, expected: str) -> str:
        context, poller, peer, contact, *rest = sockets
        connection = Connection(context, poller, peer, replace(contact, address=address), *rest)

        def reported() -> bool:
            while connection.monitor.poll(10):
                connection.read_event(time.monotonic())
            return connection.problem.startswith(expected)

        eventually(reported)
        connection.close()
        return connection.problem

    refused = f"tcp://127.0.0.1:{free_port()}"
    assert problem(refused, "nobody") == f"{CONNECT_FAILURES[zmq.EVENT_CLOSED]} ({refused})"
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as clients:
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        dropped = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert problem(dropped, "no reply") == f"{NO_REPLY} ({dropped})"


def test_connection_is_made_again_some_time_after_it_was_lost(sockets: Any) -> None:
    connection = Connection(*sockets)
    connection.on_event(LOST, 100.0)
    assert not connection.needs_attention(100.0 + RECONNECT_SECONDS)
    assert connection.needs_attention(100.1 + RECONNECT_SECONDS)
    connection.reconnect_if_due(100.1 + RECONNECT_SECONDS)
    assert not connection.needs_attention(1e9)  # until ZeroMQ reports the outcome
    connection.on_event(LOST, 200.0)
    assert connection.problem.startswith(NOT_CGD)


def test_peer_moves_us_to_a_new_address_at_a_limited_rate(sockets: Any) -> None:
    connection = Connection(*sockets)
    listed, first, second = connection.address, *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    connection.request_move(listed)
    assert not connection.needs_attention(0.0)
    connection.request_move(first)
    connection.reconnect_if_due(0.0)
    assert connection.address == first
    connection.request_move(second)
    connection.reconnect_if_due(MIN_SECONDS_BETWEEN_MOVES)
    assert connection.address == first
    connection.reconnect_if_due(MIN_SECONDS_BETWEEN_MOVES + 0.1)
    assert (connection.address, connection.listed_address) == (second, listed)
    connection.request_move("tcp://127.0.0.1:no-port")
    connection.reconnect_if_due(100.0)
    assert connection.address == second
    assert connection.problem == "it reports the address 'tcp://127.0.0.1:no-port': Invalid argument"


@pytest.fixture
def hub_connection(sockets: Any) -> HubConnection:
    arguments = [*sockets, itertools.count(1)]
    return HubConnection(*arguments)


def test_connection_to_the_hub_is_made_again_with_a_new_socket(hub_connection: HubConnection) -> None:
    connection = hub_connection
    where, now = f"({connection.address})", 1e9
    assert connection.number == 1
    for event, connected, problem, seconds in (
        (CONNECTED, True, "connected, and not yet accepted", None),
        (LOST, False, CONNECTION_LOST, RECONNECT_SECONDS / 4),
        (zmq.EVENT_CLOSED, False, f"nobody answers there {where}", RECONNECT_SECONDS),
        (LOST, False, f"nobody answers there {where}", RECONNECT_SECONDS),
    ):
        connection.on_event(event, now)
        assert (connection.connected, connection.problem) == (connected, problem)
        assert not connection.needs_attention(now + (seconds or 1e9))
        assert seconds is None or connection.needs_attention(now + 1.1 * seconds)
    before = connection.dealer
    connection.reconnect_if_due(now + RECONNECT_SECONDS)
    assert (connection.number, connection.dealer) == (1, before)
    connection.reconnect_if_due(now + 1.1 * RECONNECT_SECONDS)
    assert connection.number == 2
    assert connection.dealer is not before
    assert before.closed
    connection.on_event(LOST, now)
    assert connection.problem == f"{NOT_CGD} {where}"


def test_unknown_host_of_the_hub_is_reported(hub_connection: HubConnection) -> None:
    """ZeroMQ reports no event at all."""
    connection = hub_connection
    connection.reconnect_if_due(1e9)
    assert (
        connection.problem == f"its address is not known here: no such host, or no name service ({connection.address})"
    )
    assert connection.number == 2


# Limits for strangers and for peers.


@pytest.fixture
def accepted() -> Iterator[tuple[int, list[socket.socket]]]:
    """A port, and more connections that it has accepted than one peer may have."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]
        connections = []
        for _ in range(MAX_CONNECTIONS_PER_PEER + 2):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            connections.append(stack.enter_context(server.accept()[0]))
        yield port, connections


def is_open(connection: socket.socket) -> bool:
    try:
        return connection.send(b"x") == 1
    except BrokenPipeError:
        return False


def test_oldest_connection_without_a_message_is_closed_when_there_are_too_many(
    accepted: tuple[int, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, connections = accepted
    monkeypatch.setattr(limits_module, "MAX_UNAUTHENTICATED_CONNECTIONS", 2)
    rejections = RejectionLog()
    limits = ConnectionLimits(rejections, port)
    for each in connections[:4]:
        limits.on_accepted(each.fileno())
    assert [is_open(each) for each in connections[:4]] == [False, True, True, True]
    assert rejections.counts == {("an unknown client", "an idle connection"): 1}


def test_further_connection_of_one_peer_is_closed(accepted: tuple[int, list[socket.socket]]) -> None:
    port, connections = accepted
    rejections = RejectionLog()
    limits = ConnectionLimits(rejections, port)
    for each in connections:  # a message may be read before ZeroMQ reports the connection
        message: Any = SimpleNamespace(last={zmq.SRCFD: each.fileno()}, parts=1, nbytes=10)
        limits.on_message(message, "c")
    further = len(connections) - MAX_CONNECTIONS_PER_PEER
    assert [is_open(each) for each in connections] == [True] * MAX_CONNECTIONS_PER_PEER + [False] * further
    assert rejections.counts == {("c", "a further connection"): further}


def test_incomplete_messages_of_strangers_and_of_a_peer_are_limited(
    accepted: tuple[int, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports how much was received; nothing of it is a complete message."""
    port, connections = accepted
    received = {each.fileno(): 0 for each in connections}
    tcp_info = limits_module._tcp_info

    def report(descriptor: int) -> Any:
        found = tcp_info(descriptor)
        return None if found is None else (found[0], received[descriptor])

    monkeypatch.setattr(limits_module, "_tcp_info", report)
    rejections = RejectionLog()
    limits = ConnectionLimits(rejections, port)
    peer, small, large = (each.fileno() for each in connections[:3])
    for each in connections[:3]:
        limits.on_accepted(each.fileno())
    message: Any = SimpleNamespace(last={zmq.SRCFD: peer}, parts=1, nbytes=10)
    limits.on_message(message, "c")
    limits.check(0.0)
    assert rejections.counts == {}
    half = limits_module.MAX_UNAUTHENTICATED_BYTES // 2
    received.update({small: half, large: half + 1, peer: 1 << 40})
    limits.check(limits_module.SECONDS_BETWEEN_CHECKS / 2)  # too early for the next check
    assert rejections.counts == {}
    limits.check(2 * limits_module.SECONDS_BETWEEN_CHECKS)
    assert [is_open(each) for each in connections[:3]] == [False, True, False]
    kind = "an incomplete message"
    assert rejections.counts == {("c", kind): 1, ("an unknown client", kind): 1}


def test_descriptor_that_was_closed_and_used_again_is_not_closed_for_its_predecessor(
    accepted: tuple[int, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, connections = accepted
    monkeypatch.setattr(limits_module, "MAX_UNAUTHENTICATED_CONNECTIONS", 0)
    rejections = RejectionLog()
    limits = ConnectionLimits(rejections, port)
    first, second, third = connections[:3]
    limits.on_accepted(first.fileno())
    limits._connections[first.fileno()].addresses = (("127.0.0.1", port), ("127.0.0.1", 1))
    limits.on_accepted(second.fileno())  # the first is the oldest, and its descriptor belongs to another by now
    assert rejections.counts == {("an unknown client", "an idle connection"): 1}
    assert is_open(first)
    limits._connections[second.fileno()].addresses = (("127.0.0.1", port), ("127.0.0.1", 1))
    limits.check(1e9)
    limits.on_accepted(third.fileno())
    assert [is_open(each) for each in connections[:3]] == [True, True, True]
