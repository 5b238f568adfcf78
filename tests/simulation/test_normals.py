from __future__ import annotations

import numpy as np
import pytest

from cgd.optim.normal import normal_quantile, standard_normal
from cgd.simulation import vectors


@pytest.mark.parametrize("delta", [1.0, 0.1, 1e-3])
def test_compiled_draw_equals_the_reference_bit_for_bit(delta: float) -> None:
    count = 1_000_000
    key = bytes(range(32))
    reference = standard_normal(key, count) * delta
    numbers = np.empty(count, np.float32)
    vectors.draw_normals(key, delta, numbers)
    assert np.array_equal(numbers, reference.astype(np.float32))


def test_compiled_quantile_equals_the_reference_in_the_far_tails() -> None:
    steps = np.arange(0, 1 << 40, 1 << 24, dtype=np.uint64)
    spread = np.arange(0, 1 << 63, 1 << 47, dtype=np.uint64) * np.uint64(2)
    words = np.concatenate([steps, np.uint64(2**64 - 1) - steps, spread])
    reference = normal_quantile(((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
    assert np.abs(reference).max() > 8  # where r > 5, which millions of random numbers do not reach
    numbers = np.empty(len(words), np.float64)
    vectors._quantiles(words, 1.0, numbers)
    assert np.array_equal(numbers, reference)
