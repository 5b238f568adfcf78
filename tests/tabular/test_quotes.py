from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import read_dataset
from cgd.tabular.quotes import BYTE_ORDER_MARK, QuoteChecker

if TYPE_CHECKING:
    from pathlib import Path

DATA = Data("outcome", (Column("age", "number"),), classes=("yes", "no"))


def regular(data: bytes, size: int) -> bool:
    checker = QuoteChecker(",")
    for start in range(0, len(data), size):
        checker.add(data[start : start + size])
    return checker.regular()


@given(st.text(alphabet='"",\n\rab', max_size=20), st.integers(1, 8))
def test_regular_quotes_are_accepted_by_a_strict_parser(text: str, size: int) -> None:
    if regular(text.encode(), size):
        list(csv.reader(io.StringIO(text, newline=""), strict=True))


@given(
    st.lists(st.lists(st.text(alphabet='",\n\ra;ä', max_size=6), min_size=2, max_size=3), max_size=5),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    st.integers(3, 9),
    st.booleans(),
)
def test_quotes_of_a_csv_writer_are_regular(rows: list[list[str]], quoting: Any, size: int, mark: bool) -> None:
    text = io.StringIO()
    csv.writer(text, quoting=quoting).writerows(rows)
    assert regular(BYTE_ORDER_MARK * mark + text.getvalue().encode(), size)


@pytest.mark.parametrize("note", ['5" disk', '5"', '"a" b', 'a "b" c', '"a ""b"" c"', '""', '"two\nlines"'])
def test_quotes_that_lose_no_records_are_accepted(note: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"note,age,outcome\n{note},1,yes\nb,2,no\n{note},3,no\n")
    records, _ = read_dataset(tmp_path / "t.csv", DATA, DATA.columns)
    assert records.numbers["age"].tolist() == [1, 2, 3]
