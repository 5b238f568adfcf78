"""How many of the honest participants' samples are in each class: from the last layer's gradient of one round.

Under cross-entropy, the gradient with respect to the last layer's biases is the sum of (probabilities − labels) over
the samples. The honest participants' part of it, times n, is what their models predict for each class less what is
there. At the start a model predicts about the same for everything, so the coalition sees what it predicts for its own
samples. In FedSGD it has the model; in CGD it draws some like those of the honest participants, and the larger the
origins are, the less these say.

A colluder that enters a vector of its own makes sure of it. It moves the hidden units' biases down until all units are
silent, and one last bias up, in everybody's model alike. All then predict that one class for every sample, whatever the
origins are, and what is left of the sum is the labels. So of the first and the last round, the one is read in which it
is surest what the models predict.

Without biases the gradient of the last layer's weights does as well, summed over its inputs: every sample's part is
multiplied by the sum of its activations, of which the coalition takes the average from its own gradients. What clipping
for differential privacy takes away, it sees in them, too.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from cgd.audit.embedded import participants, samples
from cgd.audit.schemes import Scenario, observe
from cgd.audit.view import Finding, Truth, flat, unflat
from cgd.errors import InputError
from cgd.optim.origin import Origin

if TYPE_CHECKING:
    from cgd.audit.schemes import Sample
    from cgd.audit.view import Colluder, Scheme, View

# An attack succeeds if it halves the distance of guessing.
MAX_LABEL_ERROR = 0.5
# How many models a coalition draws to see what the honest participants' may predict.
ORIGINS = 16
TINY = 1e-12
# How far a steering colluder moves biases, for δ up to 1: a digit is some 4 long, and 5 deviations are rarely passed.
FAR = 20.0


def label_counts(view: View) -> torch.Tensor:
    """How many of the honest participants' samples are in each class, as the first or last round tells; whole numbers.

    The less sure it is what their models predict, the more all classes are taken to be alike.

    Raises:
        InputError: the labels are no classes, or the model does not end with a fully-connected layer.
    """
    guess = torch.full((_classes(view),), view.honest_samples / _classes(view), dtype=torch.float64)
    counts, doubt = min((_told(view, number) for number in (0, len(view.rounds) - 1)), key=lambda each: each[1])
    unusual = float(((counts - guess) ** 2).sum())
    trust = 1 - doubt / unusual if unusual > 2 * doubt else 0.0
    return _whole((guess + trust * (counts - guess)).clamp(min=0), view.honest_samples)


def _told(view: View, number: int) -> tuple[torch.Tensor, float]:
    """What a round tells about the counts, and its expected squared error."""
    shared, moved = view.rounds[number].weights, view.rounds[number].displacement
    drawn = [shared] if shared is not None else [_origin(view, place) + moved for place in range(ORIGINS)]
    own = torch.cat([each.x for each in view.coalition.values()])
    predictions = torch.stack([_probabilities(view, each, own) for each in drawn])  # models × samples × classes
    means = predictions.mean(1)
    scale = view.samples / _activation(view, number)
    counts = view.honest_samples * means.mean(0) - scale * _per_class(view, view.honest_sum(number))
    # Everybody's mean prediction differs as much as these do, and the records are others than ours; noise is added to
    # every class.
    models = means.var(dim=0, correction=0).sum() / len(view.honest)
    records = predictions.var(dim=1, correction=0).mean(0).sum() * (1 / view.honest_samples + 1 / len(own))
    doubt = view.honest_samples**2 * (models + records) + len(counts) * (scale * view.noise) ** 2
    return counts, float(doubt)


def own_counts(view: View) -> torch.Tensor:
    """What the coalition would guess from its own labels."""
    labels = torch.cat([each.y for each in view.coalition.values()])
    counts = torch.bincount(labels, minlength=_classes(view)).double()
    return _whole(counts * view.honest_samples / counts.sum(), view.honest_samples)


def count_labels(view: View, truth: Truth, setting: str = "") -> Finding:
    """How close the histogram comes. The metric is the part of the labels that is wrong (total variation distance).

    Chance is the better of two guesses, the coalition's own labels and all classes alike. It succeeds with at most half
    of that.

    Raises:
        InputError: a guess is right already.
    """
    real = torch.bincount(truth.all_y, minlength=_classes(view)).double()
    alike = torch.full_like(real, len(truth.all_y) / len(real))

    def distance(counts: torch.Tensor) -> float:
        return float((counts - real).abs().sum() / (2 * real.sum()))

    value = distance(label_counts(view))
    chance = min(distance(own_counts(view)), distance(alike))
    if chance == 0:
        raise InputError("the labels are exactly as one would guess, so that nothing can be learned about them")
    detail = "every class is counted exactly" if value == 0 else f"{value:.0%} of {len(truth.all_y)} labels are wrong"
    return Finding(
        "label histogram",
        view.scheme,
        "labels wrong",
        value,
        chance,
        value <= MAX_LABEL_ERROR * chance,
        setting,
        detail,
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


def _activation(view: View, number: int) -> float:
    """By what the last layer multiplies (probabilities − labels) on average: 1 with biases, if nothing is clipped."""
    if list(view.build_model().parameters())[-1].ndim == 1:
        return _kept(view, number)
    seen = torch.cat([_per_class(view, each.addends[number]) for each in view.coalition.values()])
    meant = torch.cat([_difference(view, each, number) for each in view.coalition.values()])
    return float(seen @ meant / (meant @ meant))


def _kept(view: View, number: int) -> float:
    """What clipping leaves of (probabilities − labels) on average, as the coalition sees it of its own samples."""
    if view.clip == math.inf:
        return 1.0
    model = view.build_model()

    def value(given: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return view.loss(functional_call(model, given, (sample[None],)), label[None])

    kept, whole = 0.0, 0.0
    for each in view.coalition.values():
        weights = unflat(each.origin + view.rounds[number].displacement, model)
        gradients = list(vmap(grad(value), in_dims=(None, 0, 0))(weights, each.x, each.y).values())
        norms = torch.cat([part.reshape(len(each.y), -1) for part in gradients], dim=1).norm(dim=1)
        size = gradients[-1].square().sum(1)
        kept += float((size * (view.clip / norms.clamp(min=TINY)).clamp(max=1.0)).sum())
        whole += float(size.sum())
    return kept / max(whole, TINY)


def _difference(view: View, colluder: Colluder, number: int) -> torch.Tensor:
    """What a bias would have got of a colluder's addend."""
    shares = torch.bincount(colluder.y, minlength=_classes(view)) / len(colluder.y)
    predicted = _probabilities(view, colluder.origin + view.rounds[number].displacement, colluder.x).mean(0)
    difference: torch.Tensor = (predicted - shares.double()) * len(colluder.y) / view.samples
    return difference


