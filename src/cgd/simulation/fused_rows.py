"""Rows of the grid on which the compiled kernels compute: their samples and origins, and the sums over their parts.

All samples are divided into *parts*, which are summed separately; their sums are added in order. The division depends
on the samples and on the memory limit only, so the bits are the same with any number of threads or workers. One machine
has all rows; a worker of a cluster has those of some consecutive parts.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  matrix products of the kernels: only a loaded library can be limited
import torch
from threadpoolctl import ThreadpoolController
from torch import nn

from cgd.errors import InputError
from cgd.optim.grid import Cell
from cgd.simulation import kernels
from cgd.simulation.first_layer import (
    MIN_DENSE_FRACTION,
    BlockedSamples,
    SparseRows,
    add_products_of_samples,
)
from cgd.simulation.population import as_labels
from cgd.simulation.vectors import draw_normals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from cgd.simulation.fused_engine import Network
    from cgd.simulation.population import Participants
    from cgd.simulation.ray_cluster import WorkerReport

    Floats = npt.NDArray[np.float32]
    Chunks = Sequence[Sequence["Part"]]
    Sums = tuple[Floats, Floats, Floats, float]

SHARDS = 16
"""Parts of a chunk, which are summed separately; the same on every machine, because the last bits depend on it."""


class Part(NamedTuple):
    """Consecutive samples that are summed separately.

    Attributes:
        rows: rows that have these samples; of the first and the last, perhaps not all.
        start: first sample, counted over all rows.
        end: one past the last sample.
    """

    rows: range
    start: int
    end: int


def divide(samples: Sequence[int], row_bytes: int, memory: float, *, whole_rows: bool) -> list[list[Part]]:
    """Divide the rows into chunks, and each chunk into parts.

    Args:
        samples: number of samples of each row.
        row_bytes: size of the origins of a row.
        memory: if not all origins fit into it, those of a chunk take a quarter of it.
        whole_rows: give a part all samples of its rows, as many rows to each.

    Examples:
        >>> [[(part.start, part.end) for part in chunk] for chunk in divide([3, 1], 8, memory=40, whole_rows=False)]
        [[(0, 1), (1, 2), (2, 3), (3, 4)]]
        >>> divide([3, 1], 8, memory=0, whole_rows=True)
        [[Part(rows=range(0, 1), start=0, end=3)], [Part(rows=range(1, 2), start=3, end=4)]]
    """
    rows, offsets = len(samples), np.cumsum([0, *samples])
    chunk_rows = rows if row_bytes * rows <= memory else max(1, int(memory / 4 / max(row_bytes, 1)))
    chunks = []
    for first in range(0, rows, chunk_rows):
        last = min(first + chunk_rows, rows)
        if whole_rows:
            ends = np.linspace(first, last, min(SHARDS, last - first) + 1).astype(np.int64)
            bounds = offsets[ends]
        else:
            bounds = np.linspace(offsets[first], offsets[last], min(SHARDS, offsets[last] - offsets[first]) + 1)
            bounds = bounds.astype(np.int64)
        starts = np.searchsorted(offsets, bounds[:-1], side="right") - 1
        stops = np.searchsorted(offsets, bounds[1:], side="left")
        found = zip(starts.tolist(), stops.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        chunks.append([Part(range(row, stop), start, end) for row, stop, start, end in found])
    return chunks


def rows_of(chunks: Chunks) -> range:
    """Return the rows that have samples of consecutive parts."""
    return range(chunks[0][0].rows.start, chunks[-1][-1].rows.stop)


@dataclass
class _Chunk:
    """Parts of a chunk, with samples counted from the first row here, and the origins if they fit in memory."""

    rows: range
    parts: list[Part]
    origins: tuple[Floats, Floats] | None = None


class FusedRows:
    """Computes the sums of consecutive parts.

    Args:
        participants: simulated participants; their data are not used.
        network: their network, from `Network.from_model`.
        loss: constant of the loss, from `kernel_loss`.
        memory: most bytes for origins in memory; the others are drawn again in every step.
        chunks: the parts, by chunks.
        samples: samples and targets of the rows of these parts, from `samples_of_rows`.
        dense: multiply the zeros of samples, too, see `multiplies_zeros`.
    """

    workers: tuple[WorkerReport, ...] = ()

    def __init__(
        self,
        participants: Participants,
        network: Network,
        loss: int,
        memory: float,
        chunks: Chunks,
        samples: tuple[Floats, Floats],
        *,
        dense: bool,
    ) -> None:
        self._participants, self._network, self._loss = participants, network, loss
        self._towers = is_towers(participants)
        x, self._targets = samples
        self._features = x.shape[1]
        self._weight, *self._bias = participants.first_layer
        widths = [views[self._weight][1][1] for views in participants.layout.columns]
        self._column_offsets = np.cumsum([0, *widths])
        self._rows = rows_of(chunks)
        before = sum(participants.samples[: self._rows.start])
        self._row_offsets = np.cumsum([0, *participants.samples[self._rows.start : self._rows.stop]])
        self._net = (
            np.array(network.widths),
            np.array([*network.biased, False]),  # never empty, so that numba can infer its type
            network.activation,
            self._loss,
        )
        self._head_size = head_size(network)
        self._chunks = [
            _Chunk(rows_of([parts]), [Part(each.rows, each.start - before, each.end - before) for each in parts])
            for parts in chunks
        ]
        if self._towers:
            self._samples: Any = SparseRows.of(x)
        else:
            bounds = [np.array([each.parts[0].start, *(part.end for part in each.parts)]) for each in self._chunks]
            self._samples = _blocked_samples(x, bounds, network.widths[0], dense=dense)
        self._origin_z = np.zeros((0, 0) if self._towers else (len(x), network.widths[0]), np.float32)
        for chunk in () if participants.fresh_origins else self._chunks:
            origins = self._draw_origins(chunk.rows, 0, all_layers=True)
            limit = memory if len(self._chunks) == 1 else memory * 3 / 4  # leaves a quarter for a chunk that is drawn
            if self._cached_bytes + sum(each.nbytes for each in origins) <= limit:
                chunk.origins = origins

    def running(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: sums can always be computed here."""
        return nullcontext()

    def part_sums(self, displacement: Floats, step: int) -> Iterator[Sums]:
        """Yield the gradient sums of the parts, in order: of layer 1, its biases, layers 2…N, and of the losses."""
        unpacked = self._unpack(displacement)
        with kernel_threads() as pool:
            for chunk in self._chunks:
                yield from pool.map(self._sum_of_part(chunk, unpacked, step), chunk.parts)

    def _sum_of_part(self, chunk: _Chunk, displacement: tuple[Floats, Floats, Floats], step: int) -> Any:
        """Return the function of a part of the chunk that computes its sums in this step."""
        firsts, heads = self._origins_of(chunk, step)
        first, first_bias, head = displacement
        shared = (
            self._row_offsets,
            self._column_offsets,
            self._samples,
            self._targets,
            firsts if self._towers else self._origin_z,
        )
        first_row = chunk.rows.start - self._rows.start
        arguments = (*shared, first, first_bias, heads, first_row, head, self._net)
        return partial(_run, kernels.towers_gradient if self._towers else kernels.joint_gradient, arguments)

    @property
    def _cached_bytes(self) -> int:
        return sum(each.nbytes for chunk in self._chunks if chunk.origins for each in chunk.origins)

    def _origins_of(self, chunk: _Chunk, step: int) -> tuple[Floats, Floats]:
        """Return the origins of a chunk in this step, stored or drawn."""
        if self._participants.fresh_origins:
            return self._draw_origins(chunk.rows, step, all_layers=True)
        return chunk.origins or self._draw_origins(chunk.rows, step, all_layers=self._towers)

    def _draw_origins(self, rows: range, step: int, *, all_layers: bool) -> tuple[Floats, Floats]:
        """Draw the origins of some rows: those of layer 1 (in `towers`) and of the heads.

        With `all_layers` and without towers, also compute the rows' part of `_origin_z`.
        """
        grid, width = self._participants.grid, self._network.widths[0]
        height = self._features + grid.columns * self._network.first_bias
        heads = np.empty((len(rows) * grid.columns, self._head_size), np.float32)
        firsts = np.empty((len(rows) if self._towers else 0, height, width), np.float32)

        def draw_row(index: int) -> None:
            row = rows[index]
            first = firsts[index] if self._towers else np.empty((height, width), np.float32)
            for column in range(grid.columns):
                head = heads[index * grid.columns + column]
                self._draw_origin(Cell(row, column), step, first if all_layers else None, head)
            if all_layers and not self._towers:
                here = row - self._rows.start
                start, end = self._row_offsets[here], self._row_offsets[here + 1]
                self._origin_z[start:end] = first[self._features :].sum(axis=0)
                weights = first[: self._features]
                add_products_of_samples(start, end, self._samples, weights, self._origin_z[start:end])

        with kernel_threads() as pool:
            list(pool.map(draw_row, range(len(rows))))
        return firsts, heads

    def _draw_origin(self, cell: Cell, step: int, first: Floats | None, head: Floats) -> None:
        """Draw a participant's start + origin into `head` and, if given, into its part of the row's `first` layer."""
        origin, start = self._participants.training_origin(cell, step), self._participants.starts[cell.column]
        offset = 0
        for name, shape in origin.shapes.items():
            count = math.prod(shape)
            if name not in self._participants.first_layer:
                numbers = head[offset : offset + count]
                offset += count
            elif first is not None:
                numbers = np.empty(count, np.float32)
            else:
                continue
            draw_normals(origin.key(name), origin.delta, numbers)
            if start:
                numbers += start[name].numpy().reshape(-1)
            if first is not None and name in self._participants.first_layer:
                if name == self._weight:
                    first[self._column_slice(cell.column)] = numbers.reshape(shape).T
                else:
                    first[self._features + cell.column] = numbers

    def _column_slice(self, column: int) -> slice:
        return slice(self._column_offsets[column], self._column_offsets[column + 1])

    def _unpack(self, flat: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the displacement in the kernels' layout: layer 1 by features, its biases by columns, and the head."""
        layout, width = self._participants.layout, self._network.widths[0]
        columns = self._participants.grid.columns
        first = np.empty((self._features, width), np.float32)
        bias = np.empty((columns if self._network.first_bias else 0, width), np.float32)
        for column in range(columns):
            views = layout.columns[column]
            first[self._column_slice(column)] = flat[views[self._weight][0]].reshape(width, -1).T
            if self._network.first_bias:
                bias[column] = flat[views[self._bias[0]][0]]
        return first, bias, flat[len(flat) - self._head_size :]


@contextmanager
def kernel_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool whose threads run kernels in parallel; each matrix product uses one thread, for the same bits."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, _libraries().limit(limits=1, user_api="blas"):
        yield pool


@cache
def _libraries() -> ThreadpoolController:
    """Find the loaded libraries once: a search takes as long as a step of a small simulation."""
    return ThreadpoolController()


def _run(kernel: Any, arguments: tuple[Any, ...], part: Part) -> Any:
    return kernel(part.start, part.end, *arguments)


def is_towers(participants: Participants) -> bool:
    """Return True if each participant has a network on its own features, of several columns."""
    return participants.mode == "towers" and participants.grid.columns > 1


def head_size(network: Network) -> int:
    """Return the number of parameters of layers 2…N."""
    sizes = zip(network.widths, network.widths[1:], network.biased, strict=False)
    return sum(inputs * outputs + biased * outputs for inputs, outputs, biased in sizes)


def _blocked_samples(x: Floats, bounds: list[npt.NDArray[np.int64]], width: int, *, dense: bool) -> BlockedSamples:
    """Return samples in blocks, laid out as `dense` says, because zeros of all rows decide it and not those of some."""
    if bounds[-1][-1] < len(x):  # the last row is continued by another worker: these samples are blocks of their own
        bounds = [*bounds, np.array([bounds[-1][-1], len(x)])]
    decided = multiplies_zeros(int(np.count_nonzero(x)), x.size)
    if dense and not decided:
        found = BlockedSamples.of(x, bounds, width)
        empty = SparseRows.of(np.empty((0, 0), np.float32))
        return found._replace(dense=np.ascontiguousarray(x), rows=empty, columns=empty)
    if decided and not dense:  # samples without features, which are in no part, reduce the fraction
        x = np.concatenate([x, np.zeros((int(len(x) / MIN_DENSE_FRACTION), x.shape[1]), np.float32)])
        bounds = [*bounds, np.array([bounds[-1][-1], len(x)])]
    return BlockedSamples.of(x, bounds, width)


def multiplies_zeros(nonzero: int, features: int) -> bool:
    """Return True if so many features are not zero that products with all features are faster."""
    return nonzero >= MIN_DENSE_FRACTION * features


def samples_of_rows(participants: Participants, network: Network, loss: int, rows: range) -> tuple[Floats, Floats]:
    """Return the samples of some rows with all features, row by row, and their target outputs.

    Raises:
        InputError: the samples do not fit the model, or the labels do not fit the loss and the outputs.
    """
    blocks, columns = participants.blocks, range(participants.grid.columns)
    x = np.concatenate(
        [
            np.concatenate([np.asarray(blocks[Cell(row, column)].x, np.float32) for column in columns], axis=1)
            for row in rows
        ]
    )
    expected = participants.layout.columns[0][participants.first_layer[0]][1][1]
    if len(columns) == 1 and expected != x.shape[1]:
        raise InputError(
            f"the model takes {expected} features and the samples have {x.shape[1]}; build it for all of them"
        )
    return x, _targets(participants, network.widths[-1], loss, rows)


def _targets(participants: Participants, outputs: int, loss: int, rows: range) -> Floats:
    """Return the target outputs of samples; raise InputError if the labels do not fit the loss and the outputs."""
    blocks = participants.blocks
    y = torch.cat([as_labels(blocks[Cell(row, 0)].y, torch.float32) for row in rows])
    if loss == kernels.CROSS_ENTROPY and not y.is_floating_point():
        if not 0 <= int(y.min()) <= int(y.max()) < outputs:
            raise InputError(
                f"the labels range from {int(y.min())} to {int(y.max())} and the model has {outputs} outputs; "
                "number the classes from 0, and give the model one output per class"
            )
        y = nn.functional.one_hot(y, outputs).float()
    if loss == kernels.CROSS_ENTROPY and y.ndim == 1:
        raise InputError(
            "the labels are floats; cross-entropy needs classes as whole numbers, convert them with y.long()"
        )
    if y.shape != (len(y), outputs):
        raise InputError(
            f"the labels have shape {tuple(y.shape)} and the outputs {(len(y), outputs)}; reshape the labels"
        )
    if loss == kernels.CROSS_ENTROPY and not torch.allclose(y.sum(dim=1), torch.ones(len(y)), atol=1e-4):
        raise InputError(
            "the labels of a sample are probabilities that do not sum to one; normalise them, or set engine='modules'"
        )
    targets: Floats = y.float().contiguous().numpy()
    return targets
