from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd import InputError, Peers
from cgd.federation.data_schema import Column, Data
from cgd.tabular.federated_stats import Category, Number, Target
from cgd.tabular.loading import from_frame
from cgd.tabular.preprocessing import BLOCK_ROWS, Preprocessing, fit, fit_columns, fit_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.tabular.dataset import TabularDataset

AGE, WARD = Column("age", "number"), Column("ward", "category")
DATA = Data("outcome", (AGE, WARD))


def records_of(data: Data = DATA, **table: Sequence[Any]) -> TabularDataset:
    return from_frame(table, data, data.columns, target="outcome" in table)[0]


def fitted(members: Sequence[TabularDataset], data: Data = DATA) -> Preprocessing:
    with cgd.local_peers(len(members)) as colony:
        first, *others = colony.run(lambda peers, own: fit(own, data, data.columns, peers), members)
    assert all(each == first for each in others)
    return first


def refused(members: Sequence[TabularDataset], data: Data = DATA) -> str:
    """What every member is told: all of them the same, and none by way of another."""

    def attempt(peers: Peers, own: TabularDataset) -> str:
        with pytest.raises(InputError) as error:
            fit(own, data, data.columns, peers)
        return str(error.value)

    with cgd.local_peers(len(members)) as colony:
        (says,) = set(colony.run(attempt, members))
    return says


# Three members that lack something: one has a single record, one no age, one no ward.
ONE = records_of(age=[40], ward=["A"], outcome=["yes"])
NO_AGE = records_of(age=[None, None, None], ward=["A", "B", "B"], outcome=["no", "no", "no"])
NO_WARD = records_of(age=[20, 60], ward=[None, ""], outcome=["no", "yes"])
MEMBERS = [ONE, NO_AGE, NO_WARD]


def test_members_that_lack_something() -> None:
    preparation = fitted(MEMBERS)
    assert preparation.columns == (
        Number("age", present=3, missing=3, mean=40.0, deviation=pytest.approx((800 / 3) ** 0.5, rel=1e-15)),  # type: ignore[arg-type]
        Category("ward", ("A", "B"), (2, 2), missing=2),
    )
    assert preparation.target == Target(("no", "yes"), (4, 2))
    assert preparation.features == ("age", "age missing", "ward=A", "ward=B", "ward missing")
    assert preparation.outputs == 2
    scaled = np.float32(20 / (800 / 3) ** 0.5)
    assert preparation.transform(ONE)[0].tolist() == [[0, 0, 1, 0, 0]]
    assert preparation.transform(NO_AGE)[0].tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 1, 0], [0, 1, 0, 1, 0]]
    assert preparation.transform(NO_WARD)[0].tolist() == [[-scaled, 0, 0, 0, 1], [scaled, 0, 0, 0, 1]]
    assert preparation.encode_target(NO_WARD).tolist() == [0, 1]
    assert preparation.encode_target(NO_WARD).dtype == np.int64
    assert preparation.class_weights().tolist() == [0.75, 1.5]


def test_what_a_member_should_know() -> None:
    preparation = fitted(MEMBERS)
    assert preparation.notes(ONE) == ("only others have records of the class 'no'",)
    assert preparation.notes(NO_AGE) == ("only others have records of the class 'yes'",)
    assert preparation.notes(NO_WARD) == ()


def test_a_matrix_of_many_blocks_is_that_of_its_parts() -> None:
    rng = np.random.default_rng(0)
    rows = 2 * BLOCK_ROWS + 77
    records = records_of(
        age=np.where(rng.random(rows) < 0.1, np.nan, rng.normal(50, 9, rows)).tolist(),
        ward=rng.choice(np.array(["A", "B", None]), rows).tolist(),
        outcome=rng.choice(["yes", "no"], rows).tolist(),
    )
    preparation = fitted([records.take(np.arange(rows) % 3 == member) for member in range(3)])
    matrix, _ = preparation.transform(records)
    cuts = [0, 1, 5000, rows]
    parts = [preparation.transform(records.take(np.arange(*cut)))[0] for cut in pairwise(cuts)]
    assert np.array_equal(matrix, np.vstack(parts))
    assert np.array_equal(matrix[:, 2:].sum(axis=1), np.ones(rows))
    assert matrix.flags.c_contiguous


