"""Theorem 1 in numbers: the regret of a run, and in the convex case the terms of its bound.

By the theorem (paper, section 4) the regret R = (1/T)·Σ_k (F(w_kˡ) − F(w_*)) is O(ε + 1/(μT+1) + ln|μT+1|/T), with
ε = m·‖E_j(w₁ˡ − w₁ʲ)‖. F is the mean loss over the samples of all participants. Our sums are weighted by n_l/n, so the
gradient of F is the mean of the members' gradients, not their sum, and ε/m replaces ε.

With a delay τ, the gradient of a step is that of the model τ steps before; a term in τ is added to the bound.

The theorem assumes that F is convex. For a network it is not: w_* is not unique, so that D, the distance from it, has
no meaning, and no constant L holds everywhere. Only R and ε are measured then, with the lowest loss that was found as
F(w_*).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgd.errors import InputError
from cgd.json_files import convert
from cgd.optim.lr_scheduler import inverse_square_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.experiments.runner import RunResult
    from cgd.optim.grid import Cell
    from cgd.simulation.baselines import BaselineSettings
    from cgd.simulation.result import History, SimulationResult

GRADIENT_TOLERANCE = 1e-9
MAX_ITERATIONS = 20_000
NETWORK_STARTS = 5
"""The number of starts from which the loss of a network is minimised."""
MAX_NETWORK_ITERATIONS = 2_000
"""The largest number of iterations from each start."""


@dataclass(frozen=True)
class RegretReference:
    """What the regret of a run is compared with.

    Attributes:
        optimum: the paper's F(w_*); for a network, the lowest loss that was found.
        epsilon: ε/m of each sampled participant: the distance of its origin from the mean of all origins.
    """

    optimum: float
    epsilon: list[float]


@dataclass(frozen=True)
class ConvergenceBound(RegretReference):
    """The constants of the bound of Theorem 1, in the convex case.

    Attributes:
        distance: the paper's D: largest distance of a sampled participant from w_* at the start or at the end.
        gradient: the paper's G, a bound of the gradients of the cross-entropy: √2 times the norm of the longest sample.
        lipschitz: the paper's L, a Lipschitz constant of the gradients: half the largest eigenvalue of XᵀX/n.
    """

    distance: float
    gradient: float
    lipschitz: float

    def terms(self, steps: int, mu: float, lr: float, delay: int = 0) -> dict[str, float]:
        """Return the three terms of the bound after `steps` steps, with the constants of the proof.

        The first step size is `lr`, so the paper's α is lr·(1 + μT)². With a delay τ there is a fourth term: a gradient
        is applied at a model that has moved τ steps since, by at most G·α each, so that it differs by at most L·G·Σα
        from the gradient there, and ⟨difference, w_k − w_*⟩ by D times that.
        """
        shift = mu * steps + 1
        drift = 2 * lr * shift**2 * self.gradient * self.distance * self.lipschitz
        terms = {
            "ε": self.distance * self.lipschitz * max(self.epsilon),
            "1/(μT+1)": drift / shift,
            "ln(μT+1)/T": drift * math.log(shift) / steps,
        }
        if delay:
            mean_lr = lr * sum(inverse_square_factor(step, mu, steps) for step in range(steps)) / steps
            terms["τ"] = delay * mean_lr * self.gradient * self.distance * self.lipschitz
        return terms


def measure(settings: BaselineSettings, result: SimulationResult) -> ConvergenceBound:
    """Return the constants of the bound for a simulation of linear models with cross-entropy."""
    x, y = settings.pooled()
    minimiser, optimum = minimise(settings, x, y)
    origins = _origins(result)
    displacement = _flat({name: part.double() for name, part in result.displacement().items()})
    offsets = [origins[cell] + moved - minimiser for cell in _sampled(result) for moved in (0, displacement)]
    with_ones = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    eigenvalues = torch.linalg.eigvalsh(with_ones.T @ with_ones / len(x))
    return ConvergenceBound(
        optimum,
        _epsilon(result),
        max(float(torch.linalg.vector_norm(each)) for each in offsets),
        math.sqrt(2) * float(torch.linalg.vector_norm(with_ones, dim=1).max()),
        float(eigenvalues.max()) / 2,
    )


def measure_network(settings: BaselineSettings, result: SimulationResult) -> RegretReference:
    """Return the lowest loss that was found from several starts, and ε/m, for a simulation of networks."""
    return RegretReference(lowest_loss(settings, *settings.pooled()), _epsilon(result))


def minimise(settings: BaselineSettings, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return w_* and F(w_*) of a linear model, by L-BFGS in double precision."""
    model = settings.build_model()
    for parameter in model.parameters():  # starting from zero selects the minimiser that is nearest to zero
        nn.init.zeros_(parameter)
    optimum = _descend(model, settings, x, y, MAX_ITERATIONS)
    return _flat(dict(model.named_parameters())), optimum


