"""The linear MAC accepts every correct total, and a wrong one with probability 2^-64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cgd.aes import keystream
from cgd.secagg import mac as mac_module
from cgd.secagg.mac import TAGS, LinearMac

MEMBERS = ("a", "b", "c")
KEY = b"k" * 16
FALSE_ALARM = 1e-6
TYPES = [np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")]
sizes = st.one_of(
    st.integers(1, 300), st.sampled_from([mac_module._PRODUCTS * TAGS**2 + shift for shift in (-1, 0, 1, 65)])
)
types = st.sampled_from(TYPES)


def vectors(size: int, dtype: np.dtype[Any], seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {name: np.frombuffer(rng.bytes(size * dtype.itemsize), dtype=dtype) for name in MEMBERS}


def tagged_total(mac: LinearMac, of: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    tagged = [np.concatenate([words, mac.tags(name, words)]) for name, words in of.items()]
    total: npt.NDArray[Any] = np.sum(tagged, axis=0, dtype=tagged[0].dtype)
    return total


@settings(deadline=None, max_examples=40)
@given(sizes, types, st.integers(0, 2**32), st.integers(0, 2**40))
def test_matrix_products_equal_the_sums_of_the_definition(
    size: int, dtype: np.dtype[Any], seed: int, position: int
) -> None:
    words = vectors(size, dtype, seed)["a"]
    packed = keystream(KEY, position).update(bytes(size // 8 + TAGS))
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8)).astype(dtype)
    expected = [np.sum(bits[t : t + size] * words, dtype=dtype) for t in range(TAGS)]
    assert np.array_equal(mac_module._shifted_sums(words, keystream(KEY, position)), expected)


@settings(deadline=None, max_examples=40)
@given(sizes, types, st.integers(0, 2**32))
def test_correct_total_is_accepted(size: int, dtype: np.dtype[Any], seed: int) -> None:
    mac = LinearMac(KEY, 3, MEMBERS)
    total = tagged_total(mac, vectors(size, dtype, seed))
    assert mac.verify(total)
    assert not LinearMac(KEY, 4, MEMBERS).verify(total)
    assert not LinearMac(b"K" * 16, 3, MEMBERS).verify(total)


@settings(deadline=None, max_examples=40)
@given(sizes, types, st.data())
def test_wrong_total_is_rejected(size: int, dtype: np.dtype[Any], data: st.DataObject) -> None:
    """The error may be in the vector or in its tags."""
    mac = LinearMac(KEY, 1, MEMBERS)
    total = tagged_total(mac, vectors(size, dtype))
    indices = data.draw(st.lists(st.integers(0, total.size - 1), min_size=1, max_size=3, unique=True))
    for index in indices:
        total[index] ^= dtype.type(1) << dtype.type(data.draw(st.integers(0, 8 * dtype.itemsize - 1)))
    assert not mac.verify(total)


@pytest.mark.parametrize("dtype", TYPES)
def test_each_tag_detects_an_error_in_top_bits_with_probability_one_half(dtype: np.dtype[Any]) -> None:
    """Random multiples would miss an error of order two. Here all tags are independent coin flips."""
    error = np.zeros(40, dtype=dtype)
    error[[3, 17]] = dtype.type(1) << dtype.type(8 * dtype.itemsize - 1)
    detected = np.stack([mac_module._shifted_sums(error, keystream(KEY, position)) != 0 for position in range(2000)])
    each = [stats.binomtest(int(count), len(detected)).pvalue for count in detected.sum(axis=0)]
    pairs = np.corrcoef(detected.T)[np.triu_indices(TAGS, 1)]
    assert min(each) > FALSE_ALARM / TAGS
    # A correlation of independent coins is normal with a deviation of 1/√2000.
    assert np.abs(pairs).max() < stats.norm.isf(FALSE_ALARM / 2 / len(pairs)) / np.sqrt(len(detected))
    multiples = np.random.default_rng(1).integers(0, 2**32, (2000, 2)).astype(dtype)
    plain = (multiples * error[[3, 17]]).sum(axis=1, dtype=dtype)
    assert 0.4 < np.mean(plain == 0) < 0.6  # missed by one random multiple


@pytest.mark.parametrize("dtype", TYPES)
def test_tags_of_known_vectors_are_uniform_without_the_key(dtype: np.dtype[Any]) -> None:
    ones = np.ones(10, dtype=dtype)
    tags = np.concatenate([LinearMac(KEY, position, MEMBERS).tags("b", ones) for position in range(200)])
    top = np.bincount((tags >> dtype.type(8 * dtype.itemsize - 4)).astype(np.int64), minlength=16)
    assert stats.chisquare(top).pvalue > FALSE_ALARM
    bare = np.concatenate([mac_module._shifted_sums(ones, keystream(KEY, position)) for position in range(200)])
    assert bare.max() <= 10  # without masks they would reveal the bits


def test_repr_hides_the_key() -> None:
    assert "kkkk" not in repr(LinearMac(KEY, 1, MEMBERS))
