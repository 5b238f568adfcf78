"""Data sets by name: bundled with scikit-learn, in MNIST's file format, features of CIFAR-10, and two large tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import InputError
from cgd.experiments import cifar, idx, organisations

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

HELD_OUT_FRACTION = 0.25
VALIDATION_FRACTION = 1 / 6
BUNDLED = ("breast-cancer", "diabetes", "digits", "iris", "wine")
NAMES = (*BUNDLED, *idx.SOURCES, cifar.NAME, *organisations.LARGE)


@dataclass(frozen=True)
class Dataset:
    """Training samples and held-out samples, unscaled.

    Attributes:
        name: name of the data set.
        x: training samples.
        y: labels: classes (whole numbers) or regression targets (floats).
        held_out_x: held-out samples.
        held_out_y: labels of the held-out samples.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    held_out_x: torch.Tensor
    held_out_y: torch.Tensor

    @property
    def features(self) -> int:
        """The number of features."""
        return self.x.shape[1]

    @property
    def classes(self) -> int:
        """The number of classes; 0 for regression."""
        # Counts the held-out labels too: the first few training samples may miss a class.
        return 0 if self.y.is_floating_point() else int(torch.cat((self.y, self.held_out_y)).max()) + 1

    def scaled(self) -> Dataset:
        """Return the data in single precision.

        Bytes are divided by 255. Features in double precision, and targets, are standardised. Features in single
        precision are those of a network, and stay as they are.
        """
        if self.x.dtype == torch.uint8:
            x, held_out = self.x.float() / 255, self.held_out_x.float() / 255
        elif self.x.dtype == torch.float32:
            x, held_out = self.x, self.held_out_x
        else:
            mean, deviation = _moments(self.x)
            x, held_out = (((each - mean) / deviation).float() for each in (self.x, self.held_out_x))
        y, held_out_y = self.y, self.held_out_y
        if y.is_floating_point():
            mean, deviation = _moments(y)
            y, held_out_y = (((each - mean) / deviation).float().reshape(-1, 1) for each in (y, held_out_y))
        return Dataset(self.name, x, y, held_out, held_out_y)

    def first(self, samples: int) -> Dataset:
        """Return the data with only the first `samples` training samples.

        Raises:
            InputError: there are fewer.
        """
        if not 1 <= samples <= len(self.x):
            raise InputError(
                f"samples is {samples}; {self.name} has {len(self.x)} training samples, choose from 1 to {len(self.x)}"
            )
        return Dataset(self.name, self.x[:samples], self.y[:samples], self.held_out_x, self.held_out_y)

    def validation(self) -> Dataset:
        """Return the training samples alone, with the last sixth of them as the held-out part.

        Raises:
            InputError: there are fewer than two.
        """
        training = len(self.x) - max(1, round(VALIDATION_FRACTION * len(self.x)))
        if not training:
            raise InputError(f"{self.name} has one training sample, and none is left to train on; use more samples")
        return Dataset(self.name, self.x[:training], self.y[:training], self.x[training:], self.y[training:])


def load(name: str, seed: int = 0, data_dir: Path | None = None) -> Dataset:
    """Load a data set by name.

    Args:
        name: one of NAMES.
        seed: seed of the split into training and held-out samples, if the data set has no fixed split.
        data_dir: folder to search first for files.

    Raises:
        InputError: the name is unknown, the files are not found or damaged, or the seed is negative.

    Examples:
        >>> load("breast-cancer", seed=0).x.shape
        torch.Size([427, 30])
    """
    if name in idx.SOURCES:
        x, y, held_out_x, held_out_y = (torch.from_numpy(each.copy()) for each in idx.load(name, data_dir).values())
        return Dataset(name, x.flatten(1), y.long(), held_out_x.flatten(1), held_out_y.long())
    if name == cifar.NAME:
        return Dataset(name, *cifar.load(data_dir))
    if name in organisations.LARGE:
        return Dataset(name, *(torch.from_numpy(each) for each in organisations.encode(name, data_dir)))
    if name not in BUNDLED:
        raise InputError(f"there is no data set {name!r}; choose one of {', '.join(NAMES)}")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be at least 0")
    return hold_out(name, *read_bundled(name), seed)


@cache
def read_bundled(name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Read features and labels of a data set of scikit-learn once; callers copy what they change."""
    from sklearn import datasets as bundled

    x, y = getattr(bundled, f"load_{name.replace('-', '_')}")(return_X_y=True)
    return x, y


def hold_out(name: str, x: npt.NDArray[Any], y: npt.NDArray[Any], seed: int) -> Dataset:
    """Hold out a quarter of the samples, chosen by the seed; labels are floats or whole numbers."""
    order = np.random.default_rng(seed).permutation(len(x))
    held_out, training = np.split(order, [round(HELD_OUT_FRACTION * len(order))])
    samples = torch.from_numpy(x)
    labels = torch.from_numpy(y) if y.dtype.kind == "f" else torch.from_numpy(y).long()
    return Dataset(name, samples[training], labels[training], samples[held_out], labels[held_out])


def _moments(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of every column; for a constant column, the constant and 1."""
    # The computed deviation of a constant may differ from 0, because its mean is rounded.
    constant = values.amax(dim=0) == values.amin(dim=0)
    mean = torch.where(constant, values[0], values.mean(dim=0))
    return mean, torch.where(constant, 1.0, values.std(dim=0, correction=0))
