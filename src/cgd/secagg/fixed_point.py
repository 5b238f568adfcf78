"""Fixed-point encoding: floats as integers of the ring Z_2³² or Z_2⁶⁴, or of Z_2¹⁶ to send half the bytes.

A secret share hides only elements of a finite ring, so a gradient is rounded to a multiple of 2⁻ᶠ before it is shared.
The rounding is the only error: the sum of the integers is exact, and the same for all members.

The ring wraps around. That makes shares uniform, and must never happen to a total, so the fraction bits f are derived
from the number of addends and the largest magnitude of each.

In 16 bits most gradients are smaller than the distance of neighbouring values. To the nearest integer they would all be
zero, in every step. So they are rounded up or down at random, with the probabilities whose mean is the value
(stochastic rounding, as in QSGD): the errors of many steps and members cancel. A repeated attempt at a sum must enter
the same integers, as the difference of two totals would disclose something otherwise, so the random bits are a
keystream that can be generated again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.aes import BLOCK_BYTES
from cgd.errors import InputError, RangeError

if TYPE_CHECKING:
    import numpy.typing as npt

WORD_TYPES: dict[int, np.dtype[Any]] = {16: np.dtype("<u2"), 32: np.dtype("<u4"), 64: np.dtype("<u8")}
"""The ring's element type by its bits; little-endian, as on the wire."""
RINGS = "16, 32 or 64"

# Elements processed at once: few enough for the processor's cache, enough to make Python's overhead negligible.
CHUNK_ELEMENTS = 1 << 16
# Elements whose squares are summed at once: more, and the linear algebra library might start threads.
ROW_ELEMENTS = 1 << 13
# The squares of smaller values of 32 bits may round to zero.
MIN_SQUARED_BOUND = 2.0**-50

# The weight in a sum in 16 bits is sent as digits, which are added without carries (`messages.WEIGHT_DIGIT_BITS`).
MAX_ADDENDS_16 = ((1 << 16) - 1) // 15

# The number of fraction bits is sent in one byte; 2⁻²⁵⁵ is finer than needed.
MAX_FRACTION_BITS = 255


