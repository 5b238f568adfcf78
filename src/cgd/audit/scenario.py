"""A training to attack: participants, their data and settings, and what the colluders do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from cgd.optim.displacement import SGDRule

if TYPE_CHECKING:
    from cgd.dp.settings import PrivacySettings
    from cgd.optim.displacement import UpdateRule

Sample = tuple[torch.Tensor, torch.Tensor]
Batches = Callable[[str, int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LocalSteps:
    """Steps that each participant takes alone in a round; the sum is then about updates, in place of gradients.

    Attributes:
        lr: their learning rate.
        momentum: their momentum, which begins at zero in every round.
    """

    lr: float
    momentum: float = 0.0

    def update_size(self, steps: int) -> float:
        """Return the size of an update, as a multiple of the gradient, if that were the same in all steps."""
        size = velocity = 0.0
        for _ in range(steps):
            velocity = self.momentum * velocity + 1
            size += self.lr * velocity
        return size


@dataclass(frozen=True)
class Scenario:
    """A training to attack.

    Attributes:
        data: samples and labels of all participants, by name.
        build_model: builds the network.
        coalition: the names of the colluders.
        loss: the loss of outputs and labels, a mean over samples.
        rounds: the number of steps.
        lr: the learning rate.
        delta: δ of the origins.
        seed: the seed of origins, batches and noise.
        bound: the bound of the fixed-point encoding.
        ring_bits: the ring size of the fixed-point encoding.
        clip: the clipping norm of each sample's gradient, in the schemes of `EPSILONS`.
        privacy: the settings of differential privacy, in "dp".
        draws: returns the batches of a participant in a round, given its name, the round and the number of its samples:
            one, or with `local` one for each local step; all samples if None. With differential privacy, a step uses
            all samples, and there is neither a batch nor a local step.
        batches: returns the samples that a participant uses in a round, given its name, the round and the indices of
            the drawn ones; these if None. Colluders may choose their own batches.
        probe: returns a vector that a colluder adds to its addend, or None, given its name, the round and what all
            models have in common; an active attack within the protocol. With differential privacy it adds as much of it
            as the others accept.
        dropouts: the participants that drop out, by the first round without them.
        returns: the participants that come back, by the first round with them again.
        rule: returns the rule by which the displacement moves in a round, with its learning rate; gradient descent with
            `lr` if None.
        origins: δ and the seed of the origin of each participant, by name; `delta` and seeds that follow from `seed` if
            None.
        weights: with differential privacy, the weight of each sample, by name: 1/k if k samples belong to one person,
            who is protected as a whole. Without it, every sample counts as one.
        start: the public start of all models, flat; zero if None.
        local: the steps that each participant takes alone in a round; one gradient if None.
        prepare: changes the features of a drawn batch, as a training on tables does; unchanged if None.
        fresh_origins: true if participants compute each gradient at another origin; in confined schemes only.
        clamp: true if participants clip every number of their gradient to the bound, as in a training on tables.
    """

    data: Mapping[str, Sample]
    build_model: Callable[[], torch.nn.Module]
    coalition: Sequence[str]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = functional.cross_entropy
    rounds: int = 1
    lr: float = 0.1
    delta: float = 0.1
    seed: int = 0
    bound: float = 16.0
    ring_bits: int = 32
    clip: float = 1.0
    privacy: PrivacySettings | None = None
    draws: Callable[[str, int, int], Sequence[torch.Tensor]] | None = None
    batches: Batches | None = None
    probe: Callable[[str, int, torch.Tensor], torch.Tensor | None] | None = None
    dropouts: Mapping[int, Sequence[str]] = field(default_factory=dict)
    returns: Mapping[int, Sequence[str]] = field(default_factory=dict)
    rule: Callable[[int], UpdateRule] | None = None
    origins: Mapping[str, tuple[float, bytes]] | None = None
    weights: Mapping[str, torch.Tensor] | None = None
    start: torch.Tensor | None = None
    local: LocalSteps | None = None
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None
    clamp: bool = False
    fresh_origins: bool = False

    @property
    def private_ring_bits(self) -> int:
        """The ring size of sums with differential privacy, which have at least 32 bits."""
        return max(32, self.ring_bits)

    @property
    def changes(self) -> set[int]:
        """The rounds whose members are not those of the round before."""
        return {*self.dropouts, *self.returns}

    def members_of(self, number: int) -> tuple[str, ...]:
        """Return the members of a round."""
        missing: set[str] = set()
        for each in range(number + 1):
            missing |= set(self.dropouts.get(each, ()))
            missing -= set(self.returns.get(each, ()))
        return tuple(name for name in self.data if name not in missing)

    @property
    def quorum(self) -> int | None:
        """The least number of members of a round, if members come back; None if those that drop out stay away."""
        return min(len(self.members_of(each)) for each in range(self.rounds)) if self.returns else None

    def rule_of(self, number: int) -> UpdateRule:
        """Return the rule of a round."""
        return SGDRule(self.lr) if self.rule is None else self.rule(number)

    def origin_of(self, place: int) -> tuple[float, bytes]:
        """Return δ and the seed of the origin of the participant at a place."""
        if self.origins is None:
            return self.delta, (self.seed * 100_003 + place).to_bytes(32, "little")
        return self.origins[list(self.data)[place]]
