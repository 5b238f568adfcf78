"""Analytic recovery: what comes out of the sums of few records, and that nothing does of many, or under noise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from cgd.audit.attacks.records import analytic_recovery, recover, shown
from cgd.audit.embedded import digit_scenario
from cgd.audit.matching import match
from cgd.audit.schemes import observe
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Scheme


@pytest.mark.parametrize("scheme", ["cgd", "secure"])
@pytest.mark.parametrize("records", [1, 2, 3, 4])
def test_few_records_come_out_with_confinement_as_without(scheme: Scheme, records: int) -> None:
    found = shown(scheme, records)
    assert found.succeeds
    assert found.value == 1.0
    assert found.chance == 0.0


def test_one_round_of_cgd_is_enough_and_the_records_are_exact() -> None:
    """The only error is the rounding of the ring, 2⁻²⁷ beside gradients of 10⁻³ and more."""
    view, truth = observe(digit_scenario(3), "cgd")
    assert match(recover(view), truth.all_x, 1.0).psnr.min() > 60


@pytest.mark.parametrize("scheme", ["cgd", "secure"])
def test_of_many_records_hardly_any_comes_out(scheme: Scheme) -> None:
    """Of 200 records, a unit here and there still sees one alone."""
    found = shown(scheme, 100)
    assert 0 < found.value <= 0.05
    assert found.succeeds


@pytest.mark.parametrize("records", [1, 4])
def test_noise_is_a_protection(records: int) -> None:
    found = shown("dp", records)
    assert not found.succeeds
    assert found.value == found.chance == 0.0


def test_records_of_strangers_do_not_come_out() -> None:
    view, _ = observe(digit_scenario(2), "cgd")
    _, strangers = observe(digit_scenario(2, seed=7), "cgd")
    assert not analytic_recovery(view, strangers).succeeds


def test_the_guess_is_the_same_again_and_no_larger_than_there_are_records() -> None:
    view, _ = observe(digit_scenario(4), "cgd")
    guesses = recover(view)
    assert torch.equal(guesses, recover(view))
    assert len(guesses) <= view.honest_samples == 8


def test_other_units_are_refused() -> None:
    view, _ = observe(digit_scenario(1, smooth=True), "cgd")
    with pytest.raises(InputError, match="no ReLU units"):
        recover(view)


def test_a_layer_without_bias_is_refused() -> None:
    colony = replace(digit_scenario(1), build_model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 10, bias=False)))
    view, _ = observe(colony, "cgd")
    with pytest.raises(InputError, match="first layer has no bias"):
        recover(view)
