"""Join the suggestions that `cgd schema` made from the tables of several participants, with comments where they differ.

People decide what a column means, so a difference that changes the meaning is not resolved: the column is left out, and
a comment names the two lines. Where one of them is the more cautious, that one is taken. The marks of `cgd schema
--private` are kept: a range that is the union of two tables is not known without looking at records either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.federation.data_schema import MISSING, Column, Data, Model, parse_schema
from cgd.federation.privacy_section import REVIEW_MARK, PrivacySection
from cgd.federation.toml_lines import key_lines
from cgd.federation.toml_text import toml_key, toml_list, toml_text, toml_value
from cgd.files import parse_toml, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LEFT_OUT = re.compile(r"# *(.+?)(?:: left out, | = .*# *left out[,:] )(.*)")
CLASSES = re.compile(r"# *(classes = \[.*?\])  #")
MAX_WIDTH_RATIO = 5
# Settings that are joined, each by its own rule; in all others, the suggestions must agree.
JOINED = ("name", "target", "columns", "task", "id", "categories", "classes", "missing", "range")
# Reasons to leave a column out that do not concern other tables.
OF_ONE_TABLE = ("all its values are missing", "it has only one value", "fewer than two values")


@dataclass(frozen=True)
class Suggestion:
    """The suggestion of one participant.

    Attributes:
        name: the name of its file.
        text: its text.
        data: the columns and the target.
        model: the model.
        privacy: differential privacy, if it has the section.
        left_out: why a column was left out, by its name.
        marked: the keys of columns and of [data] whose lines have the mark.
    """

    name: str
    text: str
    data: Data
    model: Model
    privacy: PrivacySection | None
    left_out: dict[str, str]
    marked: frozenset[str]

    @classmethod
    def load(cls, path: Path) -> Suggestion:
        """Read a file that `cgd schema` wrote.

        Raises:
            InputError: it is not valid.
        """
        text = read_text(path)
        data, model, privacy = parse_schema(text, path)
        left_out = {}
        for line in text.split("\n"):
            found = LEFT_OUT.fullmatch(line)
            if found:
                left_out[_unquoted(found[1])] = found[2]
        lines = text.split("\n")
        keys = {key: lines[number - 1] for (_, key), number in key_lines(text).items()}
        marked = frozenset(key for key, line in keys.items() if line.rstrip().endswith(REVIEW_MARK))
        return cls(path.name, text, data, model, privacy, left_out, marked)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, also those in a comment."""
        found = CLASSES.search(self.text)
        if self.data.classes or found is None:
            return self.data.classes
        try:
            return tuple(map(str, parse_toml(found[1])["classes"]))
        except (ValueError, RecursionError):  # somebody has edited the comment
            return ()


def merge_schemas(paths: Sequence[Path]) -> str:
    """Return the text of one schema for all participants, made of a suggestion of each.

    Raises:
        InputError: a file is not a schema, or they have different targets or tasks, or only some have [privacy].
    """
    if len(paths) < 2:
        raise InputError(f"{len(paths)} file is named; name the suggestions of two participants or more")
    found = [Suggestion.load(Path(path)) for path in paths]
    for what in ("target", "task", "id"):
        _same(what, {each.name: getattr(each.data, what) for each in found})
    _same("[privacy]", {each.name: "present" if each.privacy else "absent" for each in found})
    names = dict.fromkeys(name for each in found for name in each.data.names)
    lines = [_column_line(name, found) for name in names]
    if all(line.startswith("#") for line in lines):
        raise InputError("the suggestions have no column that all can use:\n" + "\n".join(lines))
    lines += [_left_out_line(name, found) for name in _never_columns(names, found)]
    return "\n".join(
        [
            f"# Joined from {', '.join(each.name for each in found)}. Review it together: the same text goes to all",
            "# participants.",
            *_data_lines(found),
            "",
            "[data.columns]",
            *lines,
            "",
            *_model_lines(found),
            *_privacy_lines(found),
            "",
        ]
    )


def _same(what: str, values: dict[str, Any]) -> None:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{value!r} in {name}" for name, value in values.items())
        raise InputError(f"the suggestions differ in {what}: {listed}; agree on one, and suggest again")


def _data_lines(found: Sequence[Suggestion]) -> list[str]:
    data = found[0].data
    lines = ["[data]", f"target = {toml_text(data.target)}", f"task = {toml_text(data.task)}"]
    if data.id:
        lines.append(f"id = {toml_text(data.id)}")
    for each in fields(Data):
        values = {one.name: str(getattr(one.data, each.name)) for one in found}
        if each.name not in JOINED and any(value not in (str(each.default), "{}") for value in values.values()):
            _same(each.name, values)
            lines.append(f"{each.name} = {toml_value(getattr(data, each.name))}")
    classes = _union(each.classes for each in found)
    if classes:
        listed = all(each.data.classes for each in found)
        rare = [name for name in classes if sum(name in each.classes for each in found) == 1]
        comments = [f"only in one table: {', '.join(map(repr, rare))}"] if rare else []
        comments += [] if listed else ["left out: learned by a secure sum"]
        lines.append(_commented(f"{'' if listed else '# '}classes = {toml_list(classes)}", comments, found, "classes"))
    ends = _outer(each.data.range for each in found)
    if ends is not None:
        lines.append(_commented(f"range = [{ends[0]:.12g}, {ends[1]:.12g}]", [], found, "range"))
    missing = _union(each.data.missing for each in found)
    if set(missing) != set(MISSING):
        lines.append(_commented(f"missing = {toml_list(missing)}", [], found, "missing"))
    return lines


