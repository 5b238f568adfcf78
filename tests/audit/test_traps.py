"""Trap weights: one participant recovers many records within the bound; without traps hardly any is recovered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from cgd.audit.attacks import records, traps
from cgd.audit.embedded import digit_scenario
from cgd.audit.schemes import observe
from cgd.audit.view import flat
from cgd.optim.public_start import public_seed
from support.audits import observe_with_weak_noise

if TYPE_CHECKING:
    from cgd.audit.view import Scheme


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_third_of_200_records_is_recovered_with_and_without_confinement(scheme: Scheme) -> None:
    scenario, probe = traps.scenario(100, 4)
    view, truth = observe(scenario, scheme)
    found = traps.read_traps(view, truth, probe.armed_rounds[:4])
    assert found.succeeds
    assert found.value > 1 / 3
    passive = records.demonstrate(scheme, 100)
    assert passive.value < 0.05 < found.value


@pytest.mark.parametrize("scheme", ["dp8", "dp2", "dp0.5"])
def test_noise_prevents_recovery(scheme: Scheme) -> None:
    """Although some traps are set within the norm that honest members accept, and are kept for several rounds."""
    scenario, probe = traps.scenario(100, 4, scheme=scheme)
    view, truth = observe(scenario, scheme)
    assert len(probe.read(4)) >= 5
    assert traps.read_traps(view, truth, probe.read(4)).value == 0.0


def test_traps_in_noisy_sums_succeed_with_far_too_little_noise() -> None:
    """Records are read from the traps that the norm of totals allows."""
    scenario, probe = traps.scenario(100, 4, scheme="dp2")
    view, truth = observe_with_weak_noise(scenario)
    assert traps.read_traps(view, truth, probe.read(1)).succeeds


@pytest.mark.parametrize(
    ("records", "delta", "start", "recovered"),
    [
        (100, 0.1, "traps", 49),
        (100, 0.1, "public", 4),
        (100, 0.1, "zeros", 2),
        (20, 0.02, "public", 13),
        (20, 0.02, "zeros", 6),
    ],
)
def test_start_that_a_member_chose_reveals_records_at_once(
    records: int, delta: float, start: str, recovered: int
) -> None:
    """One round, in which nobody steers: the figures of the threat model."""
    passive = replace(digit_scenario(records, rounds=1, lr=0.5, seed=0), delta=delta)
    _, probe = traps.steer(passive, "cgd")
    with public_seed(0):
        values = flat(dict(passive.build_model().named_parameters()))
    target = probe.targets(0)
    if start != "public":
        values = torch.zeros_like(values)
    if start == "traps":
        values[: len(target)] = target
    view, truth = observe(replace(passive, start=values), "cgd")
    found = traps.read_traps(view, truth, [0])
    assert round(found.value * 2 * records) == recovered


def test_probe_stays_within_the_bound_of_gradients() -> None:
    """The colluder's own gradient is far below the bound, so the sum of both is checked with a margin."""
    scenario, _ = traps.scenario(100, 2)
    view, _ = observe(scenario, "cgd")
    [curious] = view.coalition.values()
    limit = scenario.bound * len(curious.y) / view.samples
    largest = max(float(each.abs().max()) for each in curious.addends)
    assert 0.9 * limit < largest < 1.1 * limit


def test_about_one_record_activates_a_trap() -> None:
    scenario, probe = traps.scenario(100, 1)
    view, truth = observe(scenario, "cgd")
    layer = view.rounds[probe.armed_rounds[0]].displacement[: 256 * 65]
    weight, bias = layer[: 256 * 64].reshape(256, 64), layer[256 * 64 :]
    activated = ((truth.all_x @ weight.T + bias) > 0).sum(dim=0).double()
    assert 0.2 < float(activated.mean()) < 5
    assert int((activated == 1).sum()) > 20
    assert torch.isfinite(layer).all()


def test_demonstrations_use_the_rounds_in_which_traps_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    make = traps.scenario
    monkeypatch.setattr(
        traps, "scenario", lambda _records, phases, scheme, seed: make(20, phases, scheme=scheme, seed=seed)
    )
    results = traps.attacks("cgd")
    assert [each.setting for each in results] == [
        "2 × 100 records, 20 rounds",
        "2 × 400 records, 30 rounds",
    ]
    assert all(each.succeeds for each in results)


def test_reason_without_relu_units_has_the_measured_figures() -> None:
    file = Path(__file__).parents[2] / "results" / "suggested-models.json"
    read = [each for runs in json.loads(file.read_text())["long"].values() for each in runs]
    assert f"up to {max(read)} records in 3,000 steps" in traps.NOT_TRIED
    assert f"in {sum(each > 0 for each in read)} of {len(read)} trainings" in traps.NOT_TRIED
