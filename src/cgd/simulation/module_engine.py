"""The general engine: any module and loss, one participant after another, with the operations of a real participant.

With `arithmetic="ring"` every local gradient is encoded in fixed point and added in the ring: the same integers, and so
the same bits, as the secure sum of real participants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from cgd.errors import InputError
from cgd.optim.grid import Cell
from cgd.optim.vertical import split_first_layer
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint

if TYPE_CHECKING:
    from cgd.simulation.population import Loss, Participants


@dataclass(frozen=True)
class Ring:
    """Fixed-point settings of the simulated secure sums; see `cgd.local_peers` and `JointFirstLayer`."""

    bound: float = 16.0
    ring_bits: int = 32
    joint_bound: float = 64.0
    joint_gradient_bound: float = 1.0


class ModuleEngine:
    """Computes gradient sums for any module.

    Args:
        participants: simulated participants.
        loss: loss function of outputs and labels, a mean over the samples.
        ring: fixed-point settings of the sums; None for plain floats.
        memory: most bytes for origins in memory; the others are drawn again in every step.
    """

    name = "modules"
    summation_order = "ModuleEngine"

    def __init__(self, participants: Participants, loss: Loss, ring: Ring | None, memory: float) -> None:
        self._participants, self._loss, self._ring = participants, loss, ring
        self._joint = participants.mode == "joint" and participants.grid.columns > 1
        self._models = participants.models
        size = max(sum(math.prod(shape) for _, shape in column.values()) for column in participants.layout.columns)
        cached = int(memory / (size * 8))
        self._origins = {cell: participants.draw_origin(cell) for cell in participants.grid.cells[:cached]}
        # Copied for every participant before the first use: all participants of a column use the same module in turn.
        participants.buffers |= {cell: _copy_buffers(self._models[cell.column]) for cell in participants.grid.cells}
        self._step = 0

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the weighted sum of all participants' gradients, and of their losses with the same weights."""
        participants, layout = self._participants, self._participants.layout
        grid, samples = participants.grid, participants.total_samples
        own = [self._new_sum(layout.column(c), grid.rows, displacement.dtype) for c in range(len(layout.offsets) - 1)]
        shared = self._new_sum(layout.shared, grid.rows * grid.columns, displacement.dtype)
        loss = 0.0
        with torch.random.fork_rng(devices=[]):
            for row in range(grid.rows):
                weight = participants.samples[row] / samples
                shared_weight = participants.samples[row] / (samples * grid.columns)
                for column, (gradient, value) in enumerate(self._row_gradients(row, displacement)):
                    loss += shared_weight * value
                    if own:
                        own[column].add(gradient[layout.column(column)], weight)
                    shared.add(gradient[layout.shared], shared_weight)
        total = torch.cat([each.total() for each in (*own, shared)])
        self._step += 1
        return total, loss

    def state_dict(self) -> dict[str, Any]:
        """Return the step number and the module buffers, such as running means."""
        buffers = {str(cell): values for cell, values in self._participants.buffers.items() if values}
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

    def _row_gradients(self, row: int, displacement: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
        """Return the flat local gradient and the loss of every participant of a row."""
        cells = self._participants.grid.row_peers(Cell(row, 0))
        if not self._joint:
            return [self._local_gradient(cell, displacement) for cell in cells]
        return self._joint_gradients(cells, displacement)

    def _local_gradient(self, cell: Cell, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        model, value = self._backward(cell, displacement)
        return self._flat_gradient(model, cell), value

    def _backward(self, cell: Cell, displacement: torch.Tensor) -> tuple[torch.nn.Module, float]:
        """Return the participant's model with the gradients of its loss, and the loss."""
        model = self._prepare_model(cell, displacement)
        x, y = self._participants.data(cell)
        outputs = model(x)
        if (self._loss is functional.mse_loss or isinstance(self._loss, torch.nn.MSELoss)) and outputs.shape != y.shape:
            shapes = f"{tuple(y.shape)} and the outputs {tuple(outputs.shape)}"
            raise InputError(f"the labels have shape {shapes}; reshape the labels")
        value = self._loss(outputs, y)
        value.backward()
        self._participants.buffers[cell] = _copy_buffers(model)
        return model, float(value.detach())

    def _joint_gradients(self, cells: tuple[Cell, ...], displacement: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
        """Return gradient and loss of each member of a `joint` row.

        The row opens the sum of its pre-activations of layer 1, and in the backward pass the sum of the gradients with
        respect to them.
        """
        ring = self._ring or Ring()
        parts = []
        for cell in cells:
            first, _ = split_first_layer(self._prepare_model(cell, displacement))
            parts.append(first(self._participants.data(cell)[0]).detach())
        pre_activations = self._row_sum(parts, ring.joint_bound)
        losses, backward, flat_gradients = [], [], []
        for cell in cells:
            model = self._prepare_model(cell, displacement)
            _, rest = split_first_layer(model)
            joint = pre_activations.clone().requires_grad_()
            value = self._loss(rest(joint), self._participants.data(cell)[1])
            value.backward()
            self._participants.buffers[cell] = _copy_buffers(model)
            losses.append(float(value.detach()))
            backward.append(torch.zeros_like(pre_activations) if joint.grad is None else joint.grad)
            flat_gradients.append(self._flat_gradient(model, cell))
        mean = self._row_sum(backward, ring.joint_gradient_bound) / len(cells)
        for cell, flat in zip(cells, flat_gradients, strict=True):
            model = self._prepare_model(cell, displacement)
            first, _ = split_first_layer(model)
            first(self._participants.data(cell)[0]).backward(mean)
            flat += self._flat_gradient(model, cell)
        return list(zip(flat_gradients, losses, strict=True))

    def _row_sum(self, parts: list[torch.Tensor], bound: float) -> torch.Tensor:
        """Return the sum of one tensor per member, as the row's secure sum would open it."""
        if self._ring is None:
            return torch.stack(parts).sum(dim=0)
        fixed_point = FixedPoint.for_sum(addends=len(parts), bound=bound, ring_bits=self._ring.ring_bits)
        words = np.zeros(parts[0].shape, dtype=WORD_TYPES[self._ring.ring_bits])
        for part in parts:
            words += fixed_point.encode(part.numpy())
        return torch.from_numpy(fixed_point.decode(words, parts[0].numpy().dtype))

    def _prepare_model(self, cell: Cell, displacement: torch.Tensor) -> torch.nn.Module:
        """Load the participant's parameters and buffers into the module of its column, and return that module."""
        model = self._models[cell.column]
        displaced = self._participants.layout.views(displacement, cell.column)
        origin = self._origins.get(cell) or self._participants.draw_origin(cell)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in displaced:
                    parameter.copy_(origin[name] + displaced[name])
                    parameter.grad = None
            for name, values in self._participants.buffers[cell].items():
                model.get_buffer(name).copy_(values)
        # Random numbers of the model itself (dropout) depend only on step and participant, so that a run can resume.
        torch.manual_seed(hash((self._participants.seed, self._step, cell.row, cell.column)) & 0xFFFF_FFFF)
        return model

    def _flat_gradient(self, model: torch.nn.Module, cell: Cell) -> torch.Tensor:
        layout = self._participants.layout
        flat = torch.zeros(layout.size, dtype=self._participants.dtype)
        views = layout.views(flat, cell.column)
        for name, parameter in model.named_parameters():
            if name in views and parameter.grad is not None:
                views[name].copy_(parameter.grad)
        return flat


class _WeightedSum:
    """A weighted sum of flat gradients: in the ring if there is a fixed point, else in floats."""

    def __init__(self, words: Any, fixed_point: FixedPoint | None, dtype: torch.dtype) -> None:
        self._words, self._fixed_point, self._dtype = words, fixed_point, dtype

    def add(self, gradient: torch.Tensor, weight: float) -> None:
        if self._fixed_point is None:
            self._words += gradient * weight
        elif gradient.numel():
            self._words += self._fixed_point.encode(gradient.numpy(), weight)

    def total(self) -> torch.Tensor:
        if self._fixed_point is None:
            total: torch.Tensor = self._words
            return total
        dtype = {torch.float32: np.float32, torch.float64: np.float64}[self._dtype]
        return torch.from_numpy(self._fixed_point.decode(self._words, dtype))


def _copy_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
