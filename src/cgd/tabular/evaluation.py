"""Evaluate a trained model on our validation records: scores, subgroups, and what its predictions depend on.

Everything is computed from our own records for our own report; nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.reporting.intervals import auc_interval, mean_interval, wilson_interval
from cgd.tabular.metrics import auc
from cgd.tabular.training import forward

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from cgd.peers import Peers
    from cgd.tabular.columns import Categorical
    from cgd.tabular.model import ConfinedModel
    from cgd.tabular.training import SplitRecords

    Floats = npt.NDArray[np.float64]

MIN_GROUP_RECORDS = 10
MAX_GROUPS, MAX_COLUMNS = 8, 12
MIN_CLASS_RECORDS = 10
"""An AUC of a subgroup needs as many records of both classes."""
MAX_COEFFICIENTS = 200
REPEATS = 5
MIN_IMPORTANCE_RECORDS, MAX_IMPORTANCE_RECORDS = 20, 2000
# Features of all records that are predicted for the permutation importance.
MAX_CELLS = 4 * 10**8
SEED = 20210427


def validation_outputs(model: ConfinedModel, trained: SplitRecords, peers: Peers) -> Floats | None:
    """Return the model's outputs for the validation split; in a grid with several columns, together with the row.

    None without validation records, and if an output is not finite. That is no error: whether outputs overflow depends
    on our records, and an error at the end of the training would show it to the others.
    """
    records = trained.validation
    if not records.rows:
        return None
    outputs = model.outputs(records, peers.groups.get("row") if model.towers > 1 else None)
    return outputs if np.isfinite(outputs).all() else None


def evaluate(model: ConfinedModel, trained: SplitRecords, outputs: Floats | None) -> dict[str, Any]:
    """Return the parts of run.json about the model's quality: validation, subgroups, importance, coefficients.

    Args:
        model: the model.
        trained: its training.
        outputs: the outputs to score, for the validation split; None if there are no finite ones.
    """
    found: dict[str, Any] = {"validation": None, "coefficients": _coefficients(model)}
    if outputs is not None:
        found["validation"] = model.scores(outputs, trained.validation)
        found["subgroups"] = _subgroups(model, trained, outputs)
        found["importance"] = _importance(model, trained)
    return found


def _subgroups(model: ConfinedModel, trained: SplitRecords, outputs: Floats) -> list[dict[str, Any]]:
    """Return the scores of the groups of each category column that has two or more groups of enough records."""
    measure = _GroupScores(model, trained, outputs)
    found = []
    for column in model.columns:
        values = trained.validation.categories.get(column.name)
        if values is None:
            continue
        groups = dict(_groups(values))
        large = sorted(
            (name for name in groups if len(groups[name]) >= MIN_GROUP_RECORDS), key=lambda n: -len(groups[n])
        )
        if len(large) < 2:
            continue
        shown = large[:MAX_GROUPS]
        rest = [groups[name] for name in groups if name not in shown]
        others = {"groups": len(rest), **measure(np.concatenate(rest))} if rest else None
        rows = [{"name": name, **measure(groups[name])} for name in shown]
        found.append({"column": column.name, "groups": rows, "others": others})
        if len(found) == MAX_COLUMNS:
            break
    return found


def _groups(values: Categorical) -> Iterator[tuple[str | None, npt.NDArray[np.int64]]]:
    """Yield each category with its records; None for missing values."""
    counts = [values.missing, *values.counts().tolist()]
    places = np.split(np.argsort(values.codes, kind="stable"), np.cumsum(counts)[:-1])
    for name, own in zip((None, *values.names), places, strict=True):
        if len(own):
            yield name, own


class _GroupScores:
    """The scores of a model on some of the validation records."""

    def __init__(self, model: ConfinedModel, trained: SplitRecords, outputs: Floats) -> None:
        self._outputs, self._regression = outputs, model.data.task == "regression"
        records = trained.validation
        if self._regression:
            self._errors = np.abs(outputs[:, 0] - np.asarray(records.target, dtype=np.float64))
        else:
            self._target = np.asarray(model.preprocessing.encode_target(records), dtype=np.int64)
            self._hits = outputs.argmax(axis=1) == self._target

    def __call__(self, places: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return the number of records and their scores; none of too few records."""
        count = len(places)
        if count < MIN_GROUP_RECORDS:
            return {"records": count, "scores": {}}
        if self._regression:
            errors = self._errors[places]
            mean = float(errors.mean())
            low, high = mean_interval(mean, float(errors.std(ddof=1)), count)
            return {"records": count, "scores": {"mae": {"value": mean, "low": max(0.0, low), "high": high}}}
        accuracy = float(self._hits[places].mean())
        scores = {"accuracy": _estimate(accuracy, wilson_interval(accuracy, count))}
        if self._outputs.shape[1] == 2:
            positives = int(self._target[places].sum())
            if min(positives, count - positives) >= MIN_CLASS_RECORDS:
                area = auc(self._outputs[places], self._target[places])
                scores["auc"] = _estimate(area, auc_interval(area, positives, count - positives))
        return {"records": count, "scores": scores}


