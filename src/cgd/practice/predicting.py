"""Predictions from the command line: a file in, a file out; in a federation by columns, together with the row."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.practice.reading import read
from cgd.practice.scores import classification_scores, regression_scores

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from cgd.federation.file import Federation
    from cgd.network.peers import Peers
    from cgd.practice.model import ConfinedModel


def row_of(federation: Federation, participant: str) -> Federation:
    """The members of a participant's row, as a federation of its own for predictions.

    It has another name, so that what is summed for a prediction is not taken for a part of the training.

    Raises:
        InputError: there are no rows.
    """
    cell = federation.participant(participant).cell
    grid = federation.grid
    if cell is None or grid is None or grid.columns == 1:
        raise InputError(f"{federation.path} has no grid with several columns; predict without --federation")
    members = (each for each in federation.participants if each.cell is not None and each.cell.row == cell.row)
    alone = tuple(replace(each, cell=None) for each in members)
    columns = tuple(replace(each, held_by=None) for each in federation.data.columns) if federation.data else ()
    data = replace(federation.data, columns=columns) if federation.data else None
    name = f"{federation.name[:40]}.row-{cell.row}.predictions"
    # Opened by the row itself: neither an aggregator nor a hub knows of this federation.
    training = replace(federation.training, opening="mesh", aggregator="", minimum=FEWEST_MEMBERS)
    return replace(federation, name=name, participants=alone, data=data, training=training)


@dataclass(frozen=True)
class Predictions:
    """What a model says of the records of a file.

    Attributes:
        ids: of the records, if the table has an ID column.
        outputs: probabilities of all classes, or the predicted number in one column.
        classes: of a classification.
        scores: against the target, if the file has it; see `scores.py`.
        notes: what a person should know.
    """

    ids: tuple[str, ...] | None
    outputs: npt.NDArray[np.float64]
    classes: tuple[str, ...]
    scores: dict[str, Any] | None
    notes: tuple[str, ...]

    def write(self, file: TextIO, target: str) -> None:
        """Write them as CSV: the ID, the prediction, the probability of every class."""
        lines = csv.writer(file, lineterminator="\n")
        name = ["id"] if self.ids is not None else []
        lines.writerow([*name, f"predicted {target}", *(f"probability of {each}" for each in self.classes)])
        for place, row in enumerate(self.outputs):
            who = [self.ids[place]] if self.ids is not None else []
            if self.classes:
                lines.writerow([*who, self.classes[int(row.argmax())], *(f"{each:.6g}" for each in row)])
            else:
                lines.writerow([*who, f"{row[0]:.9g}"])


def predict_file(model: ConfinedModel, path: Path, row: Peers | None = None) -> Predictions:
    """What a model says of a file's records; if the file has the target too, also how good that is.

    Raises:
        InputError: the file cannot be used.
    """
    columns = model.preparation.columns
    ids = bool(model.data.id) and has_column(path, model.data.id)
    labelled = has_column(path, model.data.target)
    records, notes = read(path, model.data, columns, target=False, ids=ids or model.columns > 1)
    _, unseen = model.preparation.transform(records.take(np.arange(records.rows)))
    outputs = model.outputs(records, row)
