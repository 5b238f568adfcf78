"""What `cgd audit` was given, and the plan that follows from it: embedded data, a spec, or a recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgd.audit.plan import Plan, Source
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cgd.privacy.view import Finding, Inapplicable, Scheme

RECORDING = "recording.json"
"""What makes a folder that of a recorded run."""
EXAMINED = ("gram", "membership", "records", "inversion", "labels", "dropout")
"""The attacks that can be tried on any view; the others need a setting of their own."""


def plan_for(what: Sequence[Path], coalition: Sequence[str] = ()) -> Plan:
    """The plan for what was named on the command line.

    Args:
        what: nothing, a spec (.toml), or the folders of a recorded run.
        coalition: of a recorded run, who colludes; with one folder and none, everybody else.

    Raises:
        InputError: it is none of these, or cannot be read.
    """
    specs = [path for path in what if path.suffix == ".toml"]
    if coalition and (specs or not what):
        raise InputError(f"--coalition is {', '.join(coalition)}; it is for recorded runs: name their folders")
    if not what:
        return embedded()
    if specs:
        if len(what) > 1:
            told = ", ".join(str(path) for path in what)
            raise InputError(f"{told} cannot be audited at once; name one spec, or the folders of one run")
        return from_spec(specs[0])
    for folder in what:
        if not (folder / RECORDING).is_file():
            fault = (
                f"has no {RECORDING}" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
            )
            raise InputError(f"{folder} {fault}; name a spec (.toml), or folders that `cgd join --record` wrote")
    return from_recording(what, coalition)


def embedded() -> Plan:
    """The whole catalogue, on data that come with scikit-learn."""
    from cgd.privacy.catalogue import CATALOGUE, parts

    about = (
        "The data come with scikit-learn: handwritten digits, tumours, diabetes patients. A few participants have some "
        "records each, and one or two of them are curious. Each attack is tried where it is strong."
    )
    return Plan(Source("embedded", "embedded data", about), CATALOGUE, tuple(parts()))


def from_spec(path: Path) -> Plan:
    """The attacks that can be tried on somebody's own data and model.

    Raises:
        InputError: the spec cannot be read, or describes nothing that can be attacked.
    """
    raise InputError(f"{path} cannot be audited: this version knows embedded data only")


def from_recording(folders: Sequence[Path], coalition: Sequence[str]) -> Plan:
    """The attacks that can be tried on a run that was recorded.

    Raises:
        InputError: the recordings cannot be read, are not of one run, or the coalition is not in it.
    """
    from cgd.practice.recording import load, view_of
    from cgd.privacy.catalogue import CATALOGUE
    from cgd.privacy.examination import described

    recordings = [load(folder) for folder in folders]
    view, _, _ = view_of(recordings, coalition)  # here, so that what is wrong is told at once
    first = recordings[0]
    if coalition:
        who = f"{', '.join(coalition)} pool what they saw of {', '.join(view.honest)}"
    else:
        who = f"the worst case for {first.participant}: everybody else pools what they saw"
    arguments = (*map(str, folders), *(("--coalition", ",".join(coalition)) if coalition else ()))
    source = Source(
        "recording",
        f"a run of {first.federation}",
        f"A real run that was recorded; {who}. {described(view)}.",
        arguments,
    )
    attacks = tuple(each for each in CATALOGUE if each.id in EXAMINED)
    return Plan(source, attacks, (Examination(tuple(map(str, folders)), tuple(coalition)),))


@dataclass(frozen=True)
class Examination:
    """All attacks that a recorded run allows, as one part: reading the run takes longer than most of them.

    Attributes:
        folders: of the recordings.
        coalition: who colludes.
    """

    folders: tuple[str, ...]
    coalition: tuple[str, ...]
    attack: str = ""
    scheme: Scheme = "cgd"
    control: bool = False

    @property
    def label(self) -> str:
        """What it is called while it runs."""
        return "the recorded run"

    def run(self, seed: int) -> Mapping[str, Sequence[Finding | Inapplicable]]:  # noqa: ARG002 - nothing is drawn
        """Read the recordings, and try everything."""
        from cgd.practice.recording import load, view_of
        from cgd.privacy.examination import examine

        return examine(*view_of([load(folder) for folder in self.folders], self.coalition))
