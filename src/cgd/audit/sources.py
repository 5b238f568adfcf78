"""What `cgd audit` was given, and the plan that follows from it: embedded data, a spec, or a recorded run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cgd.audit.examination import EXAMINED, described, examine
from cgd.audit.plan import AuditSource, Plan
from cgd.audit.registry import CATALOGUE, get, parts
from cgd.audit.view import SCHEMES
from cgd.errors import InputError
from cgd.tabular.trace_writer import FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cgd.audit.registry import Attack
    from cgd.audit.schemes import Sample
    from cgd.audit.view import Finding, Inapplicable, Scheme, Truth, View
    from cgd.experiments.spec import RunSpec

ROUNDS, HONEST = 30, 2
"""How many rounds of a spec are looked at, and how many of its participants do not collude."""


def plan_for(
    what: Sequence[Path],
    coalition: Sequence[str] = (),
    *,
    label: str | None = None,
    rounds: int | None = None,
    honest: int | None = None,
    data_dir: Path | None = None,
    function: str | None = None,
) -> Plan:
    """The plan for what was named on the command line.

    Args:
        what: nothing, a spec (.toml), or the folders of a recorded run.
        coalition: of a recorded run, who colludes; with one folder and none, everybody else.
        label: which run of a spec; the first that trains by cgd if not given.
        rounds: of a spec, how many of its steps are looked at; `ROUNDS` if not given.
        honest: of a spec, how many participants do not collude; `HONEST` if not given.
        data_dir: of a spec, where to look first for data sets.
        function: of a recorded run with a network of your own, the `module:function` that makes it.

    Raises:
        InputError: it is none of these, or cannot be read.
    """
    specs = [path for path in what if path.suffix == ".toml"]
    if coalition and (specs or not what):
        raise InputError(f"--coalition is {', '.join(coalition)}; it is for recorded runs: name their folders")
    if function is not None and (specs or not what):
        raise InputError(f"--function is {function!r}; it is for recorded runs: name their folders")
    if not specs and (label, rounds, honest, data_dir) != (None, None, None, None):
        raise InputError("--run, --rounds, --honest and --data-dir are for a spec; name one (SPEC.toml)")
    if not what:
        return embedded()
    if specs:
        if len(what) > 1:
            told = ", ".join(str(path) for path in what)
            raise InputError(f"{told} cannot be audited at once; name one spec, or the folders of one run")
        return from_spec(specs[0], label, rounds or ROUNDS, HONEST if honest is None else honest, data_dir)
    for folder in what:
        if not (folder / FILE).is_file():
            fault = f"has no {FILE}" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {fault}; name a spec (.toml), or folders that `cgd join --record` wrote")
    return from_recording(what, coalition, function)


def embedded() -> Plan:
    """The whole catalogue, on data that come with scikit-learn."""
    about = (
        "The data come with scikit-learn: handwritten digits, tumours, diabetes patients. A few participants have some "
        "records each, and one or two of them are curious. Each attack is tried where it is strong."
    )
    return Plan(AuditSource("embedded", "embedded data", about), CATALOGUE, tuple(parts()))


def from_spec(
    path: Path, label: str | None = None, rounds: int = ROUNDS, honest: int = HONEST, data_dir: Path | None = None
) -> Plan:
    """The attacks that can be tried on a setting of one's own, a run of a spec as `cgd simulate` takes it.

    Raises:
        InputError: the spec cannot be read, has no such run, or one that cannot be attacked.
    """
    from cgd.audit.spec_view import check
    from cgd.experiments.spec import read

    entries = next(iter(read(path).entries.values()))
    chosen = [each for each in entries if (each.label == label if label else each.run.method == "cgd")]
    if not chosen:
        there = ", ".join(repr(each.label) for each in entries)
        asked, remedy = "no run by the method cgd", "write one"
        if label:
            asked, remedy = f"no run {label!r}", "choose one with --run"
        raise InputError(f"{path} has {asked}; it has {there}, {remedy}")
    spec = chosen[0].run
    if spec.method != "cgd":
        raise InputError(f"{path}: {label!r} trains by {spec.method}; choose a run by the method cgd")
    check(spec, rounds, honest, data_dir)
    about = (
        f"{chosen[0].label}: {spec.data}, split over {spec.rows} participants, of whom {honest} "
        f"{'is' if honest == 1 else 'are'} honest and the others pool what they saw of the first "
        f"{min(rounds, spec.steps)} rounds, under each scheme."
    )
    arguments = [str(path)]
    for option, value, usual in (("--run", label, None), ("--rounds", rounds, ROUNDS), ("--honest", honest, HONEST)):
        arguments += [option, str(value)] if value != usual else []
    work = [SpecPart(spec, rounds, honest, data_dir, scheme, attack) for scheme in SCHEMES for attack in EXAMINED]
    return Plan(AuditSource("spec", path.name, about, tuple(arguments)), _examined(), tuple(work))


@dataclass(frozen=True)
class SpecPart:
    """One attack on a run of a spec under one scheme.

    Attributes:
        spec: the run.
        rounds: how many of its steps are looked at.
        honest: how many participants do not collude.
        data_dir: where to look first for data sets.
        scheme: how they train.
        attack: its id.
    """

    spec: RunSpec
    rounds: int
    honest: int
    data_dir: Path | None
    scheme: Scheme
    attack: str
    control: bool = False

    @property
    def label(self) -> str:
        """What it is called while it runs."""
        return f"{get(self.attack).title}, {self.scheme}"

    def run(self, seed: int) -> Mapping[str, Sequence[Finding | Inapplicable]]:
        """Train as far as it is looked at, and try it; another seed is another split and other origins."""
        spec = replace(self.spec, seed=self.spec.seed + seed)
        return examine(*_observed(spec, self.scheme, self.rounds, self.honest, self.data_dir), [self.attack])


def from_recording(folders: Sequence[Path], coalition: Sequence[str], function: str | None = None) -> Plan:
    """The attacks that can be tried on a run that was recorded.

    Raises:
        InputError: the recordings cannot be read, are not of one run, or the coalition is not in it.
    """
    from cgd.audit.trace_view import load, view_of

    recordings = [load(folder, function=function) for folder in folders]
    view, _, _ = view_of(recordings, coalition)  # here, so that what is wrong is told at once
    first = recordings[0]
    if coalition:
        who = f"{', '.join(coalition)} pool what they saw of {', '.join(view.honest)}"
    else:
        who = f"the worst case for {first.participant}: everybody else pools what they saw"
    named = {"--coalition": ",".join(coalition), "--function": function}
    arguments = (*map(str, folders), *(each for option, value in named.items() if value for each in (option, value)))
    about = f"A real run that was recorded; {who}. {described(view)}."
    taken = max(len(each.taken) for each in recordings)
    if len(view.rounds) < taken:
        about += f" Only {len(view.rounds)} of {taken} steps can be used: parts of the others are missing."
    if len(view.honest) == 1:
        about += f" With nobody else honest, the gradient of {view.honest[0]} is open in every step."
    source = AuditSource("recording", f"a run of {first.federation}", about, arguments)
    work = [RecordingPart(tuple(map(str, folders)), tuple(coalition), attack, function) for attack in EXAMINED]
    return Plan(source, _examined(), tuple(work))


@dataclass(frozen=True)
class RecordingPart:
    """One attack on a recorded run.

    Attributes:
        folders: of the recordings.
        coalition: who colludes.
        attack: its id.
        function: of a network of the user's own, the `module:function` that makes it.
    """

    folders: tuple[str, ...]
    coalition: tuple[str, ...]
    attack: str
    function: str | None = None
    scheme: Scheme = "cgd"
    control: bool = False

    @property
    def label(self) -> str:
        """What it is called while it runs."""
        return get(self.attack).title

    def run(self, seed: int) -> Mapping[str, Sequence[Finding | Inapplicable]]:  # noqa: ARG002 - nothing is drawn
        """Read the recordings, and try it."""
        return examine(*_recorded(self.folders, self.coalition, self.function), [self.attack])


def _examined() -> tuple[Attack, ...]:
    return tuple(each for each in CATALOGUE if each.id in EXAMINED)


# A process that is given several attacks on a view makes it once.


@lru_cache(maxsize=1)
def _observed(
    spec: RunSpec, scheme: Scheme, rounds: int, honest: int, data_dir: Path | None
) -> tuple[View, Truth, Sample]:
    from cgd.audit.spec_view import observed

    return observed(spec, scheme, rounds=rounds, honest=honest, data_dir=data_dir)


@lru_cache(maxsize=1)
def _recorded(folders: tuple[str, ...], coalition: tuple[str, ...], function: str | None) -> tuple[View, Truth, Sample]:
    from cgd.audit.trace_view import load, view_of

    return view_of([load(folder, function=function) for folder in folders], coalition)
