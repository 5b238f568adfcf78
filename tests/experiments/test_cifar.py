"""CIFAR-10 as features: reading the archive and the weights, extraction, the cache, and damaged files of each kind."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgd import InputError
from cgd.experiments import cifar, datasets, resnet
from cgd.experiments.runner import execute
from cgd.experiments.spec import RunSpec
from support import cifar_files


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tiny CIFAR-10; nothing else is searched."""
    monkeypatch.delenv("CGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))
    cifar_files.register(monkeypatch, tmp_path / "data")
    return tmp_path / "data"


def cached(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "cgd" / "cifar10-features" / "resnet56.safetensors"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def equal(one: cifar.Features, other: cifar.Features) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


# Loading


@pytest.mark.parametrize("option", ["data_dir", "CGD_DATA", "cache"])
def test_load_computes_features_and_labels(
    data: Path, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option == "CGD_DATA":
        monkeypatch.setenv("CGD_DATA", str(data))
    if option == "cache":
        (tmp_path / "cache").mkdir()
        data.rename(tmp_path / "cache" / "cgd")
    found = datasets.load("cifar10-features", data_dir=data if option == "data_dir" else None)
    records = [
        record
        for content in cifar_files.contents().values()
        for record in torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, cifar.RECORD_BYTES)
    ]
    assert torch.cat((found.y, found.held_out_y)).tolist() == [int(each[0]) for each in records]
    assert (found.x.shape, found.held_out_x.shape) == ((5, 64), (1, 64))
    assert (found.x.dtype, found.y.dtype, found.features) == (torch.float32, torch.int64, 64)
    (path,) = (each for each in tmp_path.rglob(resnet.WEIGHTS_FILE))
    network = resnet.load(path)
    alone = torch.cat([network(each[1:].reshape(1, 3, 32, 32)) for each in records])
    torch.testing.assert_close(torch.cat((found.x, found.held_out_x)), alone)
    assert float(alone.std(dim=0).max()) > 0


def test_features_are_computed_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(data)
    first = cifar.load(data)
    assert files_of(data) == before  # the folder of the data is only read
    assert list(files_of(tmp_path / "cache")) == [str(cached(tmp_path).relative_to(tmp_path / "cache"))]
    for path in data.rglob("*.*"):
        path.unlink()
    monkeypatch.setattr(cifar, "extract", None)
    assert equal(cifar.load(data), first)


def test_runs_train_on_the_features(data: Path) -> None:
    result = execute(RunSpec(data="cifar10-features", rows=5, columns=2, hidden=(3,), steps=2, lr=0.01), data)
    assert result.history.training_loss[1] < result.history.training_loss[0]
    assert len(result.last.accuracy) == 10


def test_interrupted_extraction_leaves_nothing_and_gives_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cifar.load(data)
    cached(tmp_path).unlink()
    monkeypatch.setattr(cifar, "BATCH_IMAGES", 2)
    forward, batches = resnet.ResNet56.forward, []

    def interrupted(network: resnet.ResNet56, images: torch.Tensor) -> torch.Tensor:
        batches.append(len(images))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return forward(network, images)

    monkeypatch.setattr(resnet.ResNet56, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cifar.load(data)
    assert files_of(tmp_path / "cache") == {}
    monkeypatch.setattr(resnet.ResNet56, "forward", forward)
    monkeypatch.setattr(cifar, "BATCH_IMAGES", 100)
    assert equal(cifar.load(data), expected)


def test_pixels_are_normalised_with_the_statistics_of_cifar_100() -> None:
    inputs = []
    network = resnet.ResNet56().eval()
    network.conv1.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    image = torch.tensor([[[[0]], [[128]], [[255]]]], dtype=torch.uint8).expand(1, 3, 32, 32)
    network(image)
    expected = [-0.5070 / 0.2673, (128 / 255 - 0.4865) / 0.2564, (1 - 0.4409) / 0.2761]
    assert inputs[0][0, :, 5, 7].tolist() == pytest.approx(expected, rel=1e-5)


def test_network_has_the_parameters_of_the_published_one() -> None:
    state = resnet.ResNet56().state_dict()
    assert len(state) + len(resnet.CLASSIFIER) == 344
    parameters = sum(each.numel() for each in resnet.ResNet56().parameters())
    assert parameters + 100 * 64 + 100 == 861_620


# Missing and damaged files


def test_missing_files_are_named_with_their_sources(data: Path, tmp_path: Path) -> None:
    (data / "weights" / resnet.WEIGHTS_FILE).unlink()
    with pytest.raises(InputError) as caught:
        cifar.load(data)
    assert f"Download {resnet.WEIGHTS_URL} into {data / 'weights'}, or" in str(caught.value)
    with pytest.raises(InputError) as caught:
        cifar.load()
    both = f"{cifar.ARCHIVE_URL} into {tmp_path}/cache/cgd/cifar10 and {resnet.WEIGHTS_URL} into {tmp_path}"
    assert both in str(caught.value)
    assert "CGD_DATA" in str(caught.value)


CONTENTS = cifar_files.contents()
FIRST, LAST = next(iter(CONTENTS)), list(CONTENTS)[-1]
WHOLE = cifar_files.archive(CONTENTS)


def altered(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def with_link() -> bytes:
    """Return an archive in which a file of the data set is a link to another place."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        member = tarfile.TarInfo(FIRST)
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(member)
    return buffer.getvalue()


ARCHIVES = {
    "empty": (b"", "cannot be read"),
    "truncated": (WHOLE[: len(WHOLE) // 2], "cannot be read"),
    "not gzip": (b"no archive", "cannot be read"),
    "not tar": (gzip.compress(b"no archive" * 100), "cannot be read"),
    "altered": (
        cifar_files.archive({**CONTENTS, LAST: altered(CONTENTS[LAST])}),
        f"{LAST} is not the published file: its md5 is ",
    ),
    "longer": (cifar_files.archive({**CONTENTS, FIRST: CONTENTS[FIRST] * 5}), f"{FIRST} is not the published file"),
    "file missing": (
        cifar_files.archive({name: content for name, content in CONTENTS.items() if name != LAST}),
        f"has no file {LAST}",
    ),
    "link": (with_link(), f"has no file {FIRST}"),
    "too large": (cifar_files.archive({"padding": bytes(1 << 20), **CONTENTS}), "more than 1000000 bytes"),
}


@pytest.mark.parametrize(("content", "message"), ARCHIVES.values(), ids=ARCHIVES)
def test_damaged_archive_is_refused(
    content: bytes, message: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "MAX_ARCHIVE_BYTES", 1_000_000)
    path = data / "cifar10" / cifar.ARCHIVE
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        cifar.load(data)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"download it again from {cifar.ARCHIVE_URL}")
    assert files_of(tmp_path / "cache") == {}


@given(st.lists(st.tuples(st.integers(0, 1600), st.binary(min_size=1, max_size=20)), min_size=1, max_size=3))
def test_archive_with_changed_headers_raises_only_input_errors(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    content = bytearray(gzip.decompress(WHOLE))
    for place, change in changes:
        content[place : place + len(change)] = change
    path = tmp_path_factory.getbasetemp() / cifar.ARCHIVE
    path.write_bytes(gzip.compress(content, 1))
    with pytest.raises(InputError, match=re.escape(str(path))):
        cifar.read_archive(path)


class Malicious:
    """A pickle that runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("attacked"),)


WEIGHTS = {
    "truncated": cifar_files.weights()[:-1],
    "altered": cifar_files.weights()[:-1] + b"x",
    "empty": b"",
    "another network": cifar_files.other_weights(),
    "code": pickle.dumps(Malicious()),
    "too large": bytes(resnet.MAX_WEIGHTS_BYTES + 5),
}


@pytest.mark.parametrize("content", WEIGHTS.values(), ids=WEIGHTS)
def test_other_weights_are_refused_before_they_are_parsed(
    content: bytes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "load", None)
    path = data / "weights" / resnet.WEIGHTS_FILE
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        cifar.load(data)
    assert str(caught.value).startswith(f"{path} is not the published file: it has ")
    assert f"not {resnet.WEIGHTS_SHA256}; download it again from {resnet.WEIGHTS_URL}" in str(caught.value)
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    "content",
    [cifar_files.other_weights(), cifar_files.saved(Malicious()), cifar_files.saved([1])],
    ids=["another network", "code", "list"],
)
def test_other_contents_are_refused_even_with_a_matching_digest(
    content: bytes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = data / "weights" / resnet.WEIGHTS_FILE
    path.write_bytes(content)
    monkeypatch.setattr(resnet, "WEIGHTS_SHA256", hashlib.sha256(content).hexdigest())
    with pytest.raises(InputError) as caught:
        cifar.load(data)
    assert str(caught.value).startswith(f"{path} does not contain the parameters of this ResNet-56")
    assert str(caught.value).endswith(f"; download it again from {resnet.WEIGHTS_URL}")
    assert not Path("attacked").exists()


def test_unreadable_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read .Is a directory.; download it again from https://"):
        resnet.load(tmp_path)


def without_digest(content: bytes) -> bytes:
    return safetensors.torch.save(safetensors.torch.load(content))


def reshaped(content: bytes) -> bytes:
    tensors = safetensors.torch.load(content)
    tensors["x"] = tensors["x"].reshape(10, 32)
    return safetensors.torch.save(tensors, metadata(content))


def in_half_precision(content: bytes) -> bytes:
    tensors = safetensors.torch.load(content)
    return safetensors.torch.save({**tensors, "x": tensors["x"].bfloat16()}, metadata(content))


def metadata(content: bytes) -> dict[str, str]:
    size = int.from_bytes(content[:8], "little")
    return dict(json.loads(content[8 : 8 + size])["__metadata__"])


def without_labels(content: bytes) -> bytes:
    return safetensors.torch.save({"x": safetensors.torch.load(content)["x"]}, {"sha256": "0"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (altered, "was altered: the sha256 of its content is "),
        (without_digest, "was altered: the sha256 of its content is "),
        (without_labels, "cannot be read"),
        (reshaped, "was altered"),
        (in_half_precision, "cannot be read"),
        (lambda content: content[:-1], "cannot be read"),
        (lambda content: b"", "cannot be read"),
        (lambda content: pickle.dumps(Malicious()), "cannot be read"),
    ],
)
def test_damaged_cache_is_refused(damage: Any, message: str, data: Path, tmp_path: Path) -> None:
    cifar.load(data)
    path = cached(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError) as caught:
        cifar.load(data)
    assert str(caught.value).startswith(f"{path} {message}")
    assert str(caught.value).endswith("; delete it, and it is computed again")


def test_features_of_other_weights_are_not_used(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar.load(data)
    monkeypatch.setattr(resnet, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(InputError, match="was altered"):
        cifar.load(data)


def test_unwritable_cache_is_reported_before_the_extraction(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "extract", None)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InputError) as caught:
        cifar.load(data)
    assert str(caught.value).startswith(f"{cached(tmp_path)} cannot be written (")
    assert str(caught.value).endswith("; name a folder for it with XDG_CACHE_HOME")


# The published files

CGD_DATA = Path(os.environ.get("CGD_DATA") or os.devnull)
PUBLISHED = CGD_DATA / "cifar10" / cifar.ARCHIVE, CGD_DATA / "weights" / resnet.WEIGHTS_FILE


@pytest.mark.slow
@pytest.mark.skipif(
    not all(path.is_file() for path in PUBLISHED), reason="CIFAR-10 and the weights of ResNet-56 are not in CGD_DATA"
)
def test_features_of_published_images() -> None:
    archive, weights = PUBLISHED
    images, labels = cifar.read_archive(archive)
    assert images.shape == (60_000, 3, 32, 32)
    assert labels[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    assert labels[50_000:50_008].tolist() == [3, 8, 8, 0, 6, 6, 1, 6]
    assert labels[:50_000].bincount().tolist() == [5000] * 10
    features = resnet.load(weights)(images[:8])
    torch.testing.assert_close(features[:, :4], torch.tensor(EXPECTED), rtol=1e-3, atol=1e-3)


EXPECTED = [  # the first four features of the first eight training images
    [4.3436, 0.7285, 0.8794, 0.9081],
    [1.1964, 2.7543, 2.7235, 1.2923],
    [0.0840, 0.8711, 4.1672, 0.2125],
    [2.1233, 0.3467, 4.4742, 0.2365],
    [0.8715, 3.4201, 1.7429, 0.9363],
    [2.0368, 2.5881, 2.9988, 0.9534],
    [4.7174, 0.3855, 1.9737, 2.0879],
    [0.1292, 2.5337, 6.4929, 1.4355],
]
