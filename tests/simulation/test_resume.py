"""A run that is killed at random steps and resumed writes the same result file."""

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
from cgd.experiments.runner import ResultStore
from cgd.experiments.spec import RunSpec
from cgd.simulation import loop
loop.CHECKPOINT_INTERVAL_SECONDS = 0.0
ResultStore(Path(sys.argv[1])).run(
    RunSpec.from_table(json.loads(sys.argv[2]), "test"), on_step=lambda step, _: print(step, flush=True)
)
"""


def start_run(folder: Path, spec: RunSpec) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(spec.as_json())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 10, "columns": 2, "mode": "joint", "accept": JOINT_REVEALS_RECORDS},
        {"rows": 4, "arithmetic": "ring"},
        {"rows": 6, "method": "local", "sample": 3},
        {"rows": 4, "rule": "running-norm"},
        {"rows": 6, "method": "local", "sample": 3, "rule": "running-norm"},
        {"rows": 6, "local": {"epochs": 2, "batch": 3, "momentum": 0.9}, "momentum": 0.5, "keep": 0.2},
        {"rows": 4, "local": {"batch": 5}, "rule": "adam", "lr": 0.01, "arithmetic": "ring"},
        {"rows": 6, "batches": 4, "momentum": 0.9},
        {"rows": 6, "method": "fedavg", "local": {"batch": 5}},
    ],
    ids=["fused", "ring", "local", "norm", "local-norm", "local-training", "ring-adam", "batches", "fedavg"],
)
def test_killed_and_resumed_run_writes_the_same_result(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = RunSpec(data="iris", hidden=(8,), steps=60, evaluations=10, **settings)
    uninterrupted = ResultStore(tmp_path / "uninterrupted")
    uninterrupted.run(spec)
    interrupted = ResultStore(tmp_path / "interrupted")
    rng = random.Random(1)
    steps_seen: list[int] = []
    for _ in range(2):
        process = start_run(interrupted.folder, spec)
        assert process.stdout is not None
        steps_seen += [int(process.stdout.readline()) for _ in range(rng.randint(8, 20))]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert not interrupted.path(spec).exists()
    assert max(steps_seen) > 12  # it resumed, and not from the start
    process = start_run(interrupted.folder, spec)
    rest, _ = process.communicate()
    assert process.returncode == 0
    assert int(rest.split()[0]) > 1
    assert interrupted.path(spec).read_bytes() == uninterrupted.path(spec).read_bytes()
    assert not interrupted.checkpoint(spec).exists()
