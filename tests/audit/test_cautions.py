"""The figures that cautions state are those that the attacks come to: the texts cannot drift from the truth."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd.audit.attacks import dropout, gram, membership, traps
from cgd.audit.attacks import records as analytic
from cgd.audit.embedded import digit_scenario
from cgd.audit.schemes import observe
from cgd.optim import privacy_warnings
from cgd.optim.privacy_warnings import FirstLayer

if TYPE_CHECKING:
    from cgd.optim.privacy_warnings import PrivacyWarning

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"
TUMOUR = 30
"""Measurements."""


def the_one(found: tuple[PrivacyWarning, ...], kind: str) -> PrivacyWarning:
    return next(each for each in found if each.kind == kind)


def span(each: int, *, units: int, steps: int) -> float:
    """The AUC in a colony of two honest participants with tumours, and two that collude."""
    colony, fresh = membership.colony(each, steps, data="breast-cancer", hidden=units)
    return membership.span_membership(*observe(colony, "cgd"), fresh).value


def test_the_figure_of_the_span() -> None:
    wide, narrow = span(10, units=8, steps=5), span(10, units=2, steps=50)
    assert f"AUC {min(wide, narrow):.3f}, with 8 units after 5 steps and with 2 after 50" == privacy_warnings.SPAN
    caution = the_one(privacy_warnings.cautions(10, FirstLayer(TUMOUR, 8), members=4, everyone=60), "span")
    assert privacy_warnings.SPAN in str(caution)


def test_the_figure_of_the_span_of_a_linear_model() -> None:
    colony, fresh = membership.colony(10, 200, data="breast-cancer")
    colony = replace(colony, build_model=lambda: nn.Sequential(nn.Linear(TUMOUR, 2)))
    found = membership.span_membership(*observe(colony, "cgd"), fresh)
    assert found.succeeds
    assert f"AUC {found.value:.1f} after 200 steps of a linear model with two outputs" == privacy_warnings.LINEAR_SPAN
    layer = FirstLayer.of(nn.Sequential(nn.Linear(TUMOUR, 2)))
    assert layer is not None
    assert the_one(privacy_warnings.cautions(10, layer), "span").figure == privacy_warnings.LINEAR_SPAN


def leverage(each: int, layers: nn.Sequential, steps: int = 5) -> float:
    colony, fresh = membership.colony(each, steps, data="breast-cancer")
    colony = replace(colony, build_model=lambda: layers)
    return membership.leverage_membership(*observe(colony, "cgd"), fresh).value


def test_the_figures_of_leverage() -> None:
    network = nn.Sequential(nn.Linear(TUMOUR, 32), nn.ReLU(), nn.Linear(32, 2))
    layer = FirstLayer(TUMOUR, 32)
    few, some, many = (leverage(each, network) for each in (20, 40, privacy_warnings.PLENTY * layer.rank))
    per_input = [f"{2 * each / layer.rank:.2g}" for each in (20, 40, privacy_warnings.PLENTY * layer.rank)]
    told = f"AUC {few:.2f} with {per_input[0]} honest records for each input, {some:.2f} with {per_input[1]}"
    assert f"{told}, {many:.2f} with {per_input[2]}" == privacy_warnings.LEVERAGE
    assert the_one(privacy_warnings.cautions(40, layer), "leverage").figure == privacy_warnings.LEVERAGE


def test_the_figure_of_the_leverage_of_a_linear_model() -> None:
    linear = nn.Sequential(nn.Linear(TUMOUR, 2))
    value = leverage(20, linear, 200)
    told = f"AUC {value:.2f} with {40 / 31:.2g} honest records for each input after 200 steps of a linear model"
    assert f"{told} with two outputs" == privacy_warnings.LINEAR_LEVERAGE
    layer = FirstLayer.of(linear)
    assert layer is not None
    assert the_one(privacy_warnings.cautions(40, layer), "leverage").figure == privacy_warnings.LINEAR_LEVERAGE


def test_as_many_records_as_the_remedy_asks_for_are_enough() -> None:
    """Both honest participants have as many as the caution says, and there is none any more."""
    layer = FirstLayer(TUMOUR, 32)
    enough = privacy_warnings.PLENTY * layer.rank
    for own in (10, 40):
        assert f"at least {enough} records" in privacy_warnings.cautions(own, layer)[0].remedy
    assert privacy_warnings.cautions(enough, layer) == ()
    assert span(enough, units=32, steps=5) == pytest.approx(0.5, abs=0.1)
    network = nn.Sequential(nn.Linear(TUMOUR, 32), nn.ReLU(), nn.Linear(32, 2))
    assert leverage(enough, network) == pytest.approx(0.5, abs=0.1)


def test_the_figure_of_few_records() -> None:
    def recovered(records: int, units: int) -> float:
        return analytic.analytic_recovery(*observe(digit_scenario(records, rounds=3, hidden=units), "cgd")).value

    assert [recovered(each, 256) for each in range(1, privacy_warnings.FEW_RECORDS + 1)] == [
        1.0
    ] * privacy_warnings.FEW_RECORDS
    assert 0 < recovered(4, 32) < 0.5
    assert privacy_warnings.RECORDS == "all of 2 × 1 to 4 records with 256 units, fewer than half of 2 × 4 with 32"
    caution = the_one(privacy_warnings.cautions(4, FirstLayer(64, 256), members=3), "few records")
    assert privacy_warnings.RECORDS in str(caution)


def test_the_figures_of_second_moments() -> None:
    passive, targets = gram.recover(*observe(gram.colony(rounds=60), "cgd"))
    active, _ = gram.recover(*observe(gram.colony("own batches"), "cgd"))
    told = f"relative error {passive.value:.2f} from watching 60 steps, below 0.000001 with batches of its own choice"
    assert told == privacy_warnings.GRAM
    assert active.value < 1e-6
    assert not targets.succeeds  # masked by the origins
    layer = FirstLayer.of(nn.Linear(gram.FEATURES, 1))
    assert layer is not None
    assert the_one(privacy_warnings.cautions(500, layer), "second moments").figure == privacy_warnings.GRAM


def test_one_member_alone_gets_second_moments_whatever_delta_is() -> None:
    def own_batch(name: str, number: int, indices: torch.Tensor) -> torch.Tensor:
        return indices[[number % len(indices)]] if name == curious else indices

    curious = next(iter(gram.colony().coalition))
    for delta in (0.1, 1.0):
        colony = replace(gram.colony(delta=delta), coalition=[curious], batches=own_batch)
        assert gram.recover(*observe(colony, "cgd"))[0].value < 1e-5


def test_the_figure_of_a_departure() -> None:
    found = dropout.difference(*observe(dropout.colony(), "cgd"))
    assert f"relative error {found.value:.2f} a step apart" == privacy_warnings.DEPARTURE
    assert privacy_warnings.of_departure(["dan"]).figure == privacy_warnings.DEPARTURE


def test_the_figure_of_steering() -> None:
    colony, trapper = traps.steered(100, 4)
    found = traps.spring(*observe(colony, "cgd"), trapper.sprung[:4])
    told = f"{100 * found.value:.0f} % of 2 × 100 records in {colony.rounds} steps, by one member and within the bound"
    assert told == privacy_warnings.STEERING
    assert privacy_warnings.of_steering(3, 1234.0).figure == privacy_warnings.STEERING


@pytest.mark.parametrize("each", [5, 100])
def test_steering_is_noticed_at_its_first_step_and_an_undisturbed_training_is_not(each: int) -> None:
    """Every honest participant compares the sum of the first layer with its own largest gradient so far."""
    steered, _ = traps.steered(each, 1)
    layer = slice(256 * 64)
    for colony, noticed in ((steered, True), (replace(steered, probe=None), False)):
        view, truth = observe(colony, "cgd")
        own, ratios = 0.0, []
        for number, opened in enumerate(view.rounds):
            gradient = dropout._real_gradient(view, truth, ("honest-1",), number)
            own = max(own, float(gradient[layer].abs().max()))
            ratios.append(float(opened.gradient_sum[layer].abs().max()) / own)
        assert (ratios[0] > privacy_warnings.EXTRAORDINARY) == noticed
        if not noticed:
            assert max(ratios) < privacy_warnings.EXTRAORDINARY / 3


def test_the_page_has_the_same_figures() -> None:
    section = PAGE.read_text().partition("### Cautions")[2].partition("\n## ")[0]
    for told in (
        privacy_warnings.SPAN,
        privacy_warnings.LINEAR_SPAN,
        privacy_warnings.LEVERAGE,
        privacy_warnings.LINEAR_LEVERAGE,
        privacy_warnings.GRAM,
        privacy_warnings.DEPARTURE,
    ):
        figures = re.findall(r"\d+\.\d+", told)
        assert figures
        assert all(figure in section for figure in figures), figures
