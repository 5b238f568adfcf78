"""Complete runs: the files in the folder, also after a participant is killed, and predictions."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

import cgd
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.hub_server import FederationHub
from cgd.federation.member import FederationMember
from cgd.json_files import convert
from cgd.optim.grid import Cell
from cgd.reporting.run_file import AnyRun, Run, load_run
from cgd.reporting.run_scores import ClassificationScores, RegressionScores
from cgd.reporting.training_report import summarize
from cgd.tabular.predict import load_inputs, predict, row_federation
from cgd.tabular.run import TabularRun
from cgd.tabular.run_folder import HISTORY_FILE, RunFolder
from cgd.tabular.training import EvalRecord
from support.tabular import VERTICAL_SCHEMA, run_in_threads, table, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ("ada", "bob", "cleo")
CELLS = [Cell(row, column) for row in range(3) for column in range(3)]


def start(path: Path, name: str, *options: str) -> subprocess.Popen[str]:
    data = path.parent / f"{name}.csv"
    command = [sys.executable, "-m", "cgd", "join", str(path), "--as", name, "--data", str(data), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def finish(processes: dict[str, subprocess.Popen[str]]) -> dict[str, str]:
    output = {}
    for name, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        output[name] = out + err
    return output


def models(path: Path, folder: str = "runs") -> dict[str, bytes]:
    return {name: (path.parent / folder / name / "model.safetensors").read_bytes() for name in NAMES}


@pytest.mark.slow
def test_participant_that_loses_everything_but_its_key_gets_the_same_model(tmp_path: Path) -> None:
    """Two runs with the same keys and tables; in one of them a participant is killed."""
    path = write_federation(tmp_path, NAMES, steps=80, lr=0.02, patience=0)
    for place, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(60 - 20 * place, place))
    output = finish({name: start(path, name) for name in NAMES})
    undisturbed = models(path)
    assert len(set(undisturbed.values())) == 3  # every participant has its own
    for name in NAMES:
        content = load_run(tmp_path / "runs" / name)
        assert [row.step for row in content.history] == list(range(5, 81, 5))
        assert all(row.training_loss is not None for row in content.history)
        assert "at step" in output[name]
        assert "report.html" in output[name]
        for file in (tmp_path / "runs" / name).iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

    again = {name: start(path, name, "--out", str(tmp_path / "again" / name), "--state", str(tmp_path / "new" / name))
             for name in NAMES}  # fmt: skip
    history = tmp_path / "again" / "bob" / HISTORY_FILE
    deadline = time.monotonic() + 60
    while not history.exists() or len(history.read_text().splitlines()) < 8:
        assert time.monotonic() < deadline, again["bob"].poll()
        time.sleep(0.02)
    again["bob"].send_signal(signal.SIGKILL)
    again["bob"].communicate()
    for file in (tmp_path / "new" / "bob").iterdir():
        file.unlink()
    again["bob"] = start(path, "bob", "--out", str(history.parent), "--state", str(tmp_path / "new" / "bob"))
    finish(again)
    assert models(path, "again") == undisturbed
    # Its history includes the evaluations from before the kill.
    content = load_run(history.parent)
    assert [row.step for row in content.history] == list(range(5, 81, 5))
    assert sum(row.training_loss is not None for row in content.history) >= 14


STUCK = """
import sys
import cgd.tabular.run
from cgd.cli import app

def compute(*_, **__):
    while True:
        sum(range(1000))

