"""The data sets that come with scikit-learn, ready to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

HELD_OUT = 0.25


@dataclass(frozen=True)
class Dataset:
    """A classification task as it comes, with a part held out."""

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
        """The number of classes."""
        return int(self.y.max()) + 1


def load(name: str, seed: int) -> Dataset:
    """Load a data set by name; the seed decides which samples are held out.

    Examples:
        >>> load("breast-cancer", seed=0).x.shape
        torch.Size([427, 30])
    """
    from sklearn import datasets as embedded

    loaders: dict[str, Callable[..., tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = {
        "breast-cancer": embedded.load_breast_cancer,
        "digits": embedded.load_digits,
    }
    if name not in loaders:
        raise InputError(f"there is no data set {name!r}; choose one of {', '.join(loaders)}")
    arrays = loaders[name](return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(arrays[0]))
    held_out, training = np.split(order, [round(HELD_OUT * len(order))])
    x, y = torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]).long()
    return Dataset(name, x[training], y[training], x[held_out], y[held_out])
