"""The file of an audit, `audit.json`: what `cgd audit` found, for the page and for programs.

`SHAPE` says what is in it, as `cgd.json_shapes` reads it. Besides, names of attacks are used once and can be part
of an address, every scheme that is named is explained, and pictures are where pictures are kept. JSON has no
infinities, so those are texts in the file and numbers again when it is read.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, cast

import cgd
from cgd.json_shapes import MisfitError, damaged, fit, read_json

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from cgd.audit.plan import Part, Plan
    from cgd.audit.registry import Attack
    from cgd.audit.runner import Done, Measured, Outcome
    from cgd.json_shapes import Shape

FORMAT = "cgd-audit 1"
FILE = "audit.json"
PICTURES = "pictures"
REMEDY = "run cgd audit again"

_UNBOUNDED = {"infinite": math.inf, "minus infinite": -math.inf, "not a number": math.nan}
NUMBER: Shape = (*_UNBOUNDED, float)
FINDING: Shape = {
    "attack": str,
    "scheme": str,
    "metric": str,
    "value": NUMBER,
    "chance": NUMBER,
    "succeeds": bool,
    "setting": str,
    "detail": str,
    "control": bool,
    "undecided": bool,
    "must_succeed": bool,
    "pictures": {"*": str},
}
PART: Shape = {"label": str, "attack": str, "scheme": str, "control": bool}
SHAPE: Shape = {
    "format": FORMAT,
    "version?": str,
    "finished?": str,
    "seconds": float,
    "complete": bool,
    "command?": str,
    "source": {"kind": ("embedded", "spec", "recording"), "name": str, "about": str},
    "seed": int,
    "schemes": {"*": str},
    "attacks": [
        {
            "id": str,
            "title": str,
            "question": str,
            "about": str,
            "rule": str,
            "remedy": str,
            "findings": [FINDING],
            "inapplicable": [{"scheme": str, "why": str}],
        }
    ],
    "failed": [PART | {"why": str}],
    "unfinished": [PART],
}
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_PICTURE = re.compile(rf"{PICTURES}/[a-z0-9][a-z0-9-]*\.png")


def content(plan: Plan, outcome: Outcome, seed: int, finished: datetime) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the file says, and its pictures by path. The order is the plan's, whichever part was done first."""
    from cgd.audit.view import SCHEMES

    pictures: dict[str, bytes] = {}
    done = [(part, outcome.done[place]) for place, part in enumerate(plan.parts) if place in outcome.done]
    tried = {part.scheme for part in plan.parts}
    said = {
        "format": FORMAT,
        "version": cgd.__version__,
        "finished": finished.isoformat(timespec="seconds"),
        "seconds": round(outcome.seconds, 1),
        "complete": len(outcome.done) == len(plan.parts),
        "command": plan.command(seed),
        "source": {"kind": plan.source.kind, "name": plan.source.name, "about": plan.source.about},
        "seed": seed,
        "schemes": {scheme: told for scheme, told in SCHEMES.items() if scheme in tried},
        "attacks": [_attack(each, done, pictures) for each in plan.attacks],
        "failed": [_part(part) | {"why": each.failure} for part, each in done if each.failure],
        "unfinished": [_part(part) for place, part in enumerate(plan.parts) if place not in outcome.done],
    }
    return said, pictures


