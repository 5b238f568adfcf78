"""Real tables, split over five organisations as they are in life.

They are of very different sizes, some do not measure or do not fill in what others do, and some have never seen
categories that others have. `breast-cancer` and `diabetes` come with scikit-learn; `adult` and `credit-default` (UCI)
are found where `CGD_DATA` says.
"""

from __future__ import annotations

import csv
import gzip
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.csv_writer import write_rows
from cgd.errors import InputError
from cgd.federation.data_schema import Column, Data

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Cells = npt.NDArray[np.str_]

# How large the organisations are, of tables with hundreds and with many thousands of records.
SMALL_PARTS, LARGE_PARTS = (0.50, 0.30, 0.14, 0.045, 0.015), (0.50, 0.33, 0.13, 0.036, 0.004)
MANY_RECORDS = 10_000
LETTERS = "abcde"
HELD_OUT = 0.2

ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CREDIT_CATEGORIES = ("SEX", "EDUCATION", "MARRIAGE")


@dataclass(frozen=True)
class Whole:
    """A table before it is split, as text.

    Attributes:
        kind: what the organisations are called, such as "hospital".
        data: its schema.
        training: the records to be split, one row each, in the order of `data.names` and the target.
        held_out: records for a last test that nobody trains on.
        rare: the column whose rarer categories the smaller organisations do not have.
    """

    kind: str
    data: Data
    training: Cells
    held_out: Cells
    rare: str = ""


@dataclass(frozen=True)
class Organisations:
    """A table that was split.

    Attributes:
        data: its schema.
        tables: the records of every organisation, with gaps, by name; largest first.
        held_out: records for a last test, without gaps.
    """

    data: Data
    tables: dict[str, Cells]
    held_out: Cells

    def write(self, folder: Path) -> list[Path]:
        """Write a CSV file for each of them, and `test.csv`.

        Raises:
            InputError: one of them exists, or cannot be written.
        """
        written = []
        for name, cells in {**self.tables, "test": self.held_out}.items():
            path = folder / f"{name}.csv"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with path.open("x", newline="", encoding="utf-8") as file:
                    write_rows(file, [(*self.data.names, self.data.target), *cells.tolist()])
            except FileExistsError:
                raise InputError(f"{path} exists and is never overwritten; name another folder") from None
            except OSError as error:
                raise InputError(f"{path} cannot be written ({error.strerror}); name another folder") from None
            written.append(path)
        return written


def split(name: str, seed: int = 0) -> Organisations:
    """A data set by name, over five organisations.

    Raises:
        InputError: there is no such data set, or its files are nowhere.

    Examples:
        >>> {name: len(cells) for name, cells in split("breast-cancer").tables.items()}
        {'hospital-a': 230, 'hospital-b': 136, 'hospital-c': 63, 'hospital-d': 20, 'hospital-e': 6}
    """
    if name not in SOURCES:
        raise InputError(f"there is no data set {name!r}; choose one of {', '.join(SOURCES)}")
    whole, random = SOURCES[name](), np.random.default_rng(seed)
    common = _common(whole)
    places = random.permutation(len(whole.training))
    # The small ones have common categories only: their records are taken from those, and the large ones have the rest.
    small = [place for place in places if common[place]]
    parts = LARGE_PARTS if len(places) > MANY_RECORDS else SMALL_PARTS
    sizes = [int(part * len(places)) for part in parts]
    taken: list[Any] = []
    for size in reversed(sizes[2:]):
        taken.append(np.array(small[:size]))
        small = small[size:]
    rest = places[~np.isin(places, np.concatenate(taken))]
    first = len(places) - sum(sizes[1:])
    tables = {}
    for letter, part in zip(LETTERS, [rest[:first], rest[first:], *reversed(taken)], strict=True):
        tables[f"{whole.kind}-{letter}"] = _gaps(whole, whole.training[part], letter, random)
    return Organisations(whole.data, tables, whole.held_out)


