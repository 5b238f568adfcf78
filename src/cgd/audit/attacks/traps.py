"""Records by steering: a participant that enters vectors of its own sets traps in everybody's first layer.

All models move by the same opened sum, so whoever adds a vector to its gradient moves them all, whatever their origins
are. A colluder moves the first layer until each of its ReLU units has a direction of its own and a threshold that about
one in all honest records exceeds. Such a unit is then activated by a single record or by none, and its gradient is that
record (`analytic.py`). With other directions it begins anew.

It keeps to the protocol: every number that it enters is within the bound of the sum, weighted by its part of all
samples, as a gradient would be. Nobody can see an addend, so nobody can see who did it. What shows is that the sums
are large.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from cgd.audit.attacks.records import analytic_recovery
from cgd.audit.embedded import digit_scenario, samples
from cgd.audit.schemes import observe
from cgd.audit.view import Truth

if TYPE_CHECKING:
    from cgd.audit.schemes import Scenario
    from cgd.audit.view import Finding, Scheme, View

# How much larger than origins a trap's weights are made, so that these do not matter.
STRENGTH = 5.0
# A trap is set when no weight is further from where it should be.
SET_WITHIN = 0.25


@dataclass
class Trapper:
    """What a colluder adds to its addends, round by round.

    Attributes:
        own: its records: they tell what is usual.
        honest: how many records the others have.
        units: of the first layer.
        lr: the step size.
        limit: the largest magnitude that it may enter.
        sprung: the rounds in which traps were set, which it then reads.
    """

    own: torch.Tensor
    honest: int
    units: int
    lr: float
    limit: float
    sprung: list[int] = field(default_factory=list)

    def __call__(self, number: int, displacement: torch.Tensor) -> torch.Tensor:
        """What it adds in a round, at a displacement that everybody knows."""
        wanted = self._traps(len(self.sprung))
        off = displacement[: len(wanted)] - wanted
        if off.abs().max() < SET_WITHIN:
            self.sprung.append(number)
            off = displacement[: len(wanted)] - self._traps(len(self.sprung))
        added = torch.zeros_like(displacement)
        added[: len(wanted)] = (off / self.lr).clamp(-self.limit, self.limit)
        return added

    def _traps(self, phase: int) -> torch.Tensor:
        """Weights and biases of a first layer in which each unit waits for one record in all, flat."""
        random = torch.Generator().manual_seed(phase)
        directions = torch.randn(self.units, self.own.shape[1], generator=random)
        directions = directions / directions.norm(dim=1, keepdim=True)
        seen = self.own @ directions.T
        rare = NormalDist().inv_cdf(1 - 1 / self.honest)
        thresholds = seen.mean(0) + rare * seen.std(0)
        return STRENGTH * torch.cat([directions.reshape(-1), -thresholds])


def spring(view: View, truth: Truth, rounds: list[int], setting: str = "") -> Finding:
    """Read the traps, in the rounds in which they were set, and count how many of the real records came out."""
    found = analytic_recovery(view.only(rounds), truth, setting)
    return replace(found, attack="records by steering the first layer")


# The settings it is shown in.


def steered(records: int, phases: int, *, seed: int = 0) -> tuple[Scenario, Trapper]:
    """Two honest participants with so many digits each, and a curious one that sets traps so many times."""
    colony = digit_scenario(records, rounds=5 * phases, lr=0.5, seed=seed)
    name = colony.coalition[0]
    own = colony.data[name][0]
    share = len(own) / sum(len(y) for _, y in colony.data.values())
    units = next(colony.build_model().parameters()).shape[0]
    trapper = Trapper(own, 2 * records, units, colony.lr, share * colony.bound)
    return replace(colony, probe=lambda _, number, displacement: trapper(number, displacement)), trapper


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Many more records than inputs."""
    findings = []
    for records, phases in ((100, 4), (400, 6)):
        colony, trapper = steered(records, phases, seed=seed)
        view, truth = observe(colony, scheme)
        setting = f"2 × {records} records, {colony.rounds} rounds, {len(trapper.sprung[:phases])} sets of traps"
        findings.append(spring(view, truth, trapper.sprung[:phases], setting))
    return findings


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """People who took no part."""
    colony, trapper = steered(100, 2, seed=seed)
    view, _ = observe(colony, scheme)
    x, y = samples("digits", seed)
    strangers = Truth({"strangers": x[-200:]}, {"strangers": y[-200:]}, {})
    return [spring(view, strangers, trapper.sprung[:2], "2 × 100 records, 2 sets of traps, scored on 200 strangers")]
