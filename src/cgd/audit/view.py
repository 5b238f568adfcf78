"""The view of a coalition: its own secrets, and everything that was opened or sent to it.

An attack reads a `View` and nothing else, whatever the scheme and wherever the view comes from: a simulation
(`schemes.py`) or a recorded run (`trace_view.py`). The secrets of the honest participants are in `Truth`, which only
measures how well an attack did, after it has made its guess.

Several attacks read the gradient of a fully-connected first layer (`gradient_rows`): for any weights, it is a linear
combination of the input records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cgd.audit.record_table import RecordTable


Scheme = Literal["plain", "secure", "cgd", "dp8", "dp2", "dp0.5", "dp"]
"""Ways to train together. "dp" is CGD with the privacy of a spec's run or of a recorded run."""
EPSILONS: dict[Scheme, float] = {"dp8": 8.0, "dp2": 2.0, "dp0.5": 0.5}
"""ε of the schemes with differential privacy that every attack is tried against."""
SCHEMES: dict[Scheme, str] = {
    "plain": "FedSGD, gradients in the open",
    "secure": "FedSGD, secure aggregation",
    "cgd": "CGD",
    **{scheme: f"CGD, ε = {epsilon:g}" for scheme, epsilon in EPSILONS.items()},
}
"""The schemes that an audit compares, in the order of the report, and their names."""


def is_confined(scheme: Scheme) -> bool:
    """Return whether participants have origins of their own: in CGD, with and without noise."""
    return scheme not in ("plain", "secure")


@dataclass(frozen=True, repr=False)
class Colluder:
    """A member of the coalition, which shares everything with the other colluders.

    Attributes:
        x: its samples.
        y: their labels.
        addends: its addend in each round: its gradient, flat, times n_l/n; with differential privacy, with its noise.
        origin: its origin, flat, without the public start; in FedSGD the common one.
        samples: its part of n, if that differs from the number of samples here.
    """

    x: torch.Tensor
    y: torch.Tensor
    addends: tuple[torch.Tensor, ...]
    origin: torch.Tensor
    samples: int | None = None

    @property
    def sample_count(self) -> int:
        """Its part of n."""
        return len(self.y) if self.samples is None else self.samples


@dataclass(frozen=True, repr=False)
class Round:
    """The values that were opened in one round.

    Attributes:
        members: the members of its sum.
        displacement: what all models have in common before the step, flat, and everybody knows: the displacement D,
            added to the public start if there is one. A model is this plus an unknown origin.
        gradient_sum: the opened sum of all addends, flat.
        weights: the common model before the step, flat; None in CGD, which has none.
        gradients: all addends by name, in plain FedSGD; else empty.
        pre_activations: the opened z⁽¹⁾ of the row's samples, with `joint` columns; else None.
        samples: n of this round, which is counted again when members change; None if it is that of the view.
        honest_samples: the number of the honest participants' samples. With differential privacy it does not follow
            from n, which has noise; the coalition is assumed to know it. Otherwise None.
    """

    members: tuple[str, ...]
    displacement: torch.Tensor
    gradient_sum: torch.Tensor
    weights: torch.Tensor | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    pre_activations: torch.Tensor | None = None
    samples: int | None = None
    honest_samples: int | None = None


