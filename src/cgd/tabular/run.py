"""A complete run: from a participant's file to a folder with its model, metrics and report.

    model.safetensors, model.json   the confined model, for `cgd predict` and `cgd.load_model`
    run.json                        everything about the run, for programs
    history.jsonl                   the evaluations, written during the training
    metrics.csv                     the evaluations as a table
    report.html                     everything on one page

Only their owner can read them: they were made from private records.

The module also states what a training discloses: the privacy warnings before it begins, and the sums in the report.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

import cgd
from cgd.errors import InputError
from cgd.files import write_private
from cgd.json_files import parse_json
from cgd.optim.origin import check_delta
from cgd.optim.privacy_warnings import FirstLayer, find_warnings
from cgd.reporting.run_file import FILE, FORMAT, DisclosedSum, load_run
from cgd.reporting.training_report import write_report
from cgd.tabular.alone import compare_alone, compare_finished
from cgd.tabular.dataset import read_dataset
from cgd.tabular.evaluation import evaluate, validation_outputs
from cgd.tabular.federated_stats import CategoryStats, NumberStats
from cgd.tabular.model import ConfinedModel
from cgd.tabular.models import FUNCTION_ARGUMENTS
from cgd.tabular.private_run import check_private, open_ledger, privacy_summary, private_sums
from cgd.tabular.run_folder import RunFolder
from cgd.tabular.run_summary import federation_info, target_summary
from cgd.tabular.settings import TabularSettings
from cgd.tabular.trace_writer import TraceWriter, check_recordable
from cgd.tabular.training import EvalRecord, TrainingResult, train
from cgd.user_functions import check_function_named, load_function

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd.federation.config import Federation
    from cgd.optim.privacy_ledger import PrivacyLedger
    from cgd.optim.privacy_warnings import PrivacyWarning
    from cgd.peers import Peers
    from cgd.reporting.run_file import AnyRun
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.training import TrainingResult

    ShowMessage = Callable[[str], None]


EVERYONE = "every participant"
SAME_COLUMNS = "every participant that holds the same columns"


def early_privacy_warnings(
    federation: Federation, settings: TabularSettings, records: TabularDataset
) -> tuple[PrivacyWarning, ...]:
    """Return the privacy warnings that a participant's own records imply, before anything is sent.

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
    members = federation.grid.rows if settings.vertical and federation.grid else len(federation.names)
    layer = FirstLayer(inputs, units, relu=relu, only_layer=not model.layers)
    return find_warnings(records.rows, layer, members=members)


def disclosed_sums(settings: TabularSettings, trained: TrainingResult) -> list[DisclosedSum]:
    """Return the kinds of opened sums: content, recipients, number of sums, and numbers in each."""
    if trained.ledger is not None:
        return private_sums(settings, trained)
    statistics = SAME_COLUMNS if settings.vertical else EVERYONE
    gradients = f"{EVERYONE} (the first layer's: {SAME_COLUMNS})" if settings.vertical else EVERYONE
    parameters = sum(each.numel() for each in trained.network.parameters())
    numbers = [each for each in settings.own_columns if each.type == "number"]
    learned = [each.name for each in settings.own_columns if each.type == "category" and not each.categories]
    counts = [len(each.categories) for each in trained.preprocessing.columns if isinstance(each, CategoryStats)]
    what = "the sum of all gradients, weighted by the participants' numbers of records"
    sums = [
        DisclosedSum(what, gradients, trained.steps, parameters),
        DisclosedSum("the total number of training records, again if the members change", EVERYONE, 1, 1),
    ]
    if numbers:
        what = "of every number column: the number of values and of missing values, their mean and deviation"
        sums.append(DisclosedSum(what, statistics, 1, 4 * len(numbers)))
    if counts:
        union = f", and the categories of {', '.join(learned)}" if learned else ""
        what = f"of every category column: the number of records of each category{union}"
        sums.append(DisclosedSum(what, statistics, 1, sum(counts)))
    if learned:
        what = "the sum of the participants' numbers of distinct categories"
        sums.append(DisclosedSum(what, statistics, 1, 1))
    if settings.data.task == "classification":
        union = "" if settings.data.classes else ", and the classes"
        what = f"the number of records of each class{union}"
        sums.append(DisclosedSum(what, EVERYONE, 1, len(trained.preprocessing.classes)))
        if not settings.data.classes:
            what = "the sum of the participants' numbers of distinct classes"
            sums.append(DisclosedSum(what, EVERYONE, 1, 1))
    else:
        sums.append(DisclosedSum("the number of values of the target, their mean and deviation", EVERYONE, 1, 3))
    what = "the validation loss over all records, and the number of validation records"
    sums.append(DisclosedSum(what, EVERYONE, len(trained.evaluations), 2))
    if settings.vertical:
        sums.append(DisclosedSum("whether the files of the row have the same IDs", "the row", 1, 0))
        what = "the joint prediction of the row's models for each validation record"
        sums.append(DisclosedSum(what, "the row", 1, trained.validation.rows * trained.preprocessing.outputs))
    return sums


