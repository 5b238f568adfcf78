from __future__ import annotations

import copy
import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from opacus.accountants import PRVAccountant
from scipy.stats import norm
from torch import nn

from cgd import DivergenceError, Grid, InputError, confine
from cgd.experiments.datasets import load
from cgd.optim.grid import Cell
from cgd.simulation import loop
from cgd.simulation.baselines.dp_sgd import PrivatelyTrained, dp_sgd
from cgd.simulation.baselines.setting import BaselineSettings
from cgd.simulation.population import participant_seed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd.simulation.result import History

DIGITS = load("digits").scaled()
SAMPLES = len(DIGITS.x)
ALL: dict[str, Any] = {"epsilon": 3, "batch": SAMPLES}
"""A batch of all samples, for which the noise is found at once; where sampling matters, it is below 100."""


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), *(layers or (nn.ReLU(),)), nn.Linear(32, 10))


def setting_of(samples: int = SAMPLES, rows: int = 1, **changes: Any) -> BaselineSettings:
    blocks = Grid(rows).split(DIGITS.x[:samples], DIGITS.y[:samples], seed=0)
    return BaselineSettings(**{"build_model": network, "blocks": blocks, "steps": 10, "lr": 1.0, **changes})


def start_of(setting: BaselineSettings) -> nn.Module:
    """Where the run starts."""
    model = setting.build_model()
    assert isinstance(setting.delta, float)
    confine(model, setting.delta, participant_seed(setting.seed, Cell(0, 0)))
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def weights(trained: PrivatelyTrained) -> torch.Tensor:
    return flat(trained.models["dp-sgd"])