def test_every_member_makes_the_same_sums_whatever_it_has() -> None:
    """A member that comes back replays the sums of the past: their settings must not depend on its records."""
    contexts: dict[str, list[tuple[Any, ...]]] = {}

    def attempt(peers: Peers, own: TabularDataset) -> None:
        real = peers.sum

        def listening(values: Any, **options: Any) -> Any:
            contexts.setdefault(peers.me, []).append((values.shape, values.dtype.name, options["context"]))
            return real(values, **options)

        peers.sum = listening  # type: ignore[method-assign]
        fit(own, DATA, DATA.columns, peers)

    with cgd.local_peers(3) as colony:
        colony.run(attempt, MEMBERS)
    first, second, third = contexts.values()
    assert first == second == third
    assert [context for _, _, context in first] == [
        "classes: size",
        "classes: table 0",
        "count values",
        "sums of columns",
        "squares of columns",
        "categories: size",
        "categories: table 0",
    ]
    assert {dtype for _, dtype, _ in first} == {"int64"}


def test_listed_categories_and_classes_take_counts_only() -> None:
    data = Data("outcome", (Column("ward", "category", ("B", "A", "C")),), classes=("yes", "no"))
    members = [
        records_of(data, ward=["A"], outcome=["yes"]),
        records_of(data, ward=["A", "B", "D"], outcome=["no"] * 3),
        records_of(data, ward=[None, None], outcome=["no", "yes"]),
    ]
    preparation = fitted(members, data)
    assert preparation.columns == (Category("ward", ("B", "A", "C"), (1, 2, 0), missing=3),)
    assert preparation.target == Target(("yes", "no"), (2, 4))
    assert preparation.features == ("ward=B", "ward=A", "ward=C", "ward missing")
    assert preparation.transform(members[1])[0].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]


# Columns that say nothing


def test_a_constant_column_becomes_zeros_and_is_told() -> None:
    """0.1 is no double: sums of it are rounded, and it is constant all the same."""
    data = Data("outcome", (AGE,))
    members = [records_of(data, age=[0.1] * rows, outcome=["yes", *["no"] * (rows - 1)]) for rows in (1, 7, 1000)]
    preparation = fitted(members, data)
    (column,) = preparation.columns
    assert column == Number("age", present=1008, missing=0, mean=0.1, deviation=0.0)
    assert isinstance(column, Number)
    assert column.constant
    assert not preparation.transform(members[1])[0].any()
    assert preparation.notes(members[2]) == (
        "column 'age' has the same value everywhere in the federation; it becomes zeros",
    )


def test_a_column_without_a_value_anywhere_becomes_zeros_and_is_told() -> None:
    members = [records_of(age=[None] * 2, ward=[None] * 2, outcome=["yes", "no"])] * 3
    preparation = fitted(members)
    assert preparation.features == ("age", "age missing", "ward missing")
    matrix, notes = preparation.transform(members[0])
    assert (matrix.tolist(), notes) == ([[0, 1, 1]] * 2, ())
    assert preparation.notes(members[0]) == (
        "column 'age' has no value anywhere in the federation; it becomes zeros",
        "column 'ward' has no value anywhere in the federation; it becomes zeros",
    )


# What cannot be learned


def test_fewer_than_two_classes() -> None:
    same = records_of(age=[1], ward=["A"], outcome=["yes"])
    expected = (
        "all records of the federation are of one class of 'outcome', 'yes'; there is nothing to tell apart: "
        "see whether the target is the right column"
    )
    assert refused([same] * 3) == expected
    listed = Data("outcome", (AGE, WARD), classes=("no", "yes"))
    assert refused([records_of(listed, age=[1], ward=["A"], outcome=["yes"])] * 3, listed) == expected


def test_a_target_that_is_the_same_everywhere() -> None:
    data = Data("outcome", (AGE,), task="regression")
    assert refused([records_of(data, age=[1, 2], outcome=[0.1, 0.1])] * 3, data) == (
        "all values of 'outcome' in the federation are equal; there is nothing to predict: "
        "see whether the target is the right column"
    )


def test_a_class_that_nobody_has() -> None:
    data = Data("outcome", (AGE,), classes=("yes", "no", "perhaps"))
    preparation = fitted([records_of(data, age=[1, 2], outcome=["yes", "no"])] * 3, data)
    assert preparation.notes(records_of(data, age=[1], outcome=["no"])) == (
        "nobody has records of the class 'perhaps'; it cannot be learned",
        "only others have records of the class 'yes'",
    )
    assert preparation.class_weights().tolist() == [1.0, 1.0, 0.0]
    assert preparation.outputs == 3


