"""Realistic contents of run.json, as `cgd join --data` writes them."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.tabular.comparison import compare_classifiers, compare_regressions
from cgd.tabular.metrics import classification_scores, regression_scores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

Run = dict[str, Any]

HOSPITALS = ("hospital-a", "hospital-b", "hospital-c", "hospital-d", "hospital-e")
TUMOURS = (
    "Adenocarcinoma of the ascending colon, mucinous, poorly differentiated",
    "Carcinoid",
    "Clear cell renal cell carcinoma",
    "Diffuse large B-cell lymphoma, not otherwise specified",
    "Ewing sarcoma",
    "Glioblastoma, IDH wild type",
    "Hepatocellular carcinoma",
    "Melanoma",
    "Papillary thyroid carcinoma, follicular variant",
    "Squamous cell carcinoma of the lung",
)


def write(run: Run, directory: Path) -> Path:
    """Write the directory of a run, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps(run))
    return directory


def classification() -> Run:
    """Return a run with two classes, five hospitals, and all optional parts."""
    return deepcopy(_classification())


def regression() -> Run:
    """Return a regression run: the length of a stay."""
    return deepcopy(_regression())


@cache  # bootstraps take a while
def _classification() -> Run:
    columns = [
        _number("age", 38.58, 13.64, missing=12),
        _category("workclass", {"Private": 22_696, "Self-emp-not-inc": 2541, "Local-gov": 2093}, missing=1836),
        _category("education", {f"level {i}": 9000 // i for i in range(1, 17)}),
        _number("capital_gain", 1077.6, 7385.4),
        _number("hours_per_week", 40.44, 12.35, missing=3),
        _category("sex", {"Female": 10_771, "Male": 21_790}, learned=False),
        _number("site_code", 7.0, 0.0) | {"constant": True},
    ]
    classes, shares = ("<=50K", ">50K"), (0.76, 0.24)
    p, target = _predictions(1203, shares, 1.2)
    weak, _ = _predictions(1203, shares, 1.0, target)
    features = [feature for column in columns for feature in _features(column)]
    return _run("income", "classification", classification_scores(p, target, classes)) | {
        "columns": columns,
        "features": features,
        "comparison": {
            "records": 1203,
            "training": 4810,
            "models": compare_classifiers({"alone": weak, "together": p}, target),
        },
        "kept": {
            "keep": "personalised",
            "records": 1203,
            "part": 0.5,
            "method": "weights",
            "steps": 35,
            "models": [
                {"name": "trained", "loss": 0.402, "score": 0.812},
                {"name": "scaled", "loss": 0.398, "score": 0.815},
                {"name": "adapted", "loss": 0.371, "score": 0.829},
            ],
        },
        "subgroups": [
            _subgroup("sex", {"Male": (812, 0.791, 0.834), "Female": (391, 0.887, 0.905)}),
            _subgroup(
                "workclass",
                {"Private": (850, 0.823, 0.871), "Self-emp-not-inc": (96, 0.75, None), None: (61, 0.869, None)},
                {"records": 196, "scores": {"accuracy": _estimate(0.81)}, "groups": 5},
            ),
            _subgroup(
                "education",
                {f"level {i}": (400 // i, 0.7 + 0.02 * i, None) for i in range(1, 9)},
                {"records": 7, "scores": {}, "groups": 8},
            ),
        ],
        "importance": [
            {"column": each["name"], "rise": 0.21 / 2**i - 0.004, "deviation": 0.003} for i, each in enumerate(columns)
        ],
        "coefficients": [{"feature": name, "value": (-1) ** i * 1.4 / (i + 1)} for i, name in enumerate(features)],
        "recorded": True,
        "target": {"classes": {"<=50K": 24_720, ">50K": 7841}},
        "notes": [
            "column site_code is constant everywhere and says nothing",
            "column workclass: 14 of our records have a category that nobody else has; it counts as missing",
        ],
    }


def many_classes() -> Run:
    """Return a run with ten classes with long names, and sixty columns."""
    generator = np.random.default_rng(7)
    numbers = [_number(f"marker_{i:02}", *generator.normal(2, 1, 2).round(3).tolist()) for i in range(1, 56)]
    sites = {name: int(count) for name, count in zip(TUMOURS, generator.integers(5, 900, 10), strict=True)}
    categories = [_category(f"previous_finding_{i}", sites, missing=40 * i) for i in range(1, 6)]
    shares = (0.22, 0.04, 0.1, 0.08, 0.01, 0.09, 0.06, 0.2, 0.08, 0.12)
    p, target = _predictions(640, shares, 2.2)
    scores = classification_scores(p, target, TUMOURS)
    reason = "all our training records have the class 'Melanoma', so nothing can be learned from them alone"
    return _run("diagnosis", "classification", scores) | {
        "columns": numbers + categories,
        "features": [feature for column in numbers + categories for feature in _features(column)],
        "target": {"classes": sites},
        "comparison": {"records": 640, "training": 2560, "models": [], "unavailable": reason},
    }


@cache
def _regression() -> Run:
    generator = np.random.default_rng(3)
    actual = generator.gamma(3, 2.4, 412)
    predicted = 2.2 + 0.7 * actual + generator.normal(0, 1.8, 412)
    weak = predicted + generator.normal(0, 2.0, 412)
    both = {"alone": weak[:, None], "together": predicted[:, None]}
    run = _run("length_of_stay", "regression", regression_scores(predicted, actual)) | {
        "comparison": {"records": 412, "training": 1650, "models": compare_regressions(both, actual)},
        "subgroups": [
            {
                "column": "ward",
                "groups": [
                    {
                        "name": name,
                        "records": 100,
                        "scores": {"mae": {"value": error, "low": error - 0.2, "high": error + 0.2}},
                    }
                    for name, error in (("surgery", 1.52), ("medicine", 1.48), ("paediatrics", 2.1))
                ],
                "others": None,
            }
        ],
        "importance": [
            {"column": "age", "rise": 1.92, "deviation": 0.11},
            {"column": "creatinine", "rise": 0.35, "deviation": 0.04},
        ],
        "coefficients": [{"feature": "age", "value": 2.31}, {"feature": "creatinine", "value": -0.41}],
        "columns": [_number("age", 61.2, 17.9, missing=4), _number("creatinine", 1.18, 0.74, missing=310)],
        "features": ["age", "creatinine"],
        "target": {"mean": 7.21, "deviation": 4.13, "count": 12_345},
        "notes": [],
    }
    return run | {"model": run["model"] | {"kind": "linear", "layers": [], "parameters": 3}}


def without_validation() -> Run:
    """Return a run without a validation split."""
    run = classification() | {"validation": None, "comparison": None, "subgroups": None, "importance": None}
    run["data"]["validation"] = 0.0
    run["records"] |= {"validation": 0, "training": 6013}
    for each in run["history"]:
        each |= {"validation_loss": None, "everyone_validation_loss": None, "score": None}
    run["outcome"] |= {"steps": 300, "best_step": None, "early": False}
    return run


def grid() -> Run:
    """Return a run in a grid of three rows and three columns."""
    run = classification()
    names = [f"{each}-{part}" for each in ("north", "east", "south") for part in ("clinic", "laboratory", "insurer")]
    place = {"rows": 3, "columns": 3, "cell": [0, 1]}
    run["federation"] |= {"participants": names, "grid": place}
    run["data"]["columns"] = [
        {"name": each["name"], "type": each["type"], "categories": [], "held_by": i % 3}
        for i, each in enumerate(run["columns"])
    ]
    return run | {"participant": "north-laboratory"}


def minimal() -> Run:
    """Return a run with the required parts only."""
    return {
        "format": "cgd-run-1",
        "participant": "hospital-a",
        "federation": {"name": "five-hospitals", "participants": list(HOSPITALS)},
        "data": {"target": "income", "task": "classification"},
        "history": [],
    }


def _run(target: str, task: str, scores: Run) -> Run:
    return {
        "format": "cgd-run-1",
        "version": "0.1.0",
        "participant": "hospital-a",
        "finished": "2026-11-16T12:00:00+00:00",
        "federation": {
            "name": "five-hospitals",
            "epoch": 1,
            "digest": "9f2c51d7e0b84a63" * 4,
            "participants": list(HOSPITALS),
            "grid": None,
            "hub": False,
        },
        "training": {
            "steps": 300,
            "lr": 0.05,
            "mu": 0.0,
            "bound": 16.0,
            "ring_bits": 32,
            "sharing": "expanded",
            "opening": "mesh",
            "aggregator": "",
            "minimum": 3,
            "optimizer": "adam",
            "momentum": 0.0,
            "validate_every": 10,
            "patience": 5,
            "delta": 0.05,
        },
        "data": {
            "target": target,
            "task": task,
            "columns": [],
            "classes": [],
            "class_weights": "none",
            "id": "",
            "missing": ["", "NA", "?"],
            "validation": 0.2,
        },
        "model": {
            "kind": "mlp",
            "layers": [32, 16],
            "activation": "relu",
            "function": "",
            "delta": 0.05,
            "parameters": 4034,
        },
        "records": {
            "file": "a.csv",
            "used": 6013,
            "training": 6013 - scores["records"],
            "validation": scores["records"],
            "everyone_training": 26_049,
        },
        "history": _history(scores.get("accuracy") or scores["r2"]),
        "outcome": {"steps": 210, "best_step": 160, "early": True, "seconds": 95.2},
        "validation": scores,
        "revealed": [
            {
                "what": "the sum of all gradients, in every step",
                "to": "every participant",
                "times": 210,
                "numbers": 4034,
            },
            {
                "what": "for every number column: how many values, their mean and deviation over everybody",
                "to": "every participant",
                "times": 1,
                "numbers": 12,
            },
            {"what": "the sum of all validation losses", "to": "every participant", "times": 21, "numbers": 1},
        ],
        "traffic": {"sums": 236, "bytes_sent": 13_561_344, "bytes_received": 13_559_872},
        "waiting": {
            "computing": 41.25,
            "summing": 3.5,
            "waiting": 96.0,
            "kept": 0.5,
            "peers": {
                "hospital-b": {"computing": 20.5, "summing": 1.25, "away": 0.0, "alone": 4.0},
                "hospital-c": {"computing": 30.0, "summing": 0.5, "away": 61.0, "alone": 75.0},
            },
        },
    }


def _history(score: float) -> list[Run]:
    generator = np.random.default_rng(5)
    history: list[Run] = []
    for step in range(10, 220, 10):
        shape = np.exp(-step / 45)
        training = 0.31 + 0.36 * shape - 0.00015 * step
        late = max(0, step - 160) * 0.0004
        history.append(
            {
                "step": step,
                "training_loss": float(training + generator.normal(0, 0.002)),
                "validation_loss": float(0.335 + 0.35 * shape + late + generator.normal(0, 0.004)),
                "everyone_validation_loss": float(0.322 + 0.36 * shape + late + generator.normal(0, 0.001)),
                "score": float(score - 0.25 * shape + generator.normal(0, 0.004)),
            }
        )
    return history


def _predictions(
    records: int, shares: Sequence[float], skill: float, target: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    generator = np.random.default_rng(11 if target is None else 12)
    if target is None:
        target = generator.choice(len(shares), size=records, p=shares)
    logits = generator.normal(size=(records, len(shares))) + skill * np.eye(len(shares))[target]
    p = np.exp(logits + np.log(shares))
    return p / p.sum(axis=1, keepdims=True), target


def _subgroup(name: str, groups: dict[Any, tuple[int, float, float | None]], others: Run | None = None) -> Run:
    return {
        "column": name,
        "groups": [
            {
                "name": each,
                "records": count,
                "scores": {"accuracy": _estimate(accuracy)} | ({"auc": _estimate(auc)} if auc else {}),
            }
            for each, (count, accuracy, auc) in groups.items()
        ],
        "others": others,
    }


def _estimate(value: float) -> Run:
    return {"value": value, "low": value - 0.04, "high": min(1.0, value + 0.03)}


def _number(name: str, mean: float, deviation: float, missing: int = 0) -> Run:
    deviation = abs(deviation)
    return {
        "name": name,
        "type": "number",
        "present": 32_561 - missing,
        "missing": missing,
        "mean": mean,
        "deviation": deviation,
        "constant": False,
    }


def _category(name: str, categories: dict[str, int], missing: int = 0, learned: bool = True) -> Run:
    return {"name": name, "type": "category", "learned": learned, "missing": missing, "categories": categories}


def _features(column: Run) -> list[str]:
    return [f"{column['name']}: {each}" for each in column.get("categories", ())] or [column["name"]]
