"""Records from databases: SQLite files, addresses, passwords, and records that change."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import tempfile
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd import InputError
from cgd.federation.config import Federation
from cgd.tabular import databases
from cgd.tabular.columns import Categorical
from cgd.tabular.databases import Query, _with_encryption
from cgd.tabular.dataset import dataset_from_frame, read_dataset
from cgd.tabular.query_records import RECORDS_FILE, digest, in_fixed_order
from cgd.tabular.run import TabularRun
from cgd.tabular.run_inputs import RunOptions, read_inputs
from cgd.tabular.schema import suggest_schema
from cgd.tabular.sources import open_source, parse_source
from support.databases import write_sqlite
from support.private_tables import PRIVATE_SCHEMA
from support.tabular import COLUMNS, DATA, table, write_csv, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.tabular.dataset import TabularDataset

PASSWORD = "t0p%20secret"
SELECT = "SELECT age, dose, ward, outcome FROM records"


def content(rows: int = 60, seed: int = 1) -> dict[str, list[Any]]:
    made = table(rows, seed)
    return {name: made[name] for name in ("age", "dose", "ward", "outcome")}


def sqlite_query(path: Path, sql: str = SELECT) -> Query:
    made = parse_source(os.fspath(path), query=sql)
    assert isinstance(made, Query)
    return made


def refused(query: Query) -> str:
    with pytest.raises(InputError) as error:
        open_source(query, [], [])
    return str(error.value)


def same(one: TabularDataset, other: TabularDataset) -> bool:
    assert isinstance(one.target, Categorical)
    assert isinstance(other.target, Categorical)
    return (
        all(np.array_equal(one.numbers[name], other.numbers[name], equal_nan=True) for name in one.numbers)
        and all(
            one.categories[name].names == other.categories[name].names
            and np.array_equal(one.categories[name].codes, other.categories[name].codes)
            for name in one.categories
        )
        and one.target.names == other.target.names
        and np.array_equal(one.target.codes, other.target.codes)
    )


# SQLite


def test_query_gives_the_records_of_the_same_csv_file(tmp_path: Path) -> None:
    query = sqlite_query(write_sqlite(tmp_path / "a.db", content()))
    found, notes = read_dataset(query, DATA, COLUMNS)
    expected, _ = read_dataset(write_csv(tmp_path / "a.csv", content()), DATA, COLUMNS)
    assert notes == ()
    assert same(found, expected)
    assert suggest_schema(query, "outcome") == suggest_schema(tmp_path / "a.csv", "outcome")


def test_query_is_run_once_and_its_result_does_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BATCH_ROWS", 7)
    path = write_sqlite(tmp_path / "a.db", content())
    query = sqlite_query(path, "SELECT *, random() AS chance FROM records")
    batches = [[array.to_pylist() for array in batch] for batch in query.table.batches([4, 0])]
    assert [len(batch[0]) for batch in batches] == [0, *[7] * 8, 4]
    path.unlink()
    interleaved = zip(query.table.batches([4, 0]), query.table.batches([4, 0]), strict=True)
    for (one, other), expected in zip(interleaved, batches, strict=True):
        assert [array.to_pylist() for array in one] == [array.to_pylist() for array in other] == expected
    assert pickle.loads(pickle.dumps(query)) == query  # another process runs it itself


def test_result_is_in_no_file_that_others_can_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    query = sqlite_query(write_sqlite(tmp_path / "a.db", content()))
    assert len(list(query.table.batches([0]))) == 2
    assert list(folder.iterdir()) == []
    full = sqlite_query(tmp_path / "a.db")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert "cannot be kept in" in refused(full)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (
            "INSERT INTO records VALUES (1, 2, 'A', 'ill')",
            "the query begins with INSERT; a query can only read: write one",
        ),
        ("-- harmless\nDELETE FROM records", "begins with DELETE"),
        ("/* SELECT */ DROP TABLE records", "begins with DROP"),
        ("CREATE TABLE x (y)", "begins with CREATE"),
        ("PRAGMA writable_schema = ON", "begins with PRAGMA"),
        ("ATTACH 'other.db' AS other", "begins with ATTACH"),
        ("VACUUM INTO 'copy.db'", "begins with VACUUM"),
        ("EXPLAIN DELETE FROM records", "begins with EXPLAIN"),
        ("  ;; ", "the query is empty"),
        ("-- nothing", "the query is empty"),
        ("'text'", "the query begins with \"'text'\""),
        ("SELECT 1\0", "has a null character"),
        ("SELECT 1; DELETE FROM records", "one statement at a time"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("WITH x AS (SELECT 1) INSERT INTO records SELECT 1, 2, 'A', 'ill'", "not authorized"),
        ("WITH x AS (SELECT 1) DELETE FROM records", "not authorized"),
        ("SELECT load_extension('x')", "not authorized to use function: load_extension"),
        ("SELECT * FROM pragma_table_info('records')", "not authorized"),
        ("SELECT writefile('x', 'y')", "no such function: writefile"),
        ("SELECT weight FROM records", "no such column: weight"),
        ("SELECT x'00' AS blob", "a value is a BLOB"),
        ("SELECT * FROM records WHERE age < 0", "has no rows; correct its conditions"),
    ],
)
def test_query_that_is_not_a_select_is_refused(tmp_path: Path, sql: str, message: str) -> None:
    path = write_sqlite(tmp_path / "a.db", content())
    before = path.read_bytes()
    with pytest.raises(InputError) as error:
        open_source(sqlite_query(path, sql), [], [])
    assert message in str(error.value)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.db"]


def test_sql_without_the_first_check_cannot_write_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first word is for a clear message; the database refuses, whatever it is."""
    path = write_sqlite(tmp_path / "a.db", content())
    before = path.read_bytes()
    monkeypatch.setattr(databases, "_one_statement", lambda sql: sql)
    monkeypatch.chdir(tmp_path)
    for sql in (
        *("INSERT INTO records VALUES (1, 2, 'A', 'ill')", "DELETE FROM records", "CREATE TABLE x (y)"),
        *("PRAGMA query_only = OFF", "ATTACH 'other.db' AS other", "VACUUM INTO 'copy.db'", "COMMIT", "DETACH main"),
        *("CREATE TEMP TABLE x (y)", "REINDEX", "SAVEPOINT x", "ALTER TABLE records RENAME TO x"),
    ):
        assert "refuses the query" in refused(sqlite_query(path, sql)), sql
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.db"]


