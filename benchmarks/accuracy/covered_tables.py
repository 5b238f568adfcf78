"""Public tables as `[privacy]` needs them: with the categories and the ranges that their documentation states.

Categories are taken from the records, because the documentation of a data set lists the same ones. Ranges are round
numbers that contain what a column can be: percentages, hours of a week, ages of adults, the colour of a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.experiments.organisations import SOURCES
from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import dataset_from_frame

if TYPE_CHECKING:
    from cgd.federation.data_schema import Range
    from cgd.tabular.dataset import TabularDataset

HELD_OUT = 0.2
SYNTHETIC_RECORDS, SYNTHETIC_LIMIT = 20_000, 4.0

ADULT: dict[str, Range] = {
    "age": (0, 100),
    "fnlwgt": (0, 1_500_000),
    "education-num": (1, 16),
    "capital-gain": (0, 100_000),
    "capital-loss": (0, 5_000),
    "hours-per-week": (0, 100),
}
# Amounts are in Taiwan dollars; a payment status is the number of months of delay.
CREDIT: dict[str, Range] = {
    "LIMIT_BAL": (0, 1_000_000),
    "AGE": (18, 100),
    **{f"PAY_{month}": (-2, 9) for month in (0, 2, 3, 4, 5, 6)},
    **{f"BILL_AMT{month}": (-200_000, 1_000_000) for month in range(1, 7)},
    **{f"PAY_AMT{month}": (0, 1_000_000) for month in range(1, 7)},
}
# The highest values of a tumour's measurements; their standard errors are up to a tenth of these.
TUMOURS = {
    "radius": 40.0,
    "texture": 50.0,
    "perimeter": 300.0,
    "area": 5000.0,
    "smoothness": 0.3,
    "compactness": 1.5,
    "concavity": 1.5,
    "concave_points": 0.3,
    "symmetry": 0.7,
    "fractal_dimension": 0.3,
}


@dataclass(frozen=True)
class CoveredTable:
    """A table with a schema that `[privacy]` accepts.

    Attributes:
        data: the schema.
        training: the records to train on.
        held_out: the records for the test.
    """

    data: Data
    training: TabularDataset
    held_out: TabularDataset


def covered(data: Data, cells: Any) -> Data:
    """Return a schema with ranges, and with the categories of these cells."""
    columns = [
        replace(column, range=known_range(column.name)) if column.type == "number" else column
        for column in with_categories(data, cells).columns
    ]
    return replace(data, columns=tuple(columns))


def with_categories(data: Data, cells: Any) -> Data:
    """Return a schema with the categories of these cells."""
    columns = []
    for place, column in enumerate(data.columns):
        categories = sorted(set(cells[:, place].tolist()) - set(data.missing)) if column.type == "category" else ()
        columns.append(replace(column, categories=tuple(categories)))
    return replace(data, columns=tuple(columns))


def known_range(name: str) -> Range:
    """Return the range of a number column of Adult, credit default or the tumours."""
    if name in ADULT or name in CREDIT:
        return (ADULT | CREDIT)[name]
    measured = name.removesuffix("_error").removeprefix("mean_").removeprefix("worst_")
    return (0.0, TUMOURS[measured] / (10 if name.endswith("_error") else 1))


def read_cells(data: Data, cells: Any) -> TabularDataset:
    """Return cells, in the order of the columns and the target, as records."""
    frame = {name: cells[:, column].tolist() for column, name in enumerate((*data.names, data.target))}
    return dataset_from_frame(frame, data, data.columns, target=True)[0]


@cache
def load(name: str) -> CoveredTable:
    """Return a table by its name.

    Raises:
        InputError: it has to be in the folder CGD_DATA, and is not.
    """
    if name == "digits":
        return _digits()
    if name.startswith("synthetic-"):
        return _synthetic(int(name.removeprefix("synthetic-")))
    source = SOURCES[{"tumours": "breast-cancer"}.get(name, name)]()
    data = covered(source.data, np.concatenate([source.training, source.held_out]))
    return CoveredTable(data, read_cells(data, source.training), read_cells(data, source.held_out))


def _digits() -> CoveredTable:
    """Return handwritten digits of 8 × 8 pixels: is the digit even or odd?"""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return _numbers(bunch.data, np.where(bunch.target % 2 == 0, "even", "odd"), ("even", "odd"), (0.0, 16.0))


def _synthetic(columns: int) -> CoveredTable:
    """Return normal numbers, and a class whose log-odds are a linear function of them, of standard deviation 3."""
    random = np.random.default_rng(columns)
    x = random.standard_normal((SYNTHETIC_RECORDS, columns))
    weights = random.standard_normal(columns)
    odds = x @ (3 * weights / np.linalg.norm(weights))
    y = np.where(random.random(SYNTHETIC_RECORDS) < 1 / (1 + np.exp(-odds)), "yes", "no")
    return _numbers(x, y, ("no", "yes"), (-SYNTHETIC_LIMIT, SYNTHETIC_LIMIT))


def _numbers(x: Any, y: Any, classes: tuple[str, ...], limits: Range) -> CoveredTable:
    columns = tuple(Column(f"x{place}", "number", range=limits) for place in range(x.shape[1]))
    data = Data("y", columns, classes=classes)
    order = np.random.default_rng(0).permutation(len(x))
    count = round(HELD_OUT * len(x))

    def read(places: Any) -> TabularDataset:
        frame = {each.name: x[places, index].tolist() for index, each in enumerate(columns)} | {"y": y[places].tolist()}
        return dataset_from_frame(frame, data, columns, target=True)[0]

    return CoveredTable(data, read(order[count:]), read(order[:count]))
