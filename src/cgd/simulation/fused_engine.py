"""The fast engine: colonies of fully-connected networks in single precision, by the compiled kernels.

What makes it cheap (paper's notation, D the displacement): x·(w₁ˡ + D) = x·w₁ˡ + x·D, and the first part never changes.
With added pre-activations it is computed once for all samples, whatever the number of participants; in `towers` every
participant's own features are so few that its first layer is put together on the fly.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from cgd.errors import InputError
from cgd.optim.grid import Cell
from cgd.simulation import kernels, vectors
from cgd.simulation.normals import draw as draw_normals
from cgd.simulation.population import as_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from cgd.simulation.population import Participants

    Floats = npt.NDArray[np.float32]

SHARDS = 16
ACTIVATIONS = {
    nn.Identity: vectors.IDENTITY,
    nn.ReLU: vectors.RELU,
    nn.Tanh: vectors.TANH,
    nn.Sigmoid: vectors.SIGMOID,
}


def known_loss(loss: Callable[..., Any]) -> int | None:
    """The kernels' name for a loss: cross-entropy or mean squared error, as function or as module; else None."""
    plain = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    as_usual = all(getattr(loss, name, value) == value for name, value in plain.items())
    if loss is nn.functional.cross_entropy or (type(loss) is nn.CrossEntropyLoss and as_usual):
        return kernels.CROSS_ENTROPY
    if loss is nn.functional.mse_loss or (type(loss) is nn.MSELoss and as_usual):
        return kernels.SQUARED_ERROR
    return None


@dataclass(frozen=True)
class Network:
    """A stack of fully-connected layers as the kernels want it."""

    widths: tuple[int, ...]
    first_bias: bool
    biased: tuple[bool, ...]
    activation: int

    @classmethod
    def of(cls, model: nn.Module) -> Network | None:
        """None if the model is anything else."""
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
    """Some rows of the grid with what their participants keep of their origins, if there is room for it."""

    rows: range
    origins: tuple[Floats, Floats] | None = None


