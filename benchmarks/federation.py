"""Measure the cost of a secure sum over sockets, and of saving the optimiser's state after every step: `make bench`.

Five processes on this machine, connected as a federation (ZeroMQ with CURVE), sum vectors. The same processes
all-reduce the same vectors with torch.distributed's gloo, which neither encrypts nor hides anything. Both alternate in
one run, so that the load of the machine is the same for both; the result is the ratio of the medians.

Two more columns show the cost of encryption alone (the same bytes as in a secure sum, sent to the same peers over plain
CURVE sockets and discarded), and the same sum through a hub, which is one more process.

The second table compares the serialisation of an optimiser's state with momentum (twice the vector), which a member of
a federation stores after every step, with one secure sum; beside it `safetensors.torch.save`, which writes the same
bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
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
from cgd.optim.recovery import TensorWriter, common_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

NAMES = ("ada", "bob", "cleo", "dan", "eve")
MNIST_NETWORK = 784 * 256 + 256 * 10
SIZES = (MNIST_NETWORK, 10_000_000)
MAX_RATIOS = {MNIST_NETWORK: 2.5, 10_000_000: 5.0}  # of a secure sum to gloo
MAX_HUB_RATIO = 1.3  # of a sum through the hub to a direct one
SLICE_BYTES = 1 << 20


def free_ports(count: int) -> list[int]:
    """Return ports that are not in use."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def create_federations(folder: Path) -> tuple[Path, Path, int, list[int]]:
    """Write two federation files, the second with a hub, and all keys; return them and ports for gloo and CURVE."""
    *ports, hub_port, rendezvous = free_ports(2 * len(NAMES) + 2)
    ports, curve_ports = ports[: len(NAMES)], ports[len(NAMES) :]
    participants = []
    for name, port in zip(NAMES, ports, strict=True):
        keys = Keys.generate(name)
        keys.save(folder)
        participants.append(config.Participant(name, f"tcp://127.0.0.1:{port}", keys.public, None))
    config_edit.create_federation(folder / "federation.toml", "bench", participants)
    hub = Keys.generate("hub")
    hub.save(folder)
    dialers = [replace(each, address="") for each in participants]
    site = config.HubSite(f"tcp://127.0.0.1:{hub_port}", hub.public)
    config_edit.create_federation(folder / "hub.toml", "bench-hub", dialers, config.Training(opening="hub"), site)
    return folder / "federation.toml", folder / "hub.toml", rendezvous, curve_ports


def run_hub(path: Path, stop: Event) -> None:
    """Run the hub until `stop` is set."""
    running = FederationHub(path)
    stop.wait()
    running.close()


@contextmanager
def curve_sockets(name: str, path: Path, ports: Sequence[int]) -> Iterator[Callable[[int], None]]:
    """Connect to all others by plain CURVE sockets; yield a function that exchanges the bytes of a sum of a size."""
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

    def exchange(size: int) -> None:
        part = 4 * size // len(NAMES)
        slices = [bytes(min(SLICE_BYTES, part - start)) for start in range(0, part, SLICE_BYTES)]
        for _ in range(2):  # the subtotals, then the totals
            for each in slices:
                for dealer in dealers:
                    dealer.send(each)
            for _ in range(len(slices) * len(dealers)):
                router.recv_multipart(copy=False)

    yield exchange
    for each in (*dealers, router):
        each.close(linger=0)
    context.term()


def timed(barrier: Callable[[], object], function: Callable[[], object]) -> float:
    """Return the seconds of a function that all processes start at the same time."""
    barrier()
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def optimizer_state(size: int) -> dict[str, torch.Tensor]:
    """Return the common state of an optimiser with momentum over one parameter."""
    parameter = torch.zeros(size)
    state = {parameter: {"displacement": torch.randn(size), "momentum_buffer": torch.randn(size)}}
    return common_state([parameter], state, [300, 1])


