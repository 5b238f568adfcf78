from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd import InputError, Peers
from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.federated_stats import CategoryStats, NumberStats, TargetStats
from cgd.tabular.preprocessing import BLOCK_ROWS, Preprocessing, fit, fit_columns, fit_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.tabular.dataset import TabularDataset

AGE, WARD = Column("age", "number"), Column("ward", "category")
DATA = Data("outcome", (AGE, WARD), rare=1)


def records_of(data: Data = DATA, **table: Sequence[Any]) -> TabularDataset:
    return dataset_from_frame(table, data, data.columns, target="outcome" in table)[0]


def fitted(members: Sequence[TabularDataset], data: Data = DATA) -> Preprocessing:
    with cgd.local_peers(len(members)) as group:
        first, *others = group.run(lambda peers, own: fit(own, data, data.columns, peers), members)
    assert all(each == first for each in others)
    return first


def refused(members: Sequence[TabularDataset], data: Data = DATA) -> str:
    """Return the message of the error that every member raises itself."""

    def attempt(peers: Peers, own: TabularDataset) -> str:
        with pytest.raises(InputError) as error:
            fit(own, data, data.columns, peers)
        return str(error.value)

    with cgd.local_peers(len(members)) as group:
        (message,) = set(group.run(attempt, members))
    return message


# Three members with missing values: one has a single record, one no age, one no ward.
ONE = records_of(age=[40], ward=["A"], outcome=["yes"])
NO_AGE = records_of(age=[None, None, None], ward=["A", "B", "B"], outcome=["no", "no", "no"])
NO_WARD = records_of(age=[20, 60], ward=[None, ""], outcome=["no", "yes"])
MEMBERS = [ONE, NO_AGE, NO_WARD]


def test_members_without_some_values_get_the_same_statistics() -> None:
    preprocessing = fitted(MEMBERS)
    assert preprocessing.columns == (
        NumberStats("age", present=3, missing=3, mean=40.0, deviation=pytest.approx((800 / 3) ** 0.5, rel=1e-15)),  # type: ignore[arg-type]
        CategoryStats("ward", ("A", "other"), (2, 2), missing=2),  # only one member has ward B
    )
    assert preprocessing.target == TargetStats(("no", "yes"), (4, 2))
    assert preprocessing.features == ("age", "age missing", "ward=A", "ward=other", "ward missing")
    assert preprocessing.outputs == 2
    scaled = np.float32(20 / (800 / 3) ** 0.5)
    assert preprocessing.transform(ONE)[0].tolist() == [[0, 0, 1, 0, 0]]
    assert preprocessing.transform(NO_AGE)[0].tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 1, 0], [0, 1, 0, 1, 0]]
    assert preprocessing.transform(NO_WARD)[0].tolist() == [[-scaled, 0, 0, 0, 1], [scaled, 0, 0, 0, 1]]
    assert preprocessing.encode_target(NO_WARD).tolist() == [0, 1]
    assert preprocessing.encode_target(NO_WARD).dtype == np.int64
    assert preprocessing.class_weights().tolist() == [0.75, 1.5]


def test_notes_for_a_member() -> None:
    preprocessing = fitted(MEMBERS)
    assert preprocessing.notes(ONE) == ("only other members have records of the class 'no'",)
    assert preprocessing.notes(NO_AGE) == ("only other members have records of the class 'yes'",)
    assert preprocessing.notes(NO_WARD) == ()


def test_transform_is_independent_of_the_block_size() -> None:
    rng = np.random.default_rng(0)
    rows = 2 * BLOCK_ROWS + 77
    records = records_of(
        age=np.where(rng.random(rows) < 0.1, np.nan, rng.normal(50, 9, rows)).tolist(),
        ward=rng.choice(np.array(["A", "B", None]), rows).tolist(),
        outcome=rng.choice(["yes", "no"], rows).tolist(),
    )
    preprocessing = fitted([records.take(np.arange(rows) % 3 == member) for member in range(3)])
    matrix, _ = preprocessing.transform(records)
    cuts = [0, 1, 5000, rows]
    parts = [preprocessing.transform(records.take(np.arange(*cut)))[0] for cut in pairwise(cuts)]
    assert np.array_equal(matrix, np.vstack(parts))
    assert np.array_equal(matrix[:, 2:].sum(axis=1), np.ones(rows))
    assert matrix.flags.c_contiguous


