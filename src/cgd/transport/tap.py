"""Hooks for recording a run: the frames that a member receives, its addends, and the totals of its sums.

Attacks are run on recordings of real runs, which `cgd.tabular.trace_writer` writes. Without a recording these hooks
cost nothing: a transport is wrapped only for one, and `Peers.observer` is None otherwise.

Everything that is passed to the hooks is as secret as the records it is computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cgd.errors import FrameError
from cgd.secagg import codec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from cgd.dp.mechanism import NoisyEncoding
    from cgd.secagg.journal_entry import Step
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.base import PeerStatus, ReconnectingTransport, Transport

FrameSink = Callable[["PeerId", "Buffer"], None]
"""Called with the sender and the bytes of every well-formed frame, before the protocol reads it.

It must not keep the buffer. Other bytes are not passed on, because a participant could fill the disk with them: the
protocol rejects and logs them.
"""


@dataclass(frozen=True, repr=False)
class Addend:
    """The input of this member to a sum.

    Attributes:
        values: the values before weighting and encoding; read them at once, do not keep them.
        weight: the weight of the values in a weighted sum, or None.
        context: the text that the members compare before the sum.
        step: the step of an optimiser that the sum belongs to, or None.
        members: the members of the sum.
        epoch: the epoch of the federation; 0 in one process.
        noise: the encoding of a sum with noise, or None.
        entered: in `after_sum` of a sum with noise, the values with noise as they were entered in the latest attempt;
            None if the sum was replayed from the journal.
    """

    values: npt.NDArray[Any]
    weight: float | None
    context: str
    step: Step | None
    members: tuple[PeerId, ...]
    epoch: int
    noise: NoisyEncoding | None = None
    entered: npt.NDArray[Any] | None = None


class Observer(Protocol):
    """Receives the addend and the total of every sum of a `Peers`."""

    def before_sum(self, addend: Addend) -> None:
        """Handle an addend before any part of it is sent.

        It is not called for a sum that is replayed from the journal, because nothing is sent then. An observer that
        writes addends to disk here has all that were ever sent, even if the process is killed.
        """

    def after_sum(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        """Handle the total of a sum.

        It is also called for a sum that is replayed from the journal; `addend` was not sent in this process then, and
        may differ from the one that was.
        """


class TappedTransport:
    """A transport that passes every well-formed frame that is received to a sink first."""

    def __init__(self, inner: Transport, sink: FrameSink) -> None:
        self._inner, self._sink = inner, sink

    @property
    def me(self) -> PeerId:
        """The name of this member."""
        return self._inner.me

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members."""
        return self._inner.members

    def send(self, to: PeerId, frame: Buffer) -> bool:
        """Send a frame; see `Transport.send`."""
        return self._inner.send(to, frame)

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """Pass the next frame to the sink if it is well-formed, then return it; see `Transport.receive`."""
        received = self._inner.receive(timeout)
        if received is not None and _well_formed(*received):
            self._sink(*received)
        return received

    def wakeup(self) -> None:
        """Make a blocked `receive` call return; see `Transport.wakeup`."""
        self._inner.wakeup()

    def close(self) -> None:
        """Close the wrapped transport; the sink is left open."""
        self._inner.close()


class TappedReconnectingTransport(TappedTransport):
    """A reconnecting transport that passes every well-formed frame that is received to a sink first."""

    def __init__(self, inner: ReconnectingTransport, sink: FrameSink) -> None:
        super().__init__(inner, sink)
        self._reconnecting = inner

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Replace the members and their addresses."""
        self._reconnecting.update(contacts)

    def status(self) -> dict[PeerId, PeerStatus]:
        """Return the connection status of every peer."""
        return self._reconnecting.status()

    def backlog(self, *, connected: bool) -> int:
        """Return the number of frames that peers have not consumed yet; with `connected`, of connected peers only."""
        return self._reconnecting.backlog(connected=connected)


def _well_formed(sender: PeerId, frame: Buffer) -> bool:
    try:
        codec.from_bytes(frame, sender)
    except FrameError:
        return False
    return True
