"""Records from the summed gradient of a first layer of ReLU units, by algebra alone.

The gradient of unit i's weights and bias is Σ_r c_ir·[x_r, 1] over the records r: whatever the weights are, it is a
combination of records, and c_ir is exactly 0 for every record that does not activate the unit. So no model need be
known, and confinement changes nothing. Two ways to read records from it:

- **Alone.** If a unit is activated by one record only, its weights' gradient over its bias's is that record. The record
  that comes out of two units, or of the same unit in two rounds, is no accident.
- **Combined.** The rows [gradient of weights, gradient of bias] of all units and rounds span as many dimensions as
  there are records. All units that record r leaves alone lie in one hyperplane of that space: about half of all units,
  and no other hyperplane holds as many. Hyperplanes through a few units drawn at random find them when there are few
  records, and the hyperplanes of all records together give all records.

With more records than inputs the rows span everything and nearly every unit mixes many records. Few still come out: of
200, those one to four in a hundred that some unit sees alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from cgd.audit.embedded import digit_scenario, samples
from cgd.audit.first_layer import gradient_rows, has_bias
from cgd.audit.matching import match, own_records, value_range
from cgd.audit.schemes import observe
from cgd.audit.view import Finding, Truth
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Scheme, View

MAX_COMBINED = 10
"""With more records than this a hyperplane is not found by drawing any more."""
DRAWS = 8000
TRIED = 1500
"""So many hyperplanes are drawn, and so many of those that hold the most units are looked at closely."""
SAME = 3e-4
"""Two directions are the same if they differ by less: far above the rounding of the ring, far below any difference."""


def analytic_recovery(view: View, truth: Truth, setting: str = "") -> Finding:
    """Recover records, and count how many of the real ones were.

    Chance is what the attacker's own records score in place of its guesses. It succeeds if it recovers a record, and
    more than chance does by two standard deviations of such a count.
    """
    guesses = recover(view)
    peak = value_range(view)
    found = match(guesses, truth.all_x, peak)
    own = match(own_records(view)[: view.honest_samples], truth.all_x, peak)
    hits, by_chance = (each.recovered * len(found.real) for each in (found, own))
    return Finding(
        "records from a layer of ReLU units",
        view.scheme,
        "records recovered",
        found.recovered,
        own.recovered,
        succeeds=hits > by_chance + 2 * math.sqrt(by_chance),
        setting=setting,
        detail=f"{round(hits)} of {len(found.real)} records; "
        f"mean PSNR {found.mean_psnr:.1f} dB; the attacker's own records {own.mean_psnr:.1f} dB",
        images=found.images(),
    )


def recover(view: View) -> torch.Tensor:
    """Guess the honest participants' records, the surest first: at most as many as they have.

    Raises:
        InputError: the network does not begin with a linear layer that has a bias.
    """
    model = view.build_model()
    if not has_bias(model):
        raise InputError("the first layer has no bias, by which this attack tells how much of a record it sees")
    if not any(isinstance(each, torch.nn.ReLU) for each in model.modules()):
        raise InputError("there are no ReLU units, which see some of the records only")
    rows = gradient_rows(view)
    rows = rows[rows.norm(dim=1) > SAME * rows.norm(dim=1).max()]
    rows = rows / rows.norm(dim=1, keepdim=True)
    surest = torch.cat([_combined(rows, view.honest_samples), _alone(rows)])
    own = own_records(view)
    slack = 0.05 * value_range(view)
    possible = ((surest > own.min() - slack) & (surest < own.max() + slack)).all(dim=1)
    return _distinct(torch.cat([surest[possible], surest[~possible]]), view.honest_samples)


def _alone(rows: torch.Tensor) -> torch.Tensor:
    """Every unit's row as if one record made it; those that several units agree on come first."""
    rows = rows * rows[:, -1:].sign()
    rows = rows[rows[:, -1] > SAME]
    agree = (torch.cdist(rows, rows) < SAME).sum(dim=1)
    rows = rows[agree.argsort(descending=True, stable=True)]
    return rows[:, :-1] / rows[:, -1:]


