"""From a run to its result: a JSON file that is written once, and a checkpoint while it is under way."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import cgd
from cgd.errors import InputError
from cgd.experiments import datasets, theory
from cgd.experiments.spec import RunSpec
from cgd.optim.grid import Grid
from cgd.optim.vertical import JOINT_REVEALS_RECORDS
from cgd.simulation import baselines
from cgd.simulation.checkpoint import write_whole
from cgd.simulation.population import participant_seed
from cgd.simulation.result import History

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from cgd.experiments.datasets import Dataset
    from cgd.optim.grid import Cell
    from cgd.simulation.baselines import BaselineSettings
    from cgd.simulation.loop import OnStep
    from cgd.simulation.result import Evaluation


FORMAT = "cgd-result-1"
ACTIVATIONS = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    spec: RunSpec
    history: History
    version: str
    extra: dict[str, Any]

    @property
    def last(self) -> Evaluation:
        """The evaluation after the last step."""
        return self.history.evaluations[-1]

    def as_json(self) -> dict[str, Any]:
        """The result as plain data, without times or places: the same run gives the same bytes."""
        return {
            "format": FORMAT,
            "cgd": self.version,
            "spec": self.spec.as_json(),
            **self.extra,
            "history": _rounded(self.history.as_json()),
        }

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result in a file.

        Raises:
            InputError: it is no result.
        """
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            made = content.pop("spec")
            if made.get("mode") == "joint":  # to look at a result reveals nothing more
                made.setdefault("accept", JOINT_REVEALS_RECORDS)
            spec = RunSpec.from_table(made, path.name)
            history = History.from_json(content.pop("history"))
            return cls(spec, history, content.pop("cgd"), content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is not a result that cgd wrote ({error}); move it away to run it anew") from None


class ResultStore:
    """A folder of results, one file for each run; whichever experiment asks for a run finds it there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, spec: RunSpec) -> Path:
        """Where the result of this run is or will be."""
        return self.folder / f"{spec.slug}.json"

    def checkpoint(self, spec: RunSpec) -> Path:
        """Where the run stands while it is under way."""
        return self.folder / ".checkpoints" / f"{spec.slug}.pt"

    def get(self, spec: RunSpec) -> Result | None:
        """The result of this run, if it is there."""
        path = self.path(spec)
        if not path.exists():
            return None
        found = Result.read(path)
        if found.spec != spec:
            raise InputError(f"{path} is the result of another run; move it away to run it anew")
        return found

    def prepare(self, specs: Collection[RunSpec], *, fresh: bool = False) -> None:
        """Make the folder; with `fresh`, forget what is there of these runs.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            (self.folder / ".checkpoints").mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / ".checkpoints" / f"try-{os.getpid()}", b"")
            (self.folder / ".checkpoints" / f"try-{os.getpid()}").unlink()
        except OSError as error:
            raise InputError(f"{self.folder} cannot be written ({error.strerror}); name another place") from None
        for spec in specs if fresh else ():
            self.path(spec).unlink(missing_ok=True)
            self.checkpoint(spec).unlink(missing_ok=True)

    def run(self, spec: RunSpec, data_dir: Path | None = None, on_step: OnStep = lambda *_: None) -> Result:
        """The result of this run: the one that is there, or a new one; goes on from a checkpoint."""
        found = self.get(spec)
        if found is not None:
            return found
        checkpoint = self.checkpoint(spec)
        self.prepare([spec])
        result = execute(spec, data_dir, checkpoint, on_step)
        write_whole(self.path(spec), (json.dumps(result.as_json()) + "\n").encode())
        checkpoint.unlink(missing_ok=True)
        return Result.read(self.path(spec))


