"""Subgroups and importance of columns, on records whose target is known to depend on some of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.json_files import convert
from cgd.local import solo_peers
from cgd.reporting.run_scores import Coefficient, ColumnImportance, SubgroupColumn
from cgd.tabular import evaluation
from cgd.tabular.evaluation import evaluate, validation_outputs
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import TrainingResult, train
from support.tabular import DATA, REGRESSION, records, table, tabular_settings

if TYPE_CHECKING:
    from cgd.tabular.settings import TabularSettings

WARDS = ("A", "B", "C", "D", *(f"small {number}" for number in range(5)))


def trained_on(
    settings: TabularSettings, content: dict[str, list[Any]]
) -> tuple[ConfinedModel, TrainingResult, dict[str, Any]]:
    peers = solo_peers(b"s" * 32)
    trained = train(peers, settings, records(content, settings.data))
    model = ConfinedModel.from_training(trained, settings, {})
    found = evaluate(model, trained, validation_outputs(model, trained, peers))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return model, trained, found


def hospital(rows: int = 800) -> dict[str, list[Any]]:
    """Records whose outcome depends on age and dose; the ward says nothing, and has groups of all sizes."""
    content = table(rows, 1)
    random = np.random.default_rng(2)
    shares = np.array([0.3, 0.25, 0.2, 0.12, *[0.01] * 5])
    wards = random.choice(len(WARDS), size=rows, p=shares / shares.sum())
    content["ward"] = [WARDS[each] for each in wards]
    for place in range(0, rows, 13):
        content["ward"][place] = None
    content["outcome"] = ["ill" if age > 60 else "well" for age in np.nan_to_num(np.array(content["age"], dtype=float))]
    return content


def test_subgroups_are_scored_and_small_ones_are_pooled() -> None:
    settings = tabular_settings(model=Model("logistic"), steps=60)
    model, trained, found = trained_on(settings, hospital())
    (column,) = convert(found["subgroups"], list[SubgroupColumn])
    values = trained.validation.categories["ward"]
    sizes = {name: int(count) for name, count in zip(values.names, values.counts(), strict=True) if count}
    sizes |= {None: values.missing}  # type: ignore[dict-item]
    large = {name: count for name, count in sizes.items() if count >= 10}
    assert {each.name: each.records for each in column.groups} == large
    assert None in large
    assert [each.records for each in column.groups] == sorted(large.values(), reverse=True)
    assert column.others is not None
    assert (column.others.records, column.others.groups) == (160 - sum(large.values()), len(sizes) - len(large))
    hits = model.outputs(trained.validation).argmax(axis=1) == model.preprocessing.encode_target(trained.validation)
    for each in column.groups:
        code = -1 if each.name is None else values.names.index(each.name)
        own = hits[values.codes == code]
        assert each.scores["accuracy"].value == own.mean()
        assert (each.scores["accuracy"].low or 0) < own.mean() <= (each.scores["accuracy"].high or 0)
    assert "auc" in column.groups[0].scores


def test_regression_has_mean_errors_of_groups() -> None:
    settings = tabular_settings(REGRESSION, model=Model("linear"), steps=60)
    model, trained, found = trained_on(settings, hospital())
    (column,) = convert(found["subgroups"], list[SubgroupColumn])
    values = trained.validation.categories["ward"]
    errors = np.abs(model.outputs(trained.validation)[:, 0] - np.asarray(trained.validation.target))
    first = column.groups[0]
    assert first.name is not None
    own = errors[values.codes == values.names.index(first.name)]
    assert first.scores["mae"].value == pytest.approx(own.mean())
    assert set(first.scores) == {"mae"}


@pytest.mark.parametrize("wards", [("A",), tuple(f"ward {number}" for number in range(100))])
def test_column_without_two_large_groups_has_no_subgroups(wards: tuple[str, ...]) -> None:
    content = table(100, 1, wards)
    _, _, found = trained_on(tabular_settings(steps=5), content)
    assert found["subgroups"] == []


def test_number_of_columns_and_groups_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    content = table(400, 1, ("A", "B", "C", "D"))
    content["again"] = content["ward"]
    data = Data("outcome", (*DATA.columns, Column("again", "category")))
    monkeypatch.setattr(evaluation, "MAX_GROUPS", 2)
    monkeypatch.setattr(evaluation, "MAX_COLUMNS", 1)
    _, _, found = trained_on(tabular_settings(data, steps=5), content)
    (column,) = convert(found["subgroups"], list[SubgroupColumn])
    assert len(column.groups) == 2
    assert column.others is not None
    assert column.others.groups == 2
    assert "accuracy" in column.others.scores  # together they are enough


def test_column_that_decides_the_outcome_is_the_most_important() -> None:
    """The outcome depends on the age alone; the other columns are independent of it."""
    model, trained, found = trained_on(tabular_settings(steps=100), hospital())
    importance = convert(found["importance"], list[ColumnImportance])
    assert importance[0].column == "age"
    assert {each.column for each in importance} == {"age", "dose", "ward"}
    assert importance[0].rise > 20 * max(abs(each.rise) for each in importance[1:])
    assert found["coefficients"] is None
    again = evaluate(model, trained, model.outputs(trained.validation))
    assert again["importance"] == found["importance"]  # the same permutations


def test_importance_is_the_rise_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a regression, with a single permutation that is known."""
    monkeypatch.setattr(evaluation, "REPEATS", 1)
    settings = tabular_settings(REGRESSION, model=Model("linear"), steps=40)
    model, trained, found = trained_on(settings, hospital(300))
    sample = trained.validation
    generator = np.random.default_rng(evaluation.SEED)
    generator.permutation(sample.rows)
    order = generator.permutation(sample.rows)
    changed = {**sample.numbers, "dose": sample.numbers["dose"][order]}
    permuted = type(sample)(sample.rows, changed, sample.categories, sample.target)
    target = np.asarray(sample.target)
    before, after = (np.sqrt(np.mean((model.outputs(each)[:, 0] - target) ** 2)) for each in (sample, permuted))
    (dose,) = [each for each in convert(found["importance"], list[ColumnImportance]) if each.column == "dose"]
    assert dose.rise == pytest.approx(after - before, rel=1e-4)  # the network computes in single precision
    assert dose.deviation == 0


