"""Who is in a simulated colony: blocks of data, private origins, and where each parameter lies in the displacement."""

from __future__ import annotations

import copy
import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from cgd.errors import InputError
from cgd.optim.grid import Cell, Grid
from cgd.optim.origin import Origin, check_delta
from cgd.optim.vertical import first_layer_names, narrow, split_first_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from cgd.optim.grid import Block

    Delta = float | Callable[[Cell], float]
    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

Mode = Literal["towers", "joint"]


def participant_seed(seed: int, cell: Cell) -> bytes:
    """The 32 bytes from which the participant's origin is drawn in a simulation with this seed.

    `cgd.confine(model, delta, seed=participant_seed(seed, cell))` gives the same origin to a real participant.
    """
    return hmac.digest(f"cgd colony {seed}".encode(), str(cell).encode(), "sha256")


@dataclass(frozen=True)
class Layout:
    """Where the parameters lie in the flat displacement: first each column's first layer, then what all have in common.

    With one column everything is common.
    """

    columns: tuple[dict[str, tuple[slice, tuple[int, ...]]], ...]
    cuts: tuple[int, ...]
    size: int

    @property
    def shared(self) -> slice:
        """What is summed over everyone."""
        return slice(self.cuts[-1], self.size)

    def column(self, column: int) -> slice:
        """What is summed within this column group."""
        return slice(self.cuts[column], self.cuts[column + 1])

    def views(self, flat: torch.Tensor, column: int) -> dict[str, torch.Tensor]:
        """The parts of `flat` that belong to the parameters of a participant of this column."""
        return {name: flat[place].view(shape) for name, (place, shape) in self.columns[column].items()}

    @classmethod
    def of(cls, models: list[torch.nn.Module], first: tuple[str, ...]) -> Layout:
        """The layout for one model for each column; `first` are the names of the first layer, if it is cut."""
        shapes = [{n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad} for model in models]
        places: list[dict[str, tuple[slice, tuple[int, ...]]]] = [{} for _ in models]
        at, cuts = 0, [0]
        for column, own in enumerate(shapes):
            for name in filter(own.__contains__, first):
                end = at + int(np.prod(own[name]))
                places[column][name] = (slice(at, end), own[name])
                at = end
            if first:
                cuts.append(at)
        for name in shapes[0]:
            if name not in first:
                end = at + int(np.prod(shapes[0][name]))
                for own_places in places:
                    own_places[name] = (slice(at, end), shapes[0][name])
                at = end
        ordered = tuple({name: place[name] for name in own} for own, place in zip(shapes, places, strict=True))
        return cls(ordered, tuple(cuts), at)


@dataclass(frozen=True)
class _CommonOrigin(Origin):
    """The origin of a model that everybody has, or its column's part of it."""

    column: int = 0
    first: tuple[str, ...] = ()

    def key(self, name: str) -> bytes:
        return super().key(f"{name} of column {self.column}" if name in self.first else name)


