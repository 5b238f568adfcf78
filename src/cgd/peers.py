"""`Peers`: a member's connection with its peers, and the conversion of values to ring elements and back."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cgd.errors import InputError, MembersChangedError, MembershipError, RangeError, WeightError
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint
from cgd.secagg.messages import MASKINGS, MAX_NAME_BYTES, OPENINGS, Masking, Opening, PeerId, Reason, SumSpec
from cgd.transport.driver import NoRecovery
from cgd.transport.tap import Addend

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy.typing as npt
    import torch

    from cgd.secagg.journal_entry import Step
    from cgd.transport.driver import Driver, Recovery, Traffic
    from cgd.transport.tap import Observer

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")

QUOTIENT_ROUNDING = 2.0**-52  # of a weight n_l/n, in double precision
# With weights below this fraction of an equal share, the values must also be larger than their rounding errors.
SMALL_SHARE = 1 / 8
# The smallest ratio of the weighted values to their rounding error (both as Euclidean norms).
MIN_PRECISION = 8.0


@dataclass(frozen=True)
class SumSettings:
    """The settings of secure sums, the same for all members.

    Attributes:
        bound: the largest magnitude of a value (in training, of a gradient coordinate).
        ring_bits: 32, or 64 for more precision at twice the bytes.
        masking: "pairwise" (masks derived from pairwise keys, no extra traffic) or "uniform" (the shares of the paper:
            m − 1 times the bytes, perfect secrecy).
        opening: "mesh" (every member adds up one part), "aggregator" (one member adds up everything) or "hub" (the hub
            of the federation adds up everything; it learns who sums and when, and nothing of the values).
        aggregator: the name of the aggregating member, for opening="aggregator".
    """

    bound: float = 16.0
    ring_bits: int = 32
    masking: Masking = "pairwise"
    opening: Opening = "mesh"
    aggregator: PeerId = ""

    def __post_init__(self) -> None:
        FixedPoint.for_weighted_sum(addends=1, bound=self.bound, ring_bits=self.ring_bits)  # checks both
        if self.masking not in MASKINGS:
            raise InputError(f"masking is {self.masking!r}; choose one of {', '.join(MASKINGS)}")
        if self.opening not in OPENINGS:
            raise InputError(f"opening is {self.opening!r}; choose one of {', '.join(OPENINGS)}")
        if (self.opening == "aggregator") != bool(self.aggregator):
            raise InputError(
                f"opening is {self.opening!r} and aggregator is {self.aggregator!r}; name one for the other"
            )


class Peers:
    """This member's connection with its peers: `peers.sum(values)` returns the same total at every member.

    `cgd.local_peers` creates them in one process, `cgd.join` over a network. Use an instance from one thread. Closing
    notifies the peers, which then do not wait for it. The other arguments are the attributes of the same names.

    Args:
        driver: runs the protocol.
        settings: the settings of the sums.

    Attributes:
        groups: in a grid, the peers of this participant's `"column"` (and `"row"`, if that has three members or more).
        training: in a federation, the settings of its file: `peers.training["lr"]`.
        seed: 32 secret bytes, for `cgd.confine`; random by default. In a federation they are derived from the
            participant's key file, so the same origin can be drawn again after everything else was lost.
        recovery: stores the optimisers' states, so that a restarted member can continue; by default it stores nothing.
        observer: receives the addend and the total of every sum, for a recording; None by default.
    """

    def __init__(
        self,
        driver: Driver,
        settings: SumSettings,
        *,
        recovery: Recovery | None = None,
        seed: bytes | None = None,
        groups: Mapping[str, Peers] | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.groups = dict(groups or {})
        self.training = dict(training or {})
        self.seed = secrets.token_bytes(32) if seed is None else seed
        self.recovery: Recovery = NoRecovery() if recovery is None else recovery
        self.observer: Observer | None = None
        self._driver = driver
        self._slots = 0
        if settings.aggregator and settings.aggregator not in self.members:
            names = ", ".join(self.members)
            raise MembershipError(f"the aggregator {settings.aggregator!r} is not a member; name one of {names}")

    @property
    def me(self) -> PeerId:
        """The name of this member."""
        return self._driver.me

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, in order."""
        return self._driver.members

    @property
    def session_id(self) -> bytes:
        """The identifier of the session, the same at all its members."""
        return self._driver.session_id

    @property
    def number(self) -> int:
        """The number of the latest sum that this member started or aborted; 0 before the first."""
        return self._driver.number

    @property
    def epoch(self) -> int:
        """The current epoch of the membership; 0 if the members never change."""
        return self._driver.epoch

    @property
    def traffic(self) -> Traffic:
        """The counters of frames and bytes sent and received."""
        return self._driver.traffic

    @property
    def resolution(self) -> float:
        """The difference of neighbouring totals of a weighted sum, such as a gradient sum, under the settings."""
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
        new_weight: bool = True,
        bound: float | None = None,
        ring_bits: int | None = None,
        context: str = "",
        step: Step | None = None,
        epoch: int | None = None,
    ) -> Array:
        """Return the sum of all members' `values`, bit for bit the same at every member.

        Floats are encoded in fixed point, and the total has their type. Integers are summed exactly, as int64.

        Args:
            values: an array or tensor, of the same shape and type at every member.
            weight: this member's weight in a weighted sum. The weights of all members must sum to 1, which is checked;
                the total then stays within the bound, and the resolution does not depend on the number of members.
            new_weight: False if an earlier sum was finished with `weight`: then it is not checked again.
            bound: another bound for this sum only; the same at every member.
            ring_bits: another ring for this sum only.
            context: a short public text that must be the same at every member, otherwise the sum fails.
            step: for optimisers: the step whose state will contain the total.
            epoch: for optimisers: the epoch that `weight` was computed for.

        Raises:
            RangeError: a value is NaN, infinite or beyond the bound. Nothing was sent; the sum fails at every member.
            RemoteProtocolError: a peer broke the protocol, has other settings, aborted the sum or left.
            PeerTimeoutError: nothing was received from a peer for `timeout` seconds.
            InputError: `weight` is so small that all `values` would round to zero in the ring.
            WeightError: the weights of all members do not sum to 1.
            MembersChangedError: `weight` was computed for an earlier epoch.

        Examples:
            >>> import cgd, numpy as np
            >>> with cgd.local_peers(3) as members:
            ...     totals = members.run(lambda peers, value: peers.sum(np.array([value])), [0.5, 0.25, 1.0])
            >>> totals
            [array([1.75]), array([1.75]), array([1.75])]
        """
        while True:
            current, addends = self.next_round()
            if epoch not in (None, current):
                raise MembersChangedError(epoch or 0, current, self.members)
            try:
                return self._sum(values, weight, new_weight, bound, ring_bits, context, step, current, addends)
            except MembersChangedError:
                if weight is not None or epoch is not None:
                    raise

    def next_round(self) -> tuple[int, int]:
        """Return the epoch of the next sum and its number of addends; wait until they are known."""
        return self._driver.next_round()

    def next_slot(self) -> int:
        """Return a new slot number for an optimiser: the optimisers of a program are numbered in order of creation."""
        self._slots += 1
        return self._slots - 1

    def abort_sum(self) -> None:
        """Abort the next sum: its other members get an error instead of waiting for this one."""
        with self._driver.exclusive():
            self._abort(None)

    def close(self) -> None:
        """Leave and notify the peers, so that they do not wait for this member. A second call does nothing.

        It may be called while another thread is in a sum with these peers; that sum then fails.
        """
        self._driver.close(done=False)

    def _sum(
        self,
        values: Array,
        weight: float | None,
        new_weight: bool,
        bound: float | None,
        ring_bits: int | None,
        context: str,
        step: Step | None,
        epoch: int,
        addends: int,
    ) -> Array:
        with self._driver.exclusive():
            try:
                array, dtype = _to_numpy(values)
                fixed_point = self._fixed_point(array, weight, bound, ring_bits, addends)
                if weight is not None and new_weight:
                    _check_precision(array, weight, fixed_point, addends)
                spec = self._spec(array, dtype, fixed_point, context, weighted=weight is not None)
                encoded = [_encode(array, fixed_point, spec, weight, addends)]  # raises RangeError before a message
                addend = self._observe_addend(array, weight, context, step, epoch)
            except BaseException as error:
                self._abort(error)
                raise

            def encode() -> npt.NDArray[Any]:  # again after the first call: the protocol modifies the words in place
                return encoded.pop() if encoded else _encode(array, fixed_point, spec, weight, addends)

            total = self._driver.run_sum(spec, encode, epoch, step, lambda: None)
            if weight is not None:
                _check_weights(total[-1:], _weight_encoding(spec, addends), addends)
            try:
                decoded_type = np.float32 if dtype == "bfloat16" else np.dtype(dtype)
                decoded = fixed_point.decode(total[: array.size], decoded_type).reshape(array.shape)
                if self.observer is not None and addend is not None:
                    self.observer.after_sum(addend, decoded)
                result: Array = _from_numpy(decoded, values)
            except BaseException:  # an interrupt, or a recording that fails: the caller may request the sum again
                self._driver.repeat_sum()
                raise
            return result

    def _observe_addend(
        self, array: npt.NDArray[Any], weight: float | None, context: str, step: Step | None, epoch: int
    ) -> Addend | None:
        """Pass the addend to the observer, if there is one, unless the sum is replayed from the journal."""
        if self.observer is None:
            return None
        addend = Addend(array, weight, context, step, self.members, epoch)
        if not self.recovery.is_replay():
            self.observer.before_sum(addend)
        return addend

    def _abort(self, error: BaseException | None) -> None:
        reasons = {RangeError: Reason.RANGE, InputError: Reason.SETTINGS}
        reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), Reason.STOPPED)
        self._driver.abort_sum(reason)

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
            masking=self.settings.masking,
            opening=self.settings.opening,
            aggregator=self.settings.aggregator,
            context=context,
            weighted=weighted,
        )


