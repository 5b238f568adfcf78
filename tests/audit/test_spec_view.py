"""The view of a coalition in a run of a spec."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from cgd.audit.spec_source import observed
from cgd.audit.view import EPSILONS, SCHEMES, flat, is_confined, sample_gradients, unflat
from cgd.dp.accountant import mu_of
from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError
from cgd.experiments.runner import execute
from cgd.experiments.spec import RunSpec
from cgd.optim.public_start import public_seed
from cgd.optim.skew import Skew
from cgd.simulation.local_training import LocalTraining


def test_view_has_the_settings_of_the_spec() -> None:
    spec = RunSpec(data="digits", rows=5, hidden=(8,), lr=0.25, delta=0.2, samples=100, steps=3)
    view, truth, (x, y) = observed(spec, "cgd", rounds=20)
    assert (len(view.rounds), view.lr, view.delta, view.samples) == (3, 0.25, 0.2, 100)
    assert view.honest == ("participant-1", "participant-2")
    assert len(view.coalition) == 3
    assert len(truth.all_y) == view.honest_samples == 40
    assert len(x) == len(y) > 400
    again, _, _ = observed(spec, "cgd", rounds=20)
    assert torch.equal(view.final_displacement, again.final_displacement)


def test_participants_have_the_classes_of_the_spec() -> None:
    spec = RunSpec(data="iris", rows=6, hidden=(4,), steps=1)
    for skew, classes in ((None, 3), (Skew(classes=1), 1)):
        _, truth, _ = observed(replace(spec, skew=skew), "cgd", rounds=1, honest=1)
        assert len(truth.all_y.unique()) == classes


def test_every_scheme_has_its_view() -> None:
    spec = RunSpec(data="iris", rows=3, hidden=(4,), steps=2)
    for scheme in SCHEMES:
        view, _, _ = observed(spec, scheme, rounds=2, honest=1)
        assert view.scheme == scheme
        assert (view.rounds[0].weights is None) == is_confined(scheme)
        assert view.is_private == (scheme in EPSILONS)
    with pytest.raises(InputError, match="has no settings of privacy"):
        observed(spec, "dp", rounds=2, honest=1)
    own = PrivacySettings(3.0, 1e-6, steps=2, clip=0.5)
    view, _, _ = observed(replace(spec, privacy=own), "dp", rounds=2, honest=2)
    assert view.clip == 0.5
    assert view.mu == pytest.approx(mu_of(3.0, 1e-6), rel=1e-6)
    # With one honest participant of three, and not two, less noise remains than t = 1 promises.
    exposed, _, _ = observed(replace(spec, privacy=own), "dp", rounds=2, honest=1)
    assert exposed.mu == pytest.approx(view.mu * 2**0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "schedule": "linear"},
        {"mu": 0.05, "hold": 2},
        {"delta": (0.05, 0.2)},
        {"momentum": 0.5},
        {"batches": 3},
        {"local": LocalTraining(epochs=2, batch=7, lr=0.05, momentum=0.9)},
        {"keep": 0.2},
        {"fresh_origins": True},
        {"fresh_origins": True, "local": LocalTraining(epochs=2, batch=7, lr=0.05, momentum=0.9)},
    ],
    ids=[
        "momentum and schedule",
        "schedule of the paper",
        "range of δ",
        "momentum",
        "batches",
        "local",
        "keep",
        "fresh",
        "fresh, local",
    ],
)
def test_training_is_that_of_the_simulation_to_the_last_bit(options: dict[str, Any]) -> None:
    spec = RunSpec(data="iris", rows=4, hidden=(4,), steps=6, arithmetic="ring", start="zeros", **options)
    view, _, _ = observed(spec, "cgd", rounds=6)
    displacement = unflat(view.final_displacement, view.build_model())
    assert digest(displacement) == execute(spec).extra["displacement"]
    plain, _, _ = observed(RunSpec(data="iris", rows=4, hidden=(4,), steps=6), "cgd", rounds=6)
    assert not torch.equal(plain.final_displacement, view.final_displacement)


def test_updates_have_the_size_of_gradients_for_the_coalition() -> None:
    spec = RunSpec(data="iris", rows=4, hidden=(4,), steps=1)
    gradients, _, _ = observed(spec, "cgd", rounds=1)
    for momentum in (0.0, 0.9):
        local = LocalTraining(epochs=3, lr=1e-4, momentum=momentum)  # the weights hardly move
        updates, _, _ = observed(replace(spec, lr=1.0, local=local), "cgd", rounds=1)
        assert torch.allclose(updates.honest_sum(0), gradients.honest_sum(0), rtol=0.05, atol=updates.noise * 20)
        assert updates.noise > 100 * gradients.noise  # of rounding, relative to a small update


def test_noise_is_for_gradients_of_all_records() -> None:
    spec = RunSpec(data="iris", rows=3, hidden=(4,), steps=2, lr=0.1)
    whole, _, _ = observed(spec, "dp8", rounds=2, honest=2)
    for changed in (replace(spec, batches=3), replace(spec, local=LocalTraining())):
        view, _, _ = observed(changed, "dp8", rounds=2, honest=2)
        assert torch.equal(view.final_displacement, whole.final_displacement)


def test_public_start_is_known_to_the_coalition() -> None:
    spec = RunSpec(data="iris", rows=4, hidden=(4,), steps=3, arithmetic="ring")
    view, truth, _ = observed(spec, "cgd", rounds=3, honest=2)
    with public_seed(spec.seed):
        start = flat(dict(view.build_model().named_parameters()))
    assert torch.equal(view.rounds[0].displacement, start)
    for model in truth.models.values():  # the rest is the private origin
        assert (model - view.final_displacement).std().item() == pytest.approx(spec.delta, rel=0.5)
    for step in range(3):  # sums are those of the models with the start
        models = {name: model - view.final_displacement for name, model in truth.models.items()}
        parts = [
            sample_gradients(view, models[name] + view.rounds[step].displacement, truth.x[name], truth.y[name]).sum(0)
            for name in view.honest
        ]
        assert torch.allclose(view.honest_sum(step), torch.stack(parts).sum(0) / view.samples, atol=1e-5)


def digest(displacement: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in displacement.values())).hexdigest()


@pytest.mark.parametrize(
    ("spec", "honest", "message"),
    [
        (RunSpec(rows=3, columns=2), 2, "the run has 2 columns"),
        (RunSpec(rows=3, rule="running-norm"), 2, "the rule of the run is running-norm; an audit of a spec needs the"),
        (RunSpec(rows=2), 2, "2 of 2 participants are honest"),
        (RunSpec(rows=3), 0, "0 of 3 participants are honest"),
        (RunSpec(rows=200, hidden=(4000,)), 2, "GiB of gradients"),
        (RunSpec(rows=201), 2, "the run has 201 participants, and an audit takes at most 200"),
        (RunSpec(data="iris", rows=150), 2, "rows is 150 and there are"),
        (RunSpec(data="diabetes", rows=3, hidden=(), lr=1e6), 2, "the training diverges"),
    ],
)
def test_unsuitable_spec_is_rejected(spec: RunSpec, honest: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        observed(spec, "cgd", rounds=30, honest=honest)
