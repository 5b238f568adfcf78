"""Files of data sets in the format of MNIST: the format, and where they are searched on this machine."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd import InputError
from cgd.experiments import data_files, idx
from cgd.experiments.runner import load_data
from cgd.experiments.spec import RunSpec
from support.idx_files import ARRAYS, GZIPPED, PLAIN, assert_loads, idx_bytes, md5, write_files

pytestmark = pytest.mark.usefixtures("no_idx_files")


# The file format


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_parse_returns_the_written_array(shape: list[int], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    values = data.draw(st.binary(min_size=count, max_size=count))
    array = np.frombuffer(values, np.uint8).reshape(shape) if values else np.zeros(shape, np.uint8)
    parsed = idx.parse(idx_bytes(array), "here")
    assert parsed.dtype == np.uint8
    assert parsed.shape == array.shape
    assert np.array_equal(parsed, array)


@pytest.mark.parametrize("file", list(PLAIN))
def test_parse_rejects_truncated_and_longer_content(file: str) -> None:
    content = PLAIN[file]
    for length in range(len(content)):
        with pytest.raises(InputError, match="some-file is not an idx file of bytes; delete it and download it again"):
            idx.parse(content[:length], "some-file")
    for suffix in (b"\x00", content):
        with pytest.raises(InputError, match="not an idx file of bytes"):
            idx.parse(content + suffix, "here")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x0d\x01\x00\x00\x00\x00",  # floats
        b"\x01\x00\x08\x01\x00\x00\x00\x00",
        b"\x00\x00\x08\x00",  # no dimension
        b"\x00\x00\x08\x00x",
        b"\x00\x00\x08\x46" + b"\x00\x00\x00\x01" * 0x46 + b"x",  # more dimensions than numpy has
        b"\x00\x00\x08\x04" + b"\xff" * 12 + b"\x00" * 4,  # no values, but a shape too large for numpy
        b"<!DOCTYPE html><html>",
        gzip.compress(PLAIN["train-labels"], mtime=0),  # without a time, which would change the name of the test
    ],
)
def test_parse_rejects_other_formats(content: bytes) -> None:
    with pytest.raises(InputError, match="some/file is not an idx file of bytes; delete it and download it again"):
        idx.parse(content, "some/file")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_source_lists_files_in_the_order_of_the_data_set_fields(name: str) -> None:
    source = idx.SOURCES[name]
    assert source.name == name
    kinds = " ".join(re.sub("-idx.*", "", file) for file in source.md5)
    assert kinds == "train-images train-labels t10k-images t10k-labels"
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in source.md5.values())


# On disk

LOCATIONS = {
    "parent folder given": ("given", "given/tiny"),
    "parent folder given, torchvision's layout": ("given", "given/Tiny/raw"),
    "folder given": ("given/tiny", "given/tiny"),
    "folder with any name given": ("given", "given"),
    "cache": (None, "cache/cgd/tiny"),
    "cache, torchvision's layout": (None, "cache/cgd/Tiny/raw"),
    "system folder": (None, "share/tiny"),
    "second system folder": (None, "more/tiny"),
    "datasets of a system folder": (None, "share/datasets/tiny"),
}


@pytest.mark.parametrize("gzipped", [True, False], ids=["gzipped", "plain"])
@pytest.mark.parametrize("option", ["data_dir", "CGD_DATA"])
@pytest.mark.parametrize(("given", "location"), LOCATIONS.values(), ids=LOCATIONS)
def test_load_finds_files_in_all_locations(
    given: str | None, location: str, option: str, gzipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / location, GZIPPED if gzipped else PLAIN, ".gz" if gzipped else "")
    if given is not None and option == "CGD_DATA":
        monkeypatch.setenv("CGD_DATA", str(tmp_path / given))
    assert_loads(tmp_path / given if given is not None and option == "data_dir" else None)


def test_spec_finds_fashion_mnist_in_a_system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {file: md5(content) for file, content in PLAIN.items()}
    monkeypatch.setitem(idx.SOURCES, "fashion-mnist", replace(idx.SOURCES["fashion-mnist"], mirrors=(), md5=digests))
    write_files(tmp_path / "share/datasets/fashion-mnist", GZIPPED)
    data = load_data(RunSpec(data="fashion-mnist", samples=2), tmp_path / "empty")
    assert (len(data.x), data.features, data.classes) == (2, 4, 3)


def test_load_searches_locations_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file is reported if it comes first, and ignored if an intact one comes before it."""
    order = ["given", "environment", "cache/cgd", "share", "more", "share/datasets"]
    monkeypatch.setenv("CGD_DATA", str(tmp_path / "environment"))
    write_files(tmp_path / order[-1] / "tiny", GZIPPED)
    for location in reversed(order[:-1]):
        damaged = tmp_path / location / "tiny"
        write_files(damaged, {"train-labels": b"damaged"}, "")
        with pytest.raises(InputError, match=re.escape(f"{damaged / 'train-labels'} is not the published file")):
            idx.load("tiny", tmp_path / "given")
        write_files(damaged, {"train-labels": GZIPPED["train-labels"]})  # searched before the damaged plain file
        assert_loads(tmp_path / "given")