def execute(
    spec: RunSpec, data_dir: Path | None = None, checkpoint: Path | None = None, on_step: OnStep = lambda *_: None
) -> Result:
    """Run it."""
    data = loaded(spec.data, spec.seed, data_dir)
    if spec.samples:
        data = data.first(spec.samples)
    setting = baselines.BaselineSettings(
        build_model=lambda: build_model(spec, data),
        blocks=Grid(spec.rows, spec.columns).split(data.x, data.y, seed=spec.seed),
        steps=spec.steps,
        lr=spec.lr,
        delta=deltas(spec),
        loss=nn.functional.cross_entropy if data.classes else nn.functional.mse_loss,
        seed=spec.seed,
        test=(data.held_out_x, data.held_out_y) if spec.measure == "held-out" else (data.x, data.y),
        evaluate_every=max(1, spec.steps // spec.evaluations),
        checkpoint=checkpoint,
        on_step=on_step,
    )
    return _METHODS[spec.method](spec, setting)


def _cgd(spec: RunSpec, setting: BaselineSettings) -> Result:
    colony = setting.colony(
        mode=spec.mode,  # type: ignore[arg-type]
        accept=spec.accept,
        sample=spec.sample,
        arithmetic=spec.arithmetic,  # type: ignore[arg-type]
        mu=spec.mu,
        hold=spec.hold,
    )
    extra = {"displacement": _digest(colony.displacement())}
    if spec.has_regret:
        return Result(
            spec, colony.history, cgd.__version__, {**extra, "theory": asdict(theory.measure(setting, colony))}
        )
    return Result(spec, colony.history, cgd.__version__, extra)


def _federated(spec: RunSpec, setting: BaselineSettings) -> Result:
    secure = spec.method == "secure-fedsgd"
    mode: Any = spec.mode
    colony = baselines.federated_sgd(setting, secure=secure, mode=mode, accept=spec.accept)
    return Result(spec, colony.history, cgd.__version__, {"displacement": _digest(colony.displacement())})


def _centralised(spec: RunSpec, setting: BaselineSettings) -> Result:
    return Result(spec, baselines.centralised(setting).history, cgd.__version__, {})


def _local(spec: RunSpec, setting: BaselineSettings) -> Result:
    return Result(spec, baselines.local(setting, spec.sample).history, cgd.__version__, {})


def _private(spec: RunSpec, setting: BaselineSettings) -> Result:
    trained = baselines.dp_sgd(setting, epsilon=spec.epsilon, dp_delta=spec.dp_delta, batch=spec.batch, clip=spec.clip)
    extra = {"epsilon_spent": trained.epsilon_spent, "noise_multiplier": trained.noise_multiplier}
    return Result(spec, trained.history, cgd.__version__, extra)


_METHODS = {
    "cgd": _cgd,
    "centralised": _centralised,
    "local": _local,
    "fedsgd": _federated,
    "secure-fedsgd": _federated,
    "dp-sgd": _private,
}


def check(spec: RunSpec, data_dir: Path | None = None) -> None:
    """Refuse a run that its data do not allow, without running it.

    Raises:
        InputError: the data set is not there, or too small for the run.
    """
    data = loaded(spec.data, spec.seed, data_dir)
    data = data.first(spec.samples) if spec.samples else data
    for name, least, there in (
        ("rows", spec.rows, f"{len(data.x)} samples"),
        ("columns", spec.columns, f"{data.features} features"),
        ("batch", spec.batch if spec.method == "dp-sgd" else 1, f"{len(data.x)} samples"),
    ):
        if least > int(there.split()[0]):
            raise InputError(f"{name} is {least} and there are {there}; make it smaller")


def build_model(spec: RunSpec, data: Dataset) -> nn.Sequential:
    """The fully-connected network of a run."""
    layers: list[nn.Module] = []
    widths = (data.features, *spec.hidden, data.classes or 1)
    for wide_in, wide_out in itertools.pairwise(widths):
        layers += [nn.Linear(wide_in, wide_out, bias=spec.bias), ACTIVATIONS[spec.activation]()]
    return nn.Sequential(*layers[:-1])


def deltas(spec: RunSpec) -> float | Callable[[Cell], float]:
    """δ for all, or a function that gives everybody its own, drawn once."""
    if not isinstance(spec.delta, tuple):
        return spec.delta
    low, high = spec.delta

    def own(cell: Cell) -> float:
        return float(np.random.default_rng([*participant_seed(spec.seed, cell)]).uniform(low, high))

    return own


@lru_cache(maxsize=2)
def loaded(name: str, seed: int, data_dir: Path | None) -> Dataset:
    """A data set, scaled; those in use are kept."""
    return datasets.load(name, seed, data_dir).scaled()


def _digest(displacement: dict[str, torch.Tensor]) -> str:
    state = hashlib.sha256()
    for part in displacement.values():
        state.update(part.contiguous().numpy().data)
    return state.hexdigest()


def _rounded(value: Any) -> Any:
    """Six significant digits: what a curve shows, in a file that stays small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
