"""Simulate a training under each scheme, and return the view of a coalition.

The gradients are computed participant by participant, and summed in the ring of the real protocol. Every opened value
is kept, so this is for small scenarios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from cgd.audit.view import Colluder, Round, Truth, View, flat, unflat
from cgd.errors import InputError
from cgd.optim.origin import Origin
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint

if TYPE_CHECKING:
    from cgd.audit.view import Scheme

Sample = tuple[torch.Tensor, torch.Tensor]
Batches = Callable[[str, int, torch.Tensor], torch.Tensor]


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
        noise: the noise multiplier, in "dp".
        clip: the clipping norm of each sample's gradient, in "dp".
        batches: returns the samples that a participant uses in a round, given its name, the round and the indices of
            all its samples; all samples if None. Colluders may choose their own batches.
        probe: returns a vector that a colluder adds to its addend, or None, given its name, the round and the
            displacement; an active attack within the protocol.
        dropouts: the participants that drop out, by the first round without them.
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
    noise: float = 1.0
    clip: float = 1.0
    batches: Batches | None = None
    probe: Callable[[str, int, torch.Tensor], torch.Tensor | None] | None = None
    dropouts: Mapping[int, Sequence[str]] = field(default_factory=dict)


def observe(scenario: Scenario, scheme: Scheme) -> tuple[View, Truth]:
    """Run a scenario under a scheme, and return the view of its coalition and the secrets of the others.

    Raises:
        InputError: nobody is honest, or a colluder is not a participant.
    """
    unknown = [name for name in scenario.coalition if name not in scenario.data]
    if unknown or len(set(scenario.data) - set(scenario.coalition)) < 1:
        raise InputError(f"the coalition is {', '.join(scenario.coalition)}; choose some of {', '.join(scenario.data)}")
    return _Run(scenario, scheme).run()


class _Run:
    def __init__(self, scenario: Scenario, scheme: Scheme) -> None:
        self.scenario, self.scheme = scenario, scheme
        self.model = scenario.build_model()
        self.samples = sum(len(y) for _, y in scenario.data.values())
        shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        self.dtype = next(self.model.parameters()).dtype
        self.origins = {}
        for place, name in enumerate(scenario.data):
            number = place if scheme == "cgd" else 0  # in FedSGD all participants start from the same model
            seed = (scenario.seed * 100_003 + number).to_bytes(32, "little")
            self.origins[name] = flat(dict(Origin(scenario.delta, shapes, seed).draw())).to(self.dtype)
        self.random = torch.Generator().manual_seed(scenario.seed)

    def run(self) -> tuple[View, Truth]:
        scenario = self.scenario
        displacement = torch.zeros_like(next(iter(self.origins.values())))
        rounds: list[Round] = []
        addends: dict[str, list[torch.Tensor]] = {name: [] for name in scenario.data}
        missing: set[str] = set()
        for number in range(scenario.rounds):
            missing |= set(scenario.dropouts.get(number, ()))
            members = tuple(name for name in scenario.data if name not in missing)
            own = {name: self._addend(name, number, displacement, members) for name in members}
            for name in scenario.data:
                addends[name].append(own.get(name, torch.zeros_like(displacement)))
            total = self._sum(list(own.values()))
            shared = self.scheme != "cgd"
            rounds.append(
                Round(
                    members,
                    displacement.clone(),
                    total,
                    weights=self.origins[members[0]] + displacement if shared else None,
                    gradients={name: each.clone() for name, each in own.items()} if self.scheme == "plain" else {},
                    samples=sum(len(scenario.data[name][1]) for name in members),
                )
            )
            displacement = displacement - scenario.lr * total
        coalition = {
            name: Colluder(*scenario.data[name], tuple(addends[name]), self.origins[name])
            for name in scenario.coalition
        }
        view = View(
            self.scheme,
            scenario.build_model,
            scenario.loss,
            self.samples,
            scenario.lr,
            scenario.delta,
            coalition,
            tuple(rounds),
            noise=self._noise(),
            clip=scenario.clip if self.scheme == "dp" else math.inf,
        )
        honest = [name for name in scenario.data if name not in scenario.coalition]
        return view, Truth(
            {name: scenario.data[name][0] for name in honest},
            {name: scenario.data[name][1] for name in honest},
            {name: self.origins[name] + displacement for name in honest},
        )

    def _addend(self, name: str, number: int, displacement: torch.Tensor, members: Sequence[str]) -> torch.Tensor:
        scenario = self.scenario
        x, y = scenario.data[name]
        if scenario.batches is not None:
            chosen = scenario.batches(name, number, torch.arange(len(y)))
            x, y = x[chosen], y[chosen]
        weights = unflat(self.origins[name] + displacement, self.model)
        present = sum(len(scenario.data[each][1]) for each in members)
        share = len(scenario.data[name][1]) / present
        private = self.scheme == "dp"
        addend = share * (self._private(weights, x, y, present) if private else self._gradient(weights, x, y))
        if scenario.probe is None or name not in scenario.coalition:
            return addend
        added = scenario.probe(name, number, displacement)
        return addend if added is None else addend + added

    def _gradient(self, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def value(given: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.scenario.loss(functional_call(self.model, given, (x,)), y)

        return flat(grad(value)(weights))

    def _private(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, present: int
    ) -> torch.Tensor:
        """Return the mean of clipped gradients with a participant's part of the noise (Gaussian mechanism)."""

        def value(given: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return self.scenario.loss(functional_call(self.model, given, (sample[None],)), label[None])

        gradients = vmap(grad(value), in_dims=(None, 0, 0))(weights, x, y)
        each = torch.cat([part.reshape(len(y), -1) for part in gradients.values()], dim=1)
        total = (each * (self.scenario.clip / (each.norm(dim=1) + 1e-12)).clamp(max=1.0)[:, None]).sum(0)
        spread = self.scenario.noise * self.scenario.clip * (len(y) / present) ** 0.5
        noise = torch.randn(total.shape, generator=self.random, dtype=total.dtype)
        private: torch.Tensor = (total + spread * noise) / len(y)
        return private

    def _sum(self, addends: list[torch.Tensor]) -> torch.Tensor:
        """Add floats in plain FedSGD; otherwise add in the ring, with its rounding."""
        if self.scheme == "plain":
            return torch.stack(addends).sum(0)
        fixed_point = self._fixed_point(len(addends))
        words = np.zeros(addends[0].numel(), dtype=WORD_TYPES[fixed_point.ring_bits])
        for each in addends:
            words += fixed_point.encode(each.numpy())
        return torch.from_numpy(fixed_point.decode(words, addends[0].numpy().dtype))

    def _fixed_point(self, addends: int) -> FixedPoint:
        return FixedPoint.for_weighted_sum(
            addends=addends, bound=self.scenario.bound, ring_bits=self.scenario.ring_bits
        )

    def _noise(self) -> float:
        """Return the standard deviation of the error in `View.honest_sum`.

        The rounding error of every addend is uniform, up to half a step of the ring. In "dp", n times a participant's
        addend has a variance of (noise·clip)²·n_l/n. The coalition subtracts its own addends with their noise, so the
        noise of the honest participants' samples remains.
        """
        if self.scheme == "plain":
            return 0.0
        members = len(self.scenario.data)
        rounding = self._fixed_point(members).resolution * math.sqrt(members / 12)
        if self.scheme != "dp":
            return rounding
        honest = sum(len(y) for name, (_, y) in self.scenario.data.items() if name not in self.scenario.coalition)
        added = self.scenario.noise * self.scenario.clip * math.sqrt(honest / self.samples) / self.samples
        return math.hypot(rounding, added)
