"""Results of attacks, and `audit.json`, the file that stores the results of an audit.

An `AttackResult` is what an attack returns, what the file stores and what the table and the page are computed from. A
picture in it is an address: a `data:` URI in memory, the path of a PNG file below the audit's folder in the file. JSON
has no infinities, so the file has texts in their place.
"""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import cgd
from cgd.json_files import damaged_file, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from pathlib import Path

    from cgd.audit.runner import Part, PartResult, Plan

    Number = float
else:
    Number = float | Literal["infinite", "minus infinite", "not a number"]

FORMAT: Literal["cgd-audit 1"] = "cgd-audit 1"
FILE = "audit.json"
PICTURES = "pictures"
REMEDY = "run cgd audit again"

_NON_FINITE = {"infinite": math.inf, "minus infinite": -math.inf, "not a number": math.nan}
_ID = re.compile(r"[a-z][a-z0-9_]*")
_PICTURE = re.compile(rf"{PICTURES}/[a-z][a-z0-9_-]*\.png")
_DATA_URI = "data:image/png;base64,"
_ADDRESS = re.compile(rf"{_PICTURE.pattern}|{_DATA_URI}[A-Za-z0-9+/=]*")
_PNG_HEADER = b"\x89PNG\r\n"


@dataclass(frozen=True)
class RecoveredRecord:
    """A record that an attack recovered, as its owner knows it.

    Attributes:
        place: where it is in the owner's table, such as "line 17".
        real: its values, one for each column.
        guess: the values that the attack found.
    """

    place: str
    real: list[str]
    guess: list[str]


@dataclass(frozen=True)
class RecoveredRecords:
    """The records of a table that an attack recovered.

    Attributes:
        total: their number.
        columns: the names of the columns.
        records: the first of them, the most similar ones first.
    """

    total: int
    columns: list[str]
    records: list[RecoveredRecord]

    def __post_init__(self) -> None:
        if self.total < len(self.records):
            raise ValueError(f"{len(self.records)} records are listed as recovered, and the total is {self.total}")
        for each in self.records:
            if not len(each.real) == len(each.guess) == len(self.columns):
                raise ValueError(f"{each.place} has another number of values than of the {len(self.columns)} columns")


@dataclass(frozen=True)
class AttackResult:
    """The result of an attack against a scheme in one setting.

    Attributes:
        attack: the name of the attack, or of a variant of it.
        scheme: the scheme that was attacked.
        metric: the name of the measured quantity.
        value: the measured value.
        chance: the value of guessing without a view.
        succeeds: true if the value is clearly better than chance, by the rule of the attack.
        setting: the setting in a few words, such as "2 × 4 records".
        detail: further figures, in a sentence.
        control: true if this is a control: a setting with a known outcome. The audit sets it, not the attack.
        undecided: true if the value is better than chance, but there are too few records to be sure.
        must_succeed: the known outcome of a control. An attack must fail where there is nothing to find, and must
            succeed where a protection was removed.
        deviation: the standard deviation of the value by chance; None if it is not known.
        allowed: the largest value that ε allows, with differential privacy; None if it allows any.
        pictures: addresses of pictures of records, by caption.
        recovered: the records of a table that were recovered; None if there are none.
    """

    attack: str
    scheme: str
    metric: str
    value: Number
    chance: Number
    succeeds: bool
    setting: str = ""
    detail: str = ""
    control: bool = False
    undecided: bool = False
    must_succeed: bool = False
    deviation: float | None = None
    allowed: float | None = None
    pictures: dict[str, str] = field(default_factory=dict, repr=False)
    recovered: RecoveredRecords | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("value", "chance"):
            given = getattr(self, name)
            object.__setattr__(self, name, _NON_FINITE[given] if isinstance(given, str) else float(given))
        for address in self.pictures.values():
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"a picture of {self.attack} is {address!r}; it would be outside {PICTURES}")


@dataclass(frozen=True)
class Inapplicable:
    """The reason why an attack cannot be run on a view.

    Attributes:
        scheme: the scheme of the view.
        why: the reason, in a sentence.
    """

    scheme: str
    why: str


@dataclass(frozen=True)
class Source:
    """The data that is attacked.

    Attributes:
        kind: where the data comes from.
        name: a short name.
        about: the data, the participants and the coalition, in a sentence.
    """

    kind: Literal["embedded", "spec", "table", "recording"]
    name: str
    about: str


@dataclass(frozen=True)
class AttackFindings:
    """One attack in an audit: its texts from the registry, and its results.

    Attributes:
        id: the id of the attack, an identifier: its module has the same name.
        title: its name.
        question: the question that it answers.
        about: how it works.
        rule: when it counts as a success.
        remedy: what helps against it.
        findings: its results, controls included.
        inapplicable: the reasons where it could not be run.
    """

    id: str
    title: str
    question: str
    about: str
    rule: str
    remedy: str
    findings: list[AttackResult]
    inapplicable: list[Inapplicable]

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"the id of an attack is {self.id!r}; it must be an identifier of a-z, 0-9 and _")


@dataclass(frozen=True)
class UnfinishedPart:
    """A part of an audit that was not run to its end.

    Attributes:
        label: its name.
        attack: the id of its attack.
        scheme: the scheme that was to be attacked.
        control: true if the part runs controls.
    """

    label: str
    attack: str
    scheme: str
    control: bool


