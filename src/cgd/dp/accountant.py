"""Account for the privacy that openings of noisy totals use: Gaussian differential privacy (Dong, Roth and Su 2022).

An opening whose noise has the standard deviation σ, and whose total changes by at most Δ (in the Euclidean norm) with
one record, is μ-GDP with μ = Δ/σ. Two facts make the accounting exact:

- μ-GDP is (ε, δ)-differential privacy for every ε, with δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) and no smaller δ
  (Balle and Wang 2018).
- The squares add up: openings with μ₁, μ₂, … are together √(μ₁² + μ₂² + …)-GDP. This also holds if every μᵢ is chosen
  after the earlier totals are known, as long as the sum stays within a bound that was fixed before (Smith and Thakurta
  2022). `Budget` enforces such a bound.

The formula is evaluated with 100 decimal digits, and results are rounded so that they never promise too much.
"""

from __future__ import annotations

import math
from collections import Counter
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cgd.dp.sampler import MAX_DISTANCE
from cgd.errors import BudgetSpentError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

# Up to 12, a tail of the normal distribution is computed as ½ minus a number: up to 33 digits cancel. Beyond, the error
# of the other series is below exp(−12²/2). Both are far below the bound.
_DIGITS = 100
_CONTEXT = Context(prec=_DIGITS, traps=[])  # a number that is too large becomes infinite
_SERIES_END = 12
_TAIL_ERROR = Decimal("1e-28")
_PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
)
_ZERO_FROM = 39  # from here on, Φ(−x) is below the smallest positive float
_LAST_FAR = 1000
_TOLERANCE = 1e-13

MAX_DRAWS = 1 << 50
"""More random integers than all trainings on a data set draw: 1000 openings of 10⁹ parameters with 1000 members.

The distance of as many from Gaussian noise, 2⁻⁵⁹, is far below any useful δ.
"""


class Spent(NamedTuple):
    """The use of the openings so far: together they are (epsilon, delta)-differentially private.

    Attributes:
        epsilon: ε, at most the one of the budget.
        delta: δ of the budget.
        mu: μ of all openings together.
        openings: the number of openings charged.
    """

    epsilon: float
    delta: float
    mu: float
    openings: int


def delta_of(mu: float, epsilon: float) -> float:
    """Return the smallest δ with which μ-GDP is (ε, δ)-differential privacy, rounded up.

    Examples:
        >>> delta_of(mu=1.0, epsilon=1.0)
        0.12693673750664...
        >>> delta_of(mu=0.5, epsilon=8.0) < 1e-50
        True
    """
    _check_not_negative("mu", mu)
    _check_not_negative("epsilon", epsilon)
    if mu == 0:
        return 0.0
    with localcontext(_CONTEXT):
        ratio, half = Decimal(epsilon) / Decimal(mu), Decimal(mu) / 2
        near, far = ratio - half, ratio + half
        if near > _ZERO_FROM:
            return math.ulp(0.0)
        first = _upper_tail(near)
        # Without the second term, δ is larger; a large one is left out, because e^ε is beyond all numbers.
        second = Decimal(epsilon).exp() * _upper_tail(far) if far < _LAST_FAR else Decimal(0)
        # The second term is below the first one, so this covers the errors of both.
        return math.nextafter(min(1.0, float(first - second + 2 * _TAIL_ERROR * first)), 1)


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest ε with which μ-GDP is (ε, δ)-differential privacy, rounded up.

    Examples:
        >>> round(epsilon_of(mu=0.5016, delta=1e-5), 3)
        2.0
    """
    _check_not_negative("mu", mu)
    _check_delta(delta)
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(mu, high) > delta:
        high *= 2
    return _bisect(0.0, high, lambda epsilon: delta_of(mu, epsilon) > delta)[1]


def exceedance(mu: float, epsilon: float) -> float:
    """Return the probability that an outcome of a μ-GDP mechanism tells more than ε about a record that was used.

    The logarithm of the ratio of its probabilities with and without the record is N(μ²/2, μ²) in the worst case. So
    this is Φ(μ/2 − ε/μ), which is larger than δ: δ counts only by how much the ratio is larger.

    Examples:
        >>> mu = mu_of(1.0, 1e-6)
        >>> f"{exceedance(mu, 1.0) / 1e-6:.1f}"
        '20.1'
    """
    return 0.5 * math.erfc((epsilon / mu - mu / 2) / math.sqrt(2))


@lru_cache(maxsize=64)
def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest μ for which μ-GDP is (ε, δ)-differential privacy, rounded down.

    Examples:
        >>> [round(mu_of(epsilon, 1e-5), 4) for epsilon in (0.5, 1, 2, 3, 8)]
        [0.1422, 0.2681, 0.5016, 0.7191, 1.666]
    """
    _check_not_negative("epsilon", epsilon)
    _check_delta(delta)
    high = 1.0
    while delta_of(high, epsilon) <= delta:
        high *= 2
    return _bisect(0.0, high, lambda mu: delta_of(mu, epsilon) <= delta)[0]