def _probabilities(view: View, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a model predicts for samples, a row for each."""
    model = view.build_model()
    outputs: torch.Tensor = functional_call(model, unflat(weights, model), (x,))
    return outputs.detach().double().softmax(1)


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


def colony(*, delta: float = 0.1, each: int = 40, biases: bool = True, seed: int = 0) -> Scenario:
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

    return Scenario(data, build, coalition, rounds=1, delta=delta, seed=seed)


def steered(*, delta: float = 1.0, rounds: int = 16, seed: int = 0) -> Scenario:
    """The same, and the first colluder makes every model predict class 0 for every sample, before the last round.

    Every number that it adds is within the bound of the sum, weighted by its part of all samples, as a gradient is.
    """
    seen = replace(colony(delta=delta, seed=seed), rounds=rounds, lr=0.5)
    name = seen.coalition[0]
    limit = seen.bound * len(seen.data[name][1]) / sum(len(y) for _, y in seen.data.values())
    layers = [torch.zeros_like(each) for each in seen.build_model().parameters()]  # what training moves is moved back
    layers[1][:] = -FAR * max(1, delta)
    layers[-1][0] = FAR * max(1, delta)
    wanted = flat(layers)

    def steer(who: str, _: int, displacement: torch.Tensor) -> torch.Tensor | None:
        return ((displacement - wanted) / seen.lr).clamp(-limit, limit) if who == name else None

    return replace(seen, probe=steer)


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """From biases, from weights, and by steering, with large origins."""
    active = steered(seed=seed)
    return [
        count_labels(*observe(colony(seed=seed), scheme), setting="2 × 40 records, from biases"),
        count_labels(*observe(colony(biases=False, seed=seed), scheme), setting="2 × 40 records, from weights"),
        count_labels(*observe(active, scheme), setting=f"2 × 40 records, steered, δ = 1, {active.rounds} rounds"),
    ]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """What hides them: in CGD large origins, with which nobody knows what is predicted; in "dp" much noise.

    Otherwise people who took no part, whose labels cannot come out.
    """
    if scheme == "cgd":
        return [count_labels(*observe(colony(delta=1.0, seed=seed), scheme), setting="2 × 40 records, passive, δ = 1")]
    if scheme == "dp":
        noisy = replace(colony(seed=seed), noise=20.0)
        return [count_labels(*observe(noisy, "dp"), setting="2 × 40 records, noise of 20 clipping norms")]
    view, _ = observe(colony(seed=seed), scheme)
    x, y = samples("digits", seed)
    strangers = Truth({"strangers": x[-80:]}, {"strangers": y[-80:]}, {})
    return [count_labels(view, strangers, setting="80 strangers")]
