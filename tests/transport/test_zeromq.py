"""Connections over ZeroMQ: which processes are accepted, the reasons that are reported, and restarts."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cgd.transport import connections, link, zeromq
from cgd.transport.connections import Contact
from cgd.transport.link import Datagram, DatagramKind
from support.ports import free_port
from support.transports import connected, eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.transports import ZeroMQNetwork


# Keys and names.


@pytest.mark.slow
def test_key_that_is_listed_later_is_accepted_without_a_restart(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    """ZeroMQ does not reconnect after a key was rejected; cgd does."""
    without_c = {name: each for name, each in network.contacts.items() if name != "c"}
    a, c = network.open("a", without_c), network.open("c")
    eventually(lambda: "it refuses our key: our key is not in its federation file" in c.status()["a"].problem)
    key = network.contacts["c"].public_key.decode()
    line = f"refused a connection from an unknown client (key {key} at ::ffff:127.0.0.1 is not in the federation file)"
    eventually(lambda: line in caplog.text)
    a.update(network.contacts)
    eventually(lambda: connected(c, "a") and connected(a, "c"))
    assert c.send("a", b"at last")
    assert a.receive(5) == ("c", b"at last")


@pytest.mark.slow
def test_messages_of_a_replaced_key_are_dropped(network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture) -> None:
    """The connection of the old key is still open, and was made under the same name."""
    a, old = network.open("a"), network.open("c")
    eventually(lambda: connected(old, "a"))
    public, secret = zmq.curve_keypair()
    a.update(network.contacts | {"c": Contact(f"tcp://127.0.0.1:{free_port()}", public)})
    old.send("a", b"from the old key")
    eventually(lambda: not connected(old, "a"))
    assert a.receive(0.0) is None
    eventually(
        lambda: (
            "refused a message from a former participant (its key is not in the federation file any more)"
            in caplog.text
        )
    )
    old.close()
    new = network.open("c", network.contacts | {"c": Contact(f"tcp://127.0.0.1:{free_port()}", public)}, secret)
    new.send("a", b"from the new key")
    assert a.receive(20) == ("c", b"from the new key")


@pytest.mark.slow
def test_messages_of_a_removed_participant_are_dropped(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    a, c = network.open("a"), network.open("c")
    eventually(lambda: connected(c, "a"))
    a.update({name: each for name, each in network.contacts.items() if name != "c"})
    c.send("a", b"after the removal")
    eventually(lambda: not connected(c, "a"))
    assert a.receive(0.0) is None
    eventually(lambda: "refused a message from a former participant" in caplog.text)


@pytest.mark.slow
def test_listed_key_with_the_name_of_another_participant_is_rejected(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = network.open("a"), network.open("b")
    forged = network.contacts | {"b": Contact(f"tcp://127.0.0.1:{free_port()}", network.pairs["c"][0])}
    impostor = network.open("b", forged, network.pairs["c"][1])
    eventually(lambda: impostor.status()["a"].problem == "your key is that of c, and you say that you are b")
    assert not connected(impostor, "a")
    eventually(lambda: "refused a false name from c (it reports the name 'b', and its key is that of c)" in caplog.text)
    b.send("a", b"from b")
    assert a.receive(20) == ("b", b"from b")
    assert impostor.send("a", b"from the impostor")
    assert a.receive(0.5) is None


@pytest.mark.slow
def test_second_process_with_a_key_is_rejected_until_the_first_has_ended(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    a, first = network.open("a"), network.open("c")
    eventually(lambda: connected(first, "a"))
    elsewhere = network.contacts | {"c": Contact(f"tcp://127.0.0.1:{free_port()}", network.pairs["c"][0])}
    second = network.open("c", elsewhere)
    reason = "another process with this key is connected; stop it first"
    eventually(lambda: second.status()["a"].problem == reason)
    assert second.send("a", b"second")
    time.sleep(link.SILENT_SECONDS / 2 + 0.5)  # longer than the timeout of a silent first process
    assert second.status()["a"].problem == reason
    assert first.send("a", b"first")
    assert a.receive(5) == ("c", b"first")
    assert a.receive(0.0) is None
    eventually(lambda: "refused a second process with the same key from c" in caplog.text)
    first.close()
    assert a.receive(20) == ("c", b"second")
    eventually(lambda: connected(second, "a"))
    assert second.status()["a"].problem != reason


# Reported problems.


def test_other_version_of_the_link_is_reported_on_both_sides(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    a = network.open("a")
    client = network.connect_client("a", network.pairs["c"])
    hello = bytearray(Datagram(DatagramKind.HELLO, b"c" * 8, link.NO_INCARNATION, 0, b"c").to_bytes())
    hello[4] = link.VERSION + 1
    client.send(bytes(hello))
    assert client.poll(20_000)
    answer = link.from_bytes(client.recv())
    assert answer.kind is DatagramKind.REJECTED
    message = f"version {link.VERSION + 1} of the link, ours is {link.VERSION}; install the same cgd"
    assert bytes(answer.body).decode() == message
    eventually(lambda: f"refused an incompatible message from c ({message})" in caplog.text)
    assert not a.status()["c"].connected


@pytest.mark.slow
def test_other_service_at_the_address_is_reported_and_the_peer_is_reached_later(network: ZeroMQNetwork) -> None:
    """ZeroMQ gives up on an address at which another service answers; cgd does not."""
    a = network.open("a")
    with socket.create_server(("127.0.0.1", network.port("b"))) as other:
        other.settimeout(20)
        client, _ = other.accept()
        with client:
            client.sendall(b"SSH-2.0-OpenSSH_9.9\r\n" * 10)
            address = network.contacts["b"].address
            eventually(lambda: a.status()["b"].problem == f"something answers there that is not cgd ({address})")
    b = network.open("b")
    assert a.send("b", b"now it runs")
    assert b.receive(20) == ("a", b"now it runs")


def test_peer_with_another_key_than_listed_is_reported_on_both_sides(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    public, secret = zmq.curve_keypair()
    a = network.open("a")
    network.open("b", network.contacts | {"b": Contact(network.contacts["b"].address, public)}, secret)
    reason = "it closed the connection in the handshake: it has another key than in our file, or is not cgd"
    eventually(lambda: a.status()["b"].problem == f"{reason} ({network.contacts['b'].address})")
    line = "refused a handshake from an unknown client (it does not use CURVE, or expects another"
    eventually(lambda: line in caplog.text)


@pytest.mark.slow
def test_reason_for_an_unreachable_peer_is_reported(network: ZeroMQNetwork) -> None:
    unknown = "tcp://no-such-host.invalid:7001"
    a = network.open("a", network.contacts | {"c": Contact(unknown, network.contacts["c"].public_key)})
    expected = {
        "b": f"nobody answers there ({network.contacts['b'].address})",
        "c": f"its address is not known here: no such host, or no name service ({unknown})",
    }
    eventually(lambda: {peer: each.problem for peer, each in a.status().items()} == expected)
    network.open("b")
    eventually(lambda: connected(a, "b"))


# Load and restarts.


@pytest.mark.slow
def test_many_idle_connections_keep_no_peer_out(network: ZeroMQNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_MILLISECONDS", 1500)
    a = network.open("a")
    idle = [socket.create_connection(("127.0.0.1", network.port("a"))) for _ in range(200)]
    try:
        b = network.open("b")
        b.send("a", b"hello")
        assert a.receive(20) == ("b", b"hello")
        for each in idle:  # they are closed after the timeout of the handshake
            each.settimeout(20)
            while each.recv(100):
                pass
    finally:
        for each in idle:
            each.close()


@pytest.mark.slow
def test_transport_can_be_closed_during_an_attack(network: ZeroMQNetwork) -> None:
    """ZeroMQ reports every connection, and must not wait for a reader of its reports when the transport is closed."""
    a = network.open("a")
    client = network.connect_client("a", network.pairs["c"])
    over = threading.Event()

    def connect_repeatedly() -> None:
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", network.port("a")), 1) as raw:
                    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
            except OSError:
                continue

    def send_garbage() -> None:
        while not over.is_set():
            if client.poll(100, zmq.POLLOUT):
                client.send(bytes(500))

    threads = [threading.Thread(target=each) for each in (connect_repeatedly, connect_repeatedly, send_garbage)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(a.rejections.counts) == 2 and min(a.rejections.counts.values()) > 100)
        closing = threading.Thread(target=a.close)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_unread_frames_of_a_killed_process_do_not_block_its_successor(network: ZeroMQNetwork) -> None:
    """They are read after the restart, and must not count as frames of the new process."""
    a, before = network.open("a"), network.open("c")
    for i in range(5):
        assert before.send("a", bytes([i]))
    eventually(lambda: len(a._inbox) == 5)
    before.close()
    after = network.open("c")
    eventually(lambda: connected(after, "a"))
    assert [a.receive(5) for _ in range(5)] == [("c", bytes([i])) for i in range(5)]
    megabyte, read = bytes(1 << 20), 0
    deadline = time.monotonic() + 20
    for _ in range(3 * link.WINDOW_BYTES >> 20):
        while not after.send("a", megabyte):
            assert time.monotonic() < deadline, "the window stays full"
            read += a.receive(0.1) is not None
    eventually(lambda: a.receive(0.0) is not None or not after.backlog(connected=False))


@pytest.mark.slow
def test_frame_that_arrives_while_another_is_read_ends_a_blocked_receive(network: ZeroMQNetwork) -> None:
    a, b = network.open("a"), network.open("b")
    assert b.send("a", b"first")
    eventually(lambda: len(a._inbox) == 1)
    reading, consumed = threading.Event(), threading.Event()
    read_all = a._read_all

    def read_after_the_consumer(ready: Mapping[Any, int]) -> None:
        if a._router in ready:
            reading.set()
            consumed.wait(20)
            time.sleep(0.1)  # now `receive` is blocked
        read_all(ready)

    a._read_all = read_after_the_consumer  # type: ignore[method-assign]
    assert b.send("a", b"second")
    assert reading.wait(20)
    assert a.receive(5) == ("b", b"first")
    consumed.set()
    started = time.monotonic()
    assert a.receive(60) == ("b", b"second")
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_close_stops_waiting_for_a_peer_that_is_not_reached(
    network: ZeroMQNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "CLOSE_SECONDS", 0.2)
    a = network.open("a")
    assert a.send("b", b"nobody receives this")
    closing = threading.Thread(target=a.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_datagram_numbers_beyond_the_range_are_rejected(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = network.open("a"), network.open("b")
    client = network.connect_client("a", network.pairs["c"])
    client.send(Datagram(DatagramKind.HELLO, b"c" * 8, link.NO_INCARNATION, 0, b"c\0").to_bytes())
    assert client.poll(20_000)
    recipient = link.from_bytes(client.recv()).sender
    for number in (2**64 - 1, 2**63, 2**63 + 1):
        for kind in (DatagramKind.DATA, DatagramKind.PING):
            client.send(Datagram(kind, b"c" * 8, recipient, number, b"x").to_bytes())
    b.send("a", b"still running?")
    assert a.receive(20) == ("b", b"still running?")
    eventually(lambda: "refused a malformed message from c (malformed: the number" in caplog.text)
