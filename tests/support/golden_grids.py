"""Golden runs of grids and simulations; for `support.golden`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

import cgd
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.vertical import JointFirstLayer, build_tower
from support import golden_program
from support.golden_digests import BOUND, STEPS, Contexts, Roundings, digest, equal_value
from support.golden_program import numbers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.golden_digests import Digests

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
        cgd.confine(model, DELTA, cgd.participant_seed(SEED, block.cell), start="zeros")
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
            start="zeros",
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
        "start": "zeros",
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
