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

# The largest frame that a transport must carry. The protocol sends no larger ones: it cuts vectors into slices.
MAX_FRAME_BYTES = 4 << 20
# How long `close` continues to deliver frames.
CLOSE_SECONDS = 2.0
# Members are not started in the same second, and connect again after a fault. For so long, that is no reason to warn.
SETTLE_SECONDS = 15.0


@dataclass(frozen=True)
class PeerStatus:
    """The connection status of a peer.

    Attributes:
        connected: True if frames can be sent to it at the moment.
        latency: the measured round-trip time in seconds, or None.
        problem: the reason if it is not connected, or if nothing is received from it.
        silent: the seconds since its process last answered; infinite if it never did. None if that is not measured.
    """

    connected: bool
    latency: float | None = None
    problem: str = ""
    silent: float | None = None


class Transport(Protocol):
    """One member's connection with its peers.

    Any thread may call `send`, `wakeup` and `close`, also while another one is blocked in `receive`. Only one thread at
    a time calls `receive`.
    """

    @property
    def me(self) -> PeerId:
        """The name of this member."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, including this one, sorted."""

    def send(self, to: PeerId, frame: Buffer) -> bool:
        """Put a frame into the send queue of a peer, without blocking.

        An accepted frame is delivered without further calls of this transport. So a transport over sockets has a thread
        of its own, as `ZeroMQTransport` does. A transport carries frames of up to `MAX_FRAME_BYTES`, also empty ones,
        and may reject larger ones with an `InputError`. The queue is bounded: it holds some MiB. An empty queue accepts
        any frame that the transport carries.

        Returns:
            True if the frame is accepted. It is accepted and dropped if this transport is closed, or if the peer has
            closed its own. False if the queue is full: receive, then try again.

        Raises:
            MembershipError: `to` is not the name of a peer: it is unknown, or `me`.
        """

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """Return the next frame and its sender; None after `timeout` seconds without a frame, or after `wakeup`.

        The frame is `bytes`, or a read-only memoryview of bytes that the transport never changes. Frames that a peer
        sent before it closed are still received, also after a frame to this peer could not be sent. A `timeout` of None
        waits without limit.

        Raises:
            ClosedError: this transport is closed.
        """

    def wakeup(self) -> None:
        """Make a blocked `receive` call, or else a later one, return None at once.

        Frames that are waiting may be returned first; the wakeup is not lost.
        """

    def close(self) -> None:
        """Deliver the accepted frames, then release all resources; a second call does nothing.

        A member closes its transport directly after its last frame. So frames for which `send` has returned True are
        still delivered, for about `CLOSE_SECONDS`; the call may block that long. Frames that are not received yet are
        dropped, and a blocked `receive` raises ClosedError.
        """


class ReconnectingTransport(Transport, Protocol):
    """A transport that reconnects to peers that were unreachable for some time.

    Until a peer is connected again, frames to it wait in its send queue.
    """

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Replace the members and their addresses."""

    def status(self) -> dict[PeerId, PeerStatus]:
        """Return the connection status of every peer."""

    def backlog(self, *, connected: bool) -> int:
        """Return the number of frames that peers have not consumed yet; with `connected`, of connected peers only."""