def _column_line(name: str, found: Sequence[Suggestion]) -> str:
    key = toml_key(name)
    lines = {each.name: column for each in found for column in each.data.columns if column.name == name}
    refused = {each.name: each.left_out[name] for each in found if _refuses(each, name)}
    if refused:
        where, why = next(iter(refused.items()))
        return f"# {key}: left out, as in {where}: {why}"
    for what in (each.name for each in fields(Column) if each.name not in JOINED):
        values = {where: getattr(column, what) for where, column in lines.items()}
        if len(set(map(str, values.values()))) > 1:
            both = ", ".join(f"{value!r} in {where}" for where, value in values.items())
            return f"# {key}: left out, its {what} differs: {both}. Decide what it means, and write one line"
    columns = list(lines.values())
    listed = [column for column in columns if column.categories]
    merged = replace(
        columns[0],
        categories=_union(column.categories for column in columns) if len(listed) == len(columns) else (),
        range=_outer(column.range for column in columns),
        missing=_union(column.missing for column in columns),
    )
    comments = [
        f"not in {each.name}: that participant needs an empty column of this name"
        for each in found
        if each.name not in lines
    ]
    widths = {where: column.range[1] - column.range[0] for where, column in lines.items() if column.range is not None}
    if widths and max(widths.values()) > MAX_WIDTH_RATIO * min(widths.values()):
        narrow, wide = (choose(widths, key=lambda where: widths[where]) for choose in (min, max))
        comments.append(f"much wider in {wide} than in {narrow}: is it the same unit?")
    if listed and len(listed) < len(columns):
        comments.append("listed by some only: its categories are learned")
    return _commented(f"{key} = {_column_value(merged)}", comments, found, name)


def _refuses(each: Suggestion, name: str) -> bool:
    return name in each.left_out and not each.left_out[name].startswith(OF_ONE_TABLE)


def _never_columns(names: Iterable[str], found: Sequence[Suggestion]) -> list[str]:
    return [name for name in dict.fromkeys(name for each in found for name in each.left_out) if name not in set(names)]


def _left_out_line(name: str, found: Sequence[Suggestion]) -> str:
    where, why = next((each.name, each.left_out[name]) for each in found if name in each.left_out)
    return f"# {toml_key(name)}: left out, as in {where}: {why}"


def _column_value(column: Column) -> str:
    settings = {
        each.name: getattr(column, each.name)
        for each in fields(Column)
        if each.name == "type" or getattr(column, each.name) not in (None, (), {}, column.name)
    }
    if column.values:
        del settings["categories"]  # those that the mapping gives
    if settings.keys() == {"type"}:
        return toml_text(column.type)
    if settings.keys() == {"type", "categories"}:
        return toml_list(column.categories)
    return toml_value(settings)


def _model_lines(found: Sequence[Suggestion]) -> list[str]:
    """Return the section of the model with the fewest parameters, as it is in its file."""

    def size(each: Suggestion) -> tuple[bool, int]:
        return each.model.kind == "custom", sum(each.model.layers)

    chosen = min(found, key=size)
    with_header = ("model", "") in key_lines(chosen.text)
    settings = ((each.name, getattr(chosen.model, each.name), each.default) for each in fields(Model))
    written = [f"{name} = {toml_value(value)}" for name, value, default in settings if value != default]
    lines = _section(chosen.text, "model") if with_header else ["[model]", *written]
    if len({(each.model.kind, each.model.layers, each.model.function) for each in found}) > 1:
        lines.insert(1, f"# From {chosen.name}, the smallest of different models: it discloses the least.")
    return lines


def _privacy_lines(found: Sequence[Suggestion]) -> list[str]:
    sections = [each.privacy for each in found if each.privacy is not None]
    if not sections:
        return []
    _same("unit", {each.name: each.privacy.unit for each in found if each.privacy is not None})
    strictest = {
        "epsilon": min(each.epsilon for each in sections),
        "delta": min(each.delta for each in sections),
        "clip": min(each.clip for each in sections),
        "colluders": max(each.colluders for each in sections),
        "reruns": min(each.reruns for each in sections),
        "unit": sections[0].unit,
    }
    defaults = {each.name: each.default for each in fields(PrivacySection)}
    written = {key: value for key, value in strictest.items() if value != defaults[key] or key in ("clip", "colluders")}
    return ["", "[privacy]", *(f"{key} = {toml_value(value)}" for key, value in written.items())]


def _section(text: str, name: str) -> list[str]:
    """Return the lines of a section, from its header to the next one."""
    lines = text.split("\n")
    start = key_lines(text)[name, ""] - 1
    end = next((place for place, line in enumerate(lines) if place > start and line.startswith("[")), len(lines))
    return "\n".join(lines[start:end]).rstrip().split("\n")


def _commented(line: str, comments: Sequence[str], found: Sequence[Suggestion], key: str) -> str:
    """Return a line with comments, and with the mark if it has it in one of the suggestions."""
    marks = [REVIEW_MARK] if any(key in each.marked for each in found) else []
    texts = "; ".join([*comments, *marks])
    return f"{line}  # {texts}" if texts else line


def _union(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for each in lists for text in each))


def _outer(ranges: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Return the range around all ranges; none if one of them is not limited."""
    known = list(ranges)
    ends = [each for each in known if each is not None]
    if not ends or len(ends) < len(known):
        return None
    return min(low for low, _ in ends), max(high for _, high in ends)


def _unquoted(key: str) -> str:
    try:
        return str(next(iter(parse_toml(f"{key} = 0")))) if key.startswith('"') else key
    except (ValueError, RecursionError):
        return key
