"""Inversion: one round gives records away in FedSGD; in CGD the first does not, and a late one or several do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from cgd.audit.attacks.inversion import MIN_PSNR_GAIN, inversion, invert, shown
from cgd.audit.embedded import digit_scenario
from cgd.audit.schemes import observe
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Finding, Scheme


@cache
def one_round(scheme: Scheme, *, strangers: bool = False) -> Finding:
    return shown(scheme, steps=200, strangers=strangers)


def test_one_round_is_enough_in_fedsgd() -> None:
    found = one_round("secure")
    assert found.succeeds
    assert found.value > 40  # dB; the pixels have 16 levels, which 40 dB tell apart
    assert found.images["recovered"].shape == found.images["real"].shape == (4, 8, 8)


def test_the_same_attack_with_a_guessed_origin_fails_on_cgd_at_delta_0_1() -> None:
    found = one_round("cgd")
    assert not found.succeeds
    assert found.value < found.chance


def test_noise_is_a_protection() -> None:
    found = one_round("dp")
    assert not found.succeeds
    assert found.value < found.chance


def test_nothing_is_found_of_people_who_took_no_part() -> None:
    found = one_round("secure", strangers=True)
    assert not found.succeeds
    assert found.value < found.chance + 1


def test_three_rounds_with_origins_as_unknowns_give_records_away_in_cgd() -> None:
    """Confinement does not last: every round brings equations and no new unknowns."""
    found = shown("cgd", rounds=3)
    assert found.attack == "inversion, several rounds, unknown models"
    assert found.succeeds
    assert found.value > found.chance + 2 * MIN_PSNR_GAIN


def test_a_guessed_origin_is_enough_once_the_displacement_is_large_beside_it() -> None:
    """The other side of the fact above: with the same δ, the first round alone fails and a late one succeeds."""
    early = shown("cgd", delta=0.02, models="guessed")
    late = shown("cgd", delta=0.02, rounds=41, alone=True)
    assert late.attack == "inversion, one round, guessed model"
    assert late.setting == "2 × 2 records, round 41 alone, δ 0.02"
    assert not early.succeeds
    assert late.succeeds
    assert late.value > late.chance + 2 * MIN_PSNR_GAIN


def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Classes count differently, and labels must be whole."""
    weights = torch.linspace(0.5, 2.0, 10, dtype=outputs.dtype)
    return (functional.cross_entropy(outputs, labels, reduction="none") * weights[labels]).mean()


def test_a_loss_with_weights_is_no_hindrance() -> None:
    colony = digit_scenario(1, hidden=16, smooth=True, lr=0.5)
    found = inversion(*observe(replace(colony, loss=weighted), "secure"), steps=150)
    assert found.succeeds


def test_the_guess_is_the_same_again() -> None:
    view, _ = observe(digit_scenario(1, hidden=8, smooth=True), "secure")
    assert torch.equal(invert(view, "known", steps=5), invert(view, "known", steps=5, restarts=1))


def test_a_model_that_is_not_there_cannot_be_known() -> None:
    view, _ = observe(digit_scenario(1, hidden=8, smooth=True), "cgd")
    with pytest.raises(InputError, match="no common one"):
        invert(view, "known")
