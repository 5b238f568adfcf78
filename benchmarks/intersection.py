"""Measure the intersection of a row's IDs: `make intersection-results`.

Three processes on this machine, connected as a federation (ZeroMQ with CURVE), have as many IDs each, half of which all
have. Printed for each number of IDs: the processor seconds of one member, which another machine needs about as well;
the seconds that passed here, where the members share processors; the bytes that one member sends; and its memory.

`--without-curve` replaces the elliptic curve by a stand-in that takes no time and protects nothing. What is left are
the bytes, the memory, and the processor seconds of everything else.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cgd
from cgd.federation import config, config_edit
from cgd.federation.data_schema import Column, Data
from cgd.federation.intersection_section import EACH_LEARNS_WHO, Intersection
from cgd.federation.keys import Keys
from cgd.psi import curve, protocol
from cgd.tabular.dataset import TabularDataset
from cgd.tabular.intersection import intersect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.queues import Queue

    from cgd.psi.curve import Points

NAMES = ("ada", "bob", "cleo")
SIZES = (10_000, 100_000, 1_000_000)
HEADER = ("IDs of each", "processor seconds", "passed seconds", "MB sent", "bytes sent per ID", "MB of memory")


def free_ports(count: int) -> list[int]:
    """Return ports that are not in use."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def own_ids(place: int, count: int) -> tuple[str, ...]:
    """Return the IDs of a member: the first half is that of all."""
    texts = [f"{number}" if number < count // 2 else f"{place} {number}" for number in range(count)]
    return tuple(hashlib.sha256(each.encode()).hexdigest()[:20] for each in texts)


def replace_curve() -> None:
    """Replace the group by strings of bits, which are "multiplied" by XOR: it commutes, and has inverses."""

    def hash_to_points(elements: Sequence[str], key: bytes) -> Points:
        digests = (hashlib.blake2b(each.encode(), key=key, digest_size=32).digest() for each in elements)
        return curve.as_points(b"".join(digests))

    def multiply(points: Points, scalar: bytes) -> Points:
        return points ^ np.frombuffer(scalar, dtype=np.uint8)

    def divide(dividend: bytes, divisor: bytes) -> bytes:
        return bytes(one ^ other for one, other in zip(dividend, divisor, strict=True))

    for name, replacement in (("hash_to_points", hash_to_points), ("multiply", multiply), ("divide", divide)):
        setattr(curve, name, replacement)
    protocol.hash_to_points = hash_to_points  # type: ignore[attr-defined]


def take_part(
    path: Path, place: int, count: int, results: Queue[tuple[float, ...]], shows: bool, with_curve: bool
) -> None:
    """Take part in an intersection as one member, and report what it took."""
    if not with_curve:
        replace_curve()
    data = Data(
        "y",
        (Column("x", "number"),),
        "regression",
        id="id",
        intersection=Intersection(count // 4, count, EACH_LEARNS_WHO),
    )
    records = TabularDataset(count, {"x": np.arange(count, dtype=np.float64)}, {}, ids=own_ids(place, count))
    start, used = time.monotonic(), time.process_time()
    with cgd.join(path, NAMES[place], linger=5.0) as peers:
        found = intersect(records, peers, data, b"", print if shows else lambda _: None)
        figures = time.process_time() - used, time.monotonic() - start
        assert found.records.rows == count // 2
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        results.put((*figures, float(peers.traffic.bytes_sent), float(memory)))


def measure(count: int, *, shows: bool, with_curve: bool) -> list[tuple[float, ...]]:
    """Return the figures of every member."""
    with tempfile.TemporaryDirectory(prefix="cgd-intersection-") as folder:
        participants = []
        for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True):
            keys = Keys.generate(name)
            keys.save(Path(folder))
            participants.append(config.Participant(name, f"tcp://127.0.0.1:{port}", keys.public))
        path = Path(folder) / "federation.toml"
        config_edit.create_federation(path, "row", participants)
        context = multiprocessing.get_context("spawn")
        results: Queue[tuple[float, ...]] = context.Queue()
        arguments: list[Any] = [
            (path, place, count, results, shows and not place, with_curve) for place in range(len(NAMES))
        ]
        processes = [context.Process(target=take_part, args=each) for each in arguments]
        for each in processes:
            each.start()
        figures = [results.get() for _ in processes]
        for each in processes:
            each.join()
    return figures


def main(sizes: Sequence[int], *, shows: bool, with_curve: bool) -> None:
    """Print a table of all sizes."""
    print(f"{os.cpu_count()} processors, shared by {len(NAMES)} members")
    print(f"| {' | '.join(HEADER)} |")
    print("|--:" * len(HEADER) + "|")
    for count in sizes:
        used, passed, sent, memory = (
            max(each) for each in zip(*measure(count, shows=shows, with_curve=with_curve), strict=True)
        )
        cells = (
            f"{count:,}",
            f"{used:.1f}",
            f"{passed:.1f}",
            f"{sent / 1e6:.1f}",
            f"{sent / count:.0f}",
            f"{memory / 1e6:.0f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--verbose", action="store_true", help="show the messages of the first member")
    parser.add_argument("--without-curve", action="store_true", help="measure all but the calculations in the group")
    arguments = parser.parse_args()
    main(arguments.sizes, shows=arguments.verbose, with_curve=not arguments.without_curve)
