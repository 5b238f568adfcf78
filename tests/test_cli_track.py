"""`cgd join --track`: three processes, one of which is killed and started again; what was tracked is read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cgd.reporting.tracking import FIGURES
from support.mlflow_server import MLflowServer, needs_mlflow, runs
from support.tabular import table, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMES = ("ada", "bob", "cleo")
STEPS = 300
SECONDS = 300.0
# The end waits for the last figures for as long as a machine takes that does much else.
PROGRAM = f"""
from cgd.cli import main
from cgd.reporting import tracking
tracking.END_SECONDS = {SECONDS}
main()
"""
MORE = {"computing_seconds", "summing_seconds", "waiting_seconds"}


def test_options_are_checked_before_anything_is_sent(command: Any, tmp_path: Path) -> None:
    path = write_federation(tmp_path, NAMES)
    data = write_csv(tmp_path / "ada.csv", table(30, 1))
    join = ("join", path, "--as", "ada")
    assert (
        "--track, --dry-run and --no-alone need --data"
        in command(*join, "--run", "train:main", "--track", "tensorboard:board")[2]
    )
    code, _, err = command(*join, "--data", data, "--track", "tensorboard:board", "--track", "mlflow:http://a:b@c")
    assert code == 2
    assert "set MLFLOW_TRACKING_USERNAME" in err
    code, out, err = command(
        *join, "--data", data, "--dry-run", "--track", "tensorboard:board", "--track", "mlflow:https://ml.example/x"
    )
    assert code == 0, err
    assert "without --dry-run: tracking with TensorBoard in board: losses and scores of our own records are" in out
    assert "without --dry-run: tracking with MLflow at https://ml.example: losses and scores of our own" in out
    assert "to ml.example: they leave this machine" in out
    assert not (tmp_path / "board").exists()


def start(folder: Path, path: Path, name: str, track: Sequence[str]) -> subprocess.Popen[bytes]:
    data = folder / f"{name}.csv"
    if not data.exists():
        write_csv(data, table(40, len(name)))
    options = [each for target in track for each in ("--track", target)]
    log = (folder / f"{name}.err").open("ab")
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "join", str(path), "--as", name, "--data", str(data), "--no-alone", *options],
        cwd=folder,
        stdout=log,
        stderr=log,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    log.close()
    return started


def history(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "runs" / name / "history.jsonl"
    found = []
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # the last one, which is being written
            break
    return found


def train(folder: Path, track: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Train; kill ada after some evaluations; return the figures of its history."""
    path = write_federation(folder, NAMES, steps=STEPS, patience=0)
    processes = {name: start(folder, path, name, track if name == "ada" else ()) for name in NAMES}
    try:
        deadline = time.monotonic() + SECONDS
        while len(history(folder, "ada")) < 3:
            assert processes["ada"].poll() is None, (folder / "ada.err").read_text()
            assert time.monotonic() < deadline, (folder / "ada.err").read_text()
            time.sleep(0.01)
        processes["ada"].kill()
        processes["ada"].wait()
        processes["ada"] = start(folder, path, "ada", track)
        for name, process in processes.items():
            assert process.wait(SECONDS) == 0, (folder / f"{name}.err").read_text()
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    rows = {each["step"]: each for each in history(folder, "ada")}
    return {
        name: [(step, rows[step][name]) for step in sorted(rows) if rows[step][name] is not None] for name in FIGURES
    }


def compare(found: dict[str, list[tuple[int, float]]], expected: dict[str, list[tuple[int, float]]]) -> None:
    """Compare with the history: every figure once, and nothing else; TensorBoard has float32."""
    assert found.keys() == {*FIGURES, *MORE}
    for name, figures in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in figures], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in figures], rel=1e-6)
    for name in MORE:
        steps = [step for step, _ in found[name]]
        assert len(steps) == len(set(steps))
        assert {*steps} <= {step for step, _ in expected["everyone_validation_loss"]}
        assert all(value >= 0 for _, value in found[name])


@pytest.mark.slow
def test_killed_run_continues_in_tensorboard_without_duplicates(tmp_path: Path) -> None:
    expected = train(tmp_path, ["tensorboard:board"])
    (folder,) = (tmp_path / "board").iterdir()
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    compare(
        {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}, expected
    )
    assert "tracking with TensorBoard in board: losses and scores of our own" in (tmp_path / "ada.err").read_text()


@pytest.mark.slow
@needs_mlflow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
def test_killed_run_continues_in_mlflow_without_duplicates(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with MLflowServer(tmp_path / "server") as server:
        expected = train(tmp_path, [f"mlflow:{server.url}"])
        ((run, found),) = runs(server.url, "trial")
    compare(found, expected)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "ada"


@pytest.mark.slow
def test_training_needs_no_server(tmp_path: Path) -> None:
    """Nobody listens there: the training is the same, with one warning and one line at the end."""
    train(tmp_path, ["mlflow:http://127.0.0.1:9"])
    output = (tmp_path / "ada.err").read_text()
    first, second = output.split("tracking with MLflow at http://127.0.0.1: ")[1:]
    for part in (first, second):
        assert part.count("cannot be reached or written") <= 1
    assert "MLflow at http://127.0.0.1 lacks the figures of 60 evaluations" in second
    assert "Traceback" not in output
