"""The matrix of a federation equals that of scikit-learn on one table with all records."""

from __future__ import annotations

import csv
import gzip
import json
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn import datasets
from sklearn.utils.class_weight import compute_class_weight

import cgd
from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import dataset_from_frame, read_dataset
from cgd.tabular.federated_stats import NumberStats
from cgd.tabular.preprocessing import Preprocessing, fit
from cgd.tabular.rare_values import fold_rare_values
from support import pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from cgd.tabular.dataset import TabularDataset

Table = dict[str, list[Any]]


def fitted(members: Sequence[TabularDataset], data: Data) -> Preprocessing:
    with cgd.local_peers(len(members)) as group:
        first, *others = group.run(lambda peers, own: fit(own, data, data.columns, peers), members)
    assert all(each == first for each in others)  # to the last bit
    assert Preprocessing.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    return first


def records_of(table: Table, data: Data) -> TabularDataset:
    return dataset_from_frame(table, data, data.columns, target=True)[0]


def parts(sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Return the positions of the members' records."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def check(
    records: TabularDataset, members: Sequence[npt.NDArray[Any]], table: Table, data: Data, off: float = 1e-9
) -> Preprocessing:
    """Compare with scikit-learn up to the rounding of single precision, and `off` for that of the statistics."""
    own = [records.take(places) for places in members]
    preprocessing = fitted(own, data)
    expected = pooled.matrix(
        pooled.folded(table, data.columns, [each.tolist() for each in members], data.rare), data.columns
    )
    features: npt.NDArray[Any] = np.empty(expected.shape, dtype=np.float32)
    for places, each in zip(members, own, strict=True):
        matrix, _ = preprocessing.transform(fold_rare_values(each, data, data.columns))
        assert matrix.dtype == np.float32
        features[places] = matrix
    assert features.shape == (records.rows, len(preprocessing.features))
    assert np.all(np.abs(features - expected) <= 2.0**-24 * np.abs(expected) * (1 + off) + off)
    return preprocessing


# Tables of scikit-learn


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "iris"])
def test_classification_tables_match_scikit_learn(name: str) -> None:
    source = getattr(datasets, f"load_{name}")()
    names = [str(each) for each in source.feature_names]
    table: Table = {each: column.tolist() for each, column in zip(names, source.data.T, strict=True)}
    data = Data("target", tuple(Column(each, "number") for each in names), rare=1)
    records = records_of({**table, "target": [str(source.target_names[each]) for each in source.target]}, data)
    # The tables are sorted by class: some members have one class only, and two have every class.
    order = np.argsort(np.arange(records.rows) % 3 == 0, kind="stable")
    members = [order[places] for places in parts([1, 2, 50, records.rows - 53 - records.rows // 4, records.rows // 4])]
    preprocessing = check(records, members, table, data)
    assert preprocessing.features == tuple(names)
    classes = sorted(map(str, source.target_names))
    assert preprocessing.classes == tuple(classes)
    labels = np.array([classes.index(source.target_names[each]) for each in source.target])
    assert np.array_equal(preprocessing.encode_target(records), labels)
    balanced = compute_class_weight("balanced", classes=np.arange(len(classes)), y=labels)
    np.testing.assert_allclose(preprocessing.class_weights(), balanced, rtol=2**-24)
    assert preprocessing.outputs == len(classes)


def test_regression_table_matches_scikit_learn() -> None:
    source = datasets.load_diabetes(scaled=False)
    table: Table = {name: column.tolist() for name, column in zip(source.feature_names, source.data.T, strict=True)}
    data = Data("target", tuple(Column(name, "number") for name in source.feature_names), task="regression", rare=1)
    records = records_of({**table, "target": source.target.tolist()}, data)
    preprocessing = check(records, parts([1, 100, 141, 200]), table, data)
    target = preprocessing.encode_target(records)
    assert target.dtype == np.float32
    standardised = (source.target - source.target.mean()) / source.target.std()
    np.testing.assert_allclose(target, standardised, rtol=2**-23, atol=1e-12)
    np.testing.assert_allclose(preprocessing.decode(target), source.target, rtol=2**-22)
    assert (preprocessing.outputs, preprocessing.classes) == (1, ())


# Real tables with missing values and categories


def folder(name: str) -> Path:
    where = os.environ.get("CGD_DATA")
    if not where or not (Path(where) / name).is_dir():
        pytest.skip(f"needs {name}/ in CGD_DATA")
    return Path(where) / name


ADULT = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours",
    "country",
    "income",
]
ADULT_NUMBERS = {"age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours"}


def read_twice(path: Path, data: Data) -> tuple[TabularDataset, Table]:
    """Read a file as records, and by Python's csv module."""
    records, _ = read_dataset(path, data, data.columns, label=None)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, skipinitialspace=True))
    table: Table = {}
    for column in data.columns:
        texts = [None if row[column.name] == "?" else row[column.name] for row in rows]
        table[column.name] = (
            [each if each is None else float(each) for each in texts] if column.type == "number" else texts
        )
    return records, table


