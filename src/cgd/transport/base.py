"""The transport interface: the boundary between the protocol and the code that carries its frames.

A transport connects one member with its peers. It delivers whole frames with the name of their sender, and keeps the
order of each sender's frames. It neither reads nor creates frames. Every transport passes the test suite in
tests/transport/test_base.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import Buffer, PeerId


@dataclass(frozen=True)
class PeerStatus:
    """The connection status of a peer.

    Attributes:
        connected: True if frames can be sent to it at the moment.
        latency: the measured round-trip time in seconds, or None.
        problem: the reason if it is not connected, or if nothing is received from it.
    """

    connected: bool
    latency: float | None = None
    problem: str = ""


class Transport(Protocol):
    """One member's connection with its peers."""

    @property
    def me(self) -> PeerId:
        """The name of this member."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, including this one."""

    def send(self, to: PeerId, frame: bytes) -> bool:
        """Send a frame without blocking.

        Returns:
            False if the send queue of the peer is full: receive, then try again. A frame to a peer that has closed its
            transport is dropped.
        """

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """Return the next frame and its sender; None after `timeout` seconds without a frame, or after `wakeup`.

        Raises:
            ClosedError: this transport is closed.
        """

    def wakeup(self) -> None:
        """Make a blocked `receive` call, or else the next one, return at once. Safe to call from any thread."""

    def close(self) -> None:
        """Release all resources; a second call does nothing."""


class ReconnectingTransport(Transport, Protocol):
    """A transport that reconnects to peers that were unreachable for some time."""

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Replace the members and their addresses."""

    def status(self) -> dict[PeerId, PeerStatus]:
        """Return the connection status of every peer."""

    def backlog(self, *, connected: bool) -> int:
        """Return the number of frames that peers have not consumed yet; with `connected`, of connected peers only."""