def no_gradient(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return 0 * outputs.mean()


def test_little_noise_learns_and_much_noise_does_not() -> None:
    setting = setting_of(rows=3, steps=150, test=(DIGITS.held_out_x, DIGITS.held_out_y), evaluate_every=60)
    loose = dp_sgd(setting, epsilon=50, batch=128)
    tight = dp_sgd(setting, epsilon=0.05, batch=128)
    assert [each.step for each in loose.history.evaluations] == [0, 60, 120, 150]
    assert loose.history.participants == ["dp-sgd"]
    assert len(loose.history.training_loss) == 150
    (reached,), (hindered,) = (run.history.evaluations[-1].accuracy for run in (loose, tight))
    assert reached > 0.85
    assert hindered < reached - 0.2
    model = loose.models["dp-sgd"]
    right = (model(DIGITS.held_out_x).argmax(dim=1) == DIGITS.held_out_y).float().mean()
    assert float(right) == pytest.approx(reached)


def test_it_starts_where_centralised_training_does() -> None:
    setting = setting_of(loss=no_gradient, lr=0.0, steps=1, seed=3)
    assert torch.equal(weights(dp_sgd(setting, **ALL)), flat(start_of(setting)))


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")  # of RDP, from which PRV takes its range
@pytest.mark.parametrize(("epsilon", "dp_delta"), [(0.05, 1e-5), (0.5, 1e-4), (2, 1e-5), (8, 1e-6)])
def test_another_accountant_agrees_that_it_is_private(epsilon: float, dp_delta: float) -> None:
    steps, batch = 20, 64
    trained = dp_sgd(setting_of(steps=steps), epsilon=epsilon, dp_delta=dp_delta, batch=batch)
    assert 0.99 * epsilon < trained.epsilon_spent <= epsilon

    def cost(noise_multiplier: float) -> float:
        accountant = PRVAccountant()
        accountant.history = [(noise_multiplier, batch / SAMPLES, steps)]
        return float(accountant.get_epsilon(delta=dp_delta, eps_error=epsilon / 50))

    assert cost(trained.noise_multiplier) <= epsilon
    assert cost(0.75 * trained.noise_multiplier) > epsilon  # it is not private by mere excess


@pytest.mark.parametrize("epsilon", [0.2, 1, 10])
def test_with_all_samples_it_is_the_gaussian_mechanism(epsilon: float) -> None:
    # Of which δ is known in closed form (Balle and Wang 2018), and many steps are one with √steps times the signal.
    steps, dp_delta = 9, 1e-5
    trained = dp_sgd(setting_of(samples=40, steps=steps), epsilon=epsilon, dp_delta=dp_delta, batch=40)

    def delta(noise_multiplier: float) -> float:
        signal = math.sqrt(steps) / noise_multiplier
        near, far = norm.cdf(signal / 2 - epsilon / signal), norm.cdf(-signal / 2 - epsilon / signal)
        return float(near - math.exp(epsilon) * far)

    assert delta(trained.noise_multiplier) <= dp_delta
    assert delta(0.75 * trained.noise_multiplier) > dp_delta


@pytest.mark.parametrize(("samples", "batch"), [(SAMPLES, 100), (8, 1)])  # of eight, none are drawn in every third step
def test_the_noise_has_the_size_that_was_accounted_for(samples: int, batch: int) -> None:
    steps, clip, lr = 10, 3.0, 2.0
    setting = setting_of(samples, loss=no_gradient, steps=steps, lr=lr, build_model=lambda: nn.Linear(64, 200))
    trained = dp_sgd(setting, epsilon=0.5, batch=batch, clip=clip)
    moved = (weights(trained) - flat(start_of(setting))).double()
    expected = steps * (lr / batch * trained.noise_multiplier * clip) ** 2
    measured = float((moved**2).mean())
    # The mean of so many squares is normal around 1 with this deviation: a false alarm in 1.7 million.
    tolerance = 5 * math.sqrt(2 / len(moved))
    assert abs(measured / expected - 1) < tolerance
    assert abs(measured / (1.1**2 * expected) - 1) > tolerance  # noise of 1.1 times the size would not pass
    assert abs(float(moved.mean())) < 5 * math.sqrt(expected / len(moved))


def test_batches_are_poisson_samples() -> None:
    steps, batch, sizes = 300, 64, []

    def build() -> nn.Linear:
        model = nn.Linear(64, 10)
        model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        return model

    dp_sgd(setting_of(build_model=build, steps=steps, lr=0.0), epsilon=1, batch=batch)
    assert len(sizes) == steps
    drawn = torch.tensor(sizes, dtype=torch.float64)
    variance = batch * (1 - batch / SAMPLES)
    # Both within five standard deviations, a false alarm in 900,000; a fixed size has no variance and would not pass.
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
def test_a_step_is_the_sum_of_clipped_gradients(build: Callable[[], nn.Module]) -> None:
    samples, lr = 51, 0.3
    setting = setting_of(samples, build_model=build, steps=1, lr=lr)
    model, (x, y) = start_of(setting), setting.pooled()
    gradients = []
    for sample in range(samples):
        loss = setting.loss(model(x[sample : sample + 1]), y[sample : sample + 1])
        gradients.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]))
    norms = torch.stack(gradients).norm(dim=1)
    clip = float(norms.median())  # so that half of them are clipped and half of them are not
    clipped = (torch.stack(gradients) * (clip / norms).clamp(max=1)[:, None]).sum(dim=0)

    # With a batch of all samples nothing is left to chance but the noise, which is the same without gradients.
    trained, noise = (
        dp_sgd(dataclasses.replace(setting, loss=loss), epsilon=1000, batch=samples, clip=clip)
        for loss in (setting.loss, no_gradient)
    )
    moved = (weights(noise) - weights(trained)) * samples / lr
    # Opacus adds 1e-6 to a norm of at least `clip`. A weight is rounded a few times by 2⁻²⁴ of itself, and then scaled.
    rounding = 2**-22 * float(weights(trained).abs().max()) * samples / lr
    tolerance = rounding + (2**-20 + 1e-6 / clip) * samples * clip
    assert float((moved - clipped).abs().max()) < tolerance
    assert float((torch.stack(gradients).sum(dim=0) - clipped).abs().max()) > 100 * tolerance


