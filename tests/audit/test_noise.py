"""The noise that a view states is that of its sums, and its μ that of the settings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from cgd.audit.private_sums import PrivateSums, max_steering
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import DELTA, max_probe, observe
from cgd.audit.view import EPSILONS, View, sample_gradients
from cgd.dp.accountant import mu_of
from cgd.dp.settings import PrivacySettings
from cgd.errors import BudgetSpentError


def scenario() -> Scenario:
    random = torch.Generator().manual_seed(1)
    data = {
        name: (torch.randn(count, 50, generator=random).double(), torch.randint(0, 40, (count,), generator=random))
        for name, count in (("a", 300), ("b", 500), ("c", 800), ("d", 200))
    }
    return Scenario(data, lambda: nn.Linear(50, 40, dtype=torch.float64), ["c"])


def test_noise_of_fixed_point_rounding() -> None:
    """2,040 uniform errors; the deviation of their deviation is 1.2 %, so 6 % is a false alarm in 10⁶."""
    exact, _ = observe(scenario(), "plain")
    assert exact.noise == 0
    for bound in (16.0, 4096.0):
        view, _ = observe(replace(scenario(), bound=bound), "secure")
        off = view.rounds[0].gradient_sum - exact.rounds[0].gradient_sum
        assert float(off.std()) == pytest.approx(view.noise, rel=0.06)
        assert not view.is_private


def exact_honest_sum(given: Scenario, view: View, number: int) -> torch.Tensor:
    """The honest participants' clipped gradients, divided by the number of records that was opened."""
    _, truth = observe(given, "dp2")
    total = torch.zeros_like(view.final_displacement)
    for name, model in truth.models.items():
        weights = model - view.final_displacement + view.rounds[number].displacement
        total += sample_gradients(view, weights, truth.x[name], truth.y[name]).sum(0)
    return total / view.samples


@pytest.mark.parametrize("coalition", [("c",), ("b", "c"), ("a", "b", "c")])
def test_noise_of_differential_privacy(coalition: tuple[str, ...]) -> None:
    """2,040 normal errors: the deviation of their deviation is 1.6 %, so 8 % is a false alarm in 10⁶.

    The coalition knows its own part of the noise, and the promised noise remains, whatever its size is.
    """
    given = replace(scenario(), coalition=coalition, rounds=2)
    view, _ = observe(given, "dp2")
    mu = mu_of(2.0, DELTA) * math.sqrt(0.99 / 2)  # of each of two steps
    assert view.noise == pytest.approx(1 / (mu * view.samples), rel=0.02)  # the sampler adds up to 1.6 %
    assert view.mu == pytest.approx(mu_of(2.0, DELTA), rel=1e-6)
    for number in range(2):
        off = view.honest_sum(number) - exact_honest_sum(given, view, number)
        # The product clips to C·(1 − 5e-4), which is a deviation of at most 5e-4 in norm, and nothing here.
        assert float(off.std()) == pytest.approx(view.noise, rel=0.08)
        assert abs(float(off.mean())) < 5 * view.noise / len(off) ** 0.5
    own = sum(each.addends[0] for each in view.coalition.values())
    assert torch.allclose(view.honest_sum(0) + own, view.rounds[0].gradient_sum)


def test_noise_grows_as_epsilon_falls_and_repeats_with_the_seed() -> None:
    views = [observe(scenario(), scheme)[0] for scheme in EPSILONS]
    noises = [each.noise * each.samples for each in views]
    assert noises == sorted(noises)
    again, _ = observe(scenario(), "dp2")
    assert torch.equal(again.final_displacement, views[1].final_displacement)
    other, _ = observe(replace(scenario(), seed=1), "dp2")
    assert not torch.equal(other.final_displacement, again.final_displacement)


def test_number_of_records_has_noise_and_the_coalition_knows_the_true_one() -> None:
    counts = {observe(replace(scenario(), seed=seed), "dp2")[0].samples for seed in range(4)}
    assert len(counts) > 1
    view, _ = observe(scenario(), "dp2")
    assert view.honest_samples == 1000
    left, _ = observe(replace(scenario(), rounds=2, dropouts={1: ("a",)}), "dp2")
    assert (left.honest_samples_in(0), left.honest_samples_in(1)) == (1000, 700)
    assert left.samples_in(0) != left.samples_in(1)


def test_openings_beyond_the_budget_are_refused() -> None:
    sums = PrivateSums(PrivacySettings(2.0, DELTA, steps=2, reruns=0), seed=0, ring_bits=32)
    values = {name: np.zeros(5) for name in "abc"}
    records = sums.count(dict.fromkeys("abc", 100))
    for _ in range(2):
        sums.step(values, records, {})
    with pytest.raises(BudgetSpentError):
        sums.step(values, records, {})


@pytest.mark.parametrize("size", [0.5, 1e6])
def test_steered_total_is_one_that_honest_members_accept(size: float) -> None:
    """A small vector is added as it is; of a large one, as much as they accept. The coalition leaves out its noise."""
    settings = PrivacySettings(2.0, DELTA, steps=1, reruns=0)
    direction = np.zeros(400)
    direction[7] = size
    sums = {name: np.zeros(400) for name in ("a", "b", "c")}
    addends, total = PrivateSums(settings, seed=3, ring_bits=32).step(sums, 300, {"c": direction})
    encoding = settings.step_encoding(3, 400, 300, 32)
    assert np.count_nonzero(addends["c"]) == 1
    norm = float(np.linalg.norm(total))
    if size == 0.5:
        assert addends["c"][7] == pytest.approx(0.5, abs=2.0**-20)
        assert norm < encoding.max_total_norm
    else:
        assert norm == pytest.approx(encoding.max_total_norm, rel=1e-5)
        assert norm <= encoding.max_total_norm
        # The norm that an attacker expects to be accepted, up to the noise of the others.
        assert addends["c"][7] == pytest.approx(max_steering(encoding, 2), rel=0.2)


def test_probe_is_limited_by_the_norm_of_totals_only_with_noise() -> None:
    assert max_probe(scenario(), "cgd") == math.inf
    assert 0 < max_probe(scenario(), "dp2") < 10


def test_final_displacement_follows_from_the_last_sum() -> None:
    view, _ = observe(replace(scenario(), rounds=3), "cgd")
    shorter = view.rounds[-1]
    assert torch.equal(view.final_displacement, shorter.displacement - view.lr * shorter.gradient_sum)
    longer, _ = observe(replace(scenario(), rounds=4), "cgd")
    assert torch.equal(view.final_displacement, longer.rounds[-1].displacement)
