"""Integer noise: its distribution, its tails, the lemma about rounding, and its random bits.

The random bits of the statistical tests are fixed, so they cannot fail by chance. With other bits each would fail with
the stated probability.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from cgd.dp.normal_table import TABLE_DISTANCE, TABLE_SIGMA, thresholds
from cgd.dp.sampler import (
    MAX_DISTANCE,
    MAX_RATIO,
    MAX_SIGMA,
    MIN_SIGMA,
    IntegerGaussian,
    _lookup,
    keystream,
    root_down,
    rounding_distance,
)
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

COUNT = 1_000_000
BINS = 20
FALSE_POSITIVES = 1e-9
LIMIT = stats.chi2.isf(FALSE_POSITIVES, BINS - 1)
ONE = 2**128


def fixed(seed: str) -> Callable[[int], bytes]:
    return lambda count: hashlib.shake_256(seed.encode()).digest(count)


def chi_squared(values: npt.NDArray[Any], sigma: float) -> float:
    """Return the statistic of bins with equal probabilities under N(0, σ²); it has BINS − 1 degrees of freedom."""
    counts = np.bincount((special.ndtr(values / sigma) * BINS).astype(int), minlength=BINS)
    expected = values.size / BINS
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("sigma", [2.0**18, 3e6, 2.0**34])
def test_distribution_is_normal_with_the_stated_deviation(sigma: float) -> None:
    """Fails with a probability of 1e-9 for correct noise, and above 0.99999 if the deviation is wrong by 1 %."""
    noise = IntegerGaussian(sigma, fixed("distribution"))
    values = noise.draw(COUNT).astype(float)
    assert chi_squared(values, noise.sigma) < LIMIT
    for wrong in (0.99, 1.01):
        probabilities = np.diff(special.ndtr(wrong * special.ndtri(np.arange(BINS + 1) / BINS)))
        noncentrality = COUNT * BINS * ((probabilities - 1 / BINS) ** 2).sum()
        assert stats.ncx2.sf(LIMIT, BINS - 1, noncentrality) > 0.99999
        assert chi_squared(values, wrong * noise.sigma) > LIMIT


def test_low_bits_and_neighbours_are_independent() -> None:
    """Each of the three fails with a probability of 1e-9 for correct noise; the last bits are those of A₀ alone."""
    noise = IntegerGaussian(2.0**34, fixed("low bits"))
    values = noise.draw(COUNT)
    counts = np.bincount(values % BINS, minlength=BINS)
    assert ((counts - COUNT / BINS) ** 2).sum() / (COUNT / BINS) < LIMIT
    normal = values / noise.sigma
    limit = stats.norm.isf(FALSE_POSITIVES / 2) / math.sqrt(COUNT)
    assert abs((normal[1:] * normal[:-1]).mean()) < limit
    half = COUNT // 2
    assert abs((normal[:half] * normal[half:]).mean()) < 2 * limit


def test_values_of_the_table_have_its_probabilities() -> None:
    """Fails with a probability of 1e-9 for a correct lookup; the bins are all values up to 2.5 s, and two tails."""
    values = _lookup().draw(keystream(bytes(32)), COUNT).astype(int)
    limits = np.arange(-2560, 2561)
    counts = np.bincount(np.searchsorted(limits, values, side="left"))
    table = [0, *(thresholds()[len(thresholds()) // 2 + k] for k in limits), ONE]
    expected = COUNT * np.array([(high - low) / ONE for low, high in pairwise(table)])
    assert expected.min() > 10
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(FALSE_POSITIVES, expected.size - 1)


def test_tails_to_six_deviations() -> None:
    """Numbers that begin with 16 zeros are drawn: values below −4.16 s. 65 of a million are beyond 6 s.

    Each of four counts fails with a probability of 1e-9 for a correct lookup, and above 0.99 if tails are 2.5 times as
    likely, or not there at all.
    """
    stream = keystream(bytes(32))
    values = _lookup().draw(lambda count: bytes(count) if count == 2 * COUNT else stream(count), COUNT)
    assert values.max() < -4 * TABLE_SIGMA
    for sigmas in (4.5, 5.0, 5.5, 6.0):
        limit = -int(sigmas * TABLE_SIGMA)
        probability = thresholds()[len(thresholds()) // 2 + limit] / 2**112
        low, high = stats.binom.ppf([FALSE_POSITIVES / 2, 1 - FALSE_POSITIVES / 2], COUNT, probability)
        assert low <= np.count_nonzero(values <= limit) <= high
        assert stats.binom.sf(high, COUNT, 2.5 * probability) > 0.99 or probability > 0.1
        assert low > 0


@pytest.mark.parametrize("b", [64, 256, 512])
def test_exact_probabilities_of_two_levels(b: int) -> None:
    """P(A₀ + b·A₁ = x) is the probability of rint(N(0, σ²) + b·U) = x, within the bound and to 15 digits at 6 σ."""
    mpmath = pytest.importorskip("mpmath")
    noise = IntegerGaussian(root_down(TABLE_SIGMA**2 * (1 + b * b)) * (1 - 1e-15))
    assert noise.multipliers == (b,)
    middle = len(thresholds()) // 2
    table = [0, *thresholds(), ONE]

    def probability(k: int) -> int:
        return table[k + middle + 1] - table[k + middle] if abs(k) <= middle else 0

    with mpmath.workprec(500):
        sigma = mpmath.sqrt(noise.variance)

        def integral(z: Any) -> Any:  # of the distribution function of N(0, σ²)
            return z * mpmath.ncdf(z / sigma) + sigma * mpmath.npdf(z / sigma)

        half, width = mpmath.mpf(1) / 2, mpmath.mpf(b) / 2
        for x in (0, 1, b // 2, 7 * b + 3, -1000 * b - 1, int(3 * noise.sigma), -int(6 * noise.sigma)):
            drawn = sum(
                probability(x - b * k) * probability(k) for k in range((x - middle) // b, (x + middle) // b + 1)
            )
            corners = [(1, x + half + width), (-1, x + half - width), (-1, x - half + width), (1, x - half - width)]
            exact = sum(sign * integral(at) for sign, at in corners) / b
            difference = abs(mpmath.mpf(drawn) / ONE**2 - exact)
            assert difference < noise.distance
            assert difference < 1e-15 * exact


@pytest.mark.parametrize("first", [0.3, 0.5, 0.8, 1.2])
@pytest.mark.parametrize("second", [0.3, 0.6, 1.2])
def test_rounding_distance_is_a_bound_and_not_a_loose_one(first: float, second: float) -> None:
    """Compare with the densities, integrated over y, for several x."""
    y = np.linspace(-9, 9, 4001)
    k = np.arange(-14, 15)
    total = math.hypot(first, second)
    worst = 0.0
    for x in np.linspace(0, 0.5, 6):
        weights = special.ndtr((k - x + 0.5) / second) - special.ndtr((k - x - 0.5) / second)
        rounded = stats.norm.pdf(y[:, None], k, first) @ weights
        smooth = special.ndtr((y - x + 0.5) / total) - special.ndtr((y - x - 0.5) / total)
        worst = max(worst, 0.5 * np.abs(rounded - smooth).sum() * (y[1] - y[0]))
    bound = rounding_distance(first, second)
    assert worst <= bound * (1 + 1e-9) + 1e-13
    assert bound < max(10 * worst, 1e-12)


def test_ties_are_decided_by_all_128_bits() -> None:
    table = thresholds()
    lookup = _lookup()

    def drawn(number: int) -> int:
        pieces = [number >> 112, (number >> 64 & (1 << 48) - 1) << 16 | 0x1234, number & (1 << 64) - 1]
        parts = iter([pieces[0].to_bytes(2, "little"), *(piece.to_bytes(8, "little") for piece in pieces[1:])])
        return int(lookup.draw(lambda count: next(parts), 1)[0])

    ranks = [*range(0, len(table), 499), *range(1000), *range(len(table) - 1000, len(table))]
    for number in {0, ONE - 1, *(table[rank] + step for rank in ranks for step in (-1, 0, 1))} - {ONE}:
        assert drawn(number) == bisect_right(table, number) - len(table) // 2


@given(st.floats(math.log2(MIN_SIGMA), math.log2(MAX_SIGMA)).map(lambda bits: 2.0**bits))
def test_deviation_is_reached_from_above(sigma: float) -> None:
    noise = IntegerGaussian(sigma)
    assert sigma <= noise.sigma <= sigma * (1 + 1 / 64)
    if sigma > 2**19:
        assert noise.sigma <= sigma * 1.002
    assert noise.sigma**2 == pytest.approx(noise.variance, rel=1e-15)
    assert noise.variance == TABLE_SIGMA**2 * (1 + sum(b * b for b in noise.multipliers))
    assert all(1 <= high <= MAX_RATIO * low for low, high in pairwise((1, *noise.multipliers)))
    assert 2.0**-114 < noise.distance <= MAX_DISTANCE


@pytest.mark.parametrize("sigma", [2.0**18, 2.0**28, 2.0**60])
def test_distance_counts_every_table_and_every_sum(sigma: float) -> None:
    noise = IntegerGaussian(sigma)
    expected = (1 + len(noise.multipliers)) * TABLE_DISTANCE
    before = 1.0
    for b in noise.multipliers:
        squared = TABLE_SIGMA**2 * before / (before + b * b)  # s² of the lemma
        expected += sum(math.exp(-2 * math.pi**2 * squared * j * j) for j in (1, 2))
        before += b * b
    assert expected <= noise.distance <= expected * (1 + 1e-9)


@given(st.integers(0, 2**130))
def test_roots_are_rounded_down(square: int) -> None:
    root = root_down(square)
    assert Fraction(root) ** 2 <= square < Fraction(math.nextafter(root, math.inf)) ** 2


def test_every_call_has_a_new_key_of_the_given_source() -> None:
    asked = []

    def random(count: int) -> bytes:
        asked.append(count)
        return bytes([len(asked)]) * count

    noise = IntegerGaussian(1e6, random)
    first, second = noise.draw(1000), noise.draw(1000)
    assert asked == [32, 32]
    assert not np.array_equal(first, second)
    own = IntegerGaussian(1e6)
    assert not np.array_equal(own.draw(1000), own.draw(1000))
    assert "random" not in repr(own)


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_537])
def test_any_number_of_integers_can_be_drawn(count: int) -> None:
    noise = IntegerGaussian(1e6, fixed("count"))
    values = noise.draw(count)
    assert values.shape == (count,)
    assert values.dtype == np.int64
    if count > 2:
        assert np.abs(values).max() < 8 * noise.sigma
        assert values[-3:].std() > 0


@pytest.mark.parametrize("sigma", [0.0, -1.0, MIN_SIGMA * 0.999, MAX_SIGMA * 1.001, math.nan, math.inf])
def test_deviations_out_of_range_are_rejected(sigma: float) -> None:
    with pytest.raises(InputError, match="with more or with fewer fraction bits"):
        IntegerGaussian(sigma)
