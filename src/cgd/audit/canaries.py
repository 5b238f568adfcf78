"""Canaries: a lower bound of the ε that a private training really has, measured on the product's own code.

A canary is a fake record whose gradient is C·e_j: it changes one element of the sum, which no other record changes. A
coin decides for each canary whether it is among the records. Then the members train: `ConfinedSGD` with `Privacy`, so
the canaries are clipped, encoded, hidden in noise, summed in the ring and decoded as any record. From the opened totals
alone each coin is guessed. If the training is μ-GDP, the rates of both kinds of errors are bounded: Φ⁻¹(1 − FPR) −
Φ⁻¹(FNR) ≤ μ. So the measured rates, increased to the ends of their confidence intervals (Clopper and Pearson), are a
lower bound of μ, and by the accountant of ε.

What makes the test sharp:

- The inputs are twice as large as the clip norm allows, so that a canary that is not clipped counts twice.
- The sign of the loss alternates from step to step, and so does that of each canary, but not that of noise: noise that
  is repeated in the next step cancels.
- The t colluders leave out their noise, which the promise allows. So no more noise remains than was promised.
- The threshold, half of a canary, is fixed before. A threshold that was chosen by its result proves nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import special

from cgd.dp.accountant import epsilon_of
from cgd.dp.mechanism import NoisyEncoding
from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError
from cgd.local import local_peers
from cgd.optim.origin import confine
from cgd.optim.privacy import Privacy
from cgd.optim.sgd import ConfinedSGD

if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt

    from cgd.peers import Peers

THRESHOLD = 0.5
"""From this part of a canary on, it is guessed to be among the records."""
EXCESS = 2.0
"""The norm of a canary's gradient before clipping, divided by the clip norm."""


@dataclass(frozen=True)
class CanaryAudit:
    """What the guesses about all canaries show.

    Attributes:
        epsilon: the claimed ε.
        delta: the claimed δ.
        inside: the number of canaries that were among the records.
        outside: the number of the others.
        missed: how many of those inside were guessed to be outside.
        alarms: how many of those outside were guessed to be inside.
        confidence: the probability with which both bounds hold.
    """

    epsilon: float
    delta: float
    inside: int
    outside: int
    missed: int
    alarms: int
    confidence: float

    @property
    def mu_lower(self) -> float:
        """The lower bound of μ; 0 if the guesses show nothing."""
        error = (1 - self.confidence) / 2
        rates = upper_rate(self.alarms, self.outside, error), upper_rate(self.missed, self.inside, error)
        # The opposite guesses are as good if more than half of these are wrong; but that would be another threshold.
        return max(0.0, -sum(map(NormalDist().inv_cdf, rates)) if max(rates) < 1 else 0.0)

    @property
    def epsilon_lower(self) -> float:
        """The lower bound of ε at the claimed δ."""
        return epsilon_of(self.mu_lower, self.delta)


def upper_rate(errors: int, trials: int, error: float) -> float:
    """Return the upper end of the one-sided confidence interval of a rate (Clopper and Pearson).

    Args:
        errors: how often it happened.
        trials: of how many.
        error: the probability with which the rate may be above the result.

    Examples:
        >>> round(upper_rate(0, 100, 0.05), 4), round(upper_rate(50, 100, 0.05), 4), upper_rate(100, 100, 0.05)
        (0.0295, 0.5864, 1.0)
    """
    if not 0 <= errors <= trials or trials < 1:
        raise InputError(f"{errors} of {trials} is not a rate; there must be canaries inside and outside")
    return 1.0 if errors == trials else float(special.betaincinv(errors + 1, trials - errors, 1 - error))


