"""Second moments of a linear regression: recovered where the sums determine them, and not recovered elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cgd.audit.attacks import gram
from cgd.audit.schemes import observe
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Scheme

SIXTEEN_BITS = 16_000.0  # the bound that leaves 16 fraction bits


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
@pytest.mark.parametrize("strategy", ["own batches", "probe"])
def test_active_coalition_recovers_the_gram_matrix(scheme: Scheme, strategy: gram.Strategy) -> None:
    found, _ = gram.recover(*observe(gram.scenario(strategy, rounds=30), scheme))
    assert found.value < 1e-5
    assert found.succeeds
    coarse, _ = gram.recover(*observe(gram.scenario(strategy, rounds=30, bound=SIXTEEN_BITS), scheme))
    assert 10 * found.value < coarse.value < 1e-3  # the rounding is 1,000 times larger


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_passive_coalition_recovers_most_of_it(scheme: Scheme) -> None:
    found, _ = gram.recover(*observe(gram.scenario(bound=SIXTEEN_BITS), scheme))
    assert 0.02 < found.value < 0.3
    assert found.value < 0.5 * found.chance
    assert found.succeeds


@pytest.mark.slow
def test_fresh_origins_blur_the_moments_and_average_out() -> None:
    errors = {}
    for fresh in (False, True):
        for rounds in (30, 480):
            changed = replace(gram.scenario("probe", rounds=rounds), fresh_origins=fresh)
            errors[fresh, rounds] = [each.value for each in gram.recover(*observe(changed, "cgd"))]
    assert max(errors[False, 30][0], errors[False, 480][0]) < 1e-5
    assert 0.1 < errors[True, 480][0] < 0.25 * errors[True, 30][0]
    assert errors[False, 480][1] == pytest.approx(errors[False, 30][1], rel=1e-2)  # the same mask in every step
    assert errors[False, 30][1] == pytest.approx(0.3, abs=0.05)
    assert errors[True, 30][1] == pytest.approx(1.0, abs=0.05)
    assert errors[True, 480][1] < 0.2


def test_confinement_masks_xty_in_proportion_to_delta() -> None:
    _, shared = gram.recover(*observe(gram.scenario("probe", rounds=30), "secure"))
    assert shared.value < 1e-4
    errors = []
    for delta in (0.01, 0.1, 1.0):
        _, masked = gram.recover(*observe(gram.scenario("probe", rounds=30, delta=delta), "cgd"))
        errors.append(masked.value / delta)
    # The mask is Σ XᵀX·origin, linear in δ, and XᵀX is known.
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-2)
    assert errors[0] > 1


@pytest.mark.parametrize("scheme", ["plain", "secure", "cgd", "dp2"])
def test_single_round_reveals_no_more_than_own_samples(scheme: Scheme) -> None:
    found, _ = gram.recover(*observe(gram.scenario(rounds=1), scheme))
    assert found.value == pytest.approx(found.chance, rel=1e-6)
    assert not found.succeeds


@pytest.mark.parametrize("scheme", ["dp2", pytest.param("dp0.5", marks=pytest.mark.slow)])
def test_noise_hides_the_moments_of_300_records(scheme: Scheme) -> None:
    for found in gram.attacks(scheme):
        assert not found.succeeds
        assert found.value > 0.7 * found.chance


def test_noise_does_not_hide_the_moments_of_many_records() -> None:
    """ε bounds what is learned about one record: with 20 times as many, the same attack succeeds at ε = 2."""
    random = torch.Generator().manual_seed(0)
    mix = torch.randn(10, 10, generator=random)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 10, generator=random) @ mix / 3
        return x, x.sum(dim=1, keepdim=True) / 3 + torch.randn(count, 1, generator=random)

    few = gram.scenario("probe", size=gram.PRIVATE_PROBE)
    data = {name: draw(30 if name in few.coalition else 3000) for name in few.data}
    found, _ = gram.recover(*observe(replace(few, data=data), "dp2"))
    assert found.succeeds


def test_demonstrations_succeed_and_controls_fail() -> None:
    for scheme in ("secure", "cgd"):
        assert [each.succeeds for each in gram.attacks(scheme) if "XᵀX" in each.attack] == [True] * 3
        assert not any(each.succeeds for each in gram.controls(scheme))
    assert gram.controls("cgd") == gram.controls("cgd")


@settings(max_examples=10)
@given(st.integers(1, 6), st.booleans(), st.integers(0, 1000))
def test_probes_in_every_direction_recover_any_gram_matrix(features: int, bias: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    scales = torch.rand(features, generator=random) + 0.5
    data = {
        name: (torch.randn(12, features, generator=random) * scales, torch.randn(12, 1, generator=random))
        for name in ("one", "two", "curious")
    }
    parameters = features + bias

    def probe(_: str, number: int, __: torch.Tensor) -> torch.Tensor:
        return torch.eye(parameters)[number % parameters] * (1.0 if number // parameters % 2 else -1.0)

    scenario = replace(
        gram.scenario(),
        data=data,
        build_model=lambda: nn.Linear(features, 1, bias=bias),
        coalition=["curious"],
        rounds=2 * parameters + 1,
        probe=probe,
        seed=seed,
    )
    view, truth = observe(scenario, "cgd")
    found, _ = gram.recover(view, truth)
    # A round moves D by about lr = 0.1, and the sums are rounded by some 1e-8, floats by some 1e-7.
    assert found.value < 1e-4


def test_estimate_is_deterministic() -> None:
    view, _ = observe(gram.scenario(rounds=5), "cgd")
    first, second = gram.second_moments(view), gram.second_moments(view)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_other_model_is_rejected() -> None:
    scenario = replace(
        gram.scenario(rounds=1), build_model=lambda: nn.Linear(10, 2), loss=lambda out, y: (out - y).mean()
    )
    view, _ = observe(scenario, "cgd")
    with pytest.raises(InputError, match="a linear model with one output"):
        gram.second_moments(view)
