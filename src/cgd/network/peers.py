"""`Peers`: what the layers above know of the others. It drives the protocol over a transport."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cgd.errors import (
    ClosedError,
    InputError,
    LocalProtocolError,
    MembershipError,
    PeerTimeoutError,
    RangeError,
    TransportError,
    WeightError,
)
from cgd.network.arrays import decoded_type, from_numpy, to_numpy
from cgd.protocol.messages import LONGEST_NAME, OPENINGS, SHARINGS, Opening, PeerId, Reason, Sharing, SumSpec
from cgd.ring.fixed_point import WORD_TYPES, FixedPoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import numpy.typing as npt
    import torch

    from cgd.network.transport import Transport
    from cgd.protocol.session import Session

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")

# While a peer's inbox is full we look into our own this often; it is the only place where we poll.
FULL_PAUSE_SECONDS = 0.002
# How long a member that gives up tries to tell the others.
FAREWELL_SECONDS = 2.0
# How far a weight n_l/n in double precision may be from the true quotient.
QUOTIENT_ROUNDING = 2.0**-52


@dataclass(frozen=True)
class SumSettings:
    """How the members sum; the same for all of them.

    Attributes:
        bound: the largest magnitude of a value (of a gradient coordinate, in training).
        ring_bits: 32, or 64 for more precision at twice the bytes.
        sharing: "expanded" (shares from pair keys, nothing extra travels) or "uniform" (the paper's, (m − 1) times
            the bytes, perfect secrecy).
        opening: "mesh" (every member adds up one part) or "aggregator" (one member adds up everything).
        aggregator: the name of that member.
    """

    bound: float = 16.0
    ring_bits: int = 32
    sharing: Sharing = "expanded"
    opening: Opening = "mesh"
    aggregator: PeerId = ""

    def __post_init__(self) -> None:
        FixedPoint.for_weighted_sum(addends=1, bound=self.bound, ring_bits=self.ring_bits)  # refuses what cannot be
        if self.sharing not in SHARINGS:
            raise InputError(f"sharing is {self.sharing!r}; choose one of {', '.join(SHARINGS)}")
        if self.opening not in OPENINGS:
            raise InputError(f"opening is {self.opening!r}; choose one of {', '.join(OPENINGS)}")
        if (self.opening == "aggregator") != bool(self.aggregator):
            raise InputError(
                f"opening is {self.opening!r} and aggregator is {self.aggregator!r}; name one for the other"
            )


@dataclass
class Traffic:
    """What a member sent and received so far."""

    sums: int = 0
    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0


class Peers:
    """This member's connection with the others: `peers.sum(values)` gives everyone the same total.

    `cgd.local_peers` makes them inside one process. One sum runs at a time; use it from one thread.
    Closing tells the others, so that nobody waits for a member that is gone.

    Args:
        transport: carries the frames.
        session: this member's side of the protocol.
        settings: how the members sum.
        timeout: how many seconds to wait for a silent peer before giving up; None waits for ever.

    Attributes:
        traffic: what was sent and received so far.
    """

    def __init__(
        self, transport: Transport, session: Session, settings: SumSettings, timeout: float | None = None
    ) -> None:
        self.settings = settings
        self.timeout = timeout
        self.traffic = Traffic()
        self._transport = transport
        self._session = session
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._unsent: tuple[PeerId, bytes] | None = None
        if timeout is not None and timeout <= 0:
            raise InputError(f"timeout is {timeout}; it is a number of seconds above 0, or None to wait for ever")
        if transport.me != session.me:
            raise MembershipError(f"the transport is that of {transport.me}, the session that of {session.me}")
        if settings.aggregator and settings.aggregator not in self.members:
            names = ", ".join(self.members)
            raise MembershipError(f"the aggregator {settings.aggregator!r} is not a member; name one of {names}")

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
        """What tells this session from any other; all its members have the same."""
        return self._session.session

    @property
    def number(self) -> int:
        """The number of the latest sum that this member began or declined; 0 before the first."""
        return self._session.number

    @property
    def resolution(self) -> float:
        """The step between neighbouring totals of a weighted sum, such as a gradient sum, under the settings."""
        bound, ring_bits = self.settings.bound, self.settings.ring_bits
        return FixedPoint.for_weighted_sum(addends=len(self), bound=bound, ring_bits=ring_bits).resolution

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Peers(me={self.me!r}, members={len(self)}, {self.settings}, {self.traffic})"

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sum(
        self,
        values: Array,
        *,
        weight: float | None = None,
        bound: float | None = None,
        ring_bits: int | None = None,
        context: str = "",
    ) -> Array:
        """The sum of all members' `values`, the same bits for everyone.

        Floats go through the fixed point of the settings and come back in their own type. Integers are summed exactly
        and come back as int64.

        Args:
            values: an array or tensor, of the same shape and type at every member.
            weight: this member's weight, if it has one. The weights of all members must sum to 1, which is checked; the
                total then stays within the bound, and the resolution does not depend on the number of members.
            bound: for this sum only, another bound than the settings have; the same at every member.
            ring_bits: for this sum only, another ring.
            context: a short public text that must be the same at every member, or the sum is refused.

        Raises:
            RangeError: a value is NaN, infinite or beyond the bound. Nothing was sent, and the others are told that
                this sum is off.
            RemoteProtocolError: a peer broke the rules, has other settings, gave up or left.
            PeerTimeoutError: a peer was silent for longer than `timeout`.
            WeightError: the weights of all members do not sum to 1.

        Examples:
            >>> import cgd, numpy as np
            >>> with cgd.local_peers(3) as colony:
            ...     totals = colony.run(lambda peers, value: peers.sum(np.array([value])), [0.5, 0.25, 1.0])
            >>> totals
            [array([1.75]), array([1.75]), array([1.75])]
        """
        with self._one_at_a_time():
            try:
                array, dtype = to_numpy(values)
                fixed_point = self._fixed_point(array, weight, bound, ring_bits)
                spec = self._spec(array, dtype, fixed_point, context, weighted=weight is not None)
                secret = np.empty(spec.size, dtype=WORD_TYPES[spec.ring_bits])
                fixed_point.encode(array, 1.0 if weight is None else weight, out=secret[: array.size])
                if weight is not None:
                    self._weighing(spec).encode(np.array([weight]), out=secret[-1:])
            except BaseException as error:
                self._refuse(error)
                raise
            total = self._run(spec, secret)
            if weight is not None:
                self._check_weights(total[-1:], self._weighing(spec))
            self.traffic.sums += 1
            decoded = fixed_point.decode(total[: array.size], decoded_type(dtype)).reshape(array.shape)
            result: Array = from_numpy(decoded, values)
            return result

    def decline(self) -> None:
        """Tell the others that we cannot take part in the next sum, so that nobody waits for us."""
        with self._one_at_a_time():
            self._refuse(None)

    def close(self) -> None:
        """Leave: the others are told, and wait no longer for us. A second call does nothing.

        It may be called while another thread is in a sum with these peers; that sum then fails.
        """
        self._closed.set()
        self._depart_if_idle()
        self._transport.wake()

    # How a sum is driven.

    def _run(self, spec: SumSpec, secret: npt.NDArray[Any]) -> npt.NDArray[Any]:
        try:
            self._session.start(spec, secret)
            self._drive()
            return self._session.total
        except BaseException as error:
            if self._session.running:  # stopped from outside, or by a silent peer: nobody shall wait for us
                self._session.end(f"{type(error).__name__} during a sum")
            self._say_what_is_left()
            raise

    def _drive(self) -> None:
        """Send what there is to send and take in what comes, until the sum is finished and all is sent."""
        heard = time.monotonic()
        while True:
            blocked = self._send_all()
            if not blocked and not self._session.running:
                return
            received = self._transport.receive(FULL_PAUSE_SECONDS if blocked else self._patience(heard))
            if received is not None:
                heard = time.monotonic()
                self._take(*received)
            elif self._closed.is_set():
                raise ClosedError(f"the connection of {self.me} was closed during a sum")
            elif self.timeout is not None and time.monotonic() - heard >= self.timeout:
                if not self._session.running:
                    return  # all have confirmed; what we could not send yet goes out with the next sum
                what, missing = self._session.waiting_for
                if self._unsent is not None:
                    what, missing = "room for our frames", frozenset({self._unsent[0]})
                raise PeerTimeoutError(missing, self.timeout, f"{what} in sum {self._session.number}")

    def _patience(self, heard: float) -> float | None:
        return None if self.timeout is None else max(0.0, heard + self.timeout - time.monotonic())

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

    def _take(self, sender: PeerId, frame: bytes) -> None:
        self.traffic.frames_received += 1
        self.traffic.bytes_received += len(frame)
        self._session.receive(sender, frame)

    def _refuse(self, error: BaseException | None) -> None:
        reasons = {RangeError: Reason.RANGE, InputError: Reason.SETTINGS}
        reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), Reason.STOPPED)
        self._session.refuse(reason)
        self._say_what_is_left()

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
                time.sleep(FULL_PAUSE_SECONDS)

    def _depart_if_idle(self) -> None:
        """Leave the session, unless a sum is running: then its thread does, as soon as it notices."""
        if self._busy.acquire(blocking=False):
            self._session.end("this member closed it")
            self._say_what_is_left()
            self._transport.close()
            self._busy.release()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
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

    # How values become ring elements and back.

    def _fixed_point(
        self, array: npt.NDArray[Any], weight: float | None, bound: float | None, ring_bits: int | None
    ) -> FixedPoint:
        if array.dtype.kind != "f":
            if (weight, bound, ring_bits) != (None, None, None):
                raise InputError("integers are summed exactly, without weight, bound or ring_bits; pass floats")
            return FixedPoint.for_integers(addends=len(self))
        derive = FixedPoint.for_sum if weight is None else FixedPoint.for_weighted_sum
        return derive(
            addends=len(self),
            bound=self.settings.bound if bound is None else bound,
            ring_bits=self.settings.ring_bits if ring_bits is None else ring_bits,
        )

    def _weighing(self, spec: SumSpec) -> FixedPoint:
        """How weights themselves are summed: up to one from each member, without wrapping around."""
        return FixedPoint.for_sum(addends=len(self), bound=1.0, ring_bits=spec.ring_bits)

    def _check_weights(self, words: npt.NDArray[Any], weighing: FixedPoint) -> None:
        total = weighing.decode(words).item()
        # Each weight is off by half a step of the ring at most, and by the rounding of a quotient.
        if abs(total - 1.0) > len(self) * (weighing.resolution / 2 + QUOTIENT_ROUNDING):
            raise WeightError(
                f"the members' weights sum to {total:.6g} instead of 1, so the weighted sum is not used; "
                "in training, some member's samples are not those that were counted: call recount() on every optimiser"
            )

    def _spec(
        self, array: npt.NDArray[Any], dtype: str, fixed_point: FixedPoint, context: str, *, weighted: bool
    ) -> SumSpec:
        if not context.isprintable() or len(context.encode()) > LONGEST_NAME:
            raise InputError(f"the context {context!r} must be printable and of at most {LONGEST_NAME} bytes")
        return SumSpec(
            shape=array.shape,
            dtype=dtype,
            ring_bits=fixed_point.ring_bits,
            fraction_bits=fixed_point.fraction_bits,
            sharing=self.settings.sharing,
            opening=self.settings.opening,
            aggregator=self.settings.aggregator,
            context=context,
            weighted=weighted,
        )
