"""Recover records from the summed gradient of a first layer of ReLU units, by linear algebra.

The gradient of unit i's weights and bias is Σ_r c_ir·[x_r, 1] over the records r: for any weights, it is a linear
combination of records, and c_ir is exactly 0 for every record that does not activate the unit. So no model has to be
known, and confinement changes nothing. There are two methods:

- **Single.** If only one record activates a unit, the gradient of its weights divided by that of its bias is the
  record. A record that comes out of two units, or of one unit in two rounds, is no coincidence.
- **Combined.** The rows [gradient of weights, gradient of bias] of all units and rounds span as many dimensions as
  there are records. The units that record r does not activate lie in one hyperplane of that space: about half of all
  units, and no other hyperplane contains as many. With few records, hyperplanes through a few random units find them,
  and the hyperplanes of all records together give all records.

With more records than inputs, the rows span the whole space and nearly every unit combines many records. A few are
still recovered: of 200 records, the 1 to 4 % that activate some unit alone.

Both methods need exact sums: they recognise equal directions. With differential privacy, the rows of all rounds are
averaged, and the gradient of every unit is taken for a single record. All rounds together contain a record with at most
μ times the noise, spread over all its features; a correlation of 0.99 would need about seven times the noise in each of
them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from cgd.audit.embedded import digit_scenario, samples
from cgd.audit.matching import match, own_records, show, value_range
from cgd.audit.results import AttackResult
from cgd.audit.schemes import observe
from cgd.audit.view import Truth, gradient_rows, has_bias, limit_rows
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, View

MAX_COMBINED = 10
"""Records up to which random hyperplanes find those of the combined method."""
MAX_DRAWN, MAX_REFINED = 8000, 1500
"""Hyperplanes that are drawn, and those of them with the most units that are refined."""
SAME_DIRECTION = 3e-4
"""The largest difference of two equal directions: far above fixed-point rounding, far below real differences."""
EXACT = 0.01
"""The largest error of an exact guess in any feature: in a table, a hundredth of a standard deviation."""


def analytic_recovery(view: View, truth: Truth, setting: str = "") -> AttackResult:
    """Measure the fraction of the real records that are recovered.

    Chance is the score of the attacker's own records as guesses. The attack succeeds if it recovers more records than
    chance, by two standard deviations of the count.
    """
    guesses = recover(view)
    peak = value_range(view)
    table = truth.table is not None
    found = match(guesses, truth.all_x, peak, table=table)
    own = match(own_records(view)[: view.honest_samples], truth.all_x, peak, table=table)
    hits, by_chance = (each.recovered * len(found.real) for each in (found, own))
    succeeds = hits > by_chance + 2 * math.sqrt(by_chance)
    return AttackResult(
        "records from a layer of ReLU units",
        view.scheme,
        "records recovered",
        found.recovered,
        own.recovered,
        succeeds=succeeds,
        setting=setting,
        detail=f"{round(hits)} of {len(found.real)} records; "
        f"mean PSNR {found.mean_psnr:.1f} dB; the attacker's own records {own.mean_psnr:.1f} dB",
        deviation=math.sqrt(max(hits, 1.0)) / len(found.real),
        **show(found, truth, succeeds=succeeds),
    )


def on_view(view: View, truth: Truth, _: Sample) -> list[AttackResult]:
    """Run the attack on any view."""
    return [analytic_recovery(limit_rows(view), truth, view.describe())]


def recover(view: View) -> torch.Tensor:
    """Guess the honest participants' records, the most certain first, at most as many as they have.

    Raises:
        InputError: the network does not begin with a linear layer with a bias, or has no ReLU units.
    """
    check_relu_layer(view.build_model())
    if view.is_private:
        return _from_noisy_rows(view)
    rows = gradient_rows(view)
    rows = rows[rows.norm(dim=1) > SAME_DIRECTION * rows.norm(dim=1).max()]
    rows = rows / rows.norm(dim=1, keepdim=True)
    guesses = torch.cat([_combined(rows, view.honest_samples), _single(rows)])
    own = own_records(view)
    slack = 0.05 * value_range(view)
    possible = ((guesses > own.min() - slack) & (guesses < own.max() + slack)).all(dim=1)
    return _distinct(torch.cat([guesses[possible], guesses[~possible]]), view.honest_samples)


def check_relu_layer(model: torch.nn.Module) -> None:
    """Check that records can be read from the first layer of a network.

    Raises:
        InputError: the network does not begin with a linear layer with a bias, or has no ReLU units.
    """
    if not has_bias(model):
        raise InputError("the first layer has no bias; this attack divides by the gradient of the bias")
    if not any(isinstance(each, torch.nn.ReLU) for each in model.modules()):
        raise InputError("there are no ReLU units; this attack needs units that only some records activate")


def count_exact(rows: torch.Tensor, truth: Truth) -> int:
    """Return how many of the real records are equal, in every feature, to some row of first-layer gradients.

    There is no limit on the number of guesses, so an attacker does not read more from single rows. It recognises the
    right ones, because a record that alone activates a unit mostly comes out in the next round, too.

    Args:
        rows: gradients of a unit's weights and bias, as `gradient_rows` returns them, or combinations of them; the
            units of a model without a hidden layer are its outputs.
        truth: the real records.
    """
    guesses = rows[:, :-1] / rows[:, -1:]
    real = truth.all_x.reshape(len(truth.all_x), -1).double()
    lowest, highest = real.min(dim=0).values - EXACT, real.max(dim=0).values + EXACT
    guesses = guesses[((guesses >= lowest) & (guesses <= highest)).all(dim=1)]
    if not len(guesses):
        return 0
    return int((torch.cdist(real, guesses, p=math.inf).min(dim=1).values <= EXACT).sum())


def _from_noisy_rows(view: View) -> torch.Tensor:
    """Return the record of every unit, if only one activates it, from means over all rounds."""
    rows = gradient_rows(view)
    rows = rows.reshape(len(view.rounds), -1, rows.shape[1]).mean(0)
    own = own_records(view)
    # A bias near zero is noise; the sign of a unit's gradient is that of its bias.
    bias = torch.where(rows[:, -1:] < 0, -1.0, 1.0) * rows[:, -1:].abs().clamp_min(view.noise / len(view.rounds) ** 0.5)
    guesses: torch.Tensor = (rows[:, :-1] / bias).clamp(own.min(), own.max())
    return guesses


def _single(rows: torch.Tensor) -> torch.Tensor:
    """Return the record of every unit, if only one activates it; those that several units agree on come first."""
    rows = rows * rows[:, -1:].sign()
    rows = rows[rows[:, -1] > SAME_DIRECTION]
    agree = (torch.cdist(rows, rows) < SAME_DIRECTION).sum(dim=1)
    rows = rows[agree.argsort(descending=True, stable=True)]
    return rows[:, :-1] / rows[:, -1:]


def _combined(rows: torch.Tensor, records: int) -> torch.Tensor:
    """Return all records from their hyperplanes, or nothing if these are not found."""
    nothing = rows.new_zeros(0, rows.shape[1] - 1)
    if not 2 <= records <= min(MAX_COMBINED, rows.shape[1] - 1) or len(rows) < 2 * records:
        return nothing
    # Whitened coordinates, in which similar records are separated.
    left, size, right = torch.linalg.svd(rows, full_matrices=False)
    basis = size[:records, None] * right[:records]
    points = left[:, :records]
    normals = _hyperplanes(points / points.norm(dim=1, keepdim=True), records)
    if len(normals) < records or torch.linalg.cond(normals).item() > 1 / SAME_DIRECTION:
        return nothing
    extended = torch.linalg.inv(normals).T @ basis  # each is orthogonal to the normals of all other records
    records_found: torch.Tensor = extended[:, :-1] / extended[:, -1:]
    return records_found


def _hyperplanes(points: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return normals of the hyperplanes through 0 with the most points, at most one per dimension."""
    near = (points @ points.T).abs() > 1 - SAME_DIRECTION**2 / 2
    points = points[~near.tril(-1).any(dim=1)]  # each direction once: equal ones do not define a hyperplane
    if len(points) < 2 * dimensions:
        return points[:0]
    random = torch.Generator().manual_seed(0)
    drawn = torch.rand(MAX_DRAWN, len(points), generator=random).argsort(dim=1)[:, : dimensions - 1]
    counts = _contained(points, torch.linalg.svd(points[drawn]).Vh[:, -1]).sum(dim=0)
    found: list[torch.Tensor] = []
    for place in counts.argsort(descending=True, stable=True)[:MAX_REFINED].tolist():
        contained = _contained(points, torch.linalg.svd(points[drawn[place]]).Vh[-1:])[:, 0]
        if len(found) == dimensions or contained.sum() <= dimensions:
            break
        _, size, right = torch.linalg.svd(points[contained])  # fitted to all of its points, not only the drawn ones
        new = all((right[-1] - other).norm() > 10 * SAME_DIRECTION < (right[-1] + other).norm() for other in found)
        if new and size[-2] > 10 * SAME_DIRECTION > size[-1]:
            found.append(right[-1])
    return torch.stack(found) if found else points[:0]


