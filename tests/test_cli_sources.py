"""The commands for tables with records from workbooks and databases."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cgd import extras
from cgd.audit.own_table import OwnTable
from cgd.audit.sources import plan_for
from cgd.errors import InputError
from cgd.local import solo_peers
from cgd.tabular.model import ConfinedModel
from cgd.tabular.sources import parse_source
from cgd.tabular.training import train
from support import own_tables
from support.databases import write_sqlite
from support.private_tables import PRIVATE_SCHEMA
from support.tabular import records, table, tabular_settings, write_csv, write_federation
from support.workbooks import write_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAMES = ("ada", "bob", "cleo")
COLUMNS = ("age", "dose", "ward", "outcome")
SELECT = f"SELECT {', '.join(COLUMNS)} FROM records"


@pytest.fixture
def command(command: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """Run a command; return its exit code, standard output, and standard error as one line."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code, out, err = command(*arguments)
        return code, out, " ".join(err.split())

    return run


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, tuple[str, ...]]:
    """Write the same records as a CSV file, a workbook and a database; return the arguments that name them."""
    content = {name: values for name, values in table(60, 1).items() if name in COLUMNS}
    content["dose"] = [round(value, 9) for value in content["dose"]]
    content["age"] = [None if value is None else round(value, 9) for value in content["age"]]
    write_csv(tmp_path / "a.csv", content)
    write_table(tmp_path / "a.xlsx", {name: content[name] for name in COLUMNS})
    write_sqlite(tmp_path / "a.db", content)
    (tmp_path / "all.sql").write_text(f"{SELECT};\n")
    return {
        "csv": ("a.csv",),
        "xlsx": ("a.xlsx", "--sheet", "Sheet1"),
        "database": ("sqlite:///a.db", "--query", SELECT),
        "file of a database": ("a.db", "--query", "all.sql"),
    }


def test_each_source_gives_the_same_suggestion(command: Any, sources: dict[str, tuple[str, ...]]) -> None:
    texts = {name: command("schema", *arguments, "--label", "outcome") for name, arguments in sources.items()}
    assert all(code == 0 for code, _, _ in texts.values()), texts
    assert len({out for _, out, _ in texts.values()}) == 1


def test_each_source_gives_the_same_predictions(
    command: Any, sources: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    settings = tabular_settings(steps=10)
    made = train(solo_peers(b"s" * 32), settings, records(table(60, 1)))
    origin = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}
    ConfinedModel.from_training(made, settings, origin).save(tmp_path / "run")
    found = {name: command("predict", "run", "--data", *arguments) for name, arguments in sources.items()}
    assert all(code == 0 for code, _, _ in found.values()), found
    assert len({(out, err) for _, out, err in found.values()}) == 1
    assert "accuracy" in found["database"][2]


