"""If cgd fails on a message, only that message is lost: transports and the hub keep running."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from cgd.transport import link
from cgd.transport.hub import HubClient
from cgd.transport.link import Datagram, DatagramKind
from cgd.transport.routes import RelayedRoute
from support.hubs import HubFederation, random_addend
from support.transports import MEMBERS, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.transport.zeromq import ZeroMQTransport
    from support.transports import ZeroMQNetwork

FAILED = "a message that cgd failed on"


def fail(*_: object) -> None:
    raise RuntimeError("a fault in cgd")


@contextmanager
def delivers_frames_of_b(network: ZeroMQNetwork, a: ZeroMQTransport) -> Iterator[ZeroMQTransport]:
    """Open b, run the block, then check that a frame of b arrives at a."""
    b = network.open("b")
    yield b
    assert b.send("a", b"still running?")
    assert a.receive(60) == ("b", b"still running?")


@pytest.mark.parametrize("method", ["on_data", "on_peer_address", "send_ack"])
def test_transport_continues_after_an_error_in_a_message(
    network: ZeroMQNetwork, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    a = network.open("a")
    vars(a._routes["c"])[method] = fail
    client = network.connect_client("a", network.pairs["c"])
    for _ in range(50):
        client.send(Datagram(DatagramKind.HELLO, b"m" * 8, link.NO_INCARNATION, 0, b"c\0").to_bytes())
    eventually(lambda: a.rejections.counts.get(("c", FAILED), 0) == 50)
    assert 1 <= caplog.text.count("RuntimeError: a fault in cgd") < 25  # one line in ten seconds, with its traceback
    with delivers_frames_of_b(network, a):
        pass


def test_transport_continues_after_an_error_in_an_answer(network: ZeroMQNetwork) -> None:
    a = network.open("a")
    vars(a._routes["b"])["on_ack"] = fail
    with delivers_frames_of_b(network, a):
        eventually(lambda: a.rejections.counts.get(("b", FAILED), 0) > 0)


def test_transport_continues_after_an_error_in_sending_to_a_peer(network: ZeroMQNetwork) -> None:
    a = network.open("a")
    vars(a._routes["c"])["can_send"] = fail
    with delivers_frames_of_b(network, a) as b:
        eventually(lambda: a.rejections.counts.get(("c", FAILED), 0) > 0)
    assert a.send("b", b"yes")
    assert b.receive(60) == ("a", b"yes")


@pytest.mark.parametrize("kind", [HubClient, RelayedRoute])
def test_sums_through_the_hub_recover_from_errors_in_messages(
    kind: type[HubClient | RelayedRoute], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_data = kind.on_data
    failures = 0

    def fail_five_times(self: HubClient | RelayedRoute, datagram: Datagram, reply_to: bytes) -> object:
        nonlocal failures
        if self.peer == "c" and failures < 5:
            failures += 1
            raise RuntimeError("a fault in cgd")
        return on_data(self, datagram, reply_to)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "on_data", fail_five_times)
    with HubFederation() as federation:
        hub = federation.start_hub()
        federation.start()
        totals, errors = federation.sums({name: random_addend(name, 1) for name in MEMBERS})
        assert not errors
        assert len({total.tobytes() for total in totals.values()}) == 1
        assert failures == 5
        assert hub.failure is None
