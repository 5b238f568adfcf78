"""In the ring, the simulator has the same bits as real participants that run the secure-sum protocol."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import (
    JOINT_REVEALS_RECORDS,
    Cell,
    ConfinedAdam,
    ConfinedSGD,
    Grid,
    LocalTraining,
    Ring,
    confine,
    local_peers,
    participant_seed,
    public_seed,
    simulate,
)
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.vertical import JointFirstLayer, build_tower, copy_columns, late_fusion, split_first_layer
from cgd.simulation.local_training import Work
from cgd.simulation.population import Participants
from support.networks import CLASSES, FEATURES, blocks, fully_connected

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd import Block, ConfinedOptimizer, LocalPeers, Peers
    from cgd.optim.displacement import UpdateRule
    from cgd.simulation.local_training import Indices

STEPS, LR, DELTA, SEED = 6, 0.3, 0.2, 4
build = fully_connected(FEATURES, 8, CLASSES)


def equal_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(("dtype", "delay"), [(torch.float32, 0), (torch.float64, 0), (torch.float32, 2)])
def test_simulated_rows_equal_real_participants(rule: str, dtype: torch.dtype, delay: int) -> None:
    split = blocks(4, count=30)
    make: dict[str, Callable[..., ConfinedOptimizer]] = {
        "sgd": partial(ConfinedSGD, lr=LR),
        "momentum": partial(ConfinedSGD, lr=LR, momentum=0.9),
        "adam": partial(ConfinedAdam, lr=LR),
    }
    rules: dict[str, Callable[[float], UpdateRule]] = {
        "sgd": SGDRule,
        "momentum": partial(SGDRule, momentum=0.9),
        "adam": AdamRule,
    }
    make_model = fully_connected(FEATURES, 8, CLASSES, dtype=dtype)

    def train(peers: Peers, block: Block) -> dict[str, torch.Tensor]:
        with public_seed(SEED):
            model = make_model()
        confine(model, DELTA, participant_seed(SEED, block.cell))
        optimizer = make[rule](model.parameters(), peers=peers, samples=block.samples, delay=delay)
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(model(block.x.to(dtype)), block.y).backward()
            optimizer.step()
        optimizer.drain()
        return dict(model.named_parameters())

    with local_peers(4) as members:
        real = members.run(train, split.values())
    result = simulate(
        make_model,
        split,
        steps=STEPS,
        lr=LR,
        delta=DELTA,
        seed=SEED,
        rule=rules[rule],
        delay=delay,
        arithmetic="ring",
        progress=False,
    )
    for cell, parameters in zip(split, real, strict=True):
        assert equal_bits(dict(result.model(cell).named_parameters()), parameters)


def test_simulated_sums_in_16_bits_equal_those_of_real_participants() -> None:
    split = blocks(4, count=30)

    def train(peers: Peers, block: Block) -> dict[str, torch.Tensor]:
        peers.seed = participant_seed(SEED, block.cell)
        with public_seed(SEED):
            model = build()
        confine(model, DELTA, peers.seed)
        optimizer = ConfinedSGD(model.parameters(), LR, peers=peers, samples=block.samples, momentum=0.9)
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(model(block.x), block.y).backward()
            optimizer.step()
        return dict(model.named_parameters())

    with local_peers(4, bound=2.0, ring_bits=16) as members:
        real = members.run(train, split.values())
    settings: dict[str, Any] = {"momentum": 0.9, "arithmetic": "ring", "ring": Ring(bound=2.0, ring_bits=16)}
    result = simulate(build, split, steps=STEPS, lr=LR, delta=DELTA, seed=SEED, progress=False, **settings)
    for cell, parameters in zip(split, real, strict=True):
        assert equal_bits(dict(result.model(cell).named_parameters()), parameters)


@pytest.mark.parametrize(
    "local", [None, LocalTraining(epochs=2, batch=3, lr=0.2, momentum=0.5)], ids=["batches", "local"]
)
def test_batches_and_local_training_equal_real_participants(local: LocalTraining | None) -> None:
    split, work = blocks(4, count=30), Work(batches=3 if local is None else 1, local=local)
    participants = Participants(build, split)

    def descend(model: nn.Module, block: Block, batch: Indices, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(block.x[batch]), block.y[batch]).backward()
        optimizer.step()

    def train(peers: Peers, block: Block) -> dict[str, torch.Tensor]:
        with public_seed(0):
            model = build()
        confine(model, DELTA, participant_seed(0, block.cell))
        optimizer = ConfinedSGD(model.parameters(), LR, peers=peers, samples=block.samples, momentum=0.9)
        for number in range(STEPS):
            batches = work.batches_of_row(participants, block.cell.row, number)
            if local is None:
                descend(model, block, batches[0], optimizer)
                continue
            with optimizer.local_steps():
                own = torch.optim.SGD(model.parameters(), lr=local.lr, momentum=local.momentum)
                for batch in batches:
                    descend(model, block, batch, own)
        return dict(model.named_parameters())

    with local_peers(4) as members:
        real = members.run(train, split.values())
    settings: dict[str, Any] = {"batches": work.batches, "local": local, "momentum": 0.9, "arithmetic": "ring"}
    result = simulate(build, split, steps=STEPS, lr=LR, delta=DELTA, progress=False, **settings)
    for cell, parameters in zip(split, real, strict=True):
        assert equal_bits(dict(result.model(cell).named_parameters()), parameters)


def connect_grid(grid: Grid, stack: ExitStack) -> tuple[LocalPeers, list[Peers], list[Peers]]:
    """Return the peers of all participants, and for each cell those of its column group and of its row."""
    everyone = stack.enter_context(local_peers(list(map(str, grid.cells))))
    own: dict[tuple[str, int], LocalPeers] = {}
    for column in range(grid.columns):
        own["column", column] = stack.enter_context(local_peers([str(c) for c in grid.column_peers(Cell(0, column))]))
    for row in range(grid.rows):
        own["row", row] = stack.enter_context(local_peers([str(c) for c in grid.row_peers(Cell(row, 0))]))
    columns = [own["column", cell.column][cell.row] for cell in grid.cells]
    rows = [own["row", cell.row][cell.column] for cell in grid.cells]
    return everyone, columns, rows


@pytest.mark.parametrize("mode", ["towers", "joint"])
def test_simulated_grids_equal_real_participants(mode: Any) -> None:
    grid = Grid(3, 3)
    split = blocks(3, 3, count=20)
    test_x = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(9))

    def train(everyone: Peers, column: Peers, row: Peers, block: Block) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with public_seed(SEED):
            full = build()
            model = build_tower(full, block.x.shape[1])
        if mode == "joint":
            copy_columns(split_first_layer(full)[0], slice(4 * block.cell.column, 4 * block.cell.column + 4), model)
        confine(model, DELTA, participant_seed(SEED, block.cell))
        rest = list(model[1:].parameters())
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters()), "peers": column},
            {"params": rest, "lr": LR * (grid.columns if mode == "towers" else 1)},
        ]
        optimizer = ConfinedSGD(groups, LR, peers=everyone, samples=block.samples)
        layer: Any = model[0]
        first = JointFirstLayer(layer, row, accept=JOINT_REVEALS_RECORDS) if mode == "joint" else layer
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(model[1:](first(block.x)), block.y).backward()
            optimizer.step()
        own = test_x[:, 4 * block.cell.column : 4 * block.cell.column + 4]
        with torch.no_grad():
            outputs = late_fusion(model(own), row) if mode == "towers" else model[1:](first(own))
        return dict(model.named_parameters()), outputs

    with ExitStack() as stack:
        everyone, columns, rows = connect_grid(grid, stack)
        real = everyone.run(train, columns, rows, split.values())
    accept = JOINT_REVEALS_RECORDS if mode == "joint" else ""
    result = simulate(
        build,
        split,
        steps=STEPS,
        lr=LR,
        delta=DELTA,
        seed=SEED,
        mode=mode,
        accept=accept,
        arithmetic="ring",
        progress=False,
    )
    for cell, (parameters, outputs) in zip(grid.cells, real, strict=True):
        assert equal_bits(dict(result.model(cell).named_parameters()), parameters)
        simulated = result.fused_outputs(cell.row, test_x) if mode == "towers" else result.outputs(cell, test_x)
        assert torch.allclose(simulated, outputs, atol=1e-5)  # the opened sum was rounded to the ring


def test_float_arithmetic_has_other_bits() -> None:
    """Control: without the fixed point the bits differ, so the comparisons above are meaningful."""
    arithmetics: tuple[Any, Any] = ("ring", "float")
    ring, plain = (
        simulate(build, blocks(3), steps=3, lr=LR, arithmetic=arithmetic, engine="modules", progress=False)
        for arithmetic in arithmetics
    )
    assert not equal_bits(ring.displacement(), plain.displacement())
    assert all(
        torch.allclose(ring.displacement()[name], plain.displacement()[name], atol=1e-6) for name in ring.displacement()
    )
