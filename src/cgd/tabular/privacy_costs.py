"""The cost of differential privacy: by how much private training of a table is worse than exact training, as measured.

`make privacy-results` trains models on public tables with and without noise, and writes the losses of accuracy and AUC
to `privacy_costs.json` in this package. Here they are looked up for a setting that was not measured.

**What the noise depends on.** All members divide by n, the number of training records, so one step of T has noise of
the standard deviation C·√T·√(m/(m − t))/(μ·n) in each coordinate (docs/differential-privacy.md). The output of a model
for a record with p standardised columns adds up p or so of these. So the ratio of signal to noise depends on

    s = n·μ·√((m − t)/m)/√p

whatever ε, m, t, n and p are. A category column counts as one column, because a record has one of its categories. In
the measurements (results/privacy), logistic regressions with equal s and different n, ε, m, t and p have about the same
loss; it is somewhat smaller with fewer records, where the exact model is worse, too. For networks, more columns cost
more than √p says, so the range over the data sets is wider.

Between two measured s, losses are interpolated. Outside of what was measured, there is no answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
from msgspec import Struct

from cgd.dp.accountant import epsilon_of, mu_of
from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError
from cgd.json_files import decode_json

FILE = "privacy_costs.json"
COLUMNS_FACTOR = 2
"""The table is used for up to twice as many columns as were measured, and for half as few."""

Metric = Literal["accuracy", "auc"]
ModelKind = Literal["logistic", "mlp"]


class CostPoint(Struct, frozen=True):
    """Mean losses at one ratio of signal to noise.

    Attributes:
        signal: s.
        accuracy: the loss of accuracy, as a fraction: exact minus private.
        auc: the loss of the AUC.
    """

    signal: float
    accuracy: float
    auc: float


class CostCurve(Struct, frozen=True):
    """The losses of one model on one data set.

    Attributes:
        dataset: the name of the data set.
        model: the kind of model.
        columns: the number of its columns.
        records: the lowest and the highest number of training records that were used.
        points: the losses, by rising s.
    """

    dataset: str
    model: ModelKind
    columns: int
    records: tuple[int, int]
    points: tuple[CostPoint, ...]

    def loss(self, signal: float, metric: Metric) -> float | None:
        """Return the loss at s; None if it was not measured."""
        measured = [each.signal for each in self.points]
        if not measured[0] <= signal <= measured[-1]:
            return None
        losses = [getattr(each, metric) for each in self.points]
        return float(np.interp(math.log(signal), np.log(measured), losses))

    def needed(self, loss: float, metric: Metric) -> float | None:
        """Return the lowest measured s from which on the loss stays below `loss`; None if it is not reached.

        Examples:
            >>> points = (CostPoint(10, 0.05, 0.1), CostPoint(100, 0.03, 0.05), CostPoint(1000, 0.01, 0.01))
            >>> round(CostCurve("example", "logistic", 10, (100, 1000), points).needed(0.02, "accuracy"))
            316
        """
        losses = [getattr(each, metric) for each in self.points]
        above = [place for place, each in enumerate(losses) if each > loss]
        if not above:
            return self.points[0].signal
        last = above[-1]
        if last + 1 == len(losses):
            return None
        ends = [math.log(each.signal) for each in self.points[last : last + 2]]
        return math.exp(float(np.interp(-loss, [-losses[last], -losses[last + 1]], ends)))


class CostTable(Struct, frozen=True):
    """The kept table of measurements.

    Attributes:
        settings: the settings of the measured trainings, in words: the table holds for no others.
        curves: the losses.
    """

    settings: str
    curves: tuple[CostCurve, ...]

    @property
    def columns(self) -> tuple[int, int]:
        """The lowest and the highest number of columns."""
        found = [each.columns for each in self.curves]
        return min(found), max(found)

    def of(self, model: ModelKind) -> tuple[CostCurve, ...]:
        """Return the curves of a kind of model."""
        return tuple(each for each in self.curves if each.model == model)


@dataclass(frozen=True)
class PrivateSetting:
    """The setting on which the cost of a private training depends. Invalid values raise an `InputError`.

    Attributes:
        records: the number of all members' training records.
        columns: the number of columns to predict from.
        members: m, the number of members.
        epsilon: ε.
        delta: δ.
        colluders: t.
        quorum: q, the least number of members of a sum; None for m.
    """

    records: float
    columns: int
    members: int
    epsilon: float
    delta: float
    colluders: int = 1
    quorum: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.records < math.inf:
            raise InputError(f"records is {self.records:g}; it is the number of all participants' records, at least 1")
        if self.columns < 1:
            raise InputError(f"columns is {self.columns}; it is the number of columns to predict from, at least 1")
        settings = PrivacySettings(self.epsilon, self.delta, 1, colluders=self.colluders, quorum=self.quorum)
        settings.check_members(self.members)
        settings.check_records(round(self.records))

    @property
    def signal(self) -> float:
        """The ratio of signal to noise s.

        Examples:
            >>> round(PrivateSetting(20_000, 16, members=5, epsilon=1.0, delta=1e-5, colluders=1).signal)
            1199
        """
        return self.records * mu_of(self.epsilon, self.delta) * self._share / math.sqrt(self.columns)

    def records_for(self, signal: float) -> int:
        """Return the number of training records with which s has a value, everything else being equal."""
        return math.ceil(self.records * signal / self.signal)

    def epsilon_for(self, signal: float) -> float:
        """Return the ε with which s has a value, everything else being equal."""
        return epsilon_of(signal * math.sqrt(self.columns) / (self.records * self._share), self.delta)

    @property
    def measured(self) -> bool:
        """True if the table has measurements with about as many columns."""
        low, high = cost_table().columns
        return low <= COLUMNS_FACTOR * self.columns and self.columns <= COLUMNS_FACTOR * high

    @property
    def _share(self) -> float:
        """The necessary part of the noise if all are present: the rest replaces that of colluders and absent members.

        Examples:
            >>> for quorum in (None, 4, 3):
            ...     print(round(PrivateSetting(20_000, 16, 5, 1.0, 1e-5, quorum=quorum)._share, 3))
            0.894
            0.775
            0.632
        """
        quorum = self.members if self.quorum is None else self.quorum
        return math.sqrt((quorum - self.colluders) / self.members)


@cache
def cost_table() -> CostTable:
    """Return the kept table of measurements."""
    return decode_json((files("cgd.tabular") / FILE).read_bytes(), CostTable)


def measured_losses(setting: PrivateSetting, model: ModelKind, metric: Metric = "accuracy") -> dict[str, float]:
    """Return the losses that were measured with as much noise, by data set; empty if there are none."""
    if not setting.measured:
        return {}
    found = {each.dataset: each.loss(setting.signal, metric) for each in cost_table().of(model)}
    return {dataset: loss for dataset, loss in found.items() if loss is not None}


def needed_signals(model: ModelKind, loss: float, metric: Metric = "accuracy") -> dict[str, float | None]:
    """Return the s from which on the loss stays below `loss`, by data set; None where that was not reached."""
    return {each.dataset: each.needed(loss, metric) for each in cost_table().of(model)}