class FusedEngine:
    """Gradient sums of a colony of fully-connected networks.

    Args:
        participants: the colony.
        network: its networks, as `Network.of` sees them.
        loss: as `known_loss` calls it.
        memory: how many bytes origins may take; the rest is drawn again in every step.
    """

    name = "fused"

    def __init__(self, participants: Participants, network: Network, loss: int, memory: float) -> None:
        self._participants, self._network, self._loss = participants, network, loss
        self._towers = participants.mode == "towers" and participants.grid.columns > 1
        x = _rows(participants)
        self._cuts = np.cumsum(
            [0, *(participants.blocks[Cell(0, c)].x.shape[1] for c in range(participants.grid.columns))]
        )
        self._features = x.shape[1]
        self._weight, *self._bias = participants.first
        wanted = participants.layout.columns[0][self._weight][1][1]
        if participants.grid.columns == 1 and wanted != self._features:
            raise InputError(f"the model takes {wanted} features and the samples have {self._features}")
        self._data = _compressed(x)
        self._targets = _targets(participants, network.widths[-1], self._loss)
        self._row_cuts = np.cumsum([0, *participants.samples])
        self._net = (
            np.array(network.widths),
            np.array([*network.biased, False]),  # never empty: numba wants to know its type
            network.activation,
            self._loss,
        )
        self._head_size = _head_size(network)
        self._chunks = list(self._cut(memory))
        fixed = (0, 0) if self._towers else (len(x), network.widths[0])
        self._fixed = np.zeros(fixed, np.float32)
        for chunk in self._chunks:
            origins = self._origins(chunk.rows, all_layers=True)
            room = memory if len(self._chunks) == 1 else memory * 3 / 4  # the rest is for a chunk that is drawn
            if self._bytes_kept + sum(each.nbytes for each in origins) <= room:
                chunk.origins = origins

    @property
    def order(self) -> str:
        """In which order gradients are added: chunk by chunk, if the memory asks for several."""
        chunks = f" in {len(self._chunks)} chunks" if len(self._chunks) > 1 else ""
        return f"{type(self).__name__}{chunks}"

    @property
    def _bytes_kept(self) -> int:
        return sum(each.nbytes for chunk in self._chunks if chunk.origins for each in chunk.origins)

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The gradient of the mean loss over all samples with respect to the displacement, and that loss.

        Layers that are summed over everyone are averaged over the columns, as by the weights of the optimiser.
        """
        first, first_bias, head = self._unpack(displacement.numpy())
        kernel = kernels.towers_gradient if self._towers else kernels.joint_gradient
        totals, loss = [np.zeros_like(each, dtype=np.float64) for each in (first, first_bias, head)], 0.0
        # The kernels' matrix products are one thread's work each: the threads are the pool's.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool, threadpool_limits(1, "blas"):
            for chunk in self._chunks:
                firsts, heads = chunk.origins or self._origins(chunk.rows, all_layers=self._towers)
                shared = (
                    self._row_cuts,
                    self._cuts,
                    self._data,
                    self._targets,
                    firsts if self._towers else self._fixed,
                )
                arguments = (*shared, first, first_bias, heads, chunk.rows.start, head, self._net)
                start, end = self._row_cuts[chunk.rows.start], self._row_cuts[chunk.rows.stop]
                # As many shards on every machine: the order of additions, and so the last bits, depend on them.
                ends = np.linspace(start, end, min(SHARDS, end - start) + 1).astype(int)
                run = partial(_run, kernel, arguments)
                for *parts, part_loss in pool.map(run, ends[:-1], ends[1:]):
                    loss += part_loss
                    with np.errstate(invalid="ignore"):  # a run that diverges: the loss will tell
                        for total, part in zip(totals, parts, strict=True):
                            total += part
        samples, columns = self._participants.total_samples, self._participants.grid.columns
        # In `joint` all columns' losses depend on layer 1, and their mean is what everybody descends.
        first_weight = samples if self._towers else samples * columns
        gradient = self._pack(totals[0] / first_weight, totals[1] / first_weight, totals[2] / (samples * columns))
        return torch.from_numpy(gradient), loss / (samples * columns)

    def state(self) -> dict[str, Any]:
        """What changes from step to step besides the displacement: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""

    def _cut(self, memory: float) -> Iterator[_Chunk]:
        """Chunks of rows whose origins take a part of the memory each, so that one can be drawn beside those kept."""
        grid = self._participants.grid
        per_row = 4 * grid.columns * self._head_size
        if self._towers:
            per_row += 4 * self._network.widths[0] * (self._features + grid.columns * self._network.first_bias)
        many = grid.rows if per_row * grid.rows <= memory else max(1, int(memory / 4 / max(per_row, 1)))
        for start in range(0, grid.rows, many):
            yield _Chunk(range(start, min(start + many, grid.rows)))

    def _origins(self, rows: range, *, all_layers: bool) -> tuple[Floats, Floats]:
        """Draw the origins of some rows: those of layer 1 (in `towers`) and of the heads.

        With all layers, what layer 1 makes of the samples goes to `_fixed`.
        """
        grid, width = self._participants.grid, self._network.widths[0]
        deep = self._features + grid.columns * self._network.first_bias
        heads = np.empty((len(rows) * grid.columns, self._head_size), np.float32)
        firsts = np.empty((len(rows) if self._towers else 0, deep, width), np.float32)

        def draw(place: int) -> None:
            row = rows[place]
            own = firsts[place] if self._towers else np.empty((deep, width), np.float32)
            for column in range(grid.columns):
                head = heads[place * grid.columns + column]
                self._draw(Cell(row, column), own if all_layers else None, head)
            if all_layers and not self._towers:
                begin, end = self._row_cuts[row], self._row_cuts[row + 1]
                self._fixed[begin:end] = own[self._features :].sum(axis=0)
                kernels.first_layer(begin, end, self._data, own, self._fixed)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw, range(len(rows))))
        return firsts, heads

    def _draw(self, cell: Cell, first: Floats | None, head: Floats) -> None:
        """Draw one participant's origin: its part of the row's first layer, if that is wanted, and its head."""
        origin = self._participants.origin(cell)
        at = 0
        for name, shape in origin.shapes.items():
            count = math.prod(shape)
            if name not in self._participants.first:
                draw_normals(origin.key(name), origin.delta, head[at : at + count])
                at += count
            elif first is not None:
                numbers = np.empty(count, np.float32)
                draw_normals(origin.key(name), origin.delta, numbers)
                if name == self._weight:
                    first[self._cuts[cell.column] : self._cuts[cell.column + 1]] = numbers.reshape(shape).T
                else:
                    first[self._features + cell.column] = numbers

    def _unpack(self, flat: Floats) -> tuple[Floats, Floats, Floats]:
        """The displacement as the kernels want it: layer 1 by features, its biases by columns, and the heads."""
        layout, width = self._participants.layout, self._network.widths[0]
        columns = self._participants.grid.columns
        first = np.empty((self._features, width), np.float32)
        bias = np.empty((columns if self._network.first_bias else 0, width), np.float32)
        for column in range(columns):
            views = layout.columns[column]
            first[self._cuts[column] : self._cuts[column + 1]] = flat[views[self._weight][0]].reshape(width, -1).T
            if self._network.first_bias:
                bias[column] = flat[views[self._bias[0]][0]]
        return first, bias, flat[len(flat) - self._head_size :]

    def _pack(self, first: npt.NDArray[Any], bias: npt.NDArray[Any], head: npt.NDArray[Any]) -> Floats:
        layout = self._participants.layout
        flat = np.empty(layout.size, np.float32)
        for column in range(self._participants.grid.columns):
            views = layout.columns[column]
            flat[views[self._weight][0]] = first[self._cuts[column] : self._cuts[column + 1]].T.reshape(-1)
            if self._network.first_bias:
                flat[views[self._bias[0]][0]] = bias[column]
        flat[layout.size - self._head_size :] = head
        return flat


