"""What a coalition of participants sees: its own secrets, and everything that was opened or shown to it.

An attack gets a `View` and nothing else, whatever the scheme is and wherever the view comes from: a simulation
(`schemes.py`), or a real run that was recorded (`cgd.audit.trace_view`). What the honest participants keep to
themselves is in `Truth`, and is for measuring how well an attack did, after it has made its guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Scheme = Literal["cgd", "plain", "secure", "dp"]
SCHEMES: dict[Scheme, str] = {
    "plain": "FedSGD, gradients in the open",
    "secure": "FedSGD, secure aggregation",
    "dp": "FedSGD, differential privacy",
    "cgd": "CGD",
}
Loss = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"


@dataclass(frozen=True, repr=False)
class Colluder:
    """A member of the coalition: it shows the others of the coalition everything.

    Attributes:
        x: its samples.
        y: their labels.
        addends: what it put into the sum of each round: its gradient, flat, times n_l/n.
        origin: its origin, flat; in FedSGD the common one.
        samples: how many it counts for in n, if that is not how many are given here.
    """

    x: torch.Tensor
    y: torch.Tensor
    addends: tuple[torch.Tensor, ...]
    origin: torch.Tensor
    samples: int | None = None

    @property
    def counts_for(self) -> int:
        """How many samples it counts for in n."""
        return len(self.y) if self.samples is None else self.samples


@dataclass(frozen=True, repr=False)
class Round:
    """What was opened in one round.

    Attributes:
        members: who took part in its sum.
        displacement: D before the step, flat: known to everybody.
        gradient_sum: the opened sum of everybody's addends, flat.
        weights: the common model before the step, flat; None in CGD, where there is none.
        gradients: everybody's addend, where they are sent in the open (plain FedSGD); else empty.
        pre_activations: in `joint` columns, the opened z⁽¹⁾ of the row's samples; else None.
        samples: n of this round's members, who count anew when they change; None if it is as in the whole view.
    """

    members: tuple[str, ...]
    displacement: torch.Tensor
    gradient_sum: torch.Tensor
    weights: torch.Tensor | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    pre_activations: torch.Tensor | None = None
    samples: int | None = None


@dataclass(frozen=True, repr=False)
class View:
    """Everything that a coalition has seen.

    Attributes:
        scheme: how the participants trained.
        build_model: makes the network; its architecture is known to all.
        loss: of outputs and labels, a mean over samples.
        samples: n, the number of everybody's samples.
        lr: the step size.
        delta: the usual δ of origins; everybody knows its order of magnitude.
        coalition: its members, by name.
        rounds: one after the other.
        frames: bytes that members of the coalition received, with their senders, if they were recorded.
        noise: the standard deviation of what is added to every number of `honest_sum`, by rounding in the ring or by
            the honest participants for differential privacy: everybody knows these settings.
        final: D after the last step, flat, where another rule than plain descent by `lr` moved it.
        clip: the norm to which every sample's gradient was cut, for differential privacy: known as well.
    """

    scheme: Scheme
    build_model: Callable[[], torch.nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    samples: int
    lr: float
    delta: float
    coalition: Mapping[str, Colluder]
    rounds: tuple[Round, ...]
    frames: Iterable[tuple[str, bytes]] = ()
    noise: float = 0.0
    final: torch.Tensor | None = None
    clip: float = math.inf

    @property
    def honest(self) -> tuple[str, ...]:
        """The names of the others."""
        return tuple(name for name in self.rounds[0].members if name not in self.coalition)

    @property
    def honest_samples(self) -> int:
        """How many samples the others have together: everybody learns n."""
        return self.samples - sum(each.counts_for for each in self.coalition.values())

    def samples_in(self, number: int) -> int:
        """The samples of a round, n, which its members count anew when they change."""
        return self.rounds[number].samples or self.samples

    def coalition_samples(self, number: int) -> int:
        """How many of the samples of a round are the coalition's."""
        return sum(each.counts_for for name, each in self.coalition.items() if name in self.rounds[number].members)

    def same_members(self, number: int) -> bool:
        """Whether the same members, with as many samples, took part in a round as in the one before it."""
        before, now = self.rounds[number - 1], self.rounds[number]
        return set(before.members) == set(now.members) and self.samples_in(number - 1) == self.samples_in(number)

    @property
    def final_displacement(self) -> torch.Tensor:
        """D after the last step, flat."""
        if self.final is not None:
            return self.final
        return self.rounds[-1].displacement - self.lr * self.rounds[-1].gradient_sum

    def only(self, numbers: Sequence[int]) -> View:
        """What was seen in these rounds, one at least, in their order."""
        coalition = {
            name: replace(each, addends=tuple(each.addends[number] for number in numbers))
            for name, each in self.coalition.items()
        }
        after = numbers[-1] + 1
        final = self.rounds[after].displacement if after < len(self.rounds) else self.final
        return replace(self, rounds=tuple(self.rounds[number] for number in numbers), coalition=coalition, final=final)

    def until(self, rounds: int) -> View:
        """What was seen of the first rounds."""
        return self.only(range(min(rounds, len(self.rounds))))

    def honest_sum(self, number: int) -> torch.Tensor:
        """What remains of a round's sum without the coalition's addends: the honest participants' own, times n_l/n."""
        own = [each.addends[number] for each in self.coalition.values()]
        return self.rounds[number].gradient_sum - sum(own, torch.zeros_like(self.rounds[number].gradient_sum))