def _to_numpy(values: object) -> tuple[npt.NDArray[Any], str]:
    """Return the values as an array, and the name of their total's type."""
    torch = sys.modules.get("torch")  # a caller that has a tensor has imported torch; this layer must not
    if torch is not None and isinstance(values, torch.Tensor):
        dtype = str(values.dtype).removeprefix("torch.")
        try:
            tensor = values.detach().cpu()
            array = (tensor.float() if dtype == "bfloat16" else tensor).numpy()
        except (TypeError, RuntimeError) as error:  # sparse, meta, …: the error of torch says which
            raise InputError(f"a tensor of {values.layout} {values.dtype} cannot be summed: {error}") from None
    elif isinstance(values, np.ndarray):
        array, dtype = values, values.dtype.name
    else:
        raise InputError(f"sum takes a numpy array or a torch tensor, not {type(values).__name__}; wrap it in one")
    if array.size == 0:
        raise InputError(f"an array of shape {array.shape} is empty; there is nothing to sum")
    if array.dtype.kind in "iub":
        return array, "int64"
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(f"values of type {dtype} cannot be summed; use floats of up to 64 bits, or integers")
    return array, dtype


def _from_numpy(array: npt.NDArray[Any], like: Any) -> Any:
    """Return the array as an array or as a tensor on the same device, as `like` is."""
    if isinstance(like, np.ndarray):
        return array
    tensor = sys.modules["torch"].from_numpy(array).to(like.device)
    return tensor.to(like.dtype) if like.is_floating_point() else tensor