class Budget:
    """The bound (ε, δ) of everything that is opened about a data set, and what was charged so far.

    Args:
        epsilon: ε.
        delta: δ. Choose it well below one divided by the number of records.
        draws: how many random integers all members draw for all openings: openings · members · dimension. Their
            distance from a Gaussian, at most `MAX_DISTANCE` each, reduces the δ that is left for the openings.

    Attributes:
        mu_squared: the sum of μ² that may be charged.

    Examples:
        >>> budget = Budget(epsilon=2.0, delta=1e-5, draws=105 * 5 * 1000)
        >>> each = budget.mu_squared_each(openings=105)
        >>> for step in range(100):
        ...     budget.charge(each, "training")
        >>> budget.spent()
        Spent(epsilon=1.94..., delta=1e-05, mu=0.48..., openings=100)
        >>> budget.charge(10 * each, "statistics")
        Traceback (most recent call last):
        cgd.errors.BudgetSpentError: an opening for statistics needs μ² = 0.02396, but 0.01198 of 0.2516 is \
left (spent: 0.2396 by 100 openings for training); stop here, or agree on a larger epsilon before the first opening
    """

    def __init__(self, epsilon: float, delta: float, draws: int = 0) -> None:
        if not 0 < epsilon < math.inf:
            raise InputError(f"epsilon is {epsilon}; it must be above 0 and finite")
        _check_delta(delta)
        if draws < 0:
            raise InputError(f"draws is {draws}; it must not be negative")
        self.epsilon, self.delta = epsilon, delta
        self._openings_delta = _without_reserve(epsilon, delta, draws)
        mu = mu_of(epsilon, self._openings_delta)
        self.mu_squared = math.nextafter(mu * mu, 0)
        # Fractions, so that n openings of an n-th each are always affordable.
        self._spent: dict[str, Fraction] = {}
        self._openings: Counter[str] = Counter()

    @property
    def openings(self) -> int:
        """The number of openings that were charged."""
        return sum(self._openings.values())

    def mu_squared_each(self, openings: int) -> float:
        """Return how much μ² each of `openings` openings may use, if they share all that is left."""
        if openings < 1:
            raise InputError(f"openings is {openings}; it must be at least 1")
        each = self._left() / openings
        rounded = float(each)
        return rounded if rounded <= each else math.nextafter(rounded, 0)

    def can_afford(self, mu_squared: float) -> bool:
        """Return whether an opening with this μ² may still be charged."""
        _check_not_negative("mu_squared", mu_squared)
        return Fraction(mu_squared) <= self._left()

    def charge(self, mu_squared: float, what: str) -> None:
        """Charge an opening, before it can be seen by anybody.

        Args:
            mu_squared: its μ², the square of the sensitivity divided by the standard deviation of the noise.
            what: what it is for, as a noun for messages.

        Raises:
            BudgetSpentError: it needs more than is left; nothing was charged.
        """
        self.check(mu_squared, what)
        self.restore(mu_squared, what)

    def check(self, mu_squared: float, what: str) -> None:
        """Check that an opening may still be charged; see `charge`."""
        if not self.can_afford(mu_squared):
            uses = ", ".join(
                f"{float(spent):.4g} by {self._openings[use]} openings for {use}" for use, spent in self._spent.items()
            )
            raise BudgetSpentError(
                f"an opening for {what} needs μ² = {mu_squared:.4g}, but {max(0.0, float(self._left())):.4g} of "
                f"{self.mu_squared:.4g} is left (spent: {uses or 'nothing'}); "
                "stop here, or agree on a larger epsilon before the first opening"
            )

    def restore(self, mu_squared: float, what: str) -> None:
        """Add an opening that an earlier process has charged, whatever is left."""
        self._spent[what] = self._spent.get(what, Fraction()) + Fraction(mu_squared)
        self._openings[what] += 1

    def spent(self) -> Spent:
        """Return what was charged so far, as ε at the δ of the budget.

        If opened totals decided how many openings there were, only the ε of the budget is a guarantee: a bound must be
        fixed before.
        """
        total = sum(self._spent.values(), Fraction())
        mu = math.nextafter(math.sqrt(total), math.inf) if total else 0.0
        # Rounding up must not exceed the budget itself, which is what was promised.
        epsilon = min(self.epsilon, epsilon_of(mu, self._openings_delta))
        return Spent(epsilon, self.delta, mu, self.openings)

    def _left(self) -> Fraction:
        return Fraction(self.mu_squared) - sum(self._spent.values(), Fraction())