@dataclass(frozen=True)
class FixedPoint:
    """The encoding of x as the integer nearest to x·2^fraction_bits, modulo 2^ring_bits.

    Attributes:
        fraction_bits: the number of bits after the binary point.
        bound: the largest magnitude that `encode` accepts.
        ring_bits: 16, 32 or 64.

    Examples:
        >>> import numpy as np
        >>> fixed_point = FixedPoint.for_sum(addends=5, bound=1.0)
        >>> fixed_point.fraction_bits
        28
        >>> words = fixed_point.encode(np.array([0.5, -0.25]))
        >>> words
        array([ 134217728, 4227858432], dtype=uint32)
        >>> fixed_point.decode(words + words)
        array([ 1. , -0.5])
        >>> fixed_point.encode(np.array([0.5, 3.7]))
        Traceback (most recent call last):
        cgd.errors.RangeError: value at index (1,) is 3.7, beyond the bound 1; clip it, scale it down, or raise bound= \
for every member (ring_bits=64 keeps the precision)
    """

    fraction_bits: int
    bound: float
    ring_bits: int = 32

    def __post_init__(self) -> None:
        if self.ring_bits not in WORD_TYPES:
            raise InputError(f"ring_bits is {self.ring_bits}; choose {RINGS}")
        if not 0 <= self.fraction_bits <= MAX_FRACTION_BITS:
            raise InputError(f"fraction_bits is {self.fraction_bits}; it must be from 0 to {MAX_FRACTION_BITS}")
        if not 0 < self.bound < math.inf:
            raise InputError(f"bound is {self.bound}; it must be a positive, finite number")
        if Fraction(self.bound) * (1 << self.fraction_bits) > _largest(self.ring_bits):  # exact, for large integers too
            raise InputError(
                f"{self.bound:g} with {self.fraction_bits} fraction bits does not fit a ring of {self.ring_bits} bits; "
                "let for_sum derive the fraction bits"
            )

    @classmethod
    def for_sum(cls, *, addends: int, bound: float, ring_bits: int = 32) -> FixedPoint:
        """Return the finest encoding with which the sum of `addends` values within ±`bound` cannot wrap around."""
        return cls._finest(bound, _largest(ring_bits) // _checked(addends), addends, ring_bits)

    @classmethod
    def for_weighted_sum(cls, *, addends: int, bound: float, ring_bits: int = 32) -> FixedPoint:
        """Return the finest encoding for a weighted sum whose weights sum to one.

        The total stays within ±`bound` whatever the number of addends, so they cost no bits, except one unit per addend
        for its rounding and for the rounding of its weight.
        """
        if ring_bits == 16 and addends > MAX_ADDENDS_16:
            raise InputError(f"{addends} addends are too many for ring_bits=16, at most {MAX_ADDENDS_16}; use 32")
        unit = 1 + (_largest(ring_bits) >> 51)
        return cls._finest(bound, _largest(ring_bits) - _checked(addends) * unit, addends, ring_bits)

    @classmethod
    def for_integers(cls, *, addends: int) -> FixedPoint:
        """Return the encoding of exact integers in Z_2⁶⁴, for counts and histograms."""
        return cls(fraction_bits=0, bound=_largest(64) // _checked(addends), ring_bits=64)

    @classmethod
    def _finest(cls, bound: float, room: int, addends: int, ring_bits: int) -> FixedPoint:
        """Return the encoding with the most fraction bits in which `bound` is at most `room`."""
        if not 0 < bound < math.inf:
            raise InputError(f"bound is {bound}; it must be a positive, finite number")
        if room < 1 or bound > room:
            raise InputError(
                f"{addends} addends of up to {bound:g} do not fit a ring of {ring_bits} bits; "
                + (f"use ring_bits={2 * ring_bits}, or " if ring_bits < 64 else "")
                + "scale the values down"
            )
        bits = min(MAX_FRACTION_BITS, room.bit_length() - math.frexp(bound)[1] + 1)
        while math.ldexp(bound, bits) > room:  # exact: Python compares a float with an int without rounding
            bits -= 1
        return cls(fraction_bits=bits, bound=bound, ring_bits=ring_bits)

    @property
    def resolution(self) -> float:
        """The distance of neighbouring values; the rounding error of an addend to the nearest is at most half of it."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def rounding_error(self) -> float:
        """The standard deviation of the rounding error of an addend: in 16 bits, it is rounded at random."""
        return self.resolution / math.sqrt(6 if self.ring_bits == 16 else 12)

    def encode(
        self,
        values: npt.NDArray[Any],
        weight: float = 1.0,
        out: npt.NDArray[Any] | None = None,
        rounding: Any = None,
    ) -> npt.NDArray[Any]:
        """Round `values`·`weight` to ring elements of the same shape, in `out` (flat) if it is given.

        With a keystream (`cgd.aes`) as `rounding`, values are rounded up or down at random, else to the nearest.

        The range is checked before the weight is applied, so that the bound has the same meaning for every member.

        Raises:
            RangeError: a value is NaN, infinite or beyond the bound.
        """
        if not 0 < weight <= 1:
            raise InputError(f"weight is {weight}; it must be above 0 and at most 1")
        flat = np.ascontiguousarray(values).reshape(-1)
        words = np.empty(flat.shape, dtype=WORD_TYPES[self.ring_bits]) if out is None else out
        signed = words.view(f"<i{self.ring_bits // 8}")
        integers = flat.dtype.kind in "iub" and self.fraction_bits == 0 and weight == 1
        scale = math.ldexp(weight, self.fraction_bits)
        scaled = np.empty(min(CHUNK_ELEMENTS, flat.size))
        offsets = None if rounding is None else _Offsets(rounding, scaled.size)
        for start in range(0, flat.size, CHUNK_ELEMENTS):
            chunk = flat[start : start + CHUNK_ELEMENTS]
            exceeds = self._check_range(chunk, start, np.shape(values))
            if integers:
                signed[start : start + CHUNK_ELEMENTS] = chunk
                continue
            rounded = scaled[: chunk.size]
            np.copyto(rounded, chunk)  # to double precision first: a product of floats would round to theirs
            if exceeds:
                np.clip(rounded, -self.bound, self.bound, out=rounded)
            rounded *= scale
            if offsets is None:
                np.rint(rounded, out=rounded)
            else:
                rounded += offsets.draw(rounded.size)
                np.floor(rounded, out=rounded)
            np.copyto(signed[start : start + CHUNK_ELEMENTS], rounded, casting="unsafe")
        shaped: npt.NDArray[Any] = words.reshape(np.shape(values))
        return shaped

    def decode(self, words: npt.NDArray[Any], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """Return the values of ring elements, rounded once to `dtype`."""
        signed = words.view(f"<i{self.ring_bits // 8}")
        if np.dtype(dtype).kind == "i":
            return signed.astype(dtype)
        values = np.empty(words.shape, dtype=dtype)
        flat, out = signed.reshape(-1), values.reshape(-1)
        # Converting rounds, and multiplying by a power of two does not; but half precision cannot hold the integers.
        scaled = np.empty(min(CHUNK_ELEMENTS, flat.size), dtype=np.float64) if values.dtype == np.float16 else None
        for start in range(0, flat.size, CHUNK_ELEMENTS):
            target = out[start : start + CHUNK_ELEMENTS]
            chunk = target if scaled is None else scaled[: target.size]
            np.copyto(chunk, flat[start : start + CHUNK_ELEMENTS], casting="unsafe")
            chunk *= chunk.dtype.type(self.resolution)
            if scaled is not None:
                np.copyto(target, chunk, casting="unsafe")
        return values

    def _check_range(self, chunk: npt.NDArray[Any], start: int, shape: tuple[int, ...]) -> bool:
        """Reject values out of range; return whether a value exceeds the bound by the rounding of its type only.

        The float32 nearest to 0.1 is above 0.1. Clipping float32 values to 0.1 yields it, so it counts as within 0.1.
        """
        if self._is_within(chunk):
            return False
        limit = self.bound
        if chunk.dtype.kind == "f":
            with np.errstate(over="ignore"):
                limit = min(float(np.float64(self.bound).astype(chunk.dtype)), np.finfo(chunk.dtype).max)
        # Two reductions detect any value out of range (a NaN passes through both); only then is it searched for.
        low, high = chunk.min().item(), chunk.max().item()
        if -limit <= low and high <= limit:
            return bool(low < -self.bound or high > self.bound)
        outside = ~((chunk >= -limit) & (chunk <= limit))
        first = int(np.flatnonzero(outside)[0])
        index = tuple(int(i) for i in np.unravel_index(start + first, shape)) if shape else ()
        raise RangeError(chunk[first].item(), index, self.bound)

    def _is_within(self, chunk: npt.NDArray[Any]) -> bool:
        """Return whether the squares of a whole chunk sum to so little that no value exceeds the bound.

        That is so for most gradients, and takes half the time of a minimum and a maximum.
        """
        if chunk.size != CHUNK_ELEMENTS or chunk.dtype.char not in "fd" or self.bound < MIN_SQUARED_BOUND:
            return False
        rows = chunk.reshape(-1, ROW_ELEMENTS)
        with np.errstate(over="ignore", invalid="ignore"):
            return (
                float((rows[:, None, :] @ rows[:, :, None]).max()) < self.bound**2 / 2
            )  # not with a NaN; the half covers rounding


class _Offsets:
    """Uniform numbers from 0 to 1, multiples of 2⁻³² from a keystream.

    A value plus such a number, rounded down, is the value rounded up with the probability of its fraction; the mean is
    off by less than 2⁻³². An integer stays what it is.
    """

    def __init__(self, stream: Any, size: int) -> None:
        self._stream, self._zeros = stream, memoryview(bytes(4 * size))
        self._buffer, self._offsets = np.empty(4 * size + BLOCK_BYTES, dtype=np.uint8), np.empty(size)

    def draw(self, count: int) -> npt.NDArray[np.float64]:
        self._stream.update_into(self._zeros[: 4 * count], self._buffer)
        offsets = self._offsets[:count]
        np.copyto(offsets, self._buffer[: 4 * count].view("<u4"))
        offsets *= 2.0**-32
        return offsets


def _largest(ring_bits: int) -> int:
    """Return the largest total that fits the ring: half of it is for negative numbers."""
    if ring_bits not in WORD_TYPES:
        raise InputError(f"ring_bits is {ring_bits}; choose {RINGS}")
    return (1 << (ring_bits - 1)) - 1


def _checked(addends: int) -> int:
    if addends < 1:
        raise InputError(f"addends is {addends}; it must be at least 1")
    return addends
