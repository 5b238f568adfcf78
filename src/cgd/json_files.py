"""Read JSON files into typed objects: `msgspec` structs or dataclasses.

Unknown keys are ignored. A wrong type, a missing key, an integer of more than 63 bits, half a surrogate pair or nesting
beyond the interpreter's recursion limit raise `InputError`, which names the place in the document, the value and what
to do. A struct's own checks belong into its `__post_init__`, which raises ValueError.
"""

from __future__ import annotations

import json
import re
import reprlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cgd.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
MAX_INTEGER = 2**63 - 1
# msgspec prepares a type at its first use, and the process crashes if two threads do that at once.
_CONVERTING = threading.RLock()

_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(.*)`")


def read_json(path: Path, kind: type[T], *, version: str, written_by: str, remedy: str) -> T:
    """Read a file with a key `format`.

    Args:
        path: the file, in the directory that the user named.
        kind: the type to decode into.
        version: the expected value of `format`.
        written_by: the command that writes such directories.
        remedy: advice about a damaged file, besides restoring it.

    Raises:
        InputError: the file is missing, damaged or of another format.
    """
    folder = path.parent
    try:
        content = parse_json(path.read_bytes())
        written = content.get("format") if isinstance(content, dict) else None
        if not isinstance(written, str) or written == version:
            return convert(content, kind)
    except FileNotFoundError:
        fact = f"has no {path.name}" if folder.is_dir() else "does not exist"
        raise InputError(f"{folder} {fact}; name the directory that {written_by} wrote") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name the directory that {written_by} wrote"
        ) from None
    except InputError as error:
        raise damaged_file(path, str(error), remedy) from None
    raise InputError(
        f"{path} has the format {reprlib.repr(written)}, not {version!r}; use the version of cgd that wrote it"
    )


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """Decode a JSON document.

    Raises:
        InputError: it is not JSON, or not of this type; the message names the place and the value, not the file.
    """
    return convert(parse_json(data), kind)


def parse_json(data: bytes | str) -> Any:
    """Parse a JSON document into dictionaries, lists, strings and numbers.

    Raises:
        InputError: it is not JSON, or not UTF-8, has an integer of more than 63 bits, or is nested too deeply.
    """
    try:
        content = json.loads(data.decode() if isinstance(data, bytes) else data, parse_int=_parse_integer)
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair could not be written anywhere
    except ValueError as error:
        raise InputError(f"it cannot be read as JSON ({error})") from None
    except RecursionError:
        raise InputError("it cannot be read as JSON (it is nested too deeply)") from None
    return content


def convert(content: Any, kind: type[T], place: str = "") -> T:
    """Convert a parsed document, or the object at a place in it, to a type.

    Raises:
        InputError: it does not fit; the message names the place and the value.
    """
    try:
        with _CONVERTING:
            return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise InputError(_describe(str(error), content, place)) from None


def convert_complete(content: dict[str, Any], kind: type[T], place: str) -> T:
    """Convert an object that must have all keys of a struct or dataclass, also those with a default.

    Raises:
        InputError: it does not fit; the message names the place and the value.
    """
    with _CONVERTING:
        known = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    for field in known:
        if field.name not in content:
            raise InputError(f"{place}.{field.name} is missing")
    return convert(content, kind, place)


def damaged_file(path: Path, fact: str, remedy: str) -> InputError:
    """Return the error about a file with impossible content."""
    return InputError(f"{path} is damaged: {fact}; restore it from a copy, or {remedy}")


def _parse_integer(digits: str) -> int:
    if len(digits) > len(str(MAX_INTEGER)) + 1 or abs(value := int(digits)) > MAX_INTEGER:
        raise ValueError(f"the number {reprlib.repr(digits)} is too large")
    return value


def _describe(message: str, content: Any, prefix: str) -> str:
    """Return msgspec's message with the place first, and the value at that place."""
    found = _PLACE.fullmatch(message)
    fact, path = (found[1], found[2]) if found else (message, "")
    place = f"{prefix}.{path}".strip(".")
    if missing := _MISSING.fullmatch(fact):
        return f"{place}.{missing[1]} is missing".lstrip(".")
    fact = fact[:1].lower() + fact[1:]
    value = content
    try:
        for name, index in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (KeyError, IndexError, TypeError):  # a place that msgspec writes in another way
        value = {}
    if isinstance(value, (dict, list)):
        return f"{place}: {fact}" if place else fact
    return f"{place or 'the document'} is {reprlib.repr(value)}: {fact}"
