"""Exact sums of numbers of any size, without a range agreed beforehand and without disclosing one.

The statistics of a table may be 10⁻⁹ in one column and 10¹² in the next, and no member should have to disclose the size
of its own. Each number becomes an integer in units of 2⁻¹²⁸, and the integer 80 digits of 4 bits. The digits are summed
exactly as integers; every member recombines the digits of the total. Every number has 80 digits, so its size is not
visible.

All members learn the sum to its last bit, and practically nothing else. The sums of the digits alone would disclose
more, namely the carries: 0.5 + 0.5 and −0.5 + 1.5 have different ones. Therefore every member moves a random carry
between each two neighbouring digits: it subtracts r from the upper one and adds 16·r to the lower one, which does not
change its number. The opened digits are then a function of the sum and of 79 carries, each the true one plus the random
ones of all members. A random carry is uniform among 2ˢ values, with the largest s for which the digits of m members
cannot exceed 63 bits (57 for 5 members, 53 for 100). True carries of h honest members are from 0 to h − 1, so for any
two inputs of the honest members with the same sum, the distributions of the opened digits have a statistical distance
of at most 79·(h − 1)/2ˢ for each number: below 2⁻⁴⁸ for 5 members, and below 2⁻⁴⁰ for up to 100.
"""

from __future__ import annotations

import secrets
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import InputError, MembersChangedError, RangeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from cgd.peers import Peers

FRACTION_BITS = 128
DIGITS, DIGIT_BITS = 80, 4
BASE = 1 << DIGIT_BITS
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
    while True:
        epoch, addends = peers.next_round()  # more members need smaller carries
        try:
            totals = peers.sum(_move_carries(digits, addends), context=context, epoch=epoch).tolist()
            break
        except MembersChangedError:
            continue
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
    # In two's complement: all digits are from 0 to 15, except the first one, which has the sign.
    lower = [(integer >> DIGIT_BITS * place) & (BASE - 1) for place in range(DIGITS - 1)]
    return [*lower, integer >> DIGIT_BITS * (DIGITS - 1)]


def _carry_bits(addends: int) -> int:
    """Return the bits of a random carry: as many as fit, so that the total of `addends` digits has 63 bits and a sign.

    A digit is at most BASE − 1, plus half of the carries' range, plus BASE times that.
    """
    largest = (2**63 - 1) // addends
    return (2 * (largest - BASE) // (BASE + 1)).bit_length() - 1


def _move_carries(digits: npt.NDArray[np.int64], addends: int) -> npt.NDArray[np.int64]:
    """Return other digits of the same numbers, with a random carry moved between each two neighbours."""
    moved = digits.reshape(-1, DIGITS).copy()
    random = np.frombuffer(secrets.token_bytes(8 * (DIGITS - 1) * len(moved)), dtype=np.int64)
    # The shift keeps the sign: uniform from −2ˢ⁻¹ to 2ˢ⁻¹ − 1.
    carries = random.reshape(-1, DIGITS - 1) >> (64 - _carry_bits(addends))
    moved[:, 1:] -= carries
    moved[:, :-1] += carries << DIGIT_BITS
    return moved


def _integer(digits: Sequence[int]) -> int:
    return sum(digit << (DIGIT_BITS * place) for place, digit in enumerate(digits))
