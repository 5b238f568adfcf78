"""Data sets in the idx layout of MNIST: found on disk, or fetched from a public mirror, and always checked."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import InputError
from cgd.simulation.checkpoint import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

TIMEOUT = 30.0


@dataclass(frozen=True)
class DownloadSource:
    """Where a data set is to be found.

    Attributes:
        name: what users call it.
        folders: what its folder is called, below a data folder.
        mirrors: where its gzipped files are published.
        md5: of each file when decompressed (gzip bytes differ from mirror to mirror).
    """

    name: str
    folders: tuple[str, ...]
    mirrors: tuple[str, ...]
    md5: dict[str, str]


SOURCES = {
    "mnist": DownloadSource(
        "mnist",
        ("mnist", "MNIST/raw"),
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        {
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
    ),
    "fashion-mnist": DownloadSource(
        "fashion-mnist",
        ("fashion-mnist", "FashionMNIST/raw"),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
        {
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
    ),
}


def load(name: str, data_dir: Path | None = None) -> dict[str, npt.NDArray[np.uint8]]:
    """The arrays of a data set by the names of their files.

    Raises:
        InputError: it is nowhere and cannot be fetched, or a file is damaged.
    """
    source = SOURCES[name]
    found = {file: _find(source, file, data_dir) for file in source.md5}
    missing = [file for file, array in found.items() if array is None]
    fetched = {file: _fetch(source, missing[number:], data_dir) for number, file in enumerate(missing)}
    return {file: fetched[file] if array is None else array for file, array in found.items()}


def folders(source: DownloadSource, data_dir: Path | None) -> Iterator[Path]:
    """Where the data set may lie, the first choice first."""
    named = [Path(folder) for folder in (data_dir, os.environ.get("CGD_DATA")) if folder]
    shares = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    system = [Path(folder) for folder in shares.split(":") if folder]
    for parent in (*named, cache(), *system, *(folder / "datasets" for folder in system)):
        for folder in source.folders:
            yield parent / folder
    yield from named


def cache() -> Path:
    """Where fetched files are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgd"


def _find(source: DownloadSource, file: str, data_dir: Path | None) -> npt.NDArray[np.uint8] | None:
    for folder in folders(source, data_dir):
        for path in (folder / f"{file}.gz", folder / file):
            if os.path.isfile(path):  # Path.is_file fails where we may not look
                content = _content(path)
                if not _of_another(source, folder, file, content):
                    return parse(_checked(source, file, content, path), path)
    return None


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}); delete it and get it anew") from None


def _of_another(source: DownloadSource, folder: Path, file: str, content: bytes) -> bool:
    """Whether this is a file of another data set (all name them alike), in a folder not named after this one."""
    if any(folder.match(each) for each in source.folders):
        return False
    return _md5(content) in {other.md5.get(file) for other in SOURCES.values() if other.name != source.name}


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _checked(source: DownloadSource, file: str, content: bytes, path: object) -> bytes:
    found = _md5(content)
    if found != source.md5[file]:
        raise InputError(
            f"{path} is not the published file: its md5, decompressed, is {found}, not {source.md5[file]}; "
            "delete it and get it anew"
        )
    return content


def parse(content: bytes, where: object) -> npt.NDArray[np.uint8]:
    """An array from idx bytes: two zeros, the type (8: bytes), the number of dimensions, their sizes, the values.

    Raises:
        InputError: they are something else, too few or too many.

    Examples:
        >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "here")
        array([7, 9], dtype=uint8)
    """
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], ">u4").astype(int).tolist() if len(content) >= start else []
    try:
        if content[:3] != b"\x00\x00\x08" or not shape or len(content) != start + math.prod(shape):
            raise ValueError
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    except ValueError:  # also numpy's, of dimensions beyond its own
        raise InputError(f"{where} is not an idx file of bytes; delete it and get it anew") from None


def _fetch(source: DownloadSource, missing: list[str], data_dir: Path | None) -> npt.NDArray[np.uint8]:
    """Download the first missing file into the cache; only one that is the published one gets there."""
    from http.client import HTTPException

    file, failures = missing[0], []
    for mirror in source.mirrors:
        url = f"{mirror}/{file}.gz"
        try:
            packed = _download(url)
            content = _checked(source, file, gzip.decompress(packed), url)
        except (OSError, EOFError, zlib.error, HTTPException, InputError) as error:
            failures.append(f"{url}: {error}")
            continue
        _keep(cache() / source.folders[0] / f"{file}.gz", packed)
        return parse(content, url)
    wanted = data_dir or os.environ.get("CGD_DATA") or cache()
    files = ", ".join(f"{each}.gz" for each in missing)
    raise InputError(
        f"the data set {source.name} is not on this machine and cannot be fetched ({'; '.join(failures)}). "
        f"Put {files} into {Path(wanted) / source.folders[0]}, or name the folder above it with --data-dir or CGD_DATA"
    )


def _keep(path: Path, packed: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, packed)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}); name a folder for it with XDG_CACHE_HOME") from None


def _download(url: str) -> bytes:
    from urllib.request import urlopen

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    received = bytearray()
    with (
        urlopen(url, timeout=TIMEOUT) as response,  # noqa: S310 - the mirrors above, and the content is checked
        Progress(*columns, console=Console(file=sys.stderr)) as bar,
    ):
        length: int | None = response.length  # None if the server does not say
        task = bar.add_task(url.rsplit("/", 1)[-1], total=length)
        while piece := response.read(1 << 16):
            received += piece
            bar.advance(task, len(piece))
    if length is not None and len(received) != length:
        raise ConnectionError(f"the connection was cut after {len(received)} of {length} bytes")
    return bytes(received)
