"""Public tables, split over five organisations with realistic differences.

The organisations have very different sizes, some have missing values or a missing column, and the small ones lack some
categories. `breast-cancer` and `diabetes` come with scikit-learn; `adult` and `credit-default` (UCI) are read from the
folder in `CGD_DATA`, and `encode` returns them undivided. `cgd.experiments.trades` has organisations whose records are
of different kinds.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.experiments import data_files
from cgd.federation.data_schema import Column, Data
from cgd.files import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Cells = npt.NDArray[np.str_]
    Floats = npt.NDArray[np.float64]
    Integers = npt.NDArray[np.int64]

# Fractions of the records per organisation, for tables with hundreds and with many thousands of records.
SMALL_TABLE_PARTS, LARGE_TABLE_PARTS = (0.50, 0.30, 0.14, 0.045, 0.015), (0.50, 0.33, 0.13, 0.036, 0.004)
MAX_SMALL_TABLE_RECORDS = 10_000
LETTERS = "abcde"
HELD_OUT_FRACTION = 0.2

ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CREDIT_CATEGORIES = ("SEX", "EDUCATION", "MARRIAGE")


@dataclass(frozen=True)
class SourceTable:
    """A table before it is split, as text.

    Attributes:
        kind: kind of the organisations, such as "hospital".
        data: schema.
        training: records to split, one row each, in the order of `data.names` and the target.
        held_out: records for the final test, not used for training.
        uneven_column: column whose rarer categories the small organisations do not have; empty for none.
    """

    kind: str
    data: Data
    training: Cells
    held_out: Cells
    uneven_column: str = ""


@dataclass(frozen=True)
class Organisations:
    """The tables of five organisations.

    Attributes:
        data: schema.
        tables: records of each organisation, with missing values, by name; largest first.
        held_out: records for the final test, without missing values.
        own_held_out: records for the final test as each organisation has them, with its missing values, by name.
    """

    data: Data
    tables: dict[str, Cells]
    held_out: Cells
    own_held_out: dict[str, Cells]

    def write(self, folder: Path) -> list[Path]:
        """Write a CSV file for each organisation, and `test.csv`; return their paths.

        Raises:
            InputError: a file exists, or cannot be written.
        """
        header = (*self.data.names, self.data.target)
        return [
            write_table(folder / f"{name}.csv", [header, *cells.tolist()])
            for name, cells in {**self.tables, "test": self.held_out}.items()
        ]


def write_table(path: Path, rows: Sequence[Sequence[str]], delimiter: str = ",") -> Path:
    """Write a new CSV file, and return its path.

    Raises:
        InputError: the file exists, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", newline="", encoding="utf-8") as file:
            write_rows(file, rows, delimiter)
    except FileExistsError:
        raise InputError(f"{path} exists and is never overwritten; name another folder") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another folder") from None
    return path


def split(name: str, seed: int = 0) -> Organisations:
    """Split a data set over five organisations.

    Raises:
        InputError: the name is unknown, or the files of the data set are not found.

    Examples:
        >>> {name: len(cells) for name, cells in split("breast-cancer").tables.items()}
        {'hospital-a': 230, 'hospital-b': 136, 'hospital-c': 63, 'hospital-d': 20, 'hospital-e': 6}
    """
    if name not in SOURCES:
        raise InputError(f"there is no data set {name!r}; choose one of {', '.join(SOURCES)}")
    source, random = SOURCES[name](), np.random.default_rng(seed)
    has_common_category = _common_category_mask(source, source.training)
    order = random.permutation(len(source.training))
    # Small organisations get records with common categories only, the large ones get the rest.
    candidates = [index for index in order if has_common_category[index]]
    parts = LARGE_TABLE_PARTS if len(order) > MAX_SMALL_TABLE_RECORDS else SMALL_TABLE_PARTS
    sizes = [int(part * len(order)) for part in parts]
    small: list[Any] = []
    for size in reversed(sizes[2:]):
        small.append(np.array(candidates[:size]))
        candidates = candidates[size:]
    rest = order[~np.isin(order, np.concatenate(small))]
    first = len(order) - sum(sizes[1:])
    tables = {}
    for letter, indices in zip(LETTERS, [rest[:first], rest[first:], *reversed(small)], strict=True):
        tables[f"{source.kind}-{letter}"] = _remove_values(source.data, source.training[indices], letter, random)
    common = source.held_out[_common_category_mask(source, source.held_out)]
    own_held_out = {
        name: _remove_values(source.data, source.held_out if letter in LETTERS[:2] else common, letter, random)
        for name, letter in zip(tables, LETTERS, strict=True)
    }
    return Organisations(source.data, tables, source.held_out, own_held_out)


def _common_category_mask(source: SourceTable, cells: Cells) -> npt.NDArray[np.bool_]:
    """Return a mask of the cells that have one of the two most frequent categories of the uneven column."""
    if not source.uneven_column:
        return np.ones(len(cells), dtype=np.bool_)
    place = source.data.names.index(source.uneven_column)
    names, counts = np.unique(source.training[:, place], return_counts=True)
    return np.isin(cells[:, place], names[np.argsort(counts)[-2:]])