@pytest.mark.slow
def test_adult_matches_scikit_learn(tmp_path: Path) -> None:
    text = gzip.decompress((folder("adult") / "adult.data.gz").read_bytes()).decode().strip()
    (tmp_path / "adult.csv").write_text(f"{','.join(ADULT)}\n{text}\n")
    columns = [Column(name, "number" if name in ADULT_NUMBERS else "category") for name in ADULT[:-1]]
    columns[9] = Column("sex", "category", ("Male", "Female"))
    data = Data("income", tuple(columns))
    records, table = read_twice(tmp_path / "adult.csv", data)
    # By education: members lack most of its categories, and one has a single record.
    order = np.argsort(records.categories["education"].codes, kind="stable")
    members = np.split(order, [1, 9000, 20000, 20010])
    preprocessing = check(records, members, table, data)
    assert preprocessing.target.counts == (24720, 7841)
    missing = {each.name for each in preprocessing.columns if each.missing}
    # The single record has fewer than `rare` numbers, and a rare value of the listed categories.
    assert missing == {"workclass", "occupation", "country", "sex", *ADULT_NUMBERS}
    assert preprocessing.notes(records) == ()
    listed = tuple(
        each if each.type == "number" else replace(each, categories=tuple(sorted(set(table[each.name]) - {None})))
        for each in columns
    )
    preprocessing = check(records, members, table, replace(data, columns=listed, rare=1))
    assert len(preprocessing.features) == 6 + 8 + 16 + 7 + 14 + 6 + 5 + 2 + 41 + 3


def test_credit_default_matches_scikit_learn(tmp_path: Path) -> None:
    raw = gzip.decompress((folder("credit-default") / "UCI_Credit_Card.csv.gz").read_bytes())
    (tmp_path / "credit.csv").write_bytes(raw)
    codes = {"SEX", "EDUCATION", "MARRIAGE"}
    names = raw.split(b"\n", 1)[0].decode().replace('"', "").strip().split(",")[1:-1]
    columns = tuple(Column(name, "category" if name in codes else "number") for name in names)
    data = Data("default.payment.next.month", columns)
    records, table = read_twice(tmp_path / "credit.csv", data)
    check(records, parts([10000, 1, 19999]), table, data)


# Random tables

present = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
number_columns = st.lists(st.one_of(st.none(), present, st.just(5.0)), min_size=12, max_size=12)
category_columns = st.lists(st.one_of(st.none(), st.sampled_from("abcde")), min_size=12, max_size=12)


@given(
    st.lists(number_columns, min_size=1, max_size=2),
    st.lists(category_columns, min_size=0, max_size=2),
    st.booleans(),
    st.integers(1, 10).flatmap(lambda first: st.tuples(st.just(first), st.integers(1, 11 - first))),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_random_tables_match_scikit_learn(
    numbers: list[list[Any]], categories: list[list[Any]], listed: bool, cut: tuple[int, int], rare: int
) -> None:
    """Missing values, constant columns, columns that are missing at some members; any distribution of the rows."""
    names = [f"n{place}" for place in range(len(numbers))], [f"c{place}" for place in range(len(categories))]
    table: Table = dict(zip((*names[0], *names[1]), (*numbers, *categories), strict=True))
    assume(all(any(each is not None for each in column) for column in table.values()))
    chosen = ("e", "a", "b", "c", "d", "z") if listed else ()
    columns = (*(Column(each, "number") for each in names[0]), *(Column(each, "category", chosen) for each in names[1]))
    data = Data("target", columns, classes=("yes", "no"), rare=rare)
    records = records_of({**table, "target": ["yes", "no"] * 6}, data)
    members = parts([cut[0], cut[1], 12 - sum(cut)])
    used = pooled.folded(table, columns, [each.tolist() for each in members], rare)
    spread = [np.ptp([each for each in used[name] if each is not None] or [0.0]) for name in names[0]]
    assume(all(each == 0 or each > 5e-2 for each in spread))  # below that, the rounding of doubles dominates
    check(records, members, table, data, off=1e-7)


@pytest.mark.parametrize(("mean", "deviation"), [(1e12, 1.0), (-1e15, 30.0), (1e-9, 1e-12), (3e20, 1e18), (0.0, 1e-14)])
def test_numbers_of_any_size_match_scikit_learn(mean: float, deviation: float) -> None:
    """The error of the statistics is the rounding of a double, also for values far from zero."""
    values = mean + deviation * np.random.default_rng(0).normal(size=3000)
    data = Data("target", (Column("x", "number"),), rare=1)
    records = records_of({"x": values.tolist(), "target": ["a", "b"] * 1500}, data)
    (column,) = fitted([records.take(each) for each in parts([1, 999, 2000])], data).columns
    assert isinstance(column, NumberStats)
    exact = [Fraction(value) for value in values]
    true_mean = sum(exact) / 3000
    variance = float(sum((value - true_mean) ** 2 for value in exact) / 3000)
    assert abs(Fraction(column.mean) - true_mean) <= np.spacing(abs(mean)) / 2 + 1e-15 * deviation
    assert column.deviation == pytest.approx(variance**0.5, rel=1e-12, abs=0)
    if abs(mean) > 1e9 * deviation:  # the naive formula fails
        naive = np.mean(values**2) - np.mean(values) ** 2
        assert naive != pytest.approx(variance, rel=1e-3, abs=0)
