"""Records from a real PostgreSQL server, which the tests start if Debian's package is installed."""

from __future__ import annotations

import datetime
import logging
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from cgd import InputError
from cgd.federation.config import Federation
from cgd.federation.data_schema import parse_data
from cgd.federation.member import FederationMember
from cgd.tabular import databases
from cgd.tabular.databases import Query
from cgd.tabular.dataset import dataset_from_frame, read_dataset
from cgd.tabular.run import TabularRun
from cgd.tabular.sources import open_source
from support.databases import OWNER, Server, postgresql
from support.tabular import run_in_threads, table, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.reporting.run_file import AnyRun

pytestmark = pytest.mark.slow  # a server starts within a few seconds

PASSWORD = "hunter2 is not a password"
NAMES = ("ada", "bob", "cleo")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgresql() as made:
        rows = ", ".join(
            f"({age if age is not None else 'NULL'}, {dose!r}, '{ward}', '{outcome}')"
            for age, dose, ward, outcome in zip(*(table(60, 1)[name] for name in COLUMNS), strict=True)
        )
        made.run(
            f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'",
            "CREATE TABLE records (age float8, dose float8, ward text, outcome text)",
            f"INSERT INTO records VALUES {rows}",
            "CREATE TABLE many AS SELECT i AS x, repeat('y', 30) AS y FROM generate_series(1, 300000) AS i",
            "CREATE SEQUENCE visits",
            "CREATE FUNCTION add_record() RETURNS int LANGUAGE sql AS "
            "$$ INSERT INTO records VALUES (1, 1, 'A', 'ill') RETURNING 1 $$",
            "GRANT ALL ON ALL TABLES IN SCHEMA public TO reader",
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO reader",
            "GRANT CREATE ON SCHEMA public TO reader",
        )
        yield made


COLUMNS = ("age", "dose", "ward", "outcome")
SELECT = f"SELECT {', '.join(COLUMNS)} FROM records"


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PG"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)


def refused(server: Server, sql: str, user: str = "reader") -> str:
    with pytest.raises(InputError) as error:
        open_source(Query(server.address(user), sql), [], [])
    assert PASSWORD not in str(error.value)
    return str(error.value)


def test_values_of_each_type(server: Server) -> None:
    query = Query(
        server.address("reader"),
        "SELECT 1::smallint AS small, 2::int AS int, 2::bigint ^ 40 AS big, 0.1::numeric(10, 3) AS exact, "
        "0.5::float4 AS single, 0.1::float8 AS double, true AS truth, 'é'::text AS text, 'ab'::varchar(5) AS var, "
        "'c'::char(3) AS fixed, DATE '1969-12-31' AS day, TIMESTAMP '2020-02-29 23:59' AS moment, "
        "NULL::int AS nothing, '{\"a\": 1}'::jsonb AS js, "
        "'00000000-0000-0000-0000-0000000000ff'::uuid AS uuid, 'NaN'::numeric AS no_number",
    )
    (_, batch) = query.table.batches(range(len(query.table.names)))
    assert dict(zip(query.table.names, [each.to_pylist()[0] for each in batch], strict=True)) == {
        "small": 1,
        "int": 2,
        "big": 2.0**40,
        "exact": "0.100",
        "single": 0.5,
        "double": 0.1,
        "truth": True,
        "text": "é",
        "var": "ab",
        "fixed": "c  ",
        "day": datetime.date(1969, 12, 31),
        "js": '{"a": 1}',
        "moment": datetime.datetime(2020, 2, 29, 23, 59),
        "nothing": None,
        "no_number": "nan",
        "uuid": "00000000-0000-0000-0000-0000000000ff",
    }


