"""A participant's own gradient from two sums, one with it and one without it.

If the same step were summed twice, before and after a participant dropped out, the difference of the two sums would be
its gradient, exactly. The product never does that (a sum is opened once; see `cgd.protocol.assembly`). But the members
go on with the next step without it, one step further. What the sum would have been there, had it stayed, the
coalition can tell from the sums before: training is smooth, so it continues their curve. The error that is left is what
cannot be foretold. Minibatches make it large in a single step (a patient coalition would average over many), and noise
does for good.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call, grad

from cgd.errors import InputError
from cgd.privacy.embedded import dealt, participants, samples
from cgd.privacy.schemes import Colony, observe
from cgd.privacy.view import Finding, flat, unflat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.privacy.view import Scheme, Truth, View

# An attack succeeds if it halves the error of guessing.
CLEARLY = 0.5
MOST_ORDERS = 4
LEAVER = "honest-1"


def departure(view: View) -> tuple[int, str]:
    """The first round that one honest participant is missing from, and its name.

    Raises:
        InputError: nobody has left.
    """
    for number in range(1, len(view.rounds)):
        gone = set(view.rounds[number - 1].members) - set(view.rounds[number].members) - set(view.coalition)
        if gone:
            return number, min(gone)
    raise InputError("nobody has dropped out; differencing needs two sums over different members")


def missing_gradient(view: View) -> torch.Tensor:
    """The gradient of the participant that dropped out, at the first displacement without it; flat."""
    number, name = departure(view)
    before, after = view.samples, view.rounds[number].samples or view.samples
    if name in view.rounds[number - 1].gradients:  # in the open, there is no need to take a difference
        shown = [each.gradients[name].double() * before / (before - after) for each in view.rounds[:number]]
        return _continued(shown, _best_order(shown))
    past = [view.honest_sum(each).double() for each in range(number)]
    order = _best_order(past)
    weight = before / (before - after)
    found = weight * _continued(past, order) - (weight - 1) * view.honest_sum(number).double()
    # It may be as wrong as it would have been one round before; of what is not larger than that, nothing is left.
    doubt = weight * (_continued(past[:-1], order) - past[-1]) if len(past) > 1 else torch.zeros_like(found)
    return found * float((1 - (doubt.norm() / found.norm()) ** 2).clamp(min=0))


def like_the_others(view: View) -> torch.Tensor:
    """What the sum without it suggests: that its gradient is like that of the honest participants who stayed."""
    number, _ = departure(view)
    after = view.rounds[number].samples or view.samples
    own = sum(len(each.y) for each in view.coalition.values())
    return after * view.honest_sum(number).double() / (after - own)


def difference(view: View, truth: Truth, setting: str = "") -> Finding:
    """How close the gradient comes. The metric is the relative error.

    Chance is the better of two guesses, zero (1 by definition) and `like_the_others`. It succeeds with at most half of
    that.
    """
    number, name = departure(view)
    real = _real_gradient(view, truth, name, number)

    def error(guess: torch.Tensor) -> float:
        return float((guess - real).norm() / real.norm())

    value, chance = error(missing_gradient(view)), min(1.0, error(like_the_others(view)))
    detail = f"{name} is missing from round {number + 1} on; it has {len(truth.y[name])} records"
    return Finding(
        "gradient of one who drops out",
        view.scheme,
        "relative error",
        value,
        chance,
        value <= CLEARLY * chance,
        setting,
        detail,
    )


def _continued(past: Sequence[torch.Tensor], order: int) -> torch.Tensor:
    """The next value of a polynomial of this order through the latest values."""
    terms = [(-1) ** back * math.comb(order + 1, back + 1) * past[-1 - back] for back in range(order + 1)]
    return torch.stack(terms).sum(0)


def _best_order(past: Sequence[torch.Tensor]) -> int:
    """The order that would have foretold the latest of these sums best from those before it."""
    orders = range(min(MOST_ORDERS, len(past) - 1))
    return min(orders, key=lambda order: float((_continued(past[:-1], order) - past[-1]).norm()), default=0)


def _real_gradient(view: View, truth: Truth, name: str, number: int) -> torch.Tensor:
    model = view.build_model()
    weights = truth.models[name] - view.final_displacement + view.rounds[number].displacement

    def value(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return view.loss(functional_call(model, given, (truth.x[name],)), truth.y[name])

    return flat(grad(value)(unflat(weights, model))).double()


# The settings it is shown in.


def colony(*, lr: float = 0.1, leaves: int = 10, batch: int | None = None, seed: int = 0) -> Colony:
    """Three honest participants with 40 digits each and two colluders; one drops out after `leaves` rounds.

    Args:
        lr: the step size; at 0 the step without it is the same step again.
        leaves: the round it is missing from.
        batch: how many of their samples the honest participants use in a round; all if not given.
        seed: decides who has which samples, origins and batches.
    """
    counts, coalition = participants(3, 40, own=20)
    data, _ = dealt(samples("digits", seed), counts)
    random = torch.Generator().manual_seed(seed)

    def batches(name: str, _: int, indices: torch.Tensor) -> torch.Tensor:
        if batch is None or name in coalition:
            return indices
        return indices[torch.randperm(len(indices), generator=random)[:batch]]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    gone = {leaves: (LEAVER,)}
    return Colony(data, build, coalition, rounds=leaves + 1, lr=lr, seed=seed, batches=batches, dropouts=gone)


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """One leaves, and the others go on with the next step."""
    return [difference(*observe(colony(seed=seed), scheme), setting="a step apart")]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Minibatches, which nobody can foretell; and the same step again, which the product never sums: it must succeed.

    In "dp" not even that does.
    """
    hidden = difference(*observe(colony(batch=10, seed=seed), scheme), setting="a step apart, minibatches of 10 of 40")
    again = difference(*observe(colony(lr=0.0, seed=seed), scheme), setting="the same step summed twice, as never is")
    return [hidden, replace(again, must_succeed=scheme != "dp")]
