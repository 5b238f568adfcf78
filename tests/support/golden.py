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

import hmac
import json
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn
from torch.nn import functional
from zmq.utils import z85

import cgd
from cgd.federation.config import Federation
from cgd.federation.keys import Keys
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.vertical import JointFirstLayer, build_tower
from cgd.secagg.fixed_point import FixedPoint
from cgd.tabular.dataset import read_dataset
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import train as train_on_table
from support import golden_program
from support.federations import NAMES
from support.forking import Forked, ForkedFederation
from support.golden_program import numbers
from support.golden_wire import wire
from support.tabular import SCHEMA, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cgd.transport.tap import Addend

    Digests = dict[str, str]

GOLDEN_FILE = Path(__file__).parent.parent / "golden.json"
FEDERATION = "trial"
BOUND = 2.0**22
STEPS = 6
SMALL = NAMES[:3]
# The bound of the error of gradients, in units in the last place of their largest value: of gradients computed in their
# own type, and of those computed in double precision and then rounded.
COMPUTED, CONVERTED = 16.0, 2.0


def digest(*parts: Any) -> str:
    """Return the digest of concatenated tensors, bytes or texts."""
    hashed = sha256()
    for part in parts:
        content = part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else part
        hashed.update(content.encode() if isinstance(content, str) else content)
    return hashed.hexdigest()


def fixed_keys(name: str) -> Keys:
    """Derive the keys of a participant from its name."""
    secret, seed = (sha256(f"golden {which} of {name}".encode()).digest() for which in ("secret", "seed"))
    curve = z85.encode(secret)
    signing = Ed25519PrivateKey.from_private_bytes(_signing_secret(seed)).public_key().public_bytes_raw()
    return Keys(name, (zmq.curve_public(curve) + z85.encode(signing)).decode(), curve, seed)


def _signing_secret(seed: bytes) -> bytes:
    return hmac.digest(seed, b"cgd signing key", "sha256")


