"""Privacy warnings before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cgd.federation.config import Federation
from cgd.federation.data_schema import Column
from cgd.federation.model_section import Model
from cgd.tabular.alignment import validation_split
from cgd.tabular.disclosure import early_privacy_warnings
from support.tabular import DATA, REGRESSION, records, table, tabular_settings, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.tabular.settings import TabularSettings


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.load(write_federation(tmp_path, ("ada", "bob", "cleo")))


@pytest.mark.parametrize(
    ("rows", "config", "kinds"),
    [
        (4, tabular_settings(), ["relu units", "few records"]),  # at least three inputs, and a bias
        (5, tabular_settings(), ["relu units", "few records"]),  # four to train on
        (3, tabular_settings(model=Model("mlp", (8,), "tanh")), ["span"]),
        (4, tabular_settings(model=Model("mlp", (8,), "tanh")), ["leverage"]),
        (18, tabular_settings(), ["relu units", "leverage"]),  # 15 to train on
        (19, tabular_settings(), ["relu units"]),
        (16, tabular_settings(replace(DATA, validation=0.0)), ["relu units"]),
        (60, tabular_settings(), ["relu units"]),
        *((60, tabular_settings(model=Model("mlp", (8,), each)), []) for each in ("tanh", "gelu", "sigmoid")),
        (60, tabular_settings(model=Model("logistic")), []),
        (60, tabular_settings(REGRESSION, Model("linear")), ["second moments"]),
        (60, tabular_settings(model=Model("linear")), []),
        (3, tabular_settings(model=Model("linear")), ["span"]),
        (3, tabular_settings(model=Model("custom", function="nowhere:none")), []),
    ],
)
def test_early_privacy_warnings(federation: Federation, rows: int, config: TabularSettings, kinds: list[str]) -> None:
    found = early_privacy_warnings(federation, config, records(table(rows, 1), config.data))
    assert [each.kind for each in found] == kinds
    assert all("each of the other two members, alone," in each.fact for each in found if each.kind == "span")


def test_listed_categories_count_as_inputs(federation: Federation) -> None:
    config = tabular_settings(model=Model("mlp", (8,), "tanh"))
    wards = Column("ward", "category", ("A", "B", "C", "D"))
    listed = replace(config, data=replace(config.data, columns=(*config.data.columns[:2], wards)))
    assert [each.kind for each in early_privacy_warnings(federation, listed, records(table(6, 1)))] == ["span"]
    assert early_privacy_warnings(federation, listed, records(table(35, 1))) == ()


@pytest.mark.parametrize("rows", [1, 6, 18, 60])
def test_validation_records_are_not_counted(federation: Federation, rows: int) -> None:
    """The first warning has the same number as the optimiser's, which knows the training records only."""
    settings = tabular_settings(model=Model("mlp", (64,), "tanh"), batches=4)
    trained = rows - int(validation_split(rows, settings.data.validation, bytes(32)).sum())
    fact = early_privacy_warnings(federation, settings, records(table(rows, 1)))[0].fact
    assert fact.startswith(f"this participant trains on {max(1, trained // 4)} record")
    whole = replace(settings, training=replace(settings.training, batches=1))
    for each in early_privacy_warnings(federation, whole, records(table(rows, 1))):
        assert each.fact.startswith(f"this participant trains on {trained} record")