@dataclass(frozen=True)
class FailedPart(UnfinishedPart):
    """A part of an audit that ended with an error.

    Attributes:
        why: the error.
    """

    why: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The content of `audit.json`.

    Attributes:
        format: the version of the file format.
        version: the version of cgd that wrote it.
        finished: the time of the end, in ISO 8601.
        seconds: the duration.
        complete: true if all parts were run.
        command: the command that repeats the audit.
        source: the data that was attacked.
        seed: the seed.
        schemes: descriptions of the schemes that were attacked, by name.
        attacks: the attacks and their results.
        failed: parts that ended with an error.
        unfinished: parts that were interrupted.
    """

    format: Literal["cgd-audit 1"]
    version: str | None = None
    finished: str | None = None
    seconds: float
    complete: bool
    command: str | None = None
    source: Source
    seed: int
    schemes: dict[str, str]
    attacks: list[AttackFindings]
    failed: list[FailedPart]
    unfinished: list[UnfinishedPart]

    def __post_init__(self) -> None:
        ids = [each.id for each in self.attacks]
        for repeated in (each for each in ids if ids.count(each) > 1):
            raise ValueError(f"there are two attacks with the id {repeated!r}")
        schemes = [each.scheme for attack in self.attacks for each in attack.findings]
        schemes += [each.scheme for attack in self.attacks for each in attack.inapplicable]
        schemes += [each.scheme for each in (*self.failed, *self.unfinished)]
        for unknown in (each for each in schemes if each not in self.schemes):
            raise ValueError(f"a result is about {unknown!r}, which is not among the schemes")

    def map_pictures(self, change: Callable[[str, str], str]) -> Audit:
        """Return the audit with other addresses of pictures.

        Args:
            change: returns the new address, given a name for the picture's file and the old address.
        """
        attacks = []
        for attack in self.attacks:
            findings = []
            for number, result in enumerate(attack.findings, 1):
                pictures = {
                    caption: change(f"{attack.id}-{number}-{_slug(caption)}.png", address)
                    for caption, address in result.pictures.items()
                }
                findings.append(replace(result, pictures=pictures))
            attacks.append(replace(attack, findings=findings))
        return replace(self, attacks=attacks)


def assemble(plan: Plan, finished: Mapping[int, PartResult], *, seed: int, seconds: float, end: datetime) -> Audit:
    """Return the audit of a plan, in the plan's order.

    Args:
        plan: the plan.
        finished: the results of the finished parts, by their place in the plan.
        seed: the seed of the run.
        seconds: the duration of the run.
        end: the time of its end.
    """
    results = [(part, finished[place]) for place, part in enumerate(plan.parts) if place in finished]
    attacked = {part.scheme for part in plan.parts}
    attacks = []
    for attack in plan.attacks:
        found = [each for part, result in results if part.attack == attack.id for each in result.results]
        attacks.append(
            AttackFindings(
                attack.id,
                attack.title,
                attack.question,
                attack.about,
                attack.rule,
                attack.remedy,
                [each for each in found if isinstance(each, AttackResult)],
                [each for each in found if isinstance(each, Inapplicable)],
            )
        )
    return Audit(
        format=FORMAT,
        version=cgd.__version__,
        finished=end.isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        complete=len(finished) == len(plan.parts),
        command=plan.command(seed),
        source=plan.source,
        seed=seed,
        schemes={scheme: text for scheme, text in plan.schemes.items() if scheme in attacked},
        attacks=attacks,
        failed=[FailedPart(*_identify(part), result.failure) for part, result in results if result.failure],
        unfinished=[UnfinishedPart(*_identify(part)) for place, part in enumerate(plan.parts) if place not in finished],
    )


def to_files(audit: Audit) -> dict[str, bytes]:
    """Return the files of an audit by their path below its folder: the pictures, and `audit.json` as the last one."""
    files = {}

    def move(name: str, address: str) -> str:
        path = f"{PICTURES}/{name}"
        files[path] = base64.b64decode(address.removeprefix(_DATA_URI))
        return path

    content = asdict(audit.map_pictures(move))
    for result in (each for attack in content["attacks"] for each in attack["findings"]):
        result |= {name: _to_json(result[name]) for name in ("value", "chance")}
        if result["recovered"] is None:
            del result["recovered"]
        if result["deviation"] is None or not math.isfinite(result["deviation"]):
            del result["deviation"]
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return files | {FILE: text.encode(errors="replace")}


def load(folder: Path) -> Audit:
    """Read `audit.json`; the addresses of pictures are paths.

    Raises:
        InputError: the folder holds no audit, or its file is damaged or of another format.
    """
    return read_json(folder / FILE, Audit, version=FORMAT, written_by="cgd audit", remedy=REMEDY)


def load_with_pictures(folder: Path) -> Audit:
    """Read `audit.json` and the pictures that it names.

    Raises:
        InputError: the folder holds no audit, or a file is missing or damaged.
    """

    def read(_: str, path: str) -> str:
        try:
            content = (folder / path).read_bytes()
        except OSError as error:
            raise damaged_file(folder / path, f"it cannot be read ({error.strerror})", REMEDY) from None
        if not content.startswith(_PNG_HEADER):
            raise damaged_file(folder / path, "it is not a PNG file", REMEDY)
        return to_data_uri(content)

    return load(folder).map_pictures(read)


def to_data_uri(png: bytes) -> str:
    """Return the address of a picture that contains the picture."""
    return f"{_DATA_URI}{base64.b64encode(png).decode()}"


def is_audit(folder: Path) -> bool:
    """Return whether a folder holds an audit, of any version of the format."""
    try:
        content = json.loads((folder / FILE).read_bytes().decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and str(content.get("format", "")).startswith("cgd-audit ")


def _identify(part: Part) -> tuple[str, str, str, bool]:
    return part.label, part.attack, part.scheme, part.control


def _slug(caption: str) -> str:
    return re.sub("[^a-z0-9]+", "-", caption.lower()).strip("-") or "picture"


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "not a number" if math.isnan(value) else "infinite" if value > 0 else "minus infinite"
