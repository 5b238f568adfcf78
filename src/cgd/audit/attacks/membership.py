"""Membership inference: is a known record among those that the honest participants train on?

Candidates are the honest participants' records (members) and fresh records of the same kind (non-members).

- `span_scores`: the gradient of a fully-connected first layer is a linear combination of the input records, for any
  weights. While there are fewer records than inputs, they span a subspace that does not contain a fresh record. Each
  hidden unit of each round gives a vector of it. Confinement does not matter.
- `leverage_scores`: with more records than inputs, the span contains every record, but members still have a lower
  leverage in the gradients than fresh records. The advantage shrinks slowly with the number of records
  (`benchmarks/leverage.py`).
- `loss_scores`: the loss of a trained model is lower on its training records. In FedSGD the coalition has the common
  model; in CGD it has its own models, with other origins and the same displacement. In CGD the displacement itself,
  used as a model (`displacement_scores`), is the better one: it was fitted to the records, and origins are noise.
- `gradient_scores`: a member's gradient is a part of the sum, so that the sum is more similar to it. With exact sums
  the others see more; with noise this is the best of these, because it adds up all that a record contributes.

An attack succeeds with an AUC of at least 0.6 that is 3 standard deviations above chance, which happens by chance once
in 700 times.

Differential privacy bounds the AUC (`allowed_auc`). Two trainings that differ in one of two records, x and x', are as
hard to distinguish as N(−μ, 1) and N(μ, 1): each record changes the sum by at most C, where the noise has C/μ. By
symmetry, x ranks above x' in the one as often as below in the other. So if x was used and x' was not, x ranks above x'
with a probability of at most Φ(μ). This is reached by opposite gradients; orthogonal ones reach Φ(μ/√2), which is also
the AUC of the decision about a single record, whether it was used or not.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from scipy.stats import mannwhitneyu
from torch import nn
from torch.func import functional_call, vmap

from cgd.audit.embedded import participants, samples, split
from cgd.audit.results import AttackResult
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import observe
from cgd.audit.view import Truth, gradient_rows, has_bias, is_confined, limit_rows, sample_gradients, unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.audit.embedded import Name
    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, View

    Score = Callable[[View, Sample], torch.Tensor]

MIN_AUC = 0.6
MIN_DEVIATIONS = 3.0
FALSE_POSITIVE_RATE = 0.001
FLOAT_ROUNDING = 1e-7
# On any view, the numbers of members and of fresh records that are compared.
MIN_CANDIDATES, MAX_CANDIDATES = 5, 2000
# Of gradients that are compared with the sums: candidates × parameters × rounds; and of those in memory at once.
MAX_GRADIENT_NUMBERS, CHUNK_NUMBERS = 2e9, 2e7


def span(view: View) -> torch.Tensor:
    """Return an orthonormal basis, row by row, of the span of the honest first-layer gradients beyond noise."""
    rows = gradient_rows(view)
    _, strength, directions = torch.linalg.svd(rows, full_matrices=False)
    # The largest singular value of noise alone is about (√rows + √columns)·σ.
    found: torch.Tensor = directions[strength > 2 * _noise(view, rows) * sum(side**0.5 for side in rows.shape)]
    return found


def span_scores(view: View, candidates: Sample) -> torch.Tensor:
    """Score each candidate by minus the part of its norm outside the span of the gradients."""
    basis = span(view)
    x = _with_bias(view, candidates[0])
    outside: torch.Tensor = (x - x @ basis.T @ basis).norm(dim=1) / x.norm(dim=1)
    # Smaller values are rounding errors.
    return torch.where(outside < 1e-9, 0.0, -outside)


def leverage_scores(view: View, candidates: Sample) -> torch.Tensor:
    """Score each candidate by minus its leverage x·(GᵀG)⁻¹·xᵀ in the gradient rows G.

    The rows are combinations of the members, which therefore have a lower leverage than fresh records, even if there
    are more records than inputs and the span contains all of them.
    """
    rows = gradient_rows(view)
    x = _with_bias(view, candidates[0])
    noise = len(rows) * _noise(view, rows) ** 2
    inverse = torch.linalg.inv(rows.T @ rows + noise * torch.eye(rows.shape[1], dtype=torch.float64))
    scores: torch.Tensor = -((x @ inverse) * x).sum(dim=1)
    return scores


def loss_scores(view: View, candidates: Sample) -> torch.Tensor:
    """Score each candidate by minus its loss, averaged over the coalition's final models."""
    return -torch.stack([_losses(view, each.origin, candidates) for each in view.coalition.values()]).mean(0)


