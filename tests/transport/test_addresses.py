"""Addresses that peers report: a peer can redirect us to its own machine only, and not often."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import pytest
import zmq

from cgd.errors import InputError
from cgd.transport import link
from cgd.transport.addresses import new_address
from cgd.transport.auth import RejectionLog
from cgd.transport.connections import MIN_SECONDS_BETWEEN_MOVES, Connection, Contact
from cgd.transport.limits import ConnectionLimits
from cgd.transport.link import Datagram, DatagramKind
from support.ports import free_port
from support.transports import eventually

if TYPE_CHECKING:
    from support.transports import ZeroMQNetwork


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
def test_new_address_accepts_the_listed_host_and_the_source_of_the_connection(
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
def test_new_address_rejects_other_hosts_and_invalid_addresses(claimed: str) -> None:
    with pytest.raises(InputError):
        new_address(claimed, "tcp://a.example:7001", "192.0.2.7")


def report_address(network: ZeroMQNetwork, address: str) -> None:
    """Send a HELLO of c with this address to a, and wait for the answer."""
    client = network.connect_client("a", network.pairs["c"])
    hello = Datagram(DatagramKind.HELLO, b"m" * 8, link.NO_INCARNATION, 0, f"c\0{address}".encode())
    client.send(hello.to_bytes())
    assert client.poll(60_000)


def test_peer_cannot_make_us_connect_to_another_machine(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    a = network.open("a")
    with socket.create_server(("127.0.0.2", 0)) as other:
        address = f"tcp://127.0.0.2:{other.getsockname()[1]}"
        report_address(network, address)
        other.settimeout(1.0)
        with pytest.raises(TimeoutError):
            other.accept()
    assert a.rejections.counts["c", "a new address"] == 1
    line = f"refused a new address from c (it reports the address {address}, and its connection comes from"
    eventually(lambda: line in caplog.text)


def test_peer_with_another_port_on_its_machine_is_connected_there(
    network: ZeroMQNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    network.open("a")
    with socket.create_server(("127.0.0.1", 0)) as new:
        new.settimeout(60)
        port = new.getsockname()[1]
        report_address(network, f"tcp://another-name.example:{port}")
        new.accept()[0].close()
    eventually(lambda: f"c is at tcp://127.0.0.1:{port} now" in caplog.text)


def test_peer_cannot_make_us_change_ports_often() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pair = zmq.curve_keypair()
    first, second, third = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    connection = Connection(context, zmq.Poller(), "c", Contact(first, pair[0]), pair, ConnectionLimits(RejectionLog()))
    connection.request_move(second)
    connection.reconnect_if_due(100.0)
    assert connection.address == second
    connection.request_move(first)
    connection.request_move(third)
    connection.reconnect_if_due(100.0 + MIN_SECONDS_BETWEEN_MOVES / 2)
    assert connection.address == second
    connection.reconnect_if_due(101.0 + MIN_SECONDS_BETWEEN_MOVES)
    assert connection.address == third
    connection.close()
    context.destroy(linger=0)
