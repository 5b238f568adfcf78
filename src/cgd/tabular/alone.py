"""Train the same model on our own records only, and compare it with ours: what would we have had alone?

Alone means: without anything that comes from the others. The model, the optimiser, the learning rate and the largest
number of steps are those of the federation file. Means, deviations and categories are those of our own training
records. A part of these is set aside for early stopping, as large as the validation split. So the validation records,
on which both models are scored, influence the model of our own in no way. With [privacy], it is trained without noise,
because nothing is sent; in a grid with several columns, it uses our own columns.

All of it happens on this machine, after the last sum: nothing is sent, and nobody waits for it.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import DivergenceError
from cgd.local import solo_peers
from cgd.tabular.columns import Categorical
from cgd.tabular.comparison import compare_classifiers, compare_regressions
from cgd.tabular.model import ConfinedModel
from cgd.tabular.rare_values import value_counts
from cgd.tabular.training import train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import EvalRecord, SplitRecords

    Floats = npt.NDArray[np.float64]

MIN_SECONDS = 600.0
"""Training alone takes this long at most, or as long as the training together, which takes as many gradients."""


class _TooLongError(Exception):
    """Training alone takes too long."""


def compare_alone(
    settings: TabularSettings,
    trained: SplitRecords,
    outputs: Mapping[str, Floats],
    seed: bytes,
    *,
    delta: float | None = None,
) -> dict[str, Any]:
    """Train alone, and compare the result with our models of the training together on our validation records.

    Args:
        settings: those of the training together.
        trained: our records in it.
        outputs: the outputs of its models for our validation records, by their names.
        seed: our seed, from which another one is derived.
        delta: our own δ, if not that of the federation file.

    Returns:
        The comparison for run.json: records, training (the number of records that we train on alone), models; or
        unavailable, with the reason. No failure here is an error, because the run is finished.
    """
    if reason := _nothing_to_learn(trained.own):
        return compare_together(settings, trained, outputs, reason)
    try:
        model = train_alone(settings, trained, seed, delta=delta)
        models = _compare(settings, trained, {"alone": model.outputs(trained.validation), **outputs})
    except _TooLongError:
        reason = "training alone took much longer than training together, and was stopped"
    except Exception as error:  # whatever it is, for example in a network of the user's own
        reason = f"training alone failed: {error}"
    else:
        return {"records": trained.validation.rows, "training": trained.own.rows, "models": models}
    return compare_together(settings, trained, outputs, reason)


def train_alone(
    settings: TabularSettings, trained: SplitRecords, seed: bytes, *, delta: float | None = None
) -> ConfinedModel:
    """Return a model of our own training records alone; the arguments are those of `compare_alone`."""
    config = settings.training
    peers = solo_peers(hmac.digest(seed, b"cgd alone", "sha256"), bound=config.bound, ring_bits=config.ring_bits)
    alone = settings_alone(settings, trained.preprocessing.classes, trained.own)
    limit = time.monotonic() + max(MIN_SECONDS, trained.seconds)
    result = train(peers, alone, trained.own, delta=delta, progress=_stop_at(limit))
    return ConfinedModel.from_training(result, alone, {})


def compare_together(
    settings: TabularSettings, trained: SplitRecords, outputs: Mapping[str, Floats], reason: str
) -> dict[str, Any]:
    """Compare our models of the training together with each other, without one of our own records alone.

    Args:
        settings: those of the training together.
        trained: our records in it.
        outputs: the outputs of its models for our validation records, by their names.
        reason: why there is no model of our own records alone.
    """
    models = _compare(settings, trained, outputs) if len(outputs) > 1 else []
    parts = {"records": trained.validation.rows, "training": trained.own.rows}
    return {**parts, "models": models, "unavailable": reason}


def _compare(settings: TabularSettings, trained: SplitRecords, outputs: Mapping[str, Floats]) -> list[dict[str, Any]]:
    if not all(np.isfinite(each).all() for each in outputs.values()):
        raise DivergenceError("a model predicts values that are not finite")
    if settings.data.task == "regression":
        return compare_regressions(outputs, np.asarray(trained.validation.target, dtype=np.float64))
    target = np.asarray(trained.preprocessing.encode_target(trained.validation), dtype=np.int64)
    return compare_classifiers(outputs, target, probabilities=settings.data.class_weights != "balanced")


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
    # Fresh origins keep the displacement from adapting to the own origin, which only helps members with other records.
    model = replace(settings.model, fresh_origins=False)
    return replace(settings, data=data, model=model, column=0, columns=1, privacy=None)


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