def _without_reserve(epsilon: float, delta: float, draws: int) -> float:
    """Return the δ of an exact Gaussian with which `draws` numbers from the sampler keep the given δ.

    If outputs are within a distance x of (ε, δ')-private ones, for all records, they are (ε, δ' + (1 + e^ε)·x)-private.
    """
    if draws == 0:
        return delta
    with localcontext(_CONTEXT):
        reserve = (1 + Decimal(epsilon).exp()) * draws * Decimal(MAX_DISTANCE)
        if reserve >= Decimal(delta) / 2:
            raise InputError(
                f"epsilon {epsilon:g} with delta {delta:g} cannot be promised: integers differ from ideal Gaussian "
                f"noise, which adds (1 + e^epsilon)·{draws * MAX_DISTANCE:.1g} to delta, and may be half of it. "
                + ("Such an epsilon protects nothing; choose 8 or less" if epsilon > 20 else "Choose a larger delta")
            )
        return math.nextafter(float(Decimal(delta) - reserve), 0)


def _upper_tail(x: Decimal) -> Decimal:
    """Return 1 − Φ(x), with a relative error below _TAIL_ERROR."""
    if x < 0:
        return 1 - _upper_tail(-x)
    square = x * x
    density = (-square / 2).exp() / (2 * _PI).sqrt()
    if x < _SERIES_END:
        # Φ(x) = ½ + φ(x)·(x + x³/3 + x⁵/(3·5) + …)
        total, term, n = x, x, 1
        while term > total.scaleb(-_DIGITS):
            n += 2
            term *= square / n
            total += term
        return Decimal("0.5") - density * total
    # 1 − Φ(x) = φ(x)/x·(1 − 1/x² + 1·3/x⁴ − …): the error is smaller than the first term left out.
    total, term, n = Decimal(0), Decimal(1), 1
    while abs(term) > Decimal("1e-40") and n < square:
        total += term
        term *= -n / square
        n += 2
    return density / x * total


def _bisect(low: float, high: float, holds: Callable[[float], bool]) -> tuple[float, float]:
    """Return two close numbers between which a condition changes: it holds for the first and not for the second."""
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InputError(f"{name} is {value}; it must be finite and not negative")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta is {delta}; it must be above 0 and below 1")
