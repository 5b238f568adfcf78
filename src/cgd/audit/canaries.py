"""Canaries: a lower bound of the ε that a private training really has, measured on the product's own code.

A canary is a fake record whose gradient is C·e_j: it changes one element of the sum, which no other record changes. A
coin decides for each canary whether it is among the records. Then the members train: `ConfinedSGD` with `Privacy`, so
the canaries are clipped, encoded, hidden in noise, summed in the ring and decoded as any record. From the opened totals
alone each coin is guessed. There are two lower bounds of ε.

- `epsilon_lower`: if the training is μ-GDP, the rates of both kinds of errors are bounded: Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) ≤ μ.
  So the measured rates, increased to the ends of their confidence intervals (Clopper and Pearson), are a lower bound of
  μ, and by the accountant of ε. This assumes that the canaries of a training are independent of each other, as they are
  with the noise of this mechanism.
- `epsilon_lower_one_run`: the bound of Steinke, Nasr and Jagielski (2023), which holds for any mechanism, also if all
  canaries of a training depend on each other. It only uses the coins, of which the most certain ones are guessed. The
  number of guesses is fixed before. It is lower, because it does not know that the noise is Gaussian; and n guesses
  that are all right show no more than about log(n/3).

What makes the test sharp:

- The inputs are twice as large as the clip norm allows, so that a canary that is not clipped counts twice.
- The sign of the loss alternates from step to step, and so does that of each canary, but not that of noise: noise that
  is repeated in the next step cancels.
- The t colluders leave out their noise, which the promise allows. So no more noise remains than was promised.
- The threshold, half of a canary, is fixed before. A threshold that was chosen by its result proves nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import special, stats

from cgd.audit.private_sums import encode_without_noise
from cgd.dp.accountant import epsilon_of
from cgd.dp.mechanism import NoisyEncoding
from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError
from cgd.local import local_peers
from cgd.optim.origin import confine
from cgd.optim.privacy import Privacy
from cgd.optim.sgd import ConfinedSGD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import numpy.typing as npt

    from cgd.peers import Peers

THRESHOLD = 0.5
"""From this part of a canary on, it is guessed to be among the records."""
EXCESS = 2.0
"""The norm of a canary's gradient before clipping, divided by the clip norm."""
CANARIES_PER_GUESS = 50
"""For the bound of one run, a guess is made about one of so many canaries: those with the lowest and highest scores."""
ONE_RUN_CONFIDENCE = 0.95
"""Of the bound of one run. It cannot be near 1: with a probability of δ, a mechanism may reveal all coins."""
MAX_EPSILON = 1e4


@dataclass(frozen=True)
class CanaryAudit:
    """The result of guessing all canaries.

    Attributes:
        epsilon: the claimed ε.
        delta: the claimed δ.
        inside: the number of canaries that were among the records.
        outside: the number of the others.
        missed: how many of those inside were guessed to be outside.
        alarms: how many of those outside were guessed to be inside.
        guesses: the number of the most certain guesses, for the bound of one run.
        correct: how many of these are right.
        confidence: the probability with which the first bound holds; the bound of one run holds with 95 %.
    """

    epsilon: float
    delta: float
    inside: int
    outside: int
    missed: int
    alarms: int
    guesses: int
    correct: int
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

    @property
    def epsilon_lower_one_run(self) -> float:
        """The lower bound of ε at the claimed δ that assumes nothing about the mechanism."""
        return one_run_epsilon(self.guesses, self.correct, self.inside + self.outside, self.delta, ONE_RUN_CONFIDENCE)


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


def one_run_epsilon(guesses: int, correct: int, canaries: int, delta: float, confidence: float) -> float:
    """Return a lower bound of ε from guesses of coins, whatever the mechanism is.

    This is the bound of Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run".

    Args:
        guesses: how many coins were guessed; fixed before.
        correct: how many guesses were right.
        canaries: the number of all coins.
        delta: δ.
        confidence: the probability with which the bound holds.

    Examples:
        >>> round(one_run_epsilon(1000, 750, 1000, 0.0, 0.95), 2)  # 75 % is what ε = log 3 allows
        0.98
        >>> one_run_epsilon(1000, 500, 1000, 0.0, 0.95)
        0.0
    """
    low, high = 0.0, 1.0
    while one_run_p_value(guesses, correct, canaries, high, delta) < 1 - confidence and high < MAX_EPSILON:
        low, high = high, 2 * high
    if one_run_p_value(guesses, correct, canaries, low, delta) >= 1 - confidence:
        return 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if one_run_p_value(guesses, correct, canaries, middle, delta) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def one_run_p_value(guesses: int, correct: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return a bound of the probability that so many guesses are right, if a mechanism is (ε, δ)-private.

    With δ = 0 each guess is right with a probability of at most q = e^ε/(1 + e^ε), so that the number of right ones is
    at most binomial. δ adds 2·m·δ·max over i of P(correct > Bin(guesses, q) ≥ correct − i)/i.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise InputError(f"{correct} of {guesses} guesses about {canaries} canaries are right; these are no numbers")
    right = special.expit(epsilon)
    value = float(stats.binom.sf(correct - 1, guesses, right))
    if delta > 0:
        below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right).cumsum()
        value += 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, value)


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
    quiet = colluders if forgetful is None else forgetful
    coins = np.array([np.random.default_rng([seed, run]).integers(0, 2, canaries) for run in range(runs)], dtype=bool)
    scores = np.array([_scores(settings, each, members, quiet, ring_bits) for each in coins])
    return judge(coins.ravel(), scores.ravel(), epsilon, delta, confidence)


def judge(
    coins: npt.NDArray[np.bool_], scores: npt.NDArray[np.float64], epsilon: float, delta: float, confidence: float
) -> CanaryAudit:
    """Compare guesses with the coins: of all canaries by the threshold, and of the lowest and the highest scores.

    Args:
        coins: true for canaries that were among the records.
        scores: how much of each canary the opened totals contain.
        epsilon: the claimed ε.
        delta: the claimed δ.
        confidence: the probability with which the first bound holds.
    """
    above = scores > THRESHOLD
    few = max(1, coins.size // CANARIES_PER_GUESS // 2)
    order = np.argsort(scores, kind="stable")
    correct = int((~coins[order[:few]]).sum() + coins[order[-few:]].sum())
    inside, missed, alarms = (int(each.sum()) for each in (coins, coins & ~above, ~coins & above))
    return CanaryAudit(epsilon, delta, inside, coins.size - inside, missed, alarms, 2 * few, correct, confidence)


def judge_all(audits: Sequence[CanaryAudit]) -> CanaryAudit:
    """Return what the guesses of several audits of the same claim show together."""
    first = audits[0]
    counts = ("inside", "outside", "missed", "alarms", "guesses", "correct")
    return replace(first, **{name: sum(getattr(each, name) for each in audits) for name in counts})


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
    confine(model, delta=0.1, seed=peers.seed, start="zeros")
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
        return encode_without_noise(self, values)


class _Forgetful(PrivacySettings):
    """The settings of such a member."""

    def step_encoding(self, members: int, dimension: int, records: int, ring_bits: int) -> NoisyEncoding:
        """Return the encoding of a step's gradients."""
        right = super().step_encoding(members, dimension, records, ring_bits)
        return _Quiet(**{each.name: getattr(right, each.name) for each in fields(right)})
