"""A member's addend with its share of the noise, as ring elements.

Every member clips the gradient of each record to the norm C, adds the clipped gradients, divides by the same public
number N, and rounds to integers. To these it adds integer noise of its own, so that the noises of any m − t members
together have the standard deviation that one opening needs. Up to t members may collude, or leave out their noise.
With t = m − 1, the addend of every member is private by itself. With a quorum q, members may be absent from a sum. Each
counts as one that leaves out its noise: that of any q − t members is enough.

What is proved where (all in `docs/differential-privacy.md`):

- "Rounded shares": the sum of rounded shares is a function of one Gaussian, up to `NoisyEncoding.distance`.
- "Sensitivity": one record changes the integers by at most 2^(f + g)·C/N + √d·(1 + 2⁻⁵²·M) in the Euclidean norm, where
  M is the largest integer. The guard bits g make the second term small: without them it adds 2.5 % to the noise of a
  network for MNIST, and 100 % if there are as many parameters as records, 10⁶ of each.
- "Calibration": the noise, the fraction bits f, and the bound of a total's norm.

Nothing here depends on values: an error would be a signal about records. What cannot be encoded becomes 0, or the
largest number.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.dp.sampler import IntegerGaussian, rounding_distance
from cgd.errors import InputError
from cgd.secagg.fixed_point import CHUNK_ELEMENTS, MAX_FRACTION_BITS, WORD_TYPES, FixedPoint

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

GUARD_BITS = {32: 16, 64: 0}
"""The additional bits of the integers to which noise is added, beyond those of ring elements; 64 bits at most in all.

A ring of 64 bits needs none: its elements are finer than the floats.
"""

MIN_SHARE = float(1 << 18)
"""The smallest standard deviation of a member's noise, with guard bits: 4 elements of the ring of 32 bits."""

NOISE_RANGE = 10
"""A total may exceed the largest one without noise by so many standard deviations: by more in one of 10²² elements."""

NORM_MARGIN = 6
"""By so many standard deviations a total's norm is above its root mean square with a probability below e⁻¹⁸, 1.6e-8."""

# Covers the rounding of the few operations below; it makes the noise larger, by nothing that matters.
_SAFETY = 1 + 1e-12


