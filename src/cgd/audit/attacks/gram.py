"""Second moments from a linear regression's gradient sums: what the paper's table 2 calls "not applicable".

With a squared error, the honest participants' part of a round's sum is affine in the displacement:

    H_k = A·D_k + c        A = (2/n)·Σ XᵀX        c = (2/n)·Σ (XᵀX·origin − Xᵀy)

with a column of ones in X if the model has a bias. All origins are in c, so confinement does not hide A: it comes out
of sums at displacements that differ. It does hide Xᵀy, which is c but for the origins, in proportion to δ. The more
directions the displacements take, the better A is known. Three ways:

- `passive`: the displacements are what training makes them.
- `own batches`: colluders use a sample or two of theirs at a time, which any participant may do.
- `probe`: a colluder adds a vector of its own to its addend, a different direction every round.

Where the displacements say little, the attack falls back on what the coalition's own samples suggest: it is never
much worse than that guess, which is its chance level.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional

from cgd.audit.embedded import dealt, participants, samples
from cgd.audit.schemes import Scenario, observe
from cgd.audit.view import Finding
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Scheme, Truth, View

Way = Literal["passive", "own batches", "probe"]
WAYS: tuple[Way, ...] = ("passive", "own batches", "probe")
# An attack succeeds if it halves the error of guessing.
MAX_RELATIVE_ERROR = 0.5
FLOAT_ROUNDING = 1e-7
TINY = 1e-300
FEATURES = 10
# δ of a model for tables, unless another is given.
USUAL_DELTA = 0.02


def second_moments(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """The honest participants' XᵀX and Xᵀy, as far as the view tells; a bias is a last feature that is always one.

    XᵀX is the maximum a posteriori of a linear regression of H on D, around the coalition's own second moments. How
    far the honest ones' may be from those is fitted to the sums, too (empirical Bayes); the noise of a sum is known.

    Raises:
        InputError: the model is not linear with one output.
    """
    guess, _ = own_moments(view)
    scale = 2 / view.samples
    displacements = torch.stack([each.displacement for each in view.rounds]).double()
    sums = torch.stack([view.honest_sum(number) for number in range(len(view.rounds))]).double()
    moved = displacements - displacements.mean(0)
    unexpected = sums - sums.mean(0) - moved @ (scale * guess)
    left, strength, right = torch.linalg.svd(moved, full_matrices=False)
    noise = max(view.noise, FLOAT_ROUNDING * float(sums.abs().max()))
    rotated = left.T @ unexpected
    kept = strength**2 / (strength**2 + (noise / _spread(rotated, strength, noise)) ** 2)
    correction = right.T @ ((kept / strength.clamp(min=TINY))[:, None] * rotated)
    # A is symmetric, so what is seen of its rows is seen of its columns; what is seen twice counts once.
    unseen = torch.eye(len(guess), dtype=torch.float64) - right.T @ (kept[:, None] * right)
    gram = guess + (correction + unseen @ correction.T) / scale
    gram = (gram + gram.T) / 2
    # In CGD the origins are unknown, and zero on average.
    shared = view.rounds[0].weights
    origin = torch.zeros(len(gram)) if shared is None else shared - view.rounds[0].displacement
    offset = sums.mean(0) / scale - gram @ displacements.mean(0)
    return gram, gram @ origin.double() - offset


def own_moments(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """What the coalition's own samples suggest: its XᵀX and Xᵀy, scaled to the honest participants' samples."""
    x = torch.cat([_with_bias(view, each.x) for each in view.coalition.values()])
    y = torch.cat([each.y for each in view.coalition.values()]).double()
    scale = view.honest_samples / len(x)
    return scale * x.T @ x, scale * (x.T @ y).reshape(-1)


def recover(view: View, truth: Truth, setting: str = "") -> tuple[Finding, Finding]:
    """How well the honest participants' XᵀX comes out, and how well their Xᵀy.

    The metric is the relative error; chance is that of `own_moments`. It succeeds with at most half of that.
    """
    x = _with_bias(view, truth.all_x)
    real = x.T @ x, (x.T @ truth.all_y.double()).reshape(-1)
    findings = []
    for what, found, guessed, actual in zip(("XᵀX", "Xᵀy"), second_moments(view), own_moments(view), real, strict=True):
        value, chance = (float((each - actual).norm() / actual.norm()) for each in (found, guessed))
        attack, succeeds = f"{what} of a linear regression", value <= MAX_RELATIVE_ERROR * chance
        detail = f"opened sums: {len(view.rounds)}; own samples alone suggest it with an error of {chance:.2g}"
        findings.append(Finding(attack, view.scheme, "relative error", value, chance, succeeds, setting, detail))
    return findings[0], findings[1]


def _spread(rotated: torch.Tensor, strength: torch.Tensor, noise: float) -> float:
    """How far the honest participants' moments are from ours: what makes the sums most likely."""
    power = (rotated**2).sum(1)

    def log_evidence(spread: float) -> float:
        variance = (strength * spread) ** 2 + noise**2
        return -float((rotated.shape[1] * variance.log() + power / variance).sum())

    spreads = [math.pow(10.0, place / 4) for place in range(-40, 17)]
    return max(spreads, key=log_evidence)


