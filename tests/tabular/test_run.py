"""Runs: what is left in the folder, and what becomes of it when a participant is killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.hub_server import FederationHub
from cgd.federation.member import FederationMember
from cgd.optim.grid import Cell
from cgd.reporting.run_file import load_run
from cgd.tabular.loading import read
from cgd.tabular.metrics_log import FILE as HISTORY
from cgd.tabular.predict import answers, questions, row_of
from cgd.tabular.run import DataSource, RunFolder, run, summary
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import EvalRecord
from support.practice import IN_COLUMNS, federation_file, table, write_csv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
CELLS = [Cell(row, column) for row in range(3) for column in range(3)]


def start(path: Path, name: str, *options: str) -> subprocess.Popen[str]:
    data = path.parent / f"{name}.csv"
    command = [sys.executable, "-m", "cgd", "join", str(path), "--as", name, "--data", str(data), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def finish(processes: dict[str, subprocess.Popen[str]]) -> dict[str, str]:
    said = {}
    for name, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        said[name] = out + err
    return said


def models(path: Path, folder: str = "runs") -> dict[str, bytes]:
    return {name: (path.parent / folder / name / "model.safetensors").read_bytes() for name in NAMES}


def test_who_is_killed_and_loses_all_but_its_key_ends_up_with_the_same_model(tmp_path: Path) -> None:
    """Two runs with the same keys and tables, one of them disturbed."""
    path = federation_file(tmp_path, NAMES, steps=80, lr=0.02, patience=0)
    for place, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(60 - 20 * place, place))
    said = finish({name: start(path, name) for name in NAMES})
    undisturbed = models(path)
    assert len(set(undisturbed.values())) == 3  # everybody's is its own
    for name in NAMES:
        content = load_run(tmp_path / "runs" / name)
        assert [row["step"] for row in content["history"]] == list(range(5, 81, 5))
        assert all(row["training_loss"] is not None for row in content["history"])
        assert "at step" in said[name]
        assert "report.html" in said[name]
        for file in (tmp_path / "runs" / name).iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

    again = {name: start(path, name, "--out", str(tmp_path / "again" / name), "--state", str(tmp_path / "new" / name))
             for name in NAMES}  # fmt: skip
    history = tmp_path / "again" / "bob" / HISTORY
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
    # What it had seen before it was killed is in its history, too.
    content = load_run(history.parent)
    assert [row["step"] for row in content["history"]] == list(range(5, 81, 5))
    assert sum(row["training_loss"] is not None for row in content["history"]) >= 14


def in_threads(work: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def one(name: str) -> None:
        try:
            results[name] = work[name]()
        except BaseException as error:
            results[name] = error

    threads = [threading.Thread(target=one, args=(name,)) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    assert len(results) == len(work)
    return results


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[Path]:
    """A federation by columns whose second row only dials out, and its hub."""
    names = [f"p{cell.row}{cell.column}" for cell in CELLS]
    path = federation_file(tmp_path, names, CELLS, IN_COLUMNS, ("p10", "p11", "p12"), steps=20)
    hub = FederationHub(path)
    yield path
    hub.close()


def test_a_federation_by_columns_over_sockets_and_its_predictions(tmp_path: Path, grid: Path) -> None:
    cells, path = CELLS, grid
    names = list(Federation.load(path).names)
    columns = ("age", "dose", "ward")
    for cell, name in zip(cells, names, strict=True):
        content = table(40, cell.row)
        own = (columns[cell.column], "outcome", "id")
        write_csv(tmp_path / f"{name}.csv", content, own)
        write_csv(tmp_path / f"{name}-test.csv", table(15, 99), own)

    def train(name: str) -> dict[str, Any]:
        federation = Federation.load(path)
        setting = TabularSettings.of(federation, name)
        records, notes = read(tmp_path / f"{name}.csv", setting.data, setting.own_columns, ids=True)
        membership = FederationMember(path, name, linger=10.0)
        with membership.peers as peers:
            folder = RunFolder(tmp_path / "runs" / name, federation, name)
            return run(peers, federation, name, DataSource(f"{name}.csv", records, notes), folder)

    results = in_threads({name: lambda name=name: train(name) for name in names})  # type: ignore[misc]
    for row in range(3):
        tried = [results[f"p{row}{column}"]["validation"] for column in range(3)]
        assert tried[0] == tried[1] == tried[2]  # the row says the same of the records that it kept back
    told = " ".join(each["what"] for each in results["p00"]["revealed"])
    assert "the same IDs" in told
    assert results["p02"]["features"] == ["ward=A", "ward=B"]

    def ask(name: str) -> Any:
        model = cgd.load_model(tmp_path / "runs" / name)
        asked = questions(model, tmp_path / f"{name}-test.csv")
        membership = FederationMember(row_of(Federation.load(path), name), name, state=tmp_path / "asking" / name)
        with membership.peers as peers:
            return answers(model, asked, peers)

    members = [name for name in names if name.startswith("p1")]
    predicted = in_threads({name: lambda name=name: ask(name) for name in members})  # type: ignore[misc]
    for name in members:
        assert np.array_equal(predicted[name].outputs, predicted["p10"].outputs)
        assert predicted[name].ids == tuple(table(15, 99)["id"])
        assert predicted[name].scores["records"] == 15


def test_cautions_are_told_at_the_start_logged_and_kept_in_the_report(tmp_path: Path) -> None:
    path = federation_file(tmp_path, NAMES, steps=5, lr=0.02, patience=0)
    for place, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(4 if name == "cleo" else 60, place))
    said = finish({name: start(path, name) for name in NAMES})
    cautioned = {
        name: [note for note in load_run(tmp_path / "runs" / name)["notes"] if "audit" in note] for name in NAMES
    }
    assert [len(cautioned[name]) for name in NAMES] == [0, 0, 1]
    text = cautioned["cleo"][0]
    assert text.startswith(
        "caution: we bring 4 records; each of the other two members, alone, can compute whole records"
    )
    assert said["cleo"].index("cgd: caution, from our own table alone: ") < said["cleo"].index("step 5 of 5")
    assert f"cgd: {text}\n" in said["cleo"]
    assert "  note: " not in said["cleo"]
    assert "cgd: caution" not in said["ada"] + said["bob"]
    events = [json.loads(line) for line in (tmp_path / "state" / "cleo" / "events.jsonl").read_text().splitlines()]
    assert [each["text"] for each in events if each.get("event") == "caution"] == [text]
    assert "we bring 4 records" in (tmp_path / "runs" / "cleo" / "report.html").read_text()


def test_a_row_of_a_federation_without_columns_is_none(tmp_path: Path) -> None:
    federation = Federation.load(federation_file(tmp_path, NAMES))
    with pytest.raises(InputError, match="has no grid with several columns; predict without --federation"):
        row_of(federation, "ada")


def test_a_disk_that_is_full_at_the_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gave up there would need everybody to begin again."""
    federation = Federation.load(federation_file(tmp_path, NAMES, steps=5))
    monkeypatch.setattr("cgd.tabular.run.RETRY_SECONDS", 0.01)
    plain, fails = os.replace, 3
    said: list[str] = []

    def full(before: str, after: Any) -> None:
        nonlocal fails
        if str(after).endswith(("run.json", "model.json")) and fails:
            fails -= 1
            raise OSError(28, "No space left on device")
        plain(before, after)

    def one(peers: cgd.Peers, name: str) -> bool:
        setting = TabularSettings.of(federation, name)
        records, _ = read(write_csv(tmp_path / f"{name}.csv", table(20, 1)), setting.data, setting.own_columns)
        folder = RunFolder(tmp_path / "runs" / name, federation, name)
        before = folder.finished
        run(peers, federation, name, DataSource("x.csv", records), folder, say=said.append)
        return not before and folder.finished

    monkeypatch.setattr(os, "replace", full)
    with cgd.local_peers(NAMES) as colony:
        assert colony.run(one, NAMES) == [True] * 3
    assert sum("No space left on device" in each and "trying again" in each for each in said) == 3
    assert any(each == "done after step 5; saving" for each in said)


