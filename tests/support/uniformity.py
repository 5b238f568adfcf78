"""A statistical test of words that must be uniform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    import numpy.typing as npt


def p_values(words: npt.NDArray[Any]) -> list[float]:
    """Return the p-values of chi-squared tests of the upper and the lower four bits for uniformity."""
    bits = 8 * words.itemsize
    counts = [np.bincount(part.astype(np.int64), minlength=16) for part in (words >> (bits - 4), words & 15)]
    return [float(stats.chisquare(each).pvalue) for each in counts]
