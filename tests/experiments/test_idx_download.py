"""Downloads of data sets from mirrors: all failures are reported with a remedy, and nothing damaged is cached."""

from __future__ import annotations

import gzip
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from cgd import InputError
from cgd.experiments import idx
from support.idx_files import GZIPPED, PLAIN, assert_loads, files_below, register_source, write_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Response = Callable[[BaseHTTPRequestHandler], object]

pytestmark = pytest.mark.usefixtures("no_idx_files")


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
