"""The general engine: any module and loss, one participant after the other, exactly as each would compute by itself.

With `arithmetic="ring"` every local gradient goes through the fixed point and the sum is an addition in the ring: the
same integers, and so the same bits, as the secure sum of real participants.
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
    """The fixed point of the simulated secure sums; see `cgd.local_peers` and `JointFirstLayer`."""

    bound: float = 16.0
    ring_bits: int = 32
    joint_bound: float = 64.0
    joint_gradient_bound: float = 1.0


class ModuleEngine:
    """Gradient sums of a colony of any modules.

    Args:
        participants: the colony.
        loss: of outputs and labels; a mean over the samples.
        ring: how sums are rounded; None for plain floats.
        memory: how many bytes origins may take; the rest is drawn again in every step.
    """

    name = "modules"
    order = "ModuleEngine"

    def __init__(self, participants: Participants, loss: Loss, ring: Ring | None, memory: float) -> None:
        self._participants, self._loss, self._ring = participants, loss, ring
        self._joint = participants.mode == "joint" and participants.grid.columns > 1
        self._models = participants.models
        size = max(sum(math.prod(shape) for _, shape in own.values()) for own in participants.layout.columns)
        room = int(memory / (size * 8))
        self._origins = {cell: participants.drawn(cell) for cell in participants.grid.cells[:room]}
        # Taken before the models are used, and for everybody: the models are shared out again and again.
        participants.buffers |= {cell: _buffers_of(self._models[cell.column]) for cell in participants.grid.cells}
        self._step = 0

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The weighted sum of all participants' gradients, and the mean of their losses with the same weights."""
        participants, layout = self._participants, self._participants.layout
        grid, samples = participants.grid, participants.total_samples
        own = [self._sum(layout.column(c), grid.rows, displacement.dtype) for c in range(len(layout.cuts) - 1)]
        shared = self._sum(layout.shared, grid.rows * grid.columns, displacement.dtype)
        loss = 0.0
        with torch.random.fork_rng(devices=[]):
            for row in range(grid.rows):
                weight = participants.samples[row] / samples
                everyones = participants.samples[row] / (samples * grid.columns)
                for column, (gradient, value) in enumerate(self._row(row, displacement)):
                    loss += everyones * value
                    if own:
                        own[column].add(gradient[layout.column(column)], weight)
                    shared.add(gradient[layout.shared], everyones)
        total = torch.cat([each.total() for each in (*own, shared)])
        self._step += 1
        return total, loss

    def state(self) -> dict[str, Any]:
        """What changes from step to step besides the displacement: buffers, such as running means."""
        buffers = {str(cell): values for cell, values in self._participants.buffers.items() if values}
        return {"step": self._step, "buffers": buffers}

    def load_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""
        self._step = state["step"]
        for cell in self._participants.grid.cells:
            self._participants.buffers[cell] = state["buffers"].get(str(cell), {})

    def _sum(self, place: slice, addends: int, dtype: torch.dtype) -> _Sum:
        size = place.stop - place.start
        if self._ring is None:
            return _Sum(torch.zeros(size, dtype=dtype), None, dtype)
        fixed_point = FixedPoint.for_weighted_sum(
            addends=addends, bound=self._ring.bound, ring_bits=self._ring.ring_bits
        )
        return _Sum(np.zeros(size, dtype=WORD_TYPES[fixed_point.ring_bits]), fixed_point, dtype)

    def _row(self, row: int, displacement: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
        """The local gradient, flat, and the loss of every participant of a row."""
        cells = self._participants.grid.row_peers(Cell(row, 0))
        if not self._joint:
            return [self._alone(cell, displacement) for cell in cells]
        return self._jointly(cells, displacement)

    def _alone(self, cell: Cell, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        model = self._placed(cell, displacement)
        x, y = self._participants.data(cell)
        outputs = model(x)
        if (self._loss is functional.mse_loss or isinstance(self._loss, torch.nn.MSELoss)) and outputs.shape != y.shape:
            shapes = f"{tuple(y.shape)} and the outputs {tuple(outputs.shape)}"
            raise InputError(f"the labels have shape {shapes}; reshape the labels")
        value = self._loss(outputs, y)
        value.backward()
        self._participants.buffers[cell] = _buffers_of(model)
        return self._flat(model, cell), float(value.detach())

    def _jointly(self, cells: tuple[Cell, ...], displacement: torch.Tensor) -> list[tuple[torch.Tensor, float]]:
        """The row adds the pre-activations of layer 1, and on the way back what its members' losses say of them."""
        ring = self._ring or Ring()
        parts = []
        for cell in cells:
            first, _ = split_first_layer(self._placed(cell, displacement))
            parts.append(first(self._participants.data(cell)[0]).detach())
        opened = self._open(parts, ring.joint_bound)
        losses, gradients, flats = [], [], []
        for cell in cells:
            model = self._placed(cell, displacement)
            _, rest = split_first_layer(model)
            joint = opened.clone().requires_grad_()
            value = self._loss(rest(joint), self._participants.data(cell)[1])
            value.backward()
            self._participants.buffers[cell] = _buffers_of(model)
            losses.append(float(value.detach()))
            gradients.append(torch.zeros_like(opened) if joint.grad is None else joint.grad)
            flats.append(self._flat(model, cell))
        mean = self._open(gradients, ring.joint_gradient_bound) / len(cells)
        for cell, flat in zip(cells, flats, strict=True):
            model = self._placed(cell, displacement)
            first, _ = split_first_layer(model)
            first(self._participants.data(cell)[0]).backward(mean)
            flat += self._flat(model, cell)
        return list(zip(flats, losses, strict=True))

    def _open(self, parts: list[torch.Tensor], bound: float) -> torch.Tensor:
        """The row's sum of what its members computed for each sample."""
        if self._ring is None:
            return torch.stack(parts).sum(dim=0)
        fixed_point = FixedPoint.for_sum(addends=len(parts), bound=bound, ring_bits=self._ring.ring_bits)
        words = np.zeros(parts[0].shape, dtype=WORD_TYPES[self._ring.ring_bits])
        for part in parts:
            words += fixed_point.encode(part.numpy())
        return torch.from_numpy(fixed_point.decode(words, parts[0].numpy().dtype))

    def _placed(self, cell: Cell, displacement: torch.Tensor) -> torch.nn.Module:
        """The participant's model, ready to train; the one of its column is used again for each."""
        model = self._models[cell.column]
        moved = self._participants.layout.views(displacement, cell.column)
        origin = self._origins.get(cell) or self._participants.drawn(cell)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in moved:
                    parameter.copy_(origin[name] + moved[name])
                    parameter.grad = None
            for name, values in self._participants.buffers[cell].items():
                model.get_buffer(name).copy_(values)
        # What the model draws by itself (dropout) depends on the step and the participant alone, so a run can resume.
        place = hash((self._participants.seed, self._step, cell.row, cell.column)) & 0xFFFF_FFFF
        torch.manual_seed(place)
        return model

    def _flat(self, model: torch.nn.Module, cell: Cell) -> torch.Tensor:
        layout = self._participants.layout
        flat = torch.zeros(layout.size, dtype=self._participants.dtype)
        views = layout.views(flat, cell.column)
        for name, parameter in model.named_parameters():
            if name in views and parameter.grad is not None:
                views[name].copy_(parameter.grad)
        return flat


class _Sum:
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


def _buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
