"""Gradient inversion: one round reveals records in FedSGD; in CGD the first does not, a later one or several do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from cgd.audit.attacks.inversion import MIN_PSNR_GAIN, demonstrate, inversion, invert
from cgd.audit.embedded import digit_scenario
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import observe
from cgd.errors import InputError
from support.audits import observe_with_weak_noise

if TYPE_CHECKING:
    from cgd.audit.results import AttackResult
    from cgd.audit.view import Scheme, Truth, View


@cache
def one_round(scheme: Scheme, *, strangers: bool = False) -> AttackResult:
    return demonstrate(scheme, steps=200, strangers=strangers)


def test_single_round_reveals_records_in_fedsgd() -> None:
    found = one_round("secure")
    assert found.succeeds
    assert found.value > 40  # dB, which separates the 16 levels of a pixel
    assert set(found.pictures) == {"recovered", "real"}


def test_guessed_origin_fails_in_the_first_round_of_cgd_at_delta_0_1() -> None:
    found = one_round("cgd")
    assert not found.succeeds
    assert found.value < found.chance


def test_noise_prevents_inversion() -> None:
    """The most likely records are then the mean of the attacker's own ones."""
    for scheme in ("dp8", "dp2"):
        found = one_round(scheme)
        assert not found.succeeds
        assert found.value == pytest.approx(found.chance, abs=0.5)


def test_search_in_noisy_sums_succeeds_with_far_too_little_noise() -> None:
    """And if the guess of the only honest participant's model is right."""
    scenario = digit_scenario(2, honest=1, hidden=16, smooth=True, lr=0.5)
    view, truth = observe_with_weak_noise(scenario)
    right = {name: replace(each, origin=view_origin(view, truth)) for name, each in view.coalition.items()}
    assert inversion(replace(view, coalition=right), truth, models="guessed", steps=200).succeeds


def view_origin(view: View, truth: Truth) -> torch.Tensor:
    return truth.models["honest-1"] - view.final_displacement


def test_strangers_are_not_recovered() -> None:
    found = one_round("secure", strangers=True)
    assert not found.succeeds
    assert found.value < found.chance + 1


@pytest.mark.slow
def test_three_rounds_reveal_records_in_cgd_with_unknown_origins() -> None:
    """Every round adds equations and no unknowns."""
    found = demonstrate("cgd", rounds=3)
    assert found.attack == "inversion, several rounds, unknown models"
    assert found.succeeds
    assert found.value > found.chance + 2 * MIN_PSNR_GAIN


@pytest.mark.slow
def test_guessed_origin_succeeds_when_the_displacement_is_large() -> None:
    """With the same δ, the attack on the first round fails and that on a later one succeeds."""
    early = demonstrate("cgd", delta=0.02, models="guessed")
    late = demonstrate("cgd", delta=0.02, rounds=41, alone=True)
    assert late.attack == "inversion, one round, guessed model"
    assert late.setting == "2 × 2 records, round 41 alone, δ 0.02"
    assert not early.succeeds
    assert late.succeeds
    assert late.value > late.chance + 2 * MIN_PSNR_GAIN


def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with class weights, which needs integer labels."""
    weights = torch.linspace(0.5, 2.0, 10, dtype=outputs.dtype)
    return (functional.cross_entropy(outputs, labels, reduction="none") * weights[labels]).mean()


def test_class_weights_do_not_prevent_inversion() -> None:
    scenario = digit_scenario(1, hidden=16, smooth=True, lr=0.5)
    found = inversion(*observe(replace(scenario, loss=weighted), "secure"), steps=150)
    assert found.succeeds


def test_search_is_deterministic() -> None:
    view, _ = observe(digit_scenario(1, hidden=8, smooth=True), "secure")
    assert torch.equal(invert(view, "known", steps=5), invert(view, "known", steps=5, restarts=1))


def test_known_model_is_rejected_in_cgd() -> None:
    view, _ = observe(digit_scenario(1, hidden=8, smooth=True), "cgd")
    with pytest.raises(InputError, match="no common model"):
        invert(view, "known")


def test_search_needs_a_start() -> None:
    view, _ = observe(digit_scenario(1, hidden=8, smooth=True), "secure")
    with pytest.raises(InputError, match="restarts is 0; it must be at least 1"):
        invert(view, "known", restarts=0)


def test_records_of_a_regression_are_recovered() -> None:
    """Two records of eight pixels each in eight gradients of sixteen units: many more equations than unknowns."""
    random = torch.Generator().manual_seed(0)
    data = {name: (torch.rand(2, 8, generator=random).double(), torch.rand(2, 1).double()) for name in "abc"}
    scenario = Scenario(data, lambda: tanh_regression(8, 16), ["c"], loss=functional.mse_loss)
    found = inversion(*observe(scenario, "secure"), steps=150)
    assert found.succeeds


def tanh_regression(inputs: int, units: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(inputs, units), torch.nn.Tanh(), torch.nn.Linear(units, 1)).double()
