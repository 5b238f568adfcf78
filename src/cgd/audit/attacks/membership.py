"""Whether a known record is among those that the honest participants train on.

A record is a candidate: those of the honest participants (members) against fresh ones of the same kind (non-members).

- `span_scores`: the gradient of a fully-connected first layer is a combination of the input records, whatever the
  weights are. While there are fewer records than inputs, they span a subspace in which a fresh record does not lie.
  Each hidden unit and each round gives a vector of it. Confinement does not matter.
- `leverage_scores`: with a few times more records than inputs, all lie in the span, but members are still more like the
  gradients than fresh records are.
- `loss_scores`: a network's loss is lower on what it was trained on. It needs a trained model. FedSGD hands out the
  common one; a CGD coalition has its own models, with other origins and the same displacement. In CGD the displacement
  alone, `displacement_scores`, says more than those: it was made for the records, and the coalition's origins only
  blur it.

An attack succeeds with an AUC of at least 0.6 that is 3 standard deviations above chance: once in 700 times if it knows
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call, vmap

from cgd.audit.embedded import dealt, participants, samples
from cgd.audit.first_layer import gradient_rows, has_bias
from cgd.audit.schemes import Scenario, observe
from cgd.audit.view import Finding, Truth, unflat

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.audit.embedded import Name
    from cgd.audit.schemes import Sample
    from cgd.audit.view import Scheme, View

    Score = Callable[[View, Sample], torch.Tensor]

MIN_AUC = 0.6
DEVIATIONS = 3.0
FALSE_ALARMS = 0.001
FLOAT_ROUNDING = 1e-7


def spanned(view: View) -> torch.Tensor:
    """An orthonormal basis, row by row, of what the honest participants' first-layer gradients span beyond noise."""
    rows = gradient_rows(view)
    _, strength, directions = torch.linalg.svd(rows, full_matrices=False)
    # The largest singular value of noise alone is about (√rows + √columns)·σ.
    found: torch.Tensor = directions[strength > 2 * _noise(view, rows) * sum(side**0.5 for side in rows.shape)]
    return found


def span_scores(view: View, candidates: Sample) -> torch.Tensor:
    """How well each candidate lies in what the gradients span: minus the part of its length that does not."""
    basis = spanned(view)
    x = _with_bias(view, candidates[0])
    outside: torch.Tensor = (x - x @ basis.T @ basis).norm(dim=1) / x.norm(dim=1)
    # Below this, it is rounding that is compared.
    return torch.where(outside < 1e-9, 0.0, -outside)


def leverage_scores(view: View, candidates: Sample) -> torch.Tensor:
    """How much like the gradients each candidate is: minus its leverage x·(GᵀG)⁻¹·xᵀ in their rows G.

    The rows are made of the members, so they are long where members are; a fresh record stands out, even when there
    are more records than inputs and all lie in the span.
    """
    rows = gradient_rows(view)
    x = _with_bias(view, candidates[0])
    noise = len(rows) * _noise(view, rows) ** 2
    inverse = torch.linalg.inv(rows.T @ rows + noise * torch.eye(rows.shape[1], dtype=torch.float64))
    scores: torch.Tensor = -((x @ inverse) * x).sum(dim=1)
    return scores


def loss_scores(view: View, candidates: Sample) -> torch.Tensor:
    """Minus the loss on each candidate, on average over the final models that the coalition has."""
    return -torch.stack([_losses(view, each.origin, candidates) for each in view.coalition.values()]).mean(0)


def displacement_scores(view: View, candidates: Sample) -> torch.Tensor:
    """Minus the loss on each candidate of the displacement itself, taken for a model: origins are zero on average."""
    return -_losses(view, torch.zeros_like(view.final_displacement), candidates)


def _with_bias(view: View, x: torch.Tensor) -> torch.Tensor:
    """Records as the first layer's gradient has them: with a feature that is one, if there is a bias."""
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
    """How often a member has a higher score than a non-member; a draw is half."""
    difference = members[:, None] - others[None]
    return float(((difference > 0).double() + (difference == 0).double() / 2).mean())


def true_alarms(members: torch.Tensor, others: torch.Tensor, false_alarms: float = FALSE_ALARMS) -> float:
    """The part of the members above a threshold that at most this part of the non-members is above."""
    allowed = int(false_alarms * len(others))
    threshold = others.sort(descending=True).values[allowed]
    return float((members > threshold).double().mean())


