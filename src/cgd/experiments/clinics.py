"""Tables of four clinics with the differences that exported tables have: `cgd sample DIR --dataset clinics`.

The records are those of scikit-learn's diabetes study: 442 patients with age, body mass index, blood pressure, lipids
and glucose, and the progression of the disease after a year, here as a class. Names, numbers and dates of birth are
invented. Each clinic exports them in its own way:

- a: as a spreadsheet, with a number, a name and a date of birth for each patient, and a ward that two patients have;
- b: cholesterol in mmol/l instead of mg/dl, 999 for a blood pressure that was not measured, and some rows twice;
- c: with semicolons, decimal commas and dates as 31.12.1950; 1 and 2 for the sex;
- d: names of columns in capitals, 0 and 1 for the class, and no glucose.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

import numpy as np

from cgd.experiments.organisations import write_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TARGET = "progressed"
NAMES = ("number", "patient", "born", "ward", "age", "sex", "bmi", "pressure", "cholesterol", "hdl", "glucose", TARGET)
SIZES = {"clinic-a": 160, "clinic-b": 110, "clinic-c": 80, "clinic-d": 50}
MEDIAN_PROGRESSION = 140.0
MG_PER_MMOL = 38.67  # of cholesterol, for a decilitre and a litre
STUDY = date(2003, 6, 1)
FIRST_NAMES = ("Ada", "Ben", "Cem", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jin", "Kim", "Lea", "Max", "Noor")
LAST_NAMES = (
    *("Abel", "Berg", "Chen", "Diaz", "Egli", "Fuchs", "Garcia", "Haas", "Ito", "Jensen", "Kaya", "Lang", "Moser"),
    *("Novak", "Ott", "Park", "Quinn", "Roth", "Suter", "Tran", "Ulrich", "Vogel", "Weber", "Xu", "Young", "Zhou"),
)

Record = dict[str, str]


@dataclass(frozen=True)
class Export:
    """The table of one clinic.

    Attributes:
        header: the names of its columns.
        rows: its records.
        delimiter: between the values of a row.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    delimiter: str = ","

    def __len__(self) -> int:
        return len(self.rows)


def exports(seed: int = 0) -> dict[str, Export]:
    """Return the tables of the clinics, and `test`, which no clinic has, by name.

    Examples:
        >>> {name: len(export) for name, export in exports().items()}
        {'clinic-a': 160, 'clinic-b': 114, 'clinic-c': 80, 'clinic-d': 50, 'test': 42}
        >>> exports()["clinic-c"].rows[0][5:8]
        ('2', '22,1', '87')
    """
    random = np.random.default_rng(seed)
    records = _records(random)
    found = {}
    for name, size in SIZES.items():
        own, records = records[:size], records[size:]
        found[name] = EXPORTERS[name](_numbered(own), random)
    found["test"] = _spreadsheet(_numbered(records), random)
    return found


def write(folder: Path, tables: dict[str, Export]) -> list[Path]:
    """Write a CSV file for each table; return their paths.

    Raises:
        InputError: a file exists, or cannot be written.
    """
    return [
        write_table(folder / f"{name}.csv", [each.header, *each.rows], each.delimiter) for name, each in tables.items()
    ]


def _records(random: np.random.Generator) -> list[Record]:
    """Return all records in random order, with invented names and dates of birth."""
    from sklearn.datasets import load_diabetes

    study = load_diabetes(scaled=False)
    found = []
    for place in random.permutation(len(study.target)):
        age, sex, bmi, pressure, cholesterol, _, hdl, _, _, glucose = study.data[place]
        born = STUDY - timedelta(days=int(365.25 * age) + int(random.integers(365)))
        found.append(
            {
                "patient": f"{random.choice(LAST_NAMES)}, {random.choice(FIRST_NAMES)}",
                "born": born.isoformat(),
                "ward": str(random.choice(("diabetes", "general", "heart"), p=(0.5, 0.3, 0.2))),
                "age": f"{age:g}",
                "sex": "F" if sex == 1 else "M",
                "bmi": f"{bmi:g}",
                "pressure": f"{pressure:g}",
                "cholesterol": f"{cholesterol:g}",
                "hdl": f"{hdl:g}",
                "glucose": f"{glucose:g}",
                TARGET: "yes" if study.target[place] > MEDIAN_PROGRESSION else "no",
            }
        )
    return found


def _numbered(records: Sequence[Record]) -> list[Record]:
    return [{"number": str(1001 + place), **record} for place, record in enumerate(records)]


def _rows(records: Sequence[Record], names: Sequence[str] = NAMES) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(record[name] for name in names) for record in records)


def _spreadsheet(records: list[Record], random: np.random.Generator) -> Export:
    for place in random.choice(len(records), 2, replace=False):
        records[place]["ward"] = "palliative"
    return Export(NAMES, _rows(records))


def _other_unit(records: list[Record], random: np.random.Generator) -> Export:
    for record in records:
        record["cholesterol"] = f"{float(record['cholesterol']) / MG_PER_MMOL:.2f}"
    for place in random.choice(len(records), 9, replace=False):
        records[place]["pressure"] = "999"
    return Export(NAMES, _rows([*records, *records[:4]]))


def _decimal_commas(records: list[Record], _: np.random.Generator) -> Export:
    for record in records:
        record["sex"] = {"F": "1", "M": "2"}[record["sex"]]
        record["born"] = f"{date.fromisoformat(record['born']):%d.%m.%Y}"
        for name in ("bmi", "pressure", "cholesterol", "hdl", "glucose"):
            record[name] = record[name].replace(".", ",")
    return Export(NAMES, _rows(records), ";")


def _capitals(records: list[Record], _: np.random.Generator) -> Export:
    for record in records:
        record[TARGET] = {"no": "0", "yes": "1"}[record[TARGET]]
    names = [name for name in NAMES if name != "glucose"]
    return Export(tuple(name.upper() if name == "bmi" else name.capitalize() for name in names), _rows(records, names))


EXPORTERS: dict[str, Callable[[list[Record], np.random.Generator], Export]] = {
    "clinic-a": _spreadsheet,
    "clinic-b": _other_unit,
    "clinic-c": _decimal_commas,
    "clinic-d": _capitals,
}