def _remove_values(data: Data, cells: Cells, letter: str, random: np.random.Generator) -> Cells:
    """Remove values: 3 % of all at organisation b, one whole column at c, 30 % of the first column at d."""
    cells = cells.astype(object)
    count = len(data.names)
    if letter == "b":
        cells[:, :count][random.random((len(cells), count)) < 0.03] = ""
    elif letter == "c":
        cells[:, _last_number_column(data)] = "NA"
    elif letter == "d":
        cells[random.random(len(cells)) < 0.3, 0] = ""
    return cells.astype(str)


def _last_number_column(data: Data) -> int:
    return max(index for index, column in enumerate(data.columns) if column.type == "number")


def _bundled(name: str, kind: str, target: str, task: Any, classes: tuple[str, ...]) -> SourceTable:
    """Return a table bundled with scikit-learn."""
    from sklearn import datasets

    options = {} if name != "diabetes" else {"scaled": False}
    bunch = getattr(datasets, f"load_{name}")(**options)
    names = [each.replace(" ", "_") for each in bunch.feature_names]
    categories = {"sex"} if name == "diabetes" else set()
    columns = tuple(Column(each, "category" if each in categories else "number") for each in names)
    features = [[f"{value:g}" for value in row] for row in bunch.data]
    labels = [classes[int(value)] if classes else f"{value:g}" for value in bunch.target]
    cells = np.array([[*row, label] for row, label in zip(features, labels, strict=True)])
    training, held_out = _hold_out(cells)
    return SourceTable(kind, Data(target, columns, task, classes), training, held_out)


def _hold_out(cells: Cells) -> tuple[Cells, Cells]:
    order = np.random.default_rng(0).permutation(len(cells))
    count = round(HELD_OUT_FRACTION * len(cells))
    return cells[order[count:]], cells[order[:count]]


def _adult(data_dir: Path | None = None) -> SourceTable:
    def read(name: str) -> Cells:
        rows = (line.rstrip(".\n").split(", ") for line in _read_lines("adult", f"{name}.gz", data_dir))
        return np.array([row for row in rows if len(row) == len(ADULT)])

    columns = tuple(Column(each, "number" if each in ADULT_NUMBERS else "category") for each in ADULT[:-1])
    data = Data("income", columns, classes=("<=50K", ">50K"))
    return SourceTable("office", data, read("adult.data"), read("adult.test"), "native-country")


def _credit_default(data_dir: Path | None = None) -> SourceTable:
    rows = list(csv.reader(_read_lines("credit-default", "UCI_Credit_Card.csv.gz", data_dir)))
    names = rows[0][1:-1]  # without the ID and the target
    columns = tuple(Column(each, "category" if each in CREDIT_CATEGORIES else "number") for each in names)
    training, held_out = _hold_out(np.array([row[1:] for row in rows[1:]]))
    return SourceTable("bank", Data("default", columns, classes=("0", "1")), training, held_out, "EDUCATION")


def _read_lines(folder: str, file: str, data_dir: Path | None) -> list[str]:
    path = data_files.find(file, (folder,), data_dir)
    if path is None:
        raise InputError(
            f"{file} of the data set {folder} is not on this machine; put it into "
            f"{data_files.suggested_folder(folder, data_dir)}, or set CGD_DATA to the parent of a folder {folder}"
        )
    try:
        return gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged ({error}); replace it") from None


def encode(name: str, data_dir: Path | None = None) -> tuple[Floats, Integers, Floats, Integers]:
    """Return the features and classes of the training and of the held-out records of a large table.

    A category has one feature for each of its values; as the data are public, so are these values.

    Args:
        name: one of LARGE.
        data_dir: folder to search first.

    Raises:
        InputError: the files are not found, or damaged.
    """
    source = LARGE[name](data_dir)
    cells = np.concatenate([source.training, source.held_out])
    features: list[Floats] = []
    for column, values in zip(source.data.columns, cells.T, strict=False):
        if column.type == "number":
            features.append(values.astype(np.float64).reshape(-1, 1))
        else:
            features.append((values[:, None] == np.unique(values)).astype(np.float64))
    labels = np.searchsorted(source.data.classes, cells[:, -1])
    count = len(source.training)
    x = np.concatenate(features, axis=1)
    return x[:count], labels[:count], x[count:], labels[count:]


LARGE: dict[str, Callable[[Path | None], SourceTable]] = {"adult": _adult, "credit-default": _credit_default}
SOURCES: dict[str, Callable[[], SourceTable]] = {
    "breast-cancer": lambda: _bundled(
        "breast_cancer", "hospital", "diagnosis", "classification", ("malignant", "benign")
    ),
    "diabetes": lambda: _bundled("diabetes", "clinic", "progression", "regression", ()),
    "adult": _adult,
    "credit-default": _credit_default,
}
