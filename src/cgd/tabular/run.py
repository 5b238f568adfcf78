"""A complete run: from a participant's file to a folder with its model, metrics and report.

    model.safetensors, model.json   the model that we keep, for `cgd predict` and `cgd.load_model`
    confined/                       the confined model, if we keep another one
    run.json                        everything about the run, for programs
    history.jsonl                   the evaluations, written during the training
    metrics.csv                     the evaluations as a table
    report.html                     everything on one page

Only their owner can read them: they were made from private records.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors.torch import save as save_tensors

import cgd
from cgd.errors import InputError
from cgd.files import write_private
from cgd.json_files import parse_json
from cgd.reporting.run_file import FILE, FORMAT, load_run
from cgd.reporting.training_report import write_report
from cgd.tabular.disclosure import disclosed_sums
from cgd.tabular.evaluation import evaluate, validation_outputs
from cgd.tabular.federated_stats import CategoryStats, NumberStats
from cgd.tabular.learned_values import learned_messages
from cgd.tabular.model import ConfinedModel
from cgd.tabular.own_results import CONFINED, DISPLACEMENT_FILE, FinishedTraining, load_finished, own_results
from cgd.tabular.private_run import open_ledger, privacy_summary
from cgd.tabular.run_folder import RunFolder
from cgd.tabular.run_inputs import RunOptions, read_inputs
from cgd.tabular.run_summary import federation_info, target_summary
from cgd.tabular.sources import check_unchanged, source_name
from cgd.tabular.trace_writer import TraceWriter
from cgd.tabular.training import EvalRecord, TrainingResult, train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from cgd.federation.config import Federation
    from cgd.optim.privacy_ledger import PrivacyLedger
    from cgd.peers import Peers
    from cgd.reporting.run_file import AnyRun
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.kept_model import Keep
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.sources import TableSource
    from cgd.tabular.training import TrainingResult

    ShowMessage = Callable[[str], None]
    Track = Callable[[EvalRecord, Mapping[str, float]], None]


RETRY_SECONDS = 10.0
COMPUTING = "computing what is for us alone, the model that we keep and its comparison; nobody waits for it"


@dataclass(frozen=True)
class TabularRun:
    """A run on a table, prepared before anything is sent.

    Attributes:
        federation: the federation file.
        participant: our name.
        settings: data, model and training settings.
        records: our records.
        folder: the folder for the results.
        file: the name of the source of our records, for the report.
        notes: notes about it.
        delta: our own δ, if not that of the federation file.
        trace_writer: records our messages for privacy attacks, if wanted.
        ledger: with [privacy], charges the budget of our records.
        alone: whether the report compares the model with one of our own records alone; see `cgd.tabular.alone`.
        keep: which model we keep; see `cgd.tabular.kept_model`.
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
    keep: Keep = "confined"

    @classmethod
    def prepare(
        cls,
        federation: Federation,
        participant: str,
        data: TableSource,
        folder: Path,
        *,
        label: str | None = None,
        delta: float | None = None,
        record: Path | None = None,
        function: str | None = None,
        budget: Path | None = None,
        alone: bool = True,
        keep: str | None = None,
        decimal: str = ".",
        device: str | torch.device = "cpu",
        salt: Path | None = None,
    ) -> TabularRun:
        """Check all settings and read the records.

        Args:
            federation: the federation file.
            participant: our name.
            data: where our records are.
            folder: the folder for the results.
            label: see `RunOptions`, as for all others.
            delta: our own δ.
            record: a folder for a trace.
            function: the function in [model].
            budget: with [privacy], the file with the budget of our records.
            decimal: the decimal sign of our file.
            alone: compare with a model of our own records alone.
            keep: see `RunOptions`.
            device: see `RunOptions`.
            salt: see `RunOptions`.

        Raises:
            InputError: a setting, the device, the file or a folder cannot be used, the file names another function, or
                the privacy budget is spent.
        """
        options = RunOptions(label, delta, record, function, budget, decimal, keep, device, salt)
        inputs = read_inputs(federation, participant, data, options)
        settings, notes = inputs.settings, inputs.notes
        run_folder = RunFolder(folder, federation, participant)
        if run_folder.finished_run() is None:
            check_unchanged(data, folder, inputs.records, write=True)
        trace_writer = None if record is None else TraceWriter(record, participant, federation.name)
        ledger = None
        if settings.privacy is not None:
            ledger, more = open_ledger(settings, federation.name, data, budget)
            notes = (*notes, *more)
        file = _text(source_name(data))
        return cls(
            federation,
            participant,
            settings,
            inputs.records,
            run_folder,
            file,
            notes,
            delta,
            trace_writer,
            ledger,
            alone,
            inputs.keep,
        )

    def run(
        self,
        peers: Peers,
        show_message: ShowMessage = lambda _: None,
        show_note: ShowMessage = lambda _: None,
        after_sums: Callable[[], None] = lambda: None,
        track: Track = lambda *_: None,
    ) -> AnyRun:
        """Train with the other members, save the model and write the report; return the content of run.json.

        If an earlier process has finished the run, take part for members that must catch up, and change no file; only
        the results that are computed after the last sum are added if they are missing.

        Args:
            peers: the members.
            show_message: called with progress messages.
            show_note: called with notes about our records, which nobody else may see.
            after_sums: called when we take part in no further sum and all files are written; then the model that we
                keep is chosen and compared with one of our own records alone, for which nobody has to wait.
            track: called with every evaluation, also of replayed steps, and with figures of a new one by name; it must
                return at once.

        Raises:
            CGDError: see `train`.
        """
        finished, steps = self.folder.finished_run(), self.settings.training.steps
        if finished is not None:  # an earlier process may have been interrupted after the last sum
            finished = self._complete(finished, peers.seed, show_message)
        history: list[EvalRecord] = []
        replaying = True

        def on_fitted(preprocessing: Preprocessing) -> None:
            for message in learned_messages(self.settings, preprocessing, self.records):
                show_message(message)

        def on_caught_up(replayed: int) -> None:
            nonlocal replaying
            replaying = False
            if replayed:
                show_message(f"steps 1 to {replayed} of {steps} were taken before the restart and are replayed")

        def on_evaluation(evaluation: EvalRecord) -> None:
            known = self.folder.add(evaluation) if finished is None else self.folder.known(evaluation) or evaluation
            history.append(known)
            track(known, {} if replaying else self._figures(peers))
            if not replaying:
                show_message(_progress(evaluation, self.settings))

        trained = train(
            peers,
            self.settings,
            self.records,
            delta=self.delta,
            fitted=on_fitted,
            progress=on_evaluation,
            caught_up=on_caught_up,
            trace_writer=self.trace_writer,
            ledger=self.ledger,
            show_note=show_note,
            show_message=show_message,
        )
        model = ConfinedModel.from_training(trained, self.settings, self._provenance())
        end = f"{'stopped early' if trained.steps < steps else 'done'} after step {trained.steps}"
        if finished is None:
            show_message(f"{end}; saving")
            _retry(lambda: model.save(self.folder.path), show_message)
            _retry(self.folder.history.complete, show_message)
        outputs, notes = validation_outputs(model, trained, peers), trained.notes
        if outputs is None and trained.validation.rows:
            notes = (*notes, "the model's outputs for our validation records are not finite, so there are no scores")
        if finished is not None:
            show_message(f"{end}; the run was finished before, and {self.folder.path} is not changed")
            for message in self.unapplied_keep(finished):
                show_message(message)
        else:
            if self.keep != "confined" and outputs is not None and trained.displacement is not None:
                # For `_complete`, after an interruption.
                _retry(partial(self._save_displacement, trained.displacement), show_message)
            quality = evaluate(model, trained, outputs)
            self._write(self._content(trained, history, quality, notes, peers), show_message)
        after_sums()
        if outputs is not None and self._lacks_results(finished):
            self._add_results(FinishedTraining(model, trained, outputs), peers.seed, show_message)
        return load_run(self.folder.path)

    def _figures(self, peers: Peers) -> dict[str, float]:
        """Return the privacy that was spent, if there is a budget, and for how long this process waited until now."""
        times, figures = peers.waiting, dict[str, float]()
        if times is not None:
            figures |= {f"{name}_seconds": getattr(times, name) for name in ("computing", "summing", "waiting")}
        if self.ledger is not None:
            figures["epsilon_spent"] = self.ledger.spent().epsilon
        return figures

    def unapplied_keep(self, finished: AnyRun) -> list[str]:
        """Return a message if the confined model is wanted, and a finished run keeps another one."""
        place = self.folder.path / CONFINED
        if self.keep != "confined" or finished.kept is None or not place.exists():
            return []
        return [f"--keep confined was not applied, because the run is finished; the confined model is in {place}"]

    def _lacks_results(self, finished: AnyRun | None) -> bool:
        """Return whether a run lacks what is computed after the last sum; None is one that was just trained."""
        if finished is None:
            return self.alone or self.keep != "confined"
        wanted = self.alone or (self.keep != "confined" and finished.kept is None)
        return finished.comparison is None and wanted

    def _complete(self, finished: AnyRun, seed: bytes, show_message: ShowMessage) -> AnyRun:
        """Add the results that a finished run lacks, if that is possible without the other members."""
        if not self._lacks_results(finished) or finished.validation is None or self.settings.vertical:
            return finished
        training = load_finished(self.settings, self.records, self.folder.path, finished, seed)
        if training is None:
            return finished
        self._add_results(training, seed, show_message)
        return load_run(self.folder.path)

    def _add_results(self, training: FinishedTraining, seed: bytes, show_message: ShowMessage) -> None:
        """Compute what follows the last sum, save the model that we keep, and write the report again."""
        show_message(COMPUTING)
        found = own_results(self.settings, training, seed, keep=self.keep, alone=self.alone, delta=self.delta)
        folder, kept = self.folder.path, found.kept
        if kept is not None:
            _retry(lambda: training.model.save(folder / CONFINED), show_message)
            _retry(lambda: kept.save(folder), show_message)
        content = parse_json((folder / FILE).read_bytes())
        self._write({**content, **found.content}, show_message)
        with suppress(OSError):
            (folder / DISPLACEMENT_FILE).unlink(missing_ok=True)

    def _save_displacement(self, displacement: Mapping[str, torch.Tensor]) -> None:
        tensors = {name: each.contiguous() for name, each in displacement.items()}
        write_private(self.folder.path / DISPLACEMENT_FILE, save_tensors(tensors))

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
        self,
        trained: TrainingResult,
        history: list[EvalRecord],
        quality: dict[str, Any],
        notes: Sequence[str],
        peers: Peers,
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
            "model": {**settings.model.as_stored(), "parameters": parameters},
            "records": {
                "file": self.file,
                "used": trained.records.rows,
                "training": trained.samples,
                "validation": trained.validation.rows,
                "everyone_training": None if settings.unit else trained.everyone_samples,
            },
            "features": list(trained.preprocessing.features),
            "columns": [_column_summary(each, settings) for each in trained.preprocessing.columns],
            "target": target_summary(trained),
            "notes": [*self.notes, *notes],
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
            **({} if peers.waiting is None else {"waiting": peers.waiting.stored()}),
            **({} if trained.intersection is None else {"intersection": trained.intersection.as_stored()}),
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


def _progress(evaluation: EvalRecord, settings: TabularSettings) -> str:
    step, loss = f"step {evaluation.step} of {settings.training.steps}", evaluation.everyone_validation_loss
    if loss is None:
        return step
    if settings.privacy is not None and not settings.training.patience:
        return f"{step}: validation loss of all {loss:.2f}, with noise"
    best = "the best so far" if evaluation.best_step == evaluation.step else f"best after step {evaluation.best_step}"
    noise = "" if settings.privacy is None else ", with noise"
    return f"{step}: validation loss of all {loss:.4f}{noise}, {best}"


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