def test_records_without_a_target() -> None:
    without = records_of(age=[1], ward=["A"])
    with cgd.local_peers(3) as colony, pytest.raises(InputError, match="the target was not read"):
        colony.run(lambda peers, own: fit_target(own, DATA, peers), [without, ONE, ONE])
    preparation = fitted(MEMBERS)
    assert preparation.transform(without)[0].shape == (1, 5)
    with pytest.raises(InputError, match="the target was not read; read the file with its label"):
        preparation.encode_target(without)


# Predictions, on records that nobody had


def test_what_nobody_had_is_zero_and_told() -> None:
    """A category that nobody had, and values that are missing where none was."""
    complete = records_of(age=[1, 2], ward=["A", "B"], outcome=["yes", "no"])
    preparation = fitted([complete] * 3)
    assert preparation.features == ("age", "ward=A", "ward=B")
    later = records_of(age=[None, 1.5, 1.5, 1.5], ward=["C", "D", "C", None])
    matrix, notes = preparation.transform(later)
    assert not matrix.any()
    assert notes == (
        "column 'age': 1 value is missing and taken for the mean; none was missing when the statistics were made",
        "column 'ward': 3 values are of categories that nobody had: 'C' (2), 'D' (1)",
        "column 'ward': 1 value is missing and of no category; none was missing when the statistics were made",
    )


def test_a_class_that_nobody_had() -> None:
    preparation = fitted(MEMBERS)
    later = records_of(age=[1, 2], ward=["A", "A"], outcome=["yes", "dead"])
    with pytest.raises(InputError, match="the class 'dead' was nobody's when the model was trained"):
        preparation.encode_target(later)


def test_a_column_that_was_not_read() -> None:
    records, _ = from_frame({"age": [1]}, DATA, (AGE,))
    with pytest.raises(InputError, match="column 'ward' was not read"):
        fitted(MEMBERS).transform(records)


def test_classes_have_no_unit() -> None:
    with pytest.raises(InputError, match="a classification has classes and no unit"):
        fitted(MEMBERS).decode(np.zeros(3))


# Keeping it


def test_it_survives_json() -> None:
    for preparation in (
        fitted(MEMBERS),
        Preprocessing((Number("x", 3, 0, 1 / 3, 5e-324),), Target(mean=1e300, deviation=2 / 3)),
    ):
        again = Preprocessing.from_dict(json.loads(json.dumps(preparation.to_dict())))
        assert again == preparation
        assert hash(again) == hash(preparation)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "format is None and not 'cgd preparation 1'; use the version that wrote it"),
        ({"format": "cgd preparation 2"}, "format is 'cgd preparation 2'"),
        ({"format": "cgd preparation 1"}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": 3, "target": {}}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": [{"type": "date"}], "target": {}}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": [{"type": "number", "name": "x"}], "target": {}}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": [], "target": {"colour": 1}}, "is damaged"),
    ],
)
def test_what_is_no_preparation(content: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Preprocessing.from_dict(content)


# In a grid


def test_in_a_grid_a_column_learns_of_its_own_features_and_of_every_record_once() -> None:
    tables = (
        {"age": [1, 2], "ward": ["A", "B"], "outcome": ["yes", "no"]},
        {"age": [3], "ward": ["A"], "outcome": ["no"]},
        {"age": [None], "ward": ["C"], "outcome": ["no"]},
    )
    for column, features in ((AGE, ("age", "age missing")), (WARD, ("ward=A", "ward=B", "ward=C"))):
        members = [from_frame(table, DATA, (column,), target=True)[0] for table in tables]
        with cgd.local_peers(3) as group:
            results = group.run(lambda peers, own: fit(own, DATA, (own_column(own),), peers), members)
        for preparation in results:
            assert preparation.target == Target(("no", "yes"), (3, 1))
            assert preparation.features == features


def own_column(records: TabularDataset) -> Column:
    return AGE if records.numbers else WARD


def test_columns_can_be_fitted_by_themselves() -> None:
    with cgd.local_peers(3) as colony:
        results = colony.run(lambda peers, own: fit_columns(own, (WARD,), peers), MEMBERS)
    assert results == [(Category("ward", ("A", "B"), (2, 2), missing=2),)] * 3
