"""The files of a saved model: `model.json` and `model.safetensors`, read so that nothing in them is taken on trust.

`SHAPE` says what is in `model.json`, as `shapes.py` reads it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch

from cgd.errors import InputError
from cgd.federation.data_schema import Column, Data, Model
from cgd.json_shapes import MisfitError, damaged, fit, read_json
from cgd.tabular.preprocessing import Preprocessing

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from cgd.json_shapes import Shape

FORMAT = "cgd-model-1"
WEIGHTS, ABOUT = "model.safetensors", "model.json"
REMEDY = "train again"
ORIGIN = ("participant", "federation", "epoch", "digest")

COLUMN: Shape = {"name": str, "type": str, "categories": [str], "held_by?": int}
MODEL: Shape = {"kind": str, "layers": [int], "activation": str, "function": str, "delta": float}
SHAPE: Shape = {
    "format": FORMAT,
    "version?": str,
    "participant": str,
    "federation": str,
    "epoch": int,
    "digest": str,
    "columns": [str],
    "towers": int,
    "data": {
        "target": str,
        "columns": [COLUMN],
        "task": str,
        "classes": [str],
        "class_weights": str,
        "id": str,
        "missing": [str],
        "validation": float,
    },
    "model": MODEL,
    "preparation": dict,
    "weights": {"file": WEIGHTS, "sha256": str},
}


@dataclass(frozen=True)
class ModelFile:
    """What the two files say.

    Attributes:
        data: what the tables hold and what is predicted.
        model: which network it is.
        preparation: what makes features of a table.
        columns: the columns of a table that the model looks at.
        towers: how many models predict together.
        origin: whose it is.
        weights: of the network, by name.
    """

    data: Data
    model: Model
    preparation: Preprocessing
    columns: tuple[Column, ...]
    towers: int
    origin: dict[str, Any]
    weights: dict[str, torch.Tensor]


def read_model(folder: Path) -> ModelFile:
    """Read the model in the folder of a run; nothing that it names is imported.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = folder / ABOUT
    for each in (path, folder / WEIGHTS):
        if not each.exists():
            raise InputError(
                f"there is no model in {folder}: {each.name} is missing; name the folder of a run, as "
                "`cgd join --data` made it"
            )
    content = read_json(path, FORMAT, written_by="cgd join --data", remedy=REMEDY)
    try:
        about = fit(content, SHAPE)
        json.dumps(content, ensure_ascii=False).encode()  # half a character could not be written anywhere
        data = _made(
            Data, {**about["data"], "columns": tuple(_made(Column, each) for each in about["data"]["columns"])}
        )
        model = _made(Model, about["model"])
        preparation = Preprocessing.from_dict(about["preparation"])
        columns = tuple(each for each in data.columns if each.name in about["columns"])
        _check_together(data, preparation, columns, about["towers"])
    except (MisfitError, InputError, UnicodeEncodeError) as error:
        raise damaged(path, str(error), REMEDY) from None
    weights = _weights(folder / WEIGHTS, about["weights"]["sha256"])
    origin = {name: about[name] for name in ORIGIN}
    return ModelFile(data, model, preparation, columns, about["towers"], origin, weights)


def fill(network: torch.nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Give a network the weights that were saved for it.

    Raises:
        InputError: they are those of another one.
    """
    wanted = {name: (each.shape, each.dtype) for name, each in network.state_dict().items()}
    if wanted != {name: (each.shape, each.dtype) for name, each in weights.items()}:
        raise damaged(folder / WEIGHTS, f"it has not the weights of the network in {ABOUT}", REMEDY)
    network.load_state_dict(weights)


def parameters_of(model: Model, features: int, outputs: int) -> int:
    """Return how many parameters a network of ours has, without making it: a file may ask for a huge one."""
    sizes = (features, *model.layers, outputs)
    return sum((before + 1) * after for before, after in pairwise(sizes))


def check_size(found: ModelFile, folder: Path) -> None:
    """Refuse a network of ours that has other weights than were saved, before it is made.

    Raises:
        InputError: it has.
    """
    expected = parameters_of(found.model, len(found.preparation.features), found.preparation.outputs)
    saved = sum(each.numel() for each in found.weights.values())
    if found.model.kind != "custom" and expected != saved:
        raise damaged(folder / ABOUT, f"its network has {expected} parameters, and {WEIGHTS} has {saved}", REMEDY)


def _made(kind: type, table: dict[str, Any]) -> Any:
    """Make one of our classes from what a file says; there may be more in the file than it takes."""
    return kind(**{each.name: table[each.name] for each in fields(kind)})


def _check_together(data: Data, preparation: Preprocessing, columns: tuple[Column, ...], towers: int) -> None:
    looked_at = [(each.name, each.type) for each in columns]
    if looked_at != [(each.name, type(each).__name__.lower()) for each in preparation.columns]:
        raise MisfitError("columns and preparation are of other columns")
    if (data.task == "regression") != (not preparation.classes) or len(preparation.classes) == 1:
        raise MisfitError(f"a {data.task} has {len(preparation.classes)} classes")
    if towers < 1:
        raise MisfitError(f"towers is {towers}, and there is at least 1")


def _weights(path: Path, digest: str) -> dict[str, torch.Tensor]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})", REMEDY) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise InputError(f"{path} does not belong to {path.with_name(ABOUT)}; restore both from a copy")
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise damaged(path, f"it holds no tensors ({error})", REMEDY) from None
