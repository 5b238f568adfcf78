"""Recover the number of the honest participants' samples in each class, from the last layer's gradient of one round.

With cross-entropy, the gradient of the last layer's biases is the sum of (probabilities − labels) over the samples. The
honest participants' part of it, times n, is the predicted minus the actual count of each class. An untrained model
predicts about the same for every sample, so the coalition uses the predictions for its own samples. In FedSGD it has
the model; in CGD it draws models with random origins, which are less informative for larger origins.

An active colluder makes the predictions certain. It adds vectors to its addend that lower the biases of the hidden
units until no unit is activated, and raise one bias of the last layer, in all models alike. All models then predict
that class for every sample, whatever their origins are, and the rest of the sum is the labels. The attack reads the
first or the last round, whichever has the more certain predictions.

Without biases, the gradient of the last layer's weights, summed over its inputs, serves as well: each sample's part is
multiplied by the sum of its activations, whose average the coalition takes from its own gradients. These also show the
effect of clipping in differential privacy. There, the sums of all rounds are combined, each by its certainty, because
the noise of each is independent. ε bounds what is learned about one record, not the number of records in a class.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from cgd.audit.embedded import participants, samples
from cgd.audit.results import AttackResult
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import observe
from cgd.audit.steering import Steering, speed
from cgd.audit.view import EPSILONS, TINY, Truth, flat, is_confined, sample_gradients, unflat
from cgd.errors import InputError
from cgd.optim.origin import Origin

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.audit.scenario import Sample
    from cgd.audit.view import Colluder, Scheme, View

    ObserveTruth = Callable[[Scenario], tuple[View, Truth]]

# Relative to the error of guessing.
MAX_LABEL_ERROR = 0.5
# The largest probability that errors of the estimate's size alone halve the error of a guess; and its random draws.
MAX_CHANCE, DRAWS = 0.001, 20_000
# The number of models that a coalition draws to estimate the honest participants' predictions.
ORIGINS = 16
# The change of biases by an active colluder, for δ up to 1: a digit has a norm of about 4, times 5 deviations.
BIAS_SHIFT = 20.0
# With differential privacy the norm of a total is bounded, so that steering takes longer.
STEERED_ROUNDS, PRIVATE_STEERED_ROUNDS = 16, 128


def label_counts(view: View) -> torch.Tensor:
    """Estimate the number of the honest participants' samples in each class.

    With exact sums, the first or the last round is used; with noise, all rounds.

    The less certain the predictions of their models are, the nearer is the estimate to equal classes.

    Raises:
        InputError: the labels are not classes, the loss is not the cross-entropy without class weights, or the model
            does not end with a fully-connected layer.
    """
    return _estimate_counts(view)[0]


def _estimate_counts(view: View) -> tuple[torch.Tensor, float]:
    """Return the estimate of `label_counts`, and the expected squared error of the counts in the sums."""
    guess = torch.full((_classes(view),), view.honest_samples / _classes(view), dtype=torch.float64)
    if view.is_private:
        counts, variance = _combine([_estimate(view, number) for number in range(len(view.rounds))])
    else:
        found = [_estimate(view, number) for number in (0, len(view.rounds) - 1)]
        counts, variance, _ = min(found, key=lambda each: each[1])
    distance = float(((counts - guess) ** 2).sum())
    weight = 1 - variance / distance if distance > 2 * variance else 0.0
    return _whole((guess + weight * (counts - guess)).clamp(min=0), view.honest_samples), variance


def _combine(estimates: list[tuple[torch.Tensor, float, float]]) -> tuple[torch.Tensor, float]:
    """Return the mean of several estimates, weighted by their certainty, and its expected squared error.

    Only the noise is independent; the other errors may be the same in all rounds.
    """
    weights = torch.tensor([1 / variance for _, variance, _ in estimates], dtype=torch.float64)
    weights /= weights.sum()
    noise = torch.tensor([each for _, _, each in estimates], dtype=torch.float64)
    other = torch.tensor([variance for _, variance, _ in estimates], dtype=torch.float64) - noise
    counts = (weights[:, None] * torch.stack([each for each, _, _ in estimates])).sum(0)
    return counts, float(weights @ other.sqrt()) ** 2 + float(weights**2 @ noise)


def _estimate(view: View, number: int) -> tuple[torch.Tensor, float, float]:
    """Estimate the counts from one round, and return the expected squared error, and the part of it that is noise."""
    shared, moved = view.rounds[number].weights, view.rounds[number].displacement
    drawn = [shared] if shared is not None else [_origin(view, place) + moved for place in range(ORIGINS)]
    own = torch.cat([each.x for each in view.coalition.values()])
    predictions = torch.stack([_probabilities(view, each, own) for each in drawn])  # models × samples × classes
    means = predictions.mean(1)
    scale = view.samples / _activation(view, number)
    counts = view.honest_samples * means.mean(0) - scale * _per_class(view, view.honest_sum(number))
    # The honest participants' mean predictions vary like these, their records differ from ours, and every class has
    # noise.
    models = means.var(dim=0, correction=0).sum() / len(view.honest)
    records = predictions.var(dim=1, correction=0).mean(0).sum() * (1 / view.honest_samples + 1 / len(own))
    noise = len(counts) * (scale * view.noise * _numbers_per_class(view) ** 0.5) ** 2
    return counts, float(view.honest_samples**2 * (models + records)) + noise, noise


def own_counts(view: View) -> torch.Tensor:
    """Return the counts that the coalition guesses from its own labels."""
    labels = torch.cat([each.y for each in view.coalition.values()])
    counts = torch.bincount(labels, minlength=_classes(view)).double()
    return _whole(counts * view.honest_samples / counts.sum(), view.honest_samples)


def count_labels(view: View, truth: Truth, setting: str = "") -> AttackResult:
    """Measure the fraction of wrong labels in the histogram (total variation distance).

    Chance is the better of two guesses, the coalition's own labels and equal classes. The attack succeeds with at most
    half of that, if luck rarely gives as much (`is_beyond_chance`).

    Raises:
        InputError: a guess is exact.
    """
    real = torch.bincount(truth.all_y, minlength=_classes(view)).double()
    equal = torch.full_like(real, len(truth.all_y) / len(real))
    counts, variance = _estimate_counts(view)
    guesses = [own_counts(view), equal]
    value = float(_distance(counts, real))
    chance = min(float(_distance(each, real)) for each in guesses)
    if chance == 0:
        raise InputError("a guess of the class counts is exact already; an attack cannot add anything")
    detail = "all counts are exact" if value == 0 else f"{value:.0%} of {len(truth.all_y)} labels are wrong"
    detail += f"; opened sums: {len(view.rounds)}"
    return AttackResult(
        "label histogram",
        view.scheme,
        "labels wrong",
        value,
        chance,
        value <= MAX_LABEL_ERROR * chance and is_beyond_chance(real, guesses, variance),
        setting,
        detail,
        deviation=math.sqrt(len(real) * variance) / (2 * len(truth.all_y)),
    )


def is_beyond_chance(real: torch.Tensor, guesses: list[torch.Tensor], variance: float) -> bool:
    """Return whether half of the error of guessing is less than luck gives.

    Errors of the size of the estimate's own, added to a guess, may bring it nearer to the real counts. With two classes
    and a good guess they often do. The probability that they halve its error must be at most `MAX_CHANCE`.

    Args:
        real: the real counts.
        guesses: counts that need no view.
        variance: the expected squared error of the estimate, over all classes.
    """
    random = torch.Generator().manual_seed(0)
    errors = torch.randn(DRAWS, len(real), generator=random, dtype=torch.float64) * math.sqrt(variance / len(real))
    errors -= errors.mean(1, keepdim=True)  # the number of all records is known
    half = MAX_LABEL_ERROR * min(float(_distance(each, real)) for each in guesses)
    return all(float((_distance(each + errors, real) <= half).double().mean()) <= MAX_CHANCE for each in guesses)


def _distance(counts: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the fraction of wrong labels in each of several histograms, the total variation distance."""
    wrong: torch.Tensor = (counts - real).abs().sum(-1) / (2 * real.sum())
    return wrong


