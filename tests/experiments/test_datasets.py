from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import datasets as bundled

from cgd import InputError
from cgd.experiments import datasets, idx
from cgd.experiments.datasets import Dataset

SHAPES = {  # samples, features, classes
    "breast-cancer": (569, 30, 2),
    "diabetes": (442, 10, 0),
    "digits": (1797, 64, 10),
    "iris": (150, 4, 3),
    "wine": (178, 13, 3),
}


def sorted_samples(x: object, y: object) -> list[tuple[float, ...]]:
    """Return samples with their labels, sorted."""
    return sorted(map(tuple, np.column_stack([np.asarray(x, float), np.asarray(y, float)]).tolist()))


def make_dataset(x: torch.Tensor, held_out: torch.Tensor, y: torch.Tensor | None = None) -> Dataset:
    labels = torch.arange(len(x)) % 2 if y is None else y
    return Dataset("test", x, labels, held_out, labels[: len(held_out)])


def columns(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).T.contiguous()


# Loading


def test_names_include_the_data_sets_bundled_with_scikit_learn() -> None:
    assert set(datasets.BUNDLED) == set(SHAPES)
    assert set(datasets.NAMES) == {*SHAPES, "mnist", "fashion-mnist", "cifar10-features", "adult", "credit-default"}


@pytest.mark.parametrize("name", SHAPES)
def test_bundled_data_sets_have_a_held_out_part(name: str) -> None:
    samples, features, classes = SHAPES[name]
    data = datasets.load(name)
    held_out = round(samples / 4)
    assert data.x.shape == (samples - held_out, features)
    assert data.held_out_x.shape == (held_out, features)
    assert data.y.shape == (samples - held_out,)
    assert data.held_out_y.shape == (held_out,)
    assert (data.name, data.features, data.classes) == (name, features, classes)
    assert data.y.dtype == data.held_out_y.dtype == (torch.int64 if classes else torch.float64)
    if classes:
        assert data.y.unique().tolist() == list(range(classes))


@pytest.mark.parametrize("name", SHAPES)
def test_every_sample_is_in_exactly_one_part_with_its_label(name: str) -> None:
    data = datasets.load(name, seed=5)
    x, y = getattr(bundled, f"load_{name.replace('-', '_')}")(return_X_y=True)
    parts = torch.cat([data.x, data.held_out_x]), torch.cat([data.y, data.held_out_y])
    assert sorted_samples(*parts) == sorted_samples(x, y)


@pytest.mark.parametrize("name", SHAPES)
def test_seed_determines_the_held_out_samples(name: str) -> None:
    one, same, other = (datasets.load(name, seed) for seed in (1, 1, 2))
    for part in ("x", "y", "held_out_x", "held_out_y"):
        assert torch.equal(getattr(one, part), getattr(same, part))
    assert sorted_samples(one.held_out_x, one.held_out_y) != sorted_samples(other.held_out_x, other.held_out_y)


def test_load_lists_the_names_if_the_name_is_unknown() -> None:
    with pytest.raises(InputError, match="there is no data set 'mnits'; choose one of") as caught:
        datasets.load("mnits")
    assert all(name in str(caught.value) for name in (*SHAPES, "mnist", "fashion-mnist"))


def test_load_rejects_a_negative_seed() -> None:
    with pytest.raises(InputError, match="seed is -1; it must be at least 0"):
        datasets.load("iris", seed=-1)


def test_load_converts_idx_files_to_samples_and_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        "train-images": np.arange(24, dtype=np.uint8).reshape(4, 3, 2),
        "train-labels": np.array([0, 1, 2, 3], np.uint8),
        "test-images": np.arange(200, 212, dtype=np.uint8).reshape(2, 3, 2),
        "test-labels": np.array([3, 1], np.uint8),
    }
    digests = {}
    (tmp_path / "mnist").mkdir()
    for file, array in arrays.items():
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        content = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
        (tmp_path / "mnist" / f"{file}.gz").write_bytes(gzip.compress(content))
        digests[file] = hashlib.md5(content).hexdigest()
    monkeypatch.setitem(idx.SOURCES, "mnist", idx.DownloadSource("mnist", ("mnist",), (), digests))
    one, other = (datasets.load("mnist", seed, tmp_path) for seed in (0, 1))
    assert torch.equal(one.x, torch.arange(24, dtype=torch.uint8).reshape(4, 6))
    assert torch.equal(one.held_out_x, torch.arange(200, 212, dtype=torch.uint8).reshape(2, 6))
    assert one.y.tolist() == [0, 1, 2, 3]
    assert one.held_out_y.tolist() == [3, 1]
    assert one.y.dtype == torch.int64
    assert (one.features, one.classes) == (6, 4)
    assert torch.equal(one.held_out_x, other.held_out_x)  # the published split does not depend on the seed


