"""`Peers`: what the layers above know of the others. Values become ring elements here, and totals values again."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cgd.errors import InputError, MembersChangedError, MembershipError, RangeError, WeightError
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint
from cgd.secagg.messages import MAX_NAME_BYTES, OPENINGS, SHARINGS, Opening, PeerId, Reason, Sharing, SumSpec
from cgd.transport.arrays import decoded_type, from_numpy, to_numpy
from cgd.transport.tap import Addend

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy.typing as npt
    import torch

    from cgd.secagg.journal import Step
    from cgd.transport.driver import Driver, Traffic
    from cgd.transport.tap import Observer

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")

# How far a weight n_l/n in double precision may be from the true quotient.
QUOTIENT_ROUNDING = 2.0**-52
# A weight of less than this part of an equal share is looked at: does it leave anything of our values in the ring?
SMALL_SHARE = 1 / 8
# The weighted values must be this many times as large as what rounding takes from them (both as Euclidean norms).
MIN_PRECISION = 8.0


@dataclass(frozen=True)
class SumSettings:
    """How the members sum; the same for all of them.

    Attributes:
        bound: the largest magnitude of a value (of a gradient coordinate, in training).
        ring_bits: 32, or 64 for more precision at twice the bytes.
        sharing: "expanded" (shares from pair keys, nothing extra travels) or "uniform" (the paper's, (m − 1) times
            the bytes, perfect secrecy).
        opening: "mesh" (every member adds up one part), "aggregator" (one member adds up everything) or "hub" (the hub
            does, which learns who sums and when, and nothing of the values; in a federation that has one).
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


