"""The matrix that scikit-learn computes from one table with all members' records."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column

UNKNOWN = "an unknown category"
OTHER = "other"


def folded(
    table: Mapping[str, Sequence[Any]], columns: Sequence[Column], members: Sequence[Sequence[int]], rare: int
) -> dict[str, list[Any]]:
    """Return a table with "other" for values of learned categories that are rare, or that only one member has.

    Listed values that are rare are missing. So are numbers of a member that has few of them in a column, or few that
    differ from its most frequent one.

    Args:
        table: the values of all records, by column.
        columns: the columns.
        members: the positions of each member's records.
        rare: the number of records that a member must have of a value, or with a number, for them to be kept.
    """
    result = {name: list(values) for name, values in table.items()}
    for column in columns:
        if column.type == "number":
            for member in members:
                _drop_few_numbers(result[column.name], member, rare)
            continue
        values, owners = table[column.name], Counter[Any]()
        counts = [Counter(values[place] for place in member) for member in members]
        for count in counts:
            owners.update(value for value, number in count.items() if number >= rare)
        for member, count in zip(members, counts, strict=True):
            for place in member:
                value = values[place]
                if value is not None and column.categories and count[value] < rare:
                    result[column.name][place] = None
                elif value is not None and not column.categories and (count[value] < rare or owners[value] < 2):
                    result[column.name][place] = OTHER
    return result


def _drop_few_numbers(values: list[Any], member: Sequence[int], rare: int) -> None:
    counts = Counter(values[place] for place in member if values[place] is not None)
    most = max(counts, key=counts.__getitem__, default=None)
    few = counts.total() - counts[most] < rare and len(counts) > 1
    kept = counts[most] if few else counts.total()
    for place in member:
        if kept < rare or (few and values[place] != most):
            values[place] = None


def matrix(table: Mapping[str, Sequence[Any]], columns: Sequence[Column]) -> npt.NDArray[np.float64]:
    """Return the features of a table of numbers and texts; None is a missing value."""
    parts = []
    for column in columns:
        values = np.array(table[column.name], dtype=float if column.type == "number" else object)[:, None]
        parts.append(_number(values) if column.type == "number" else _category(values, column))
    return np.hstack(parts)


def _number(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    scaled = values if np.isnan(values).all() else StandardScaler().fit_transform(values)
    imputer = SimpleImputer(strategy="constant", fill_value=0, add_indicator=True, keep_empty_features=True)
    filled: npt.NDArray[Any] = imputer.fit_transform(scaled)
    return filled


def _category(values: npt.NDArray[Any], column: Column) -> npt.NDArray[Any]:
    missing = values == None  # noqa: E711  element by element
    found = set(values[~missing])
    names = column.categories or (*sorted(found - {OTHER}), *sorted(found & {OTHER}))
    encoder = OneHotEncoder(categories=[np.array(names, dtype=object)], handle_unknown="ignore", sparse_output=False)
    encoded = encoder.fit(np.array(names, dtype=object)[:, None]).transform(np.where(missing, UNKNOWN, values))
    return np.hstack([encoded, missing.astype(float)]) if missing.any() else encoded
