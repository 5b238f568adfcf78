"""Integer Gaussian noise, proved to be as private as noise from a continuous Gaussian.

Noise in floating point can be told apart from Gaussian noise by its low bits (Mironov 2012). Here the noise is an
integer from the start: X = A₀ + b₁A₁ + b₂A₂ + …, with independent Aᵢ = rint(N(0, s²)), s = 1024, from the table of
`normal_table.py`, and integers bᵢ ≤ (s/2)·bᵢ₋₁ (b₀ = 1).

Up to a total variation distance of at most `IntegerGaussian.distance`, X is rint(N(0, σ²) + U) with
σ² = s²·(1 + b₁² + b₂² + …) and a number U that is independent of the rest. So an integer plus X is a function of that
integer plus N(0, σ²), and every theorem about Gaussian noise of standard deviation σ holds for it.
`docs/differential-privacy.md` has the proof: `rounding_distance` is the lemma there.

The random bits come from AES-256 in counter mode under a key of the operating system, a new one for every call. The
time depends on the noise, very little, and never on data.
"""

from __future__ import annotations

import math
import os
import sys
from bisect import bisect_right
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cgd.dp.normal_table import TABLE_DISTANCE, TABLE_SIGMA, thresholds
from cgd.errors import InputError
from cgd.secagg.fixed_point import CHUNK_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]
    RandomBytes = Callable[[int], bytes]

KEY_BYTES = 32

MIN_SIGMA = float(1 << 16)
"""The smallest standard deviation: with b₁ ≥ 64 the next integer is close."""

MAX_SIGMA = float(1 << 62)
"""The largest standard deviation; the noise of a ring of 64 bits has a smaller one."""

MAX_RATIO = TABLE_SIGMA // 2

MAX_DISTANCE = 2.0**-109
"""The largest `IntegerGaussian.distance`."""

_FIRST_BITS = 16
_UNDECIDED = np.iinfo(np.int16).min


class IntegerGaussian:
    """Integer noise with a standard deviation of at least `sigma`, and less than 1.6 % more.

    Args:
        sigma: the smallest standard deviation that is good enough, from 2¹⁶ to 2⁶².
        random: the source of keys. Only tests use another one than the operating system.

    Attributes:
        multipliers: b₁, b₂, …
        variance: σ², an integer.
        sigma: σ, rounded down. This is the standard deviation to account for.
        distance: the bound of the total variation distance of one number.

    Examples:
        >>> noise = IntegerGaussian(sigma=300_000)
        >>> noise.multipliers, noise.sigma
        ((293,), 300033.74...)
        >>> round(float(noise.draw(100_000).std() / noise.sigma), 1)
        1.0
        >>> noise.distance < 2**-111
        True
    """

    def __init__(self, sigma: float, random: RandomBytes = os.urandom) -> None:
        if not MIN_SIGMA <= sigma <= MAX_SIGMA:
            raise InputError(
                f"sigma is {sigma}; integer noise has a standard deviation from 2^16 to 2^62: "
                "encode the values with more or with fewer fraction bits"
            )
        self.multipliers = _multipliers(math.ceil(Fraction(sigma) ** 2 / TABLE_SIGMA**2) - 1)
        self.variance = TABLE_SIGMA**2 * (1 + sum(b * b for b in self.multipliers))
        self.sigma = root_down(self.variance)
        self.distance = _distance(self.multipliers)
        self._random = random

    def __repr__(self) -> str:
        return f"IntegerGaussian(sigma={self.sigma!r})"

    def draw(self, count: int) -> Integers:
        """Return `count` independent integers, from random bits that are used once."""
        bits = keystream(self._random(KEY_BYTES))
        table = _lookup()
        noise = np.empty(count, dtype=np.int64)
        for start in range(0, count, CHUNK_ELEMENTS):
            chunk = noise[start : start + CHUNK_ELEMENTS]
            chunk[:] = table.draw(bits, chunk.size)
            for b in self.multipliers:
                # Beyond 2⁶³ it wraps around, as the ring of 64 bits does.
                chunk += np.multiply(table.draw(bits, chunk.size), b, dtype=np.int64)
        return noise


def rounding_distance(first: float, second: float) -> float:
    """Return a bound of the distance between g₁ + rint(x + g₂) and g₁ + x + g₂ + U, for every x.

    g₁ and g₂ are normal with these standard deviations, U is uniform on (−½, ½), and all are independent. With
    s² = s₁²·s₂²/(s₁² + s₂²), the total variation distance is at most Σ exp(−2π²s²·j²) over j = 1, 2, …
    (`docs/differential-privacy.md`).

    Examples:
        >>> rounding_distance(4.0, 4.0) < 1e-68
        True
        >>> rounding_distance(0.5, 0.5)
        0.0848...
    """
    harmonic = 1 / (1 / first**2 + 1 / second**2)
    q = math.exp(-2 * math.pi**2 * harmonic * (1 - 1e-14))  # the margin covers the rounding of these operations
    return max(q / (1 - q**3) * (1 + 1e-14), sys.float_info.min)  # j² ≥ 1 + 3(j − 1)


