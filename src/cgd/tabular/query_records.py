"""Records of a query in an order of their own, and the check that they are the same after a restart.

A database returns rows in any order, and its tables change. A training draws its validation split by the places of the
records, and a participant that was killed continues with the same records. So the records of a query are sorted by
their content, and a digest of them is kept in the folder of the run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cgd.errors import InputError
from cgd.files import write_private
from cgd.json_files import read_json
from cgd.tabular.columns import MISSING_CODE, Categorical

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.dataset import TabularDataset

FORMAT = "cgd records 1"
RECORDS_FILE = "records.json"


def in_fixed_order(records: TabularDataset, data: Data, columns: Sequence[Column]) -> TabularDataset:
    """Return the records, and the categories that are not listed, in an order that follows from their content alone."""
    learned = {each.name for each in columns if each.is_learned}
    categories = {
        name: _sorted_names(values) if name in learned else values for name, values in records.categories.items()
    }
    target = records.target
    if isinstance(target, Categorical) and not data.classes:
        target = _sorted_names(target)
    unordered = replace(records, categories=categories, target=target)
    return unordered.take(np.lexsort(_keys(unordered)))


def digest(records: TabularDataset) -> str:
    """Return a digest of records in a fixed order."""
    found = hashlib.sha256(FORMAT.encode())
    names = [*records.numbers, *records.categories]
    for key in (names, records.ids, records.units, *(each.names for each in _categoricals(records))):
        found.update(json.dumps(key).encode() + b"\n")
    for values in _keys(records):
        found.update(np.ascontiguousarray(values).tobytes())
    return found.hexdigest()


def check_same_records(folder: Path, records: TabularDataset, source: str, *, write: bool) -> None:
    """Check that a query gives the records with which the training began.

    Args:
        folder: the folder of the run.
        records: our records, in a fixed order.
        source: the name of the database.
        write: whether to write the digest, if there is none.

    Raises:
        InputError: the records are others.
    """
    path = folder / RECORDS_FILE
    if not path.exists():
        if write:
            content = {"format": FORMAT, "records": records.rows, "sha256": digest(records)}
            write_private(path, json.dumps(content).encode())
        return
    known = read_json(path, _Document, version=FORMAT, written_by="cgd join --data", remedy="delete it")
    if known.sha256 != digest(records):
        raise InputError(
            f"the query of {source} gives other records than when this training began ({known.records:,} then, "
            f"{records.rows:,} now), and a training continues with the same ones: restore them, or query a copy of the "
            f"database that does not change. Only if it is to continue with those of today, delete {path}"
        )


class _Document(msgspec.Struct):
    """The content of records.json."""

    format: str
    records: int
    sha256: str


def _sorted_names(values: Categorical) -> Categorical:
    """Return the same values with sorted categories."""
    order = sorted(values.names)
    places = {name: place for place, name in enumerate(order)}
    codes = np.array([*(places[name] for name in values.names), MISSING_CODE], dtype=np.int32)
    return Categorical(codes[values.codes], tuple(order))


def _categoricals(records: TabularDataset) -> list[Categorical]:
    target = [records.target] if isinstance(records.target, Categorical) else []
    return [*records.categories.values(), *target]


def _keys(records: TabularDataset) -> list[npt.NDArray[Any]]:
    """Return the columns as numbers to sort by."""
    texts: Sequence[Sequence[str] | None] = (records.units, records.ids)
    keys: list[npt.NDArray[Any]] = [np.unique(each, return_inverse=True)[1] for each in texts if each is not None]
    keys += [each.codes for each in _categoricals(records)]
    if isinstance(records.target, np.ndarray):
        keys.append(records.target)
    keys += [np.where(np.isnan(values), np.nan, values) for values in records.numbers.values()]
    return keys or [np.zeros(records.rows)]