def _estimate(value: float, interval: tuple[float, float]) -> dict[str, float]:
    return {"value": value, "low": interval[0], "high": interval[1]}


def _importance(model: ConfinedModel, trained: SplitRecords) -> list[dict[str, Any]] | None:
    """Return the permutation importance of each column: how much the loss rises if its values are exchanged.

    The loss is the log loss, or the root mean squared error in the unit of the target. None in a grid with several
    columns, whose models predict together, and with very few records.
    """
    records = trained.validation
    features = [len(each.features) for each in trained.preprocessing.columns]
    if model.towers > 1 or records.rows < MIN_IMPORTANCE_RECORDS:
        return None
    generator = np.random.default_rng(SEED)
    affordable = MAX_CELLS // (len(features) * REPEATS * max(1, sum(features)))
    count = min(records.rows, MAX_IMPORTANCE_RECORDS, max(MIN_IMPORTANCE_RECORDS, affordable))
    sample = records.take(np.sort(generator.permutation(records.rows)[:count]))
    x = torch.from_numpy(trained.preprocessing.transform(sample)[0])
    y = torch.from_numpy(trained.preprocessing.encode_target(sample))
    orders = [torch.from_numpy(generator.permutation(count)) for _ in range(REPEATS)]
    before = _loss(model, x, y)
    found, start = [], 0
    for column, width in zip(trained.preprocessing.columns, features, strict=True):
        own = x[:, start : start + width].clone()
        rises = []
        for order in orders:
            x[:, start : start + width] = own[order]
            rises.append(_loss(model, x, y) - before)
        x[:, start : start + width] = own
        start += width
        found.append({"column": column.name, "rise": float(np.mean(rises)), "deviation": float(np.std(rises))})
    return sorted(found, key=lambda each: -each["rise"])


def _loss(model: ConfinedModel, x: torch.Tensor, y: torch.Tensor) -> float:
    outputs = forward(model.network, x).double()
    if y.is_floating_point():
        error = (outputs[:, 0] - y).square().mean().sqrt().item()
        return error * model.preprocessing.target.deviation
    return torch.nn.functional.cross_entropy(outputs, y).item()


def _coefficients(model: ConfinedModel) -> list[dict[str, Any]] | None:
    """Return the weights of a model without hidden layers: of the number, or of the second class minus the first.

    None for other models, with more than two classes, and if a weight is not finite.
    """
    if model.model.kind == "custom" or model.model.layers or model.preprocessing.outputs > 2 or model.towers > 1:
        return None
    weights = next(model.network.parameters()).detach().double()
    if not weights.isfinite().all():
        return None
    single = weights[0] * model.preprocessing.target.deviation if len(weights) == 1 else weights[1] - weights[0]
    named = zip(model.preprocessing.features, single.tolist(), strict=True)
    found = [{"feature": name, "value": value} for name, value in named]
    return sorted(found, key=lambda each: -abs(each["value"]))[:MAX_COEFFICIENTS]
