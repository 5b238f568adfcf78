"""What a member sees, handed on as it is seen: the frames it receives, what it puts into sums, what is opened.

For whoever wants to know what the others could learn: attacks are run on recordings of real runs, which
`cgd.tabular.trace_writer` writes. Where nothing is recorded, nothing of this is in the way: a transport is wrapped only
then, and `Peers` has no observer.

Whatever is handed over here is as secret as the records it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from cgd.secagg.journal import Step
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.base import PeerStatus, ReconnectingTransport, Transport

Sink = Callable[["PeerId", "Buffer"], None]
"""Is given the sender and the bytes of every frame, before the protocol gets them; it may not keep the buffer."""


@dataclass(frozen=True, repr=False)
class Addend:
    """What this member puts into a sum.

    Attributes:
        values: as they are before the weight and the ring; to be read at once, not kept.
        weight: theirs, in a weighted sum.
        context: what the members compare before the sum.
        step: the step of an optimiser that the sum belongs to, if any.
        members: who takes part.
        epoch: of the federation; 0 inside one process.
    """

    values: npt.NDArray[Any]
    weight: float | None
    context: str
    step: Step | None
    members: tuple[PeerId, ...]
    epoch: int


class Observer(Protocol):
    """Sees every sum of a `Peers`."""

    def entering(self, addend: Addend) -> None:
        """This is about to be put into a sum: nothing has left yet.

        It is not called for a sum of the past, made in an earlier life of this process: nothing is put in then. Whoever
        writes addends down here has every one that ever left, whenever the process is killed.
        """

    def opened(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        """The total of a sum, also of one of the past; then `addend` was not put in, and need not be what was."""


class TappedTransport:
    """Another transport, with every frame that it receives handed to a sink first."""

    def __init__(self, inner: Transport, sink: Sink) -> None:
        self._inner, self._sink = inner, sink

    @property
    def me(self) -> PeerId:
        """This member's name."""
        return self._inner.me

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members."""
        return self._inner.members

    def send(self, to: PeerId, frame: bytes) -> bool:
        """Send a frame; see `Transport.send`."""
        return self._inner.send(to, frame)

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """The next frame and its sender, after the sink has had them; see `Transport.receive`."""
        received = self._inner.receive(timeout)
        if received is not None:
            self._sink(*received)
        return received

    def wake(self) -> None:
        """Let our `receive` return; see `Transport.wake`."""
        self._inner.wake()

    def close(self) -> None:
        """Close the other one; the sink stays as it is."""
        self._inner.close()


class TappedReconnectingTransport(TappedTransport):
    """The same for a transport whose peers may be away for a while."""

    def __init__(self, inner: ReconnectingTransport, sink: Sink) -> None:
        super().__init__(inner, sink)
        self._standing = inner

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Have these members from now on."""
        self._standing.update(contacts)

    def status(self) -> dict[PeerId, PeerStatus]:
        """How it stands with every peer."""
        return self._standing.status()

    def backlog(self, *, connected: bool) -> int:
        """How many frames wait for a peer to take them; `connected`: only for those that can."""
        return self._standing.backlog(connected=connected)
