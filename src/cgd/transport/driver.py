"""What drives the protocol over a transport: the seam below `Peers`.

`SessionDriver` drives one session in the thread of whoever asks for a sum: all that members inside one process need.
`FederationRuntime` (conductor.py) drives a whole federation in a thread of its own, so that a participant answers its peers
while its program computes.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cgd.errors import ClosedError, InputError, LocalProtocolError, MembershipError, PeerTimeoutError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from cgd.secagg.journal import OptimizerState, Step
    from cgd.secagg.messages import Buffer, PeerId, Reason, SumSpec
    from cgd.secagg.session import Session
    from cgd.transport.base import Transport

# While a peer's inbox is full we look into our own this often; it is the only place where we poll.
MIN_PAUSE_WHEN_FULL_SECONDS = 0.002
# How long a member that gives up tries to tell the others.
FAREWELL_SECONDS = 2.0


@dataclass
class Traffic:
    """What a member sent and received so far."""

    sums: int = 0
    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0


class Driver(Protocol):
    """One member's side of a group that sums."""

    traffic: Traffic

    @property
    def me(self) -> PeerId:
        """This member's name."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, in order."""

    @property
    def session(self) -> bytes:
        """What tells this session from any other; all its members have the same."""

    @property
    def number(self) -> int:
        """The number of the latest sum that this member began or declined; 0 before the first."""

    def turn(self) -> AbstractContextManager[None]:
        """One sum at a time: entered before anything is done for it."""

    def total(
        self, spec: SumSpec, encode: Callable[[], npt.NDArray[Any]], epoch: int, step: Step | None
    ) -> npt.NDArray[Any]:
        """Run the next sum; `encode` makes our addend, for the members of an epoch."""

    def refuse(self, reason: Reason) -> None:
        """Tell the others that we cannot take part in the next sum."""

    def close(self, *, done: bool) -> None:
        """Leave, and tell the others; `done`: whether our program has done all it wanted."""

    def outlook(self) -> tuple[int, int]:
        """The epoch of the next sum, which changes with the members, and how many addends it has."""

    def present(self) -> int:
        """The present epoch; 0 where members do not change."""

    def past(self) -> bool:
        """Whether the next sum was made before."""

    def moving(self) -> AbstractContextManager[object]:
        """Held while an optimiser's state changes, so that nobody is given half of it."""

    def remember(self, slot: int, steps: int, content: Callable[[], bytes], *, fixed: bool = False) -> None:
        """An optimiser has taken `steps` steps; `content` makes its state, for members that come back.

        A `fixed` state does not change until it is replaced; members compare it before every sum.
        """

    def recall(self, slot: int) -> OptimizerState | None:
        """The state of an optimiser as the members remember it."""

    def skip(self, slot: int, steps: int) -> None:
        """Do without the sums of an optimiser's first `steps` steps: their outcome is in its state."""

    def jump(self, step: int) -> None:
        """Begin with this step of the program's loop: what all groups summed in earlier ones is not asked for again."""

    def reach(self, step: int) -> None:
        """The program's loop is at this step."""


class NoRecovery:
    """What a `Driver` does about the past where nobody who dies comes back: nothing."""

    def present(self) -> int:
        """There is only one."""
        return 0

    def past(self) -> bool:
        """There is none."""
        return False

    def moving(self) -> AbstractContextManager[object]:
        """Nothing to guard."""
        return nullcontext()

    def remember(self, slot: int, steps: int, content: Callable[[], bytes], *, fixed: bool = False) -> None:
        """Nothing is remembered."""

    def recall(self, slot: int) -> OptimizerState | None:  # noqa: ARG002
        """Nothing is remembered."""
        return None

    def skip(self, slot: int, steps: int) -> None:
        """Nothing is remembered."""

    def jump(self, step: int) -> None:
        """Nothing is remembered."""

    def reach(self, step: int) -> None:
        """Nothing is remembered."""