def test_query_gives_the_records_of_the_same_table(server: Server) -> None:
    data = parse_data({"target": "outcome", "columns": {"age": "number", "dose": "number", "ward": "category"}})
    found, _ = read_dataset(Query(server.address("reader"), SELECT), data, data.columns)
    frame = {name: table(60, 1)[name] for name in COLUMNS}
    expected, _ = dataset_from_frame(frame, data, data.columns, target=True)
    for name in ("age", "dose"):
        assert np.array_equal(np.sort(found.numbers[name]), np.sort(expected.numbers[name]), equal_nan=True)
    assert found.categories["ward"].counts().sum() == 60


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("INSERT INTO records VALUES (1, 1, 'A', 'ill')", "begins with INSERT"),
        ("COPY records TO PROGRAM 'touch written'", "begins with COPY"),
        ("CALL something()", "begins with CALL"),
        ("DO $$ BEGIN DELETE FROM records; END $$", "begins with DO"),
        ("SET TRANSACTION READ WRITE", "begins with SET"),
        ("EXPLAIN ANALYZE DELETE FROM records", "begins with EXPLAIN"),
        ("SELECT 1; DELETE FROM records", "syntax error"),
        ("SELECT 1) AS records; DELETE FROM records; --", "syntax error"),
        (
            "SELECT 1) AS records; COMMIT; DELETE FROM records; SELECT * FROM (SELECT 1",
            "cannot insert multiple commands",
        ),
        ("SELECT 1) TO PROGRAM 'touch written' --", "subquery in FROM must have an alias"),
        ("SELECT * INTO copy FROM records", "SELECT ... INTO is not allowed here"),
        ("WITH x AS (DELETE FROM records RETURNING *) SELECT * FROM x", "data-modifying statement must be at the top"),
        ("SELECT nextval('visits')", "cannot execute nextval() in a read-only transaction"),
        ("SELECT setval('visits', 7)", "cannot execute setval() in a read-only transaction"),
        ("SELECT add_record()", "cannot execute INSERT in a read-only transaction"),
        ("SELECT set_config('transaction_read_only', 'off', false), add_record()", "must be set before any query"),
        ("SELECT * FROM records FOR UPDATE", "cannot execute SELECT FOR UPDATE in a read-only transaction"),
        ("SELECT pg_read_file('/etc/passwd')", "permission denied for function pg_read_file"),
        ("SELECT lo_export(1, '/tmp/written')", "permission denied"),
        ("SELECT 1 / (x - 200000) FROM many", "division by zero"),
        ("SELECT nothing FROM records", 'column "nothing" does not exist'),
        ("SELECT * FROM records WHERE age < 0", "has no rows; correct its conditions"),
        ("SELECT $1", "refuses the query"),
    ],
)
def test_query_that_does_not_read_is_refused(server: Server, sql: str, message: str) -> None:
    before = state(server)
    assert message in refused(server, sql)
    assert state(server) == before