def _contained(points: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    """Return which points (rows) lie in which hyperplanes (columns)."""
    return (points @ normals.T).abs() < SAME_DIRECTION


def _distinct(guesses: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` guesses that differ from those before them."""
    similar = torch.cdist(guesses, guesses) <= 0.05 * guesses.norm(dim=1)
    chosen = torch.zeros(len(guesses), dtype=torch.bool)
    for place in range(len(guesses)):
        if chosen.sum() == count:
            break
        chosen[place] = not (similar[place] & chosen).any()
    return guesses[chosen]


# Demonstrations.


def demonstrate(scheme: Scheme, records: int, *, rounds: int = 3, seed: int = 0) -> AttackResult:
    """Attack two honest participants with `records` digits each."""
    view, truth = observe(digit_scenario(records, rounds=rounds, seed=seed), scheme)
    return analytic_recovery(view, truth, f"2 × {records} record{'s' * (records > 1)}, {rounds} rounds")


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with one to four records each, and with a hundred, of which few are recovered."""
    return [demonstrate(scheme, records, seed=seed) for records in (1, 2, 3, 4, 100)]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the result on records that nobody trained on."""
    view, _ = observe(digit_scenario(4, rounds=3, seed=seed), scheme)
    x, y = samples("digits", seed)
    strangers = Truth({"strangers": x[-200:]}, {"strangers": y[-200:]}, {})
    return [analytic_recovery(view, strangers, "2 × 4 records, 3 rounds, scored on 200 strangers")]
