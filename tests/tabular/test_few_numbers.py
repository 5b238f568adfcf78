"""Columns of numbers with few values: the values of single records are not in the opened sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.federated_stats import NumberStats
from cgd.tabular.preprocessing import fit
from cgd.tabular.rare_values import check_rare_values, fold_rare_values
from cgd.tabular.training import train
from support.tabular import run_members, tabular_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

AGE, LACTATE = Column("age", "number"), Column("lactate", "number")
DATA = Data("outcome", (AGE, LACTATE), classes=("no", "yes"))
ROWS = 20


def patients(lactate: Sequence[float], data: Data = DATA) -> TabularDataset:
    """Return records of which the first ones have these values of the second column."""
    frame = {
        "age": [float(40 + place) for place in range(ROWS)],
        "lactate": [*lactate, *[None] * (ROWS - len(lactate))],
        "outcome": ["no", "yes"] * (ROWS // 2),
    }
    return dataset_from_frame(frame, data, data.columns, target=True)[0]


def lactate_of(members: Sequence[TabularDataset], data: Data = DATA) -> NumberStats:
    first, *others = run_members(lambda peers, own: fit(own, data, data.columns, peers).columns[1], members)
    assert all(each == first for each in others)
    assert isinstance(first, NumberStats)
    return first


def test_value_of_the_only_record_that_has_one_is_not_opened() -> None:
    assert lactate_of([patients([7.3]), patients([]), patients([])]) == NumberStats("lactate", 0, 60, 0.0, 0.0)


def test_holder_of_many_values_cannot_subtract_them_from_the_mean() -> None:
    many = [1.0, 2.0, 3.0] * 6
    stats = lactate_of([patients(many), patients([7.3]), patients([])])
    assert (stats.present, stats.missing, stats.mean) == (18, 42, 2.0)


def test_enough_values_are_used_as_they_are() -> None:
    own = patients([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert fold_rare_values(own, DATA, DATA.columns).numbers["lactate"] is own.numbers["lactate"]
    assert lactate_of([own, patients([]), patients([])]).present == 6


@pytest.mark.parametrize(
    ("data", "present"),
    [
        (DATA, 0),
        (replace(DATA, rare=2), 3),
        (replace(DATA, rare=1), 3),
        (replace(DATA, rare=3), 0),  # one of them is the most frequent one, and two differ from it
    ],
)
def test_number_of_values_is_a_setting(data: Data, present: int) -> None:
    folded = fold_rare_values(patients([1, 2, 3], data), data, data.columns)
    assert np.count_nonzero(~np.isnan(folded.numbers["lactate"])) == present
    assert np.count_nonzero(~np.isnan(folded.numbers["age"])) == ROWS


def test_owner_is_told_and_no_value_is_named() -> None:
    assert check_rare_values(patients([]), DATA, DATA.columns) == ()
    (note,) = check_rare_values(patients([7.3, 8.4, 9.5]), DATA, DATA.columns)
    assert note == (
        "numbers of columns in which we have fewer than 5, or so few that differ, count as missing, because sums could "
        "disclose them: 'lactate' (3 records)"
    )
    (note,) = check_rare_values(patients([7.3] * 12 + [9.5]), DATA, DATA.columns)
    assert note == (
        "numbers that fewer than 5 of our records have, where all others have the same one, count as missing, because "
        "sums could disclose them: 'lactate' (1 record)"
    )


def test_owner_is_told_if_few_values_are_used() -> None:
    data = replace(DATA, rare=1)
    low, note = check_rare_values(patients([7.3], data), data, data.columns)
    assert low == (
        "rare is 1, and 5 is the default: from sums about a single record, such as the mean of few numbers or the "
        "gradient of a category, others may read values of these records, or all of them"
    )
    assert note == "others may read our numbers from the opened mean and deviation: 'lactate' (1 record)"
    assert check_rare_values(patients([1.0] * 5, data), data, data.columns) == (low,)


@pytest.mark.parametrize("rare", [2, 3, 4])
def test_owner_is_told_of_every_number_below_the_default(rare: int) -> None:
    data = replace(DATA, rare=rare)
    low, note = check_rare_values(patients([7.3] * rare, data), data, data.columns)
    assert low.startswith(f"rare is {rare}, and 5 is the default: from sums about {rare} records")
    assert note == f"others may read our numbers from the opened mean and deviation: 'lactate' ({rare} records)"
    assert check_rare_values(patients([7.3] * rare, data), data, data.columns, private=True) == ()


def test_owner_is_told_of_a_target_that_few_records_differ_in() -> None:
    data = Data("cost", (AGE,), "regression")
    frame = {"age": [float(40 + place) for place in range(ROWS)], "cost": [0.0] * (ROWS - 1) + [900.0]}
    (note,) = check_rare_values(dataset_from_frame(frame, data, data.columns, target=True)[0], data, data.columns)
    assert note == (
        "all but 1 record have the same value of 'cost': others may read the rest from the opened mean and deviation"
    )


def test_values_are_not_hidden_where_noise_covers_them() -> None:
    assert check_rare_values(patients([7.3]), DATA, DATA.columns, private=True) == ()


def test_few_values_are_not_in_the_features_of_a_training() -> None:
    settings = tabular_settings(DATA, steps=5)

    def member(peers: Peers, own: TabularDataset) -> int:
        return int(np.count_nonzero(~np.isnan(train(peers, settings, own).records.numbers["lactate"])))

    assert run_members(member, [patients([1.0] * 9), patients([7.3]), patients([])]) == [9, 0, 0]
