"""Steering: one participant that stays within the bound reads many records; without traps hardly any come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cgd.audit.attacks import records, traps
from cgd.audit.schemes import observe

if TYPE_CHECKING:
    from cgd.audit.view import Scheme


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_a_third_of_200_records_comes_out_with_confinement_as_without(scheme: Scheme) -> None:
    colony, trapper = traps.steered(100, 4)
    view, truth = observe(colony, scheme)
    found = traps.spring(view, truth, trapper.sprung[:4])
    assert found.succeeds
    assert found.value > 1 / 3
    passive = records.shown(scheme, 100)
    assert passive.value < 0.05 < found.value


def test_noise_is_a_protection() -> None:
    colony, trapper = traps.steered(100, 2)
    view, truth = observe(colony, "dp")
    assert traps.spring(view, truth, trapper.sprung[:2]).value == 0.0


def test_it_enters_nothing_that_a_gradient_could_not_be() -> None:
    """Before anything is added to it, a gradient is far from the bound, so the sum of both is checked with a margin."""
    colony, _ = traps.steered(100, 2)
    view, _ = observe(colony, "cgd")
    [curious] = view.coalition.values()
    limit = colony.bound * len(curious.y) / view.samples
    largest = max(float(each.abs().max()) for each in curious.addends)
    assert 0.9 * limit < largest < 1.1 * limit


def test_a_trap_waits_for_about_one_record_in_all() -> None:
    colony, trapper = traps.steered(100, 1)
    view, truth = observe(colony, "cgd")
    layer = view.rounds[trapper.sprung[0]].displacement[: 256 * 65]
    weight, bias = layer[: 256 * 64].reshape(256, 64), layer[256 * 64 :]
    activated = ((truth.all_x @ weight.T + bias) > 0).sum(dim=0).double()
    assert 0.2 < float(activated.mean()) < 5
    assert int((activated == 1).sum()) > 20
    assert torch.isfinite(layer).all()