cgd.tabular.run.own_results = compute
app(sys.argv[1:])
"""


@pytest.mark.slow
def test_comparison_delays_nobody_and_can_be_interrupted(tmp_path: Path) -> None:
    path = write_federation(tmp_path, NAMES, steps=5, patience=0)
    for place, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(60, place))
    arguments = ["join", str(path), "--as", "ada", "--data", str(tmp_path / "ada.csv")]
    ada = subprocess.Popen([sys.executable, "-c", STUCK, *arguments], stderr=subprocess.PIPE, text=True)
    output = finish({"bob": start(path, "bob"), "cleo": start(path, "cleo", "--no-alone")})
    computes = ada.poll() is None
    report = tmp_path / "runs" / "ada" / "report.html"
    earlier = load_run(report.parent)
    assert report.exists()
    ada.send_signal(signal.SIGINT)
    _, err = ada.communicate(timeout=60)
    assert computes  # the others have left, although it still computed
    assert earlier.comparison is None
    assert "the accuracy is" in output["bob"]
    assert "together and" not in output["cleo"]
    assert (ada.returncode, err.splitlines()[-1]) == (130, "cgd: interrupted; the same command continues from here")
    # The others are gone for good; the same command adds the comparison and then waits for them.
    again = start(path, "ada")
    deadline = time.monotonic() + 60
    while load_run(report.parent).comparison is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=60)
    assert "Alone and together" in report.read_text()


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[Path]:
    """A federation partitioned by columns whose second row only dials out, and its hub."""
    names = [f"p{cell.row}{cell.column}" for cell in CELLS]
    path = write_federation(tmp_path, names, CELLS, VERTICAL_SCHEMA, ("p10", "p11", "p12"), steps=20)
    hub = FederationHub(path)
    yield path
    hub.close()


@pytest.mark.slow
def test_vertical_federation_trains_and_predicts_over_sockets(tmp_path: Path, grid: Path) -> None:
    cells, path = CELLS, grid
    names = list(Federation.load(path).names)
    columns = ("age", "dose", "ward")
    for cell, name in zip(cells, names, strict=True):
        content = table(40, cell.row)
        own = (columns[cell.column], "outcome", "id")
        write_csv(tmp_path / f"{name}.csv", content, own)
        write_csv(tmp_path / f"{name}-test.csv", table(15, 99), own)

    federation = Federation.load(path)

    def train(name: str) -> AnyRun:
        run = TabularRun.prepare(federation, name, tmp_path / f"{name}.csv", tmp_path / "runs" / name)
        with FederationMember(path, name, linger=10.0).peers as peers:
            return run.run(peers)

    results = run_in_threads(train, names)
    for row in range(3):
        scores = [results[f"p{row}{column}"].validation for column in range(3)]
        assert scores[0] == scores[1] == scores[2]  # the row predicts its validation split together
    disclosed = " ".join(each.what for each in results["p00"].revealed)
    assert "the same IDs" in disclosed
    assert results["p02"].features == ["ward=A", "ward=B"]

    def predict_with_row(name: str) -> Any:
        model = cgd.load_model(tmp_path / "runs" / name)
        inputs = load_inputs(model, tmp_path / f"{name}-test.csv")
        row = row_federation(federation, name)
        with FederationMember(row, name, state=tmp_path / "predictions" / name).peers as peers:
            return predict(model, inputs, peers)

    members = [name for name in names if name.startswith("p1")]
    predicted = run_in_threads(predict_with_row, members)
    for name in members:
        assert np.array_equal(predicted[name].outputs, predicted["p10"].outputs)
        assert predicted[name].ids == tuple(table(15, 99)["id"])
        assert predicted[name].scores["records"] == 15


@pytest.mark.slow
def test_privacy_warnings_are_printed_logged_and_reported(tmp_path: Path) -> None:
    path = write_federation(tmp_path, NAMES, steps=5, lr=0.02, patience=0)
    for place, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(4 if name == "cleo" else 60, place))
    output = finish({name: start(path, name) for name in NAMES})
    warnings = {
        name: [note for note in (load_run(tmp_path / "runs" / name).notes or []) if "audit" in note] for name in NAMES
    }
    assert [len(warnings[name]) for name in NAMES] == [1, 1, 2]
    relu, text = warnings["cleo"]
    assert warnings["ada"] == warnings["bob"] == [relu]
    assert relu.startswith("privacy warning: the first layer has 8 ReLU units; ")
    assert text.startswith(
        "privacy warning: this participant trains on 4 records; each of the other two members, alone, can "
    )
    assert output["cleo"].index("cgd: privacy warning, from our own table alone: ") < output["cleo"].index(
        "step 5 of 5"
    )
    assert f"cgd: {text}\n" in output["cleo"]
    assert "  note: privacy warning" not in output["cleo"]  # they were printed before
    for name in NAMES:
        early = "cgd: privacy warning, from our own table alone: the first layer has 8 ReLU units; "
        assert output[name].index(early) < output[name].index("step 5 of 5")
    events = [json.loads(line) for line in (tmp_path / "state" / "cleo" / "events.jsonl").read_text().splitlines()]
    assert [each["text"] for each in events if each.get("event") == "privacy warning"] == [relu, text]
    assert "this participant trains on 4 records" in (tmp_path / "runs" / "cleo" / "report.html").read_text()


def test_row_federation_needs_several_columns(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, NAMES))
    with pytest.raises(InputError, match="has no grid with several columns; predict without --federation"):
        row_federation(federation, "ada")


def test_saving_is_retried_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without retries, all members would have to train again."""
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=5))
    monkeypatch.setattr("cgd.tabular.run.RETRY_SECONDS", 0.01)
    original_replace, fails = os.replace, 3
    output: list[str] = []

    def full(before: str, after: Any) -> None:
        nonlocal fails
        if str(after).endswith(("run.json", "model.json")) and fails:
            fails -= 1
            raise OSError(28, "No space left on device")
        original_replace(before, after)

    def member(peers: cgd.Peers, name: str) -> bool:
        data = write_csv(tmp_path / f"{name}.csv", table(20, 1))
        run = TabularRun.prepare(federation, name, data, tmp_path / "runs" / name)
        before = run.folder.finished_run()
        run.run(peers, show_message=output.append)
        return before is None and run.folder.finished_run() is not None

    monkeypatch.setattr(os, "replace", full)
    with cgd.local_peers(NAMES) as group:
        assert group.run(member, NAMES) == [True] * 3
    assert sum("No space left on device" in each and "retrying" in each for each in output) == 3
    assert any(each == "done after step 5; saving" for each in output)


