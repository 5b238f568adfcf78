"""Experiments with several runs, as written in TOML files."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.experiments import privacy_table
from cgd.experiments.setting_values import as_float, check_choice, is_number, suggest, table_of, text_of
from cgd.experiments.spec import SMALL_DATA, RunSpec
from cgd.files import parse_toml

if TYPE_CHECKING:
    from pathlib import Path

SCALES = ("quick", "paper")
SHOW_CHOICES = ("table", "curves", "gaps", "sweep", "regret")
MAX_SEEDS = 1000


@dataclass(frozen=True)
class Explanation:
    """Another run that explains a difference from the paper, at least in part.

    Attributes:
        text: what is different in that run, in a few words.
        experiment: name of its experiment.
        row: its group and label there.
    """

    text: str
    experiment: str
    row: str


@dataclass(frozen=True)
class RunEntry:
    """A row of an experiment's table: a run, or the same run with several seeds.

    Attributes:
        label: name of the entry within its group.
        run: settings of the run with the first seed.
        group: name of a group of entries, such as their grid.
        reported: metrics that the paper reports for this run.
        seeds: number of runs, with the seeds `run.seed`, `run.seed` + 1, …
        why: a run that explains a difference from `reported`; None if no such run is known.
    """

    label: str
    run: RunSpec
    group: str = ""
    reported: dict[str, float] = field(default_factory=dict)
    seeds: int = 1
    why: Explanation | None = None

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
    own = {key: value for key, value in run.items() if key not in ("label", "group", "reported", "why", *SCALES)}
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
        _explanation(table_of(run, "why", where), where),
    )


def _explanation(table: dict[str, Any], where: str) -> Explanation | None:
    """Return the table `why` of a run; None if there is none."""
    if not table:
        return None
    names = tuple(each.name for each in fields(Explanation))
    if set(table) != set(names):
        raise InputError(f"{where}: why has the settings {', '.join(table)}; it must have {', '.join(names)}")
    return Explanation(*(text_of(table, name, "", f"{where}: why") for name in names))
