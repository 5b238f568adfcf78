"""What a run on a table reads before it connects: the settings, and the records of our file. Nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.optim.flat_vectors import CPU, check_device
from cgd.optim.origin import check_delta
from cgd.tabular.data_checks import find_notes
from cgd.tabular.dataset import read_dataset
from cgd.tabular.date_columns import rare_day_notes
from cgd.tabular.dry_run import foresee
from cgd.tabular.few_records import few_states, merge_notes
from cgd.tabular.intersection import check_intersection, read_salt
from cgd.tabular.kept_model import check_keep
from cgd.tabular.models import FUNCTION_ARGUMENTS, check_on_device
from cgd.tabular.private_run import check_private
from cgd.tabular.rare_values import check_rare_values
from cgd.tabular.settings import TabularSettings
from cgd.tabular.sources import budget_path, with_fixed_order
from cgd.tabular.trace_writer import check_recordable
from cgd.user_functions import check_function_named, load_function

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from cgd.federation.config import Federation
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.kept_model import Keep
    from cgd.tabular.sources import TableSource


@dataclass(frozen=True)
class RunOptions:
    """The options of a participant, which need not be those of the others.

    Attributes:
        label: the target's name in our file, if it differs.
        delta: our own δ, if not that of the federation file.
        record: a folder for a trace, if one is to be recorded.
        function: the function in [model], if there is one: a federation file alone cannot choose the code that runs
            here.
        budget: with [privacy], the file with the budget of our records; by default beside them.
        decimal: the decimal sign of numbers in our file, a point or a comma.
        keep: which model to keep: "confined", "scaled", which is the default with [privacy], or "personalised".
        device: where our models are trained, such as "cuda", "mps" or "cpu".
        salt: the file with the secret of our row, for an intersection.
    """

    label: str | None = None
    delta: float | None = None
    record: Path | None = None
    function: str | None = None
    budget: Path | None = None
    decimal: str = "."
    keep: str | None = None
    device: str | torch.device = "cpu"
    salt: Path | None = None


@dataclass(frozen=True)
class RunInputs:
    """The settings and the records of a run.

    Attributes:
        settings: data, model and training settings.
        records: our records.
        notes: notes about them.
        keep: which model to keep.
    """

    settings: TabularSettings
    records: TabularDataset
    notes: tuple[str, ...]
    keep: Keep


def read_inputs(federation: Federation, participant: str, data: TableSource, options: RunOptions) -> RunInputs:
    """Check all settings, and read and check the records.

    Args:
        federation: the federation file.
        participant: our name.
        data: where our records are.
        options: our options.

    Raises:
        InputError: a setting, the file or the device cannot be used, or the federation file names another function.
    """
    settings = TabularSettings.from_federation(federation, participant)
    salt = read_salt(options.salt, settings.data.intersection)
    settings = replace(settings, device=check_device(options.device), salt=salt)
    if options.delta is not None:
        check_delta(options.delta)
    private = settings.privacy is not None
    keep = check_keep(options.keep, private=private, vertical=settings.vertical)
    if options.record is not None:
        check_recordable(settings)
    if options.budget is not None and settings.privacy is None:
        raise InputError(f"--budget is for differential privacy, and {federation.path} has no [privacy]; omit it")
    check_function_named(settings.model.function, options.function, federation.path)
    if settings.model.function:
        load_function(settings.model.function, "function in [model]", FUNCTION_ARGUMENTS)
    records, notes = read_dataset(
        data,
        settings.data,
        settings.own_columns,
        label=options.label,
        ids=settings.vertical,
        unit=settings.unit,
        decimal=options.decimal,
    )
    records = with_fixed_order(data, records, settings.data, settings.own_columns)
    check_intersection(records, settings.data)
    if private:
        budget_path(data, options.budget)
        check_private(settings, records)
    if settings.device != CPU:
        foreseen = foresee(settings, records)
        check_on_device(foreseen.network, len(foreseen.preprocessing.features), settings.device)
    rare = check_rare_values(records, settings.data, settings.own_columns, private=private)
    if not private:
        rare += merge_notes(few_states(records, settings.data, settings.own_columns))
        rare += tuple(rare_day_notes(records, settings.data, settings.own_columns))
    schema = settings.data
    chosen = {each.name: {*each.values.values()} for each in settings.own_columns}
    found = find_notes(records, schema.target, {**chosen, schema.target: {*schema.values.values()}})
    return RunInputs(settings, records, (*notes, *rare, *found), keep)
