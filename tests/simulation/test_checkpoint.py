from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cgd import InputError
from cgd.simulation import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = {"lr": "0.5", "data": "digits"}
STATE: dict[str, Any] = {
    "displacement": torch.arange(6.0).reshape(2, 3),
    "rule": [{"momentum_buffer": torch.ones(3, dtype=torch.float64)}, {}],
    "history": {"training_loss": [2.5, 0.1 + 0.2], "participants": ["r0c0"]},
}


def test_load_returns_the_saved_state(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, SETTINGS, STATE)
    loaded = checkpoint.load(path, SETTINGS)
    assert loaded is not None
    assert torch.equal(loaded["displacement"], STATE["displacement"])
    assert torch.equal(loaded["rule"][0]["momentum_buffer"], STATE["rule"][0]["momentum_buffer"])
    assert loaded["rule"][0]["momentum_buffer"].dtype == torch.float64
    assert loaded["history"] == STATE["history"]


def test_save_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for number in range(3):
        checkpoint.save(path, SETTINGS, {"number": number})
    loaded = checkpoint.load(path, SETTINGS)
    assert loaded is not None
    assert loaded["number"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_load_returns_none_without_a_file(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "run.pt", SETTINGS) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"lr": "0.1", "data": "digits"}, "lr was 0.5, is 0.1"),
        ({"lr": "0.1", "data": "iris"}, "data was digits, is iris; lr was 0.5, is 0.1"),
        ({"lr": "0.5"}, "data was digits, is None"),
        ({"lr": "0.5", "data": "digits", "mu": "1"}, "mu was None, is 1"),
    ],
)
def test_load_names_the_settings_that_differ(settings: dict[str, str], difference: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, SETTINGS, STATE)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, settings)
    assert f"{path} is a checkpoint of another run ({difference}); name another file, or move it away" in str(
        caught.value
    )
    assert path.read_bytes() == before


def test_load_ignores_the_order_of_settings(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run.pt", SETTINGS, STATE)
    assert checkpoint.load(tmp_path / "run.pt", dict(reversed(SETTINGS.items()))) is not None


def load_error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, SETTINGS)
    message = str(caught.value)
    assert message.startswith(f"{path} is not a checkpoint that cgd wrote (")
    assert message.endswith("); move it away to start again")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x02.", b"{}", b"PK\x03\x04" + bytes(100)])
def test_load_rejects_other_bytes(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(content)
    load_error(path)
    assert path.read_bytes() == content


def test_load_rejects_a_truncated_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, SETTINGS, STATE)
    complete = path.read_bytes()
    for length in [*range(1, len(complete), 37), len(complete) - 1]:
        path.write_bytes(complete[:length])
        load_error(path)


def test_load_rejects_a_folder(tmp_path: Path) -> None:
    assert "IsADirectoryError" in load_error(tmp_path)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"format": "cgd-checkpoint-0", "settings": SETTINGS}, "ValueError"),
        ({"format": checkpoint.FORMAT}, "KeyError"),
        ({"weight": torch.zeros(2)}, "KeyError"),
        ([1, 2], "TypeError"),
    ],
)
def test_load_rejects_other_torch_files(content: object, error: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "run.pt")
    assert error in load_error(tmp_path / "run.pt")


class CreatesFolderWhenUnpickled:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_load_executes_no_code(tmp_path: Path) -> None:
    torch.save(
        {"format": checkpoint.FORMAT, "settings": SETTINGS, "state": CreatesFolderWhenUnpickled(tmp_path / "created")},
        tmp_path / "run",
    )
    load_error(tmp_path / "run")
    assert not (tmp_path / "created").exists()
    torch.load(tmp_path / "run", weights_only=False)  # the exploit works without weights_only
    assert (tmp_path / "created").exists()


# Writers that are killed. They are forked from one process, so that torch is imported only once.

FORK_PROGRAM = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from cgd import files
from cgd.simulation import checkpoint

torch.set_num_threads(1)
path = Path(sys.argv[1]) / "run.pt"
random.seed(0)

def save(number):
    checkpoint.save(path, {}, {"number": number, "values": torch.full((300_000,), float(number))})

def fork(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return child

def check_after(child):
    status = os.waitpid(child, 0)[1]
    content = checkpoint.load(path, {})
    complete = bool((content["values"] == content["number"]).all())
    others = [each for each in path.parent.iterdir() if each != path]
    for each in others:
        each.unlink()
    report.append([-os.waitstatus_to_exitcode(status), content["number"], complete, len(others)])

report = []
save(0)
"""
AT_EVERY_LINE = """
def die_at(line):
    def trace(frame, event, argument):
        nonlocal line
        if frame.f_code.co_filename not in (checkpoint.__file__, files.__file__):
            return None
        if event in ("line", "return"):
            line -= 1
            if line < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    save(1)

while not report or report[-1][0]:
    check_after(fork(lambda: die_at(len(report))))
print(json.dumps(report))
"""
AT_ANY_TIME = """
def write(number):
    while True:
        number += 1
        save(number)

for _ in range(100):
    number = report[-1][1] if report else 0
    before = path.stat().st_ino
    child = fork(lambda: write(number))
    while path.stat().st_ino == before:  # until it has written something
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    check_after(child)
print(json.dumps(report))
"""


def run_killed_writers(script: str, folder: Path) -> list[list[int]]:
    """Return for every writer: its signal, the number in the file, 1 if the file is complete, the number of others."""
    command = [sys.executable, "-c", FORK_PROGRAM + script, str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    report: list[list[int]] = json.loads(finished.stdout)
    assert all(complete for _, _, complete, _ in report)
    return report


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the writers")
def test_file_is_complete_if_the_writer_is_killed_at_any_line(tmp_path: Path) -> None:
    report = run_killed_writers(AT_EVERY_LINE, tmp_path)
    *interrupted, (status, number, _, others) = report
    assert (status, number, others) == (0, 1, 0)  # the last writer finished
    assert all(status == signal.SIGKILL for status, *_ in interrupted)
    numbers = [number for _, number, _, _ in interrupted]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1}
    assert any(others for *_, others in interrupted)  # some were killed before the new file was renamed


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the writers")
def test_file_is_complete_if_the_writer_is_killed_at_any_time(tmp_path: Path) -> None:
    report = run_killed_writers(AT_ANY_TIME, tmp_path)
    assert len(report) == 100
    assert all(status == signal.SIGKILL for status, *_ in report)
    numbers = [0, *(number for _, number, _, _ in report)]
    assert all(one < next_one for one, next_one in itertools.pairwise(numbers))  # never an older checkpoint
