"""The targets of the fuzzer, without the fuzzer: all stored inputs, and some random ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fuzz import files, frames, membership
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = Path(__file__).parent / "corpus"
TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": frames.one_input,
    "membership": membership.one_input,
    "files": files.one_input,
}


@pytest.mark.parametrize(
    ("target", "name"), [(target, path.name) for target in TARGETS for path in sorted((CORPUS / target).iterdir())]
)
def test_stored_inputs_crash_nothing(target: str, name: str) -> None:
    TARGETS[target]((CORPUS / target / name).read_bytes())


@pytest.mark.parametrize("target", ["frames", "files"])
def test_examples_are_read_to_their_end(target: str) -> None:
    """An example that a reader rejects at its first byte tests nothing."""
    readers = {"frames": frames.READERS, "files": files.READERS}[target]
    found = {(CORPUS / target / path.name).read_bytes()[0] for path in (CORPUS / target).iterdir()}
    assert found == set(range(len(readers)))
    if target == "files":
        for path in (CORPUS / target).iterdir():
            if not path.name.startswith("crash-"):
                files.READERS[path.read_bytes()[0]](path.read_bytes()[1:])  # raises no exception, not even a CGDError


@pytest.mark.parametrize("target", TARGETS)
def test_random_inputs_crash_nothing(target: str) -> None:
    examples = {"frames": 300, "membership": 40, "files": 100}[target]
    readers = {"frames": len(frames.READERS), "membership": 256, "files": len(files.READERS)}[target]

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.integers(0, readers - 1), st.binary(max_size=600))
    def run(reader: int, rest: bytes) -> None:
        TARGETS[target](bytes([reader]) + rest)

    run()


@pytest.mark.parametrize("content", [b"", b"\xff" * 500, bytes(500), b"[" * 5000, b"{" * 5000, b'"\\ud800"', b"NaN"])
def test_odd_inputs_crash_no_reader(content: bytes) -> None:
    for target in (frames, files):
        for reader in range(len(target.READERS)):
            target.one_input(bytes([reader]) + content)
