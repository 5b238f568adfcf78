"""Gradient inversion: optimise records until the sum of their gradients matches the opened sums.

The result depends on what the attacker assumes about the honest participants' models:

- **known**: in FedSGD everybody has the common model. One round is enough.
- **guessed**: in CGD the displacement is known and the origins are not, so the attacker uses its own origin instead of
  theirs (the mean, if several collude). Confinement is meant against this attack, which fails in the first rounds,
  while the displacement is small compared with the origins. Later, a single round is enough.
- **unknown**: in CGD, the attacker optimises the origins along with the records, one per honest participant. Every
  further round adds as many equations as the model has parameters, and no unknowns, since displacements are known. So
  a few rounds together can give records where a guess fails.

Labels are optimised as well. The attacker knows the total number of records only. With one model it does not matter
which honest participant holds which record; with unknown origins the records are distributed evenly.

With differential privacy, gradients are clipped and the noise is known. So the search is for the most likely records:
errors are divided by the noise, and a record is expected to be like the attacker's own ones, in mean and variance. With
much noise, this is the mean of its own records.
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
from cgd.audit.matching import match, own_records, show, value_range
from cgd.audit.results import AttackResult
from cgd.audit.schemes import observe
from cgd.audit.view import Truth, is_confined, unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, View

Models = Literal["known", "guessed", "unknown"]

MIN_PSNR_GAIN = 3.0
"""In dB above chance, from which the attack succeeds: half the squared error."""
# On any view, the attack is tried within these limits: with more parameters it takes minutes, and it recovers no more
# records than this.
MAX_RECORDS, MAX_PARAMETERS, MAX_ROUNDS = 8, 20_000, 3
# With noise, the search has an optimum near its start.
MAX_PRIVATE_STEPS = 100

# Weights of the priors, relative to a relative error of the gradients of 1: a record like the mean, an origin of the
# usual size. They are weak, and decide only what the gradients leave open.
_RECORD_PRIOR, _LABEL_PRIOR, _ORIGIN_PRIOR = 1e-6, 1e-8, 1e-6
# Layers that are random in training.
_RANDOM_LAYERS = (_DropoutNd, nn.RReLU)


def inversion(
    view: View, truth: Truth, setting: str = "", *, models: Models | None = None, steps: int = 400, restarts: int = 1
) -> AttackResult:
    """Search for the records, and compare the guesses with the real ones.

    Chance is the better of two guesses: the mean of the attacker's own records for every record, and its own records.
    The attack succeeds from 3 dB above chance on.
    """
    models = models or _default_models(view)
    guesses = invert(view, models, steps=steps, restarts=restarts)
    own, peak = own_records(view), value_range(view)
    table = truth.table is not None
    found = match(guesses, truth.all_x, peak, table=table)
    simple = own.mean(dim=0, keepdim=True), own[: len(guesses)]
    chance = max(match(each, truth.all_x, peak, table=table).mean_psnr for each in simple)
    succeeds = found.mean_psnr >= chance + MIN_PSNR_GAIN
    rounds = "several rounds" if len(view.rounds) > 1 else "one round"
    return AttackResult(
        f"inversion, {rounds}, {models} model{'s' * (models == 'unknown')}",
        view.scheme,
        "mean PSNR, dB",
        found.mean_psnr,
        chance,
        succeeds=succeeds,
        setting=setting,
        detail=f"mean correlation {found.correlation.mean().item():.2f}; {found.recovered:.0%} recovered",
        **show(found, truth, succeeds=succeeds),
    )


def on_view(view: View, truth: Truth, _: Sample) -> list[AttackResult]:
    """Run the attack on any view: on the first round, in CGD also on the first rounds together.

    Raises:
        InputError: there are too many records or parameters.
    """
    parameters = sum(each.numel() for each in view.build_model().parameters())
    records = view.honest_samples
    if records > MAX_RECORDS or parameters > MAX_PARAMETERS:
        raise InputError(
            f"{records:,} record{'s' * (records != 1)} and {parameters:,} parameters; the search is tried with up to "
            f"{MAX_RECORDS} records and {MAX_PARAMETERS:,} parameters"
        )
    views = [view.until(1), view.until(MAX_ROUNDS)] if is_confined(view.scheme) else [view.until(1)]
    return [inversion(each, truth, each.describe()) for each in views]


def invert(view: View, models: Models, *, steps: int = 400, restarts: int = 1) -> torch.Tensor:
    """Guess the honest participants' records from all rounds of a view, a flat row each.

    Args:
        view: the view.
        models: the assumption about their models.
        steps: the number of L-BFGS steps of each start.
        restarts: the number of starts from random records; the one that matches the sums best is used.

    Raises:
        InputError: "known" is chosen and there is no common model; or a record's gradient depends on other records.
    """
    if models == "known" and view.rounds[0].weights is None:
        raise InputError('in CGD there is no common model that could be known; choose "guessed" or "unknown"')
    if restarts < 1:
        raise InputError(f"restarts is {restarts}; it must be at least 1")
    searches = [_Search(view, models, seed).run(steps) for seed in range(restarts)]
    _, records = min(searches, key=lambda each: each[0])
    own = own_records(view)
    return records.clamp(own.min(), own.max())


@dataclass
class _Unknowns:
    """The variables of the search.

    Attributes:
        x: records, a flat row each.
        y: logits of the labels, or regression targets.
        origins: one per honest participant, divided by δ; None if models are known or guessed.
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
        _check_records_independent(self.model)
        self.sums = torch.stack([view.honest_sum(number) for number in range(len(view.rounds))]).double()
        self.weights = self._assumed_weights(models)
        colluder = next(iter(view.coalition.values()))
        self.shape = colluder.x.shape[1:]
        self.classes = not colluder.y.is_floating_point()
        random = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random, dtype=torch.double)

        own, records = own_records(view), view.honest_samples
        self.mean = own.mean(dim=0)
        # One pseudo-record with the variance of all features: a pixel that is constant here may vary elsewhere.
        variance = (own.var(dim=0, correction=0) * len(own) + own.var()) / (len(own) + 1)
        self.weights_of_errors, self.record_prior = self._weights(variance)
        outputs = self.model(own[:1].reshape(1, *self.shape)).shape[1:]
        self.unknowns = _Unknowns(
            self.mean + 0.1 * value_range(view) * normal(records, own.shape[1]),
            0.1 * normal(records, *outputs),
            normal(len(view.honest), self.sums.shape[1]) if models == "unknown" else None,
        )
        self.holder = torch.arange(records) % len(view.honest)

    def run(self, steps: int) -> tuple[float, torch.Tensor]:
        """Search, and return the final objective and the records."""
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

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = self._objective()
            value.backward()
            return value

        optimizer.step(closure)
        return self._objective().item(), self.unknowns.x.detach()

    def _objective(self) -> torch.Tensor:
        """Return the weighted squared error of all rounds' sums, plus the priors."""
        found = self.unknowns
        error = (self._predicted_sums() - self.sums).square().sum(dim=1) @ self.weights_of_errors
        prior = ((found.x - self.mean).square() * self.record_prior).sum() + _LABEL_PRIOR * found.y.square().sum()
        if found.origins is not None:
            prior = prior + _ORIGIN_PRIOR * found.origins.square().sum()
        objective: torch.Tensor = error + prior
        return objective

    def _weights(self, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the squared errors of each round, and of the distance of a record from the mean."""
        if not self.view.is_private:
            return 1 / self.sums.square().sum(dim=1), torch.full_like(variance, _RECORD_PRIOR)
        size = float(self.sums.square().sum())  # both weights are divided by it and by the noise
        return torch.full_like(self.sums[:, 0], 1 / size), self.view.noise**2 / size / variance

    def _predicted_sums(self) -> torch.Tensor:
        """Return the sums of all rounds for the current values of the unknowns."""
        found = self.unknowns
        weights = self.weights
        if found.origins is not None:
            weights = weights[:, None] + self.view.delta * found.origins[self.holder]
        else:
            weights = weights[:, None].expand(-1, len(found.x), -1)
        y = torch.softmax(found.y, dim=-1) if self.classes else found.y
        one_round = vmap(grad(self._loss), in_dims=(0, 0, 0))
        gradients: torch.Tensor = vmap(one_round, in_dims=(0, None, None))(weights, found.x, y)
        if self.view.is_private:
            gradients = gradients * (self.view.clip / gradients.norm(dim=2, keepdim=True)).clamp(max=1.0)
        return gradients.sum(dim=1) / self.view.samples

    def _loss(self, weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of one record; for classes, the expected loss over the probabilities of the labels."""
        outputs = functional_call(self.model, unflat(weights, self.model), (x.reshape(1, *self.shape),))
        if not self.classes:
            return self.view.loss(outputs, y[None])
        losses: torch.Tensor = vmap(lambda label: self.view.loss(outputs, label[None]))(torch.arange(len(y)))
        return losses @ y

    def _assumed_weights(self, models: Models) -> torch.Tensor:
        """Return the model of each round, without the origin if that is unknown."""
        if models == "known":
            return torch.stack([each.weights for each in self.view.rounds if each.weights is not None]).double()
        displacements = torch.stack([each.displacement for each in self.view.rounds]).double()
        if models == "unknown":
            return displacements
        return displacements + torch.stack([each.origin for each in self.view.coalition.values()]).double().mean(dim=0)


def _check_records_independent(model: nn.Module) -> None:
    """Raise InputError if the gradient of a record depends on other records or on random numbers."""
    for each in model.modules():
        batch = isinstance(each, _BatchNorm) and (each.training or not each.track_running_stats)
        if batch or (isinstance(each, _RANDOM_LAYERS) and each.training):
            raise InputError(
                f"the network has a {type(each).__name__}, which makes a record's gradient depend on "
                f"{'the other records' if batch else 'random numbers'}; the search needs a network without it"
            )


def _default_models(view: View) -> Models:
    if view.rounds[0].weights is not None:
        return "known"
    return "guessed" if len(view.rounds) == 1 else "unknown"


# Demonstrations.


def demonstrate(
    scheme: Scheme,
    *,
    rounds: int = 1,
    alone: bool = False,
    delta: float = 0.1,
    models: Models | None = None,
    steps: int = 400,
    seed: int = 0,
    strangers: bool = False,
) -> AttackResult:
    """Attack two honest participants with two digits each, who train a network of tanh units.

    Args:
        scheme: the scheme of the training.
        rounds: the number of rounds that the attacker combines.
        alone: use only the last of these rounds.
        delta: δ of the origins.
        models: the assumption about the models; by default known if there is a common one, otherwise guessed with one
            round and unknown with several.
        steps: the number of steps of the search.
        seed: the seed of everything.
        strangers: compare the guesses with records that nobody trained on, which cannot be recovered.
    """
    scenario = digit_scenario(2, rounds=rounds, hidden=16, smooth=True, lr=0.5, delta=delta, seed=seed)
    view, truth = observe(scenario, scheme)
    if strangers:
        x, y = samples("digits", seed)
        truth = Truth({"stranger": x[-4:]}, {"stranger": y[-4:]}, {})
    steps = min(steps, MAX_PRIVATE_STEPS) if view.is_private else steps
    used = f"round {rounds} alone" if alone else f"{rounds} round{'s' * (rounds > 1)}"
    setting = f"2 × 2 {'strangers' if strangers else 'records'}, {used}, δ {delta:g}"
    return inversion(view.only([rounds - 1]) if alone else view, truth, setting, models=models, steps=steps)


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the result of one round; in CGD also with unknown origins, of three rounds, and of a later round."""
    one = demonstrate(scheme, seed=seed)
    if not is_confined(scheme):
        return [one]
    return [
        one,
        demonstrate(scheme, models="unknown", seed=seed),
        demonstrate(scheme, rounds=3, seed=seed),
        demonstrate(scheme, rounds=41, alone=True, delta=0.02, seed=seed),
    ]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the result on records that nobody trained on."""
    return [demonstrate(scheme, rounds=3 if is_confined(scheme) else 1, seed=seed, strangers=True)]
