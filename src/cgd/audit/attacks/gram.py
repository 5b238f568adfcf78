"""Recover second moments from the gradient sums of a linear regression; "not applicable" in the paper's table 2.

With a squared error, the honest participants' part of a round's sum is affine in the displacement:

    H_k = A·D_k + c        A = (2/n)·Σ XᵀX        c = (2/n)·Σ (XᵀX·origin − Xᵀy)

with a column of ones in X if the model has a bias. The origins occur in c only, so confinement does not hide A: sums at
different displacements determine it. Confinement hides Xᵀy, which is c without the origins, in proportion to δ. The
more directions the displacements take, the better A is determined. There are three strategies:

- `passive`: colluders follow the training.
- `own batches`: colluders use one of their samples at a time, which any participant may do.
- `probe`: a colluder adds a vector to its addend, in a different direction every round.

Where the displacements determine little, the attack falls back on the coalition's own samples: it is never much worse
than that guess, which is its chance level. With differential privacy, the sums are those of clipped gradients. So they
are compared with what the coalition's own samples would give with the same clipping, and the difference is added to
their moments. ε bounds what is learned about one record, not the moments of all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional

from cgd.audit.embedded import participants, samples, split
from cgd.audit.results import AttackResult
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import observe
from cgd.audit.view import EPSILONS, is_confined, sample_gradients
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, Truth, View

Strategy = Literal["passive", "own batches", "probe"]
STRATEGIES: tuple[Strategy, ...] = ("passive", "own batches", "probe")
# Relative to the error of guessing.
MAX_RELATIVE_ERROR = 0.5
FLOAT_ROUNDING = 1e-7
TINY = 1e-300
FEATURES = 10
# The default of models for tables.
DEFAULT_DELTA = 0.02
# The size of a probe against noise: larger ones make most gradients so large that clipping hides the moments.
PRIVATE_PROBE = 4.0


def second_moments(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the honest participants' XᵀX and Xᵀy; a bias is a last feature that is always one.

    XᵀX is the maximum a posteriori estimate of a linear regression of H on D, with the coalition's second moments as
    the prior mean. The prior's spread is fitted to the sums (empirical Bayes); the noise of a sum is known.

    Raises:
        InputError: the model is not linear with one output.
    """
    guess, guessed_products = own_moments(view)
    scale = 2 / view.samples
    displacements = torch.stack([each.displacement for each in view.rounds]).double()
    sums = torch.stack([view.honest_sum(number) for number in range(len(view.rounds))]).double()
    moved = displacements - displacements.mean(0)
    expected = _expected_sums(view) if view.is_private else scale * (displacements @ guess - guessed_products)
    unexpected = (sums - sums.mean(0)) - (expected - expected.mean(0))
    left, strength, right = torch.linalg.svd(moved, full_matrices=False)
    noise = max(view.noise, FLOAT_ROUNDING * float(sums.abs().max()))
    rotated = left.T @ unexpected
    weight = strength**2 / (strength**2 + (noise / _spread(rotated, strength, noise)) ** 2)
    correction = right.T @ ((weight / strength.clamp(min=TINY))[:, None] * rotated)
    # A is symmetric, so what determines its rows determines its columns; what is determined twice counts once.
    unseen = torch.eye(len(guess), dtype=torch.float64) - right.T @ (weight[:, None] * right)
    gram = guess + (correction + unseen @ correction.T) / scale
    gram = (gram + gram.T) / 2
    # In CGD the origins are unknown, and zero on average.
    shared = view.rounds[0].weights
    origin = torch.zeros(len(gram)) if shared is None else shared - view.rounds[0].displacement
    offset = (sums - expected).mean(0) / scale - (gram - guess) @ displacements.mean(0)
    return gram, guessed_products + gram @ origin.double() - offset


def _expected_sums(view: View) -> torch.Tensor:
    """Return the sums of all rounds if the honest participants had our samples, and no origins; as clipped."""
    x, y = (torch.cat([getattr(each, name) for each in view.coalition.values()]) for name in ("x", "y"))
    sums = [sample_gradients(view, each.displacement, x, y).double().mean(0) for each in view.rounds]
    return torch.stack(sums) * view.honest_samples / view.samples


