"""The label histogram from the first round's last layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd.errors import InputError
from cgd.privacy import labels
from cgd.privacy.schemes import observe

if TYPE_CHECKING:
    from cgd.privacy.view import Scheme


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