RETRY_SECONDS = 10.0
COMPARING = "comparing with a model of our own records alone, for the report; nobody waits for it"


@dataclass(frozen=True)
class TabularRun:
    """A run on a table, prepared before anything is sent.

    Attributes:
        federation: the federation file.
        participant: our name.
        settings: data, model and training settings.
        records: our records.
        folder: the folder for the results.
        file: the name of our data file, for the report.
        notes: notes about the data file.
        delta: our own δ, if not that of the federation file.
        trace_writer: records our messages for privacy attacks, if wanted.
        ledger: with [privacy], charges the budget of our records.
        alone: whether the report compares the model with one of our own records alone; see `cgd.tabular.alone`.
    """

    federation: Federation
    participant: str
    settings: TabularSettings
    records: TabularDataset
    folder: RunFolder
    file: str = ""
    notes: tuple[str, ...] = ()
    delta: float | None = None
    trace_writer: TraceWriter | None = None
    ledger: PrivacyLedger | None = None
    alone: bool = True

    @classmethod
    def prepare(
        cls,
        federation: Federation,
        participant: str,
        data: Path,
        folder: Path,
        *,
        label: str | None = None,
        delta: float | None = None,
        record: Path | None = None,
        function: str | None = None,
        budget: Path | None = None,
        alone: bool = True,
    ) -> TabularRun:
        """Check all settings and read the records.

        Args:
            federation: the federation file.
            participant: our name.
            data: our CSV or Parquet file.
            folder: the folder for the results.
            label: the target's name in our file, if it differs.
            delta: our own δ.
            record: a folder for a trace, if one is to be recorded.
            function: the function in [model], if there is one: a federation file alone cannot choose the code that
                runs here.
            budget: with [privacy], the file with the budget of our records; by default beside them.
            alone: compare with a model of our own records alone.

        Raises:
            InputError: a setting, the file or a folder cannot be used, the file names another function, or the privacy
                budget is spent.
        """
        settings = TabularSettings.from_federation(federation, participant)
        if delta is not None:
            check_delta(delta)
        if record is not None:
            check_recordable(settings)
        if budget is not None and settings.privacy is None:
            raise InputError(f"--budget is for differential privacy, and {federation.path} has no [privacy]; omit it")
        check_function_named(settings.model.function, function, federation.path)
        if settings.model.function:
            load_function(settings.model.function, "function in [model]", FUNCTION_ARGUMENTS)
        records, notes = read_dataset(
            data, settings.data, settings.own_columns, label=label, ids=settings.vertical, unit=settings.unit
        )
        if settings.privacy is not None:
            check_private(settings, records)
        run_folder = RunFolder(folder, federation, participant)
        trace_writer = None if record is None else TraceWriter(record, participant, federation.name)
        ledger = None
        if settings.privacy is not None:
            ledger, more = open_ledger(settings, federation.name, data, budget)
            notes = (*notes, *more)
        file = _text(data.name)
        return cls(
            federation, participant, settings, records, run_folder, file, notes, delta, trace_writer, ledger, alone
        )

    def run(
        self, peers: Peers, show_message: ShowMessage = lambda _: None, after_sums: Callable[[], None] = lambda: None
    ) -> AnyRun:
        """Train with the other members, save the model and write the report; return the content of run.json.

        If an earlier process has finished the run, take part for members that must catch up, and change no file; only
        a comparison that is missing is added.

        Args:
            peers: the members.
            show_message: called with progress messages.
            after_sums: called when we take part in no further sum and all files are written; then the model is compared
                with one of our own records alone, for which nobody has to wait.

        Raises:
            CGDError: see `train`.
        """
        finished, steps = self.folder.finished_run(), self.settings.training.steps
        if finished is not None:  # an earlier process may have been interrupted in its comparison
            finished = self._compare_finished(finished, peers.seed, show_message)
        history: list[EvalRecord] = []
        replaying = True

        def on_caught_up(replayed: int) -> None:
            nonlocal replaying
            replaying = False
            if replayed:
                show_message(f"steps 1 to {replayed} of {steps} were taken before the restart and are replayed")

        def on_evaluation(evaluation: EvalRecord) -> None:
            history.append(self.folder.add(evaluation) if finished is None else evaluation)
            if not replaying:
                show_message(_progress(evaluation, steps))

        trained = train(
            peers,
            self.settings,
            self.records,
            delta=self.delta,
            progress=on_evaluation,
            caught_up=on_caught_up,
            trace_writer=self.trace_writer,
            ledger=self.ledger,
        )
        model = ConfinedModel.from_training(trained, self.settings, self._provenance())
        end = f"{'stopped early' if trained.steps < steps else 'done'} after step {trained.steps}"
        if finished is None:
            show_message(f"{end}; saving")
            _retry(lambda: model.save(self.folder.path), show_message)
            _retry(self.folder.history.complete, show_message)
        outputs = validation_outputs(model, trained, peers)
        if finished is not None:
            show_message(f"{end}; the run was finished before, and {self.folder.path} is not changed")
        else:
            self._write(self._content(trained, history, evaluate(model, trained, outputs), peers), show_message)
        after_sums()
        if self.alone and outputs is not None and (finished is None or finished.comparison is None):
            show_message(COMPARING)
            self._add(compare_alone(self.settings, trained, outputs, peers.seed, delta=self.delta), show_message)
        return load_run(self.folder.path)

    def _compare_finished(self, finished: AnyRun, seed: bytes, show_message: ShowMessage) -> AnyRun:
        """Add a comparison that is missing in a finished run, if that is possible without the other members."""
        if not self.alone or finished.comparison or finished.validation is None or self.settings.vertical:
            return finished
        show_message(COMPARING)
        settings, folder = self.settings, self.folder.path
        found = compare_finished(settings, self.records, folder, finished.validation, seed, delta=self.delta)
        if found is None:
            return finished
        self._add(found, show_message)
        return load_run(folder)

    def _add(self, comparison: dict[str, Any], show_message: ShowMessage) -> None:
        content = parse_json((self.folder.path / FILE).read_bytes())
        self._write({**content, "comparison": comparison}, show_message)

    def _write(self, content: dict[str, Any], show_message: ShowMessage) -> None:
        text = json.dumps(content, indent=1, ensure_ascii=False).encode()
        _retry(lambda: write_private(self.folder.path / FILE, text), show_message)
        _retry(lambda: write_report(self.folder.path), show_message)

    def _provenance(self) -> dict[str, Any]:
        return {
            "participant": self.participant,
            "federation": self.federation.name,
            "epoch": self.federation.epoch,
            "digest": self.federation.digest,
        }

    def _content(
        self, trained: TrainingResult, history: list[EvalRecord], quality: dict[str, Any], peers: Peers
    ) -> dict[str, Any]:
        """Return the content of run.json."""
        settings, training = self.settings, self.federation.training
        delta = settings.model.delta if self.delta is None else self.delta
        parameters = sum(each.numel() for each in trained.network.parameters())
        # After a restart, the losses of replayed steps and the duration are unknown.
        restarted = any(evaluation.training_loss is None for evaluation in trained.evaluations)
        selected = trained.evaluations[-1].everyone_validation_loss is not None
        if trained.ledger is not None and not training.patience:  # one look, at the last model
            selected = False
        return {
            "format": FORMAT,
            "version": cgd.__version__,
            "participant": self.participant,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "federation": federation_info(self.federation, self.participant),
            "training": {**training.as_stored(), "delta": delta},
            "data": settings.data.as_stored(),
            "model": {**asdict(settings.model), "parameters": parameters},
            "records": {
                "file": self.file,
                "used": self.records.rows,
                "training": trained.samples,
                "validation": trained.validation.rows,
                "everyone_training": None if settings.unit else trained.everyone_samples,
            },
            "features": list(trained.preprocessing.features),
            "columns": [_column_summary(each, settings) for each in trained.preprocessing.columns],
            "target": target_summary(trained),
            "notes": [*self.notes, *trained.notes],
            "history": msgspec.to_builtins(history),
            "outcome": {
                "steps": trained.steps,
                "best_step": trained.best_step if selected else None,
                "early": trained.steps < training.steps,
                "seconds": None if restarted else round(trained.seconds, 3),
            },
            **quality,
            "recorded": self.trace_writer is not None,
            "revealed": msgspec.to_builtins(disclosed_sums(settings, trained)),
            "traffic": {key: value for key, value in asdict(peers.traffic).items() if not key.startswith("frames")},
            **({} if trained.ledger is None else {"privacy": privacy_summary(settings, trained, len(peers))}),
        }


