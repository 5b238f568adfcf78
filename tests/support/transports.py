"""A transport that tests can listen to and meddle with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cgd import LocalPeers, Peers
from cgd.secagg.session import Session
from cgd.transport.driver import SessionDriver
from support.wire import pair_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cgd.peers import SumSettings
    from cgd.secagg.messages import Buffer
    from cgd.transport.base import Transport

MEMBERS = ("a", "b", "c")


class BentTransport:
    """Sends what `bend` makes of each frame."""

    def __init__(self, inner: Transport, bend: Callable[[bytes], bytes]) -> None:
        self.me, self.members = inner.me, inner.members
        self._inner, self._bend = inner, bend

    def send(self, to: str, frame: bytes) -> bool:
        return self._inner.send(to, self._bend(frame))

    def receive(self, timeout: float | None) -> tuple[str, Buffer] | None:
        return self._inner.receive(timeout)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def custom_peers(transports: Sequence[Transport], settings: list[SumSettings], timeout: float = 5.0) -> LocalPeers:
    keys = pair_keys(MEMBERS)
    session = os.urandom(16)
    return LocalPeers(
        Peers(SessionDriver(transport, Session(me, MEMBERS, session, keys[me]), timeout), own)
        for me, transport, own in zip(MEMBERS, transports, settings, strict=True)
    )
