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


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, SETTINGS, STATE)
    loaded = checkpoint.load(path, SETTINGS)
    assert loaded is not None
    assert torch.equal(loaded["displacement"], STATE["displacement"])
    assert torch.equal(loaded["rule"][0]["momentum_buffer"], STATE["rule"][0]["momentum_buffer"])
    assert loaded["rule"][0]["momentum_buffer"].dtype == torch.float64
    assert loaded["history"] == STATE["history"]


def test_the_last_one_counts_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for number in range(3):
        checkpoint.save(path, SETTINGS, {"number": number})
    loaded = checkpoint.load(path, SETTINGS)
    assert loaded is not None
    assert loaded["number"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_where_nothing_is_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "run.pt", SETTINGS) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": "0.1", "data": "digits"}, "lr was 0.5, is 0.1"),
        ({"lr": "0.1", "data": "iris"}, "data was digits, is iris; lr was 0.5, is 0.1"),
        ({"lr": "0.5"}, "data was digits, is None"),
        ({"lr": "0.5", "data": "digits", "mu": "1"}, "mu was None, is 1"),
    ],
)
def test_other_settings_are_refused_by_name_and_value(settings: dict[str, str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, SETTINGS, STATE)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, settings)
    assert f"{path} is a checkpoint of another run ({says}); name another file, or move it away" in str(caught.value)
    assert path.read_bytes() == before


def test_the_order_of_the_settings_does_not_matter(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run.pt", SETTINGS, STATE)
    assert checkpoint.load(tmp_path / "run.pt", dict(reversed(SETTINGS.items()))) is not None


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, SETTINGS)
    said = str(caught.value)
    assert said.startswith(f"{path} is not a checkpoint that cgd wrote (")
    assert said.endswith("); move it away to start anew")
    assert "\n" not in said
    return said


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x02.", b"{}", b"PK\x03\x04" + bytes(100)])
def test_garbage_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(content)
    refused(path)
    assert path.read_bytes() == content


def test_a_part_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, SETTINGS, STATE)
    whole = path.read_bytes()
    for length in [*range(1, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "IsADirectoryError" in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"format": "cgd-checkpoint-0", "settings": SETTINGS}, "ValueError"),
        ({"format": checkpoint.FORMAT}, "KeyError"),
        ({"weight": torch.zeros(2)}, "KeyError"),
        ([1, 2], "TypeError"),
    ],
)
def test_other_files_of_torch_are_refused(content: object, says: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "run.pt")
    assert says in refused(tmp_path / "run.pt")


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    torch.save(
        {"format": checkpoint.FORMAT, "settings": SETTINGS, "state": Trap(tmp_path / "sprung")}, tmp_path / "run"
    )
    refused(tmp_path / "run")
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "run", weights_only=False)  # the trap does work
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_write_that_fails_changes_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    checkpoint.write_whole(path, b"old")

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        checkpoint.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_if_the_place_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        checkpoint.write_whole(tmp_path / "run.pt", b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.pt"]


# A process that is killed. The writers are forked from one process, so that torch is imported only once.

FORKS = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from cgd.simulation import checkpoint

torch.set_num_threads(1)
path = Path(sys.argv[1]) / "run.pt"
random.seed(0)

def save(number):
    checkpoint.save(path, {}, {"number": number, "values": torch.full((300_000,), float(number))})

def forked(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return child

def ended(child):
    status = os.waitpid(child, 0)[1]
    content = checkpoint.load(path, {})
    whole = bool((content["values"] == content["number"]).all())
    beside = [each for each in path.parent.iterdir() if each != path]
    for each in beside:
        each.unlink()
    report.append([-os.waitstatus_to_exitcode(status), content["number"], whole, len(beside)])

report = []
save(0)
"""
AT_EVERY_LINE = """
def die_at(line):
    def trace(frame, event, argument):
        nonlocal line
        if frame.f_code.co_filename != checkpoint.__file__:
            return None
        if event == "line":
            line -= 1
            if line < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    save(1)

while not report or report[-1][0]:
    ended(forked(lambda: die_at(len(report))))
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
    child = forked(lambda: write(number))
    while path.stat().st_ino == before:  # until it has written something
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    ended(child)
print(json.dumps(report))
"""


def killed(script: str, folder: Path) -> list[list[int]]:
    """Of every writer the signal it died of, the number in the file, whether that is whole, and the files beside it."""
    command = [sys.executable, "-c", FORKS + script, str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    report: list[list[int]] = json.loads(finished.stdout)
    assert all(whole for _, _, whole, _ in report)
    return report


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the writers")
def test_a_writer_may_be_killed_at_every_line(tmp_path: Path) -> None:
    report = killed(AT_EVERY_LINE, tmp_path)
    *interrupted, (status, number, _, beside) = report
    assert (status, number, beside) == (0, 1, 0)  # the last one was left to finish
    assert all(status == signal.SIGKILL for status, *_ in interrupted)
    numbers = [number for _, number, _, _ in interrupted]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1}
    assert any(beside for *_, beside in interrupted)  # some died between opening the new file and renaming it


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the writers")
def test_a_writer_may_be_killed_at_any_time(tmp_path: Path) -> None:
    report = killed(AT_ANY_TIME, tmp_path)
    assert len(report) == 100
    assert all(status == signal.SIGKILL for status, *_ in report)
    numbers = [0, *(number for _, number, _, _ in report)]
    assert all(one < next_one for one, next_one in itertools.pairwise(numbers))  # never back to an older one