def _with_bias(view: View, x: torch.Tensor) -> torch.Tensor:
    """Samples as the model's weights see them: with a feature that is one, if there is a bias.

    Raises:
        InputError: the model is not linear with one output.
    """
    shapes = [tuple(each.shape) for each in view.build_model().parameters()]
    if shapes not in ([(1, x.shape[1])], [(1, x.shape[1]), (1,)]):
        raise InputError("second moments come out of a linear model with one output; the model here is another one")
    ones = torch.ones(len(x), len(shapes) - 1, dtype=torch.float64)
    return torch.cat([x.double(), ones], dim=1)


# The settings it is shown in.


def colony(
    way: Way = "passive", *, rounds: int = 60, delta: float = 0.1, bound: float = 16.0, seed: int = 0
) -> Scenario:
    """Two honest participants and two colluders who predict the course of diabetes from 10 measurements.

    Args:
        way: of attacking.
        rounds: how many steps.
        delta: δ of the origins.
        bound: of the fixed point; 16 leaves 26 fraction bits, 16,000 leaves 16.
        seed: decides who has which samples, origins and batches.
    """
    counts, coalition = participants(2, 150, own=30)
    data, _ = dealt(samples("diabetes", seed), counts)

    def own_batch(name: str, number: int, indices: torch.Tensor) -> torch.Tensor:
        return indices[[number % len(indices)]] if name in coalition else indices

    def probe(name: str, number: int, _: torch.Tensor) -> torch.Tensor | None:
        kick = torch.zeros(FEATURES + 1)
        kick[number % (FEATURES + 1)] = 1.0 if number // (FEATURES + 1) % 2 else -1.0
        return kick if name == coalition[0] else None

    return Scenario(
        data,
        lambda: nn.Linear(FEATURES, 1),
        coalition,
        functional.mse_loss,
        rounds=rounds,
        lr=0.1,
        delta=delta,
        seed=seed,
        bound=bound,
        clip=10.0,  # in "dp"; so large that it is the noise that hides
        batches=own_batch if way == "own batches" else None,
        probe=probe if way == "probe" else None,
    )


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """XᵀX in each way, and Xᵀy in the first; in CGD this also with the δ that tables have unless another is given."""
    seen = {way: recover(*observe(colony(way, seed=seed), scheme), setting=way) for way in WAYS}
    products = [replace(seen["passive"][1], setting="passive, δ = 0.1")]
    if scheme == "cgd":
        usual = observe(colony(delta=USUAL_DELTA, seed=seed), scheme)
        products.append(recover(*usual, setting=f"passive, δ = {USUAL_DELTA:g}")[1])
    return [*(moments for moments, _ in seen.values()), *products]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """One round, whose sum has nothing to differ from; and Xᵀy behind large origins, in CGD."""
    alone, _ = recover(*observe(colony(rounds=1, seed=seed), scheme), setting="one round only")
    _, masked = recover(*observe(colony(delta=1.0, seed=seed), scheme), setting="passive, δ = 1")
    return [alone, masked] if scheme == "cgd" else [alone]