def to_bytes(said: dict[str, Any]) -> bytes:
    """The file."""
    return (json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


def load(folder: Path) -> dict[str, Any]:
    """What the file of an audit says.

    Raises:
        InputError: the folder holds no audit, or its file is damaged or of another format.
    """
    path = folder / FILE
    found = read_json(path, FORMAT, written_by="cgd audit", remedy=REMEDY)
    try:
        read = cast("dict[str, Any]", fit(found, SHAPE))
        _fit_names([each["id"] for each in read["attacks"]])
        for attack in read["attacks"]:
            _fit_findings(attack)
        _fit_schemes(read)
    except MisfitError as error:
        raise damaged(path, str(error), REMEDY) from None
    return read


def load_pictures(folder: Path, audit: dict[str, Any]) -> dict[str, bytes]:
    """The pictures that an audit names, by path.

    Raises:
        InputError: one of them is missing, or is none.
    """
    found = {}
    for path in picture_paths(audit):
        try:
            found[path] = (folder / path).read_bytes()
        except OSError as error:
            raise damaged(folder / path, f"it cannot be read ({error.strerror})", REMEDY) from None
        if not found[path].startswith(b"\x89PNG\r\n"):
            raise damaged(folder / path, "it is no PNG file", REMEDY)
    return found


def picture_paths(audit: dict[str, Any]) -> list[str]:
    """Where an audit's pictures are, below its folder."""
    findings = [finding for attack in audit["attacks"] for finding in attack["findings"]]
    return [path for finding in findings for path in finding["pictures"].values()]


def is_audit(folder: Path) -> bool:
    """Whether there is an audit in a folder, of whatever version."""
    try:
        found = json.loads((folder / FILE).read_bytes().decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and str(found.get("format", "")).startswith("cgd-audit ")


def _attack(attack: Attack, done: list[tuple[Part, Done]], pictures: dict[str, bytes]) -> dict[str, Any]:
    from cgd.audit.view import Inapplicable

    findings: list[dict[str, Any]] = []
    inapplicable: list[dict[str, str]] = []
    for found in (each for _, part in done for each in part.findings.get(attack.id, ())):
        if isinstance(found, Inapplicable):
            inapplicable.append({"scheme": found.scheme, "why": found.why})
        else:
            findings.append(_finding(found, f"{attack.id}-{len(findings) + 1}", pictures))
    return {
        "id": attack.id,
        "title": attack.title,
        "question": attack.question,
        "about": attack.about,
        "rule": attack.rule,
        "remedy": attack.remedy,
        "findings": findings,
        "inapplicable": inapplicable,
    }


def _part(part: Part) -> dict[str, Any]:
    return {"label": part.label, "attack": part.attack, "scheme": part.scheme, "control": part.control}


def _finding(measured: Measured, name: str, pictures: dict[str, bytes]) -> dict[str, Any]:
    paths = {}
    for caption, picture in measured.pictures.items():
        path = f"{PICTURES}/{name}-{re.sub('[^a-z0-9]+', '-', caption.lower()).strip('-') or 'picture'}.png"
        paths[caption], pictures[path] = path, picture
    return {
        "attack": measured.attack,
        "scheme": measured.scheme,
        "metric": measured.metric,
        "value": _written(measured.value),
        "chance": _written(measured.chance),
        "succeeds": measured.succeeds,
        "setting": measured.setting,
        "detail": measured.detail,
        "control": measured.control,
        "undecided": measured.undecided,
        "must_succeed": measured.must_succeed,
        "pictures": paths,
    }


def _written(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "not a number" if math.isnan(value) else "infinite" if value > 0 else "minus infinite"


def _fit_names(names: list[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise MisfitError(f"the id of an attack is {name!r}; it has other characters than a-z, 0-9 and -")
        if names.count(name) > 1:
            raise MisfitError(f"there are two attacks with the id {name!r}")


def _fit_schemes(read: dict[str, Any]) -> None:
    """See that every scheme that is named is explained."""
    named = [each for attack in read["attacks"] for each in (*attack["findings"], *attack["inapplicable"])]
    for each in (*named, *read["failed"], *read["unfinished"]):
        if each["scheme"] not in read["schemes"]:
            raise MisfitError(f"something was tried against {each['scheme']!r}, which is not among the schemes")


def _fit_findings(attack: dict[str, Any]) -> None:
    """Turn texts for infinities into numbers, and see that pictures are where they belong."""
    for finding in attack["findings"]:
        for name in ("value", "chance"):
            finding[name] = _UNBOUNDED.get(finding[name], finding[name])
        for path in finding["pictures"].values():
            if not _PICTURE.fullmatch(path):
                raise MisfitError(f"a picture of {attack['id']} is {path!r}; it would be outside {PICTURES}")
