"""Reading a recording of a run, which `recorder.py` wrote: what one participant saw, and what it had of its own."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from cgd.audit.replay import replay
from cgd.errors import InputError
from cgd.federation.config import Training
from cgd.federation.data_schema import Model
from cgd.federation.toml_validation import at
from cgd.json_shapes import MisfitError, damaged, fit
from cgd.optim.origin import check_delta
from cgd.peers import SumSettings
from cgd.tabular.model_file import parameters_of
from cgd.tabular.models import build
from cgd.tabular.trace_writer import DATA, FILE, FORMAT, FRAMES, STEPS, read_content, read_frames
from cgd.tabular.user_functions import check_named

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from cgd.audit.schemes import Sample
    from cgd.json_shapes import Shape


REMEDY = "record anew"
MIN_WEIGHT = 2.0**-40
"""The smallest part of all records that a participant may have."""
SHAPE: Shape = {
    "format": FORMAT,
    "participant": str,
    "federation": str,
    "members": [str],
    "model": dict,
    "features": int,
    "outputs": int,
    "task": ("classification", "regression"),
    "class_weights?": [float],
    "training": dict,
    "bound": float,
    "ring_bits": int,
    "delta": float,
    "samples": int,
    "best_step?": int,
}
TOLD: Shape = {"weight": float, "members": [str], "epoch": int}
_STEP_FILE = re.compile(r"([0-9]{1,9})\.(own|total|state)\.safetensors")


@dataclass(frozen=True, repr=False)
class Taken:
    """One step, as a participant saw it.

    Attributes:
        members: who took part.
        epoch: of the federation.
        samples: n, of all of them.
        addend: what it put in: its gradient, flat, times n_l/n.
    """

    members: tuple[str, ...]
    epoch: int
    samples: int
    addend: torch.Tensor


@dataclass(frozen=True, repr=False)
class Recording:
    """What one participant saw and had in a run.

    Attributes:
        folder: where it is.
        participant: whose it is.
        federation: its name.
        model: which network was trained.
        features: how many inputs it has.
        outputs: and how many outputs.
        task: "classification" or "regression".
        class_weights: by which the loss was weighted; none if it was not.
        training: how was trained.
        bound: of the fixed point.
        ring_bits: of the fixed point.
        delta: its own δ; `model` has that of the federation.
        records: its training records, prepared.
        kept: those that it kept back for validation.
        origin: its origin, flat.
        taken: what it put in, by the number of the step, from 0.
        totals: what was opened, likewise.
        states: the displacement and what the rule remembers, before steps at which it came back.
        members: who took part when it began.
        best_step: after how many steps its model was taken; None if the run was not finished.
    """

    folder: Path
    participant: str
    federation: str
    model: Model
    features: int
    outputs: int
    task: str
    class_weights: tuple[float, ...]
    training: Training
    bound: float
    ring_bits: int
    delta: float
    records: Sample
    kept: Sample
    origin: torch.Tensor
    taken: Mapping[int, Taken]
    totals: Mapping[int, torch.Tensor]
    states: Mapping[int, Mapping[str, torch.Tensor]]
    members: tuple[str, ...]
    best_step: int | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """The steps, up to its last, of which it has not both its own part and the total."""
        last = max((*self.taken, *self.totals))
        return tuple(step for step in range(last + 1) if step not in self.taken or step not in self.totals)

    def frames(self) -> Iterator[tuple[str, bytes]]:
        """Every frame that it received, with its sender, one after the other."""
        return read_frames(self.folder / FRAMES)

    def build_model(self) -> torch.nn.Module:
        """The network, with weights that mean nothing."""
        return build(self.model, self.features, self.outputs)

    def displacements(self) -> dict[int, torch.Tensor]:
        """The displacement after so many steps, flat, bit for bit that of the run, as far as it can be told."""
        return replay(self.training, len(self.origin), self.totals, self.states).displacements


def load(folder: str | os.PathLike[str], *, function: str | None = None) -> Recording:
    """Read a recording that `cgd join --record` left; one that goes on or was broken off, too, as far as it got.

    Args:
        folder: of the recording.
        function: of a network of your own, the `module:function` that makes it; see `load_model`.

    Raises:
        InputError: there is none, it is damaged, no step was taken yet, or it names a function that you did not.
    """
    folder = Path(folder)
    if not (folder / FILE).exists():
        raise InputError(f"{folder} has no {FILE}; name a folder that `cgd join --record` wrote")
    content = read_content(folder / FILE)
    if "training" not in content or not any((folder / STEPS).glob("*.total.safetensors")):
        raise InputError(f"no step was taken in the recording {folder}; read it when the training has begun")
    try:
        recording = _read(folder, fit(content, SHAPE))
    except MisfitError as error:
        raise damaged(folder / FILE, str(error), REMEDY) from None
    check_named(recording.model.function, function, folder / FILE)
    _check_sizes(recording)
    return recording


def _read(folder: Path, told: dict[str, Any]) -> Recording:
    with at(f"{folder / FILE} is damaged: "):
        model, training = Model(**_known(Model, told["model"])), Training(**_known(Training, told["training"]))
        SumSettings(told["bound"], told["ring_bits"])
        check_delta(told["delta"])
    files = _step_files(folder)
    data = _Tensors(folder / DATA)
    rows, inputs, regression = told["samples"], told["features"], told["task"] == "regression"
    label = torch.float32 if regression else torch.int64
    kept = len(data.get("kept_y", 1, None, label))
    parts = {
        name: (data.get(f"{name}x", 2, (count, inputs)), data.get(f"{name}y", 1, (count,), label))
        for name, count in (("", rows), ("kept_", kept))
    }
    for _, labels in parts.values():
        if not regression and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < told["outputs"]:
            raise MisfitError(f"{DATA} has labels beyond the {told['outputs']} outputs")
    samples = {name: (x, y[:, None] if regression else y) for name, (x, y) in parts.items()}
    origin = data.get("origin", 1)
    size = tuple(origin.shape)
    return Recording(
        folder,
        told["participant"],
        told["federation"],
        model,
        inputs,
        told["outputs"],
        told["task"],
        tuple(told["class_weights"] or ()),
        training,
        float(told["bound"]),
        told["ring_bits"],
        float(told["delta"]),
        samples[""],
        samples["kept_"],
        origin,
        {step: _taken(path, rows, size) for step, path in files["own"].items()},
        {step: _Tensors(path).get("total", 1, size) for step, path in files["total"].items()},
        {step: _state(path, size, training) for step, path in files["state"].items()},
        tuple(told["members"]),
        told["best_step"],
    )


def _known(kind: type, table: dict[str, Any]) -> dict[str, Any]:
    """Return what a class takes, of what a file says."""
    return {each.name: table[each.name] for each in fields(kind) if each.name in table}


def _step_files(folder: Path) -> dict[str, dict[int, Path]]:
    files: dict[str, dict[int, Path]] = {"own": {}, "total": {}, "state": {}}
    for path in sorted((folder / STEPS).iterdir()):
        if found := _STEP_FILE.fullmatch(path.name):
            files[found[2]][int(found[1])] = path
    return files


def _check_sizes(recording: Recording) -> None:
    """See that the network is that of the recording, before one of ours is made: it may be huge."""
    model, size = recording.model, len(recording.origin)
    parameters = parameters_of(model, recording.features, recording.outputs)
    if model.kind == "custom":
        parameters = sum(each.numel() for each in recording.build_model().parameters())
    if size != parameters:
        raise InputError(
            f"the network has {parameters} parameters, and {recording.folder} is of one with {size}; it is "
            "damaged, or the function in [model] gives another network now: bring that of the run"
        )
    weights = recording.class_weights
    if weights and (len(weights) != recording.outputs or not all(0 <= each < math.inf for each in weights)):
        raise damaged(recording.folder / FILE, f"class_weights are not {recording.outputs} weights", REMEDY)


def _taken(path: Path, samples: int, size: tuple[int, ...]) -> Taken:
    tensors = _Tensors(path)
    try:
        told = fit(json.loads(tensors.told["told"]), TOLD)
    except (KeyError, ValueError, RecursionError, MisfitError) as error:
        raise tensors.damaged(f"it does not say who took part: {error}") from None
    if not MIN_WEIGHT <= told["weight"] <= 1:
        raise tensors.damaged(f"the weight is {told['weight']}, and not a part of the records")
    weight = float(told["weight"])
    own = tensors.get("own", 1, size)
    return Taken(tuple(told["members"]), told["epoch"], round(samples / weight), own * weight)


def _state(path: Path, size: tuple[int, ...], training: Training) -> dict[str, torch.Tensor]:
    """Read the displacement and what the rule remembers, which is there after the first step."""
    tensors = _Tensors(path)
    rule = ("mean", "square") if training.optimizer == "adam" else ("momentum_buffer",) if training.momentum else ()
    state = {name: tensors.get(name, 1, size) for name in ("displacement", *rule)}
    if training.optimizer == "adam":
        state["powers"] = tensors.get("powers", 1, (2,), torch.float64)
    return state


class _Tensors:
    """The tensors of a file, looked at when they are taken out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._tensors = safetensors.torch.load_file(path)
            with safetensors.safe_open(path, "pt") as file:
                self.told: dict[str, str] = file.metadata() or {}
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise self.damaged(str(error)) from None

    def get(
        self, name: str, dimensions: int, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a tensor that has so many dimensions, this shape and type, and finite numbers."""
        if name not in self._tensors:
            raise self.damaged(f"it has no {name!r}")
        found = self._tensors[name]
        if found.ndim != dimensions or found.dtype != dtype or shape not in (None, tuple(found.shape)):
            wanted = f"{dtype} {'' if shape is None else list(shape)}".rstrip()
            raise self.damaged(f"{name!r} is {found.dtype} {list(found.shape)}, not {wanted}")
        if not bool(torch.isfinite(found).all()):
            raise self.damaged(f"{name!r} has numbers that are not finite")
        return found

    def damaged(self, how: str) -> InputError:
        """Return the error about this file."""
        step = self._path.parent.name == STEPS
        remedy = "; a step can also be done without: remove its file" if step else ", or record anew"
        return InputError(f"{self._path} is damaged ({how}); restore it from your copy{remedy}")
