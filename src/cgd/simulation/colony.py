"""A simulated colony: everybody's origin, one displacement, and so everybody's model."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.optim.grid import Cell
from cgd.optim.vertical import fuse, log_probabilities, split_first_layer
from cgd.simulation.population import as_input, as_labels, judge, sample_of
from cgd.simulation.result import Evaluation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.optim.origin import Origin
    from cgd.simulation.population import Loss, Participants
    from cgd.simulation.result import History


class SimulationResult:
    """What `simulate` returns.

    Attributes:
        history: the course of the run.
        engine: what computed the gradient sums, "fused" or "modules".
        flat: the displacement as one vector: the first layers of all columns, then what everybody has in common.
    """

    def __init__(self, participants: Participants, engine: str, history: History, loss: Loss) -> None:
        self._participants, self.engine, self.history, self._loss = participants, engine, history, loss
        self.flat = torch.zeros(participants.layout.size, dtype=participants.dtype)

    def __repr__(self) -> str:
        grid = self._participants.grid
        mode = f", {self._participants.mode}" if grid.columns > 1 else ""
        return f"Colony({grid.rows} × {grid.columns}{mode}, {self.steps} steps)"

    def __len__(self) -> int:
        return len(self._participants.blocks)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return len(self.history.training_loss)

    @property
    def fuses(self) -> bool:
        """Whether its rows predict by late fusion."""
        return self._participants.grid.columns > 1 and self._participants.mode == "towers"

    @property
    def parts(self) -> tuple[slice, slice]:
        """Of the flat displacement: what is summed within column groups, and what is summed over everyone."""
        shared = self._participants.layout.shared
        return slice(0, shared.start), shared

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Everybody's place."""
        return self._participants.grid.cells

    def displacement(self, column: int = 0) -> dict[str, torch.Tensor]:
        """The common displacement of the parameters of everybody in this column; of layers 2…N it is everyone's."""
        return {name: part.clone() for name, part in self._participants.layout.views(self.flat, column).items()}

    def origin(self, cell: Cell) -> Origin:
        """A participant's private origin."""
        return self._participants.origin(cell)

    def model(self, cell: Cell) -> torch.nn.Module:
        """A participant's confined model. In a grid it takes the features of the participant's column."""
        return self._participants.model(cell, self.flat)

    @torch.no_grad()
    def outputs(self, cell: Cell, x: Any) -> torch.Tensor:
        """What a participant's model says of samples with all features.

        In `towers` it sees those of its own column. In `joint` its row adds up the pre-activations of layer 1 for it.
        """
        x = as_input(x, self._participants.dtype)
        model = self.model(cell).eval()
        if self.fuses:
            return self._tower(model, cell, x)
        if self._participants.grid.columns > 1:
            _, model = split_first_layer(model)
            x = self._pre_activations(cell.row, x)
        output: torch.Tensor = model(x)
        return output

    @torch.no_grad()
    def fused_outputs(self, row: int, x: Any) -> torch.Tensor:
        """Log-probabilities of a whole row in `towers`, by late fusion, for samples with all features.

        Raises:
            InputError: the rows of this colony do not fuse.
        """
        if not self.fuses:
            raise InputError(
                "there is nothing to fuse: only the towers of a row with several columns add their outputs"
            )
        x = as_input(x, self._participants.dtype)
        peers = self._participants.grid.row_peers(Cell(row, 0))
        return fuse([log_probabilities(self._tower(self.model(cell).eval(), cell, x)) for cell in peers])

    def evaluate(
        self, x: Any, y: Any, cells: Sequence[Cell], rows: Sequence[int] = (), *, step: int | None = None
    ) -> Evaluation:
        """Losses and accuracies of some participants on these samples; of some rows, too, where rows tell classes."""
        labels = as_labels(y, self._participants.dtype)
        own = [judge(self._loss, self.outputs(cell, x), labels) for cell in cells]
        fusing = () if labels.is_floating_point() or labels.ndim != 1 else rows
        fused = [judge(self._loss, self.fused_outputs(row, x), labels) for row in fusing]
        return Evaluation(
            self.steps if step is None else step,
            [loss for loss, _ in own],
            [accuracy for _, accuracy in own if accuracy is not None],
            [loss for loss, _ in fused],
            [accuracy for _, accuracy in fused if accuracy is not None],
        )

    def sample(self, count: int, seed: int = 0) -> list[Cell]:
        """So many participants, drawn at random; all of them if there are no more."""
        return sample_of(self.cells, count, seed)

    def _tower(self, model: torch.nn.Module, cell: Cell, x: torch.Tensor) -> torch.Tensor:
        widths = [self._participants.blocks[Cell(0, c)].x.shape[1] for c in range(cell.column + 1)]
        output: torch.Tensor = model(x[:, sum(widths[:-1]) : sum(widths)])
        return output

    def _pre_activations(self, row: int, x: torch.Tensor) -> torch.Tensor:
        """Σ_j x_j·w_ij + b_ij over the row, as one product with its first layers side by side."""
        weight, *bias = self._participants.first
        peers = self._participants.grid.row_peers(Cell(row, 0))
        placed = [self._participants.parameters(cell, self.flat, self._participants.first) for cell in peers]
        z = x @ torch.cat([own[weight] for own in placed], dim=1).T
        return z + torch.stack([own[bias[0]] for own in placed]).sum(dim=0) if bias else z
