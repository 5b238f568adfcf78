"""Records from gradients by optimisation: look for records whose gradients would have summed to what was opened.

What the attacker takes for the honest participants' models makes the difference:

- **known**: in FedSGD everybody has the common model. One round is enough.
- **guessed**: in CGD the displacement is known and the origins are not, so it takes its own in place of theirs (the
  mean, if several collude). This is what confinement is meant against, and it does fail in the first rounds, while
  the displacement is small beside the origins. Later it is not, and one round alone is enough again.
- **unknown**: in CGD, it looks for the origins along with the records, one for each honest participant. Every further
  round brings as many equations as the model has parameters, and no new unknown, since displacements are known. So what
  fails with a guess can come out of a few rounds together.

Labels are looked for, too. Of the number of records only the total is known to the attacker; which honest participant
holds which does not matter for one model, and for unknown origins they are dealt out evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from cgd.audit.embedded import digit_scenario, samples
from cgd.audit.matching import match, own_records, value_range
from cgd.audit.schemes import observe
from cgd.audit.view import Finding, Truth, unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Scheme, View

Models = Literal["known", "guessed", "unknown"]

MIN_PSNR_GAIN = 3.0
"""The attack succeeds from so many dB above chance on: half the squared error."""

# How strongly the search is drawn to what is likely beforehand, beside a relative error of the gradients of 1: a record
# like the mean one, an origin of the usual size. Weak, so that it only decides what the gradients leave open.
_USUAL_RECORD, _USUAL_LABEL, _USUAL_ORIGIN = 1e-6, 1e-8, 1e-6
# Layers that draw at random while they are trained.
_BY_CHANCE = (_DropoutNd, nn.RReLU)


def inversion(
    view: View, truth: Truth, setting: str = "", *, models: Models | None = None, steps: int = 400, restarts: int = 1
) -> Finding:
    """Look for the records, and compare what comes out with the real ones.

    Chance is the better of two: the mean of the attacker's own records as the guess for everything, and its own records
    as guesses. It succeeds from 3 dB above chance on.
    """
    models = models or _default(view)
    guesses = invert(view, models, steps=steps, restarts=restarts)
    own, peak = own_records(view), value_range(view)
    found = match(guesses, truth.all_x, peak)
    chance = max(
        match(each, truth.all_x, peak).mean_psnr for each in (own.mean(dim=0, keepdim=True), own[: len(guesses)])
    )
    several = len(view.rounds) > 1
    return Finding(
        f"inversion, {'several rounds' if several else 'one round'}, {models} model{'s' * (models == 'unknown')}",
        view.scheme,
        "mean PSNR, dB",
        found.mean_psnr,
        chance,
        succeeds=found.mean_psnr >= chance + MIN_PSNR_GAIN,
        setting=setting,
        detail=f"mean correlation {found.correlation.mean().item():.2f}; {found.recovered:.0%} recovered",
        images=found.images(),
    )


def invert(view: View, models: Models, *, steps: int = 400, restarts: int = 1) -> torch.Tensor:
    """Guess the honest participants' records from all rounds of a view: a flat row for each.

    Args:
        view: what was seen.
        models: what is taken for their models.
        steps: of L-BFGS, in each start.
        restarts: from how many random records; the start that explains the sums best counts.

    Raises:
        InputError: the model is to be known, and there is no common one; or it does not take records one by one.
    """
    if models == "known" and view.rounds[0].weights is None:
        raise InputError("the model is not known in CGD: there is no common one; choose guessed or unknown")
    if restarts < 1:
        raise InputError(f"restarts is {restarts}; it must be at least 1")
    searches = [_Search(view, models, seed).run(steps) for seed in range(restarts)]
    _, records = min(searches, key=lambda each: each[0])
    own = own_records(view)
    return records.clamp(own.min(), own.max())


@dataclass
class _Unknowns:
    """What is looked for.

    Attributes:
        x: records, a flat row for each.
        y: the labels' logits, or the values to predict.
        origins: one for each honest participant, over δ; None if models are known or guessed.
    """

    x: torch.Tensor
    y: torch.Tensor
    origins: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in (self.x, self.y, self.origins) if each is not None]


class _Search:
    """One start of the search, in double precision."""

    def __init__(self, view: View, models: Models, seed: int) -> None:
        self.view = view
        self.model = view.build_model().double()
        _check_records_alone(self.model)
        self.sums = torch.stack([view.honest_sum(number) for number in range(len(view.rounds))]).double()
        self.weights = self._taken_for_weights(models)
        colluder = next(iter(view.coalition.values()))
        self.shape = colluder.x.shape[1:]
        self.classes = not colluder.y.is_floating_point()
        random = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random, dtype=torch.double)

        own, records = own_records(view), view.honest_samples
        self.usual = own.mean(dim=0)
        outputs = self.model(own[:1].reshape(1, *self.shape)).shape[1:]
        self.unknowns = _Unknowns(
            self.usual + 0.1 * value_range(view) * normal(records, own.shape[1]),
            0.1 * normal(records, *outputs),
            normal(len(view.honest), self.sums.shape[1]) if models == "unknown" else None,
        )
        self.holder = torch.arange(records) % len(view.honest)

    def run(self, steps: int) -> tuple[float, torch.Tensor]:
        """Search: how badly the sums are explained in the end, and the records."""
        unknowns = self.unknowns.tensors()
        for each in unknowns:
            each.requires_grad_()
        optimizer = torch.optim.LBFGS(
            unknowns,
            max_iter=steps,
            max_eval=2 * steps,
            history_size=100,
            tolerance_grad=1e-12,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )

        def badness() -> torch.Tensor:
            optimizer.zero_grad()
            value = self._badness()
            value.backward()
            return value

        optimizer.step(badness)
        return self._badness().item(), self.unknowns.x.detach()

    def _badness(self) -> torch.Tensor:
        """The relative squared error of every round's sum, and a little for what is unusual."""
        found = self.unknowns
        error = (self._would_be_sums() - self.sums).square().sum(dim=1) / self.sums.square().sum(dim=1)
        unusual = _USUAL_RECORD * (found.x - self.usual).square().sum() + _USUAL_LABEL * found.y.square().sum()
        if found.origins is not None:
            unusual = unusual + _USUAL_ORIGIN * found.origins.square().sum()
        badness: torch.Tensor = error.sum() + unusual
        return badness

    def _would_be_sums(self) -> torch.Tensor:
        """What would have been opened in every round if the unknowns were as they are now."""
        found = self.unknowns
        weights = self.weights
        if found.origins is not None:
            weights = weights[:, None] + self.view.delta * found.origins[self.holder]
        else:
            weights = weights[:, None].expand(-1, len(found.x), -1)
        y = torch.softmax(found.y, dim=-1) if self.classes else found.y
        one_round = vmap(grad(self._loss), in_dims=(0, 0, 0))
        gradients: torch.Tensor = vmap(one_round, in_dims=(0, None, None))(weights, found.x, y)
        return gradients.sum(dim=1) / self.view.samples

    def _loss(self, weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of one record; of a label that is one of several, each with a probability, the expected one."""
        outputs = functional_call(self.model, unflat(weights, self.model), (x.reshape(1, *self.shape),))
        if not self.classes:
            return self.view.loss(outputs, y[None])
        losses: torch.Tensor = vmap(lambda label: self.view.loss(outputs, label[None]))(torch.arange(len(y)))
        return losses @ y

    def _taken_for_weights(self, models: Models) -> torch.Tensor:
        """The model of each round, or what of it is certain."""
        if models == "known":
            return torch.stack([each.weights for each in self.view.rounds if each.weights is not None]).double()
        displacements = torch.stack([each.displacement for each in self.view.rounds]).double()
        if models == "unknown":
            return displacements
        return displacements + torch.stack([each.origin for each in self.view.coalition.values()]).double().mean(dim=0)


def _check_records_alone(model: nn.Module) -> None:
    """Whether a model makes the same of a record every time, whatever other records are beside it."""
    for each in model.modules():
        batch = isinstance(each, _BatchNorm) and (each.training or not each.track_running_stats)
        if batch or (isinstance(each, _BY_CHANCE) and each.training):
            raise InputError(
                f"the network has a {type(each).__name__}, with which a record's gradient depends on "
                f"{'the other records' if batch else 'chance'}; the search needs one that depends on the record alone"
            )


def _default(view: View) -> Models:
    if view.rounds[0].weights is not None:
        return "known"
    return "guessed" if len(view.rounds) == 1 else "unknown"


# The settings it is shown in.


def shown(
    scheme: Scheme,
    *,
    rounds: int = 1,
    alone: bool = False,
    delta: float = 0.1,
    models: Models | None = None,
    steps: int = 400,
    seed: int = 0,
    strangers: bool = False,
) -> Finding:
    """Two honest participants with two digits each, who train a network of tanh units.

    Args:
        scheme: how they train.
        rounds: how many rounds the attacker puts together.
        alone: only the last of them is looked at.
        delta: δ of the origins.
        models: what it takes for their models; known where there is a common one, otherwise guessed in one round and
            unknown in several, unless given.
        steps: of the search.
        seed: decides everything.
        strangers: score the guesses against people who took no part: nothing can be recovered of them.
    """
    colony = digit_scenario(2, rounds=rounds, hidden=16, smooth=True, lr=0.5, delta=delta, seed=seed)
    view, truth = observe(colony, scheme)
    if strangers:
        x, y = samples("digits", seed)
        truth = Truth({"stranger": x[-4:]}, {"stranger": y[-4:]}, {})
    seen = f"round {rounds} alone" if alone else f"{rounds} round{'s' * (rounds > 1)}"
    setting = f"2 × 2 {'strangers' if strangers else 'records'}, {seen}, δ {delta:g}"
    return inversion(view.only([rounds - 1]) if alone else view, truth, setting, models=models, steps=steps)


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """One round; in CGD also with origins as unknowns, of three rounds together, and a later round alone."""
    one = shown(scheme, seed=seed)
    if scheme != "cgd":
        return [one]
    return [
        one,
        shown(scheme, models="unknown", seed=seed),
        shown(scheme, rounds=3, seed=seed),
        shown(scheme, rounds=41, alone=True, delta=0.02, seed=seed),
    ]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """People who took no part."""
    return [shown(scheme, rounds=3 if scheme == "cgd" else 1, seed=seed, strangers=True)]