def test_sql_without_the_first_check_cannot_write_either(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first word is for a clear message; the server refuses, whatever it is."""
    before = state(server)
    monkeypatch.setattr(databases, "_one_statement", lambda sql: sql)
    for sql in (
        *("INSERT INTO records VALUES (1, 1, 'A', 'ill')", "DELETE FROM records", "CREATE TABLE x (y int)"),
        *("DROP TABLE records", "TRUNCATE records", "COMMIT", "ROLLBACK; DELETE FROM records", "NOTIFY x"),
        *("COPY records TO PROGRAM 'touch written'", "COPY records FROM PROGRAM 'echo 1'", "SET ROLE owner"),
        "INSERT INTO records VALUES (1, 1, 'A', 'ill') RETURNING *",
    ):
        assert "refuses the query" in refused(server, sql), sql
    assert state(server) == before


def state(server: Server) -> list[Any]:
    """Return what a query may have changed: records, tables, the sequence and large objects."""
    return server.run(
        "SELECT (SELECT count(*) FROM records), (SELECT count(*) FROM pg_class), (SELECT last_value FROM visits), "
        "(SELECT is_called FROM visits), (SELECT count(*) FROM pg_largeobject_metadata)"
    )


def test_what_functions_may_still_do_is_rolled_back(server: Server) -> None:
    before = state(server)
    assert open_source(Query(server.address("reader"), "SELECT lo_create(0), pg_notify('x', 'y')"), [], []).names
    assert state(server) == before
    assert server.run("SELECT count(*) FROM pg_stat_activity WHERE usename = 'reader'") == [(0,)]


def test_powerful_accounts_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "is a superuser, or may run programs or write files at the server, and a query can do so by functions"
    for role in ("pg_execute_server_program", "pg_write_server_files"):
        server.run(f"GRANT {role} TO reader")
        try:
            assert message in refused(server, SELECT)
        finally:
            server.run(f"REVOKE {role} FROM reader")
    assert open_source(Query(server.address("reader"), SELECT), [], []).names == COLUMNS
    monkeypatch.setenv("PGPASSWORD", "of the owner")
    assert message in refused(server, SELECT, OWNER)


def test_large_result_is_read_in_batches_of_one_state(server: Server) -> None:
    query = Query(server.address("reader"), "SELECT x, y FROM many")
    server.run("DELETE FROM many WHERE x > 299000")
    made = query.table
    server.run("DELETE FROM many WHERE x > 298000")
    batches = [array for (array,) in made.batches([0])]
    assert len(batches) > 2
    assert sorted(pa.chunked_array(batches).to_pylist()) == list(range(1, 299001))
    again = [array for (array,) in made.batches([0])]
    assert pa.chunked_array(again) == pa.chunked_array(batches)


def test_times_with_a_time_zone_are_days_of_the_zone_of_the_schema(server: Server) -> None:
    query = Query(
        server.address("reader"), "SELECT TIMESTAMPTZ '2020-01-31 23:30+00' AS seen, DATE '2020-01-31' AS day, 'x' AS y"
    )
    columns = {"seen": {"type": "date", "time_zone": "Europe/Zurich"}, "day": "date"}
    data = parse_data({"target": "y", "columns": columns})
    found, _ = read_dataset(query, data, data.input_columns)
    assert found.numbers["seen days"] - found.numbers["day days"] == [1.0]
    data = parse_data({"target": "y", "columns": {"seen": "date"}})
    with pytest.raises(InputError, match="column 'seen' has times with a time zone, and the day depends on it"):
        read_dataset(query, data, data.input_columns)
    infinite = Query(server.address("reader"), "SELECT 'infinity'::date AS seen, 'x' AS y")
    with pytest.raises(InputError, match="row 1, column 'seen': it is infinite, or not in the years 1 to 9999"):
        read_dataset(infinite, data, data.input_columns)


# The password


def test_password_comes_from_the_environment_or_a_file(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGPASSWORD", "wrong")
    message = refused(server, SELECT)
    assert 'password authentication failed for user "reader"' in message
    assert "PGPASSWORD in the environment, or a line in ~/.pgpass" in message
    monkeypatch.delenv("PGPASSWORD")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no password supplied" in refused(server, SELECT)
    path = tmp_path / "passwords"
    path.write_text(f"*:*:postgres:reader:{PASSWORD}\n")
    path.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(path))
    assert open_source(Query(server.address("reader"), SELECT), [], []).names == COLUMNS
    monkeypatch.delenv("PGPASSFILE")
    assert open_source(Query(f"{server.address('reader')}&passfile={path}", SELECT), [], []).names == COLUMNS


def test_password_is_in_no_file_and_no_message_of_a_run(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    path = write_federation(tmp_path, NAMES, steps=5)
    federation = Federation.load(path)
    sources = {name: write_csv(tmp_path / f"{name}.csv", table(60, place)) for place, name in enumerate(NAMES)}
    sources["ada"] = Query(server.address("reader"), SELECT)  # type: ignore[assignment]

    def run(name: str) -> AnyRun:
        made = TabularRun.prepare(federation, name, sources[name], tmp_path / "runs" / name)
        with FederationMember(path, name, state=tmp_path / "state" / name, linger=10.0).peers as peers:
            return made.run(peers)

    finished = run_in_threads(run, NAMES)["ada"]
    assert finished.records is not None
    assert finished.records.file == "postgresql://reader@/postgres"
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert any(each.name == "run.json" for each in files)
    for each in files:
        assert PASSWORD.encode() not in each.read_bytes(), each
    assert PASSWORD not in caplog.text + "".join(capfd.readouterr())


def test_command_reads_from_a_server_and_its_arguments_have_no_password(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cgd", "schema", server.address("reader"), "--query", SELECT, "--label", "outcome"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert 'dose = "number"' in finished.stdout
    assert PASSWORD not in " ".join(command) + finished.stdout + finished.stderr
    address = server.address("reader").replace("@", ":x%20y@")
    refused_command = [address if each == command[4] else each for each in command]
    finished = subprocess.run(refused_command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert finished.returncode == 2
    assert "the address of the database has a password" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "x%20y" not in finished.stderr


@pytest.mark.parametrize(
    "sql", ["SELECT pg_sleep(600)", "SELECT x FROM generate_series(1, 10000000000) AS x WHERE x < 0"]
)
def test_interrupted_query_ends_at_once(server: Server, sql: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cgd", "schema", server.address("reader"), "--query", sql, "--label", "x"]
    running = (
        "SELECT count(*) FROM pg_stat_activity WHERE usename = 'reader' AND state = 'active' AND query LIKE 'COPY%'"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        while server.run(running) != [(1,)]:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
