"""Recover records with trap weights: an active colluder sets the first layer so that units see single records.

All models move by the same opened sum, so a colluder that adds a vector to its gradient moves all of them, whatever
their origins are. It moves the first layer until each ReLU unit has its own direction and a threshold that about one of
all honest records exceeds. A single record, or none, then activates such a unit, and its gradient is that record
(`records.py`). Then the colluder starts again with other directions.

It follows the protocol: every number that it enters is within the bound of the sum, weighted by its part of all
samples, like a gradient. Addends are secret, so nobody can see which participant did it. The sums are visibly large.

With differential privacy, honest members refuse a total with a larger norm than they produce together. So the colluder
moves as many units as it can in half of the rounds. Then it keeps the traps, to average the noise of the other half.

In any training (`on_scenario`), the traps are as large as the colluder can set them in a quarter of the rounds, up to
the size in the demonstrations: with Adam, a weight moves by its learning rate in a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from cgd.audit.attacks.records import analytic_recovery, check_relu_layer
from cgd.audit.embedded import digit_scenario, samples
from cgd.audit.schemes import max_probe, observe, step_noise
from cgd.audit.steering import Steering, speed
from cgd.audit.view import MAX_ROWS, Truth
from cgd.errors import InputError
from cgd.optim.displacement import AdamRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.audit.results import AttackResult
    from cgd.audit.scenario import Scenario
    from cgd.audit.view import Scheme, View

    ObserveTruth = Callable[[Scenario], tuple[View, Truth]]

# The size of trap weights, far above that of origins; and with differential privacy, where the distance is limited.
TRAP_WEIGHT, PRIVATE_TRAP_WEIGHT = 5.0, 2.0
# The traps are set when no weight is further from its target.
MAX_DISTANCE = 0.25
NOT_TRIED = (
    "This does not mean that you are safe: steering for longer was not tried here. In our measurements on public "
    "tables it read up to 8 records in 3,000 steps, in 7 of 9 trainings, from tanh, GELU and sigmoid units. That was "
    "with Adam at lr 0.01; sums that move a weight further in one step, as those of sgd or local epochs with lr 1, may "
    "need far fewer. Only noise ([privacy]) prevents it"
)
"""What is known where the attack does not apply; `results/suggested-models.json` has the figures."""


@dataclass
class TrapProbe:
    """The vectors that the colluder adds to its addends.

    Attributes:
        own: its records, which give the distribution of activations.
        honest: the number of the honest participants' records.
        units: the number of units of the first layer.
        steering: moves the displacement.
        reach: the distance by which it can move the first layer; it sets as many traps as that allows.
        max_traps: the number of traps that it sets at most.
        keep: true to keep the first traps, false to set others in the next round.
        weight: the size of trap weights.
        tolerance: the traps are set when no weight is further from its target.
        armed_rounds: the rounds in which traps were set, which the attack reads.
    """

    own: torch.Tensor
    honest: int
    units: int
    steering: Steering
    reach: float = math.inf
    max_traps: float = math.inf
    keep: bool = False
    weight: float = TRAP_WEIGHT
    tolerance: float = MAX_DISTANCE
    armed_rounds: list[int] = field(default_factory=list)

    def __call__(self, number: int, displacement: torch.Tensor) -> torch.Tensor:
        """Return the vector of a round, given the displacement."""
        distance = self._distance(displacement)
        if distance.abs().max() < self.tolerance:
            self.armed_rounds.append(number)
            distance = self._distance(displacement)
        added = torch.zeros_like(displacement)
        added[: len(distance)] = self.steering.vector(number, distance)
        return added

    def read(self, phases: int) -> list[int]:
        """Return the rounds to read: the first ones with traps, or all of them if these are the same."""
        return self.armed_rounds if self.keep else self.armed_rounds[:phases]

    def _distance(self, displacement: torch.Tensor) -> torch.Tensor:
        """Return the distance of the first layer from the traps, flat; zero for units that get none."""
        target = self.targets(0 if self.keep else len(self.armed_rounds))
        weight, bias = target[: -self.units].reshape(self.units, -1), target[-self.units :]
        further = (weight.square().sum(1) + bias.square()).cumsum(0).sqrt() > self.reach
        further |= torch.arange(self.units) >= self.max_traps
        further[0] = False
        unused = torch.cat([further[:, None].expand_as(weight).reshape(-1), further])
        return torch.where(unused, 0.0, displacement[: len(target)] - target)

    def targets(self, phase: int) -> torch.Tensor:
        """Return weights and biases of a first layer whose units are activated by about one of all records, flat."""
        random = torch.Generator().manual_seed(phase)
        directions = torch.randn(self.units, self.own.shape[1], generator=random)
        directions = directions / directions.norm(dim=1, keepdim=True)
        activations = self.own @ directions.T
        quantile = NormalDist().inv_cdf(1 - 1 / self.honest)
        thresholds = activations.mean(0) + quantile * activations.std(0)
        return self.weight * torch.cat([directions.reshape(-1), -thresholds])


def read_traps(view: View, truth: Truth, rounds: list[int], setting: str = "") -> AttackResult:
    """Measure the fraction of the real records that are recovered from the rounds in which traps were set.

    If the traps were never complete, the last round is read.
    """
    found = analytic_recovery(view.only(rounds or [len(view.rounds) - 1]), truth, setting)
    detail = f"{found.detail}; rounds with traps: {len(rounds)}"
    return replace(found, attack="records by steering the first layer", detail=detail)


def on_scenario(passive: Scenario, scheme: Scheme, observe_truth: ObserveTruth) -> list[AttackResult]:
    """Run the attack in any training: the first colluder steers it.

    Raises:
        InputError: the network does not begin with a linear layer with a bias, or has no ReLU units.
    """
    try:
        check_relu_layer(passive.build_model())
    except InputError as error:
        raise InputError(f"{error}. {NOT_TRIED}") from error
    _, probe = steer(passive, scheme)
    rule, limit = passive.rule_of(0), probe.steering.limit
    if isinstance(rule, AdamRule) and max_probe(passive, scheme) < math.inf:
        probe = _within_norm(passive, scheme, probe)
        limit = probe.steering.limit
    furthest = float(probe.targets(0).abs().max()) / probe.weight
    weight = min(probe.weight, speed(rule, limit) * passive.rounds / 4 / furthest)
    probe = replace(probe, weight=weight, tolerance=MAX_DISTANCE / TRAP_WEIGHT * weight, armed_rounds=[])
    view, truth = observe_truth(_with_probe(passive, probe))
    rounds = probe.armed_rounds if probe.keep else _spread(probe.armed_rounds, passive.rounds, MAX_ROWS // probe.units)
    found = read_traps(view, truth, rounds, f"{view.describe()}, steered")
    return [replace(found, detail=f"{found.detail}, {len(probe.armed_rounds)} of them complete")]


def _spread(armed: list[int], rounds: int, limit: int) -> list[int]:
    """Return the rounds to read: at most `limit`, from the time when the first traps are half set.

    On the way from one set of traps to the next, units are activated by few records, too, and in each round by others.
    """
    first = (armed[0] if armed else rounds) // 2
    step = max(1, -(-(rounds - first) // max(1, limit)))
    return list(range(first, rounds, step))


def _within_norm(passive: Scenario, scheme: Scheme, probe: TrapProbe) -> TrapProbe:
    """Return a probe for Adam with noise: as many traps as can be moved by numbers above the noise."""
    norm, features = max_probe(passive, scheme), probe.own.shape[1] + 1
    noise = step_noise(passive, scheme)
    traps = max(1, min(probe.units, int((norm / noise) ** 2 / features)))
    limit = min(probe.steering.limit, norm / math.sqrt(traps * features))
    return replace(probe, reach=math.inf, max_traps=traps, steering=Steering(passive.rule_of, limit))


# Demonstrations.


def scenario(records: int, phases: int, *, scheme: Scheme = "cgd", seed: int = 0) -> tuple[Scenario, TrapProbe]:
    """Return two honest participants with `records` digits each, and a colluder that sets traps.

    Args:
        records: the number of records of each honest participant.
        phases: how many times it can set traps, if there is no noise.
        scheme: the scheme under which the scenario will be run.
        seed: the seed of everything.
    """
    return steer(digit_scenario(records, rounds=5 * phases, lr=0.5, seed=seed), scheme)


def steer(passive: Scenario, scheme: Scheme) -> tuple[Scenario, TrapProbe]:
    """Return a scenario in which the first colluder sets traps, and its probe."""
    name = passive.coalition[0]
    own = passive.data[name][0]
    share = len(own) / sum(len(y) for _, y in passive.data.values())
    units = next(passive.build_model().parameters()).shape[0]
    honest = sum(len(y) for each, (_, y) in passive.data.items() if each not in passive.coalition)
    reach = passive.lr * max_probe(passive, scheme) * passive.rounds / 2
    probe = TrapProbe(own, honest, units, Steering(passive.rule_of, share * passive.bound), reach)
    if reach < math.inf:
        probe = replace(probe, keep=True, weight=PRIVATE_TRAP_WEIGHT)
    return _with_probe(passive, probe), probe


def _with_probe(passive: Scenario, probe: TrapProbe) -> Scenario:
    """Return a scenario in which the first colluder adds the vectors of a probe."""
    name = passive.coalition[0]

    def add(who: str, number: int, displacement: torch.Tensor) -> torch.Tensor | None:
        return probe(number, displacement) if who == name else None

    return replace(passive, probe=add)


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with many more records than inputs."""
    results = []
    for records, phases in ((100, 4), (400, 6)):
        steered, probe = scenario(records, phases, scheme=scheme, seed=seed)
        view, truth = observe(steered, scheme)
        setting = f"2 × {records} records, {steered.rounds} rounds"
        results.append(read_traps(view, truth, probe.read(phases), setting))
    return results


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the result on records that nobody trained on."""
    steered, probe = scenario(100, 2, scheme=scheme, seed=seed)
    view, _ = observe(steered, scheme)
    x, y = samples("digits", seed)
    strangers = Truth({"strangers": x[-200:]}, {"strangers": y[-200:]}, {})
    setting = "2 × 100 records, scored on 200 strangers"
    return [read_traps(view, strangers, probe.read(2), setting)]
