"""A program for tests: simulations on a Ray cluster of two nodes on this machine, one of which is killed.

It prints, as JSON, the digest of each result, the addresses at which the cluster listened, and the workers' reports.
Ray leaves files open and warns of its own settings, so it does not run in the process of the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import cgd
from cgd.simulation.ray_cluster import LOOPBACK_ONLY
from support.networks import FEATURES, blocks, fully_connected

if TYPE_CHECKING:
    from cgd.simulation.result import SimulationResult

STEPS = 6
GRIDS: dict[str, dict[str, Any]] = {
    "one column": {},
    "local training": {"local": cgd.LocalTraining(epochs=2, batch=3, lr=0.1, momentum=0.9)},
    "fresh origins": {"fresh_origins": True},
}


def run(name: str, **settings: Any) -> SimulationResult:
    options = {"steps": STEPS, "lr": 0.5, "progress": False, **GRIDS[name], **settings}
    return cgd.simulate(fully_connected(FEATURES, 8, 3), blocks(11), **options)


def digest(result: SimulationResult) -> str:
    values = result.flat_displacement.numpy().tobytes() + repr(result.history.as_json()).encode()
    return hashlib.sha256(values).hexdigest()


def listening(processes: set[int]) -> set[str]:
    """Return the addresses at which these processes accept connections from a network."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").glob("*"):
            if link.is_symlink() and (target := os.readlink(link)).startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def processes_of(folder: str) -> set[int]:
    """Return the processes of the cluster that has its files in this folder, and this one."""
    found = {os.getpid()}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if folder in (entry / "cmdline").read_text() or folder in (entry / "environ").read_text():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def main() -> None:
    torch.set_num_threads(1)
    os.environ.update({LOOPBACK_ONLY: "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"})
    os.environ["RAY_AUTH_TOKEN"] = os.urandom(32).hex()
    found: dict[str, Any] = {"plain": {name: digest(run(name)) for name in GRIDS}}
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="cgd-ray-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # the cluster writes its address there, and does not create this folder
        (Path(folder) / "ray").mkdir()
        node = {"num_cpus": 2, "include_dashboard": False, "temp_dir": folder, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        second = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        try:
            with cgd.RayCluster(cluster.address).connected():
                for name, workers in (
                    ("one column", 1),
                    ("one column", 2),
                    ("fresh origins", 2),
                    ("local training", 4),
                ):
                    result = run(name, engine=cgd.RayCluster(workers=workers))
                    found[f"{name}, {workers} workers"] = digest(result)
                    found[f"reports of {workers}"] = [vars(each) for each in result.workers]
                found["listening"] = sorted(listening(processes_of(folder)))

                def kill_node(step: int, _: Any) -> None:
                    if step == 2:
                        cluster.remove_node(second, allow_graceful=False)  # type: ignore[no-untyped-call]

                lost = run("one column", engine=cgd.RayCluster(workers=4), on_step=kill_node)
                found["one column, node killed"] = digest(lost)
                found["losses"] = [each.losses for each in lost.workers]
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]
    found["left"] = len(processes_of(folder)) - 1
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
