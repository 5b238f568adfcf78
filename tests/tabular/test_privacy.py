"""Privacy warnings before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cgd.federation.config import Federation
from cgd.federation.data_schema import Column
from cgd.federation.model_section import Model
from cgd.tabular.disclosure import early_privacy_warnings
from support.tabular import REGRESSION, records, table, tabular_settings, write_federation

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
        (3, tabular_settings(model=Model("mlp", (8,), "tanh")), ["span"]),
        (4, tabular_settings(model=Model("mlp", (8,), "tanh")), ["leverage"]),
        (15, tabular_settings(), ["relu units", "leverage"]),
        (16, tabular_settings(), ["relu units"]),
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
    assert early_privacy_warnings(federation, listed, records(table(28, 1))) == ()
