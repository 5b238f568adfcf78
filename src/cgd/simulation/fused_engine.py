"""The fast engine: fully-connected networks in single precision, by the compiled kernels.

In the paper's notation, with the displacement D: x·(w₁ˡ + D) = x·w₁ˡ + x·D, and the first term never changes. In
`joint`, and with one column, it is computed once for all samples, so a step costs the same for any number of
participants. In `towers` each participant has few features, so its first layer is computed in every step.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  matrix products of the kernels: only a loaded library can be limited
import torch
from threadpoolctl import ThreadpoolController
from torch import nn

from cgd.errors import InputError
from cgd.optim.grid import Cell
from cgd.simulation import kernels, vectors
from cgd.simulation.first_layer import BlockedSamples, SparseRows, add_products_of_samples
from cgd.simulation.population import as_labels
from cgd.simulation.vectors import draw_normals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from cgd.simulation.population import Participants

    Floats = npt.NDArray[np.float32]

SHARDS = 16
"""Parts of the samples that are summed separately; the same on every machine, because the last bits depend on it."""

ACTIVATIONS = {
    nn.Identity: vectors.IDENTITY,
    nn.ReLU: vectors.RELU,
    nn.Tanh: vectors.TANH,
    nn.Sigmoid: vectors.SIGMOID,
}


def kernel_loss(loss: Callable[..., Any]) -> int | None:
    """Return the kernels' constant for cross-entropy or mean squared error, function or module; None for others."""
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    has_defaults = all(getattr(loss, name, value) == value for name, value in defaults.items())
    if loss is nn.functional.cross_entropy or (type(loss) is nn.CrossEntropyLoss and has_defaults):
        return kernels.CROSS_ENTROPY
    if loss is nn.functional.mse_loss or (type(loss) is nn.MSELoss and has_defaults):
        return kernels.SQUARED_ERROR
    return None


@dataclass(frozen=True)
class Network:
    """A stack of fully-connected layers, as the kernels need it.

    Attributes:
        widths: number of outputs of each layer.
        first_bias: True if layer 1 has a bias.
        biased: for each of layers 2…N, True if it has a bias.
        activation: the kernels' constant for the activation.
    """

    widths: tuple[int, ...]
    first_bias: bool
    biased: tuple[bool, ...]
    activation: int

    @classmethod
    def from_model(cls, model: nn.Module) -> Network | None:
        """Return the description of a fully-connected network; None if the model is anything else."""
        if type(model) is not nn.Sequential or model.training is False:
            return None
        if any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in model.modules()):
            return None
        linear = [each for each in list(model)[::2] if type(each) is nn.Linear]
        kinds = {ACTIVATIONS.get(type(each)) for each in list(model)[1::2]} or {vectors.IDENTITY}
        activation = kinds.pop()
        if 2 * len(linear) - 1 != len(set(model)) or len(linear) != len(set(linear)) or kinds or activation is None:
            return None
        if not all(each.requires_grad and each.dtype == torch.float32 for each in model.parameters()):
            return None
        biased = tuple(each.bias is not None for each in linear)
        return cls(tuple(each.out_features for each in linear), biased[0], biased[1:], activation)


@dataclass
class _Chunk:
    """Rows of the grid, and the origins of their participants if they fit in memory."""

    rows: range
    origins: tuple[Floats, Floats] | None = None


