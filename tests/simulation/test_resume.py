"""Pulling the plug: a process is killed at a random moment, again and again, and the result is the same file."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from cgd import JOINT_REVEALS_RECORDS
from cgd.experiments.runner import ResultStore
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from cgd.experiments.runner import Store
from cgd.experiments.spec import RunSpec
from cgd.simulation import course
course.SECONDS_BETWEEN_CHECKPOINTS = 0.0
Store(Path(sys.argv[1])).run(
    RunSpec.from_table(json.loads(sys.argv[2]), "test"), on_step=lambda step, _: print(step, flush=True)
)
"""


def start(folder: Path, spec: RunSpec) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(spec.as_json())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 10, "columns": 2, "mode": "joint", "accept": JOINT_REVEALS_RECORDS},
        {"rows": 4, "arithmetic": "ring"},
        {"rows": 6, "method": "local", "sample": 3},
    ],
    ids=["fused", "ring", "local"],
)
def test_killed_at_random_steps_and_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = RunSpec(data="iris", hidden=(8,), steps=60, evaluations=10, **settings)
    undisturbed = ResultStore(tmp_path / "undisturbed")
    undisturbed.run(spec)
    disturbed = ResultStore(tmp_path / "disturbed")
    choice = random.Random(1)
    steps_seen: list[int] = []
    for _ in range(2):
        process = start(disturbed.folder, spec)
        assert process.stdout is not None
        steps_seen += [int(process.stdout.readline()) for _ in range(choice.randint(8, 20))]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert not disturbed.path(spec).exists()
    assert max(steps_seen) > 12  # it did go on, and not from the start
    process = start(disturbed.folder, spec)
    rest, _ = process.communicate()
    assert process.returncode == 0
    assert int(rest.split()[0]) > 1
    assert disturbed.path(spec).read_bytes() == undisturbed.path(spec).read_bytes()
    assert not disturbed.checkpoint(spec).exists()