def test_query_that_reads_may_be_written_in_many_ways(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "a.db", content(20))
    (tmp_path / "q.sql").write_text(f"\ufeff-- all\n{SELECT};\n", encoding="utf-8")
    for sql in (
        *(f"{SELECT};", f"  {SELECT} -- the end", f"/* all */ {SELECT.lower()}", str(tmp_path / "q.sql")),
        *(f"WITH x AS ({SELECT}) SELECT * FROM x", "VALUES (1, 2)", f"{SELECT} UNION ALL {SELECT}"),
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 5) SELECT x FROM n",
    ):
        assert open_source(sqlite_query(path, sql), [], []).names


def test_values_keep_their_bits_and_their_kinds(tmp_path: Path) -> None:
    values = [1, 2**53 + 1, 0.1 + 0.2, 1e-300, -0.0, "x", " 7 ", None, ""]
    path = write_sqlite(tmp_path / "a.db", {"x": values})
    (_, batch) = open_source(sqlite_query(path, "SELECT x FROM records"), [], []).batches([0])
    assert batch[0].to_pylist() == [
        *("1", "9007199254740993", "0.30000000000000004", "1e-300", "-0.0", "x", " 7 ", None, "")
    ]


def test_names_that_several_columns_have(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "a.db", content())
    query = sqlite_query(path, "SELECT age, dose, ward, outcome, outcome FROM records")
    with pytest.raises(InputError, match="has 2 columns called 'outcome'; rename all but the one that is meant"):
        read_dataset(query, DATA, COLUMNS)


def test_invalid_value_is_located_in_the_result(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "a.db", {**content(), "dose": ["high" if row == 3 else row for row in range(60)]})
    with pytest.raises(InputError, match=r"the result of the query of .*a\.db, row 4, column 'dose': 'high' is not a"):
        read_dataset(sqlite_query(path), DATA, COLUMNS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a.db cannot be read (No such file or directory); name an SQLite file"),
        (b"age,dose\n1,2\n", "a.db is not an SQLite file; a query (--query) is for a database"),
        (databases.SQLITE_HEADER + bytes(50), "a.db refuses the query ("),
        (databases.SQLITE_HEADER + b"x" * 5000, "a.db refuses the query ("),
    ],
)
def test_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.db").write_bytes(content)
    assert message in refused(sqlite_query(tmp_path / "a.db"))


def test_path_with_other_characters(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "Ärzte & Co. #1? 50%.db", content())
    assert open_source(sqlite_query(path), [], []).names == ("age", "dose", "ward", "outcome")
    assert sqlite_query(path).title == str(path)