def test_sums_are_the_same_whatever_the_records() -> None:
    """A restarted member replays past sums, so their settings must not depend on its records."""
    contexts: dict[str, list[tuple[Any, ...]]] = {}

    def attempt(peers: Peers, own: TabularDataset) -> None:
        original_sum = peers.sum

        def recorded_sum(values: Any, **options: Any) -> Any:
            contexts.setdefault(peers.me, []).append((values.shape, values.dtype.name, options["context"]))
            return original_sum(values, **options)

        peers.sum = recorded_sum  # type: ignore[method-assign]
        fit(own, DATA, DATA.columns, peers)

    with cgd.local_peers(3) as group:
        group.run(attempt, MEMBERS)
    first, second, third = contexts.values()
    assert first == second == third
    assert [context for _, _, context in first] == [
        "classes: size",
        "classes: claims 0",
        "classes: shared",
        "classes: table 0",
        "count classes",
        "categories: size",
        "categories: claims 0",
        "categories: shared",
        "categories: table 0",
        "count values",
        "sums of columns",
        "squares of columns",
    ]
    assert {dtype for _, dtype, _ in first} == {"int64"}


def test_listed_categories_and_classes_are_only_counted() -> None:
    data = Data("outcome", (Column("ward", "category", ("B", "A", "C")),), classes=("yes", "no"), rare=1)
    members = [
        records_of(data, ward=["A"], outcome=["yes"]),
        records_of(data, ward=["A", "B", "D"], outcome=["no"] * 3),
        records_of(data, ward=[None, None], outcome=["no", "yes"]),
    ]
    preprocessing = fitted(members, data)
    assert preprocessing.columns == (CategoryStats("ward", ("B", "A", "C"), (1, 2, 0), missing=3),)
    assert preprocessing.target == TargetStats(("yes", "no"), (2, 4))
    assert preprocessing.features == ("ward=B", "ward=A", "ward=C", "ward missing")
    assert preprocessing.transform(members[1])[0].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]


# Columns without information


def test_constant_column_is_zero_with_a_note() -> None:
    """0.1 is not exact in binary, so its sums are rounded; the column is still constant."""
    data = Data("outcome", (AGE,), rare=1)
    members = [records_of(data, age=[0.1] * rows, outcome=["yes", *["no"] * (rows - 1)]) for rows in (1, 7, 1000)]
    preprocessing = fitted(members, data)
    (column,) = preprocessing.columns
    assert column == NumberStats("age", present=1008, missing=0, mean=0.1, deviation=0.0)
    assert isinstance(column, NumberStats)
    assert column.constant
    assert not preprocessing.transform(members[1])[0].any()
    assert preprocessing.notes(members[2]) == (
        "column 'age' has the same value everywhere in the federation; its feature is zero",
    )


def test_empty_column_is_zero_with_a_note() -> None:
    members = [records_of(age=[None] * 2, ward=[None] * 2, outcome=["yes", "no"])] * 3
    preprocessing = fitted(members)
    assert preprocessing.features == ("age", "age missing", "ward missing")
    matrix, notes = preprocessing.transform(members[0])
    assert (matrix.tolist(), notes) == ([[0, 1, 1]] * 2, ())
    assert preprocessing.notes(members[0]) == (
        "column 'age' has no value anywhere in the federation; its features are zero",
        "column 'ward' has no value anywhere in the federation; its features are zero",
    )


# Targets that cannot be learned


def test_fewer_than_two_classes_are_refused() -> None:
    same = records_of(age=[1], ward=["A"], outcome=["yes"])
    expected = (
        "all records of the federation have the same class of 'outcome', 'yes'; there is nothing to predict: "
        "check that the target is the right column"
    )
    assert refused([same] * 3) == expected
    listed = Data("outcome", (AGE, WARD), classes=("no", "yes"))
    assert refused([records_of(listed, age=[1], ward=["A"], outcome=["yes"])] * 3, listed) == expected


def test_constant_target_is_refused() -> None:
    data = Data("outcome", (AGE,), task="regression")
    assert refused([records_of(data, age=[1, 2], outcome=[0.1, 0.1])] * 3, data) == (
        "all values of 'outcome' in the federation are equal; there is nothing to predict: "
        "check that the target is the right column"
    )


def test_class_without_records_gives_a_note() -> None:
    data = Data("outcome", (AGE,), classes=("yes", "no", "perhaps"), rare=1)
    preprocessing = fitted([records_of(data, age=[1, 2], outcome=["yes", "no"])] * 3, data)
    assert preprocessing.notes(records_of(data, age=[1], outcome=["no"])) == (
        "no member has records of the class 'perhaps'; it cannot be learned",
        "only other members have records of the class 'yes'",
    )
    assert preprocessing.class_weights().tolist() == [1.0, 1.0, 10.0]  # a member that joins later may have some
    assert preprocessing.outputs == 3


