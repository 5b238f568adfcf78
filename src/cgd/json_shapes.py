"""JSON files of ours: reading them, and seeing that what they say is of the right shape.

A shape is a type, a text that must be just this, a list of alternatives in (), any number of the same in [], names in
{}. `*` is any name. A name that ends in `?` may be missing or null; both become None when it is read. There may be more
in a file than its shape says.
"""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

MAX_INTEGER = 2**63

Shape = Any

_TOLD = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}


class MisfitError(Exception):
    """What a file says is not of its shape."""


def read_json(path: Path, version: str, written_by: str, remedy: str) -> Any:
    """What a file says, if it is JSON and of our format; its shape is still to be looked at.

    Args:
        path: the file, in the directory that the user named.
        version: of the format; what the file must have as `format`.
        written_by: the command that makes such directories.
        remedy: what to do about a damaged file, besides restoring it.

    Raises:
        InputError: it is not there, damaged, or of another format.
    """
    folder = path.parent
    try:
        content = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        what = f"has no {path.name}" if folder.is_dir() else "does not exist"
        raise InputError(f"{folder} {what}; name the directory that {written_by} wrote") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name the directory that {written_by} wrote"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number with too many digits
        raise damaged(path, f"it is not JSON ({error})", remedy) from None
    written = content.get("format") if isinstance(content, dict) else None
    if isinstance(written, str) and written != version:
        raise InputError(
            f"{path} has the format {reprlib.repr(written)}, not {version!r}; use the version of cgd that wrote it"
        )
    return content


def damaged(path: Path, how: str, remedy: str) -> InputError:
    """The error about a file that says something impossible."""
    return InputError(f"{path} is damaged: {how}; restore it from a copy, or {remedy}")


def fit(value: Any, shape: Shape, where: str = "") -> Any:
    """The value, with None for what may be missing and is.

    Raises:
        MisfitError: it is of another shape; the message says where.
    """
    if isinstance(shape, tuple):
        return _fit_one_of(value, shape, where)
    if isinstance(shape, list):
        return [fit(each, shape[0], f"{where}[{i}]") for i, each in enumerate(_typed(value, list, "a list", where))]
    if isinstance(shape, dict):
        return _fit_names(value, shape, where)
    if isinstance(shape, type):
        return _typed(value, shape, _TOLD[shape], where)
    if value != shape:
        raise MisfitError(f"{where} is {reprlib.repr(value)}, not {shape!r}")
    return value


def _fit_one_of(value: Any, shapes: tuple[Shape, ...], where: str) -> Any:
    for shape in shapes[:-1]:
        try:
            return fit(value, shape, where)
        except MisfitError:
            pass
    return fit(value, shapes[-1], where)


def _fit_names(value: Any, shape: dict[str, Shape], where: str) -> dict[str, Any]:
    _typed(value, dict, "an object", where)
    if "*" in shape:
        return {name: fit(each, shape["*"], f"{where}[{name!r}]") for name, each in value.items()}
    read = dict(value)
    for key, inner in shape.items():
        name = key.removesuffix("?")
        place = f"{where}.{name}" if where else name
        if value.get(name) is not None:
            read[name] = fit(value[name], inner, place)
        elif key.endswith("?"):
            read[name] = None
        else:
            raise MisfitError(f"{place} is missing")
    return read


def _typed(value: Any, kind: type, told: str, where: str) -> Any:
    fits = (int, float) if kind is float else kind
    if not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
        raise MisfitError(f"{where or 'the whole'} is {reprlib.repr(value)}, not {told}")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise MisfitError(f"{where} is {reprlib.repr(value)}, which nothing can be")
    return value
