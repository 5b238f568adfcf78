"""The grid of participants, m = m^h × m^v (paper, section 6): rows of samples times columns of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from cgd.errors import InputError
from cgd.optim.option_checks import check_number, check_whole
from cgd.optim.skew import Skew

if TYPE_CHECKING:
    import numpy.typing as npt

    Data = npt.NDArray[Any] | torch.Tensor


class Cell(NamedTuple):
    """A participant's position in the grid. Its text, such as "r0c2", is used as a member's name."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"r{self.row}c{self.column}"


@dataclass(frozen=True)
class Block:
    """One participant's data: the features of its column for the samples of its row, and the labels of the row."""

    cell: Cell
    x: Any
    y: Any

    @property
    def samples(self) -> int:
        """The number of samples, n_l."""
        return len(self.y)


@dataclass(frozen=True)
class Grid:
    """`rows` groups of samples times `columns` groups of features, one participant for each pair.

    The gradients of layers 2…N are summed over all members, those of the first layer over a column, whose members hold
    the same features. The members of a row hold the same samples.

    Examples:
        >>> import numpy as np
        >>> grid = Grid(rows=3, columns=2)
        >>> blocks = grid.split(np.arange(40.0).reshape(10, 4), np.arange(10), seed=1)
        >>> [block.x.shape for block in blocks.values()]
        [(4, 2), (4, 2), (3, 2), (3, 2), (3, 2), (3, 2)]
        >>> [str(cell) for cell in grid.column_peers(Cell(0, 1))]
        ['r0c1', 'r1c1', 'r2c1']
    """

    rows: int
    columns: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise InputError(f"a grid of {self.rows} × {self.columns} has no cell; both must be at least 1")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, row by row."""
        return tuple(Cell(row, column) for row in range(self.rows) for column in range(self.columns))

    def row_peers(self, cell: Cell) -> tuple[Cell, ...]:
        """Return the cells that hold the same samples as `cell`, including `cell`."""
        self._check(cell)
        return tuple(Cell(cell.row, column) for column in range(self.columns))

    def column_peers(self, cell: Cell) -> tuple[Cell, ...]:
        """Return the cells that hold the same features as `cell`, including `cell`."""
        self._check(cell)
        return tuple(Cell(row, cell.column) for row in range(self.rows))

    def split(
        self,
        x: Data,
        y: Data,
        *,
        seed: int | None = 0,
        row_shares: Sequence[float] | None = None,
        skew: Skew | None = None,
        column_shares: Sequence[float] | None = None,
    ) -> dict[Cell, Block]:
        """Split data into one block for each cell.

        Samples are shuffled; features keep their order. Without shares and skew, the sizes differ by at most one.

        Args:
            x: samples × features (with one column of participants, any further dimensions).
            y: one label for each sample.
            seed: the seed for shuffling; None keeps the order of the samples.
            row_shares: the relative sizes of the rows: (3, 1, 1) gives the first row 60 % of the samples.
            skew: how classes are divided among the rows; None for rows with about the same mix of classes.
            column_shares: the relative sizes of the columns, in features.

        Raises:
            InputError: the sizes do not fit, or a block would be empty.
        """
        for data in (x, y):
            if not isinstance(data, (np.ndarray, torch.Tensor)):
                raise InputError(f"the data is a {type(data).__name__}; pass numpy arrays or torch tensors")
        if len(x) != len(y):
            raise InputError(f"there are {len(x)} samples and {len(y)} labels; there must be one label for each sample")
        if self.columns > 1 and x.ndim != 2:
            raise InputError(f"x has shape {tuple(x.shape)}; {self.columns} columns need samples × features")
        rows = self._divide_samples(y, seed, row_shares, skew)
        edges = _boundaries(x.shape[1], self.columns, column_shares, "features") if self.columns > 1 else []
        blocks = {}
        for row, indices in enumerate(rows):
            samples, labels = _take(x, indices), _take(y, indices)
            for column in range(self.columns):
                cell = Cell(row, column)
                features = samples if self.columns == 1 else samples[:, edges[column] : edges[column + 1]]
                blocks[cell] = Block(cell, features, labels)
        return blocks

    def _divide_samples(
        self, y: Data, seed: int | None, shares: Sequence[float] | None, skew: Skew | None
    ) -> list[npt.NDArray[Any]]:
        """Return the numbers of the samples of each row."""
        if seed is not None:
            check_whole("seed", seed)
        if skew is not None:
            if not isinstance(skew, Skew):
                raise InputError(f"skew is {skew!r}; pass cgd.Skew(classes=…) or cgd.Skew(dirichlet=…)")
            if seed is None or shares is not None:
                raise InputError(
                    f"there is a skew, the seed is {seed} and the shares of samples are {shares}; a skew needs a seed, "
                    "and determines the sizes of the rows: leave row_shares out"
                )
            return skew.divide(y, self.rows, seed)
        order = np.arange(len(y)) if seed is None else np.random.default_rng(seed).permutation(len(y))
        return np.split(order, _boundaries(len(y), self.rows, shares, "samples")[1:-1])

    def _check(self, cell: Cell) -> None:
        if not (0 <= cell.row < self.rows and 0 <= cell.column < self.columns):
            raise InputError(f"{cell} is not in a grid of {self.rows} × {self.columns}")


def _take(data: Data, indices: npt.NDArray[Any]) -> Data:
    return data[indices] if isinstance(data, np.ndarray) else data[torch.from_numpy(indices)]


def _boundaries(count: int, parts: int, shares: Any, items: str) -> list[int]:
    """Return the boundaries of `parts` consecutive parts of `count` items, from 0 to `count`."""
    if shares is None:
        size, remainder = divmod(count, parts)
        sizes = [size + (i < remainder) for i in range(parts)]
    else:
        if not isinstance(shares, (Sequence, np.ndarray)) or isinstance(shares, str):
            raise InputError(f"the shares of {items} are {shares!r}; they must be {parts} numbers, such as (3, 2, 1)")
        if len(shares) != parts or not all(check_number(f"a share of {items}", share) > 0 for share in shares):
            raise InputError(f"the shares of {items} are {list(shares)}; there must be {parts}, all positive")
        ends = np.rint(np.cumsum(shares) / np.sum(shares) * count).astype(int)
        sizes = np.diff(ends, prepend=0).tolist()
    if min(sizes) < 1:
        raise InputError(f"{count} {items} are too few for {parts} parts of these shares; each part needs at least one")
    return [0, *np.cumsum(sizes).tolist()]
