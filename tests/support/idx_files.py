"""The files of a tiny data set, `tiny`, in the format of MNIST; for tests of `cgd.experiments.idx`."""

from __future__ import annotations

import gzip
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from cgd.experiments import idx

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    import pytest

    Bytes = npt.NDArray[np.uint8]


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
