"""Profile one member of a secure sum over sockets: `make profile`.

Five processes on this machine, connected as a federation, sum vectors, as in `federation.py`. One of them measures
itself, and prints for each size, per sum:

- the processor time of each of its threads, and how often each of them went to sleep: its wake-ups;
- the processor time, the calls, the copied bytes and the fresh memory of each part of the work: the functions in
  `PARTS`, without those that they call. What remains is Python between them, and ZeroMQ. The system clears fresh memory
  page by page when it is first touched, which costs more than a copy;
- how often a lock of the transport was taken, and how long a thread waited for one;
- the ratio of the processor time to that of the AES streams and the digest alone, which no implementation can avoid.

Timing a call costs about a microsecond, so the sums are a little slower than those of `federation.py`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import operator
import os
import resource
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import cgd
from cgd.aes import keystream
from cgd.secagg.fixed_point import CHUNK_ELEMENTS
from federation import NAMES, SIZES, create_federations, run_hub

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.synchronize import Barrier

SLICE_BYTES = 1 << 20
TASKS = Path("/proc/self/task")

# The functions of each part, as module:function or module:class.method.
PARTS = {
    "encode": ("cgd.secagg.fixed_point:FixedPoint.encode",),
    "mask": (
        "cgd.secagg.masking:PairwiseMasks.add_to",
        "cgd.secagg.secure_sum:add_self_mask",
        "cgd.secagg.secure_sum:remove_self_masks",
    ),
    "decode": ("cgd.secagg.fixed_point:FixedPoint.decode",),
    "digest": ("cgd.secagg.secure_sum:sha256",),
    "MAC (hub)": ("cgd.secagg.mac:LinearMac.tags", "cgd.secagg.mac:LinearMac.verify"),
    "add slices": ("cgd.secagg.reduction:add_slice",),
    "write frames": ("cgd.secagg.session:encode",),
    "read frames": ("cgd.secagg.session:from_bytes",),
    "protocol": ("cgd.transport.runtime:FederationRuntime._process_frames",),
    "put into links": ("cgd.transport.zeromq:ZeroMQTransport.send",),
    "take from inbox": ("cgd.transport.zeromq:ZeroMQTransport.receive",),
    "write datagrams": ("cgd.transport.link:Datagram.encode",),
    "read datagrams": ("cgd.transport.link:from_bytes",),
    "send by sockets": (
        "cgd.transport.connections:Connection.send",
        "cgd.transport.routes:send_to",
    ),
    "read sockets": ("cgd.transport.receiver:read_message",),
    "poll": ("cgd.transport.zeromq:ZeroMQTransport._poll",),
    "seal (hub)": ("cgd.transport.channel:Channel.seal", "cgd.transport.channel:Channel.open"),
    "signatures": ("cgd.secagg.federation_spec:Identity.sign",),
    "journal": (
        "cgd.federation.state:StateFolder.append",
        "cgd.transport.runtime:FederationRuntime._save_journals",
    ),
}
# Parts that produce a copy of what they are given: the bytes of their results are counted.
COPIES = ("write frames", "write datagrams", "seal (hub)")


@dataclass
class Part:
    """The measured cost of one part."""

    calls: int = 0
    seconds: float = 0.0
    copied: int = 0
    fresh: int = 0


def used() -> tuple[float, int]:
    """Return the processor time of this thread, and the bytes of fresh memory that it has touched."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return time.thread_time(), usage.ru_minflt * resource.getpagesize()


class Profile:
    """Measures the calls of `PARTS` in this process, its locks and its threads."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = defaultdict(Part)
        self.locks = Part()
        self._inner = threading.local()  # the time of the calls that the present one has made

    def install(self) -> None:
        """Replace the functions and the conditions of the transport by measured ones."""
        for part, names in PARTS.items():
            for name in names:
                module, _, path = name.partition(":")
                *owners, attribute = path.split(".")
                owner = functools.reduce(getattr, owners, importlib.import_module(module))
                setattr(owner, attribute, self._measured(part, getattr(owner, attribute)))
        profile = self

        class MeasuredCondition(threading.Condition):
            def __enter__(self) -> bool:
                if self.acquire(blocking=False):
                    profile.locks.calls += 1
                    return True
                started = time.perf_counter()
                entered = super().__enter__()
                profile.locks.calls += 1
                profile.locks.copied += 1
                profile.locks.seconds += time.perf_counter() - started
                return entered

            def acquire(self, *args: Any, **options: Any) -> bool:
                return bool(self._lock.acquire(*args, **options))  # type: ignore[attr-defined]

        threading.Condition = MeasuredCondition  # type: ignore[misc]

    def _measured(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inner, record = self._inner, self.parts[part]
        copies = part in COPIES

        @functools.wraps(function)
        def measured(*args: Any, **options: Any) -> Any:
            outside = getattr(inner, "used", (0.0, 0))
            inner.used = 0.0, 0
            started = used()
            try:
                result = function(*args, **options)
            finally:
                seconds, fresh = map(operator.sub, used(), started)
                record.seconds += seconds - inner.used[0]
                record.fresh += fresh - inner.used[1]
                record.calls += 1
                inner.used = outside[0] + seconds, outside[1] + fresh
            if copies and isinstance(result, bytes | memoryview):
                record.copied += len(result)
            return result

        return measured


def threads() -> dict[str, tuple[float, int]]:
    """Return the processor time and the number of sleeps of every thread, added up by its role."""
    names = {str(each.native_id): each.name for each in threading.enumerate()}
    found: dict[str, tuple[float, int]] = {}
    for task in TASKS.iterdir():
        try:
            name = names.get(task.name) or (task / "comm").read_text().strip()
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except OSError:  # it has just ended
            continue
        sleeps = int(status["voluntary_ctxt_switches"])
        before = found.get(role := name.removesuffix(f"-{NAMES[0]}"), (0.0, 0))
        found[role] = before[0] + seconds, before[1] + sleeps
    return found


def floor_seconds(size: int) -> float:
    """Return the processor time of the AES streams and the digest of a member's part in a sum of this size."""
    streams = [keystream(os.urandom(16), 0) for _ in range(len(NAMES) - 1 + 1 + len(NAMES))]
    chunk = bytes(4 * CHUNK_ELEMENTS)
    buffer, vector = bytearray(len(chunk) + 16), memoryview(bytes(4 * size))
    started = time.thread_time()
    for start in range(0, len(vector), len(chunk)):
        part = memoryview(chunk)[: min(len(chunk), len(vector) - start)]
        for stream in streams:
            stream.update_into(part, buffer)
    sha256(vector).digest()
    return time.thread_time() - started


