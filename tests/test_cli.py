from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cgd

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.slow


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_version_and_help_do_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from cgd.cli import app; app(['--help'], standalone_mode=False); "
        "assert not {'torch', 'sklearn', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "demo" in finished.stdout
    assert run("--version", cwd=tmp_path).stdout == f"cgd {cgd.__version__}\n"


@pytest.mark.parametrize("dataset", ["breast-cancer", "digits"])
def test_demo_writes_a_table_a_plot_and_json(dataset: str, tmp_path: Path) -> None:
    finished = run(
        "demo", "--dataset", dataset, "--steps", "60", "--participants", "4", "--json", "out.json", cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stderr
    assert "all data pooled" in finished.stdout
    assert "Not revealed" in finished.stdout
    assert "The curves are in cgd-demo.png" in finished.stdout
    assert (tmp_path / "cgd-demo.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["cgd"] == cgd.__version__
    assert len(result["participants"]) == 4
    confined = [each["confined"]["accuracy"][-1] for each in result["participants"]]
    alone = [each["alone"]["accuracy"][-1] for each in result["participants"]]
    assert min(confined) > 0.85
    if dataset == "breast-cancer":  # digits needs more steps until together is better than alone
        assert sum(confined) > sum(alone)
    for each in result["participants"]:
        assert f"{each['confined']['loss'][-1]:.3f}" in finished.stdout
        assert each["traffic"]["sums"] == 62  # statistics, n, and one for each step


def test_demo_with_the_same_seed_gives_the_same_json(tmp_path: Path) -> None:
    results = []
    for name in ("one.json", "two.json"):
        assert run("demo", "--steps", "5", "--seed", "3", "--json", name, cwd=tmp_path).returncode == 0
        results.append((tmp_path / name).read_text())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--participants", "2"], "a secure sum needs at least 3"),
        (["demo", "--steps", "0"], "steps is 0; it must be at least 1"),
        (["demo", "--participants", "300"], "are too few for 300 parts"),
        (["demo", "--dataset", "mnist"], "mnist"),
        (["demo", "--json", "nowhere/out.json"], "nowhere/out.json cannot be written (No such file or directory)"),
        (["demo", "--plot", "."], "cannot be written (Is a directory)"),
        (["demo", "--plot", "curves.xyz"], "ends with .png"),
        (["demo", "--json", "/proc/out.json"], "cannot be written"),
        (["demo", "--participants", "-1"], "participants is -1"),
        (["demo", "--participants", "100000"], "are too few for 100000 parts"),
        (["dance"], "No such command"),
    ],
)
def test_bad_input_is_reported_without_a_traceback(arguments: Sequence[str], message: str, tmp_path: Path) -> None:
    finished = run(*arguments, cwd=tmp_path)
    assert finished.returncode == 2
    assert message in " ".join(finished.stderr.replace("│", " ").split())
    assert "Traceback" not in finished.stderr
    assert not list(tmp_path.iterdir())


def test_closed_pipe_loses_no_files(tmp_path: Path) -> None:
    command = f"{sys.executable} -m cgd demo --steps 3 --json out.json | head -c 1"
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "Traceback" not in finished.stderr
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["steps"] == 3
    assert (tmp_path / "cgd-demo.png").exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of a process in /proc")
def test_interrupt_stops_the_demo_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cgd", "demo", "--steps", "1000", "--participants", "8"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=one_thread
    )
    tasks = Path(f"/proc/{process.pid}/task")
    while len(list(tasks.iterdir())) < 10:  # the eight members have begun
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())
