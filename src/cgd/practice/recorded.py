"""Reading a recording of a run, which `recorder.py` wrote: what one participant saw, and what it had of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch

from cgd.errors import InputError
from cgd.federation.file import Training
from cgd.federation.task import Model
from cgd.practice.functions import check_named
from cgd.practice.networks import build
from cgd.practice.recorder import DATA, FILE, FRAMES, STEPS, read_content, read_frames
from cgd.practice.replay import replay

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    import torch

    from cgd.privacy.schemes import Sample


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
        recording = _read(folder, content)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder} is damaged ({error!r}); restore it from your copy, or record anew") from None
    check_named(recording.model.function, function, folder / FILE)
    parameters = sum(each.numel() for each in recording.build_model().parameters())
    sizes = {len(recording.origin), *map(len, recording.totals.values())}
    if sizes != {parameters}:
        raise InputError(
            f"the network has {parameters} parameters, and {folder} is of one with {max(sizes - {parameters})}; it is "
            "damaged, or the function in [model] gives another network now: bring that of the run"
        )
    return recording


def _read(folder: Path, content: dict[str, Any]) -> Recording:
    data = _tensors(folder / DATA)
    regression = content["task"] == "regression"
    labels = {key: data[key][:, None] if regression else data[key] for key in ("y", "kept_y")}
    files: dict[str, dict[int, Path]] = {"own": {}, "total": {}, "state": {}}
    for path in sorted((folder / STEPS).glob("[0-9]*.safetensors")):
        number, what, _ = path.name.split(".")
        files[what][int(number)] = path
    samples = int(content["samples"])
    if samples != len(data["y"]):
        raise InputError(
            f"{folder / FILE} says {samples} records, and {DATA} has {len(data['y'])}; restore them from your copy, or "
            "record anew"
        )
    return Recording(
        folder,
        content["participant"],
        content["federation"],
        Model(**content["model"]),
        content["features"],
        content["outputs"],
        content["task"],
        tuple(content["class_weights"] or ()),
        Training(**content["training"]),
        content["bound"],
        content["ring_bits"],
        content["delta"],
        (data["x"], labels["y"]),
        (data["kept_x"], labels["kept_y"]),
        data["origin"],
        {step: _taken(path, samples) for step, path in files["own"].items()},
        {step: _tensors(path)["total"] for step, path in files["total"].items()},
        {step: _tensors(path) for step, path in files["state"].items()},
        tuple(content["members"]),
        content.get("best_step"),
    )


def _taken(path: Path, samples: int) -> Taken:
    own = _tensors(path)["own"]
    with safetensors.safe_open(path, "pt") as file:
        told = json.loads((file.metadata() or {})["told"])
    weight = float(told["weight"])
    return Taken(tuple(told["members"]), int(told["epoch"]), round(samples / weight), own * weight)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        step = path.parent.name == STEPS
        remedy = "; a step can also be done without: remove its file" if step else ", or record anew"
        raise InputError(f"{path} is damaged ({error}); restore it from your copy{remedy}") from None