def displacement_scores(view: View, candidates: Sample) -> torch.Tensor:
    """Score each candidate by minus its loss with the displacement as the model: origins are zero on average."""
    return -_losses(view, torch.zeros_like(view.final_displacement), candidates)


def gradient_scores(view: View, candidates: Sample) -> torch.Tensor:
    """Score each candidate by the product of its gradient with the sums, both without the mean gradient of our records.

    In CGD, gradients are means over the models of the colluders.
    """
    x, y = candidates
    size = view.final_displacement.numel()
    rounds = max(1, min(len(view.rounds), int(MAX_GRADIENT_NUMBERS / (size * len(y)))))
    scores = torch.zeros(len(y), dtype=torch.float64)
    for number in range(rounds):
        models = _models(view, number)
        own = [_gradients(view, models, each.x, each.y).sum(0) for each in view.coalition.values()]
        mean = torch.stack(own).sum(0) / sum(len(each.y) for each in view.coalition.values())
        unexpected = view.samples_in(number) * view.honest_sum(number).double() - view.honest_samples * mean
        chunk = max(1, int(CHUNK_NUMBERS / size))
        for start in range(0, len(y), chunk):
            part = slice(start, start + chunk)
            scores[part] += (_gradients(view, models, x[part], y[part]) - mean) @ unexpected
    return scores


def _models(view: View, number: int) -> list[torch.Tensor]:
    """Return the models of a round that the coalition has: the common one, or those of the colluders."""
    common, moved = view.rounds[number].weights, view.rounds[number].displacement
    return [each.origin + moved for each in view.coalition.values()] if common is None else [common]


