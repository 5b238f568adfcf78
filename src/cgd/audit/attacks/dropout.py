"""A participant's own gradient from two sums, one with it and one without it.

If the same step were summed twice, before and after a participant dropped out, the difference of the two sums would be
its gradient, exactly. The product never does that (a sum is opened once; see `cgd.secagg.membership`). But the members
go on with the next step without it, one step further. What the sum would have been there, had it stayed, the
coalition can tell from the sums before: training is smooth, so it continues their curve. The error that is left is what
cannot be foretold. Minibatches make it large in a single step (a patient coalition would average over many), and noise
does for good. Of several who leave at once it is the sum that comes out, not each one's gradient.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call, grad

from cgd.audit.embedded import dealt, participants, samples
from cgd.audit.schemes import Scenario, observe
from cgd.audit.view import Finding, flat, unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.audit.view import Scheme, Truth, View

# An attack succeeds if it halves the error of guessing.
MAX_RELATIVE_ERROR = 0.5
MAX_ORDERS = 4
LEAVER = "honest-1"


def departure(view: View) -> tuple[int, tuple[str, ...]]:
    """The first round that honest participants are missing from, while nobody joined, and their names.

    Raises:
        InputError: nobody has left.
    """
    for number in range(1, len(view.rounds)):
        before, after = set(view.rounds[number - 1].members), set(view.rounds[number].members)
        gone = before - after - set(view.coalition)
        if gone and after <= before:
            return number, tuple(sorted(gone))
    raise InputError("nobody has dropped out; differencing needs two sums, the second without one of the first")


def missing_gradient(view: View) -> torch.Tensor:
    """The gradient of who dropped out, at the first displacement without them; flat.

    If several left at once, it is the mean over all their samples: nothing tells them apart.
    """
    number, names = departure(view)
    same = _same_members_since(view, number - 1)
    before, after = view.samples_in(number - 1), view.samples_in(number)
    missing = before - view.coalition_samples(number - 1) - (after - view.coalition_samples(number))
    shown = [each.gradients for each in view.rounds[same:number]]
    if all(name in each for each in shown for name in names):  # in the open, there is no need to take a difference
        past = [torch.stack([each[name].double() for name in names]).sum(0) * before / missing for each in shown]
        return _continued(past, _best_order(past))
    past = [view.honest_sum(each).double() for each in range(same, number)]
    order = _best_order(past)
    found = (before * _continued(past, order) - after * view.honest_sum(number).double()) / missing
    # It may be as wrong as it would have been one round before; of what is not larger than that, nothing is left.
    doubt = before / missing * (_continued(past[:-1], order) - past[-1]) if len(past) > 1 else torch.zeros_like(found)
    return found * float((1 - (doubt.norm() / found.norm()) ** 2).clamp(min=0))


def like_the_others(view: View) -> torch.Tensor:
    """What the sum without them suggests: that their gradient is like that of the honest participants who stayed."""
    number, _ = departure(view)
    after = view.samples_in(number)
    stayed = after - view.coalition_samples(number)
    return after * view.honest_sum(number).double() / max(1, stayed)  # nobody's sum is zero


def difference(view: View, truth: Truth, setting: str = "") -> Finding:
    """How close the gradient comes. The metric is the relative error.

    Chance is the better of two guesses, zero (1 by definition) and `like_the_others`. It succeeds with at most half of
    that.
    """
    number, names = departure(view)
    real = _real_gradient(view, truth, names, number)

    def error(guess: torch.Tensor) -> float:
        return float((guess - real).norm() / real.norm())

    value, chance = error(missing_gradient(view)), min(1.0, error(like_the_others(view)))
    records = sum(len(truth.y[name]) for name in names)
    together = f"they have {records} records together" if len(names) > 1 else f"it has {records} records"
    missing = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing from round {number + 1} on"
    return Finding(
        "gradient of one who drops out",
        view.scheme,
        "relative error",
        value,
        chance,
        value <= MAX_RELATIVE_ERROR * chance,
        setting,
        f"{missing}; {together}",
    )


def _same_members_since(view: View, number: int) -> int:
    """The first round from which on the members were those of this one."""
    while number > 0 and view.same_members(number):
        number -= 1
    return number


def _continued(past: Sequence[torch.Tensor], order: int) -> torch.Tensor:
    """The next value of a polynomial of this order through the latest values."""
    terms = [(-1) ** back * math.comb(order + 1, back + 1) * past[-1 - back] for back in range(order + 1)]
    return torch.stack(terms).sum(0)


def _best_order(past: Sequence[torch.Tensor]) -> int:
    """The order that would have foretold the latest of these sums best from those before it."""
    orders = range(min(MAX_ORDERS, len(past) - 1))
    return min(orders, key=lambda order: float((_continued(past[:-1], order) - past[-1]).norm()), default=0)


def _real_gradient(view: View, truth: Truth, names: Sequence[str], number: int) -> torch.Tensor:
    """The gradient of these participants at a round's displacement: its mean over all their samples."""
    model = view.build_model()
    moved = view.rounds[number].displacement - view.final_displacement

    def gradient(name: str) -> torch.Tensor:
        def value(given: dict[str, torch.Tensor]) -> torch.Tensor:
            return view.loss(functional_call(model, given, (truth.x[name],)), truth.y[name])

        return flat(grad(value)(unflat(truth.models[name] + moved, model))).double()

    counts = {name: len(truth.y[name]) for name in names}
    return torch.stack([count * gradient(name) for name, count in counts.items()]).sum(0) / sum(counts.values())


# The settings it is shown in.


def colony(*, lr: float = 0.1, leaves: int = 10, batch: int | None = None, seed: int = 0) -> Scenario:
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
    return Scenario(data, build, coalition, rounds=leaves + 1, lr=lr, seed=seed, batches=batches, dropouts=gone)


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