def participant(name: str, path: Path, barrier: Barrier, repeats: int, sizes: Sequence[int], by_hub: bool) -> None:
    """Run one of the five participants; the first one prints its profile."""
    profile = Profile()
    if name == NAMES[0]:
        profile.install()
    with cgd.join(path, name, timeout=120, state=path.parent / f"{path.stem}-state" / name) as peers:
        for size in sizes:
            rounds = max(3, min(repeats, repeats * SIZES[0] * 10 // size))
            values = np.random.default_rng(0).normal(0, 0.01, size).astype(np.float32)
            peers.sum(values)
            barrier.wait()
            before, locks_before = threads(), Part(**vars(profile.locks))
            for part in profile.parts.values():
                vars(part).update(vars(Part()))
            pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            started = time.perf_counter()
            for _ in range(rounds):
                peers.sum(values)
            seconds = (time.perf_counter() - started) / rounds
            pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages
            after = threads()
            barrier.wait()
            if name == NAMES[0]:
                since = {role: map(operator.sub, after[role], before.get(role, (0.0, 0))) for role in after}
                locks = Part(*map(operator.sub, vars(profile.locks).values(), vars(locks_before).values()))
                per_sum = {role: tuple(value / rounds for value in each) for role, each in since.items()}
                report(
                    size,
                    seconds,
                    rounds,
                    per_sum,
                    profile.parts,
                    locks,
                    pages * resource.getpagesize() / rounds,
                    by_hub,
                )
        barrier.wait()


def report(
    size: int,
    seconds: float,
    rounds: int,
    per_sum: Mapping[str, tuple[float, ...]],
    parts: Mapping[str, Part],
    locks: Part,
    fresh: float,
    by_hub: bool,
) -> None:
    """Print the profile of sums of one size."""
    console, total = Console(width=110), sum(each[0] for each in per_sum.values())
    floor = floor_seconds(size)
    how = "through the hub" if by_hub else "directly"
    table = Table(title=f"One sum of {size:,} floats {how}: {1000 * seconds:.1f} ms; one member")
    for heading in ("part", "processor time, ms", "calls or sleeps", "per slice of 1 MiB", "copied, MB", "fresh, MB"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    slices = max(1, 4 * size // SLICE_BYTES)
    for role, (busy, sleeps) in sorted(per_sum.items(), key=lambda item: -item[1][0]):
        if busy > total / 200:
            table.add_row(f"thread {role}", f"{1000 * busy:.2f}", f"{sleeps:.0f}", f"{sleeps / slices:.1f}", "", "")
    table.add_row("all threads", f"{1000 * total:.2f}", "", "", "", f"{fresh / 1e6:.1f}", end_section=True)
    for name, part in sorted(parts.items(), key=lambda item: -item[1].seconds):
        if part.calls:
            calls = part.calls / rounds
            copied = f"{part.copied / rounds / 1e6:.1f}" if part.copied else ""
            new = f"{part.fresh / rounds / 1e6:.1f}"
            each = f"{1000 * part.seconds / rounds:.2f}", f"{calls:.0f}", f"{calls / slices:.1f}", copied, new
            table.add_row(name, *each)
    rest = total - sum(part.seconds for part in parts.values()) / rounds
    new = f"{fresh / 1e6 - sum(part.fresh for part in parts.values()) / rounds / 1e6:.1f}"
    table.add_row("the rest: Python between them, ZeroMQ", f"{1000 * rest:.2f}", "", "", "", new, end_section=True)
    waited = f"{1000 * locks.seconds / rounds:.2f} waiting"
    table.add_row("locks", waited, f"{locks.calls / rounds:.0f}, {locks.copied / rounds:.0f} waited", "", "", "")
    table.add_row("AES streams and digest alone", f"{1000 * floor:.2f}", "", "", "", "")
    console.print(table)
    console.print(f"all threads / AES streams and digest alone: {total / floor:.2f}\n")


def main() -> None:
    """Print the profiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    options = parser.parse_args()
    if not TASKS.exists():
        sys.exit("this program reads the times of threads from /proc, which only Linux has")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="cgd-profile-") as folder:
        direct, hub, *_ = create_federations(Path(folder))
        stop = spawn.Event()
        hub_process = spawn.Process(target=run_hub, args=(hub, stop))
        hub_process.start()
        for path in (direct, hub):
            arguments = path, spawn.Barrier(len(NAMES)), options.repeats, options.sizes, path == hub
            processes = [spawn.Process(target=participant, args=(name, *arguments)) for name in NAMES]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        stop.set()
        hub_process.join()


if __name__ == "__main__":
    main()
