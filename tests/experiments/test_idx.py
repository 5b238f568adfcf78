from __future__ import annotations

import gzip
import hashlib
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd import InputError
from cgd.experiments import idx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Answer = Callable[[BaseHTTPRequestHandler], object]


def packed_idx(array: Bytes) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


ARRAYS = {
    "train-images": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
    "train-labels": np.array([0, 2, 1], np.uint8),
    "test-images": np.arange(100, 108, dtype=np.uint8).reshape(2, 2, 2),
    "test-labels": np.array([1, 0], np.uint8),
}
PLAIN = {file: packed_idx(array) for file, array in ARRAYS.items()}
PACKED = {file: gzip.compress(content, mtime=0) for file, content in PLAIN.items()}


def offer(monkeypatch: pytest.MonkeyPatch, *mirrors: str) -> None:
    source = idx.DownloadSource(
        "tiny", ("tiny", "Tiny/raw"), mirrors, {file: md5(content) for file, content in PLAIN.items()}
    )
    monkeypatch.setitem(idx.SOURCES, "tiny", source)


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data set is anywhere, and nothing is fetched from the real mirrors."""
    monkeypatch.delenv("CGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path / 'share'}:{tmp_path / 'more'}")
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    offer(monkeypatch)


def put(folder: Path, files: dict[str, bytes], suffix: str = ".gz") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / f"{file}{suffix}").write_bytes(content)


def check(data_dir: Path | None = None) -> None:
    loaded = idx.load("tiny", data_dir)
    assert list(loaded) == list(ARRAYS)
    assert all(
        np.array_equal(loaded[file], array) and loaded[file].shape == array.shape for file, array in ARRAYS.items()
    )


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# The layout


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_parse_gives_back_what_was_written(shape: list[int], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    values = data.draw(st.binary(min_size=count, max_size=count))
    array = np.frombuffer(values, np.uint8).reshape(shape) if values else np.zeros(shape, np.uint8)
    parsed = idx.parse(packed_idx(array), "here")
    assert parsed.dtype == np.uint8
    assert parsed.shape == array.shape
    assert np.array_equal(parsed, array)


@pytest.mark.parametrize("file", list(PLAIN))
def test_a_file_that_is_cut_or_goes_on_is_refused(file: str) -> None:
    content = PLAIN[file]
    for length in range(len(content)):
        with pytest.raises(InputError, match="cut-here is not an idx file of bytes; delete it and get it anew"):
            idx.parse(content[:length], "cut-here")
    for more in (b"\x00", content):
        with pytest.raises(InputError, match="not an idx file of bytes"):
            idx.parse(content + more, "here")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x0d\x01\x00\x00\x00\x00",  # floats
        b"\x01\x00\x08\x01\x00\x00\x00\x00",
        b"\x00\x00\x08\x00",  # no dimension
        b"\x00\x00\x08\x00x",
        b"\x00\x00\x08\x46" + b"\x00\x00\x00\x01" * 0x46 + b"x",  # more dimensions than numpy has
        b"\x00\x00\x08\x04" + b"\xff" * 12 + b"\x00" * 4,  # nothing, but of a size beyond numpy's
        b"<!DOCTYPE html><html>",
        gzip.compress(PLAIN["train-labels"], mtime=0),  # the time would be part of the test's name
    ],
)
def test_what_is_not_idx_is_refused(content: bytes) -> None:
    with pytest.raises(InputError, match="some/file is not an idx file of bytes; delete it and get it anew"):
        idx.parse(content, "some/file")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_published_files_are_listed_in_the_order_in_which_they_are_unpacked(name: str) -> None:
    source = idx.SOURCES[name]
    assert source.name == name
    kinds = " ".join(re.sub("-idx.*", "", file) for file in source.md5)
    assert kinds == "train-images train-labels t10k-images t10k-labels"
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in source.md5.values())


# On disk

PLACES = {
    "the parent is named": ("named", "named/tiny"),
    "the parent is named, torchvision's layout": ("named", "named/Tiny/raw"),
    "the folder itself is named": ("named/tiny", "named/tiny"),
    "the folder itself is named, whatever it is called": ("named", "named"),
    "the cache": (None, "cache/cgd/tiny"),
    "the cache, torchvision's layout": (None, "cache/cgd/Tiny/raw"),
    "a system folder": (None, "share/tiny"),
    "the second system folder": (None, "more/tiny"),
    "datasets of a system folder": (None, "share/datasets/tiny"),
}


@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "plain"])
@pytest.mark.parametrize("by", ["data_dir", "CGD_DATA"])
@pytest.mark.parametrize(("named", "lies"), PLACES.values(), ids=PLACES)
def test_files_are_found(
    named: str | None, lies: str, by: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / lies, PACKED if packed else PLAIN, ".gz" if packed else "")
    if named is not None and by == "CGD_DATA":
        monkeypatch.setenv("CGD_DATA", str(tmp_path / named))
    check(tmp_path / named if named is not None and by == "data_dir" else None)


def test_the_places_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a damaged file comes first, it is the one complained of; where it comes second, it is not seen."""
    order = ["named", "environment", "cache/cgd", "share", "more", "share/datasets"]
    monkeypatch.setenv("CGD_DATA", str(tmp_path / "environment"))
    put(tmp_path / order[-1] / "tiny", PACKED)
    for place in reversed(order[:-1]):
        damaged = tmp_path / place / "tiny"
        put(damaged, {"train-labels": b"damaged"}, "")
        with pytest.raises(InputError, match=re.escape(f"{damaged / 'train-labels'} is not the published file")):
            idx.load("tiny", tmp_path / "named")
        put(damaged, {"train-labels": PACKED["train-labels"]})  # beside the damaged one, which comes second
        check(tmp_path / "named")


