"""Exact sums of numbers of any size, without a range agreed beforehand and without disclosing one.

The statistics of a table may be 10⁻⁹ in one column and 10¹² in the next, and no member should have to disclose the size
of its own. Each number becomes an integer in units of 2⁻¹²⁸, and the integer ten signed digits of 32 bits. The digits
are summed exactly as integers; every member recombines the digits of the total. A digit's total fits in 63 bits for any
number of members, so nothing wraps around. Every number has ten digits, so its size is not visible.

All members learn the sum to its last bit, and nothing else.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import InputError, RangeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from cgd.peers import Peers

FRACTION_BITS = 128
DIGITS, DIGIT_BITS = 10, 32
MAX_VALUE = 2.0 ** (DIGITS * DIGIT_BITS - FRACTION_BITS - 1)
"""The maximum magnitude of an addend, 2¹⁹¹."""


def exact_sum(
    peers: Peers, values: Sequence[float | Fraction] | npt.NDArray[np.float64], context: str
) -> list[Fraction]:
    """Return the sums of all members' values, each value rounded to a multiple of 2⁻¹²⁸ first.

    Args:
        peers: the members of the sum.
        values: the addends, equally many at every member.
        context: as for `Peers.sum`.

    Raises:
        InputError: a value is NaN, or there are no values. The sum is aborted for all members.
        RangeError: a value is infinite or beyond 2¹⁹¹. The sum is aborted for all members.
    """
    try:
        digits = np.array([_digits(value, index) for index, value in enumerate(values)], dtype=np.int64)
    except InputError:
        peers.abort_sum()
        raise
    totals = peers.sum(digits, context=context).tolist()
    return [Fraction(_integer(total), 1 << FRACTION_BITS) for total in totals]


def wide_sum(
    peers: Peers, values: Sequence[float | Fraction] | npt.NDArray[np.float64], context: str
) -> npt.NDArray[np.float64]:
    """Return the sums as `exact_sum` does, each rounded once to a double.

    Examples:
        >>> import cgd, numpy as np
        >>> with cgd.local_peers(3) as members:
        ...     totals = members.run(lambda peers, x: wide_sum(peers, np.array([x]), "x"), [1e20, 2.5, -1e20])
        >>> totals[0]
        array([2.5])
    """
    # Python rounds a quotient of integers correctly.
    return np.array([total.numerator / total.denominator for total in exact_sum(peers, values, context)])


def _digits(value: float | Fraction, index: int) -> list[int]:
    if value != value:
        raise InputError(f"value at index ({index},) is nan; leave missing values out before the sum")
    if not -MAX_VALUE <= value <= MAX_VALUE:
        raise RangeError(float(value), (index,), MAX_VALUE)
    integer = round(Fraction(value) * (1 << FRACTION_BITS))
    sign, rest = (-1 if integer < 0 else 1), abs(integer)
    return [sign * ((rest >> DIGIT_BITS * place) & ((1 << DIGIT_BITS) - 1)) for place in range(DIGITS)]


def _integer(digits: Sequence[int]) -> int:
    return sum(digit << (DIGIT_BITS * place) for place, digit in enumerate(digits))