def failing(number: int, fails: Callable[[], bool]) -> Callable[[int, Any], int]:
    """A write that fails while it should, after it has written a part."""
    plain = os.write

    def write(descriptor: int, content: Any) -> int:
        if fails() and len(content) > 7:
            plain(descriptor, content[:7])
            return 7
        if fails():
            raise OSError(number, os.strerror(number))
        return plain(descriptor, content)

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO, errno.EDQUOT])
def test_a_history_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """From the first row on, and until the model is there; then everything is."""
    federation = Federation.load(federation_file(tmp_path, NAMES, steps=20, patience=0))
    begun = False
    monkeypatch.setattr("cgd.tabular.run.RETRY_SECONDS", 0.01)
    saved = [tmp_path / "runs" / name / "model.json" for name in NAMES]
    fails = lambda: begun and not all(path.exists() for path in saved)  # noqa: E731
    monkeypatch.setattr("cgd.tabular.metrics_log.os", SimpleNamespace(**vars(os) | {"write": failing(number, fails)}))

    def one(peers: cgd.Peers, name: str) -> dict[str, Any]:
        nonlocal begun
        setting = TabularSettings.of(federation, name)
        records, _ = read(write_csv(tmp_path / f"{name}.csv", table(20, 1)), setting.data, setting.own_columns)
        folder = RunFolder(tmp_path / "runs" / name, federation, name)
        peers.sum(np.zeros(1))  # all have their folder
        begun = True
        return run(peers, federation, name, DataSource("x.csv", records), folder)

    with cgd.local_peers(NAMES) as colony:
        contents = colony.run(one, NAMES)
    for name, content in zip(NAMES, contents, strict=True):
        assert [row["step"] for row in content["history"]] == [5, 10, 15, 20]
        first, *rows = map(json.loads, (tmp_path / "runs" / name / HISTORY).read_text().splitlines())
        assert first == {"participant": name, "federation": "trial"}
        assert rows == content["history"]
    warnings = [each for each in caplog.records if "training goes on" in each.getMessage()]
    assert len(warnings) == 3  # of everybody one, and not one for every row
    assert {each.event for each in warnings} == {"not saved"}  # type: ignore[attr-defined]
    assert os.strerror(number) in warnings[0].getMessage()


