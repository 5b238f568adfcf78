"""The label histogram from the last layer's sum, of the first round or of one after steering."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd.audit.attacks import labels
from cgd.audit.registry import get
from cgd.audit.results import Inapplicable
from cgd.audit.schemes import observe
from cgd.audit.trace_view import view_of
from cgd.errors import InputError
from support.traces import COALITION, SETTINGS, load_all, run

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.view import Scheme


@pytest.mark.parametrize("seed", range(3))
def test_shared_model_reveals_the_exact_histogram(seed: int) -> None:
    view, truth = observe(labels.scenario(seed=seed), "secure")
    assert torch.equal(labels.label_counts(view), torch.bincount(truth.all_y, minlength=10).double())
    found = labels.count_labels(view, truth)
    assert found.value == 0
    assert found.succeeds


@pytest.mark.parametrize("seed", range(3))
def test_confinement_hides_the_histogram_only_with_a_large_delta(seed: int) -> None:
    found = labels.count_labels(*observe(labels.scenario(seed=seed), "cgd"))
    assert 0 < found.value < 0.1
    assert found.succeeds
    hidden = labels.count_labels(*observe(labels.scenario(delta=1.0, seed=seed), "cgd"))
    assert hidden.value >= hidden.chance
    assert not hidden.succeeds


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_weights_serve_if_there_are_no_biases(scheme: Scheme) -> None:
    found = labels.count_labels(*observe(labels.scenario(biases=False), scheme))
    assert found.value < 0.1
    assert found.succeeds


@pytest.mark.parametrize("seed", range(3))
def test_noise_hides_the_histogram_only_with_a_small_epsilon(seed: int) -> None:
    """ε bounds what is learned about one record, not how many there are in a class: noise of one or two records."""
    weak, strong = (labels.count_labels(*observe(labels.scenario(seed=seed), scheme)) for scheme in ("dp8", "dp0.5"))
    assert weak.succeeds
    assert strong.value >= strong.chance
    assert not strong.succeeds


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
@pytest.mark.parametrize("seed", range(3))
def test_steering_reveals_the_exact_histogram_for_large_origins(scheme: Scheme, seed: int) -> None:
    steered = labels.steering_scenario(seed=seed)
    found = labels.count_labels(*observe(steered, scheme))
    assert found.value == 0
    assert found.succeeds
    # The control: the same rounds without steering reveal nothing in CGD.
    passive = labels.count_labels(*observe(replace(steered, probe=None), "cgd"))
    assert passive.value >= passive.chance
    assert not passive.succeeds


def test_steering_stays_within_the_bound_of_gradients() -> None:
    """The colluder's own gradient is far below the bound, so the sum of both is checked with a margin."""
    steered = labels.steering_scenario()
    view, _ = observe(steered, "cgd")
    active = view.coalition[steered.coalition[0]]
    limit = steered.bound * len(active.y) / view.samples
    largest = max(float(each.abs().max()) for each in active.addends)
    assert 0.9 * limit < largest < 1.1 * limit


@pytest.mark.slow
def test_steering_succeeds_with_weak_noise_and_needs_the_correction_for_clipping() -> None:
    """At ε = 8, the mean over many rounds determines the number of labels of a class up to one or two."""
    view, truth = observe(labels.steering_scenario(rounds=labels.PRIVATE_STEERED_ROUNDS), "dp8")
    assert labels.count_labels(view, truth).succeeds
    assert labels.count_labels(view, truth).value < labels.count_labels(replace(view, clip=math.inf), truth).value
    assert not labels.count_labels(view.only([0]), truth).succeeds


def test_first_round_is_preferred_to_a_trained_model() -> None:
    """A trained model predicts something else for every record, so the first round is more certain."""
    view, _ = observe(replace(labels.scenario(), rounds=30, lr=0.5), "secure")
    assert torch.equal(labels.label_counts(view), labels.label_counts(view.until(1)))
    assert not torch.equal(labels.label_counts(view.only([29])), labels.label_counts(view.until(1)))


def test_demonstrations_succeed_and_controls_fail() -> None:
    for scheme in ("plain", "secure", "cgd"):
        assert all(each.succeeds for each in labels.attacks(scheme))
        assert not any(each.succeeds for each in labels.controls(scheme))


def test_counts_are_whole_and_sum_to_all_records() -> None:
    view, _ = observe(labels.scenario(), "cgd")
    for counts in (labels.label_counts(view), labels.own_counts(view)):
        assert torch.equal(counts, counts.round())
        assert counts.min() >= 0
        assert int(counts.sum()) == view.honest_samples


def test_model_without_a_final_linear_layer_is_rejected() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 10, 8, bias=False), nn.Flatten())

    view, _ = observe(replace(labels.scenario(), build_model=build), "secure")
    with pytest.raises(InputError, match="ends with a torch.nn.Linear"):
        labels.label_counts(view)


def test_recorded_run_with_class_weights_is_not_measured(tmp_path: Path) -> None:
    """The gradient of a weighted loss is not predicted minus actual labels."""
    run(SETTINGS["class weights"], tmp_path)
    [found] = get("labels").run_on(*view_of(load_all(tmp_path), COALITION))
    assert isinstance(found, Inapplicable)
    assert "weighted by class" in found.why


@pytest.mark.parametrize("seed", range(3))
def test_addend_of_more_samples_than_the_view_has_does_not_matter(seed: int) -> None:
    """As in the view of a single trace, in which the others have a few samples, and addends of many more."""
    view, truth = observe(labels.scenario(biases=False, seed=seed), "secure")
    few = {
        name: replace(each, x=each.x[::5], y=each.y[::5], samples=each.sample_count)
        for name, each in view.coalition.items()
    }
    assert labels.count_labels(replace(view, coalition=few), truth).value < 0.05


def test_exact_guess_without_a_view_is_no_measure_of_the_attack() -> None:
    view, truth = observe(labels.scenario(), "secure")
    every_class = {name: torch.arange(len(y)) % 10 for name, y in truth.y.items()}
    with pytest.raises(InputError, match="a guess of the class counts is exact already"):
        labels.count_labels(view, replace(truth, y=every_class))


def test_lucky_estimate_within_the_noise_is_no_success() -> None:
    """Two classes and a good guess: noise of a few records often brings a guess as near as half of its distance."""
    real, guess = torch.tensor([80.0, 70.0]), torch.tensor([86.0, 64.0])
    assert labels.is_beyond_chance(real, [guess], variance=0.01)
    assert not labels.is_beyond_chance(real, [guess], variance=2 * 10.0**2)


def test_noise_alone_does_not_succeed_with_two_classes() -> None:
    passive = labels.scenario()
    data = {name: (x, (y < 5).long()) for name, (x, y) in passive.data.items()}
    passive = replace(passive, data=data, build_model=_two_classes)
    found = [labels.count_labels(*observe(replace(passive, seed=seed), "dp0.5")) for seed in range(20)]
    assert any(each.value <= each.chance / 2 for each in found)  # by luck
    assert not any(each.succeeds for each in found)


def _two_classes() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))
