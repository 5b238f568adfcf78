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
    Response = Callable[[BaseHTTPRequestHandler], object]


def idx_bytes(array: Bytes) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


ARRAYS = {
    "train-images": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
    "train-labels": np.array([0, 2, 1], np.uint8),
    "test-images": np.arange(100, 108, dtype=np.uint8).reshape(2, 2, 2),
    "test-labels": np.array([1, 0], np.uint8),
}
PLAIN = {file: idx_bytes(array) for file, array in ARRAYS.items()}
GZIPPED = {file: gzip.compress(content, mtime=0) for file, content in PLAIN.items()}


def register_source(monkeypatch: pytest.MonkeyPatch, *mirrors: str) -> None:
    source = idx.DownloadSource(
        "tiny", ("tiny", "Tiny/raw"), mirrors, {file: md5(content) for file, content in PLAIN.items()}
    )
    monkeypatch.setitem(idx.SOURCES, "tiny", source)


@pytest.fixture(autouse=True)
def _no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Search empty folders only, and never contact the real mirrors."""
    monkeypatch.delenv("CGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path / 'share'}:{tmp_path / 'more'}")
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    register_source(monkeypatch)


def write_files(folder: Path, files: dict[str, bytes], suffix: str = ".gz") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / f"{file}{suffix}").write_bytes(content)


def assert_loads(data_dir: Path | None = None) -> None:
    loaded = idx.load("tiny", data_dir)
    assert list(loaded) == list(ARRAYS)
    assert all(
        np.array_equal(loaded[file], array) and loaded[file].shape == array.shape for file, array in ARRAYS.items()
    )


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


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
    folders = list(idx.folders(idx.SOURCES["tiny"], None))
    assert folders[0] == tmp_path / ".cache/cgd/tiny"
    assert {Path("/usr/share/tiny"), Path("/usr/local/share/datasets/tiny")} < set(folders)


def test_load_skips_unreadable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGD_DATA", "/" + "n" * 300)  # ENAMETOOLONG; EACCES behaves the same, but not for root
    write_files(tmp_path / "cache/cgd/tiny", GZIPPED)
    assert_loads()


# From a mirror


class Mirror:
    """An HTTP server on this machine with given responses; it records the requested paths."""

    def __init__(self) -> None:
        self.responses: dict[str, Response] = {}
        self.requests: list[str] = []
        self.stopped = threading.Event()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.requests.append(self.path)
                mirror.responses.get(self.path, not_found)(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def serve(self, folder: str, respond: Callable[[bytes], Response]) -> str:
        """Serve all files in a folder and return its URL."""
        self.responses |= {f"/{folder}/{file}.gz": respond(content) for file, content in GZIPPED.items()}
        return f"{self.url}/{folder}"


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    thread = threading.Thread(target=mirror.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield mirror
    mirror.stopped.set()
    mirror.server.shutdown()
    mirror.server.server_close()
    thread.join()


def not_found(handler: BaseHTTPRequestHandler) -> None:
    handler.send_error(404)


def respond_with(content: bytes, length: int | None = None, **headers: str) -> Response:
    def response(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return response


def raw(response: bytes) -> Response:
    return lambda handler: handler.wfile.write(response)


def test_downloaded_files_are_cached(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register_source(monkeypatch, mirror.serve("a", respond_with))
    assert_loads()
    assert mirror.requests == [f"/a/{file}.gz" for file in GZIPPED]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(f"{file}.gz" in printed.err for file in GZIPPED)  # the progress
    assert files_below(tmp_path / "cache") == sorted(f"cgd/tiny/{file}" for file in PLAIN)
    assert_loads()
    assert len(mirror.requests) == len(GZIPPED)  # no second request
    assert capsys.readouterr().err == ""


def test_load_downloads_only_missing_files(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_source(monkeypatch, mirror.serve("a", respond_with))
    write_files(tmp_path / "given/tiny", {file: GZIPPED[file] for file in ("train-images", "test-labels")})
    assert_loads(tmp_path / "given")
    assert mirror.requests == ["/a/train-labels.gz", "/a/test-images.gz"]


def test_download_accepts_gzip_as_content_encoding(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    register_source(monkeypatch, mirror.serve("a", lambda content: respond_with(content, Content_Encoding="gzip")))
    assert_loads()


def test_download_works_without_content_length(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    register_source(monkeypatch, mirror.serve("a", lambda content: raw(b"HTTP/1.0 200 OK\r\n\r\n" + content)))
    assert_loads()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FAILURES: dict[str, tuple[Callable[[bytes], Response], str]] = {
    "not found": (lambda content: not_found, "404 Client Error: Not Found"),
    "other content": (lambda content: respond_with(gzip.compress(b"other")), "does not match the known hash"),
    "not gzip": (lambda content: respond_with(b"<html>Log in to the network!</html>"), "does not match the known hash"),
    "damaged gzip": (lambda content: respond_with(content[:10] + b"\xff" + content[11:]), "damaged gzip file"),
    "truncated gzip": (lambda content: respond_with(content[:-9]), "damaged gzip file"),
    "empty": (lambda content: respond_with(b""), "does not match the known hash"),
    "connection closed early": (lambda content: respond_with(content[:20], len(content)), "IncompleteRead"),
    "content complete, but closed early": (lambda content: respond_with(content, len(content) + 9), "IncompleteRead"),
    "closed within a chunk": (lambda content: raw(CHUNKED + b"20\r\n" + content[:9]), "IncompleteRead|InvalidChunk"),
    "no response": (lambda content: lambda handler: None, "without response"),
    "not HTTP": (lambda content: raw(b"220 ftp ready\r\n"), "220 ftp ready"),
}


@pytest.mark.parametrize(("respond", "message"), FAILURES.values(), ids=FAILURES)
def test_download_reports_a_failing_mirror_and_uses_the_next(
    respond: Callable[[bytes], Response], message: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mirror.serve("first", respond)
    register_source(monkeypatch, first)
    with pytest.raises(InputError, match=message) as caught:
        idx.load("tiny")
    assert f"{first}/train-images.gz: " in str(caught.value)
    assert files_below(tmp_path / "cache") == []
    register_source(monkeypatch, first, mirror.serve("second", respond_with))
    assert_loads()
    assert {f"/second/{file}.gz" for file in GZIPPED} < set(mirror.requests)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache/cgd/tiny").iterdir()} == PLAIN


def test_download_times_out(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "DOWNLOAD_TIMEOUT_SECONDS", 0.1)
    register_source(monkeypatch, mirror.serve("a", lambda content: lambda handler: mirror.stopped.wait()))
    with pytest.raises(InputError, match="timed out"):
        idx.load("tiny")


@pytest.mark.parametrize("option", ["data_dir", "CGD_DATA", "cache"])
def test_offline_error_names_the_files_and_their_folder(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        register_source(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}/a")  # bound, but not listening
        write_files(tmp_path / "share/tiny", {"train-labels": GZIPPED["train-labels"]})
        folder = tmp_path / ("cache/cgd" if option == "cache" else "given") / "tiny"
        data_dir = tmp_path / "given" if option == "data_dir" else None
        if option == "CGD_DATA":
            monkeypatch.setenv("CGD_DATA", str(tmp_path / "given"))
        with pytest.raises(InputError, match="the data set tiny is not on this machine") as caught:
            idx.load("tiny", data_dir)
        assert "Connection refused" in str(caught.value)
        assert "Max retries" not in str(caught.value)
        remedy = f"Put train-images.gz, test-images.gz, test-labels.gz into {folder}, or name its parent folder"
        assert remedy in str(caught.value)
        write_files(folder, {file: GZIPPED[file] for file in ("train-images", "test-images", "test-labels")})
        assert_loads(data_dir)  # the remedy works


def test_download_reports_an_unwritable_cache(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_source(monkeypatch, mirror.serve("a", respond_with))
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(InputError, match=r"tiny/train-images cannot be written .*; name a folder .* XDG_CACHE_HOME"):
        idx.load("tiny")
