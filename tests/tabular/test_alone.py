"""The model of our own records alone: it depends on nothing of the others, and whatever fails, the run is finished."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.tabular import alone
from cgd.tabular.alone import compare_alone, settings_alone
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import TrainingResult, train
from support.private_tables import PRIVATE_DATA, private_settings
from support.tabular import DATA, REGRESSION, records, run_grid, run_members, table, tabular_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings

SEED = b"s" * 32
GRID_COLUMNS: tuple[tuple[str, Any], ...] = (("age", "number"), ("dose", "number"), ("ward", "category"))


def first_member(settings: TabularSettings, tables: Sequence[TabularDataset]) -> tuple[TrainingResult, dict[str, Any]]:
    """Train together; return the first member's result, and its model's outputs for its validation records.

    All members have left when this returns, so nothing that follows can send anything.
    """

    def member(peers: Peers, own: TabularDataset, place: int) -> Any:
        peers.seed = bytes([place]) * 32
        trained = train(peers, settings, own)
        model = ConfinedModel.from_training(trained, settings, {})
        return trained, {"together": model.outputs(trained.validation)}

    found: tuple[TrainingResult, dict[str, Any]] = run_members(member, tables, range(len(tables)))[0]
    return found


def tables(own: dict[str, list[Any]], other: int, data: Data = DATA) -> list[TabularDataset]:
    return [records(each, data) for each in (own, table(80, other), table(80, other + 1))]


@pytest.mark.parametrize("data", [DATA, REGRESSION], ids=["classification", "regression"])
def test_model_alone_does_not_depend_on_the_others(data: Data) -> None:
    settings = tabular_settings(data)
    found, together = [], []
    for other in (10, 20):  # other records, with other means
        trained, outputs = first_member(settings, tables(table(60, 1), other, data))
        found.append(compare_alone(settings, trained, outputs, SEED))
        together.append(outputs["together"])
    first, second = (each["models"][0] for each in found)
    assert first == second
    assert first["name"] == "alone"
    assert not np.array_equal(together[0], together[1])
    assert [(each["records"], each["training"]) for each in found] == [(12, 48)] * 2


def test_validation_records_do_not_influence_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = replace(DATA, id="id")
    settings = tabular_settings(data)
    trained, outputs = first_member(settings, tables(table(60, 1), 10, data))
    seen: list[TabularDataset] = []

    def spy(peers: Peers, given: TabularSettings, own: TabularDataset, **options: Any) -> TrainingResult:
        seen.append(own)
        return train(peers, given, own, **options)

    monkeypatch.setattr(alone, "train", spy)
    compare_alone(settings, trained, outputs, SEED)
    assert set(seen[0].ids or ()) == set(trained.records.ids or ()) - set(trained.validation.ids or ())
    assert len(seen[0].ids or ()) == 48


def test_more_records_of_the_others_make_the_model_together_better() -> None:
    """A small participant: alone it cannot learn what all records show."""
    settings = tabular_settings(model=Model("logistic"), steps=100, lr=0.1)
    data = [records(each) for each in (table(400, 1), table(400, 2), table(400, 3))]
    small = data[0].take(np.arange(400) % 10 == 0)  # 40 records, 8 of them for validation
    trained, _ = first_member(settings, [small, *data[1:]])
    # Scored on many records, so that the result does not rest on chance.
    held_out = np.arange(400) >= 32
    chosen = replace(trained, records=data[0], held_out=held_out)
    outputs = ConfinedModel.from_training(trained, settings, {}).outputs(chosen.validation)
    comparison = compare_alone(settings, chosen, {"together": outputs}, SEED)
    assert (comparison["records"], comparison["training"]) == (368, 32)
    assert comparison["models"][1]["gains"]["auc"]["low"] > 0
    assert comparison["models"][1]["gains"]["log_loss"]["low"] > 0


def test_class_that_only_others_have_is_a_class_of_both_models() -> None:
    own = table(60, 1)
    own["outcome"] = ["ill" if place % 2 else "well" for place in range(60)]
    others = [{**table(60, seed), "outcome": ["dead", "ill", "well"] * 20} for seed in (2, 3)]
    settings = tabular_settings()
    trained, outputs = first_member(settings, [records(each) for each in (own, *others)])
    assert outputs["together"].shape[1] == 3
    comparison = compare_alone(settings, trained, outputs, SEED)
    assert len(comparison["models"]) == 2
    alone = settings_alone(settings, trained.preprocessing.classes, trained.records)
    assert alone.data.classes == ("dead", "ill", "well")


def test_values_that_nobody_else_has_are_categories_of_the_model_alone() -> None:
    """Together they count as "other"; alone, nothing is disclosed."""
    own = {**table(60, 1), "ward": ["X" if place % 3 else "Y" for place in range(60)]}
    settings = tabular_settings()
    trained, _ = first_member(settings, tables(own, 10))
    alone = settings_alone(settings, trained.preprocessing.classes, trained.records)
    (ward,) = (each for each in alone.data.columns if each.name == "ward")
    assert set(ward.categories) == {"X", "Y"}


def test_records_of_one_class_give_a_reason() -> None:
    own = {**table(60, 1), "outcome": ["ill"] * 60}
    settings = tabular_settings()
    trained, outputs = first_member(settings, tables(own, 10))
    comparison = compare_alone(settings, trained, outputs, SEED)
    reason = "all our training records have the class 'ill', so nothing can be learned from them alone"
    assert (comparison["models"], comparison["unavailable"]) == ([], reason)
    nobody = replace(trained, held_out=np.ones(60, dtype=np.bool_))
    assert compare_alone(settings, nobody, outputs, SEED)["unavailable"] == "we have no training records"


def test_equal_numbers_give_a_reason() -> None:
    own = {**table(20, 1), "score": [1.0] * 20}
    settings = tabular_settings(REGRESSION)
    trained, outputs = first_member(settings, tables(own, 10, REGRESSION))
    unavailable = compare_alone(settings, trained, outputs, SEED)["unavailable"]
    assert unavailable.startswith("all our training records have the same value of the target")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("2 GB"), "training alone failed: 2 GB"),
        (RuntimeError("shape"), "training alone failed: shape"),
    ],
)
def test_failure_is_a_reason_and_no_error(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    settings = tabular_settings()
    trained, outputs = first_member(settings, tables(table(60, 1), 10))
    monkeypatch.setattr(alone, "train", fail)
    assert compare_alone(settings, trained, outputs, SEED)["unavailable"] == reason


def test_training_alone_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tabular_settings(steps=10)
    trained, outputs = first_member(settings, tables(table(60, 1), 10))
    monkeypatch.setattr(alone, "MIN_SECONDS", 0.0)
    unavailable = compare_alone(settings, replace(trained, seconds=0.0), outputs, SEED)["unavailable"]
    assert unavailable == "training alone took much longer than training together, and was stopped"
    assert len(compare_alone(settings, replace(trained, seconds=600.0), outputs, SEED)["models"]) == 2


@pytest.mark.slow
def test_in_a_grid_the_model_alone_uses_our_own_columns() -> None:
    columns = tuple(Column(name, kind, held_by=place) for place, (name, kind) in enumerate(GRID_COLUMNS))
    settings = tabular_settings(Data("outcome", columns, id="id", validation=0.25), steps=20)

    def member(peers: Peers, row: int, column: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        own = replace(settings, column=column, columns=3)
        mine = records(table(80, row), settings.data)
        trained = train(peers, own, mine)
        outputs = ConfinedModel.from_training(trained, own, {}).outputs(trained.validation, peers.groups["row"])
        return compare_alone(own, trained, {"together": outputs}, peers.seed), settings_alone(
            own, trained.preprocessing.classes, trained.records
        ).data.names

    found = run_grid(3, 3, member)
    for (_, column), (comparison, names) in found.items():
        assert names == (GRID_COLUMNS[column][0],)
        assert [each["name"] for each in comparison["models"]] == ["alone", "together"]
    # The members of a row have the same validation records, and the same predictions together.
    together = [found[0, column][0]["models"][1]["scores"] for column in range(3)]
    assert together[0] == together[1] == together[2]


def test_with_privacy_the_model_alone_has_no_noise_and_charges_nothing() -> None:
    settings = private_settings(steps=10)
    own = [records(table(80, seed), PRIVATE_DATA) for seed in (1, 2, 3)]

    def member(peers: Peers, mine: TabularDataset) -> tuple[Any, Any, Any]:
        trained = train(peers, settings, mine)
        assert trained.ledger is not None
        before = trained.ledger.spent()
        outputs = ConfinedModel.from_training(trained, settings, {}).outputs(trained.validation)
        found = [compare_alone(settings, trained, {"together": outputs}, SEED) for _ in range(2)]
        assert trained.ledger.spent() == before
        return found[0], found[1], settings_alone(settings, trained.preprocessing.classes, trained.records)

    for first, second, used in run_members(member, own):
        assert used.privacy is None
        assert first == second  # noise would differ
        assert len(first["models"]) == 2


def test_other_models_are_compared_with_the_one_alone_or_with_each_other() -> None:
    settings = tabular_settings()
    trained, outputs = first_member(settings, tables(table(60, 1), 10))
    several = {**outputs, "personalised": outputs["together"] ** 2}
    comparison = compare_alone(settings, trained, several, SEED)
    assert [each["name"] for each in comparison["models"]] == ["alone", "together", "personalised"]
    nobody = replace(trained, held_out=np.ones(60, dtype=np.bool_))
    without = compare_alone(settings, nobody, {name: np.full((60, 2), 0.5) for name in several}, SEED)
    assert [each["name"] for each in without["models"]] == ["together", "personalised"]
    assert without["unavailable"] == "we have no training records"
    assert without["models"][0]["gains"] is None


def test_with_class_weights_there_is_no_log_loss() -> None:
    """The outputs are not meant as probabilities of the classes as they are."""
    settings = tabular_settings(replace(DATA, class_weights="balanced"))
    trained, outputs = first_member(settings, tables(table(60, 1), 10))
    for each in compare_alone(settings, trained, outputs, SEED)["models"]:
        assert set(each["scores"]) == {"accuracy", "auc"}
