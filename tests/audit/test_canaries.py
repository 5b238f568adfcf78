"""Canaries: the lower bound of ε stays below the claim, and above it for every protection that is removed.

The bounds hold with a probability of 1 − 1e-8 each, so the whole module fails by chance with less than 1e-6. The number
of canaries of the mutations is such that they are also noticed with this probability.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from scipy import stats

from cgd.audit.canaries import CanaryAudit, audit_canaries, upper_rate
from cgd.dp.sampler import IntegerGaussian
from cgd.errors import InputError
from cgd.optim import record_gradients, record_norms

if TYPE_CHECKING:
    from collections.abc import Callable

SURE = 1 - 1e-8
CLAIMS = (0.5, 2.0, 8.0)


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


def no_noise(self: IntegerGaussian, count: int) -> Any:
    return draw(self, count) * 0


def half_noise(self: IntegerGaussian, count: int) -> Any:
    return draw(self, count) // 2


def repeated_noise() -> Callable[[IntegerGaussian, int], Any]:
    kept: dict[tuple[int, int], Any] = {}
    return lambda self, count: kept.setdefault((threading.get_ident(), count), draw(self, count)).copy()


def unclipped(finished: Any, _clip: float, scale: float, *, plain: bool) -> Any:
    return clipped_sums(finished, 1e9, scale, plain=plain)


draw, clipped_sums = IntegerGaussian.draw, record_norms.clipped_sums
MUTATIONS: dict[str, tuple[type | Any, str, Any]] = {
    "no noise": (IntegerGaussian, "draw", no_noise),
    "half of the noise": (IntegerGaussian, "draw", half_noise),
    "repeated noise": (IntegerGaussian, "draw", repeated_noise),
    "no clipping": (record_gradients, "clipped_sums", unclipped),
}


def audit_mutation(monkeypatch: pytest.MonkeyPatch, name: str, epsilon: float, runs: int) -> CanaryAudit:
    if name == "one forgets more":
        return audit_canaries(epsilon=epsilon, members=3, forgetful=2, runs=runs, confidence=SURE)
    owner, attribute, changed = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, changed() if changed is repeated_noise else changed)
    return audit_canaries(epsilon=epsilon, members=3, runs=runs, confidence=SURE)


@pytest.mark.parametrize("name", [*MUTATIONS, "one forgets more"])
def test_missing_protection_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert audit_mutation(monkeypatch, name, 8.0, runs=8).epsilon_lower > 8.0


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", CLAIMS)
def test_lower_bound_is_below_the_claim_for_twenty_seeds(epsilon: float) -> None:
    for seed in range(20):
        assert audit_canaries(epsilon=epsilon, runs=5, seed=seed, confidence=SURE).epsilon_lower <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "runs"), [(2.0, 40), (0.5, 500)])
@pytest.mark.parametrize("name", [*MUTATIONS, "one forgets more"])
def test_missing_protection_is_noticed_at_smaller_claims(
    monkeypatch: pytest.MonkeyPatch, name: str, epsilon: float, runs: int
) -> None:
    fewer = name != "one forgets more" and epsilon < 1
    assert audit_mutation(monkeypatch, name, epsilon, 100 if fewer else runs).epsilon_lower > epsilon


@pytest.mark.parametrize(("errors", "trials"), [(0, 10), (3, 10), (10, 10), (400, 1000)])
def test_upper_rates_are_those_of_clopper_and_pearson(errors: int, trials: int) -> None:
    interval = stats.binomtest(errors, trials).proportion_ci(0.98, "exact")
    assert upper_rate(errors, trials, 0.01) == pytest.approx(interval.high, rel=1e-9)


def test_guesses_that_are_all_wrong_or_missing_show_nothing() -> None:
    assert CanaryAudit(2.0, 1e-5, 10, 10, 10, 10, 0.95).epsilon_lower == 0
    with pytest.raises(InputError, match="there must be canaries inside and outside"):
        _ = CanaryAudit(2.0, 1e-5, 10, 0, 0, 0, 0.95).mu_lower
