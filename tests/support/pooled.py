"""What scikit-learn makes of one table with everybody's records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column

NOTHING = "nothing of the kind"


def matrix(
    table: Mapping[str, Sequence[Any]], columns: Sequence[Column], fitted_on: Mapping[str, Sequence[Any]] | None = None
) -> npt.NDArray[np.float64]:
    """The features of a table of numbers and texts (None is missing), by the statistics of another or its own."""
    parts = []
    for column in columns:
        values = np.array(table[column.name], dtype=float if column.type == "number" else object)[:, None]
        base = np.array((fitted_on or table)[column.name], dtype=values.dtype)[:, None]
        parts.append(_number(values, base) if column.type == "number" else _category(values, base, column))
    return np.hstack(parts)


def _number(values: npt.NDArray[Any], base: npt.NDArray[Any]) -> npt.NDArray[Any]:
    scaler = StandardScaler().fit(base)
    imputer = SimpleImputer(strategy="constant", fill_value=0, add_indicator=True, keep_empty_features=True)
    filled: npt.NDArray[Any] = imputer.fit(scaler.transform(base)).transform(scaler.transform(values))
    return filled


def _category(values: npt.NDArray[Any], base: npt.NDArray[Any], column: Column) -> npt.NDArray[Any]:
    missing, any_missing = values == None, (base == None).any()  # noqa: E711  element by element
    kept = base[base != None][:, None]  # noqa: E711
    listed = [np.array(column.categories, dtype=object)] if column.categories else "auto"
    encoder = OneHotEncoder(categories=listed, handle_unknown="ignore", sparse_output=False).fit(kept)
    encoded = encoder.transform(np.where(missing, NOTHING, values))
    return np.hstack([encoded, missing.astype(float)]) if any_missing else encoded