def test_each_source_is_checked_without_connecting(
    command: Any, sources: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    federation = write_federation(tmp_path, NAMES)
    for name, arguments in sources.items():
        code, out, err = command("join", federation, "--as", "ada", "--data", *arguments, "--dry-run")
        assert code == 0, err
        assert f"60 records of {'a.db' if 'database' in name else arguments[0]}" in out
    assert not (tmp_path / "runs").exists()


def test_missing_extras_are_named(
    command: Any, sources: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite needs none."""
    for extra in ("xlsx", "postgresql"):
        monkeypatch.setitem(extras.EXTRAS, extra, ("no_such_module",))
    for address, extra in ((("a.xlsx",), "xlsx"), (("postgresql:///x", "--query", "SELECT 1"), "postgresql")):
        code, _, err = command("schema", *address, "--label", "outcome")
        assert code == 2
        assert f"needs no_such_module, which is not installed; pip install 'cgd[{extra}]'" in err
    assert command("schema", *sources["database"], "--label", "outcome")[0] == 0


def test_options_that_do_not_fit_are_refused(command: Any, sources: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    federation = write_federation(tmp_path, NAMES)
    join = ("join", federation, "--as", "ada", "--dry-run", "--data")
    assert "a.csv is not an Excel workbook (.xlsx), which --sheet is for" in command(*join, "a.csv", "--sheet", "x")[2]
    assert (
        "a.csv is not an SQLite file; a query (--query) is for a data" in command(*join, "a.csv", "--query", SELECT)[2]
    )
    assert "a.db is an SQLite database; state with --query which records" in command(*join, "a.db")[2]
    err = command("join", federation, "--as", "ada", "--run", "train:main", "--query", SELECT)[2]
    assert "--decimal, --sheet, --query, --keep" in err
    assert "--merge has no other options" in command("schema", "--merge", "a.toml", "b.toml", "--sheet", "x")[2]
    for arguments in (
        *(("schema", "ADDRESS", "--label", "y"), ("predict", "run", "--data", "ADDRESS"), (*join, "ADDRESS")),
        *(("audit", "ADDRESS"), ("audit", "ADDRESS", "--federation", federation), ("audit", "x", "ADDRESS")),
    ):
        for query in ((), ("--query", SELECT)):
            address = "postgresql://reader:t0psecret@db.example/hospital"
            made = [address if each == "ADDRESS" else each for each in arguments]
            code, out, err = command(*made, *query)
            assert code == 2
            assert "t0psecret" not in out + err
            assert "the address of the database has a password" in err or arguments[0] == "predict"


def test_budget_of_a_database_must_be_named(command: Any, sources: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    federation = write_federation(tmp_path, NAMES, schema=PRIVATE_SCHEMA)
    join = ("join", federation, "--as", "ada", "--dry-run", "--data", *sources["database"])
    code, _, err = command(*join)
    assert code == 2
    assert "the records of a.db need a privacy budget, and it has to be the same one for every query that gives" in err
    code, out, _ = command(*join, "--budget", "patients.budget")
    assert code == 0
    assert "patients.budget would be created: the privacy budget of these records" in out
    code, out, _ = command("join", federation, "--as", "ada", "--dry-run", "--data", *sources["xlsx"])
    assert code == 0
    assert "a.xlsx.budget would be created" in out


def test_dry_run_with_other_records_than_before_is_refused(
    command: Any, sources: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    federation = write_federation(tmp_path, NAMES)
    join = ("join", federation, "--as", "ada", "--dry-run", "--data", *sources["database"])
    (tmp_path / "runs" / "ada").mkdir(parents=True)
    known = {"format": "cgd records 1", "records": 61, "sha256": "0" * 64}
    (tmp_path / "runs" / "ada" / "records.json").write_text(json.dumps(known))
    code, _, err = command(*join)
    assert code == 2
    assert "gives other records than when this training began (61 then, 60 now)" in err


def test_audit_of_a_database_and_of_a_workbook(tmp_path: Path) -> None:
    content = {name: values for name, values in _own_columns(own_tables.write_table(tmp_path)).items() if name}
    write_sqlite(tmp_path / "my.db", content)
    write_table(tmp_path / "my.xlsx", content)
    federation = own_tables.write_federation(tmp_path)
    sql = f"SELECT {', '.join(content)} FROM records"
    for arguments, options in (([tmp_path / "my.db"], {"query": sql}), ([tmp_path / "my.xlsx"], {"sheet": "Sheet1"})):
        plan = plan_for(arguments, federation=federation, **options)  # type: ignore[arg-type]
        assert plan.source.name == str(tmp_path / "my.db") or plan.source.name == "my.xlsx"
        assert plan.source.about.startswith("The other participants are made from the same table")
        assert sql in plan.arguments or "Sheet1" in plan.arguments
    query = parse_source(str(tmp_path / "my.db"), query=sql)
    one = OwnTable.read(query, federation, None, None)
    reverse = parse_source(str(tmp_path / "my.db"), query=f"{sql} ORDER BY value_1 DESC")
    other = OwnTable.read(reverse, federation, None, None)
    assert all((one.records.numbers[name] == other.records.numbers[name]).all() for name in one.records.numbers)
    with pytest.raises(InputError, match="--query is 'SELECT 1'; it is for a table"):
        plan_for([], query="SELECT 1")


def _own_columns(path: Path) -> dict[str, list[Any]]:
    header, *rows = (line.split(",") for line in path.read_text().splitlines())
    return {
        name: [float(row[place]) if name.startswith("value") else row[place] for row in rows]
        for place, name in enumerate(header)
    }