class Peers:
    """This member's connection with the others: `peers.sum(values)` gives everyone the same total.

    `cgd.local_peers` makes them inside one process, `cgd.join` over a network. One sum runs at a time; use it from one
    thread. Closing tells the others, so that nobody waits for a member that is gone.

    Args:
        driver: runs the protocol.
        settings: how the members sum.
        seed: 32 secret bytes of this participant's; fresh ones if not given.
        groups: the smaller groups it sums with.
        training: what the federation agreed on.

    Attributes:
        settings: how the members sum.
        groups: in a grid, the peers of this participant's `"column"` (and `"row"`, if that has three members or more).
        training: in a federation, the settings of its file: `peers.training["lr"]`.
        seed: 32 secret bytes, for `cgd.confine`. In a federation they belong to the participant's key file: the origin
            drawn from them can be drawn again after everything else was lost.
        memory: what optimisers leave with the members, for one that comes back.
        observer: sees what we put into every sum and what is opened, for a recording; usually None.
    """

    def __init__(
        self,
        driver: Driver,
        settings: SumSettings,
        *,
        seed: bytes | None = None,
        groups: Mapping[str, Peers] | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.groups = dict(groups or {})
        self.training = dict(training or {})
        self.seed = secrets.token_bytes(32) if seed is None else seed
        self.memory = driver
        self.observer: Observer | None = None
        self._driver = driver
        self._slots = 0
        if settings.aggregator and settings.aggregator not in self.members:
            names = ", ".join(self.members)
            raise MembershipError(f"the aggregator {settings.aggregator!r} is not a member; name one of {names}")

    @property
    def me(self) -> PeerId:
        """This member's name."""
        return self._driver.me

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, in order."""
        return self._driver.members

    @property
    def session(self) -> bytes:
        """What tells this session from any other; all its members have the same."""
        return self._driver.session

    @property
    def number(self) -> int:
        """The number of the latest sum that this member began or declined; 0 before the first."""
        return self._driver.number

    @property
    def traffic(self) -> Traffic:
        """What was sent and received so far."""
        return self._driver.traffic

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
        self._driver.close(done=kind is None)

    def sum(
        self,
        values: Array,
        *,
        weight: float | None = None,
        bound: float | None = None,
        ring_bits: int | None = None,
        context: str = "",
        step: Step | None = None,
        epoch: int | None = None,
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
            step: for optimisers: the step whose state will contain the total.
            epoch: for optimisers: the epoch that `weight` was made for.

        Raises:
            RangeError: a value is NaN, infinite or beyond the bound. Nothing was sent, and the others are told that
                this sum is off.
            RemoteProtocolError: a peer broke the rules, has other settings, gave up or left.
            PeerTimeoutError: a peer was silent for longer than `timeout`.
            InputError: `weight` is so small that nothing of `values` would be left in the ring.
            WeightError: the weights of all members do not sum to 1.
            MembersChangedError: `weight` was made for other members than there are now.

        Examples:
            >>> import cgd, numpy as np
            >>> with cgd.local_peers(3) as colony:
            ...     totals = colony.run(lambda peers, value: peers.sum(np.array([value])), [0.5, 0.25, 1.0])
            >>> totals
            [array([1.75]), array([1.75]), array([1.75])]
        """
        while True:
            present, addends = self._driver.outlook()
            if epoch not in (None, present):
                raise MembersChangedError(epoch or 0, present, self.members)
            try:
                return self._sum(values, weight, bound, ring_bits, context, step, present, addends)
            except MembersChangedError:
                if weight is not None or epoch is not None:
                    raise

    def next_slot(self) -> int:
        """For optimisers: tells those of one program apart, in the order in which they are made."""
        self._slots += 1
        return self._slots - 1

    def decline(self) -> None:
        """Tell the others that we cannot take part in the next sum, so that nobody waits for us."""
        with self._driver.turn():
            self._refuse(None)

    def close(self) -> None:
        """Leave: the others are told, and wait no longer for us. A second call does nothing.

        It may be called while another thread is in a sum with these peers; that sum then fails.
        """
        self._driver.close(done=False)

    # How values become ring elements and back.

    def _sum(
        self,
        values: Array,
        weight: float | None,
        bound: float | None,
        ring_bits: int | None,
        context: str,
        step: Step | None,
        epoch: int,
        addends: int,
    ) -> Array:
        with self._driver.turn():
            try:
                array, dtype = to_numpy(values)
                fixed_point = self._fixed_point(array, weight, bound, ring_bits, addends)
                if weight is not None and weight * addends < SMALL_SHARE:
                    _check_meaning(array, weight, fixed_point, addends)
                spec = self._spec(array, dtype, fixed_point, context, weighted=weight is not None)
                made = [self._encode(array, fixed_point, spec, weight, addends)]  # refuses what does not fit
                addend = self._shown(array, weight, context, step, epoch)
            except BaseException as error:
                self._refuse(error)
                raise

            def encode() -> npt.NDArray[Any]:  # anew each time but the first: the protocol takes it over
                return made.pop() if made else self._encode(array, fixed_point, spec, weight, addends)

            total = self._driver.total(spec, encode, epoch, step)
            if weight is not None:
                self._check_weights(total[-1:], self._weighing(spec, addends), addends)
            decoded = fixed_point.decode(total[: array.size], decoded_type(dtype)).reshape(array.shape)
            if self.observer is not None and addend is not None:
                self.observer.opened(addend, decoded)
            result: Array = from_numpy(decoded, values)
            return result

    def _shown(
        self, array: npt.NDArray[Any], weight: float | None, context: str, step: Step | None, epoch: int
    ) -> Addend | None:
        """Show the observer, if there is one, what goes into the next sum; in one of the past, nothing does."""
        if self.observer is None:
            return None
        addend = Addend(array, weight, context, step, self.members, epoch)
        if not self._driver.past():
            self.observer.entering(addend)
        return addend

    def _refuse(self, error: BaseException | None) -> None:
        reasons = {RangeError: Reason.RANGE, InputError: Reason.SETTINGS}
        reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), Reason.STOPPED)
        self._driver.refuse(reason)

    def _encode(
        self, array: npt.NDArray[Any], fixed_point: FixedPoint, spec: SumSpec, weight: float | None, addends: int
    ) -> npt.NDArray[Any]:
        words = np.empty(spec.size, dtype=WORD_TYPES[spec.ring_bits])
        fixed_point.encode(array, 1.0 if weight is None else weight, out=words[: array.size])
        if weight is not None:
            self._weighing(spec, addends).encode(np.array([weight]), out=words[-1:])
        return words

    def _fixed_point(
        self, array: npt.NDArray[Any], weight: float | None, bound: float | None, ring_bits: int | None, addends: int
    ) -> FixedPoint:
        if array.dtype.kind != "f":
            if (weight, bound, ring_bits) != (None, None, None):
                raise InputError("integers are summed exactly, without weight, bound or ring_bits; pass floats")
            return FixedPoint.for_integers(addends=addends)
        derive = FixedPoint.for_sum if weight is None else FixedPoint.for_weighted_sum
        return derive(
            addends=addends,
            bound=self.settings.bound if bound is None else bound,
            ring_bits=self.settings.ring_bits if ring_bits is None else ring_bits,
        )

    def _weighing(self, spec: SumSpec, addends: int) -> FixedPoint:
        """How weights themselves are summed: up to one from each member, without wrapping around."""
        return FixedPoint.for_sum(addends=addends, bound=1.0, ring_bits=spec.ring_bits)

    def _check_weights(self, words: npt.NDArray[Any], weighing: FixedPoint, addends: int) -> None:
        total = weighing.decode(words).item()
        # Each weight is off by half a step of the ring at most, and by the rounding of a quotient.
        if abs(total - 1.0) > addends * (weighing.resolution / 2 + QUOTIENT_ROUNDING):
            raise WeightError(
                f"the members' weights sum to {total:.6g} instead of 1, so the weighted sum is not used; "
                "in training, some member's samples are not those that were counted: call recount() on every optimiser"
            )

    def _spec(
        self, array: npt.NDArray[Any], dtype: str, fixed_point: FixedPoint, context: str, *, weighted: bool
    ) -> SumSpec:
        if not context.isprintable() or len(context.encode()) > MAX_NAME_BYTES:
            raise InputError(f"the context {context!r} must be printable and of at most {MAX_NAME_BYTES} bytes")
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


def _check_meaning(array: npt.NDArray[Any], weight: float, fixed_point: FixedPoint, addends: int) -> None:
    """Refuse a weight that leaves nothing of our values: the total would be the others' alone.

    A member can enter any number of samples, and so make everybody's weight small. If ours rounds to nothing and that
    of one other does not, all members read that one's values in the total.

    Raises:
        InputError: the weight is too small for these values, and an equal share would not be.
    """
    norm = float(np.linalg.norm(array.astype(np.float64, copy=False)))
    needed = MIN_PRECISION * float(np.sqrt(np.count_nonzero(array) / 12)) * fixed_point.resolution
    if norm * weight < needed <= norm / addends:
        raise InputError(
            f"our weight in this sum is {weight:.3g}, which leaves nothing of our values in {fixed_point.ring_bits} "
            "bits: the total would be the others' alone, and show it. In training, some member's number of samples is "
            "not true, or ours is too small beside it: find out whose, or let every member use ring_bits=64"
        )
