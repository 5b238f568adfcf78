"""Exact sums of numbers of any size, without agreeing on a range beforehand and without revealing one.

The statistics of a table may be 10⁻⁹ in one column and 10¹² in the next, and nobody should have to tell how large its
own are. So a number becomes an integer, in steps of 2⁻¹²⁸, and the integer ten signed digits of 32 bits. Integers are
summed exactly; the digits of the total are put together again by everyone. A total of the digits fits 63 bits whoever
adds to it, so nothing wraps around. Every number has ten digits, so its size does not show.

All members learn the sum to its last bit, and no more.
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
"""The largest magnitude of an addend, 2¹⁹¹."""


def exact_sum(
    peers: Peers, values: Sequence[float | Fraction] | npt.NDArray[np.float64], context: str
) -> list[Fraction]:
    """The sums of all members' values, each value rounded to a multiple of 2⁻¹²⁸ first.

    Args:
        peers: with whom.
        values: as many at every member.
        context: as for `Peers.sum`.

    Raises:
        InputError: a value is NaN (or there is none). The others are told that this sum is off.
        RangeError: a value is infinite or beyond 2¹⁹¹. The others are told as well.
    """
    try:
        digits = np.array([_digits(value, index) for index, value in enumerate(values)], dtype=np.int64)
    except InputError:
        peers.decline()
        raise
    totals = peers.sum(digits, context=context).tolist()
    return [Fraction(_integer(total), 1 << FRACTION_BITS) for total in totals]


def wide_sum(
    peers: Peers, values: Sequence[float | Fraction] | npt.NDArray[np.float64], context: str
) -> npt.NDArray[np.float64]:
    """The same, each total rounded once to a double.

    Examples:
        >>> import cgd, numpy as np
        >>> with cgd.local_peers(3) as colony:
        ...     totals = colony.run(lambda peers, x: wide_sum(peers, np.array([x]), "x"), [1e20, 2.5, -1e20])
        >>> totals[0]
        array([2.5])
    """
    # A quotient of Python's integers is rounded correctly.
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