def test_database_that_is_being_written_is_read_as_it_was(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "a.db", content())
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("BEGIN")
        writer.execute("DELETE FROM records")
        assert sum(len(batch[0]) for batch in sqlite_query(path).table.batches([0])) == 60


# Addresses and passwords


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://reader:{PASSWORD}@db.example/hospital",
        f"postgresql://reader:@db.example/hospital?password={PASSWORD}",
        f"postgresql://reader@db.example/hospital?password={PASSWORD}",
        f"postgresql://reader@db.example/hospital?sslpassword={PASSWORD}",
        f"postgresql://reader@db.example/hospital?options=x&PASSWORD={PASSWORD}",
        f"postgresql://reader@db.example/hospital?%70assword={PASSWORD}",
        f"postgresql://reader%3A{PASSWORD}@db.example/hospital",
        f"postgresql://:{PASSWORD}@db.example/hospital",
        f"postgres://reader:{PASSWORD}@ss@db.example/hospital",
        f"postgresql+psycopg://reader:{PASSWORD}@db.example/hospital",
        f"mysql://reader:{PASSWORD}@db.example/hospital",
        f"jdbc:postgresql://db.example/hospital?user=reader&password={PASSWORD}",
        f"sqlite:///{PASSWORD}.db?password={PASSWORD}",
        f"host=db.example user=reader password={PASSWORD}",
        f"host=db.example user=reader password = '{PASSWORD}'",
        f"postgresql://[reader:{PASSWORD}@db.example/hospital",
        f"postgresql://reader@db.example:{PASSWORD}/hospital",
        f"postgresql://reader@db.example/hospital#{PASSWORD}",
        f"oracle://reader@db.example/hospital#{PASSWORD}",
        f"postgresql://reader@db.example/hospital?token={PASSWORD}",
    ],
)
@pytest.mark.parametrize("query", [None, SELECT])
def test_password_in_an_address_is_refused_and_not_repeated(address: str, query: str | None) -> None:
    with pytest.raises(InputError) as error:
        parse_source(address, query=query)
    message = str(error.value)
    assert PASSWORD not in message
    assert "t0p" not in message
    assert "secret" not in message


def test_message_about_a_password_has_the_remedy() -> None:
    with pytest.raises(InputError) as error:
        parse_source(f"postgresql://reader:{PASSWORD}@db.example/hospital", query=SELECT)
    assert "the address of the database has a password, which others on this machine see in the list of" in str(
        error.value
    )
    assert "change the password, write postgresql://USER@HOST/DATABASE, and state the new one as PGPASSWORD in" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("mysql://reader@db.example/hospital", "databases of the kind 'mysql' are not supported, because only for"),
        ("sqlite://records.db", "the address of an SQLite file is sqlite:///FILE"),
        ("sqlite:///records.db?mode=rwc", "the address of an SQLite file is sqlite:///FILE"),
        ("postgresql://reader@db.example/hospital?dbnam=x", "has the parameter 'dbnam', which is not supported"),
        (
            "postgresql://reader@db.example:70000/hospital",
            "the address of the database is not valid (Port out of range",
        ),
    ],
)
def test_other_addresses_are_refused(address: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_source(address, query=SELECT)
    assert message in str(error.value)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "a.db", content())
    with pytest.raises(InputError, match=r"db.example/hospital is a database; state with --query which records"):
        parse_source("postgresql://reader@db.example/hospital?sslmode=require")
    with pytest.raises(InputError, match="--sheet is for a workbook, and --query for a database"):
        parse_source(str(path), sheet="one", query=SELECT)
    with pytest.raises(InputError, match="--sheet is for a workbook, and --query for a database"):
        parse_source("sqlite:///a.db", sheet="one", query=SELECT)
    with pytest.raises(InputError, match=r"a\.db is an SQLite database; state with --query which records"):
        open_source(path, [], [])
    with pytest.raises(InputError, match="q.sql cannot be read"):
        parse_source(str(path), query=str(tmp_path / "q.sql"))
    (tmp_path / "q.sql").write_bytes(b"SELECT '\xff'")
    with pytest.raises(InputError, match="q.sql is not in UTF-8"):
        parse_source(str(path), query=str(tmp_path / "q.sql"))


