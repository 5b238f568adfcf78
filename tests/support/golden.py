"""Golden runs: runs of every kind with fixed seeds and data, and the SHA-256 digests of their results.

`tests/golden.json` has the digests, `tests/test_golden.py` compares them, and `python tests/golden.py` prints or
rewrites them. No restructuring may change a bit of a result, nor of what is sent or stored. Digests cover bytes only:
names of Python modules and classes are in them only where the program itself writes them.

The digests do not depend on the machine. The samples are multiples of 1/8, made by SHA-256. Origins are drawn with
operations that IEEE 754 rounds once, and so is every operation between a revealed total and the displacement. Only a
participant's gradient may differ in its last bits between processors; it is computed in double precision and rounded in
a ring with 8 fraction bits (`BOUND`), and `Roundings` checks that no value is so close to the middle between two ring
elements that these bits could decide. Runs of processes cannot be observed; runs in threads with the same result are
checked instead. The fused engine adds in single precision and has no ring: one of its runs has exact numbers only, and
in the other the displacement is rounded to multiples of 2⁻¹⁰ before the digest.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cgd
from support import golden_program
from support.federations import NAMES
from support.forking import ForkedFederation
from support.golden_digests import (
    BOUND,
    CONVERTED,
    FEDERATION,
    SMALL,
    STEPS,
    Contexts,
    Roundings,
    digest,
    equal_value,
    fixed_keys,
)
from support.golden_grids import COLUMNS, fused, grid, simulated
from support.golden_tables import tables, tables_in_threads
from support.golden_wire import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from support.golden_digests import Digests

GOLDEN_FILE = Path(__file__).parent.parent / "golden.json"


# Participants in threads.


def local(
    kind: str, names: Sequence[str] = NAMES, steps: int = STEPS, bound: float = BOUND, **settings: Any
) -> Digests:
    """Train as participants in threads: the whole protocol, without sockets."""
    contexts = Contexts()

    def work(peers: cgd.Peers) -> tuple[torch.Tensor, torch.Tensor]:
        peers.seed = fixed_keys(peers.me).federation_seed(FEDERATION)
        if peers.me == names[0]:
            peers.observer = contexts
        return golden_program.train(peers, kind, steps)

    with Roundings(CONVERTED).recording(), cgd.local_peers(names, bound=bound, **settings) as peers:
        results = peers.run(work)
    return {
        "displacement": digest(equal_value(displacement for displacement, _ in results)),
        "weights": digest(*(digest(weights) for _, weights in results)),
        "contexts": digest("\n".join(contexts.lines)),
    }


# Participants as processes.


def processes(opening: str = "mesh", names: Sequence[str] = NAMES, killed: str | None = None) -> Digests:
    """Train as participants in separate processes; one may be killed during the training and restarted.

    The digests are those of participants in threads.
    """
    program = Path(golden_program.__file__).read_text()
    dialers = names if opening == "hub" else ()
    steps = STEPS if killed is None else 4 * STEPS
    training = {"steps": steps, "bound": BOUND, "opening": opening}
    with tempfile.TemporaryDirectory(prefix="cgd-golden-") as folder:
        federation = ForkedFederation(Path(folder), names, (), dialers, program, fixed_keys, **training)
        try:
            if dialers:
                federation.start_hub()
            pause = {} if killed is None else {"PAUSE": "0.1"}
            federation.start_all(**pause)
            if killed is not None:
                federation.until_step(STEPS)
                federation.kill(killed)
                assert not (federation.folder / f"{killed}.bits").exists()
                federation.start(killed, **pause)
            assert set(federation.wait().values()) == {0}, "\n".join(map(federation.output, names))
            bits = {name: text.split() for name, text in federation.bits().items()}
        finally:
            federation.close()
    return {
        "displacement": equal_value(displacement for displacement, _ in bits.values()),
        "weights": digest(*(bits[name][1] for name in names)),
    }


RUNS: dict[str, Callable[[], Digests]] = {
    "local momentum": partial(local, "momentum"),
    "local adam": partial(local, "adam"),
    "local nesterov": partial(local, "nesterov"),
    "local amsgrad": partial(local, "amsgrad"),
    "local clipped": partial(local, "clipped"),
    "local uniform shares, one aggregator, 64 bits": partial(
        local, "momentum", SMALL, bound=2.0**54, masking="uniform", opening="aggregator", ring_bits=64
    ),
    "local undisturbed": partial(local, "momentum", SMALL, 4 * STEPS),
    "grid towers": partial(grid, "towers"),
    "grid joint": partial(grid, "joint"),
    "tables in threads": tables_in_threads,
    "simulation modules": simulated,
    "simulation modules, adam": partial(simulated, adam=True),
    "simulation modules, grid towers": partial(simulated, COLUMNS, "towers"),
    "simulation modules, grid joint": partial(simulated, COLUMNS, "joint"),
    "simulation fused": fused,
    "simulation fused, grid towers": partial(fused, 2, "towers"),
    "simulation fused, grid joint": partial(fused, 2, "joint"),
    "wire": lambda: wire(fixed_keys),
}
"""All runs in this process, by name."""

PROCESS_RUNS: dict[str, Callable[[], Digests]] = {
    "processes mesh": processes,
    "processes hub": partial(processes, "hub"),
    "processes recovery": partial(processes, names=SMALL, killed=SMALL[1]),
    "tables": tables,
}
"""The runs that start processes, by name."""

EQUAL_RUNS: tuple[tuple[str, ...], ...] = (
    ("local momentum", "processes mesh", "processes hub"),
    ("local undisturbed", "processes recovery"),
    ("tables in threads", "tables"),
    ("grid towers", "simulation modules, grid towers"),
    ("grid joint", "simulation modules, grid joint"),
)
"""Groups of runs with equal digests, for all labels that they have in common."""