def test_the_four_files_may_lie_in_four_places(tmp_path: Path) -> None:
    for place, (file, content) in zip(["named", "cache/cgd", "share", "more"], PACKED.items(), strict=True):
        put(tmp_path / place / "tiny", {file: content})
    check(tmp_path / "named")


def test_any_compression_of_the_right_content_will_do(tmp_path: Path) -> None:
    put(tmp_path / "tiny", {file: gzip.compress(content, 1, mtime=7) for file, content in PLAIN.items()})
    assert (tmp_path / "tiny/train-images.gz").read_bytes() != PACKED["train-images"]
    check(tmp_path)


DAMAGES = {
    "a changed byte": (gzip.compress(PLAIN["test-images"][:-1] + b"\x00"), "is not the published file: its md5"),
    "another file of the set": (PACKED["train-images"], f"not {md5(PLAIN['test-images'])}"),
    "cut": (PACKED["test-images"][:-9], "cannot be read"),
    "cut in the header": (PACKED["test-images"][:5], "cannot be read"),
    "empty": (b"", "is not the published file"),
    "no gzip": (PLAIN["test-images"], "cannot be read"),
    "damaged in the middle": (PACKED["test-images"][:10] + b"\xff" + PACKED["test-images"][11:], "invalid block type"),
}


