"""Transports for tests: one that changes frames, and three connected ZeroMQ transports with access to their keys."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import zmq

from cgd import LocalPeers, Peers
from cgd.peers import SumSettings
from cgd.secagg.session import Session
from cgd.transport.connections import Contact
from cgd.transport.driver import SessionDriver
from cgd.transport.zeromq import ZeroMQTransport
from support.ports import free_port
from support.wire import pair_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cgd.secagg.messages import Buffer
    from cgd.transport.base import Transport

MEMBERS = ("a", "b", "c")
DEADLINE_SECONDS = 60.0


def eventually(condition: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
    """Wait until a condition holds; fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds:g} s"
        time.sleep(0.02)


class TamperingTransport:
    """A transport that sends the result of `change` in place of each frame."""

    def __init__(self, inner: Transport, change: Callable[[bytes], bytes]) -> None:
        self.me, self.members = inner.me, inner.members
        self._inner, self._change = inner, change

    def send(self, to: str, frame: Buffer) -> bool:
        return self._inner.send(to, self._change(bytes(frame)))

    def receive(self, timeout: float | None) -> tuple[str, Buffer] | None:
        return self._inner.receive(timeout)

    def wakeup(self) -> None:
        self._inner.wakeup()

    def close(self) -> None:
        self._inner.close()


def custom_peers(
    transports: Sequence[Transport], settings: Sequence[SumSettings] | None = None, timeout: float = 5.0
) -> LocalPeers:
    """Return members with these connected transports, and with these settings instead of the default ones."""
    members = transports[0].members
    keys = pair_keys(members)
    session = os.urandom(16)
    return LocalPeers(
        Peers(SessionDriver(each, Session(each.me, members, session, keys[each.me]), timeout), own)
        for each, own in zip(transports, settings or [SumSettings()] * len(transports), strict=True)
    )


def outcomes(members: LocalPeers, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the result or the error of every member."""

    def attempt(peers: Peers, *own: Any) -> Any:
        try:
            return function(peers, *own)
        except Exception as error:
            return error

    return members.run(attempt, *arguments)


class ZeroMQNetwork:
    """The keys and addresses of three participants, and the sockets that a test opens with them."""

    def __init__(self) -> None:
        self.pairs = {name: zmq.curve_keypair() for name in MEMBERS}
        self.contacts = {
            name: Contact(f"tcp://127.0.0.1:{free_port()}", public) for name, (public, _) in self.pairs.items()
        }
        self.transports: list[ZeroMQTransport] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clients: list[zmq.Socket[bytes]] = []

    def open(self, name: str, contacts: dict[str, Contact] | None = None, key: bytes = b"") -> ZeroMQTransport:
        """Open the transport of a participant."""
        self.transports.append(ZeroMQTransport(name, contacts or self.contacts, key or self.pairs[name][1]))
        return self.transports[-1]

    def port(self, name: str) -> int:
        return int(self.contacts[name].address.rsplit(":", 1)[1])

    def connect_client(
        self,
        to: str,
        pair: tuple[bytes, bytes],
        server_key: bytes = b"",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> zmq.Socket[bytes]:
        """Connect a plain CURVE socket with the keys `pair` to a participant."""
        dealer = (context or self._context).socket(zmq.DEALER)
        dealer.curve_serverkey = server_key or self.contacts[to].public_key
        dealer.curve_publickey, dealer.curve_secretkey = pair
        dealer.connect(self.contacts[to].address)
        self._clients.append(dealer)
        return dealer

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        for client in self._clients:
            client.close(linger=0)
        self._context.destroy(linger=0)


def connected(transport: ZeroMQTransport, *peers: str) -> bool:
    """Return whether a transport is connected to all these peers."""
    status = transport.status()
    return all(status[peer].connected for peer in peers)
