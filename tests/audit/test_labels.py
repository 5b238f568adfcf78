"""The label histogram from the last layer's sum: of the first round, or of one that a colluder steered to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd.audit.attacks import labels
from cgd.audit.schemes import observe
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Scheme


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_model_gives_every_label_away(seed: int) -> None:
    view, truth = observe(labels.colony(seed=seed), "secure")
    assert torch.equal(labels.label_counts(view), torch.bincount(truth.all_y, minlength=10).double())
    found = labels.count_labels(view, truth)
    assert found.value == 0
    assert found.succeeds


@pytest.mark.parametrize("seed", range(3))
def test_confinement_blurs_it_a_little(seed: int) -> None:
    found = labels.count_labels(*observe(labels.colony(seed=seed), "cgd"))
    assert 0 < found.value < 0.1
    assert found.succeeds
    hidden = labels.count_labels(*observe(labels.colony(delta=1.0, seed=seed), "cgd"))
    assert hidden.value >= hidden.chance
    assert not hidden.succeeds


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_weights_do_without_biases(scheme: Scheme) -> None:
    found = labels.count_labels(*observe(labels.colony(biases=False), scheme))
    assert found.value < 0.1
    assert found.succeeds


@pytest.mark.parametrize("seed", range(3))
def test_much_noise_leaves_nothing(seed: int) -> None:
    found = labels.count_labels(*observe(replace(labels.colony(seed=seed), noise=20.0), "dp"))
    assert found.value >= found.chance
    assert not found.succeeds


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
@pytest.mark.parametrize("seed", range(3))
def test_who_steers_counts_exactly_however_large_origins_are(scheme: Scheme, seed: int) -> None:
    steered = labels.steered(seed=seed)
    found = labels.count_labels(*observe(steered, scheme))
    assert found.value == 0
    assert found.succeeds
    # The same rounds without steering, as a control: in CGD nothing comes out.
    passive = labels.count_labels(*observe(replace(steered, probe=None), "cgd"))
    assert passive.value >= passive.chance
    assert not passive.succeeds


def test_who_steers_enters_nothing_that_a_gradient_could_not_be() -> None:
    """Its own gradient is far from the bound, so the sum of both is checked with a margin."""
    steered = labels.steered()
    view, _ = observe(steered, "cgd")
    active = view.coalition[steered.coalition[0]]
    limit = steered.bound * len(active.y) / view.samples
    largest = max(float(each.abs().max()) for each in active.addends)
    assert 0.9 * limit < largest < 1.1 * limit


@pytest.mark.parametrize("seed", range(3))
def test_usual_noise_does_not_hide_them_from_who_steers(seed: int) -> None:
    """A clipping norm of noise is less than one label in each class, and everybody knows what clipping took away."""
    view, truth = observe(labels.steered(seed=seed), "dp")
    assert labels.count_labels(view, truth).succeeds
    assert not labels.count_labels(replace(view, clip=math.inf), truth).succeeds  # who takes it for unclipped


def test_a_trained_model_is_not_preferred_to_a_fresh_one() -> None:
    """It predicts something else for every record, so the first round still tells more: what it told alone."""
    view, _ = observe(replace(labels.colony(), rounds=30, lr=0.5), "secure")
    assert torch.equal(labels.label_counts(view), labels.label_counts(view.until(1)))
    assert not torch.equal(labels.label_counts(view.only([29])), labels.label_counts(view.until(1)))


def test_what_the_audit_shows() -> None:
    for scheme in ("plain", "secure", "cgd"):
        assert all(each.succeeds for each in labels.attacks(scheme))
        assert not any(each.succeeds for each in labels.controls(scheme))


def test_counts_are_whole_and_complete() -> None:
    view, _ = observe(labels.colony(), "cgd")
    for counts in (labels.label_counts(view), labels.own_counts(view)):
        assert torch.equal(counts, counts.round())
        assert counts.min() >= 0
        assert int(counts.sum()) == view.honest_samples


def test_a_model_that_ends_with_something_else_is_refused() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 10, 8, bias=False), nn.Flatten())

    view, _ = observe(replace(labels.colony(), build_model=build), "secure")
    with pytest.raises(InputError, match="ends with a torch.nn.Linear"):
        labels.label_counts(view)