@pytest.mark.parametrize(
    ("address", "encrypted"),
    [
        ("postgresql://reader@db.example/hospital", True),
        ("postgresql://db.example:5433/hospital?application_name=x%20y", True),
        ("postgresql:///hospital?host=db.example", True),
        ("postgresql:///hospital?host=/run/postgresql&hostaddr=10.0.0.7", True),
        ("postgresql://reader@db.example/hospital?sslmode=verify-full", False),
        ("postgresql://reader@db.example/hospital?sslmode=disable", False),
        ("postgresql://reader@localhost/hospital", False),
        ("postgresql://reader@127.0.0.1:5433/hospital", False),
        ("postgresql:///hospital?host=/run/postgresql", False),
        ("postgresql:///hospital", False),
    ],
)
def test_connection_over_a_network_is_encrypted(address: str, encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGSSLMODE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    assert ("sslmode=require" in _with_encryption(address)) == encrypted
    monkeypatch.setenv("PGHOST", "db.example")
    assert "sslmode=require" in _with_encryption("postgresql:///hospital")
    monkeypatch.setenv("PGSSLMODE", "prefer")
    assert "sslmode" not in _with_encryption("postgresql:///hospital")


# Records that change, or come in another order


def test_order_of_the_rows_makes_no_difference() -> None:
    frame, data = content(200), DATA
    made, _ = dataset_from_frame(frame, data, COLUMNS, target=True)
    random = np.random.default_rng(1)
    for _ in range(3):
        order = random.permutation(200)
        shuffled = {name: [values[place] for place in order] for name, values in frame.items()}
        other, _ = dataset_from_frame(shuffled, data, COLUMNS, target=True)
        assert same(in_fixed_order(made, data, COLUMNS), in_fixed_order(other, data, COLUMNS))
        assert digest(in_fixed_order(made, data, COLUMNS)) == digest(in_fixed_order(other, data, COLUMNS))
    places = in_fixed_order(made, data, COLUMNS).places
    assert places is not None
    assert sorted(places) == list(range(200))


@pytest.mark.parametrize(("column", "value"), [("age", 61.5), ("dose", None), ("ward", "C"), ("outcome", "well")])
def test_each_value_counts_in_the_digest(column: str, value: Any) -> None:
    frame = content(30)
    frame["outcome"][7] = "ill"
    changed = {**frame, column: [value if row == 7 else each for row, each in enumerate(frame[column])]}
    found = [
        digest(in_fixed_order(dataset_from_frame(each, DATA, COLUMNS, target=True)[0], DATA, COLUMNS))
        for each in (frame, changed)
    ]
    assert found[0] != found[1]


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.load(write_federation(tmp_path, ("ada", "bob", "cleo")))


def test_restart_with_rows_in_another_order_continues(tmp_path: Path, federation: Federation) -> None:
    path, frame = tmp_path / "a.db", content()
    write_sqlite(path, frame)
    first = TabularRun.prepare(federation, "ada", sqlite_query(path), tmp_path / "run")
    write_sqlite(path, {name: values[::-1] for name, values in frame.items()})
    again = TabularRun.prepare(federation, "ada", sqlite_query(path, f"{SELECT} ORDER BY dose"), tmp_path / "run")
    assert same(first.records, again.records)
    assert again.file == str(path)


def test_restart_with_other_records_is_refused(tmp_path: Path, federation: Federation) -> None:
    path, frame = tmp_path / "a.db", content()
    write_sqlite(path, frame)
    TabularRun.prepare(federation, "ada", sqlite_query(path), tmp_path / "run")
    assert json.loads((tmp_path / "run" / RECORDS_FILE).read_bytes())["records"] == 60
    write_sqlite(path, {**frame, "dose": [*frame["dose"][:-1], 0.5]})
    with pytest.raises(InputError) as error:
        TabularRun.prepare(federation, "ada", sqlite_query(path), tmp_path / "run")
    assert "gives other records than when this training began (60 then, 60 now)" in str(error.value)
    write_sqlite(path, {name: values[1:] for name, values in frame.items()})
    with pytest.raises(InputError, match=r"\(60 then, 59 now\)"):
        TabularRun.prepare(federation, "ada", sqlite_query(path), tmp_path / "run")
    (tmp_path / "run" / RECORDS_FILE).unlink()
    TabularRun.prepare(federation, "ada", sqlite_query(path), tmp_path / "run")


def test_privacy_budget_of_a_database_must_be_named(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, ("ada", "bob", "cleo"), schema=PRIVATE_SCHEMA))
    query = sqlite_query(write_sqlite(tmp_path / "a.db", content(200)))
    with pytest.raises(InputError, match="it has to be the same one for every query that gives records of the same"):
        read_inputs(federation, "ada", query, RunOptions())
    budget = tmp_path / "patients.budget"
    run = TabularRun.prepare(federation, "ada", query, tmp_path / "run", budget=budget)
    assert run.ledger is not None
    assert run.ledger.file is not None
    assert run.ledger.file.path == budget
