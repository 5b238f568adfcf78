"""Dates in a table: in the formats and languages of many tables, inside of texts, and as numbers."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from cgd.errors import InputError
from cgd.federation.privacy_section import DAYS_QUESTION, check_reviewed
from cgd.tabular.schema import suggest_schema
from cgd.tabular.schema_merge import merge_schemas
from cgd.tabular.written_dates import has_date, has_day, is_date
from support.tabular import write_csv

if TYPE_CHECKING:
    from pathlib import Path


DRAW = random.Random(3)
FORMATS = {
    "spanish": lambda: f"{DRAW.randint(1, 28):02}-{DRAW.choice(('ene', 'abr', 'ago', 'dic'))}-2020",
    "italian": lambda: f"{DRAW.randint(1, 28)} {DRAW.choice(('gennaio', 'maggio', 'giugno', 'luglio'))} 2020",
    "portuguese": lambda: f"{DRAW.randint(1, 28)} de {DRAW.choice(('março', 'fevereiro'))} de 2020",
    "russian": lambda: f"{DRAW.randint(1, 28)} {DRAW.choice(('января', 'марта', 'мая'))} 2020",
    "chinese": lambda: f"2020年{DRAW.randint(1, 6)}月{DRAW.randint(1, 28)}日",
    "korean": lambda: f"2020년 {DRAW.randint(1, 6)}월 {DRAW.randint(1, 28)}일",
    "hours": lambda: f"2020-0{DRAW.randint(1, 3)}-{DRAW.randint(1, 28):02}T10",
    "weeks": lambda: f"2020-W{DRAW.randint(1, 52):02}",
    "months": lambda: f"{DRAW.randint(1, 12):02}/{DRAW.randint(1950, 1960)}",
    "months in words": lambda: f"{DRAW.choice(('März', 'Mai', 'Juni'))} {DRAW.randint(1950, 1960)}",
    "with a word": lambda: f"geb. {DRAW.randint(1, 28):02}.{DRAW.randint(1, 3):02}.1956",
    "with a weekday": lambda: f"Mo, {DRAW.randint(1, 28):02}.{DRAW.randint(1, 3):02}.2020",
    "two": lambda: f"1.2.2020-{DRAW.randint(1, 28)}.3.2020",
}


def suggestion(path: Path, name: str, values: list[object], *, private: bool = False) -> str:
    rows = len(values)
    columns: dict[str, list[Any]] = {
        name: values,
        "v": [row % 17 + 0.5 for row in range(rows)],
        "y": ["ab"[row % 2] for row in range(rows)],
    }
    return suggest_schema(write_csv(path / "table.csv", columns, tuple(columns)), "y", private=private)


@pytest.mark.parametrize("kind", FORMATS)
def test_dates_of_many_records_each_are_left_out(tmp_path: Path, kind: str) -> None:
    values: list[object] = [FORMATS[kind]() for _ in range(2000)]
    for private in (False, True):
        text = suggestion(tmp_path, "entry", values, private=private)
        assert "# entry: left out, its values look like dates" in text
        assert not [each for each in values if str(each) in text]


def test_days_of_birth_as_numbers_are_to_be_reviewed(tmp_path: Path) -> None:
    """They cannot be told from a salary."""
    days: list[object] = [DRAW.randint(11_000, 40_000) for _ in range(2000)]
    for place, private in enumerate((False, True)):
        text = suggestion(tmp_path, "entry", days, private=private)
        found = next(line for line in text.splitlines() if line.startswith("entry"))
        assert found.count("REVIEW") == 1
        assert DAYS_QUESTION in found
        paths = [tmp_path / f"{place}{each}.toml" for each in range(2)]
        for path in paths:
            path.write_text(text)
        joined = merge_schemas(paths)
        assert DAYS_QUESTION in joined
    with pytest.raises(InputError, match="are these dates of birth"):
        check_reviewed(suggestion(tmp_path, "entry", days))


@pytest.mark.parametrize("name", ["dob", "Date of birth", "birthdate", "Geburtsdatum", "生年月日"])
def test_date_of_birth_is_not_suggested_as_the_id(tmp_path: Path, name: str) -> None:
    text = suggestion(tmp_path, name, [11_000 + 7919 * row % 20_000 for row in range(100)])
    assert "# id =" not in text
    assert "left out, its name suggests" in text


def test_other_numbers_and_texts_are_no_dates() -> None:
    for text in (
        "2010-2020",
        "10.1.2.3",
        "1.2.3",
        "Stage 2",
        "5-10-20-40",
        "99.99.2020",
        "12 weeks",
        "3 tablets 2 times",
    ):
        assert not has_date(text), text
    assert not has_day("March 2020")
    assert is_date("2020-02-03T10")
    assert not is_date("seen 2020-02-03")


@pytest.mark.slow
def test_long_texts_take_little_time() -> None:
    started = time.monotonic()
    for text in ("jan" * 50_000, "1 " * 50_000, "2020-" * 50_000, "1 de " * 50_000, " " * 100_000 + "1"):
        assert not has_day(text)
        assert not has_date(text)
    assert time.monotonic() - started < 10
