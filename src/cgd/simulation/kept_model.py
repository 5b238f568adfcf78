"""The model that a participant keeps after training: start + displacement + c·origin, with a c of its own choice.

Everybody knows start and displacement. The origin protects a participant during the training; afterwards it is noise in
the participant's model. With c = 1 the model is the confined one, as trained. With c = 0 it is the *common model*,
start + displacement: all participants can compute it, and so it is not private. Each chooses its c by the losses of
records of its own that it did not train on, and tells nobody.

Few records do not tell which c is best. So a participant takes the smallest c whose losses are not significantly
larger than those of the best one: the common model, unless its own records speak against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from cgd.errors import InputError
from cgd.optim.grid import Block
from cgd.simulation.population import as_input, as_labels, loss_and_accuracy, participant_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.optim.grid import Cell
    from cgd.simulation.population import Loss, Participants

    Score = tuple[float, float | None]

SIGNIFICANCE = 0.01
"""Level of the one-sided t-test by which a c is found to be worse than the best one."""
ORIGIN_SCALES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The values of c that participants choose from."""


def hold_out(blocks: Mapping[Cell, Block], part: float, seed: int) -> tuple[dict[Cell, Block], dict[Cell, Block]]:
    """Divide each participant's records at random into those it trains on and those by which it chooses c.

    Args:
        blocks: data of all participants, in one column.
        part: part of each participant's records that is held out, at least one record.
        seed: seed of the simulation.

    Raises:
        InputError: `part` is invalid, there are several columns, or a participant has only one record.
    """
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part < 1:
        raise InputError(f"keep is {part!r}; it is the part of the records that choose c, above 0 and below 1")
    training: dict[Cell, Block] = {}
    validation: dict[Cell, Block] = {}
    for cell, block in blocks.items():
        if cell.column:
            raise InputError("keep is set and there are several columns; kept models are for one column, set keep to 0")
        if block.samples < 2:
            raise InputError(f"{cell} has one record, and keep needs one to choose c; set keep to 0, or use fewer rows")
        order = np.random.default_rng([*participant_seed(seed, cell)]).permutation(block.samples)
        held_out = min(block.samples - 1, max(1, round(part * block.samples)))
        chosen = [torch.from_numpy(np.sort(each)) for each in np.split(order, [held_out])]
        for own, records in zip((validation, training), chosen, strict=True):
            x, y = (torch.as_tensor(values)[records] for values in (block.x, block.y))
            own[cell] = Block(cell, x, y)
    return training, validation


def first_not_worse(losses: npt.NDArray[np.float64]) -> int:
    """Return the first row that is not significantly larger than the row with the least mean, by a paired t-test.

    Args:
        losses: candidates × records. With one record nothing is significant, and the first candidate is taken.

    Examples:
        >>> first_not_worse(np.array([[0.9, 1.0, 1.1], [0.1, 0.2, 0.3]]))
        1
        >>> first_not_worse(np.array([[0.9, 0.1, 0.4], [0.1, 0.2, 0.3]]))
        0
    """
    from scipy import stats

    if losses.shape[1] < 2:
        return 0
    excess = losses - losses[np.argmin(losses.mean(axis=1))]
    errors = excess.std(axis=1, ddof=1) / np.sqrt(losses.shape[1])
    limit = stats.t.isf(SIGNIFICANCE, losses.shape[1] - 1)
    return int(np.argmax(excess.mean(axis=1) <= limit * errors))


class KeptModels:
    """Chooses and evaluates the models that participants keep.

    Args:
        participants: simulated participants, in one column.
        validation: records of each participant by which it chooses c.
        loss: loss function of outputs and labels, a mean over the samples.
    """

    def __init__(self, participants: Participants, validation: Mapping[Cell, Block], loss: Loss) -> None:
        self._participants, self._validation, self._loss = participants, validation, loss

    @torch.no_grad()
    def choose(self, cell: Cell, displacement: torch.Tensor) -> float:
        """Return the c of ORIGIN_SCALES that the participant takes, by the losses of its validation records."""
        x, y = self._samples((self._validation[cell].x, self._validation[cell].y))
        losses = []
        for model in self._participants.models_of(cell, displacement, ORIGIN_SCALES):
            outputs = self._participants.predict(model, x)
            losses.append([float(self._loss(outputs[i : i + 1], y[i : i + 1])) for i in range(len(y))])
        return ORIGIN_SCALES[first_not_worse(np.array(losses))]

    def _samples(self, samples: tuple[object, object]) -> tuple[torch.Tensor, torch.Tensor]:
        return as_input(samples[0], self._participants.dtype), as_labels(samples[1], self._participants.dtype)

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, samples: tuple[object, object]) -> Score:
        """Return the loss and the accuracy of a model; no accuracy without classes."""
        x, y = self._samples(samples)
        return loss_and_accuracy(self._loss, self._participants.predict(model, x), y)

    def evaluate(
        self, displacement: torch.Tensor, cells: Sequence[Cell], test: tuple[object, object], confined: Sequence[Score]
    ) -> tuple[list[float], list[Score], Score]:
        """Return the c of each participant, the results of the kept models, and those of the common model.

        Args:
            displacement: displacement of all participants.
            cells: participants to evaluate.
            test: samples and labels.
            confined: results of the participants' confined models on these samples.
        """
        common = self._score(next(self._participants.models_of(cells[0], displacement, (0.0,))), test)
        scales: list[float] = []
        scores: list[Score] = []
        for cell, own in zip(cells, confined, strict=True):
            scales.append(self.choose(cell, displacement))
            known = {1.0: own} if self._participants.buffers.get(cell) else {0.0: common, 1.0: own}
            if scales[-1] not in known:
                model = next(self._participants.models_of(cell, displacement, scales[-1:]))
                known[scales[-1]] = self._score(model, test)
            scores.append(known[scales[-1]])
        return scales, scores, common