class Roundings:
    """Records how close encoded values are to the middle between two ring elements.

    Args:
        errors: the largest error of a value, in units in the last place of the largest value.

    Attributes:
        least: the smallest distance to the middle between two elements, in units of that error.
    """

    def __init__(self, errors: float = COMPUTED) -> None:
        self._errors = errors
        self.least = float("inf")
        self._lock = threading.Lock()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all encoded values, and fail at the end if the digests of this run may depend on the machine."""
        original = FixedPoint.encode

        def encode(own: FixedPoint, values: npt.NDArray[Any], weight: float = 1.0, out: Any = None) -> npt.NDArray[Any]:
            self._record(own, np.asarray(values), weight)
            return original(own, values, weight, out)

        with patch.object(FixedPoint, "encode", encode):
            yield
        assert self.least > 1, f"a value is rounded too close to a tie ({self.least:.2g} errors); use other data"

    def _record(self, fixed_point: FixedPoint, values: npt.NDArray[Any], weight: float) -> None:
        if values.dtype.kind != "f" or values.size < 2:  # a single value is a weight, a quotient that is rounded once
            return
        scaled = values.astype(np.float64) * weight * 2.0**fixed_point.fraction_bits
        distance = np.abs(scaled - np.floor(scaled) - 0.5)
        size = np.maximum(np.abs(values).max(), 1.0) * weight * 2.0**fixed_point.fraction_bits
        error = self._errors * np.finfo(values.dtype).eps * size
        with self._lock:
            self.least = min(self.least, float(distance.min() / error))


class Contexts:
    """Records the settings of every sum of one member, as the members compare them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def before_sum(self, addend: Addend) -> None:
        step = None if addend.step is None else (addend.step.slot, addend.step.number)
        shape = list(addend.values.shape)
        self.lines.append(f"{shape} {addend.values.dtype} {addend.weight!r} {step} {addend.context}")

    def after_sum(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        pass


def equal_value(values: Iterable[Any]) -> Any:
    """Check that all values are equal, and return the first."""
    first, *others = values
    assert all(torch.equal(first, each) if isinstance(first, torch.Tensor) else first == each for each in others)
    return first


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


# Grids and simulations.

ROWS, COLUMNS, SEED, DELTA = 3, 3, 25, golden_program.DELTA
GRID_FEATURES, GRID_HIDDEN, CLASSES = 6, 5, 3


def build(
    dtype: torch.dtype = torch.float64, activation: type[nn.Module] = nn.Tanh, outputs: int = CLASSES
) -> nn.Sequential:
    """Build the network of grids and simulations."""
    return nn.Sequential(
        nn.Linear(GRID_FEATURES, GRID_HIDDEN, dtype=dtype), activation(), nn.Linear(GRID_HIDDEN, outputs, dtype=dtype)
    )


def blocks(rows: int, columns: int) -> dict[cgd.Cell, cgd.Block]:
    """Cut samples into blocks, one for each cell; the classes depend on the samples."""
    x = numbers("samples of a grid", 22, GRID_FEATURES)
    return cgd.Grid(rows, columns).split(x, (x[:, 0] > 0).long() + (x[:, 3] > x[:, 4]), seed=1)


def grid_peers(grid: cgd.Grid, stack: ExitStack) -> tuple[cgd.LocalPeers, list[cgd.Peers], list[cgd.Peers]]:
    """Connect all cells, and return the peers of each cell in everyone, in its column and in its row."""

    def connect(cells: Iterable[cgd.Cell]) -> cgd.LocalPeers:
        return stack.enter_context(cgd.local_peers(list(map(str, cells)), bound=BOUND))

    everyone = connect(grid.cells)
    columns = [connect(grid.column_peers(cgd.Cell(0, column))) for column in range(grid.columns)]
    rows = [connect(grid.row_peers(cgd.Cell(row, 0))) for row in range(grid.rows)]
    in_columns = [columns[cell.column][cell.row] for cell in grid.cells]
    return everyone, in_columns, [rows[cell.row][cell.column] for cell in grid.cells]


def grid(mode: str) -> Digests:
    """Train a grid of participants in threads, by rows of samples and columns of features."""
    contexts = Contexts()
    accept = cgd.JOINT_REVEALS_RECORDS if mode == "joint" else ""

    def train(
        everyone: cgd.Peers, column: cgd.Peers, row: cgd.Peers, block: cgd.Block
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        if block.cell == (0, 0):
            everyone.observer = column.observer = row.observer = contexts
        model = build_tower(build(), block.x.shape[1])
        cgd.confine(model, DELTA, cgd.participant_seed(SEED, block.cell))
        layer: Any = model[0]
        groups: list[dict[str, Any]] = [
            {"params": list(layer.parameters()), "peers": column},
            {"params": list(model[1:].parameters()), "lr": 0.5 * (COLUMNS if mode == "towers" else 1)},
        ]
        optimizer = cgd.ConfinedSGD(groups, 0.5, peers=everyone, samples=block.samples)
        first = JointFirstLayer(layer, row, accept=accept) if mode == "joint" else layer
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(model[1:](first(block.x)), block.y).backward()
            optimizer.step()
        own = sum(each.numel() for each in layer.parameters())
        return optimizer.displacement().split([own, optimizer.displacement().numel() - own]), list(model.parameters())

    with Roundings().recording(), ExitStack() as stack:
        everyone, columns, rows = grid_peers(cgd.Grid(ROWS, COLUMNS), stack)
        results = everyone.run(train, columns, rows, blocks(ROWS, COLUMNS).values())
    first, rest = zip(*(displacement for displacement, _ in results), strict=True)
    return {
        "displacement": digest(*(equal_value(first[column::COLUMNS]) for column in range(COLUMNS)), equal_value(rest)),
        "weights": digest(*(each for _, weights in results for each in weights)),
        "contexts": digest("\n".join(contexts.lines)),
    }


def simulated(columns: int = 1, mode: Any = "towers", adam: bool = False) -> Digests:
    """Simulate by the module engine in the ring; the digests of a grid are those of `grid`."""
    split = blocks(ROWS, columns)
    rule = AdamRule if adam else partial(SGDRule, momentum=0.5) if columns == 1 else SGDRule
    with Roundings().recording():
        result = cgd.simulate(
            build,
            split,
            steps=STEPS,
            lr=0.5,
            delta=DELTA,
            seed=SEED,
            mode=mode,
            accept=cgd.JOINT_REVEALS_RECORDS if mode == "joint" else "",
            rule=rule,
            arithmetic="ring",
            ring=cgd.Ring(bound=BOUND),
            progress=False,
        )
    assert result.engine == "modules"
    weights = [each for cell in split for each in result.model(cell).parameters()]
    return {"displacement": digest(result.flat_displacement), "weights": digest(*weights)}


def fused(columns: int = 1, mode: Any = "towers") -> Digests:
    """Simulate by the fused engine in single precision: one run with exact numbers, one rounded."""
    shared: dict[str, Any] = {
        "mode": mode,
        "accept": cgd.JOINT_REVEALS_RECORDS if mode == "joint" else "",
        "seed": SEED,
        "progress": False,
    }
    # The origin is so small that it is zero in single precision. After two steps every weight has changed, and the
    # sigmoid was evaluated at zero only. With 16 samples and 4 outputs all quotients are exact.
    x, y = numbers("samples to be exact", 16, GRID_FEATURES), numbers("targets to be exact", 16, 4)
    exact = cgd.simulate(
        partial(build, torch.float32, nn.Sigmoid, 4),
        cgd.Grid(4, columns).split(x.float(), y.float(), seed=1),
        steps=2,
        lr=0.25,
        delta=1e-60,
        loss=functional.mse_loss,
        **shared,
    )
    rounded = cgd.simulate(
        partial(build, torch.float32, nn.ReLU),
        {cell: cgd.Block(cell, block.x.float(), block.y) for cell, block in blocks(ROWS, columns).items()},
        steps=STEPS,
        lr=0.5,
        delta=DELTA,
        **shared,
    )
    assert exact.engine == rounded.engine == "fused"
    assert bool((exact.flat_displacement != 0).all())
    scaled = rounded.flat_displacement.double() * 2**10
    margin = (scaled - scaled.floor() - 0.5).abs().min().item()
    assert margin > 2**-7, f"a displacement is rounded too close to a tie ({margin:.2g}); use other data"
    return {
        "exact displacement": digest(exact.flat_displacement),
        "rounded displacement": digest(scaled.round().to(torch.int32)),
    }


# Tables.

TABLE_SCHEMA = SCHEMA.replace("layers = [8]", "layers = [4]")
TABLE_TRAINING = {
    "steps": 8,
    "lr": 0.125,
    "optimizer": "adam",
    "validate_every": 4,
    "patience": 0,
    "bound": BOUND,
}


def table(name: str, rows: int) -> dict[str, list[Any]]:
    """Make a table of pairs of numbers x and −x, so that means and deviations are exact."""
    half = numbers(f"table of {name}", rows // 2, 2)
    age, dose = (torch.stack([half[:, column], -half[:, column]], dim=1).reshape(-1) for column in range(2))
    other = numbers(f"more of {name}", rows, 2)
    return {
        "age": [None if i % 8 > 5 else value for i, value in enumerate((8 * age).tolist())],
        "dose": dose.tolist(),
        "ward": ["north" if value > 0 else "south" for value in other[:, 0].tolist()],
        "outcome": ["ill" if value > 0 else "well" for value in (age + dose + other[:, 1]).tolist()],
    }


def _table_federation(folder: Path) -> Path:
    path = write_federation(folder, SMALL, (), TABLE_SCHEMA, (), fixed_keys, **TABLE_TRAINING)
    for name, rows in zip(SMALL, (32, 24, 16), strict=True):
        write_csv(folder / f"{name}.csv", table(name, rows))
    return path


def tables_in_threads() -> Digests:
    """Train on tables as participants in threads."""
    contexts = Contexts()
    with tempfile.TemporaryDirectory(prefix="cgd-golden-") as name, Roundings().recording():
        folder = Path(name)
        federation = Federation.load(_table_federation(folder))

        def work(peers: cgd.Peers) -> Any:
            peers.seed = fixed_keys(peers.me).federation_seed(FEDERATION)
            if peers.me == SMALL[0]:
                peers.observer = contexts
            setting = TabularSettings.from_federation(federation, peers.me)
            records, _ = read_dataset(folder / f"{peers.me}.csv", setting.data, setting.own_columns)
            return train_on_table(peers, setting, records)

        with cgd.local_peers(SMALL, bound=federation.training.bound) as peers:
            trained = peers.run(work)
    return {
        "weights": digest(*(_tensors(dict(each.network.state_dict())) for each in trained)),
        "preparation": digest(equal_value(json.dumps(each.preprocessing.to_dict()) for each in trained)),
        "contexts": digest("\n".join(contexts.lines)),
    }


def tables() -> Digests:
    """Train on tables by `cgd join --data`; weights and preparation are those of participants in threads."""
    with tempfile.TemporaryDirectory(prefix="cgd-golden-") as name:
        folder = Path(name)
        path = _table_federation(folder)
        logs = {each: folder / f"{each}.err" for each in SMALL}
        joined = {each: Forked(_join(path, each), folder, logs[each], {}) for each in SMALL}
        try:
            assert {process.wait(120.0) for process in joined.values()} == {0}, logs[SMALL[0]].read_text()
        finally:
            for process in joined.values():
                process.kill()
        runs = [folder / "runs" / each for each in SMALL]
        about = [json.loads((run / "model.json").read_text()) for run in runs]
        weights = [_tensors(safetensors.torch.load_file(run / "model.safetensors")) for run in runs]
    for each in about:
        del each["version"], each["digest"], each["weights"]["sha256"]
    return {
        "weights": digest(*weights),
        "preparation": digest(equal_value(json.dumps(each["preparation"]) for each in about)),
        "about": digest(*map(json.dumps, about)),
    }


def _join(path: Path, name: str) -> list[str]:
    return ["join", str(path), "--as", name, "--data", str(path.parent / f"{name}.csv")]


def _tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(name.encode() + tensors[name].detach().numpy().tobytes() for name in sorted(tensors))


RUNS: dict[str, Callable[[], Digests]] = {
    "local momentum": partial(local, "momentum"),
    "local adam": partial(local, "adam"),
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
