"""Running a spec: the result is a JSON file that is written once, with a checkpoint while the run is in progress."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import cgd
from cgd.errors import InputError
from cgd.experiments import data_files, datasets, normalisation, own_data, privacy_table, theory
from cgd.experiments.rounding import finite, rounded
from cgd.experiments.spec import ADAM_RULES, RunSpec
from cgd.files import write_file
from cgd.json_files import convert
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.flat_vectors import CPU
from cgd.optim.grid import Grid
from cgd.optim.vertical import JOINT_REVEALS_RECORDS
from cgd.simulation import baselines
from cgd.simulation.gradient_norm import GradientNormRule
from cgd.simulation.result import History
from cgd.simulation.simulate import step_factor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from cgd.experiments.datasets import Dataset
    from cgd.optim.displacement import UpdateRule
    from cgd.optim.grid import Block, Cell
    from cgd.simulation.baselines import BaselineSettings
    from cgd.simulation.loop import OnStep
    from cgd.simulation.ray_cluster import RayCluster
    from cgd.simulation.result import Evaluation, SimulationResult


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
class RunResult:
    """The result of a run.

    Attributes:
        spec: settings of the run.
        history: losses and evaluations.
        version: version of cgd that ran it.
        extra: further results of the method, such as a digest of the displacement.
    """

    spec: RunSpec
    history: History
    version: str
    extra: dict[str, Any]

    @property
    def last(self) -> Evaluation:
        """The evaluation after the last step."""
        return self.history.evaluations[-1]

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data, without times or paths: the same run gives the same bytes."""
        return {
            "format": FORMAT,
            "cgd": self.version,
            "spec": self.spec.as_json(),
            **self.extra,
            "history": rounded(self.history.as_json()),
        }

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """Read a result from a file.

        Raises:
            InputError: the file is not a result.
        """
        try:
            content = json.loads(path.read_text(), parse_float=finite, parse_constant=finite)
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            table = content.pop("spec")
            if table.get("mode") == "joint":  # reading a result reveals nothing more
                table.setdefault("accept", JOINT_REVEALS_RECORDS)
            table.setdefault("start", "zeros")
            spec = RunSpec.from_table(table, path.name)
            found = cls(spec, History.from_json(content.pop("history")), convert(content.pop("cgd"), str), content)
            found.history.check_complete(spec.steps)
            if spec.has_regret:
                theory.reference(found)
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is not a result that cgd wrote ({error}); move it away to run it again") from None


