"""`cgd simulate` on CIFAR-10, killed while it computes the features and while it trains, gives the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

STEPS = 40
NEVER = "never"
SPEC = f"""
[common]
data = "cifar10-features"
hidden = [16]
delta = 0.01
lr = 0.01
momentum = 0.9
steps = {STEPS}
evaluations = 4

[[run]]
label = "joint"
rows = 5
columns = 16
mode = "joint"
accept = "joint reveals raw records"

[[run]]
label = "towers"
rows = 5
columns = 16

[[run]]
label = "alone"
method = "local"
rows = 5
columns = 2
sample = 3
"""
PROGRAM = """
import os, signal, sys
from pathlib import Path
import pytest, typer
from cgd.cli import main
from cgd.experiments import cifar, resnet
from cgd.simulation import loop
from support import cifar_files

fatal, echo, forward = sys.argv.pop(1), typer.echo, resnet.ResNet56.forward

def die_after(text):
    if text.startswith(fatal):
        os.kill(os.getpid(), signal.SIGKILL)

def announce_step(text, err):
    echo(text, err=err)
    die_after(text)

def announce_batch(network, images):
    announce_batch.number += 1
    announce_step(f"batch {announce_batch.number}", True)
    return forward(network, images)

announce_batch.number = 0
typer.echo, resnet.ResNet56.forward = announce_step, announce_batch
cifar.BATCH_IMAGES, loop.CHECKPOINT_INTERVAL_SECONDS = 1, 0.0
cifar_files.register(pytest.MonkeyPatch(), Path("data"))
main()
"""


def run(folder: Path, fatal: str) -> str:
    """Run the command, which kills itself after it printed a line with this beginning; return what it printed."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.toml").write_text(SPEC)
    environment = {key: value for key, value in os.environ.items() if key != "CGD_DATA"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ("simulate", "mine.toml", "--out", "out", "--data-dir", "data")
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, fatal, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert finished.returncode == (0 if fatal == NEVER else -signal.SIGKILL), finished.stderr
    return finished.stderr


def contents(folder: Path) -> dict[str, bytes]:
    """Return the results and the cached features; plots are drawn, and not computed step by step."""
    found = (*folder.glob("out/*.json"), *folder.glob("cache/cgd/*/*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_killed_extraction_and_killed_runs_give_the_same_bits(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert run(undisturbed, NEVER).count("batch") == 6
    assert run(killed, "batch 3").count("batch") == 3
    assert contents(killed) == {}
    for number, label in enumerate(("joint", "towers", "alone")):
        printed = run(killed, f"{label}: step {STEPS // 2} ")
        assert printed.count("batch") == (0 if number else 6)  # the features are computed anew, and once
        assert len(list(killed.glob("out/*.json"))) == number  # the runs before this one are complete
    printed = run(killed, NEVER)
    assert f"alone: step {STEPS // 10} of" not in printed  # it continued
    assert f"alone: step {STEPS} of" in printed
    assert contents(killed) == contents(undisturbed)
    assert len(contents(killed)) == 4