class Participants:
    """The participants of a simulated colony.

    Attributes:
        grid: their places.
        blocks: their data.
        mode: how the members of a row go together, if there are several columns.
        models: one model for each column, as it was built.
        first: the names of the parameters of layer 1, if the model begins with a fully-connected one.
        layout: where their parameters lie in the displacement.
        samples: the number of samples of each row.
        dtype: the type of the parameters.
        buffers: everybody's own buffers, such as running means, if the model has any and they have changed.

    With a common origin everybody starts from the same weights: that is federated SGD, not CGD.
    """

    def __init__(
        self,
        build_model: Callable[[], torch.nn.Module],
        blocks: Mapping[Cell, Block],
        mode: Mode = "towers",
        delta: Delta = 0.1,
        seed: int = 0,
        *,
        common_origin: bool = False,
    ) -> None:
        if mode not in ("towers", "joint"):
            raise InputError(f"the mode is {mode!r}; choose towers or joint")
        if not blocks or not hasattr(blocks, "items"):
            raise InputError("there are no blocks by cell; cgd.Grid(rows, columns).split(x, y) makes them")
        self.grid = _grid_of(blocks)
        self.blocks, self.mode, self.seed = blocks, mode, seed
        self._common_origin = common_origin
        self._deltas = {cell: check_delta(delta(cell) if callable(delta) else delta) for cell in blocks}
        self.samples = [blocks[Cell(row, 0)].samples for row in range(self.grid.rows)]
        whole = build_model()
        self.dtype = _type_of(whole)
        if self.grid.columns > 1:
            widths = [blocks[Cell(0, column)].x.shape[1] for column in range(self.grid.columns)]
            first, _ = split_first_layer(whole)
            if first.in_features != sum(widths):
                raise InputError(
                    f"the model takes {first.in_features} features and the columns hold {sum(widths)}; "
                    "build the model for all of them, it is cut by columns"
                )
            self.models: list[torch.nn.Module] = [narrow(whole, width) for width in widths]
        else:
            self.models = [whole]
        self.first = first_layer_names(whole)
        self.layout = Layout.of(self.models, self.first if self.grid.columns > 1 else ())
        self.buffers: dict[Cell, dict[str, torch.Tensor]] = {}
        self._shapes = [{name: shape for name, (_, shape) in own.items()} for own in self.layout.columns]

    @property
    def total_samples(self) -> int:
        """n, the number of samples of all rows."""
        return sum(self.samples)

    def delta(self, cell: Cell) -> float:
        """δˡ of this participant."""
        return self._deltas[cell]

    def origin(self, cell: Cell) -> Origin:
        """The private origin of this participant."""
        if cell not in self.blocks:
            raise InputError(f"{cell} is not in a grid of {self.grid.rows} × {self.grid.columns}")
        if self._common_origin:
            # One model for all: each column's part of layer 1 from a stream of its own, the rest the same for everyone.
            common = Cell(0, 0)
            seed = participant_seed(self.seed, common)
            first = self.first if self.grid.columns > 1 else ()
            return _CommonOrigin(self._deltas[common], self._shapes[cell.column], seed, None, cell.column, first)
        return Origin(self._deltas[cell], self._shapes[cell.column], participant_seed(self.seed, cell))

    def drawn(self, cell: Cell) -> dict[str, torch.Tensor]:
        """The participant's origin in the type of the model."""
        return {name: numbers.to(self.dtype) for name, numbers in self.origin(cell).draw()}

    def parameters(
        self, cell: Cell, displacement: torch.Tensor, only: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """The participant's origin plus the displacement, by name; of all parameters or only of some."""
        moved = self.layout.views(displacement, cell.column)
        drawn = self.origin(cell).draw(only)
        return {name: numbers.to(self.dtype) + moved[name] for name, numbers in drawn}

    def model(self, cell: Cell, displacement: torch.Tensor) -> torch.nn.Module:
        """The participant's confined model."""
        model = copy.deepcopy(self.models[cell.column])
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in self.parameters(cell, displacement).items():
                parameters[name].copy_(values)
            for name, values in self.buffers.get(cell, {}).items():
                model.get_buffer(name).copy_(values)
        return model

    def data(self, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        """The participant's samples in the type of the model, and their labels."""
        block = self.blocks[cell]
        return as_input(block.x, self.dtype), as_labels(block.y, self.dtype)

    def told(self) -> dict[str, str]:
        """Everything here that decides a run, so that a checkpoint is not taken up by another."""
        kept, data, deltas = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        for name, values in self.models[0].state_dict().items():
            if name not in self.layout.columns[0]:  # what is not drawn: frozen parameters and buffers
                kept.update(name.encode() + values.contiguous().numpy().tobytes())
        for cell, block in self.blocks.items():
            deltas.update(repr((cell, self._deltas[cell])).encode())
            data.update(np.ascontiguousarray(np.asarray(block.x)).data)
            data.update(np.ascontiguousarray(np.asarray(block.y)).data)
        several = len(set(self._deltas.values())) > 1
        model = " ".join(str(self.models[0]).split())
        return {
            "grid": f"{self.grid.rows}×{self.grid.columns} {self.mode if self.grid.columns > 1 else ''}".strip(),
            "data": data.hexdigest()[:16],
            "model": f"{model} in {self.dtype}, {sorted(self.layout.columns[0])}, {kept.hexdigest()[:8]}",
            "delta": deltas.hexdigest()[:16] if several else repr(next(iter(self._deltas.values()))),
            "seed": f"{self.seed}, common origin" if self._common_origin else repr(self.seed),
        }


def as_input(x: Any, dtype: torch.dtype) -> torch.Tensor:
    """Samples as a tensor; floats in the type of the model."""
    tensor = torch.as_tensor(x)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def as_labels(y: Any, dtype: torch.dtype) -> torch.Tensor:
    """Labels as a tensor: classes as long integers, numbers in the type of the model."""
    tensor = torch.as_tensor(y)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.long()


def sample_of(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """So many cells, drawn at random; all of them if there are no more."""
    chosen = np.random.default_rng(seed).permutation(len(cells))[:count]
    return [cells[i] for i in sorted(chosen)]


def judge(loss: Loss, outputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, float | None]:
    """The loss of outputs, and if the labels are classes, how many of them are right."""
    value = float(loss(outputs, labels))
    if labels.is_floating_point() or labels.ndim != 1 or outputs.ndim != 2:
        return value, None
    return value, float((outputs.argmax(dim=1) == labels).float().mean())


def _type_of(model: torch.nn.Module) -> torch.dtype:
    """The type of the parameters that are trained."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if not types:
        raise InputError("the model has no trainable parameter; set requires_grad on what shall be trained")
    if len(types) > 1 or not types <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(map(str, types)))
        raise InputError(f"the parameters are of type {names}; a simulation wants all float32 or all float64")
    return types.pop()


def _grid_of(blocks: Mapping[Cell, Block]) -> Grid:
    """The grid that these blocks fill; they must fit together."""
    grid = Grid(1 + max(cell.row for cell in blocks), 1 + max(cell.column for cell in blocks))
    if set(blocks) != set(grid.cells):
        missing = next((cell for cell in grid.cells if cell not in blocks), None)
        raise InputError(f"the blocks do not fill a grid of {grid.rows} × {grid.columns}: {missing} is missing")
    for cell, block in blocks.items():
        if len(block.x) != block.samples or block.samples == 0:
            raise InputError(
                f"{cell} has {len(block.x)} samples and {block.samples} labels; give as many, at least one"
            )
        beside, above = blocks[Cell(cell.row, 0)], blocks[Cell(0, cell.column)]
        if block.y is not beside.y and not np.array_equal(block.y, beside.y):
            raise InputError(f"{beside.cell} and {cell} are in one row and have different labels; a row has one set")
        if block.x.shape[1:] != above.x.shape[1:]:
            shape, others = tuple(block.x.shape[1:]), tuple(above.x.shape[1:])
            raise InputError(f"{cell} has features of shape {shape}, its column {others}")
    return grid
