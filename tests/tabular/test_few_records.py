"""Training records that share a feature with few others are merged with them, and their owner is told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.federation.config import Federation
from cgd.federation.data_schema import Column, Data
from cgd.local import solo_peers
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.federated_stats import CategoryStats, NumberStats, TargetStats
from cgd.tabular.few_records import few_states, merge_few_records, merge_notes
from cgd.tabular.preprocessing import Preprocessing, fit_columns
from cgd.tabular.rare_values import fold_rare_values, records_text
from cgd.tabular.run_inputs import RunOptions, read_inputs
from cgd.tabular.training import train
from support.tabular import SCHEMA, run_members, table, tabular_settings, write_csv, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

WARD, AGE = Column("ward", "category"), Column("age", "number")
LISTED = Column("ward", "category", ("A", "B", "C"))
DATA = Data("outcome", (AGE, WARD), classes=("no", "yes"))


def records_of(ages: list[Any], wards: list[Any], data: Data = DATA) -> TabularDataset:
    outcome = (["yes", "no"] * len(ages))[: len(ages)]
    return dataset_from_frame({"age": ages, "ward": wards, "outcome": outcome}, data, data.columns, target=True)[0]


def merged(ages: list[Any], wards: list[Any], data: Data = DATA, missing: int = 1) -> tuple[Any, dict[str, int]]:
    """Return the matrix of training records after merging; the mean of all is 0, the deviation 1."""
    columns = NumberStats("age", 100, missing, 0.0, 1.0), CategoryStats("ward", ("A", "B", "other"), (50, 40, 10), 1)
    preprocessing = Preprocessing(columns, TargetStats(("no", "yes"), (50, 50)))
    matrix, _ = preprocessing.transform(records_of(ages, wards, data))
    return matrix, merge_few_records(matrix, preprocessing, data)


AGES = [float(each) for each in range(1, 21)]


@pytest.mark.parametrize(
    ("wards", "states", "changed"),
    [
        (["A"] * 15 + ["B"] * 5, [15, 5, 0, 0], 0),
        (["A"] * 16 + ["B"] * 4, [20, 0, 0, 0], 4),
        (["B"] * 12 + ["A"] * 4 + ["Z"] * 3 + [None], [0, 20, 0, 0], 8),
        (["A"] * 10 + ["Y"] * 3 + ["Z"] * 3 + ["B"] * 4, [14, 0, 6, 0], 4),  # Y and Z are "other" together
        (["A"] * 10 + [None] * 10, [10, 0, 0, 10], 0),
    ],
)
def test_states_of_few_records_become_the_most_frequent_one(wards: list[Any], states: list[int], changed: int) -> None:
    matrix, found = merged(AGES, wards)
    assert matrix[:, 2:].sum(axis=0).tolist() == states
    assert found == ({"ward": changed} if changed else {})


@pytest.mark.parametrize(
    ("ages", "features", "changed"),
    [
        (AGES, [[each, 0] for each in AGES], 0),
        ([None, *AGES[1:]], [[0, 0], *([each, 0] for each in AGES[1:])], 1),  # the mean, without "missing"
        ([None] * 5 + AGES[5:], [[0, 1]] * 5 + [[each, 0] for each in AGES[5:]], 0),
        ([None] * 16 + AGES[16:], [[0, 1]] * 20, 4),
        ([7.0] * 16 + [1.0, 2.0, 3.0, 4.0], [[7, 0]] * 20, 4),
        ([7.0] * 15 + [1.0, 2.0] + [None] * 3, [[7, 0]] * 20, 5),
        ([7.0] * 15 + [1.0] * 5, [[7, 0]] * 15 + [[1, 0]] * 5, 0),
        ([7.0] * 10 + [1.0] + [None] * 9, [[7, 0]] * 11 + [[0, 1]] * 9, 1),
        ([None] * 20, [[0, 1]] * 20, 0),
    ],
)
def test_numbers_of_few_records_are_merged(ages: list[Any], features: list[Any], changed: int) -> None:
    matrix, found = merged(ages, ["A"] * 20)
    assert matrix[:, :2].tolist() == features
    assert found == ({"age": changed} if changed else {})


def test_fewer_records_than_rare_have_the_same_features() -> None:
    matrix, _ = merged([1.0, 2.0, None], ["A", "B", "B"])
    assert matrix.tolist() == [[0, 0, 0, 1, 0, 0]] * 3
    matrix, _ = merged([1.0, 2.0, 3.0], ["A", "B", "B"], missing=0)
    assert matrix.tolist() == [[0, 0, 1, 0, 0]] * 3


def test_column_may_have_its_own_number() -> None:
    data = replace(DATA, columns=(AGE, replace(WARD, rare=2)))
    assert merged(AGES, ["A"] * 18 + ["B"] * 2, data)[1] == {}
    assert merged(AGES, ["A"] * 19 + ["B"], data)[1] == {"ward": 1}
    assert merged([None, *AGES[1:]], ["A"] * 19 + ["B"], replace(DATA, rare=1))[1] == {}


ages = st.lists(st.sampled_from([None, 0.0, 0.0, 1.0, 2.5, 3.5, 4.5, 5.5, 6.5]), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(ages, st.randoms(use_true_random=False), st.sampled_from([WARD, LISTED]), st.integers(1, 6), st.data())
def test_no_feature_divides_few_training_records_from_the_rest(
    values: list[Any], random: Any, ward: Column, rare: int, drawn: st.DataObject
) -> None:
    data = replace(DATA, columns=(AGE, ward), rare=rare)
    wards = [random.choice(["A", "A", "A", "B", "C", None]) for _ in values]
    records = records_of(values, wards, data)
    columns = fit_columns(records, data, data.columns, solo_peers())
    preprocessing = Preprocessing(columns, TargetStats(("no", "yes"), (1, 1)))
    kept = np.array(drawn.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    matrix, _ = preprocessing.transform(fold_rare_values(records, data, data.columns).take(kept))
    merge_few_records(matrix, preprocessing, data)
    rows = len(matrix)
    for column, part in preprocessing.parts():
        block = matrix[:, part]
        if isinstance(column, CategoryStats):
            sizes = np.unique(block, axis=0, return_counts=True)[1]
            assert all(size >= min(rare, rows) for size in sizes)
            continue
        absent = block[:, 1] > 0 if column.missing else np.zeros(rows, dtype=bool)
        assert np.count_nonzero(absent) == 0 or np.count_nonzero(absent) >= min(rare, rows)
        present = np.unique(block[~absent, 0], return_counts=True)[1]
        assert present.sum() == 0 or present.sum() >= min(rare, rows)
        differing = present.sum() - present.max(initial=0)
        assert differing == 0 or differing >= rare


# Notes

MERGED = (
    "in training, records that share their category, or that a value is missing, with few others count as the most "
    "frequent category or number, or as the mean, because gradients would be about these records alone: "
)


def test_one_note_lists_all_columns_that_are_merged() -> None:
    own = records_of([None, *AGES[1:]], ["A"] * 12 + ["Jones"] * 2 + [None] * 6)
    assert merge_notes(few_states(own, DATA, DATA.columns)) == (f"{MERGED}'age' (1 record), 'ward' (2 records)",)
    assert few_states(own, replace(DATA, rare=1), DATA.columns) == {}
    (note,) = merge_notes({f"x{place}": 1 for place in range(15)})
    assert note.endswith("'x11' (1 record), and 3 more columns")


def test_owner_of_a_person_that_a_file_asks_for_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    schema = SCHEMA.replace(
        'ward = "category"', 'ward = { type = "category", values = { "Anna Keller" = "x", "*" = "y" } }'
    )
    content = table(60, 0)
    content["ward"][7] = "Anna Keller"
    federation = Federation.load(write_federation(tmp_path, ("ada", "bob", "cleo"), schema=schema))
    notes = read_inputs(federation, "ada", write_csv(tmp_path / "ada.csv", content), RunOptions()).notes
    assert (
        "values of listed categories that fewer than 5 of our records have count as missing, because sums could "
        "disclose them: 'ward' (1 record)"
    ) in notes
    assert f"{MERGED}'ward' (1 record)" in notes
    assert not any("Keller" in each for each in notes)


def test_owner_is_told_before_the_first_step_what_the_validation_split_adds() -> None:
    data = replace(DATA, validation=0.5, columns=(AGE, LISTED))
    own = records_of([float(place) for place in range(12)], ["A"] * 6 + ["B"] * 6, data)

    def member(peers: Peers, own: TabularDataset) -> tuple[int, list[str]]:
        shown: list[str] = []
        result = train(peers, tabular_settings(data, steps=1), own, show_note=shown.append)
        return min(result.records.take(~result.held_out).categories["ward"].counts()[:2]), shown

    results = run_members(member, [own] * 3)  # of six training records, at most three are of the ward with fewer
    assert any(fewest for fewest, _ in results)
    for fewest, shown in results:
        notes = [each for each in shown if "'ward'" in each]
        assert notes == ([f"{MERGED}'ward' ({records_text(fewest)})"] if fewest else [])