def failing(number: int, fails: Callable[[], bool]) -> Callable[[int, Any], int]:
    """Return a write function that fails, after writing a part, while `fails` returns true."""
    original_write = os.write

    def write(descriptor: int, content: Any) -> int:
        if fails() and len(content) > 7:
            original_write(descriptor, content[:7])
            return 7
        if fails():
            raise OSError(number, os.strerror(number))
        return original_write(descriptor, content)

    return write


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, *(pytest.param(each, marks=pytest.mark.slow) for each in (errno.EMFILE, errno.EIO, errno.EDQUOT))],
)
def test_unwritable_history_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Writes fail from the first row until the models are saved; then all rows are written."""
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=20, patience=0))
    started = False
    monkeypatch.setattr("cgd.tabular.run.RETRY_SECONDS", 0.01)
    saved = [tmp_path / "runs" / name / "model.json" for name in NAMES]
    fails = lambda: started and not all(path.exists() for path in saved)  # noqa: E731
    monkeypatch.setattr("cgd.tabular.run_folder.os", SimpleNamespace(**vars(os) | {"write": failing(number, fails)}))

    def member(peers: cgd.Peers, name: str) -> AnyRun:
        nonlocal started
        data = write_csv(tmp_path / f"{name}.csv", table(20, 1))
        run = TabularRun.prepare(federation, name, data, tmp_path / "runs" / name)
        peers.sum(np.zeros(1))  # wait until all folders exist
        started = True
        return run.run(peers)

    with cgd.local_peers(NAMES) as group:
        contents = group.run(member, NAMES)
    for name, content in zip(NAMES, contents, strict=True):
        assert [row.step for row in content.history] == [5, 10, 15, 20]
        first, *rows = map(json.loads, (tmp_path / "runs" / name / HISTORY_FILE).read_text().splitlines())
        assert first == {"participant": name, "federation": "trial"}
        assert rows == msgspec.to_builtins(content.history)
    warnings = [each for each in caplog.records if "training continues" in each.getMessage()]
    assert len(warnings) == 3  # one per member, not one per row
    assert {each.event for each in warnings} == {"not saved"}  # type: ignore[attr-defined]
    assert os.strerror(number) in warnings[0].getMessage()


NO_DESCRIPTORS = """
import resource, sys
from pathlib import Path
from cgd.federation.config import Federation
from cgd.reporting.run_file import EvalRecord
from cgd.tabular.run_folder import RunFolder

