"""Participants that are jobs of two ranks, started by torchrun: real processes that are killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.federations import NAMES, ProcessFederation, uninterrupted_bits
from support.rank_program import TRAINING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 30
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# Without it, torchrun gives restarted ranks the addresses of the killed ones (pytorch issue 135712).
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Jobs(ProcessFederation):
    """Participants of two ranks each; the last one runs its program as a script, the others through `cgd join`."""

    def start(self, name: str, *options: str, run: str = "training:main", **environment: str) -> subprocess.Popen[str]:
        command = ["-m", "--", "cgd", "join", str(self.path), "--as", name, "--run", run, *options]
        if name == self.names[-1]:
            command = [str(self.folder / "training.py"), name]
        with (self.folder / f"{name}.err").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [*TORCHRUN, "--max-restarts", "2", *command],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                text=True,
                env=os.environ | RESTARTABLE | {"OMP_NUM_THREADS": "1"} | environment,
            )
        return self.processes[name]

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()  # torchrun ends its ranks; a killed one would leave them
        for process in self.processes.values():
            process.wait()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path, NAMES[:3], program=TRAINING, steps=STEPS)
    yield jobs
    jobs.close()


@pytest.mark.slow
def test_jobs_of_two_ranks_have_the_bits_of_ordinary_participants_also_after_kills(jobs: Jobs) -> None:
    jobs.start_all(PAUSE="0.2")
    for step, victim, rank in ((5, "ada", 1), (14, "cleo", 0)):
        jobs.until_step(step)
        os.kill(int((jobs.folder / f"{victim}.{rank}.pid").read_text()), signal.SIGKILL)
    assert set(jobs.wait(seconds=100).values()) == {0}, "\n".join(map(jobs.output, jobs.names))
    followers = {(jobs.folder / f"{name}.1.bits").read_text() for name in jobs.names}
    assert set(jobs.bits().values()) == followers == {uninterrupted_bits(jobs.folder, NAMES[:3], STEPS)}
