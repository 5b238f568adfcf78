"""TOML is parsed with memory that does not grow with the square of what is written."""

from __future__ import annotations

import tomllib
import tracemalloc

import pytest

from cgd.files import MAX_KEY_PARTS, parse_toml

DEEP = "a." * 5000 + "a"


@pytest.mark.parametrize(
    "text",
    [
        f"{DEEP} = 1",
        DEEP,
        f"[{DEEP}]",
        f"[[ {DEEP} ]]",
        f"x = {{b = 1, {DEEP} = 2}}",
        'x = 1\n"=".' + '"=".' * 5000 + "a = 1",
        "x = 1\n" + "'\u2028'." * 5000 + "a = 1",
        " . ".join(["a"] * 5000) + " = 1",
    ],
)
def test_a_key_of_very_many_parts_is_refused_without_much_memory(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"line [12] has a key of more than {MAX_KEY_PARTS} parts"):
            parse_toml(text)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        f"x = [{', '.join(['1.5'] * 500)}]",
        f'x = "{"." * 500}"',
        "x = [\n" + ", ".join(["1.5"] * 500) + ",\n]",
        "x = [\n[" + ", ".join(["1.5"] * 500) + "],\n]",
        f"x = 1  # {'.' * 500}",
        f"{'a.' * 50}a = 1",
    ],
)
def test_what_has_many_dots_elsewhere_is_parsed(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)