def test_no_sample_moves_the_model_further_than_the_norm() -> None:
    samples, clip, lr = 20, 0.01, 1.0
    setting = setting_of(samples, steps=1, lr=lr)
    trained, noise = (
        dp_sgd(dataclasses.replace(setting, loss=loss), epsilon=1000, batch=samples, clip=clip)
        for loss in (lambda outputs, y: 1e6 * setting.loss(outputs, y), no_gradient)
    )
    moved = float((weights(trained) - weights(noise)).norm())
    assert 0 < moved <= lr * clip * 1.001


def test_regression_works_too() -> None:
    diabetes = load("diabetes").scaled()
    setting = BaselineSettings(
        lambda: nn.Linear(10, 1),
        Grid(2, 2).split(diabetes.x, diabetes.y, seed=0),
        steps=100,
        lr=0.3,
        loss=nn.functional.mse_loss,
        test=(diabetes.held_out_x, diabetes.held_out_y),
    )
    trained = dp_sgd(setting, epsilon=20, batch=64)
    evaluations = trained.history.evaluations
    assert evaluations[-1].accuracy == []
    assert evaluations[-1].loss[0] < 0.75  # a guess of the mean has 1


def test_a_run_repeats_and_another_seed_differs() -> None:
    setting = setting_of(steps=3)
    once, again = (dp_sgd(setting, epsilon=3, batch=64) for _ in range(2))
    assert torch.equal(weights(once), weights(again))
    assert once.history == again.history
    still = dataclasses.replace(setting, loss=no_gradient)
    noises = []
    for seed in (0, 1):
        seeded = dataclasses.replace(still, seed=seed)
        noises.append(weights(dp_sgd(seeded, **ALL)) - flat(start_of(seeded)))
    likeness = torch.corrcoef(torch.stack(noises))[0, 1]
    assert abs(float(likeness)) < 5 / math.sqrt(len(noises[0]))  # a false alarm in 1.7 million; the same noise has 1


