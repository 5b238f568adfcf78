"""Join the suggestions that `cgd schema` made from the tables of several participants, with comments where they differ.

People decide what a column means, so a difference that changes the meaning is not resolved: the column is left out, and
a comment names the two lines. Where one of them is the more cautious, that one is taken, and a comment names the other:
an activation that is not ReLU, the largest δ of the origins. Of different models, the smallest is taken; in a
regression, the smallest with hidden units, because others disclose covariances. A text that is missing for one
participant, and a category of another, is never missing for all: the column is left out. So is a column that only one
participant has, or fewer than half of them.

The marks of `cgd schema --private` are kept: a range that is the union of two tables is not known without looking at
records either. A file with a mark that belongs to no column and no key of [data] is refused. The files come from other
participants, so nothing in them, nor in their names, can add a line of another kind: the result is parsed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.federation.data_schema import MISSING, Column, Data, parse_schema
from cgd.federation.date_format import day_text
from cgd.federation.intersection_section import Intersection
from cgd.federation.model_section import Model
from cgd.federation.privacy_section import QUESTIONS, REVIEW_MARK, PrivacySection
from cgd.federation.toml_lines import COLUMNS
from cgd.federation.toml_text import toml_key, toml_list, toml_text, toml_value
from cgd.federation.value_map import EVERY_OTHER, ValueMap, canonical
from cgd.tabular.suggestion import Suggestion, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_WIDTH_RATIO = 5
# Settings that are joined, each by its own rule; in all others, the suggestions must agree.
JOINED = ("name", "target", "columns", "task", "id", "categories", "classes", "missing", "range")
# Settings of a model that only one kind of model has.
OF_A_KIND = {"mlp": ("layers", "activation"), "custom": ("function",)}
# Reasons to leave a column out that do not concern other tables: it has no use there, or its numbers must be corrected.
USELESS = ("all its values are missing", "it has only one value", "fewer than two values")
TO_CORRECT = ("its numbers have ", "some of its values are limits")
LEARNED = "learned: agree on one spelling of each value, or write values"


def merge_schemas(paths: Sequence[Path]) -> str:
    """Return the text of one schema for all participants, made of a suggestion of each.

    Raises:
        InputError: a file is not a schema, or they have different targets or tasks, or only some have [privacy]; or a
            class of one is missing in another; or a mark would be lost.
    """
    if len(paths) < 2:
        raise InputError(f"{len(paths)} file is named; name the suggestions of two participants or more")
    names_of_files = Counter(Path(path).name for path in paths)
    found = [
        Suggestion.load(path, _printable(path.name if names_of_files[path.name] == 1 else str(path)))
        for path in map(Path, paths)
    ]
    for what in ("target", "task", "id"):
        _same(what, {each.name: getattr(each.data, what) for each in found})
    _same("[privacy]", {each.name: "present" if each.privacy else "absent" for each in found})
    names = dict.fromkeys(name for each in found for name in each.data.names)
    lines = [_column_line(name, found) for name in names]
    if all(line.startswith("#") for line in lines):
        raise InputError("the suggestions have no column that all can use:\n" + "\n".join(lines))
    lines += [_left_out_line(name, found) for name in _never_columns(names, found)]
    joined = "\n".join(
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
    try:
        parse_schema(joined)
    except InputError as error:
        raise InputError(f"the suggestions cannot be joined, because of their values: {error}") from None
    return joined


def _same(what: str, values: dict[str, Any]) -> None:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{value!r} in {name}" for name, value in values.items())
        raise InputError(f"the suggestions differ in {what}: {listed}; agree on one, and suggest again")


def _data_lines(found: Sequence[Suggestion]) -> list[str]:
    data = found[0].data
    lines = ["[data]"]
    lines += [
        _commented(f"{key} = {toml_text(getattr(data, key))}", [], found, ("data", key))
        for key in ("target", "task", "id")
        if getattr(data, key)
    ]
    for each in fields(Data):
        values = {one.name: str(getattr(one.data, each.name)) for one in found}
        if each.name not in JOINED and any(value not in (str(each.default), "{}") for value in values.values()):
            _same(each.name, values)
            common = getattr(data, each.name)
            value = toml_value(common.as_stored() if isinstance(common, Intersection) else common)
            lines.append(_commented(f"{each.name} = {value}", [], found, ("data", each.name)))
    conflict = _conflict(found, data.target, {each.name: (each.classes, each.data.values) for each in found}, "class")
    if conflict:
        raise InputError(f"the suggestions differ in missing: {conflict}; agree on one, and suggest again")
    classes = union(each.classes for each in found)
    if classes:
        listed = all(each.data.classes for each in found)
        rare = [name for name in classes if sum(name in each.classes for each in found) == 1]
        comments = [f"only in one table: {', '.join(map(repr, rare))}"] if rare else []
        line = f"{'# ' * (not listed)}classes = {toml_list(classes)}"
        means = _classes_meant(classes, rare)
        if not listed and all(text == each for text, each in means.items()):
            comments.append("left out: learned by a secure sum")
        elif not listed:  # not a list that only has to be accepted: yes and ja would be two classes
            pairs = (f"{toml_text(text)} = {toml_text(each)}" for text, each in means.items())
            line = f"# values = {{ {', '.join(pairs)} }}"
            comments.append(
                "spelled differently: check the class that each means, and remove the first #"
                if all(means.values())
                else 'state the class that each means; "" removes the label'
            )
        lines.append(_commented(line, comments, found, ("data", "classes")))
    if (ends := _outer(each.data.range for each in found)) is not None:
        lines.append(_commented(f"range = [{ends[0]:.12g}, {ends[1]:.12g}]", [], found, ("data", "range")))
    missing = union(each.data.missing for each in found)
    comments = _only_in({each.name: each.data.missing for each in found})
    if comments or set(missing) != set(MISSING):
        lines.append(_commented(f"missing = {toml_list(missing)}", comments, found, ("data", "missing")))
    return lines


def _classes_meant(classes: Sequence[str], rare: Sequence[str]) -> dict[str, str]:
    """Return the class that each text means: spellings that differ by case or spaces only are one class.

    It is empty, and people have to state it, for the other texts that only one table has, which are `rare`.
    """
    plain = {text: " ".join(text.lower().split()) for text in classes}
    spellings = Counter(plain.values())
    return {text: plain[text] if spellings[plain[text]] > 1 else "" if text in rare else text for text in classes}


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
    conflict = _conflict(
        found, name, {where: (column.categories, column.values) for where, column in lines.items()}, "category"
    )
    if conflict:
        return f"# {key}: left out, {conflict}. Decide what it means, and write one line"
    held = any(column.held_by is not None for column in lines.values())
    if not held and (few := _held_by_few(name, found)):
        return f"# {key}: left out, {few}"
    columns = list(lines.values())
    listed = [column for column in columns if column.categories]
    merged = replace(
        columns[0],
        categories=union(column.categories for column in columns) if len(listed) == len(columns) else (),
        range=_outer(column.range for column in columns),
        missing=union(column.missing for column in columns),
    )
    comments = _kept_comments({each.name: each.column_comments.get(name, "") for each in found if each.name in lines})
    comments += [] if held else [_advice(each, name) for each in found if each.name not in lines]
    widths = {where: column.range[1] - column.range[0] for where, column in lines.items() if column.range is not None}
    if widths and max(widths.values()) > MAX_WIDTH_RATIO * min(widths.values()):
        narrow, wide = (choose(widths, key=lambda where: widths[where]) for choose in (min, max))
        comments.append(f"much wider in {wide} than in {narrow}: is it the same unit?")
    if listed and len(listed) < len(columns):
        comments.append("listed by some only: its categories are learned")
    comments += _only_in({where: column.missing for where, column in lines.items()})
    if merged.is_learned:
        comments.append(LEARNED)
    comments += [each for each in QUESTIONS if any((name, each) in one.questioned for one in found)]
    return _commented(f"{key} = {_column_value(merged)}", comments, found, (COLUMNS, name))


def _held_by_few(name: str, found: Sequence[Suggestion]) -> str:
    """Return why a column is left out that one participant has, or fewer than half of them; or an empty text.

    With values of one participant, an opened sum of the column is its own one. The comment has the name of the column,
    which everybody sees already, and not its categories or range.
    """
    having = [each.name for each in found if name in each.data.names]
    known = [each.name for each in found if name in each.data.names or name in each.left_out]
    use = f"To use it all the same, copy its line from {having[0]}; then the others need an empty column of this name"
    if len(known) == 1:
        return f"only {known[0]} has it, and the opened sums would be those of that participant alone. {use}"
    if 2 * len(known) < len(found):
        return f"only {', '.join(known)} have it, fewer than half of the participants. {use}"
    return ""


def _advice(each: Suggestion, name: str) -> str:
    """Return the comment about a participant whose suggestion lacks a column."""
    why = each.left_out.get(name, "")
    if why.startswith(TO_CORRECT):
        return f"left out in {each.name}: {why}"
    return f"not in {each.name}: that participant needs an empty column of this name"


def _kept_comments(comments: Mapping[str, str]) -> list[str]:
    """Return the comments of the suggestions about a column, each part once, with the files if not all have it."""
    parts = {
        where: [part for part in each.split("; ") if part not in ("", LEARNED)] for where, each in comments.items()
    }
    return [
        ("" if len(having) == len(parts) else f"in {', '.join(having)}: ") + "; ".join(texts)
        for having, texts in _by_files(parts).items()
    ]


def _only_in(missing: Mapping[str, Sequence[str]]) -> list[str]:
    """Return comments about texts that only some suggestions have as missing; `missing` are those of each."""
    return [
        f"missing only in {', '.join(having)}: {', '.join(map(repr, texts))}"
        for having, texts in _by_files(missing).items()
        if len(having) < len(missing)
    ]


def _by_files(lists: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], list[str]]:
    """Return the distinct texts of the lists of several files, by the files that have them."""
    texts = dict[tuple[str, ...], list[str]]()
    for text in union(lists.values()):
        texts.setdefault(tuple(where for where, each in lists.items() if text in each), []).append(text)
    return texts


def _conflict(
    found: Sequence[Suggestion], name: str, listed: Mapping[str, tuple[Sequence[str], dict[str, str]]], what: str
) -> str:
    """Return where a text is missing in one suggestion and a category of another one; empty if there is no such text.

    Args:
        found: the suggestions.
        name: the name of the column, or of the target.
        listed: the categories and the `values` of each suggestion that has the column.
        what: what a category is called.
    """
    missing = {each.name: {canonical(text): text for text in each.missing_in(name)} for each in found}
    for other, (categories, values) in listed.items():
        named = ValueMap({key: each for key, each in values.items() if key.strip() != EVERY_OTHER})
        plain_categories = set() if values else set(map(canonical, categories))
        for where, texts in missing.items():
            for plain, text in texts.items():
                if plain not in missing[other] and (plain in plain_categories or named.get(plain)):
                    return f"{text!r} is missing in {where} and a {what} in {other}"
    return ""


def _refuses(each: Suggestion, name: str) -> bool:
    return name in each.left_out and not each.left_out[name].startswith((*USELESS, *TO_CORRECT))


def _never_columns(names: Iterable[str], found: Sequence[Suggestion]) -> list[str]:
    return [name for name in dict.fromkeys(name for each in found for name in each.left_out) if name not in set(names)]


def _left_out_line(name: str, found: Sequence[Suggestion]) -> str:
    where, why = next((each.name, each.left_out[name]) for each in found if name in each.left_out)
    return f"# {toml_key(name)}: left out, as in {where}: {why}"


def _column_value(column: Column) -> str:
    settings: dict[str, Any] = {
        each.name: getattr(column, each.name)
        for each in fields(Column)
        if each.name == "type" or getattr(column, each.name) not in (None, (), {}, "", column.name)
    }
    if column.type == "date" and column.range is not None:
        settings["range"] = tuple(map(day_text, column.range))
    if column.values:
        del settings["categories"]  # those that the mapping gives
    if settings.keys() == {"type"}:
        return toml_text(column.type)
    if settings.keys() == {"type", "categories"}:
        return toml_list(column.categories)
    return toml_value(settings)


def _model_lines(found: Sequence[Suggestion]) -> list[str]:
    """Return the section of the model with the fewest units, with the most cautious activation and δ of all.

    In a regression, a model without a hidden layer discloses covariances: it is taken only if all suggest it.
    """
    regression = found[0].data.task == "regression"

    def units(each: Suggestion) -> int:
        return sum(each.model.layers) if each.model.kind == "mlp" else 0

    def size(each: Suggestion) -> tuple[bool, bool, int]:
        return each.model.kind == "custom", regression and not units(each), units(each)

    chosen = min(found, key=size)
    activations = [each.model.activation for each in (chosen, *found) if each.model.kind == "mlp"]
    model = replace(
        chosen.model,
        activation=next((each for each in activations if each != "relu"), "relu"),
        delta=max(each.model.delta for each in found),
    )
    lines = ["[model]"]
    if len({(each.model.kind, each.model.layers, each.model.function) for each in found}) > 1:
        hidden = " with hidden units: the others disclose covariances" if regression and units(chosen) else ""
        lines.append(f"# From {chosen.name}, the smallest of different models{hidden}.")
    for key in ("kind", *OF_A_KIND.get(model.kind, ()), "delta"):
        alike = [each for each in found if key in ("kind", "delta") or each.model.kind == model.kind]
        value, values = getattr(model, key), {each.name: getattr(each.model, key) for each in alike}
        differs = len(set(values.values())) > 1
        if key == "delta" and not differs and value == Model.delta:
            continue
        reasons = [each.comments.get(key, "") for each in (chosen, *alike) if getattr(each.model, key) == value]
        comments = list(filter(None, reasons))[:1]
        if differs:
            shown = {where: list(each) if key == "layers" else each for where, each in values.items()}
            comments.append("differs: " + ", ".join(f"{each!r} in {where}" for where, each in shown.items()))
        lines.append(_commented(f"{key} = {toml_value(value)}", comments, found, ("model", key)))
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


def _commented(line: str, comments: Sequence[str], found: Sequence[Suggestion], place: tuple[str, str]) -> str:
    """Return a line with comments, and with the mark if this section and key have it in one of the suggestions."""
    marks = [REVIEW_MARK] if any(place in each.marked for each in found) else []
    texts = "; ".join([*comments, *marks])
    return f"{line}  # {texts}" if texts else line


def _outer(ranges: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Return the range around all ranges; none if one of them is not limited."""
    known = list(ranges)
    ends = [each for each in known if each is not None]
    if not ends or len(ends) < len(known):
        return None
    return min(low for low, _ in ends), max(high for _, high in ends)


def _printable(name: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)
