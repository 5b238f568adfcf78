"""Raw records from joint columns: a real run of the product, attacked by one colluder in each column."""

from __future__ import annotations

from dataclasses import replace

import torch

from cgd.audit.attacks import joint


def test_opened_pre_activations_reveal_the_records_of_the_row() -> None:
    view, truth = joint.observe_columns("joint")
    found = joint.recover(view, truth)
    assert found.value == 1.0
    assert found.succeeds
    assert set(found.pictures) == {"real", "recovered"}
    guess = joint.records(view)
    assert guess is not None
    assert (guess - truth.all_x).abs().max() < joint.TOLERANCE
    assert found.detail.startswith("60 of 60 records, 60 of them to within 0.001")
    # Two rounds are enough for all of them, with a larger error.
    assert joint.recover(replace(view, rounds=view.rounds[:2]), truth).value == 1.0
    # One round is not: there is no difference of pre-activations.
    once = joint.recover(replace(view, rounds=view.rounds[:1]), truth)
    assert once.value == 0
    assert not once.succeeds
    # The displacement of all columns is needed, which takes a colluder in each.
    blind = [replace(each, displacement=each.displacement * _own_column(each.displacement)) for each in view.rounds]
    assert joint.recover(replace(view, rounds=tuple(blind)), truth).value == 0


def _own_column(displacement: torch.Tensor) -> torch.Tensor:
    """Ones where the colluder in the row knows the displacement by itself, zeros elsewhere."""
    known = torch.ones_like(displacement)
    weight = known[: joint.HIDDEN * 64].view(joint.HIDDEN, 64)
    weight[:, 22:] = 0
    return known


def test_towers_reveal_nothing() -> None:
    view, truth = joint.observe_columns("towers", rounds=3)
    assert view.rounds[-1].displacement.abs().max() > 0  # they do train
    found = joint.recover(view, truth)
    assert found.value == found.chance == 0
    assert not found.succeeds
    # The guess is no closer to the records than their mean is.
    guess = joint.records(view)
    assert guess is not None
    assert (guess - truth.all_x).norm() > (truth.all_x.mean(0) - truth.all_x).norm()
