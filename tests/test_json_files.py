from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest

from cgd.errors import InputError
from cgd.json_files import MAX_INTEGER, convert_complete, decode_json, read_json

if TYPE_CHECKING:
    from pathlib import Path


class Row(msgspec.Struct):
    step: int
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError("step is negative")


class Document(msgspec.Struct):
    format: str
    rows: list[Row]
    kind: Literal["a", "b"] = "a"
    counts: dict[str, int] | None = None
    named: dict[str, Row] | None = None


@dataclass(frozen=True)
class Section:
    width: int = 3
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rows": []}', "format is missing"),
        ('{"format": "x", "rows": [{}]}', "rows[0].step is missing"),
        ('{"format": "x", "rows": [{"step": "ten"}]}', "rows[0].step is 'ten': expected `int`, got `str`"),
        ('{"format": "x", "rows": [{"step": true}]}', "rows[0].step is True: expected `int`, got `bool`"),
        ('{"format": "x", "rows": [{"step": 1.0}]}', "rows[0].step is 1.0: expected `int`, got `float`"),
        ('{"format": "x", "rows": [{"step": -1}]}', "rows[0]: step is negative"),
        ('{"format": "x", "rows": {}}', "rows: expected `array`, got `object`"),
        ('{"format": "x", "rows": [], "kind": "c"}', "kind is 'c': invalid enum value 'c'"),
        ('{"format": "x", "rows": [], "counts": {"a": null}}', "counts[...]: expected `int`, got `null`"),
        (
            '{"format": "x", "rows": [], "named": {"a": {"step": "ten"}}}',
            "named[...].step: expected `int`, got `str`",
        ),
        ("[]", "expected `object`, got `array`"),
        ("3", "the document is 3: expected `object`, got `int`"),
        ("{", "it cannot be read as JSON (Expecting property name"),
        ("[" * 100_000, "it cannot be read as JSON (it is nested too deeply)"),
        (
            f'{{"format": {MAX_INTEGER + 1}}}',
            "it cannot be read as JSON (the number '9223372036854775808' is too large)",
        ),
        ("9" * 5_000, "it cannot be read as JSON (the number '9999"),
        ('"\\ud800"', "it cannot be read as JSON ('utf-8' codec can't encode"),
    ],
)
def test_invalid_document_is_refused_with_place_and_value(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        decode_json(text, Document)
    assert str(error.value).startswith(message)


def test_unknown_keys_are_ignored_and_limits_are_accepted() -> None:
    text = f'{{"format": "x", "more": [1], "rows": [{{"step": {MAX_INTEGER}, "loss": 1}}]}}'
    assert decode_json(text.encode(), Document) == Document("x", [Row(MAX_INTEGER, 1.0)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"width": 3}, "model.names is missing"),
        ({"width": "3", "names": []}, "model.width is '3': expected `int`, got `str`"),
        ({"width": 3, "names": [4]}, "model.names[0] is 4: expected `str`, got `int`"),
    ],
)
def test_complete_object_needs_keys_with_defaults(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        convert_complete(content, Section, "model")
    assert str(error.value) == message
    assert convert_complete({"width": 4, "names": ["x"], "more": 1}, Section, "model") == Section(4, ("x",))


def test_file_errors_name_file_and_remedy(tmp_path: Path) -> None:
    def error_of(path: Path) -> str:
        with pytest.raises(InputError) as error:
            read_json(path, Document, version="cgd 1", written_by="cgd join", remedy="train again")
        return str(error.value)

    path = tmp_path / "run.json"
    assert error_of(path) == f"{tmp_path} has no run.json; name the directory that cgd join wrote"
    assert error_of(tmp_path / "none" / "run.json").startswith(f"{tmp_path / 'none'} does not exist; ")
    assert error_of(tmp_path).startswith(f"{tmp_path} cannot be read (Is a directory); ")
    path.write_text('{"format": "cgd 2", "rows": 3}')
    assert error_of(path) == f"{path} has the format 'cgd 2', not 'cgd 1'; use the version of cgd that wrote it"
    path.write_text('{"format": "cgd 1"}')
    assert error_of(path) == f"{path} is damaged: rows is missing; restore it from a copy, or train again"
    path.write_text('{"format": "cgd 1", "rows": []}')
    assert read_json(path, Document, version="cgd 1", written_by="", remedy="") == Document("cgd 1", [])


THREADS = """
import sys, threading
import msgspec
from cgd.json_files import convert

sys.setswitchinterval(1e-6)
names = [f"field{number}" for number in range(20)]
for _ in range(100):
    inner = msgspec.defstruct("Inner", [(name, list[int] | None, None) for name in names])
    outer = msgspec.defstruct("Outer", [(name, dict[str, inner], {}) for name in names])
    start = threading.Barrier(4)
    def read():
        start.wait()
        convert({names[0]: {"a": {names[1]: [1]}}}, outer)
    threads = [threading.Thread(target=read) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


def test_first_use_of_a_type_in_several_threads_does_not_crash_the_process() -> None:
    assert subprocess.run([sys.executable, "-c", THREADS], check=False).returncode == 0
