"""The files of a tiny CIFAR-10, with one image in each file, and random weights; for tests of `cgd.experiments`."""

from __future__ import annotations

import hashlib
import io
import tarfile
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.experiments import cifar, resnet

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

IMAGES = 1


@cache
def contents() -> dict[str, bytes]:
    """Return the files of the archive."""
    random = np.random.default_rng(0)
    found = {}
    for name in cifar.MD5:
        records = random.integers(0, 256, (IMAGES, cifar.RECORD_BYTES), np.uint8)
        records[:, 0] %= 10
        found[name] = records.tobytes()
    return found


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        folder = tarfile.TarInfo("cifar-10-batches-bin")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@cache
def weights() -> bytes:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = {**resnet.ResNet56().state_dict(), "fc.weight": torch.zeros(100, 64), "fc.bias": torch.zeros(100)}
    return saved(state)


@cache
def other_weights() -> bytes:
    """Return the weights of a network with the same names of parameters, but fewer blocks: ResNet-20."""
    blocks = tuple(f".{number}." for number in range(3, resnet.BLOCKS))
    state = torch.load(io.BytesIO(weights()), weights_only=True)
    return saved({name: value for name, value in state.items() if not any(each in name for each in blocks)})


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def register(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Write the files to a folder, and make their digests the published ones."""
    files, network = contents(), weights()
    monkeypatch.setattr(cifar, "IMAGES_PER_FILE", IMAGES)
    monkeypatch.setattr(cifar, "MD5", {name: hashlib.md5(content).hexdigest() for name, content in files.items()})
    monkeypatch.setattr(resnet, "WEIGHTS_SHA256", hashlib.sha256(network).hexdigest())
    for path, content in (("cifar10", archive(files)), ("weights", network)):
        (folder / path).mkdir(parents=True, exist_ok=True)
        name = cifar.ARCHIVE if path == "cifar10" else resnet.WEIGHTS_FILE
        (folder / path / name).write_bytes(content)