OPENS_NOTHING = """
import resource, sys
from pathlib import Path
from cgd.federation.config import Federation
from cgd.tabular.run import RunFolder
from cgd.tabular.training import Look

folder = RunFolder(Path("run"), Federation.load("federation.toml"), "ada")
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
try:
    open("run/history.jsonl")
except OSError as error:
    print(error.strerror)
folder.note(Look(5, 0.5, 5, training_loss=0.7))
"""


def test_a_process_that_may_open_no_more_files_notes_all_the_same(tmp_path: Path) -> None:
    federation_file(tmp_path, NAMES)
    command = [sys.executable, "-c", OPENS_NOTHING]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Too many open files\n"
    assert done.stderr == ""
    assert len((tmp_path / "run" / HISTORY).read_text().splitlines()) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_is_told_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = 100.0
    monkeypatch.setattr("cgd.tabular.metrics_log.time", SimpleNamespace(monotonic=lambda: clock))
    folder = RunFolder(tmp_path / "run", Federation.load(federation_file(tmp_path, NAMES)), "ada")
    full = os.open("/dev/full", os.O_WRONLY)
    room, folder.history._descriptor = folder.history._descriptor, full
    for step in range(4):
        folder.note(EvalRecord(step, 0.5, step, training_loss=0.7))
        clock += 31
    assert caplog.text.count("No space left on device") == 2
    with pytest.raises(InputError, match="cannot be written .*make room"):
        folder.history.complete()
    folder.history._descriptor = room
    folder.note(EvalRecord(4, 0.5, 4, training_loss=0.7))
    rows = [json.loads(line) for line in (tmp_path / "run" / HISTORY).read_text().splitlines()[1:]]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    os.close(full)