def test_load_combines_files_from_several_locations(tmp_path: Path) -> None:
    for location, (file, content) in zip(["given", "cache/cgd", "share", "more"], GZIPPED.items(), strict=True):
        write_files(tmp_path / location / "tiny", {file: content})
    assert_loads(tmp_path / "given")


def test_load_accepts_any_compression_of_the_published_content(tmp_path: Path) -> None:
    write_files(tmp_path / "tiny", {file: gzip.compress(content, 1, mtime=7) for file, content in PLAIN.items()})
    assert (tmp_path / "tiny/train-images.gz").read_bytes() != GZIPPED["train-images"]
    assert_loads(tmp_path)


DAMAGES = {
    "changed byte": (gzip.compress(PLAIN["test-images"][:-1] + b"\x00"), "is not the published file: its md5"),
    "another file of the data set": (GZIPPED["train-images"], f"not {md5(PLAIN['test-images'])}"),
    "truncated": (GZIPPED["test-images"][:-9], "cannot be read"),
    "truncated header": (GZIPPED["test-images"][:5], "cannot be read"),
    "empty": (b"", "is not the published file"),
    "not gzip": (PLAIN["test-images"], "cannot be read"),
    "damaged in the middle": (
        GZIPPED["test-images"][:10] + b"\xff" + GZIPPED["test-images"][11:],
        "invalid block type",
    ),
}


@pytest.mark.parametrize(("content", "message"), DAMAGES.values(), ids=DAMAGES)
def test_load_names_a_damaged_file_and_a_remedy(content: bytes, message: str, tmp_path: Path) -> None:
    write_files(tmp_path / "tiny", {**GZIPPED, "test-images": content})
    with pytest.raises(InputError) as caught:
        idx.load("tiny", tmp_path)
    assert str(tmp_path / "tiny" / "test-images.gz") in str(caught.value)
    assert message in str(caught.value)
    assert str(caught.value).endswith("; delete it and download it again")


def test_load_ignores_files_of_another_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All data sets use the same file names, so CGD_DATA=.../fashion-mnist must not cause an error for mnist."""
    others = {file: idx_bytes(255 - array) for file, array in ARRAYS.items()}
    other = idx.DownloadSource("other", ("other",), (), {file: md5(content) for file, content in others.items()})
    monkeypatch.setitem(idx.SOURCES, "other", other)
    monkeypatch.setenv("CGD_DATA", str(tmp_path / "other"))
    write_files(tmp_path / "other", others, "")
    assert np.array_equal(idx.load("other")["train-labels"], [255, 253, 254])
    with pytest.raises(InputError, match=r"the data set tiny is not on this machine"):
        idx.load("tiny")
    write_files(tmp_path / "tiny", others, "")  # but in a folder with its own name they are an error
    with pytest.raises(InputError, match="train-images is not the published file"):
        idx.load("tiny", tmp_path)


@pytest.mark.parametrize("value", ["", ":"])
def test_load_ignores_empty_system_folders(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(Path("tiny"), GZIPPED)
    monkeypatch.setenv("XDG_DATA_DIRS", value)
    with pytest.raises(InputError, match="not on this machine"):
        idx.load("tiny")
    assert_loads(Path())  # the working folder is searched only if it is given


def test_folders_default_to_the_xdg_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("XDG_DATA_DIRS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = list(data_files.folders(("tiny",), None))
    assert folders[0] == tmp_path / ".cache/cgd/tiny"
    assert {Path("/usr/share/tiny"), Path("/usr/local/share/datasets/tiny")} < set(folders)


def test_load_skips_unreadable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGD_DATA", "/" + "n" * 300)  # ENAMETOOLONG; EACCES behaves the same, but not for root
    write_files(tmp_path / "cache/cgd/tiny", GZIPPED)
    assert_loads()


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_files_that_are_too_large_are_not_read_as_a_whole(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx, "MAX_FILE_BYTES", 100)
    content = bytes(101)
    write_files(tmp_path / "given/tiny", {"train-images": gzip.compress(content) if suffix else content}, suffix)
    with pytest.raises(
        InputError, match=r"train-images.* cannot be read \(it has more than 100 bytes\); delete it and"
    ):
        idx.load("tiny", tmp_path / "given")
