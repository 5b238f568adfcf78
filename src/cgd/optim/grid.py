"""The grid of participants, m = m^h × m^v (paper, section 6): rows of samples times columns of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Data = npt.NDArray[Any] | torch.Tensor


class Cell(NamedTuple):
    """A participant's place in the grid. Its text, such as "r0c2", serves as the name of a peer."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"r{self.row}c{self.column}"


@dataclass(frozen=True)
class Block:
    """One participant's data: its row of samples, its column of features, and the labels of the row."""

    cell: Cell
    x: Any
    y: Any

    @property
    def samples(self) -> int:
        """n_l, the number of samples."""
        return len(self.y)


@dataclass(frozen=True)
class Grid:
    """`rows` groups of samples times `columns` groups of features, one participant for each pair.

    Layers 2…N are summed over everyone. The first layer is summed within a column group, whose members hold the same
    features; the members of a row hold the same samples.

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
        """The cells that hold the same samples as `cell`, itself included."""
        self._check(cell)
        return tuple(Cell(cell.row, column) for column in range(self.columns))

    def column_peers(self, cell: Cell) -> tuple[Cell, ...]:
        """The cells that hold the same features as `cell`, itself included."""
        self._check(cell)
        return tuple(Cell(row, cell.column) for row in range(self.rows))

    def split(
        self,
        x: Data,
        y: Data,
        *,
        seed: int | None = 0,
        row_shares: Sequence[float] | None = None,
        column_shares: Sequence[float] | None = None,
    ) -> dict[Cell, Block]:
        """Cut data into one block for each cell.

        Samples are shuffled; features keep their order. Without shares, the sizes differ by at most one.

        Args:
            x: samples × features (with one column of participants, any further dimensions).
            y: one label for each sample.
            seed: for the shuffling; None leaves the samples in order.
            row_shares: how the samples are shared out among the rows, in any unit: (3, 1, 1) gives the first row 60 %.
            column_shares: the same for the features.

        Raises:
            InputError: the sizes do not fit, or somebody would be left with nothing.
        """
        for data in (x, y):
            if not isinstance(data, (np.ndarray, torch.Tensor)):
                raise InputError(f"the data is a {type(data).__name__}; pass numpy arrays or torch tensors")
        if len(x) != len(y):
            raise InputError(f"there are {len(x)} samples and {len(y)} labels; they must be as many")
        if self.columns > 1 and x.ndim != 2:
            raise InputError(f"x has shape {tuple(x.shape)}; {self.columns} columns need samples × features")
        order = np.arange(len(x)) if seed is None else np.random.default_rng(seed).permutation(len(x))
        rows = np.split(order, _cuts(len(x), self.rows, row_shares, "samples")[1:-1])
        cuts = _cuts(x.shape[1], self.columns, column_shares, "features") if self.columns > 1 else []
        blocks = {}
        for row, chosen in enumerate(rows):
            own, labels = _chosen(x, chosen), _chosen(y, chosen)
            for column in range(self.columns):
                cell = Cell(row, column)
                part = own if self.columns == 1 else own[:, cuts[column] : cuts[column + 1]]
                blocks[cell] = Block(cell, part, labels)
        return blocks

    def _check(self, cell: Cell) -> None:
        if not (0 <= cell.row < self.rows and 0 <= cell.column < self.columns):
            raise InputError(f"{cell} is not in a grid of {self.rows} × {self.columns}")


def _chosen(data: Data, chosen: npt.NDArray[Any]) -> Data:
    return data[chosen] if isinstance(data, np.ndarray) else data[torch.from_numpy(chosen)]


def _cuts(count: int, parts: int, shares: Sequence[float] | None, of_what: str) -> list[int]:
    """Where to cut `count` things into `parts`: the first is 0, the last is `count`."""
    if shares is None:
        short, longer = divmod(count, parts)
        sizes = [short + (i < longer) for i in range(parts)]
    else:
        if len(shares) != parts or not all(0 < share < float("inf") for share in shares):
            raise InputError(f"the shares of {of_what} are {list(shares)}; there must be {parts}, all positive")
        ends = np.rint(np.cumsum(shares) / np.sum(shares) * count).astype(int)
        sizes = np.diff(ends, prepend=0).tolist()
    if min(sizes) < 1:
        raise InputError(f"{count} {of_what} do not suffice for {parts} parts of these shares; each needs at least one")
    return [0, *np.cumsum(sizes).tolist()]