folder = RunFolder(Path("run"), Federation.load("federation.toml"), "ada")
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
try:
    open("run/history.jsonl")
except OSError as error:
    print(error.strerror)
folder.add(EvalRecord(5, 0.5, 5, training_loss=0.7))
"""


@pytest.mark.slow
def test_history_is_written_without_free_file_descriptors(tmp_path: Path) -> None:
    write_federation(tmp_path, NAMES)
    command = [sys.executable, "-c", NO_DESCRIPTORS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Too many open files\n"
    assert done.stderr == ""
    assert len((tmp_path / "run" / HISTORY_FILE).read_text().splitlines()) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_full_disk_is_logged_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = 100.0
    monkeypatch.setattr("cgd.tabular.run_folder.time", SimpleNamespace(monotonic=lambda: clock))
    folder = RunFolder(tmp_path / "run", Federation.load(write_federation(tmp_path, NAMES)), "ada")
    full = os.open("/dev/full", os.O_WRONLY)
    original, folder.history._descriptor = folder.history._descriptor, full
    for step in range(4):
        folder.add(EvalRecord(step, 0.5, step, training_loss=0.7))
        clock += 31
    assert caplog.text.count("No space left on device") == 2
    with pytest.raises(InputError, match="cannot be written .*free some disk space"):
        folder.history.complete()
    folder.history._descriptor = original
    folder.add(EvalRecord(4, 0.5, 4, training_loss=0.7))
    rows = [json.loads(line) for line in (tmp_path / "run" / HISTORY_FILE).read_text().splitlines()[1:]]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    os.close(full)


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, NAMES))
    RunFolder(tmp_path / "run", federation, "ada")
    with pytest.raises(InputError, match=r"run holds the run of ada of trial, which is never overwritten.*\(--out\)"):
        RunFolder(tmp_path / "run", federation, "bob")
    (tmp_path / "full").write_text("")
    with pytest.raises(InputError, match=r"cannot be used \(.*\); name another folder for the run \(--out\)"):
        RunFolder(tmp_path / "full", federation, "ada")


def test_truncated_history_is_read_up_to_the_damage(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, NAMES))
    evaluation = EvalRecord(5, 0.5, 5, training_loss=0.7, validation_loss=0.6, score=0.8)
    RunFolder(tmp_path / "run", federation, "ada").add(evaluation)
    with (tmp_path / "run" / HISTORY_FILE).open("a") as file:
        file.write('{"step": 10, "every')
    folder = RunFolder(tmp_path / "run", federation, "ada")
    assert folder.add(EvalRecord(5, 0.5, 5)) == evaluation
    assert folder.add(EvalRecord(10, 0.4, 10)) == EvalRecord(10, 0.4, 10)
    late = EvalRecord(15, 0.3, 15, training_loss=0.6)
    folder.add(late)
    again = RunFolder(tmp_path / "run", federation, "ada")
    assert again.history.evaluations == {
        5: evaluation,
        10: EvalRecord(10, 0.4, 10),
        15: late,
    }  # nothing was appended to the truncated row


def test_summary_of_a_run() -> None:
    base: dict[str, Any] = {
        "format": "cgd-run-1",
        "participant": "ada",
        "federation": {"name": "trial", "participants": ["ada"]},
        "data": {"target": "outcome", "task": "classification"},
        "history": [],
        "outcome": {"steps": 30, "best_step": 30},
    }

    def classification(**scores: Any) -> str:
        defaults = {"records": 12, "accuracy": 0.875, "classes": [], "confusion": [], "baseline_accuracy": 0.5}
        return summarize(convert(base | {"validation": defaults | scores}, Run[ClassificationScores]))

    def regression(**scores: Any) -> str:
        defaults = {"records": 20, "rmse": 12.34567, "mae": 10.0}
        return summarize(convert(base | {"validation": defaults | scores}, Run[RegressionScores]))

    assert classification() == "accuracy 87.5 % on 12 of our own validation records, at step 30"
    assert "AUC 0.910" in classification(auc=0.91)
    assert classification(baseline_accuracy=0.9).endswith("at step 30; no better than the most common class")
    assert regression(records=2) == (
        "root mean squared error 12.35 on 2 of our own validation records, at step 30; too few records to judge"
    )
    assert regression(r2=-0.1).endswith(
        "R² -0.100 on 20 of our own validation records, at step 30; no better than the mean"
    )
    assert summarize(convert(base, Run[RegressionScores])) == (
        "ada has a model, at step 30; there are no validation records to score it on"
    )


def test_run_file_is_read_back(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=10))

    def member(peers: cgd.Peers, name: str) -> AnyRun:
        data = write_csv(tmp_path / f"{name}.csv", table(30, len(name)))
        return TabularRun.prepare(federation, name, data, tmp_path / name).run(peers)

    with cgd.local_peers(NAMES) as group:
        runs = group.run(member, NAMES)
    for name, run in zip(NAMES, runs, strict=True):
        assert run == load_run(tmp_path / name)
        assert run.records is not None
        assert run.records.used == 30
        assert {"metrics.csv", "report.html"} <= {each.name for each in (tmp_path / name).iterdir()}
        disclosed = run.revealed or []
        assert any("gradients" in each.what and each.times == 10 for each in disclosed)
        assert any("and the categories of ward" in each.what for each in disclosed)


def test_run_is_complete_before_the_model_is_compared_with_one_of_our_own_records(tmp_path: Path) -> None:
    """Nobody waits for the comparison, and nothing is lost if it is interrupted; the same command adds it."""
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=10))
    data = {name: write_csv(tmp_path / f"{name}.csv", table(40, len(name))) for name in NAMES}
    before: dict[str, AnyRun] = {}

    def member(peers: cgd.Peers, name: str, alone: bool, interrupted: bool) -> AnyRun:
        run = TabularRun.prepare(federation, name, data[name], tmp_path / name, alone=alone, keep="confined")
        peers.seed = name.encode().ljust(32)

        def after_sums() -> None:
            before[name] = load_run(tmp_path / name)
            assert (tmp_path / name / "report.html").exists()
            if interrupted:
                raise KeyboardInterrupt

        return run.run(peers, after_sums=after_sums)

    def run_all(alone: bool, interrupted: bool = False) -> list[AnyRun]:
        with cgd.local_peers(NAMES) as group:
            return group.run(member, NAMES, [alone] * 3, [interrupted] * 3)

    with pytest.raises(KeyboardInterrupt):
        run_all(alone=True, interrupted=True)
    interrupted = dict(before)
    without = run_all(alone=False)
    assert [run.comparison for run in without] == [None] * 3
    found = run_all(alone=True)
    for name, run, earlier in zip(NAMES, found, without, strict=True):
        assert interrupted.get(name, earlier) == earlier  # some members may have been stopped by the first one's error
        assert run.comparison is not None
        assert [each.name for each in run.comparison.models] == ["alone", "together"]
        assert (run.comparison.records, run.comparison.training) == (8, 32)
        assert msgspec.structs.replace(run, comparison=None) == earlier  # nothing else has changed
        assert "Alone and together" in (tmp_path / name / "report.html").read_text()
    files = {name: (tmp_path / name / "run.json").read_bytes() for name in NAMES}
    assert run_all(alone=True) == found
    assert {name: (tmp_path / name / "run.json").read_bytes() for name in NAMES} == files


def test_comparison_of_a_finished_run_needs_no_other_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption, the others may have left for good."""
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=10))
    data = {name: write_csv(tmp_path / f"{name}.csv", table(40, len(name))) for name in NAMES}

    def member(peers: cgd.Peers, name: str) -> AnyRun:
        peers.seed = name.encode().ljust(32)
        return TabularRun.prepare(federation, name, data[name], tmp_path / name).run(peers)

    with cgd.local_peers(NAMES) as group:
        complete = group.run(member, NAMES)[0]
    file = tmp_path / "ada" / "run.json"
    content = json.loads(file.read_text())
    del content["comparison"]
    file.write_text(json.dumps(content))
    monkeypatch.setattr("cgd.tabular.run.train", lambda *_, **__: pytest.fail("it would wait for the others"))

    def join_again(table: Path) -> AnyRun:
        peers = SimpleNamespace(seed=b"ada".ljust(32))
        with pytest.raises(pytest.fail.Exception, match="it would wait"):
            TabularRun.prepare(federation, "ada", table, tmp_path / "ada").run(peers)  # type: ignore[arg-type]
        return load_run(tmp_path / "ada")

    assert join_again(write_csv(tmp_path / "other.csv", table(40, 9))).comparison is None  # not the table of the run
    assert join_again(write_csv(tmp_path / "fewer.csv", table(30, 3))).comparison is None
    assert join_again(data["ada"]) == complete
    assert "Alone and together" in (tmp_path / "ada" / "report.html").read_text()


