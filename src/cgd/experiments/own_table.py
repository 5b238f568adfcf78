"""Tables of a user in a spec: numbers and one-hot categories, with the readers of `cgd.tabular`.

A column of numbers is one feature. A column with texts is a category, with one feature for each of its values. A
missing number is replaced by the mean of the training records, and the column has one more feature that is 1 where a
value is missing; a missing category is a category of its own. Records without a label are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import InputError
from cgd.experiments import data_files
from cgd.experiments.setting_values import suggest
from cgd.federation.data_schema import MISSING, Column, Data
from cgd.tabular.cells import MissingMarkers
from cgd.tabular.column_profile import ColumnProfile
from cgd.tabular.columns import MAX_CATEGORIES, MAX_LEARNED_CLASSES, Categorical
from cgd.tabular.dataset import find_columns, read_dataset
from cgd.tabular.number_columns import MAX_NUMBER
from cgd.tabular.readers import open_table
from cgd.tabular.schema import is_regression
from cgd.tabular.written_numbers import writing

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from cgd.experiments.datasets import Dataset
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.readers import Table

    Array = npt.NDArray[Any]


def read(path: Path, target: str) -> tuple[Array, Array]:
    """Return the features, with NaN for missing numbers, and the labels: texts of classes, or floats.

    Args:
        path: a CSV or Parquet file.
        target: column to predict. Texts, and whole numbers with at most 20 different values, are classes.

    Raises:
        InputError: the file is not a table, lacks the column, or has a column that is not a feature.
    """
    table = open_table(path, [target], MISSING)
    if target not in table.names:
        listed = ", ".join(name for name in table.names if name)
        raise InputError(
            f"{table.title} has no column {target!r}{suggest(target, table.names)}; set target to one of {listed}"
        )
    profiles = _profiles(table, target)
    label = profiles.pop(target)
    _check_target(table.title, target, label)
    if not profiles:
        raise InputError(f"{table.title} has no column but {target!r}; there must be others to predict it from")
    columns = tuple(Column(name, _kind(table.title, name, each)) for name, each in profiles.items())
    widths = (len(profiles[each.name].values) if each.type == "category" else 1 for each in columns)
    data_files.check_memory(table.title, label.rows * sum(widths))
    markers = [text for each in (*profiles.values(), label) for text in each.markers]
    data = Data(
        target,
        columns,
        "regression" if is_regression(label) else "classification",
        missing=tuple(dict.fromkeys((*MISSING, *markers))),
    )
    records, _ = read_dataset(path, data, columns)
    features = [_encoded(records, column) for column in columns]
    labels = records.target
    if isinstance(labels, Categorical):
        return np.concatenate(features, axis=1), np.array(labels.names)[labels.codes]
    return np.concatenate(features, axis=1), np.asarray(labels)


def fill_missing(data: Dataset) -> Dataset:
    """Return the data with missing numbers replaced by the means of the training records (0 if all are missing)."""
    present = ~data.x.isnan()
    means = data.x.nan_to_num().sum(dim=0) / present.sum(dim=0).clamp(min=1)
    x, held_out_x = (torch.where(each.isnan(), means, each) for each in (data.x, data.held_out_x))
    return replace(data, x=x, held_out_x=held_out_x)


def _profiles(table: Table, target: str) -> dict[str, ColumnProfile]:
    names = [name for name in dict.fromkeys(table.names) if name]
    positions = find_columns(table, names, target)
    profiles, missing = {name: ColumnProfile() for name in names}, MissingMarkers(MISSING)
    records = 0
    for arrays in table.batches(positions):
        records += len(arrays[0])
        data_files.check_memory(table.title, records * len(names))
        for name, array in zip(names, arrays, strict=True):
            try:
                profiles[name].add_batch(array, missing)
            except (NotImplementedError, ValueError):  # the classes of Arrow's errors for lists, bytes, …
                raise InputError(
                    f"{table.title}: column {name!r} is of the type {array.type}, neither numbers nor texts; remove it"
                ) from None
    return profiles


def _check_target(title: str, target: str, profile: ColumnProfile) -> None:
    if not profile.present:
        raise InputError(f"{title}: no record has a value in column {target!r}; name another target")
    _check_numbers(title, target, profile)
    if is_regression(profile):
        return
    if _all_differ(profile):
        raise InputError(
            f"{title}: column {target!r} has {profile.present} classes, as many as records; name another target, or "
            "write numbers to predict as decimals, such as 3.5"
        )
    if len(profile.values) > MAX_LEARNED_CLASSES:
        raise InputError(
            f"{title}: column {target!r} has more than {MAX_LEARNED_CLASSES} classes; group them, or name another one"
        )


def _all_differ(profile: ColumnProfile) -> bool:
    """Return whether no two records have the same value; only so many different values are counted."""
    count = len(profile.values)
    return count == profile.present or (count > MAX_CATEGORIES and profile.distinct)


def _kind(title: str, name: str, profile: ColumnProfile) -> Any:
    """Return the type of a column, "number" or "category".

    Raises:
        InputError: it has no values, or looks like an identifier or free text.
    """
    if not profile.present:
        raise InputError(f"{title}: column {name!r} has no values; remove it from the file")
    _check_numbers(title, name, profile)
    if profile.numeric:
        return "number"
    if _all_differ(profile) or len(profile.values) > MAX_CATEGORIES:
        many = "a different text in each record" if _all_differ(profile) else f"more than {MAX_CATEGORIES} texts"
        raise InputError(f"{title}: column {name!r} has {many}: an identifier or free text? Remove it from the file")
    return "category"


def _check_numbers(title: str, name: str, profile: ColumnProfile) -> None:
    """Raise InputError for numbers that are too large, not written plainly, or with other texts among them."""
    large = [number for number in profile.numbers if not abs(number) <= MAX_NUMBER]
    if large and len(profile.numbers) > len(profile.texts):
        raise InputError(
            f"{title}: column {name!r} has the number {large[0]}, beyond {MAX_NUMBER:.0e}; correct it, or leave the "
            "cell empty"
        )
    if written := [text for text in profile.texts if writing(text) in profile.writings]:
        raise InputError(
            f"{title}: column {name!r} has numbers such as {min(written)!r}; write them without units, signs and "
            "thousands separators, and decimals with a point"
        )
    if profile.remarks:
        raise InputError(
            f"{title}: column {name!r} has numbers, and {profile.remarks} texts that are none, such as "
            f"{min(set(profile.texts) - set(profile.markers))!r}; correct them, or leave the cells empty"
        )


def _encoded(records: TabularDataset, column: Column) -> Array:
    """Return the features of a column."""
    if column.type == "number":
        values = records.numbers[column.name]
        missing = np.isnan(values)
        return np.column_stack([values, missing]) if missing.any() else values.reshape(-1, 1)
    found = records.categories[column.name]
    codes = range(-1 if found.missing else 0, len(found.names))
    return np.column_stack([found.codes == code for code in codes]).astype(np.float64)
