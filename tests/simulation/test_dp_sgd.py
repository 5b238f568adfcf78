from __future__ import annotations

import copy
import dataclasses
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from scipy.stats import norm
from torch import nn

from cgd import DivergenceError, Grid, InputError, confine, public_seed
from cgd.dp.settings import PrivacySettings
from cgd.experiments.datasets import load
from cgd.optim.displacement import SGDRule
from cgd.optim.grid import Cell
from cgd.simulation import loop
from cgd.simulation.baselines.dp_sgd import DPSGDResult, _prv_epsilon, dp_sgd
from cgd.simulation.baselines.private import private_centralised
from cgd.simulation.baselines.settings import BaselineSettings
from cgd.simulation.population import participant_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cgd.simulation.result import History

dp_sgd_module = sys.modules[dp_sgd.__module__]  # the package has a function of the same name
DIGITS = load("digits").scaled()
SAMPLES = len(DIGITS.x)
ALL: dict[str, Any] = {"epsilon": 3, "batch": SAMPLES}
"""A batch of all samples, for which the noise is calibrated quickly; tests of the sampling use a batch below 100."""


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), *(layers or (nn.ReLU(),)), nn.Linear(32, 10))


def make_settings(samples: int = SAMPLES, rows: int = 1, **changes: Any) -> BaselineSettings:
    blocks = Grid(rows).split(DIGITS.x[:samples], DIGITS.y[:samples], seed=0)
    return BaselineSettings(**{"build_model": network, "blocks": blocks, "steps": 10, "lr": 1.0, **changes})


def initial_model(settings: BaselineSettings) -> nn.Module:
    with public_seed(settings.seed):
        model = settings.build_model()
    assert isinstance(settings.delta, float)
    confine(model, settings.delta, participant_seed(settings.seed, Cell(0, 0)))
    return model


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def weights(result: DPSGDResult) -> torch.Tensor:
    return flat_parameters(result.models["dp-sgd"])


def no_gradient(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return 0 * outputs.mean()


@pytest.mark.slow
def test_accuracy_depends_on_the_noise() -> None:
    settings = make_settings(rows=3, steps=150, test=(DIGITS.held_out_x, DIGITS.held_out_y), evaluate_every=60)
    loose = dp_sgd(settings, epsilon=50, batch=128)
    tight = dp_sgd(settings, epsilon=0.05, batch=128)
    assert [each.step for each in loose.history.evaluations] == [0, 60, 120, 150]
    assert loose.history.participants == ["dp-sgd"]
    assert len(loose.history.training_loss) == 150
    (loose_accuracy,), (tight_accuracy,) = (run.history.evaluations[-1].accuracy for run in (loose, tight))
    assert loose_accuracy > 0.85
    assert tight_accuracy < loose_accuracy - 0.2
    model = loose.models["dp-sgd"]
    right = (model(DIGITS.held_out_x).argmax(dim=1) == DIGITS.held_out_y).float().mean()
    assert float(right) == pytest.approx(loose_accuracy)


def test_initial_model_is_that_of_centralised_training() -> None:
    settings = make_settings(loss=no_gradient, lr=0.0, steps=1, seed=3)
    assert torch.equal(weights(dp_sgd(settings, **ALL)), flat_parameters(initial_model(settings)))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Optimal order is the largest alpha"
)  # a warning of RDP, which PRV uses for its range
@pytest.mark.parametrize(("epsilon", "dp_delta"), [(0.05, 1e-5), (0.5, 1e-4), (2, 1e-5), (8, 1e-6)])
def test_privacy_holds_by_another_accountant(epsilon: float, dp_delta: float) -> None:
    from opacus.accountants import PRVAccountant

    steps, batch = 20, 64
    result = dp_sgd(make_settings(steps=steps), epsilon=epsilon, dp_delta=dp_delta, batch=batch)
    assert 0.99 * epsilon < result.epsilon_spent <= epsilon

    def cost(noise_multiplier: float) -> float:
        accountant = PRVAccountant()
        accountant.history = [(noise_multiplier, batch / SAMPLES, steps)]
        return float(accountant.get_epsilon(delta=dp_delta, eps_error=epsilon / 50))

    assert cost(result.noise_multiplier) <= epsilon
    assert cost(0.75 * result.noise_multiplier) > epsilon  # the noise is not far too large


