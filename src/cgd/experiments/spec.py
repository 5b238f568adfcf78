"""What is to be run: one run, and an experiment of several, as they are written in TOML files."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from cgd.errors import InputError
from cgd.experiments.datasets import NAMES
from cgd.files import parse_toml
from cgd.optim.vertical import accept_joint

if TYPE_CHECKING:
    from pathlib import Path

Method = Literal["cgd", "centralised", "local", "fedsgd", "secure-fedsgd", "dp-sgd"]
METHODS: tuple[str, ...] = get_args(Method)
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "elu", "softplus")
Scale = Literal["quick", "paper"]
SCALES: tuple[str, ...] = get_args(Scale)


@dataclass(frozen=True)
class RunSpec:
    """One run. The names are those of `cgd.simulate`, where it has them.

    Attributes:
        method: how to train.
        data: the name of a data set.
        samples: how many of its samples to train on, the first ones; 0 for all.
        rows: m^h.
        columns: m^v.
        mode: how a row goes together.
        accept: `cgd.JOINT_REVEALS_RECORDS`, which `joint` is refused without; the run is the same with it.
        hidden: the widths of the hidden layers; none for a linear model.
        activation: between the layers.
        bias: whether layers have biases.
        delta: δ, or the two ends of the range from which everybody draws its own.
        steps: T.
        lr: α.
        mu: μ.
        hold: the steps before α shrinks.
        seed: decides the split of the data and the origins.
        sample: how many participants are evaluated (in `local`: trained).
        evaluations: how often, over the run.
        measure: on "held-out" samples, or on the "training" samples of all, for the regret of Theorem 1.
        arithmetic: "float" or "ring".
        epsilon: the privacy of dp-sgd.
        dp_delta: its probability of failure.
        batch: its expected batch size.
        clip: its largest norm of a sample's gradient.
    """

    method: str = "cgd"
    data: str = "digits"
    samples: int = 0
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
    seed: int = 0
    sample: int = 10
    evaluations: int = 50
    measure: str = "held-out"
    arithmetic: str = "float"
    epsilon: float = 0.0
    dp_delta: float = 1e-5
    batch: int = 256
    clip: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            # A whole number becomes a float where a float is meant: equal runs have equal slugs.
            object.__setattr__(self, each.name, _typed(each.name, getattr(self, each.name)))
        _one_of("method", self.method, METHODS)
        _one_of("data", self.data, NAMES)
        _one_of("mode", self.mode, ("towers", "joint"))
        accept_joint(self.mode, self.accept)
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("arithmetic", self.arithmetic, ("float", "ring"))
        _one_of("measure", self.measure, ("held-out", "training"))
        at_least = {
            "samples": 0,
            "rows": 1,
            "columns": 1,
            "steps": 1,
            "hold": 0,
            "seed": 0,
            "sample": 1,
            "evaluations": 1,
            "batch": 1,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if any(width < 1 for width in self.hidden):
            raise InputError(f"hidden is {list(self.hidden)}; every layer needs at least one unit")
        if isinstance(self.delta, tuple):
            if not (len(self.delta) == 2 and 0 < self.delta[0] < self.delta[1] < math.inf):
                raise InputError(f"delta is {list(self.delta)}; a range has two ends, 0 < low < high, both finite")
        elif not 0 < self.delta < math.inf:
            raise InputError(f"delta is {self.delta}; it is a standard deviation, a finite number above 0")
        for name in ("lr", "mu", "epsilon"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be a finite number, at least 0")
        if self.hold > self.steps:
            raise InputError(
                f"hold is {self.hold} and steps is {self.steps}; α must be held for no longer than the run"
            )
        for name in ("mu", "hold", "arithmetic"):
            if self.method != "cgd" and getattr(self, name) != _DEFAULTS[name]:
                raise InputError(
                    f"{name} is {getattr(self, name)} and the method is {self.method}; only cgd has it, set it in the "
                    "runs of that method"
                )
        if self.method == "dp-sgd" and not self.epsilon > 0:
            raise InputError(f"epsilon is {self.epsilon}; dp-sgd needs the privacy it shall give, above 0")
        if not 0 < self.dp_delta < 1:
            raise InputError(f"dp_delta is {self.dp_delta}; it is a probability, above 0 and below 1")
        if not 0 < self.clip < math.inf:
            raise InputError(f"clip is {self.clip}; it must be a finite number above 0")

    @property
    def slug(self) -> str:
        """A file name that is the same for the same run, and readable."""
        grid = "" if self.method in ("centralised", "dp-sgd") else f"-{self.rows}x{self.columns}"
        mode = f"-{self.mode}" if self.columns > 1 and self.method != "local" else ""
        delta = "-".join(f"{each:g}" for each in self.delta) if isinstance(self.delta, tuple) else f"{self.delta:g}"
        private = f"-eps{self.epsilon:g}" if self.method == "dp-sgd" else ""
        # Of what differs from the defaults, so that a setting added later does not rename old results.
        special = {name: value for name, value in self.as_json().items() if value != _json(_DEFAULTS[name])}
        special.pop("accept", None)  # it is no setting, and old results were made without
        digest = hashlib.sha256(json.dumps(special, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.data}-{self.method}{grid}{mode}-d{delta}{private}-t{self.steps}-{digest}"

    @property
    def has_regret(self) -> bool:
        """Whether it is a convex case of Theorem 1, measured before every step on everybody's training samples."""
        convex = self.method == "cgd" and not self.hidden and self.columns == 1 and self.data != "diabetes"
        return convex and self.measure == "training" and self.evaluations >= self.steps

    def as_json(self) -> dict[str, Any]:
        """The run as plain data."""
        return {name: _json(value) for name, value in asdict(self).items() if (name, value) != ("accept", "")}

    @classmethod
    def from_table(cls, table: dict[str, Any], where: str) -> RunSpec:
        """A run from a table of a TOML or JSON file.

        Raises:
            InputError: a name is unknown, or a value is of the wrong type or makes no sense.
        """
        for name in table:
            if name not in _DEFAULTS:
                raise InputError(
                    f"{where}: there is no setting {name!r}{_similar(name, _DEFAULTS)}; "
                    f"choose one of {', '.join(_DEFAULTS)}"
                )
        try:
            return cls(**table)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


_DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(RunSpec) if each.default is not MISSING}


@dataclass(frozen=True)
class RunEntry:
    """A run as a part of an experiment: its label, its place, and what the paper reports of it."""

    label: str
    run: RunSpec
    group: str = ""
    reported: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or a setting of a user's own.

    Attributes:
        name: what it is called on the command line.
        title: one line.
        about: what to know about it.
        show: how it is drawn.
        entries: its runs, by scale.
    """

    name: str
    title: str
    about: str
    show: str
    entries: dict[str, tuple[RunEntry, ...]]


SHOWS = ("table", "curves", "gaps", "sweep", "regret")


def read(path: Path, before: tuple[Path, ...] = ()) -> Experiment:
    """Read an experiment from a TOML file (`before`: the files that refer to it by `like`).

    Raises:
        InputError: it cannot be read, or holds what is not known.
    """
    try:
        content = parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); name a TOML file") from None
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number may have too many digits
        raise InputError(f"{path} is not TOML: {error}; mend it there") from None
    if "like" in content:
        return _like(path, content, (*before, path))
    known = ("title", "about", "show", "common", "scale", "run")
    for key in content:
        if key not in known:
            raise InputError(
                f"{path.name}: there is no table {key!r}{_similar(key, known)}; choose one of {', '.join(known)}"
            )
    show = content.get("show", "curves")
    _one_of(f"{path.name}: show", show, SHOWS)
    scales = _table(content, "scale", path.name) or {"paper": {}}
    for scale in scales:
        _one_of(f"{path.name}: scale", scale, SCALES)
        _table(scales, scale, f"{path.name}: scale")
    runs = content.get("run", [])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        found = "has no run" if runs == [] else "has a run that is not in a list of tables"
        raise InputError(f"{path.name} {found}; write one or more [[run]] tables, in double brackets")
    common = _table(content, "common", path.name)
    entries = {
        scale: tuple(_entry(path.name, number, run, common, scales, scale) for number, run in enumerate(runs, start=1))
        for scale in scales
    }
    for own in entries.values():
        _check_show(show, own, path.name)
    about = " ".join(_text(content, "about", "", path.name).split())
    return Experiment(path.stem, _text(content, "title", path.stem, path.name), about, show, entries)


def _like(path: Path, content: dict[str, Any], before: tuple[Path, ...]) -> Experiment:
    """An experiment that shows the runs of another file beside it in another way, or some of them."""
    known = ("title", "about", "show", "like", "only")
    for key in content:
        if key not in known:
            raise InputError(f"{path.name}: there is no {key!r} beside `like`{_similar(key, known)}")
    beside = path.parent / f"{_text(content, 'like', '', path.name)}.toml"
    if beside in before:
        raise InputError(f"{path.name}: like is {content['like']!r}, which is like this one; name a file with runs")
    other = read(beside, before)
    show = content.get("show", other.show)
    _one_of(f"{path.name}: show", show, SHOWS)
    only = _text(content, "only", "", path.name)
    entries = {
        scale: tuple(entry for entry in own if only in f"{entry.group} {entry.label}")
        for scale, own in other.entries.items()
    }
    if not all(entries.values()):
        raise InputError(f"{path.name}: no run of {other.name} has {only!r} in its group and label")
    for own in entries.values():
        _check_show(show, own, path.name)
    about = " ".join(_text(content, "about", other.about, path.name).split())
    return Experiment(path.stem, _text(content, "title", other.title, path.name), about, show, entries)


def _check_show(show: str, entries: tuple[RunEntry, ...], where: str) -> None:
    """Refuse what cannot be shown before it is trained."""
    for entry in entries:
        run = entry.run
        if show == "regret" and not run.has_regret:
            raise InputError(
                f"{where}: {entry.label!r} has no regret to show; that needs cgd, classes, hidden = [], one column, "
                'measure = "training", and as many evaluations as steps'
            )
        if show == "gaps" and run.data == "diabetes":
            raise InputError(f"{where}: {entry.label!r} has no accuracy to fall behind in; show a table or curves")


def _entry(
    file: str, number: int, run: dict[str, Any], common: dict[str, Any], scales: dict[str, Any], scale: str
) -> RunEntry:
    """A [[run]] with what it has in common with the others and what the scale changes.

    The run has the last word, but what a table `quick` or `paper` inside it says counts at that scale only.
    """
    where = f"{file}, run {number}"
    for other in SCALES:
        if other in run and other not in scales:
            raise InputError(f"{where}: there is no scale {other!r} to change; write [scale.{other}], it may be empty")
    own = {key: value for key, value in run.items() if key not in ("label", "group", "reported", *SCALES)}
    settings = {**common, **scales[scale], **own, **_table(run, scale, where)}
    spec = RunSpec.from_table(settings, where if len(scales) == 1 else f"{where}, scale {scale}")
    reported = _table(run, "reported", where)
    for key, value in reported.items():
        if not _is_number(value):
            raise InputError(f"{where}: reported {key} is {value!r}; it is a number")
    return RunEntry(
        _text(run, "label", f"run {number}", where),
        spec,
        _text(run, "group", "", where),
        {key: _float(value) for key, value in reported.items()},
    )


def _table(content: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise InputError(f"{where}: {name} is {found!r}; it is a table of settings")
    return found


def _text(content: dict[str, Any], name: str, default: str, where: str) -> str:
    found = content.get(name, default)
    if not isinstance(found, str):
        raise InputError(f"{where}: {name} is {found!r}; it is a text, write it in quotes")
    return found


def _typed(name: str, value: Any) -> Any:
    default = _DEFAULTS[name]
    if name == "delta" and isinstance(value, (list, tuple)):
        if not all(_is_number(each) for each in value):
            raise InputError(f"delta is {list(value)}; it is a number, or a list of two")
        return tuple(_float(each) for each in value)
    if isinstance(default, tuple):
        if isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
            return tuple(value)
        raise InputError(f"{name} is {value!r}; it is a list of whole numbers")
    if isinstance(default, float) and _is_number(value):
        return _float(value)
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[type(default)]
        raise InputError(f"{name} is {value!r}; it is {kind}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _float(value: float) -> float:
    try:
        return float(value) + 0.0  # -0.0 becomes 0.0, which equals it
    except OverflowError:  # a whole number beyond all floats
        return math.inf if value > 0 else -math.inf


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _one_of(what: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{what} is {value!r}{_similar(str(value), choices)}; choose one of {', '.join(choices)}")


def _similar(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
