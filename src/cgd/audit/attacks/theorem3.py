"""Theorem 3's z₁ and z₂: what secure-aggregated FedSGD exposes, and CGD beside it.

z₁ is the sum of the honest participants' gradients. z₂ = xᵀΔ(x·w_k, y) is the same gradient read as a function of their
records at a model that the coalition knows. In FedSGD everybody has w_k, so whoever has z₁ has z₂. In CGD z₁ is seen
just as exactly, but each addend was computed at another model, and no model that the coalition could name makes z₂ of
it: the gap between them is what confinement buys. It closes where origins are small beside the displacement, which then
is near enough to all of their models.

The paper's example is linear regression, where z₂ = xᵀx·w_k − xᵀy. Over some rounds that is a system of linear
equations, with xᵀx and xᵀy for unknowns. In CGD the right-hand side is Σ_l xᵀx·origin_l off, the same in every round:
xᵀy is masked by it, but xᵀx comes out as well as in FedSGD. The paper's table 2 says "not applicable" there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.func import functional_call, grad
from torch.nn import functional

from cgd.audit.embedded import dealt, samples
from cgd.audit.schemes import Scenario, observe
from cgd.audit.view import Finding, flat, unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.audit.view import Scheme, Truth, View

# z₂ is exposed if it explains the opened sums but for less than half.
MAX_RELATIVE_ERROR = 0.5
# δ of a model for tables, unless another is given.
USUAL_DELTA = 0.02


@dataclass(frozen=True, repr=False)
class Exposed:
    """What a coalition computes from its view of a linear regression.

    Attributes:
        z1: the honest participants' gradient sum, a row for each round.
        models: the model that the coalition takes each to be computed at: the common one, or in CGD the displacement.
        moments: its estimate of xᵀx, in units of the loss's gradient.
        products: its estimate of xᵀy, in the same units.
    """

    z1: torch.Tensor
    models: torch.Tensor
    moments: torch.Tensor
    products: torch.Tensor


@dataclass(frozen=True)
class Theorem3:
    """How far each of these is from the truth, as relative errors.

    Attributes:
        scheme: what it was run against.
        z1: of the gradient sum: what Theorems 2 and 3 grant to the coalition in both schemes.
        z2: between z₁ and z₂ at the model that the coalition takes it to be computed at; near 0 if z₂ is exposed.
        moments: of xᵀx.
        products: of xᵀy.
    """

    scheme: Scheme
    z1: float
    z2: float
    moments: float
    products: float


def theorem3(view: View) -> Exposed:
    """z₁ and, by reading it as z₂ over all rounds, what it says about the records: from the view alone.

    Raises:
        InputError: there are too few rounds to solve for all unknowns.
    """
    z1 = torch.stack([view.honest_sum(number) for number in range(len(view.rounds))]).double()
    models = torch.stack([each.displacement if each.weights is None else each.weights for each in view.rounds]).double()
    if len(z1) <= z1.shape[1]:
        raise InputError(f"{len(z1)} rounds cannot tell {z1.shape[1]} columns of xᵀx and xᵀy apart; take more rounds")
    equations = torch.cat([models, -torch.ones(len(models), 1, dtype=models.dtype)], dim=1)
    solution = torch.linalg.lstsq(equations, z1, driver="gelsd").solution
    return Exposed(z1, models, (solution[:-1] + solution[:-1].T) / 2, solution[-1])


def score(exposed: Exposed, view: View, truth: Truth) -> Theorem3:
    """Compare with the honest participants' records, which the coalition cannot."""
    at = _gradient_at(view, truth)
    products = -at(torch.zeros(exposed.z1.shape[1], dtype=torch.double))
    moments = torch.stack([at(unit) + products for unit in torch.eye(len(products), dtype=torch.double)])
    z2 = torch.stack([at(model) for model in exposed.models])
    last = view.rounds[-1].displacement.double()
    origins = {name: model.double() - view.final_displacement.double() for name, model in truth.models.items()}
    true_sum = torch.zeros_like(last)
    for name, origin in origins.items():
        true_sum += _gradient_at(view, truth, name)(origin + last)
    return Theorem3(
        view.scheme,
        _relative(exposed.z1[-1], true_sum),
        _relative(exposed.z1, z2),
        _relative(exposed.moments, moments),
        _relative(exposed.products, products),
    )


def _gradient_at(view: View, truth: Truth, name: str | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The honest participants' summed gradient (or one's addend) at a model, from their records."""
    model = view.build_model().double()
    x, y = (truth.all_x, truth.all_y) if name is None else (truth.x[name], truth.y[name])
    share = len(y) / view.samples

    def value(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return share * view.loss(functional_call(model, weights, (x.double(),)), y.double())

    return lambda weights: flat(grad(value)(unflat(weights, model)))


def _relative(found: torch.Tensor, real: torch.Tensor) -> float:
    return float((found - real).norm() / real.norm())


# The setting it is shown in.


def shown(scheme: Scheme, *, rounds: int = 40, delta: float = 0.1, seed: int = 0) -> Theorem3:
    """Linear regression on patients with diabetes, half of them with two honest participants.

    The curious one takes a minibatch of its own records in every round, as in stochastic descent: that moves the model
    in all directions, where full batches would soon move it in few.
    """
    x, y = samples("diabetes", seed)
    data, _ = dealt((x.double(), y.double()), {"curious": 220, "honest-1": 110, "honest-2": 112})

    def batches(name: str, number: int, indices: torch.Tensor) -> torch.Tensor:
        if name != "curious":
            return indices
        random = torch.Generator().manual_seed(1000 * seed + number)
        return indices[torch.randperm(len(indices), generator=random)[:8]]

    colony = Scenario(
        data,
        lambda: torch.nn.Linear(x.shape[1], 1, bias=False, dtype=torch.double),
        ["curious"],
        loss=functional.mse_loss,
        rounds=rounds,
        delta=delta,
        seed=seed,
        bound=64.0,
        ring_bits=64,
        batches=batches,
    )
    view, truth = observe(colony, scheme)
    return score(theorem3(view), view, truth)


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Whether the opened sum is z₂ at a model that the coalition knows; it succeeds if it is off by less than half.

    In CGD that depends on how large origins are beside the displacement: also with the δ that tables usually have.
    """
    return [_finding(scheme, delta, seed) for delta in ((0.1, USUAL_DELTA) if scheme == "cgd" else (0.1,))]


def _finding(scheme: Scheme, delta: float, seed: int) -> Finding:
    found = shown(scheme, delta=delta, seed=seed)
    detail = f"z₁ is off by {found.z1:.1g}; what follows from taking it for z₂: {found.moments:.1g} for xᵀx, "
    detail += f"{found.products:.1g} for xᵀy"
    setting = f"2 honest, 222 records, 40 rounds, δ = {delta:g}"
    return Finding(
        "z₂ of Theorem 3", scheme, "relative error of z₂", found.z2, 1.0, found.z2 < MAX_RELATIVE_ERROR, setting, detail
    )


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Noise: for "dp"."""
    return attacks(scheme, seed)
