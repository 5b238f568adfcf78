"""How many of the honest participants' samples are in each class: from the last layer's gradient of the first round.

Under cross-entropy, the gradient with respect to the last layer's biases is the sum of (probabilities − labels) over
the samples. The honest participants' part of it, times n, is what their models predict for each class less what is
there. At the start a model predicts about the same for everything, so the coalition sees what it predicts for its own
samples. In FedSGD it has the model; in CGD it draws some like those of the honest participants, and the larger the
origins are, the less these say.

Without biases the gradient of the last layer's weights does as well, summed over its inputs: every sample's part is
multiplied by the sum of its activations, of which the coalition takes the average from its own gradients.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call

from cgd.errors import InputError
from cgd.learning.confinement import Origin
from cgd.privacy.embedded import participants, samples
from cgd.privacy.schemes import Colony, observe
from cgd.privacy.view import Finding, Truth, flat, unflat

if TYPE_CHECKING:
    from cgd.privacy.schemes import Sample
    from cgd.privacy.view import Colluder, Scheme, View

# An attack succeeds if it halves the distance of guessing.
CLEARLY = 0.5
# How many models a coalition draws to see what the honest participants' may predict.
ORIGINS = 16


def label_counts(view: View) -> torch.Tensor:
    """How many of the honest participants' samples are in each class, as the first round tells; whole numbers.

    The less sure it is what their models predict, the more all classes are taken to be alike.

    Raises:
        InputError: the labels are no classes, or the model does not end with a fully-connected layer.
    """
    guess = torch.full((_classes(view),), view.honest_samples / _classes(view), dtype=torch.float64)
    shared = view.rounds[0].weights
    drawn = [shared] if shared is not None else [_origin(view, number) for number in range(ORIGINS)]
    predictions = torch.stack([_probabilities(view, each) for each in drawn])
    scale = view.samples / _activation(view)
    counts = view.honest_samples * predictions.mean(0) - scale * _per_class(view, view.honest_sum(0))
    # Everybody's mean prediction differs as much as these do; noise is added to every class.
    variance = predictions.var(dim=0, correction=0).sum() / len(view.honest)
    doubt = view.honest_samples**2 * variance + len(counts) * (scale * view.noise) ** 2
    unusual = ((counts - guess) ** 2).sum()
    trust = float(1 - doubt / unusual) if unusual > 2 * doubt else 0.0
    return _whole((guess + trust * (counts - guess)).clamp(min=0), view.honest_samples)


def own_counts(view: View) -> torch.Tensor:
    """What the coalition would guess from its own labels."""
    labels = torch.cat([each.y for each in view.coalition.values()])
    counts = torch.bincount(labels, minlength=_classes(view)).double()
    return _whole(counts * view.honest_samples / counts.sum(), view.honest_samples)


def count_labels(view: View, truth: Truth, setting: str = "") -> Finding:
    """How close the histogram comes. The metric is the part of the labels that is wrong (total variation distance).

    Chance is the better of two guesses, the coalition's own labels and all classes alike. It succeeds with at most half
    of that.
    """
    real = torch.bincount(truth.all_y, minlength=_classes(view)).double()
    alike = torch.full_like(real, len(truth.all_y) / len(real))

    def distance(counts: torch.Tensor) -> float:
        return float((counts - real).abs().sum() / (2 * real.sum()))

    value = distance(label_counts(view))
    chance = min(distance(own_counts(view)), distance(alike))
    detail = "every class is counted exactly" if value == 0 else f"{value:.0%} of {len(truth.all_y)} labels are wrong"
    return Finding(
        "label histogram", view.scheme, "labels wrong", value, chance, value <= CLEARLY * chance > 0, setting, detail
    )


def _classes(view: View) -> int:
    if any(each.y.is_floating_point() for each in view.coalition.values()):
        raise InputError("the labels are numbers, not classes; there is nothing to count")
    return len(list(view.build_model().parameters())[-1])


def _per_class(view: View, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the last biases; without biases, of the last weights, summed over their inputs."""
    last = list(unflat(gradient.double(), view.build_model()).values())[-1]
    if last.ndim > 2:
        raise InputError(
            f"the last parameter has {last.ndim} dimensions; this needs a model that ends with a torch.nn.Linear"
        )
    return last if last.ndim == 1 else last.sum(1)