def own_moments(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coalition's XᵀX and Xᵀy, scaled to the number of the honest participants' samples."""
    x = torch.cat([_with_bias(view, each.x) for each in view.coalition.values()])
    y = torch.cat([each.y for each in view.coalition.values()]).double()
    scale = view.honest_samples / len(x)
    return scale * x.T @ x, scale * (x.T @ y).reshape(-1)


def recover(view: View, truth: Truth, setting: str = "") -> tuple[AttackResult, AttackResult]:
    """Measure the relative errors of the honest participants' XᵀX and Xᵀy.

    Chance is the error of `own_moments`. The attack succeeds with at most half of that.
    """
    x = _with_bias(view, truth.all_x)
    real = x.T @ x, (x.T @ truth.all_y.double()).reshape(-1)
    results = []
    for name, found, guessed, actual in zip(("XᵀX", "Xᵀy"), second_moments(view), own_moments(view), real, strict=True):
        value, chance = (float((each - actual).norm() / actual.norm()) for each in (found, guessed))
        attack, succeeds = f"{name} of a linear regression", value <= MAX_RELATIVE_ERROR * chance
        detail = f"opened sums: {len(view.rounds)}; the error of a guess from the coalition's samples is {chance:.2g}"
        results.append(AttackResult(attack, view.scheme, "relative error", value, chance, succeeds, setting, detail))
    return results[0], results[1]


def on_view(view: View, truth: Truth, _: Sample) -> list[AttackResult]:
    """Run the attack on any view."""
    return [*recover(view, truth, view.describe())]


def _spread(rotated: torch.Tensor, strength: torch.Tensor, noise: float) -> float:
    """Return the difference between the honest participants' moments and ours that makes the sums most likely."""
    power = (rotated**2).sum(1)

    def log_evidence(spread: float) -> float:
        variance = (strength * spread) ** 2 + noise**2
        return -float((rotated.shape[1] * variance.log() + power / variance).sum())

    spreads = [math.pow(10.0, place / 4) for place in range(-40, 17)]
    return max(spreads, key=log_evidence)


def _with_bias(view: View, x: torch.Tensor) -> torch.Tensor:
    """Return samples with a feature that is always one, if the model has a bias.

    Raises:
        InputError: the model is not linear with one output.
    """
    shapes = [tuple(each.shape) for each in view.build_model().parameters()]
    if shapes not in ([(1, x.shape[1])], [(1, x.shape[1]), (1,)]):
        raise InputError("the model is not a linear model with one output, whose second moments this attack recovers")
    ones = torch.ones(len(x), len(shapes) - 1, dtype=torch.float64)
    return torch.cat([x.double(), ones], dim=1)


# Demonstrations.


def scenario(
    strategy: Strategy = "passive",
    *,
    rounds: int = 60,
    delta: float = 0.1,
    bound: float = 16.0,
    size: float = 1.0,
    seed: int = 0,
) -> Scenario:
    """Return two honest participants and two colluders, who predict the progress of diabetes from 10 measurements.

    Args:
        strategy: the strategy of the colluders.
        rounds: the number of steps.
        delta: δ of the origins.
        bound: the bound of the fixed-point encoding; 16 leaves 26 fraction bits, 16,000 leaves 16.
        size: the norm of the vectors of a probe.
        seed: the seed of the split, origins and batches.
    """
    counts, coalition = participants(2, 150, own=30)
    data, _ = split(samples("diabetes", seed), counts)

    def own_batch(name: str, number: int, indices: torch.Tensor) -> torch.Tensor:
        return indices[[number % len(indices)]] if name in coalition else indices

    def probe(name: str, number: int, _: torch.Tensor) -> torch.Tensor | None:
        direction = torch.zeros(FEATURES + 1)
        direction[number % (FEATURES + 1)] = size if number // (FEATURES + 1) % 2 else -size
        return direction if name == coalition[0] else None

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
        clip=10.0,  # so large that the noise protects, not the clipping
        batches=own_batch if strategy == "own batches" else None,
        probe=probe if strategy == "probe" else None,
    )


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results for XᵀX with each strategy, and for Xᵀy with the passive one; in CGD also with default δ."""
    size = PRIVATE_PROBE if scheme in EPSILONS else 1.0
    results = {
        each: recover(*observe(scenario(each, size=size, seed=seed), scheme), setting=each) for each in STRATEGIES
    }
    products = [replace(results["passive"][1], setting="passive, δ = 0.1")]
    if is_confined(scheme):
        default = observe(scenario(delta=DEFAULT_DELTA, seed=seed), scheme)
        products.append(recover(*default, setting=f"passive, δ = {DEFAULT_DELTA:g}")[1])
    return [*(moments for moments, _ in results.values()), *products]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results of a single round, and in CGD for Xᵀy with large origins."""
    alone, _ = recover(*observe(scenario(rounds=1, seed=seed), scheme), setting="one round only")
    _, masked = recover(*observe(scenario(delta=1.0, seed=seed), scheme), setting="passive, δ = 1")
    return [alone, masked] if is_confined(scheme) else [alone]
