"""Specs of runs, and of experiments with several runs, as written in TOML files."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from cgd.errors import InputError
from cgd.experiments import own_data, privacy_table
from cgd.experiments.setting_values import as_float, check_choice, converted, is_number, suggest, table_of, text_of
from cgd.files import parse_toml
from cgd.optim.vertical import check_joint_accepted

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.dp.settings import PrivacySettings

Method = Literal["cgd", "centralised", "local", "fedsgd", "secure-fedsgd", "dp-sgd", "private-centralised"]
METHODS: tuple[str, ...] = get_args(Method)
POOLED_METHODS = ("centralised", "dp-sgd", "private-centralised")
_METHODS_OF: dict[str, tuple[str, ...]] = {  # settings that not all methods have
    **dict.fromkeys(("mu", "hold", "arithmetic"), ("cgd",)),
    "schedule": (*privacy_table.PRIVATE_METHODS, "dp-sgd"),
    "momentum": (*privacy_table.PRIVATE_METHODS, "dp-sgd", "centralised", "local"),
    "rule": ("cgd", "centralised", "local"),
}
RULES = ("sgd", "running-norm", "first-norm")
SMALL_DATA = ("breast-cancer", "digits", "iris", "wine")
"""Data sets with classes that are so small that a network on them is minimised in seconds."""
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "elu", "softplus")
Scale = Literal["quick", "paper"]
SCALES: tuple[str, ...] = get_args(Scale)
MAX_SEEDS = 1000


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
        mode: "towers" or "joint", see `cgd.optim.vertical`.
        accept: `cgd.JOINT_REVEALS_RECORDS`, required by the mode "joint"; has no effect on the result.
        hidden: widths of the hidden layers; empty for a linear model.
        activation: activation between the layers.
        bias: use biases.
        delta: standard deviation of the origins, the paper's δ; or a range from which each participant draws its own.
        steps: number of steps, the paper's T.
        lr: step size, the paper's α.
        mu: the paper's μ of the step size; 0 for a fixed step size.
        hold: number of steps with a fixed step size before it decreases.
        schedule: "paper" for the step size of `mu` and `hold`, "linear" for one that falls linearly to 0.
        momentum: momentum of the steps.
        rule: update rule: "sgd", or a step size divided by the norm of each layer's gradient, see
            `cgd.simulation.gradient_norm`: "running-norm", or "first-norm" for the norm of the first step.
        seed: seed of the split of the data and of the origins.
        sample: number of participants to evaluate (in `local`: to train).
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
    mode: str = "towers"
    accept: str = field(default="", compare=False)
    hidden: tuple[int, ...] = (256,)
    activation: str = "relu"
    bias: bool = True
    delta: float | tuple[float, float] = 0.1
    steps: int = 500
    lr: float = 0.5
    mu: float = 0.0
    hold: int = 0
    schedule: str = "paper"
    momentum: float = 0.0
    rule: str = "sgd"
    seed: int = 0
    sample: int = 10
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
        check_choice("mode", self.mode, ("towers", "joint"))
        check_joint_accepted(self.mode, self.accept)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("arithmetic", self.arithmetic, ("float", "ring"))
        check_choice("measure", self.measure, ("held-out", "training", "validation"))
        check_choice("normalise", self.normalise, ("none", "unit", "centred"))
        check_choice("schedule", self.schedule, ("paper", "linear"))
        check_choice("rule", self.rule, RULES)
        at_least = dict.fromkeys(("samples", "hold", "seed"), 0)
        at_least |= dict.fromkeys(("rows", "columns", "steps", "sample", "evaluations", "batch"), 1)
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
        for name in ("lr", "mu", "momentum", "epsilon"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be a finite number, at least 0")
        if self.hold > self.steps:
            raise InputError(f"hold is {self.hold} and steps is {self.steps}; hold must not be larger than steps")
        if not self.momentum < 1:
            raise InputError(f"momentum is {self.momentum}; it must be below 1, 0.9 is common")
        if self.schedule == "linear" and (self.mu or self.hold):
            raise InputError(
                f"mu is {self.mu}, hold is {self.hold} and the schedule is linear; set either mu and hold, or schedule"
            )
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
            if self.method == "cgd" and self.columns > 1 and self.mode == "towers":
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

    @property
    def slug(self) -> str:
        """A readable file name that is the same for equal runs."""
        grid = "" if self.method in POOLED_METHODS else f"-{self.rows}x{self.columns}"
        mode = f"-{self.mode}" if self.columns > 1 and self.method != "local" else ""
        delta = "-".join(f"{each:g}" for each in self.delta) if isinstance(self.delta, tuple) else f"{self.delta:g}"
        epsilon = self.privacy.epsilon if self.privacy else self.epsilon
        private = f"-eps{epsilon:g}" if self.method == "dp-sgd" or self.privacy else ""
        # Only settings that differ from the defaults, so that a new setting does not rename old results.
        changed = {name: value for name, value in self.as_json().items() if value != _plain(_DEFAULTS[name])}
        changed.pop("accept", None)  # has no effect on the result, and old results were made without it
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        return f"{own_data.short_name(self.data)}-{self.method}{grid}{mode}-d{delta}{private}-t{self.steps}-{digest}"

    @property
    def has_regret(self) -> bool:
        """True for a run of Theorem 1 that is evaluated before every step on all training samples.

        That is a linear model, or a network on a small data set, because its F(w_*) is searched from several starts.
        """
        has_classes = self.data != "diabetes" and not self.data_digest  # of a file, it is not known before it is read
        searched = not self.hidden or self.data in SMALL_DATA
        studied = self.method == "cgd" and searched and self.columns == 1 and has_classes
        return studied and self.measure == "training" and self.evaluations >= self.steps

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        settings = {name: value for name, value in asdict(self).items() if name in _DEFAULTS}
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
# Defaults that are left out of JSON, so that the results of former versions stay as they are.
_OMITTED = (
    *(("accept", ""), ("privacy", None), ("normalise", "none"), ("schedule", "paper"), ("momentum", 0.0)),
    *(("rule", "sgd"), ("target", ""), ("data_digest", "")),
)


@dataclass(frozen=True)
class RunEntry:
    """A row of an experiment's table: a run, or the same run with several seeds.

    Attributes:
        label: name of the entry within its group.
        run: settings of the run with the first seed.
        group: name of a group of entries, such as their grid.
        reported: metrics that the paper reports for this run.
        seeds: number of runs, with the seeds `run.seed`, `run.seed` + 1, …
    """

    label: str
    run: RunSpec
    group: str = ""
    reported: dict[str, float] = field(default_factory=dict)
    seeds: int = 1

    @property
    def name(self) -> str:
        """The group and the label."""
        return f"{self.group} {self.label}".strip()

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """The settings of all runs, by seed."""
        return tuple(replace(self.run, seed=self.run.seed + number) for number in range(self.seeds))

    def name_of(self, run: RunSpec) -> str:
        """Return the name of one of the runs: with its seed, if there are several."""
        return f"{self.name}, seed {run.seed}" if self.seeds > 1 else self.name


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or an experiment of a user.

    Attributes:
        name: name on the command line.
        title: title, one line.
        about: description.
        show: kind of table or plot, one of SHOW_CHOICES.
        entries: runs, by scale.
    """

    name: str
    title: str
    about: str
    show: str
    entries: dict[str, tuple[RunEntry, ...]]


