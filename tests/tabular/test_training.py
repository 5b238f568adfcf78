"""Training on tables: the same model for everyone but for its origin, stopped in time."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import cgd
from cgd.errors import DivergenceError, InputError
from cgd.federation.data_schema import Column
from cgd.federation.model_section import Model
from cgd.local import solo_peers
from cgd.optim.origin import Origin
from cgd.tabular.alignment import validation_split
from cgd.tabular.columns import Categorical
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import train
from support.tabular import DATA, REGRESSION, records, run_members, table, tabular_settings

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

SEEDS = [bytes([number]) * 32 for number in range(3)]


def trained(config: TabularSettings, *tables: dict[str, list[Any]], seeds: list[bytes] = SEEDS) -> list[TrainingResult]:
    def member(peers: cgd.Peers, content: dict[str, list[Any]], seed: bytes) -> TrainingResult:
        peers.seed = seed
        return train(peers, config, records(content, config.data))

    return run_members(member, tables, seeds)


def displacement(result: TrainingResult, seed: bytes, delta: float) -> torch.Tensor:
    """Return the model minus its origin, which is the same at all members."""
    shapes = {name: tuple(each.shape) for name, each in result.network.named_parameters()}
    origin = dict(Origin(delta, shapes, seed).draw())
    return torch.cat([(each - origin[name].float()).flatten() for name, each in result.network.named_parameters()])


def test_members_get_the_same_displacement_and_evaluations() -> None:
    config = tabular_settings()
    results = trained(config, table(80, 1), table(30, 2, ("B", "C")), table(9, 3, ("A",)))
    moved = [displacement(each, seed, config.model.delta) for each, seed in zip(results, SEEDS, strict=True)]
    for other in moved[1:]:
        # Each is (origin + D) − origin in single precision: off by a rounding of the weight, twice.
        assert torch.allclose(moved[0], other, rtol=0, atol=4 * torch.finfo(torch.float32).eps * 4)
    assert not torch.equal(results[0].network[0].weight, results[1].network[0].weight)  # type: ignore[index]
    histories = [
        [
            (evaluation.step, evaluation.everyone_validation_loss, evaluation.best_step)
            for evaluation in each.evaluations
        ]
        for each in results
    ]
    assert histories[0] == histories[1] == histories[2]
    assert len({each.best_step for each in results}) == 1
    assert {each.everyone_samples for each in results} == {sum(each.samples for each in results)}


def test_equal_origins_give_training_on_pooled_data() -> None:
    """Without confinement the sum of gradients is that of the pooled records; what differs is the fixed point."""
    wards = Column("ward", "category", ("A", "B", "C"))  # learned, ward C would be "other": only one member has it
    data = replace(DATA, columns=(*DATA.columns[:2], wards), validation=0.0, rare=1)
    config = tabular_settings(data, steps=20, patience=0, optimizer="sgd", lr=0.2, ring_bits=64)
    tables = [table(80, 1), table(30, 2, ("B", "C")), table(10, 3)]
    pooled = {name: [value for each in tables for value in each[name]] for name in tables[0]}
    pooled_result = train(solo_peers(SEEDS[0], ring_bits=64), config, records(pooled, data))
    for each in trained(config, *tables, seeds=[SEEDS[0]] * 3):
        assert each.preprocessing.features == pooled_result.preprocessing.features
        for ours, theirs in zip(each.network.parameters(), pooled_result.network.parameters(), strict=True):
            # 20 steps of lr 0.2, gradients below 2, single precision with sums of 120 records.
            assert torch.allclose(ours, theirs, rtol=0, atol=20 * 0.2 * 2 * 120 * torch.finfo(torch.float32).eps)


def test_confined_models_are_close_to_the_pooled_model() -> None:
    tables = [table(300, 1), table(100, 2, ("B", "C")), table(12, 3)]
    config, test = tabular_settings(steps=100), records(table(500, 9, ("A", "B")))
    results = trained(config, *tables)
    accuracies = []
    for each in results:
        model = ConfinedModel.from_training(each, config, {})
        accuracies.append(model.scores(model.outputs(test), test)["accuracy"])
    assert min(accuracies) > 0.85
    assert max(accuracies) - min(accuracies) < 0.03


def test_early_stopping_restores_the_best_step() -> None:
    config = tabular_settings(steps=200, lr=0.3, validate_every=2, patience=2)  # overfits at once
    tables = [table(12, seed) for seed in (1, 2, 3)]
    results = trained(config, *tables)
    best = min(results[0].evaluations, key=lambda evaluation: evaluation.everyone_validation_loss or np.inf)
    assert results[0].steps < 200
    assert results[0].steps - results[0].best_step >= 4
    assert abs(best.step - results[0].best_step) <= 4
    for each, content in zip(results, tables, strict=True):
        model, kept = ConfinedModel.from_training(each, config, {}), each.validation
        evaluation = next(evaluation for evaluation in each.evaluations if evaluation.step == each.best_step)
        assert kept.rows == int(0.2 * len(content["age"]))
        assert model.scores(model.outputs(kept), kept)["log_loss"] == pytest.approx(
            evaluation.validation_loss, rel=1e-5
        )


def test_all_steps_are_taken_without_patience() -> None:
    results = trained(tabular_settings(steps=30, lr=0.3, patience=0), *(table(12, seed) for seed in (1, 2, 3)))
    assert {each.steps for each in results} == {30}


def test_training_without_validation_split() -> None:
    config = tabular_settings(replace(DATA, validation=0.0), steps=10)
    results = trained(config, *(table(12, seed) for seed in (1, 2, 3)))
    assert [evaluation.everyone_validation_loss for evaluation in results[0].evaluations] == [None, None]
    assert results[0].best_step == 10
    assert results[0].validation.rows == 0


def test_balanced_class_weights_help_rare_classes() -> None:
    tables = [table(200, seed, rare=2.5) for seed in (1, 2, 3)]
    test = records(table(600, 9, rare=2.5))
    recalls = []
    for weights in ("none", "balanced"):
        config = tabular_settings(replace(DATA, class_weights=weights), Model("logistic"), steps=60)
        each = trained(config, *tables)[0]
        model = ConfinedModel.from_training(each, config, {})
        scores = model.scores(model.outputs(test), test)
        ill = scores["classes"].index("ill")
        recalls.append(scores["confusion"][ill][ill] / sum(scores["confusion"][ill]))
    assert recalls[1] > recalls[0] + 0.1


def test_regression_predicts_in_the_unit_of_the_target() -> None:
    config = tabular_settings(REGRESSION, Model("linear"), steps=150)
    results = trained(config, *(table(100, seed) for seed in (1, 2, 3)))
    model, test = ConfinedModel.from_training(results[0], config, {}), records(table(200, 9), REGRESSION)
    scores = model.scores(model.outputs(test), test)
    assert scores["r2"] > 0.8
    assert np.allclose(model.predict(test), model.outputs(test)[:, 0])


def test_member_with_one_record_takes_part() -> None:
    results = trained(tabular_settings(), table(60, 1), table(40, 2), {k: v[:1] for k, v in table(5, 3).items()})
    assert results[2].samples == 1
    assert results[2].validation.rows == 0
    assert results[2].best_step == results[0].best_step


def test_gradient_beyond_the_bound_is_clipped_with_a_note() -> None:
    results = trained(tabular_settings(bound=0.01), *(table(30, seed) for seed in (1, 2, 3)))
    assert results[0].clipped > 0
    assert any("exceeded the bound 0.01" in note for note in results[0].notes)


def test_loss_that_is_not_finite_raises_divergence_error() -> None:
    config = tabular_settings(REGRESSION, Model("linear"), optimizer="sgd", lr=1e30)
    with pytest.raises(DivergenceError, match=r"our loss is (inf|nan) in step \d+; lower lr in \[training\]"):
        trained(config, *(table(30, seed) for seed in (1, 2, 3)))


def test_learning_rate_decays_with_mu() -> None:
    constant, decaying = (
        trained(tabular_settings(optimizer="sgd", mu=mu, patience=0), *(table(30, seed) for seed in (1, 2, 3)))[0]
        for mu in (0.0, 0.01)
    )
    moved = [displacement(each, SEEDS[0], 0.02).norm() for each in (constant, decaying)]
    assert moved[1] < moved[0]


def test_custom_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_network.py").write_text(
        "import torch\n"
        "def network(features, outputs):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(features, 3), torch.nn.Tanh(), torch.nn.Linear(3, outputs))\n"
        "def narrow(features, outputs):\n    return torch.nn.Linear(features, outputs + 1)\n"
        "def text(features, outputs):\n    return 'network'\n"
        "def frozen(features, outputs):\n    return torch.nn.ReLU()\n"
        "def broken(features, outputs):\n    return torch.nn.Linear(features + 1, outputs)\n"
        "def short(features):\n    return None\n"
        "def normed(features, outputs):\n"
        "    return torch.nn.Sequential(torch.nn.BatchNorm1d(features), torch.nn.Linear(features, outputs))\n"
        "def dropping(features, outputs):\n"
        "    return torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(features, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tables = [table(30, seed) for seed in (1, 2, 3)]
    result = trained(tabular_settings(model=Model(function="own_network:network"), steps=5), *tables)[0]
    assert sum(each.numel() for each in result.network.parameters()) == 3 * 5 + 3 + 3 * 2 + 2
    # Without other members, because threads share torch's generator.
    dropping = tabular_settings(model=Model(function="own_network:dropping"), steps=5)
    again = [train(solo_peers(SEEDS[0]), dropping, records(tables[0])) for _ in range(2)]
    for ours, theirs in zip(again[0].network.parameters(), again[1].network.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # dropout is reproducible
    for function, message in {
        "narrow": r"outputs of shape \(2, 3\) for inputs of \(2, 5\); the shape must be \(2, 2\)",
        "text": "returned a str; it must return a torch.nn.Module",
        "frozen": "without trainable parameters",
        "broken": "fails on 5 features",
        "short": "is called with two arguments, the number of features and the number of outputs, and does not accept",
        "none": "has no function 'none'; function in",
        "normed": "with the buffer 0.running_mean; buffers are not summed",
    }.items():
        with pytest.raises(InputError, match=message):
            trained(tabular_settings(model=Model(function=f"own_network:{function}"), steps=5), *tables)


def test_validation_split_is_the_same_after_a_restart() -> None:
    first, again, other = (validation_split(100, 0.3, seed) for seed in (SEEDS[0], SEEDS[0], SEEDS[1]))
    assert first.sum() == 30
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert validation_split(1, 0.9, SEEDS[0]).sum() == 0
    assert validation_split(2, 0.9, SEEDS[0]).sum() == 1


class _Addends:
    """An observer that keeps a member's weighted addends to gradient sums, and the totals."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.totals: list[Any] = []

    def before_sum(self, addend: Any) -> None:
        if addend.step is not None and addend.weight is not None:
            self.own.append(addend.weight * np.array(addend.values))

    def after_sum(self, addend: Any, total: Any) -> None:
        if addend.step is not None and addend.weight is not None:
            self.totals.append(np.array(total))


