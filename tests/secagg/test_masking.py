"""Secret sharing and pairwise masks: they cancel, and any part of them is uniform."""

from __future__ import annotations

import tracemalloc
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from cgd import InputError, reconstruct, split
from cgd.errors import LocalProtocolError
from cgd.secagg.fixed_point import CHUNK_ELEMENTS
from cgd.secagg.masking import PairwiseMasks
from support.wire import names, pair_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

# The false-alarm rate of one call of `looks_uniform`; this file makes fewer than thirty calls.
FALSE_ALARM = 1e-6
WORDS = 1 << 17

ring_arrays = st.sampled_from([np.uint16, np.uint32, np.uint64]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=2))
)


@given(ring_arrays, st.integers(2, 9))
def test_reconstruct_inverts_split(secret: npt.NDArray[Any], count: int) -> None:
    shares = split(secret, count)
    assert len(shares) == count
    assert np.array_equal(reconstruct(shares), secret)


def p_values(shares: Sequence[npt.NDArray[np.uint32]]) -> list[float]:
    """Return p-values of the test that every sum over some of these shares is uniform, byte by byte (chi-squared)."""
    subsets = chain.from_iterable(combinations(shares, size) for size in range(1, len(shares) + 1))
    totals = [np.add.reduce(chosen, dtype=np.uint32) for chosen in subsets]
    counts = [np.bincount(total.view(np.uint8)[byte::4], minlength=256) for total in totals for byte in range(4)]
    return [stats.chisquare(count).pvalue for count in counts]


def looks_uniform(shares: Sequence[npt.NDArray[np.uint32]]) -> bool:
    values = p_values(shares)
    return min(values) > FALSE_ALARM / len(values)  # Bonferroni: the false-alarm rate of all tests together


@pytest.mark.parametrize("secret", [0, 1, 2**31, 2**32 - 1])
def test_any_proper_subset_of_shares_is_uniform(secret: int) -> None:
    shares = split(np.full(WORDS, secret, dtype=np.uint32), 4)
    for left_out in range(4):
        assert looks_uniform(shares[:left_out] + shares[left_out + 1 :])


def test_uniformity_test_can_fail() -> None:
    shares = split(np.full(WORDS, 7, dtype=np.uint32), 4)
    assert not looks_uniform(shares)  # all four together reveal the secret
    biased = shares[0].copy()
    biased[: WORDS // 20] &= 0x7FFFFFFF  # one bit is always zero in one word of twenty
    assert not looks_uniform([biased, *shares[1:3]])


@given(
    st.integers(3, 8), st.integers(1, 50), st.sampled_from([np.uint16, np.uint32, np.uint64]), st.integers(0, 2**64 - 1)
)
def test_pairwise_masks_cancel(count: int, size: int, dtype: type, position: int) -> None:
    members = names(count)
    keys = pair_keys(members)
    masked: list[npt.NDArray[Any]] = [np.zeros(size, dtype=dtype) for _ in members]
    for me, words in zip(members, masked, strict=True):
        PairwiseMasks(me, keys[me]).add_to(words, position)
    assert not reconstruct(masked).any()
    assert all(words.any() for words in masked)


def test_pairwise_masks_do_not_depend_on_the_vector_size() -> None:
    keys = pair_keys(["a", "b", "c"])["a"]
    long, short = np.zeros(3 * CHUNK_ELEMENTS + 5, dtype=np.uint32), np.zeros(CHUNK_ELEMENTS + 3, dtype=np.uint32)
    PairwiseMasks("a", keys).add_to(long, 1)
    PairwiseMasks("a", keys).add_to(short, 1)
    assert np.array_equal(long[: short.size], short)


def test_masked_values_of_all_but_one_member_are_uniform() -> None:
    members = names(4)
    keys = pair_keys(members)
    masked = [np.full(WORDS, i, dtype=np.uint32) for i in range(4)]
    for me, words in zip(members, masked, strict=True):
        PairwiseMasks(me, keys[me]).add_to(words, 1)
    assert looks_uniform(masked[1:])
    assert not looks_uniform(masked)


def test_position_can_be_used_once() -> None:
    masks = PairwiseMasks("a", pair_keys(["a", "b", "c"])["a"])
    masks.add_to(np.zeros(1, dtype=np.uint32), 5)
    for position in (5, 4):
        with pytest.raises(LocalProtocolError, match="may have been used already"):
            masks.add_to(np.zeros(1, dtype=np.uint32), position)


def test_positions_have_different_masks() -> None:
    masks = PairwiseMasks("a", pair_keys(["a", "b", "c"])["a"])
    first, second = np.zeros(1000, dtype=np.uint32), np.zeros(1000, dtype=np.uint32)
    masks.add_to(first, 1)
    masks.add_to(second, 2)
    assert np.count_nonzero(first == second) <= 2  # equal by chance once in four million


@pytest.mark.parametrize("peers", [2, 40])
def test_additional_memory_is_bounded(peers: int) -> None:
    words = np.zeros(4_000_000, dtype=np.uint32)
    masks = PairwiseMasks("p", {f"q{i}": bytes(16) for i in range(peers)})
    tracemalloc.start()
    masks.add_to(words, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # the vector itself has 16 MB


def test_sessions_have_different_masks() -> None:
    keys = pair_keys(["a", "b", "c"])["a"]
    first, second = np.zeros(1000, dtype=np.uint32), np.zeros(1000, dtype=np.uint32)
    PairwiseMasks("a", keys, b"one").add_to(first, 1)
    PairwiseMasks("a", keys, b"two").add_to(second, 1)
    assert np.count_nonzero(first == second) <= 2


def test_repr_hides_the_keys() -> None:
    key = b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(PairwiseMasks("a", {"b": key}))


def test_invalid_secrets_shares_and_keys_are_rejected() -> None:
    ring = np.zeros(2, dtype=np.uint32)
    with pytest.raises(InputError, match="cannot be split into 1"):
        split(ring, 1)
    with pytest.raises(InputError, match="float64 is not a ring"):
        split(np.zeros(2), 3)
    with pytest.raises(InputError, match="no shares"):
        reconstruct([])
    with pytest.raises(InputError, match="shares of one secret have the same type and shape"):
        reconstruct([ring, np.zeros(3, dtype=np.uint32)])
    with pytest.raises(InputError, match="has 3 bytes"):
        PairwiseMasks("a", {"b": b"abc"})