def root_down(square: int) -> float:
    """Return the square root of an integer, rounded down to a float.

    Examples:
        >>> root_down(9), root_down(2) ** 2 < 2
        (3.0, True)
    """
    root = math.sqrt(square)
    while Fraction(root) ** 2 > square:
        root = math.nextafter(root, 0)
    return root


def keystream(key: bytes) -> RandomBytes:
    """Return a source of the bytes of AES-256-CTR under this key."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return lambda count: stream.update(bytes(count))


def _multipliers(needed: int) -> tuple[int, ...]:
    """Return b₁, b₂, … as few as possible, whose squares sum to `needed` or slightly more."""
    levels = 1
    while sum(MAX_RATIO ** (2 * i) for i in range(1, levels + 1)) < needed:
        levels += 1
    ratio = 1
    while sum(ratio ** (2 * i) for i in range(1, levels + 1)) < needed:
        ratio += 1
    lower = [ratio**i for i in range(1, levels)]
    rest = needed - sum(b * b for b in lower)
    return (*lower, math.isqrt(max(rest, 1) - 1) + 1)


def _distance(multipliers: tuple[int, ...]) -> float:
    """Return the bound of the distance of A₀ + b₁A₁ + … from a rounded Gaussian: of each table, and of each sum.

    The sum of the first terms plus bᵢAᵢ, divided by bᵢ, is a Gaussian plus a rounded one.
    """
    distance, variance = TABLE_DISTANCE, TABLE_SIGMA**2
    for b in multipliers:
        distance += TABLE_DISTANCE + rounding_distance(math.sqrt(variance) / b, TABLE_SIGMA)
        variance += (TABLE_SIGMA * b) ** 2
    return distance


class Lookup(NamedTuple):
    """The table of `normal_table.py`, arranged for reading random bits only as far as they decide.

    Attributes:
        thresholds: all 128 bits.
        high: their first 64 bits.
        by_first_bits: the value that the first 16 bits decide, or _UNDECIDED.
        below: for every value of the first 16 bits, the number of thresholds that are certainly not above.
        several: whether more than one threshold begins with these 16 bits.
    """

    thresholds: tuple[int, ...]
    high: npt.NDArray[np.uint64]
    by_first_bits: npt.NDArray[np.int16]
    below: npt.NDArray[np.int64]
    several: npt.NDArray[np.bool_]

    def draw(self, bits: RandomBytes, count: int) -> npt.NDArray[np.int16]:
        """Return `count` values: 16 random bits each; 64 more for one in eleven; and again for a tie."""
        first = np.frombuffer(bits(2 * count), dtype="<u2")
        values = self.by_first_bits.take(first)
        undecided = np.flatnonzero(values == _UNDECIDED)
        if undecided.size:
            values[undecided] = self._decide(first[undecided], bits)
        return values

    def _decide(self, first: npt.NDArray[np.uint16], bits: RandomBytes) -> npt.NDArray[np.int64]:
        """Return the values for numbers that begin with the bits in `first`."""
        more = np.frombuffer(bits(8 * first.size), dtype="<u8")
        words = (first.astype(np.uint64) << np.uint64(64 - _FIRST_BITS)) | (more >> np.uint64(_FIRST_BITS))
        ranks = self.below[first]
        ranks += words >= self.high[ranks]
        several = np.flatnonzero(self.several[first])
        ranks[several] = np.searchsorted(self.high, words[several], side="right")
        # No rank is 0, because the first threshold begins with 64 zeros.
        for tie in np.flatnonzero(self.high[ranks - 1] == words):
            number = int(words[tie]) << 64 | int.from_bytes(bits(8), "little")
            ranks[tie] = bisect_right(self.thresholds, number)
        return ranks - len(self.thresholds) // 2


@cache
def _lookup() -> Lookup:
    table = thresholds()
    low_bits = 128 - _FIRST_BITS
    starts = [each >> low_bits for each in table]
    buckets = np.arange(1 << _FIRST_BITS)
    below = np.searchsorted(starts, buckets, side="left")
    inside = np.searchsorted(starts, buckets, side="right") - below
    values = np.where(inside > 0, _UNDECIDED, below - len(table) // 2).astype(np.int16)
    return Lookup(
        table, np.array([each >> 64 for each in table], dtype=np.uint64), values, below.astype(np.int64), inside > 1
    )