MNIST_FILES = tuple(idx.SOURCES["mnist"].md5)


def mnist_available() -> bool:
    given = Path(os.environ.get("CGD_DATA") or os.devnull)
    paths = (
        folder / f"{file}{suffix}"
        for folder in (given, given / "mnist")
        for file in MNIST_FILES
        for suffix in ("", ".gz")
    )
    return sum(path.is_file() for path in paths) >= len(MNIST_FILES)


@pytest.mark.skipif(not mnist_available(), reason="the files of MNIST are not in CGD_DATA")
def test_load_mnist() -> None:
    data = datasets.load("mnist")
    assert data.x.shape == (60000, 784)
    assert data.held_out_x.shape == (10000, 784)
    assert data.x.dtype == torch.uint8
    assert (data.features, data.classes) == (784, 10)
    assert data.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.held_out_y[:5].tolist() == [7, 2, 1, 0, 4]
    scaled = data.scaled()
    assert (float(scaled.x.min()), float(scaled.x.max())) == (0.0, 1.0)
    assert float(scaled.x.double().mean()) == pytest.approx(0.1307, abs=1e-4)  # the commonly used mean


DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir(), reason="the Debian package dataset-fashion-mnist is not installed"
)
def test_load_fashion_mnist_of_debian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CGD_DATA", "XDG_DATA_DIRS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = datasets.load("fashion-mnist")
    assert (data.x.shape, data.held_out_x.shape) == ((60000, 784), (10000, 784))
    assert data.y[:5].tolist() == [9, 0, 0, 3, 0]
    assert data.held_out_y[:5].tolist() == [9, 2, 1, 1, 6]
    assert float(data.scaled().x.double().mean()) == pytest.approx(0.2860, abs=1e-4)  # the commonly used mean
    assert list(tmp_path.iterdir()) == []  # nothing was downloaded


# Scaling


def test_scaled_divides_bytes_by_255() -> None:
    all_bytes = torch.arange(256, dtype=torch.uint8).reshape(-1, 1)
    data = make_dataset(all_bytes, all_bytes.flip(0)).scaled()
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x, torch.arange(256.0).reshape(-1, 1) / 255)
    assert torch.equal(data.held_out_x, data.x.flip(0))


def test_scaled_keeps_the_features_of_a_network() -> None:
    """Statistics of all records would not be covered by the privacy of a run."""
    x = torch.tensor([[3.5, 0.0], [1e6, -2.0]])
    scaled = make_dataset(x, x[:1]).scaled()
    assert torch.equal(scaled.x, x)
    assert torch.equal(scaled.held_out_x, x[:1])


@given(st.lists(st.tuples(*3 * [st.integers(-(2**20), 2**20)]), min_size=2, max_size=30), st.integers(-20, 20))
def test_scaled_standardises_other_features(rows: list[tuple[int, ...]], exponent: int) -> None:
    x = torch.tensor(rows, dtype=torch.float64) * 2.0**exponent
    scaled = make_dataset(x, x).scaled()
    assert scaled.x.dtype == torch.float32
    for column, before in zip(scaled.x.double().T, x.T, strict=True):
        # Rounding to single precision changes a value by at most 2^-24 of itself, so mean and deviation by no more than
        # 2^-24. Errors of the double precision before are negligible.
        assert abs(float(column.mean())) < 2**-23
        deviation = float(column.std(correction=0))
        assert deviation == (0 if bool((before == before[0]).all()) else pytest.approx(1, abs=2**-23))
        assert torch.equal(column.argsort(stable=True), before.argsort(stable=True))


@pytest.mark.parametrize("name", SHAPES)
def test_bundled_data_sets_are_standardised(name: str) -> None:
    data = datasets.load(name).scaled()
    assert data.x.dtype == data.held_out_x.dtype == torch.float32
    moments = data.x.double().mean(dim=0), data.x.double().std(dim=0, correction=0)
    constant = (data.x == data.x[0]).all(dim=0)
    assert bool(constant.any()) == (name == "digits")  # some pixels at the border are always zero
    assert float(moments[0].abs().max()) < 2**-23
    assert float((moments[1] - (~constant).double()).abs().max()) < 2**-23
    assert bool(data.held_out_x.isfinite().all())


