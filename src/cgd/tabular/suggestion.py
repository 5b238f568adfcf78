"""Read the suggestion of one participant, as `cgd schema` wrote it, or as somebody has edited it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.federation.data_schema import parse_schema
from cgd.federation.privacy_section import QUESTIONS, REVIEW_MARK, has_mark
from cgd.federation.toml_lines import COLUMNS, statements
from cgd.files import parse_toml, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from cgd.federation.data_schema import Data
    from cgd.federation.model_section import Model
    from cgd.federation.privacy_section import PrivacySection


@dataclass(frozen=True)
class Suggestion:
    """The suggestion of one participant.

    Attributes:
        name: the name of its file, in printable characters.
        text: its text.
        data: the columns and the target.
        model: the model.
        privacy: differential privacy, if it has the section.
        left_out: why a column was left out, by its name.
        comments: the comments of the keys of [model].
        column_comments: the comments of the columns, without marks and without the question about persons.
        marked: the section and the key of everything that has the mark: columns, and keys of [data].
        questioned: the columns and the questions of their comments, such as whether they name persons.
    """

    name: str
    text: str
    data: Data
    model: Model
    privacy: PrivacySection | None
    left_out: dict[str, str]
    comments: dict[str, str]
    column_comments: dict[str, str]
    marked: frozenset[tuple[str, str]]
    questioned: frozenset[tuple[str, str]]

    @classmethod
    def load(cls, path: Path, name: str) -> Suggestion:
        """Read a file that `cgd schema` wrote.

        Raises:
            InputError: it is not valid, or has a mark that is not for a column or a key of [data].
        """
        text = read_text(path).replace("\r\n", "\n")
        data, model, privacy = parse_schema(text, path)
        left_out = dict(filter(None, map(_left_out, text.split("\n"))))
        section, comments, marked = tuple[str, ...](), dict[str, str](), set[tuple[str, str]]()
        column_comments, questioned = dict[str, str](), set[tuple[str, str]]()
        for number, statement, comment in statements(text):
            keys = _keys(parse_toml(statement))
            if statement.startswith("["):
                section, keys = keys, ()
            place: tuple[str, str] | None = None
            match (*section, *keys):
                case ("data", "columns", key, *_):
                    place = COLUMNS, key
                    parts = (column_comments.get(key, ""), _without_marks(comment))
                    column_comments[key] = "; ".join(filter(None, parts))
                case ("data", key, *_) if key != "columns":
                    place = "data", key
                case ("model", key, *_):
                    comments[key] = comment
            if not has_mark(comment):
                continue
            if place is None:
                raise InputError(
                    f"{path}, line {number}: the mark {REVIEW_MARK} is not for one column or one key of [data], and "
                    "would be lost; review the file first, or move the mark to the line that it is for"
                )
            marked.add(place)
            questioned |= {(place[1], question) for question in QUESTIONS if question in comment}
        found = (left_out, comments, column_comments, frozenset(marked), frozenset(questioned))
        return cls(name, text, data, model, privacy, *found)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, also those in a comment."""
        if self.data.classes:
            return self.data.classes
        for line in self.text.split("\n"):
            listed, end, _ = line.lstrip("# ").partition("]  #")
            if line.startswith("#") and end and listed.startswith("classes = ["):
                try:
                    return tuple(map(str, parse_toml(f"{listed}]")["classes"]))
                except (ValueError, RecursionError):  # somebody has edited the comment
                    return ()
        return ()

    def missing_in(self, name: str) -> tuple[str, ...]:
        """Return the texts that stand for a missing value in a column or the target."""
        return union([self.data.missing, *(each.missing for each in self.data.columns if each.name == name)])


def union(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the distinct texts of several lists, in order."""
    return tuple(dict.fromkeys(text for each in lists for text in each))


def _left_out(line: str) -> tuple[str, str] | None:
    """Return the column that a comment leaves out, and why: `# KEY: left out, WHY` or `# KEY = …  # left out, WHY`."""
    start, equals, rest = line.lstrip("# ").partition(" = ")
    key, found, why = start.partition(": left out, ")
    if found:
        why += equals + rest
    else:
        _, found, why = rest.rpartition("# left out")
        found, why = found if why.startswith((", ", ": ")) else "", why[2:]
    return (_unquoted(key), why) if found and line.startswith("#") else None


def _without_marks(comment: str) -> str:
    """Return the parts of a comment that have no mark, and are not the question that comes with one."""
    return "; ".join(part for part in comment.split("; ") if not has_mark(part) and part not in QUESTIONS)


def _keys(content: Any) -> tuple[str, ...]:
    """Return the keys from the outermost table inwards, as long as each is the only one."""
    keys = []
    while isinstance(content, dict) and len(content) == 1:
        ((key, content),) = content.items()
        keys.append(key)
    return tuple(keys)


def _unquoted(key: str) -> str:
    try:
        return str(next(iter(parse_toml(f"{key} = 0")))) if key.startswith('"') else key
    except (ValueError, RecursionError):
        return key