@dataclass(frozen=True, repr=False)
class Truth:
    """What the honest participants keep to themselves: to measure an attack by, never for the attack.

    Attributes:
        x: their samples, by name.
        y: the labels.
        models: their final models' weights, flat, by name.
    """

    x: Mapping[str, torch.Tensor]
    y: Mapping[str, torch.Tensor]
    models: Mapping[str, torch.Tensor]

    @property
    def all_x(self) -> torch.Tensor:
        """All their samples."""
        return torch.cat(list(self.x.values()))

    @property
    def all_y(self) -> torch.Tensor:
        """All their labels."""
        return torch.cat(list(self.y.values()))


@dataclass(frozen=True)
class Finding:
    """What an attack came to.

    Attributes:
        attack: its name.
        scheme: what it was run against.
        metric: what was measured.
        value: how well it did.
        chance: how well guessing does, without any view.
        succeeds: whether it is clearly better than that; the attack says by which rule.
        setting: the setting in a few words, such as "2 × 4 records".
        detail: what else is worth knowing, in a sentence.
        control: whether this is a setting that shows what the measurement is worth.
        undecided: whether it looks better than guessing, and there is too little to measure it on to tell.
        must_succeed: of a control, whether it must succeed. An attack's control must fail; that of a protection, in
            which there is nothing to protect by, must not.
        images: pictures for people, by caption: recovered beside real, each a stack of grey images in 0…1.
    """

    attack: str
    scheme: Scheme
    metric: str
    value: float
    chance: float
    succeeds: bool
    setting: str = ""
    detail: str = ""
    control: bool = False
    undecided: bool = False
    must_succeed: bool = False
    images: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Inapplicable:
    """Why an attack cannot be tried on a view.

    Attributes:
        scheme: of the view.
        why: the reason, in a sentence.
    """

    scheme: Scheme
    why: str


def flat(tensors: Mapping[str, torch.Tensor] | list[torch.Tensor]) -> torch.Tensor:
    """Some tensors as one vector, in their order."""
    values = tensors.values() if not isinstance(tensors, list) else tensors
    return torch.cat([each.detach().reshape(-1) for each in values])


def unflat(vector: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A vector as a model's parameters, by name."""
    found, start = {}, 0
    for name, parameter in model.named_parameters():
        found[name] = vector[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    return found