@pytest.mark.parametrize("epsilon", [0.2, 1, 10])
def test_full_batch_equals_the_gaussian_mechanism(epsilon: float) -> None:
    # Its δ has a closed form (Balle and Wang 2018), and many steps equal one step with √steps times the signal.
    steps, dp_delta = 9, 1e-5
    result = dp_sgd(make_settings(samples=40, steps=steps), epsilon=epsilon, dp_delta=dp_delta, batch=40)

    def delta(noise_multiplier: float) -> float:
        signal = math.sqrt(steps) / noise_multiplier
        near, far = norm.cdf(signal / 2 - epsilon / signal), norm.cdf(-signal / 2 - epsilon / signal)
        return float(near - math.exp(epsilon) * far)

    assert delta(result.noise_multiplier) <= dp_delta
    assert delta(0.75 * result.noise_multiplier) > dp_delta


@pytest.mark.parametrize(
    ("epsilon", "prior_mu"),
    [
        (0.5, 0.1),
        (8, 0.0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0.5, 0.0), (2, 0.0), (2, 0.1), (8, 0.1)]),
    ],
)
def test_accountants_agree_on_the_full_batch(epsilon: float, prior_mu: float) -> None:
    steps, dp_delta = 165, 1e-5
    result = dp_sgd(make_settings(40, steps=steps, lr=0.0), epsilon=epsilon, batch=40, prior_mu=prior_mu)
    assert result.epsilon_spent == pytest.approx(epsilon, rel=1e-6)
    assert result.epsilon_spent <= epsilon

    def cost(noise_multiplier: float) -> float:
        return _prv_epsilon(noise_multiplier, 1.0, steps, prior_mu, dp_delta, epsilon / 500)

    assert cost(result.noise_multiplier) == pytest.approx(epsilon, rel=0.01)
    assert cost(0.98 * result.noise_multiplier) > 1.01 * epsilon  # a difference of 2 % in the noise is seen


@pytest.mark.slow
def test_what_was_opened_before_is_part_of_epsilon() -> None:
    steps, prior_mu = 20, 0.3
    for batch, tolerance in ((SAMPLES, 1e-9), (1000, 0.01)):
        alone, after = (
            dp_sgd(make_settings(steps=steps, lr=0.0), epsilon=2, batch=batch, prior_mu=each)
            for each in (0.0, prior_mu)
        )
        assert after.epsilon_spent <= 2
        assert after.noise_multiplier > 1.1 * alone.noise_multiplier
        if batch == SAMPLES:
            squares = (steps / each.noise_multiplier**2 for each in (alone, after))
            assert next(squares) == pytest.approx(next(squares) + prior_mu**2, rel=tolerance)


def test_random_batches_need_less_noise_than_by_the_renyi_accountant() -> None:
    from opacus.accountants import RDPAccountant

    # Its bound is valid, too, and known to be some percent less tight.
    noise_multiplier = dp_sgd(make_settings(steps=20, lr=0.0), epsilon=2, batch=64).noise_multiplier
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, 64 / SAMPLES, 20)]
    assert 2 < accountant.get_epsilon(delta=1e-5) < 2.5


@pytest.mark.parametrize(
    ("samples", "batch"), [(SAMPLES, 100), (8, 1)]
)  # of eight samples, none is drawn in every third step
def test_noise_has_the_accounted_size(samples: int, batch: int) -> None:
    steps, clip, lr = 10, 3.0, 2.0
    settings = make_settings(samples, loss=no_gradient, steps=steps, lr=lr, build_model=lambda: nn.Linear(64, 200))
    result = dp_sgd(settings, epsilon=0.5, batch=batch, clip=clip)
    moved = (weights(result) - flat_parameters(initial_model(settings))).double()
    expected = steps * (lr / batch * result.noise_multiplier * clip) ** 2
    measured = float((moved**2).mean())
    # Five standard deviations of the mean of the squares: one false alarm in 1.7 million runs.
    tolerance = 5 * math.sqrt(2 / len(moved))
    assert abs(measured / expected - 1) < tolerance
    assert abs(measured / (1.1**2 * expected) - 1) > tolerance  # noise of 1.1 times the size fails
    assert abs(float(moved.mean())) < 5 * math.sqrt(expected / len(moved))


