"""Schemas and settings for tests of differential privacy on tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cgd.federation.data_schema import Column, Data
from cgd.federation.privacy_section import PrivacySection
from support.tabular import tabular_settings

if TYPE_CHECKING:
    from cgd.tabular.settings import TabularSettings

COLUMNS = (
    Column("age", "number", range=(0, 120)),
    Column("dose", "number", range=(-20, 20)),
    Column("ward", "category", ("A", "B")),
)
PRIVATE_DATA = Data("outcome", COLUMNS, classes=("well", "ill"))
PRIVATE_REGRESSION = Data("outcome", COLUMNS, "regression", range=(-6, 6))
PRIVATE_SCHEMA = """
[data]
target = "outcome"
classes = ["well", "ill"]
[data.columns]
age = { type = "number", range = [0, 120] }
dose = { type = "number", range = [-20, 20] }
ward = ["A", "B"]
[model]
kind = "mlp"
layers = [8]
[privacy]
epsilon = 8.0
delta = 1e-5
"""


def private_settings(
    data: Data = PRIVATE_DATA, epsilon: float = 8.0, colluders: int = 1, **training: Any
) -> TabularSettings:
    """Return settings with [privacy]; `training` overrides fields of `support.tabular.TRAINING`."""
    section = PrivacySection(epsilon, 1e-5, colluders=colluders)
    return replace(tabular_settings(data, **{"patience": 0, **training}), privacy=section)