class SessionDriver(NoRecovery):
    """Drives one session over a transport, in the thread that asks for a sum; see `Driver`."""

    def __init__(self, transport: Transport, session: Session, timeout: float | None = None) -> None:
        self.traffic = Traffic()
        self._timeout = timeout
        self._transport = transport
        self._session = session
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._unsent: tuple[PeerId, bytes] | None = None
        if timeout is not None and timeout <= 0:
            raise InputError(f"timeout is {timeout}; it is a number of seconds above 0, or None to wait for ever")
        if transport.me != session.me:
            raise MembershipError(f"the transport is that of {transport.me}, the session that of {session.me}")

    @property
    def me(self) -> PeerId:
        """This member's name."""
        return self._session.me

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, in order."""
        return self._session.members

    @property
    def session(self) -> bytes:
        """What tells this session from any other."""
        return self._session.session

    @property
    def number(self) -> int:
        """The number of the latest sum."""
        return self._session.number

    def total(
        self,
        spec: SumSpec,
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,  # noqa: ARG002
        step: Step | None,  # noqa: ARG002
    ) -> npt.NDArray[Any]:
        """Run the next sum."""
        secret = encode()
        try:
            self._session.start(spec, secret)
            self._drive()
            self.traffic.sums += 1
            return self._session.total
        except BaseException as error:
            if self._session.running:  # stopped from outside, or by a silent peer: nobody shall wait for us
                self._session.end(f"{type(error).__name__} during a sum")
            self._say_what_is_left()
            raise

    def refuse(self, reason: Reason) -> None:
        """Tell the others that we cannot take part in the next sum."""
        self._session.refuse(reason)
        self._say_what_is_left()

    def close(self, *, done: bool) -> None:  # noqa: ARG002
        """Leave. A sum that another thread is in fails."""
        self._closed.set()
        self._depart_if_idle()
        self._transport.wake()

    def outlook(self) -> tuple[int, int]:
        """Always the same: the members of a session do not change."""
        return 0, len(self.members)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One sum at a time."""
        if self._closed.is_set():
            raise ClosedError(f"the connection of {self.me} is closed; make new peers for further sums")
        if not self._busy.acquire(blocking=False):
            if self._closed.is_set():
                raise ClosedError(f"the connection of {self.me} is being closed; make new peers for further sums")
            raise LocalProtocolError(f"{self.me} is in a sum already; a member's sums run one after the other")
        try:
            yield
        finally:
            self._busy.release()
            if self._closed.is_set():
                self._depart_if_idle()

    def _drive(self) -> None:
        """Send what there is to send and take in what comes, until the sum is finished and all is sent."""
        heard = time.monotonic()
        while True:
            blocked = self._send_all()
            if self._session.fault is not None:
                raise self._session.fault
            if not blocked and not self._session.running:
                return
            received = self._transport.receive(MIN_PAUSE_WHEN_FULL_SECONDS if blocked else self._patience(heard))
            if received is not None:
                heard = time.monotonic()
                self._take(*received)
            elif self._closed.is_set():
                raise ClosedError(f"the connection of {self.me} was closed during a sum")
            elif self._timeout is not None and time.monotonic() - heard >= self._timeout:
                if not self._session.running:
                    return  # all have confirmed; what we could not send yet goes out with the next sum
                what, missing = self._session.waiting_for
                if self._unsent is not None:
                    what, missing = "room for our frames", frozenset({self._unsent[0]})
                raise PeerTimeoutError(missing, self._timeout, f"{what} in sum {self._session.number}")

    def _patience(self, heard: float) -> float | None:
        return None if self._timeout is None else max(0.0, heard + self._timeout - time.monotonic())

    def _send_all(self) -> bool:
        """Send until nothing is left; True if a peer's inbox is full. The frame that did not fit is kept."""
        while (outgoing := self._unsent or self._session.next_outgoing()) is not None:
            self._unsent = outgoing
            if not self._send(*outgoing):
                return True
            self._unsent = None
        return False

    def _send(self, to: PeerId, frame: bytes) -> bool:
        if not self._transport.send(to, frame):
            return False
        self.traffic.frames_sent += 1
        self.traffic.bytes_sent += len(frame)
        return True

    def _take(self, sender: PeerId, frame: Buffer) -> None:
        self.traffic.frames_received += 1
        self.traffic.bytes_received += len(frame)
        self._session.receive(sender, frame)

    def _say_what_is_left(self) -> None:
        """Tell the others, as well as can be, that we gave up or leave; one that is full does not hold up the rest."""
        left = [] if self._unsent is None else [self._unsent]
        self._unsent = None
        left += iter(self._session.next_outgoing, None)
        deadline = time.monotonic() + FAREWELL_SECONDS
        with suppress(TransportError):
            while left := [outgoing for outgoing in left if not self._send(*outgoing)]:
                if time.monotonic() > deadline:
                    return
                time.sleep(MIN_PAUSE_WHEN_FULL_SECONDS)

    def _depart_if_idle(self) -> None:
        """Leave the session, unless a sum is running: then its thread does, as soon as it notices."""
        if self._busy.acquire(blocking=False):
            self._session.end("this member closed it")
            self._say_what_is_left()
            self._transport.close()
            self._busy.release()