SHOW_CHOICES = ("table", "curves", "gaps", "sweep", "regret")


def read(path: Path, referrers: tuple[Path, ...] = ()) -> Experiment:
    """Read an experiment from a TOML file.

    Args:
        path: the file.
        referrers: files that refer to this one by `like`.

    Raises:
        InputError: the file cannot be read, or has unknown or invalid content.
    """
    try:
        content = parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); name a TOML file") from None
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number may have too many digits
        raise InputError(f"{path} is not TOML: {error}; correct it there") from None
    if "like" in content:
        return _read_like(path, content, (*referrers, path))
    known = ("title", "about", "show", "common", "privacy", "scale", "run")
    for key in content:
        if key not in known:
            raise InputError(
                f"{path.name}: there is no table {key!r}{suggest(key, known)}; choose one of {', '.join(known)}"
            )
    show = content.get("show", "curves")
    check_choice(f"{path.name}: show", show, SHOW_CHOICES)
    scales = table_of(content, "scale", path.name) or {"paper": {}}
    for scale in scales:
        check_choice(f"{path.name}: scale", scale, SCALES)
        table_of(scales, scale, f"{path.name}: scale")
    runs = content.get("run", [])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        found = "has no run" if runs == [] else "has a run that is not in a list of tables"
        raise InputError(f"{path.name} {found}; write one or more [[run]] tables, in double brackets")
    common = table_of(content, "common", path.name)
    runs = [privacy_table.with_defaults(run, common, table_of(content, "privacy", path.name)) for run in runs]
    entries = {
        scale: tuple(_entry(path, number, run, common, scales, scale) for number, run in enumerate(runs, start=1))
        for scale in scales
    }
    for own in entries.values():
        _check_show(show, own, path.name)
    about = " ".join(text_of(content, "about", "", path.name).split())
    return Experiment(path.stem, text_of(content, "title", path.stem, path.name), about, show, entries)


