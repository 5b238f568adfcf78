"""Keys, texts and lists as TOML writes them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def toml_key(name: str) -> str:
    """Return a key, in quotes if it needs them."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_text(name)


def toml_text(text: str) -> str:
    """Return a text in quotes."""
    # JSON strings are TOML strings, except for one character that TOML requires to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_list(texts: Sequence[str]) -> str:
    """Return a list of texts."""
    return f"[{', '.join(map(toml_text, texts))}]"


def toml_value(value: Any) -> str:
    """Return a text, a number, a list, or a table in one line.

    Examples:
        >>> toml_value({"type": "number", "range": [0.0, 120.0], "body mass": 1})
        '{ type = "number", range = [0, 120], "body mass" = 1 }'
    """
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml_key(key)} = {toml_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value)
