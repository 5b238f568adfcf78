"""Drivers: the interfaces below `Peers` that run the protocol over a transport and store recovery states.

`SessionDriver` runs one session in the thread that requests a sum. That is enough for members of one process.
`GroupDriver` (group_driver.py) uses a `FederationRuntime`, which runs a federation in its own thread, so that a
participant answers its peers while its program computes.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cgd.errors import ClosedError, InputError, LocalProtocolError, MembershipError, PeerTimeoutError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from cgd.secagg.journal import OptimizerState
    from cgd.secagg.journal_entry import Step
    from cgd.secagg.messages import Buffer, PeerId, Reason, SumSpec
    from cgd.secagg.session import Session
    from cgd.transport.base import Transport
    from cgd.transport.waiting_times import WaitingTimes

# The pause between two attempts to send to a peer whose queue is full; nothing else is polled.
MIN_PAUSE_WHEN_FULL_SECONDS = 0.002
# The longest time that a member spends on sending its last frames (Abort, Leave).
FLUSH_SECONDS = 2.0


@dataclass
class Traffic:
    """Counters of a member's sums, frames and bytes."""

    sums: int = 0
    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0


class Driver(Protocol):
    """One member's side of a group that sums."""

    traffic: Traffic

    @property
    def waiting(self) -> WaitingTimes | None:
        """How long our program computed and waited until now; None in one process, where members share processors."""

    @property
    def me(self) -> PeerId:
        """The name of this member."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, in order."""

    @property
    def session_id(self) -> bytes:
        """The identifier of the session, the same at all its members."""

    @property
    def number(self) -> int:
        """The number of the latest sum that this member started or aborted; 0 before the first."""

    @property
    def epoch(self) -> int:
        """The current epoch of the membership; 0 if the members never change."""

    @property
    def quorum(self) -> int | None:
        """The least number of members of a sum, if members may be absent; None if every sum has all."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context manager that admits one sum at a time."""

    def next_round(self) -> tuple[int, int]:
        """Return the epoch of the next sum and its number of addends."""

    def run_sum(
        self,
        spec: SumSpec,
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,
        step: Step | None,
        before_reveal: Callable[[], None],
    ) -> npt.NDArray[Any]:
        """Run the next sum and return its total.

        Args:
            spec: the settings of the sum.
            encode: returns this member's addend for the given epoch; called for every attempt.
            epoch: the epoch of the sum.
            step: the optimiser step that it belongs to, if any.
            before_reveal: called in every attempt before the total can become known; if it raises a `RevealError`,
                the sum fails and nobody learns the total.
        """

    def abort_sum(self, reason: Reason) -> None:
        """Abort the next sum: its other members get an error instead of waiting for this one."""

    def repeat_sum(self) -> None:
        """Return the total of the last sum again when the program requests it again, if totals are stored."""

    def close(self, *, done: bool) -> None:
        """Leave the group and notify its members; `done` is True if this member's program has finished."""


class Recovery(Protocol):
    """The recovery store of one group of members: the optimiser states with which a restarted member continues.

    An optimiser hands over its common state as immutable bytes after every step. The store never runs its code.
    """

    keeps_states: bool
    """False if nothing is stored, so that an optimiser need not serialise its state."""

    def is_replay(self) -> bool:
        """Return whether the program's next sum was finished before and comes from the journal."""

    def save(self, slot: int, steps: int, content: bytes, *, fixed: bool = False) -> None:
        """Store an optimiser's state after `steps` steps.

        A `fixed` state does not change until it is replaced; members compare it before every sum.
        """

    def load(self, slot: int) -> OptimizerState | None:
        """Return an optimiser's state as the members have it; wait until that is known."""

    def is_overtaken(self, slot: int, steps: int) -> bool:
        """Return whether the other members have gone on without this one, beyond this number of steps."""

    def size_in(self, epoch: int) -> int:
        """Return the number of members in an epoch, with those that are absent; 0 if it is not known."""

    def require_all(self, *, required: bool) -> None:
        """Let the program's next sums wait for all members, although there is a quorum; or no longer."""

    def took_part_in_last(self) -> bool:
        """Return whether this member's addend is in the program's latest sum."""

    def skip(self, slot: int, steps: int) -> None:
        """Skip the sums of an optimiser's first `steps` steps: their result is part of its state."""

    def jump(self, step: int) -> None:
        """Start the program's loop at this step: skip the sums of all groups that belong to earlier steps."""

    def set_step(self, step: int) -> None:
        """Record the step that the program's loop is at."""

    def may_be_revealed(self, step: Step) -> bool:
        """Return whether the gradient sum of this step was attempted before, so that somebody may have its total."""

    def took_part(self) -> bool:
        """Return False if the program's next sum was finished by other members, before this one joined."""


class NoRecovery:
    """Null implementation for members that are not restarted; see `Recovery`."""

    keeps_states = False

    def is_replay(self) -> bool:
        """Return False."""
        return False

    def save(self, slot: int, steps: int, content: bytes, *, fixed: bool = False) -> None:
        """Do nothing."""

    def load(self, slot: int) -> OptimizerState | None:  # noqa: ARG002
        """Return None."""
        return None

    def is_overtaken(self, slot: int, steps: int) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def size_in(self, epoch: int) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def require_all(self, *, required: bool) -> None:
        """Do nothing."""

    def took_part_in_last(self) -> bool:
        """Return True."""
        return True

    def skip(self, slot: int, steps: int) -> None:
        """Do nothing."""

    def jump(self, step: int) -> None:
        """Do nothing."""

    def set_step(self, step: int) -> None:
        """Do nothing."""

    def may_be_revealed(self, step: Step) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def took_part(self) -> bool:
        """Return True."""
        return True