@pytest.mark.parametrize("stop_at", [1, 4, 5, 11, 12])
def test_it_resumes_to_the_same_bits(stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_CHECKPOINTS", -1)

    class StopError(Exception):
        pass

    def stop(step: int, history: History) -> None:
        if step == stop_at:
            raise StopError

    setting = setting_of(steps=12, test=(DIGITS.held_out_x, DIGITS.held_out_y), evaluate_every=5)
    whole = dp_sgd(setting, epsilon=3, batch=64)
    checkpointed = dataclasses.replace(setting, checkpoint=tmp_path / "run.pt")
    with pytest.raises(StopError):
        dp_sgd(dataclasses.replace(checkpointed, on_step=stop), epsilon=3, batch=64)
    taken: list[int] = []
    resumed = dp_sgd(dataclasses.replace(checkpointed, on_step=lambda step, _: taken.append(step)), epsilon=3, batch=64)
    assert taken == list(range(stop_at + 1, 13))  # it did not begin anew
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.history == whole.history
    finished = dp_sgd(checkpointed, epsilon=3, batch=64)
    assert torch.equal(weights(finished), weights(whole))
    assert finished.history == whole.history


def test_checkpoints_are_not_written_at_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    seen: list[bool] = []
    dp_sgd(setting_of(checkpoint=path, on_step=lambda *_: seen.append(path.exists())), **ALL)
    assert seen == [False] * 10
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("epsilon", {}, {"epsilon": 4}),
        ("dp_delta", {}, {"dp_delta": 1e-6}),
        ("batch", {}, {"batch": SAMPLES - 1}),
        ("clip", {}, {"clip": 2.0}),
        ("lr", {"lr": 0.5}, {}),
        ("steps", {"steps": 11}, {}),
        ("seed", {"seed": 1}, {}),
        ("dp-sgd", {"delta": 0.2}, {}),
        ("loss", {"loss": nn.functional.multi_margin_loss}, {}),
        ("dp-sgd", {"build_model": lambda: network(nn.Tanh())}, {}),
        ("dp-sgd", {"blocks": Grid(1).split(DIGITS.x.flip(0), DIGITS.y.flip(0), seed=0)}, {}),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    name: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.pt"
    dp_sgd(setting_of(checkpoint=path), **ALL)
    with pytest.raises(InputError, match=f"another run .*{name} was"):
        dp_sgd(setting_of(checkpoint=path, **changes), **{**ALL, **options})


def test_nothing_of_opacus_is_left_on_the_model() -> None:
    setting = setting_of(steps=2)
    model = dp_sgd(setting, **ALL).models["dp-sgd"]
    clean = start_of(setting)
    for ours, theirs in zip(model.modules(), clean.modules(), strict=True):
        assert ours.__dict__.keys() == theirs.__dict__.keys()
        assert not ours._forward_hooks
        assert not ours._backward_hooks
    for parameter, other in zip(model.parameters(), clean.parameters(), strict=True):
        assert parameter.grad is None
        assert vars(parameter) == vars(other)
    copy.deepcopy(model)(DIGITS.x[:3]).sum().backward()


def test_a_failed_run_leaves_the_model_clean_too() -> None:
    model = network()

    def fail(step: int, history: History) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dp_sgd(setting_of(build_model=lambda: model, on_step=fail), **ALL)
    dp_sgd(setting_of(build_model=lambda: model), **ALL)  # hooks are not added twice


def test_frozen_parameters_stay() -> None:
    def build() -> nn.Sequential:
        model = network()
        first = model.get_parameter("0.weight")
        nn.init.constant_(first, 0.25).requires_grad_(False)
        return model

    setting = setting_of(build_model=build)
    model, start = dp_sgd(setting, **ALL).models["dp-sgd"], start_of(setting)
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
        ({"epsilon": 1e-4}, "epsilon is 0.0001, and no noise .*; raise epsilon"),
        ({"dp_delta": 0.0}, "dp_delta is 0.0; .* between 0 and 1"),
        ({"dp_delta": 1.0}, "dp_delta is 1.0"),
        ({"clip": 0.0}, "clip is 0.0; .* positive"),
        ({"clip": -2}, "clip is -2"),
        ({"batch": 0}, f"batch is 0; .* from 1 to the number of samples, {SAMPLES}"),
        ({"batch": SAMPLES + 1}, f"batch is {SAMPLES + 1}"),
        ({"batch": 2.5}, "batch is 2.5"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dp_sgd(setting_of(), **{**ALL, **options})


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match="steps is 0; .* at least 1"):
        dp_sgd(setting_of(steps=0), epsilon=1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.outer(self.inner(self.inner(x)))
        return hidden


class Idle(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.outer(x)
        return hidden


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: network(nn.BatchNorm1d(32)), "layer 1 is BatchNorm1d.*; replace it by GroupNorm"),
        (lambda: network(nn.BatchNorm1d(32, affine=False)), "layer 1 is BatchNorm1d"),
        (lambda: network(nn.BatchNorm1d(32, track_running_stats=False)), "layer 1 is BatchNorm1d"),
        (lambda: nn.LSTM(64, 10), "Opacus cannot handle a layer .*LSTM.*; replace it"),
        (Tied, "cannot clip .*tying.*; use every parameter"),
        (Idle, "cannot clip .*; use every parameter"),
    ],
)
def test_layers_that_cannot_be_private_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=f"(?s){message}"):
        dp_sgd(setting_of(build_model=build), **ALL)


def test_without_opacus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(InputError, match=r"pip install 'cgd\[dp\]'"):
        dp_sgd(setting_of(), epsilon=1)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(DivergenceError, match="loss is (inf|nan) after .* steps; lower lr"):
        dp_sgd(setting_of(lr=1e38), **ALL)