def _read_like(path: Path, content: dict[str, Any], referrers: tuple[Path, ...]) -> Experiment:
    """Return an experiment that shows runs of another file in the same folder, all or some, in another way."""
    known = ("title", "about", "show", "like", "only")
    for key in content:
        if key not in known:
            raise InputError(
                f"{path.name}: {key!r} is not allowed with `like`{suggest(key, known)}; "
                f"choose one of {', '.join(known)}"
            )
    other_path = path.parent / f"{text_of(content, 'like', '', path.name)}.toml"
    if other_path in referrers:
        raise InputError(f"{path.name}: like is {content['like']!r}, a circular reference; name a file with runs")
    other = read(other_path, referrers)
    show = content.get("show", other.show)
    check_choice(f"{path.name}: show", show, SHOW_CHOICES)
    only = text_of(content, "only", "", path.name)
    entries = {scale: tuple(entry for entry in own if only in entry.name) for scale, own in other.entries.items()}
    if not all(entries.values()):
        raise InputError(f"{path.name}: no run of {other.name} has {only!r} in its group and label")
    for own in entries.values():
        _check_show(show, own, path.name)
    about = " ".join(text_of(content, "about", other.about, path.name).split())
    return Experiment(path.stem, text_of(content, "title", other.title, path.name), about, show, entries)


def _check_show(show: str, entries: tuple[RunEntry, ...], where: str) -> None:
    """Raise InputError, before any training, if the runs do not have the results to show."""
    for entry in entries:
        run = entry.run
        if show == "regret" and not run.has_regret:
            raise InputError(
                f"{where}: {entry.label!r} has no regret to show; it needs cgd, classes, one column, "
                f'measure = "training", as many evaluations as steps, and hidden = [] or one of {", ".join(SMALL_DATA)}'
            )
        if show == "gaps" and run.data == "diabetes":
            raise InputError(
                f"{where}: {entry.label!r} is a regression and has no accuracy to show gaps of; show a table or curves"
            )


def _entry(
    file: Path, number: int, run: dict[str, Any], common: dict[str, Any], scales: dict[str, Any], scale: str
) -> RunEntry:
    """Return a [[run]], merged with the common settings and those of the scale.

    Settings of the run override the others; those in its table `quick` or `paper` apply at that scale only.
    """
    where = f"{file.name}, run {number}"
    for other in SCALES:
        if other in run and other not in scales:
            raise InputError(f"{where}: there is no scale {other!r} to change; write [scale.{other}], it may be empty")
    own = {key: value for key, value in run.items() if key not in ("label", "group", "reported", *SCALES)}
    settings = {**common, **scales[scale], **own, **table_of(run, scale, where)}
    seeds = settings.pop("seeds", 1)
    if type(seeds) is not int or not 1 <= seeds <= MAX_SEEDS:
        raise InputError(f"{where}: seeds is {seeds!r}; it must be a whole number from 1 to {MAX_SEEDS}")
    spec = RunSpec.from_table(settings, where if len(scales) == 1 else f"{where}, scale {scale}", file.parent)
    reported = table_of(run, "reported", where)
    for key, value in reported.items():
        if not is_number(value):
            raise InputError(f"{where}: reported {key} is {value!r}; it must be a number")
    return RunEntry(
        text_of(run, "label", f"run {number}", where),
        spec,
        text_of(run, "group", "", where),
        {key: as_float(value) for key, value in reported.items()},
        seeds,
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
