"""Errors about a data file: fact, value and remedy, before anything is sent."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cgd import InputError
from cgd.federation.data_schema import Column, Data
from cgd.tabular import readers
from cgd.tabular.dataset import dataset_from_frame, read_dataset

AGE, WARD = Column("age", "number"), Column("ward", "category")
DATA = Data("outcome", (AGE, WARD))
HEADER = "age,ward,outcome\n"


def refused(path: Path, data: Data = DATA, label: str | None = None, **options: Any) -> str:
    """Return the message, without the path."""
    with pytest.raises(InputError) as error:
        read_dataset(path, data, data.columns, label=label, **options)
    assert type(error.value) is InputError
    assert str(path) in str(error.value) or "[data]" in str(error.value) or "label" in str(error.value)
    return str(error.value).replace(str(path), "FILE")


def refused_text(folder: Path, text: str | bytes, data: Data = DATA, **options: Any) -> str:
    path = folder / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return refused(path, data, **options)


def refused_frame(frame: Any, data: Data = DATA, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        dataset_from_frame(frame, data, data.columns, **options)
    return str(error.value)


# The file


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing.csv") == (
        "FILE cannot be read (No such file or directory); name a CSV or Parquet file"
    )
    assert refused(tmp_path) == "FILE is a folder; name a CSV or Parquet file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "FILE is empty; name a CSV file with a header and a row for every record, or a Parquet file"),
        (b"\n\r\n \n", "FILE has blank lines only; a CSV file needs a header and a row for every record"),
        (b"age,ward,outcome", "FILE has a header and no rows; export it with its records"),
        (b"age,ward,outcome\r\n\r\n", "FILE has a header and no rows; export it with its records"),
        (HEADER.encode("utf-16"), "FILE is text in UTF-16; save it as CSV (UTF-8)"),
        (
            b"PK\x03\x04....",
            "FILE is a zip archive, and no Excel workbook (.xlsx); save the sheet as .xlsx or CSV (UTF",
        ),
        (
            b"# The private keys of ada. Any\nsecret = ...",
            "FILE is a private key file of cgd; name a CSV or Parquet fil",
        ),
        (b'name = "ada"\nsecret = "x"\n', "FILE is a private key file of cgd; name a CSV or Parquet file with your"),
        (b"# The public key of ada, which", "FILE is a public key file of cgd; name a CSV or Parquet file with your"),
        (b'\xa8\1\0\0\0\0\0\0{"weight', "FILE is a model of cgd, or another file of tensors; name a CSV or"),
        (b"\xfd7zXZ\0....", "FILE is compressed by xz; decompress it, or use gzip"),
        (b"age,ward,\xe4\n1,A,yes\n", "FILE, line 1: it is not in UTF-8 (perhaps in Latin-1 or Windows-1252)"),
        (b"age,ward,outcome\n1,A,yes\n2,\xe4,no\n", "FILE, line 3: it is not in UTF-8"),
        (b"age,ward,outcome\n1,A,yes\n2,B,\xe4\n", "FILE, line 3: it is not in UTF-8"),
        (b"x" * 200_000 + b"\n1\n", "FILE, line 1: a quote is not closed, or a field is too long"),
    ],
)
def test_file_that_is_not_csv_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    assert refused_text(tmp_path, content).startswith(message)


@pytest.mark.parametrize("cut", [30, -5])
def test_truncated_gzip_file_is_refused(tmp_path: Path, cut: int) -> None:
    rows = "".join(f"{number},A,yes\n" for number in np.random.default_rng(0).random(1000))
    message = refused_text(tmp_path, gzip.compress((HEADER + rows).encode())[:cut])
    assert message.startswith("FILE is damaged (")
    assert message.endswith("); copy or export it again")


def test_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"{number},A,yes\n" for number in np.random.default_rng(0).random(1000))
    raw = bytearray(gzip.compress((HEADER + rows).encode()))
    raw[len(raw) // 2 : len(raw) // 2 + 40] = bytes(40)
    assert re.match("FILE(, line [0-9]+|.* is damaged)", refused_text(tmp_path, bytes(raw)))


@pytest.mark.parametrize("content", [b"age,ward,outcome\n1,A,yes\n", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_file_that_is_not_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.parquet"
    path.write_bytes(content)
    assert re.match(
        "FILE is not a Parquet file, (although its name says so|or is damaged).*; export it again", refused(path)
    )


def test_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"age": np.arange(1000.0), "ward": ["a"] * 1000, "outcome": ["b"] * 1000}), path)
    raw = bytearray(path.read_bytes())
    raw[10:60] = bytes(50)
    path.write_bytes(raw)
    assert refused(path).startswith("FILE is not a Parquet file, or is damaged")


def test_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in HEADER.strip().split(",")}), tmp_path / "t")
    assert refused(tmp_path / "t") == "FILE has no rows; export it with its records"


@pytest.mark.parametrize("frame", [3, {"age": 3}, {"age": [1], "ward": [1, 2]}, object()])
def test_object_that_is_not_a_table_is_refused(frame: Any) -> None:
    assert "is not a table" in refused_frame(frame)


def test_table_without_columns_is_refused() -> None:
    assert refused_frame(pa.table({})) == "the table has no columns; export it again, with a column for each property"


# The header


def test_missing_column_is_named(tmp_path: Path) -> None:
    assert refused_text(tmp_path, "Age,ward,outcome\n1,A,yes\n") == (
        "FILE has no column 'age' (did you mean 'Age'?); rename the column that is meant, or add an empty one for what "
        "you do not measure. Its header is Age, ward, outcome"
    )


def test_all_missing_columns_are_named_at_once(tmp_path: Path) -> None:
    columns = (*DATA.columns, Column("systolic_bp", "number"), Column("crp", "number"))
    message = refused_text(tmp_path, "AGE,ward,Systolic BP\n1,A,120\n", Data("outcome", columns, id="id"), ids=True)
    assert message == (
        "FILE has no columns 'age' (did you mean 'AGE'?), 'systolic_bp' (did you mean 'Systolic BP'?), 'crp', "
        "'outcome', 'id'; rename the columns that are meant, or add an empty one for what you do not measure; name the "
        "column to predict with --label. Its header is AGE, ward, Systolic BP"
    )


def test_column_of_ids_cannot_be_added_empty(tmp_path: Path) -> None:
    message = refused_text(tmp_path, "age,ward,outcome\n1,A,yes\n", Data("outcome", DATA.columns, id="id"), ids=True)
    assert "'id'; rename the column that is meant. Its" in message


def test_missing_label_is_named(tmp_path: Path) -> None:
    text = "age,ward,result\n1,A,yes\n"
    assert refused_text(tmp_path, text).startswith(
        "FILE has no column 'outcome'; name the column to predict with --label"
    )
    assert "'resutl' (did you mean 'result'?); name the column" in refused_text(tmp_path, text, label="resutl")
    assert refused_text(tmp_path, text, label="age") == (
        "the label is 'age', which is a column to predict from; name another label"
    )


def test_file_without_a_header_is_refused(tmp_path: Path) -> None:
    assert "Its header is 39, State-gov, <=50K" in refused_text(tmp_path, "39,State-gov,<=50K\n50,Private,>50K\n")


@pytest.mark.parametrize("header", ["age,ward,ward,outcome", "age, ward ,ward,outcome"])
def test_duplicate_column_is_refused(tmp_path: Path, header: str) -> None:
    assert refused_text(tmp_path, f"{header}\n1,A,B,yes\n") == (
        "FILE has 2 columns called 'ward'; rename all but the one that is meant"
    )


def test_duplicate_parquet_column_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array(["a"])], ["age", "age", "outcome"])
    pq.write_table(table, tmp_path / "t")
    assert "2 columns called 'age'" in refused(tmp_path / "t", Data("outcome", (AGE,)))


# The rows


@pytest.mark.parametrize(
    ("line", "fields"), [("2,B", "2 fields"), ("2", "1 field"), ("2,B,no,", "4 fields"), ("2,5,B,no", "4 fields")]
)
def test_row_of_another_length_is_located(tmp_path: Path, line: str, fields: str) -> None:
    message = refused_text(tmp_path, f"{HEADER}1,A,yes\n\n{line}\n3,C,yes\n")
    assert message == (
        f"FILE, line 4: it has {fields}, but the header has 3; correct it: is a text with a delimiter (',') not in "
        "quotes?"
    )


def test_row_of_another_length_late_in_a_file_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)
    assert "line 302: it has 2 fields" in refused_text(tmp_path, HEADER + "1,A,yes\n" * 300 + "1,A\n")


@pytest.mark.parametrize(
    "text",
    [
        HEADER + '1,A,yes\n2,"B,no\n3,C,yes\n',
        HEADER.replace("ward", "note,ward") + '1,,A,yes\n2,"B,C,no\n3,,C,yes\n',
        # The last column is not read, and Arrow would report no error.
        HEADER.replace("\n", ",note\n") + '1,A,yes,\n2,B,no,"\n3,C,yes,\n',
    ],
)
def test_unclosed_quote_is_located(tmp_path: Path, text: str) -> None:
    message = refused_text(tmp_path, text)
    assert "FILE, line 3: " in message
    assert "quote is not closed" in message


def test_quote_inside_a_text_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(HEADER + '1,5" pipe,yes\n2,B,no\n')
    assert read_dataset(path, DATA, DATA.columns, label=None)[0].categories["ward"].names == ('5" pipe', "B")


def test_endless_line_is_refused(tmp_path: Path) -> None:
    text = HEADER + "1,A,yes\n" + "2," + "x" * (5 << 20) + ",no\n"
    assert refused_text(tmp_path, text) == (
        "FILE, line 3: a quote is not closed, or a field is too long; correct it there"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("old", "'old' is not a number; correct it, list it as missing in [data], or make the column a category"),
        ('"1,5"', "'1,5' is not a number; write decimals with a point, as in 1.5"),
        ('"1,234"', "'1,234' is not a number; write it without thousands separators, and decimals with a point"),
        ('"1,234,567.8"', "'1,234,567.8' is not a number; write it without thousands separators"),
        ("1.234.567", "'1.234.567' is not a number; write it without thousands separators"),
        ("1'234", '"1\'234" is not a number; write it without thousands separators'),
        ("12 345", "'12 345' is not a number; write it without thousands separators"),
        ("41 years", "'41 years' is not a number; correct it"),
        ("0x1F", "'0x1F' is not a number; correct it"),
        ("٤", "'٤' is not a number; correct it"),
        ("x" * 100, f"'{'x' * 37}… is not a number; correct it"),
        ("inf", "'inf' is infinite; correct it; if it stands for a missing value, list it as missing in [data]"),
        (" -Infinity", "' -Infinity' is infinite"),
        ("1e999", "'1e999' is infinite"),
        ("1e30", "'1e30' is beyond ±1e+24; correct it"),
    ],
)
def test_text_in_a_number_column_is_located(tmp_path: Path, value: str, message: str) -> None:
    found = refused_text(tmp_path, f"{HEADER}1,A,yes\n,A,yes\n{value},B,no\n4,C,yes\n")
    assert found.startswith(f"FILE, line 4, column 'age': {message}")


def test_text_in_a_parquet_number_column_is_located(tmp_path: Path) -> None:
    pq.write_table(pa.table({"age": ["1", "x"], "ward": ["a", "b"], "outcome": ["a", "b"]}), tmp_path / "t")
    assert refused(tmp_path / "t").startswith("FILE, row 2, column 'age': 'x' is not a number")
    pq.write_table(pa.table({"age": [1, -np.inf], "ward": ["a", "b"], "outcome": ["a", "b"]}), tmp_path / "t")
    assert refused(tmp_path / "t").startswith("FILE, row 2, column 'age': -inf is infinite")


def test_text_among_numeric_labels_is_located(tmp_path: Path) -> None:
    data = Data("outcome", (AGE,), task="regression")
    assert refused_text(tmp_path, "age,outcome\n1,2\n2,high\n", data).startswith(
        "FILE, line 3, column 'outcome': 'high' is not a number"
    )


@pytest.mark.parametrize(
    "array",
    [pa.array([[1], [2]]), pa.array([{"a": 1}, {"a": 2}]), pa.array([b"a", b"b"])],
    ids=["list", "struct", "binary"],
)
def test_unsupported_types_are_refused(tmp_path: Path, array: pa.Array) -> None:
    plain = {"age": [1, 2], "ward": ["a", "b"], "outcome": ["a", "b"]}
    pq.write_table(pa.table({**plain, "age": array}), tmp_path / "age")
    assert re.search("column 'age' is of type .*, and a number is needed", refused(tmp_path / "age"))
    pq.write_table(pa.table({**plain, "ward": array}), tmp_path / "ward")
    assert re.search("column 'ward' is of type .*, which is not a category", refused(tmp_path / "ward"))


def test_date_in_a_number_column_is_refused() -> None:
    frame = {"age": pa.array([0], pa.timestamp("s")), "ward": ["a"]}
    assert "column 'age' is of type timestamp[s], and a number is needed; convert it" in refused_frame(frame)


def test_too_long_category_is_located(tmp_path: Path) -> None:
    message = refused_text(tmp_path, f"{HEADER}1,A,yes\n2,{'ä' * 50},no\n")
    assert message == (
        "FILE, line 3, column 'ward': the category 'ääääääääääääääääääää'… has 100 bytes, and 90 is the most; "
        "shorten it, or leave the column out"
    )


def test_too_many_categories_are_refused(tmp_path: Path) -> None:
    rows = [f"{number},W{number},yes\n" for number in range(1001)]
    assert refused_text(tmp_path, HEADER + "".join(rows)) == (
        "FILE: column 'ward' has more than 1000 different values; is it an ID or free text? "
        "Leave it out of [data.columns], group its values, or make it a number"
    )
    path = tmp_path / "table.csv"
    path.write_text(HEADER + "".join(rows[:1000]))
    assert len(read_dataset(path, DATA, DATA.columns, label=None)[0].categories["ward"].names) == 1000


def test_too_many_classes_are_refused(tmp_path: Path) -> None:
    rows = "".join(f"1,A,{number}.5\n" for number in range(1001))
    assert (
        "column 'outcome' has more than 200 different values; is it a number to predict? Write task = 'regression'"
        in (refused_text(tmp_path, HEADER + rows))
    )


def test_unlisted_class_is_located(tmp_path: Path) -> None:
    data = Data("outcome", (AGE, WARD), classes=("yes", "no"))
    assert refused_text(tmp_path, f"{HEADER}1,A,yes\n2,B,NA\n3,B,yess\n", data) == (
        "FILE, line 4, column 'outcome': 'yess' (did you mean 'yes'?) is not one of the classes 'yes', 'no'; "
        "correct it, or add it to classes in [data] for all participants"
    )


def test_file_without_labels_is_refused(tmp_path: Path) -> None:
    assert refused_text(tmp_path, f"{HEADER}1,A,\n2,B,NA\n") == (
        "FILE: no row has a label in column 'outcome'; name the column to predict with --label"
    )


def test_values_that_remove_all_labels_of_a_table_are_named(tmp_path: Path) -> None:
    data = Data("outcome", (AGE, WARD), values={"yes": "yes", "no": "no", "ja": "", "nein": ""})
    assert refused_text(tmp_path, f"{HEADER}1,A,ja\n2,B,nein\n3,B,NA\n", data) == (
        "FILE: no row has a label in column 'outcome', because `values` in [data] makes its values missing; write "
        "there the class that each means"
    )


def test_ambiguous_list_of_categories_is_refused() -> None:
    region = Data("outcome", (Column("region", "category", ("EU", "NA")),))
    assert refused_frame({"region": ["EU"]}, region) == (
        "[data] lists 'NA' for 'region', which stands for a missing value; remove it from the list `missing`"
    )
    free = Data("outcome", region.columns, missing=("", "?"))
    records, _ = dataset_from_frame({"region": ["EU", "NA", "?"]}, free, free.columns)
    assert records.categories["region"].codes.tolist() == [0, 1, -1]
    stage = Data("outcome", (Column("stage", "category", ("1", "2", "1.0")),))
    assert refused_frame({"stage": [1]}, stage) == (
        "[data] lists '1' and '1.0' for 'stage', which are the same category; remove one"
    )


# Ids


def test_missing_and_duplicate_ids_are_refused(tmp_path: Path) -> None:
    data = Data("outcome", (AGE,), id="patient")
    text = "age,patient,outcome\n1,{},yes\n\n2,{},no\n"
    assert refused_text(tmp_path, text.format("a", ""), data, ids=True) == (
        "FILE, line 4: the id in column 'patient' is missing; every record needs one: fill it in, or remove the row"
    )
    assert refused_text(tmp_path, text.format("7", "7.0"), data, ids=True) == (
        "FILE: the id '7' in column 'patient' is in line 2 and line 4; every record must have its own id"
    )
    assert "has no column 'patient'" in refused_text(tmp_path, "age,outcome\n1,yes\n", data, ids=True)
    assert refused_text(tmp_path, text, ids=True).startswith("[data] names no id column")


def test_two_quotes_that_are_not_closed_lose_no_records(tmp_path: Path) -> None:
    """The text between them would become one field of a column that is not read, with all its records."""
    lines = [f"n{number},{number},A,yes" for number in range(50)]
    lines[5], lines[40] = '"half,5,A,yes', '"half,40,A,yes'
    assert "quote" in refused_text(tmp_path, "note," + HEADER + "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", [b"donn\xe9es.csv", b"donn\xe9es.csv.gz", b"donn\xe9es.parquet"])
def test_name_of_a_file_that_is_not_utf8_is_read_or_refused(tmp_path: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    text = (HEADER + "1,A,yes\n2,B,no\n").encode()
    if path.suffix == ".parquet":
        with path.open("wb") as file:
            pq.write_table(pa.table({"age": [1, 2], "ward": ["A", "B"], "outcome": ["yes", "no"]}), file)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    with suppress(InputError):
        assert read_dataset(path, DATA, DATA.columns)[0].rows == 2


BAD_TEXTS = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32).tobytes()), pa.py_buffer(b"\xff\xfe")]
)
"""Latin-1 bytes in a column that claims to be UTF-8, as some programs write them."""


@pytest.mark.parametrize(
    "ward",
    [
        BAD_TEXTS,
        pa.array([1, 2], pa.timestamp("us", tz="Mars/Phobos")),
        pa.array([Decimal(1), Decimal(2)], pa.decimal32(5, 0)),
    ],
    ids=["text", "time zone", "decimal"],
)
def test_parquet_column_that_arrow_cannot_convert_is_read_or_refused(tmp_path: Path, ward: Any) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"age": [1, 2], "ward": ward, "outcome": ["yes", "no"]}), path)
    with suppress(InputError):
        assert read_dataset(path, DATA, DATA.columns)[0].rows == 2


def test_column_of_ids_is_not_a_label(tmp_path: Path) -> None:
    """The classes of the label are opened to all participants; `--label ID` would publish every ID."""
    text = "id," + HEADER + "".join(f"p{number},{number},A,yes\n" for number in range(20))
    assert "label" in refused_text(tmp_path, text, Data("outcome", (AGE, WARD), id="id"), label="id")


def test_long_first_line_of_a_small_compressed_file_takes_little_memory(tmp_path: Path) -> None:
    """400 kB that become a header of 400 MB: a line may have 4 MB, and the header is one."""
    path = tmp_path / "table.csv.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(400):
            file.write(b"x" * 1_000_000)
    assert path.stat().st_size < 1_000_000
    program = (
        "import resource, sys\n"
        "from cgd.errors import InputError\n"
        "from cgd.tabular.readers import open_table\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    open_table(sys.argv[1], ['age'], ())\nexcept InputError:\n    pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100_000  # kB


def test_more_classes_than_are_learned_are_refused_before_they_are_disclosed(tmp_path: Path) -> None:
    rows = "".join(f"1,A,patient {number}\n" for number in range(201))
    assert "column 'outcome' has more than 200 different values" in refused_text(tmp_path, HEADER + rows)


def test_pipe_is_refused(tmp_path: Path) -> None:
    """A table is opened several times: the first bytes of a pipe would be lost, or nobody would write to it again."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"pipe is a pipe or a device; name a CSV or Parquet file"):
        read_dataset(tmp_path / "pipe", DATA, DATA.columns)
