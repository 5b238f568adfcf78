"""Results of a simulation: every participant's model, the training losses and the evaluations on held-out data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.json_files import convert
from cgd.optim.grid import Cell
from cgd.optim.option_checks import check_number
from cgd.optim.vertical import fuse, log_probabilities, split_first_layer
from cgd.simulation.kept_model import KeptModels
from cgd.simulation.population import as_input, as_labels, loss_and_accuracy, sample_cells

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cgd.dp.accountant import Spent
    from cgd.optim.grid import Block
    from cgd.optim.origin import Origin
    from cgd.simulation.population import Loss, Participants
    from cgd.simulation.ray_cluster import WorkerReport


@dataclass(frozen=True)
class Evaluation:
    """Losses and accuracies on held-out data after a number of steps.

    Attributes:
        step: number of steps taken.
        loss: loss of each sampled participant.
        accuracy: accuracy of each sampled participant; empty if the labels are not classes.
        fused_loss: loss of each sampled row in `towers`, by late fusion.
        fused_accuracy: accuracy of each sampled row in `towers`, by late fusion.
        kept_loss: loss of the model that each sampled participant keeps, see `cgd.simulation.kept_model`.
        kept_accuracy: accuracy of the model that each sampled participant keeps.
        origin_scale: factor of the origin, c, that each sampled participant chose.
        common_loss: loss of the common model, start + displacement, as a list of one number.
        common_accuracy: accuracy of the common model, as a list of one number.
    """

    step: int
    loss: list[float]
    accuracy: list[float] = field(default_factory=list)
    fused_loss: list[float] = field(default_factory=list)
    fused_accuracy: list[float] = field(default_factory=list)
    kept_loss: list[float] = field(default_factory=list)
    kept_accuracy: list[float] = field(default_factory=list)
    origin_scale: list[float] = field(default_factory=list)
    common_loss: list[float] = field(default_factory=list)
    common_accuracy: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """The mean, the worst value and the standard deviation of a metric over several participants."""

    mean: float
    worst: float
    deviation: float

    @classmethod
    def of_losses(cls, values: list[float]) -> Spread:
        """Summarise losses; the highest is the worst."""
        return cls(fmean(values), max(values), pstdev(values))

    @classmethod
    def of_accuracies(cls, values: list[float]) -> Spread:
        """Summarise accuracies; the lowest is the worst."""
        return cls(fmean(values), min(values), pstdev(values))


@dataclass
class History:
    """Losses and evaluations of a run.

    Attributes:
        participants: names of the participants that are evaluated.
        training_loss: mean loss over all samples before each step, each sample under its own participant's model.
        evaluations: evaluations on held-out data.
    """

    participants: list[str] = field(default_factory=list)
    training_loss: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return numbers and lists only; empty lists of an evaluation are left out."""
        content = asdict(self)
        content["evaluations"] = [
            {key: value for key, value in each.items() if value != []} for each in content["evaluations"]
        ]
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> History:
        """Build a history from the output of `as_json`.

        Raises:
            InputError: it has other content.
        """
        return convert(content, cls)

    def check_complete(self, steps: int) -> None:
        """Check that it is the history of a finished run.

        Raises:
            InputError: losses or evaluations are missing, or impossible.
        """
        if not self.evaluations or self.evaluations[-1].step != steps or len(self.training_loss) != steps:
            raise InputError(f"its losses or evaluations are not those of {steps} steps")
        first = self.evaluations[0]
        for each in self.evaluations:
            accuracies = (*each.accuracy, *each.fused_accuracy)
            lengths = [len(values) for values in (each.loss, each.accuracy, each.fused_loss, each.fused_accuracy)]
            expected = [len(values) for values in (first.loss, first.accuracy, first.fused_loss, first.fused_accuracy)]
            if not each.loss or lengths != expected or any(not 0 <= value <= 1 for value in accuracies):
                raise InputError(
                    f"its evaluation after {each.step} steps has not a loss, and an accuracy from 0 to 1, for each of "
                    "the same participants"
                )


