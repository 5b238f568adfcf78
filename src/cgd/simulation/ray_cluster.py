"""The Ray cluster on which a simulation runs: its address, the number of workers, and what each of them reports.

A simulation is one domain of trust: the workers have the data of all simulated participants. Ray executes what it
receives, so whoever reaches an open port of a cluster runs programs there (docs/simulation.md says how to prevent it).
A cluster that is started here listens on the loopback interface only, and accepts only programs that have its token.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.extras import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    OnReport = Callable[[Sequence["WorkerReport"]], None]

LOCAL, RUNNING, CLIENT = "local", "auto", "ray://"
PROBE_SECONDS = 10.0
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Of Ray: with 0 a node has the address 127.0.0.1, on every system, and all its servers listen only there."""


@dataclass(frozen=True)
class WorkerReport:
    """What a worker has used so far.

    Attributes:
        number: number of the worker, from 0.
        node: address of its node.
        process: process id there.
        participants: number of participants of which it has samples.
        samples: number of samples whose gradients it sums.
        seconds: processor time of its sums.
        peak_memory: most bytes of memory that it has had.
        losses: how often it was lost and replaced; the other values are those of the last replacement.
    """

    number: int
    node: str
    process: int
    participants: int
    samples: int
    seconds: float
    peak_memory: int
    losses: int


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster, as the `engine` of `cgd.simulate`.

    Attributes:
        address: "local" to start Ray on this machine and stop it afterwards, "auto" for the cluster that this machine
            belongs to, "HOST:PORT" for that of this head node, "ray://HOST:PORT" for a cluster that this machine does
            not belong to. None for the cluster to which this process is connected by `ray.init`; if it is not, for the
            address in RAY_ADDRESS, or "local".
        workers: number of workers, one processor each; by default as many as the cluster has. There are at most as
            many as parts of the samples, see docs/simulation.md.
        on_report: function that is called after each step with the reports of all workers.
    """

    address: str | None = None
    workers: int | None = None
    on_report: OnReport = field(default=lambda _: None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise InputError(f"workers is {self.workers!r}; it must be a whole number, at least 1")
        if self.address is not None and self.address not in (LOCAL, RUNNING):
            _host_and_port(self.address)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect this process to the cluster; disconnect at the end, unless it was connected before.

        Raises:
            InputError: Ray is not installed, or the cluster cannot be reached.
        """
        require("ray", "a simulation on a Ray cluster")
        address = self.address or os.environ.get("RAY_ADDRESS") or LOCAL
        if address == LOCAL and "ray" not in sys.modules:
            os.environ.setdefault(LOOPBACK_ONLY, "0")
            if "RAY_AUTH_MODE" not in os.environ:
                os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        import ray

        if ray.is_initialized():
            if self.address is not None:
                raise InputError(
                    f"the address of Ray is {self.address} and this process is connected to a cluster by ray.init; "
                    "leave the address out, or call ray.shutdown() first"
                )
            yield
            return
        if address == LOCAL:
            with (
                tempfile.TemporaryDirectory(prefix="cgd-ray-", ignore_cleanup_errors=True) as folder,
                self._initialised(self._start_local, folder),
            ):
                yield
            return
        if address != RUNNING:
            probe(address)
        with self._initialised(_initialise, address=address):
            yield

    @contextmanager
    def _initialised(self, initialise: Callable[..., None], *arguments: Any, **options: Any) -> Iterator[None]:
        import ray

        try:
            initialise(*arguments, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            ray.shutdown()
            if isinstance(error, InputError):
                raise
            place = self.address or os.environ.get("RAY_ADDRESS") or LOCAL
            raise InputError(
                f"the Ray cluster {place} cannot be used ({reason(error)}); start one with ray start, or correct the "
                "address (address=, --ray)"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()

    def _start_local(self, folder: str) -> None:
        """Start Ray on this machine, reachable from this machine only."""
        if os.environ.get(LOOPBACK_ONLY) != "0":
            raise InputError(
                f"ray was imported before the simulation started it, and would listen on all interfaces; set "
                f"{LOOPBACK_ONLY}=0 before the import, or call ray.init and leave the address out"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        processors = self.workers or len(os.sched_getaffinity(0))
        _initialise(address=LOCAL, num_cpus=processors, include_dashboard=False, _temp_dir=folder)


def probe(address: str) -> None:
    """Check that a server answers at this address; Ray itself would try for minutes.

    Raises:
        InputError: it does not answer, or not as Ray does.
    """
    import grpc

    host, port = _host_and_port(address)
    remedy = "start the cluster (ray start --head), open the port for this machine, or correct the address"
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise InputError(f"nothing answers at the Ray address {address} ({error}); {remedy}") from None
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=PROBE_SECONDS)
        except grpc.FutureTimeoutError:
            raise InputError(f"what answers at the Ray address {address} is not Ray; {remedy}") from None


def reason(error: Exception) -> str:
    """Return the line of an error of Ray that says what happened: its last one if a program of ours failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) or "creation task" in lines[0] else 0][:300]


def _initialise(**options: Any) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray: files that it leaves open, settings that it will change
        ray.init(log_to_driver=False, configure_logging=False, **options)


def _host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of an address; raise InputError if it has none."""
    host, _, port = str(address).removeprefix(CLIENT).rpartition(":")
    if not host or "/" in host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(
            f"the Ray address is {address!r}; it is local, auto, HOST:PORT of the head node, or ray://HOST:PORT"
        )
    return host.strip("[]"), int(port)