def _gradients(view: View, models: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([sample_gradients(view, each, x, y) for each in models]).mean(0).double()


def _with_bias(view: View, x: torch.Tensor) -> torch.Tensor:
    """Return records with a feature that is always one, if the first layer has a bias."""
    ones = torch.ones(len(x), int(has_bias(view.build_model())), dtype=torch.float64)
    return torch.cat([x.reshape(len(x), -1).double(), ones], dim=1)


def _noise(view: View, rows: torch.Tensor) -> float:
    return max(view.noise, FLOAT_ROUNDING * float(rows.abs().max()))


def _losses(view: View, origin: torch.Tensor, candidates: Sample) -> torch.Tensor:
    x, y = candidates
    model = view.build_model()
    outputs = functional_call(model, unflat(origin + view.final_displacement, model), (x,)).detach()
    losses: torch.Tensor = vmap(lambda output, label: view.loss(output[None], label[None]))(outputs, y)
    return losses.double()


def area_under_curve(members: torch.Tensor, others: torch.Tensor) -> float:
    """Return the probability that a member has a higher score than a non-member; a tie counts half."""
    statistic = mannwhitneyu(members.numpy(), others.numpy(), method="asymptotic").statistic
    return float(statistic / (len(members) * len(others)))


def true_positive_rate(
    members: torch.Tensor, others: torch.Tensor, false_positive_rate: float = FALSE_POSITIVE_RATE
) -> float:
    """Return the fraction of members above the lowest threshold with at most this false positive rate."""
    allowed = int(false_positive_rate * len(others))
    threshold = others.sort(descending=True).values[allowed]
    return float((members > threshold).double().mean())


def infer(view: View, truth: Truth, fresh: Sample, score: Score, attack: str, setting: str = "") -> AttackResult:
    """Measure the AUC of scores that separate the honest participants' samples from fresh ones; 0.5 by chance."""
    members, others = score(view, (truth.all_x, truth.all_y)), score(view, fresh)
    value = area_under_curve(members, others)
    # The standard deviation of the Mann-Whitney statistic if both have the same distribution.
    chance_deviation = ((len(members) + len(others) + 1) / (12 * len(members) * len(others))) ** 0.5
    succeeds = value >= MIN_AUC and value - 0.5 > MIN_DEVIATIONS * chance_deviation
    many = FALSE_POSITIVE_RATE * len(others) >= 1
    rate = f"{FALSE_POSITIVE_RATE:.1%} false positives" if many else "no false positive"
    found = true_positive_rate(members, others)
    detail = f"{round(found * len(members))} of {len(members)} members ({found:.0%}) are found with {rate} among "
    detail += f"{len(others)} others"
    undecided = value >= MIN_AUC and not succeeds
    allowed = allowed_auc(view.mu) if view.is_private else None
    return AttackResult(
        attack,
        view.scheme,
        "AUC",
        value,
        0.5,
        succeeds,
        setting,
        detail,
        undecided=undecided,
        deviation=chance_deviation,
        allowed=allowed,
    )


def allowed_auc(mu: float) -> float:
    """Return the largest AUC between records that were used and others, if a training is μ-GDP: Φ(μ).

    Examples:
        >>> round(allowed_auc(0.5016), 3)
        0.692
    """
    return NormalDist().cdf(mu)


def allowed_record_auc(mu: float) -> float:
    """Return the largest AUC of a test whether one given record was used, if a training is μ-GDP: Φ(μ/√2).

    Examples:
        >>> round(allowed_record_auc(0.5016), 3)
        0.639
    """
    return NormalDist().cdf(mu / math.sqrt(2))


def span_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> AttackResult:
    """Infer membership by `span_scores`."""
    return infer(view, truth, fresh, span_scores, "membership, by the span of first-layer gradients", setting)


def leverage_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> AttackResult:
    """Infer membership by `leverage_scores`."""
    return infer(view, truth, fresh, leverage_scores, "membership, by leverage in first-layer gradients", setting)


def loss_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> AttackResult:
    """Infer membership by `loss_scores`."""
    return infer(view, truth, fresh, loss_scores, "membership, from the loss of final models", setting)


def displacement_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> AttackResult:
    """Infer membership by `displacement_scores`."""
    return infer(view, truth, fresh, displacement_scores, "membership, from the loss of the displacement", setting)


def gradient_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> AttackResult:
    """Infer membership by `gradient_scores`."""
    return infer(view, truth, fresh, gradient_scores, "membership, by the gradient of the record", setting)


def gradients_on_view(view: View, truth: Truth, fresh: Sample) -> list[AttackResult]:
    """Run the attacks on first-layer gradients on any view."""
    members, others = _candidates(truth, fresh)
    few, setting = limit_rows(view), view.describe()
    return [span_membership(few, members, others, setting), leverage_membership(few, members, others, setting)]


def loss_on_view(view: View, truth: Truth, fresh: Sample) -> list[AttackResult]:
    """Run the attacks on the loss and its gradient on any view."""
    members, others = _candidates(truth, fresh)
    methods = [gradient_membership, loss_membership]
    if is_confined(view.scheme):
        methods.append(displacement_membership)
    return [method(view, members, others, view.describe()) for method in methods]


def _candidates(truth: Truth, fresh: Sample) -> tuple[Truth, Sample]:
    x, y = fresh
    if min(len(y), len(truth.all_y)) < MIN_CANDIDATES:
        raise InputError(
            f"there are {len(truth.all_y)} records and {len(y)} fresh ones to compare them with; membership inference "
            f"needs at least {MIN_CANDIDATES} of each"
        )
    members = Truth({"": truth.all_x[:MAX_CANDIDATES]}, {"": truth.all_y[:MAX_CANDIDATES]}, {})
    return members, (x[:MAX_CANDIDATES], y[:MAX_CANDIDATES])


# Demonstrations.


def scenario(
    each: int, rounds: int, *, data: Name = "digits", delta: float = 0.1, hidden: int = 32, seed: int = 0
) -> tuple[Scenario, Sample]:
    """Return two honest participants and two colluders with 20 records each, and the remaining records as fresh ones.

    Args:
        each: the number of records of an honest participant.
        rounds: the number of steps.
        data: digits of 64 pixels, or tumours with 30 measurements.
        delta: δ of the origins.
        hidden: the number of hidden units.
        seed: the seed of the split and the origins.
    """
    counts, coalition = participants(2, each, own=20)
    given, fresh = split(samples(data, seed), counts)
    features, classes = fresh[0].shape[1], 10 if data == "digits" else 2

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    return Scenario(given, build, coalition, rounds=rounds, lr=0.5, delta=delta, seed=seed), fresh


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with few records for the span and gradients, more for leverage, many rounds for the loss."""
    digits, other_digits = scenario(20, 5, seed=seed)
    tumours, other_tumours = scenario(10, 5, data="breast-cancer", seed=seed)
    more, other_more = scenario(20, 5, data="breast-cancer", seed=seed)
    many, other_many = scenario(40, 5, data="breast-cancer", seed=seed)
    most, other_most = scenario(100, 5, seed=seed)
    trained, fresh = scenario(40, 150, hidden=256, seed=seed)
    view, truth = observe(trained, scheme)
    results = [
        span_membership(*observe(digits, scheme), other_digits, "2 × 20 records of 64 pixels, 5 rounds"),
        span_membership(*observe(tumours, scheme), other_tumours, "2 × 10 records of 30 measurements, 5 rounds"),
        leverage_membership(*observe(more, scheme), other_more, "2 × 20 records of 30 measurements, 5 rounds"),
        leverage_membership(*observe(many, scheme), other_many, "2 × 40 records of 30 measurements, 5 rounds"),
        leverage_membership(*observe(most, scheme), other_most, "2 × 100 records of 64 pixels, 5 rounds"),
        gradient_membership(*observe(digits, scheme), other_digits, "2 × 20 records of 64 pixels, 5 rounds"),
        gradient_membership(*observe(more, scheme), other_more, "2 × 20 records of 30 measurements, 5 rounds"),
        loss_membership(view, truth, fresh, "2 × 40 records, 150 rounds"),
    ]
    if is_confined(scheme):
        results.append(displacement_membership(view, truth, fresh, "2 × 40 records, 150 rounds"))
    return results


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with more tumours than measurements for the span, and on records that nobody trained on.

    Digits would need far more records: some pixels are used so rarely that a fresh digit may use one that no record
    uses, and so lie outside the span.
    """
    tumours, others = scenario(100, 5, data="breast-cancer", seed=seed)
    spanned = span_membership(*observe(tumours, scheme), others, "2 × 100 records of 30 measurements, 5 rounds")
    few, others = scenario(20, 5, data="breast-cancer", seed=seed)
    trained, fresh = scenario(40, 150, hidden=256, seed=seed)
    return [
        spanned,
        leverage_membership(observe(few, scheme)[0], *_strangers(others, 200), "200 records of nobody, 5 rounds"),
        gradient_membership(observe(few, scheme)[0], *_strangers(others, 200), "200 records of nobody, 5 rounds"),
        loss_membership(observe(trained, scheme)[0], *_strangers(fresh, 80), "80 records of nobody, 150 rounds"),
    ]


def _strangers(fresh: Sample, count: int) -> tuple[Truth, Sample]:
    """Return some records that nobody trained on as if they were members, and the others."""
    x, y = fresh
    return Truth({"nobody": x[:count]}, {"nobody": y[:count]}, {}), (x[count:], y[count:])
