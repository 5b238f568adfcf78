"""Data sets in the IDX file format of MNIST: read from disk or downloaded from a mirror, with checked digests."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import InputError
from cgd.experiments import data_files

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.progress import Progress

DOWNLOAD_TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 16
GZIP_MAGIC = b"\x1f\x8b"
MAX_FILE_BYTES = 1 << 26
"""The most bytes of a file, decompressed; the largest published one has 47 million."""


@dataclass(frozen=True)
class DownloadSource:
    """Folders, mirrors and digests of a data set.

    Attributes:
        name: name of the data set.
        folders: possible names of its folder, relative to a data folder.
        mirrors: URLs of folders with its gzipped files.
        md5: digest of each decompressed file (the gzip bytes differ between mirrors).
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
    """Return the arrays of a data set, by file name; download files that are not on disk.

    Raises:
        InputError: a file is not on disk and cannot be downloaded, or is damaged.
    """
    source = SOURCES[name]
    found = {file: _find(source, file, data_dir) for file in source.md5}
    missing = [file for file, array in found.items() if array is None]
    downloaded = {file: _download(source, missing[number:], data_dir) for number, file in enumerate(missing)}
    return {file: downloaded[file] if array is None else array for file, array in found.items()}


def _find(source: DownloadSource, file: str, data_dir: Path | None) -> npt.NDArray[np.uint8] | None:
    for folder in data_files.folders(source.folders, data_dir):
        for path in (folder / f"{file}.gz", folder / file):
            if os.path.isfile(path):  # Path.is_file raises an error in folders without permission
                content = _read(path)
                if not _is_other_dataset(source, folder, file, content):
                    return parse(_check_digest(source, file, content, path), path)
    return None


def _read(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content: bytes = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:  # a small file may decompress to any number of bytes
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return content
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}); delete it and download it again") from None


def _is_other_dataset(source: DownloadSource, folder: Path, file: str, content: bytes) -> bool:
    """Return True for a file of another data set (they use the same names), in a folder not named after this one."""
    if any(folder.match(each) for each in source.folders):
        return False
    return _md5(content) in {other.md5.get(file) for other in SOURCES.values() if other.name != source.name}


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _check_digest(source: DownloadSource, file: str, content: bytes, path: Path) -> bytes:
    digest = _md5(content)
    if digest != source.md5[file]:
        raise InputError(
            f"{path} is not the published file: its md5, decompressed, is {digest}, not {source.md5[file]}; "
            "delete it and download it again"
        )
    return content


def parse(content: bytes, where: object) -> npt.NDArray[np.uint8]:
    """Parse IDX bytes: two zeros, the type (8 for bytes), the number of dimensions, their sizes, the values.

    Raises:
        InputError: the content is not IDX of bytes, or too short or too long.

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
    except ValueError:  # also raised by numpy for too many or too large dimensions
        raise InputError(f"{where} is not an idx file of bytes; delete it and download it again") from None


def _download(source: DownloadSource, missing: list[str], data_dir: Path | None) -> npt.NDArray[np.uint8]:
    """Download the first missing file to the cache; pooch checks the digest and leaves no partial file."""
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")  # the progress bar is enough
    file, folder, failures = missing[0], data_files.cache() / source.folders[0], []
    for mirror in source.mirrors:
        url, digest = f"{mirror}/{file}.gz", f"md5:{source.md5[file]}"
        try:
            path = pooch.retrieve(url, digest, fname=file, path=folder, downloader=_download_decompressed)
        except (RequestException, ValueError) as error:
            failures.append(f"{url}: {_reason(error)}")
        except OSError as error:
            raise InputError(
                f"{folder / file} cannot be written ({error}); name a folder for it with XDG_CACHE_HOME"
            ) from None
        else:
            return parse(Path(path).read_bytes(), path)
    target = data_files.suggested_folder(source.folders[0], data_dir)
    files = ", ".join(f"{each}.gz" for each in missing)
    raise InputError(
        f"the data set {source.name} is not on this machine and cannot be downloaded ({'; '.join(failures)}). "
        f"Put {files} into {target}, or name its parent folder with --data-dir or CGD_DATA"
    )


def _download_decompressed(url: str, output_file: str, _: object) -> None:
    """Download a gzipped file and write it decompressed, so that pooch checks the digest of the content."""
    from pooch import HTTPDownloader
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    content = io.BytesIO()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        bar = _ProgressBar(progress, url.rsplit("/", 1)[-1])
        HTTPDownloader(progressbar=bar, chunk_size=CHUNK_BYTES, timeout=DOWNLOAD_TIMEOUT_SECONDS)(url, content, None)
    received = content.getvalue()
    try:  # a server that declares gzip as the content encoding: already decompressed
        plain = gzip.decompress(received) if received.startswith(GZIP_MAGIC) else received
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"damaged gzip file ({error})") from None
    Path(output_file).write_bytes(plain)


class _ProgressBar:
    """A progress bar of rich with the interface that pooch expects."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._task, self.total = progress, progress.add_task(name, total=None), 0

    def update(self, size: int) -> None:
        self._progress.update(self._task, advance=size, total=self.total or None)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        pass


def _reason(error: Exception) -> object:
    """Return the cause of a failed connection, without the retries and the connection pool that wrap it."""
    return getattr(error.args[0] if error.args else None, "reason", None) or error
