"""Results of a participant for itself, after the last sum: the model that it keeps, and a comparison with one alone.

Nobody waits for it. The confined model and the report are saved before; if the process is stopped here, the same
command does it again. If another model is kept, the confined one is stored beside it, in the folder `confined`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors.torch import load as load_tensors

from cgd.reporting.run_scores import RegressionScores
from cgd.tabular.alone import compare_alone, compare_together
from cgd.tabular.evaluation import evaluate
from cgd.tabular.kept_model import choose_model
from cgd.tabular.model import MODEL_FILE, ConfinedModel, load_model
from cgd.tabular.rare_values import fold_rare_values
from cgd.tabular.training import SplitRecords, validation_mask

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from cgd.reporting.run_file import AnyRun
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.kept_model import Keep
    from cgd.tabular.settings import TabularSettings

CONFINED = "confined"
"""The folder with the confined model, if another one is kept."""
DISPLACEMENT_FILE = "displacement.safetensors"
"""D, from the end of the training until the model to keep is saved; all members know it."""
NOT_WANTED = "it was not trained (--no-alone)"


@dataclass(frozen=True)
class FinishedTraining:
    """A finished training together.

    Attributes:
        model: the confined model.
        trained: our records in it.
        outputs: the model's outputs for our validation records.
    """

    model: ConfinedModel
    trained: SplitRecords
    outputs: npt.NDArray[np.float64]


@dataclass(frozen=True)
class OwnResults:
    """The results after the last sum.

    Attributes:
        content: parts of run.json, to add to those of the training or to replace them.
        kept: the model to keep; None if it is the confined one.
    """

    content: dict[str, Any]
    kept: ConfinedModel | None = None


def own_results(
    settings: TabularSettings,
    finished: FinishedTraining,
    seed: bytes,
    *,
    keep: Keep,
    alone: bool,
    delta: float | None = None,
) -> OwnResults:
    """Choose the model to keep, train one alone, and compare them.

    Args:
        settings: those of the training.
        finished: its result.
        seed: our seed.
        keep: which model to keep; "confined" for the one that was trained.
        alone: whether to train a model of our own records alone.
        delta: our own δ, if not that of the federation file.
    """
    trained, content = finished.trained, dict[str, Any]()
    outputs, kept = {"together": finished.outputs}, None
    if keep != "confined":
        choice = choose_model(settings, finished.model, trained, seed, keep=keep, delta=delta)
        content["kept"] = choice.summary
        if choice.outputs is not None:
            outputs[keep] = choice.outputs
        if choice.model is not finished.model:
            kept = choice.model
            content |= evaluate(kept, trained, choice.outputs)
    if alone:
        content["comparison"] = compare_alone(settings, trained, outputs, seed, delta=delta)
    elif len(outputs) > 1:
        content["comparison"] = compare_together(settings, trained, outputs, NOT_WANTED)
    return OwnResults(content, kept)


def load_finished(
    settings: TabularSettings, records: TabularDataset, folder: Path, run: AnyRun, seed: bytes
) -> FinishedTraining | None:
    """Return the training of a finished run from its folder, without the other members.

    Not for a grid with several columns, whose models predict together.

    Args:
        settings: those of the training.
        records: our records.
        folder: the folder of the run.
        run: the content of run.json, without a comparison.
        seed: our seed.

    Returns:
        The training; None if the saved model cannot be read, or has other scores on these records: then they are not
        those of the run. It is no error either, because the others may wait for us.
    """
    try:
        return _load(settings, records, folder, run, seed)
    except Exception:  # not logged: a message may contain values of records
        return None


def _load(
    settings: TabularSettings, records: TabularDataset, folder: Path, run: AnyRun, seed: bytes
) -> FinishedTraining | None:
    if settings.privacy is None:
        records = fold_rare_values(records, settings.data, settings.own_columns)
    # An earlier process may have saved the model to keep, and stopped before run.json.
    source = folder / CONFINED if (folder / CONFINED / MODEL_FILE).exists() else folder
    model = load_model(source, function=settings.model.function or None)
    path = folder / DISPLACEMENT_FILE
    displacement = load_tensors(path.read_bytes()) if path.exists() else None
    held_out = validation_mask(settings, records, seed)
    trained = SplitRecords(records, held_out, model.preprocessing, 0.0, displacement=displacement)
    scores = run.validation
    if scores is None or trained.validation.rows != scores.records:
        return None
    outputs = model.outputs(trained.validation)
    name = "rmse" if isinstance(scores, RegressionScores) else "accuracy"
    if not math.isclose(model.scores(outputs, trained.validation)[name], getattr(scores, name), rel_tol=1e-6):
        return None
    return FinishedTraining(model, trained, outputs)
