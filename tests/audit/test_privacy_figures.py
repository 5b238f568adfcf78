"""The figures in privacy warnings are those of the attacks; test_leverage.py has those of leverage."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd.audit.attacks import dropout, gram, membership, records, traps
from cgd.audit.embedded import digit_scenario
from cgd.audit.schemes import observe
from cgd.optim import privacy_warnings
from cgd.optim.privacy_warnings import FirstLayer, find_warnings

if TYPE_CHECKING:
    from cgd.optim.privacy_warnings import PrivacyWarning

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"
ABSENCES = Path(__file__).parents[2] / "results" / "absences.json"
TUMOUR_INPUTS = 30


def warning_of_kind(warnings: tuple[PrivacyWarning, ...], kind: str) -> PrivacyWarning:
    return next(each for each in warnings if each.kind == kind)


def span_auc(each: int, *, units: int, steps: int) -> float:
    """The AUC with two honest participants and two colluders, on tumours."""
    scenario, fresh = membership.scenario(each, steps, data="breast-cancer", hidden=units)
    return membership.span_membership(*observe(scenario, "cgd"), fresh).value


def test_figure_of_the_span() -> None:
    auc = min(span_auc(10, units=8, steps=5), span_auc(10, units=2, steps=50))
    assert f"AUC {auc:.3f}, with 8 units after 5 steps and with 2 after 50" == privacy_warnings.SPAN_FIGURE
    warning = warning_of_kind(find_warnings(10, FirstLayer(TUMOUR_INPUTS, 8), members=4, total_records=60), "span")
    assert privacy_warnings.SPAN_FIGURE in str(warning)


def test_figure_of_the_span_of_a_linear_model() -> None:
    scenario, fresh = membership.scenario(10, 200, data="breast-cancer")
    scenario = replace(scenario, build_model=lambda: nn.Sequential(nn.Linear(TUMOUR_INPUTS, 2)))
    found = membership.span_membership(*observe(scenario, "cgd"), fresh)
    assert found.succeeds
    text = f"AUC {found.value:.1f} after 200 steps of a linear model with two outputs"
    assert text == privacy_warnings.LINEAR_SPAN_FIGURE
    layer = FirstLayer.from_model(nn.Sequential(nn.Linear(TUMOUR_INPUTS, 2)))
    assert warning_of_kind(find_warnings(10, layer), "span").figure == privacy_warnings.LINEAR_SPAN_FIGURE


def test_span_reveals_nothing_with_the_records_of_the_remedy() -> None:
    """With more records than inputs, the span contains every record; leverage remains (test_leverage.py)."""
    layer = FirstLayer(TUMOUR_INPUTS, 32, relu=False)
    enough = privacy_warnings.MIN_RECORDS_PER_INPUT * layer.rank
    for own in (10, 40):
        assert f"at least {enough} records" in find_warnings(own, layer)[0].remedy
    assert find_warnings(enough, layer) == ()
    assert span_auc(enough, units=32, steps=5) == 0.5


def test_figure_of_few_records() -> None:
    def recovered(count: int, units: int) -> float:
        return records.analytic_recovery(*observe(digit_scenario(count, rounds=3, hidden=units), "cgd")).value

    most = privacy_warnings.MAX_RECOVERABLE_RECORDS
    assert [recovered(count, 256) for count in range(1, most + 1)] == [1.0] * most
    assert 0 < recovered(4, 32) < 0.5
    figure = "all of 2 × 1 to 4 records with 256 units, fewer than half of 2 × 4 with 32"
    assert figure == privacy_warnings.RECORDS_FIGURE
    assert figure in str(warning_of_kind(find_warnings(4, FirstLayer(64, 256), members=3), "few records"))


def test_figures_of_second_moments() -> None:
    passive, targets = gram.recover(*observe(gram.scenario(rounds=60), "cgd"))
    active, _ = gram.recover(*observe(gram.scenario("own batches"), "cgd"))
    text = f"relative error {passive.value:.2f} from watching 60 steps, below 0.000001 with batches of its own choice"
    assert text == privacy_warnings.GRAM_FIGURE
    assert active.value < 1e-6
    assert not targets.succeeds  # masked by the origins
    layer = FirstLayer.from_model(nn.Linear(gram.FEATURES, 1))
    assert warning_of_kind(find_warnings(500, layer), "second moments").figure == privacy_warnings.GRAM_FIGURE


def test_single_member_recovers_second_moments_for_any_delta() -> None:
    def own_batch(name: str, number: int, indices: torch.Tensor) -> torch.Tensor:
        return indices[[number % len(indices)]] if name == colluder else indices

    colluder = next(iter(gram.scenario().coalition))
    for delta in (0.1, 1.0):
        scenario = replace(gram.scenario(delta=delta), coalition=[colluder], batches=own_batch)
        assert gram.recover(*observe(scenario, "cgd"))[0].value < 1e-5


def test_figure_of_a_departure() -> None:
    found = dropout.difference(*observe(dropout.scenario(), "cgd"))
    assert f"relative error {found.value:.2f} a step apart" == privacy_warnings.DEPARTURE_FIGURE
    assert privacy_warnings.departure_warning(["dan"]).figure == privacy_warnings.DEPARTURE_FIGURE


def test_figure_of_an_absence() -> None:
    """`make absence-results` measures it; tests/audit/test_dropout.py repeats a part."""
    found = json.loads(ABSENCES.read_text())
    whole = fmean(found["one, all records, 0.1, 1"])
    one, some, many = (fmean(found[f"one, 10 of 40 records, 0.1, {count}"]) for count in (1, 16, 64))
    assert (
        f"mean relative error {whole:.2f} after one absence of a round; with batches of 10 of 40 records {one:.2f} "
        f"after one, {some:.2f} after 16 and {many:.2f} after 64"
    ) == privacy_warnings.ABSENCE_FIGURE
    assert privacy_warnings.absence_warning(["dan"]).figure == privacy_warnings.ABSENCE_FIGURE


def test_figure_of_steering() -> None:
    scenario, probe = traps.scenario(100, 4)
    found = traps.read_traps(*observe(scenario, "cgd"), probe.armed_rounds[:4])
    text = (
        f"{100 * found.value:.0f} % of 2 × 100 records in {scenario.rounds} steps, by one member and within the bound"
    )
    assert text == privacy_warnings.STEERING_FIGURE
    assert privacy_warnings.steering_warning(3, 1234.0).figure == privacy_warnings.STEERING_FIGURE


@pytest.mark.parametrize("each", [5, 100])
def test_steering_exceeds_the_sum_ratio_at_once_and_training_does_not(each: int) -> None:
    """Every honest participant compares the sum of the first layer with its own largest gradient so far."""
    steered, _ = traps.scenario(each, 1)
    layer = slice(256 * 64)
    for scenario, exceeds in ((steered, True), (replace(steered, probe=None), False)):
        view, truth = observe(scenario, "cgd")
        own, ratios = 0.0, []
        for number, opened in enumerate(view.rounds):
            gradient = dropout._real_gradient(view, truth, ("honest-1",), number)
            own = max(own, float(gradient[layer].abs().max()))
            ratios.append(float(opened.gradient_sum[layer].abs().max()) / own)
        assert (ratios[0] > privacy_warnings.MAX_SUM_RATIO) == exceeds
        if not exceeds:
            assert max(ratios) < privacy_warnings.MAX_SUM_RATIO / 3


def test_documentation_has_the_same_figures() -> None:
    [section] = re.findall(r"^### Privacy warnings$(.*?)^##", PAGE.read_text(), re.M | re.S)
    for figure in (
        privacy_warnings.SPAN_FIGURE,
        privacy_warnings.LINEAR_SPAN_FIGURE,
        privacy_warnings.LEVERAGE_FIGURE,
        privacy_warnings.LINEAR_LEVERAGE_FIGURE,
        privacy_warnings.GRAM_FIGURE,
        privacy_warnings.DEPARTURE_FIGURE,
        privacy_warnings.ABSENCE_FIGURE,
    ):
        numbers = re.findall(r"\d+\.\d+", figure)
        assert numbers
        assert all(number in section for number in numbers), numbers
