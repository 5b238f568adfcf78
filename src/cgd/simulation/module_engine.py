"""The general engine: any module and loss, one participant after another, with the operations of a real participant.

With `arithmetic="ring"` every local gradient is encoded in fixed point and added in the ring: the same integers, and so
the same bits, as the secure sum of real participants.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from cgd.aes import keystream
from cgd.errors import InputError
from cgd.optim.flat_vectors import CPU, join, split_sum
from cgd.optim.grid import Cell
from cgd.optim.vertical import split_first_layer
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint
from cgd.secagg.journal_entry import Step
from cgd.simulation.local_training import Work
from cgd.simulation.population import participant_seed
from cgd.sum_encoding import rounding_key

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cgd.simulation.local_training import Indices, LocalTraining
    from cgd.simulation.population import Loss, Participants
    from cgd.simulation.ray_cluster import WorkerReport


@dataclass(frozen=True)
class Ring:
    """Fixed-point settings of the simulated secure sums; see `cgd.local_peers` and `JointFirstLayer`."""

    bound: float = 16.0
    ring_bits: int = 32
    joint_bound: float = 64.0
    joint_gradient_bound: float = 1.0

    @property
    def unweighted_ring_bits(self) -> int:
        """The bits of sums without weights, as `SumSettings` has them."""
        return max(32, self.ring_bits)


class ModuleEngine:
    """Computes gradient sums for any module.

    Args:
        participants: simulated participants.
        loss: loss function of outputs and labels, a mean over the samples.
        ring: fixed-point settings of the sums; None for plain floats.
        memory: most bytes for origins in memory; the others are drawn again in every step.
        work: the records that are used in each step, and the local training; by default gradients of all records.
    """

    name = "modules"
    summation_order = "ModuleEngine"
    workers: tuple[WorkerReport, ...] = ()

    def __init__(
        self, participants: Participants, loss: Loss, ring: Ring | None, memory: float, work: Work | None = None
    ) -> None:
        self._participants, self._loss, self._ring, self._work = participants, loss, ring, work or Work()
        self._device = participants.device
        self._joint = participants.mode == "joint" and participants.grid.columns > 1
        self._models = participants.models
        if self._device != CPU:  # the participants' own models stay where they are
            self._models = [copy.deepcopy(each).to(self._device) for each in participants.models]
            if isinstance(loss, torch.nn.Module):  # with weights of classes, for example
                self._loss = copy.deepcopy(loss).to(self._device)
        self._samples: dict[Cell, tuple[torch.Tensor, torch.Tensor]] = {}
        size = max(sum(math.prod(shape) for _, shape in column.values()) for column in participants.layout.columns)
        cached = int(memory / (size * 8))
        kept = () if participants.fresh_origins else participants.grid.cells[:cached]
        self._origins = {cell: participants.draw_origin(cell, 0) for cell in kept}
        # Copied for every participant before the first use: all participants of a column use the same module in turn.
        participants.buffers |= {cell: _copy_buffers(self._models[cell.column]) for cell in participants.grid.cells}
        self._step = 0

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the weighted sum of all participants' gradients or updates, and of their losses.

        With a local training, the loss of a participant is the mean over its steps, each before the step.
        """
        participants, layout = self._participants, self._participants.layout
        grid, samples = participants.grid, participants.total_samples
        own = [self._new_sum(layout.column(c), grid.rows, displacement.dtype) for c in range(len(layout.offsets) - 1)]
        shared = self._new_sum(layout.shared, grid.rows * grid.columns, displacement.dtype)
        loss = 0.0
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            for row in range(grid.rows):
                weight = participants.samples[row] / samples
                shared_weight = participants.samples[row] / (samples * grid.columns)
                for column, (gradient, value) in enumerate(self._row_gradients(row, displacement)):
                    loss += shared_weight * value
                    key = self._rounding_key(Cell(row, column), gradient)
                    if own:
                        own[column].add(gradient[layout.column(column)], weight, key)
                    shared.add(gradient[layout.shared], shared_weight, key)
        total = torch.cat([each.total() for each in (*own, shared)])
        self._step += 1
        return total, loss

    def running(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: sums can always be computed."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the step number and the module buffers, such as running means."""
        buffers = {
            str(cell): {name: each.to(CPU) for name, each in values.items()}
            for cell, values in self._participants.buffers.items()
            if values
        }
        return {"step": self._step, "buffers": buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._step = state["step"]
        for cell in self._participants.grid.cells:
            self._participants.buffers[cell] = state["buffers"].get(str(cell), {})

    def _new_sum(self, part: slice, addends: int, dtype: torch.dtype) -> _WeightedSum:
        size = part.stop - part.start
        if self._ring is None:
            return _WeightedSum(torch.zeros(size, dtype=dtype), None, dtype)
        fixed_point = FixedPoint.for_weighted_sum(
            addends=addends, bound=self._ring.bound, ring_bits=self._ring.ring_bits
        )
        return _WeightedSum(np.zeros(size, dtype=WORD_TYPES[fixed_point.ring_bits]), fixed_point, dtype)

    def _rounding_key(self, cell: Cell, gradient: torch.Tensor) -> bytes:
        """Return the key by which a participant with the seed of this one's origin rounds its gradient in 16 bits."""
        return rounding_key(participant_seed(self._participants.seed, cell), gradient.numpy(), Step(0, self._step))

    def _row_gradients(self, row: int, displacement: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
        """Return the flat local gradient, or the update, and the loss of every participant of a row."""
        cells = self._participants.grid.row_peers(Cell(row, 0))
        local = self._work.local
        if local is not None:
            return [self._local_update(cell, displacement, local) for cell in cells]
        if not self._joint:
            return [self._local_gradient(cell, displacement) for cell in cells]
        return self._joint_gradients(cells, displacement)

    def _local_gradient(self, cell: Cell, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        model, value = self._backward(cell, displacement)
        return self._flat_gradient(model, cell), value

    def _backward(self, cell: Cell, displacement: torch.Tensor) -> tuple[torch.nn.Module, float]:
        """Return the participant's model with the gradients of its loss, and the loss."""
        model = self._prepare_model(cell, displacement)
        value = self._compute_loss(model, *self._data(cell))
        value.backward()
        self._participants.buffers[cell] = _copy_buffers(model)
        return model, float(value.detach())

    def _local_update(self, cell: Cell, displacement: torch.Tensor, local: LocalTraining) -> tuple[torch.Tensor, float]:
        """Train the participant's model for a round; return the flat difference of its weights, and the mean loss."""
        model = self._prepare_model(cell, displacement)
        x, y = self._samples_of(cell)
        before = {name: values.detach().clone() for name, values in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), local.lr, local.momentum)
        losses = 0.0
        for batch in self._batches(cell):
            optimizer.zero_grad()
            value = self._compute_loss(model, x[batch], y[batch])
            value.backward()
            optimizer.step()
            losses += len(batch) * float(value.detach())
        self._participants.buffers[cell] = _copy_buffers(model)
        update = self._flat(cell, {name: before[name] - values for name, values in model.named_parameters()})
        return update, losses / (len(x) * local.epochs)

    def _compute_loss(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = model(x)
        if (self._loss is functional.mse_loss or isinstance(self._loss, torch.nn.MSELoss)) and outputs.shape != y.shape:
            shapes = f"{tuple(y.shape)} and the outputs {tuple(outputs.shape)}"
            raise InputError(f"the labels have shape {shapes}; reshape the labels")
        return self._loss(outputs, y)

    def _data(self, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the participant's samples and labels of this step."""
        x, y = self._samples_of(cell)
        if self._work.batches == 1:
            return x, y
        (batch,) = self._batches(cell)
        return x[batch], y[batch]

    def _batches(self, cell: Cell) -> list[torch.Tensor]:
        drawn: list[Indices] = self._work.batches_of_row(self._participants, cell.row, self._step)
        return [torch.from_numpy(batch).to(self._device) for batch in drawn]

    def _samples_of(self, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the participant's samples and labels, which stay on the device."""
        if self._device == CPU:
            return self._participants.data(cell)
        if cell not in self._samples:
            x, y = self._participants.data(cell)
            self._samples[cell] = x.to(self._device), y.to(self._device)
        return self._samples[cell]

    def _joint_gradients(self, cells: tuple[Cell, ...], displacement: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
        """Return gradient and loss of each member of a `joint` row.

        The row opens the sum of its pre-activations of layer 1, and in the backward pass the sum of the gradients with
        respect to them.
        """
        ring = self._ring or Ring()
        parts = []
        for cell in cells:
            first, _ = split_first_layer(self._prepare_model(cell, displacement))
            parts.append(first(self._data(cell)[0]).detach())
        pre_activations = self._row_sum(parts, ring.joint_bound)
        losses, backward, flat_gradients = [], [], []
        for cell in cells:
            model = self._prepare_model(cell, displacement)
            _, rest = split_first_layer(model)
            joint = pre_activations.clone().requires_grad_()
            value = self._loss(rest(joint), self._data(cell)[1])
            value.backward()
            self._participants.buffers[cell] = _copy_buffers(model)
            losses.append(float(value.detach()))
            backward.append(torch.zeros_like(pre_activations) if joint.grad is None else joint.grad)
            flat_gradients.append(self._flat_gradient(model, cell))
        mean = self._row_sum(backward, ring.joint_gradient_bound) / len(cells)
        for cell, flat in zip(cells, flat_gradients, strict=True):
            model = self._prepare_model(cell, displacement)
            first, _ = split_first_layer(model)
            first(self._data(cell)[0]).backward(mean)
            flat += self._flat_gradient(model, cell)
        return list(zip(flat_gradients, losses, strict=True))

    def _row_sum(self, parts: list[torch.Tensor], bound: float) -> torch.Tensor:
        """Return the sum of one tensor per member, as the row's secure sum would open it."""
        if self._ring is None:
            return torch.stack(parts).sum(dim=0)
        bits = self._ring.unweighted_ring_bits
        fixed_point = FixedPoint.for_sum(addends=len(parts), bound=bound, ring_bits=bits)
        words = np.zeros(parts[0].shape, dtype=WORD_TYPES[bits])
        for part in parts:
            words += fixed_point.encode(part.numpy())
        return torch.from_numpy(fixed_point.decode(words, parts[0].numpy().dtype))

    def _prepare_model(self, cell: Cell, displacement: torch.Tensor) -> torch.nn.Module:
        """Load the participant's parameters and buffers into the module of its column, and return that module."""
        model = self._models[cell.column]
        displaced = self._participants.layout.views(displacement, cell.column)
        origin = self._origins.get(cell) or self._participants.draw_origin(cell, self._step)
        with torch.no_grad():
            trained = {name: each for name, each in model.named_parameters() if name in displaced}
            weights = join([origin[name] + displaced[name] for name in trained])  # which crosses to the device once
            for parameter, values in split_sum(weights, list(trained.values())).items():
                parameter.copy_(values)
                parameter.grad = None
            for name, values in self._participants.buffers[cell].items():
                model.get_buffer(name).copy_(values)
        # Random numbers of the model itself (dropout) depend only on step and participant, so that a run can resume.
        seed = hash((self._participants.seed, self._step, cell.row, cell.column)) & 0xFFFF_FFFF
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        elif self._device.type == "mps":
            torch.mps.manual_seed(seed)
        return model

    def _flat_gradient(self, model: torch.nn.Module, cell: Cell) -> torch.Tensor:
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        return self._flat(cell, {name: gradient for name, gradient in gradients if gradient is not None})

    def _flat(self, cell: Cell, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the values of parameters as one vector in the layout of the displacement; missing ones are zero."""
        layout = self._participants.layout
        flat = torch.zeros(layout.size, dtype=self._participants.dtype)
        views = {name: view for name, view in layout.views(flat, cell.column).items() if name in parts}
        if views:  # cross to the CPU once
            joined = join([parts[name].detach() for name in views])
            sizes = [each.numel() for each in views.values()]
            for view, values in zip(views.values(), joined.split(sizes), strict=True):
                view.copy_(values.view(view.shape))
        return flat


class _WeightedSum:
    """A weighted sum of flat gradients: in the ring if there is a fixed point, else in floats."""

    def __init__(self, words: Any, fixed_point: FixedPoint | None, dtype: torch.dtype) -> None:
        self._words, self._fixed_point, self._dtype = words, fixed_point, dtype

    def add(self, gradient: torch.Tensor, weight: float, key: bytes) -> None:
        if self._fixed_point is None:
            self._words += gradient * weight
        elif gradient.numel():
            rounding = keystream(key, 0) if self._fixed_point.ring_bits == 16 else None
            self._words += self._fixed_point.encode(gradient.numpy(), weight, rounding=rounding)

    def total(self) -> torch.Tensor:
        if self._fixed_point is None:
            total: torch.Tensor = self._words
            return total
        dtype = {torch.float32: np.float32, torch.float64: np.float64}[self._dtype]
        return torch.from_numpy(self._fixed_point.decode(self._words, dtype))


def _copy_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
