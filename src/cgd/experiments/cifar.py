"""CIFAR-10 as the paper uses it: the features that a frozen ResNet-56, trained on CIFAR-100, computes of the images.

Images and weights are never changed or copied. The features are computed once and stored in the cache, as safetensors
with a digest of their bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

import safetensors
import safetensors.torch
import torch

from cgd.errors import InputError
from cgd.experiments import data_files, resnet
from cgd.files import write_file

if TYPE_CHECKING:
    from pathlib import Path

NAME = "cifar10-features"

ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
ARCHIVE_FOLDERS, WEIGHTS_FOLDERS = ("cifar10",), ("weights",)
MD5 = {
    "cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
"""The files of the archive, training images first, and the published digests of their contents."""

IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
"""The bytes of an image: its class, then its red, green and blue pixels."""
IMAGES_PER_FILE = 10_000
MAX_ARCHIVE_BYTES = 1 << 28
"""The most bytes that are decompressed; the published archive has 184 million."""

CACHE_FILE = "resnet56.safetensors"
BATCH_IMAGES = 100


class Features(NamedTuple):
    """The data set: features in single precision, and classes."""

    x: torch.Tensor
    y: torch.Tensor
    held_out_x: torch.Tensor
    held_out_y: torch.Tensor


def load(data_dir: Path | None = None) -> Features:
    """Return the features from the cache, or compute and store them, with a progress bar.

    Args:
        data_dir: folder to search first for the images and the weights.

    Raises:
        InputError: a file is missing or damaged, or the cache cannot be written.
    """
    path = data_files.cache() / NAME / CACHE_FILE
    if os.path.isfile(path):
        return read_cache(path)
    missing = []
    found = {}
    for file, names, url in (
        (ARCHIVE, ARCHIVE_FOLDERS, ARCHIVE_URL),
        (resnet.WEIGHTS_FILE, WEIGHTS_FOLDERS, resnet.WEIGHTS_URL),
    ):
        found[file] = data_files.find(file, names, data_dir)
        if found[file] is None:
            missing.append(f"{url} into {data_files.suggested_folder(names[0], data_dir)}")
    archive, weights = found.values()
    if archive is None or weights is None:
        raise InputError(
            f"files of the data set {NAME} are not on this machine. Download {' and '.join(missing)}, or name the "
            "parent folder of both folders with --data-dir or CGD_DATA"
        )
    network = resnet.load(weights)
    images, labels = read_archive(archive)
    _make_folder(path)
    training = len(images) - IMAGES_PER_FILE
    features = extract(network, images)
    data = Features(features[:training], labels[:training], features[training:], labels[training:])
    write_cache(path, data)
    return data


def read_archive(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images, those for tests last, and their classes.

    Only the six files of the data set are read, into memory; nothing is unpacked to the disk.

    Raises:
        InputError: it cannot be read, is too large, or a file in it is missing or not the published one.
    """
    contents: dict[str, bytes] = {}
    remedy = f"download it again from {ARCHIVE_URL}"
    try:
        with gzip.open(path) as stream, tarfile.open(fileobj=_LimitedReader(stream), mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name in MD5 and member.isreg() else None
                if file is not None:
                    contents[member.name] = file.read(IMAGES_PER_FILE * RECORD_BYTES + 1)
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); {remedy}") from None
    for name, expected in MD5.items():
        if name not in contents:
            raise InputError(f"{path} has no file {name}; {remedy}")
        digest = hashlib.md5(contents[name], usedforsecurity=False).hexdigest()
        if digest != expected:
            raise InputError(f"{path}: {name} is not the published file: its md5 is {digest}, not {expected}; {remedy}")
    content = bytearray().join(contents[name] for name in MD5)
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, RECORD_BYTES)
    return records[:, 1:].reshape(-1, *IMAGE_SHAPE), records[:, 0].long()


class _LimitedReader(io.RawIOBase):
    """A file that ends with an error after MAX_ARCHIVE_BYTES: a small file may decompress to any number of bytes."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file, self._left = file, MAX_ARCHIVE_BYTES

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes."""
        content = self._file.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it has more than {MAX_ARCHIVE_BYTES} bytes, decompressed")
        return content


def extract(network: resnet.ResNet56, images: torch.Tensor) -> torch.Tensor:
    """Return the features of images, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, torch.inference_mode():
        task = progress.add_task("features of CIFAR-10", total=len(images))
        parts = []
        for batch in images.split(BATCH_IMAGES):
            parts.append(network(batch))
            progress.advance(task, len(batch))
    return torch.cat(parts).clone()


def _make_folder(path: Path) -> None:
    """Create the folder of a file, before minutes are spent on its content."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(_not_written(path, error)) from None


def _not_written(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror}); name a folder for it with XDG_CACHE_HOME"


def _digest(data: Features) -> str:
    """Return a digest of the types, shapes and values, and of the weights with which they were computed."""
    state = hashlib.sha256(f"{resnet.WEIGHTS_SHA256} {[(each.dtype, each.shape) for each in data]}".encode())
    for each in data:
        state.update(each.contiguous().numpy().data)
    return state.hexdigest()


def write_cache(path: Path, data: Features) -> None:
    """Store features with their digest.

    Raises:
        InputError: the file cannot be written.
    """
    tensors = {name: each.contiguous() for name, each in data._asdict().items()}
    try:
        write_file(path, safetensors.torch.save(tensors, {"sha256": _digest(data)}))
    except OSError as error:
        raise InputError(_not_written(path, error)) from None


def read_cache(path: Path) -> Features:
    """Return the features that were stored in a file.

    Raises:
        InputError: they cannot be read, or differ from those that were stored.
    """
    remedy = "delete it, and it is computed again"
    try:
        with safetensors.safe_open(path, "pt") as file:
            stored = (file.metadata() or {}).get("sha256", "missing")
            data = Features(*(file.get_tensor(name) for name in Features._fields))
        digest = _digest(data)
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} cannot be read ({error}); {remedy}") from None
    if digest != stored:
        raise InputError(f"{path} was altered: the sha256 of its content is {digest}, not {stored}; {remedy}")
    return data
