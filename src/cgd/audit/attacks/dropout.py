"""Recover the gradient of a participant that drops out, from two sums: one with it and one without it.

If the same step were summed before and after a participant dropped out, the difference of the sums would be its
gradient, exactly. The product never does that: a sum is opened once (see `cgd.secagg.membership`). But the members go
on with the next step. Training is smooth, so the coalition extrapolates the sums before the dropout to that step, and
the difference to the actual sum is the missing gradient, up to the error of the extrapolation. Minibatches make this
error large in a single step. With differential privacy, the mean of several sums may predict the next one better than
an extrapolation. If several participants leave at once, only the sum of their gradients comes out.

With a quorum, participants come back, and may be absent again (`difference_of_absences`). Then every sum is a linear
equation about the gradients of those present: a least-squares fit gives the gradient of each participant that is
present in some of them and absent in others, and averages over batches. Whoever can cut connections chooses the
equations.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd.audit.embedded import participants, samples, split
from cgd.audit.results import AttackResult
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import observe
from cgd.audit.view import EPSILONS, TINY, sample_gradients
from cgd.errors import InputError
from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, Truth, View

    ObserveTruth = Callable[[Scenario], tuple[View, Truth]]
    Predictor = Callable[[Sequence[torch.Tensor]], torch.Tensor]

# Relative to the error of guessing.
MAX_RELATIVE_ERROR = 0.5
MAX_ORDERS = 4
LEAVER = "honest-1"
FULL_ROUNDS = 10


def find_dropout(view: View) -> tuple[int, tuple[str, ...]]:
    """Return the first round without some honest participants, if nobody joined in it, and their names.

    Raises:
        InputError: nobody has dropped out.
    """
    for number in range(1, len(view.rounds)):
        before, after = set(view.rounds[number - 1].members), set(view.rounds[number].members)
        gone = before - after - set(view.coalition)
        if gone and after <= before:
            return number, tuple(sorted(gone))
    raise InputError("nobody has dropped out; differencing needs two sums, the second without a member of the first")


def missing_gradient(view: View) -> torch.Tensor:
    """Return the gradient of the participants that dropped out, at the first displacement without them; flat.

    If several left at once, return the mean over all their samples.
    """
    number, names = find_dropout(view)
    start = _first_round_with_members_of(view, number - 1)
    before, after = view.samples_in(number - 1), view.samples_in(number)
    missing = view.honest_samples_in(number - 1) - view.honest_samples_in(number)
    public = [each.gradients for each in view.rounds[start:number]]
    if all(name in each for each in public for name in names):  # plain FedSGD: no difference is needed
        past = [torch.stack([each[name].double() for name in names]).sum(0) * before / missing for each in public]
        return _best_predictor(past)(past)
    past = [view.honest_sum(each).double() for each in range(start, number)]
    predict = _best_predictor(past, averages=view.is_private)
    found = (before * predict(past) - after * view.honest_sum(number).double()) / missing
    # The error one round earlier estimates the error now; the guess is shrunk by it, to zero if it is not larger. The
    # noise of both parts is known: of the prediction at least that of a mean over all sums.
    error = before / missing * (predict(past[:-1]) - past[-1]) if len(past) > 1 else torch.zeros_like(found)
    noise = before / missing * view.noise * math.sqrt(found.numel() * (1 + 1 / len(past)))
    return found * max(0.0, 1 - (max(float(error.norm()), noise) / float(found.norm())) ** 2)


def guess_from_remaining(view: View) -> torch.Tensor:
    """Return the mean gradient of the honest participants that stayed, as a guess without differencing."""
    number, _ = find_dropout(view)
    stayed = view.honest_samples_in(number)
    # If nobody stayed, the sum is zero.
    return view.samples_in(number) * view.honest_sum(number).double() / max(1, stayed)


def difference(view: View, truth: Truth, setting: str = "") -> AttackResult:
    """Measure the relative error of the recovered gradient.

    Chance is the better of two guesses, zero (1 by definition) and `guess_from_remaining`. The attack succeeds with at
    most half of that.
    """
    number, names = find_dropout(view)
    real = _real_gradient(view, truth, names, number)

    def error(guess: torch.Tensor) -> float:
        return float((guess - real).norm() / real.norm())

    value, chance = error(missing_gradient(view)), min(1.0, error(guess_from_remaining(view)))
    records = sum(len(truth.y[name]) for name in names)
    together = f"they have {records} records together" if len(names) > 1 else f"it has {records} records"
    missing = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing from round {number + 1} on"
    return AttackResult(
        "gradient of a participant that drops out",
        view.scheme,
        "relative error",
        value,
        chance,
        value <= MAX_RELATIVE_ERROR * chance,
        setting,
        f"{missing}; {together}",
    )


def difference_of_absences(view: View, truth: Truth, name: str, setting: str = "") -> AttackResult:
    """Measure the relative error of the gradient of a participant that was absent from some rounds and came back.

    Chance is 1, the error of guessing zero. The attack succeeds with at most half of that.

    Raises:
        InputError: no rounds tell its gradient from those of the others.
    """
    number, guess = absent_gradient(view, name)
    value = relative_error(view, truth, name, number, guess)
    rounds = sum(name not in each.members for each in view.rounds)
    return AttackResult(
        "gradient of a participant that is absent for some rounds",
        view.scheme,
        "relative error",
        value,
        1.0,
        value <= MAX_RELATIVE_ERROR,
        setting,
        f"{name} is missing from {rounds} of {len(view.rounds)} rounds; it has {len(truth.y[name])} records",
    )


def relative_error(view: View, truth: Truth, name: str, number: int, guess: torch.Tensor) -> float:
    """Return the relative error of a guess of a participant's mean gradient over all its samples, in a round."""
    real = _real_gradient(view, truth, [name], number)
    return float((guess - real).norm() / real.norm())


