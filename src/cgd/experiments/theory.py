"""Theorem 1 in numbers: the regret of a run in the convex case, and the terms of its bound.

By the theorem (paper, section 4) the regret R = (1/T)·Σ_k (F(w_kˡ) − F(w_*)) is O(ε + 1/(μT+1) + ln|μT+1|/T), with
ε = m·‖E_j(w₁ˡ − w₁ʲ)‖. F is the mean loss over the samples of all participants. Our sums are weighted by n_l/n, so the
gradient of F is the mean of the members' gradients, not their sum, and ε/m replaces ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.experiments.runner import RunResult
    from cgd.simulation.baselines import BaselineSettings
    from cgd.simulation.result import History, SimulationResult

GRADIENT_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ConvergenceBound:
    """The constants of the bound of Theorem 1.

    Attributes:
        optimum: the paper's F(w_*).
        epsilon: ε/m of each sampled participant: the distance of its origin from the mean of all origins.
        distance: the paper's D: largest distance of a sampled participant from w_* at the start or at the end.
        gradient: the paper's G, a bound of the gradients of the cross-entropy: √2 times the norm of the longest sample.
        lipschitz: the paper's L, a Lipschitz constant of the gradients: half the largest eigenvalue of XᵀX/n.
    """

    optimum: float
    epsilon: list[float]
    distance: float
    gradient: float
    lipschitz: float

    def terms(self, steps: int, mu: float, lr: float) -> dict[str, float]:
        """Return the three terms of the bound after `steps` steps, with the constants of the proof.

        The first step size is `lr`, so the paper's α is lr·(1 + μT)².
        """
        shift = mu * steps + 1
        drift = 2 * lr * shift**2 * self.gradient * self.distance * self.lipschitz
        return {
            "ε": self.distance * self.lipschitz * max(self.epsilon),
            "1/(μT+1)": drift / shift,
            "ln(μT+1)/T": drift * math.log(shift) / steps,
        }


def measure(settings: BaselineSettings, result: SimulationResult) -> ConvergenceBound:
    """Return the constants of the bound for a simulation of linear models with cross-entropy."""
    x, y = settings.pooled()
    minimiser, optimum = minimise(settings, x, y)
    cells = [cell for cell in result.cells if str(cell) in result.history.participants]
    origins = {cell: _flat(dict(result.origin(cell).draw())) for cell in result.cells}
    mean = torch.stack(list(origins.values())).mean(dim=0)
    displacement = _flat({name: part.double() for name, part in result.displacement().items()})
    offsets = [origins[cell] + moved - minimiser for cell in cells for moved in (0, displacement)]
    with_ones = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    eigenvalues = torch.linalg.eigvalsh(with_ones.T @ with_ones / len(x))
    return ConvergenceBound(
        optimum,
        [float(torch.linalg.vector_norm(origins[cell] - mean)) for cell in cells],
        max(float(torch.linalg.vector_norm(each)) for each in offsets),
        math.sqrt(2) * float(torch.linalg.vector_norm(with_ones, dim=1).max()),
        float(eigenvalues.max()) / 2,
    )


def minimise(settings: BaselineSettings, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return w_* and F(w_*), by L-BFGS in double precision."""
    model = settings.build_model().double()
    for parameter in model.parameters():  # starting from zero selects the minimiser that is nearest to zero
        nn.init.zeros_(parameter)
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=20_000,
        tolerance_grad=GRADIENT_TOLERANCE,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = settings.loss(model(x.double()), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return _flat(dict(model.named_parameters())), float(closure().detach())


def regret(history: History, optimum: float) -> list[list[float]]:
    """Return the regret R of each sampled participant after 1, 2, … steps; needs an evaluation before every step."""
    total = [0.0] * len(history.participants)
    regrets = []
    for steps, evaluation in enumerate(history.evaluations[:-1], start=1):
        total = [previous + loss - optimum for previous, loss in zip(total, evaluation.loss, strict=True)]
        regrets.append([each / steps for each in total])
    return regrets


@dataclass(frozen=True)
class WorstCase:
    """The largest values over the evaluated participants, and over the seeds of an entry.

    Attributes:
        epsilon: ε/m.
        regret: regret R after 1, 2, … steps.
        gap: excess loss F(w_T) − F(w_*) after the last step.
        terms: the three terms of the bound.
    """

    epsilon: float
    regret: list[float]
    gap: float
    terms: list[float]

    @classmethod
    def of(cls, results: Sequence[RunResult]) -> WorstCase:
        """Summarise the runs of an entry."""
        bounds = [ConvergenceBound(**result.extra["theory"]) for result in results]
        regrets = [regret(result.history, bound.optimum) for result, bound in zip(results, bounds, strict=True)]
        terms = [
            bound.terms(result.spec.steps, result.spec.mu, result.spec.lr).values()
            for result, bound in zip(results, bounds, strict=True)
        ]
        return cls(
            max(max(bound.epsilon) for bound in bounds),
            [max(map(max, each)) for each in zip(*regrets, strict=True)],
            max(max(result.last.loss) - bound.optimum for result, bound in zip(results, bounds, strict=True)),
            [max(each) for each in zip(*terms, strict=True)],
        )


def _flat(parts: dict[str, Any]) -> torch.Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts.values()])