def test_batches_are_poisson_samples() -> None:
    steps, batch, sizes = 300, 64, []

    def build() -> nn.Linear:
        model = nn.Linear(64, 10)
        model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        return model

    dp_sgd(make_settings(build_model=build, steps=steps, lr=0.0), epsilon=1, batch=batch)
    assert len(sizes) == steps
    drawn = torch.tensor(sizes, dtype=torch.float64)
    variance = batch * (1 - batch / SAMPLES)
    # Both within five standard deviations, one false alarm in 900,000 runs; a fixed size has no variance and fails.
    assert abs(float(drawn.mean()) - batch) < 5 * math.sqrt(variance / steps)
    assert abs(float(drawn.var()) / variance - 1) < 5 * math.sqrt(2 / steps) < 1


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear layers": network,
    "without biases": lambda: nn.Sequential(nn.Linear(64, 16, bias=False), nn.Tanh(), nn.Linear(16, 10, bias=False)),
    "a normalisation": lambda: network(nn.LayerNorm(32), nn.ReLU()),
    "a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10)
    ),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_step_is_the_sum_of_clipped_gradients(build: Callable[[], nn.Module]) -> None:
    samples, lr = 51, 0.3
    settings = make_settings(samples, build_model=build, steps=1, lr=lr)
    model, (x, y) = initial_model(settings), settings.pooled()
    gradients = []
    for sample in range(samples):
        loss = settings.loss(model(x[sample : sample + 1]), y[sample : sample + 1])
        gradients.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]))
    norms = torch.stack(gradients).norm(dim=1)
    clip = float(norms.median())  # half of the gradients are clipped
    clipped = (torch.stack(gradients) * (clip / norms).clamp(max=1)[:, None]).sum(dim=0)

    # With a batch of all samples only the noise is random, and it is the same without gradients.
    result, noise = (
        dp_sgd(dataclasses.replace(settings, loss=loss), epsilon=1000, batch=samples, clip=clip)
        for loss in (settings.loss, no_gradient)
    )
    moved = (weights(noise) - weights(result)) * samples / lr
    # Opacus adds 1e-6 to the norm. Weights have a few rounding errors of 2⁻²⁴ of themselves, which are then scaled.
    rounding = 2**-22 * float(weights(result).abs().max()) * samples / lr
    tolerance = rounding + (2**-20 + 1e-6 / clip) * samples * clip
    assert float((moved - clipped).abs().max()) < tolerance
    assert float((torch.stack(gradients).sum(dim=0) - clipped).abs().max()) > 100 * tolerance


def test_without_noise_and_clipping_it_is_sgd_with_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp_sgd_module, "_calibrate", lambda *_: (0.0, 3.0))
    settings = make_settings(100, build_model=lambda: network().double(), steps=5, lr=0.3)
    factors = (1.0, 0.8, 0.6, 0.4, 0.2)
    result = dp_sgd(settings, epsilon=3, batch=100, clip=1e9, momentum=0.9, schedule=factors.__getitem__)
    model, (x, y) = initial_model(settings), settings.pooled()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for factor in factors:
        optimizer.param_groups[0]["lr"] = 0.3 * factor
        optimizer.zero_grad()
        settings.loss(model(x), y).backward()
        optimizer.step()
    # Each gradient is a sum of 100 numbers in another order: at most 100 rounding errors of 2⁻⁵³ of the sum of
    # magnitudes, which is below 10. Five steps, with a momentum of at most 5 times a gradient, move less than 10 of it,
    # and later steps increase earlier differences by less than 10.
    tolerance = 100 * 2**-53 * 10 * 10 * 10
    assert float((weights(result) - flat_parameters(model)).abs().max()) < tolerance
    plain = dp_sgd(settings, epsilon=3, batch=100, clip=1e9)
    assert float((weights(plain) - flat_parameters(model)).abs().max()) > 1e6 * tolerance


