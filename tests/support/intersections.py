"""Records of people of whom three organisations have some in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.federation.data_schema import Column, Data
from cgd.federation.intersection_section import EACH_LEARNS_WHO, Intersection
from cgd.tabular.dataset import dataset_from_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.tabular.dataset import TabularDataset

SETTINGS = Intersection(5, 2000, EACH_LEARNS_WHO)
DATA = Data("y", (Column("x", "number", held_by=0),), "regression", id="id", intersection=SETTINGS)


def person(number: int) -> str:
    return f"{number * 7919 % 10**9:09d}-{number * 104729 % 10**9:09d}"


def records_of(numbers: Sequence[int], data: Data = DATA) -> TabularDataset:
    """Return records of these people, whose only value is their number."""
    frame = {"x": list(numbers), "id": [person(number) for number in numbers]}
    return dataset_from_frame(frame, data, data.columns, ids=True)[0]


SETS = ([*range(120)], [*range(100, 250), *range(60, 80)], [*range(300, 400), *range(65, 105)])
COMMON = {*range(65, 80), *range(100, 105)}