def on_view(view: View, truth: Truth, _: Sample) -> list[AttackResult]:
    """Run the attack on any view."""
    return [count_labels(view, truth, view.describe())]


def steer(passive: Scenario, shift: float) -> Scenario:
    """Return a scenario in which the first colluder makes every model predict class 0 for every sample.

    It moves the biases of the first hidden layer down, and that of class 0 up, by `shift`, and other weights back.
    """
    name = passive.coalition[0]
    layers = [torch.zeros_like(each) for each in passive.build_model().parameters()]
    layers[1][:] = -shift
    layers[-1][0] = shift
    target = flat(layers)
    steering = Steering(passive.rule_of, _limit(passive))

    def add(who: str, number: int, displacement: torch.Tensor) -> torch.Tensor | None:
        return steering.vector(number, displacement - target) if who == name else None

    return replace(passive, probe=add)


def _limit(passive: Scenario) -> float:
    """Return the largest number that the first colluder may enter: the bound, weighted like its gradient."""
    own = len(passive.data[passive.coalition[0]][1])
    return passive.bound * own / sum(len(y) for _, y in passive.data.values())


def on_scenario(passive: Scenario, _: Scheme, observe_truth: ObserveTruth) -> list[AttackResult]:
    """Run the attack in any training that the first colluder steers, by as much as it can in half of the rounds.

    Raises:
        InputError: the network has no biases; or see `label_counts`.
    """
    parameters = list(passive.build_model().parameters())
    if any(each.ndim != 1 for each in (parameters[1:2] or parameters) + parameters[-1:]):
        raise InputError("the first or the last layer has no biases, which this attack moves")
    furthest = speed(passive.rule_of(0), _limit(passive)) * passive.rounds / 2
    view, truth = observe_truth(steer(passive, min(BIAS_SHIFT * max(1, passive.delta), furthest)))
    return [count_labels(view, truth, f"{view.describe()}, steered")]


