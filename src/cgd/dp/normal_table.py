"""The distribution of a rounded normal number as integers of 128 bits.

The table belongs to rint(N(0, s²)) with s = 1024: the thresholds round(2¹²⁸·F(k + ½)) of its distribution function F.
It is computed with integers only, so it is the same on every machine, and the error is bounded as follows.

The probability of k is the integral of the density φ over (k − ½, k + ½). The Taylor series of φ at k gives

    p(k) = Σₙ φ⁽²ⁿ⁾(k) / ((2n + 1)!·4ⁿ) = φ(k)·Σₙ He₂ₙ(k/s) / ((2n + 1)!·(4s²)ⁿ).

By Cramér's inequality, |φ⁽²ⁿ⁾| ≤ √((2n)!)/s²ⁿ⁺¹, so the terms from n = 6 on are together below 2⁻¹⁵⁸, and below 2⁻¹⁴⁴
for all k of the table. φ(k) comes from a recurrence. Each operation is rounded down to a multiple of 2⁻²⁵⁶ relative to
φ(0); this adds less than 2⁻¹⁹⁰. Dividing by the sum over all k makes φ(0) unnecessary; the values of k that are left
out have a probability below 2⁻¹⁴⁵. So a threshold is within 0.51·2⁻¹²⁸ of the exact value: its own rounding is most
of the error.

Two distributions whose thresholds differ by at most x each have a total variation distance of at most x times the
number of thresholds. The values beyond the table have a probability of at most 2⁻¹²⁸. TABLE_DISTANCE covers both.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate

TABLE_SIGMA = 1024
"""s, the standard deviation before rounding. A power of two, so that k²/s² is exact."""

THRESHOLD_BITS = 128

TABLE_DISTANCE = 27_000 * 2.0**-THRESHOLD_BITS
"""A bound of the total variation distance between the table and rint(N(0, s²)); a test compares the size."""

_SCALE_BITS = 256
_TERMS = 6
_LARGEST = 14 * TABLE_SIGMA  # beyond 14 s, the probability is below 2⁻¹⁴⁵


@cache
def thresholds() -> tuple[int, ...]:
    """Return t(−K), …, t(K − 1) with t(k) = round(2¹²⁸·F(k + ½)), strictly between 0 and 2¹²⁸.

    A uniform integer of 128 bits that is not below exactly j of these numbers stands for the value j − K, so the
    values are −K, …, K.

    Examples:
        >>> table = thresholds()
        >>> len(table) // 2  # K
        13423
        >>> table[13423] / 2**128  # F(0.5)
        0.5001947960276117
    """
    probabilities = _relative_probabilities()
    total = 2 * sum(probabilities) - probabilities[0]
    one = 1 << THRESHOLD_BITS
    below_half = (total - probabilities[0]) // 2  # the probability of negative numbers
    upper = [((below_half + partial << THRESHOLD_BITS) + total // 2) // total for partial in accumulate(probabilities)]
    upper = [each for each in upper if each < one]
    return tuple([one - each for each in reversed(upper)] + upper)


def _relative_probabilities() -> list[int]:
    """Return the probabilities of 0, 1, 2, … relative to φ(0), as multiples of 2⁻²⁵⁶."""
    square_bits = 2 * (TABLE_SIGMA.bit_length() - 1)  # s² = 2^square_bits
    series = _taylor_coefficients()
    ratio = _exp_of_minus_power_of_two(square_bits + 1)  # φ(k + 1)/φ(k) = exp(−(2k + 1)/(2s²))
    ratio_of_ratios = _exp_of_minus_power_of_two(square_bits)
    density = 1 << _SCALE_BITS
    probabilities = []
    for k in range(_LARGEST):
        square = k * k
        value = 0
        for coefficient in series:
            value = (value * square >> square_bits) + coefficient
        probabilities.append(density * value >> _SCALE_BITS)
        density = density * ratio >> _SCALE_BITS
        ratio = ratio * ratio_of_ratios >> _SCALE_BITS
    return probabilities


def _taylor_coefficients() -> list[int]:
    """Return the coefficients of Σₙ He₂ₙ(x) / ((2n + 1)!·(4s²)ⁿ) as a polynomial in x², the highest power first.

    He₂ₙ(x) = Σⱼ (−1)ʲ·(2n)!/(j!·2ʲ·(2n − 2j)!)·x²⁽ⁿ⁻ʲ⁾.
    """
    series = [0] * _TERMS
    for n in range(_TERMS):
        for j in range(n + 1):
            numerator = (-1) ** j * math.factorial(2 * n) << _SCALE_BITS
            hermite = math.factorial(j) * 2**j * math.factorial(2 * n - 2 * j)
            series[n - j] += numerator // (hermite * math.factorial(2 * n + 1) * (4 * TABLE_SIGMA**2) ** n)
    return series[::-1]


def _exp_of_minus_power_of_two(bits: int) -> int:
    """Return exp(−2^−bits) as a multiple of 2⁻²⁵⁶."""
    value = term = 1 << _SCALE_BITS
    power = 0
    while term:
        power += 1
        term = (term >> bits) // power
        value += -term if power % 2 else term
    return value