@pytest.mark.parametrize(("only", "invented"), [(0, (-1_000_000, 0)), (1, (0, 1_000_000))])
def test_one_member_cannot_remove_a_class_so_that_the_sum_is_the_gradient_of_one_other(
    only: int, invented: tuple[int, int]
) -> None:
    """Ada has records of one class only. Cleo invents records of it, or fewer than none, and reads bob's gradient."""
    settings = tabular_settings(replace(DATA, classes=("well", "ill"), class_weights="balanced"), steps=2)
    observers = [_Addends(), _Addends(), _Addends()]

    def member(peers: cgd.Peers, number: int) -> None:
        own, honest_sum = records(table(60, number), settings.data), peers.sum
        assert isinstance(own.target, Categorical)
        if number == 0:
            own = own.take(own.target.codes == only)

        def dishonest_sum(values: Any, **options: Any) -> Any:
            if options.get("context") == "count classes":
                values = values + np.array(invented)
            return honest_sum(values, **options)

        if number == 2:
            peers.sum = dishonest_sum  # type: ignore[method-assign]
        peers.observer = observers[number]
        train(peers, settings, own)

    try:
        run_members(member, [0, 1, 2])
    except cgd.CGDError:  # an error before anything is shared is right
        return
    _, bob, cleo = observers
    for total, own, bobs in zip(cleo.totals, cleo.own, bob.own, strict=True):
        assert np.linalg.norm(total - own - bobs) > 0.01 * np.linalg.norm(bobs)


