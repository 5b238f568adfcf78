from __future__ import annotations

import gzip
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.federation.data_schema import MISSING, Column, Data
from cgd.federation.value_map import canonical
from cgd.tabular import readers
from cgd.tabular.columns import Categorical
from cgd.tabular.dataset import TabularDataset, dataset_from_frame, locate_records, read_dataset

if TYPE_CHECKING:
    from pathlib import Path

AGE, WARD = Column("age", "number"), Column("ward", "category")
TEXT = "age,ward,outcome\n41,A,yes\n,B,no\n63.5,,yes\n"


def schema(*columns: Column, **options: Any) -> Data:
    return Data("outcome", columns or (AGE, WARD), **options)


class ForeignFrame:
    """A data frame of another library that implements Arrow's C stream protocol, as polars does."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def values(column: Categorical) -> list[str | None]:
    return [None if code < 0 else column.names[code] for code in column.codes]


def from_text(folder: Path, text: str | bytes, data: Data | None = None, **options: Any) -> tuple[TabularDataset, Any]:
    path = folder / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    data = data or schema()
    return read_dataset(path, data, data.columns, label=options.pop("label", None), **options)


def check(records: TabularDataset) -> None:
    """Check that these are the records of TEXT."""
    assert records.rows == 3
    np.testing.assert_array_equal(records.numbers["age"], [41, np.nan, 63.5])
    assert values(records.categories["ward"]) == ["A", "B", None]
    assert isinstance(records.target, Categorical)
    assert values(records.target) == ["yes", "no", "yes"]
    assert records.ids is None


# Variants of one table


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.rstrip("\n"),
        TEXT.replace("\n", "\r\n"),
        TEXT.replace("\n", "\r"),
        "\ufeff" + TEXT,
        TEXT.replace(",", ";"),
        TEXT.replace(",", "\t"),
        TEXT.replace(",", "|"),
        "\n\n" + TEXT.replace("\n", "\n\n"),
        TEXT.replace("A", '"A"').replace("41", '"41"').replace("ward", '"ward"'),
        TEXT.replace(",", " , "),
        TEXT.replace("63.5,,", "63.5,?,").replace("\n,B", "\nNA,B"),
        TEXT.replace("63.5,,", '63.5," NA ",').replace("\n,B", "\n n/a ,B").replace("n/a", "N/A"),
    ],
    ids=["lf", "no-end", "crlf", "cr", "bom", "semicolon", "tab", "bar", "blank", "quoted", "spaces", "missing", "na"],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_csv_dialects_give_the_same_records(tmp_path: Path, text: str, zipped: bool) -> None:
    raw = gzip.compress(text.encode()) if zipped else text.encode()
    records, notes = from_text(tmp_path, raw)
    check(records)
    assert notes == ()


@pytest.mark.parametrize("name", ["table.parquet", "table"])
def test_parquet_types_give_the_same_records(tmp_path: Path, name: str) -> None:
    table = pa.table(
        {
            "outcome": pa.array(["yes", "no", "yes"]).dictionary_encode(),
            "ward": pa.array([" A", "B", "?"], pa.large_string()),
            "age": pa.array([41, None, 63.5], pa.float32()),
        }
    )
    pq.write_table(table, tmp_path / name)
    records, notes = read_dataset(tmp_path / name, schema(), schema().columns, label=None)
    check(records)
    assert notes == ()


@pytest.mark.parametrize(
    "frame",
    [
        {"age": np.array([41, np.nan, 63.5]), "ward": ["A", "B", None], "outcome": ["yes", "no", "yes"]},
        pa.table({"age": ["41", "", " 63.5"], "ward": ["A", "B", ""], "outcome": ["yes", "no", "yes"]}),
        pa.table({"age": [41, None, 63.5], "ward": ["A", "B", None], "outcome": ["yes", "no", "yes"]}).to_batches()[0],
        ForeignFrame(pa.table({"age": [41, None, 63.5], "ward": ["A", "B", None], "outcome": ["yes", "no", "yes"]})),
    ],
    ids=["dictionary", "texts", "batch", "data frame"],
)
def test_table_in_memory_is_read_like_a_file(frame: Any) -> None:
    records, _ = dataset_from_frame(frame, schema(), schema().columns, target=True)
    check(records)
    assert dataset_from_frame(frame, schema(), schema().columns)[0].target is None


def test_batches_are_concatenated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of a few lines, codes are the same in all blocks, and line numbers are those of the file."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100)
    rows = [(number, "ABC"[number % 3], "yes" if number % 5 else "no") for number in range(200)]
    text = "age,ward,outcome\n" + "".join(f"{age},{ward},{outcome}\n" for age, ward, outcome in rows)
    records, _ = from_text(tmp_path, text)
    np.testing.assert_array_equal(records.numbers["age"], np.arange(200))
    assert values(records.categories["ward"]) == [ward for _, ward, _ in rows]
    with pytest.raises(ValueError, match="line 152, column 'age': 'x' is not a number"):
        from_text(tmp_path, text.replace("\n150,", "\nx,"))


def test_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    """Blank lines and line ends within quotes count."""
    text = 'age,ward,outcome,remark\n1,A,yes,"two\nlines"\n\n2,B,no,\nx,A,no,\n'
    with pytest.raises(ValueError, match="line 6, column 'age': 'x'"):
        from_text(tmp_path, text)


def test_column_name_may_have_several_lines(tmp_path: Path) -> None:
    weight = Column("weight\nin kg", "number")
    for text in ('"weight\nin kg",outcome\n70,yes\n', '\n\r\n"weight\nin kg",outcome\r\n70,yes\r\n'):
        records, _ = from_text(tmp_path, text, schema(weight))
        assert records.numbers[weight.name].tolist() == [70]


def test_header_names_may_contain_other_delimiters(tmp_path: Path) -> None:
    weight = Column("weight, kg, dry", "number")
    text = "weight, kg, dry;outcome\n70;yes\n80;no\n"
    records, _ = from_text(tmp_path, text, schema(weight))
    np.testing.assert_array_equal(records.numbers[weight.name], [70, 80])
    quoted, _ = from_text(tmp_path, '"weight, kg, dry",outcome\n70,yes\n80,no\n', schema(weight))
    np.testing.assert_array_equal(quoted.numbers[weight.name], [70, 80])


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(-1e20, 1e20),
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([",", ";", "\t", "|"]),
)
@settings(max_examples=60)
def test_written_values_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float | None, str]], delimiter: str
) -> None:
    """Numbers are exact; texts may have quotes, delimiters and line ends, and become canonical."""
    lines = (
        ['"age"', '"ward"', '"outcome"'],
        *(["" if age is None else repr(age), '"' + ward.replace('"', '""') + '"', "yes"] for age, ward in rows),
    )
    text = "\r\n".join(delimiter.join(line) for line in lines)
    records, _ = from_text(tmp_path_factory.getbasetemp(), text)
    np.testing.assert_array_equal(records.numbers["age"], [np.nan if age is None else age for age, _ in rows])
    expected = [None if (text := canonical(ward)) in MISSING else text for _, ward in rows]
    assert values(records.categories["ward"]) == expected


# Cells


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, 2, None], pa.int8()), ["1", "2", None]),
        (pa.array([2**63, 0, 1], pa.uint64()), [str(2**63), "0", "1"]),
        (pa.array([1.0, -0.0, float("nan")]), ["1", "0", None]),
        (pa.array([1.5, 1e17, None], pa.float32()), ["1.5", "99999998430674944", None]),
        (pa.array([True, False, None]), ["true", "false", None]),
        (pa.array(["TRUE", "False", "true"]), ["true", "false", "true"]),
        (pa.array(["1.0", " 1 ", "01"]), ["1", "1", "01"]),
        (pa.array(["-0.0", "1.", "1.50"]), ["0", "1", "1.50"]),
        (pa.array([3, 4, 3]).dictionary_encode(), ["3", "4", "3"]),
        (pa.array(["a", None, "NULL"]).dictionary_encode(), ["a", None, None]),
        (pa.array(["a", None, "b"], pa.string_view()), ["a", None, "b"]),
        (pa.array([Decimal("3.00"), Decimal("1.25"), None]), ["3", "1.25", None]),
        (pa.array([date(2020, 1, 2), None, None]), ["2020-01-02", None, None]),
        (
            pa.array([0, 1, None], pa.timestamp("ns")),
            ["1970-01-01 00:00:00.000000000", "1970-01-01 00:00:00.000000001", None],
        ),
        (pa.nulls(3), [None, None, None]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_categories_are_independent_of_the_storage_type(array: pa.Array, expected: list[str | None]) -> None:
    records, _ = dataset_from_frame({"ward": array}, schema(WARD), (WARD,))
    assert values(records.categories["ward"]) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, 2, None], pa.int64()), [1, 2, np.nan]),
        (pa.array([2**53 + 1, 0, 1]), [2.0**53, 0, 1]),
        (pa.array([True, False, None]), [1, 0, np.nan]),
        (pa.array([Decimal("3.25"), None, Decimal("-1")]), [3.25, np.nan, -1]),
        (pa.array([1.5, float("nan"), 0.1], pa.float32()), [1.5, np.nan, np.float32(0.1)]),
        (pa.array(np.array([1.5, 2, 3], dtype=np.float16)), [1.5, 2, 3]),
        (pa.array(["1e3", "+5", " .5 "]), [1000, 5, 0.5]),
        (pa.array(["7", None, "NA"]).dictionary_encode(), [7, np.nan, np.nan]),
        (pa.array(["7", "8", "?"], pa.string_view()), [7, 8, np.nan]),
        (pa.nulls(3), [np.nan] * 3),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_numbers_are_independent_of_the_storage_type(array: pa.Array, expected: list[float]) -> None:
    records, _ = dataset_from_frame({"age": array}, schema(AGE), (AGE,))
    assert records.numbers["age"].dtype == np.float64
    np.testing.assert_array_equal(records.numbers["age"], expected)


@pytest.mark.parametrize("array", [["-9", "-9.0", " -9", "9"], [-9.0, -9, -9, 9], [-9, -9, -9, 9]])
def test_missing_code_applies_to_texts_and_numbers(array: list[Any]) -> None:
    data = schema(missing=("-9",))
    records, _ = dataset_from_frame({"age": array, "ward": array}, data, data.columns)
    np.testing.assert_array_equal(records.numbers["age"], [np.nan] * 3 + [9])
    assert values(records.categories["ward"]) == [None, None, None, "9"]


def test_listed_categories_keep_their_listed_names() -> None:
    data = schema(Column("ward", "category", ("2.0", "True", "C")))
    records, notes = dataset_from_frame({"ward": ["2", "TRUE", "C", "D", "D", None]}, data, data.columns)
    ward = records.categories["ward"]
    assert ward.names == ("2.0", "True", "C")
    assert values(ward) == ["2.0", "True", "C", None, None, None]
    assert notes == ("column 'ward': 2 values are not among its listed categories and treated as missing: 'D'",)


def test_note_about_unlisted_values_is_short() -> None:
    data = schema(Column("ward", "category", ("a",)))
    texts = [f"text {number}" for number in range(5000)]
    records, (note,) = dataset_from_frame({"ward": texts}, data, data.columns)
    assert records.categories["ward"].missing == 5000
    assert "5,000 values are not among" in note
    assert len(note) < 200


# Target and notes


def test_rows_without_a_label_are_left_out(tmp_path: Path) -> None:
    records, notes = from_text(tmp_path, TEXT.replace("no", "NA"))
    assert records.rows == 2
    np.testing.assert_array_equal(records.numbers["age"], [41, 63.5])
    assert values(records.categories["ward"]) == ["A", None]
    assert notes == ("1 row without a label is left out",)
    _, notes = from_text(tmp_path, TEXT.replace("yes", ""))
    assert notes == ("2 rows without a label are left out",)


def test_label_may_have_another_name(tmp_path: Path) -> None:
    records, notes = from_text(tmp_path, TEXT.replace("outcome", "Ergebnis"), label="Ergebnis")
    check(records)
    assert notes == ()


def test_note_lists_columns_that_are_not_read(tmp_path: Path) -> None:
    records, notes = from_text(tmp_path, TEXT, schema(AGE))
    assert not records.categories
    assert notes == ("columns not in the schema are not read: ward",)
    header = ",".join(f"c{number}" for number in range(14))
    _, notes = from_text(tmp_path, f"age,outcome,{header}\n1,yes{',' * 14}\n", schema(AGE))
    assert notes == ("columns not in the schema are not read: c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 and 4 more",)


def test_duplicate_name_of_unread_columns_is_allowed(tmp_path: Path) -> None:
    check(from_text(tmp_path, "age,x,ward,x,outcome\n41,1,A,2,yes\n,3,B,4,no\n63.5,5,,6,yes\n")[0])


@pytest.mark.parametrize("name", ["no\u2028te", "no\x0cte", "no\x85te"])
def test_column_name_may_contain_unicode_line_separators(tmp_path: Path, name: str) -> None:
    check(from_text(tmp_path, f"{name},age,ward,outcome\n1,41,A,yes\n2,,B,no\n3,63.5,,yes\n")[0])


def test_unread_column_may_hold_anything(tmp_path: Path) -> None:
    text = b"age,ward,note,outcome\n41,A,\xe4\xff,yes\n,B,x,no\n63.5,,,yes\n"
    check(from_text(tmp_path, text)[0])


def test_regression_target_is_read_as_numbers(tmp_path: Path) -> None:
    data = schema(AGE, task="regression")
    records, notes = from_text(tmp_path, "age,outcome\n1,2.5\n2,\n3,-1e3\n", data)
    assert isinstance(records.target, np.ndarray)
    assert records.target.tolist() == [2.5, -1000]
    assert records.numbers["age"].tolist() == [1, 3]
    assert notes == ("1 row without a label is left out",)


def test_all_rows_are_kept_without_the_target(tmp_path: Path) -> None:
    records, notes = from_text(tmp_path, TEXT.replace("no", ""), target=False)
    assert (records.rows, records.target, notes) == (3, None, ())
    records, _ = from_text(tmp_path, "ward,age\nA,1\n", target=False)
    assert records.rows == 1


def test_ids_are_canonical_texts_of_the_kept_rows() -> None:
    data = schema(AGE, id="patient")
    frame = {"age": [1, 2, 3], "patient": [7.0, 8.0, 9.0], "outcome": ["yes", None, "no"]}
    records, _ = dataset_from_frame(frame, data, data.columns, target=True, ids=True)
    assert records.ids == ("7", "9")


# Records


def test_take_selects_records_in_order() -> None:
    data = schema(id="patient")
    frame = {"age": [1, 2, 3], "ward": ["a", "b", None], "patient": ["x", "y", "z"], "outcome": ["no", "yes", "no"]}
    records, _ = dataset_from_frame(frame, data, data.columns, target=True, ids=True)
    taken = records.take([2, 0])
    assert taken.rows == 2
    assert taken.numbers["age"].tolist() == [3, 1]
    assert values(taken.categories["ward"]) == [None, "a"]
    assert taken.ids == ("z", "x")
    assert isinstance(taken.target, Categorical)
    assert taken.target.counts().tolist() == [2, 0]
    assert records.take(np.array([True, False, True])).ids == ("x", "z")
    assert records.take([]).rows == 0


def test_records_know_their_places_in_the_file(tmp_path: Path) -> None:
    """Rows without a label are left out, blank lines and lines within a text are counted."""
    path = tmp_path / "my.csv"
    path.write_text('age,ward,outcome\n1,A,yes\n\n2,"a\nb",no\n3,A,\n4,B,yes\n')
    records, _ = read_dataset(path, schema(), schema().columns)
    assert records.places is not None
    assert records.places.tolist() == [0, 1, 3]
    places = locate_records(path, schema(), schema().columns, records.places.tolist())
    assert places == ["line 2", "line 4", "line 7"]
    taken = records.take([2, 0]).places
    assert taken is not None
    assert locate_records(path, schema(), schema().columns, taken.tolist()) == ["line 7", "line 2"]


def test_repr_shows_no_value() -> None:
    frame = {"age": [41.0], "ward": ["secret"], "outcome": ["grave"]}
    records, _ = dataset_from_frame(frame, schema(), schema().columns, target=True)
    text = f"{records!r} {records} {records.categories['ward']!r} {records.target!r}"
    assert not any(value in text for value in ("41", "secret", "grave"))
    assert repr(records) == "TabularDataset(1 rows of age, ward, with a target)"


def test_quote_within_a_column_name_does_not_open_a_text(tmp_path: Path) -> None:
    """The records up to the next quote were taken for a part of the header, and lost."""
    records, _ = from_text(tmp_path, 'size in ",age,ward,outcome\n5,1,A,yes\n5",2,B,no\n6,3,A,yes\n')
    assert records.numbers["age"].tolist() == [1, 2, 3]
