"""The tables of four clinics that export the same records differently."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest

from cgd.errors import InputError
from cgd.experiments.clinics import NAMES, exports, write

if TYPE_CHECKING:
    from pathlib import Path


def test_every_patient_of_the_study_is_in_one_table() -> None:
    tables = exports()
    assert sum(len(set(each.rows)) for each in tables.values()) == 442
    assert exports() == tables != exports(seed=1)


def test_clinics_differ_as_described(tmp_path: Path) -> None:
    paths = {path.stem: path for path in write(tmp_path / "tables", exports())}

    def column(clinic: str, name: str, delimiter: str = ",") -> list[str]:
        with paths[clinic].open(newline="") as file:
            return [row[name] for row in csv.DictReader(file, delimiter=delimiter)]

    assert column("clinic-a", "ward").count("palliative") == 2
    assert max(map(float, column("clinic-b", "cholesterol"))) < 10 < min(map(float, column("clinic-a", "cholesterol")))
    assert column("clinic-b", "pressure").count("999") >= 9
    assert set(column("clinic-c", "sex", ";")) == {"1", "2"}
    assert any("," in value for value in column("clinic-c", "bmi", ";"))
    assert set(column("clinic-d", "Progressed")) == {"0", "1"}
    assert "glucose" not in paths["clinic-d"].read_text().partition("\n")[0].lower()
    assert tuple(paths["test"].read_text().partition("\n")[0].split(",")) == NAMES


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path, exports())
    with pytest.raises(InputError, match=r"clinic-a.csv exists and is never overwritten"):
        write(tmp_path, exports())