def test_one_member_cannot_shrink_the_deviation_so_that_the_sum_is_the_gradient_of_one_other() -> None:
    """Ada's targets are all zero. Cleo invents a million more zeros, and bob's become large numbers beside them."""
    settings = tabular_settings(REGRESSION, steps=2)
    observers = [_Addends(), _Addends(), _Addends()]

    def member(peers: cgd.Peers, number: int) -> None:
        content, honest_sum = table(60, number), peers.sum
        content["score"] = [50.0 + score if number == 1 else 0.0 for score in content["score"]]

        def dishonest_sum(values: Any, **options: Any) -> Any:
            if options.get("context") == "count targets":
                values = values + 1_000_000
            return honest_sum(values, **options)

        if number == 2:
            peers.sum = dishonest_sum  # type: ignore[method-assign]
        peers.observer = observers[number]
        train(peers, settings, records(content, settings.data))

    try:
        run_members(member, [0, 1, 2])
    except cgd.CGDError:  # an error before anything is shared is right
        return
    _, bob, cleo = observers
    for total, own, bobs in zip(cleo.totals, cleo.own, bob.own, strict=True):
        assert np.linalg.norm(total - own - bobs) > 0.01 * np.linalg.norm(bobs)


@pytest.mark.parametrize(("invented", "least", "most"), [(0, 0.2, 0.3), (5500, 0.0, 0.006)])
def test_sum_is_nearly_one_gradient_if_the_targets_of_others_are_at_the_mean(
    invented: int, least: float, most: float
) -> None:
    """A non-promise (N12). Ada's targets are zero, and cleo invents as many zeros as the checks permit to bob."""
    settings = tabular_settings(REGRESSION, steps=1)
    observers = [_Addends(), _Addends(), _Addends()]

    def member(peers: cgd.Peers, number: int) -> None:
        content, honest_sum = table(20 if number == 0 else 60, number), peers.sum
        content["score"] = [50.0 + score if number == 1 else 0.0 for score in content["score"]]

        def dishonest_sum(values: Any, **options: Any) -> Any:
            return honest_sum(values + invented if options.get("context") == "count targets" else values, **options)

        if number == 2:
            peers.sum = dishonest_sum  # type: ignore[method-assign]
        peers.observer, peers.seed = observers[number], bytes([number]) * 32  # origins that do not vary
        train(peers, settings, records(content, settings.data))

    run_members(member, [0, 1, 2])
    _, bob, cleo = observers
    difference = np.linalg.norm(cleo.totals[0] - cleo.own[0] - bob.own[0]) / np.linalg.norm(bob.own[0])
    assert least < difference < most
