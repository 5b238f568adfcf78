"""The matrix that scikit-learn computes from one table with all members' records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column

UNKNOWN = "an unknown category"


def matrix(table: Mapping[str, Sequence[Any]], columns: Sequence[Column]) -> npt.NDArray[np.float64]:
    """Return the features of a table of numbers and texts; None is a missing value."""
    parts = []
    for column in columns:
        values = np.array(table[column.name], dtype=float if column.type == "number" else object)[:, None]
        parts.append(_number(values) if column.type == "number" else _category(values, column))
    return np.hstack(parts)


def _number(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    scaled = StandardScaler().fit_transform(values)
    imputer = SimpleImputer(strategy="constant", fill_value=0, add_indicator=True, keep_empty_features=True)
    filled: npt.NDArray[Any] = imputer.fit_transform(scaled)
    return filled


def _category(values: npt.NDArray[Any], column: Column) -> npt.NDArray[Any]:
    missing = values == None  # noqa: E711  element by element
    listed = [np.array(column.categories, dtype=object)] if column.categories else "auto"
    encoder = OneHotEncoder(categories=listed, handle_unknown="ignore", sparse_output=False)
    encoded = encoder.fit(values[~missing][:, None]).transform(np.where(missing, UNKNOWN, values))
    return np.hstack([encoded, missing.astype(float)]) if missing.any() else encoded
