"""Predictions from the command line: a file in, a file out; in a federation by columns, together with the row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cgd.csv_writer import write_rows
from cgd.errors import InputError
from cgd.tabular.loading import read
from cgd.tabular.readers import open_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

    import numpy as np
    import numpy.typing as npt

    from cgd.federation.config import Federation
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.model import ConfinedModel


@dataclass(frozen=True)
class LoadedInputs:
    """The records of a file that a model is asked about.

    Attributes:
        records: all of them.
        notes: what a person should know.
        path: of the file.
    """

    records: TabularDataset
    notes: tuple[str, ...]
    path: Path


@dataclass(frozen=True)
class Predictions:
    """What a model says of the records of a file.

    Attributes:
        ids: of the records, if the table has an ID column.
        outputs: probabilities of all classes, or the predicted number in one column.
        classes: of a classification.
        scores: beside the target, if the file has it; see `scores.py`.
        notes: what a person should know.
    """

    ids: tuple[str, ...] | None
    outputs: npt.NDArray[np.float64]
    classes: tuple[str, ...]
    scores: dict[str, Any] | None
    notes: tuple[str, ...]

    def write(self, file: TextIO, target: str) -> None:
        """Write them as CSV: the ID, the prediction, the probability of every class; see `csv_writing.py`."""
        write_rows(file, self._rows(target))

    def _rows(self, target: str) -> Iterator[list[str]]:
        who = [] if self.ids is None else ["id"]
        yield [*who, f"predicted {target}", *(f"probability of {each}" for each in self.classes)]
        for place, row in enumerate(self.outputs):
            who = [] if self.ids is None else [self.ids[place]]
            if self.classes:
                yield [*who, self.classes[int(row.argmax())], *(f"{each:.6g}" for each in row)]
            else:
                yield [*who, f"{row[0]:.9g}"]


def questions(model: ConfinedModel, path: Path) -> LoadedInputs:
    """Read the records of a file, before anybody else is bothered.

    Raises:
        InputError: it cannot be used.
    """
    header = open_table(path, [each.name for each in model.columns], model.data.missing).names
    ids = model.towers > 1 or (bool(model.data.id) and model.data.id in header)
    records, notes = read(path, model.data, model.columns, target=False, ids=ids)
    return LoadedInputs(records, notes, path)


def answers(model: ConfinedModel, asked: LoadedInputs, row: Peers | None = None) -> Predictions:
    """What a model says of them; if the file has the target too, also how good that is.

    Raises:
        InputError: the row's members ask of other records.
    """
    _, unseen = model.preparation.transform(asked.records)
    outputs = model.outputs(asked.records, row)
    scores, notes = _scores(model, asked, outputs)
    return Predictions(asked.records.ids, outputs, model.preparation.classes, scores, (*asked.notes, *unseen, *notes))


def row_of(federation: Federation, participant: str) -> Federation:
    """The members of a participant's row, as a federation of its own for predictions.

    It has another name, so that what is summed for a prediction is not taken for a part of the training.

    Raises:
        InputError: there are no rows, or too few members in them.
    """
    grid, cell = federation.grid, federation.participant(participant).cell
    if cell is None or grid is None or grid.columns == 1:
        raise InputError(f"{federation.path} has no grid with several columns; predict without --federation")
    members = (each for each in federation.participants if each.cell is not None and each.cell.row == cell.row)
    alone = tuple(replace(each, cell=None) for each in members)
    name = f"{federation.name[:40]}.row-{cell.row}.predictions"
    # Opened by the row itself: neither an aggregator nor a hub knows of this federation.
    training = replace(federation.training, opening="mesh", aggregator="")
    return replace(federation, name=name, participants=alone, training=training, data=None, model=None)


def _scores(
    model: ConfinedModel, asked: LoadedInputs, outputs: npt.NDArray[np.float64]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """How good the outputs are, and why that is not known."""
    header = open_table(asked.path, [model.data.target], model.data.missing).names
    if model.data.target not in header:
        return None, ()
    try:
        labelled, _ = read(asked.path, model.data, (), target=True)
        if labelled.rows < asked.records.rows:
            return None, (f"not all rows have a {model.data.target}, so the predictions are not compared with it",)
        return model.scores(outputs, labelled), ()
    except InputError as error:
        return None, (f"the predictions are not compared with the target: {error}",)
