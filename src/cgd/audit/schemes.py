"""Simulate a training under each scheme, and return the view of a coalition.

The gradients are computed participant by participant, and summed in the ring of the real protocol. Every opened value
is kept, so this is for small scenarios.

With differential privacy, the noise is calibrated for t = the size of the coalition, so that exactly the promised noise
remains when the coalition has subtracted its own.
"""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.func import functional_call, grad
from torch.nn.utils import vector_to_parameters

from cgd.aes import keystream
from cgd.audit.private_sums import PrivateSums, honest_noise, max_steering, remaining_mu
from cgd.audit.view import EPSILONS, Colluder, Round, Truth, View, flat, is_confined, unflat
from cgd.dp.settings import COUNT_SHARE, PrivacySettings
from cgd.errors import InputError
from cgd.optim.origin import Origin
from cgd.optim.record_gradients import RecordGradients
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint
from cgd.sum_encoding import rounding_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from cgd.audit.scenario import Sample, Scenario
    from cgd.audit.view import Scheme
    from cgd.dp.mechanism import NoisyEncoding

DELTA = 1e-5
"""δ of the schemes with differential privacy."""


def observe(scenario: Scenario, scheme: Scheme) -> tuple[View, Truth]:
    """Run a scenario under a scheme, and return the view of its coalition and the secrets of the others.

    Raises:
        InputError: nobody is honest, or a colluder is not a participant.
    """
    unknown = [name for name in scenario.coalition if name not in scenario.data]
    if unknown or len(set(scenario.data) - set(scenario.coalition)) < 1:
        raise InputError(f"the coalition is {', '.join(scenario.coalition)}; choose some of {', '.join(scenario.data)}")
    return _Run(scenario, scheme).run()


def describe_sums(batches: int, *, local: bool, noise: bool = True) -> str:
    """Return what a round without differential privacy sums, in a sentence.

    Args:
        batches: the number of batches of an epoch.
        local: there are local steps.
        noise: rounds with differential privacy are audited, too.
    """
    if local:
        summed = "updates of local steps, which the attackers divide by their size"
    else:
        summed = f"gradients of one of {batches} batches of each participant's records"
    if not noise:
        return f" A round sums {summed}."
    return f" Without noise, a round sums {summed}; with noise, gradients of all records."


def privacy_of(scenario: Scenario, scheme: Scheme) -> PrivacySettings | None:
    """Return the settings of differential privacy under a scheme; None without noise.

    Raises:
        InputError: the scheme is "dp", and the scenario has no settings.
    """
    if scheme == "dp":
        if scenario.privacy is None:
            raise InputError('the scheme is "dp", and the scenario has no settings of privacy; give it some')
        return scenario.privacy
    if scheme not in EPSILONS:
        return None
    return PrivacySettings(
        EPSILONS[scheme],
        DELTA,
        scenario.rounds,
        scenario.clip,
        len(scenario.coalition),
        reruns=_reruns(scenario),
        quorum=scenario.quorum,
    )


def _reruns(scenario: Scenario) -> int:
    """Return a number of reruns whose budget pays for a new count after each change of members."""
    changes = len(scenario.changes)
    share = changes * COUNT_SHARE / (1 - COUNT_SHARE)
    return max(changes, math.ceil(share * scenario.rounds / (1 - share)))


def max_probe(scenario: Scenario, scheme: Scheme) -> float:
    """Return the norm of a vector that colluders can add to a sum with noise; infinite without noise.

    Without noise, only the bound of each number limits it.
    """
    settings = privacy_of(scenario, scheme)
    if settings is None:
        return math.inf
    return max_steering(_step_encoding(scenario, settings), len(scenario.data) - len(scenario.coalition))


def step_noise(scenario: Scenario, scheme: Scheme) -> float:
    """Return the standard deviation of the noise of the honest members in a step; zero without noise."""
    settings = privacy_of(scenario, scheme)
    if settings is None:
        return 0.0
    return honest_noise(_step_encoding(scenario, settings), len(scenario.data) - len(scenario.coalition))


def _step_encoding(scenario: Scenario, settings: PrivacySettings) -> NoisyEncoding:
    members, records = len(scenario.data), sum(len(y) for _, y in scenario.data.values())
    dimension = sum(each.numel() for each in scenario.build_model().parameters())
    return settings.step_encoding(members, dimension, records, scenario.private_ring_bits)