def audit_canaries(
    *,
    epsilon: float,
    delta: float = 1e-5,
    members: int = 5,
    colluders: int = 1,
    forgetful: int | None = None,
    canaries: int = 1000,
    steps: int = 4,
    runs: int = 1,
    seed: int = 0,
    ring_bits: int = 32,
    confidence: float = 0.95,
) -> CanaryAudit:
    """Train on canaries, guess which were among the records, and return what the guesses show.

    Args:
        epsilon: ε that the training claims.
        delta: δ that it claims.
        members: m.
        colluders: t.
        forgetful: how many members leave out their noise; by default t, as many as the promise allows.
        canaries: the number of canaries in one training, which is that of the model's parameters.
        steps: the steps of a training.
        runs: the number of trainings, each with other canaries.
        seed: of the coins; the noise itself cannot be repeated.
        ring_bits: 32 or 64.
        confidence: the probability with which the lower bound holds.

    Examples:
        >>> audit = audit_canaries(epsilon=8.0, canaries=200, confidence=1 - 1e-9)
        >>> audit.inside + audit.outside, audit.epsilon_lower <= 8.0
        (200, True)
    """
    settings = PrivacySettings(epsilon, delta, steps, colluders=colluders, reruns=0)
    counts = np.zeros(4, dtype=np.int64)
    for run in range(runs):
        coins = np.random.default_rng([seed, run]).integers(0, 2, canaries).astype(bool)
        guesses = (
            _scores(settings, coins, members, colluders if forgetful is None else forgetful, ring_bits) > THRESHOLD
        )
        counts += coins.sum(), (~coins).sum(), (coins & ~guesses).sum(), (~coins & guesses).sum()
    inside, outside, missed, alarms = counts.tolist()
    return CanaryAudit(epsilon, delta, inside, outside, missed, alarms, confidence)


def _scores(
    settings: PrivacySettings, coins: npt.NDArray[np.bool_], members: int, forgetful: int, ring_bits: int
) -> npt.NDArray[np.float64]:
    """Return how much of each canary the opened totals contain: without noise, 1 if it was inside, otherwise 0."""
    names = [f"member-{place}" for place in range(members)]
    with local_peers(names, ring_bits=ring_bits) as peers:
        scores: npt.NDArray[np.float64] = peers.run(
            _train,
            [settings if place >= forgetful else _Forgetful(**asdict(settings)) for place in range(members)],
            [np.flatnonzero(coins & (np.arange(coins.size) % members == place)) for place in range(members)],
            [coins.size] * members,
        )[0]
    return scores


def _train(peers: Peers, settings: PrivacySettings, inside: npt.NDArray[np.intp], size: int) -> npt.NDArray[np.float64]:
    model = torch.nn.Linear(size, 1, bias=False, dtype=torch.float64)
    confine(model, delta=0.1, seed=peers.seed)
    # One record more whose gradient is zero, because every member has records.
    x = torch.zeros(len(inside) + 1, size, dtype=torch.float64)
    x[torch.arange(len(inside)), torch.from_numpy(inside)] = EXCESS * settings.clip
    privacy = Privacy(
        model,
        epsilon=settings.epsilon,
        delta=settings.delta,
        steps=settings.steps,
        clip=settings.clip,
        colluders=settings.colluders,
        reruns=settings.reruns,
        reduction="sum",
    )
    privacy.settings = settings  # equal, or those of a member that leaves out its noise
    optimizer = ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=len(x), privacy=privacy)
    score, before = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for step in range(settings.steps):
        sign = -1 if step % 2 else 1
        optimizer.zero_grad()
        (sign * model(x).sum()).backward()
        optimizer.step()
        after = optimizer.displacement()
        score -= sign * (after - before)
        before = after
    records = optimizer.param_groups[0]["total_samples"]
    scores: npt.NDArray[np.float64] = (score * records / (settings.clip * settings.steps)).numpy()
    return scores


class _Quiet(NoisyEncoding):
    """The encoding of a member that leaves out its noise. The others cannot see this."""

    def encode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the ring elements of `values`/N, rounded."""
        return self.fixed_point.encode(values / self.denominator)


class _Forgetful(PrivacySettings):
    """The settings of such a member."""

    def step_encoding(self, members: int, dimension: int, records: int, ring_bits: int) -> NoisyEncoding:
        """Return the encoding of a step's gradients."""
        right = super().step_encoding(members, dimension, records, ring_bits)
        return _Quiet(**{each.name: getattr(right, each.name) for each in fields(right)})
