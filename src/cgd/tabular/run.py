"""A whole run: from a participant's records to a folder with its model, its metrics and a report.

    model.safetensors, model.json   the confined model, for `cgd predict` and `cgd.load_model`
    run.json                        everything about the run, for programs
    history.jsonl                   how it went so far, written as it goes
    metrics.csv, curves.png         how it went, for people
    report.html                     all of it on one page

Only their owner can read them: they were made from private records.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import cgd
from cgd.errors import InputError
from cgd.files import write_private
from cgd.reporting.report import PAGE, write_report
from cgd.reporting.run_file import FILE, FORMAT, load_run
from cgd.tabular.disclosure import revealed
from cgd.tabular.federated_stats import Category, Number
from cgd.tabular.metrics_log import FILE as HISTORY
from cgd.tabular.metrics_log import MetricsLog
from cgd.tabular.model import ConfinedModel
from cgd.tabular.model_file import ABOUT, WEIGHTS
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import EvalRecord, TrainingResult, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd.federation.config import Federation
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.trace_writer import TraceWriter

MODEL_FILES = (WEIGHTS, ABOUT)
RETRY_SECONDS = 10.0
FEW_RECORDS, TOO_FEW = 10, "; too few to tell"


@dataclass(frozen=True)
class DataSource:
    """Where a participant's records come from.

    Attributes:
        file: its name, for the report.
        records: what was read.
        notes: what a person should know of it.
    """

    file: str
    records: TabularDataset
    notes: tuple[str, ...] = ()


class RunFolder:
    """The folder of a run.

    Args:
        folder: made when something is written.
        federation: the run's.
        participant: whose.

    Raises:
        InputError: it holds a run of another federation or participant, or cannot be used.
    """

    def __init__(self, folder: Path, federation: Federation, participant: str) -> None:
        self.folder = folder
        self._training = asdict(federation.training)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            belongs = {"participant": participant, "federation": federation.name}
            self.history = MetricsLog(folder / HISTORY, belongs)
        except OSError as error:
            raise InputError(
                f"{folder} cannot be used ({error.strerror}); name another folder for the run (--out)"
            ) from None

    @property
    def finished(self) -> bool:
        """Tell whether an earlier process finished the run; then nothing in its folder changes any more."""
        return self.content() is not None

    def content(self) -> dict[str, Any] | None:
        """Return what `run.json` says of a run that an earlier process finished; None if it is not finished.

        It was not if a file is missing or damaged, or if [training] has changed since, such as for more steps.
        """
        if not all((self.folder / name).exists() for name in (*MODEL_FILES, PAGE)):
            return None
        try:
            content = load_run(self.folder)
        except InputError:
            return None
        known = content["training"] or {}
        return content if all(known.get(key, value) == value for key, value in self._training.items()) else None

    def note(self, look: EvalRecord) -> EvalRecord:
        """Write down how far the training is; what we knew of this step in an earlier life is put in again."""
        known = self.history.looks.get(look.step)
        if known is not None and look.training_loss is None:
            return known
        self.history.add(look)
        return look


def run(
    peers: Peers,
    federation: Federation,
    participant: str,
    source: DataSource,
    folder: RunFolder,
    *,
    delta: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    recorder: TraceWriter | None = None,
) -> dict[str, Any]:
    """Train with the others, save the model and write the report; returns what `run.json` has.

    If that was done in an earlier life, the past is gone through for others who need it, and the folder stays as it is.

    Args:
        peers: the others.
        federation: the file.
        participant: who we are.
        source: our records.
        folder: for what comes out.
        delta: our own δ, if not that of the file.
        say: is told how it goes, in words.
        recorder: writes down what we see, for attacks on it.

    Raises:
        CGDError: see `train`.
    """
    setting = TabularSettings.of(federation, participant)
    finished = folder.content()
    looks: list[EvalRecord] = []
    past = True

    def caught_up(steps: int) -> None:
        nonlocal past
        past = False
        if steps:
            say(f"steps 1 to {steps} of {setting.training.steps} were taken before, and are caught up")

    def progress(look: EvalRecord) -> None:
        looks.append(folder.note(look) if finished is None else look)
        if not past:
            say(_told(look, setting.training.steps))

    def keep(write: Callable[[], object]) -> None:
        """Write, and try again for as long as it takes: who gave up now would need everybody to begin again."""
        while True:
            try:
                write()
                return
            except InputError as error:
                say(f"{error}; trying again every {RETRY_SECONDS:g} s")
                time.sleep(RETRY_SECONDS)

    trained = train(
        peers, setting, source.records, delta=delta, progress=progress, caught_up=caught_up, recorder=recorder
    )
    origin = {
        "participant": participant,
        "federation": federation.name,
        "epoch": federation.epoch,
        "digest": federation.digest,
    }
    model = ConfinedModel.of(trained, setting, origin)
    ended = f"{'stopped early' if trained.steps < setting.training.steps else 'done'} after step {trained.steps}"
    if finished is None:
        say(f"{ended}; saving")
        keep(lambda: model.save(folder.folder))
        keep(folder.history.complete)
    scores = _scores(model, trained, peers)
    if finished is not None:
        say(f"{ended}; the run was finished before, and {folder.folder} stays as it is")
        return finished
    whole = all(look.training_loss is not None for look in trained.looks)  # or we were started anew in between
    content = {
        "format": FORMAT,
        "version": cgd.__version__,
        "participant": participant,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "federation": _federation(federation, participant),
        "training": {**asdict(federation.training), "delta": setting.model.delta if delta is None else delta},
        "data": asdict(setting.data),
        "model": {**asdict(setting.model), "parameters": sum(each.numel() for each in trained.network.parameters())},
        "records": {
            "file": source.file,
            "used": source.records.rows,
            "training": trained.samples,
            "validation": trained.validation.rows,
            "everyone_training": trained.everyone_samples,
        },
        "features": list(trained.preparation.features),
        "columns": [_column(each, setting) for each in trained.preparation.columns],
        "target": _target(trained),
        "notes": [*source.notes, *trained.notes],
        "history": [asdict(look) for look in looks],
        "outcome": {
            "steps": trained.steps,
            "best_step": trained.best_step if trained.looks[-1].everyone_validation_loss is not None else None,
            "early": trained.steps < setting.training.steps,
            "seconds": round(trained.seconds, 3) if whole else None,
        },
        "validation": scores,
        "revealed": revealed(setting, trained),
        "traffic": {key: value for key, value in asdict(peers.traffic).items() if not key.startswith("frames")},
    }
    text = json.dumps(content, indent=1, ensure_ascii=False).encode()
    keep(lambda: write_private(folder.folder / FILE, text))
    keep(lambda: write_report(folder.folder))
    return content


def summary(content: dict[str, Any]) -> str:
    """The outcome of a run in a sentence."""
    scores, step = content["validation"], content["outcome"]["best_step"] or content["outcome"]["steps"]
    if scores is None:
        return f"{content['participant']} has a model, that of step {step}; no records were kept back to try it on"
    tried = f"on {scores['records']:,} of our own records that were kept back, at step {step}"
    few = scores["records"] < FEW_RECORDS
    if content["data"]["task"] == "regression":
        r2 = f", R² {scores['r2']:.3f}" if scores["r2"] is not None else ""
        poor = "; no better than the mean" if scores["r2"] is not None and scores["r2"] <= 0 else ""
        return f"root mean squared error {scores['rmse']:.4g}{r2} {tried}{TOO_FEW if few else poor}"
    auc = f", AUC {scores['auc']:.3f}" if scores["auc"] is not None else ""
    poor = "; no better than the commonest class" if scores["accuracy"] <= scores["baseline_accuracy"] else ""
    return f"accuracy {100 * scores['accuracy']:.1f} %{auc} {tried}{TOO_FEW if few else poor}"


def _told(look: EvalRecord, steps: int) -> str:
    if look.everyone_validation_loss is None:
        return f"step {look.step} of {steps}"
    best = "the best so far" if look.best_step == look.step else f"best after step {look.best_step}"
    return f"step {look.step} of {steps}: validation loss of all {look.everyone_validation_loss:.4f}, {best}"


def _federation(federation: Federation, participant: str) -> dict[str, Any]:
    grid, cell = federation.grid, federation.participant(participant).cell
    return {
        "name": federation.name,
        "epoch": federation.epoch,
        "digest": federation.digest,
        "participants": list(federation.names),
        "grid": {"rows": grid.rows, "columns": grid.columns, "cell": list(cell)} if grid and cell else None,
        "hub": federation.hub is not None,
    }


def _column(found: Number | Category, setting: TabularSettings) -> dict[str, Any]:
    """What is known of a column of the table, over everybody's records."""
    if isinstance(found, Number):
        return {"type": "number", **asdict(found), "constant": found.constant}
    listed = next(each.categories for each in setting.own_columns if each.name == found.name)
    counts = dict(zip(found.categories, found.counts, strict=True))
    return {
        "type": "category",
        "name": found.name,
        "categories": counts,
        "missing": found.missing,
        "present": sum(found.counts),
        "learned": not listed,
    }


def _target(trained: TrainingResult) -> dict[str, Any]:
    target = trained.preparation.target
    if target.classes:
        return {"classes": dict(zip(target.classes, target.counts, strict=True))}
    return {"mean": target.mean, "deviation": target.deviation}


def _scores(model: ConfinedModel, trained: TrainingResult, peers: Peers) -> dict[str, Any] | None:
    """How the model does on the records that were kept back; in a row, together with the row."""
    records = trained.validation
    if not records.rows:
        return None
    outputs = model.outputs(records, peers.groups.get("row") if model.towers > 1 else None)
    return model.scores(outputs, records)