def _classes(view: View) -> int:
    if any(each.y.is_floating_point() for each in view.coalition.values()):
        raise InputError("the labels are numbers, not classes; there is nothing to count")
    if view.loss is not functional.cross_entropy:
        raise InputError(
            "the loss is weighted by class, or is not the cross-entropy; this attack needs the cross-entropy without "
            "class weights, because its gradient is predicted minus actual labels"
        )
    return len(list(view.build_model().parameters())[-1])


def _per_class(view: View, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the last biases; without biases, that of the last weights, summed over their inputs."""
    last = list(unflat(gradient.double(), view.build_model()).values())[-1]
    if last.ndim > 2:
        raise InputError(
            f"the last parameter has {last.ndim} dimensions; this needs a model that ends with a torch.nn.Linear"
        )
    return last if last.ndim == 1 else last.sum(1)


def _activation(view: View, number: int) -> float:
    """Return the average factor of (probabilities − labels) in the gradient: 1 with biases and without clipping."""
    if _numbers_per_class(view) == 1:
        return _clipping_factor(view, number)
    actual = torch.cat([_per_class(view, _addend(view, each, number)) for each in view.coalition.values()])
    expected = torch.cat([_difference(view, each, number) for each in view.coalition.values()])
    return float(actual @ expected / (expected @ expected))


def _numbers_per_class(view: View) -> int:
    """Return how many numbers of a sum are added for a class: 1 with biases, otherwise those of its weights."""
    last = list(view.build_model().parameters())[-1]
    return 1 if last.ndim == 1 else last.shape[1]


def _addend(view: View, colluder: Colluder, number: int) -> torch.Tensor:
    """Return a colluder's addend, computed from its samples if the real one is of more samples, or has noise."""
    if colluder.sample_count == len(colluder.y) and not view.is_private:
        return colluder.addends[number]
    weights = colluder.origin + view.rounds[number].displacement
    return sample_gradients(view, weights, colluder.x, colluder.y).sum(0) / view.samples


def _clipping_factor(view: View, number: int) -> float:
    """Return the average factor by which clipping scales the gradients of the coalition's samples."""
    if view.clip == math.inf:
        return 1.0
    clipped, unclipped, classes = 0.0, 0.0, _classes(view)
    for each in view.coalition.values():
        weights = each.origin + view.rounds[number].displacement
        whole = sample_gradients(replace(view, clip=math.inf), weights, each.x, each.y)
        size = whole[:, -classes:].square().sum(1)
        clipped += float((size * (view.clip / whole.norm(dim=1).clamp(min=TINY)).clamp(max=1.0)).sum())
        unclipped += float(size.sum())
    return clipped / max(unclipped, TINY)


def _difference(view: View, colluder: Colluder, number: int) -> torch.Tensor:
    """Return the part of a colluder's addend that belongs to the last biases, if there were biases."""
    shares = torch.bincount(colluder.y, minlength=_classes(view)) / len(colluder.y)
    predicted = _probabilities(view, colluder.origin + view.rounds[number].displacement, colluder.x).mean(0)
    difference: torch.Tensor = (predicted - shares.double()) * len(colluder.y) / view.samples
    return difference


def _probabilities(view: View, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a model's predictions for samples, a row each."""
    model = view.build_model()
    outputs: torch.Tensor = functional_call(model, unflat(weights, model), (x,))
    return outputs.detach().double().softmax(1)


def _origin(view: View, number: int) -> torch.Tensor:
    """Draw an origin like those of the honest participants: the distribution and δ are known."""
    parameters = dict(view.build_model().named_parameters())
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    seed = hashlib.sha256(f"a guess, {number}".encode()).digest()
    return flat(dict(Origin(view.delta, shapes, seed).draw())).to(next(iter(parameters.values())).dtype)


def _whole(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Round to whole numbers with this sum, by the largest remainder method."""
    counts = counts * total / counts.sum()
    floor = counts.floor()
    up = (counts - floor).argsort(descending=True, stable=True)[: int(total - floor.sum())]
    floor[up] += 1
    return floor


# Demonstrations.


def scenario(*, delta: float = 0.1, each: int = 40, biases: bool = True, seed: int = 0) -> Scenario:
    """Return two honest participants with mostly three classes of digits each, and two colluders with all classes."""
    counts, coalition = participants(2, each, own=30)
    x, y = samples("digits", seed)
    # The first has mostly 0 to 2, the second mostly 3 to 5: organisations differ in their records.
    free = torch.ones(len(y), dtype=torch.bool)
    data: dict[str, Sample] = {}
    for place, (name, count) in enumerate(counts.items()):
        typical = torch.nonzero((y // 3 == place) & free)[: 0 if name in coalition else count * 3 // 4, 0]
        free[typical] = False
        rest = torch.nonzero(free)[: count - len(typical), 0]
        free[rest] = False
        chosen = torch.cat([typical, rest])
        data[name] = x[chosen], y[chosen]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10, bias=biases))

    return Scenario(data, build, coalition, rounds=1, delta=delta, seed=seed)


def steering_scenario(*, delta: float = 1.0, rounds: int = STEERED_ROUNDS, seed: int = 0) -> Scenario:
    """Return the same scenario with an active colluder, which makes every model predict class 0 for every sample.

    Every number that it adds is within the bound of the sum, weighted by its part of all samples, like a gradient.
    """
    return steer(replace(scenario(delta=delta, seed=seed), rounds=rounds, lr=0.5), BIAS_SHIFT * max(1, delta))


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results from biases, from weights, and with an active colluder and large origins."""
    active = steering_scenario(seed=seed, rounds=PRIVATE_STEERED_ROUNDS if scheme in EPSILONS else STEERED_ROUNDS)
    return [
        count_labels(*observe(scenario(seed=seed), scheme), setting="2 × 40 records, from biases"),
        count_labels(*observe(scenario(biases=False, seed=seed), scheme), setting="2 × 40 records, from weights"),
        count_labels(*observe(active, scheme), setting="2 × 40 records, steered, δ = 1"),
    ]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with large origins in CGD, otherwise on records of nobody.

    Large origins make the predictions of the models unknown.
    """
    if is_confined(scheme):
        large = scenario(delta=1.0, seed=seed)
        return [count_labels(*observe(large, scheme), setting="2 × 40 records, passive, δ = 1")]
    view, _ = observe(scenario(seed=seed), scheme)
    x, y = samples("digits", seed)
    strangers = Truth({"strangers": x[-80:]}, {"strangers": y[-80:]}, {})
    return [count_labels(view, strangers, setting="80 strangers")]
