"""Check opened statistics: one dishonest member must not make another one's records vanish from the gradient sums.

No member can prove its counts, but every member knows its own. A total below our own part, or above its limit, shows
that some member entered a value that is not a count; the sum does not show which. The total is not used then: with a
wrong number of records of a class, or a wrong deviation, the gradient of one honest member could be negligible beside
that of another one, which the sum would then reveal.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from cgd.errors import InputError, ProtocolError
from cgd.tabular.number_columns import MAX_NUMBER
from cgd.tabular.wide_sums import FRACTION_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cgd.peers import Peers

# With n records in total, our n_l values are at most √(n/n_l) deviations from the mean, so this concerns members that
# have less than a hundredth of all records.
MAX_DISTANCE = 10.0
REMEDY = (
    "a member entered a wrong number, and the sums do not show which; check the tables of all participants, then train "
    "anew under another federation name"
)
REMEDY_AFTER_RESTART = (
    "our table is not the one that was counted, or a member entered a wrong number; restart with the table that was "
    "counted, or train anew under another federation name"
)


def is_included(peers: Peers) -> bool:
    """Return whether our part is in the next sum: not if other members finished it before we joined."""
    peers.next_round()  # waits until that is known
    return peers.recovery.took_part()


def was_included(peers: Peers) -> bool:
    """Return whether our part is in the latest sum: not if the other members finished it while we were absent."""
    return peers.recovery.took_part_in_last()


def check_counts(
    peers: Peers, what: str, totals: Iterable[int], own: Sequence[int] | None, limit: int | None = None
) -> None:
    """Check counts over all members' records, before they are used.

    Args:
        peers: the members of the sum. If the check fails, the next sum is aborted, so that nobody waits for us.
        what: the name of the counts in a message.
        totals: the opened counts.
        own: our part of each; None if the sum does not include us.
        limit: the largest possible count, if it is known.

    Raises:
        ProtocolError: a total is negative, below our own part or above the limit.
    """
    totals = list(totals)
    for total, part in zip(totals, [0] * len(totals) if own is None else own, strict=True):
        if total < part:
            raise refuse(peers, f"{what}: {total:,} in total, but we alone have {part:,}")
        if limit is not None and total > limit:
            raise refuse(peers, f"{what}: {total:,} in total, but there are only {limit:,} records")


def check_mean(peers: Peers, name: str, mean: float) -> None:
    """Check the mean of a column over all members' records.

    Raises:
        ProtocolError: no column can have this mean.
    """
    if not abs(mean) <= MAX_NUMBER:
        raise refuse(peers, f"the mean of {name!r} is {mean:.3g}, and no number may be beyond ±{MAX_NUMBER:.0e}")


def check_spread(peers: Peers, name: str, total: Fraction, own: float) -> None:
    """Check the sum of squared distances from the mean over all members' records.

    Raises:
        ProtocolError: the sum is below our own part.
    """
    if total < Fraction(own) - Fraction(1, 1 << FRACTION_BITS):  # parts are rounded before they are added
        raise refuse(peers, f"the squared distances of {name!r} from the mean sum to less than ours alone")


def check_distance(peers: Peers, name: str, own: float, count: int, deviation: float) -> None:
    """Check that our values of a column are not very far from the mean, in standard deviations.

    Args:
        peers: the members of the sum.
        name: the name of the column.
        own: our sum of squared distances from the mean.
        count: the number of our values.
        deviation: the standard deviation over all members' records.

    Raises:
        InputError: they are. With them our gradient would be much larger than those of the others.
    """
    if not count or not deviation:
        return
    distance = math.sqrt(own / count) / deviation
    if distance > MAX_DISTANCE:
        _abort(peers)
        raise InputError(
            f"our values of {name!r} are {distance:.3g} standard deviations from the mean over all members (root mean "
            f"square), and {MAX_DISTANCE:g} is the most: the gradient sums would show ours nearly alone. Check whether "
            "the other participants use another unit; if not, a member entered wrong statistics, or the column must be "
            "left out or made a category in [data.columns]"
        )


def refuse(peers: Peers, fact: str) -> ProtocolError:
    """Abort the next sum, and return the error about a total that contradicts our own part."""
    return ProtocolError(f"{fact}: {REMEDY if _abort(peers) else REMEDY_AFTER_RESTART}")


def _abort(peers: Peers) -> bool:
    """Abort the next sum, unless we have restarted: then the members wait, as we may restart with the right table."""
    restarted = peers.recovery.is_replay()
    if not restarted:
        peers.abort_sum()
    return not restarted