def _retry(write: Callable[[], object], show_message: ShowMessage) -> None:
    """Write until it succeeds: after a failure, all members would have to train again."""
    while True:
        try:
            write()
            return
        except InputError as error:
            show_message(f"{error}; retrying every {RETRY_SECONDS:g} s")
            time.sleep(RETRY_SECONDS)


def _progress(evaluation: EvalRecord, steps: int) -> str:
    if evaluation.everyone_validation_loss is None:
        return f"step {evaluation.step} of {steps}"
    best = "the best so far" if evaluation.best_step == evaluation.step else f"best after step {evaluation.best_step}"
    return (
        f"step {evaluation.step} of {steps}: validation loss of all {evaluation.everyone_validation_loss:.4f}, {best}"
    )


def _column_summary(stats: NumberStats | CategoryStats, settings: TabularSettings) -> dict[str, Any]:
    """Return the statistics of a column over all members' records."""
    if isinstance(stats, NumberStats):
        return {**msgspec.to_builtins(stats), "constant": stats.constant}
    listed = next(each.categories for each in settings.own_columns if each.name == stats.name)
    return {
        "type": "category",
        "name": stats.name,
        "categories": dict(zip(stats.categories, stats.counts, strict=True)),
        "missing": stats.missing,
        "present": sum(stats.counts),
        "learned": not listed,
    }


def _text(name: str) -> str:
    """Return a file name as valid text: bytes that are not UTF-8, for which Python has surrogates, are escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")
