"""The expected cost of differential privacy in words, for `cgd privacy expect` and for the report of a run.

Figures are those of the kept table (`privacy_costs.py`), and are only given for trainings like the measured ones: two
classes, a model and settings as `cgd schema` and `cgd federation new` write them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from cgd.dp.settings import PrivacySettings, suggested_delta
from cgd.errors import InputError
from cgd.federation.config import FOR_PRIVATE_TABLES, Federation
from cgd.federation.data_schema import Data, parse_schema
from cgd.federation.privacy_section import PrivacySection
from cgd.files import parse_toml, read_text
from cgd.reporting.privacy_text import describe_epsilon, points
from cgd.secagg.reduction import MIN_MEMBERS
from cgd.tabular.privacy_costs import ModelKind, PrivateSetting, cost_table, measured_losses, needed_signals
from cgd.tabular.settings import TabularSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MEASURED_LAYERS, MEASURED_ACTIVATION = (32,), "relu"
TRAINING_KEYS = ("optimizer", "steps", "lr", "momentum", "mu", "patience")
MODEL_NAMES: dict[ModelKind, str] = {"logistic": "Logistic regression", "mlp": "One hidden layer of 32 units"}
LOSSES = (0.02, 0.01, 0.005)
VALIDATION = Data.validation
MAX_EPSILON = 20  # larger ones were not measured, and protect nobody


@dataclass(frozen=True)
class Question:
    """A training whose cost is asked for.

    Attributes:
        records: the number of all participants' records.
        setting: what the cost depends on.
        models: the kinds of models.
    """

    records: int
    setting: PrivateSetting
    models: tuple[ModelKind, ...]


def read_question(path: Path | None, records: int, given: Mapping[str, Any], model: str | None = None) -> Question:
    """Return the question that options and a file state; options come first.

    Args:
        path: a federation file or a schema.
        records: the number of all participants' records.
        given: columns, members, epsilon, delta, colluders and quorum, as far as they are given.
        model: the kind of model; by default that of the file, or all that were measured.

    Raises:
        InputError: a value is invalid or missing, or there are no measurements of such a training.
    """
    values: dict[str, Any] = {"columns": None, "members": None, "epsilon": None, "delta": None, "colluders": 1}
    values["quorum"] = None
    validation, models = VALIDATION, get_args(ModelKind)
    if model is not None and model not in models:
        raise InputError(f"model is {model!r}; choose one of {', '.join(models)}")
    if path is not None:
        settings, members = _read_settings(path)
        unlike = differences(settings)
        if unlike:
            raise InputError(
                f"{path}: there are no measurements of such a training, because it has {', '.join(unlike)}. Without "
                "the file, with --columns, --members and --epsilon, you get the figures of the default settings"
            )
        values |= {"columns": len(settings.own_columns), "members": members, "quorum": settings.quorum}
        if settings.privacy is not None:
            privacy = settings.privacy
            values |= {"epsilon": privacy.epsilon, "delta": privacy.delta, "colluders": privacy.colluders}
        validation, models = settings.data.validation, (measured_kind(settings),)
    values |= given
    for name in ("columns", "members", "epsilon"):
        if values[name] is None:
            raise InputError(f"--{name} is missing; give it, or a file that has it")
    if records < 1:
        raise InputError(f"--records is {records}; it is the number of all participants' records, at least 1")
    if values["members"] < MIN_MEMBERS:
        raise InputError(f"--members is {values['members']}; a federation has at least {MIN_MEMBERS}")
    if values["delta"] is None:
        values["delta"] = suggested_delta(records)
    PrivacySettings(values["epsilon"], values["delta"], 1, colluders=values["colluders"]).check_records(records)
    setting = PrivateSetting(max(1.0, (1 - validation) * records), **values)
    return Question(records, setting, cast("tuple[ModelKind, ...]", (model,)) if model is not None else models)


def differences(settings: TabularSettings) -> list[str]:
    """Return in what a training differs from the measured ones, in words."""
    data, model, training = settings.data, settings.model, settings.training
    found = []
    if data.task == "regression":
        found.append("a number to predict instead of classes")
    elif len(data.classes) > 2:
        found.append(f"{len(data.classes)} classes instead of two")
    if data.class_weights != "none":
        found.append(f"class_weights = {data.class_weights!r}")
    if model.kind == "custom":
        found.append("a network of your own")
    elif model.kind == "mlp" and (model.layers, model.activation) != (MEASURED_LAYERS, MEASURED_ACTIVATION):
        found.append(f"hidden layers of {list(model.layers)} ({model.activation})")
    compared = [(name, getattr(training, name), getattr(FOR_PRIVATE_TABLES, name)) for name in TRAINING_KEYS]
    if settings.privacy is not None:
        asked = settings.privacy_settings()
        usual = PrivacySection(asked.epsilon, asked.delta).settings(training.steps)
        compared += [("clip", asked.clip, usual.clip), ("reruns", asked.reruns, usual.reruns)]
    found += [f"{name} = {value!r} instead of {default!r}" for name, value, default in compared if value != default]
    return found


def expected_cost(settings: TabularSettings, members: int, records: int) -> dict[str, Any]:
    """Return what run.json states about the expected loss.

    Args:
        settings: the settings of the run, with [privacy].
        members: the number of members.
        records: the opened number of training records, which has noise.
    """
    unlike = differences(settings)
    if unlike:
        return {"unknown": f"this training has {', '.join(unlike)}"}
    privacy = settings.privacy_settings()
    columns = len(settings.own_columns)
    chosen = privacy.epsilon, privacy.delta, privacy.colluders, privacy.quorum
    setting = PrivateSetting(records, columns, members, *chosen)
    losses = {metric: measured_losses(setting, measured_kind(settings), metric) for metric in ("accuracy", "auc")}
    if not losses["accuracy"]:
        return {"unknown": _outside(setting, measured_kind(settings))}
    ends = {metric: [min(found.values()), max(found.values())] for metric, found in losses.items()}
    return {**ends, "datasets": list(losses["accuracy"])}


def describe_expectation(question: Question) -> Iterator[str]:
    """Yield lines that answer a question."""
    setting = question.setting
    colluders = "no colluders" if not setting.colluders else f"up to {setting.colluders} colluding"
    if setting.quorum is not None:
        colluders += f", a quorum of {setting.quorum}"
    yield (
        f"{question.records:,} records ({round(setting.records):,} of them to train on), {setting.columns} columns, "
        f"{setting.members} participants ({colluders}), epsilon = {setting.epsilon:g}, delta = {setting.delta:g}"
    )
    yield describe_epsilon(setting.epsilon, setting.delta)
    for model in question.models:
        yield ""
        yield f"{MODEL_NAMES[model]}:"
        losses, auc = (measured_losses(setting, model, metric) for metric in ("accuracy", "auc"))
        if losses:
            yield f"  measured loss with as much noise: {points(losses.values())} of accuracy, {_auc(auc)} of AUC"
            yield f"    (on {', '.join(losses)})"
        else:
            yield f"  no figure: {_outside(setting, model)}"
        if setting.measured:
            yield from (f"  {_need(question, model, loss)}" for loss in LOSSES)
    yield ""
    yield (
        "Measured for two classes on public data sets, against training without noise on the same records, with the "
        f"settings that `cgd federation new` writes ({cost_table().settings}). This is no promise: on your records, "
        "the loss may be smaller or larger."
    )


def _read_settings(path: Path) -> tuple[TabularSettings, int | None]:
    """Return the settings of a federation file or a schema, and the number of participants if it is known."""
    text = read_text(path)
    try:
        federation = "participants" in parse_toml(text)
    except (ValueError, RecursionError):
        federation = True  # its parser has the message
    if federation:
        made = Federation.parse(text, path)
        return TabularSettings.from_federation(made, made.names[0]), len(made.names)
    data, model, privacy = parse_schema(text, path)
    return TabularSettings(data, model, FOR_PRIVATE_TABLES, privacy=privacy), None


def measured_kind(settings: TabularSettings) -> ModelKind:
    """Return which of the measured models is like that of a training."""
    return "mlp" if settings.model.kind == "mlp" else "logistic"


def _outside(setting: PrivateSetting, model: ModelKind) -> str:
    """Return why there is no figure for a setting."""
    curves = cost_table().of(model)
    low, high = cost_table().columns
    if not setting.measured:
        return f"tables with {low} to {high} columns were measured"
    if setting.signal < min(each.points[0].signal for each in curves):
        return "so few records with so much noise were not measured; expect a model that has learned little or nothing"
    largest = max(curves, key=lambda each: each.points[-1].signal)
    loss = points([largest.points[-1].accuracy])
    return (
        f"so many records with so little noise were not measured; with the least noise, the loss was {loss} of accuracy"
    )


def _need(question: Question, model: ModelKind, loss: float) -> str:
    """Return how many records, or which ε, a small loss needs."""
    setting, found = question.setting, needed_signals(model, loss)
    reached = sorted(each for each in found.values() if each is not None)
    missed = [dataset for dataset, each in found.items() if each is None]
    what = f"a loss below {100 * loss:g} point{'s' if loss != 0.01 else ''}"
    if not reached:
        return f"{what} was not reached in any measurement"
    share = question.records / setting.records
    counts = [_round(share * setting.records_for(each)) for each in (reached[0], reached[-1])]
    epsilons = [_epsilon(setting.epsilon_for(each)) for each in (reached[0], reached[-1])]
    if missed:  # then there is no upper end
        names = ", ".join(missed)
        best = next(dataset for dataset, each in found.items() if each == reached[0])
        return f"{what} needs {counts[0]} records, or epsilon {epsilons[0]}, on {best}; it was not reached on {names}"
    return f"{what} needs {_between(counts)} records, or with these records epsilon {_between(epsilons)}"


def _between(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _round(number: float) -> str:
    """Return a number with two significant digits."""
    scale = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return f"{math.ceil(number / scale) * scale:,}"


def _epsilon(epsilon: float) -> str:
    return f"{epsilon:.2g}" if epsilon <= MAX_EPSILON else f"above {MAX_EPSILON}"


def _auc(losses: Mapping[str, float]) -> str:
    return _between([f"{max(0.0, each):.3f}" for each in (min(losses.values()), max(losses.values()))])
