"""The accountant: exact values, safe rounding, and a budget that is never exceeded."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.dp.accountant import Budget, Spent, delta_of, epsilon_of, mu_of
from cgd.dp.sampler import MAX_DISTANCE
from cgd.errors import BudgetSpentError, CGDError, InputError

# (σ of a sum that one record changes by 1, openings, δ, ε) by dp-accounting 0.6.0 with numpy 2.4:
#   pld = dp_accounting.pld.privacy_loss_distribution
#   pld.from_gaussian_mechanism(σ, value_discretization_interval=i).self_compose(openings).get_epsilon_for_delta(δ)
# with i = 1e-3 for the last two and 1e-4 for the others.
PRIVACY_LOSS_DISTRIBUTIONS = [
    (1.0, 1, 1e-05, 4.377178),
    (1.0, 1, 1e-09, 6.173935),
    (0.6, 1, 1e-05, 8.003691),
    (0.6, 1, 1e-09, 10.962412),
    (10.0, 10, 1e-05, 1.199370),
    (10.0, 10, 1e-09, 1.788025),
    (20.0, 100, 1e-05, 1.993092),
    (20.0, 100, 1e-09, 2.909734),
    (60.0, 900, 1e-05, 1.993098),
    (60.0, 900, 1e-09, 2.909742),
    (5.0, 300, 1e-05, 20.125079),
    (5.0, 300, 1e-09, 26.198306),
]


@pytest.mark.parametrize(("sigma", "openings", "delta", "epsilon"), PRIVACY_LOSS_DISTRIBUTIONS)
def test_composition_equals_privacy_loss_distributions(
    sigma: float, openings: int, delta: float, epsilon: float
) -> None:
    mu = math.sqrt(openings) / sigma
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-5)
    assert mu_of(epsilon, delta) == pytest.approx(mu, rel=1e-5)


DP_ACCOUNTING = Path(sys.prefix) / "dp-accounting" / "bin" / "python"
COMPOSE = """
import json, sys
from dp_accounting.pld import privacy_loss_distribution
for sigma, openings, delta in json.loads(sys.argv[1]):
    one = privacy_loss_distribution.from_gaussian_mechanism(sigma, value_discretization_interval=1e-3)
    print(one.self_compose(openings).get_epsilon_for_delta(delta))
