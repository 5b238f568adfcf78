"""Membership inference: certain with few records, and less and less with many (test_leverage.py has the curve)."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import nn

from cgd.audit.attacks import membership
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import DELTA, observe
from cgd.audit.view import EPSILONS, Truth
from cgd.dp.accountant import mu_of
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.embedded import Name
    from cgd.audit.view import Scheme

# Three standard deviations of an AUC of 80 strangers: a false alarm once in 370 seeds, which are fixed.
MAX_CHANCE_DEVIATION = 0.1


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
@pytest.mark.parametrize(("data", "each"), [("digits", 20), ("digits", 2), ("breast-cancer", 10)])
def test_few_records_are_distinguished_from_fresh_ones(scheme: Scheme, data: Name, each: int) -> None:
    scenario, fresh = membership.scenario(each, 5, data=data)
    view, truth = observe(scenario, scheme)
    found = membership.span_membership(view, truth, fresh)
    assert found.value > 0.99
    assert found.succeeds
    assert "members (100%) are found with " in found.detail
    assert ("0.1% false positives" if len(fresh[1]) >= 1000 else "no false positive") in found.detail
    assert len(membership.span(view)) == 2 * each


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_more_records_than_inputs_span_everything(scheme: Scheme) -> None:
    scenario, fresh = membership.scenario(100, 5, data="breast-cancer")
    view, truth = observe(scenario, scheme)
    assert len(membership.span(view)) == 31  # the measurements and the bias
    found = membership.span_membership(view, truth, fresh)
    assert found.value == 0.5
    assert not found.succeeds


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_leverage_succeeds_with_more_records_than_inputs(scheme: Scheme) -> None:
    """With 40, 80 and 200 records in 31 dimensions, the AUC falls below the audit's threshold."""
    areas = []
    for each in (20, 40, 100):
        scenario, fresh = membership.scenario(each, 5, data="breast-cancer")
        view, truth = observe(scenario, scheme)
        found = membership.leverage_membership(view, truth, fresh)
        assert found.succeeds == (each < 100)
        areas.append(found.value)
    assert areas[0] > 0.9
    assert areas[0] > areas[1] > membership.MIN_AUC > areas[2]


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_leverage_succeeds_on_digits_with_three_records_per_pixel(scheme: Scheme) -> None:
    scenario, fresh = membership.scenario(100, 5)
    view, truth = observe(scenario, scheme)
    found = membership.leverage_membership(view, truth, fresh)
    assert found.value > 0.62
    assert found.succeeds
    x, y = fresh
    nobody = Truth({"nobody": x[:200]}, {"nobody": y[:200]}, {})
    # An AUC of 200 strangers has a standard deviation of 0.022, so 5 of them are a false alarm in 10⁶.
    assert abs(membership.leverage_membership(view, nobody, (x[200:], y[200:])).value - 0.5) < 0.11


def test_noise_hides_the_span() -> None:
    scenario, fresh = membership.scenario(20, 5)
    view, truth = observe(scenario, "dp2")
    assert len(membership.span(view)) == 0
    assert membership.span_membership(view, truth, fresh).value == 0.5


def lower_bound(values: list[float]) -> float:
    """Return a lower bound of the mean of normal numbers, with a probability of error of 1e-6."""
    deviations = float(stats.t.ppf(1 - 1e-6, len(values) - 1))
    return fmean(values) - deviations * stdev(values) / math.sqrt(len(values))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["dp8", "dp2", "dp0.5"])
def test_auc_is_not_above_what_epsilon_allows(scheme: Scheme) -> None:
    """Not even above that of the decision about one record. Without noise, the same measurement is above it."""
    private, exact = [], []
    for seed in range(8):
        scenario, fresh = membership.scenario(10, 5, data="breast-cancer", seed=seed)
        view, truth = observe(scenario, scheme)
        attacks = (membership.gradient_membership, membership.leverage_membership)
        results = [attack(view, truth, fresh) for attack in attacks]
        private.append([each.value for each in results])
        assert {each.allowed for each in results} == {membership.allowed_auc(view.mu)}
        exact.append(membership.leverage_membership(*observe(scenario, "cgd"), fresh).value)
    allowed = membership.allowed_record_auc(mu_of(EPSILONS[scheme], DELTA))
    for values in zip(*private, strict=True):
        assert lower_bound(list(values)) <= allowed < membership.allowed_auc(view.mu)
    assert lower_bound(exact) > allowed


def test_allowed_auc_is_reached_by_opposite_and_by_orthogonal_gradients() -> None:
    """One number N(μ, 1) or N(−μ, 1), and two numbers; 10⁶ draws are exact to 0.0005, and 6 of these are 0.003."""
    random = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 1_000_000, generator=random)
    mu = 0.5
    opposite = float((mu + one > -(mu + one)).double().mean())
    assert opposite == pytest.approx(membership.allowed_auc(mu), abs=0.003)
    orthogonal = float((mu + one > other).double().mean())
    assert orthogonal == pytest.approx(membership.allowed_record_auc(mu), abs=0.003)


def test_gradient_of_a_member_is_similar_to_the_sum() -> None:
    """In FedSGD, where the model is known; a sum over 10 seeds, because one alone has few records."""
    areas = []
    for seed in range(10):
        scenario, fresh = membership.scenario(20, 5, data="breast-cancer", seed=seed)
        areas.append(membership.gradient_membership(*observe(scenario, "secure"), fresh).value)
    assert fmean(areas) > 0.58


def test_loss_of_the_displacement_is_better_than_that_of_confined_models() -> None:
    scenario, fresh = membership.scenario(40, 150, hidden=256)
    found = membership.loss_membership(*observe(scenario, "secure"), fresh)
    assert 0.62 < found.value < 0.72
    assert found.succeeds
    view, truth = observe(scenario, "cgd")
    own = membership.loss_membership(view, truth, fresh)
    assert 0.53 < own.value < 0.61
    assert not own.succeeds
    common = membership.displacement_membership(view, truth, fresh)
    assert own.value + 0.02 < common.value < found.value
    x, y = fresh
    nobody = Truth({"nobody": x[:80]}, {"nobody": y[:80]}, {})
    for attack in (membership.loss_membership, membership.displacement_membership):
        control = attack(view, nobody, (x[80:], y[80:]))
        assert abs(control.value - 0.5) < MAX_CHANCE_DEVIATION
        assert not control.succeeds


scores = st.lists(st.integers(-3, 3), min_size=1, max_size=30)


@given(scores, scores)
def test_area_under_the_curve_is_that_of_scikit_learn(members: list[int], others: list[int]) -> None:
    truth = [1] * len(members) + [0] * len(others)
    area = membership.area_under_curve(torch.tensor(members), torch.tensor(others))
    assert area == pytest.approx(roc_auc_score(truth, members + others))


@given(scores, scores, st.floats(0, 0.99))
def test_true_positive_rate_is_the_best_at_a_false_positive_rate(
    members: list[int], others: list[int], rate: float
) -> None:
    here, there = torch.tensor(members), torch.tensor(others)
    found = membership.true_positive_rate(here, there, rate)
    best = 0.0
    for threshold in range(-4, 4):
        if (there > threshold).double().mean() <= rate:
            best = max(best, float((here > threshold).double().mean()))
    assert found == best


def test_model_without_a_linear_first_layer_is_rejected() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Identity(), nn.Tanh(), nn.Linear(4, 2))

    data = {name: (torch.ones(2, 4), torch.tensor([0, 1])) for name in "abc"}
    view, _ = observe(Scenario(data, build, ["a"]), "cgd")
    with pytest.raises(InputError, match="begins with Tanh"):
        membership.span(view)
