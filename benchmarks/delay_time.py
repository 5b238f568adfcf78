"""Measure the time of a step with a delay, in a slow network: `make delay-time`.

Five processes on this machine train the paper's MNIST network as a federation. Every connection between two of them
passes a proxy that delays all bytes by 50 ms each way. The gradient of a step is preceded by a pause in place of a
longer computation, so that the load of the machine has little influence: fixed pauses, or such that change from step to
step and member to member, with the same mean. A step with a delay of 0 takes the pause and the sum one after the other;
with a delay it takes the longer of the two. The result are ratios of the times of a step to that without a delay.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import random
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import cgd
from cgd.federation import config, config_edit
from cgd.federation.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

NAMES = ("ada", "bob", "cleo", "dan", "eve")
DELAYS = (0, 1, 2)
LATENCY_SECONDS = 0.05
PAUSE_SECONDS = 0.4
PAUSES = {"fixed": (PAUSE_SECONDS, PAUSE_SECONDS), "varying": (0.0, 2 * PAUSE_SECONDS)}
CHUNK_BYTES = 1 << 16


def free_ports(count: int) -> list[int]:
    """Return ports that are not in use."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read, `LATENCY_SECONDS` later: a delay line, which does not limit the throughput."""
    loop, waiting = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def write() -> None:
        while True:
            due, chunk = await waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            writer.write(chunk)
            await writer.drain()

    writing = asyncio.ensure_future(write())
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            waiting.put_nowait((loop.time() + LATENCY_SECONDS, chunk))
    except OSError:
        pass
    finally:
        writing.cancel()
        writer.close()


def run_proxy(routes: dict[int, int], ready: Any) -> None:
    """Forward connections from some ports to others."""

    async def handle(to: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_forward(reader, target_writer), _forward(target_reader, writer))

    def handler(to: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        return lambda reader, writer: handle(to, reader, writer)

    async def serve() -> None:
        for port, to in routes.items():
            await asyncio.start_server(handler(to), "127.0.0.1", port)
        ready.set()
        await asyncio.Event().wait()

    asyncio.run(serve())


def create_federation(folder: Path) -> tuple[Path, dict[int, int]]:
    """Write the federation file, with the addresses of the proxy, and all keys; return it and the proxy's routes."""
    ports = free_ports(2 * len(NAMES))
    public, own = ports[: len(NAMES)], ports[len(NAMES) :]
    participants = []
    for name, port in zip(NAMES, public, strict=True):
        keys = Keys.generate(name)
        keys.save(folder)
        participants.append(config.Participant(name, f"tcp://127.0.0.1:{port}", keys.public, None))
    config_edit.create_federation(folder / "federation.toml", "bench", participants)
    return folder / "federation.toml", dict(zip(public, own, strict=True))


def participant(name: str, path: Path, port: int, steps: int, barrier: Barrier, results: Queue[Any]) -> None:
    """Run one of the five participants."""
    torch.set_num_threads(1)
    logging.getLogger("cgd.optim").setLevel(logging.ERROR)  # privacy warnings about the made-up images
    with cgd.join(path, name, listen=f"tcp://127.0.0.1:{port}", timeout=120) as peers:
        for kind, (least, most) in PAUSES.items():
            for delay in DELAYS:
                pause = partial(random.Random(f"{name} {kind}").uniform, least, most)
                seconds = train(peers, delay, steps, pause, barrier)
                if name == NAMES[0]:
                    results.put((kind, delay, seconds))


def train(peers: cgd.Peers, delay: int, steps: int, pause: Callable[[], float], barrier: Barrier) -> float:
    """Return the seconds of a step of the paper's MNIST network, with 60 random images at each participant."""
    with cgd.public_seed(0):
        model = torch.nn.Sequential(
            torch.nn.Linear(784, 256, bias=False), torch.nn.ReLU(), torch.nn.Linear(256, 10, bias=False)
        )
    cgd.confine(model, seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=60, delay=delay)
    x, y = torch.rand(60, 784), torch.randint(10, (60,))
    barrier.wait()
    started = 0.0
    for step in range(steps + 1):  # the first step counts the samples
        if step == 1:
            started = time.perf_counter()
        time.sleep(pause())
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.drain()
    return (time.perf_counter() - started) / steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results, barrier, ready = spawn.Queue(), spawn.Barrier(len(NAMES)), spawn.Event()
    with tempfile.TemporaryDirectory(prefix="cgd-bench-") as folder:
        path, routes = create_federation(Path(folder))
        proxy = spawn.Process(target=run_proxy, args=(routes, ready))
        proxy.start()
        ready.wait(60)
        processes = [
            spawn.Process(target=participant, args=(name, path, port, options.steps, barrier, results))
            for name, port in zip(NAMES, routes.values(), strict=True)
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=1200) for _ in PAUSES for _ in DELAYS]
        for process in processes:
            process.join()
        proxy.terminate()
        proxy.join()
    seconds = {(kind, delay): each for kind, delay, each in found}
    latency = f"{LATENCY_SECONDS * 1000:.0f} ms of latency each way"
    table = Table(title=f"Time of a step of {len(NAMES)} processes, {latency}")
    for heading in ("pauses", *(f"delay {delay}" for delay in DELAYS)):
        table.add_column(heading, justify="right")
    for kind in PAUSES:
        cells = [f"{seconds[kind, each]:.2f} s, {seconds[kind, each] / seconds[kind, 0]:.2f}" for each in DELAYS]
        table.add_row(kind, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
