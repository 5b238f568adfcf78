"""Tables of a TOML file, checked: what is there, of which type, and words for what is wrong with it."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.federation.keys import similar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

MAX_DEPTH = 16
KINDS = {int: "a whole number", float: "a number", str: "a text, in quotes"}


@contextmanager
def at(where: str) -> Iterator[None]:
    """Say where, in an error of what is done here."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}{error}") from None


def check_keys(table: Any, needed: Collection[str], optional: Collection[str]) -> None:
    """Refuse a table that lacks something, or has something that is not known.

    Raises:
        InputError: it does.
    """
    if not isinstance(table, dict):
        raise InputError(f"{table!r} is no table; write its header, and KEY = VALUE in every line")
    known = (*needed, *optional)
    for key in table:
        if key not in known:
            raise InputError(f"there is no {key!r}{similar(key, known)}; choose one of {', '.join(known)}")
    for key in needed:
        if key not in table:
            raise InputError(f"{key} is missing; add it")


def check_values(value: Any, depth: int = MAX_DEPTH) -> None:
    """Refuse numbers beyond TOML's 64 bits, which Python would read and not always print, and endless nesting.

    Raises:
        InputError: there is such a number, or tables are nested deeper than any that is known.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError("a whole number is beyond 64 bits; write a smaller one")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not depth:
        raise InputError(f"tables and lists are nested more than {MAX_DEPTH} deep; write them flat")
    for each in inner:
        check_values(each, depth - 1)


def typed(name: str, value: Any, kind: type) -> Any:
    """The value, if it is of this type.

    Raises:
        InputError: it is not.
    """
    if kind is float and type(value) in (int, float):
        return float(value) + 0.0  # -0.0 becomes 0.0, which equals it
    if type(value) is not kind:
        raise InputError(f"{name} is {value!r}; it is {KINDS[kind]}")
    return value


def digest(content: Any) -> str:
    """Return a digest of what is said, not of how: the order of keys does not matter.

    It is the whole SHA-256, because members agree by it: of a shorter one a dishonest member could find two files that
    have the same.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
