"""`Peers`: what the layers above know of the others. It drives the protocol over a transport."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cgd.errors import InputError, LocalProtocolError, MembershipError, PeerTimeoutError, RangeError, TransportError
from cgd.protocol.messages import LONGEST_NAME, OPENINGS, SHARINGS, Opening, PeerId, Reason, Sharing, SumSpec
from cgd.ring.fixed_point import FixedPoint

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
        FixedPoint(fraction_bits=0, bound=self.bound, ring_bits=self.ring_bits)  # refuses what is not a ring or bound
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
            weight: this member's weight, if it has one. The weights of all members must sum to 1; the total then stays
                within the bound, and no precision is lost however many members there are.
            bound: for this sum only, another bound than the settings have; the same at every member.
            ring_bits: for this sum only, another ring.
            context: a short public text that must be the same at every member, or the sum is refused.

        Raises:
            RangeError: a value is NaN, infinite or beyond the bound. Nothing was sent, and the others are told that
                this sum is off.
            RemoteProtocolError: a peer broke the rules, has other settings, gave up or left.
            PeerTimeoutError: a peer was silent for longer than `timeout`.

        Examples:
            >>> import cgd, numpy as np
            >>> with cgd.local_peers(3) as colony:
            ...     totals = colony.run(lambda peers, value: peers.sum(np.array([value])), [0.5, 0.25, 1.0])
            >>> totals
            [array([1.75]), array([1.75]), array([1.75])]
        """
        with self._one_at_a_time():
            try:
                array, dtype = _to_numpy(values)
                fixed_point = self._fixed_point(array, weight, bound, ring_bits)
                secret = fixed_point.encode(array, 1.0 if weight is None else weight).reshape(-1)
                spec = self._spec(array, dtype, fixed_point, context)
            except InputError as error:
                self._session.refuse(Reason.RANGE if isinstance(error, RangeError) else Reason.SETTINGS)
                self._say_farewell()
                raise
            total = self._run(spec, secret)
            self.traffic.sums += 1
            result: Array = _from_numpy(fixed_point.decode(total, _decoded(dtype)).reshape(array.shape), values)
            return result

    def close(self) -> None:
        """Leave: the others are told, and wait no longer for us. A second call does nothing.

        It may be called while another thread is in a sum with these peers; that sum then fails.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if self._busy.acquire(blocking=False):
            self._depart()
            self._busy.release()
        self._transport.close()  # a sum in another thread wakes up from this, and departs by itself

    # How a sum is driven.

    def _run(self, spec: SumSpec, secret: npt.NDArray[Any]) -> npt.NDArray[Any]:
        try:
            self._session.start(spec, secret)
            self._drive()
            return self._session.total
        except BaseException as error:
            if self._session.running:  # stopped from outside, or by a silent peer: nobody shall wait for us
                self._session.end(f"{type(error).__name__} during a sum")
            self._say_farewell()
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
            elif self.timeout is not None and time.monotonic() - heard >= self.timeout:
                what, missing = self._session.waiting_for
                raise PeerTimeoutError(missing, self.timeout, f"{what} of sum {self._session.number}")

    def _patience(self, heard: float) -> float | None:
        return None if self.timeout is None else max(0.0, heard + self.timeout - time.monotonic())

    def _send_all(self) -> bool:
        """Send until nothing is left; True if a peer's inbox is full. The frame that did not fit is kept."""
        while (outgoing := self._unsent or self._session.next_outgoing()) is not None:
            self._unsent = outgoing
            if not self._transport.send(*outgoing):
                return True
            self._unsent = None
            self.traffic.frames_sent += 1
            self.traffic.bytes_sent += len(outgoing[1])
        return False

    def _take(self, sender: PeerId, frame: bytes) -> None:
        self.traffic.frames_received += 1
        self.traffic.bytes_received += len(frame)
        self._session.receive(sender, frame)

    def _say_farewell(self) -> None:
        """Tell the others, as well as can be, that we gave up or leave."""
        self._unsent = None
        deadline = time.monotonic() + FAREWELL_SECONDS
        with suppress(TransportError):
            while self._send_all() and time.monotonic() < deadline:
                time.sleep(FULL_PAUSE_SECONDS)

    def _depart(self) -> None:
        self._session.end("this member closed it")
        self._say_farewell()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if self._closed.is_set():
            raise LocalProtocolError(f"the connection of {self.me} is closed; make new peers for further sums")
        if not self._busy.acquire(blocking=False):
            raise LocalProtocolError(f"{self.me} is in a sum already; a member's sums run one after the other")
        try:
            yield
        finally:
            if self._closed.is_set():
                self._depart()
            self._busy.release()

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

    def _spec(self, array: npt.NDArray[Any], dtype: str, fixed_point: FixedPoint, context: str) -> SumSpec:
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
        )


def _to_numpy(values: object) -> tuple[npt.NDArray[Any], str]:
    """The values as an array, and the name of the type in which their total comes back."""
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it; this layer need not
    if torch is not None and isinstance(values, torch.Tensor):
        tensor = values.detach().cpu()
        dtype = str(tensor.dtype).removeprefix("torch.")
        array = (tensor.float() if dtype == "bfloat16" else tensor).numpy()
    elif isinstance(values, np.ndarray):
        array, dtype = values, values.dtype.name
    else:
        raise InputError(f"sum takes a numpy array or a torch tensor, not {type(values).__name__}; wrap it in one")
    if array.dtype.kind in "iub":
        return array, "int64"
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(f"values of type {dtype} cannot be summed; use floats of up to 64 bits, or integers")
    return array, dtype


def _decoded(dtype: str) -> npt.DTypeLike:
    return np.float32 if dtype == "bfloat16" else np.dtype(dtype)


def _from_numpy(array: npt.NDArray[Any], like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return array
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array).to(like.device)
    return tensor.to(like.dtype) if like.is_floating_point() else tensor
