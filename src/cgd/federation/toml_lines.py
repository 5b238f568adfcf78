"""Line numbers in a TOML text, for errors about its meaning: the parser of the standard library does not keep them.

An error names the key that it is about, in quotes or as a word. So the line is found by searching the section that the
error names for the first of its keys in the message. `statements` gives the comments, which the parser drops as well.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.files import parse_toml

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

COLUMNS = "data.columns"

_KEY = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)"""
_LINE = re.compile(rf"\s*({_KEY})\s*(?:\.\s*({_KEY})\s*)?=")
_HEADER = re.compile(rf"\s*\[(\[?)\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]")
_TOKEN = re.compile(
    r""""{3}(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[][{}\n]""", re.DOTALL
)
_SECTION = re.compile(r"\[(\w+)\] |participant (\d+)\b")


@contextmanager
def at_line(path: str | os.PathLike[str], text: str) -> Iterator[None]:
    """Prefix the message of an `InputError` raised in this block with the path of a file, and the line if it is found.

    Args:
        path: the path.
        text: the content of the file.
    """
    try:
        yield
    except InputError as error:
        line = find_line(text, str(error))
        raise InputError(f"{path}{'' if line is None else f', line {line}'}: {error}") from None


def find_line(text: str, message: str) -> int | None:
    r"""Return the number of the line of a TOML text that a message is about, from 1; None if it is not found.

    Any section may name a column of the tables, in quotes.

    Examples:
        >>> find_line("name = 'a'\n[training]\nsteps = 0\n", "[training] steps is 0; train for at least 1")
        3
        >>> find_line("name = 'a'\n[training]\nlr = 1\n", "[training] there is no such key")
        2
    """
    named = _SECTION.match(message)
    section, rest = ("", message) if named is None else (named[1] or f"participants {named[2]}", message[named.end() :])
    lines, found = key_lines(text), []
    for (where, key), line in lines.items():
        first = not section and rest.startswith(f"{key} ")
        if not key or not (first or where in (section, COLUMNS) or where.startswith(f"{section}.")):
            continue
        # The name of a column may be any word, and outside of sections so may a word of the message.
        quoted = where == COLUMNS or (not section and not first)
        place = re.search(rf"'{re.escape(key)}'" if quoted else rf"(?<!\w){re.escape(key)}(?!\w)", rest)
        if place:
            found.append((place.start(), -len(key), line))
    return min(found)[2] if found else lines.get((section, ""))


def key_lines(text: str) -> dict[tuple[str, str], int]:
    """Return the line of every key of a TOML text, by its section and its name.

    The section of the second participant is "participants 2". The header of a section has the empty name.
    """
    lines: dict[tuple[str, str], int] = {}
    section, counts = "", dict[str, int]()
    for number, line in enumerate(text.split("\n"), start=1):  # as editors and the parser count them
        header, key = _HEADER.match(line), _LINE.match(line)
        if header:
            section = ".".join(map(_plain, re.findall(_KEY, header[2])))
            parent, _, name = section.rpartition(".")
            lines.setdefault((parent, name), number)
            if header[1]:
                counts[section] = counts.get(section, 0) + 1
                section = f"{section} {counts[section]}"
            lines.setdefault((section, ""), number)
        elif key:
            lines.setdefault((section, _plain(key[1])), number)
            if key[2]:
                lines.setdefault((f"{section}.{_plain(key[1])}".lstrip("."), _plain(key[2])), number)
    return lines


def statements(text: str) -> Iterator[tuple[int, str, str]]:
    r"""Yield every header and every key with its value: its first line, its text, and its comments, wherever they are.

    A line that begins with `#` belongs to a statement only within a value of several lines.

    Examples:
        >>> list(statements("# a\n[data]\nclasses = [\n  'a#',  # one\n]  # all\n"))
        [(2, '[data]', ''), (3, "classes = [\n  'a#',  # one\n]  # all", 'one; all')]
    """
    start, number, depth, comments = 0, 1, 0, list[str]()
    text += "\n"
    for token in _TOKEN.finditer(text):
        if token[0] in ("[", "{"):
            depth += 1
        elif token[0] in ("]", "}"):
            depth -= 1
        elif token[0].startswith("#"):
            comments.append(token[0].lstrip("#").strip())
        elif token[0] == "\n" and depth <= 0:
            statement, end = text[start : token.start()], token.end()
            if statement.strip() and not statement.startswith("#"):
                yield number, statement.strip(), "; ".join(comments)
            number += text.count("\n", start, end)
            start, depth, comments = end, 0, []


def _plain(key: str) -> str:
    """Return the name that a key has, which may be in quotes."""
    if key[0] not in "\"'":
        return key
    try:
        return str(next(iter(parse_toml(f"{key} = 0"))))
    except (ValueError, RecursionError):
        return key[1:-1]