def test_scale_depends_on_the_training_part_only() -> None:
    x, held_out = columns([1, 2, 3, 6], [10, -10, 30, 50]), columns([2, 4], [0, 1])
    one, far = make_dataset(x, held_out).scaled(), make_dataset(x, held_out + 1e6).scaled()
    assert torch.equal(one.x, far.x)
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    assert torch.equal(far.held_out_x, ((held_out + 1e6 - mean) / deviation).float())
    assert abs(float(far.held_out_x.mean())) > 1e4  # the held-out part is not standardised by its own moments


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, -1e9 / 3])
@pytest.mark.parametrize("samples", [1, 3, 7, 100])
def test_scaled_sets_a_constant_feature_to_zero(value: float, samples: int) -> None:
    """The computed mean of three times 0.1 is not 0.1, so the computed deviation is not 0."""
    x = torch.full((samples, 1), value, dtype=torch.float64)
    scaled = make_dataset(x, torch.tensor([[value], [value + 2]], dtype=torch.float64)).scaled()
    assert scaled.x.tolist() == [[0.0]] * samples
    assert scaled.held_out_x[0].item() == 0
    assert scaled.held_out_x[1].item() == pytest.approx(2)


def test_scaled_standardises_regression_targets() -> None:
    data = datasets.load("diabetes")
    scaled = data.scaled()
    assert scaled.y.shape == (len(data.x), 1)
    assert scaled.held_out_y.shape == (len(data.held_out_x), 1)
    assert scaled.y.dtype == scaled.held_out_y.dtype == torch.float32
    assert abs(float(scaled.y.double().mean())) < 2**-23
    assert float(scaled.y.double().std(correction=0)) == pytest.approx(1, abs=2**-23)
    deviation = data.y.std(correction=0)
    assert torch.equal(scaled.held_out_y[:, 0], ((data.held_out_y - data.y.mean()) / deviation).float())
    assert scaled.classes == 0


def test_scaled_sets_constant_targets_to_zero() -> None:
    y = torch.full((3,), 0.1, dtype=torch.float64)
    assert make_dataset(columns([1, 2, 3]), columns([4]), y).scaled().y.tolist() == [[0.0]] * 3


def test_scaled_keeps_classes_and_the_original() -> None:
    data = datasets.load("wine")
    before = data.x.clone()
    scaled = data.scaled()
    assert torch.equal(scaled.y, data.y)
    assert torch.equal(scaled.held_out_y, data.held_out_y)
    assert torch.equal(data.x, before)
    assert scaled.name == "wine"


# The first samples


def test_first_keeps_the_held_out_part() -> None:
    data = datasets.load("iris")
    for samples in (1, 40, len(data.x)):
        some = data.first(samples)
        assert torch.equal(some.x, data.x[:samples])
        assert torch.equal(some.y, data.y[:samples])
        assert torch.equal(some.held_out_x, data.held_out_x)
        assert torch.equal(some.held_out_y, data.held_out_y)
        assert some.name == "iris"


@pytest.mark.parametrize("samples", [0, -1, 113])
def test_first_rejects_other_numbers_of_samples(samples: int) -> None:
    with pytest.raises(InputError, match=f"samples is {samples}; iris has 112 training samples, choose from 1 to 112"):
        datasets.load("iris").first(samples)


def test_classes_include_those_that_the_first_samples_miss() -> None:
    """A model without an output for such a class would fail on the held-out samples."""
    data = datasets.load("iris").first(1)
    assert data.y.numel() == 1
    assert data.classes == 3


# The validation part


@pytest.mark.parametrize(("samples", "training"), [(112, 93), (6, 5), (3, 2), (2, 1)])
def test_validation_part_is_the_last_sixth_of_the_training_samples(samples: int, training: int) -> None:
    data = datasets.load("iris").first(samples)
    split = data.validation()
    assert torch.equal(split.x, data.x[:training])
    assert torch.equal(split.y, data.y[:training])
    assert torch.equal(split.held_out_x, data.x[training:])
    assert torch.equal(split.held_out_y, data.y[training:])


def test_validation_needs_two_samples() -> None:
    with pytest.raises(InputError, match="iris has one training sample, and none is left to train on; use more"):
        datasets.load("iris").first(1).validation()
