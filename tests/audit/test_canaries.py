"""Canaries: the lower bound of ε stays below the claim, and above it for every protection that is removed.

The bounds hold with a probability of 1 − 1e-8 each, so the whole module fails by chance with less than 1e-6. The number
of canaries of the mutations is such that they are also noticed with this probability.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from cgd.audit.canaries import (
    CanaryAudit,
    audit_canaries,
    judge,
    judge_all,
    one_run_epsilon,
    one_run_p_value,
    upper_rate,
)
from cgd.errors import InputError
from support.pages import load_script

canaries = load_script("canaries", "benchmarks")
SURE = 1 - 1e-8
CLAIMS = (0.5, 2.0, 8.0)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", CLAIMS)
@pytest.mark.parametrize("seed", range(3))
def test_lower_bound_is_below_the_claim(epsilon: float, seed: int) -> None:
    audit = audit_canaries(epsilon=epsilon, runs=2, seed=seed, confidence=SURE)
    assert audit.inside + audit.outside == 2000
    assert audit.epsilon_lower <= epsilon


@pytest.mark.parametrize(("colluders", "ring_bits"), [(0, 32), (2, 32), (1, 64)])
def test_lower_bound_is_below_the_claim_for_any_colluders_and_ring(colluders: int, ring_bits: int) -> None:
    audit = audit_canaries(epsilon=8.0, members=3, colluders=colluders, ring_bits=ring_bits, runs=2, confidence=SURE)
    assert audit.epsilon_lower <= 8.0


def test_lower_bound_is_not_far_below_the_claim() -> None:
    """Otherwise a missing protection would not be noticed."""
    assert audit_canaries(epsilon=8.0, runs=5, confidence=SURE).epsilon_lower > 4.0


@pytest.mark.slow
@pytest.mark.parametrize("name", canaries.MUTATIONS)
def test_missing_protection_is_noticed(name: str) -> None:
    assert canaries.audit_mutation(name, 8.0, runs=8, confidence=SURE).epsilon_lower > 8.0


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", CLAIMS)
def test_lower_bound_is_below_the_claim_for_twenty_seeds(epsilon: float) -> None:
    for seed in range(20):
        assert audit_canaries(epsilon=epsilon, runs=5, seed=seed, confidence=SURE).epsilon_lower <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("name", canaries.MUTATIONS)
def test_missing_protection_is_noticed_at_smaller_claims(name: str, epsilon: float) -> None:
    runs = (canaries.FORGETFUL_RUNS if name == canaries.FORGETFUL else canaries.MUTATION_RUNS)[epsilon]
    assert canaries.audit_mutation(name, epsilon, runs, confidence=SURE).epsilon_lower > epsilon


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 10), (10, 10), (400, 1000)])
def test_upper_rates_are_those_of_clopper_and_pearson(errors: int, trials: int) -> None:
    interval = stats.binomtest(errors, trials).proportion_ci(0.98, "exact")
    assert upper_rate(errors, trials, 0.01) == pytest.approx(interval.high, rel=1e-9)


def test_guesses_that_are_all_wrong_or_missing_show_nothing() -> None:
    audit = CanaryAudit(2.0, 1e-5, 10, 10, 10, 10, guesses=2, correct=0, confidence=0.95)
    assert (audit.epsilon_lower, audit.epsilon_lower_one_run) == (0, 0)
    with pytest.raises(InputError, match="there must be canaries inside and outside"):
        _ = CanaryAudit(2.0, 1e-5, 10, 0, 0, 0, guesses=2, correct=1, confidence=0.95).mu_lower


def randomised_response(epsilon: float, canaries: int, seed: int) -> int:
    """Return how many coins are guessed rightly if each is published, and turned with probability 1/(1 + e^ε)."""
    return int(np.random.default_rng(seed).binomial(canaries, special.expit(epsilon)))


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_bound_of_one_run_is_just_below_the_truth_for_randomised_response(epsilon: float) -> None:
    """Randomised response has exactly this ε, and reaches what the theorem allows.

    The bounds are too large with a probability of 1e-8 each. The guesses determine ε = log(q/(1 − q)) up to a standard
    deviation of 1/√(n·q·(1 − q)); the bound is six of them lower, and so is the draw with a probability of 1e-9.
    """
    guesses, right = 20_000, special.expit(epsilon)
    for seed in range(5):
        correct = randomised_response(epsilon, guesses, seed)
        bound = one_run_epsilon(guesses, correct, guesses, 0.0, SURE)
        assert epsilon - 14 / (guesses * right * (1 - right)) ** 0.5 < bound <= epsilon


def test_bound_of_one_run_covers_delta() -> None:
    """With a probability of δ all coins are revealed: allowed, so no confidence above 1 − δ can exclude it."""
    assert one_run_p_value(1000, 1000, 1000, 0.0, 0.01) >= 0.01
    assert one_run_epsilon(1000, 1000, 1000, 0.01, 0.995) == 0
    assert one_run_epsilon(1000, 1000, 1000, 1e-5, 0.95) > 4
    # Without δ, it is the test of a binomial number.
    for guesses, correct, epsilon in ((50, 40, 0.3), (1000, 700, 0.8), (10, 0, 1.0)):
        expected = stats.binomtest(correct, guesses, float(special.expit(epsilon)), "greater").pvalue
        assert one_run_p_value(guesses, correct, 10_000, epsilon, 0.0) == pytest.approx(expected)


@pytest.mark.slow
def test_bound_of_one_run_is_not_far_below_what_it_can_show() -> None:
    """200 guesses can never show more than about log(200/3); they are nearly all right."""
    assert 2.0 < audit_canaries(epsilon=8.0, runs=10).epsilon_lower_one_run < 4.3


def test_guesses_about_the_most_certain_canaries() -> None:
    coins = np.arange(1000) % 2 == 0
    scores = np.where(coins, 1.0, 0.0)
    audit = judge(coins, scores, 2.0, 1e-5, 0.95)
    assert (audit.inside, audit.outside, audit.missed, audit.alarms) == (500, 500, 0, 0)
    assert (audit.guesses, audit.correct) == (20, 20)
    twice = judge_all([audit, audit])
    assert (twice.inside, twice.guesses, twice.correct) == (1000, 40, 40)
    assert judge(coins, 1 - scores, 2.0, 1e-5, 0.95).correct == 0
