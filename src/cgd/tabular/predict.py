"""Predict the records of a source for the command line; in a grid with several columns, together with the row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.files import write_rows
from cgd.tabular.dataset import read_dataset
from cgd.tabular.intersection import intersect
from cgd.tabular.sources import open_source
from cgd.tabular.unit_checks import compare_with_training
from cgd.tabular.written_numbers import is_total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    import numpy.typing as npt

    from cgd.federation.config import Federation
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.model import ConfinedModel
    from cgd.tabular.readers import Table
    from cgd.tabular.sources import TableSource


@dataclass(frozen=True)
class LoadedInputs:
    """The records to predict.

    Attributes:
        records: the records.
        notes: notes for the user.
        source: where they are.
        decimal: the decimal sign of its numbers.
    """

    records: TabularDataset
    notes: tuple[str, ...]
    source: TableSource
    decimal: str = "."


@dataclass(frozen=True)
class Predictions:
    """The predictions for the records of a file.

    Attributes:
        ids: IDs of the records, if the table has an ID column.
        outputs: probabilities of all classes, or the predicted number in one column.
        classes: the classes; empty in a regression.
        scores: scores against the target, if the file has it; see `metrics.py`.
        notes: notes for the user.
    """

    ids: tuple[str, ...] | None
    outputs: npt.NDArray[np.float64]
    classes: tuple[str, ...]
    scores: dict[str, Any] | None
    notes: tuple[str, ...]

    def write(self, file: TextIO, target: str) -> None:
        """Write ID, prediction and the probability of every class as CSV; see `files.py`."""
        write_rows(file, self._rows(target))

    def _rows(self, target: str) -> Iterator[list[str]]:
        id_cells = [] if self.ids is None else ["id"]
        yield [*id_cells, f"predicted {target}", *(f"probability of {each}" for each in self.classes)]
        for index, row in enumerate(self.outputs):
            id_cells = [] if self.ids is None else [self.ids[index]]
            if self.classes:
                yield [*id_cells, self.classes[int(row.argmax())], *(f"{each:.6g}" for each in row)]
            else:
                yield [*id_cells, f"{row[0]:.9g}"]


def load_inputs(model: ConfinedModel, source: TableSource, decimal: str = ".") -> LoadedInputs:
    """Read the records to predict, before anything is sent.

    Args:
        model: the model.
        source: where they are.
        decimal: the decimal sign of its numbers, a point or a comma.

    Raises:
        InputError: the file cannot be used.
    """
    table = open_source(source, [each.source for each in model.columns], model.data.missing)
    ids = model.towers > 1 or (bool(model.data.id) and model.data.id in table.names)
    records, notes = read_dataset(source, model.data, model.columns, target=False, ids=ids, decimal=decimal)
    unlike = compare_with_training(records, model.preprocessing, table.locate)
    return LoadedInputs(records, (*notes, *unlike, *_total_notes(table)), source, decimal)


def predict(
    model: ConfinedModel,
    inputs: LoadedInputs,
    row: Peers | None = None,
    *,
    salt: bytes = b"",
    same_records: bool = False,
    show_message: Callable[[str], None] = lambda _: None,
) -> Predictions:
    """Predict the records, and score the predictions if the file has the target.

    Args:
        model: the model.
        inputs: the records.
        row: in a grid with several columns, the members of the row.
        salt: the secret of the row, if its members find out which records they have in common.
        same_records: all members of the row have the same records, so there is nothing to find out.
        show_message: called with messages about an intersection.

    Raises:
        InputError: the row's members predict other records; or see `intersect`.
    """
    records, ids = inputs.records, inputs.records.ids
    mask: npt.NDArray[np.bool_] | None = None
    if row is not None and model.data.intersection is not None and not same_records:
        common = intersect(records, row, model.data, salt, show_message)
        records, mask = common.records, common.mask
        ids = None if ids is None else tuple(each for each, kept in zip(ids, mask, strict=True) if kept)
    _, unseen = model.preprocessing.transform(records)
    outputs = model.outputs(records, row)
    scores, notes = _score(model, inputs, outputs, mask)
    return Predictions(ids, outputs, model.preprocessing.classes, scores, (*inputs.notes, *unseen, *notes))


def row_federation(federation: Federation, participant: str) -> Federation:
    """Return a federation of the members of a participant's row, for predictions.

    It has another name, so that the sums of a prediction are not confused with those of the training.

    Raises:
        InputError: the grid does not have several columns, or a row has too few members.
    """
    grid, cell = federation.grid, federation.participant(participant).cell
    if cell is None or grid is None or grid.columns == 1:
        raise InputError(f"{federation.path} has no grid with several columns; predict without --federation")
    members = (each for each in federation.participants if each.cell is not None and each.cell.row == cell.row)
    participants = tuple(replace(each, cell=None) for each in members)
    name = f"{federation.name[:40]}.row-{cell.row}.predictions"
    # The row opens the sums itself: neither an aggregator nor a hub takes part in this federation.
    training = replace(federation.training, opening="mesh", aggregator="")
    return replace(federation, name=name, participants=participants, training=training, data=None, model=None)


def _total_notes(table: Table) -> Iterator[str]:
    """Yield a note if the last row of a table, in any column, has a word for totals or means."""
    last: list[Any] = []
    for arrays in table.batches(range(len(table.names))):
        last = [array[-1].as_py() for array in arrays if len(array)] or last
    found = [text for text in last if isinstance(text, str) and is_total(text.strip())]
    if found:
        yield f"the last row has {found[0].strip()!r}, and is predicted; remove it if it is a total and no record"


def _score(
    model: ConfinedModel, inputs: LoadedInputs, outputs: npt.NDArray[np.float64], mask: npt.NDArray[np.bool_] | None
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the scores of the outputs, or None and a note with the reason; `mask` is of the rows with outputs."""
    header = open_source(inputs.source, [model.data.target], model.data.missing).names
    if model.data.target not in header:
        return None, ()
    try:
        labelled, _ = read_dataset(inputs.source, model.data, (), target=True, decimal=inputs.decimal)
        if mask is None:
            mask = np.ones(inputs.records.rows, dtype=np.bool_)
        labelled = labelled.take(mask[labelled.places])
        if not labelled.rows:
            return None, (f"no predicted row has a value of {model.data.target!r}, so the predictions are not scored",)
        place_of = np.cumsum(mask) - 1
        scores = model.scores(outputs[place_of[labelled.places]], labelled)
        return scores, _unlabelled_note(model, labelled, len(outputs))
    except InputError as error:
        return None, (f"the predictions are not scored: {error}",)


def _unlabelled_note(model: ConfinedModel, labelled: TabularDataset, predicted: int) -> tuple[str, ...]:
    without = predicted - labelled.rows
    if not without:
        return ()
    rows = "row has" if without == 1 else "rows have"
    scored = f"so the predictions are scored on {labelled.rows:,} of {predicted:,} rows"
    return (f"{without:,} {rows} no value of {model.data.target!r}, {scored}",)