@dataclass(frozen=True, repr=False)
class View:
    """Everything that a coalition has seen.

    Attributes:
        scheme: the scheme of the training.
        build_model: builds the network, whose architecture everybody knows.
        loss: the loss of outputs and labels, a mean over samples.
        samples: n, the number of all samples, by which sums are divided; with differential privacy, as it was opened.
        lr: the learning rate.
        delta: the usual δ of origins, whose order of magnitude everybody knows.
        coalition: the colluders by name.
        rounds: the rounds in order.
        frames: the bytes that colluders received, with their senders, if they were recorded.
        noise: the standard deviation of the error of every number in `honest_sum`, from fixed-point rounding or from
            the noise of differential privacy, whose settings everybody knows.
        final: `Round.displacement` after the last step, if another rule than gradient descent with `lr` moved it.
        clip: the clipping norm of each sample's gradient in differential privacy, which everybody knows.
        mu: μ of everything that the training opens to this coalition, in differential privacy; infinite without noise.
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
    mu: float = math.inf

    @property
    def is_private(self) -> bool:
        """True with differential privacy."""
        return self.mu < math.inf

    @property
    def honest(self) -> tuple[str, ...]:
        """The names of the honest participants."""
        return tuple(name for name in self.rounds[0].members if name not in self.coalition)

    @property
    def honest_samples(self) -> int:
        """The number of samples of the honest participants together."""
        return self.honest_samples_in(0)

    def describe(self) -> str:
        """Return the honest participants, their records and the rounds in a few words."""
        honest, records, rounds = len(self.honest), self.honest_samples, len(self.rounds)
        return f"{honest} honest, {records:,} record{'s' * (records != 1)}, {rounds:,} round{'s' * (rounds != 1)}"

    def samples_in(self, number: int) -> int:
        """Return n of a round."""
        return self.rounds[number].samples or self.samples

    def honest_samples_in(self, number: int) -> int:
        """Return the number of the honest participants' samples in a round, which follows from n if that is exact."""
        known = self.rounds[number].honest_samples
        members = self.rounds[number].members
        own = sum(each.sample_count for name, each in self.coalition.items() if name in members)
        return self.samples_in(number) - own if known is None else known

    def samples_of(self, name: str) -> int:
        """Return the number of samples of an honest participant, which follows from the counts with and without it.

        Raises:
            InputError: the counts do not tell it from those of the others.
        """
        present = torch.tensor([[float(each in one.members) for each in self.honest] for one in self.rounds])
        counts = torch.tensor([float(self.honest_samples_in(number)) for number in range(len(self.rounds))])
        place = torch.zeros(1, len(self.honest))
        place[0, self.honest.index(name)] = 1.0
        rank = torch.linalg.matrix_rank
        if rank(torch.cat([present, place])) > rank(present):
            raise InputError(f"the counts do not tell the number of samples of {name} from those of the others")
        found = torch.linalg.lstsq(present.double(), counts.double()[:, None], driver="gelsd").solution
        return round(float(found[self.honest.index(name), 0]))

    def same_members(self, number: int) -> bool:
        """Return whether a round has the members and n of the round before it."""
        before, now = self.rounds[number - 1], self.rounds[number]
        return set(before.members) == set(now.members) and self.samples_in(number - 1) == self.samples_in(number)

    @property
    def final_displacement(self) -> torch.Tensor:
        """The common part of all models after the last step, flat, as `Round.displacement`."""
        if self.final is not None:
            return self.final
        return self.rounds[-1].displacement - self.lr * self.rounds[-1].gradient_sum

    def only(self, numbers: Sequence[int]) -> View:
        """Return the view of these rounds, at least one, in their order.

        Its `final_displacement` is D after the last of them, but a `Truth` still has the models after the whole run:
        subtract the `final_displacement` of the whole view from these to get origins.
        """
        coalition = {
            name: replace(each, addends=tuple(each.addends[number] for number in numbers))
            for name, each in self.coalition.items()
        }
        after = numbers[-1] + 1
        final = self.rounds[after].displacement if after < len(self.rounds) else self.final
        return replace(self, rounds=tuple(self.rounds[number] for number in numbers), coalition=coalition, final=final)

    def until(self, rounds: int) -> View:
        """Return the view of the first rounds; see `only` for the models of the `Truth`."""
        return self.only(range(min(rounds, len(self.rounds))))

    def honest_sum(self, number: int) -> torch.Tensor:
        """Return a round's sum without the coalition's addends: the sum of the honest addends, times n_l/n."""
        own = [each.addends[number] for each in self.coalition.values()]
        return self.rounds[number].gradient_sum - sum(own, torch.zeros_like(self.rounds[number].gradient_sum))


