"""Analytic recovery: few records are recovered from the sums, hardly any of many, none with noise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from cgd.audit.attacks.records import analytic_recovery, demonstrate, recover
from cgd.audit.embedded import digit_scenario
from cgd.audit.matching import match
from cgd.audit.schemes import observe
from cgd.errors import InputError
from support.audits import observe_with_weak_noise

if TYPE_CHECKING:
    from cgd.audit.view import Scheme


@pytest.mark.parametrize("scheme", ["cgd", "secure"])
@pytest.mark.parametrize("records", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3)), 4])
def test_few_records_are_recovered_with_and_without_confinement(scheme: Scheme, records: int) -> None:
    found = demonstrate(scheme, records)
    assert found.succeeds
    assert found.value == 1.0
    assert found.chance == 0.0


def test_single_round_of_cgd_reveals_records_exactly() -> None:
    """The only error is fixed-point rounding, of 2⁻²⁷ in gradients of 10⁻³ and more."""
    view, truth = observe(digit_scenario(3), "cgd")
    assert match(recover(view), truth.all_x, 1.0).psnr.min() > 60


@pytest.mark.parametrize("scheme", ["cgd", "secure"])
def test_hardly_any_of_many_records_is_recovered(scheme: Scheme) -> None:
    """Of 200 records, a few activate some unit alone."""
    found = demonstrate(scheme, 100)
    assert 0 < found.value <= 0.05
    assert found.succeeds


@pytest.mark.parametrize("scheme", ["dp8", "dp2", "dp0.5"])
@pytest.mark.parametrize("records", [1, 4])
def test_noise_prevents_recovery(scheme: Scheme, records: int) -> None:
    found = demonstrate(scheme, records)
    assert not found.succeeds
    assert found.value == found.chance == 0.0


def test_recovery_from_noisy_sums_succeeds_with_far_too_little_noise() -> None:
    """The most visible units give single records, as there are with one record for each participant."""
    assert analytic_recovery(*observe_with_weak_noise(digit_scenario(1, rounds=3))).succeeds


def test_strangers_are_not_recovered() -> None:
    view, _ = observe(digit_scenario(2), "cgd")
    _, strangers = observe(digit_scenario(2, seed=7), "cgd")
    assert not analytic_recovery(view, strangers).succeeds


def test_guesses_are_deterministic_and_at_most_as_many_as_records() -> None:
    view, _ = observe(digit_scenario(4), "cgd")
    guesses = recover(view)
    assert torch.equal(guesses, recover(view))
    assert len(guesses) <= view.honest_samples == 8


def test_other_units_are_rejected() -> None:
    view, _ = observe(digit_scenario(1, smooth=True), "cgd")
    with pytest.raises(InputError, match="no ReLU units"):
        recover(view)


def test_layer_without_bias_is_rejected() -> None:
    scenario = replace(digit_scenario(1), build_model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 10, bias=False)))
    view, _ = observe(scenario, "cgd")
    with pytest.raises(InputError, match="first layer has no bias"):
        recover(view)
