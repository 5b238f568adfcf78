"""Records as their owner knows them: their places in its table, and their values in the units of the table.

An attack works on encoded records, and never receives this. The audit shows its guesses beside the real records in this
form, to the owner of the records only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgd.tabular.federated_stats import NumberStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from cgd.tabular.federated_stats import CategoryStats
    from cgd.tabular.preprocessing import Preprocessing

MISSING = "missing"
UNCLEAR = "?"
"""The text for a category if none of its features is set."""
DIGITS = 6
"""Numbers are shown with this many digits of the deviation of their column, which the encoding keeps."""


@dataclass(frozen=True, repr=False)
class RecordTable:
    """The table that encoded records come from.

    Attributes:
        places: where the records of each participant are, such as "line 17", by name.
        preprocessing: the encoding of the records.
    """

    places: Mapping[str, Sequence[str]]
    preprocessing: Preprocessing

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return [each.name for each in self.preprocessing.columns]

    def decode(self, record: torch.Tensor) -> list[str]:
        """Return the values of an encoded record, one for each column; the nearest ones of a guess."""
        values, features = [], record.tolist()
        for column in self.preprocessing.columns:
            own, features = features[: len(column.features)], features[len(column.features) :]
            values.append(_number(column, own) if isinstance(column, NumberStats) else _category(column, own))
        return values


def _number(column: NumberStats, features: Sequence[float]) -> str:
    if len(features) > 1 and features[1] > 0.5:
        return MISSING
    value = column.mean + features[0] * column.deviation
    if not math.isfinite(value):
        return UNCLEAR
    spread = column.deviation or abs(column.mean) or 1.0
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(spread)))
    text = f"{value:.{min(decimals, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _category(column: CategoryStats, features: Sequence[float]) -> str:
    names = [*column.categories, *([MISSING] if column.missing else [])]
    if not features or not max(features) > 0.5:
        return UNCLEAR
    return names[max(range(len(features)), key=lambda place: features[place])]
