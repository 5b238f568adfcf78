"""Normalised records: norms, the mean with noise, what it may use of the budget, and what a run spends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import cgd
from cgd import InputError
from cgd.dp.accountant import mu_of
from cgd.experiments import datasets, normalisation
from cgd.experiments.datasets import Dataset
from cgd.experiments.runner import build_model, execute, load_data
from cgd.experiments.spec import RunSpec
from cgd.optim.displacement import SGDRule
from cgd.simulation.baselines import BaselineSettings, dp_sgd

PRIVACY = {"epsilon": 2.0, "delta": 1e-5, "statistics_share": 0.02}
CENTRED: dict[str, Any] = {"data": "digits", "normalise": "centred", "hidden": [], "steps": 3}


def spec(**changes: Any) -> RunSpec:
    return RunSpec.from_table({**CENTRED, **changes}, "test")


def example(records: int = 40_000) -> Dataset:
    """Return records far from the origin, so that their mean has a length near 1."""
    x = torch.randn(records, 5, generator=torch.Generator().manual_seed(0)) + torch.tensor([3.0, 0, 0, -4.0, 0])
    y = torch.zeros(records, dtype=torch.int64)
    return Dataset("example", x, y, x[:7] * 2, y[:7])


def norms(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().sum(dim=1).sqrt()


def test_unit_scales_each_record_by_itself() -> None:
    data = example(100)
    data.x[3] = 0  # a record without features stays as it is
    found = normalisation.normalise(data, RunSpec(normalise="unit"))
    expected = torch.ones(100, dtype=torch.float64)
    expected[3] = 0
    torch.testing.assert_close(norms(found.x), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.x[0], data.x[0] / data.x[0].norm())
    torch.testing.assert_close(found.held_out_x[0], found.x[0])  # twice as long
    assert torch.equal(found.y, data.y)


def test_none_changes_nothing() -> None:
    data = example(10)
    assert normalisation.normalise(data, RunSpec()) is data


def test_centred_without_privacy_uses_the_exact_mean_of_the_training_records() -> None:
    data = example(100)
    unit = normalisation.normalise(data, RunSpec(normalise="unit"))
    found = normalisation.normalise(data, spec())
    centred = unit.x - unit.x.mean(dim=0)
    torch.testing.assert_close(found.x, centred / centred.norm(dim=1, keepdim=True))
    torch.testing.assert_close(found.held_out_x[0], found.x[0])


@pytest.mark.parametrize("method", ["cgd", "private-centralised"])
def test_noise_of_the_mean_has_the_deviation_of_its_share(method: str) -> None:
    """Over 200 seeds, the mean of the square of 1000 standard numbers is within 8 of its deviations."""
    data = example()
    run = spec(method=method, rows=4, privacy={**PRIVACY, "colluders": 3})
    assert run.privacy is not None
    unit = normalisation.normalise(data, RunSpec(normalise="unit")).x
    share = run.privacy.budget().mu_squared * 0.02 / 2  # for one of two attempts
    encoding = normalisation.mean_encoding(run, run.privacy, 5)
    assert encoding.mu**2 == pytest.approx(share, rel=0.04)
    assert encoding.mu**2 <= share
    members = 4 if method == "cgd" else 1  # with three colluders, the noise of each is enough
    deviation = (2 * members / share) ** 0.5
    assert encoding.sigma_total == pytest.approx(deviation, rel=0.02)
    squares = []
    for seed in range(200):
        noise = normalisation._mean(unit, replace(run, seed=seed)) * len(unit) - unit.double().sum(dim=0)
        squares.append(float((noise / deviation).square().mean()))
    # The division by the noisy number of records adds less than 1 %: it is 40,000, with a deviation of 40.
    assert sum(squares) / 200 == pytest.approx(1, abs=8 * (2 / 1000) ** 0.5)
    assert len(set(squares)) == 200


@pytest.mark.parametrize("method", ["cgd", "private-centralised"])
def test_run_charges_the_mean(method: str) -> None:
    with_mean = spec(method=method, rows=3, privacy=PRIVACY)
    result, again = execute(with_mean), execute(with_mean)
    assert result.as_json() == again.as_json()
    alone = execute(spec(method=method, rows=3, normalise="unit", privacy={**PRIVACY, "statistics_share": 0.0})).extra[
        "spent"
    ]
    spent = result.extra["spent"]
    assert spent["openings"] == 1 + alone["openings"] == 5
    assert with_mean.privacy is not None
    total = with_mean.privacy.budget().mu_squared
    training = alone["mu"] ** 2 * 0.98
    assert spent["mu"] ** 2 == pytest.approx(training + 0.01 * total, rel=1e-3)
    assert spent["epsilon"] < 2


def test_dp_sgd_charges_the_mean() -> None:
    """The mean of dp-sgd has the noise of private-centralised with a share of 0.02, and the steps have the rest."""
    options: dict[str, Any] = {"method": "dp-sgd", "epsilon": 2.0, "batch": 1348, "columns": 2}
    run, product = spec(**options), spec(method="private-centralised", privacy=PRIVACY)
    assert torch.equal(load_data(run, None).x, load_data(product, None).x)
    exact = load_data(spec(), None).x
    assert not torch.equal(load_data(run, None).x, exact)
    result, alone = execute(run), execute(replace(run, normalise="unit"))
    assert result.as_json() == execute(run).as_json()
    assert product.privacy is not None
    total = mu_of(2.0, 1e-5) ** 2
    mean = normalisation.mean_encoding(product, product.privacy, 64).mu ** 2
    assert 0.009 * total < mean < 0.01 * total
    assert 3 / alone.extra["noise_multiplier"] ** 2 == pytest.approx(total)
    assert 3 / result.extra["noise_multiplier"] ** 2 == pytest.approx(total - mean)
    assert result.extra["epsilon_spent"] <= 2


def test_mean_of_dp_sgd_needs_an_epsilon_that_integers_can_have() -> None:
    with pytest.raises(InputError, match="epsilon 60 with delta 1e-05 cannot be promised"):
        spec(method="dp-sgd", epsilon=60)
    spec(method="dp-sgd", epsilon=60, normalise="unit")


def test_momentum_and_schedule_of_dp_sgd() -> None:
    run = spec(method="dp-sgd", epsilon=8.0, batch=1348, normalise="unit", momentum=0.9, schedule="linear", steps=4)
    data = load_data(run, None)
    settings = BaselineSettings(
        lambda: build_model(run, data),
        cgd.Grid(1).split(data.x, data.y, seed=0),
        steps=4,
        lr=0.5,
        test=(data.held_out_x, data.held_out_y),
    )
    factors = (1, 0.75, 0.5, 0.25)
    expected = dp_sgd(settings, epsilon=8.0, batch=1348, momentum=0.9, schedule=factors.__getitem__).history
    found = execute(run).history
    assert found.training_loss == expected.training_loss
    plain = execute(replace(run, momentum=0.0)).history, execute(replace(run, schedule="paper")).history
    assert all(each.training_loss[-1] != found.training_loss[-1] for each in plain)


def test_records_outside_the_training_part_do_not_matter() -> None:
    run = spec(measure="validation", privacy=PRIVACY, rows=3)
    found = load_data(run, None)
    data = datasets.load("digits").scaled()
    split = len(found.x)
    assert (split, len(found.held_out_x)) == (1123, 225)
    changed = replace(data, x=torch.cat([data.x[:split], 9 + data.x[split:]]), held_out_x=data.held_out_x + 5)
    again = normalisation.normalise(changed.validation(), run)
    assert torch.equal(again.x, found.x)


@pytest.mark.parametrize(("normalise", "share"), [("centred", 0.0), ("unit", 0.02), ("none", 0.02)])
def test_share_of_the_budget_and_the_mean_belong_together(normalise: str, share: float) -> None:
    with pytest.raises(InputError, match=f"normalise is '{normalise}' and statistics_share of privacy is {share:g}"):
        spec(rows=3, normalise=normalise, privacy={**PRIVACY, "statistics_share": share})


@pytest.mark.parametrize("method", ["cgd", "private-centralised"])
def test_momentum_and_schedule_are_those_of_simulate(method: str) -> None:
    privacy = {"epsilon": 8.0, "delta": 1e-5, "colluders": 0}
    run = spec(method=method, normalise="unit", momentum=0.9, schedule="linear", steps=4, lr=0.3, privacy=privacy)
    data = load_data(run, None)
    result = cgd.simulate(
        lambda: build_model(run, data),
        cgd.Grid(1).split(data.x, data.y, seed=0),
        steps=4,
        lr=0.3,
        delta=0.1,
        rule=partial(SGDRule, momentum=0.9),
        schedule=lambda step: (1, 0.75, 0.5, 0.25)[step],
        privacy=run.privacy,
        test=(data.held_out_x, data.held_out_y),
        evaluate_every=1,
        progress=False,
    )
    found = execute(run).history
    assert found.training_loss == result.history.training_loss
    plain = execute(replace(run, momentum=0.0)).history, execute(replace(run, schedule="paper")).history
    assert all(each.training_loss[-1] != found.training_loss[-1] for each in plain)
