"""The seam between the protocol and whatever carries its frames.

A transport connects one member with its peers. It carries whole frames, knows who sent each, and keeps the order of one
sender's frames. It neither reads nor makes them. Every transport passes the suite in tests/transport/test_base.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import Buffer, PeerId


@dataclass(frozen=True)
class PeerStatus:
    """How it stands with a peer.

    Attributes:
        connected: whether frames reach it at the moment.
        latency: seconds to it and back, if that was measured.
        problem: if it is not connected, or nothing comes from it, why.
    """

    connected: bool
    latency: float | None = None
    problem: str = ""


class Transport(Protocol):
    """One member's connection with its peers."""

    @property
    def me(self) -> PeerId:
        """This member's name."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, this one among them."""

    def send(self, to: PeerId, frame: bytes) -> bool:
        """Send a frame, without waiting.

        Returns:
            False if the way to the peer is full at the moment: receive, then try again. A frame for a peer that has
            closed is dropped, as a network would.
        """

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """The next frame and its sender; None when `timeout` seconds have passed without one, or after `wake`.

        Raises:
            ClosedError: this side is closed.
        """

    def wake(self) -> None:
        """Let a `receive` that waits, or else the next one, return at once. May be called from any thread."""

    def close(self) -> None:
        """Let go of everything; a second call does nothing."""


class ReconnectingTransport(Transport, Protocol):
    """A transport whose peers may be away for a while."""

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Have these members from now on."""

    def status(self) -> dict[PeerId, PeerStatus]:
        """How it stands with every peer."""

    def backlog(self, *, connected: bool) -> int:
        """How many frames wait for a peer to take them; `connected`: only for those that can."""