class FusedEngine:
    """Computes gradient sums of fully-connected networks.

    Args:
        participants: simulated participants.
        network: their network, from `Network.from_model`.
        loss: constant of the loss, from `kernel_loss`.
        memory: most bytes for origins in memory; the others are drawn again in every step.
    """

    name = "fused"

    def __init__(self, participants: Participants, network: Network, loss: int, memory: float) -> None:
        self._participants, self._network, self._loss = participants, network, loss
        self._towers = participants.mode == "towers" and participants.grid.columns > 1
        x = _all_samples(participants)
        self._column_offsets = np.cumsum(
            [0, *(participants.blocks[Cell(0, c)].x.shape[1] for c in range(participants.grid.columns))]
        )
        self._features = x.shape[1]
        self._weight, *self._bias = participants.first_layer
        expected = participants.layout.columns[0][self._weight][1][1]
        if participants.grid.columns == 1 and expected != self._features:
            raise InputError(
                f"the model takes {expected} features and the samples have {self._features}; build it for all of them"
            )
        self._targets = _targets(participants, network.widths[-1], self._loss)
        self._row_offsets = np.cumsum([0, *participants.samples])
        self._net = (
            np.array(network.widths),
            np.array([*network.biased, False]),  # never empty, so that numba can infer its type
            network.activation,
            self._loss,
        )
        self._head_size = _head_size(network)
        self._chunks = list(self._split_rows(memory))
        shards = [self._shards(chunk) for chunk in self._chunks]
        self._samples = SparseRows.of(x) if self._towers else BlockedSamples.of(x, shards, network.widths[0])
        self._origin_z = np.zeros((0, 0) if self._towers else (len(x), network.widths[0]), np.float32)
        self._step = 0
        for chunk in () if participants.fresh_origins else self._chunks:
            origins = self._draw_origins(chunk.rows, all_layers=True)
            limit = memory if len(self._chunks) == 1 else memory * 3 / 4  # leaves a quarter for a chunk that is drawn
            if self._cached_bytes + sum(each.nbytes for each in origins) <= limit:
                chunk.origins = origins

    @property
    def summation_order(self) -> str:
        """The order in which gradients are added: it depends on the number of chunks, and so on the memory limit."""
        chunks = f" in {len(self._chunks)} chunks" if len(self._chunks) > 1 else ""
        return f"{type(self).__name__}{chunks}"

    @property
    def _cached_bytes(self) -> int:
        return sum(each.nbytes for chunk in self._chunks if chunk.origins for each in chunk.origins)

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the gradient of the mean loss over all samples with respect to the displacement, and that loss.

        Shared layers are averaged over the columns, as by the weights of the optimiser.
        """
        first, first_bias, head = self._unpack(displacement.numpy())
        kernel = kernels.towers_gradient if self._towers else kernels.joint_gradient
        totals, loss = [np.zeros_like(each, dtype=np.float64) for each in (first, first_bias, head)], 0.0
        with kernel_threads() as pool:
            for chunk in self._chunks:
                firsts, heads = self._origins_of(chunk)
                shared = (
                    self._row_offsets,
                    self._column_offsets,
                    self._samples,
                    self._targets,
                    firsts if self._towers else self._origin_z,
                )
                arguments = (*shared, first, first_bias, heads, chunk.rows.start, head, self._net)
                ends = self._shards(chunk)
                run = partial(_run, kernel, arguments)
                for *parts, part_loss in pool.map(run, ends[:-1], ends[1:]):
                    loss += part_loss
                    with np.errstate(
                        invalid="ignore"
                    ):  # a diverging run: its loss is not finite, which the loop checks
                        for total, part in zip(totals, parts, strict=True):
                            total += part
        samples, columns = self._participants.total_samples, self._participants.grid.columns
        # In `joint` the losses of all columns depend on layer 1, and the objective is their mean.
        first_weight = samples if self._towers else samples * columns
        self._step += 1
        gradient = self._pack(totals[0] / first_weight, totals[1] / first_weight, totals[2] / (samples * columns))
        return torch.from_numpy(gradient), loss / (samples * columns)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps if it decides the origins; otherwise a step changes the displacement only."""
        return {"step": self._step} if self._participants.fresh_origins else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._step = state.get("step", 0)

    def _origins_of(self, chunk: _Chunk) -> tuple[Floats, Floats]:
        """Return the origins of a chunk in this step, stored or drawn."""
        if self._participants.fresh_origins:
            return self._draw_origins(chunk.rows, all_layers=True)
        return chunk.origins or self._draw_origins(chunk.rows, all_layers=self._towers)

    def _split_rows(self, memory: float) -> Iterator[_Chunk]:
        """Split the rows into chunks; if not all origins fit in memory, a chunk's origins take a quarter of it."""
        grid = self._participants.grid
        per_row = 4 * grid.columns * self._head_size
        if self._towers:
            per_row += 4 * self._network.widths[0] * (self._features + grid.columns * self._network.first_bias)
        chunk_rows = grid.rows if per_row * grid.rows <= memory else max(1, int(memory / 4 / max(per_row, 1)))
        for start in range(0, grid.rows, chunk_rows):
            yield _Chunk(range(start, min(start + chunk_rows, grid.rows)))

    def _shards(self, chunk: _Chunk) -> npt.NDArray[np.int64]:
        """Return the bounds of the parts of a chunk's samples that are summed separately."""
        start, end = self._row_offsets[chunk.rows.start], self._row_offsets[chunk.rows.stop]
        return np.linspace(start, end, min(SHARDS, end - start) + 1).astype(np.int64)

    def _draw_origins(self, rows: range, *, all_layers: bool) -> tuple[Floats, Floats]:
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
                self._draw_origin(Cell(row, column), first if all_layers else None, head)
            if all_layers and not self._towers:
                start, end = self._row_offsets[row], self._row_offsets[row + 1]
                self._origin_z[start:end] = first[self._features :].sum(axis=0)
                weights = first[: self._features]
                add_products_of_samples(start, end, self._samples, weights, self._origin_z[start:end])

        with kernel_threads() as pool:
            list(pool.map(draw_row, range(len(rows))))
        return firsts, heads

    def _draw_origin(self, cell: Cell, first: Floats | None, head: Floats) -> None:
        """Draw a participant's start + origin into `head` and, if given, into its part of the row's `first` layer."""
        origin, start = self._participants.training_origin(cell, self._step), self._participants.starts[cell.column]
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

    def _pack(self, first: npt.NDArray[Any], bias: npt.NDArray[Any], head: npt.NDArray[Any]) -> Floats:
        """Return gradients in the kernels' layout as one flat vector, in the layout of the displacement."""
        layout = self._participants.layout
        flat = np.empty(layout.size, np.float32)
        for column in range(self._participants.grid.columns):
            views = layout.columns[column]
            flat[views[self._weight][0]] = first[self._column_slice(column)].T.reshape(-1)
            if self._network.first_bias:
                flat[views[self._bias[0]][0]] = bias[column]
        flat[layout.size - self._head_size :] = head
        return flat


