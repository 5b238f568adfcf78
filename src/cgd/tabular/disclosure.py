"""State what a training on a table discloses: the privacy warnings before it begins, and the sums in the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.optim.privacy_warnings import FirstLayer, find_warnings
from cgd.reporting.run_file import DisclosedSum
from cgd.tabular.alignment import validation_count
from cgd.tabular.federated_stats import CategoryStats
from cgd.tabular.private_run import private_sums

if TYPE_CHECKING:
    from cgd.federation.config import Federation
    from cgd.optim.privacy_warnings import PrivacyWarning
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

EVERYONE = "every participant"
SAME_COLUMNS = "every participant that holds the same columns"


def early_privacy_warnings(
    federation: Federation, settings: TabularSettings, records: TabularDataset
) -> tuple[PrivacyWarning, ...]:
    """Return the privacy warnings that a participant's own records imply, before anything is sent.

    Validation records do not count, because no gradient is about them. In a grid with several columns, the row draws
    the split later, and the expected number of training records is used.

    The number of the network's inputs depends on the categories and missing values of all members, which are not known
    yet. The minimum is used here, so every warning holds. The optimiser repeats them with all numbers after the records
    are counted. There are no early warnings for a network of the user's own, and none if the sums have noise.
    """
    model = settings.model
    if model.kind == "custom" or settings.privacy is not None:
        return ()
    inputs = sum(max(1, len(column.categories)) for column in settings.own_columns)
    # If the file does not list the classes, there are at least two.
    outputs = 1 if settings.data.task == "regression" else max(2, len(settings.data.classes))
    units = model.layers[0] if model.layers else outputs
    relu = bool(model.layers) and model.activation == "relu"
    layer = FirstLayer(inputs, units, relu=relu, only_layer=not model.layers)
    trained = records.rows - validation_count(records.rows, settings.data.validation)
    return find_warnings(trained, layer, members=_members(federation, settings), batches=_parts(settings))


def foreseen_privacy_warnings(
    federation: Federation, settings: TabularSettings, foreseen: TrainingResult
) -> tuple[PrivacyWarning, ...]:
    """Return the privacy warnings of the network for our own table, with the records that are not for validation.

    Args:
        federation: the federation file.
        settings: the settings.
        foreseen: a training as if others had the same categories and missing values as we have.
    """
    if settings.privacy is not None:
        return ()
    layer = FirstLayer.from_model(foreseen.network)
    return find_warnings(foreseen.samples, layer, members=_members(federation, settings), batches=_parts(settings))


def _members(federation: Federation, settings: TabularSettings) -> int:
    """Return the number of members that sum gradients of the first layer."""
    return federation.grid.rows if settings.vertical and federation.grid else len(federation.names)


def _parts(settings: TabularSettings) -> int:
    """Return the number of parts of our records of which each sum is about one."""
    return 1 if settings.training.local_epochs else settings.training.batches


def disclosed_sums(settings: TabularSettings, trained: TrainingResult) -> list[DisclosedSum]:
    """Return the kinds of opened sums: content, recipients, number of sums, and numbers in each."""
    if trained.ledger is not None:
        return private_sums(settings, trained)
    statistics = SAME_COLUMNS if settings.vertical else EVERYONE
    gradients = f"{EVERYONE} (the first layer's: {SAME_COLUMNS})" if settings.vertical else EVERYONE
    parameters = sum(each.numel() for each in trained.network.parameters())
    numbers = [each for each in settings.own_columns if each.type == "number"]
    learned = [each.name for each in settings.own_columns if each.is_learned]
    counts = [len(each.categories) for each in trained.preprocessing.columns if isinstance(each, CategoryStats)]
    summed = "updates of local steps" if settings.training.local_epochs else "gradients"
    what = f"the sum of all {summed}, weighted by the participants' numbers of records"
    sums = [
        DisclosedSum(what, gradients, trained.steps, parameters),
        DisclosedSum("the total number of training records, again if the members change", EVERYONE, 1, 1),
    ]
    if numbers:
        what = "of every number column: the number of values and of missing values, their mean and deviation"
        sums.append(DisclosedSum(what, statistics, 1, 4 * len(numbers)))
    if counts:
        union = f", and the categories of {', '.join(learned)} that two participants have" if learned else ""
        what = f"of every category column: the number of records of each category{union}"
        sums.append(DisclosedSum(what, statistics, 1, sum(counts)))
    if learned:
        what = "digests of the participants' categories: their number, and how many only one participant has"
        sums.append(DisclosedSum(what, statistics, 1, 2))
    if settings.data.task == "classification":
        union = "" if settings.data.classes else ", and the classes"
        what = f"the number of records of each class{union}"
        sums.append(DisclosedSum(what, EVERYONE, 1, len(trained.preprocessing.classes)))
        if not settings.data.classes:
            what = "digests of the participants' classes: their number, and how many only one participant has"
            sums.append(DisclosedSum(what, EVERYONE, 1, 2))
    else:
        sums.append(DisclosedSum("the number of values of the target, their mean and deviation", EVERYONE, 1, 3))
    what = "the validation loss over all records, and the number of validation records"
    sums.append(DisclosedSum(what, EVERYONE, len(trained.evaluations), 2))
    if settings.vertical:
        if settings.data.intersection is not None:
            what = "how many IDs each member of the row has entered"
            sums.append(DisclosedSum(what, "the row", 1, settings.columns))
            what = "how many of these all members of the row have, and to each which of its own these are"
            sums.append(DisclosedSum(what, "the row", 1, trained.records.rows))
        sums.append(DisclosedSum("whether the files of the row have the same IDs", "the row", 1, 0))
        what = "the joint prediction of the row's models for each validation record"
        sums.append(DisclosedSum(what, "the row", 1, trained.validation.rows * trained.preprocessing.outputs))
    return sums
