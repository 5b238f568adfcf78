"""A transport that tests can listen to and meddle with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.network.transport import Transport


class BentTransport:
    """Sends what `bend` makes of each frame."""

    def __init__(self, inner: Transport, bend: Callable[[bytes], bytes]) -> None:
        self.me, self.members = inner.me, inner.members
        self._inner, self._bend = inner, bend

    def send(self, to: str, frame: bytes) -> bool:
        return self._inner.send(to, self._bend(frame))

    def receive(self, timeout: float | None) -> tuple[str, bytes] | None:
        return self._inner.receive(timeout)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()