class SessionDriver:
    """Runs one session over a transport, in the thread that requests a sum; see `Driver`."""

    def __init__(self, transport: Transport, session: Session, timeout: float | None = None) -> None:
        self.traffic = Traffic()
        self.waiting = None
        self._timeout = timeout
        self._transport = transport
        self._session = session
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._unsent: tuple[PeerId, Buffer] | None = None
        if timeout is not None and not timeout > 0:  # also NaN
            raise InputError(f"timeout is {timeout}; it is a number of seconds above 0, or None to wait without limit")
        if transport.me != session.me:
            raise MembershipError(f"the transport belongs to {transport.me}, the session to {session.me}")

    @property
    def me(self) -> PeerId:
        """The name of this member."""
        return self._session.me

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, in order."""
        return self._session.members

    @property
    def session_id(self) -> bytes:
        """The identifier of the session."""
        return self._session.session

    @property
    def number(self) -> int:
        """The number of the latest sum."""
        return self._session.number

    @property
    def epoch(self) -> int:
        """0: the members of a session do not change."""
        return 0

    @property
    def quorum(self) -> None:
        """None: every sum of a session has all members."""
        return None

    def next_round(self) -> tuple[int, int]:
        """Return the epoch of the next sum, 0, and its number of addends."""
        return self.epoch, len(self.members)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Admit one sum at a time."""
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
                self._leave_if_idle()

    def run_sum(
        self,
        spec: SumSpec,
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,  # noqa: ARG002
        step: Step | None,  # noqa: ARG002
        before_reveal: Callable[[], None],
    ) -> npt.NDArray[Any]:
        """Run the next sum and return its total."""
        secret = encode()
        try:
            self._session.start(spec, secret, before_reveal=before_reveal)
            self._exchange_frames()
            self.traffic.sums += 1
            return self._session.total
        except BaseException as error:
            if self._session.running:  # an interrupt or a timeout: the peers must not wait for this member
                self._session.end(f"{type(error).__name__} during a sum")
            self._flush()
            raise

    def abort_sum(self, reason: Reason) -> None:
        """Abort the next sum."""
        self._session.refuse(reason)
        self._flush()

    def repeat_sum(self) -> None:
        """Do nothing: a session stores no totals."""

    def close(self, *, done: bool) -> None:  # noqa: ARG002
        """Leave the session. A sum that runs in another thread fails."""
        self._closed.set()
        self._leave_if_idle()
        self._transport.wakeup()

    def _exchange_frames(self) -> None:
        """Send and receive frames until the sum is finished and all frames are sent."""
        last_received = time.monotonic()
        while True:
            blocked = self._send_all()
            if self._session.fault is not None:
                raise self._session.fault
            if not blocked and not self._session.running:
                return
            pause = MIN_PAUSE_WHEN_FULL_SECONDS if blocked else self._remaining_timeout(last_received)
            received = self._transport.receive(pause)
            if received is not None:
                last_received = time.monotonic()
                self._process_frame(*received)
            elif self._closed.is_set():
                raise ClosedError(f"the connection of {self.me} was closed during a sum")
            elif self._timeout is not None and time.monotonic() - last_received >= self._timeout:
                if not self._session.running:
                    return  # all members have confirmed; the unsent frames are sent with the next sum
                what, missing = self._session.waiting_for
                if self._unsent is not None:
                    what, missing = "room for our frames", frozenset({self._unsent[0]})
                remedy = (
                    "its program has not started this sum: if its steps take longer than this, raise the timeout"
                    if what == "Ready"
                    else "check whether it still runs"
                )
                raise PeerTimeoutError(missing, self._timeout, f"{what} in sum {self._session.number}", remedy)

    def _remaining_timeout(self, last_received: float) -> float | None:
        return None if self._timeout is None else max(0.0, last_received + self._timeout - time.monotonic())

    def _send_all(self) -> bool:
        """Send all frames; return True if a peer's queue is full. The frame that did not fit is sent first later."""
        while (outgoing := self._unsent or self._session.next_outgoing()) is not None:
            self._unsent = outgoing
            if not self._send(*outgoing):
                return True
            self._unsent = None
        return False

    def _send(self, to: PeerId, frame: Buffer) -> bool:
        if not self._transport.send(to, frame):
            return False
        self.traffic.frames_sent += 1
        self.traffic.bytes_sent += len(frame)
        return True

    def _process_frame(self, sender: PeerId, frame: Buffer) -> None:
        self.traffic.frames_received += 1
        self.traffic.bytes_received += len(frame)
        self._session.receive(sender, frame)

    def _flush(self) -> None:
        """Send the remaining frames (Abort, Leave) as far as possible; a full queue does not delay the other peers."""
        remaining = [] if self._unsent is None else [self._unsent]
        self._unsent = None
        remaining += iter(self._session.next_outgoing, None)
        deadline = time.monotonic() + FLUSH_SECONDS
        with suppress(TransportError):
            while remaining := [outgoing for outgoing in remaining if not self._send(*outgoing)]:
                if time.monotonic() > deadline:
                    return
                time.sleep(MIN_PAUSE_WHEN_FULL_SECONDS)

    def _leave_if_idle(self) -> None:
        """Leave the session, unless a sum is running: then its thread leaves when the sum has failed."""
        if self._busy.acquire(blocking=False):
            self._session.end("this member closed it")
            self._flush()
            self._transport.close()
            self._busy.release()
