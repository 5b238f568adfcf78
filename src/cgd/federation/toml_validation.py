"""Validation of TOML tables: known and renamed keys, types and sizes of values, names, digests of sections."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
import unicodedata
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

log = logging.getLogger("cgd.federation")

MAX_DEPTH = 16
MAX_SHOWN_CHARACTERS = 40
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
KINDS = {int: "a whole number", float: "a number", str: "a text, in quotes", bool: "true or false"}


@contextmanager
def at(where: str) -> Iterator[None]:
    """Prefix the message of an `InputError` raised in this block with its location."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}{error}") from None


@dataclass(frozen=True)
class RenamedKey:
    """A key of a TOML table that has a new name; files with the old name are still read.

    Digests and stored files keep the old name and values, so that members with old and new files, or versions, agree.

    Attributes:
        old: the previous name.
        new: the present name.
        values: present names of previous values; a value that is not listed has not changed.
    """

    old: str
    new: str
    values: Mapping[str, str] = field(default_factory=dict)


def update_keys(table: Any, section: str, renamed: Iterable[RenamedKey]) -> Any:
    """Return a table with old keys and values replaced by the present ones; log a warning for each of them.

    Raises:
        InputError: the table has a key under both names.
    """
    if not isinstance(table, dict):
        return table
    updated = with_new_keys(table, renamed)
    for key in renamed:
        if key.old not in table:
            continue
        if key.new in table:
            raise InputError(f"{key.old} is called {key.new} now, and the file has both; remove {key.old}")
        old, new = table[key.old], updated[key.new]
        example = f"; `{key.old} = {_quoted(old)}` is `{key.new} = {_quoted(new)}`" if isinstance(old, str) else ""
        _warn_once(f"[{section}] {key.old} is called {key.new} now{example}")
    return updated


@lru_cache(maxsize=64)  # a process reads its federation file several times
def _warn_once(message: str) -> None:
    log.warning("%s", message, extra={"event": "file"})


def _quoted(value: str) -> str:
    return json.dumps(value if len(value) <= MAX_SHOWN_CHARACTERS else f"{value[:MAX_SHOWN_CHARACTERS]}…")


def with_new_keys(table: Mapping[str, Any], renamed: Iterable[RenamedKey]) -> dict[str, Any]:
    """Return a table with old keys and values replaced by the present ones."""
    values, names = {key.old: key.values for key in renamed}, {key.old: key.new for key in renamed}
    return {
        names.get(name, name): values[name].get(value, value) if name in names and isinstance(value, str) else value
        for name, value in table.items()
    }


def with_old_keys(table: Mapping[str, Any], renamed: Iterable[RenamedKey]) -> dict[str, Any]:
    """Return a table with the keys and values that digests and stored files contain: the inverse of `with_new_keys`."""
    inverse = [RenamedKey(key.new, key.old, {new: old for old, new in key.values.items()}) for key in renamed]
    return with_new_keys(table, inverse)


def check_keys(table: Any, needed: Collection[str], optional: Collection[str]) -> None:
    """Check that a table has all needed keys and no unknown ones.

    Raises:
        InputError: a key is missing or unknown, or this is not a table.
    """
    if not isinstance(table, dict):
        raise InputError(f"{table!r} is not a table; write its header, and KEY = VALUE in every line")
    known = (*needed, *optional)
    for key in table:
        if key not in known:
            raise InputError(f"there is no {key!r}{similar(key, known)}; choose one of {', '.join(known)}")
    for key in needed:
        if key not in table:
            raise InputError(f"{key} is missing; add it")


def check_values(value: Any, depth: int = MAX_DEPTH) -> None:
    """Check that integers fit TOML's 64 bits and that tables are not nested too deeply.

    Python reads larger integers, and then cannot always print them.

    Raises:
        InputError: there is such an integer, or tables and lists are nested more than `MAX_DEPTH` deep.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError("a whole number has more than 64 bits; write a smaller one")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not depth:
        raise InputError(f"tables and lists are nested more than {MAX_DEPTH} deep; write them flat")
    for each in inner:
        check_values(each, depth - 1)


def typed(name: str, value: Any, kind: type) -> Any:
    """Return the value if it has this type; convert an int to a float where a float is expected.

    Raises:
        InputError: it has another type.
    """
    if kind is float and type(value) in (int, float):
        return float(value) + 0.0  # -0.0 becomes 0.0, which equals it
    if type(value) is not kind:
        raise InputError(f"{name} is {value!r}; it must be {KINDS[kind]}")
    return value


def check_name(what: str, name: object) -> str:
    """Return a name that is valid in file names, on the wire and on the command line.

    Raises:
        InputError: it is not valid.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{what} is {name!r}; choose 1 to 63 letters (a to z), digits, dots, underscores and hyphens, "
            "a letter or digit first"
        )
    return name


def similar(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the most similar known name, or an empty text if no name is similar.

    Case, spaces, hyphens, underscores and accents do not make two names different.

    Examples:
        >>> similar("Systolic BP", ["age", "systolic_bp"])
        " (did you mean 'systolic_bp'?)"
    """
    plain = {_plain(each): each for each in reversed(list(known)) if each}
    close = difflib.get_close_matches(_plain(name), list(reversed(plain)), n=1)
    return f" (did you mean {plain[close[0]]!r}?)" if close and plain[close[0]] != name else ""


def _plain(name: str) -> str:
    decomposed = unicodedata.normalize("NFKD", name.casefold())
    return "".join(each for each in decomposed if each.isalnum()) or name


def digest(content: Any) -> str:
    """Return the SHA-256 of the content as canonical JSON; the order of keys does not matter.

    The digest is not shortened, because members agree by it: a dishonest member could find two files with the same
    short digest.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
