"""`cgd join --dry-run`: what a run would do, as far as our own table and the files show it.

Nothing is sent, written or charged: no file is created, not even the privacy budget of the records.

The statistics of the other members are not known. So the network is built for our own categories and missing values, as
if others had the same ones: it has more inputs if others have more of them, and fewer if nobody else has some of ours,
which then count as "other".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cgd.optim.flat_vectors import CPU
from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.reporting.run_file import EvalRecord
from cgd.tabular.alignment import validation_count
from cgd.tabular.columns import Categorical
from cgd.tabular.disclosure import disclosed_sums, foreseen_privacy_warnings
from cgd.tabular.dry_run_notes import foreseen_notes, unforeseen
from cgd.tabular.federated_stats import CategoryStats, NumberStats, TargetStats
from cgd.tabular.models import build
from cgd.tabular.preprocessing import Preprocessing
from cgd.tabular.privacy_costs import PrivateSetting
from cgd.tabular.privacy_expectation import Question, describe_expectation, differences, measured_kind
from cgd.tabular.rare_values import fold_rare_values
from cgd.tabular.run_folder import check_run_folder
from cgd.tabular.sources import budget_path, check_unchanged
from cgd.tabular.trace_writer import check_trace_folder
from cgd.tabular.training import TrainingResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.federation.config import Federation, Training
    from cgd.federation.data_schema import Column
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.run_inputs import RunInputs, RunOptions
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.sources import TableSource

UNKNOWN_CLASS = "…"


def describe_dry_run(
    federation: Federation, participant: str, inputs: RunInputs, folder: Path, data: TableSource, options: RunOptions
) -> Iterator[str]:
    """Yield lines about the run that these inputs would give.

    Args:
        federation: the federation file.
        participant: our name.
        inputs: the settings and the records.
        folder: the folder for the results.
        data: where our records are.
        options: our options.

    Raises:
        InputError: a folder or the budget cannot be used, or the budget is spent.
    """
    settings, records = inputs.settings, inputs.records
    yield from inputs.notes
    if check_run_folder(folder, federation, participant) is not None:
        yield f"this training is finished; its model and report in {folder} would not be changed"
    else:
        check_unchanged(data, folder, records, write=False)
    if options.record is not None:
        check_trace_folder(options.record, participant, federation.name)
    training, foreseen = settings.training, foresee(settings, records)
    yield from foreseen_notes(settings, foreseen)
    for warning in foreseen_privacy_warnings(federation, settings, foreseen):
        yield (
            "privacy warning, for our training records without those for validation, and for the inputs of our own "
            f"table, which are more if others have more categories or missing values: {warning}"
        )
    features = len(foreseen.preprocessing.features)
    parameters = sum(each.numel() for each in foreseen.network.parameters())
    more = ""
    if settings.privacy is None:
        more = ", and more if others have more categories, classes or missing values"
    if any(each.is_learned for each in settings.own_columns):
        more += ", or fewer if nobody else has some of our categories"
    yield f"the network would have {parameters:,} parameters, for the {features} features of our own table{more}"
    start = settings.model.start
    if settings.device != CPU:
        yield f"our models would be trained on the device {str(settings.device)!r}"
    yield f"model start: {start if start == 'zeros' else f'public seed {start}'}"
    size = bytes_per_step(training, len(federation.names), parameters)
    yield (
        f"{training.steps:,} steps or fewer, with an evaluation every {training.validate_every}; the gradients alone "
        f"are about {_size(size)} to send in each step, and as much to receive: {_size(training.steps * size)} in all"
    )
    yield "this would be opened:"
    for each in disclosed_sums(settings, foreseen):
        times = "once" if each.times == 1 else f"{each.times} times"
        yield f"  to {each.to}, {times}: {each.what} (numbers: {each.numbers})"
    if settings.privacy is not None:
        yield from _describe_budget(settings, federation.name, budget_path(data, options.budget))
        yield from _describe_cost(settings, len(federation.names), records.rows)
    yield from unforeseen(settings)


def foresee(settings: TabularSettings, records: TabularDataset) -> TrainingResult:
    """Return a training that has not taken place, with all its steps, as if others had the same kind of records."""
    private = settings.privacy is not None
    folded = records if private else fold_rare_values(records, settings.data, settings.own_columns)
    columns = tuple(_column(each, folded, private=private) for each in settings.own_columns)
    target = TargetStats()
    if isinstance(records.target, Categorical):
        classes = settings.data.classes or records.target.names
        classes = classes if len(classes) > 1 else (*classes, UNKNOWN_CLASS)
        target = TargetStats(classes, (1,) * len(classes))
    preprocessing = Preprocessing(columns, target)
    training = settings.training
    validation = validation_count(records.rows, settings.data.validation)
    steps = [*range(training.validate_every, training.steps, training.validate_every), training.steps]
    looks = (steps if training.patience or not private else steps[-1:]) if settings.data.validation else []
    return TrainingResult(
        network=build(settings.model, len(preprocessing.features), preprocessing.outputs),
        preprocessing=preprocessing,
        evaluations=tuple(EvalRecord(step, everyone_validation_loss=0.0) for step in looks),
        best_step=training.steps,
        steps=training.steps,
        records=records,
        held_out=np.arange(records.rows) < validation,
        samples=records.rows - validation,
        everyone_samples=0,
        clipped=0,
        notes=(),
        seconds=0.0,
        ledger=PrivacyLedger(settings.privacy_settings()) if private else None,
    )


def bytes_per_step(training: Training, members: int, parameters: int) -> float:
    """Return about how many bytes a member sends in a step: masked gradients, or shares of them, and parts of the sum.

    Through a hub or an aggregator, it sends one masked gradient.
    """
    vector = training.ring_bits / 8 * parameters
    shares = (members - 1) * vector if training.masking == "uniform" else 0.0
    return shares + (2 * (members - 1) / members * vector if training.opening == "mesh" else vector)


def _column(column: Column, records: TabularDataset, *, private: bool) -> NumberStats | CategoryStats:
    if column.type == "number":
        missing = int(np.count_nonzero(np.isnan(records.numbers[column.name])))
        return NumberStats(column.name, records.rows - missing, missing or int(private), 0.0, 1.0)
    values = records.categories[column.name]
    return CategoryStats(column.name, values.names, tuple(values.counts().tolist()), max(values.missing, int(private)))


def _describe_budget(settings: TabularSettings, federation: str, path: Path) -> Iterator[str]:
    privacy = settings.privacy_settings()
    if not path.exists():
        yield (
            f"{path} would be created: the privacy budget of these records, with a limit of epsilon = "
            f"{privacy.epsilon:g} at delta = {privacy.delta:g}; if trainings on these records were charged to another "
            "file, name that one with --budget"
        )
        return
    ledger = PrivacyLedger(privacy, path, unit=settings.unit)
    ledger.check(federation)
    if ledger.file is not None:
        yield (
            f"{path}: epsilon = {ledger.file.epsilon_spent:.3g} of {ledger.file.epsilon:g} is spent, and this training "
            f"would be charged up to {privacy.epsilon:g}"
        )


def _describe_cost(settings: TabularSettings, members: int, rows: int) -> Iterator[str]:
    unlike = differences(settings)
    if unlike:
        yield f"the cost in accuracy is not known, because this training has {', '.join(unlike)}"
        return
    privacy, everyone = settings.privacy_settings(), members * rows
    training_records = max(1.0, (1 - settings.data.validation) * everyone)
    chosen = privacy.epsilon, privacy.delta, privacy.colluders, privacy.quorum
    setting = PrivateSetting(training_records, len(settings.own_columns), members, *chosen)
    yield "if every participant has as many records as we have:"
    for line in describe_expectation(Question(everyone, setting, (measured_kind(settings),))):
        yield f"  {line}" if line else line


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB"
