"""Theorem 3 in numbers: z₁ and xᵀx are exposed in both schemes, z₂ in FedSGD only."""

from __future__ import annotations

import pytest

from cgd.audit.attacks.theorem3 import demonstrate
from cgd.errors import InputError

ROUNDING = 1e-9  # doubles of 10⁻¹⁶ through a least-squares problem of condition 10³ or so


def test_fedsgd_exposes_z1_z2_and_both_moments() -> None:
    found = demonstrate("secure")
    assert max(found.z1, found.z2, found.moments, found.products) < ROUNDING


def test_cgd_exposes_z1_and_second_moments_but_not_z2() -> None:
    """The paper's table 2 has "not applicable" for the moments; they are recovered as in FedSGD."""
    found = demonstrate("cgd")
    assert found.z1 < ROUNDING
    assert found.z2 > 0.5
    assert found.moments < ROUNDING
    assert found.products > 0.1


def test_products_are_masked_in_proportion_to_delta() -> None:
    """The mask is Σ xᵀx·origin, and origins are δ times the same draw."""
    small, large = demonstrate("cgd", delta=0.01), demonstrate("cgd", delta=0.1)
    assert large.products / small.products == pytest.approx(10, rel=1e-3)


def test_noise_hides_all_values() -> None:
    found = demonstrate("dp0.5", rounds=12)
    assert min(found.z1, found.z2, found.moments, found.products) > 0.5


def test_too_few_rounds_are_rejected() -> None:
    with pytest.raises(InputError, match="10 rounds cannot determine 10 columns"):
        demonstrate("secure", rounds=10)