"""


@pytest.mark.skipif(not DP_ACCOUNTING.exists(), reason="needs dp-accounting: make test-accountant")
def test_composition_equals_dp_accounting() -> None:
    cases = [(sigma, openings, delta) for sigma in (0.8, 5.0, 30.0) for openings in (1, 70) for delta in (1e-5, 1e-8)]
    command = [str(DP_ACCOUNTING), "-c", COMPOSE, json.dumps(cases)]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    for (sigma, openings, delta), epsilon in zip(cases, printed, strict=True):
        assert epsilon_of(math.sqrt(openings) / sigma, delta) == pytest.approx(float(epsilon), rel=0.01)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.5, 0.1422), (1, 0.2681), (2, 0.5016), (3, 0.7191), (8, 1.6660)])
def test_known_values_at_the_usual_delta(epsilon: float, mu: float) -> None:
    assert round(mu_of(epsilon, 1e-5), 4) == mu


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 1.0, 10.0, 24.0, 50.0])
def test_delta_is_rounded_up_by_hardly_more_than_a_float(mu: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workprec(1000):
        for near in (-20.0, -1.0, 0.0, 1.0, 5.0, 11.5, 11.999, 12.001, 13.0, 30.0):  # δ from 1 to 1e-198
            epsilon = mu * (near + mu / 2)
            if epsilon >= 0:
                half, ratio = mpmath.mpf(mu) / 2, mpmath.mpf(epsilon) / mpmath.mpf(mu)
                exact = mpmath.ncdf(half - ratio) - mpmath.exp(epsilon) * mpmath.ncdf(-half - ratio)
                assert exact <= delta_of(mu, epsilon) <= min(1, exact * (1 + 1e-14))


mus = st.floats(1e-6, 50)
deltas = st.floats(-30, -1).map(lambda power: 10.0**power)


@settings(max_examples=12)
@given(mus, deltas)
def test_inverses_are_on_the_safe_side_and_close(mu: float, delta: float) -> None:
    epsilon = epsilon_of(mu, delta)
    assert delta_of(mu, epsilon) <= delta
    if epsilon > 0:
        assert delta_of(mu, epsilon * (1 - 1e-12)) > delta
        largest = mu_of(epsilon, delta)
        assert delta_of(largest, epsilon) <= delta < delta_of(largest * (1 + 1e-12), epsilon)
        assert largest == pytest.approx(mu, rel=1e-9)


@settings(max_examples=30)
@given(mus, st.floats(0, 100), st.floats(1.001, 10))
def test_delta_grows_with_mu_and_falls_with_epsilon(mu: float, epsilon: float, factor: float) -> None:
    here = delta_of(mu, epsilon)
    assert 0 < here <= 1
    assert delta_of(mu * factor, epsilon) >= here
    assert delta_of(mu, epsilon * factor) <= here


def test_extreme_arguments() -> None:
    assert delta_of(0.0, 1.0) == 0
    assert epsilon_of(0.0, 1e-30) == 0
    assert epsilon_of(1e-6, 0.5) == 0
    assert delta_of(1e-6, 1e6) == math.ulp(0.0)  # never 0: it is rounded up
    assert delta_of(1e300, 1e300) == 1
    assert 0 < delta_of(1e-300, 0.0) < 1e-20
    assert 0.4 < delta_of(5000.0, 5000.0**2 / 2) < 0.51
    assert mu_of(0.0, 1e-5) == pytest.approx(math.sqrt(2 * math.pi) * 1e-5, rel=1e-6)
    assert mu_of(1e5, 1e-5) == pytest.approx(443, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delta_of(-1.0, 1.0), "mu is -1.0; it must be finite and not negative"),
        (lambda: delta_of(1.0, math.nan), "epsilon is nan; it must be finite and not negative"),
        (lambda: epsilon_of(1.0, 0.0), "delta is 0.0; it must be above 0 and below 1"),
        (lambda: mu_of(1.0, 1.0), "delta is 1.0; it must be above 0 and below 1"),
        (lambda: Budget(0.0, 1e-5), "epsilon is 0.0; it must be above 0 and finite"),
        (lambda: Budget(math.inf, 1e-5), "epsilon is inf"),
        (lambda: Budget(1.0, math.nan), "delta is nan"),
        (lambda: Budget(1.0, 1e-5, draws=-1), "draws is -1"),
        (lambda: Budget(1.0, 1e-20, draws=10**15), "Choose a larger delta"),
        (lambda: Budget(60.0, 1e-5, draws=10**12), "Such an epsilon protects nothing; choose 8 or less"),
        (lambda: Budget(1e300, 1e-5, draws=1), "cannot be promised"),
        (lambda: Budget(1.0, 1e-5).mu_squared_each(0), "openings is 0; it must be at least 1"),
        (lambda: Budget(1.0, 1e-5).charge(-1.0, "x"), "mu_squared is -1.0"),
        (lambda: Budget(1.0, 1e-5).can_afford(math.nan), "mu_squared is nan"),
    ],
)
def test_wrong_arguments_are_rejected(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=message):
        call()


@settings(max_examples=8)
@given(st.floats(0.01, 20), deltas, st.integers(1, 1000))
def test_equal_shares_are_affordable_and_use_everything(epsilon: float, delta: float, openings: int) -> None:
    budget = Budget(epsilon, delta)
    each = budget.mu_squared_each(openings)
    for _ in range(openings):
        assert budget.can_afford(each)
        budget.charge(each, "training")
    spent = budget.spent()
    assert spent.openings == openings
    assert spent.delta == delta
    assert delta_of(spent.mu, spent.epsilon * (1 + 1e-12)) <= delta
    assert epsilon * (1 - 1e-9) <= spent.epsilon <= epsilon
    assert not budget.can_afford(each)


def test_a_charge_beyond_the_budget_is_refused_and_not_made() -> None:
    budget = Budget(1.0, 1e-5)
    assert budget.spent() == Spent(0.0, 1e-5, 0.0, 0)
    budget.charge(0.1 * budget.mu_squared, "statistics")
    rest = budget.mu_squared_each(2)
    budget.charge(rest, "training")
    before = budget.spent()
    with pytest.raises(BudgetSpentError) as error:
        budget.charge(1.01 * rest, "validation")
    assert str(error.value) == (
        "an opening for validation needs μ² = 0.03266, but 0.03233 of 0.07185 is left (spent: 0.007185 by 1 openings "
        "for statistics, 0.03233 by 1 openings for training); stop here, or agree on a larger epsilon before the first "
        "opening"
    )
    assert isinstance(error.value, CGDError)
    assert budget.spent() == before
    budget.charge(rest, "validation")
    assert budget.spent().epsilon == pytest.approx(1.0)
    with pytest.raises(BudgetSpentError, match="spent: nothing"):
        Budget(1.0, 1e-5).charge(1.0, "training")


def test_the_distance_of_the_sampler_is_part_of_delta() -> None:
    epsilon, delta, draws = 20.0, 1e-14, 10**9
    budget = Budget(epsilon, delta, draws)
    mu = math.sqrt(budget.mu_squared)
    reserve = (1 + math.exp(epsilon)) * draws * MAX_DISTANCE
    assert reserve > 0.05 * delta
    assert delta_of(mu, epsilon) + reserve == pytest.approx(delta, rel=1e-9)
    assert Fraction(delta_of(mu, epsilon)) + Fraction(reserve * (1 - 1e-12)) <= Fraction(delta)
    assert budget.mu_squared < Budget(epsilon, delta).mu_squared
