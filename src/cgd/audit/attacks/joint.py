"""Recover raw records from `joint` columns, whose rows open their pre-activations.

Between two rounds, the pre-activations of a row's samples change by the change of the first layer's displacement:

    Δz = X·ΔDᵀ + Δb

The origins cancel. With one colluder in each column the coalition knows D of every column, and if one of them is in the
row, it knows z as well: a linear system for X, all features of all samples of the row. In `towers` the colluder in the
row has the pre-activations of its own features only, and the same attack recovers nothing.

The view is that of a real run of 3 × 3 participants, with the product's own `JointFirstLayer`, optimiser and peers.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional

from cgd.audit.embedded import samples
from cgd.audit.matching import draw
from cgd.audit.results import AttackResult
from cgd.audit.view import Colluder, Round, Truth, View, flat, unflat
from cgd.local import local_peers
from cgd.optim.grid import Cell, Grid
from cgd.optim.origin import confine
from cgd.optim.sgd import ConfinedSGD
from cgd.optim.vertical import JOINT_REVEALS_RECORDS, JointFirstLayer, build_tower

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgd.audit.view import Scheme
    from cgd.optim.grid import Block
    from cgd.peers import Peers

Mode = Literal["towers", "joint"]
# The largest error of a pixel, in 0…1, of a recovered record: rounding to the 16 grey levels makes it exact.
TOLERANCE = 1e-2
GRID = Grid(3, 3)
# One in each column; the first is in row 0, which is attacked.
COALITION = (Cell(0, 0), Cell(1, 1), Cell(2, 2))
HIDDEN = 256


def records(view: View) -> torch.Tensor | None:
    """Return the others' features of the attacked row's samples; None without pre-activations of two rounds."""
    if len(view.rounds) < 2 or any(each.pre_activations is None for each in view.rounds):
        return None
    model = view.build_model()
    known = next(iter(view.coalition.values())).x.double()
    z = torch.stack([each.pre_activations for each in view.rounds if each.pre_activations is not None]).double()
    layers = [list(unflat(each.displacement.double(), model).values()) for each in view.rounds]
    weight, bias = (torch.stack(each) for each in zip(*(layer[:2] for layer in layers), strict=True))
    weight, bias = weight - weight.mean(0), bias - bias.mean(0)
    own = weight[:, :, : known.shape[1]]
    changes = z - z.mean(0) - bias[:, None] - known @ own.mT  # rounds × samples × hidden
    moves = weight[:, :, known.shape[1] :].flatten(0, 1)
    changes = changes.mT.flatten(0, 1)
    # Weights that hardly moved determine little in a rounded z; there, the colluders' records of these columns decide.
    mean, spread = _prior(view)
    left, strength, right = torch.linalg.svd(moves * spread, full_matrices=False)
    residual = changes - (moves @ mean)[:, None]
    rotated = left.T @ residual
    noise = (residual - left @ rotated).square().mean()
    solved = ((strength / (strength**2 + noise))[:, None] * rotated).T @ right
    found: torch.Tensor = mean + spread * solved
    return found


def _prior(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the deviation of the others' features, from the colluders' records of these columns."""
    x = torch.cat([each.x.double() for each in list(view.coalition.values())[1:]], dim=1)
    # One pseudo-record with the variance of all features: a feature that is constant here may vary elsewhere.
    return x.mean(0), ((x.var(0, correction=0) * len(x) + x.var()) / (len(x) + 1)).sqrt()


def recover(view: View, truth: Truth, setting: str = "") -> AttackResult:
    """Measure the fraction of the row's records that are recovered, with every feature within 0.01.

    Chance is 0; the attack succeeds if one record is recovered.
    """
    real, found = truth.all_x, records(view)
    errors = torch.full((len(real),), torch.inf) if found is None else (found - real).abs().amax(dim=1)
    count = int((errors < TOLERANCE).sum())
    detail, images = "with one round there is no difference of pre-activations", {}
    if found is not None:
        exact = int((errors < TOLERANCE / 10).sum())
        detail = (
            f"{count} of {len(real)} records, {exact} of them to within {TOLERANCE / 10:g}; "
            f"the largest error is {errors.max():.1g}"
        )
        own = next(iter(view.coalition.values())).x.double()
        for name, others in {"real": real.double(), "recovered": found}.items():
            images[name] = torch.cat([own, others], dim=1).clamp(0, 1).reshape(-1, 8, 8).float()
    return AttackResult(
        "records from joint columns",
        view.scheme,
        "records recovered",
        count / len(real),
        0.0,
        count > 0,
        setting,
        detail,
        pictures=draw(images),
    )


# The view of the coalition in a real run.


@dataclass(frozen=True)
class _LocalRound:
    """One round as a participant sees it; in `towers`, with the pre-activations of its own features only."""

    displacement: torch.Tensor
    gradient_sum: torch.Tensor
    pre_activations: torch.Tensor


