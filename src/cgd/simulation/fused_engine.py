"""The fast engine: fully-connected networks in single precision, by the compiled kernels.

In the paper's notation, with the displacement D: x·(w₁ˡ + D) = x·w₁ˡ + x·D, and the first term never changes. In
`joint`, and with one column, it is computed once for all samples, so a step costs the same for any number of
participants. In `towers` each participant has few features, so its first layer is computed in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from cgd.simulation import kernels, vectors
from cgd.simulation.fused_rows import (
    FusedRows,
    divide,
    head_size,
    is_towers,
    multiplies_zeros,
    rows_of,
    samples_of_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from cgd.simulation.fused_rows import Chunks, Floats, Part, Sums
    from cgd.simulation.population import Participants
    from cgd.simulation.ray_cluster import RayCluster, WorkerReport

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


class PartSums(Protocol):
    """Computes the sums of all parts: in this process, or on a cluster."""

    workers: tuple[WorkerReport, ...]

    def running(self) -> AbstractContextManager[object]:
        """Return the context in which sums can be computed."""

    def part_sums(self, displacement: Floats, step: int) -> Iterator[Sums]:
        """Yield the gradient sums of the parts, in order: of layer 1, its biases, layers 2…N, and of the losses."""


@dataclass(frozen=True)
class RowsFactory:
    """Creates rows of a simulation, from what a worker of a cluster receives.

    Attributes:
        participants: simulated participants; only `samples` uses their data.
        network: their network.
        loss: constant of the loss, from `kernel_loss`.
        memory: most bytes for origins in memory.
        dense: multiply the zeros of samples, too.
    """

    participants: Participants
    network: Network
    loss: int
    memory: float
    dense: bool

    def create(self, chunks: Chunks, samples: tuple[Floats, Floats]) -> FusedRows:
        """Return the rows that have these parts, with their samples and targets."""
        return FusedRows(self.participants, self.network, self.loss, self.memory, chunks, samples, dense=self.dense)

    def samples(self, rows: range) -> tuple[Floats, Floats]:
        """Return the samples and targets of some rows."""
        return samples_of_rows(self.participants, self.network, self.loss, rows)


class FusedEngine:
    """Computes gradient sums of fully-connected networks.

    Args:
        participants: simulated participants.
        network: their network, from `Network.from_model`.
        loss: constant of the loss, from `kernel_loss`.
        memory: most bytes for origins in memory; the others are drawn again in every step.
        cluster: Ray cluster whose workers compute the sums of the parts; None to compute them in this process.
    """

    name = "fused"

    def __init__(
        self, participants: Participants, network: Network, loss: int, memory: float, cluster: RayCluster | None = None
    ) -> None:
        self._participants, self._network = participants, network
        self._towers = is_towers(participants)
        self._weight, *self._bias = participants.first_layer
        self._head_size = head_size(network)
        columns = participants.grid.columns
        self._column_offsets = np.cumsum([0, *(views[self._weight][1][1] for views in participants.layout.columns)])
        self._features = int(self._column_offsets[-1])
        row_bytes = 4 * columns * self._head_size
        if self._towers:
            row_bytes += 4 * network.widths[0] * (self._features + columns * network.first_bias)
        self._chunks = self._divide(row_bytes, memory)
        self._step = 0
        if cluster is None:
            samples = samples_of_rows(participants, network, loss, range(participants.grid.rows))
            dense = multiplies_zeros(int(np.count_nonzero(samples[0])), samples[0].size)
            self._rows: PartSums = self._factory(loss, memory, dense=dense).create(self._chunks, samples)
        else:
            from cgd.simulation.ray_workers import RayWorkers

            counts = [(0, 0)]
            for chunk in self._chunks:  # all samples together may not fit into memory once more
                x, _ = samples_of_rows(participants, network, loss, rows_of([chunk]))
                counts.append((int(np.count_nonzero(x)), x.size))
            dense = multiplies_zeros(*map(sum, zip(*counts, strict=True)))
            self._rows = RayWorkers(cluster, self._factory(loss, memory, dense=dense), self._chunks)

    def _divide(self, row_bytes: int, memory: float) -> list[list[Part]]:
        return divide(self._participants.samples, row_bytes, memory, whole_rows=False)

    def _factory(self, loss: int, memory: float, *, dense: bool) -> RowsFactory:
        return RowsFactory(self._participants, self._network, loss, memory, dense)

    @property
    def summation_order(self) -> str:
        """The order in which gradients are added: it depends on the number of chunks, and so on the memory limit."""
        chunks = f" in {len(self._chunks)} chunks" if len(self._chunks) > 1 else ""
        return f"{type(self).__name__}{chunks}"

    def running(self) -> AbstractContextManager[object]:
        """Return the context in which sums can be computed."""
        return self._rows.running()

    @property
    def workers(self) -> tuple[WorkerReport, ...]:
        """The reports of the cluster's workers after the last step; none without a cluster."""
        return self._rows.workers

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the gradient of the mean loss over all samples with respect to the displacement, and that loss.

        Shared layers are averaged over the columns, as by the weights of the optimiser.
        """
        totals, loss = self._add_parts(displacement)
        samples, columns = self._participants.total_samples, self._participants.grid.columns
        # In `joint` the losses of all columns depend on layer 1, and the objective is their mean.
        first_weight = samples if self._towers else samples * columns
        gradient = self._pack(totals[0] / first_weight, totals[1] / first_weight, totals[2] / (samples * columns))
        return torch.from_numpy(gradient), loss / (samples * columns)

    def _add_parts(self, displacement: torch.Tensor) -> tuple[list[npt.NDArray[np.float64]], float]:
        """Return the sums of a step over all parts, added in order: layer 1, its biases, layers 2…N; and the loss."""
        width, biases = self._network.widths[0], self._participants.grid.columns * self._network.first_bias
        totals, loss = [np.zeros(shape) for shape in ((self._features, width), (biases, width), self._head_size)], 0.0
        for *parts, part_loss in self._rows.part_sums(displacement.numpy(), self._step):
            loss += part_loss
            with np.errstate(invalid="ignore"):  # a diverging run: its loss is not finite, which the loop checks
                for total, part in zip(totals, parts, strict=True):
                    total += part
        self._step += 1
        return totals, loss

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps if it decides the origins; otherwise a step changes the displacement only."""
        return {"step": self._step} if self._participants.fresh_origins else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._step = state.get("step", 0)

    def _pack(self, first: npt.NDArray[Any], bias: npt.NDArray[Any], head: npt.NDArray[Any]) -> Floats:
        """Return gradients in the kernels' layout as one flat vector, in the layout of the displacement."""
        layout = self._participants.layout
        flat = np.empty(layout.size, np.float32)
        for column in range(self._participants.grid.columns):
            views = layout.columns[column]
            start, end = self._column_offsets[column : column + 2]
            flat[views[self._weight][0]] = first[start:end].T.reshape(-1)
            if self._network.first_bias:
                flat[views[self._bias[0]][0]] = bias[column]
        flat[layout.size - self._head_size :] = head
        return flat