@dataclass(frozen=True, repr=False)
class Truth:
    """The secrets of the honest participants, which measure an attack and are never given to it.

    Attributes:
        x: their samples by name.
        y: their labels by name.
        models: the weights of their models after the last round of the view that came with this truth, flat, by name.
            Minus `View.final_displacement` of that view, and not of a part of it, they are the origins.
        table: how to show the samples to their owner, if they come from a table.
    """

    x: Mapping[str, torch.Tensor]
    y: Mapping[str, torch.Tensor]
    models: Mapping[str, torch.Tensor]
    table: RecordTable | None = None

    @property
    def all_x(self) -> torch.Tensor:
        """The samples of all of them."""
        return torch.cat(list(self.x.values()))

    @property
    def all_y(self) -> torch.Tensor:
        """The labels of all of them."""
        return torch.cat(list(self.y.values()))

    @property
    def all_places(self) -> list[str]:
        """The places of all samples in their table; empty if they do not come from one."""
        return [] if self.table is None else [place for name in self.x for place in self.table.places[name]]


def flat(tensors: Mapping[str, torch.Tensor] | list[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector, in their order."""
    values = tensors.values() if not isinstance(tensors, list) else tensors
    return torch.cat([each.detach().reshape(-1) for each in values])


def unflat(vector: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a vector as the parameters of a model, by name."""
    found, start = {}, 0
    for name, parameter in model.named_parameters():
        found[name] = vector[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    return found


def sample_gradients(view: View, weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of each sample at these weights, a flat row each, clipped as in the training."""
    model = view.build_model()

    def value(given: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return view.loss(functional_call(model, given, (sample[None],)), label[None])

    gradients = vmap(grad(value), in_dims=(None, 0, 0))(unflat(weights, model), x, y)
    rows = torch.cat([part.reshape(len(y), -1) for part in gradients.values()], dim=1)
    clipped: torch.Tensor = rows * (view.clip / rows.norm(dim=1, keepdim=True).clamp_min(TINY)).clamp(max=1.0)
    return clipped


TINY = 1e-12
# Comparing all rows with each other takes minutes beyond this.
MAX_ROWS = 4096
_SAME_VALUES = (nn.Flatten, nn.Identity, nn.Unflatten)


def has_bias(model: nn.Module) -> bool:
    """Return whether the fully-connected first layer of a model has a bias.

    Raises:
        InputError: the model begins with another layer.
    """
    return _first(model).bias is not None


def units(model: nn.Module) -> int:
    """Return the number of units of the fully-connected first layer of a model.

    Raises:
        InputError: the model begins with another layer.
    """
    return _first(model).out_features


def gradient_rows(view: View) -> torch.Tensor:
    """Return the honest participants' gradient of the first layer, a row per unit and round, in double precision.

    The gradient of a bias is the last column: a bias acts as an input that is always one.

    Raises:
        InputError: the model does not begin with a fully-connected layer.
    """
    model = view.build_model()
    columns = 2 if has_bias(model) else 1
    rows = []
    for number in range(len(view.rounds)):
        gradient = list(unflat(view.honest_sum(number).double(), model).values())
        rows.append(torch.cat([each.reshape(len(each), -1) for each in gradient[:columns]], dim=1))
    return torch.cat(rows)


def limit_rows(view: View) -> View:
    """Return the view of the first rounds, with at most `MAX_ROWS` gradient rows.

    Raises:
        InputError: the model does not begin with a fully-connected layer.
    """
    return view.until(max(1, MAX_ROWS // units(view.build_model())))


def _first(model: nn.Module) -> nn.Linear:
    leaves = [each for each in model.modules() if not list(each.children()) and not isinstance(each, _SAME_VALUES)]
    if not leaves or not isinstance(leaves[0], nn.Linear):
        found = type(leaves[0]).__name__ if leaves else "no layer"
        raise InputError(f"the network begins with {found}; this attack needs one that begins with a torch.nn.Linear")
    return leaves[0]
