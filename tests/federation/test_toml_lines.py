"""Line numbers in errors about the meaning of a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.data_schema import parse_schema
from cgd.federation.toml_lines import find_line, key_lines, statements
from support.federation_files import text

SCHEMA = """# A schema.
[data]
target = "outcome"
classes = ["well", "ill"]

[data.columns]
age = "number"
"body mass" = { type = "number", range = [0, 100] }
sex = ["f", "m"]
a = "number"

[model]
kind = "mlp"
layers = [8]
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('age = "number"', 'age = "integer"', 7),
        ('"body mass" = { type = "number"', '"body mass" = { type = "category"', 8),
        ('sex = ["f", "m"]', 'sex = ["f", "f"]', 9),
        ("classes = ", "clases = ", 4),
        ('["well", "ill"]', '["well"]', 4),
        ('target = "outcome"', 'target = "sex"', 9),
        ("layers = [8]", "layers = [0]", 14),
        ("layers = [8]", "", 12),
        ('kind = "mlp"', 'kind = "forest"', 13),
        ('target = "outcome"', "", 2),
        ('a = "number"', 'a = "text"', 10),
    ],
)
def test_line_of_an_error_in_a_schema(old: str, new: str, line: int) -> None:
    with pytest.raises(InputError, match=rf"^schema\.toml, line {line}: \["):
        parse_schema(SCHEMA.replace(old, new), "schema.toml")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("epoch = 1", "epoch = 0", "epoch = 0"),
        ("epoch = 1", "epok = 1", "epok = 1"),
        ('name = "bob"', 'name = "b b"', 'name = "b b"'),
        ('name = "cleo"', 'name = "cleo"\nport = 1', "port = 1"),
        ("tcp://bob.example:7001", "bob", 'address = "bob"'),
    ],
)
def test_line_of_an_error_in_a_federation_file(old: str, new: str, place: str) -> None:
    content = text().replace(old, new)
    line = 1 + content.splitlines().index(place)
    with pytest.raises(InputError, match=rf"^f\.toml, line {line}: "):
        Federation.parse(content, Path("f.toml"))


def test_error_about_several_lines_has_no_line() -> None:
    with pytest.raises(InputError, match=r"^f\.toml: two participants have the same name"):
        Federation.parse(text().replace('name = "bob"', 'name = "ada"'), Path("f.toml"))


def test_word_of_a_message_is_not_taken_for_a_column() -> None:
    assert find_line(SCHEMA, "[data] a regression has no classes; remove classes and class_weights") == 4


def test_column_that_another_section_names_is_found() -> None:
    privacy = f"{SCHEMA}\n[privacy]\nepsilon = 1.0\ndelta = 1e-6\n"
    assert find_line(privacy, "[privacy] the categories of 'sex' would be learned from records") == 9
    assert find_line(privacy, "[privacy] epsilon is 0.0; it must be above 0") == 17


@given(st.text("[]\"'.=\\ab\n #", max_size=60), st.text("[]'abdat \\participants 12:", max_size=40))
def test_any_text_and_message_has_a_line_or_none(content: str, message: str) -> None:
    line = find_line(content, message)
    assert line is None or 1 <= line <= 1 + content.count("\n")


def test_lines_of_keys_in_quotes_in_tables_and_with_dots() -> None:
    lines = key_lines(
        "[data.columns.age]\ntype = 1\n[[participants]]\nname = 1\n[[participants]]\n'na me' = 2\nx.y = 3\n"
    )
    assert lines["data.columns", "age"] == 1
    assert lines["data.columns.age", "type"] == 2
    assert lines["participants 1", "name"] == 4
    assert lines["participants 2", "na me"] == 6
    assert lines["participants 2.x", "y"] == 7


@pytest.mark.parametrize(
    "value",
    [
        '"# no"',
        "'# no'",
        r'"\"# no"',
        r"'\'",
        '"""\n# no\n"quoted"""""',
        "'''\n# no ]\n'''",
        '""',
        '[\n"]",\n# yes\n]',
        '{ a = ["# no", {}] }',
    ],
)
def test_statements_have_their_own_comments_and_no_texts(value: str) -> None:
    before, after = "# before\na = 1  # one\n", "b = 2  # two\n"
    comment = "yes; own" if "yes" in value else "own"
    assert list(statements(f"{before}key = {value}  # own\n{after}")) == [
        (2, "a = 1  # one", "one"),
        (3, f"key = {value}  # own", comment),
        (4 + value.count("\n"), "b = 2  # two", "two"),
    ]
