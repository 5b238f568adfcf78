"""What is said of a training before anybody hears of us."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cgd.federation.config import Federation
from cgd.federation.data_schema import Column, Model
from cgd.tabular.foresight import foreseen
from support.practice import NUMBER, federation_file, records, setting, table

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.tabular.settings import TabularSettings


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.load(federation_file(tmp_path, ("ada", "bob", "cleo")))


@pytest.mark.parametrize(
    ("rows", "what", "kinds"),
    [
        (4, setting(), ["few records"]),  # three columns make three inputs at least, and a bias
        (3, setting(model=Model("mlp", (8,), "tanh")), ["span"]),
        (4, setting(model=Model("mlp", (8,), "tanh")), ["leverage"]),
        (11, setting(), ["leverage"]),
        (12, setting(), []),
        (60, setting(), []),
        (60, setting(NUMBER, Model("linear")), ["second moments"]),
        (60, setting(model=Model("linear")), []),
        (3, setting(model=Model("linear")), ["span"]),
        (3, setting(model=Model("custom", function="nowhere:none")), []),
    ],
)
def test_what_is_foreseen(federation: Federation, rows: int, what: TabularSettings, kinds: list[str]) -> None:
    found = foreseen(federation, what, records(table(rows, 1), what.data))
    assert [each.kind for each in found] == kinds
    assert all("each of the other two members, alone," in each.fact for each in found if each.kind == "span")


def test_listed_categories_are_inputs(federation: Federation) -> None:
    what = setting(model=Model("mlp", (8,), "tanh"))
    wards = Column("ward", "category", ("A", "B", "C", "D"))
    listed = replace(what, data=replace(what.data, columns=(*what.data.columns[:2], wards)))
    assert [each.kind for each in foreseen(federation, listed, records(table(6, 1)))] == ["span"]
    assert foreseen(federation, listed, records(table(21, 1))) == ()
