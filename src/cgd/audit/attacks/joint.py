"""Raw records from `joint` columns, whose rows open their pre-activations.

Between two rounds, the pre-activations of a row's samples move by what the first layer's displacement moved by:

    Δz = X·ΔDᵀ + Δb

The origins drop out. One colluder in each column knows every column's part of D, and if one of them is in the row, they
have z as well: a linear system for X, all features of all the row's samples. In `towers` the colluder in the row has
the pre-activations of its own features alone, and the same attack finds nothing in them.

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
from cgd.audit.view import Colluder, Finding, Round, Truth, View, flat, unflat
from cgd.local import local_peers
from cgd.optim.grid import Cell, Grid
from cgd.optim.optimizer import ConfinedSGD
from cgd.optim.origin import confine
from cgd.optim.vertical import JOINT_REVEALS_RECORDS, JointFirstLayer, narrow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgd.audit.view import Scheme
    from cgd.optim.grid import Block
    from cgd.peers import Peers

Mode = Literal["towers", "joint"]
# A record is recovered if no pixel, in 0…1, is off by more: nobody sees it, and rounding to 16 greys makes it exact.
TOLERANCE = 1e-2
GRID = Grid(3, 3)
# One in each column, the first in the row that is attacked, row 0.
COALITION = (Cell(0, 0), Cell(1, 1), Cell(2, 2))
HIDDEN = 256


def records(view: View) -> torch.Tensor | None:
    """The others' features of the attacked row's samples; None if there are no two rounds' pre-activations."""
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
    # Features that hardly moved say little in a rounded z. What the colluders have in these columns says what is usual.
    usual, spread = _usual(view)
    left, strength, right = torch.linalg.svd(moves * spread, full_matrices=False)
    unusual = changes - (moves @ usual)[:, None]
    seen = left.T @ unusual
    noise = (unusual - left @ seen).square().mean()
    solved = ((strength / (strength**2 + noise))[:, None] * seen).T @ right
    found: torch.Tensor = usual + spread * solved
    return found


