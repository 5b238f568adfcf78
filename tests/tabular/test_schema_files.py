"""Files for which `cgd schema` used to suggest something wrong, silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cgd import InputError
from cgd.cli import app
from cgd.federation.data_schema import parse_schema
from cgd.tabular.dataset import read_dataset
from cgd.tabular.schema import suggest_schema
from support.federation_files import text
from support.tabular import table, write_csv, write_federation

GERMAN = "age;chol;sex;num\n63,5;233,25;m;0\n41;;f;1\nn.a.;1,2e2;m;0\n" + "".join(
    f"{40 + year},25;{200 + year};{'mf'[year % 2]};{year % 2}\n" for year in range(12)
)
HINT = (
    "is not a number; write decimals with a point, as in 1.5, or add --decimal ','. (If it is text and no number, add "
    "--decimal '.')"
)


def written(folder: Path, content: str) -> Path:
    path = folder / "german.csv"
    path.write_text(content)
    return path


def cgd(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_decimal_commas_are_refused_with_the_place_and_the_remedy(tmp_path: Path) -> None:
    path = written(tmp_path, GERMAN)
    with pytest.raises(InputError) as error:
        suggest_schema(path, "num")
    assert str(error.value) == f"{path}, line 2, column 'age': '63,5' {HINT}"
    rare = "\n".join(["age;num", *(f"{year};{year % 2}" for year in range(30, 80)), "63,5;1", ""])
    with pytest.raises(InputError, match=r"line 52, column 'age': '63,5' is not a number"):
        suggest_schema(written(tmp_path, rare), "num")
    quoted = GERMAN.replace(",", "§").replace(";", ",").replace("63§5", '"63,5"').replace("§", ".")
    with pytest.raises(InputError, match=r"line 2, column 'age': '63,5' is not a number"):
        suggest_schema(written(tmp_path, quoted), "num")


def test_target_with_decimal_commas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column 'chol': '233,25' is not a number"):
        suggest_schema(written(tmp_path, GERMAN.replace("63,5", "63").replace(",25;2", ";2")), "chol")


def test_numbers_with_decimal_commas_are_suggested_as_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, GERMAN)
    data, _, _ = parse_schema(suggest_schema(path, "num", decimal=","))
    assert [(each.name, each.type) for each in data.columns] == [
        ("age", "number"), ("chol", "number"), ("sex", "category"),
    ]  # fmt: skip
    records = read_dataset(path, data, data.columns, decimal=",")[0]
    assert records.numbers["chol"][0] == 233.25


def test_texts_with_commas_are_categories_if_the_owner_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, GERMAN)
    data, _, _ = parse_schema(suggest_schema(path, "num", decimal="."))
    assert {each.name: each.type for each in data.columns}["sex"] == "category"
    words = written(tmp_path, "stage;num\n" + "1,a;0\n1,b;1\n" * 5)  # no numbers at all
    assert 'stage = "category"' in suggest_schema(words, "num")


def test_option_of_the_commands(tmp_path: Path) -> None:
    path = written(tmp_path, GERMAN)
    assert HINT in str(cgd("schema", path, "--label", "num").exception)
    result = cgd("schema", path, "--label", "num", "--decimal", ",")
    assert result.exit_code == 0
    assert 'age = "number"' in result.output
    assert "the decimal sign is ';'" in str(cgd("schema", path, "--label", "num", "--decimal", ";").exception)


def test_suggestions_are_joined_by_the_command(tmp_path: Path) -> None:
    files = []
    for seed in range(3):
        csv = write_csv(tmp_path / f"{seed}.csv", table(40, seed))
        files.append(tmp_path / f"{seed}.toml")
        files[-1].write_text(cgd("schema", csv, "--label", "outcome").output)
    result = cgd("schema", "--merge", *files)
    assert result.exit_code == 0
    (tmp_path / "joined.toml").write_text(result.output)
    write_federation(tmp_path, ("ada", "bob", "cleo"), schema=result.output)  # as `cgd federation new --schema`
    assert "--merge has no other options" in str(cgd("schema", "--merge", *files, "--private").exception)
    assert "2 files are named; name one with records, or add --merge" in str(
        cgd("schema", *files[:2], "--label", "a").exception
    )
    assert "--label is missing" in str(cgd("schema", tmp_path / "0.csv").exception)


def test_nested_columns_come_with_advice(tmp_path: Path) -> None:
    rows = 12
    content = pa.table(
        {
            "labs": [{"chol": 233.0, "crp": 1.0}] * rows,
            "pulses": [[60, 70]] * rows,
            "codes": pa.array([[("I20", 1)]] * rows, pa.map_(pa.string(), pa.int64())),
            "scan": [b"\x00\xff"] * rows,
            "age": [*range(40, 39 + rows), 40],
            "num": [0, 1] * (rows // 2),
        }
    )
    path = tmp_path / "nested.parquet"
    pq.write_table(content, path)
    text = suggest_schema(path, "num")
    start = "left out, its type is neither number nor text: export"
    assert f"# labs: {start} each of its fields as a column, as `flatten` of an Arrow table does" in text
    assert f"# pulses: {start} each element that you need as a column, or their number, mean or largest value" in text
    assert f"# codes: {start} the value of each key that you need as a column" in text
    assert f"# scan: {start} it as text or as numbers" in text
    pq.write_table(content.flatten(), path)  # the advice helps
    assert '"labs.chol"' in suggest_schema(path, "num")


def test_nested_column_is_not_recommended_as_a_category(tmp_path: Path) -> None:
    path = tmp_path / "nested.parquet"
    pq.write_table(pa.table({"labs": [{"chol": 233.0}] * 12, "num": [0, 1] * 6}), path)
    for kind in ("number", "category"):
        data, _, _ = parse_schema(
            f'[data]\ntarget = "num"\n[data.columns]\nlabs = "{kind}"\n[model]\nkind = "logistic"'
        )
        with pytest.raises(InputError, match=r"as `flatten` of an Arrow table does, or leave the column out$"):
            read_dataset(path, data, data.columns)


def test_program_of_the_page_flattens_nested_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "tables.md").read_text()
    section = page.partition("### Nested columns of Parquet files")[2]
    program = section.partition("```python\n")[2].partition("```")[0]
    rows, kind = range(20), pa.map_(pa.string(), pa.int64())
    content = {
        "labs": [{"chol": 200.5 + row % 7, "renal": {"crea": row % 9 / 4}} if row % 5 else None for row in rows],
        "pulses": [[66.5 + row % 11, 70] if row % 4 else [] if row % 8 else None for row in rows],
        "scores": pa.array([[("pain", row % 11)] if row % 3 else None for row in rows], kind),
        "num": [0, 1] * 10,
    }
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(content), "nested.parquet")
    exec(program, {})
    text = suggest_schema("flat.parquet", "num")
    data, _, _ = parse_schema(text)
    assert data.names == ("labs.chol", "labs.renal.crea", "highest_pulse", "pain")
    records = read_dataset("flat.parquet", data, data.columns)[0]
    assert np.isnan(records.numbers["labs.chol"][0])
    assert records.numbers["highest_pulse"][1] == 70
    assert records.numbers["pain"][4] == 4


def test_dates_read_as_decimals_are_not_suggested_as_a_number(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    days, months = random.integers(1, 29, 40), random.integers(1, 13, 40)
    lines = [f"{day}.{month:02},{day % 2}" for day, month in zip(days, months, strict=True)]
    rows = (f"{each},{place % 37}" for place, each in enumerate(lines))
    path = written(tmp_path, "\n".join(["admission,num,age", *rows, ""]))
    assert (
        "# admission: left out, all values are as days and months, such as 12.05: dates that were read as decimals?"
        in suggest_schema(path, "num")
    )


def test_addresses_are_whole_in_a_pipe(tmp_path: Path) -> None:
    address = f"tcp://{'a-very-long-name.' * 8}example:7001"
    path = tmp_path / "federation.toml"
    path.write_text(text().replace("tcp://bob.example:7001", address))
    assert address in cgd("federation", "show", path).output


TABLE = [f"{30 + place % 13};{'mf'[place % 2]};{place % 2}" for place in range(20)]


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "\ufeffsep=;", "SEP=;", "\nsep=;"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_first_line_that_states_the_delimiter_is_honoured(tmp_path: Path, first: str, end: str) -> None:
    path = tmp_path / "excel.csv"
    path.write_bytes(end.join([first, "age, mean;sex;num", *TABLE, ""]).encode())
    data, _, _ = parse_schema(suggest_schema(path, "num"))
    assert data.names == ("age, mean", "sex")
    assert read_dataset(path, data, data.columns)[0].rows == 20
    path.write_bytes(end.join([first, "age, mean;sex;num", *TABLE, "old;m;0", ""]).encode())
    line = 23 + first.startswith("\n")
    with pytest.raises(InputError, match=f"line {line}, column 'age, mean': 'old' is not a number"):
        read_dataset(path, data, data.columns)
    path.write_bytes(end.join([first, "age, mean;sex;num", *TABLE, "1;2", ""]).encode())
    with pytest.raises(InputError, match=f"line {line}: it has 2 fields, but the header has 3"):
        read_dataset(path, data, data.columns)


@pytest.mark.parametrize("delimiter", [",", "\t", "|"])
def test_every_delimiter_can_be_stated(tmp_path: Path, delimiter: str) -> None:
    rows = (row.replace(";", delimiter) for row in TABLE)
    path = written(tmp_path, "\n".join([f"sep={delimiter}", f"a;b;c{delimiter}sex{delimiter}num", *rows, ""]))
    assert parse_schema(suggest_schema(path, "num"))[0].names == ("a;b;c", "sex")


def test_stated_delimiter_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(["sep=^", "age^num", "1^2", ""]))
    with pytest.raises(InputError) as error:
        suggest_schema(path, "num")
    assert str(error.value) == (
        f"{path}, line 1: it states that '^' separates the fields; export it with commas, semicolons, tabs or vertical "
        "bars"
    )
    with pytest.raises(InputError, match="has blank lines only"):
        suggest_schema(written(tmp_path, "sep=;\n\n"), "num")


def test_delimiter_at_the_end_of_lines_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(["age;sex;num", *(f"{row};" for row in TABLE), ""]))
    with pytest.raises(InputError) as error:
        suggest_schema(path, "num")
    assert str(error.value) == (
        f"{path}, line 2: it has 4 fields, but the header has 3; the line ends with a delimiter (';'), and the header "
        "does not: add one to the header, too, or remove those of the lines"
    )
    path = written(tmp_path, "\n".join(["age;sex;num;", *TABLE, ""]))
    with pytest.raises(InputError) as error:
        suggest_schema(path, "num")
    assert str(error.value).endswith(
        "the header ends with a delimiter (';'), and the line does not: remove that of the header"
    )
    path = written(tmp_path, "\n".join(["age;sex;num;", *(f"{row};" for row in TABLE), ""]))
    assert parse_schema(suggest_schema(path, "num"))[0].names == ("age", "sex")


def test_title_above_the_header_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(["Report of 2023", "", "age;sex;num", *TABLE, ""]))
    with pytest.raises(InputError, match=r"Its header is Report of 2023 \(the header must be the first line: remove "):
        suggest_schema(path, "num")
