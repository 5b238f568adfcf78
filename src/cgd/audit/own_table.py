"""A training on one's own table, as the federation file describes it, with other participants made from its records.

Before joining, a participant has only its own records. They are read as `cgd join --data` reads them, and divided at
random: a part is kept as fresh records, and every member of the federation gets an equal part of the rest. So the
attacker knows records of the same kind, but none of those that it attacks. Nothing is sent, no connection is opened.

Every part is folded and merged as its member would do it (`cgd.tabular.rare_values`, `cgd.tabular.few_records`).
Statistics are those of all records together, as secure sums would give them; with [privacy], they have its noise. All
random choices follow from a seed, so an audit can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from cgd.audit.private_sums import PrivateSums
from cgd.audit.record_table import RecordTable
from cgd.audit.scenario import LocalSteps, Scenario
from cgd.audit.schemes import observe
from cgd.audit.trace_reader import public_start
from cgd.audit.trace_replay import update_rule
from cgd.audit.trace_view import WeightedCrossEntropy
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.local import solo_peers
from cgd.optim.minibatches import round_batches
from cgd.tabular.columns import MISSING_CODE, Categorical
from cgd.tabular.dataset import TabularDataset, locate_records, read_dataset
from cgd.tabular.few_records import merge_few_records
from cgd.tabular.models import FUNCTION_ARGUMENTS, build
from cgd.tabular.preprocessing import fit
from cgd.tabular.private_run import check_private
from cgd.tabular.private_stats import from_opened, own_sums, sensitivity
from cgd.tabular.rare_values import fold_rare_values
from cgd.tabular.settings import TabularSettings
from cgd.tabular.sources import with_fixed_order
from cgd.tabular.training_loop import LOCAL_MOMENTUM
from cgd.user_functions import check_function_named, load_function

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, Truth, View
    from cgd.federation.config import Training
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.sources import TableSource

MIN_RECORDS = 2
"""Of each participant: an attacker needs two to know how records vary."""
MAX_RECORDS = 20_000
"""Records that are used of a larger table. With fewer records, more of them are recovered."""
MAX_PARTICIPANTS = 200
MAX_BYTES = 4 << 30
"""Of the addends and sums in a view."""
DEFAULT_FRESH = 0.2
"""The part of the records that nobody trains on, if the federation file keeps no validation records."""


@dataclass(frozen=True)
class TableRequest:
    """The arguments of an audit of a table.

    Attributes:
        table: where the records are.
        federation: the federation file.
        target: the name of the target in the table, if it is not that of the federation file.
        function: the `module:function` that builds a custom network.
        rounds: the number of steps that the attackers see.
        honest: the number of honest members.
        decimal: the decimal sign of numbers in the table.
    """

    table: TableSource
    federation: Path
    target: str | None
    function: str | None
    rounds: int
    honest: int
    decimal: str = "."


@dataclass(frozen=True, repr=False)
class OwnTable:
    """A federation file and one's own records.

    Attributes:
        federation: the federation file.
        settings: the settings of the training.
        records: the records.
        notes: notes about the file.
    """

    federation: Federation
    settings: TabularSettings
    records: TabularDataset
    notes: tuple[str, ...]

    @classmethod
    def read(
        cls, table: TableSource, federation: Path, target: str | None, function: str | None, decimal: str = "."
    ) -> OwnTable:
        """Read the table and the file, with the checks of `cgd join --data`.

        Raises:
            InputError: a file cannot be used, or the federation is one that this audit cannot simulate.
        """
        found = Federation.load(federation)
        settings = TabularSettings.from_federation(found, found.names[0])
        if settings.vertical:
            raise InputError(
                f"{federation} divides the columns of the table over a grid; an audit of a table needs participants "
                "that hold all columns. `cgd audit --only joint` measures what joint columns reveal, and a recorded "
                "run can be audited"
            )
        check_function_named(settings.model.function, function, federation)
        if settings.model.function:
            load_function(settings.model.function, "function in [model]", FUNCTION_ARGUMENTS)
        records, notes = read_dataset(
            table, settings.data, settings.own_columns, label=target, unit=settings.unit, decimal=decimal
        )
        records = with_fixed_order(table, records, settings.data, settings.own_columns)
        if settings.privacy is not None:
            check_private(settings, records)
        return cls(found, settings, records, notes)


@dataclass(frozen=True, repr=False)
class Parts:
    """The records of an audit, divided.

    Attributes:
        members: the records of each member, by name.
        fresh: records that no member has.
    """

    members: dict[str, TabularDataset]
    fresh: TabularDataset


def names(members: int, honest: int) -> tuple[list[str], list[str]]:
    """Return the names of the honest members and of the colluders."""
    return (
        [f"honest-{place + 1}" for place in range(honest)],
        [f"colluder-{place + 1}" for place in range(members - honest)],
    )


def divide(own: OwnTable, honest: int, seed: int) -> Parts:
    """Divide records at random: fresh ones, and equal parts for all members.

    With a unit of privacy, all records of a unit are in one part.

    Raises:
        InputError: there are too few records.
    """
    members = len(own.federation.names)
    random = np.random.default_rng([seed, 0xCD])
    units = np.arange(own.records.rows) if own.records.units is None else _numbered(own.records.units)
    order = random.permutation(int(units.max()) + 1)
    if own.records.units is None:
        order = order[:MAX_RECORDS]
    fresh = round((own.settings.data.validation or DEFAULT_FRESH) * len(order))
    groups = [order[:fresh], *np.array_split(order[fresh:], members)]
    parts = [own.records.take(np.isin(units, group)) for group in groups]
    if min(each.rows for each in parts[1:]) < MIN_RECORDS:
        what = "records" if own.records.units is None else f"values of {own.settings.unit!r}"
        raise InputError(
            f"there are {len(order)} {what}, of which {fresh} are kept as fresh ones, and {members} members of the "
            f"federation would get a part each; every part needs at least {MIN_RECORDS} records: bring more records"
        )
    if own.settings.privacy is None:
        parts = [fold_rare_values(each, own.settings.data, own.settings.own_columns) for each in parts]
    honest_names, colluders = names(members, honest)
    return Parts(dict(zip((*honest_names, *colluders), parts[1:], strict=True)), parts[0])


def _numbered(units: tuple[str, ...]) -> npt.NDArray[np.int64]:
    return np.unique(units, return_inverse=True)[1].astype(np.int64)


def preprocess(own: OwnTable, parts: Parts, seed: int) -> Preprocessing:
    """Return the statistics of the training: of all records, or of the members' records with the noise of [privacy].

    Raises:
        InputError: the records cannot be learned from.
    """
    data, columns = own.settings.data, own.settings.own_columns
    if own.settings.privacy is None:
        return fit(_join([*parts.members.values(), parts.fresh]), data, columns, solo_peers())
    sums = PrivateSums(own.settings.privacy_settings(), seed, 64)
    opened, noise = sums.statistics(
        {name: own_sums(each, data, columns) for name, each in parts.members.items()}, sensitivity(data, columns)
    )
    return from_opened(opened, noise, data, columns)


def _join(parts: list[TabularDataset]) -> TabularDataset:
    """Return the records of all parts, for statistics."""
    first = parts[0]
    numbers = {name: np.concatenate([each.numbers[name] for each in parts]) for name in first.numbers}
    categories = {name: _join_categories([each.categories[name] for each in parts]) for name in first.categories}
    target: npt.NDArray[np.float64] | Categorical
    if isinstance(first.target, Categorical):
        target = _join_categories([each.target for each in parts if isinstance(each.target, Categorical)])
    else:
        target = np.concatenate([each.target for each in parts if isinstance(each.target, np.ndarray)])
    return TabularDataset(sum(each.rows for each in parts), numbers, categories, target)


def _join_categories(parts: list[Categorical]) -> Categorical:
    names = tuple(dict.fromkeys(name for each in parts for name in each.names))
    lookups = [np.array([*map(names.index, each.names), MISSING_CODE], dtype=np.int32) for each in parts]
    return Categorical(np.concatenate([codes[each.codes] for codes, each in zip(lookups, parts, strict=True)]), names)


def _places(records: TabularDataset) -> npt.NDArray[np.int64]:
    return np.arange(records.rows) if records.places is None else records.places


@dataclass(frozen=True, repr=False)
class SimulatedTraining:
    """A training on one's own table, to attack.

    Attributes:
        scenario: the training.
        fresh: encoded records that no member has.
        table: how to show records to their owner.
    """

    scenario: Scenario
    fresh: Sample
    table: RecordTable

    def observe(self, scenario: Scenario, scheme: Scheme) -> tuple[View, Truth]:
        """Run the training, or one that colluders steer, under a scheme.

        Raises:
            InputError: the training diverges.
        """
        view, truth = observe(scenario, scheme)
        if not torch.isfinite(view.final_displacement).all():
            raise InputError(
                f"the training diverges within {scenario.rounds} steps; lower lr in [training] (it is {scenario.lr:g})"
            )
        return view, replace(truth, table=self.table)


@lru_cache(maxsize=1)  # a process that runs several attacks reads the table once
def simulated_training(request: TableRequest, seed: int) -> SimulatedTraining:
    """Return the training on a table.

    Raises:
        InputError: a file cannot be used, or there are too few records.
    """
    own = OwnTable.read(request.table, request.federation, request.target, request.function, request.decimal)
    check_without_delay(own.settings.training)
    parts = divide(own, request.honest, seed)
    preprocessing = preprocess(own, parts, seed)
    settings, training = own.settings, own.settings.training
    balanced = settings.data.class_weights == "balanced"
    loss = WeightedCrossEntropy(tuple(preprocessing.class_weights().tolist())) if balanced else functional.cross_entropy
    privacy = None if settings.privacy is None else settings.privacy_settings()
    scenario = Scenario(
        {name: _encode(each, preprocessing, settings) for name, each in parts.members.items()},
        partial(build, settings.model, len(preprocessing.features), preprocessing.outputs),
        names(len(parts.members), request.honest)[1],
        functional.mse_loss if settings.data.task == "regression" else loss,
        rounds=request.rounds,
        lr=training.lr,
        delta=settings.model.delta,
        seed=seed,
        bound=training.bound,
        ring_bits=training.ring_bits,
        clip=1.0 if privacy is None else privacy.clip,
        privacy=privacy,
        rule=partial(update_rule, training),
        weights={name: torch.from_numpy(each.unit_weights()) for name, each in parts.members.items()}
        if settings.unit
        else None,
        start=public_start(settings.model, len(preprocessing.features), preprocessing.outputs),
        draws=partial(_draw, training, seed) if training.batches > 1 or training.local_epochs else None,
        local=LocalSteps(training.local_lr, LOCAL_MOMENTUM) if training.local_epochs else None,
        prepare=partial(_merge, preprocessing, settings) if training.batches > 1 and privacy is None else None,
        clamp=True,
    )
    check_size(scenario)
    honest = [name for name in parts.members if name not in scenario.coalition]
    rows = [int(row) for name in honest for row in _places(parts.members[name])]
    located = iter(locate_records(request.table, settings.data, settings.own_columns, rows, label=request.target))
    places = {name: [next(located) for _ in range(parts.members[name].rows)] for name in honest}
    return SimulatedTraining(scenario, _encode(parts.fresh, preprocessing), RecordTable(places, preprocessing))


def check_without_delay(training: Training) -> None:
    """Check that the audit can simulate the training.

    Raises:
        InputError: it has a delay, with which colluders would have to steer otherwise than the audit does.
    """
    if training.delay:
        raise InputError(
            f"delay is {training.delay} in [training], and an audit of a table simulates trainings without a delay, in "
            "which colluders steer from step to step; audit a copy of the file without delay, or a recorded run"
        )


def _draw(training: Training, seed: int, name: str, number: int, count: int) -> list[torch.Tensor]:
    """Return the batches of a member in a step, as `cgd.tabular.training_loop` draws them from a member's seed."""
    key = f"cgd audit {seed} {name}".encode()
    drawn = round_batches(key, number, count, training.batches, training.local_epochs)
    return [torch.tensor(batch) for batch in drawn]


