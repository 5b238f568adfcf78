"""The noise that a view states is that of its sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from cgd.audit.schemes import Scenario, observe


def scenario() -> Scenario:
    random = torch.Generator().manual_seed(1)
    data = {
        name: (torch.randn(count, 50, generator=random).double(), torch.randint(0, 40, (count,), generator=random))
        for name, count in (("a", 3), ("b", 5), ("c", 8))
    }
    return Scenario(data, lambda: nn.Linear(50, 40, dtype=torch.float64), ["c"], clip=1e6)


def test_noise_of_fixed_point_rounding() -> None:
    """2,040 uniform errors; the deviation of their deviation is 1.2 %, so 6 % is a false alarm in 10⁶."""
    exact, _ = observe(scenario(), "plain")
    assert exact.noise == 0
    for bound in (16.0, 4096.0):
        view, _ = observe(replace(scenario(), bound=bound), "secure")
        off = view.rounds[0].gradient_sum - exact.rounds[0].gradient_sum
        assert float(off.std()) == pytest.approx(view.noise, rel=0.06)


@pytest.mark.parametrize("coalition", [("c",), ("b", "c")])
def test_noise_of_differential_privacy(coalition: tuple[str, ...]) -> None:
    """Without clipping, the sum is the plain one plus Gaussian noise; 1.6 % each, so 8 % is a false alarm in 10⁶.

    The coalition knows its own part of the noise; the part of the honest participants' samples remains, of 8 or 3 in
    16, which is clearly less than all.
    """
    given = replace(scenario(), coalition=coalition)
    exact, _ = observe(given, "plain")
    view, _ = observe(replace(given, noise=3.0, bound=1e8, ring_bits=64), "dp")
    everybody = 3.0 * 1e6 / 16
    assert view.noise == pytest.approx(everybody * (view.honest_samples / 16) ** 0.5)
    off = view.honest_sum(0) - exact.honest_sum(0)
    assert float(off.std()) == pytest.approx(view.noise, rel=0.08)
    assert abs(float(off.mean())) < 5 * view.noise / len(off) ** 0.5
    whole = view.rounds[0].gradient_sum - exact.rounds[0].gradient_sum
    assert float(whole.std()) == pytest.approx(everybody, rel=0.08)


def test_clipping_bounds_the_gradient_of_a_sample() -> None:
    """Without noise, the mean of sixteen gradients that are clipped to a norm of 0.01 has at most that norm."""
    view, _ = observe(replace(scenario(), noise=0.0, clip=0.01, ring_bits=64), "dp")
    assert 0 < float(view.rounds[0].gradient_sum.norm()) <= 0.01
    loose, _ = observe(replace(scenario(), noise=0.0, ring_bits=64), "dp")
    exact, _ = observe(scenario(), "plain")
    assert torch.allclose(loose.rounds[0].gradient_sum, exact.rounds[0].gradient_sum, atol=1e-12)


def test_final_displacement_follows_from_the_last_sum() -> None:
    view, _ = observe(replace(scenario(), rounds=3), "cgd")
    shorter = view.rounds[-1]
    assert torch.equal(view.final_displacement, shorter.displacement - view.lr * shorter.gradient_sum)
    longer, _ = observe(replace(scenario(), rounds=4), "cgd")
    assert torch.equal(view.final_displacement, longer.rounds[-1].displacement)