def test_fit_without_a_target_is_refused() -> None:
    without = records_of(age=[1], ward=["A"])
    with cgd.local_peers(3) as group, pytest.raises(InputError, match="the target was not read"):
        group.run(lambda peers, own: fit_target(own, DATA, DATA.columns, peers), [without, ONE, ONE])
    preprocessing = fitted(MEMBERS)
    assert preprocessing.transform(without)[0].shape == (1, 5)
    with pytest.raises(InputError, match="the target was not read; read the file with its label"):
        preprocessing.encode_target(without)


# Predictions


def test_unseen_values_are_zero_with_a_note() -> None:
    """An unknown category, and missing values in columns without missing values in training."""
    complete = records_of(age=[1, 2], ward=["A", "B"], outcome=["yes", "no"])
    preprocessing = fitted([complete] * 3)
    assert preprocessing.features == ("age", "ward=A", "ward=B")
    later = records_of(age=[None, 1.5, 1.5, 1.5], ward=["C", "D", "C", None])
    matrix, notes = preprocessing.transform(later)
    assert not matrix.any()
    assert notes == (
        "column 'age': 1 value is missing and replaced by the mean; none was missing in the training records",
        "column 'ward': 3 values are of categories that no training record had: 'C' (2), 'D' (1)",
        "column 'ward': 1 value is missing and encoded without a category; none was missing in the training records",
    )


def test_unknown_class_is_refused() -> None:
    preprocessing = fitted(MEMBERS)
    later = records_of(age=[1, 2], ward=["A", "A"], outcome=["yes", "dead"])
    with pytest.raises(InputError, match="the class 'dead' is not one of the model's classes"):
        preprocessing.encode_target(later)


def test_unread_column_is_refused() -> None:
    records, _ = dataset_from_frame({"age": [1]}, DATA, (AGE,))
    with pytest.raises(InputError, match="column 'ward' was not read"):
        fitted(MEMBERS).transform(records)


def test_classes_cannot_be_decoded() -> None:
    with pytest.raises(InputError, match="the target is a class and has no unit"):
        fitted(MEMBERS).decode(np.zeros(3))


# Storage


def test_preprocessing_survives_json() -> None:
    for preprocessing in (
        fitted(MEMBERS),
        Preprocessing((NumberStats("x", 3, 0, 1 / 3, 5e-324),), TargetStats(mean=1e300, deviation=2 / 3)),
    ):
        again = Preprocessing.from_dict(json.loads(json.dumps(preprocessing.to_dict())))
        assert again == preprocessing
        assert hash(again) == hash(preprocessing)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is None and not 'cgd preparation 1'; use the version of cgd that wrote it"),
        ({"format": "cgd preparation 2"}, "preprocessing is 'cgd preparation 2'"),
        ({"format": "cgd preparation 1"}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": 3, "target": {}}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": [{"type": "date"}], "target": {}}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": [{"type": "number", "name": "x"}], "target": {}}, "is damaged"),
        ({"format": "cgd preparation 1", "columns": [], "target": {"colour": 1}}, "is damaged"),
    ],
)
def test_damaged_preprocessing_is_refused(content: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Preprocessing.from_dict(content)


# Grids


def test_grid_column_fits_its_features_over_every_record_once() -> None:
    tables = (
        {"age": [1, 2], "ward": ["A", "B"], "outcome": ["yes", "no"]},
        {"age": [3], "ward": ["A"], "outcome": ["no"]},
        {"age": [None], "ward": ["B"], "outcome": ["yes"]},
    )
    for column, features in ((AGE, ("age", "age missing")), (WARD, ("ward=A", "ward=B"))):
        members = [dataset_from_frame(table, DATA, (column,), target=True)[0] for table in tables]
        with cgd.local_peers(3) as group:
            results = group.run(lambda peers, own: fit(own, DATA, (own_column(own),), peers), members)
        for preprocessing in results:
            assert preprocessing.target == TargetStats(("no", "yes"), (2, 2))
            assert preprocessing.features == features


def own_column(records: TabularDataset) -> Column:
    return AGE if records.numbers else WARD


def test_columns_can_be_fitted_without_a_target() -> None:
    with cgd.local_peers(3) as group:
        results = group.run(lambda peers, own: fit_columns(own, DATA, (WARD,), peers), MEMBERS)
    assert results == [(CategoryStats("ward", ("A", "other"), (2, 2), missing=2),)] * 3