def _combined(rows: torch.Tensor, records: int) -> torch.Tensor:
    """All records at once, from the hyperplanes that they leave alone; nothing if that is out of reach."""
    nothing = rows.new_zeros(0, rows.shape[1] - 1)
    if not 2 <= records <= min(MAX_COMBINED, rows.shape[1] - 1) or len(rows) < 2 * records:
        return nothing
    # In coordinates in which the rows fill all directions alike: records that resemble each other are told apart.
    left, size, right = torch.linalg.svd(rows, full_matrices=False)
    basis = size[:records, None] * right[:records]
    placed = left[:, :records]
    normals = _hyperplanes(placed / placed.norm(dim=1, keepdim=True), records)
    if len(normals) < records or torch.linalg.cond(normals).item() > 1 / SAME:
        return nothing
    extended = torch.linalg.inv(normals).T @ basis  # orthogonal to all normals but its own: that record
    records_found: torch.Tensor = extended[:, :-1] / extended[:, -1:]
    return records_found


def _hyperplanes(points: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Normals of the hyperplanes through 0 that hold the most points, at most one for each dimension."""
    near = (points @ points.T).abs() > 1 - SAME**2 / 2
    points = points[~near.tril(-1).any(dim=1)]  # each direction once: two alike would leave a plane undecided
    if len(points) < 2 * dimensions:
        return points[:0]
    random = torch.Generator().manual_seed(0)
    drawn = torch.rand(DRAWS, len(points), generator=random).argsort(dim=1)[:, : dimensions - 1]
    counts = _held(points, torch.linalg.svd(points[drawn]).Vh[:, -1]).sum(dim=0)
    found: list[torch.Tensor] = []
    for place in counts.argsort(descending=True, stable=True)[:TRIED].tolist():
        held = _held(points, torch.linalg.svd(points[drawn[place]]).Vh[-1:])[:, 0]
        if len(found) == dimensions or held.sum() <= dimensions:
            break
        _, size, right = torch.linalg.svd(points[held])  # through all of its points, not only those drawn
        fresh = all((right[-1] - other).norm() > 10 * SAME < (right[-1] + other).norm() for other in found)
        if fresh and size[-2] > 10 * SAME > size[-1]:
            found.append(right[-1])
    return torch.stack(found) if found else points[:0]


def _held(points: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    """Which points lie in which hyperplanes."""
    return (points @ normals.T).abs() < SAME


def _distinct(guesses: torch.Tensor, most: int) -> torch.Tensor:
    """The first `most` guesses that are not like one before."""
    like = torch.cdist(guesses, guesses) <= 0.05 * guesses.norm(dim=1)
    kept = torch.zeros(len(guesses), dtype=torch.bool)
    for place in range(len(guesses)):
        if kept.sum() == most:
            break
        kept[place] = not (like[place] & kept).any()
    return guesses[kept]


# The settings it is shown in.


def shown(scheme: Scheme, records: int, *, rounds: int = 3, seed: int = 0) -> Finding:
    """Two honest participants with so many digits each."""
    view, truth = observe(digit_scenario(records, rounds=rounds, seed=seed), scheme)
    return analytic_recovery(view, truth, f"2 × {records} record{'s' * (records > 1)}, {rounds} rounds")


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """One to four records each, and a hundred, of which few come out."""
    return [shown(scheme, records, seed=seed) for records in (1, 2, 3, 4, 100)]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """People who took no part."""
    view, _ = observe(digit_scenario(4, rounds=3, seed=seed), scheme)
    x, y = samples("digits", seed)
    strangers = Truth({"strangers": x[-200:]}, {"strangers": y[-200:]}, {})
    return [analytic_recovery(view, strangers, "2 × 4 records, 3 rounds, scored on 200 strangers")]
