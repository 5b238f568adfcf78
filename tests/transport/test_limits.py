"""Limits on the memory and the descriptors that other processes can make a participant or the hub use."""

from __future__ import annotations

import logging
import socket
import struct
import time
from contextlib import ExitStack, suppress

import pytest

from cgd.secagg.messages import HUB
from cgd.transport import link
from cgd.transport.limits import MAX_CONNECTIONS_PER_PEER
from cgd.transport.link import Datagram, DatagramKind
from support.bounded import MeasuredProcess
from support.transports import eventually

PART = bytes(1 << 20)
# A hostile sender tries to send 1000 of them. The process may keep the limit of 48 MiB, bytes that arrive between two
# checks, and copies of them in ZeroMQ: far less than what was sent.
MAX_GROWTH_BYTES = 400 << 20


def ping() -> bytes:
    return Datagram(DatagramKind.PING, b"m" * 8, link.NO_INCARNATION).to_bytes()


# Incomplete messages.


@pytest.mark.parametrize(("name", "begin"), [("a", []), (HUB, [b"a"])])
@pytest.mark.parametrize("authenticated", [True, False])
def test_connection_with_an_incomplete_message_is_closed(name: str, begin: list[bytes], authenticated: bool) -> None:
    first = [b"", ping()] if name == HUB else [ping()]
    sender = "c" if authenticated else "an unknown client"
    with MeasuredProcess(name) as attacked, attacked.flood("c", first if authenticated else (), begin) as flood:
        before = attacked.measure()["peak"]
        flood()
        kinds = ("an incomplete message", "a malformed message")
        eventually(lambda: sum(attacked.rejections(sender, kind) for kind in kinds))
        after = attacked.measure()["peak"]
        logging.getLogger(__name__).info("%s: peak %d -> %d MiB", name, before >> 20, after >> 20)
        assert after - before < MAX_GROWTH_BYTES
        assert attacked.rejections(sender, "an incomplete message")
        eventually(lambda: any(f"refused an incomplete message from {sender}" in line for line in attacked.log))


def test_connection_with_an_incomplete_answer_is_closed() -> None:
    """The answer comes by the connection that the participant itself has made."""
    with MeasuredProcess("a") as attacked, attacked.flood("c", listens=True) as flood:
        before = attacked.measure()["peak"]
        flood()
        eventually(lambda: attacked.rejections("c", "an incomplete message") > 0, 30)
        after = attacked.measure()["peak"]
        logging.getLogger(__name__).info("our connection: peak %d -> %d MiB", before >> 20, after >> 20)
        assert after - before < MAX_GROWTH_BYTES


@pytest.mark.slow
def test_bytes_received_before_a_handshake_are_limited() -> None:
    """Each client starts a command of seven mebibytes; ZeroMQ keeps it until it is complete."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    command = b"\x06" + struct.pack(">Q", 8 * len(PART))
    with MeasuredProcess("a") as attacked, ExitStack() as stack:
        before = attacked.measure()["peak"]
        for _ in range(100):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", attacked.port), 60))
            with suppress(OSError):  # the connection is closed meanwhile
                raw.sendall(greeting + command)
                for _ in range(7):
                    raw.sendall(PART)
            time.sleep(0.02)  # the limits are checked ten times a second, and the machine may be busy
        after = attacked.measure()["peak"]
        logging.getLogger(__name__).info("unknown clients: peak %d -> %d MiB", before >> 20, after >> 20)
        assert after - before < MAX_GROWTH_BYTES
        eventually(lambda: attacked.rejections("an unknown client", "an incomplete message") > 0)


def test_connection_of_an_honest_peer_with_many_frames_stays_open() -> None:
    with MeasuredProcess("a") as process:
        b = process.open_peer("b")
        frame, count = bytes(1 << 20), 200
        for _ in range(count):
            eventually(lambda: b.send("a", frame))
        eventually(lambda: len(process.measure()["received"]) == count)
        assert not [kind for _, kind, _ in process.measure()["counts"] if "incomplete" in kind]


# Connections and descriptors.


def test_idle_connections_leave_descriptors_for_others() -> None:
    """Meanwhile the program opens files, and honest participants connect."""
    soft, hard = 100, 256
    with MeasuredProcess("a", (soft, hard)) as attacked, ExitStack() as idle:
        assert attacked.measure()["limit"] == hard
        for _ in range(20):  # few at a time, because it takes a moment to close them
            for _ in range(40):
                idle.enter_context(socket.create_connection(("127.0.0.1", attacked.port), 60))
            eventually(lambda: attacked.measure()["descriptors"] < hard // 2)
        assert attacked.rejections("an unknown client", "an idle connection") > 0
        b = attacked.open_peer("b")
        assert b.send("a", b"hello")
        eventually(lambda: attacked.measure()["received"] == ["b"])


def test_further_connections_of_a_participant_are_closed_and_the_first_stays_open() -> None:
    with MeasuredProcess("a", (256, 256)) as attacked:
        first = attacked.connect_client("c")
        first.send(ping())
        assert first.poll(60_000)
        first.recv()
        for _ in range(3 * MAX_CONNECTIONS_PER_PEER):
            attacked.connect_client("c").send(ping())
        eventually(lambda: attacked.rejections("c", "a further connection") > 0)
        first.send(ping())
        assert first.poll(60_000)
        eventually(lambda: attacked.measure()["descriptors"] < 128)