class ResultStore:
    """A folder of results, one file for each run, shared by all experiments that contain the run.

    Missing runs are computed on `device`. It does not name a result: as with another processor, last digits differ.
    """

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        self.folder, self.device = folder, device

    def path(self, spec: RunSpec) -> Path:
        """Return the path of the result of this run."""
        return self.folder / f"{spec.slug}.json"

    def checkpoint(self, spec: RunSpec) -> Path:
        """Return the path of the checkpoint of this run while it is in progress."""
        return self.folder / ".checkpoints" / f"{spec.slug}.pt"

    def get(self, spec: RunSpec) -> RunResult | None:
        """Return the stored result of this run; None if there is none."""
        path = self.path(spec)
        if not path.exists():
            return None
        found = RunResult.read(path)
        if found.spec != spec:
            raise InputError(f"{path} is the result of another run; move it away to run it again")
        return found

    def prepare(self, specs: Collection[RunSpec], *, fresh: bool = False) -> None:
        """Create the folder; with `fresh`, delete results and checkpoints of these runs.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            probe = self.folder / ".checkpoints" / f"try-{os.getpid()}"
            probe.parent.mkdir(parents=True, exist_ok=True)
            write_file(probe, b"")
            probe.unlink()
        except OSError as error:
            raise InputError(f"{self.folder} cannot be written ({error.strerror}); name another place") from None
        for spec in specs if fresh else ():
            self.path(spec).unlink(missing_ok=True)
            for part in filter(None, (spec, spec.shared_part)):
                self.checkpoint(part).unlink(missing_ok=True)

    def run(
        self,
        spec: RunSpec,
        data_dir: Path | None = None,
        on_step: OnStep = lambda *_: None,
        cluster: RayCluster | None = None,
    ) -> RunResult:
        """Return the stored result of this run, or run it, perhaps on a cluster; resume if there is a checkpoint.

        Steps that it shares with other runs are run once: their checkpoint stays.
        """
        found = self.get(spec)
        if found is not None:
            return found
        checkpoint = self.checkpoint(spec)
        self.prepare([spec])
        if spec.shared_part and not checkpoint.exists():
            shared = self.checkpoint(spec.shared_part)
            execute(spec.shared_part, data_dir, shared, on_step, device=self.device, cluster=cluster)
            write_file(checkpoint, shared.read_bytes())
        result = execute(spec, data_dir, checkpoint, on_step, device=self.device, cluster=cluster)
        write_file(self.path(spec), json.dumps(result.as_json()) + "\n")
        checkpoint.unlink(missing_ok=True)
        return RunResult.read(self.path(spec))


def execute(
    spec: RunSpec,
    data_dir: Path | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep = lambda *_: None,
    device: torch.device = CPU,
    cluster: RayCluster | None = None,
) -> RunResult:
    """Run a spec and return its result, without storing it."""
    spec.check_device(device)
    data = load_data(spec, data_dir)
    settings = baselines.BaselineSettings(
        build_model=lambda: build_model(spec, data),
        blocks=split_data(spec, data),
        steps=spec.steps,
        lr=spec.lr,
        delta=spec.origin_delta(),
        loss=nn.functional.cross_entropy if data.classes else nn.functional.mse_loss,
        seed=spec.seed,
        start=spec.start,  # type: ignore[arg-type]
        test=(data.x, data.y) if spec.measure == "training" else (data.held_out_x, data.held_out_y),
        evaluate_every=spec.evaluation_interval,
        device=device,
        checkpoint=checkpoint,
        on_step=on_step,
        engine=cluster if cluster is not None and spec.method in CLUSTER_METHODS else "auto",
    )
    return _METHODS[spec.method](spec, settings)


def _cgd(spec: RunSpec, settings: BaselineSettings) -> RunResult:
    result = settings.simulate(
        mode=spec.mode,  # type: ignore[arg-type]
        accept=spec.accept,
        sample=spec.sample,
        arithmetic=spec.arithmetic,  # type: ignore[arg-type]
        mu=spec.mu,
        hold=spec.hold,
        **_steps(spec),
        batches=spec.batches,
        local=spec.local,
        keep=spec.keep,
        fresh_origins=spec.fresh_origins,
        delay=spec.delay,
        privacy=spec.privacy,
    )
    extra: dict[str, Any] = {"displacement": _digest(result.displacement()), **_spent(spec, settings, result)}
    if spec.has_regret:
        measure = theory.measure_network if spec.hidden else theory.measure
        extra["theory"] = asdict(measure(settings, result))
    return RunResult(spec, result.history, cgd.__version__, extra)


def _federated(spec: RunSpec, settings: BaselineSettings) -> RunResult:
    if spec.local is not None:
        result = baselines.federated_averaging(settings, spec.local, rule=_rule(spec))
    else:
        options: dict[str, Any] = {"secure": spec.method == "secure-fedsgd", "mode": spec.mode, "accept": spec.accept}
        result = baselines.federated_sgd(settings, rule=_rule(spec), batches=spec.batches, **options)
    return RunResult(spec, result.history, cgd.__version__, {"displacement": _digest(result.displacement())})


def _centralised(spec: RunSpec, settings: BaselineSettings) -> RunResult:
    return RunResult(spec, baselines.centralised(settings, rule=_rule(spec)).history, cgd.__version__, {})


def _private_centralised(spec: RunSpec, settings: BaselineSettings) -> RunResult:
    privacy: Any = spec.privacy  # the spec requires it for this method
    result = baselines.private_centralised(settings, privacy, **_steps(spec))
    extra = {"displacement": _digest(result.displacement()), **_spent(spec, settings, result)}
    return RunResult(spec, result.history, cgd.__version__, extra)


def _steps(spec: RunSpec) -> dict[str, Any]:
    """Return the update rule and the schedule of `cgd.simulate`."""
    linear = spec.schedule == "linear"
    return {"rule": _rule(spec), "schedule": (lambda step: 1 - step / spec.steps) if linear else None}


def _rule(spec: RunSpec) -> Callable[[float], UpdateRule]:
    """Return the update rule, as a function of the step size."""
    if spec.rule == "sgd":
        return partial(SGDRule, momentum=spec.momentum, nesterov=spec.nesterov) if spec.momentum else SGDRule
    if spec.rule in ADAM_RULES:
        return partial(AdamRule, amsgrad=spec.rule == "amsgrad")
    return partial(GradientNormRule, first_only=spec.rule == "first-norm")


def update_rule(spec: RunSpec, step: int) -> UpdateRule:
    """Return the rule by which a run with the method cgd moves in a step, counted from 0, with its learning rate."""
    options = _steps(spec)
    factor, _ = step_factor(spec.steps, spec.mu, spec.hold, options["schedule"])
    rule: UpdateRule = options["rule"](spec.lr * factor(step))
    return rule


def _spent(spec: RunSpec, settings: BaselineSettings, result: SimulationResult) -> dict[str, Any]:
    """Return what was spent by the training, and by the mean of all records if it was opened."""
    if result.spent is None or spec.privacy is None:
        return {}
    spent = normalisation.spent_with_mean(spec, spec.privacy, settings.blocks, result.spent)
    return {"spent": rounded(spent._asdict())}


def _local(spec: RunSpec, settings: BaselineSettings) -> RunResult:
    result = baselines.local(settings, spec.sample, rule=_rule(spec))
    return RunResult(spec, result.history, cgd.__version__, {})


def _dp_sgd(spec: RunSpec, settings: BaselineSettings) -> RunResult:
    privacy = privacy_table.of_statistics(spec)
    result = baselines.dp_sgd(
        settings,
        epsilon=spec.epsilon,
        dp_delta=spec.dp_delta,
        batch=spec.batch,
        clip=spec.clip,
        momentum=spec.momentum,
        schedule=_steps(spec)["schedule"],
        prior_mu=0.0 if privacy is None else normalisation.mean_mu(spec, privacy, settings.blocks),
    )
    extra = {"epsilon_spent": result.epsilon_spent, "noise_multiplier": result.noise_multiplier}
    return RunResult(spec, result.history, cgd.__version__, extra)


CLUSTER_METHODS = ("cgd", "fedsgd", "fedavg")
"""The methods with many participants in floats; the others have one model, and are computed in this process."""

_METHODS = {
    "cgd": _cgd,
    "centralised": _centralised,
    "local": _local,
    "fedsgd": _federated,
    "secure-fedsgd": _federated,
    "fedavg": _federated,
    "dp-sgd": _dp_sgd,
    "private-centralised": _private_centralised,
}


def check(spec: RunSpec, data_dir: Path | None = None) -> None:
    """Check that the data suffice for a run, without running it.

    Raises:
        InputError: the data set is not available, or too small for the run.
    """
    data = load_data(spec, data_dir)
    for name, needed, available, unit in (
        ("rows", spec.rows, len(data.x), "samples"),
        ("columns", spec.columns, data.features, "features"),
        ("batch", spec.batch if spec.method == "dp-sgd" else 1, len(data.x), "samples"),
    ):
        if needed > available:
            raise InputError(f"{name} is {needed} and there are {available} {unit}; make it smaller")
    weights = sum(inputs * outputs for inputs, outputs in itertools.pairwise(_widths(spec, data)))
    data_files.check_memory(f"hidden is {list(spec.hidden)}, and the network", weights, fewer="units")
    if spec.skew is not None:
        spec.skew.divide(data.y, spec.rows, spec.seed)


def build_model(spec: RunSpec, data: Dataset) -> nn.Sequential:
    """Build the fully-connected network of a run."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(_widths(spec, data)):
        layers += [nn.Linear(inputs, outputs, bias=spec.bias), ACTIVATIONS[spec.activation]()]
    return nn.Sequential(*layers[:-1])