def test_coefficients_are_the_changes_of_the_prediction() -> None:
    content = hospital()
    settings = tabular_settings(model=Model("logistic"), steps=60)
    model, trained, found = trained_on(settings, content)
    coefficients = {each.feature: each.value for each in convert(found["coefficients"], list[Coefficient])}
    assert set(coefficients) == set(trained.preprocessing.features)
    deviation = trained.preprocessing.columns[1].deviation  # type: ignore[union-attr]
    rows = {"age": [50.0, 50.0], "dose": [0.0, deviation], "ward": ["A", "A"]}
    low, high = np.log(model.predict_proba(rows) / (1 - model.predict_proba(rows)))[:, 1]
    assert trained.preprocessing.classes == ("ill", "well")
    assert coefficients["dose"] == pytest.approx(high - low, abs=1e-4)
    assert coefficients["age"] < 0  # older patients are ill, and `well` is the second class
    assert list(map(abs, coefficients.values())) == sorted(map(abs, coefficients.values()), reverse=True)


def test_coefficients_of_a_regression_are_in_the_unit_of_the_target() -> None:
    settings = tabular_settings(REGRESSION, model=Model("linear"), steps=60)
    model, trained, found = trained_on(settings, table(300, 1))
    coefficients = {each.feature: each.value for each in convert(found["coefficients"], list[Coefficient])}
    deviation = trained.preprocessing.columns[1].deviation  # type: ignore[union-attr]
    low, high = model.predict({"age": [50.0, 50.0], "dose": [0.0, deviation], "ward": ["A", "A"]})
    assert coefficients["dose"] == pytest.approx(high - low, abs=1e-4)


def test_without_validation_records_there_are_coefficients_only() -> None:
    data = Data("outcome", DATA.columns, validation=0.0)
    _, _, found = trained_on(tabular_settings(data, model=Model("logistic"), steps=5), table(40, 1))
    assert found["validation"] is None
    assert set(found) == {"validation", "coefficients"}
    assert found["coefficients"]


def test_few_validation_records_have_no_importance() -> None:
    _, trained, found = trained_on(tabular_settings(steps=5), table(90, 1))
    assert trained.validation.rows == 18
    assert found["importance"] is None