@pytest.mark.slow
def test_full_batch_is_as_accurate_as_the_mechanism_of_the_product() -> None:
    """Two means of 20 seeds differ by less than 6 standard errors: one false alarm in a million, if t-distributed."""
    options: dict[str, Any] = {"rule": partial(SGDRule, momentum=0.9), "schedule": lambda step: 1 - step / 20}

    def settings(seed: int) -> BaselineSettings:
        x, held_out_x = (nn.functional.normalize(each) for each in (DIGITS.x, DIGITS.held_out_x))
        return make_settings(
            build_model=lambda: nn.Linear(64, 10),
            blocks=Grid(1).split(x, DIGITS.y, seed=0),
            steps=20,
            lr=8.0,  # so large that the noise limits the accuracy
            seed=seed,
            test=(held_out_x, DIGITS.held_out_y),
        )

    def accuracies(histories: Iterator[History]) -> torch.Tensor:
        return torch.tensor([each.evaluations[-1].accuracy[0] for each in histories], dtype=torch.float64)

    def by_opacus(epsilon: float) -> torch.Tensor:
        opacus = {"batch": SAMPLES, "momentum": 0.9, "schedule": options["schedule"]}
        return accuracies(dp_sgd(settings(seed), epsilon=epsilon, **opacus).history for seed in range(20))

    def errors(one: torch.Tensor, other: torch.Tensor) -> float:
        return abs(float((one.mean() - other.mean()) / ((one.var() + other.var()) / 20).sqrt()))

    privacy = PrivacySettings(1.0, 1e-5, steps=20, reruns=0)
    product = accuracies(private_centralised(settings(100 + seed), privacy, **options).history for seed in range(20))
    assert 0.5 < float(product.mean()) < 0.95
    assert errors(by_opacus(1.0), product) < 6
    assert errors(by_opacus(0.6), product) > 6  # 1.6 times the noise is seen


def test_parts_of_a_batch_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(60, build_model=lambda: network().double(), steps=3)
    whole = dp_sgd(settings, epsilon=3, batch=60)
    monkeypatch.setattr(dp_sgd_module, "MAX_PART", 7)
    parts = dp_sgd(settings, epsilon=3, batch=60)
    # Sums of 60 clipped gradients in another order: less than 60 rounding errors of 2⁻⁵³ of 60 in each of three steps.
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=3 * 60 * 60 * 2**-53)
    assert parts.history.training_loss == pytest.approx(whole.history.training_loss, rel=1e-12)


def test_clipping_bounds_the_step() -> None:
    samples, clip, lr = 20, 0.01, 1.0
    settings = make_settings(samples, steps=1, lr=lr)
    result, noise = (
        dp_sgd(dataclasses.replace(settings, loss=loss), epsilon=1000, batch=samples, clip=clip)
        for loss in (lambda outputs, y: 1e6 * settings.loss(outputs, y), no_gradient)
    )
    moved = float((weights(result) - weights(noise)).norm())
    assert 0 < moved <= lr * clip * 1.001


@pytest.mark.slow
def test_dp_sgd_supports_regression() -> None:
    diabetes = load("diabetes").scaled()
    settings = BaselineSettings(
        lambda: nn.Linear(10, 1),
        Grid(2, 2).split(diabetes.x, diabetes.y, seed=0),
        steps=100,
        lr=0.3,
        loss=nn.functional.mse_loss,
        test=(diabetes.held_out_x, diabetes.held_out_y),
    )
    result = dp_sgd(settings, epsilon=20, batch=64)
    evaluations = result.history.evaluations
    assert evaluations[-1].accuracy == []
    assert evaluations[-1].loss[0] < 0.75  # predicting the mean has a loss of 1


