"""Measure how many latencies of the network a secure sum takes: `make bench`.

Five processes on this machine sum vectors, as a federation with direct connections and as one with a hub. Every
connection passes a proxy that delays all bytes by 50 ms each way. So the time of a small sum, divided by 50 ms, is
about the number of messages that have to follow each other. Through the hub, a message from one participant to another
takes two latencies, because it is relayed. The least time of all sums shows this best: on a busy machine, processes
wait for the processor as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from delay_time import LATENCY_SECONDS, NAMES, create_federation, free_ports, run_proxy
from rich.console import Console
from rich.table import Table

import cgd
from cgd.federation import config, config_edit
from cgd.federation.hub_server import FederationHub
from cgd.federation.keys import Keys

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier, Event

SIZES = (100, 784 * 256 + 256 * 10)  # floats; the second is the paper's MNIST network
CONNECTIONS = ("direct", "through a hub")


def add_hub(path: Path, port: int) -> Path:
    """Write a second federation file, of the same participants with a hub at this port, and the hub's key."""
    hub = Keys.generate("hub")
    hub.save(path.parent)
    dialers = [replace(each, address="") for each in config.Federation.load(path).participants]
    site = config.HubSite(f"tcp://127.0.0.1:{port}", hub.public)
    by_hub = path.parent / "hub.toml"
    config_edit.create_federation(by_hub, "bench-hub", dialers, config.Training(opening="hub"), site)
    return by_hub


def run_hub(path: Path, port: int, stop: Event) -> None:
    """Run the hub behind the proxy until `stop` is set."""
    running = FederationHub(path, listen=f"tcp://127.0.0.1:{port}")
    stop.wait()
    running.close()


def participant(
    name: str, path: Path, by_hub: Path, port: int, repeats: int, barrier: Barrier, results: Queue[Any]
) -> None:
    """Run one of the five participants."""
    with (
        cgd.join(path, name, listen=f"tcp://127.0.0.1:{port}", timeout=120) as direct,
        cgd.join(by_hub, name, timeout=120, state=path.parent / "hub-state" / name) as through_hub,
    ):
        for size in SIZES:
            values = np.zeros(size, dtype=np.float32)
            for connection, peers in zip(CONNECTIONS, (direct, through_hub), strict=True):
                peers.sum(values)
                times = []
                for _ in range(repeats):
                    barrier.wait()
                    started = time.perf_counter()
                    peers.sum(values)
                    times.append(time.perf_counter() - started)
                if name == NAMES[0]:
                    results.put((size, connection, median(times), min(times)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results, barrier, ready, stop = spawn.Queue(), spawn.Barrier(len(NAMES)), spawn.Event(), spawn.Event()
    with tempfile.TemporaryDirectory(prefix="cgd-bench-") as folder:
        path, routes = create_federation(Path(folder))
        hub_port, own_hub_port = free_ports(2)
        by_hub = add_hub(path, hub_port)
        proxy = spawn.Process(target=run_proxy, args=({**routes, hub_port: own_hub_port}, ready))
        hub = spawn.Process(target=run_hub, args=(by_hub, own_hub_port, stop))
        for each in (proxy, hub):
            each.start()
        ready.wait(60)
        processes = [
            spawn.Process(target=participant, args=(name, path, by_hub, port, options.repeats, barrier, results))
            for name, port in zip(NAMES, routes.values(), strict=True)
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=600) for _ in SIZES for _ in CONNECTIONS]
        for process in processes:
            process.join()
        stop.set()
        hub.join()
        proxy.terminate()
        proxy.join()
    latencies = {(size, connection): [each / LATENCY_SECONDS for each in times] for size, connection, *times in found}
    table = Table(title=f"One sum among {len(NAMES)} processes, in latencies of {LATENCY_SECONDS * 1000:.0f} ms")
    table.add_column("floats", justify="right")
    for connection in CONNECTIONS:
        table.add_column(f"{connection}, median", justify="right")
        table.add_column("least", justify="right")
    for size in SIZES:
        table.add_row(
            f"{size:,}", *(f"{each:.1f}" for connection in CONNECTIONS for each in latencies[size, connection])
        )
    Console().print(table)


if __name__ == "__main__":
    main()