@pytest.mark.parametrize(("content", "says"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_with_a_remedy(content: bytes, says: str, tmp_path: Path) -> None:
    put(tmp_path / "tiny", {**PACKED, "test-images": content})
    with pytest.raises(InputError) as caught:
        idx.load("tiny", tmp_path)
    assert str(tmp_path / "tiny" / "test-images.gz") in str(caught.value)
    assert says in str(caught.value)
    assert str(caught.value).endswith("; delete it and get it anew")


def test_nobody_is_told_to_delete_the_files_of_another_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All data sets name their files alike, so CGD_DATA=.../fashion-mnist must not spoil mnist."""
    others = {file: packed_idx(255 - array) for file, array in ARRAYS.items()}
    other = idx.DownloadSource("other", ("other",), (), {file: md5(content) for file, content in others.items()})
    monkeypatch.setitem(idx.SOURCES, "other", other)
    monkeypatch.setenv("CGD_DATA", str(tmp_path / "other"))
    put(tmp_path / "other", others, "")
    assert np.array_equal(idx.load("other")["train-labels"], [255, 253, 254])
    with pytest.raises(InputError, match=r"the data set tiny is not on this machine"):
        idx.load("tiny")
    put(tmp_path / "tiny", others, "")  # but in a folder of its own name they are out of place
    with pytest.raises(InputError, match="train-images is not the published file"):
        idx.load("tiny", tmp_path)


@pytest.mark.parametrize("value", ["", ":"])
def test_an_empty_list_of_system_folders_is_not_the_working_folder(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(Path("tiny"), PACKED)
    monkeypatch.setenv("XDG_DATA_DIRS", value)
    with pytest.raises(InputError, match="not on this machine"):
        idx.load("tiny")
    check(Path())  # only if it is named


def test_the_usual_places_if_nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("XDG_DATA_DIRS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    tried = list(idx.folders(idx.SOURCES["tiny"], None))
    assert tried[0] == tmp_path / ".cache/cgd/tiny"
    assert {Path("/usr/share/tiny"), Path("/usr/local/share/datasets/tiny")} < set(tried)


def test_a_folder_that_cannot_be_looked_into_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGD_DATA", "/" + "n" * 300)  # ENAMETOOLONG; EACCES is the same, but not for root
    put(tmp_path / "cache/cgd/tiny", PACKED)
    check()


# From a mirror


class Mirror:
    """A server on this machine; it answers as it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.released = threading.Event()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                mirror.answers.get(self.path, missing)(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def serve(self, folder: str, make: Callable[[bytes], Answer]) -> str:
        """Answer for all files in a folder; the address of that folder."""
        self.answers |= {f"/{folder}/{file}.gz": make(content) for file, content in PACKED.items()}
        return f"{self.url}/{folder}"


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    thread = threading.Thread(target=mirror.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield mirror
    mirror.released.set()
    mirror.server.shutdown()
    mirror.server.server_close()
    thread.join()


def missing(handler: BaseHTTPRequestHandler) -> None:
    handler.send_error(404)


def whole(content: bytes, length: int | None = None) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def raw(response: bytes) -> Answer:
    return lambda handler: handler.wfile.write(response)


def test_what_is_fetched_is_kept(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, mirror.serve("a", whole))
    check()
    assert mirror.asked == [f"/a/{file}.gz" for file in PACKED]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(f"{file}.gz" in printed.err for file in PACKED)  # the progress
    assert files_below(tmp_path / "cache") == sorted(f"cgd/tiny/{file}.gz" for file in PACKED)
    check()
    assert len(mirror.asked) == len(PACKED)  # no second request
    assert capsys.readouterr().err == ""


def test_only_what_is_missing_is_fetched(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, mirror.serve("a", whole))
    put(tmp_path / "named/tiny", {file: PACKED[file] for file in ("train-images", "test-labels")})
    check(tmp_path / "named")
    assert mirror.asked == ["/a/train-labels.gz", "/a/test-images.gz"]


def test_a_server_need_not_tell_the_length(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, mirror.serve("a", lambda content: raw(b"HTTP/1.0 200 OK\r\n\r\n" + content)))
    check()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FAILURES: dict[str, tuple[Callable[[bytes], Answer], str]] = {
    "not there": (lambda content: missing, "HTTP Error 404"),
    "other content": (lambda content: whole(gzip.compress(b"other")), "is not the published file"),
    "no gzip": (lambda content: whole(b"<html>Log in to the network!</html>"), "gzip"),
    "nothing": (lambda content: whole(b""), "is not the published file"),
    "cut": (lambda content: whole(content[:20], len(content)), "cut after 20 of|IncompleteRead"),
    "cut, but for the user whole": (lambda content: whole(content, len(content) + 9), "cut after|IncompleteRead"),
    "cut in a chunk": (lambda content: raw(CHUNKED + b"20\r\n" + content[:9]), "IncompleteRead"),
    "hung up": (lambda content: lambda handler: None, "without response"),
    "no HTTP": (lambda content: raw(b"220 ftp ready\r\n"), "220 ftp ready"),
}


@pytest.mark.parametrize(("make", "says"), FAILURES.values(), ids=FAILURES)
def test_a_failing_mirror(
    make: Callable[[bytes], Answer], says: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mirror.serve("first", make)
    offer(monkeypatch, first)
    with pytest.raises(InputError, match=says) as caught:  # alone: one error that says why, and the cache stays empty
        idx.load("tiny")
    assert f"{first}/train-images.gz: " in str(caught.value)
    assert files_below(tmp_path / "cache") == []
    offer(monkeypatch, first, mirror.serve("second", whole))  # with another: that one serves
    check()
    assert {f"/second/{file}.gz" for file in PACKED} < set(mirror.asked)
    kept = tmp_path / "cache/cgd/tiny"
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {f"{f}.gz": PACKED[f] for f in PACKED}


def test_a_mirror_that_says_nothing_is_given_up(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "TIMEOUT", 0.1)
    offer(monkeypatch, mirror.serve("a", lambda content: lambda handler: mirror.released.wait()))
    with pytest.raises(InputError, match="timed out"):
        idx.load("tiny")


@pytest.mark.parametrize("by", ["data_dir", "CGD_DATA", "the cache"])
def test_offline_the_error_says_which_files_to_put_where(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        offer(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}/a")  # bound, but nobody listens
        put(tmp_path / "share/tiny", {"train-labels": PACKED["train-labels"]})
        folder = tmp_path / ("cache/cgd" if by == "the cache" else "named") / "tiny"
        data_dir = tmp_path / "named" if by == "data_dir" else None
        if by == "CGD_DATA":
            monkeypatch.setenv("CGD_DATA", str(tmp_path / "named"))
        with pytest.raises(InputError, match="the data set tiny is not on this machine") as caught:
            idx.load("tiny", data_dir)
        advice = f"Put train-images.gz, test-images.gz, test-labels.gz into {folder}, or name the folder above it"
        assert advice in str(caught.value)
        put(folder, {file: PACKED[file] for file in ("train-images", "test-images", "test-labels")})
        check(data_dir)  # the advice helps


def test_a_cache_that_cannot_be_written(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, mirror.serve("a", whole))
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(InputError, match=r"tiny/train-images.gz cannot be written .*; name a folder .* XDG_CACHE_HOME"):
        idx.load("tiny")