def test_participant_without_validation_records_has_no_comparison(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=5))

    def member(peers: cgd.Peers, name: str) -> AnyRun:
        data = write_csv(tmp_path / f"{name}.csv", table(4 if name == "ada" else 40, 1))
        return TabularRun.prepare(federation, name, data, tmp_path / name).run(peers)

    with cgd.local_peers(NAMES) as group:
        runs = group.run(member, NAMES)
    assert [run.comparison is None for run in runs] == [True, False, False]


def test_member_that_enters_a_wrong_number_of_rows_does_not_take_the_reports_of_the_others(tmp_path: Path) -> None:
    """The classes were counted before, so it knows how many records the others have, and enters minus that number."""
    federation = Federation.load(write_federation(tmp_path, NAMES, steps=3))
    runs = {}
    for place, name in enumerate(NAMES):
        data = write_csv(tmp_path / f"{name}.csv", table(40, place))
        runs[name] = TabularRun.prepare(federation, name, data, tmp_path / "runs" / name)

    def member(peers: cgd.Peers, name: str) -> AnyRun:
        honest_sum = peers.sum

        def dishonest_sum(values: Any, **options: Any) -> Any:
            if options.get("context") == "count values":
                values = np.array([-80, *values[1:]])
            return honest_sum(values, **options)

        if name == "cleo":
            peers.sum = dishonest_sum  # type: ignore[method-assign]
        return runs[name].run(peers)

    with cgd.local_peers(NAMES) as group:
        try:
            group.run(member, list(NAMES))
        except cgd.CGDError:  # an error before the training is right, too
            return
    assert (tmp_path / "runs" / "ada" / "report.html").exists()