@contextmanager
def kernel_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool whose threads run kernels in parallel; each matrix product uses one thread, for the same bits."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, _libraries().limit(limits=1, user_api="blas"):
        yield pool


@cache
def _libraries() -> ThreadpoolController:
    """Find the loaded libraries once: a search takes as long as a step of a small simulation."""
    return ThreadpoolController()


def _run(kernel: Callable[..., Any], arguments: tuple[Any, ...], start: int, end: int) -> Any:
    return kernel(start, end, *arguments)


def _head_size(network: Network) -> int:
    sizes = zip(network.widths, network.widths[1:], network.biased, strict=False)
    return sum(inputs * outputs + biased * outputs for inputs, outputs, biased in sizes)


def _all_samples(participants: Participants) -> Floats:
    """Return all samples with all features, row by row."""
    blocks, grid = participants.blocks, participants.grid
    rows = [
        np.concatenate([np.asarray(blocks[Cell(row, column)].x, np.float32) for column in range(grid.columns)], axis=1)
        for row in range(grid.rows)
    ]
    return np.concatenate(rows)


def _targets(participants: Participants, outputs: int, loss: int) -> Floats:
    """Return the target outputs of all samples; raise InputError if the labels do not fit the loss and the outputs."""
    blocks, grid = participants.blocks, participants.grid
    y = torch.cat([as_labels(blocks[Cell(row, 0)].y, torch.float32) for row in range(grid.rows)])
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