def test_the_folder_of_another_run_is_not_touched(tmp_path: Path) -> None:
    federation = Federation.load(federation_file(tmp_path, NAMES))
    RunFolder(tmp_path / "run", federation, "ada")
    with pytest.raises(InputError, match=r"run holds the run of ada of trial, which is never overwritten.*\(--out\)"):
        RunFolder(tmp_path / "run", federation, "bob")
    (tmp_path / "full").write_text("")
    with pytest.raises(InputError, match=r"cannot be used \(.*\); name another folder for the run \(--out\)"):
        RunFolder(tmp_path / "full", federation, "ada")


def test_a_history_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    federation = Federation.load(federation_file(tmp_path, NAMES))
    look = EvalRecord(5, 0.5, 5, training_loss=0.7, validation_loss=0.6, score=0.8)
    RunFolder(tmp_path / "run", federation, "ada").note(look)
    with (tmp_path / "run" / HISTORY).open("a") as file:
        file.write('{"step": 10, "every')
    folder = RunFolder(tmp_path / "run", federation, "ada")
    assert folder.note(EvalRecord(5, 0.5, 5)) == look
    assert folder.note(EvalRecord(10, 0.4, 10)) == EvalRecord(10, 0.4, 10)
    late = EvalRecord(15, 0.3, 15, training_loss=0.6)
    folder.note(late)
    again = RunFolder(tmp_path / "run", federation, "ada")
    assert again.history.looks == {
        5: look,
        10: EvalRecord(10, 0.4, 10),
        15: late,
    }  # nothing was added to the cut-off row


def test_a_run_in_a_sentence() -> None:
    content: dict[str, Any] = {
        "participant": "ada",
        "outcome": {"best_step": 30},
        "data": {"task": "classification"},
        "validation": {"records": 12, "accuracy": 0.875, "auc": None, "baseline_accuracy": 0.5},
    }
    assert summary(content) == "accuracy 87.5 % on 12 of our own records that were kept back, at step 30"
    content["validation"]["auc"] = 0.91
    assert "AUC 0.910" in summary(content)
    content["validation"]["baseline_accuracy"] = 0.9
    assert summary(content).endswith("at step 30; no better than the commonest class")
    content |= {"data": {"task": "regression"}, "validation": {"records": 2, "rmse": 12.34567, "r2": None}}
    assert summary(content).startswith("root mean squared error 12.35 on 2")
    assert summary(content).endswith("at step 30; too few to tell")
    content["validation"] |= {"records": 20, "r2": -0.1}
    assert summary(content).endswith(
        "R² -0.100 on 20 of our own records that were kept back, at step 30; no better than the mean"
    )
    content["validation"] = None
    assert summary(content) == "ada has a model, that of step 30; no records were kept back to try it on"


def test_what_the_file_of_a_run_says_can_be_read_again(tmp_path: Path) -> None:
    """In one process, with everything that a participant does."""
    path = federation_file(tmp_path, NAMES, steps=10)
    federation = Federation.load(path)

    def one(peers: cgd.Peers, name: str) -> dict[str, Any]:
        setting = TabularSettings.of(federation, name)
        data = write_csv(tmp_path / f"{name}.csv", table(30, len(name)))
        records, notes = read(data, setting.data, setting.own_columns)
        return run(
            peers, federation, name, DataSource("x.csv", records, notes), RunFolder(tmp_path / name, federation, name)
        )

    with cgd.local_peers(NAMES) as colony:
        contents = colony.run(one, NAMES)
    for name, content in zip(NAMES, contents, strict=True):
        read_again = load_run(tmp_path / name)
        assert json.loads(json.dumps(content))["history"] == read_again["history"]
        assert read_again["records"]["used"] == 30
        assert {"curves.png", "metrics.csv", "report.html"} <= {each.name for each in (tmp_path / name).iterdir()}
        assert any("gradients" in row["what"] and row["times"] == 10 for row in read_again["revealed"])
        assert any("which categories there are in ward" in row["what"] for row in read_again["revealed"])