def network(features: int = 64) -> nn.Sequential:
    """Return the network of a row, with all columns."""
    return nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def observe_columns(
    mode: Mode, *, each: int = 60, rounds: int = 8, lr: float = 0.5, seed: int = 0
) -> tuple[View, Truth]:
    """Train 3 × 3 participants on digits, `each` per row, and return the view of one colluder in each column."""
    x, y = samples("digits", seed)
    blocks = GRID.split(x[: GRID.rows * each], y[: GRID.rows * each], seed=seed)

    def train(peers: Peers, cell: Cell, row: Peers, column: Peers) -> list[_LocalRound]:
        block: Block = blocks[cell]
        tower = build_tower(network(), block.x.shape[1])
        confine(tower, 0.1, (seed * 100_003 + GRID.cells.index(cell)).to_bytes(32, "little"), start="zeros")
        layer: Any = tower[0]
        first = JointFirstLayer(layer, row, accept=JOINT_REVEALS_RECORDS) if mode == "joint" else layer
        rest = tower[1:]
        groups: list[dict[str, Any]] = [
            {"params": list(tower[0].parameters()), "peers": column},
            {"params": list(rest.parameters())},
        ]
        optimizer = ConfinedSGD(groups, lr=lr, peers=peers, samples=len(block.y))
        observed = []
        for _ in range(rounds):
            before = optimizer.displacement().clone()
            optimizer.zero_grad()
            z = first(block.x)
            functional.cross_entropy(rest(z), block.y).backward()
            optimizer.step()
            observed.append(_LocalRound(before, (before - optimizer.displacement()) / lr, z.detach().clone()))
        return observed

    with ExitStack() as open_peers:

        def group(cells: Iterable[Cell]) -> dict[Cell, Peers]:
            named = {cell: str(cell) for cell in cells}
            return dict(zip(named, open_peers.enter_context(local_peers(list(named.values()))), strict=True))

        rows = [group(GRID.row_peers(Cell(row, 0))) for row in range(GRID.rows)]
        columns = [group(GRID.column_peers(Cell(0, column))) for column in range(GRID.columns)]
        everyone = open_peers.enter_context(local_peers(list(map(str, GRID.cells))))
        found = everyone.run(
            train,
            GRID.cells,
            [rows[cell.row][cell] for cell in GRID.cells],
            [columns[cell.column][cell] for cell in GRID.cells],
        )
    return _combine(blocks, dict(zip(GRID.cells, found, strict=True)), lr)


def _combine(blocks: dict[Cell, Block], observed: dict[Cell, list[_LocalRound]], lr: float) -> tuple[View, Truth]:
    """Combine the three colluders' views into one, with the first layer of all columns."""
    rounds = []
    for number, at_row in enumerate(observed[COALITION[0]]):
        parts = [observed[cell][number] for cell in COALITION]
        displacement, total = (
            _join_columns([getattr(part, name) for part in parts], [blocks[cell].x.shape[1] for cell in COALITION])
            for name in ("displacement", "gradient_sum")
        )
        rounds.append(Round(tuple(map(str, GRID.cells)), displacement, total, pre_activations=at_row.pre_activations))
    coalition = {str(cell): Colluder(blocks[cell].x, blocks[cell].y, (), torch.zeros(0)) for cell in COALITION}
    n = sum(len(blocks[Cell(row, 0)].y) for row in range(GRID.rows))
    view = View("cgd", network, functional.cross_entropy, n, lr, 0.1, coalition, tuple(rounds))
    attacked = [cell for cell in GRID.row_peers(COALITION[0]) if cell not in COALITION]
    hidden = torch.cat([blocks[cell].x for cell in attacked], dim=1)
    return view, Truth({"row 0": hidden}, {"row 0": blocks[COALITION[0]].y}, {})


def _join_columns(vectors: list[torch.Tensor], features: list[int]) -> torch.Tensor:
    """Join the columns' networks, flat, to that of the row: concatenate weights, add biases; the rest is common."""
    towers = [list(unflat(vector, network(count)).values()) for vector, count in zip(vectors, features, strict=True)]
    weight = torch.cat([tower[0] for tower in towers], dim=1)
    bias = torch.stack([tower[1] for tower in towers]).sum(0)
    return flat([weight, bias, *towers[0][2:]])


def attacks(_scheme: Scheme = "cgd", seed: int = 0) -> list[AttackResult]:
    """Return the result on joint columns."""
    return [recover(*observe_columns("joint", seed=seed), "3 × 3 participants, 60 records, 8 rounds, joint")]


def controls(_scheme: Scheme = "cgd", seed: int = 0) -> list[AttackResult]:
    """Return the results on towers, and on one round of joint columns, which has no difference of pre-activations."""
    return [
        recover(*observe_columns("towers", seed=seed), "3 × 3 participants, 60 records, 8 rounds, towers"),
        recover(*observe_columns("joint", rounds=1, seed=seed), "3 × 3 participants, 60 records, 1 round, joint"),
    ]
