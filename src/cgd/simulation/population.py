"""Simulated participants: their data, their private origins, and the layout of the parameters in the displacement."""

from __future__ import annotations

import copy
import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from cgd.errors import InputError
from cgd.optim.flat_vectors import CPU
from cgd.optim.grid import Cell, Grid
from cgd.optim.origin import Origin, check_delta
from cgd.optim.public_start import check_start, public_seed, start_digest
from cgd.optim.vertical import build_tower, copy_columns, first_layer_names, split_first_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from cgd.optim.grid import Block
    from cgd.optim.public_start import Start

    Delta = float | Callable[[Cell], float]
    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

Mode = Literal["towers", "joint"]


def participant_seed(seed: int, cell: Cell) -> bytes:
    """Return the 32 bytes from which the participant's origin is drawn in a simulation with this seed.

    `cgd.confine(model, delta, seed=participant_seed(seed, cell))` gives the same origin to a real participant, and the
    same start to a model that was built inside `cgd.public_seed(seed)`.
    """
    # The text "cgd colony" decides the origins of all stored results and must not change.
    return hmac.digest(f"cgd colony {seed}".encode(), str(cell).encode(), "sha256")


@dataclass(frozen=True)
class Layout:
    """Positions of the parameters in the flat displacement: each column's first layer, then the shared layers.

    With one column all layers are shared.

    Attributes:
        columns: slice and shape of every parameter, by name, for each column.
        offsets: start of each column's first layer, then the start of the shared layers.
        size: number of coordinates of the displacement.
    """

    columns: tuple[dict[str, tuple[slice, tuple[int, ...]]], ...]
    offsets: tuple[int, ...]
    size: int

    @property
    def shared(self) -> slice:
        """The slice that is summed over all participants."""
        return slice(self.offsets[-1], self.size)

    def column(self, column: int) -> slice:
        """Return the slice that is summed within this column group."""
        return slice(self.offsets[column], self.offsets[column + 1])

    @property
    def parameter_slices(self) -> list[slice]:
        """The slices of single parameters, in the order of the displacement."""
        places = {place.start: place for column in self.columns for place, _ in column.values()}
        return [places[start] for start in sorted(places)]

    def views(self, flat: torch.Tensor, column: int) -> dict[str, torch.Tensor]:
        """Return views of `flat` in the shapes of the parameters of a participant in this column, by name."""
        return {name: flat[place].view(shape) for name, (place, shape) in self.columns[column].items()}

    @classmethod
    def for_models(cls, models: list[torch.nn.Module], first_layer: tuple[str, ...]) -> Layout:
        """Return the layout for one model per column.

        Args:
            models: one model for each column.
            first_layer: names of the first layer's parameters if that layer is split by columns, else empty.
        """
        shapes = [{n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad} for model in models]
        columns: list[dict[str, tuple[slice, tuple[int, ...]]]] = [{} for _ in models]
        start, offsets = 0, [0]
        for column, own_shapes in zip(columns, shapes, strict=True):
            for name in filter(own_shapes.__contains__, first_layer):
                end = start + int(np.prod(own_shapes[name]))
                column[name] = (slice(start, end), own_shapes[name])
                start = end
            if first_layer:
                offsets.append(start)
        for name in shapes[0]:
            if name not in first_layer:
                end = start + int(np.prod(shapes[0][name]))
                for column in columns:
                    column[name] = (slice(start, end), shapes[0][name])
                start = end
        ordered = tuple({name: column[name] for name in own} for own, column in zip(shapes, columns, strict=True))
        return cls(ordered, tuple(offsets), start)


@dataclass(frozen=True)
class _CommonOrigin(Origin):
    """The origin of a model that all participants share, or of its part for one column."""

    column: int = 0
    first_layer: tuple[str, ...] = ()

    def key(self, name: str) -> bytes:
        return super().key(f"{name} of column {self.column}" if name in self.first_layer else name)


