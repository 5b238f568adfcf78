"""Mappings of values to categories in `[data]`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd import InputError
from cgd.federation.data_schema import Column, Data, parse_data
from cgd.federation.privacy_section import PrivacySection, check_coverage
from cgd.federation.value_map import ValueMap, canonical

COLUMN = Column("age", "number")


def test_exact_value_comes_before_a_range_and_a_range_before_every_other() -> None:
    stages = ValueMap({"0": "no", "1-4": "yes", "3": "maybe", "*": "other"})
    assert [stages.get(text) for text in ("0", "1", "3", "4", "5", "x", "1-4")] == [
        "no", "yes", "maybe", "yes", "other", "other", "yes",
    ]  # fmt: skip


@given(st.integers(-50, 50), st.integers(0, 30), st.integers(-100, 100))
def test_range_contains_exactly_its_whole_numbers(first: int, width: int, value: int) -> None:
    found = ValueMap({f"{first}-{first + width}": "in"}).get(canonical(value))
    assert found == ("in" if first <= value <= first + width else None)


def test_number_that_is_not_whole_is_in_no_range() -> None:
    assert ValueMap({"1-4": "yes"}).get("2.5") is None


def test_huge_number_is_in_no_range() -> None:
    assert ValueMap({"1-4": "yes"}).get("9" * 5000) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"1-4": "a", "3-5": "b"}, "values has the ranges '1-4' and '3-5', which have 3 in common"),
        ({"4-1": "a"}, "values has the range '4-1'; write the lower number first"),
        ({"1": "a", "1.0": "b"}, "values has '1' and '1.0', which are the same value; remove one"),
        ({"": "a"}, "values has an empty key, and an empty field is always missing"),
        ({"1": 2}, "write the value of the tables, and the category that it stands for"),
        (["1"], "values is ['1']; write the value"),
        ({"1": "x" * 100}, "of more than 90 bytes; shorten it"),
    ],
)
def test_ambiguous_mapping_is_refused(values: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Column("num", "category", values=values)


def test_categories_of_a_mapping_are_known_and_need_not_be_learned() -> None:
    column = Column("num", "category", values={"1-4": "yes", "0": "no", "9": ""})
    assert column.categories == ("no", "yes")
    data = Data("outcome", (column,), values={"1": "ill", "0": "well"})
    assert data.classes == ("ill", "well")
    check_coverage(PrivacySection(1.0, 1e-6), data, 3, grid=False)  # nothing is learned from records


@pytest.mark.parametrize("listed", [("no",), ("No", "Yes")])
def test_mapping_to_a_category_that_is_not_listed_is_refused(listed: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="which is not one of the categories"):
        Column("num", "category", listed, values={"0": "no", "1-4": "yes"})


def test_number_has_no_mapping() -> None:
    with pytest.raises(InputError, match="it is a number and has values for categories"):
        Column("num", "number", values={"0": "no"})
    with pytest.raises(InputError, match="a regression has no classes; remove values"):
        Data("outcome", (COLUMN,), "regression", values={"0": "no", "1": "yes"})


def test_digest_of_a_file_without_the_new_keys_has_not_changed() -> None:
    assert Data("outcome", (COLUMN,)).as_stored() == {
        "target": "outcome",
        "columns": ({"name": "age", "type": "number", "categories": (), "held_by": None},),
        "task": "classification",
        "classes": (),
        "class_weights": "none",
        "id": "",
        "missing": ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?"),
        "validation": 0.2,
    }


def test_new_keys_are_part_of_the_digest_whatever_their_order() -> None:
    one, other = (
        parse_data({"target": "outcome", "columns": {"num": {"type": "category", "missing": ["9"], "values": values}}})
        for values in ({"0": "no", "1-4": "yes"}, {"1-4": "yes", "0": "no"})
    )
    assert str(one.as_stored()) == str(other.as_stored())
    assert one.as_stored()["columns"][0]["missing"] == ("9",)
    assert one.as_stored()["columns"][0]["values"] == {"0": "no", "1-4": "yes"}
