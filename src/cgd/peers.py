"""`Peers`: a member's connection with its peers, and the conversion of values to ring elements and back."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cgd.errors import InputError, MembersChangedError, MembershipError, RangeError
from cgd.secagg.fixed_point import FixedPoint
from cgd.secagg.messages import MASKINGS, MAX_NAME_BYTES, OPENINGS, Masking, Opening, PeerId, Reason, SumSpec
from cgd.sum_encoding import (
    charged,
    check_precision,
    check_weights,
    encode,
    from_numpy,
    rounding_key,
    to_numpy,
    weight_encoding,
    weight_words,
)
from cgd.sum_queue import SumQueue
from cgd.transport.driver import NoRecovery
from cgd.transport.ranks import OneRank, add_weighted
from cgd.transport.tap import Addend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    import numpy.typing as npt
    import torch

    from cgd.dp.mechanism import NoisyEncoding
    from cgd.secagg.journal_entry import Step
    from cgd.transport.driver import Driver, Recovery, Traffic
    from cgd.transport.ranks import Ranks
    from cgd.transport.tap import Observer
    from cgd.transport.waiting_times import WaitingTimes

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")


@dataclass(frozen=True)
class SumSettings:
    """The settings of secure sums, the same for all members.

    Attributes:
        bound: the largest magnitude of a value (in training, of a gradient coordinate).
        ring_bits: 32; 64 for more precision at twice the bytes; or 16 for half the bytes of weighted sums, such as
            those of gradients, which are rounded at random then. Sums without weights have 32 bits or more.
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

    @property
    def unweighted_ring_bits(self) -> int:
        """The bits of sums without weights: 16 are for gradients, not for results that are read as they are."""
        return max(32, self.ring_bits)


@dataclass(frozen=True)
class _SumOptions:
    """The arguments of `Peers.sum` and `Peers.private_sum`."""

    weight: float | None = None
    new_weight: bool = True
    bound: float | None = None
    ring_bits: int | None = None
    modular: bool = False
    noise: NoisyEncoding | None = None
    before_reveal: Callable[[], None] = lambda: None
    context: str = ""
    step: Step | None = None