def _common(whole: Whole) -> npt.NDArray[np.bool_]:
    """Which records have the commonest category of the column whose rarer ones are not everywhere."""
    if not whole.rare:
        return np.ones(len(whole.training), dtype=np.bool_)
    values = whole.training[:, whole.data.names.index(whole.rare)]
    names, counts = np.unique(values, return_counts=True)
    return np.isin(values, names[np.argsort(counts)[-2:]])


def _gaps(whole: Whole, cells: Cells, letter: str, random: np.random.Generator) -> Cells:
    """Values as they are not filled in: now and then at b, one column never at c, another often at d."""
    cells = cells.astype(object)
    count = len(whole.data.names)
    if letter == "b":
        cells[:, :count][random.random((len(cells), count)) < 0.03] = ""
    elif letter == "c":
        cells[:, _last_number(whole.data)] = "NA"
    elif letter == "d":
        cells[random.random(len(cells)) < 0.3, 0] = ""
    return cells.astype(str)


def _last_number(data: Data) -> int:
    return max(place for place, each in enumerate(data.columns) if each.type == "number")


def _embedded(name: str, kind: str, target: str, task: Any, classes: tuple[str, ...]) -> Whole:
    from sklearn import datasets

    options = {} if name != "diabetes" else {"scaled": False}
    bunch = getattr(datasets, f"load_{name}")(**options)
    names = [each.replace(" ", "_") for each in bunch.feature_names]
    codes = {"sex"} if name == "diabetes" else set()
    columns = tuple(Column(each, "category" if each in codes else "number") for each in names)
    features = [[f"{value:g}" for value in row] for row in bunch.data]
    labels = [classes[int(value)] if classes else f"{value:g}" for value in bunch.target]
    cells = np.array([[*row, label] for row, label in zip(features, labels, strict=True)])
    training, held_out = _held_out(cells)
    return Whole(kind, Data(target, columns, task, classes), training, held_out)


def _held_out(cells: Cells) -> tuple[Cells, Cells]:
    order = np.random.default_rng(0).permutation(len(cells))
    count = round(HELD_OUT * len(cells))
    return cells[order[count:]], cells[order[:count]]


def _adult() -> Whole:
    def read(name: str) -> Cells:
        rows = (line.rstrip(".\n").split(", ") for line in _lines(f"adult/{name}.gz"))
        return np.array([row for row in rows if len(row) == len(ADULT)])

    columns = tuple(Column(each, "number" if each in ADULT_NUMBERS else "category") for each in ADULT[:-1])
    data = Data("income", columns, classes=("<=50K", ">50K"))
    return Whole("office", data, read("adult.data"), read("adult.test"), rare="native-country")


def _credit_default() -> Whole:
    rows = list(csv.reader(_lines("credit-default/UCI_Credit_Card.csv.gz")))
    names = rows[0][1:-1]  # without the ID and the target
    columns = tuple(Column(each, "category" if each in CREDIT_CATEGORIES else "number") for each in names)
    training, held_out = _held_out(np.array([row[1:] for row in rows[1:]]))
    return Whole("bank", Data("default", columns, classes=("0", "1")), training, held_out, rare="EDUCATION")


def _lines(place: str) -> list[str]:
    folder = os.environ.get("CGD_DATA", "")
    path = Path(folder) / place
    if not folder or not path.exists():
        raise InputError(
            f"{place} is not below CGD_DATA ({folder or 'which is not set'}); set it to a folder that has it"
        )
    return gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)


SOURCES: dict[str, Callable[[], Whole]] = {
    "breast-cancer": lambda: _embedded(
        "breast_cancer", "hospital", "diagnosis", "classification", ("malignant", "benign")
    ),
    "diabetes": lambda: _embedded("diabetes", "clinic", "progression", "regression", ()),
    "adult": _adult,
    "credit-default": _credit_default,
}