def _usual(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the deviation of the others' features, in the colluders' own records of these columns."""
    x = torch.cat([each.x.double() for each in list(view.coalition.values())[1:]], dim=1)
    # As if there were one more record like all features together: what is constant here need not be so there.
    return x.mean(0), ((x.var(0, correction=0) * len(x) + x.var()) / (len(x) + 1)).sqrt()


def recover(view: View, truth: Truth, setting: str = "") -> Finding:
    """How many of the row's records come out, every feature to within 0.01. Chance is none; one is a success."""
    real, found = truth.all_x, records(view)
    off = torch.full((len(real),), torch.inf) if found is None else (found - real).abs().amax(dim=1)
    count = int((off < TOLERANCE).sum())
    detail = "the pre-activations of one round differ from nothing"
    if found is not None:
        closely = int((off < TOLERANCE / 10).sum())
        detail = (
            f"{count} of {len(real)} records, {closely} of them ten times as closely; off by {off.max():.1g} at most"
        )
    images = {}
    if found is not None:
        own = next(iter(view.coalition.values())).x.double()
        for name, others in ({"real": real.double(), "recovered": found}).items():
            images[name] = torch.cat([own, others], dim=1).clamp(0, 1).reshape(-1, 8, 8).float()
    return Finding(
        "records from joint columns",
        view.scheme,
        "records recovered",
        count / len(real),
        0.0,
        count > 0,
        setting,
        detail,
        images=images,
    )


# A real run, as the coalition sees it.


@dataclass(frozen=True)
class _Seen:
    """What a participant has of one round: in `towers`, the pre-activations of its own features alone."""

    displacement: torch.Tensor
    gradient_sum: torch.Tensor
    pre_activations: torch.Tensor


def network(features: int = 64) -> nn.Sequential:
    """The network of a row, all columns together."""
    return nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def observe_columns(
    mode: Mode, *, each: int = 60, rounds: int = 8, lr: float = 0.5, seed: int = 0
) -> tuple[View, Truth]:
    """Train 3 × 3 participants on digits, `each` in a row; what one colluder in each column sees."""
    x, y = samples("digits", seed)
    blocks = GRID.split(x[: GRID.rows * each], y[: GRID.rows * each], seed=seed)

    def train(peers: Peers, cell: Cell, row: Peers, column: Peers) -> list[_Seen]:
        block: Block = blocks[cell]
        tower = narrow(network(), block.x.shape[1])
        confine(tower, 0.1, (seed * 100_003 + GRID.cells.index(cell)).to_bytes(32, "little"))
        layer: Any = tower[0]
        first = JointFirstLayer(layer, row, accept=JOINT_REVEALS_RECORDS) if mode == "joint" else layer
        rest = tower[1:]
        groups: list[dict[str, Any]] = [
            {"params": list(tower[0].parameters()), "peers": column},
            {"params": list(rest.parameters())},
        ]
        optimizer = ConfinedSGD(groups, lr=lr, peers=peers, samples=len(block.y))
        seen = []
        for _ in range(rounds):
            before = optimizer.displacement().clone()
            optimizer.zero_grad()
            z = first(block.x)
            functional.cross_entropy(rest(z), block.y).backward()
            optimizer.step()
            seen.append(_Seen(before, (before - optimizer.displacement()) / lr, z.detach().clone()))
        return seen

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
    return _put_together(blocks, dict(zip(GRID.cells, found, strict=True)), lr)


def _put_together(blocks: dict[Cell, Block], seen: dict[Cell, list[_Seen]], lr: float) -> tuple[View, Truth]:
    """The coalition's three views as one: every column's part of the first layer, side by side."""
    rounds = []
    for number, at_row in enumerate(seen[COALITION[0]]):
        parts = [seen[cell][number] for cell in COALITION]
        displacement, total = (
            _side_by_side([getattr(part, name) for part in parts], [blocks[cell].x.shape[1] for cell in COALITION])
            for name in ("displacement", "gradient_sum")
        )
        rounds.append(Round(tuple(map(str, GRID.cells)), displacement, total, pre_activations=at_row.pre_activations))
    coalition = {str(cell): Colluder(blocks[cell].x, blocks[cell].y, (), torch.zeros(0)) for cell in COALITION}
    n = sum(len(blocks[Cell(row, 0)].y) for row in range(GRID.rows))
    view = View("cgd", network, functional.cross_entropy, n, lr, 0.1, coalition, tuple(rounds))
    attacked = [cell for cell in GRID.row_peers(COALITION[0]) if cell not in COALITION]
    hidden = torch.cat([blocks[cell].x for cell in attacked], dim=1)
    return view, Truth({"row 0": hidden}, {"row 0": blocks[COALITION[0]].y}, {})


def _side_by_side(vectors: list[torch.Tensor], features: list[int]) -> torch.Tensor:
    """Each column's network, flat, as the row's: weights beside each other, biases added, the rest the same for all."""
    towers = [list(unflat(vector, network(wide)).values()) for vector, wide in zip(vectors, features, strict=True)]
    weight = torch.cat([tower[0] for tower in towers], dim=1)
    bias = torch.stack([tower[1] for tower in towers]).sum(0)
    return flat([weight, bias, *towers[0][2:]])


def attacks(_scheme: Scheme = "cgd", seed: int = 0) -> list[Finding]:
    """Joint columns."""
    return [recover(*observe_columns("joint", seed=seed), "3 × 3 participants, 60 records, 8 rounds, joint")]


def controls(_scheme: Scheme = "cgd", seed: int = 0) -> list[Finding]:
    """Towers, and joint columns after one round, whose pre-activations differ from nothing."""
    return [
        recover(*observe_columns("towers", seed=seed), "3 × 3 participants, 60 records, 8 rounds, towers"),
        recover(*observe_columns("joint", rounds=1, seed=seed), "3 × 3 participants, 60 records, 1 round, joint"),
    ]