class Peers:
    """This member's connection with its peers: `peers.sum(values)` returns the same total at every member.

    `cgd.local_peers` creates them in one process, `cgd.join` over a network. Use an instance from one thread. Closing
    notifies the peers, which then do not wait for it. Other arguments are the attributes of the same names.

    Args:
        driver: runs the protocol.
        settings: the settings of the sums.

    Attributes:
        groups: in a grid, the peers of this participant's `"column"` (and `"row"`, if that has three members or more).
        training: in a federation, the settings of its file: `peers.training["lr"]`.
        federation: the name of the federation; empty in one process.
        seed: 32 secret bytes, for `cgd.confine`; random by default. In a federation they are derived from the
            participant's key file, so the same origin can be drawn again after everything else was lost.
        recovery: stores the optimisers' states, so that a restarted member can continue; by default it stores nothing.
        ranks: the processes of this member's job, if it is one of several (`cgd.join` in torchrun).
        observer: receives the addend and the total of every sum, for a recording; None by default.
        queue: the sums of an optimiser with a delay; any other sum waits until these are done.
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
        federation: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        self.settings, self.ranks = settings, ranks or OneRank()
        self.groups, self.training, self.federation = dict(groups or {}), dict(training or {}), federation
        self.seed = secrets.token_bytes(32) if seed is None else seed
        self.recovery: Recovery = NoRecovery() if recovery is None else recovery
        self.observer: Observer | None = None
        self.queue, self._driver, self._slots = SumQueue(driver.me), driver, 0
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
    def quorum(self) -> int | None:
        """The least number of members of a sum, if members may be absent; None if every sum has all."""
        return self._driver.quorum

    @property
    def traffic(self) -> Traffic:
        """The counters of frames and bytes sent and received."""
        return self._driver.traffic

    @property
    def waiting(self) -> WaitingTimes | None:
        """How long our program computed, summed and waited until now, and for whom.

        None in one process, where members share processors, and on the ranks of a job that are not rank 0.
        """
        return self._driver.waiting

    @property
    def resolution(self) -> float:
        """The difference of neighbouring totals of a weighted sum, such as a gradient sum, under the settings."""
        bound, ring_bits = self.settings.bound, self.settings.ring_bits
        return FixedPoint.for_weighted_sum(addends=len(self), bound=bound, ring_bits=ring_bits).resolution

    @contextmanager
    def all_members(self) -> Iterator[None]:
        """Let the sums in this block wait for all members, although a quorum might go on.

        Use it for sums that belong together, such as numbers and means: with other members in each, they would not fit.
        """
        self.recovery.require_all(required=True)
        try:
            yield
        finally:
            self.recovery.require_all(required=False)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Peers(me={self.me!r}, members={len(self)}, {self.settings}, {self.traffic})"

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.queue.finish()
        self._driver.close(done=kind is None)

    def sum(
        self,
        values: Array,
        *,
        weight: float | None = None,
        new_weight: bool = True,
        bound: float | None = None,
        ring_bits: int | None = None,
        modular: bool = False,
        context: str = "",
        step: Step | None = None,
        epoch: int | None = None,
    ) -> Array:
        """Return the sum of all members' `values`, bit for bit the same at every member.

        Floats are encoded in fixed point, and the total has their type. Integers are summed exactly, as int64. If this
        member is a job of several ranks, all of them call it, and the values of all of them are added.

        Args:
            values: an array or tensor, of the same shape and type at every member.
            weight: this member's weight in a weighted sum. The weights of all members must sum to 1, which is checked;
                the total then stays within the bound, and the resolution does not depend on the number of members.
            new_weight: False if an earlier sum was finished with `weight`: then it is not checked again.
            bound: another bound for this sum only; the same at every member.
            ring_bits: another ring for this sum only. In 16 bits, floats are rounded up or down at random, with the
                probabilities whose mean is the value, and by the same numbers if the sum is repeated.
            modular: integers of any size are summed modulo 2⁶⁴, as int64 (not −2⁶³); else their total must not wrap.
            context: a short public text that must be the same at every member, otherwise the sum fails.
            step: for optimisers: the step whose state will contain the total; all ranks have the same `values` then.
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
        options = _SumOptions(weight, new_weight, bound, ring_bits, modular, context=context, step=step)
        return self._sum_in_epoch(values, options, epoch)

    def private_sum(
        self,
        values: Array,
        noise: NoisyEncoding,
        before_reveal: Callable[[], None],
        *,
        context: str = "",
        step: Step | None = None,
        epoch: int | None = None,
    ) -> Array:
        """Return the sum of all members' clipped `values` divided by a public number, with noise from every member.

        No error depends on the values: NaN and infinities count as zero. The noise is drawn anew for every attempt.

        Args:
            values: this member's sum of clipped vectors, one of each record; floats of 64 bits.
            noise: the encoding, for the number of members; the same at every member.
            before_reveal: called in every attempt before the total can become known, to charge it; if it raises a
                `RevealError`, the sum fails and nobody learns the total.
            context: as for `sum`, and `step` and `epoch`, too.
            step: for optimisers.
            epoch: for optimisers.

        Raises:
            RevealError: `before_reveal` raised it.
            RemoteProtocolError, PeerTimeoutError, MembersChangedError: as for `sum`.
        """
        if self.ranks.size > 1:
            raise InputError("sums with noise are made by one process, not by a job of several ranks")
        options = _SumOptions(noise=noise, before_reveal=charged(before_reveal), context=context, step=step)
        return self._sum_in_epoch(values, options, epoch)

    def _sum_in_epoch(self, values: Array, options: _SumOptions, epoch: int | None) -> Array:
        while True:
            current, addends = self.next_round()
            if epoch not in (None, current):
                raise MembersChangedError(epoch or 0, current, self.members)
            try:
                return self._sum(values, options, current, addends)
            except MembersChangedError:
                if options.weight is not None or options.noise is not None or epoch is not None:
                    raise

    def next_round(self) -> tuple[int, int]:
        """Return the epoch of the next sum and its number of addends; wait until they are known."""
        self.queue.wait()
        return self._driver.next_round()

    def next_slot(self) -> int:
        """Return a new slot number for an optimiser: the optimisers of a program are numbered in order of creation."""
        self._slots += 1
        return self._slots - 1

    def abort_sum(self) -> None:
        """Abort the next sum: its other members get an error instead of waiting for this one."""

        def abort() -> None:
            with self._driver.exclusive():
                self._abort(None)

        self.queue.in_order(abort)

    def set_step(self, step: int) -> None:
        """Record the step that the program's loop is at, for the sums that it requests from now on."""
        self.queue.in_order(lambda: self.recovery.set_step(step))

    def close(self) -> None:
        """Leave and notify the peers. A second call does nothing. A sum that another thread is in fails."""
        self._driver.close(done=False)

    def _sum(self, values: Array, options: _SumOptions, epoch: int, addends: int) -> Array:
        weight, noise = options.weight, options.noise
        with self._driver.exclusive():
            try:
                array, dtype = to_numpy(values)
                if options.step is None:  # otherwise the optimiser has done it
                    array, weight = add_weighted(self.ranks, array, weight)
                fixed_point = self._fixed_point(array, options, addends)
                if weight is not None and options.new_weight:
                    check_precision(array, weight, fixed_point, addends)
                spec = self._spec(array, dtype, fixed_point, options.context, weighted=weight is not None)
                key = rounding_key(self.seed, array, options.step) if fixed_point.ring_bits == 16 else None
                # Raises RangeError before a message is sent.
                encoded = [encode(array, fixed_point, spec, weight, addends, noise, key)]
                addend = self._observe_addend(array, options, epoch)
            except BaseException as error:
                self._abort(error)
                raise

            entered: list[npt.NDArray[Any]] = []  # with noise, those of the latest attempt, for a recording

            def encode_again() -> npt.NDArray[Any]:  # after the first call: the protocol modifies the words in place
                words = encoded.pop() if encoded else encode(array, fixed_point, spec, weight, addends, noise, key)
                if noise is not None and addend is not None:
                    entered[:] = [words.copy()]
                return words

            try:
                total = self._driver.run_sum(spec, encode_again, epoch, options.step, options.before_reveal)
            except BaseException:  # in a federation the sum may go on: with these values, whatever the program does now
                array = array.copy()
                raise
            if weight is not None:
                check_weights(weight_words(total, spec), weight_encoding(spec, addends), addends)
            try:
                decoded_type = np.float32 if dtype == "bfloat16" else np.dtype(dtype)
                decoded = fixed_point.decode(total[: array.size], decoded_type).reshape(array.shape)
                if self.observer is not None and addend is not None:
                    if entered:
                        addend = replace(addend, entered=fixed_point.decode(entered[0]).reshape(array.shape))
                    self.observer.after_sum(addend, decoded)
                result: Array = from_numpy(decoded, values)
            except BaseException:  # an interrupt, or a recording that fails: the caller may request the sum again
                self._driver.repeat_sum()
                raise
            return result

    def _observe_addend(self, array: npt.NDArray[Any], options: _SumOptions, epoch: int) -> Addend | None:
        """Pass the addend to the observer, if there is one, unless the sum is replayed from the journal."""
        if self.observer is None:
            return None
        addend = Addend(array, options.weight, options.context, options.step, self.members, epoch, options.noise)
        if not self.recovery.is_replay():
            self.observer.before_sum(addend)
        return addend

    def _abort(self, error: BaseException | None) -> None:
        reasons = {RangeError: Reason.RANGE, InputError: Reason.SETTINGS}
        reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), Reason.STOPPED)
        self._driver.abort_sum(reason)

    def _fixed_point(self, array: npt.NDArray[Any], options: _SumOptions, addends: int) -> FixedPoint:
        weight, bound, ring_bits = options.weight, options.bound, options.ring_bits
        if options.noise is not None:
            if addends != options.noise.members:
                raise InputError(f"the noise is for {options.noise.members} members, and there are {addends}")
            return options.noise.fixed_point
        if array.dtype.kind != "f":
            if (weight, bound, ring_bits) != (None, None, None):
                raise InputError("integers are summed exactly, without weight, bound or ring_bits; pass floats")
            return FixedPoint.for_integers(addends=1 if options.modular else addends)
        if options.modular:
            raise InputError("only integers are summed modulo 2⁶⁴; pass integers")
        derive = FixedPoint.for_sum if weight is None else FixedPoint.for_weighted_sum
        default = self.settings.ring_bits if weight is not None else self.settings.unweighted_ring_bits
        return derive(
            addends=addends,
            bound=self.settings.bound if bound is None else bound,
            ring_bits=default if ring_bits is None else ring_bits,
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