def test_seed_determines_the_run() -> None:
    settings = make_settings(steps=3)
    once, again = (dp_sgd(settings, epsilon=3, batch=64) for _ in range(2))
    assert torch.equal(weights(once), weights(again))
    assert once.history == again.history
    noise_only = dataclasses.replace(settings, loss=no_gradient)
    noises = []
    for seed in (0, 1):
        seeded = dataclasses.replace(noise_only, seed=seed)
        noises.append(weights(dp_sgd(seeded, **ALL)) - flat_parameters(initial_model(seeded)))
    correlation = torch.corrcoef(torch.stack(noises))[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(len(noises[0]))  # one false alarm in 1.7 million runs


MOVING: dict[str, Any] = {"momentum": 0.9, "schedule": lambda step: 1 - step / 12}


@pytest.mark.parametrize(
    ("stop_at", "options"),
    [
        *((stop_at, {"batch": 64}) for stop_at in (1, 12)),
        *(pytest.param(stop_at, {"batch": 64}, marks=pytest.mark.slow) for stop_at in (4, 5, 11)),
        *((7, {"batch": batch, **MOVING}) for batch in (64, SAMPLES)),
        *(pytest.param(1, {"batch": batch, **MOVING}, marks=pytest.mark.slow) for batch in (64, SAMPLES)),
    ],
)
def test_resumed_run_has_the_same_bits(
    stop_at: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_INTERVAL_SECONDS", -1)

    class StopError(Exception):
        pass

    def stop(step: int, history: History) -> None:
        if step == stop_at:
            raise StopError

    settings = make_settings(steps=12, test=(DIGITS.held_out_x, DIGITS.held_out_y), evaluate_every=5)
    uninterrupted = dp_sgd(settings, epsilon=3, **options)
    checkpointed = dataclasses.replace(settings, checkpoint=tmp_path / "run.pt")
    with pytest.raises(StopError):
        dp_sgd(dataclasses.replace(checkpointed, on_step=stop), epsilon=3, **options)
    steps: list[int] = []
    resumed = dp_sgd(
        dataclasses.replace(checkpointed, on_step=lambda step, _: steps.append(step)), epsilon=3, **options
    )
    assert steps == list(range(stop_at + 1, 13))  # it resumed
    assert torch.equal(weights(resumed), weights(uninterrupted))
    assert resumed.history == uninterrupted.history
    finished = dp_sgd(checkpointed, epsilon=3, **options)
    assert torch.equal(weights(finished), weights(uninterrupted))
    assert finished.history == uninterrupted.history


def test_checkpoint_is_not_written_at_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    exists: list[bool] = []
    dp_sgd(make_settings(checkpoint=path, on_step=lambda *_: exists.append(path.exists())), **ALL)
    assert exists == [False] * 10
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("epsilon", {}, {"epsilon": 4}),
        ("dp_delta", {}, {"dp_delta": 1e-6}),
        ("batch", {}, {"batch": SAMPLES - 1}),
        ("clip", {}, {"clip": 2.0}),
        ("momentum", {}, {"momentum": 0.9}),
        ("schedule", {}, {"schedule": lambda step: 1 - step / 10}),
        ("noise", {}, {"prior_mu": 0.1}),
        ("lr", {"lr": 0.5}, {}),
        ("steps", {"steps": 11}, {}),
        ("seed", {"seed": 1}, {}),
        ("dp-sgd", {"delta": 0.2}, {}),
        ("loss", {"loss": nn.functional.multi_margin_loss}, {}),
        ("dp-sgd", {"build_model": lambda: network(nn.Tanh())}, {}),
        ("dp-sgd", {"blocks": Grid(1).split(DIGITS.x.flip(0), DIGITS.y.flip(0), seed=0)}, {}),
    ],
)
def test_checkpoint_of_another_run_is_rejected(
    name: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.pt"
    dp_sgd(make_settings(checkpoint=path), **ALL)
    with pytest.raises(InputError, match=f"another run .*{name} was"):
        dp_sgd(make_settings(checkpoint=path, **changes), **{**ALL, **options})


def test_model_has_no_hooks_or_attributes_of_opacus() -> None:
    settings = make_settings(steps=2)
    model = dp_sgd(settings, **ALL).models["dp-sgd"]
    clean = initial_model(settings)
    for ours, theirs in zip(model.modules(), clean.modules(), strict=True):
        assert ours.__dict__.keys() == theirs.__dict__.keys()
        assert not ours._forward_hooks
        assert not ours._backward_hooks
    for parameter, other in zip(model.parameters(), clean.parameters(), strict=True):
        assert parameter.grad is None
        assert vars(parameter) == vars(other)
    copy.deepcopy(model)(DIGITS.x[:3]).sum().backward()


def test_failed_run_removes_the_hooks_of_opacus() -> None:
    model = network()

    def fail(step: int, history: History) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dp_sgd(make_settings(build_model=lambda: model, on_step=fail), **ALL)
    dp_sgd(make_settings(build_model=lambda: model), **ALL)  # hooks are not added twice


def test_frozen_parameters_do_not_change() -> None:
    def build() -> nn.Sequential:
        model = network()
        first = model.get_parameter("0.weight")
        nn.init.constant_(first, 0.25).requires_grad_(False)
        return model

    settings = make_settings(build_model=build)
    model, start = dp_sgd(settings, **ALL).models["dp-sgd"], initial_model(settings)
    assert torch.equal(model.get_parameter("0.weight"), torch.full((32, 64), 0.25))
    for name in ("0.bias", "2.weight", "2.bias"):
        assert not torch.equal(model.get_parameter(name), start.get_parameter(name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0}, "epsilon is 0; .* positive"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"epsilon": math.inf}, "epsilon is inf"),
        ({"epsilon": 1e-4, "batch": 64}, "epsilon is 0.0001 and there are 10 steps .* need 3e.07 points.*; raise eps"),
        ({"prior_mu": 0.75}, "prior_mu is 0.75, and all that epsilon 3 allows is 0.7191; .* raise epsilon"),
        ({"prior_mu": -0.1}, "prior_mu is -0.1"),
        ({"prior_mu": math.nan}, "prior_mu is nan"),
        ({"prior_mu": 0.71909, "batch": 64}, "epsilon is 3, and no noise up to 1e.06 .* reaches it .*; raise epsilon"),
        ({"momentum": 1.0}, "momentum is 1.0; .* below 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"schedule": lambda _: -1.0}, "the schedule returns .*; every factor must be a finite number"),
        ({"dp_delta": 0.0}, "dp_delta is 0.0; .* between 0 and 1"),
        ({"dp_delta": 1.0}, "dp_delta is 1.0"),
        ({"clip": 0.0}, "clip is 0.0; .* positive"),
        ({"clip": -2}, "clip is -2"),
        ({"batch": 0}, f"batch is 0; .* from 1 to the number of samples, {SAMPLES}"),
        ({"batch": SAMPLES + 1}, f"batch is {SAMPLES + 1}"),
        ({"batch": 2.5}, "batch is 2.5"),
    ],
)
def test_dp_sgd_rejects_invalid_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dp_sgd(make_settings(), **{**ALL, **options})