def _run(kernel: Callable[..., Any], arguments: tuple[Any, ...], start: int, end: int) -> Any:
    return kernel(start, end, *arguments)


def _head_size(network: Network) -> int:
    sizes = zip(network.widths, network.widths[1:], network.biased, strict=False)
    return sum(wide_in * wide_out + biased * wide_out for wide_in, wide_out, biased in sizes)


def _rows(participants: Participants) -> Floats:
    """All samples with all features, row after row."""
    blocks, grid = participants.blocks, participants.grid
    rows = [
        np.concatenate([np.asarray(blocks[Cell(row, column)].x, np.float32) for column in range(grid.columns)], axis=1)
        for row in range(grid.rows)
    ]
    return np.concatenate(rows)


def _compressed(x: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], Floats]:
    """Where each sample begins, its features that are not zero, and their values."""
    used = x != 0  # NaN counts as not zero and will show
    begins = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    return begins, np.nonzero(used)[1].astype(np.int32), x[used]


def _targets(participants: Participants, outputs: int, loss: int) -> Floats:
    blocks, grid = participants.blocks, participants.grid
    y = torch.cat([as_labels(blocks[Cell(row, 0)].y, torch.float32) for row in range(grid.rows)])
    if loss == kernels.CROSS_ENTROPY and not y.is_floating_point():
        if not 0 <= int(y.min()) <= int(y.max()) < outputs:
            raise InputError(
                f"the labels go from {int(y.min())} to {int(y.max())} and the model has {outputs} outputs; "
                "number the classes from 0, and give the model an output for each"
            )
        y = nn.functional.one_hot(y, outputs).float()
    if loss == kernels.CROSS_ENTROPY and y.ndim == 1:
        raise InputError("the labels are floats; classes are whole numbers, as y.long() makes them")
    if y.shape != (len(y), outputs):
        raise InputError(
            f"the labels have shape {tuple(y.shape)} and the outputs {(len(y), outputs)}; reshape the labels"
        )
    if loss == kernels.CROSS_ENTROPY and not torch.allclose(y.sum(dim=1), torch.ones(len(y)), atol=1e-4):
        raise InputError(
            "the labels of a sample are probabilities, and they do not sum to one; engine='modules' takes any"
        )
    targets: Floats = y.float().contiguous().numpy()
    return targets
