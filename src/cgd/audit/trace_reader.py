"""Read the trace of a run, which `cgd.tabular.trace_writer` recorded: what one participant received and held."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors
import safetensors.torch
import torch

from cgd.audit.trace_replay import replay
from cgd.audit.view import flat
from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError
from cgd.federation.config import Training
from cgd.federation.model_section import Model
from cgd.federation.toml_validation import at, check_name
from cgd.json_files import convert, damaged_file, decode_json
from cgd.optim.origin import check_delta
from cgd.peers import SumSettings
from cgd.tabular.models import build, build_start, count_parameters
from cgd.tabular.preprocessing import Preprocessing
from cgd.tabular.trace_writer import DATA, FILE, FRAMES, STEPS, read_frames, read_header
from cgd.user_functions import check_function_named

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from cgd.audit.scenario import Sample


REMEDY = "record again"
MIN_WEIGHT = 2.0**-40
"""The smallest part of all records that a participant may have."""
MAX_RECORDS = 1 << 40
_STEP_FILE = re.compile(r"([0-9]{1,9})\.(own|total|state)\.safetensors")


@dataclass(frozen=True)
class _Header:
    """The content of `recording.json`."""

    participant: str
    federation: str
    members: list[str]
    model: dict[str, Any]
    features: int
    outputs: int
    task: Literal["classification", "regression"]
    training: dict[str, Any]
    bound: float
    ring_bits: int
    delta: float
    samples: int
    class_weights: list[float] | None = None
    best_step: int | None = None
    privacy: dict[str, Any] | None = None
    preparation: dict[str, Any] | None = None


@dataclass(frozen=True)
class _StepMetadata:
    """The metadata of a file with an addend."""

    members: list[str]
    epoch: int
    weight: float | None = None
    records: int | None = None


@dataclass(frozen=True, repr=False)
class TraceStep:
    """One step of a participant.

    Attributes:
        members: the members of the sum.
        epoch: the epoch of the federation.
        samples: n, the number of all members' samples, by which they divide; with differential privacy, as opened.
        addend: its addend: its gradient or its update by local steps, flat, times n_l/n; with differential privacy,
            with its noise.
    """

    members: tuple[str, ...]
    epoch: int
    samples: int
    addend: torch.Tensor


@dataclass(frozen=True, repr=False)
class Trace:
    """The trace of one participant.

    Attributes:
        folder: its folder.
        participant: the name of the participant.
        federation: the name of the federation.
        model: the settings of the network.
        features: the number of inputs.
        outputs: the number of outputs.
        task: "classification" or "regression".
        class_weights: the weights of the classes in the loss; empty if there are none.
        training: the settings of the training.
        bound: the bound of the fixed-point encoding.
        ring_bits: the ring size of the fixed-point encoding.
        delta: the participant's own δ; that of the federation is in `model`.
        records: the encoded training records.
        validation: the encoded validation records.
        origin: the parameters before the first step, flat: the public start and the origin.
        steps: its addends, by the number of the step, from 0.
        totals: the opened sums, by the number of the step.
        states: the displacement and the optimiser's state before the steps at which the participant restarted.
        members: the members at the start.
        best_step: the number of steps of the chosen model; None if the run was not finished.
        privacy: the settings of differential privacy; None without it.
        preprocessing: the encoding of the records; None in a trace of a former version.
        rows: the rows of the training records in their table, from 0; empty if they are not known.
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
    validation: Sample
    origin: torch.Tensor
    steps: Mapping[int, TraceStep]
    totals: Mapping[int, torch.Tensor]
    states: Mapping[int, Mapping[str, torch.Tensor]]
    members: tuple[str, ...]
    best_step: int | None = None
    privacy: PrivacySettings | None = None
    preprocessing: Preprocessing | None = None
    rows: tuple[int, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """The steps, up to the last one, without the addend or the total."""
        last = max((*self.steps, *self.totals))
        return tuple(step for step in range(last + 1) if step not in self.steps or step not in self.totals)

    def frames(self) -> Iterator[tuple[str, bytes]]:
        """Return all received frames with their senders, in order."""
        return read_frames(self.folder / FRAMES)

    def build_model(self) -> torch.nn.Module:
        """Build the network, with arbitrary weights."""
        return build(self.model, self.features, self.outputs)

    def start(self) -> torch.Tensor:
        """Return the public start of all networks, flat."""
        start = public_start(self.model, self.features, self.outputs)
        return torch.zeros_like(self.origin) if start is None else start.to(self.origin.dtype)

    def displacements(self) -> dict[int, torch.Tensor]:
        """Return the displacement after each number of steps, flat, bit for bit as in the run, where it is known."""
        return replay(self.training, len(self.origin), self.totals, self.states).displacements


def public_start(model: Model, features: int, outputs: int) -> torch.Tensor | None:
    """Return the public start of the networks of a `[model]` section, flat; None if it is zero."""
    if model.start == "zeros":
        return None
    return flat(dict(build_start(model, features, outputs).named_parameters()))


def load(folder: str | os.PathLike[str], *, function: str | None = None) -> Trace:
    """Read a trace that `cgd join --record` wrote, also of a run that is not finished.

    Args:
        folder: the folder of the trace.
        function: the `module:function` that builds a custom network; see `load_model`.

    Raises:
        InputError: there is no trace, it is damaged, has no step yet, or names a function that was not given.
    """
    folder = Path(folder)
    if not (folder / FILE).exists():
        raise InputError(f"{folder} has no {FILE}; name a folder that `cgd join --record` wrote")
    content = read_header(folder / FILE)
    if "training" not in content or not any((folder / STEPS).glob("*.total.safetensors")):
        raise InputError(f"the trace {folder} has no step yet; read it when the training has begun")
    try:
        header = convert(content, _Header)
    except InputError as error:
        raise damaged_file(folder / FILE, str(error), REMEDY) from None
    trace = _read(folder, header)
    check_function_named(trace.model.function, function, folder / FILE)
    _check_sizes(trace)
    return trace


def _read(folder: Path, header: _Header) -> Trace:
    with at(f"{folder / FILE} is damaged: "):
        for name in (header.participant, header.federation, *header.members):
            check_name("a name", name)
        model = Model(**{"start": "zeros", **_known(Model, header.model)})  # traces of former versions have no start
        training = Training.from_stored(header.training)
        SumSettings(header.bound, header.ring_bits)
        check_delta(header.delta)
        privacy = None if header.privacy is None else _privacy(header.privacy, len(header.members))
        preprocessing = None if header.preparation is None else Preprocessing.from_dict(header.preparation)
    if preprocessing is not None and len(preprocessing.features) != header.features:
        encoded = f"{len(preprocessing.features)} features are encoded, and there are {header.features}"
        raise damaged_file(folder / FILE, encoded, REMEDY)
    files = _step_files(folder, training.steps)
    data = _Tensors(folder / DATA)
    regression = header.task == "regression"
    label = torch.float32 if regression else torch.int64
    validation = len(data.get("kept_y", 1, None, label))
    parts = {
        name: (data.get(f"{name}x", 2, (count, header.features)), data.get(f"{name}y", 1, (count,), label))
        for name, count in (("", header.samples), ("kept_", validation))
    }
    for _, labels in parts.values():
        if not regression and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < header.outputs:
            raise damaged_file(folder / FILE, f"{DATA} has labels beyond the {header.outputs} outputs", REMEDY)
    samples = {name: (x, y[:, None] if regression else y) for name, (x, y) in parts.items()}
    origin = data.get("origin", 1)
    size = tuple(origin.shape)
    return Trace(
        folder,
        header.participant,
        header.federation,
        model,
        header.features,
        header.outputs,
        header.task,
        tuple(header.class_weights or ()),
        training,
        header.bound,
        header.ring_bits,
        header.delta,
        samples[""],
        samples["kept_"],
        origin,
        {
            step: _read_step(path, header.samples, size, private=privacy is not None)
            for step, path in files["own"].items()
        },
        {step: _Tensors(path).get("total", 1, size) for step, path in files["total"].items()},
        {step: _read_state(path, size, training) for step, path in files["state"].items()},
        tuple(header.members),
        header.best_step,
        privacy,
        preprocessing,
        tuple(data.get("rows", 1, (header.samples,), torch.int64).tolist()) if "rows" in data else (),
    )


def _privacy(table: dict[str, Any], members: int) -> PrivacySettings:
    """Return the settings of differential privacy, checked."""
    privacy = convert(_known(PrivacySettings, table), PrivacySettings)
    privacy.check_members(members)
    return privacy


def _known(kind: type, table: dict[str, Any]) -> dict[str, Any]:
    """Return the items of a table that are fields of a class."""
    return {each.name: table[each.name] for each in fields(kind) if each.name in table}


def _step_files(folder: Path, steps: int) -> dict[str, dict[int, Path]]:
    files: dict[str, dict[int, Path]] = {"own": {}, "total": {}, "state": {}}
    for path in sorted((folder / STEPS).iterdir()):
        if found := _STEP_FILE.fullmatch(path.name):
            if int(found[1]) > steps:
                raise InputError(
                    f"{path} is of step {int(found[1])}, and the training has {steps}; the trace is damaged: {REMEDY}"
                )
            files[found[2]][int(found[1])] = path
    return files


def _check_sizes(trace: Trace) -> None:
    """Raise InputError if the network does not fit the trace; before it is built, because it may be huge."""
    model, size = trace.model, len(trace.origin)
    parameters = count_parameters(model, trace.features, trace.outputs)
    if model.kind == "custom":
        parameters = sum(each.numel() for each in trace.build_model().parameters())
    if size != parameters:
        raise InputError(
            f"the network has {parameters} parameters, and the trace {trace.folder} is of one with {size}; it is "
            "damaged, or the function in [model] builds another network now: use that of the run"
        )
    weights = trace.class_weights
    if weights and (len(weights) != trace.outputs or not all(0 <= each < math.inf for each in weights)):
        raise damaged_file(trace.folder / FILE, f"class_weights are not {trace.outputs} weights", REMEDY)


def _read_step(path: Path, samples: int, size: tuple[int, ...], *, private: bool) -> TraceStep:
    tensors = _Tensors(path)
    try:
        metadata = decode_json(tensors.metadata.get("told", ""), _StepMetadata)
    except InputError as error:
        raise tensors.damaged(f"its metadata is invalid: {error}") from None
    own = tensors.get("own", 1, size)
    weight, records = metadata.weight, metadata.records
    if private:
        if records is None or not 1 <= records <= MAX_RECORDS:
            raise tensors.damaged(f"the number of all records is {records}; it must be at least 1")
        return TraceStep(tuple(metadata.members), metadata.epoch, records, own)
    if weight is None or not MIN_WEIGHT <= weight <= 1:
        raise tensors.damaged(f"the weight is {weight}; it must be a part of all records")
    return TraceStep(tuple(metadata.members), metadata.epoch, round(samples / weight), own * weight)


def _read_state(path: Path, size: tuple[int, ...], training: Training) -> dict[str, torch.Tensor]:
    """Read the displacement and the state of the optimiser, which exists after the first step."""
    tensors = _Tensors(path)
    rule = ("mean", "square") if training.optimizer == "adam" else ("momentum_buffer",) if training.momentum else ()
    state = {name: tensors.get(name, 1, size) for name in ("displacement", *rule)}
    if training.optimizer == "adam":
        state["powers"] = tensors.get("powers", 1, (2,), torch.float64)
    return state


class _Tensors:
    """The tensors of a file, which are checked when they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._tensors = safetensors.torch.load_file(path)
            with safetensors.safe_open(path, "pt") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise self.damaged(str(error)) from None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(
        self, name: str, dimensions: int, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a tensor; raise InputError if its dimensions, shape or type differ, or a number is not finite."""
        if name not in self._tensors:
            raise self.damaged(f"it has no {name!r}")
        found = self._tensors[name]
        if found.ndim != dimensions or found.dtype != dtype or shape not in (None, tuple(found.shape)):
            expected = f"{dtype} {'' if shape is None else list(shape)}".rstrip()
            raise self.damaged(f"{name!r} is {found.dtype} {list(found.shape)}, not {expected}")
        if not bool(torch.isfinite(found).all()):
            raise self.damaged(f"{name!r} has numbers that are not finite")
        return found

    def damaged(self, fact: str) -> InputError:
        """Return the error about this file."""
        step = self._path.parent.name == STEPS
        remedy = ", or remove it: the trace can be used without this step" if step else f", or {REMEDY}"
        return InputError(f"{self._path} is damaged ({fact}); restore it from a copy{remedy}")
