"""The file of a run, `run.json`: what `cgd join --data` leaves about it, for reports and for programs.

`SHAPE` says what is in it, as `shapes.py` reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from cgd.json_shapes import MisfitError, damaged, fit, read_json

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.json_shapes import Shape

FORMAT = "cgd-run-1"
FILE = "run.json"
REMEDY = "train again"

CLASSIFIED: Shape = {
    "records": int,
    "accuracy": float,
    "balanced_accuracy?": float,
    "auc?": float,
    "log_loss?": float,
    "classes": [str],
    "confusion": [[int]],
    "roc?": {"fpr": [float], "tpr": [float]},
    "baseline_accuracy?": float,
}
REGRESSED: Shape = {
    "records": int,
    "r2?": float,
    "rmse": float,
    "mae": float,
    "actual?": [float],
    "predicted?": [float],
}
SHAPE: Shape = {
    "format": FORMAT,
    "version?": str,
    "participant": str,
    "finished?": str,
    "federation": {
        "name": str,
        "epoch?": int,
        "digest?": str,
        "participants": [str],
        "grid?": {"rows": int, "columns": int, "cell": [int]},
        "hub?": bool,
    },
    "training?": dict,
    "data": {
        "target": str,
        "task": ("classification", "regression"),
        "columns?": [{"name": str, "held_by?": int}],
        "class_weights?": str,
        "id?": str,
        "missing?": [str],
        "validation?": float,
    },
    "model?": {
        "kind": str,
        "layers?": [int],
        "activation?": str,
        "function?": str,
        "delta?": float,
        "parameters?": int,
    },
    "records?": {"file?": str, "used?": int, "training?": int, "validation?": int, "everyone_training?": int},
    "features?": [str],
    "columns?": [
        {
            "name": str,
            "type": ("number", "category"),
            "present?": int,
            "missing?": int,
            "mean?": float,
            "deviation?": float,
            "constant?": bool,
            "learned?": bool,
            "categories?": ({"*": int}, [str]),
        }
    ],
    "target?": {"classes?": ({"*": int}, [str]), "mean?": float, "deviation?": float, "count?": int},
    "notes?": [str],
    "history": [
        {
            "step": int,
            "training_loss?": float,
            "validation_loss?": float,
            "everyone_validation_loss?": float,
            "score?": float,
        }
    ],
    "outcome?": {"steps": int, "best_step?": int, "early?": bool, "seconds?": float},
    "revealed?": [{"what": str, "to?": str, "times?": int, "numbers?": int}],
    "traffic?": {"sums?": int, "bytes_sent?": int, "bytes_received?": int},
}


def load_run(run: Path) -> dict[str, Any]:
    """What the file of a run says; what may be missing, and is, is None.

    Args:
        run: the directory.

    Raises:
        InputError: it is no directory of a run, or its file is damaged or of another format.
    """
    path = run / FILE
    content = read_json(path, FORMAT, written_by="cgd join --data", remedy=REMEDY)
    try:
        read = cast("dict[str, Any]", fit(content, SHAPE, ""))
        _fit_validation(read)
        grid = read["federation"]["grid"]
        if grid is not None and len(grid["cell"]) != 2:
            raise MisfitError("federation.grid.cell is not a row and a column")
    except MisfitError as error:
        raise damaged(path, str(error), REMEDY) from None
    return read


def _fit_validation(read: dict[str, Any]) -> None:
    """Fit the scores to their task, and see that their lists are of one length."""
    classification = read["data"]["task"] == "classification"
    scores = fit(read.get("validation"), (None, CLASSIFIED if classification else REGRESSED), "validation")
    read["validation"] = scores
    if scores is None:
        return
    if classification:
        size = len(scores["classes"])
        if [len(row) for row in scores["confusion"]] != [size] * size:
            raise MisfitError(f"validation.confusion is not a table of {size} by {size}, the number of classes")
    pairs = (scores["roc"] or {"fpr": [], "tpr": []}) if classification else scores
    names = ("fpr", "tpr") if classification else ("actual", "predicted")
    if len({len(pairs[name] or []) for name in names}) > 1:
        raise MisfitError(f"{' and '.join(names)} of validation are not of one length")
