from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from cgd.optim.normal import CHUNK, normal_quantile, standard_normal

KEY = bytes(range(32))


@given(st.floats(2.0**-53, 1 - 2.0**-53))
def test_quantile_agrees_with_scipy(p: float) -> None:
    ours, theirs = normal_quantile(np.array([p]))[0], special.ndtri(p)
    assert abs(ours - theirs) <= 4e-15 * max(1.0, abs(theirs))


def test_numbers_are_normally_distributed() -> None:
    # Kolmogorov-Smirnov; the key is fixed, so this cannot fail by chance.
    numbers = standard_normal(KEY, 200_000)
    assert stats.kstest(numbers, "norm").pvalue > 0.001
    assert stats.kstest(numbers[::2] + numbers[1::2], stats.norm(scale=np.sqrt(2)).cdf).pvalue > 0.001
    assert stats.kstest(1.02 * numbers, "norm").pvalue < 0.001  # the test detects a deviation of 2 %


def test_numbers_of_a_key_never_change() -> None:
    """A participant may have only the seed left: a change of this digest is a change of format."""
    digest = hashlib.sha256(standard_normal(KEY, 3 * CHUNK + 1).astype("<f8").tobytes()).hexdigest()
    assert digest == "fca362b72de09499b688cdec9c8ea1c05ee7f7e8948a383a9ba3734d9790b33e"


def test_longer_output_has_the_same_prefix() -> None:
    assert np.array_equal(standard_normal(KEY, CHUNK + 5)[:7], standard_normal(KEY, 7))
