from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgd import Cell, Grid, InputError


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 20), st.integers(0, 6), st.integers(0, 100))
def test_blocks_partition_the_data(rows: int, columns: int, more: int, wider: int, seed: int) -> None:
    n, d = rows + more, columns + wider
    x = np.arange(n * d).reshape(n, d)
    y = np.arange(n)
    grid = Grid(rows, columns)
    blocks = grid.split(x, y, seed=seed)
    assert list(blocks) == list(grid.cells)
    reassembled = np.vstack(
        [np.hstack([blocks[Cell(row, column)].x for column in range(columns)]) for row in range(rows)]
    )
    labels = np.concatenate([blocks[Cell(row, 0)].y for row in range(rows)])
    assert np.array_equal(reassembled, x[labels])
    assert sorted(labels) == list(range(n))
    sizes = [blocks[Cell(row, 0)].samples for row in range(rows)]
    assert max(sizes) - min(sizes) <= 1
    for row in range(rows):  # the members of a row hold the same samples
        assert all(np.array_equal(blocks[Cell(row, 0)].y, blocks[cell].y) for cell in grid.row_peers(Cell(row, 0)))


def test_seed_determines_the_order() -> None:
    x, y = np.arange(20).reshape(10, 2), np.arange(10)
    first, same, other = (Grid(2).split(x, y, seed=seed)[Cell(0, 0)].y for seed in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    assert np.array_equal(Grid(2).split(x, y, seed=None)[Cell(0, 0)].y, np.arange(5))


def test_split_with_uneven_shares() -> None:
    x, y = np.zeros((100, 10)), np.zeros(100)
    blocks = Grid(3, 2).split(x, y, row_shares=(6, 3, 1), column_shares=(0.7, 0.3))
    assert [block.x.shape for block in blocks.values()] == [(60, 7), (60, 3), (30, 7), (30, 3), (10, 7), (10, 3)]


def test_split_of_tensors_with_more_dimensions() -> None:
    images, labels = torch.arange(60.0).reshape(5, 3, 2, 2), torch.arange(5)
    blocks = Grid(2).split(images, labels)
    assert blocks[Cell(0, 0)].x.shape == (3, 3, 2, 2)
    assert torch.equal(blocks[Cell(1, 0)].x, images[blocks[Cell(1, 0)].y])


def test_row_and_column_peers() -> None:
    grid = Grid(3, 2)
    assert grid.row_peers(Cell(1, 0)) == (Cell(1, 0), Cell(1, 1))
    assert grid.column_peers(Cell(1, 0)) == (Cell(0, 0), Cell(1, 0), Cell(2, 0))
    assert [str(cell) for cell in grid.cells] == ["r0c0", "r0c1", "r1c0", "r1c1", "r2c0", "r2c1"]
    with pytest.raises(InputError, match="r3c0 is not in a grid of 3 × 2"):
        grid.row_peers(Cell(3, 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Grid(0), "has no cell"),
        (lambda: Grid(3).split(np.zeros((2, 1)), np.zeros(2)), "2 samples are too few for 3 parts"),
        (lambda: Grid(1, 3).split(np.zeros((2, 2)), np.zeros(2)), "2 features are too few"),
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(2)), "3 samples and 2 labels"),
        (lambda: Grid(1, 2).split(np.zeros((3, 2, 2)), np.zeros(3)), "columns need samples × features"),
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(3), row_shares=(1, 2, 3)), "there must be 2"),
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(3), row_shares=(1, -2)), "all positive"),
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(3), row_shares=(1000, 1)), "are too few"),
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(3), row_shares=3), "the shares of samples are 3"),  # type: ignore[arg-type]
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(3), row_shares=(1, "2")), "a share of samples is '2'"),  # type: ignore[arg-type]
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(3), seed=-1), "seed is -1"),
        (lambda: Grid(2).split(np.zeros((3, 1)), np.zeros(3), skew=2), r"skew is 2; pass cgd.Skew\(classes=…\)"),  # type: ignore[arg-type]
    ],
)
def test_invalid_splits_are_rejected(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=message):
        call()