def _encode(
    array: npt.NDArray[Any], fixed_point: FixedPoint, spec: SumSpec, weight: float | None, addends: int
) -> npt.NDArray[Any]:
    """Return the ring elements of the values; a weighted sum has the weight as one more element."""
    words = np.empty(spec.size, dtype=WORD_TYPES[spec.ring_bits])
    fixed_point.encode(array, 1.0 if weight is None else weight, out=words[: array.size])
    if weight is not None:
        _weight_encoding(spec, addends).encode(np.array([weight]), out=words[-1:])
    return words


def _weight_encoding(spec: SumSpec, addends: int) -> FixedPoint:
    """Return the fixed point of the weights: up to 1 from each member, without wrap-around."""
    return FixedPoint.for_sum(addends=addends, bound=1.0, ring_bits=spec.ring_bits)


def _check_weights(words: npt.NDArray[Any], encoding: FixedPoint, addends: int) -> None:
    total = encoding.decode(words).item()
    # The error of each weight is at most half a step of the ring, plus the rounding of a quotient.
    if abs(total - 1.0) > addends * (encoding.resolution / 2 + QUOTIENT_ROUNDING):
        raise WeightError(
            f"the members' weights sum to {total:.6g} instead of 1, so the weighted sum is not used; in training, some "
            "member's samples are not those that were counted: call recount() on every optimiser, or, in a federation, "
            "where a step is summed once, train anew under another federation name"
        )


def _check_precision(array: npt.NDArray[Any], weight: float, fixed_point: FixedPoint, addends: int) -> None:
    """Reject a weight with which all our values round to zero: the total would show the other members' values alone.

    A member can report any number of samples, and so make all other weights small. Later sums with an accepted weight
    are not checked: near a minimum, a small member's gradient may round to zero although all counts are true.

    Raises:
        InputError: the weight is too small for these values, and an equal share would not be.
    """
    largest, norm = float(np.abs(array).max()), float(np.linalg.norm(array.astype(np.float64, copy=False)))
    needed = MIN_PRECISION * float(np.sqrt(np.count_nonzero(array) / 12)) * fixed_point.resolution
    vanish = largest * weight <= fixed_point.resolution / 2 < largest / addends
    if vanish or (weight * addends < SMALL_SHARE and norm * weight < needed <= norm / addends):
        raise InputError(
            f"our weight in this sum is {weight:.3g}, so small that all our values round to zero in "
            f"{fixed_point.ring_bits} bits: the total would contain the other members' values alone, and reveal them. "
            "In training, a member reported a wrong number of samples, or ours is too small in comparison: find out "
            "which, or let every member use ring_bits=64"
        )