class SimulationResult:
    """Origins, displacement and history of all simulated participants; returned by `simulate`.

    Attributes:
        history: losses and evaluations of the run.
        engine: engine that computed the gradient sums, "fused" or "modules".
        flat_displacement: displacement as one vector: the first layers of all columns, then the shared layers.
        workers: what each worker of a cluster has used, after the last step; none without a cluster.
        spent: what the openings of a run with `privacy` used: epsilon, delta, mu, openings; None without `privacy`.
    """

    def __init__(
        self,
        participants: Participants,
        engine: str,
        history: History,
        loss: Loss,
        validation: Mapping[Cell, Block] | None = None,
    ) -> None:
        self._participants, self.engine, self.history, self._loss = participants, engine, history, loss
        self._kept = None if validation is None else KeptModels(participants, validation, loss)
        self.flat_displacement = torch.zeros(participants.layout.size, dtype=participants.dtype)
        self.spent: Spent | None = None
        self.workers: tuple[WorkerReport, ...] = ()

    def __repr__(self) -> str:
        grid = self._participants.grid
        mode = f", {self._participants.mode}" if grid.columns > 1 else ""
        return f"SimulationResult({grid.rows} × {grid.columns}{mode}, {self.steps} steps)"

    def __len__(self) -> int:
        return len(self._participants.blocks)

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return len(self.history.training_loss)

    @property
    def has_late_fusion(self) -> bool:
        """True if the rows predict by late fusion: in `towers`, with several columns."""
        return self._participants.grid.columns > 1 and self._participants.mode == "towers"

    def displacement_parts(self, *, single_parameters: bool) -> list[tuple[slice, bool]]:
        """Return slices of `flat_displacement`; each is True if it is summed over all participants.

        The others are summed within column groups.

        Args:
            single_parameters: a slice for each parameter, instead of one for each kind.
        """
        layout = self._participants.layout
        slices = layout.parameter_slices if single_parameters else [slice(0, layout.shared.start), layout.shared]
        return [(part, part.start >= layout.shared.start) for part in slices]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The grid cells of all participants."""
        return self._participants.grid.cells

    def displacement(self, column: int = 0) -> dict[str, torch.Tensor]:
        """Return the displacement of the parameters in this column; layers 2…N are the same in all columns."""
        views = self._participants.layout.views(self.flat_displacement, column)
        return {name: part.clone() for name, part in views.items()}

    def origin(self, cell: Cell) -> Origin:
        """Return a participant's private origin."""
        return self._participants.origin(cell)

    def model(self, cell: Cell, origin_scale: float = 1.0) -> torch.nn.Module:
        """Return a participant's model: start + displacement + origin_scale·origin.

        Args:
            cell: the participant. In a grid its model takes the features of its column.
            origin_scale: 1 for the confined model, as trained; 0 for the common model, which all participants can
                compute; `choose_origin_scale` returns what suits the participant.

        Raises:
            InputError: there is no such participant, or the scale is not a finite number.
        """
        scale = check_number("origin_scale", origin_scale)
        return next(self._participants.models_of(cell, self.flat_displacement, (scale,)))

    def choose_origin_scale(self, cell: Cell) -> float:
        """Return the factor of the origin that the participant chooses by the losses of the records it held out.

        Raises:
            InputError: the simulation was run without `keep`, or there is no such participant.
        """
        if self._kept is None:
            raise InputError("no records were held out to choose by; run the simulation with keep=0.1, a tenth of them")
        self._participants.grid.column_peers(cell)  # raises if the cell is not in the grid
        return self._kept.choose(cell, self.flat_displacement)

    @torch.no_grad()
    def outputs(self, cell: Cell, x: Any) -> torch.Tensor:
        """Return the outputs of a participant's model for samples with all features.

        In `towers` the model sees the features of its own column. In `joint` it gets the sum of the row's
        pre-activations of layer 1.
        """
        x = as_input(x, self._participants.dtype)
        model = self.model(cell).eval()
        if self.has_late_fusion:
            return self._tower(model, cell, x)
        if self._participants.grid.columns > 1:
            _, model = split_first_layer(model)
            x = self._pre_activations(cell.row, x)
        return self._participants.predict(model, x)

    @torch.no_grad()
    def fused_outputs(self, row: int, x: Any) -> torch.Tensor:
        """Return the log-probabilities of a row in `towers`, by late fusion, for samples with all features.

        Raises:
            InputError: the rows do not predict by late fusion.
        """
        if not self.has_late_fusion:
            raise InputError("there is nothing to fuse: late fusion needs the mode 'towers' and several columns")
        x = as_input(x, self._participants.dtype)
        peers = self._participants.grid.row_peers(Cell(row, 0))
        return fuse([log_probabilities(self._tower(self.model(cell).eval(), cell, x)) for cell in peers])

    def evaluate(
        self, x: Any, y: Any, cells: Sequence[Cell], rows: Sequence[int] = (), *, step: int | None = None
    ) -> Evaluation:
        """Return losses and accuracies of participants on these samples, and of rows if the labels are classes."""
        labels = as_labels(y, self._participants.dtype)
        own = [loss_and_accuracy(self._loss, self.outputs(cell, x), labels) for cell in cells]
        fused_rows = () if labels.is_floating_point() or labels.ndim != 1 else rows
        fused = [loss_and_accuracy(self._loss, self.fused_outputs(row, x), labels) for row in fused_rows]
        kept: list[list[float]] = []
        if self._kept is not None:
            scales, scores, common = self._kept.evaluate(self.flat_displacement, cells, (x, y), own)
            kept = [*_losses_and_accuracies(scores), scales, *_losses_and_accuracies([common])]
        return Evaluation(
            self.steps if step is None else step, *_losses_and_accuracies(own), *_losses_and_accuracies(fused), *kept
        )

    def sample(self, count: int, seed: int = 0) -> list[Cell]:
        """Return the cells of `count` participants drawn at random; all cells if there are fewer."""
        return sample_cells(self.cells, count, seed)

    def _tower(self, model: torch.nn.Module, cell: Cell, x: torch.Tensor) -> torch.Tensor:
        widths = [self._participants.blocks[Cell(0, c)].x.shape[1] for c in range(cell.column + 1)]
        output: torch.Tensor = model(x[:, sum(widths[:-1]) : sum(widths)])
        return output

    def _pre_activations(self, row: int, x: torch.Tensor) -> torch.Tensor:
        """Return Σ_j x_j·w_ij + b_ij over the row, as one product with its first layers side by side."""
        weight, *bias = self._participants.first_layer
        peers = self._participants.grid.row_peers(Cell(row, 0))
        layers = [
            self._participants.parameters(cell, self.flat_displacement, self._participants.first_layer)
            for cell in peers
        ]
        z = x @ torch.cat([layer[weight] for layer in layers], dim=1).T
        return z + torch.stack([layer[bias[0]] for layer in layers]).sum(dim=0) if bias else z


def _losses_and_accuracies(scores: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float]]:
    return [loss for loss, _ in scores], [accuracy for _, accuracy in scores if accuracy is not None]