@dataclass(frozen=True)
class NoisyEncoding:
    """The encoding of sums of clipped vectors as ring elements with noise, the same for all members.

    Attributes:
        clip: C, the largest Euclidean norm of the vector of one record.
        denominator: N, by which all members divide; public. Use 1 for counts.
        dimension: d, the number of elements of a vector.
        members: m, of the sum.
        colluders: t, how many members may collude or leave out their noise, from 0 to m − 1.
        max_mu: the largest μ that one opening may have; the square of it is charged to a `Budget`.
        max_records: the largest number of records that all members have together.
        ring_bits: 32 or 64.
        quorum: q, the least number of members of any sum of the training, above `colluders`; None for m.
        random: the source of the keys for the noise. Only tests and simulations use another one than the operating
            system.

    Examples:
        >>> import numpy as np
        >>> encoding = NoisyEncoding(
        ...     clip=1.0, denominator=1000, dimension=2, members=5, colluders=1, max_mu=0.5, max_records=1200
        ... )
        >>> encoding.fraction_bits, encoding.mu <= 0.5
        (30, True)
        >>> sums = [np.array([150.0, -20.0])] * 5  # each member's sum of clipped gradients
        >>> words = [encoding.encode(values) for values in sums]
        >>> total = encoding.decode(sum(words[1:], start=words[0]))
        >>> np.abs(total - [0.75, -0.1]) < 8 * encoding.sigma_total
        array([ True,  True])
    """

    clip: float
    denominator: float
    dimension: int
    members: int
    colluders: int
    max_mu: float
    max_records: int
    ring_bits: int = 32
    quorum: int | None = None
    random: Callable[[int], bytes] = field(default=os.urandom, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ring_bits not in GUARD_BITS:
            raise InputError(f"ring_bits is {self.ring_bits}; sums with differential privacy have 32 or 64")
        for name in ("clip", "denominator", "max_mu"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputError(f"{name} is {value}; it must be a positive, finite number")
        for name in ("dimension", "members", "max_records"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.colluders < self.members:
            raise InputError(
                f"colluders is {self.colluders} of {self.members} members; it must be from 0 to {self.members - 1}"
            )
        if self.quorum is not None and not self.colluders < self.quorum <= self.members:
            raise InputError(
                f"quorum is {self.quorum} with {self.colluders} colluders and {self.members} members; it must be from "
                f"{self.colluders + 1} to {self.members}"
            )
        if self._share(self.fraction_bits) < MIN_SHARE:
            raise InputError(
                f"noise for {self.max_records} records with a μ of {self.max_mu:g} is too small for a ring of "
                f"{self.ring_bits} bits; "
                + ("use ring_bits=64, or a smaller μ" if self.ring_bits == 32 else "use a smaller μ")
            )
        _ = self.noise  # a standard deviation that is too large is an error now, not in the first sum

    @property
    def guard_bits(self) -> int:
        """g, the bits that are removed after the noise was added."""
        return GUARD_BITS[self.ring_bits]

    @cached_property
    def fraction_bits(self) -> int:
        """f, as many as possible so that a total with noise of 10 standard deviations does not wrap around."""
        room = ((1 << self.ring_bits - 1) - 1) << self.guard_bits
        largest = math.frexp(self.clip / self.denominator * self.max_records)[1]
        for bits in range(min(MAX_FRACTION_BITS, self.ring_bits - largest), -1, -1):
            noise = 1.02 * self._share(bits) * math.sqrt(self.members)  # the sampler adds up to 1.6 %
            if self._largest(bits) + NOISE_RANGE * noise < room:
                return bits
        raise InputError(
            f"{self.max_records} vectors of norm {self.clip:g} divided by {self.denominator:g}, with noise for a μ of "
            f"{self.max_mu:g}, do not fit a ring of {self.ring_bits} bits; "
            + ("use ring_bits=64, or " if self.ring_bits == 32 else "")
            + "scale the values down"
        )

    @cached_property
    def noise(self) -> IntegerGaussian:
        """The noise of one member, in units of 2^−(f + g)."""
        return IntegerGaussian(self._share(self.fraction_bits), self.random)

    @property
    def mu(self) -> float:
        """μ of one opening, to be charged: at most `max_mu`, and a little less because the noise is rounded up."""
        honest = math.sqrt(self.noisy_members)
        return self._sensitivity(self.fraction_bits) / (self.noise.sigma * honest) * _SAFETY

    @property
    def noisy_members(self) -> int:
        """The least number of members whose noise protects in a sum: all that may be absent or collude are left out."""
        return (self.members if self.quorum is None else self.quorum) - self.colluders

    @property
    def distance(self) -> float:
        """The bound of the total variation distance from a Gaussian, for one element of one member's noise.

        It is below `MAX_DISTANCE`. An opening has a distance of at most members · dimension times as much.
        """
        share = math.ldexp(self.noise.sigma, -self.guard_bits)
        return self.noise.distance + rounding_distance(share, share)

    @property
    def sigma_total(self) -> float:
        """The standard deviation of an element of a decoded total to which all members have added noise."""
        return math.ldexp(self.noise.sigma * math.sqrt(self.members), -self.fraction_bits - self.guard_bits)

    @property
    def max_total_norm(self) -> float:
        """The largest Euclidean norm of a decoded total if all members follow the protocol.

        An honest total is larger with a probability below 1.6e-8. The last term is for rounding, one unit per member.
        """
        root = math.sqrt(self.dimension)
        sigma = self.sigma_total * (1 + 1e-6)  # the sampler's own rounding is a part of it
        without_noise = self.clip * self.max_records / self.denominator
        rounding = math.ldexp(self.members * root, -self.fraction_bits)
        return math.hypot(without_noise, sigma * root) + NORM_MARGIN * sigma + rounding

    @property
    def fixed_point(self) -> FixedPoint:
        """The encoding of a total, for the settings of a sum."""
        bound = self.clip * self.max_records / self.denominator + NOISE_RANGE * self.sigma_total
        return FixedPoint(self.fraction_bits, bound, self.ring_bits)

    def encode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the ring elements of `values`/N with fresh noise, in the same shape.

        Args:
            values: the sum of this member's clipped vectors; float64, because the sum has to be accurate. NaN and
                infinities become 0, and larger values than possible the largest possible one.
        """
        if values.size != self.dimension:
            raise InputError(f"there are {values.size} values; the dimension is {self.dimension}")
        integers = self._integers(np.ascontiguousarray(values).reshape(-1))
        integers += self.noise.draw(integers.size)
        if self.guard_bits:
            integers += 1 << (self.guard_bits - 1)
            integers >>= self.guard_bits
        return integers.astype(WORD_TYPES[self.ring_bits]).reshape(values.shape)

    def decode(self, total: npt.NDArray[Any], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """Return the values of an opened total: the sum of all vectors divided by N, with noise."""
        return self.fixed_point.decode(total, dtype)

    def _integers(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the values before noise, as integers between −M and M."""
        integers = np.empty(values.size, dtype=np.int64)
        scale, limit = self._scale(self.fraction_bits), math.ceil(self._largest(self.fraction_bits))
        for start in range(0, values.size, CHUNK_ELEMENTS):
            chunk = values[start : start + CHUNK_ELEMENTS].astype(np.float64)
            unusable = ~np.isfinite(chunk)
            with np.errstate(over="ignore", invalid="ignore"):
                chunk *= scale
            np.clip(chunk, -limit, limit, out=chunk)
            np.copyto(chunk, 0.0, where=unusable)
            np.copyto(integers[start : start + CHUNK_ELEMENTS], np.rint(chunk, out=chunk), casting="unsafe")
        return integers

    def _scale(self, fraction_bits: int) -> float:
        """Return the factor between values and integers."""
        return 2.0 ** (fraction_bits + self.guard_bits) / self.denominator

    def _largest(self, fraction_bits: int) -> float:
        """Return M, the largest integer of a total without noise."""
        return self._scale(fraction_bits) * self.clip * self.max_records

    def _sensitivity(self, fraction_bits: int) -> float:
        """Return by how much one record changes the integers at most, in the Euclidean norm."""
        rounding = 1 + 2.0**-52 * (self._largest(fraction_bits) + 1)
        return (self._scale(fraction_bits) * self.clip + math.sqrt(self.dimension) * rounding) * _SAFETY

    def _share(self, fraction_bits: int) -> float:
        """Return the standard deviation that a member's noise must have."""
        return self._sensitivity(fraction_bits) / (self.max_mu * math.sqrt(self.noisy_members)) * _SAFETY**2
