"""Train the same model on our own records only, and compare it with that of all: what would we have had alone?

Alone means: without anything that comes from the others. The model, the optimiser, the learning rate and the largest
number of steps are those of the federation file. Means, deviations and categories are those of our own training
records. A part of these is set aside for early stopping, as large as the validation split. So the validation records,
on which both models are scored, influence the model of our own in no way. With [privacy], it is trained without noise,
because nothing is sent; in a grid with several columns, it uses our own columns.

All of it happens on this machine, after the last sum: nothing is sent, and nobody waits for it.
"""

from __future__ import annotations

import hmac
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import DivergenceError
from cgd.local import solo_peers
from cgd.reporting.run_scores import RegressionScores
from cgd.tabular.columns import Categorical
from cgd.tabular.comparison import compare_classifiers, compare_regressions
from cgd.tabular.model import ConfinedModel, load_model
from cgd.tabular.rare_values import fold_rare_values, value_counts
from cgd.tabular.training import train, validation_mask

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from cgd.reporting.run_scores import ClassificationScores
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import EvalRecord, TrainingResult

MIN_SECONDS = 600.0
"""Training alone takes this long at most, or as long as the training together, which takes as many gradients."""


class _TooLongError(Exception):
    """Training alone takes too long."""


def compare_alone(
    settings: TabularSettings,
    trained: TrainingResult,
    outputs: npt.NDArray[np.float64],
    seed: bytes,
    *,
    delta: float | None = None,
) -> dict[str, Any]:
    """Train alone, and compare the result with the training together on our validation records.

    Args:
        settings: those of the training together.
        trained: its result.
        outputs: the outputs of its model for our validation records.
        seed: our seed, from which another one is derived.
        delta: our own δ, if not that of the federation file.

    Returns:
        The comparison for run.json: records, training (the number of records that we train on alone), models; or
        unavailable, with the reason. No failure here is an error, because the run is finished.
    """
    parts = trained.records, trained.held_out, trained.preprocessing.classes
    return _compare(settings, *parts, outputs, seed, delta, trained.seconds)


def compare_finished(
    settings: TabularSettings,
    records: TabularDataset,
    folder: Path,
    scores: ClassificationScores | RegressionScores,
    seed: bytes,
    *,
    delta: float | None = None,
) -> dict[str, Any] | None:
    """Compare the saved model of a finished run as `compare_alone` does, without the other members.

    Not for a grid with several columns, whose models predict together.

    Args:
        settings: those of the training together.
        records: our records.
        folder: the folder of the run.
        scores: its scores.
        seed: our seed.
        delta: our own δ.

    Returns:
        The comparison; None if the saved model cannot be read, or has other scores on these records: then they are not
        those of the run. It is no error either, because the others may wait for us.
    """
    try:
        return _compare_saved(settings, records, folder, scores, seed, delta)
    except Exception:  # not logged: a message may contain values of records
        return None


def _compare_saved(
    settings: TabularSettings,
    records: TabularDataset,
    folder: Path,
    scores: ClassificationScores | RegressionScores,
    seed: bytes,
    delta: float | None,
) -> dict[str, Any] | None:
    if settings.privacy is None:
        records = fold_rare_values(records, settings.data, settings.own_columns)
    model = load_model(folder, function=settings.model.function or None)
    held_out = validation_mask(settings, records, seed)
    validation = records.take(held_out)
    if validation.rows != scores.records:
        return None
    outputs = model.outputs(validation)
    name = "rmse" if isinstance(scores, RegressionScores) else "accuracy"
    if not math.isclose(model.scores(outputs, validation)[name], getattr(scores, name), rel_tol=1e-6):
        return None
    return _compare(settings, records, held_out, model.preprocessing.classes, outputs, seed, delta, 0.0)


def _compare(
    settings: TabularSettings,
    records: TabularDataset,
    held_out: npt.NDArray[np.bool_],
    classes: tuple[str, ...],
    outputs: npt.NDArray[np.float64],
    seed: bytes,
    delta: float | None,
    seconds: float,
) -> dict[str, Any]:
    own, validation = records.take(~held_out), records.take(held_out)
    parts: dict[str, Any] = {"records": validation.rows, "training": own.rows, "models": []}
    if reason := _nothing_to_learn(own):
        return parts | {"unavailable": reason}
    peers = solo_peers(
        hmac.digest(seed, b"cgd alone", "sha256"), bound=settings.training.bound, ring_bits=settings.training.ring_bits
    )
    try:
        alone = settings_alone(settings, classes, own)
        limit = time.monotonic() + max(MIN_SECONDS, seconds)
        model = ConfinedModel.from_training(train(peers, alone, own, delta=delta, progress=_stop_at(limit)), alone, {})
        both = {"alone": model.outputs(validation), "together": outputs}
        if not all(np.isfinite(each).all() for each in both.values()):
            raise DivergenceError("a model predicts values that are not finite")
        if settings.data.task == "regression":
            models = compare_regressions(both, np.asarray(validation.target, dtype=np.float64))
        else:
            models = compare_classifiers(both, np.asarray(model.preprocessing.encode_target(validation)))
    except _TooLongError:
        return parts | {"unavailable": "training alone took much longer than training together, and was stopped"}
    except Exception as error:  # whatever it is, for example in a network of the user's own
        return parts | {"unavailable": f"training alone failed: {error}"}
    return parts | {"models": models}


def settings_alone(settings: TabularSettings, classes: tuple[str, ...], own: TabularDataset) -> TabularSettings:
    """Return the settings of a training on our own columns without others.

    Args:
        settings: those of the training together.
        classes: its classes; both models must have the same. A class that we do not have is not learned.
        own: our training records, whose values are the categories: nothing is disclosed, and nobody else has to have
            them.
    """
    columns = (
        replace(each, categories=tuple(value_counts(own.categories[each.name])), rare=None) if each.is_learned else each
        for each in settings.own_columns
    )
    # Nothing is disclosed, so few numbers are used, too.
    data = replace(settings.data, columns=tuple(columns), classes=classes, rare=1)
    return replace(settings, data=data, column=0, columns=1, privacy=None)


def _stop_at(limit: float) -> Callable[[EvalRecord], None]:
    def check(_: EvalRecord) -> None:
        if time.monotonic() > limit:
            raise _TooLongError

    return check


def _nothing_to_learn(own: TabularDataset) -> str:
    """Return the reason why nothing can be learned from these records; empty if something can."""
    target = own.target
    if isinstance(target, Categorical):
        present = [name for name, count in zip(target.names, target.counts(), strict=True) if count]
        only = f"the class {present[0]!r}" if len(present) == 1 else ""
    else:
        only = "the same value of the target" if target is not None and own.rows and not np.ptp(target) else ""
    if not own.rows:
        return "we have no training records"
    return f"all our training records have {only}, so nothing can be learned from them alone" if only else ""