def test_dp_sgd_rejects_zero_steps() -> None:
    with pytest.raises(InputError, match="steps is 0; .* at least 1"):
        dp_sgd(make_settings(steps=0), epsilon=1)


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.outer(self.inner(self.inner(x)))
        return hidden


class UnusedLayer(SharedLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.outer(x)
        return hidden


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: network(nn.BatchNorm1d(32)), r"module 1 \(BatchNorm1d\).*Use nn.GroupNorm"),
        (lambda: network(nn.BatchNorm1d(32).eval()), "layer 1 is BatchNorm1d.*; replace it by GroupNorm"),
        (lambda: network(nn.BatchNorm1d(32, affine=False).eval()), "layer 1 is BatchNorm1d"),
        (lambda: network(nn.BatchNorm1d(32, track_running_stats=False)), "layer 1 is BatchNorm1d"),
        (lambda: nn.LSTM(64, 10), "Opacus cannot handle a layer .*LSTM.*; replace it"),
        (SharedLayer, "cannot clip .*tying.*; use each parameter"),
        (UnusedLayer, "cannot clip .*; use each parameter"),
    ],
)
def test_dp_sgd_rejects_unsupported_layers(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=f"(?s){message}"):
        dp_sgd(make_settings(build_model=build), **ALL)


def test_missing_opacus_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(InputError, match=r"pip install 'cgd\[dp\]'"):
        dp_sgd(make_settings(), epsilon=1)


def test_divergence_raises_an_error() -> None:
    with pytest.raises(DivergenceError, match="loss is (inf|nan) after .* steps; lower lr"):
        dp_sgd(make_settings(lr=1e38), **ALL)
