"""What a secure sum costs over sockets: `make bench`.

Five processes on this machine, connected as a federation (ZeroMQ with CURVE), sum vectors; the same processes
all-reduce the same vectors with torch.distributed's gloo, which neither encrypts nor hides anything. Both in turns in
one run, so that they meet the same machine; what counts is the ratio of the medians.

Between the two stands what encryption alone costs: the same bytes as in a secure sum, sent to the same peers over bare
CURVE sockets, and thrown away. Behind them, the same sum through a hub, which is one more process, with nobody
reachable by anybody else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed
import zmq
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import cgd
from cgd.federation import config, config_edit
from cgd.federation.hub_server import FederationHub
from cgd.federation.keys import Keys, curve_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

NAMES = ("ada", "bob", "cleo", "dan", "eve")
MNIST_NETWORK = 784 * 256 + 256 * 10
SIZES = (MNIST_NETWORK, 10_000_000)
TARGET = 4.0
SLICE_BYTES = 1 << 20


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def found(folder: Path) -> tuple[Path, Path, int, list[int]]:
    """Two federation files, the second with a hub, keys for everyone, a port for gloo, and ports for bare sockets."""
    *ports, hub_port, rendezvous = free_ports(2 * len(NAMES) + 2)
    ports, bare = ports[: len(NAMES)], ports[len(NAMES) :]
    participants = []
    for name, port in zip(NAMES, ports, strict=True):
        keys = Keys.generate(name)
        keys.save(folder)
        participants.append(config.Participant(name, f"tcp://127.0.0.1:{port}", keys.public, None))
    config_edit.new(folder / "federation.toml", "bench", participants)
    hub = Keys.generate("hub")
    hub.save(folder)
    away = [replace(each, address="") for each in participants]
    site = config.HubSite(f"tcp://127.0.0.1:{hub_port}", hub.public)
    config_edit.new(folder / "hub.toml", "bench-hub", away, config.Training(opening="hub"), site)
    return folder / "federation.toml", folder / "hub.toml", rendezvous, bare


def hub(path: Path, stop: Event) -> None:
    """The hub."""
    running = FederationHub(path)
    stop.wait()
    running.close()


@contextmanager
def bare_curve(name: str, path: Path, ports: Sequence[int]) -> Iterator[Callable[[int], None]]:
    """Connect with all others by CURVE and nothing else; gives a function that moves the bytes of a sum of a size."""
    keys = {each.name: each.key for each in config.Federation.load(path).participants}
    own = Keys.load(path.parent / f"{name}.key")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_secretkey = True, own.secret
    router.bind(f"tcp://127.0.0.1:{ports[NAMES.index(name)]}")
    dealers = []
    for peer, port in zip(NAMES, ports, strict=True):
        if peer != name:
            dealer = context.socket(zmq.DEALER)
            dealer.curve_serverkey, dealer.curve_secretkey = curve_key(keys[peer]), own.secret
            dealer.curve_publickey = own.curve
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealers.append(dealer)

    def move(size: int) -> None:
        part = 4 * size // len(NAMES)
        slices = [bytes(min(SLICE_BYTES, part - start)) for start in range(0, part, SLICE_BYTES)]
        for _ in range(2):  # the subtotals, then the totals
            for each in slices:
                for dealer in dealers:
                    dealer.send(each)
            for _ in range(len(slices) * len(dealers)):
                router.recv_multipart(copy=False)

    yield move
    for each in (*dealers, router):
        each.close(linger=0)
    context.term()


def timed(together: Callable[[], object], function: Callable[[], object]) -> float:
    """Seconds that a function takes when all begin at the same time."""
    together()
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def participant(
    name: str, path: Path, by_hub: Path, rendezvous: int, bare: Sequence[int], repeats: int, results: Queue[Any]
) -> None:
    """One of the five."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{rendezvous}", rank=NAMES.index(name), world_size=len(NAMES)
    )
    together = torch.distributed.barrier
    with (
        cgd.join(path, name, timeout=60) as peers,
        cgd.join(by_hub, name, timeout=60, state=path.parent / "hub-state" / name) as hub_peers,
        bare_curve(name, path, bare) as move,
    ):
        for size in SIZES:
            values = np.random.default_rng(0).normal(0, 0.01, size).astype(np.float32)
            tensor = torch.from_numpy(values.copy())
            peers.sum(values)
            hub_peers.sum(values)
            torch.distributed.all_reduce(tensor)
            move(size)
            rounds = max(3, min(repeats, repeats * MNIST_NETWORK * 10 // size))
            times = [
                (
                    timed(together, lambda tensor=tensor: torch.distributed.all_reduce(tensor)),  # type: ignore[misc]
                    timed(together, lambda size=size: move(size)),  # type: ignore[misc]
                    timed(together, lambda values=values: peers.sum(values)),  # type: ignore[misc]
                    timed(together, lambda values=values: hub_peers.sum(values)),  # type: ignore[misc]
                )
                for _ in range(rounds)
            ]
            if name == NAMES[0]:
                results.put((size, *(median(each) for each in zip(*times, strict=True))))
        steps_per_second = train(peers, together)
        if name == NAMES[0]:
            results.put(steps_per_second)
    torch.distributed.destroy_process_group()


def train(peers: cgd.Peers, together: Callable[[], object], steps: int = 40) -> float:
    """Steps per second of the paper's MNIST network, with 60 random images at each participant."""
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 256, bias=False), torch.nn.ReLU(), torch.nn.Linear(256, 10, bias=False)
    )
    cgd.confine(model, seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=60)
    x, y = torch.rand(60, 784), torch.randint(10, (60,))

    def take(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    take(1)
    return steps / timed(together, lambda: take(steps))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results: Queue[Any] = spawn.Queue()
    with tempfile.TemporaryDirectory(prefix="cgd-bench-") as folder:
        arguments = (*found(Path(folder)), options.repeats, results)
        stop = spawn.Event()
        processes = [spawn.Process(target=participant, args=(name, *arguments)) for name in NAMES]
        adder = spawn.Process(target=hub, args=(arguments[1], stop))
        for process in (adder, *processes):
            process.start()
        rows = [results.get(timeout=600) for _ in SIZES]
        steps_per_second = results.get(timeout=600)
        for process in processes:
            process.join()
        stop.set()
        adder.join()
    table = Table(title=f"One sum among {len(NAMES)} processes on this machine, medians")
    for heading in ("floats", "gloo", "CURVE", "/ gloo", "secure sum", "/ gloo", "through a hub", "/ secure sum"):
        table.add_column(heading, justify="right")
    for size, plain, curve, secure, hubbed in rows:
        ratios = (f"{1000 * curve:.1f} ms", f"{curve / plain:.1f}", f"{1000 * secure:.1f} ms", f"{secure / plain:.1f}")
        through = f"{1000 * hubbed:.1f} ms", f"{hubbed / secure:.2f}"
        table.add_row(f"{size:,}", f"{1000 * plain:.1f} ms", *ratios, *through)
    console = Console()
    console.print(table)
    console.print(f"The MNIST network, 60 images at each of {len(NAMES)}: {steps_per_second:.1f} steps per second")
    for size, plain, _, secure, _ in rows:
        if secure / plain > TARGET:
            console.print(f"{size:,} floats: {secure / plain:.1f} is above the target of {TARGET:g}")


if __name__ == "__main__":
    main()
