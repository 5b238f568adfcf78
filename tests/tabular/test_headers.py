"""A header that is a record, or names a person, is not published."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest

from cgd.errors import InputError
from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import read_dataset
from cgd.tabular.schema import suggest_schema

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = [
    "Huber Carla,1999-03-15,80,F,35.3,no",
    "Abel Jon,1971-12-01,64,M,36.1,yes",
    "Dahl Eva,1980-02-29,71,F,37.4,no",
    "Fuchs Ida,1955-07-09,58,M,36.6,yes",
]


def written(path: Path, lines: list[str]) -> Path:
    (path / "table.csv").write_text("\n".join(lines) + "\n")
    return path / "table.csv"


def without(*fields: int) -> list[str]:
    """Return the records without some of their fields."""
    return [",".join(each for place, each in enumerate(row.split(",")) if place not in fields) for row in RECORDS]


@pytest.mark.parametrize("label", ["no", "outcome"])
@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (RECORDS, r"a date \(column 2\), numbers \(columns 3, 5\), values of the same column \(columns 4, 6\)"),
        (without(2, 3, 4), r"a date \(column 2\)"),
        (without(1), r"numbers"),
        (without(1, 2, 4), r"values of the same column \(columns 2, 3\)"),
        ([f"a{number}@example.org,{row}" for number, row in enumerate(without(1, 2, 3))], "an e-mail address"),
    ],
)
def test_record_in_place_of_a_header_is_refused_without_its_values(
    tmp_path: Path, lines: list[str], found: str, label: str
) -> None:
    path = written(tmp_path, lines)
    with pytest.raises(InputError, match=found) as refused:
        suggest_schema(path, label)
    assert "add a first line with the names of the columns" in str(refused.value)
    assert not [each for each in lines[0].split(",") if len(each) > 2 and each in str(refused.value)]
    with pytest.raises(InputError, match="no header") as refused:
        read_dataset(path, Data(target="outcome", columns=(Column("age", "number"),)), (Column("age", "number"),))
    assert "Huber" not in str(refused.value)


@pytest.mark.parametrize(
    "lines",
    [
        ["2019,2020,2021,y", "4,7,2019,a", "5,9,2020,b", "1,1,1,a"],
        ["0,1,2,y", "0,1,2,a", "3,1,2,b", "0,4,5,a"],
        ["80,sex,y", "80,F,a", "81,M,b", "79,F,a"],
        ["diabetes,asthma,age,y", "diabetes,,60,a", ",asthma,61,b", "diabetes,asthma,72,a", ",,55,b"],
        ["other,age,y", "other,60,a", "none at all,61,b", "other,72,a"],
        ["age,sex,y", "60,F,a", "61,M,b", "age,sex,y", "64,M,a"],  # two exports, one after the other
    ],
)
def test_unusual_headers_are_accepted(tmp_path: Path, lines: list[str]) -> None:
    assert tomllib.loads(suggest_schema(written(tmp_path, lines[:1] + 5 * lines[1:]), "y"))["data"]["columns"]


PERSONS = (
    "Keller, Anna 1956|Keller, Anna|Dr. Keller|seen 2024-03-15|a@b.org mail|Keller,Anna|Keller, Anna-Maria|Keller, A.|"
    "Keller, Anna Maria|Keller, Anna M.|KELLER, ANNA|keller, anna|de Vries, Jan|van der Berg, Jan|O'Brien, Sean|"
    "Łuczak, Anna|Čapek, Šárka|Öztürk, İbrahim|García López, María José|王伟, 女|王伟, 56|Anna Keller|"
    "Anna Keller *03.04.56|Keller Anna 3.4.1956|Frau Keller"
)


@pytest.mark.parametrize("name", PERSONS.split("|"))
def test_column_that_names_a_person_is_not_in_the_suggestion(tmp_path: Path, name: str) -> None:
    rows = [f"{number % 25},{number * 7 % 5 / 2},{'ab'[number % 2]}" for number in range(40, 80)]
    text = suggest_schema(written(tmp_path, [f'age,"{name}",y', *rows]), "y")
    assert "# column 2: left out, its name looks like that of a person" in text
    assert name not in text
    assert not [word for word in ("Keller", "Anna", "2024", "a@b") if word in text]


MEASUREMENTS = (
    "Bilirubin, Total|Heart Rate|weight, kg|Visit 2|ICD-10|Blood Pressure, Systolic|Protein, C-reactive|MS duration|"
    "Glucose, Fasting Plasma|Pain, Chest|HR Max|Hr Max|Charlson Index|Thomas Test|Ann Arbor Stage|Marital Status|"
    "Smoking, Current|Insurance, Private|Alter, Jahre|Blutdruck, systolisch|Gewicht, Kg|年龄|血压, 收缩压|高血压|"
    "Diabetes, Type 2|Sales 2020-03|Hepatitis, B|Troponin, I|Temp, Max|San Francisco|Hemoglobin, A1c|April 2020"
)


@pytest.mark.parametrize("name", MEASUREMENTS.split("|"))
def test_other_names_of_columns_are_kept(tmp_path: Path, name: str) -> None:
    rows = [f"{number % 25},{number * 7 % 15 / 2},{'ab'[number % 2]}" for number in range(40, 80)]
    text = suggest_schema(written(tmp_path, [f'age,"{name}",y', *rows]), "y")
    assert name in tomllib.loads(text)["data"]["columns"]
