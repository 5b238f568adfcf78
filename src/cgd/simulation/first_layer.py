"""Layer 1 of networks that share its pre-activations (one column, or `joint`): layouts of samples, compiled products.

Samples are divided into *blocks*, whose activations fit into a core's cache. If most features are not zero, products
are those of a library. Otherwise zeros are skipped: for the forward pass, a sample is a list of its features that are
not zero; for the gradient, a feature is a list of the samples of a block that have it. So in both directions many rows
are read and few are written.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cgd.simulation.vectors import add_matrix, add_products, compiled

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Integers = npt.NDArray[np.int64]

BLOCK_FLOATS = 1 << 17
"""Activations of a block: half a megabyte."""
MIN_BLOCK_SAMPLES = 64
MIN_DENSE_FRACTION = 0.4
"""Of the features, not zero: then a library's products are faster, although they include the zeros."""


class SparseRows(NamedTuple):
    """Rows of a matrix without their zeros: offset of each row, indices of columns, values (CSR)."""

    offsets: Integers
    indices: npt.NDArray[np.int32]
    values: Floats

    @classmethod
    def of(cls, matrix: Floats) -> SparseRows:
        """Return the rows of a matrix."""
        nonzero = matrix != 0  # NaN counts as not zero, so that it reaches the loss
        offsets = np.concatenate([[0], np.cumsum(nonzero.sum(axis=1))])
        return cls(offsets, np.nonzero(nonzero)[1].astype(np.int32), np.ascontiguousarray(matrix[nonzero]))


class BlockedSamples(NamedTuple):
    """All samples, in blocks.

    Attributes:
        offsets: first sample of each block, then the number of samples.
        dense: all samples with all features; none if zeros are skipped.
        rows: the samples; none if `dense` has them.
        columns: the features of each block, block after block, with indices of samples within the block.
    """

    offsets: Integers
    dense: Floats
    rows: SparseRows
    columns: SparseRows

    @classmethod
    def of(cls, x: Floats, ends: list[Integers], width: int) -> BlockedSamples:
        """Divide samples into blocks for a layer of this width.

        Args:
            x: samples × features.
            ends: increasing bounds of parts of the samples; no block contains samples of two parts.
            width: number of outputs of the layer.
        """
        size = max(MIN_BLOCK_SAMPLES, BLOCK_FLOATS // width)
        starts = [np.arange(start, end, size) for part in ends for start, end in itertools.pairwise(part)]
        offsets = np.concatenate([*starts, [len(x)]])
        if np.count_nonzero(x) >= MIN_DENSE_FRACTION * x.size:
            empty = SparseRows.of(np.empty((0, 0), np.float32))
            return cls(offsets, np.ascontiguousarray(x), empty, empty)
        blocks = [SparseRows.of(x[a:b].T) for a, b in itertools.pairwise(offsets)]
        *before, total = itertools.accumulate((len(each.values) for each in blocks), initial=0)
        columns = SparseRows(
            np.concatenate([*(each.offsets[:-1] + n for each, n in zip(blocks, before, strict=True)), [total]]),
            np.concatenate([each.indices for each in blocks]),
            np.concatenate([each.values for each in blocks]),
        )
        return cls(offsets, np.empty((0, x.shape[1]), np.float32), SparseRows.of(x), columns)


@compiled
def add_products_of_samples(start, end, samples, weights, out):
    """Add the products of the samples `start` to `end` with weights (features × width) to the first rows of `out`."""
    if len(samples.dense):
        add_matrix(np.dot(samples.dense[start:end], weights), out)
        return
    offsets, indices, values = samples.rows
    for s in range(start, end):
        add_products(out[s - start], indices, values, offsets[s], offsets[s + 1], weights, 0)


@compiled
def add_gradient_of_block(samples, block, back, sums):
    """Add the gradient of the weights (features × width) over a block; `back` has those of the pre-activations."""
    start, end = samples.offsets[block], samples.offsets[block + 1]
    if len(samples.dense):
        add_matrix(np.dot(samples.dense[start:end].T, back[: end - start]), sums)
        return
    offsets, indices, values = samples.columns
    first = block * len(sums)
    for f in range(len(sums)):
        add_products(sums[f], indices, values, offsets[first + f], offsets[first + f + 1], back, 0)