def participant(
    name: str, path: Path, by_hub: Path, rendezvous: int, curve: Sequence[int], repeats: int, results: Queue[Any]
) -> None:
    """Run one of the five participants."""
    torch.set_num_threads(1)
    with (
        cgd.join(path, name, timeout=60) as peers,
        cgd.join(by_hub, name, timeout=60, state=path.parent / "hub-state" / name) as hub_peers,
        curve_sockets(name, path, curve) as exchange,
    ):
        # After `cgd.join`, which would take the processes of a group for the ranks of one participant.
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{rendezvous}", rank=NAMES.index(name), world_size=len(NAMES)
        )
        barrier = torch.distributed.barrier
        for size in SIZES:
            values = np.random.default_rng(0).normal(0, 0.01, size).astype(np.float32)
            tensor = torch.from_numpy(values.copy())
            peers.sum(values)
            hub_peers.sum(values)
            torch.distributed.all_reduce(tensor)
            exchange(size)
            state, writer = optimizer_state(size), TensorWriter()
            writer.to_bytes(state)
            rounds = max(3, min(repeats, repeats * MNIST_NETWORK * 10 // size))
            times = [
                (
                    timed(barrier, partial(torch.distributed.all_reduce, tensor)),
                    timed(barrier, partial(exchange, size)),
                    timed(barrier, partial(peers.sum, values)),
                    timed(barrier, partial(hub_peers.sum, values)),
                    timed(barrier, partial(writer.to_bytes, state)),
                    timed(barrier, partial(safetensors.torch.save, state)),
                )
                for _ in range(rounds)
            ]
            if name == NAMES[0]:
                results.put((size, *(median(each) for each in zip(*times, strict=True))))
        steps_per_second = train(peers, barrier)
        if name == NAMES[0]:
            results.put(steps_per_second)
    torch.distributed.destroy_process_group()


def train(peers: cgd.Peers, barrier: Callable[[], object], steps: int = 40) -> float:
    """Return the steps per second of the paper's MNIST network, with 60 random images at each participant."""
    with cgd.public_seed(0):
        model = torch.nn.Sequential(
            torch.nn.Linear(784, 256, bias=False), torch.nn.ReLU(), torch.nn.Linear(256, 10, bias=False)
        )
    cgd.confine(model, seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=60)
    x, y = torch.rand(60, 784), torch.randint(10, (60,))

    def take_steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    take_steps(1)
    return steps / timed(barrier, lambda: take_steps(steps))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results: Queue[Any] = spawn.Queue()
    with tempfile.TemporaryDirectory(prefix="cgd-bench-") as folder:
        arguments = (*create_federations(Path(folder)), options.repeats, results)
        stop = spawn.Event()
        processes = [spawn.Process(target=participant, args=(name, *arguments)) for name in NAMES]
        hub = spawn.Process(target=run_hub, args=(arguments[1], stop))
        for process in (hub, *processes):
            process.start()
        rows = [results.get(timeout=600) for _ in SIZES]
        steps_per_second = results.get(timeout=600)
        for process in processes:
            process.join()
        stop.set()
        hub.join()
    table = Table(title=f"One sum among {len(NAMES)} processes on this machine, medians")
    for heading in ("floats", "gloo", "CURVE", "/ gloo", "secure sum", "/ gloo", "through a hub", "/ secure sum"):
        table.add_column(heading, justify="right")
    saving = Table(title="Saving the optimiser's state (with momentum) after every step, medians")
    for heading in ("floats", "cgd", "/ secure sum", "safetensors.torch.save", "/ secure sum"):
        saving.add_column(heading, justify="right")
    for size, plain, curve, secure, by_hub, writer, safetensors_save in rows:
        ratios = (f"{1000 * curve:.1f} ms", f"{curve / plain:.1f}", f"{1000 * secure:.1f} ms", f"{secure / plain:.1f}")
        through = f"{1000 * by_hub:.1f} ms", f"{by_hub / secure:.2f}"
        table.add_row(f"{size:,}", f"{1000 * plain:.1f} ms", *ratios, *through)
        times = [(f"{1000 * each:.2f} ms", f"{each / secure:.3f}") for each in (writer, safetensors_save)]
        saving.add_row(f"{size:,}", *times[0], *times[1])
    console = Console()
    console.print(table)
    console.print(saving)
    console.print(f"The MNIST network, 60 images at each of {len(NAMES)}: {steps_per_second:.1f} steps per second")
    for size, plain, _, secure, by_hub, *_ in rows:
        if secure / plain > MAX_RATIOS[size]:
            console.print(f"{size:,} floats: {secure / plain:.1f} is above the target of {MAX_RATIOS[size]:g}")
        if by_hub / secure > MAX_HUB_RATIO:
            console.print(f"{size:,} floats through a hub: {by_hub / secure:.2f} is above {MAX_HUB_RATIO:g}")


if __name__ == "__main__":
    main()
