"""Fixed-point encoding: no total wraps around, and rounding is the only error."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cgd import FixedPoint, InputError, RangeError
from cgd.aes import keystream
from cgd.secagg.fixed_point import CHUNK_ELEMENTS

addends = st.integers(1, 100_000)
bounds = st.floats(1e-6, 1e4)
rings = st.sampled_from([32, 64])


@given(addends, bounds, rings)
def test_for_sum_is_the_finest_encoding_that_cannot_wrap(m: int, bound: float, ring_bits: int) -> None:
    fixed_point = FixedPoint.for_sum(addends=m, bound=bound, ring_bits=ring_bits)
    largest = 2 ** (ring_bits - 1) - 1
    assert m * math.ceil(math.ldexp(bound, fixed_point.fraction_bits) - 0.5) <= largest
    assert m * math.ldexp(bound, fixed_point.fraction_bits + 1) > largest - m


@given(st.integers(1, 8), bounds, rings, st.data())
def test_extreme_totals_do_not_wrap(m: int, bound: float, ring_bits: int, data: st.DataObject) -> None:
    fixed_point = FixedPoint.for_sum(addends=m, bound=bound, ring_bits=ring_bits)
    values = np.array(data.draw(st.lists(st.sampled_from([-bound, bound, 0.0]), min_size=m, max_size=m)))
    total = fixed_point.encode(values).sum(dtype=f"u{ring_bits // 8}", keepdims=True)
    assert abs(fixed_point.decode(total)[0] - math.fsum(values)) <= m * fixed_point.resolution / 2 + 1e-12 * bound


@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=50), bounds, rings, st.sampled_from([-1, 1]))
def test_weighted_totals_do_not_wrap(samples: list[int], bound: float, ring_bits: int, sign: int) -> None:
    fixed_point = FixedPoint.for_weighted_sum(addends=len(samples), bound=bound, ring_bits=ring_bits)
    worst = np.array([sign * bound])
    words = [fixed_point.encode(worst, weight=n / sum(samples)) for n in samples]
    total = fixed_point.decode(np.sum(words, axis=0, dtype=words[0].dtype))[0]
    assert abs(total - sign * bound) <= len(samples) * fixed_point.resolution / 2 + 1e-12 * bound


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50), st.floats(1e-6, 100), st.sampled_from([-1, 1]))
def test_weighted_totals_that_are_rounded_at_random_do_not_wrap(samples: list[int], bound: float, sign: int) -> None:
    fixed_point = FixedPoint.for_weighted_sum(addends=len(samples), bound=bound, ring_bits=16)
    worst, count = np.full(100, sign * bound), len(samples)
    words = [
        fixed_point.encode(worst, weight=n / sum(samples), rounding=keystream(bytes(16), position))
        for position, n in enumerate(samples)
    ]
    total = fixed_point.decode(np.sum(words, axis=0, dtype=words[0].dtype))
    assert np.abs(total - sign * bound).max() <= count * fixed_point.resolution * (1 + 1e-9)


def test_extreme_sums_without_weights_in_16_bits_do_not_wrap() -> None:
    fixed_point = FixedPoint.for_sum(addends=7, bound=0.9999, ring_bits=16)
    values = np.full(1000, 0.9999)
    words = [fixed_point.encode(values, rounding=keystream(bytes(16), position)) for position in range(7)]
    assert np.abs(fixed_point.decode(np.sum(words, axis=0, dtype=words[0].dtype)) - 7 * 0.9999).max() < 0.01


def test_random_rounding_has_the_value_as_its_mean_and_keeps_integers() -> None:
    fixed_point = FixedPoint(fraction_bits=0, bound=100.0, ring_bits=16)
    count = 3 * CHUNK_ELEMENTS + 5
    for value in (0.0, 3.0, -7.0):
        words = fixed_point.encode(np.full(count, value), rounding=keystream(bytes(16), 1))
        assert (fixed_point.decode(words) == value).all()
    for value in (0.25, -0.001, 41.9):
        words = fixed_point.encode(np.full(count, value, dtype=np.float64), rounding=keystream(bytes(16), 1))
        found = fixed_point.decode(words)
        assert set(found) == {math.floor(value), math.ceil(value)}
        fraction = value - math.floor(value)
        assert abs(found.mean() - value) < 6 * math.sqrt(fraction * (1 - fraction) / count)  # two in a billion
        again = fixed_point.encode(np.full(count, value), rounding=keystream(bytes(16), 1))
        assert np.array_equal(words, again)
        other = fixed_point.encode(np.full(count, value), rounding=keystream(bytes(16), 2))
        assert not np.array_equal(words, other)


def test_rounding_error_is_the_standard_deviation() -> None:
    values = np.random.default_rng(3).uniform(-1, 1, 100_000)
    for bits in (16, 32):
        fixed_point = FixedPoint.for_weighted_sum(addends=3, bound=1.0, ring_bits=bits)
        rounding = keystream(bytes(16), 1) if bits == 16 else None
        errors = fixed_point.decode(fixed_point.encode(values, rounding=rounding)) - values
        assert errors.std() == pytest.approx(fixed_point.rounding_error, rel=0.02)


def test_weighted_sum_needs_no_bits_for_the_number_of_addends() -> None:
    few = FixedPoint.for_weighted_sum(addends=3, bound=1.0)
    many = FixedPoint.for_weighted_sum(addends=100_000, bound=1.0)
    assert few.fraction_bits == many.fraction_bits == 30


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=3), elements=st.floats(-1, 1)), rings)
def test_rounding_error_is_at_most_half_the_resolution(values: np.ndarray, ring_bits: int) -> None:
    fixed_point = FixedPoint.for_sum(addends=3, bound=1.0, ring_bits=ring_bits)
    words = fixed_point.encode(values)
    assert words.shape == values.shape
    assert words.dtype == f"u{ring_bits // 8}"
    assert np.all(np.abs(fixed_point.decode(words) - values) <= fixed_point.resolution / 2)


@given(st.integers(0, 200_000), st.sampled_from([math.nan, math.inf, -math.inf, 1.5, -1.0000001]))
def test_value_out_of_range_is_reported_with_its_index(index: int, value: float) -> None:
    values = np.zeros((2, 100_001))
    values.flat[index] = value
    with pytest.raises(RangeError) as caught:
        FixedPoint.for_sum(addends=3, bound=1.0).encode(values)
    assert np.array_equal(caught.value.value, value, equal_nan=True)
    assert caught.value.index == np.unravel_index(index, values.shape)
    assert caught.value.bound == 1.0
    assert str(caught.value.index) in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_rounding_is_the_only_error_in_any_precision(dtype: type, weight: float) -> None:
    values: np.ndarray = np.random.default_rng(0).uniform(-1, 1, 1000).astype(dtype)
    fixed_point = FixedPoint.for_weighted_sum(addends=3, bound=1.0)
    exact = values.astype(np.float64) * weight
    assert np.all(np.abs(fixed_point.decode(fixed_point.encode(values, weight)) - exact) <= fixed_point.resolution / 2)


def test_bound_is_accepted_and_the_next_float_is_rejected() -> None:
    fixed_point = FixedPoint.for_sum(addends=3, bound=0.1)
    fixed_point.encode(np.array([0.1, -0.1]))
    with pytest.raises(RangeError, match="beyond the bound"):
        fixed_point.encode(np.array([np.nextafter(0.1, 1)]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("bound", [0.1, 1e6])
def test_value_clipped_to_the_bound_in_its_own_type_is_accepted(dtype: type, bound: float) -> None:
    """The float32 nearest to 0.1 is above 0.1; it counts as 0.1, so that no total can wrap around."""
    fixed_point = FixedPoint.for_sum(addends=3, bound=bound, ring_bits=64)
    clipped: np.ndarray = np.clip(np.array([-6e4, 6e4]), -bound, bound).astype(dtype)
    decoded = fixed_point.decode(fixed_point.encode(clipped))
    assert np.all(np.abs(decoded) <= bound)
    assert np.allclose(decoded, clipped, rtol=1e-3)
    with pytest.raises(RangeError):
        fixed_point.encode(np.array([np.inf], dtype=dtype))
    if bound < 1:
        with pytest.raises(RangeError):
            fixed_point.encode(np.nextafter(dtype(bound), dtype(1)).reshape(1))


def test_weighted_sum_needs_its_margin() -> None:
    """65,536 addends that all round up: without a margin for the rounding the total would be −2³¹."""
    bound = (2**31 - 1) / 2**30
    fixed_point = FixedPoint.for_weighted_sum(addends=65_536, bound=bound)
    words = fixed_point.encode(np.full(65_536, bound), weight=1 / 65_536)
    assert fixed_point.decode(words.sum(dtype=np.uint32, keepdims=True))[0] == pytest.approx(bound, rel=1e-4)


@given(hnp.arrays(np.int64, 5, elements=st.integers(-(2**60), 2**60)))
def test_integers_are_exact(values: np.ndarray) -> None:
    fixed_point = FixedPoint.for_integers(addends=5)
    words = fixed_point.encode(values)
    assert int(fixed_point.decode(words.sum(keepdims=True), np.int64)[0]) == sum(int(v) for v in values)


def test_integers_out_of_range_are_rejected() -> None:
    largest = (2**63 - 1) // 5
    FixedPoint.for_integers(addends=5).encode(np.array([largest, -largest]))
    for value in (largest + 1, -largest - 1, 2**63 - 1):
        with pytest.raises(RangeError, match="integers are summed exactly in 64 bits"):
            FixedPoint.for_integers(addends=5).encode(np.array([0, value]))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: FixedPoint.for_sum(addends=0, bound=1.0), "addends is 0"),
        (lambda: FixedPoint.for_sum(addends=3, bound=0.0), "bound is 0"),
        (lambda: FixedPoint.for_sum(addends=3, bound=math.nan), "bound is nan"),
        (lambda: FixedPoint.for_sum(addends=3, bound=1.0, ring_bits=8), "ring_bits is 8; choose 16, 32 or 64"),
        (lambda: FixedPoint.for_sum(addends=3, bound=1e10), "use ring_bits=64"),
        (lambda: FixedPoint.for_sum(addends=3, bound=1e30, ring_bits=64), "do not fit a ring of 64 bits"),
        (lambda: FixedPoint(fraction_bits=300, bound=1.0), "fraction_bits is 300"),
        (lambda: FixedPoint(fraction_bits=30, bound=100.0), "does not fit a ring of 32 bits"),
        (lambda: FixedPoint(fraction_bits=20, bound=1.0).encode(np.ones(1), weight=1.5), "weight is 1.5"),
    ],
)
def test_invalid_settings_are_rejected(call: object, error: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=error):
        call()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bound", [1.0, 1e-30])
@pytest.mark.parametrize("beyond", [1.001, -1.001, 1e4, 1e30, math.nan, math.inf, -math.inf])
def test_one_value_out_of_range_is_found_in_a_whole_chunk(dtype: type, bound: float, beyond: float) -> None:
    values: np.ndarray = np.full(2 * CHUNK_ELEMENTS, bound / 1000, dtype=dtype)
    fixed_point = FixedPoint.for_sum(addends=3, bound=bound)
    assert fixed_point.decode(fixed_point.encode(values))[-1] == pytest.approx(bound / 1000, rel=1e-3)
    values[CHUNK_ELEMENTS + 77] = beyond * bound
    with pytest.raises(RangeError) as caught:
        fixed_point.encode(values)
    assert caught.value.index == (CHUNK_ELEMENTS + 77,)


def test_whole_chunks_near_the_bound_are_encoded() -> None:
    values = np.full(CHUNK_ELEMENTS, -1.0, dtype=np.float32)  # its squares sum to far more than that of the bound
    fixed_point = FixedPoint.for_sum(addends=3, bound=1.0)
    assert (fixed_point.decode(fixed_point.encode(values)) == -1.0).all()
