"""`cgd schema` leaves out what identifies persons, and its notes contain no value."""

from __future__ import annotations

import csv
import datetime
import random
import tomllib
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cgd.errors import InputError
from cgd.federation.privacy_section import check_reviewed
from cgd.tabular.identifiers import identifying_name, identifying_texts
from cgd.tabular.schema import suggest_schema
from cgd.tabular.schema_merge import LEARNED, merge_schemas
from support.tabular import write_csv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = 242
DRAW = random.Random(1)
FIRST = ("Ana", "Ben", "Chi", "Dov", "Eva", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo", "Mia", "Nina", "Oli")
LAST = ("Abel", "Brandt", "Castro", "Dahl", "Eriksen", "Fuchs", "Garcia", "Huber", "Ivanov", "Jansen", "Klein", "Lopez",
        "Meyer", "Novak", "Okafor")  # fmt: skip
PEOPLE = [f"{first} {last}" for first in FIRST for last in LAST][:219]
NAMES = [*PEOPLE, *PEOPLE[: ROWS - 219]]  # 219 distinct names of 242 records
BORN = [datetime.date(1930, 1, 1) + datetime.timedelta(days=DRAW.randrange(25_000)) for _ in range(ROWS)]
HEX = "0123456789abcdef"


def clinic(**columns: list[Any]) -> dict[str, list[Any]]:
    """Return a table of usual columns, and of some more."""
    return {
        "age": [30 + number % 50 for number in range(ROWS)],
        "weight": [60 + number % 37 / 2 for number in range(ROWS)],
        "ward": ["North" if number % 3 else "South" for number in range(ROWS)],
        **columns,
        "outcome": ["well" if number % 2 else "ill" for number in range(ROWS)],
    }


def suggested(path: Path, **columns: list[Any]) -> tuple[dict[str, Any], str]:
    """Return the suggested columns, and the text."""
    content = clinic(**columns)
    text = suggest_schema(write_csv(path / "table.csv", content, tuple(content)), "outcome")
    return tomllib.loads(text)["data"]["columns"], text


def drawn(digits: str, length: int) -> str:
    return "".join(DRAW.choice(digits) for _ in range(length))


def test_names_and_dates_of_birth_of_242_patients_are_left_out(tmp_path: Path) -> None:
    """In an earlier version both became categories, and the report of one hospital listed the patients of another."""
    columns, text = suggested(tmp_path, patient=NAMES, born=[each.isoformat() for each in BORN])
    assert columns == {"age": "number", "weight": "number", "ward": "category"}
    assert '# patient: left out, its name suggests an identifier. If it identifies nobody, write patient = "cat' in text
    assert "# born: left out, its values look like dates" in text
    assert not [name for name in (*PEOPLE, *LAST, *(each.isoformat() for each in BORN)) if name in text]
    for number in ("219", "242"):
        assert number not in text
    other, text = suggested(tmp_path, who=NAMES)  # the name of the column does not matter
    assert other == columns
    assert "# who: left out, its values look like texts of few records each, as names are" in text


IDENTIFIERS: dict[str, list[Any]] = {
    "day first": [f"{each:%d.%m.%Y}" for each in BORN],
    "month first": [f"{each:%m/%d/%Y}" for each in BORN],
    "short years": [f"{each:%d/%m/%y}" for each in BORN],
    "words": [f"{each:%d %b %Y}" for each in BORN],
    "times": [f"{each.isoformat()}T{number % 24:02}:15:00Z" for number, each in enumerate(BORN)],
    "compact": [f"{each:%Y%m%d}" for each in BORN],
    "few days": [BORN[number % 5].isoformat() for number in range(ROWS)],
    "e-mails": [f"{name.replace(' ', '.').lower()}@example.org" for name in NAMES],
    "uuids": [f"{drawn(HEX, 8)}-{drawn(HEX, 4)}-4{drawn(HEX, 3)}-a{drawn(HEX, 3)}-{drawn(HEX, 12)}" for _ in NAMES],
    "digests": [drawn(HEX, 64) for _ in NAMES],
    "calls": [f"+43 1 {drawn('123456789', 7)}" for _ in NAMES],
    "american calls": [f"{drawn('23456789', 3)}-{drawn('0123456789', 3)}-{drawn('0123456789', 4)}" for _ in NAMES],
    "accounts": [f"DE{drawn('0123456789', 20)}" for _ in NAMES],
    "social security": [
        f"{drawn('123', 3)}-{drawn('0123456789', 2)}-{drawn('0123456789', 4)}" for _ in NAMES
    ],
    "chart": [f"KH-{drawn('0123456789', 6)}" for _ in NAMES],
    "ten digits": [drawn("123456789", 10) for _ in NAMES],
    "visits of ten digits": [f"{4_000_000_000 + 7919 * (number * 2 // 3)}" for number in range(ROWS)],
    "shuffled": DRAW.sample(range(1000, 1000 + ROWS), ROWS),
    "rising": list(range(7, 7 + ROWS)),
    "remarks": [f"seen by {LAST[number % 15]}, comes back on {number}" for number in range(ROWS)],
    "excel times": [f"{45000 + 7 * (number // 2) % 900 + number % 7 / 8}" for number in range(ROWS)],
    "excel days": [45000 + 7 * (number // 2) % 900 for number in range(ROWS)],
    "unix times": [1_700_000_000 + 86_413 * (number // 3) for number in range(ROWS)],
    "six digits": [f"{each:%d%m%y}" for each in BORN],
    "mobile calls": [41_790_000_000 + 7_919 * (number % 12) for number in range(ROWS)],
    # Names of columns
    "patient_id": [number % 40 for number in range(ROWS)],
    "patientID": [number % 40 for number in range(ROWS)],
    "MRN": [number % 40 for number in range(ROWS)],
    "Date of birth": [number % 40 for number in range(ROWS)],
    "insurance number": [number % 40 for number in range(ROWS)],
    "zip": [f"{1010 + number % 90}" for number in range(ROWS)],
    "family_name": [LAST[0] if number > 3 else LAST[number] for number in range(ROWS)],
}  # fmt: skip


@pytest.mark.parametrize("name", IDENTIFIERS)
def test_identifiers_are_left_out_with_a_note_without_values(tmp_path: Path, name: str) -> None:
    columns, text = suggested(tmp_path, **{name: IDENTIFIERS[name]})
    assert columns == {"age": "number", "weight": "number", "ward": "category"}
    (note,) = (line for line in text.splitlines() if ": left out" in line)
    assert not [value for value in map(str, IDENTIFIERS[name]) if len(value) > 3 and value in text]
    assert "If it identifies nobody" in note or "an ID?" in note


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("patient age", [number % 40 for number in range(ROWS)], "number"),
        ("birth weight", [3000 + 13 * (number % 91) for number in range(ROWS)], "number"),
        ("number of visits", [number % 12 for number in range(ROWS)], "number"),
        ("leukocytes", [4000 + 37 * (number % 200) for number in range(ROWS)], "number"),
        ("salary", [30_000 + 113 * (number % 200) for number in range(ROWS)], "number"),
        ("platelets", [150_000 + 1_000 * (number % 200) for number in range(ROWS)], "number"),
        ("year", [1990 + number % 30 for number in range(ROWS)], "number"),
        ("cost per patient", [number * 1.37 for number in range(ROWS)], "number"),
        ("hospital_name", [("North", "South")[number % 2] for number in range(ROWS)], "category"),
        ("grade", [f"G{number % 4}" for number in range(ROWS)], "category"),
        ("icd", [f"C{50 + number % 20}" for number in range(ROWS)], "category"),
    ],
)
def test_other_columns_are_kept(tmp_path: Path, name: str, values: list[Any], kind: str) -> None:
    columns, _ = suggested(tmp_path, **{name: values})
    assert columns[name] == kind


@pytest.mark.parametrize(
    "convert",
    [
        lambda: pa.array(BORN, pa.date32()),
        lambda: pa.array(BORN, pa.date64()),
        lambda: pa.array([datetime.datetime(each.year, each.month, each.day, 10, 30) for each in BORN]),
        lambda: pa.array([datetime.datetime(each.year, each.month, 1, tzinfo=datetime.UTC) for each in BORN]),
    ],
)
def test_dates_of_a_parquet_file_are_left_out(tmp_path: Path, convert: Callable[[], Any]) -> None:
    pq.write_table(pa.table({**clinic(), "entry": convert()}), tmp_path / "table.parquet")
    text = suggest_schema(tmp_path / "table.parquet", "outcome")
    assert "# entry: left out, its values look like dates" in text


def test_id_of_the_records_is_suggested_and_no_date(tmp_path: Path) -> None:
    days = [(datetime.date(1960, 1, 1) + datetime.timedelta(days=37 * number)).isoformat() for number in range(ROWS)]
    mrn = DRAW.sample(range(100, 90_000), ROWS)
    _, text = suggested(tmp_path, born=days, mrn=mrn)
    assert '# id = "mrn"  # needed in a grid' in text
    assert "# born: left out, its values look like dates" in text
    _, text = suggested(tmp_path, born=days)
    assert "# id" not in text


def test_rare_values_of_a_category_are_counted_in_a_note(tmp_path: Path) -> None:
    unit = ["ICU" if number < 100 else "Day clinic" for number in range(ROWS)]
    unit[:3] = ["Hospice", "Hospice", "Maternity"]
    columns, text = suggested(tmp_path, unit=unit)
    assert columns["unit"] == "category"
    assert "unit = \"category\"  # values of fewer than 5 records, 2 in this table, count as 'other'" in text
    assert "Hospice" not in text


def test_classes_of_few_records_are_not_in_the_suggestion(tmp_path: Path) -> None:
    content = clinic()
    content["outcome"][:2] = ["Kuru", "Kuru"]
    text = suggest_schema(write_csv(tmp_path / "table.csv", content, tuple(content)), "outcome")
    assert "Kuru" not in text
    assert "# classes = []  # list them, if all of you know them; some have fewer than 5 records here" in text
    assert tomllib.loads(text.replace("# classes", "classes"))["data"]["classes"] == []


def test_target_that_looks_like_names_gets_a_note(tmp_path: Path) -> None:
    content = clinic(name=NAMES)
    text = suggest_schema(write_csv(tmp_path / "table.csv", content, tuple(content)), "name")
    assert 'target = "name"  # is it the column to predict? Its values look like texts of few records each' in text
    assert not [name for name in PEOPLE if name in text]


def test_names_of_columns_are_read_as_words() -> None:
    assert identifying_name("patientId", frequent=True)
    assert identifying_name("ID2", frequent=True)
    assert identifying_name("home phone", frequent=True)
    assert identifying_name("phone no", frequent=True)
    assert identifying_name("updateDate", frequent=True) == "its name suggests a date"
    for name in ("idea", "valid", "phone calls", "candidate", "", "…", "0", "number", "case count", "state code"):
        assert not identifying_name(name, frequent=False), name


def test_some_mistyped_values_do_not_hide_dates() -> None:
    dates = [each.isoformat() for each in BORN[:80]]
    assert identifying_texts([*dates, *(f"typo {number}" for number in range(20))]) == "dates"
    assert identifying_texts([*dates, *(f"typo {number}" for number in range(21))]) == ""
    assert identifying_texts([]) == ""


def test_persons_with_several_records_are_left_out(tmp_path: Path) -> None:
    """Persons who are patients of two participants would be disclosed, although no value is rare."""
    rows = 240
    columns = {
        "Kontakt": [f"Familie {chr(65 + place % 30)}horn{place % 30}" for place in range(rows)],
        "zugewiesen von": [f"Dr. med. {chr(65 + place % 12)}. Graf" for place in range(rows)],
        "AHV": [f"756.{5000 + place % 12}.6874.98" for place in range(rows)],
        "Monat": [f"19{50 + place % 12}-10" for place in range(rows)],
        "ward": [("surgery", "heart", "general")[place % 3] for place in range(rows)],
        "y": ["ja" if place % 2 else "nein" for place in range(rows)],
    }
    path = tmp_path / "visits.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    text = suggest_schema(path, "y")
    assert [line for line in text.splitlines() if line.endswith('"category"') and not line.startswith("#")] == [
        'ward = "category"'
    ]
    assert not any(value in text for value in ("Graf", "756", "19", "horn"))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    ("label", "values"),
    [
        ("treated_by", ["Dr. Abel", "Dr. Dahl", "Dr. Fuchs"]),  # all frequent, and few
        ("hausarzt", ["Abel", "Dahl", "Fuchs"]),
        ("visit", ["1980-02-29", "1971-12-01"]),
        ("person", [f"Abel {chr(65 + number)}" for number in range(12)]),
    ],
)
def test_frequent_values_of_a_target_that_names_somebody_are_not_listed(
    tmp_path: Path, label: str, values: list[str], private: bool
) -> None:
    content = clinic(**{label: [values[number % len(values)] for number in range(ROWS)]})
    text = suggest_schema(write_csv(tmp_path / "table.csv", content, tuple(content)), label, private=private)
    assert not [each for each in values if each in text]
    assert "# classes = []  # list them only if all of you know them without a table, and they name nobody" in text


def test_differential_privacy_lists_no_names_of_doctors_and_no_long_list_of_classes(tmp_path: Path) -> None:
    """Without [privacy] these columns are suggested, but not their values, which the suggestion would publish."""
    doctors = [("Abel", "Dahl", "Fuchs")[number % 3] for number in range(ROWS)]
    content = clinic(doctor=doctors, code=[f"c{number % 22}" for number in range(ROWS)])
    path = write_csv(tmp_path / "table.csv", content, tuple(content))
    assert 'doctor = "category"' in suggest_schema(path, "outcome")
    text = suggest_schema(path, "outcome", private=True)
    assert "# doctor = []  # left out, its name suggests an identifier; list them if all know them" in text
    assert "Abel" not in text
    assert 'ward = ["North", "South"]' in text
    assert "c21" not in suggest_schema(path, "code", private=True)


def test_surnames_of_few_patients_with_many_visits_are_to_be_reviewed(tmp_path: Path) -> None:
    """No pattern can tell them from other words, so people decide, before the values are opened."""
    paths = []
    for place, count in enumerate((8, 12)):
        columns, text = suggested(tmp_path, who=[LAST[number % count] for number in range(ROWS)])
        assert columns["who"] == "category"
        assert 'who = "category"  # does it name persons? If so, leave it out; REVIEW' in text
        paths.append(tmp_path / f"{place}.toml")
        paths[-1].write_text(text)
    joined = merge_schemas(paths)
    assert f'who = "category"  # {LEARNED}; does it name persons? If so, leave it out; REVIEW' in joined
    with pytest.raises(InputError, match="1 lines of the schema have the mark REVIEW, .* does it name persons"):
        check_reviewed(joined)
    content = clinic(who=[LAST[number % 8] for number in range(ROWS)])
    text = suggest_schema(write_csv(tmp_path / "table.csv", content, tuple(content)), "outcome", private=True)
    assert not [name for name in LAST if name in text]