def _merge(preprocessing: Preprocessing, settings: TabularSettings, x: torch.Tensor) -> torch.Tensor:
    """Merge the features that few records of a batch have."""
    merged = x.clone()
    merge_few_records(merged.numpy(), preprocessing, settings.data)
    return merged


def check_size(scenario: Scenario) -> None:
    """Check that the view of a scenario fits into memory.

    Raises:
        InputError: it does not.
    """
    parameters = sum(each.numel() for each in scenario.build_model().parameters())
    needed = 4 * parameters * scenario.rounds * (len(scenario.data) + 2)
    if needed > MAX_BYTES:
        raise InputError(
            f"{len(scenario.data)} members, {parameters:,} parameters and {scenario.rounds} steps need "
            f"{needed / 2**30:.1f} GiB of gradients, and the limit is {MAX_BYTES / 2**30:g} GiB; see fewer steps "
            "(--rounds)"
        )


def _encode(records: TabularDataset, preprocessing: Preprocessing, settings: TabularSettings | None = None) -> Sample:
    """Encode records; with settings, as those that a member trains on."""
    y = torch.from_numpy(preprocessing.encode_target(records))
    x, _ = preprocessing.transform(records)
    if settings is not None and settings.privacy is None:
        merge_few_records(x, preprocessing, settings.data)
    return torch.from_numpy(x), y[:, None] if y.is_floating_point() else y
