"""Participants that are jobs of two ranks, started by torchrun: real processes that are killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.federations import NAMES, ProcessFederation, uninterrupted_bits
from support.ports import free_port
from support.rank_program import TRAINING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

STEPS = 16
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


def test_jobs_of_two_ranks_have_the_bits_of_ordinary_participants_also_after_kills(jobs: Jobs) -> None:
    jobs.start_all(PAUSE="0.2")
    for step, victim, rank in ((3, "ada", 1), (8, "cleo", 0)):
        jobs.until_step(step)
        os.kill(int((jobs.folder / f"{victim}.{rank}.pid").read_text()), signal.SIGKILL)
    assert set(jobs.wait(seconds=100).values()) == {0}, "\n".join(map(jobs.output, jobs.names))
    followers = {(jobs.folder / f"{name}.1.bits").read_text() for name in jobs.names}
    assert set(jobs.bits().values()) == followers == {uninterrupted_bits(jobs.folder, NAMES[:3], STEPS)}


RANK_1_ALONE = """
import torch.distributed as dist
from cgd.errors import RankError
from cgd.federation.process_group import ranks_of_job

dist.init_process_group()
if dist.get_rank() == 1:
    try:
        ranks_of_job(join_seconds=2)
    except RankError as error:
        print(error, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_rank_that_joins_alone_gets_an_error_and_not_a_connection(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(RANK_1_ALONE)
    done = subprocess.run([*TORCHRUN, "alone.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 has called cgd.join, and some other rank has not within 2 s; call it on all" in done.stdout


def test_an_error_of_rank_0_ends_all_ranks_with_the_same_text(jobs: Jobs) -> None:
    (jobs.folder / "ada.key").unlink()
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "cgd", "join", str(jobs.path), "--as", "ada", "--run", "training:main"]
    ranks = [  # without torchrun, which would end one when the other fails
        subprocess.Popen(
            command, cwd=jobs.folder, stderr=subprocess.PIPE, text=True, env=environment | {"RANK": str(rank)}
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert errors[0][-1].startswith("cgd: there is no key file of ada at "), errors[0]
    assert errors[1][-1] == errors[0][-1].replace("cgd: ", "cgd: on rank 1: ")


def test_a_table_is_trained_by_one_process(jobs: Jobs) -> None:
    command = [sys.executable, "-m", "cgd", "join", str(jobs.path), "--as", "ada", "--data", "ada.csv"]
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "--data trains in one process, and this is a job of 2 ranks" in done.stderr
