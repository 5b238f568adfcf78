"""Values of settings in TOML and JSON files: conversion, checks, and suggestions for names that do not exist."""

from __future__ import annotations

import difflib
import math
from typing import Any

from cgd.errors import InputError


def converted(name: str, value: Any, default: Any) -> Any:
    """Return the value of a setting in the type of its default.

    Whole numbers become floats in float settings, so that equal runs have equal names.

    Args:
        name: name of the setting.
        value: value from a file.
        default: default of the setting; None for a table, which is checked elsewhere.

    Raises:
        InputError: the value has another type.

    Examples:
        >>> converted("lr", 1, 0.5), converted("hidden", [3, 4], ())
        (1.0, (3, 4))
    """
    if default is None:
        return value
    if name == "delta" and isinstance(value, (list, tuple)):
        if not all(is_number(each) for each in value):
            raise InputError(f"delta is {list(value)}; it must be a number, or a list of two")
        return tuple(as_float(each) for each in value)
    if isinstance(default, tuple):
        if isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
            return tuple(value)
        raise InputError(f"{name} is {value!r}; it must be a list of whole numbers")
    if isinstance(default, float) and is_number(value):
        return as_float(value)
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[type(default)]
        raise InputError(f"{name} is {value!r}; it must be {kind}")
    return value


def is_number(value: Any) -> bool:
    """Return True for a number that is not a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_float(value: float) -> float:
    """Return a number as a float; -0.0 becomes 0.0, which equals it."""
    try:
        return float(value) + 0.0
    except OverflowError:  # a whole number too large for a float
        return math.inf if value > 0 else -math.inf


def check_choice(what: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check that a value is one of some texts.

    Raises:
        InputError: it is not.
    """
    if value not in choices:
        raise InputError(f"{what} is {value!r}{suggest(str(value), choices)}; choose one of {', '.join(choices)}")


def suggest(name: str, known: Any) -> str:
    """Return a question that names the most similar known name; an empty text if none is similar.

    Examples:
        >>> suggest("stepz", ["rows", "steps"])
        " (did you mean 'steps'?)"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def table_of(content: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return a table within a table; an empty one if there is none.

    Raises:
        InputError: it is not a table.
    """
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise InputError(f"{where}: {name} is {value!r}; it must be a table of settings")
    return value


def text_of(content: dict[str, Any], name: str, default: str, where: str) -> str:
    """Return a text within a table; the default if there is none.

    Raises:
        InputError: it is not a text, or has characters that cannot be printed.
    """
    value = content.get(name, default)
    if not isinstance(value, str):
        raise InputError(f"{where}: {name} is {value!r}; it must be a text, write it in quotes")
    if not "".join(value.split()).isprintable():  # it is printed: a control sequence could change the terminal
        raise InputError(f"{where}: {name} is {value!r}, with characters that cannot be printed; remove them")
    return value
