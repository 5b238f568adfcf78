"""Public tables split over five organisations."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cgd.errors import InputError
from cgd.experiments import datasets
from cgd.experiments.organisations import split
from cgd.experiments.trades import TRADES, split_by_trade
from cgd.tabular.dataset import read_dataset

needs_uci_files = pytest.mark.skipif(
    not (Path(os.environ.get("CGD_DATA", "none")) / "adult").exists(),
    reason="adult and credit-default are not in CGD_DATA",
)

ONE_HOT = {"adult": 8, "credit-default": 3}
"""The number of columns that are categories."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "breast-cancer",
        "diabetes",
        pytest.param("adult", marks=needs_uci_files),
        pytest.param("credit-default", marks=needs_uci_files),
    ],
)
def test_split_assigns_every_record_and_writes_readable_files(name: str, tmp_path: Path) -> None:
    organisations = split(name)
    sizes = [len(cells) for cells in organisations.tables.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 20 * sizes[-1]
    paths = organisations.write(tmp_path)
    assert [path.stem for path in paths] == [*organisations.tables, "test"]
    rows = 0
    for path in paths[:-1]:
        records, _ = read_dataset(path, organisations.data, organisations.data.columns)
        rows += records.rows
    assert rows == sum(sizes)
    again, other = split(name), split(name, seed=1)
    for each in organisations.tables:
        assert np.array_equal(organisations.tables[each], again.tables[each])
    assert any(not np.array_equal(organisations.tables[each], other.tables[each]) for each in other.tables)


def test_missing_values_differ_between_organisations() -> None:
    tables = list(split("breast-cancer").tables.values())
    empty = [np.isin(cells, ("", "NA")).mean() for cells in tables]
    assert empty[0] == empty[4] == 0
    assert 0.01 < empty[1] < 0.05
    assert np.all(tables[2][:, 29] == "NA")  # a missing column
    assert 0 < np.mean(tables[3][:, 0] == "") < 1


def test_split_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match="there is no data set 'titanic'; choose one of breast-cancer, diabetes, adult"
    ):
        split("titanic")
    monkeypatch.delenv("CGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InputError, match="adult.data.gz of the data set adult is not on this machine; put it into"):
        split("adult")
    with pytest.raises(InputError, match="UCI_Credit_Card.csv.gz .*, or set CGD_DATA to the parent of a folder"):
        datasets.load("credit-default")


def test_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data.gz").write_bytes(b"no archive")
    with pytest.raises(InputError, match="adult.data.gz is damaged"):
        datasets.load("adult", data_dir=tmp_path)


@needs_uci_files
@pytest.mark.parametrize(
    ("name", "records", "features", "positive"), [("adult", 32561, 108, 7841), ("credit-default", 24000, 33, 5283)]
)
def test_large_tables_are_data_sets(name: str, records: int, features: int, positive: int) -> None:
    data = datasets.load(name)
    assert (data.x.shape, data.classes, int(data.y.sum())) == ((records, features), 2, positive)
    assert len(data.held_out_x) == len(data.held_out_y) > 5000
    one_hot = data.x[:, (data.x * (1 - data.x)).abs().sum(dim=0) == 0]
    assert one_hot.sum(dim=1).unique().tolist() == [float(ONE_HOT[name])]


def test_written_tables_are_never_overwritten(tmp_path: Path) -> None:
    organisations = split("diabetes")
    paths = organisations.write(tmp_path)
    before = [path.read_bytes() for path in paths]
    with pytest.raises(InputError, match="clinic-a.csv exists and is never overwritten; name another folder"):
        organisations.write(tmp_path)
    assert [path.read_bytes() for path in paths] == before
    with pytest.raises(InputError, match=r"clinic-a.csv cannot be written \(Not a directory\); name another folder"):
        organisations.write(paths[0] / "inside-a-file")


@needs_uci_files
def test_small_organisations_lack_categories() -> None:
    organisations = split("adult")
    country = organisations.data.names.index("native-country")
    found = [len(set(cells[:, country])) for cells in organisations.tables.values()]
    assert found[0] > 30
    assert max(found[2:]) <= 2


def test_held_out_records_of_an_organisation_are_as_its_own() -> None:
    organisations = split("breast-cancer")
    own = organisations.own_held_out
    assert own.keys() == organisations.tables.keys()
    assert np.array_equal(own["hospital-a"], organisations.held_out)
    assert 0.01 < np.isin(own["hospital-b"], ("", "NA")).mean() < 0.05
    assert np.all(own["hospital-c"][:, 29] == "NA")
    assert 0 < np.mean(own["hospital-d"][:, 0] == "") < 1


@needs_uci_files
def test_held_out_records_of_small_organisations_lack_categories() -> None:
    organisations = split("adult")
    country = organisations.data.names.index("native-country")
    own = organisations.own_held_out
    assert set(own["office-e"][:, country]) == set(organisations.tables["office-c"][:, country])
    assert len(set(own["office-a"][:, country])) > 30


@needs_uci_files
def test_trades_have_different_records() -> None:
    organisations = split_by_trade()
    assert organisations.tables.keys() == organisations.own_held_out.keys() == TRADES.keys()
    assert "occupation" not in organisations.data.names
    assert len(organisations.data.names) == organisations.tables["office-a"].shape[1] - 1
    assert len(organisations.tables["office-f"]) == 100
    parts = {name: float(np.mean(cells[:, -1] == ">50K")) for name, cells in organisations.tables.items()}
    assert parts["office-a"] > 0.4 > 0.15 > parts["office-c"]
    other = split_by_trade(seed=1)
    for name, cells in organisations.own_held_out.items():
        assert len(cells) > 300
        assert not np.array_equal(cells, other.own_held_out[name])