class Participants:
    """The simulated participants.

    Attributes:
        grid: grid of participants, m^h × m^v.
        blocks: data of each participant.
        mode: "towers" or "joint", see `cgd.optim.vertical`; has no effect with one column.
        models: one model for each column, as built.
        starts: values of the public start for each column, by name; none if the start is zero.
        first_layer: names of the parameters of layer 1 if the model begins with a `torch.nn.Linear`, else empty.
        layout: positions of the parameters in the flat displacement.
        samples: number of samples of each row.
        dtype: dtype of the trained parameters.
        buffers: module buffers of each participant, such as running means, once they have changed.
        fresh_origins: True if every participant draws another origin for each step.
        device: where models compute; origins, displacement and samples stay on the CPU.

    With a common origin all participants start from the same weights: that is federated SGD, not CGD.
    """

    def __init__(
        self,
        build_model: Callable[[], torch.nn.Module],
        blocks: Mapping[Cell, Block],
        mode: Mode = "towers",
        delta: Delta = 0.1,
        seed: int = 0,
        *,
        start: Start = "model",
        common_origin: bool = False,
        fresh_origins: bool = False,
        device: torch.device = CPU,
    ) -> None:
        check_start(start)
        if common_origin and fresh_origins:
            raise InputError("common_origin and fresh_origins are both True; there is no origin to draw again")
        if mode not in ("towers", "joint"):
            raise InputError(f"the mode is {mode!r}; choose towers or joint")
        if not blocks or not hasattr(blocks, "items"):
            raise InputError("there are no blocks by cell; cgd.Grid(rows, columns).split(x, y) makes them")
        self.grid, self.device = _grid_from_blocks(blocks), device
        if device != CPU and self.grid.columns > 1:
            raise InputError(
                f"device is {device} and the grid has {self.grid.columns} columns, which are simulated on the CPU; "
                "leave device out"
            )
        self.blocks, self.mode, self.seed = blocks, mode, seed
        self._common_origin, self.fresh_origins = common_origin, fresh_origins
        self._deltas = {cell: check_delta(delta(cell) if callable(delta) else delta) for cell in blocks}
        self.samples = [blocks[Cell(row, 0)].samples for row in range(self.grid.rows)]
        with public_seed(seed):
            full_model = build_model()
        self.dtype = _trained_dtype(full_model)
        self.models = self._models_of_columns(full_model, build_model)
        self.first_layer = first_layer_names(full_model)
        self._split_layer = self.first_layer if self.grid.columns > 1 else ()
        self.layout = Layout.for_models(self.models, self._split_layer)
        self.buffers: dict[Cell, dict[str, torch.Tensor]] = {}
        self._shapes = [{name: shape for name, (_, shape) in own.items()} for own in self.layout.columns]
        self.starts = [
            {name: model.get_parameter(name).detach().clone() for name in own} if start == "model" else {}
            for model, own in zip(self.models, self._shapes, strict=True)
        ]
        self._start_digests = [start_digest(own) for own in self.starts]

    def _models_of_columns(
        self, model: torch.nn.Module, build_model: Callable[[], torch.nn.Module]
    ) -> list[torch.nn.Module]:
        """Return the model of each column, given that for all features.

        In `towers`, every member builds its tower from the same seed. In `joint`, the columns divide the first layer.
        """
        if self.grid.columns == 1:
            return [model]
        widths = [self.blocks[Cell(0, column)].x.shape[1] for column in range(self.grid.columns)]
        first, _ = split_first_layer(model)
        if first.in_features != sum(widths):
            raise InputError(
                f"the model takes {first.in_features} features and the columns hold {sum(widths)}; "
                "build the model for all of them, its first layer is split by columns"
            )
        towers: list[torch.nn.Module] = []
        for width, end in zip(widths, np.cumsum(widths).tolist(), strict=True):
            with public_seed(self.seed):
                tower = build_tower(build_model(), width)
            if self.mode == "joint":
                copy_columns(first, slice(end - width, end), tower)
            towers.append(tower)
        return towers

    @property
    def total_samples(self) -> int:
        """The number of samples of all rows, the paper's n."""
        return sum(self.samples)

    def without_data(self, rows: range) -> Participants:
        """Return a copy that can draw the origins of these rows, for a worker of a cluster: no data, no modules."""
        part = copy.copy(self)
        part.blocks, part.models, part.buffers = {}, [], {}
        cells = [Cell(row, column) for row in rows for column in range(self.grid.columns)]
        part._deltas = {cell: self._deltas[cell] for cell in {*cells, Cell(0, 0)}}  # r0c0 has the common origin
        return part

    def origin(self, cell: Cell) -> Origin:
        """Return the private origin of this participant, the paper's w₁ˡ."""
        if cell not in self._deltas:
            raise InputError(f"{cell} is not in a grid of {self.grid.rows} × {self.grid.columns}")
        if self._common_origin:
            # One model for all: each column draws its part of layer 1 from its own stream, the other layers are equal.
            common = Cell(0, 0)
            seed, delta = participant_seed(self.seed, common), self._deltas[common]
            return _CommonOrigin(
                delta,
                self._shapes[cell.column],
                seed,
                start=self._start_digests[cell.column],
                column=cell.column,
                first_layer=self._split_layer,
            )
        seed, start = participant_seed(self.seed, cell), self._start_digests[cell.column]
        return Origin(self._deltas[cell], self._shapes[cell.column], seed, start=start)

    def training_origin(self, cell: Cell, step: int) -> Origin:
        """Return the origin at which the participant computes in a step: always the same, unless they are fresh."""
        origin = self.origin(cell)
        if not self.fresh_origins:
            return origin
        return origin.of_step(step)

    def draw_origin(self, cell: Cell, step: int) -> dict[str, torch.Tensor]:
        """Draw the participant's origin in a step, added to the start, in the dtype of the model."""
        drawn = self.training_origin(cell, step).draw()
        return {name: self._above_start(name, numbers, cell.column) for name, numbers in drawn}

    def parameters(
        self, cell: Cell, displacement: torch.Tensor, only: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return start + origin + displacement of the participant, by name; `only` selects some parameters."""
        displaced = self.layout.views(displacement, cell.column)
        drawn = self.origin(cell).draw(only)
        return {name: self._above_start(name, numbers, cell.column) + displaced[name] for name, numbers in drawn}

    def _above_start(self, name: str, numbers: torch.Tensor, column: int) -> torch.Tensor:
        start = self.starts[column]
        return (start[name] + numbers if start else numbers).to(self.dtype)

    def model(self, cell: Cell, displacement: torch.Tensor) -> torch.nn.Module:
        """Return a copy of the participant's confined model."""
        return next(self.models_of(cell, displacement, (1.0,)))

    @torch.no_grad()
    def models_of(
        self, cell: Cell, displacement: torch.Tensor, origin_scales: Sequence[float]
    ) -> Iterator[torch.nn.Module]:
        """Yield a copy of the participant's model for each factor of its origin; the origin is drawn once at most."""
        displaced = self.layout.views(displacement, cell.column)
        origin = dict(self.origin(cell).draw()) if any(origin_scales) else {}
        for scale in origin_scales:
            model = copy.deepcopy(self.models[cell.column])
            for name, moved in displaced.items():
                numbers = origin[name] * scale if origin else torch.zeros_like(moved)
                model.get_parameter(name).copy_(self._above_start(name, numbers, cell.column) + moved)
            for name, values in self.buffers.get(cell, {}).items():
                model.get_buffer(name).copy_(values)
            yield model

    def data(self, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the participant's samples in the dtype of the model, and their labels."""
        block = self.blocks[cell]
        return as_input(block.x, self.dtype), as_labels(block.y, self.dtype)

    @torch.no_grad()
    def predict(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a model that `models_of` made, computed on the device."""
        outputs: torch.Tensor = model.eval().to(self.device)(x.to(self.device))
        return outputs.to(CPU)

    def checkpoint_settings(self) -> dict[str, str]:
        """Describe all inputs that decide a run, so that another run does not resume from its checkpoint."""
        fixed, data, deltas = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        for name, values in self.models[0].state_dict().items():
            if name not in self.layout.columns[0]:  # frozen parameters and buffers are not drawn
                fixed.update(name.encode() + values.contiguous().numpy().tobytes())
        for cell, block in self.blocks.items():
            deltas.update(repr((cell, self._deltas[cell])).encode())
            data.update(np.ascontiguousarray(np.asarray(block.x)).data)
            data.update(np.ascontiguousarray(np.asarray(block.y)).data)
        several = len(set(self._deltas.values())) > 1
        model = " ".join(str(self.models[0]).split())
        return {
            "grid": f"{self.grid.rows}×{self.grid.columns} {self.mode if self.grid.columns > 1 else ''}".strip(),
            "data": data.hexdigest()[:16],
            "model": f"{model} in {self.dtype}, {sorted(self.layout.columns[0])}, {fixed.hexdigest()[:8]}",
            "delta": deltas.hexdigest()[:16] if several else repr(next(iter(self._deltas.values()))),
            "seed": f"{self.seed}, common origin" if self._common_origin else repr(self.seed),
            **({"origins": "fresh"} if self.fresh_origins else {}),
            **({"start": " ".join(each[:16] for each in self._start_digests)} if self.starts[0] else {}),
        }


def as_input(x: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return samples as a tensor; floats in the dtype of the model."""
    tensor = torch.as_tensor(x)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def as_labels(y: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return labels as a tensor: classes as long integers, floats in the dtype of the model."""
    tensor = torch.as_tensor(y)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.long()


def sample_cells(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """Return `count` cells drawn at random; all cells if there are fewer."""
    chosen = np.random.default_rng(seed).permutation(len(cells))[:count]
    return [cells[i] for i in sorted(chosen)]


def loss_and_accuracy(loss: Loss, outputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, float | None]:
    """Return the loss of outputs, and their accuracy; None if the labels are not classes."""
    value = float(loss(outputs, labels))
    if labels.is_floating_point() or labels.ndim != 1 or outputs.ndim != 2:
        return value, None
    return value, float((outputs.argmax(dim=1) == labels).float().mean())


def _trained_dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of the trainable parameters."""
    if any(map(is_lazy, model.parameters())):
        raise InputError(
            "a parameter of a lazy module has no shape yet; let build_model run one batch through the model, or name "
            "the numbers of features"
        )
    types = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if not types:
        raise InputError("the model has no trainable parameter; set requires_grad on the parameters to train")
    if len(types) > 1 or not types <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(map(str, types)))
        raise InputError(f"the parameters are of type {names}; a simulation needs all float32 or all float64")
    return types.pop()


def _grid_from_blocks(blocks: Mapping[Cell, Block]) -> Grid:
    """Return the grid that these blocks fill; raise InputError if their shapes or labels do not match."""
    grid = Grid(1 + max(cell.row for cell in blocks), 1 + max(cell.column for cell in blocks))
    if set(blocks) != set(grid.cells):
        missing = next((cell for cell in grid.cells if cell not in blocks), None)
        raise InputError(f"the blocks do not fill a grid of {grid.rows} × {grid.columns}: {missing} is missing")
    for cell, block in blocks.items():
        if block.samples == 0:
            raise InputError(f"{cell} has no samples; leave this row out, and number the others from 0 without gaps")
        if len(block.x) != block.samples:
            raise InputError(f"{cell} has {len(block.x)} samples and {block.samples} labels; give each sample a label")
        row_first, column_first = blocks[Cell(cell.row, 0)], blocks[Cell(0, cell.column)]
        if block.y is not row_first.y and not np.array_equal(block.y, row_first.y):
            raise InputError(
                f"{row_first.cell} and {cell} are in one row and have different labels; give a row the same labels"
            )
        if block.x.shape[1:] != column_first.x.shape[1:]:
            shape, others = tuple(block.x.shape[1:]), tuple(column_first.x.shape[1:])
            raise InputError(f"{cell} has features of shape {shape}, its column {others}; give a column one shape")
    return grid