def lowest_loss(settings: BaselineSettings, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the lowest of the losses that L-BFGS reaches from the usual initial weights of torch, with fixed seeds.

    It may be above the infimum of F, and F need not have a minimum: a network that separates the samples can reduce the
    cross-entropy towards 0 for ever.
    """
    losses = []
    for seed in range(NETWORK_STARTS):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = settings.build_model()
        losses.append(_descend(model, settings, x, y, MAX_NETWORK_ITERATIONS))
    return min(losses)


def _descend(model: nn.Module, settings: BaselineSettings, x: torch.Tensor, y: torch.Tensor, iterations: int) -> float:
    """Minimise the mean loss of a model over all samples, in double precision, and return it."""
    model.double()
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=iterations,
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
    return float(closure().detach())


def _sampled(result: SimulationResult) -> list[Cell]:
    return [cell for cell in result.cells if str(cell) in result.history.participants]


def _origins(result: SimulationResult) -> dict[Cell, torch.Tensor]:
    return {cell: _flat(dict(result.origin(cell).draw())) for cell in result.cells}


def _epsilon(result: SimulationResult) -> list[float]:
    """Return ε/m of the sampled participants."""
    origins = _origins(result)
    mean = torch.stack(list(origins.values())).mean(dim=0)
    return [float(torch.linalg.vector_norm(origins[cell] - mean)) for cell in _sampled(result)]


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
        gaps: excess loss F(w_k) − F(w_*) before the first step, and after 1, 2, … steps.
        terms: the three terms of the bound, and the fourth if there is a delay; empty for a network.
    """

    epsilon: float
    regret: list[float]
    gaps: list[float]
    terms: list[float]

    @property
    def gap(self) -> float:
        """The excess loss after the last step."""
        return self.gaps[-1]

    @property
    def halfway_gap(self) -> float:
        """The excess loss after half of the steps."""
        return self.gaps[(len(self.gaps) - 1) // 2]

    @property
    def halfway_regret(self) -> float:
        """The regret after half of the steps, and at least one."""
        return self.regret[(len(self.regret) - 1) // 2]

    @property
    def falls_with_steps(self) -> bool:
        """True if the regret after all steps is below that after half of them."""
        return self.regret[-1] < self.halfway_regret

    @classmethod
    def of(cls, results: Sequence[RunResult]) -> WorstCase:
        """Summarise the runs of an entry."""
        references = [reference(result) for result in results]
        both = list(zip(results, references, strict=True))
        regrets = [regret(result.history, known.optimum) for result, known in both]
        gaps = [[max(each.loss) - known.optimum for each in result.history.evaluations] for result, known in both]
        terms = [
            known.terms(result.spec.steps, result.spec.mu, result.spec.lr, result.spec.delay).values()
            for result, known in both
            if isinstance(known, ConvergenceBound)
        ]
        return cls(
            max(max(known.epsilon) for known in references),
            [max(map(max, each)) for each in zip(*regrets, strict=True)],
            [max(each) for each in zip(*gaps, strict=True)],
            [max(each) for each in zip(*terms, strict=True)],
        )


def reference(result: RunResult) -> RegretReference:
    """Return what was stored about the regret of a run.

    Raises:
        InputError: it is missing, or has other content.
    """
    stored = result.extra.get("theory", {})
    found: RegretReference = convert(stored, RegretReference if result.spec.hidden else ConvergenceBound, "theory")
    if not found.epsilon:
        raise InputError("theory.epsilon has no participant")
    return found


def growth_with_epsilon(cases: Sequence[WorstCase]) -> float | None:
    """Return the power of ε with which the final excess loss grows, between the two largest ε.

    What remains at the smallest ε is subtracted, because it does not come from ε. None for fewer than three cases, or
    if ε or the excess loss does not grow.
    """
    final = sorted((each.epsilon, each.gap) for each in cases)
    if len(final) < 3:
        return None
    (_, base), (small, low), (large, high) = final[0], final[-2], final[-1]
    if not (small < large and base < low < high):
        return None
    return math.log((high - base) / (low - base)) / math.log(large / small)


def _flat(parts: dict[str, Any]) -> torch.Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts.values()])
