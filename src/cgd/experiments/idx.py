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
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.simulation.checkpoint import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

TIMEOUT = 30.0


@dataclass(frozen=True)
class Source:
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
    "mnist": Source(
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
    "fashion-mnist": Source(
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
    return {file: _read(source, file, data_dir) for file in source.md5}


def folders(source: Source, data_dir: Path | None) -> Iterator[Path]:
    """Where the data set may lie, the first choice first."""
    named = [Path(folder) for folder in (data_dir, os.environ.get("CGD_DATA")) if folder]
    system = [Path(folder) for folder in os.environ.get("XDG_DATA_DIRS", "/usr/local/share:/usr/share").split(":")]
    for parent in (*named, cache(), *system, *(folder / "datasets" for folder in system)):
        for folder in source.folders:
            yield parent / folder
    yield from named


def cache() -> Path:
    """Where fetched files are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgd"


def _read(source: Source, file: str, data_dir: Path | None) -> npt.NDArray[np.uint8]:
    for folder in folders(source, data_dir):
        for path in (folder / f"{file}.gz", folder / file):
            if path.is_file():
                return parse(_checked(source, file, _content(path), path), path)
    content = _fetch(source, file, data_dir)
    return parse(content, source.mirrors[0])


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}); delete it and get it anew") from None


def _checked(source: Source, file: str, content: bytes, path: object) -> bytes:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != source.md5[file]:
        raise InputError(
            f"{path} is not the published file: its md5, decompressed, is {found}, not {source.md5[file]}; "
            "delete it and get it anew"
        )
    return content


def parse(content: bytes, where: object) -> npt.NDArray[np.uint8]:
    """An array from idx bytes: two zeros, the type (8: bytes), the number of dimensions, their sizes, the values.

    Examples:
        >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "here")
        array([7, 9], dtype=uint8)
    """
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], ">u4").astype(int).tolist() if len(content) >= start else []
    if content[:3] != b"\x00\x00\x08" or not shape or len(content) != start + math.prod(shape):
        raise InputError(f"{where} is not an idx file of bytes; delete it and get it anew")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _fetch(source: Source, file: str, data_dir: Path | None) -> bytes:
    """Download a file into the cache; only one that is the published one gets there."""
    failures = []
    for mirror in source.mirrors:
        url = f"{mirror}/{file}.gz"
        try:
            packed = _download(url)
            content = _checked(source, file, gzip.decompress(packed), url)
        except (OSError, EOFError, zlib.error, InputError) as error:
            failures.append(f"{url}: {error}")
            continue
        path = cache() / source.folders[0] / f"{file}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, packed)
        return content
    wanted = data_dir or os.environ.get("CGD_DATA") or cache()
    files = ", ".join(f"{each}.gz" for each in source.md5)
    raise InputError(
        f"the data set {source.name} is not on this machine and cannot be fetched ({'; '.join(failures)}). "
        f"Put {files} into {Path(wanted) / source.folders[0]}, or name the folder above it with --data-dir or CGD_DATA"
    )


def _download(url: str) -> bytes:
    from urllib.request import urlopen

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    pieces = []
    with (
        urlopen(url, timeout=TIMEOUT) as response,  # noqa: S310 - the mirrors above, and the content is checked
        Progress(*columns, console=Console(file=sys.stderr)) as bar,
    ):
        length: Any = response.headers.get("Content-Length")
        task = bar.add_task(url.rsplit("/", 1)[-1], total=int(length) if length else None)
        while piece := response.read(1 << 16):
            pieces.append(piece)
            bar.advance(task, len(piece))
    return b"".join(pieces)
