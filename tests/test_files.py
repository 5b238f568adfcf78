"""Parsing TOML with bounded memory, and writing whole files atomically."""

from __future__ import annotations

import os
import stat
import threading
import tomllib
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from cgd.errors import InputError
from cgd.files import (
    MAX_KEY_PARTS,
    PRIVATE,
    SHARED,
    create_text,
    parse_toml,
    replace_text,
    watch,
    write_file,
    write_private,
)

if TYPE_CHECKING:
    from pathlib import Path

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
def test_key_of_many_parts_is_rejected_with_little_memory(text: str) -> None:
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
def test_text_with_many_dots_outside_keys_is_parsed(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


# Writing


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Any:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_file_is_created_and_replaced_with_the_given_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "first ä\r\n")
    assert (path.read_bytes(), mode(path)) == ("first ä\r\n".encode(), SHARED & ~0o022)
    write_file(path, b"second", mode=PRIVATE)
    assert (path.read_bytes(), mode(path)) == (b"second", PRIVATE)
    path.chmod(0o666)
    write_file(path, b"third", mode=None)
    assert (path.read_bytes(), mode(path)) == (b"third", 0o666)
    assert os.listdir(tmp_path) == ["file"]


def test_new_file_is_never_overwritten(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    write_file(path, b"first", mode=PRIVATE, new=True)
    link.symlink_to(tmp_path / "missing")
    for there in (path, link):
        with pytest.raises(FileExistsError) as caught:
            write_file(there, b"second", new=True)
        assert caught.value.filename == str(there)
        with pytest.raises(InputError, match="exists and is never overwritten; choose another name or folder, or move"):
            create_text(there, "second", 0o644)
    assert path.read_bytes() == b"first"
    assert not (tmp_path / "missing").exists()


def test_symbolic_link_is_replaced_unless_its_target_is_meant(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    replace_text(link, "new ä\r\n")
    assert link.is_symlink()
    assert (target.read_bytes(), mode(target)) == ("new ä\r\n".encode(), 0o640)
    write_private(link, b"private")
    assert not link.is_symlink()
    assert (link.read_bytes(), mode(link)) == (b"private", PRIVATE)
    assert target.read_bytes() == "new ä\r\n".encode()
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_private_file_gets_a_private_folder(tmp_path: Path) -> None:
    write_private(tmp_path / "a" / "b" / "file", b"content")
    assert mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "b" / "file") == PRIVATE


WRITERS = {
    "replace": lambda path: write_file(path, b"new"),
    "replace text": lambda path: replace_text(path, "new"),
    "private": lambda path: write_private(path, b"new"),
}


@pytest.mark.parametrize(
    ("writer", "fails"),
    [*((name, fails) for name in WRITERS for fails in ("replace", "fsync")), ("replace text", "fchmod")],
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_replacement_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, fails: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, fails, fail)
    with pytest.raises((OSError, InputError, KeyboardInterrupt)) as caught:
        WRITERS[writer](path)
    if isinstance(caught.value, InputError):
        assert f"{path} cannot be written (No space left on device); check whether its folder is" in str(caught.value)
    elif isinstance(caught.value, OSError):
        assert (caught.value.strerror, caught.value.filename) == ("No space left on device", str(path))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((InputError, KeyboardInterrupt)):
        create_text(tmp_path / "file", "new", PRIVATE)
    assert os.listdir(tmp_path) == []


def test_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "run.pt", b"new")
    assert os.listdir(tmp_path) == ["run.pt"]


def test_watched_file_may_be_missing_for_a_time(tmp_path: Path) -> None:
    path, stop = tmp_path / "federation.toml", threading.Event()
    changes = watch(path, stop, 0.0)
    next(changes)  # at the start, although there is no file
    path.write_text("first")
    next(changes)
    path.unlink()
    next(changes)
    path.write_text("second, longer")
    next(changes)
    stop.set()
    assert list(changes) == []
