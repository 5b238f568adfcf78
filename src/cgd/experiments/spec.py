"""The settings of a run."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from cgd.errors import InputError
from cgd.experiments import own_data, privacy_table
from cgd.experiments.setting_values import check_choice, converted, suggest
from cgd.optim.delayed_steps import check_delay
from cgd.optim.public_start import STARTS
from cgd.optim.skew import Skew
from cgd.optim.vertical import check_joint_accepted
from cgd.simulation.local_training import LocalTraining, Work
from cgd.simulation.population import participant_seed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from cgd.dp.settings import PrivacySettings
    from cgd.optim.grid import Cell

Method = Literal["cgd", "centralised", "local", "fedsgd", "secure-fedsgd", "fedavg", "dp-sgd", "private-centralised"]
METHODS: tuple[str, ...] = get_args(Method)
POOLED_METHODS = ("centralised", "dp-sgd", "private-centralised")
_METHODS_OF: dict[str, tuple[str, ...]] = {  # settings that not all methods have
    **dict.fromkeys(("mu", "hold", "arithmetic", "fresh_origins", "delay"), ("cgd",)),
    "schedule": (*privacy_table.PRIVATE_METHODS, "dp-sgd"),
    "rule": ("cgd", "centralised", "local", "fedsgd", "secure-fedsgd", "fedavg"),
    "batches": ("cgd", "fedsgd", "secure-fedsgd"),
    "local": ("cgd", "fedavg"),
    "keep": ("cgd",),
    "nesterov": ("cgd", "centralised", "local", "fedsgd", "secure-fedsgd", "fedavg"),
}
SKEW_EXAMPLES = "{ classes = 2 } or skew = { dirichlet = 0.1 }"
LOCAL_EXAMPLE = "{ epochs = 1, batch = 10 }"
MAX_FACTOR = 1e30
"""The largest step size and the largest δ; products of larger ones have no place in single precision."""
RULES = ("sgd", "adam", "amsgrad", "running-norm", "first-norm")
ADAM_RULES = ("adam", "amsgrad")
SMALL_DATA = ("breast-cancer", "digits", "iris", "wine")
"""Data sets with classes that are so small that a network on them is minimised in seconds."""
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "elu", "softplus")


@dataclass(frozen=True)
class RunSpec:
    """The settings of one run. The names are those of `cgd.simulate`, where it has them.

    Attributes:
        method: training method, one of METHODS.
        data: name of a data set, or of a file; see `cgd.experiments.own_data`.
        samples: number of training samples, taken from the start; 0 for all.
        normalise: see `cgd.experiments.normalisation`: "none", "unit" or "centred".
        rows: number of rows, the paper's m^h.
        columns: number of columns, the paper's m^v.
        skew: how classes are divided among the rows, a table such as `{ classes = 2 }` or `{ dirichlet = 0.1 }`, see
            `cgd.Skew`; None for an even mix.
        mode: "towers" or "joint", see `cgd.optim.vertical`.
        accept: `cgd.JOINT_REVEALS_RECORDS`, required by the mode "joint"; has no effect on the result.
        hidden: widths of the hidden layers; empty for a linear model.
        activation: activation between the layers.
        bias: use biases.
        delta: standard deviation of the origins, the paper's δ; or a range from which each participant draws its own.
        start: "model" for a public start drawn from the seed, "zeros" for origins around zero, as in the paper.
        fresh_origins: draw another origin for each participant and step, see `cgd.simulate`.
        steps: number of steps, the paper's T.
        lr: step size, the paper's α.
        mu: the paper's μ of the step size; 0 for a fixed step size.
        hold: number of steps with a fixed step size before it decreases.
        schedule: "paper" for the step size of `mu` and `hold`, "linear" for one that falls linearly to 0.
        momentum: momentum of the steps.
        delay: number of steps after which the displacement moves by a sum, see `cgd.simulate`.
        batches: number of batches of an epoch, of which each step uses one; 1 to use all samples in every step.
        local: local training between two sums, a table such as `{ epochs = 1, batch = 10, lr = 0.1, momentum = 0.9 }`,
            see `cgd.LocalTraining`; None to sum gradients.
        nesterov: use Nesterov's momentum.
        rule: update rule: "sgd", "adam", "amsgrad", or a step size divided by the norm of each layer's gradient, see
            `cgd.simulation.gradient_norm`: "running-norm", or "first-norm" for the norm of the first step.
        seed: seed of the split of the data and of the origins.
        sample: number of participants to evaluate (in `local`: to train).
        keep: part of each participant's records by which it chooses the model that it keeps, see
            `cgd.simulation.kept_model`; 0 for none.
        evaluations: number of evaluations during the run.
        measure: evaluate on "held-out" samples; on all "training" samples, for the regret of Theorem 1; or on the last
            sixth of the training samples after training on the others ("validation"), to choose settings.
        arithmetic: "float" or "ring".
        epsilon: ε of dp-sgd.
        dp_delta: δ of dp-sgd.
        batch: expected batch size of dp-sgd; the number of training samples for the full batch.
        clip: clipping norm of dp-sgd.
        privacy: differential privacy of cgd and private-centralised; a table of its settings, or None.
        target: column to predict, if the file is a table.
        data_digest: SHA-256 of the file's content; empty for a data set.
        data_path: where the file is; None for a data set, and in a stored result.
    """

    method: str = "cgd"
    data: str = "digits"
    samples: int = 0
    normalise: str = "none"
    rows: int = 1
    columns: int = 1
    skew: Skew | None = None
    mode: str = "towers"
    accept: str = field(default="", compare=False)
    hidden: tuple[int, ...] = (256,)
    activation: str = "relu"
    bias: bool = True
    delta: float | tuple[float, float] = 0.1
    start: str = "model"
    fresh_origins: bool = False
    steps: int = 500
    lr: float = 0.5
    mu: float = 0.0
    hold: int = 0
    schedule: str = "paper"
    momentum: float = 0.0
    nesterov: bool = False
    delay: int = 0
    batches: int = 1
    local: LocalTraining | None = None
    rule: str = "sgd"
    seed: int = 0
    sample: int = 10
    keep: float = 0.0
    evaluations: int = 50
    measure: str = "held-out"
    arithmetic: str = "float"
    epsilon: float = 0.0
    dp_delta: float = 1e-5
    batch: int = 256
    clip: float = 1.0
    privacy: PrivacySettings | None = None
    target: str = ""
    data_digest: str = ""
    data_path: Path | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            object.__setattr__(self, name, converted(name, getattr(self, name), default))
        check_choice("method", self.method, METHODS)
        own_data.check_settings(self.data, self.target, self.data_digest)
        object.__setattr__(self, "skew", _parse_table("skew", self.skew, Skew, SKEW_EXAMPLES))
        object.__setattr__(self, "local", _parse_table("local", self.local, LocalTraining, LOCAL_EXAMPLE))
        check_choice("mode", self.mode, ("towers", "joint"))
        check_joint_accepted(self.mode, self.accept)
        check_choice("start", self.start, STARTS)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("arithmetic", self.arithmetic, ("float", "ring"))
        check_choice("measure", self.measure, ("held-out", "training", "validation"))
        check_choice("normalise", self.normalise, ("none", "unit", "centred"))
        check_choice("schedule", self.schedule, ("paper", "linear"))
        check_choice("rule", self.rule, RULES)
        at_least = dict.fromkeys(("samples", "hold", "seed"), 0)
        at_least |= dict.fromkeys(("rows", "columns", "steps", "sample", "evaluations", "batch", "batches"), 1)
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if any(width < 1 for width in self.hidden):
            raise InputError(f"hidden is {list(self.hidden)}; every layer needs at least one unit")
        if isinstance(self.delta, tuple):
            if not (len(self.delta) == 2 and 0 < self.delta[0] < self.delta[1] < math.inf):
                raise InputError(
                    f"delta is {list(self.delta)}; a range must be [low, high] with 0 < low < high, both finite"
                )
        elif not 0 < self.delta < math.inf:
            raise InputError(f"delta is {self.delta}; it is a standard deviation and must be a finite number above 0")
        deltas = self.delta if isinstance(self.delta, tuple) else (self.delta,)
        for name, value in (("lr", self.lr), ("delta", max(deltas))):
            if MAX_FACTOR < value < math.inf:
                raise InputError(f"{name} is {value}, beyond the range of single precision; use at most {MAX_FACTOR:g}")
        for name in ("lr", "mu", "momentum", "epsilon"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be a finite number, at least 0")
        if not 0 <= self.keep < 1:
            raise InputError(f"keep is {self.keep}; it is a part of the records, at least 0 and below 1")
        if self.hold > self.steps:
            raise InputError(f"hold is {self.hold} and steps is {self.steps}; hold must not be larger than steps")
        if not self.momentum < 1:
            raise InputError(f"momentum is {self.momentum}; it must be below 1, 0.9 is common")
        if self.nesterov and not self.momentum:
            raise InputError("nesterov is true and momentum is 0; set a momentum, such as 0.9, or leave nesterov out")
        if self.schedule == "linear" and (self.mu or self.hold):
            raise InputError(
                f"mu is {self.mu}, hold is {self.hold} and the schedule is linear; set either mu and hold, or schedule"
            )
        self._check_work()
        for name, methods in _METHODS_OF.items():
            if self.method not in methods and getattr(self, name) != _DEFAULTS[name]:
                users = " and ".join(filter(None, (", ".join(methods[:-1]), methods[-1])))
                raise InputError(
                    f"{name} is {getattr(self, name)} and the method is {self.method}; only {users} "
                    f"{'use' if len(methods) > 1 else 'uses'} it, set it only in runs with the method "
                    f"{' or '.join(methods)}"
                )
        if self.rule != "sgd":
            if self.momentum:
                raise InputError(
                    f"momentum is {self.momentum} and the rule is {self.rule}; only the rule sgd uses it, set either "
                    "momentum or rule"
                )
            if self.rule not in ADAM_RULES and self.method == "cgd" and self.columns > 1 and self.mode == "towers":
                raise InputError(
                    f"the rule is {self.rule}, columns is {self.columns} and the mode is towers, whose layers 2…N "
                    "move by a sum over columns; this rule is defined for a mean, use the mode joint or the rule sgd"
                )
        if self.method == "dp-sgd" and not self.epsilon > 0:
            raise InputError(f"epsilon is {self.epsilon}; dp-sgd needs a privacy parameter above 0")
        if not 0 < self.dp_delta < 1:
            raise InputError(f"dp_delta is {self.dp_delta}; it is a probability and must be above 0 and below 1")
        if not 0 < self.clip < math.inf:
            raise InputError(f"clip is {self.clip}; it must be a finite number above 0")
        object.__setattr__(self, "privacy", privacy_table.parse(self.privacy, self.steps))
        privacy_table.check(self)

    def _check_work(self) -> None:
        """Raise InputError if the records of a step, or the local training, cannot be combined with other settings."""
        _ = self.work  # raises if it is invalid
        check_delay(self.delay, self.steps)
        if self.delay and self.columns > 1:
            raise InputError(f"delay is {self.delay} and columns is {self.columns}; a delay is for one column")
        if self.delay and self.fresh_origins:
            raise InputError(f"delay is {self.delay} and fresh_origins is true; real participants have one of both")
        if self.method == "fedavg" and self.local is None:
            raise InputError(
                "the method is fedavg and there is no local training; set "
                f"local = {LOCAL_EXAMPLE}, or use the method fedsgd"
            )
        if self.local is not None and self.columns > 1 and self.mode == "joint":
            raise InputError(
                "there is a local training and the mode is joint, in which a row sums in every step; use the mode "
                "towers, or batches"
            )
        if self.keep and self.columns > 1:
            raise InputError(f"keep is {self.keep} and columns is {self.columns}; kept models are for one column")
        if self.privacy is not None and (self.local is not None or self.batches > 1):
            raise InputError(
                "privacy is set with a local training or batches; the guarantee is for the gradients of all records in "
                "every step: leave local and batches out, or privacy"
            )

    @property
    def slug(self) -> str:
        """A readable file name that is the same for equal runs."""
        skew = "".join(f"-{name}{value:g}" for name, value in self.skew.as_json().items()) if self.skew else ""
        grid = "" if self.method in POOLED_METHODS else f"-{self.rows}x{self.columns}{skew}"
        mode = f"-{self.mode}" if self.columns > 1 and self.method != "local" else ""
        delta = "-".join(f"{each:g}" for each in self.delta) if isinstance(self.delta, tuple) else f"{self.delta:g}"
        epsilon = self.privacy.epsilon if self.privacy else self.epsilon
        private = f"-eps{epsilon:g}" if self.method == "dp-sgd" or self.privacy else ""
        # Only settings that differ from those of old results, so that a new setting does not rename them.
        old = {**_DEFAULTS, "start": "zeros"}
        changed = {name: value for name, value in self.as_json().items() if value != _plain(old[name])}
        changed.pop("accept", None)  # has no effect on the result, and old results were made without it
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        data = own_data.short_name(self.data)
        return f"{data}-{self.method}{grid}{mode}-d{delta}{private}-t{self.steps}-{digest}"

    @property
    def work(self) -> Work:
        """The records that participants use in each round."""
        return Work(self.batches, self.local)

    @property
    def evaluation_interval(self) -> int:
        """The number of steps between two evaluations."""
        return max(1, self.steps // self.evaluations)

    @property
    def shared_part(self) -> RunSpec | None:
        """The first steps, with a fixed step size, that runs with another `mu` share; None if there are none."""
        interval = self.evaluation_interval
        if self.method != "cgd" or self.privacy or not 0 < self.hold < self.steps or self.hold % interval:
            return None
        return replace(self, steps=self.hold, evaluations=self.hold // interval, mu=0.0, hold=0)

    @property
    def has_regret(self) -> bool:
        """True for a run of Theorem 1 that is evaluated before every step on all training samples.

        That is a linear model, or a network on a small data set, because its F(w_*) is searched from several starts.
        """
        has_classes = self.data != "diabetes" and not self.data_digest  # of a file, it is not known before it is read
        searched = not self.hidden or self.data in SMALL_DATA
        studied = self.method == "cgd" and searched and self.columns == 1 and has_classes
        return studied and self.measure == "training" and self.evaluations >= self.steps

    def origin_delta(self) -> float | Callable[[Cell], float]:
        """Return δ for all participants, or a function that draws δ for each cell, always the same for one seed."""
        if not isinstance(self.delta, tuple):
            return self.delta
        low, high = self.delta

        def draw_delta(cell: Cell) -> float:
            return float(np.random.default_rng([*participant_seed(self.seed, cell)]).uniform(low, high))

        return draw_delta

    def check_device(self, device: torch.device) -> None:
        """Check that the run can be computed on a device.

        Raises:
            InputError: it is not the CPU, and the run is no simulation, or has several columns or `privacy`.
        """
        reasons = {
            f"the method is {self.method}": self.method in ("local", "dp-sgd", "private-centralised"),
            f"columns is {self.columns}": self.columns > 1 and self.method != "centralised",
            "privacy is given": self.privacy is not None,
        }
        for reason, holds in reasons.items():
            if holds and device.type != "cpu":
                raise InputError(
                    f"device is {str(device)!r} and {reason}; such runs are computed on the CPU: leave --device out, "
                    "and name the others with --only"
                )

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        settings = {name: value for name, value in asdict(self).items() if name in _DEFAULTS}
        for name in ("skew", "local"):
            table = getattr(self, name)
            settings[name] = None if table is None else table.as_json()
        settings["privacy"] = None if self.privacy is None else privacy_table.as_json(self.privacy)
        return {name: _plain(value) for name, value in settings.items() if (name, value) not in _OMITTED}

    @classmethod
    def from_table(cls, table: dict[str, Any], where: str, folder: Path | None = None) -> RunSpec:
        """Build a spec from a table of a TOML or JSON file.

        Args:
            table: names and values of settings.
            where: name of the table in errors.
            folder: folder of the file, which the path of the data is relative to; None for a stored result.

        Raises:
            InputError: a name is unknown, or a value has the wrong type or is invalid.
        """
        for name in table:
            if name not in _DEFAULTS:
                raise InputError(
                    f"{where}: there is no setting {name!r}{suggest(name, _DEFAULTS)}; "
                    f"choose one of {', '.join(_DEFAULTS)}"
                )
        try:
            settings, path = (table, None) if folder is None else own_data.locate(table, folder)
            return cls(**settings, data_path=path)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


_DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in fields(RunSpec) if each.default is not MISSING and each.name != "data_path"
}
# Values that are left out of JSON, so that the results of former versions stay as they are.
_OMITTED = (
    *(("accept", ""), ("privacy", None), ("normalise", "none"), ("schedule", "paper"), ("momentum", 0.0)),
    *(("rule", "sgd"), ("target", ""), ("data_digest", ""), ("skew", None), ("start", "zeros")),
    *(("batches", 1), ("local", None), ("keep", 0.0), ("nesterov", False), ("fresh_origins", False), ("delay", 0)),
)


def _parse_table(setting: str, value: Any, kind: type[Any], example: str) -> Any:
    """Return the settings in a table of a TOML or JSON file, as a `kind`; None if there is no table.

    Raises:
        InputError: a name is unknown, or a value is invalid.
    """
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        raise InputError(f"{setting} is {value!r}; it must be a table: {setting} = {example}")
    names = tuple(each.name for each in fields(kind))
    for name in value:
        check_choice(f"{setting}: the setting", name, names)
    try:
        return kind(**value)
    except InputError as error:
        raise InputError(f"{setting}: {error}") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
