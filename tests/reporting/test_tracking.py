"""`--track`: what is written, once, without ever keeping a training waiting; TensorBoard's files are read back."""

from __future__ import annotations

import logging
import stat
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cgd import extras
from cgd.errors import InputError, MissingExtraError
from cgd.reporting import tracking, tracking_targets
from cgd.reporting.run_file import EvalRecord
from cgd.reporting.tracking import Tracker, Tracking
from cgd.reporting.tracking_targets import (
    EventFiles,
    MLflowTarget,
    Row,
    TensorBoardTarget,
    TrackedRun,
    parse_target,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

RUN = TrackedRun("trial", "ada", "0123456789abcdef0123456789abcdef")
DEADLINE_SECONDS = 60.0


def row(step: int, **figures: float) -> Row:
    return Row(step, 1000.0 + step, figures or {"score": step / 8})


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Memory:
    """A target in memory, which can fail or hang.

    Attributes:
        written: the figures in the order in which they were written.
        failures: the number of next writes that fail after they were applied.
        refuse: whether it cannot be opened.
        blocked: cleared to let writes hang.
    """

    caution = "in memory"

    def __init__(self) -> None:
        self.written: list[tuple[str, int, float]] = []
        self.statuses: list[str] = []
        self.failures, self.refuse = 0, False
        self.opened = 0
        self.blocked = threading.Event()
        self.blocked.set()

    def __str__(self) -> str:
        return "memory"

    def open(self, run: TrackedRun) -> Memory:
        self.opened += 1
        if self.refuse:
            raise ConnectionError("https://ada:s3cret@host/token refused")
        self.known = {(name, step) for name, step, _ in self.written}
        return self

    def write(self, rows: Sequence[Row]) -> None:
        self.blocked.wait(DEADLINE_SECONDS)
        self.written += [(name, each.step, value) for each in rows for name, value in each.figures.items()]
        if self.failures:
            self.failures -= 1
            raise TimeoutError("no answer from s3cret")

    def end(self, status: str) -> None:
        self.statuses.append(status)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(tracking, "MAX_PAUSE_SECONDS", 0.01)


def finish(tracker: Tracker, status: str = "done") -> None:
    tracker.stop(status)
    tracker.join(DEADLINE_SECONDS)


def test_rows_are_written_in_order_and_the_run_is_ended() -> None:
    target = Memory()
    tracker = Tracker(target, RUN)
    for step in range(1, 50):
        tracker.add(row(step))
    finish(tracker)
    assert target.written == [("score", step, step / 8) for step in range(1, 50)]
    assert target.statuses == ["done"]
    assert tracker.unwritten == 0


def test_nothing_is_written_twice_if_only_the_answer_was_lost() -> None:
    target = Memory()
    target.failures = 3
    tracker = Tracker(target, RUN)
    for step in range(1, 9):
        tracker.add(row(step, score=0.5, training_loss=0.25))
    eventually(lambda: not tracker.unwritten)
    finish(tracker)
    assert sorted(target.written) == sorted((name, step, value) for step in range(1, 9) for name, value in
                                            (("score", 0.5), ("training_loss", 0.25)))  # fmt: skip
    assert target.opened > 1


def test_restarted_run_adds_only_what_is_missing() -> None:
    target = Memory()
    target.written = [("score", 5, 0.625), ("score", 10, 1.25), ("training_loss", 5, 0.5)]
    tracker = Tracker(target, RUN)
    for step in (5, 10, 15):
        tracker.add(row(step, score=step / 8, training_loss=0.5))
    finish(tracker)
    assert target.written[3:] == [("training_loss", 10, 0.5), ("score", 15, 1.875), ("training_loss", 15, 0.5)]


def test_failure_gives_one_warning_without_secrets_and_everything_is_written_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = Memory()
    target.refuse = True
    tracker = Tracker(target, RUN)
    for step in range(1, 21):
        tracker.add(row(step))
    eventually(lambda: target.opened > 5)
    assert tracker.unwritten == 20
    target.refuse = False
    eventually(lambda: not tracker.unwritten)
    finish(tracker)
    assert [step for _, step, _ in target.written] == list(range(1, 21))
    (record,) = caplog.records
    assert record.getMessage() == (
        "memory cannot be reached or written (ConnectionError); training continues, and figures are written as soon as "
        "possible"
    )
    assert record.levelno == logging.WARNING


def test_target_that_hangs_delays_neither_steps_nor_more_than_some_seconds_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread is a daemon, so the process can end."""
    monkeypatch.setattr(tracking, "END_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "MAX_ROWS", 100)
    target = Memory()
    target.blocked.clear()
    found = Tracking()
    found._trackers = [Tracker(target, RUN)]
    for step in range(1, 301):  # returns at once, or this test would take a minute for each
        found.track(EvalRecord(step, 0.5), {})
    lacking = "lacks the figures of 300 evaluations; the history of the run has them, and the same command adds them"
    assert found.end("failed") == [f"memory {lacking}"]
    assert all(each.daemon for each in threading.enumerate() if each.name == "cgd-track")
    target.blocked.set()


def test_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "MAX_ROWS", 10)
    target = Memory()
    target.blocked.clear()
    tracker = Tracker(target, RUN)
    for step in range(1, 100):
        tracker.add(row(step))
    assert len(tracker._rows) == 10
    assert tracker.unwritten == 99
    target.blocked.set()
    finish(tracker)
    assert [step for _, step, _ in target.written] == list(range(1, 11))
    assert tracker.unwritten == 89


def test_only_figures_of_the_history_are_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Memory()
    monkeypatch.setattr(tracking, "parse_target", lambda _: target)
    found = Tracking.from_options(["memory", "memory"])
    found.begin("trial", "ada", tmp_path)
    found.track(EvalRecord(5, 0.5, 5, 0.25, 0.375, 0.75), {"waiting_seconds": 1.5})
    found.track(EvalRecord(10, 0.25, 10), {})
    assert found.end("done") == []
    assert target.written == [
        ("training_loss", 5, 0.25),
        ("validation_loss", 5, 0.375),
        ("everyone_validation_loss", 5, 0.5),
        ("score", 5, 0.75),
        ("waiting_seconds", 5, 1.5),
        ("everyone_validation_loss", 10, 0.25),
    ]


def test_identity_of_a_run_stays_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ada" / "tracked"
    first = tracking._run_id(path)
    assert tracking._run_id(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for damaged in (b"", b"\xff\n", b"x' OR 1=1"):
        path.write_bytes(damaged)
        assert tracking._run_id(path) not in (first, damaged)


# Options.


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("wandb:x", "begins with neither tensorboard: nor mlflow:"),
        ("https://ada:s3cret@host", "begins with neither tensorboard: nor mlflow:"),
        ("tensorboard", "names no folder"),
        ("tensorboard:", "names no folder"),
        ("tensorboard:{file}/x", "cannot be used"),
        ("mlflow:", "is followed by the address of a tracking server"),
        ("mlflow:databricks", "is followed by the address of a tracking server"),
        ("mlflow:./mlruns", "is followed by the address of a tracking server"),
        ("mlflow:http://", "is followed by the address of a tracking server"),
        ("mlflow:sqlite:///", "is followed by the address of a tracking server"),
        ("mlflow:https://ada:s3cret@host", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("mlflow:https://s3cret@host", "set MLFLOW_TRACKING_USERNAME"),
        ("mlflow:https://host/?token=s3cret", "or MLFLOW_TRACKING_TOKEN"),
        ("mlflow:https://host/#s3cret", "or MLFLOW_TRACKING_TOKEN"),
        ("mlflow:https://host:s3cret", "a wrong host or port"),
        ("mlflow:https://[s3cret", "a wrong host or port"),
        ("mlflow:https://host/s3cret\n", "a space or a special character"),
    ],
)
def test_invalid_targets_are_errors_without_secrets(option: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as error:
        parse_target(option.format(file=tmp_path / "file"))
    assert message in str(error.value)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("uri", "shown", "caution"),
    [
        ("https://ml.example/s3cret", "MLflow at https://ml.example", "to ml.example: they leave this machine"),
        ("http://ml.example:5000", "MLflow at http://ml.example", "everybody on the way can read them"),
        ("http://127.0.0.1:5000", "MLflow at http://127.0.0.1", "to this machine (127.0.0.1)"),
        ("http://localhost.example", "MLflow at http://localhost.example", "they leave this machine"),
        ("sqlite:///runs.db", "MLflow in runs.db", "are written to runs.db, exactly"),
    ],
)
def test_caution_says_where_figures_go_without_secrets(uri: str, shown: str, caution: str) -> None:
    target = MLflowTarget(uri)
    assert str(target) == shown
    assert caution in target.caution
    assert "s3cret" not in target.caution


@pytest.mark.parametrize("option", ["tensorboard:board", "mlflow:https://host"])
def test_missing_library_is_named(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = option.partition(":")[0]
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=rf"needs {extra}, .* pip install 'cgd\[{extra}\]'"):
        parse_target(option)


def test_database_needs_the_complete_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_targets, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="needs the complete MLflow, .* pip install mlflow, or start a server"):
        MLflowTarget("sqlite:///runs.db").check_library()
    MLflowTarget("https://host").check_library()


# TensorBoard.


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard reads."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    found = Tracking.from_options([f"tensorboard:{tmp_path / 'board'}"])
    assert not (tmp_path / "board").exists()
    found.begin("trial", "ada", tmp_path / "run")
    found.track(EvalRecord(5, 0.5, 5, 0.25, 0.375, 0.75), {"epsilon_spent": 0.125})
    found.track(EvalRecord(10, 0.25, 10, 0.125, 0.5, 1.0), {})
    assert found.end("done") == []
    (folder,) = (tmp_path / "board").iterdir()
    assert folder.name == f"trial.ada.{(tmp_path / 'run' / 'tracked').read_text()[:8]}"
    assert scalars(folder) == {
        "everyone_validation_loss": [(5, 0.5), (10, 0.25)],
        "training_loss": [(5, 0.25), (10, 0.125)],
        "validation_loss": [(5, 0.375), (10, 0.5)],
        "score": [(5, 0.75), (10, 1.0)],
        "epsilon_spent": [(5, 0.125)],
    }
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.iterdir())] == [0o700, 0o600]


@pytest.mark.parametrize("cut", [0, 1, 9, 40])
def test_event_files_continue_after_a_kill_without_duplicates(cut: int, tmp_path: Path) -> None:
    target = TensorBoardTarget(tmp_path)
    rows = [row(step, score=step / 8, training_loss=step / 16) for step in range(1, 9)]
    target.open(RUN).write(rows[:4])
    (folder,) = tmp_path.iterdir()
    (path,) = folder.iterdir()
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])  # a kill while the last record was written
    for part in (rows[:6], rows):
        tracker = Tracker(target, RUN)
        for each in part:
            tracker.add(each)
        finish(tracker)
        assert tracker.unwritten == 0
    expected = [(step, step / 8) for step in range(1, 9)]
    assert scalars(folder) == {"score": expected, "training_loss": [(step, step / 16) for step in range(1, 9)]}
    assert len(list(folder.iterdir())) == 3


def test_other_runs_have_other_folders(tmp_path: Path) -> None:
    target = TensorBoardTarget(tmp_path)
    for each in (RUN, RUN._replace(participant="bob"), RUN._replace(id="f" * 32)):
        target.open(each).write([row(5)])
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["trial.ada.01234567", "trial.ada.ffffffff", "trial.bob.01234567"]


def test_event_file_that_cannot_be_written_raises_for_another_attempt(tmp_path: Path) -> None:
    store: Any = EventFiles(tmp_path / "run")
    (tmp_path / "run" / "events.out.tfevents.0000000001.cgd").touch()  # of another process
    with pytest.raises(FileExistsError):
        store.write([row(5)])
    EventFiles(tmp_path / "run").write([row(5)])
    assert scalars(tmp_path / "run") == {"score": [(5, 0.625)]}
