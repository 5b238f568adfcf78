"""Theorem 3: the z₁ and z₂ that FedSGD with secure aggregation exposes, compared with CGD.

z₁ is the sum of the honest participants' gradients. z₂ = xᵀΔ(x·w_k, y) is the same gradient as a function of their
records, at a model that the coalition knows. In FedSGD everybody has w_k, so z₁ is z₂. In CGD z₁ is opened just as
exactly, but each addend was computed at another model, and there is no common model at which z₁ would be z₂. The
difference is the effect of confinement. It vanishes if origins are small compared with the displacement, which is then
close to all models.

The paper's example is linear regression, where z₂ = xᵀx·w_k − xᵀy. Several rounds give a system of linear equations
with the unknowns xᵀx and xᵀy. In CGD the right-hand side has the additional term Σ_l xᵀx·origin_l, the same in every
round: it masks xᵀy, but xᵀx is recovered as well as in FedSGD, where the paper's table 2 says "not applicable".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.func import functional_call, grad
from torch.nn import functional

from cgd.audit.embedded import samples, split
from cgd.audit.results import AttackResult
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import observe
from cgd.audit.view import flat, is_confined, unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.audit.view import Scheme, Truth, View

# Of z₂, up to which it counts as exposed.
MAX_RELATIVE_ERROR = 0.5
# The default of models for tables.
DEFAULT_DELTA = 0.02


@dataclass(frozen=True, repr=False)
class Estimates:
    """The values that a coalition computes from its view of a linear regression.

    Attributes:
        z1: the honest participants' gradient sums, a row per round.
        models: the assumed model of each round: the common one, or in CGD the displacement.
        moments: the estimate of xᵀx, in units of the loss's gradient.
        products: the estimate of xᵀy, in the same units.
    """

    z1: torch.Tensor
    models: torch.Tensor
    moments: torch.Tensor
    products: torch.Tensor


@dataclass(frozen=True)
class RelativeErrors:
    """The relative errors of a coalition's estimates.

    Attributes:
        scheme: the scheme that was attacked.
        z1: the error of the gradient sum, which both theorems concede to the coalition.
        z2: the difference of z₁ and z₂ at the assumed model; near 0 if z₂ is exposed.
        moments: the error of xᵀx.
        products: the error of xᵀy.
    """

    scheme: Scheme
    z1: float
    z2: float
    moments: float
    products: float


def estimate(view: View) -> Estimates:
    """Estimate z₁ and, by taking it for z₂ in all rounds, the moments of the records.

    Raises:
        InputError: there are too few rounds to solve for all unknowns.
    """
    z1 = torch.stack([view.honest_sum(number) for number in range(len(view.rounds))]).double()
    models = torch.stack([each.displacement if each.weights is None else each.weights for each in view.rounds]).double()
    if len(z1) <= z1.shape[1]:
        raise InputError(f"{len(z1)} rounds cannot determine {z1.shape[1]} columns of xᵀx and xᵀy; use more rounds")
    equations = torch.cat([models, -torch.ones(len(models), 1, dtype=models.dtype)], dim=1)
    solution = torch.linalg.lstsq(equations, z1, driver="gelsd").solution
    return Estimates(z1, models, (solution[:-1] + solution[:-1].T) / 2, solution[-1])


def score(found: Estimates, view: View, truth: Truth) -> RelativeErrors:
    """Compare the estimates with the honest participants' records."""
    at = _gradient_at(view, truth)
    products = -at(torch.zeros(found.z1.shape[1], dtype=torch.double))
    moments = torch.stack([at(unit) + products for unit in torch.eye(len(products), dtype=torch.double)])
    z2 = torch.stack([at(model) for model in found.models])
    last = view.rounds[-1].displacement.double()
    origins = {name: model.double() - view.final_displacement.double() for name, model in truth.models.items()}
    true_sum = torch.zeros_like(last)
    for name, origin in origins.items():
        true_sum += _gradient_at(view, truth, name)(origin + last)
    return RelativeErrors(
        view.scheme,
        _relative(found.z1[-1], true_sum),
        _relative(found.z1, z2),
        _relative(found.moments, moments),
        _relative(found.products, products),
    )


def _gradient_at(view: View, truth: Truth, name: str | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the honest participants' summed gradient (or one's addend) as a function of the model."""
    model = view.build_model().double()
    x, y = (truth.all_x, truth.all_y) if name is None else (truth.x[name], truth.y[name])
    share = len(y) / view.samples

    def value(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return share * view.loss(functional_call(model, weights, (x.double(),)), y.double())

    return lambda weights: flat(grad(value)(unflat(weights, model)))


def _relative(found: torch.Tensor, real: torch.Tensor) -> float:
    return float((found - real).norm() / real.norm())


# Demonstrations.


def demonstrate(scheme: Scheme, *, rounds: int = 40, delta: float = 0.1, seed: int = 0) -> RelativeErrors:
    """Attack a linear regression on diabetes patients, half of them with two honest participants.

    The colluder uses a minibatch of its records in every round, as in stochastic gradient descent: this moves the model
    in all directions; full batches would soon move it in few.
    """
    x, y = samples("diabetes", seed)
    data, _ = split((x.double(), y.double()), {"curious": 220, "honest-1": 110, "honest-2": 112})

    def batches(name: str, number: int, indices: torch.Tensor) -> torch.Tensor:
        if name != "curious":
            return indices
        random = torch.Generator().manual_seed(1000 * seed + number)
        return indices[torch.randperm(len(indices), generator=random)[:8]]

    scenario = Scenario(
        data,
        lambda: torch.nn.Linear(x.shape[1], 1, bias=False, dtype=torch.double),
        ["curious"],
        loss=functional.mse_loss,
        rounds=rounds,
        delta=delta,
        seed=seed,
        bound=64.0,
        ring_bits=64,
        clip=10.0,  # so large that the noise protects, not the clipping
        batches=batches,
    )
    view, truth = observe(scenario, scheme)
    return score(estimate(view), view, truth)


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the relative error of z₂; the attack succeeds if it is less than half.

    In CGD it depends on the size of the origins, so the default δ of tables is measured, too. The attack needs exact
    sums: with noise, an estimate from all rounds would be better, and then it is that of `gram`.
    """
    return [_measure(scheme, delta, seed) for delta in ((0.1, DEFAULT_DELTA) if is_confined(scheme) else (0.1,))]


def _measure(scheme: Scheme, delta: float, seed: int) -> AttackResult:
    found = demonstrate(scheme, delta=delta, seed=seed)
    detail = f"relative errors: z₁ {found.z1:.1g}; with z₁ taken for z₂, xᵀx {found.moments:.1g} and xᵀy "
    detail += f"{found.products:.1g}"
    setting = f"2 honest, 222 records, 40 rounds, δ = {delta:g}"
    return AttackResult(
        "z₂ of Theorem 3", scheme, "relative error of z₂", found.z2, 1.0, found.z2 < MAX_RELATIVE_ERROR, setting, detail
    )


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with much noise."""
    return attacks(scheme, seed)
