"""What `cgd audit` was given, and the plan that follows from it: embedded data, a spec, or a recorded run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.audit.plan import Plan, Source
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RECORDING = "recording.json"
"""What makes a folder that of a recorded run."""


def plan_for(what: Sequence[Path], coalition: Sequence[str] = ()) -> Plan:
    """The plan for what was named on the command line.

    Args:
        what: nothing, a spec (.toml), or the folders of a recorded run.
        coalition: of a recorded run, who colludes; the first of the folders' participants if not given.

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
            raise InputError(f"{folder} {fault}; name a spec (.toml), or folders of a run that was recorded")
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
        InputError: the recordings cannot be read, are not of one run, or nobody of the coalition is in it.
    """
    told = " ".join((*map(str, folders), *coalition))
    raise InputError(f"{told} cannot be audited: this version knows embedded data only")