def absent_gradient(view: View, name: str) -> tuple[int, torch.Tensor]:
    """Return a round, and the gradient of a participant there, from rounds with and without it; flat.

    The gradients of the participants are modelled as polynomials in the number of the round, in the latest rounds. The
    number of these and the degrees are those with the smallest estimated error. The guess is shrunk by that error.

    Raises:
        InputError: no rounds tell its gradient from those of the others.
    """
    count = len(view.rounds)
    lengths = sorted({count, *(1 << power for power in range(3, count.bit_length()) if 1 << power < count)})
    fits = [
        fit
        for length in lengths
        for degree in range(MAX_ORDERS)
        for own_degree in range(degree + 1)
        if (fit := _fit(view, name, length, degree, own_degree)) is not None
    ]
    if not fits:
        raise InputError(
            f"the rounds do not tell the gradient of {name} from those of the others; this attack needs rounds with "
            "and without it, and two more than unknowns"
        )
    variance, number, found = min(fits, key=lambda each: each[0])
    samples = view.samples_of(name)
    return number, found / samples * max(0.0, 1 - variance / max(float(found.norm()) ** 2, TINY))


def _fit(view: View, name: str, length: int, degree: int, own_degree: int) -> tuple[float, int, torch.Tensor] | None:
    """Return the estimated squared error of a fit to the latest rounds, the round, and the sum of the gradients there.

    Returns None if these rounds do not determine the unknowns.
    """
    numbers = range(len(view.rounds) - length, len(view.rounds))
    absent = [number for number in numbers if name not in view.rounds[number].members]
    members = [set(view.rounds[number].members) for number in numbers]
    varying = [each for each in view.honest if 0 < sum(each in present for present in members) < length]
    if name not in varying:
        return None
    time = torch.linspace(-1, 1, length, dtype=torch.float64)
    columns: list[tuple[str, int, torch.Tensor]] = []
    if len(varying) < len(view.honest):  # the participants that are always present, together
        columns += [("", power, time**power) for power in range(degree + 1)]
    for each in varying:
        present = torch.tensor([float(each in there) for there in members], dtype=torch.float64)
        columns += [(each, power, present * time**power) for power in range(own_degree + 1)]
    design = torch.stack([column for *_, column in columns], dim=1)
    free = length - design.shape[1]
    if free < 2 or int(torch.linalg.matrix_rank(design)) < design.shape[1]:
        return None
    sums = torch.stack([view.samples_in(number) * view.honest_sum(number).double() for number in numbers])
    inverse = torch.linalg.inv(design.T @ design)
    fitted = inverse @ (design.T @ sums)
    residual = float((sums - design @ fitted).square().sum()) / free
    noise = (view.samples_in(0) * view.noise) ** 2 * sums.shape[1]
    number = min(absent, key=lambda each: abs(2 * (each - numbers[0]) - (length - 1)))  # in the middle
    here = time[number - numbers[0]]
    wanted = torch.tensor([float(here**power) if of == name else 0.0 for of, power, _ in columns], dtype=torch.float64)
    return max(residual, noise) * float(wanted @ inverse @ wanted), number, wanted @ fitted


def on_view(view: View, truth: Truth, _: Sample) -> list[AttackResult]:
    """Run the attack on any view."""
    return [difference(view, truth, view.describe())]


