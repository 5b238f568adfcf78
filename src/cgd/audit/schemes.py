"""Views from simulations: the same data and model under each scheme, as a coalition would see them.

The gradients are computed one participant after the other, as each would by itself, and summed in the ring of the real
protocol. Small colonies only: this keeps everything that is ever seen.
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
    """Participants to be attacked.

    Attributes:
        data: everybody's samples and labels, by name.
        build_model: makes the network.
        coalition: who colludes.
        loss: of outputs and labels, a mean over samples.
        rounds: how many steps.
        lr: the step size.
        delta: δ of the origins.
        seed: decides origins, batches and noise.
        bound: of the fixed point.
        ring_bits: of the fixed point.
        noise: in "dp", the noise multiplier; the clipping norm is `clip`.
        clip: in "dp", the norm to which every sample's gradient is cut.
        batches: which of its samples a participant uses in a round: given its name, the round and all its indices;
            everything if not given. A coalition may choose its own to its liking.
        probe: what a colluder adds to its addend, flat, given its name, the round and the displacement, which everybody
            knows; an active attack that stays within the protocol.
        dropouts: participants that are missing from a round on, by the number of that round.
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


def observe(colony: Scenario, scheme: Scheme) -> tuple[View, Truth]:
    """Run a colony under a scheme: what its coalition sees, and what it should not.

    Raises:
        InputError: nobody is honest, or somebody colludes who is not there.
    """
    strangers = [name for name in colony.coalition if name not in colony.data]
    if strangers or len(set(colony.data) - set(colony.coalition)) < 1:
        raise InputError(f"the coalition is {', '.join(colony.coalition)}; choose some of {', '.join(colony.data)}")
    return _Run(colony, scheme).run()


class _Run:
    def __init__(self, colony: Scenario, scheme: Scheme) -> None:
        self.colony, self.scheme = colony, scheme
        self.model = colony.build_model()
        self.samples = sum(len(y) for _, y in colony.data.values())
        shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        self.dtype = next(self.model.parameters()).dtype
        self.origins = {}
        for place, name in enumerate(colony.data):
            who = 0 if scheme != "cgd" else place  # in FedSGD all begin with the same model
            seed = (colony.seed * 100_003 + who).to_bytes(32, "little")
            self.origins[name] = flat(dict(Origin(colony.delta, shapes, seed).draw())).to(self.dtype)
        self.random = torch.Generator().manual_seed(colony.seed)

    def run(self) -> tuple[View, Truth]:
        colony = self.colony
        displacement = torch.zeros_like(next(iter(self.origins.values())))
        rounds: list[Round] = []
        addends: dict[str, list[torch.Tensor]] = {name: [] for name in colony.data}
        missing: set[str] = set()
        for number in range(colony.rounds):
            missing |= set(colony.dropouts.get(number, ()))
            members = tuple(name for name in colony.data if name not in missing)
            own = {name: self._addend(name, number, displacement, members) for name in members}
            for name in colony.data:
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
                    samples=sum(len(colony.data[name][1]) for name in members),
                )
            )
            displacement = displacement - colony.lr * total
        coalition = {
            name: Colluder(*colony.data[name], tuple(addends[name]), self.origins[name]) for name in colony.coalition
        }
        view = View(
            self.scheme,
            colony.build_model,
            colony.loss,
            self.samples,
            colony.lr,
            colony.delta,
            coalition,
            tuple(rounds),
            noise=self._noise(),
            clip=colony.clip if self.scheme == "dp" else math.inf,
        )
        honest = [name for name in colony.data if name not in colony.coalition]
        return view, Truth(
            {name: colony.data[name][0] for name in honest},
            {name: colony.data[name][1] for name in honest},
            {name: self.origins[name] + displacement for name in honest},
        )

    def _addend(self, name: str, number: int, displacement: torch.Tensor, members: Sequence[str]) -> torch.Tensor:
        colony = self.colony
        x, y = colony.data[name]
        if colony.batches is not None:
            chosen = colony.batches(name, number, torch.arange(len(y)))
            x, y = x[chosen], y[chosen]
        weights = unflat(self.origins[name] + displacement, self.model)
        present = sum(len(colony.data[each][1]) for each in members)
        share = len(colony.data[name][1]) / present
        private = self.scheme == "dp"
        addend = share * (self._private(weights, x, y, present) if private else self._gradient(weights, x, y))
        if colony.probe is None or name not in colony.coalition:
            return addend
        added = colony.probe(name, number, displacement)
        return addend if added is None else addend + added

    def _gradient(self, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def value(given: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.colony.loss(functional_call(self.model, given, (x,)), y)

        return flat(grad(value)(weights))

    def _private(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, present: int
    ) -> torch.Tensor:
        """The mean of clipped gradients, with a participant's part of the noise (Gaussian mechanism)."""

        def value(given: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return self.colony.loss(functional_call(self.model, given, (sample[None],)), label[None])

        gradients = vmap(grad(value), in_dims=(None, 0, 0))(weights, x, y)
        each = torch.cat([part.reshape(len(y), -1) for part in gradients.values()], dim=1)
        total = (each * (self.colony.clip / (each.norm(dim=1) + 1e-12)).clamp(max=1.0)[:, None]).sum(0)
        spread = self.colony.noise * self.colony.clip * (len(y) / present) ** 0.5
        noise = torch.randn(total.shape, generator=self.random, dtype=total.dtype)
        private: torch.Tensor = (total + spread * noise) / len(y)
        return private

    def _sum(self, addends: list[torch.Tensor]) -> torch.Tensor:
        """In the open plain floats are added; otherwise the total has the rounding of the ring."""
        if self.scheme == "plain":
            return torch.stack(addends).sum(0)
        fixed_point = self._fixed_point(len(addends))
        words = np.zeros(addends[0].numel(), dtype=WORD_TYPES[fixed_point.ring_bits])
        for each in addends:
            words += fixed_point.encode(each.numpy())
        return torch.from_numpy(fixed_point.decode(words, addends[0].numpy().dtype))

    def _fixed_point(self, addends: int) -> FixedPoint:
        return FixedPoint.for_weighted_sum(addends=addends, bound=self.colony.bound, ring_bits=self.colony.ring_bits)

    def _noise(self) -> float:
        """Every addend is off by up to half a step of the ring, uniformly; a float sum by a few parts of its own.

        In "dp", n times a participant's addend has a variance of (noise·clip)²·n_l/n. The coalition takes its own part
        away with its addends, so what is left of the sum has that of the honest participants' samples.
        """
        if self.scheme == "plain":
            return 0.0
        members = len(self.colony.data)
        rounding = self._fixed_point(members).resolution * math.sqrt(members / 12)
        if self.scheme != "dp":
            return rounding
        honest = sum(len(y) for name, (_, y) in self.colony.data.items() if name not in self.colony.coalition)
        added = self.colony.noise * self.colony.clip * math.sqrt(honest / self.samples) / self.samples
        return math.hypot(rounding, added)