def _widths(spec: RunSpec, data: Dataset) -> tuple[int, ...]:
    return data.features, *spec.hidden, data.classes or 1


def split_data(spec: RunSpec, data: Dataset) -> dict[Cell, Block]:
    """Split the training samples of a run among its participants."""
    return Grid(spec.rows, spec.columns).split(data.x, data.y, seed=spec.seed, skew=spec.skew)


def load_data(spec: RunSpec, data_dir: Path | None) -> Dataset:
    """Return the data set of a run: scaled, limited to `spec.samples` training samples, split and normalised.

    Raises:
        InputError: the data cannot be loaded.
    """
    if spec.data_path is not None:
        data = _load_own(spec.data_path, spec.data_digest, spec.target, spec.seed)
    elif spec.data_digest:
        raise InputError(f"the run has its data from the file {spec.data}; run it from its spec file")
    else:
        # Other data sets do not depend on the seed, and need not be loaded again for each.
        data = _load_scaled(spec.data, spec.seed if spec.data in datasets.BUNDLED else 0, data_dir)
    data = data.first(spec.samples) if spec.samples else data
    data = data.validation() if spec.measure == "validation" else data
    return normalisation.normalise(data, spec)


@lru_cache(maxsize=2)
def _load_scaled(name: str, seed: int, data_dir: Path | None) -> Dataset:
    return datasets.load(name, seed, data_dir).scaled()


@lru_cache(maxsize=2)
def _load_own(path: Path, digest: str, target: str, seed: int) -> Dataset:
    return own_data.load(path, digest, target, seed).scaled()


def _digest(displacement: dict[str, torch.Tensor]) -> str:
    state = hashlib.sha256()
    for part in displacement.values():
        state.update(part.contiguous().numpy().data)
    return state.hexdigest()
