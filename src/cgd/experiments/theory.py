"""Theorem 1 in numbers: the regret of a run in the convex case, and the terms of its bound.

The theorem (paper, section 4) says of R = (1/T)·Σ_k (F(w_kˡ) − F(w_*)) that it is O(ε + 1/(μT+1) + ln|μT+1|/T), with
ε = m·‖E_j(w₁ˡ − w₁ʲ)‖. F is the mean loss over everybody's samples. Our sums are weighted by n_l/n, so F's gradient is
the mean of the members', not their sum, and ε/m takes the place of ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from cgd.simulation.baselines import BaselineSettings
    from cgd.simulation.colony import SimulationResult
    from cgd.simulation.result import History

CLOSE = 1e-9


@dataclass(frozen=True)
class Theory:
    """What the bound is made of.

    Attributes:
        optimum: F(w_*).
        epsilon: ε/m of each sampled participant: how far its origin lies from the mean of all.
        distance: D, the largest distance of a sampled participant from w_* at the start or at the end.
        gradient: G, a bound of the gradients of the cross-entropy: √2 times the longest sample.
        lipschitz: L, a bound of their change: half the largest eigenvalue of XᵀX/n.
    """

    optimum: float
    epsilon: list[float]
    distance: float
    gradient: float
    lipschitz: float

    def terms(self, steps: int, mu: float, lr: float) -> dict[str, float]:
        """The three terms of the bound after so many steps, with the constants of the proof.

        Our first step is lr, so the paper's α is lr·(1 + μT)².
        """
        shift = mu * steps + 1
        drift = 2 * lr * shift**2 * self.gradient * self.distance * self.lipschitz
        return {
            "ε": self.distance * self.lipschitz * max(self.epsilon),
            "1/(μT+1)": drift / shift,
            "ln(μT+1)/T": drift * math.log(shift) / steps,
        }


def measure(setting: BaselineSettings, colony: SimulationResult) -> Theory:
    """The terms of the bound for a colony of linear models under the cross-entropy."""
    x, y = setting.pooled()
    best, optimum = minimise(setting, x, y)
    cells = [cell for cell in colony.cells if str(cell) in colony.history.participants]
    origins = {cell: _flat(dict(colony.origin(cell).draw())) for cell in colony.cells}
    mean = torch.stack(list(origins.values())).mean(dim=0)
    moved = _flat({name: part.double() for name, part in colony.displacement().items()})
    ends = [origins[cell] + path - best for cell in cells for path in (0, moved)]
    with_ones = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    hessian = torch.linalg.eigvalsh(with_ones.T @ with_ones / len(x))
    return Theory(
        optimum,
        [float(torch.linalg.vector_norm(origins[cell] - mean)) for cell in cells],
        max(float(torch.linalg.vector_norm(each)) for each in ends),
        math.sqrt(2) * float(torch.linalg.vector_norm(with_ones, dim=1).max()),
        float(hessian.max()) / 2,
    )


def minimise(setting: BaselineSettings, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """w_* and F(w_*), by a quasi-Newton method in double precision."""
    model = setting.build_model().double()
    for parameter in model.parameters():  # from zero: of all minimisers the nearest to zero is found
        nn.init.zeros_(parameter)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=20_000, tolerance_grad=CLOSE, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = setting.loss(model(x.double()), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return _flat(dict(model.named_parameters())), float(closure().detach())


def regret(history: History, optimum: float) -> list[list[float]]:
    """R of each sampled participant after 1, 2, … steps, if there was an evaluation before each."""
    total = [0.0] * len(history.participants)
    course = []
    for taken, evaluation in enumerate(history.evaluations[:-1], start=1):
        total = [before + loss - optimum for before, loss in zip(total, evaluation.loss, strict=True)]
        course.append([each / taken for each in total])
    return course


def _flat(parts: dict[str, Any]) -> torch.Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts.values()])