def _activation(view: View) -> float:
    """By what the last layer multiplies (probabilities − labels) on average: 1 with biases."""
    if list(view.build_model().parameters())[-1].ndim == 1:
        return 1.0
    seen = torch.cat([_per_class(view, each.addends[0]) for each in view.coalition.values()])
    meant = torch.cat([_difference(view, each) for each in view.coalition.values()])
    return float(seen @ meant / (meant @ meant))


def _difference(view: View, colluder: Colluder) -> torch.Tensor:
    """What a bias would have got of a colluder's addend."""
    shares = torch.bincount(colluder.y, minlength=_classes(view)) / len(colluder.y)
    predicted = _probabilities(view, colluder.origin, colluder.x)
    difference: torch.Tensor = (predicted - shares.double()) * len(colluder.y) / view.samples
    return difference


def _probabilities(view: View, weights: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
    """What a model predicts for the coalition's samples, or these, on average."""
    model = view.build_model()
    x = torch.cat([each.x for each in view.coalition.values()]) if x is None else x
    outputs: torch.Tensor = functional_call(model, unflat(weights, model), (x,))
    return outputs.detach().double().softmax(1).mean(0)


def _origin(view: View, number: int) -> torch.Tensor:
    """An origin as an honest participant may have drawn it: everybody knows how, and about which δ."""
    parameters = dict(view.build_model().named_parameters())
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    seed = hashlib.sha256(f"a guess, {number}".encode()).digest()
    return flat(dict(Origin(view.delta, shapes, seed).draw())).to(next(iter(parameters.values())).dtype)


def _whole(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Whole numbers nearest to these with this sum: the largest remainders are rounded up."""
    counts = counts * total / counts.sum()
    floor = counts.floor()
    up = (counts - floor).argsort(descending=True, stable=True)[: int(total - floor.sum())]
    floor[up] += 1
    return floor


# The settings it is shown in.


def colony(*, delta: float = 0.1, each: int = 40, biases: bool = True, seed: int = 0) -> Colony:
    """Two honest participants with digits of a few kinds, and two colluders with all kinds."""
    counts, coalition = participants(2, each, own=30)
    x, y = samples("digits", seed)
    # The first has mostly 0 to 2, the second mostly 3 to 5, as organisations with patients of their own would.
    left = torch.ones(len(y), dtype=torch.bool)
    data: dict[str, Sample] = {}
    for place, (name, count) in enumerate(counts.items()):
        often = (y // 3 == place) & left
        usual = torch.nonzero(often)[: count * 3 // 4, 0] if name not in coalition else torch.zeros(0, dtype=torch.long)
        left[usual] = False
        rest = torch.nonzero(left)[: count - len(usual), 0]
        left[rest] = False
        chosen = torch.cat([usual, rest])
        data[name] = x[chosen], y[chosen]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10, bias=biases))

    return Colony(data, build, coalition, rounds=1, delta=delta, seed=seed)


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """From biases, and from weights."""
    return [
        count_labels(*observe(colony(seed=seed), scheme), setting="2 × 40 records, from biases"),
        count_labels(*observe(colony(biases=False, seed=seed), scheme), setting="2 × 40 records, from weights"),
    ]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """What hides them: in CGD large origins, with which nobody knows what is predicted; in "dp" much noise.

    Otherwise people who took no part, whose labels cannot come out.
    """
    if scheme == "cgd":
        return [count_labels(*observe(colony(delta=1.0, seed=seed), scheme), setting="2 × 40 records, δ = 1")]
    if scheme == "dp":
        noisy = replace(colony(seed=seed), noise=20.0)
        return [count_labels(*observe(noisy, "dp"), setting="2 × 40 records, noise of 20 clipping norms")]
    view, _ = observe(colony(seed=seed), scheme)
    x, y = samples("digits", seed)
    strangers = Truth({"strangers": x[-80:]}, {"strangers": y[-80:]}, {})
    return [count_labels(view, strangers, setting="80 strangers")]
