"""Participants of several ranks inside one process: a thread for each rank, and real gloo groups between them."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed

import cgd
from cgd.federation.member import follow_ranks, lead_ranks
from cgd.federation.process_group import ProcessGroupRanks
from cgd.peers import Peers
from cgd.transport.ranks import RankDriver, RankRecovery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAMES = ("ada", "bob", "cleo")
TIMEOUT = timedelta(seconds=60)


def run_on_ranks(size: int, function: Callable[[ProcessGroupRanks], Any]) -> list[Any]:
    """Call a function on each rank of one job; return the results, or the errors, in the order of the ranks."""
    return _run_jobs([size], lambda _, ranks: function(ranks))[0]


def train_on_ranks(
    sizes: Sequence[int], program: Callable[[Peers], Any], names: Sequence[str] = NAMES, **training: Any
) -> list[list[Any]]:
    """Run a program at members with these numbers of ranks; return the results, or errors, by member and rank."""

    def join(member: int, ranks: ProcessGroupRanks) -> Any:
        name, connected = names[member], SimpleNamespace()
        if ranks.rank == 0:
            connected.peers = _on_rank(members[member], ranks, training)
            peers = lead_ranks(ranks, name, lambda: connected).peers  # type: ignore[arg-type, return-value]
        else:
            peers = follow_ranks(ranks, name)
        try:
            return program(peers)
        finally:
            peers.close()

    with cgd.local_peers(names, timeout=60) as members:
        return _run_jobs(sizes, join)


def seed_of(name: str) -> bytes:
    return name.encode().ljust(32)


def _on_rank(peers: Peers, ranks: ProcessGroupRanks, training: dict[str, Any]) -> Peers:
    driver = RankDriver(ranks, peers._driver)
    recovery = RankRecovery(driver, peers.recovery)
    return Peers(driver, peers.settings, recovery=recovery, seed=seed_of(peers.me), ranks=ranks, training=training)


def _run_jobs(sizes: Sequence[int], function: Callable[[int, ProcessGroupRanks], Any]) -> list[list[Any]]:
    results: list[list[Any]] = [[None] * size for size in sizes]
    stores = [torch.distributed.HashStore() for _ in sizes]  # type: ignore[attr-defined]

    def run(job: int, rank: int) -> None:
        try:
            group: Any = torch.distributed.ProcessGroupGloo(stores[job], rank, sizes[job], TIMEOUT)
            ranks = ProcessGroupRanks(group, rank, sizes[job], sign_of_life_seconds=0.05)
            del group
            results[job][rank] = function(job, ranks)
        except BaseException as error:
            results[job][rank] = error
        finally:
            ranks.close()

    threads = [threading.Thread(target=run, args=(job, rank)) for job, size in enumerate(sizes) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