def infer(view: View, truth: Truth, fresh: Sample, score: Score, attack: str, setting: str = "") -> Finding:
    """How well scores tell the honest participants' samples from fresh ones. The metric is the AUC, by chance 0.5."""
    members, others = score(view, (truth.all_x, truth.all_y)), score(view, fresh)
    value = area_under_curve(members, others)
    # The standard deviation of the Mann-Whitney statistic when both are alike.
    chance_deviation = ((len(members) + len(others) + 1) / (12 * len(members) * len(others))) ** 0.5
    succeeds = value >= MIN_AUC and value - 0.5 > DEVIATIONS * chance_deviation
    rate = f"{FALSE_ALARMS:.1%} false alarms" if FALSE_ALARMS * len(others) >= 1 else "no false alarm"
    detail = f"{true_alarms(members, others):.0%} of the members are found with {rate} among {len(others)} others"
    undecided = value >= MIN_AUC and not succeeds
    return Finding(attack, view.scheme, "AUC", value, 0.5, succeeds, setting, detail, undecided=undecided)


def span_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> Finding:
    """Membership by `span_scores`."""
    return infer(view, truth, fresh, span_scores, "membership, by the span of first-layer gradients", setting)


def leverage_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> Finding:
    """Membership by `leverage_scores`."""
    return infer(view, truth, fresh, leverage_scores, "membership, by leverage in first-layer gradients", setting)


def loss_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> Finding:
    """Membership by `loss_scores`."""
    return infer(view, truth, fresh, loss_scores, "membership, from the loss of final models", setting)


def displacement_membership(view: View, truth: Truth, fresh: Sample, setting: str = "") -> Finding:
    """Membership by `displacement_scores`."""
    return infer(view, truth, fresh, displacement_scores, "membership, from the loss of the displacement", setting)


# The settings they are shown in.


def colony(
    each: int, rounds: int, *, data: Name = "digits", delta: float = 0.1, hidden: int = 32, seed: int = 0
) -> tuple[Scenario, Sample]:
    """Two honest participants with so many records `each`, two colluders with 20, and the rest, which are fresh.

    Args:
        each: how many records an honest participant has.
        rounds: how many steps.
        data: digits of 64 pixels, or tumours of 30 measurements.
        delta: δ of the origins.
        hidden: how many hidden units the network has.
        seed: decides who has which records, and origins.
    """
    counts, coalition = participants(2, each, own=20)
    given, fresh = dealt(samples(data, seed), counts)
    features, classes = fresh[0].shape[1], 10 if data == "digits" else 2

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    return Scenario(given, build, coalition, rounds=rounds, lr=0.5, delta=delta, seed=seed), fresh


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Few records and few rounds for the span, more records for leverage, many rounds for the loss."""
    digits, other_digits = colony(20, 5, seed=seed)
    tumours, other_tumours = colony(10, 5, data="breast-cancer", seed=seed)
    more, other_more = colony(20, 5, data="breast-cancer", seed=seed)
    many, other_many = colony(40, 5, data="breast-cancer", seed=seed)
    most, other_most = colony(100, 5, seed=seed)
    trained, fresh = colony(40, 150, hidden=256, seed=seed)
    view, truth = observe(trained, scheme)
    findings = [
        span_membership(*observe(digits, scheme), other_digits, "2 × 20 records of 64 pixels, 5 rounds"),
        span_membership(*observe(tumours, scheme), other_tumours, "2 × 10 records of 30 measurements, 5 rounds"),
        leverage_membership(*observe(more, scheme), other_more, "2 × 20 records of 30 measurements, 5 rounds"),
        leverage_membership(*observe(many, scheme), other_many, "2 × 40 records of 30 measurements, 5 rounds"),
        leverage_membership(*observe(most, scheme), other_most, "2 × 100 records of 64 pixels, 5 rounds"),
        loss_membership(view, truth, fresh, "2 × 40 records, 150 rounds"),
    ]
    if scheme == "cgd":
        findings.append(displacement_membership(view, truth, fresh, "2 × 40 records, 150 rounds"))
    return findings


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Many more records than measurements, which then span everything; and records that nobody trained on.

    Digits would do for the first with very many records only: some pixels are so rarely on that a fresh digit may use
    one that no record has, and so be told from members.
    """
    tumours, other_tumours = colony(100, 5, data="breast-cancer", seed=seed)
    trained, (x, y) = colony(40, 150, hidden=256, seed=seed)
    view, _ = observe(trained, scheme)
    nobody = Truth({"nobody": x[:80]}, {"nobody": y[:80]}, {})
    seen = observe(tumours, scheme)
    return [
        span_membership(*seen, other_tumours, "2 × 100 records of 30 measurements, 5 rounds"),
        leverage_membership(*seen, other_tumours, "2 × 100 records of 30 measurements, 5 rounds"),
        loss_membership(view, nobody, (x[80:], y[80:]), "80 records of nobody, 150 rounds"),
    ]
