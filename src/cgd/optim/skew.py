"""Label-skewed divisions of samples among rows: participants that do not have the same mix of classes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]

MAX_SETTING = 10**9
"""The largest value of a setting: α as large as this mixes classes evenly."""


@dataclass(frozen=True)
class Skew:
    """How classes are divided among the rows of a grid; exactly one of the two ways.

    Attributes:
        classes: each row has this number of classes. A class is held by a number of rows in proportion to its size,
            and its samples are divided evenly among these. Known as pathological, or as label quantity skew.
        dirichlet: α of the symmetric Dirichlet distribution from which the rows' shares of each class are drawn: about
            0.1 for rows that have few classes, 100 for rows that are almost alike. The rows have different sizes. A row
            without a sample takes one from the row that has the most.

    Examples:
        >>> labels = np.repeat([0, 1, 2], 20)
        >>> [np.unique(labels[row]).tolist() for row in Skew(classes=2).divide(labels, rows=3, seed=0)]
        [[1, 2], [0, 2], [0, 1]]
        >>> [len(row) for row in Skew(dirichlet=0.1).divide(labels, rows=4, seed=0)]
        [11, 16, 1, 32]
    """

    classes: int | None = None
    dirichlet: float | None = None

    def __post_init__(self) -> None:
        if (self.classes is None) == (self.dirichlet is None):
            raise InputError(
                f"classes is {self.classes} and dirichlet is {self.dirichlet}; a skew has exactly one of them, such as "
                "classes = 2 or dirichlet = 0.1"
            )
        if self.classes is not None and (type(self.classes) is not int or not 1 <= self.classes <= MAX_SETTING):
            raise InputError(f"classes is {self.classes!r}; it must be a whole number from 1 to {MAX_SETTING}")
        if self.dirichlet is not None:
            is_number = isinstance(self.dirichlet, (int, float)) and not isinstance(self.dirichlet, bool)
            if not is_number or not 0 < self.dirichlet <= MAX_SETTING:
                raise InputError(f"dirichlet is {self.dirichlet!r}; it must be a number above 0, at most {MAX_SETTING}")
            object.__setattr__(self, "dirichlet", float(self.dirichlet))  # equal skews have equal texts

    def as_json(self) -> dict[str, Any]:
        """Return the setting as plain data."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def divide(self, labels: Any, rows: int, seed: int) -> list[Indices]:
        """Divide samples among rows, each sample to one row, and at least one to each row.

        Args:
            labels: the class of each sample, as an array or a tensor.
            rows: number of rows.
            seed: seed of the division.

        Returns:
            The numbers of the samples of each row.

        Raises:
            InputError: the labels are not classes, or there are too few of them or of samples.
        """
        labels = labels.numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
        if labels.ndim != 1 or labels.dtype.kind == "f":
            raise InputError(
                f"the labels have the type {labels.dtype} and the shape {labels.shape}; a skew divides classes, one "
                "whole number for each sample: leave the skew out for numbers to predict"
            )
        if rows > len(labels):
            raise InputError(f"{len(labels)} samples are too few for {rows} rows; each row needs at least one")
        random = np.random.default_rng(seed)
        order = random.permutation(len(labels))
        _, classes = np.unique(labels[order], return_inverse=True)
        members = [order[classes == each] for each in range(classes.max() + 1)]
        if self.dirichlet is not None:
            return _divide_by_shares(members, rows, self.dirichlet, random)
        count: Any = self.classes  # one of both is set
        return _divide_by_count(members, rows, count, random)


def _divide_by_count(members: list[Indices], rows: int, count: int, random: np.random.Generator) -> list[Indices]:
    """Give each row `count` classes, and divide the samples of a class evenly among its rows."""
    remaining = _parts(np.array([len(each) for each in members]), rows, count)
    holders: list[list[int]] = [[] for _ in members]
    for row in random.permutation(rows).tolist():
        # To take the classes with the most remaining parts leaves enough different ones for the other rows.
        ties = random.permutation(len(members))
        for each in ties[np.argsort(-remaining[ties], kind="stable")][:count].tolist():
            holders[each].append(row)
            remaining[each] -= 1
    divided: list[list[Indices]] = [[] for _ in range(rows)]
    for samples, own_rows in zip(members, holders, strict=True):
        for row, part in zip(own_rows, np.array_split(samples, len(own_rows)), strict=True):
            divided[row].append(part)
    return [np.concatenate(parts) for parts in divided]


def _parts(sizes: Indices, rows: int, count: int) -> Indices:
    """Return the number of rows that hold each class, in proportion to the sizes of the classes.

    Raises:
        InputError: the rows cannot have this number of classes each.
    """
    if count > len(sizes):
        raise InputError(f"each row is to have {count} classes and there are {len(sizes)}; set fewer classes")
    if rows * count < len(sizes):
        raise InputError(
            f"{rows} rows of {count} classes each hold at most {rows * count} of {len(sizes)} classes; set more rows "
            "or more classes"
        )
    most = np.minimum(sizes, rows)
    if most.sum() < rows * count:
        raise InputError(
            f"{rows} rows of {count} classes each need {rows * count} parts of classes, and the samples suffice for "
            f"{most.sum()}; set fewer rows or fewer classes, or use more samples"
        )
    parts = np.ones_like(sizes)
    for _ in range(rows * count - len(sizes)):  # the next part to the class whose parts are the largest
        parts[np.argmax(np.where(parts < most, sizes / parts, 0.0))] += 1
    return parts


def _divide_by_shares(members: list[Indices], rows: int, alpha: float, random: np.random.Generator) -> list[Indices]:
    """Divide each class by shares drawn from a Dirichlet distribution."""
    divided: list[list[Indices]] = [[] for _ in range(rows)]
    for samples in members:
        ends = np.rint(np.cumsum(random.dirichlet(np.full(rows, alpha))) * len(samples)).astype(int)
        for row, part in enumerate(np.split(samples, ends[:-1])):
            divided[row].append(part)
    found = [np.concatenate(parts) for parts in divided]
    for row in range(rows):
        if not len(found[row]):
            largest = max(range(rows), key=lambda each: len(found[each]))
            moved = random.integers(len(found[largest]))
            found[row] = found[largest][moved : moved + 1]
            found[largest] = np.delete(found[largest], moved)
    return found
