"""Columns that are far from those of the others, found after the first sums, and told to their owner alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.federated_stats import NumberStats, TargetStats
from cgd.tabular.preprocessing import Preprocessing, fit
from cgd.tabular.training import train
from cgd.tabular.unit_checks import UNITS, Moments, compare_with_others
from support.private_tables import PRIVATE_DATA, private_settings
from support.tabular import REGRESSION, records, run_members, table, tabular_settings

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

SITES = 4
DATA = Data("outcome", (Column("chol", "number"),), classes=("ill", "well"))


def cholesterol(site: int, rows: int = 80) -> npt.NDArray[np.float64]:
    """Return values in mg/dl, with a mean that differs a little by site."""
    return np.random.default_rng(site).normal(240 + 10 * site, 45, rows)


def notes_of_all(*columns: npt.NDArray[np.float64]) -> list[tuple[str, ...]]:
    """Return the notes of every member, each with a column of its own."""

    def program(peers: Peers, own: npt.NDArray[np.float64]) -> tuple[str, ...]:
        frame = {"chol": own, "outcome": [("well", "ill")[each % 2] for each in range(len(own))]}
        dataset = dataset_from_frame(frame, DATA, DATA.columns, target=True)[0]
        return compare_with_others(dataset, fit(dataset, DATA, DATA.columns, peers), "outcome")

    notes: list[tuple[str, ...]] = run_members(program, columns)
    return notes


def test_sites_that_differ_a_little_have_no_notes() -> None:
    assert notes_of_all(*map(cholesterol, range(SITES))) == [()] * SITES


def test_cholesterol_in_another_unit_is_told_to_its_owner_alone_with_both_figures() -> None:
    columns = [cholesterol(site) for site in range(SITES)]
    columns[1] /= 38.67
    (first, told, *rest) = notes_of_all(*columns)
    assert [first, *rest] == [()] * (SITES - 1)
    others = np.concatenate([columns[0], *columns[2:]])
    (note,) = told
    assert note.startswith(
        f"column 'chol': our values have the mean {columns[1].mean():.4g} and the deviation {columns[1].std():.4g}, "
        f"and those of the other participants {others.mean():.4g} and {others.std():.4g}: ours are "
    )
    assert "times smaller, as with mmol/l and mg/dl of cholesterol: agree on one unit. Only you see" in note


@pytest.mark.parametrize(("factor", "name"), UNITS, ids=[name.replace(" ", "-") for _, name in UNITS])
@pytest.mark.parametrize("larger", [True, False])
def test_unit_is_recognised(factor: float, name: str, larger: bool) -> None:
    columns = [cholesterol(0, 400) for _ in range(3)]
    columns[0] = columns[0] * (factor if larger else 1 / factor)
    (note,), *_ = notes_of_all(*columns)
    assert name in note
    assert f"times {'larger' if larger else 'smaller'}" in note


def test_fahrenheit_is_recognised() -> None:
    random = np.random.default_rng(0)
    celsius = [random.normal(37.2, 0.8, 100) for _ in range(3)]
    celsius[2] = 1.8 * celsius[2] + 32
    assert "ours seem to be in °F, and theirs in °C: agree on one unit." in notes_of_all(*celsius)[2][0]


def test_serial_numbers_of_dates_are_recognised() -> None:
    random = np.random.default_rng(0)
    ages = [random.normal(60, 9, 100).round() for _ in range(3)]
    ages[0] = random.integers(20500, 35000, 100).astype(float)
    assert "as spreadsheets store dates (days since 1900)" in notes_of_all(*ages)[0][0]


def test_zeros_for_missing_values_are_recognised() -> None:
    columns = [cholesterol(site, 120) for site in range(SITES)]
    columns[3] = np.zeros(60)
    assert "all ours are 0: if that stands for a missing value" in notes_of_all(*columns)[3][0]


def test_wide_spread_is_noted_although_the_mean_is_usual() -> None:
    columns = [np.random.default_rng(site).normal(0, 1, 100) for site in range(3)]
    columns[2] *= 20
    assert "do they mean something else, or have another unit?" in notes_of_all(*columns)[2][0]


def test_rare_event_is_no_unusual_spread() -> None:
    rare = [np.zeros(200), np.zeros(200), np.zeros(200)]
    rare[0][:20] = 1
    assert notes_of_all(*rare) == [()] * 3
    rare[1][0] = 1
    assert notes_of_all(*rare) == [()] * 3


def test_few_values_and_columns_that_are_not_measured_have_no_notes() -> None:
    columns = [cholesterol(0), cholesterol(1), np.full(30, np.nan), np.full(5, 6.0)]
    assert notes_of_all(*columns) == [()] * SITES


def test_target_of_a_regression_is_compared() -> None:
    def program(peers: Peers, own: TabularDataset) -> tuple[str, ...]:
        return compare_with_others(own, fit(own, REGRESSION, REGRESSION.columns, peers), "outcome")

    tables = [table(80, seed) for seed in range(3)]
    tables[1]["score"] = [1000 * each for each in tables[1]["score"]]
    notes = run_members(program, [records(each, REGRESSION) for each in tables])
    assert [len(each) for each in notes] == [0, 1, 0]
    assert notes[1][0].startswith("column 'outcome': our values have the mean ")


@given(st.integers(20, 60), st.integers(20, 60), st.floats(-1e4, 1e4), st.floats(0.1, 1e3))
def test_moments_of_the_others_are_exact(ours: int, theirs: int, mean: float, deviation: float) -> None:
    random = np.random.default_rng(ours * 100 + theirs)
    own, others = random.normal(mean, deviation, ours), random.normal(-mean, 2 * deviation, theirs)
    found = Moments.of(np.concatenate([own, others])).without(Moments.of(own))
    assert found is not None
    assert found.count == theirs
    scale = abs(mean) + deviation
    assert found.mean == pytest.approx(others.mean(), abs=1e-9 * scale)
    assert found.deviation == pytest.approx(others.std(), abs=1e-6 * scale)


def training_notes(settings: Any, content: list[TabularDataset]) -> list[tuple[str, ...]]:
    """Return the notes that every member sees right after the first sums."""

    def program(peers: Peers, own: TabularDataset) -> tuple[str, ...]:
        shown: list[str] = []
        trained = train(peers, settings, own, show_note=shown.append)
        assert set(shown) <= set(trained.notes)
        return tuple(shown)

    notes: list[tuple[str, ...]] = run_members(program, content)
    return notes


def test_training_shows_and_reports_the_note_and_does_not_log_it(caplog: pytest.LogCaptureFixture) -> None:
    tables = [table(60, seed) for seed in range(3)]
    tables[0]["age"] = [None if each is None else 365.25 * each for each in tables[0]["age"]]
    with caplog.at_level(logging.DEBUG, "cgd"):
        notes = training_notes(
            tabular_settings(replace(tabular_settings().data, rare=1), steps=2), [records(each) for each in tables]
        )
    assert [len(each) for each in notes] == [1, 0, 0]
    assert "as with years and days" in notes[0][0]
    assert not any("'age'" in each.getMessage() for each in caplog.records)


def test_training_with_noise_is_not_stopped_by_unusual_values() -> None:
    tables = [table(100, seed) for seed in range(3)]
    tables[0]["age"] = [None if each is None else 5.0 for each in tables[0]["age"]]
    training_notes(private_settings(steps=2), [records(each, PRIVATE_DATA) for each in tables])


@pytest.mark.parametrize(("mean", "deviation", "noted"), [(42.0, 27.0, 1), (42.0, 22.0, 1), (6.0, 27.0, 0)])
def test_statistics_with_noise_are_compared(mean: float, deviation: float, noted: int) -> None:
    own = {**table(400, 0), "age": [5.0, 6.0] * 200}
    stats = Preprocessing((NumberStats("age", 1190, 4, mean, deviation),), TargetStats(("ill", "well"), (1, 1)))
    assert len(compare_with_others(records(own), stats, "outcome", noise=True)) == noted


@pytest.mark.parametrize("count", [390, 402, 409])
def test_statistics_with_noise_of_few_others_are_not_compared(count: int) -> None:
    own = {**table(400, 0), "age": [5.0, 6.0] * 200}
    stats = Preprocessing((NumberStats("age", count, 4, 42.0, 9.0),), TargetStats(("ill", "well"), (1, 1)))
    assert compare_with_others(records(own), stats, "outcome", noise=True) == ()


def test_noise_that_makes_the_deviation_of_the_others_small_gives_no_note() -> None:
    own = Moments(400, 60.0, 12.0)
    everyone = Moments(800, 62.0, 8.6)  # the rest would have a deviation of 1.2
    others = everyone.without(own)
    assert others is not None
    assert others.deviation < 3
    frame = {**table(400, 0), "age": np.random.default_rng(0).normal(60, 12, 400).tolist()}
    stats = Preprocessing((NumberStats("age", 800, 4, 62.0, 8.6),), TargetStats(("ill", "well"), (1, 1)))
    assert compare_with_others(records(frame), stats, "outcome", noise=True) == ()