def on_scenario(passive: Scenario, _: Scheme, observe_truth: ObserveTruth) -> list[AttackResult]:
    """Run the attack in any training, in which the first honest participant leaves in the middle.

    Raises:
        InputError: the training would end, because too few members remain.
    """
    honest = [name for name in passive.data if name not in passive.coalition]
    if len(passive.data) <= MIN_MEMBERS or len(honest) < 2 or passive.rounds < 2:
        raise InputError(
            f"{len(passive.data)} members, {len(honest)} of them honest, and {passive.rounds} rounds; for this attack, "
            f"one honest member leaves, and another one and {MIN_MEMBERS} members in all must remain"
        )
    view, truth = observe_truth(replace(passive, dropouts={passive.rounds // 2: honest[:1]}))
    return [difference(view, truth, view.describe())]


def _first_round_with_members_of(view: View, number: int) -> int:
    while number > 0 and view.same_members(number):
        number -= 1
    return number


def _extrapolate(past: Sequence[torch.Tensor], order: int) -> torch.Tensor:
    """Return the next value of the polynomial of this order through the latest values."""
    terms = [(-1) ** back * math.comb(order + 1, back + 1) * past[-1 - back] for back in range(order + 1)]
    return torch.stack(terms).sum(0)


def _mean(past: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Return the mean of the latest values."""
    return torch.stack(list(past[-count:])).mean(0)


def _best_predictor(past: Sequence[torch.Tensor], *, averages: bool = False) -> Predictor:
    """Return the function that predicts the latest sum best from those before it."""
    predictors: list[Predictor] = [
        partial(_extrapolate, order=order) for order in range(min(MAX_ORDERS, len(past) - 1))
    ]
    predictors += [partial(_mean, count=count) for count in range(2, len(past)) if averages]
    return min(
        predictors, key=lambda predict: float((predict(past[:-1]) - past[-1]).norm()), default=partial(_mean, count=1)
    )


def _real_gradient(view: View, truth: Truth, names: Sequence[str], number: int) -> torch.Tensor:
    """Return the mean gradient over all samples of these participants, at a round's displacement; as clipped."""
    moved = view.rounds[number].displacement - view.final_displacement
    gradients = [
        sample_gradients(view, truth.models[name] + moved, truth.x[name], truth.y[name]).double() for name in names
    ]
    return torch.cat(gradients).mean(0)


# Demonstrations.


def scenario(*, lr: float = 0.1, leaves: int = 10, batch: int | None = None, seed: int = 0) -> Scenario:
    """Return three honest participants with 40 digits each and two colluders; one honest participant drops out.

    Args:
        lr: the learning rate; with 0, the step after the dropout is the same step again.
        leaves: the first round without the participant.
        batch: the minibatch size of the honest participants; all samples if None.
        seed: the seed of the split, origins and batches.
    """
    counts, coalition = participants(3, 40, own=20)
    data, _ = split(samples("digits", seed), counts)
    random = torch.Generator().manual_seed(seed)

    def batches(name: str, _: int, indices: torch.Tensor) -> torch.Tensor:
        if batch is None or name in coalition:
            return indices
        return indices[torch.randperm(len(indices), generator=random)[:batch]]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    gone = {leaves: (LEAVER,)}
    return Scenario(data, build, coalition, rounds=leaves + 1, lr=lr, seed=seed, batches=batches, dropouts=gone)


def absence_scenario(
    absences: int, *, in_turn: bool = False, batch: int | None = None, lr: float = 0.1, seed: int = 0
) -> Scenario:
    """Return the same participants with a quorum: after ten rounds, honest ones are absent and come back.

    Args:
        absences: how many times each of them is absent, for one round.
        in_turn: all three honest participants are absent one after the other, as if somebody cut their connections;
            otherwise the first one, in every other round.
        batch: as for `scenario`, and so the others.
        lr: the learning rate.
        seed: the seed.
    """
    alone = scenario(lr=lr, batch=batch, seed=seed)
    honest = [name for name in alone.data if name not in alone.coalition] if in_turn else [LEAVER]
    pause = 1 if in_turn else 2
    absent = {FULL_ROUNDS + pause * place: honest[place % len(honest)] for place in range(absences * len(honest))}
    back = {number + 1: (name,) for number, name in absent.items()}
    rounds = FULL_ROUNDS + pause * len(absent)
    return replace(alone, rounds=rounds, dropouts={number: (name,) for number, name in absent.items()}, returns=back)


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the result of a dropout between two steps."""
    return [difference(*observe(scenario(seed=seed), scheme), setting="a step apart")]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with minibatches, where it must fail, and with one step summed twice, where it must succeed.

    The product never sums an exact step twice. With noise, the attack must fail in both cases.
    """
    hidden = difference(
        *observe(scenario(batch=10, seed=seed), scheme), setting="a step apart, minibatches of 10 of 40"
    )
    again = difference(
        *observe(scenario(lr=0.0, seed=seed), scheme), setting="the same step summed twice, which cgd never does"
    )
    return [hidden, replace(again, must_succeed=scheme not in EPSILONS)]
