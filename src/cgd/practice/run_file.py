"""The file of a run, `run.json`: what `cgd join --data` leaves about it, for reports and for programs.

`SHAPE` says what is in it. A name that ends in `?` may be missing or null; both become None when it is read. There may
be more in the file than is said here.
"""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any, cast

from cgd.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "cgd-run-1"
FILE = "run.json"
LARGEST = 2**63

# A type, a text that must be just this, a list of alternatives in (), any number of the same in [], names in {}. `*` is
# any name.
Shape = Any

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
_TOLD = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}


def load_run(run: Path) -> dict[str, Any]:
    """What the file of a run says; what may be missing, and is, is None.

    Args:
        run: the directory.

    Raises:
        InputError: it is no directory of a run, or its file is damaged or of another format.
    """
    path = run / FILE
    try:
        content = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        what = f"has no {FILE}" if run.is_dir() else "does not exist"
        raise InputError(f"{run} {what}; name the directory that cgd join --data wrote") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name the directory that cgd join --data wrote"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number with too many digits
        raise _damaged(path, f"it is not JSON ({error})") from None
    written = content.get("format") if isinstance(content, dict) else None
    if isinstance(written, str) and written != FORMAT:
        raise InputError(
            f"{path} has the format {reprlib.repr(written)}, not {FORMAT!r}; use the version of cgd that wrote it"
        )
    try:
        read = cast("dict[str, Any]", _fit(content, SHAPE, ""))
        _fit_validation(read)
        grid = read["federation"]["grid"]
        if grid is not None and len(grid["cell"]) != 2:
            raise _MisfitError("federation.grid.cell is not a row and a column")
    except _MisfitError as error:
        raise _damaged(path, str(error)) from None
    return read


class _MisfitError(Exception):
    """What a file says is not of its shape."""


def _damaged(path: Path, how: str) -> InputError:
    return InputError(f"{path} is damaged: {how}; restore it from a copy, or train again")


def _fit_validation(read: dict[str, Any]) -> None:
    """Fit the scores to their task, and see that their lists are of one length."""
    classification = read["data"]["task"] == "classification"
    scores = _fit(read.get("validation"), (None, CLASSIFIED if classification else REGRESSED), "validation")
    read["validation"] = scores
    if scores is None:
        return
    if classification:
        size = len(scores["classes"])
        if [len(row) for row in scores["confusion"]] != [size] * size:
            raise _MisfitError(f"validation.confusion is not a table of {size} by {size}, the number of classes")
    pairs = (scores["roc"] or {"fpr": [], "tpr": []}) if classification else scores
    names = ("fpr", "tpr") if classification else ("actual", "predicted")
    if len({len(pairs[name] or []) for name in names}) > 1:
        raise _MisfitError(f"{' and '.join(names)} of validation are not of one length")


def _fit(value: Any, shape: Shape, where: str) -> Any:
    """The value, with None for what may be missing and is."""
    if isinstance(shape, tuple):
        return _fit_one_of(value, shape, where)
    if isinstance(shape, list):
        return [_fit(each, shape[0], f"{where}[{i}]") for i, each in enumerate(_typed(value, list, "a list", where))]
    if isinstance(shape, dict):
        return _fit_names(value, shape, where)
    if isinstance(shape, type):
        return _typed(value, shape, _TOLD[shape], where)
    if value != shape:
        raise _MisfitError(f"{where} is {reprlib.repr(value)}, not {shape!r}")
    return value


def _fit_one_of(value: Any, shapes: tuple[Shape, ...], where: str) -> Any:
    for shape in shapes[:-1]:
        try:
            return _fit(value, shape, where)
        except _MisfitError:
            pass
    return _fit(value, shapes[-1], where)


def _fit_names(value: Any, shape: dict[str, Shape], where: str) -> dict[str, Any]:
    _typed(value, dict, "an object", where)
    if "*" in shape:
        return {name: _fit(each, shape["*"], f"{where}[{name!r}]") for name, each in value.items()}
    read = dict(value)
    for key, inner in shape.items():
        name = key.removesuffix("?")
        place = f"{where}.{name}" if where else name
        if value.get(name) is not None:
            read[name] = _fit(value[name], inner, place)
        elif key.endswith("?"):
            read[name] = None
        else:
            raise _MisfitError(f"{place} is missing")
    return read


def _typed(value: Any, kind: type, told: str, where: str) -> Any:
    fits = (int, float) if kind is float else kind
    if not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
        raise _MisfitError(f"{where or 'the whole'} is {reprlib.repr(value)}, not {told}")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise _MisfitError(f"{where} is {reprlib.repr(value)}, which nothing can be")
    return value
