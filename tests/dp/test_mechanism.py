"""Noisy addends: enough noise for every coalition, a sensitivity that is never exceeded, and no error that tells data.

The random bits of the statistical tests are fixed, so they cannot fail by chance.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from cgd.dp.accountant import Budget
from cgd.dp.mechanism import GUARD_BITS, MIN_SHARE, NoisyEncoding
from cgd.dp.sampler import MAX_DISTANCE
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

EXAMPLE: dict[str, Any] = {
    "clip": 1.0,
    "denominator": 1000.0,
    "dimension": 100,
    "members": 5,
    "colluders": 1,
    "max_mu": 0.05,
    "max_records": 1200,
}


def fixed(seed: str) -> Callable[[int], bytes]:
    """Return a source of different bytes in every call, the same in every run."""
    calls = itertools.count()
    return lambda count: hashlib.shake_256(f"{seed} {next(calls)}".encode()).digest(count)


def encoding(**changes: Any) -> NoisyEncoding:
    return NoisyEncoding(**{**EXAMPLE, **changes})


@st.composite
def encodings(draw: Any) -> NoisyEncoding:
    members = draw(st.integers(1, 50))
    quorum = draw(st.integers(members // 2 + 1, members) | st.none())
    denominator = 10.0 ** draw(st.floats(0, 6))
    return NoisyEncoding(
        clip=10.0 ** draw(st.floats(-3, 3)),
        denominator=denominator,
        dimension=draw(st.integers(1, 10_000_000)),
        members=members,
        colluders=draw(st.integers(0, (quorum or members) - 1)),
        quorum=quorum,
        max_mu=10.0 ** draw(st.floats(-3, 1)),
        max_records=math.ceil(denominator * draw(st.floats(1, 3))),
        ring_bits=draw(st.sampled_from([32, 64])),
    )


def units(encoding: NoisyEncoding) -> int:
    """Return how many integers there are between 0 and 1, before noise."""
    return 1 << (encoding.fraction_bits + encoding.guard_bits)


@given(encodings())
def test_any_honest_members_add_the_noise_that_the_sensitivity_needs(noisy: NoisyEncoding) -> None:
    scale = units(noisy) / noisy.denominator
    largest = scale * noisy.clip * noisy.max_records
    sensitivity = scale * noisy.clip + math.sqrt(noisy.dimension) * (1 + 2.0**-52 * largest)
    present = noisy.members if noisy.quorum is None else noisy.quorum
    mu = sensitivity / (noisy.noise.sigma * math.sqrt(present - noisy.colluders))
    assert mu * (1 - 1e-14) <= noisy.mu <= mu * (1 + 1e-11)
    assert 0.995 * noisy.max_mu <= noisy.mu <= noisy.max_mu
    assert noisy.noise.sigma >= MIN_SHARE
    assert noisy.distance <= MAX_DISTANCE
    assert noisy.sigma_total == pytest.approx(noisy.noise.sigma * math.sqrt(noisy.members) / units(noisy))


@pytest.mark.parametrize("present", [5, 4, 3])
@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_noise_is_enough_while_members_are_absent(present: int, colluders: int) -> None:
    """Of five members with a quorum of 3, some are absent from a sum, and colluders subtract their noise."""
    size = 20_000
    noisy = encoding(dimension=size, colluders=colluders, quorum=3, random=fixed(f"{present} {colluders}"))
    honest = np.sum([noisy.noise.draw(size) for _ in range(present - colluders)], axis=0)
    needed = noisy._sensitivity(noisy.fraction_bits) / noisy.max_mu
    # The relative standard deviation of the estimate is 1/√(2·20,000) = 0.005; that of the bits is fixed.
    measured = float(np.std(honest)) / needed
    assert measured == pytest.approx(math.sqrt((present - colluders) / (3 - colluders)), rel=0.02)
    assert measured > 0.98  # as promised in the worst case, and more if more are present
    assert noisy.mu <= noisy.max_mu


def test_quorum_makes_the_noise_of_all_larger_by_the_stated_factor() -> None:
    for members, quorum, colluders in ((5, 4, 1), (5, 3, 1), (9, 5, 2)):
        plain = encoding(members=members, colluders=colluders)
        noisy = encoding(members=members, colluders=colluders, quorum=quorum)
        factor = math.sqrt((members - colluders) / (quorum - colluders))
        assert noisy.sigma_total / plain.sigma_total == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize(("quorum", "colluders"), [(1, 1), (6, 1), (3, 3), (0, 0), (-1, 0)])
def test_quorum_that_leaves_no_noise_is_rejected(quorum: int, colluders: int) -> None:
    with pytest.raises(InputError, match=f"quorum is {quorum} with {colluders} colluders and 5 members; it must be"):
        encoding(quorum=quorum, colluders=colluders)


@pytest.mark.parametrize("openings", [1, 7, 1000])
def test_planned_openings_fit_the_budget(openings: int) -> None:
    budget = Budget(epsilon=2.0, delta=1e-5, draws=openings * 5 * 100)
    noisy = encoding(max_mu=math.sqrt(budget.mu_squared_each(openings)))
    for _ in range(openings):
        budget.charge(noisy.mu**2, "training")
    assert 1.99 < budget.spent().epsilon <= 2
    assert not budget.can_afford(noisy.mu**2)


@given(encodings())
def test_fraction_bits_are_the_most_without_wrapping(noisy: NoisyEncoding) -> None:
    total = noisy.clip * noisy.max_records / noisy.denominator + 10 * noisy.sigma_total
    assert total * 2.0**noisy.fraction_bits < 2.0 ** (noisy.ring_bits - 1)
    # One bit more is too much, if the rounding's part of the noise stays the same.
    assert noisy.fraction_bits == 255 or total * 2.1 * 2.0**noisy.fraction_bits > 2.0 ** (noisy.ring_bits - 1)
    assert noisy.fixed_point.fraction_bits == noisy.fraction_bits
    assert noisy.fixed_point.ring_bits == noisy.ring_bits


def change(noisy: NoisyEncoding, values: npt.NDArray[Any], record: npt.NDArray[Any]) -> float:
    """Return by how much a record changes the integers, divided by the bound."""
    before, after = noisy._integers(values), noisy._integers(values + record)
    return float(np.linalg.norm((after - before).astype(float))) / noisy._sensitivity(noisy.fraction_bits)


@pytest.mark.parametrize("ring_bits", [32, 64])
@pytest.mark.parametrize("denominator", [1.0, 1000.0, 12_345.6])
def test_one_record_changes_the_integers_by_at_most_the_sensitivity(ring_bits: int, denominator: float) -> None:
    noisy = encoding(ring_bits=ring_bits, denominator=denominator, max_records=5000)
    rng = np.random.default_rng(0)
    found = 0.0
    for _ in range(300):
        values = rng.normal(size=100) * 10.0 ** rng.uniform(-3, 2)
        record = rng.normal(size=100) * (rng.random(100) < rng.random())
        # Sums of floats are rounded, which is not part of this bound: a norm of slightly less leaves room for it.
        record *= (1 - 1e-9) / max(float(np.linalg.norm(record)), 1e-9)
        found = max(found, change(noisy, values, record))
    assert 0.99 < found <= 1


@pytest.mark.parametrize("members", [1, 3])
def test_rounding_of_every_element_the_wrong_way_is_covered(members: int) -> None:
    """All elements lie just below the middle of two integers, and a record moves each a little above it."""
    dimension = 10_000
    noisy = encoding(
        dimension=dimension, denominator=2.0**45, max_records=2**45, max_mu=1e-4, members=members, colluders=0
    )
    unit = noisy.denominator / units(noisy)
    record = np.full(dimension, noisy.clip / math.sqrt(dimension))
    assert record[0] < 0.05 * unit
    values = np.random.default_rng(0).integers(-1000, 1000, dimension) * unit + 0.5 * unit - 0.5 * record
    assert 0.9 < change(noisy, values, record) <= 1
    without_rounding = noisy.clip / unit
    assert change(noisy, values, record) * noisy._sensitivity(noisy.fraction_bits) > 5 * without_rounding


def test_values_that_are_not_numbers_become_zero_and_large_ones_the_largest() -> None:
    values = np.array([math.nan, math.inf, -math.inf, 1e308, -1e308, 1e9, 5e-324, -0.0, 3.0, 1e300])
    for ring_bits in (32, 64):
        noisy = encoding(dimension=10, ring_bits=ring_bits, denominator=8.0, max_records=9)
        integers = noisy._integers(values) / units(noisy)
        largest = 9 / 8
        expected = [0, 0, 0, largest, -largest, largest, 0, 0, 3 / 8, largest]
        np.testing.assert_allclose(integers, expected, rtol=0, atol=1e-9)
        total = noisy.decode(noisy.encode(values))
        assert np.abs(total - expected).max() < 10 * noisy.sigma_total
        for dtype in (np.float32, np.float16, np.int64):
            np.testing.assert_allclose(noisy._integers(np.full(10, 3, dtype)) / units(noisy), 3 / 8, atol=1e-9)


@pytest.mark.parametrize(("members", "colluders"), [(5, 1), (3, 2), (4, 0), (1, 0)])
@pytest.mark.parametrize("ring_bits", [32, 64])
def test_honest_members_together_add_the_noise_of_the_opening(members: int, colluders: int, ring_bits: int) -> None:
    """Chi-squared with 20 bins fails with a probability of 1e-9, and above 0.85 if there is 1 % less noise."""
    count = 500_000
    noisy = encoding(members=members, colluders=colluders, dimension=count, ring_bits=ring_bits, random=fixed("honest"))
    honest = members - colluders
    values = np.linspace(-1, 1, count)
    words = [noisy.encode(values) for _ in range(honest)]
    noise = noisy.decode(np.sum(words, axis=0, dtype=words[0].dtype)) - honest * values / noisy.denominator
    needed = noisy._sensitivity(noisy.fraction_bits) / noisy.mu / units(noisy)
    limit = stats.chi2.isf(1e-9, 19)

    def statistic(sigma: float) -> float:
        counts = np.bincount((special.ndtr(noise / sigma) * 20).astype(int), minlength=20)
        return float(((counts - count / 20) ** 2).sum() / (count / 20))

    assert statistic(needed) < limit < statistic(0.98 * needed)
    probabilities = np.diff(special.ndtr(0.99 * special.ndtri(np.arange(21) / 20)))
    assert stats.ncx2.sf(limit, 19, count * 20 * ((probabilities - 1 / 20) ** 2).sum()) > 0.85


def test_smallest_noise_is_still_rounded_correctly() -> None:
    """The noise of a member is few ring elements; the sum of rounded addends has no bias and the right deviation."""
    count = 300_000
    noisy = encoding(
        dimension=count,
        members=3,
        colluders=0,
        max_mu=1.0,
        denominator=2.0**26,
        max_records=2**26,
        random=fixed("small"),
    )
    assert 4 <= noisy.noise.sigma / 2**16 < 16
    words = [noisy.encode(np.zeros(count)) for _ in range(3)]
    total = np.sum(words, axis=0, dtype=np.uint32).view(np.int32).astype(float)
    sigma = math.sqrt(3 * ((noisy.noise.sigma / 2**16) ** 2 + 1 / 12))
    assert abs(total.mean()) < 6.2 * sigma / math.sqrt(count)  # a probability of 1e-9, as the next one
    assert abs(total.var() / sigma**2 - 1) < 6.2 * math.sqrt(2 / count)


def test_each_encoding_has_new_noise() -> None:
    noisy = encoding()
    values = np.zeros((10, 10))
    first, second = noisy.encode(values), noisy.encode(values)
    assert first.shape == (10, 10)
    assert first.dtype == np.uint32
    assert np.count_nonzero(first == second) < 5
    repeated = replace(noisy, random=lambda count: bytes(count))
    assert np.array_equal(repeated.encode(values), repeated.encode(values))
    assert repeated == noisy  # members compare settings, not sources of random bytes
    assert "random" not in repr(noisy)


@pytest.mark.parametrize("dimension", [1, 30, 100_000])
@pytest.mark.parametrize("ring_bits", [32, 64])
def test_norm_of_honest_totals_is_bounded_closely(dimension: int, ring_bits: int) -> None:
    noisy = encoding(dimension=dimension, ring_bits=ring_bits, random=fixed("norm"))
    direction = np.full(dimension, 1 / math.sqrt(dimension))
    largest = noisy.clip * noisy.max_records  # all records have the same gradient
    words = [noisy.encode(direction * largest / 5) for _ in range(5)]
    norm = float(np.linalg.norm(noisy.decode(np.sum(words, axis=0, dtype=words[0].dtype))))
    assert norm <= noisy.max_total_norm
    assert noisy.max_total_norm <= 1.2 + noisy.sigma_total * (math.sqrt(dimension) + 6) + 1e-4
    assert norm > 0.98 * noisy.max_total_norm or dimension < 1000


def test_guard_bits_keep_the_rounding_small() -> None:
    network = NoisyEncoding(
        clip=1.0, denominator=60_000, dimension=203_530, members=5, colluders=1, max_mu=0.05, max_records=61_000
    )
    overhead = network._sensitivity(network.fraction_bits) * network.denominator / units(network) - 1
    assert overhead < 1e-6
    assert 0.02 < overhead * 2 ** GUARD_BITS[32] < 0.03  # without guard bits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ring_bits": 16}, "ring_bits is 16; sums with differential privacy have 32 or 64"),
        ({"clip": 0.0}, "clip is 0.0; it must be a positive, finite number"),
        ({"clip": math.nan}, "clip is nan"),
        ({"denominator": -1.0}, "denominator is -1.0"),
        ({"max_mu": math.inf}, "max_mu is inf"),
        ({"max_mu": 0.0}, "max_mu is 0.0"),
        ({"dimension": 0}, "dimension is 0; it must be at least 1"),
        ({"members": 0}, "members is 0"),
        ({"max_records": 0}, "max_records is 0"),
        ({"colluders": 5}, "colluders is 5 of 5 members; it must be from 0 to 4"),
        ({"colluders": -1}, "colluders is -1 of 5 members"),
        ({"max_mu": 1e9}, "too small for a ring of 32 bits; use ring_bits=64, or a smaller μ"),
        ({"max_mu": 1e30, "ring_bits": 64}, "too small for a ring of 64 bits; use a smaller μ"),
        ({"clip": 1e10, "denominator": 1.0}, "do not fit a ring of 32 bits; use ring_bits=64, or scale"),
        ({"max_mu": 1e-30}, "do not fit a ring of 32 bits"),
        ({"clip": 1e30, "ring_bits": 64}, "do not fit a ring of 64 bits; scale the values down"),
        ({"clip": 1e308, "denominator": 1e-300}, "do not fit a ring"),
        ({"clip": 1e-308, "denominator": 1e300}, "do not fit a ring|too small"),
    ],
)
def test_wrong_settings_are_rejected_before_any_value_is_seen(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encoding(**changes)


def test_wrong_number_of_values_is_rejected() -> None:
    with pytest.raises(InputError, match="there are 99 values; the dimension is 100"):
        encoding().encode(np.zeros(99))


@settings(max_examples=30)
@given(st.lists(st.floats(width=64), min_size=4, max_size=4))
def test_no_value_is_an_error(values: list[float]) -> None:
    for ring_bits in (32, 64):
        noisy = encoding(dimension=4, ring_bits=ring_bits)
        assert np.isfinite(noisy.decode(noisy.encode(np.array(values)))).all()