def test_history_restored_from_a_backup_is_private_again(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, NAMES))
    path = RunFolder(tmp_path / "run", federation, "ada").path / HISTORY_FILE
    path.chmod(0o644)  # as a copy without its modes has it
    RunFolder(tmp_path / "run", federation, "ada").add(EvalRecord(5, training_loss=0.5))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_model_of_another_run_without_its_history_is_refused(tmp_path: Path) -> None:
    """Otherwise the new model overwrites it, or is not saved, because the run seems to be finished."""
    federation = Federation.load(write_federation(tmp_path, NAMES))
    (tmp_path / "run").mkdir()
    model = {"format": "cgd-model-1", "participant": "bob", "federation": "last-year"}
    (tmp_path / "run" / "model.json").write_text(json.dumps(model))
    with pytest.raises(InputError, match=r"run holds the run of bob of last-year, which is never overwritten"):
        RunFolder(tmp_path / "run", federation, "ada")


def test_history_whose_first_row_is_truncated_is_begun_again(tmp_path: Path) -> None:
    """A full disk truncates it; then the same command must continue."""
    federation = Federation.load(write_federation(tmp_path, NAMES))
    path = RunFolder(tmp_path / "run", federation, "ada").path / HISTORY_FILE
    complete = path.read_bytes()
    path.write_bytes(complete[:20])
    RunFolder(tmp_path / "run", federation, "ada")
    assert path.read_bytes() == complete