class _Run:
    def __init__(self, scenario: Scenario, scheme: Scheme) -> None:
        self.scenario, self.scheme = scenario, scheme
        self.model = scenario.build_model()
        shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        self.dtype = next(self.model.parameters()).dtype
        drawn = {}
        self.fresh: dict[str, Origin] = {}
        for place, name in enumerate(scenario.data):
            number = place if is_confined(scheme) else 0  # in FedSGD all participants start from the same model
            delta, seed = scenario.origin_of(number)
            origin = Origin(delta, shapes, seed)
            drawn[name] = flat(dict(origin.draw()))
            if scenario.fresh_origins and is_confined(scheme):
                self.fresh[name] = origin
        size = next(iter(drawn.values())).numel()
        self.start = torch.zeros(size, dtype=self.dtype) if scenario.start is None else scenario.start.to(self.dtype)
        self.origins = {name: each.to(self.dtype) for name, each in drawn.items()}
        # Models before the first step, rounded once, as those of real participants.
        self.initial = {name: (self.start + each).to(self.dtype) for name, each in drawn.items()}
        self.settings = privacy_of(scenario, scheme)
        if self.settings is not None:
            self.private_sums = PrivateSums(self.settings, scenario.seed, scenario.private_ring_bits)
            self.clipping = RecordGradients(self.model, self.settings.clip)
        self._roundings = count()
        self.local = scenario.local if self.settings is None else None
        # The coalition divides updates by this, to get numbers of the size of gradients.
        self.update_size = 1.0
        if self.local is not None:
            self.update_size = self.local.update_size(len(self._draws(next(iter(scenario.data)), 0)))

    def run(self) -> tuple[View, Truth]:
        scenario = self.scenario
        displacement = torch.zeros_like(self.start)
        rounds: list[Round] = []
        addends: dict[str, list[torch.Tensor]] = {name: [] for name in scenario.data}
        samples = 0
        state: dict[str, Any] = {}
        for number in range(scenario.rounds):
            members = scenario.members_of(number)
            if number == 0 or number in scenario.changes:
                samples = self._count(members)
            own, total = self._sum(number, displacement, members, samples)
            gradients = {name: each / self.update_size for name, each in own.items()}
            for name in scenario.data:
                addends[name].append(gradients.get(name, torch.zeros_like(displacement)))
            honest = sum(len(scenario.data[name][1]) for name in members if name not in scenario.coalition)
            rounds.append(
                Round(
                    members,
                    self.start + displacement,
                    total / self.update_size,
                    weights=None if is_confined(self.scheme) else self.initial[members[0]] + displacement,
                    gradients=gradients if self.scheme == "plain" else {},
                    samples=samples,
                    honest_samples=None if self.settings is None else honest,
                )
            )
            displacement = displacement.clone()
            scenario.rule_of(number).move(displacement, total, state)
        coalition = {
            name: Colluder(*scenario.data[name], tuple(addends[name]), self.origins[name])
            for name in scenario.coalition
        }
        first = rounds[0]
        view = View(
            self.scheme,
            scenario.build_model,
            scenario.loss,
            samples if first.samples is None else first.samples,
            scenario.lr,
            scenario.delta,
            coalition,
            tuple(rounds),
            noise=self._noise(first) / self.update_size,
            final=None if scenario.rule is None and self.local is None else self.start + displacement,
            clip=math.inf if self.settings is None else self.settings.clip,
            mu=math.inf if self.settings is None else self._mu(self.settings, first),
        )
        honest_names = [name for name in scenario.data if name not in scenario.coalition]
        return view, Truth(
            {name: scenario.data[name][0] for name in honest_names},
            {name: scenario.data[name][1] for name in honest_names},
            {name: self.initial[name] + displacement for name in honest_names},
        )

    def _count(self, members: Sequence[str]) -> int:
        samples = {name: len(self.scenario.data[name][1]) for name in members}
        if self.settings is None:
            return sum(samples.values())
        if self.scenario.weights is not None:
            samples = {name: max(1, round(float(self.scenario.weights[name].sum()))) for name in members}
        return self.private_sums.count(samples)

    def _sum(
        self, number: int, displacement: torch.Tensor, members: Sequence[str], samples: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the addends of a round, and the opened sum."""
        probes = {name: self._probe(name, number, displacement) for name in members}
        added = {name: each for name, each in probes.items() if each is not None}
        if self.settings is not None:
            sums = {name: self._clipped_sum(name, number, displacement) for name in members}
            steering = {name: each.double().numpy() for name, each in added.items()}
            own, total = self.private_sums.step(sums, samples, steering)
            return {name: self._tensor(each) for name, each in own.items()}, self._tensor(total)
        addends = {}
        for name in members:
            share = len(self.scenario.data[name][1]) / samples
            addends[name] = share * self._gradient(name, number, displacement)
            if name in added:
                addends[name] = addends[name] + added[name]
        return addends, self._add(list(addends.values()))

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.dtype)

    def _probe(self, name: str, number: int, displacement: torch.Tensor) -> torch.Tensor | None:
        scenario = self.scenario
        if scenario.probe is None or name not in scenario.coalition:
            return None
        return scenario.probe(name, number, self.start + displacement)

    def _batch(self, name: str, number: int) -> Sample:
        x, y = self.scenario.data[name]
        chosen, prepare = self._chosen(name, number), self.scenario.prepare
        return x[chosen] if prepare is None or self.settings is not None else prepare(x[chosen]), y[chosen]

    def _chosen(self, name: str, number: int) -> torch.Tensor:
        drawn, batches = self._draws(name, number)[0], self.scenario.batches
        return drawn if batches is None else batches(name, number, drawn)

    def _draws(self, name: str, number: int) -> Sequence[torch.Tensor]:
        count, draws = len(self.scenario.data[name][1]), self.scenario.draws
        return [torch.arange(count)] if draws is None or self.settings is not None else draws(name, number, count)

    def _weights(self, name: str, number: int, displacement: torch.Tensor) -> torch.Tensor:
        """Return the weights at which a participant computes the gradient of a round."""
        if name not in self.fresh:
            return self.initial[name] + displacement
        drawn = flat(dict(self.fresh[name].of_step(number).draw()))
        return (self.start + drawn).to(self.dtype) + displacement

    def _gradient(self, name: str, number: int, displacement: torch.Tensor) -> torch.Tensor:
        """Return the mean gradient of a participant's samples, or its update by local steps."""
        weights = self._weights(name, number, displacement)

        def gradient_at(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            def value(given: dict[str, torch.Tensor]) -> torch.Tensor:
                return self.scenario.loss(functional_call(self.model, given, (x,)), y)

            return flat(grad(value)(unflat(weights, self.model)))

        if self.local is None:
            gradient = gradient_at(weights, *self._batch(name, number))
        else:
            x, y = self.scenario.data[name]
            after = weights.clone()
            optimizer = torch.optim.SGD([after], self.local.lr, self.local.momentum)
            for batch in self._draws(name, number):
                after.grad = gradient_at(after, x[batch], y[batch])
                optimizer.step()
            gradient = weights - after
        return gradient.clamp(-self.scenario.bound, self.scenario.bound) if self.scenario.clamp else gradient

    def _clipped_sum(self, name: str, number: int, displacement: torch.Tensor) -> npt.NDArray[Any]:
        """Return the sum of the clipped gradients of a participant's samples, as `cgd.Privacy` computes it.

        If a colluder uses some of its samples only, they count as if they were all of them, which nobody can see.
        """
        x, y = self._batch(name, number)
        vector_to_parameters(self._weights(name, number, displacement), self.model.parameters())
        self.model.zero_grad()
        if self.scenario.weights is not None:
            chosen = self._chosen(name, number)
            self.clipping.weigh_records(self.scenario.weights[name][chosen])
        self.scenario.loss(self.model(x), y).backward()
        repeated = len(self.scenario.data[name][1]) / len(y) if name in self.scenario.coalition else 1.0
        return repeated * self.clipping.take().gradient.numpy()

    def _add(self, addends: list[torch.Tensor]) -> torch.Tensor:
        """Add floats in plain FedSGD; otherwise add in the ring, with its rounding."""
        if self.scheme == "plain":
            return torch.stack(addends).sum(0)
        fixed_point = self._fixed_point(len(addends))
        words = np.zeros(addends[0].numel(), dtype=WORD_TYPES[fixed_point.ring_bits])
        for each in addends:
            rounding = None
            if fixed_point.ring_bits == 16:
                seed = f"{self.scenario.seed} {next(self._roundings)}".encode()
                rounding = keystream(rounding_key(seed, each.numpy(), None), 0)
            words += fixed_point.encode(each.numpy(), rounding=rounding)
        return torch.from_numpy(fixed_point.decode(words, addends[0].numpy().dtype))

    def _fixed_point(self, addends: int) -> FixedPoint:
        return FixedPoint.for_weighted_sum(
            addends=addends, bound=self.scenario.bound, ring_bits=self.scenario.ring_bits
        )

    def _honest(self, first: Round) -> int:
        return sum(name not in self.scenario.coalition for name in first.members)

    def _mu(self, settings: PrivacySettings, first: Round) -> float:
        return remaining_mu(settings, len(first.members), self._honest(first))

    def _noise(self, first: Round) -> float:
        """Return the standard deviation of the error in `View.honest_sum`, in the first round.

        The coalition subtracts its own addends, and with differential privacy their noise, so that the noise of the
        honest members remains. Without it, every addend has the rounding error of the ring.
        """
        members = len(first.members)
        if self.settings is not None:
            encoding = self.settings.step_encoding(
                members, first.gradient_sum.numel(), first.samples or 0, self.scenario.private_ring_bits
            )
            return honest_noise(encoding, self._honest(first))
        return 0.0 if self.scheme == "plain" else self._fixed_point(members).rounding_error * math.sqrt(members)
