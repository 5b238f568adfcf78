"""DP-SGD (Abadi et al. 2016): one model on the pooled data of all participants, trained with differential privacy.

Opacus clips gradients and adds noise. The privacy loss of random batches is that of its PRV accountant; with a batch of
all samples it is that of `cgd.dp`, which is exact then. The loop draws batches and noise from one seeded generator, so
that a run can be repeated and resumed with the same bits.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.dp.accountant import Budget, epsilon_of
from cgd.errors import InputError
from cgd.simulation.baselines.plain import TrainingTask, evaluate, run_baseline_loop
from cgd.simulation.baselines.settings import BaselineResult
from cgd.simulation.simulate import step_factor

if TYPE_CHECKING:
    from cgd.simulation.baselines.settings import BaselineSettings
    from cgd.simulation.result import Evaluation
    from cgd.simulation.simulate import Schedule

NAME = "dp-sgd"
"""Name of the only model in the result."""

EPSILON_ERROR, MAX_EPSILON_ERROR = 0.02, 0.5
"""The error of ε that the PRV accountant may make, as a part of ε, and at most. It is added to the ε that is spent."""
CALIBRATION_TOLERANCE = 0.002
"""The part of ε that random batches may leave unused."""
MAX_POINTS = 1 << 24
"""The number of points at which the PRV accountant may compute a density; these need a gigabyte."""
MAX_PART = 4096
"""The largest number of samples whose activations are in memory at a time: small enough for the cache."""
MIN_NOISE, MAX_NOISE = 0.05, 1e6
"""The noise multipliers of random batches. Less noise than the first protects nothing."""


@dataclass(frozen=True)
class DPSGDResult(BaselineResult):
    """Result of DP-SGD.

    Attributes:
        epsilon_spent: ε of the run at its δ; at most the requested one.
        noise_multiplier: standard deviation of the noise in a sum of clipped gradients, divided by the clipping norm.
    """

    epsilon_spent: float
    noise_multiplier: float


def dp_sgd(
    settings: BaselineSettings,
    *,
    epsilon: float,
    dp_delta: float = 1e-5,
    batch: int = 256,
    clip: float = 1.0,
    momentum: float = 0.0,
    schedule: Schedule | None = None,
    prior_mu: float = 0.0,
) -> DPSGDResult:
    """Train one model on all samples with all features by DP-SGD, from the initial model of `centralised`.

    Each step draws every sample with probability batch/n, clips its gradient to the norm `clip`, adds Gaussian noise to
    the sum, and moves by lr/batch times that, or its momentum. The noise is the smallest with which all steps together
    are (ε, δ)-differentially private for adding or removing one sample. If `batch` is the number of samples, every step
    uses all of them, and the noise is that of `cgd.dp.accountant`: Gaussian differential privacy, as in private CGD.
    Otherwise it is that of Opacus's PRV accountant, with 2 % of ε for its numerical error.

    For experiments only: the noise comes from a seeded generator, so anyone who knows the seed can subtract it, and the
    history contains training losses without noise. Only the model is private, and only with a secret random seed.
    Layers that draw random numbers, such as Dropout, use torch's global generator, and a run with them does not repeat
    bit for bit.

    Args:
        settings: data, model and training settings; `loss` must also accept a batch of one.
        epsilon: ε of the whole run.
        dp_delta: δ of the whole run; should be smaller than one over the number of samples.
        batch: expected number of samples in a step; the number of all samples for steps with all of them.
        clip: norm to which each sample's gradient is clipped.
        momentum: momentum of the steps.
        schedule: factor of the step size in each step, counted from 0.
        prior_mu: μ of what was opened about the samples before, such as their mean with noise; it is a part of ε.

    Returns:
        The model under the name "dp-sgd", and its privacy loss. The history's training losses are those of the batches.

    Raises:
        InputError: a value is invalid, Opacus is not installed, or it cannot handle the model.
        DivergenceError: the loss is not finite.
    """
    _require_opacus()
    x, y = settings.pooled()
    _check(settings.steps, len(x), epsilon, dp_delta, batch, clip)
    if not 0 <= momentum < 1:
        raise InputError(f"momentum is {momentum}; it must be at least 0 and below 1, 0.9 is common")
    factor, schedule_text = step_factor(settings.steps, 0.0, 0, schedule)
    noise_multiplier, epsilon_spent = _calibrate(epsilon, dp_delta, batch, len(x), settings.steps, prior_mu)
    task = TrainingTask(settings.initial_model(), x, y)
    method_settings = {
        "epsilon": repr(epsilon),
        "dp_delta": repr(dp_delta),
        "batch": repr(batch),
        "clip": repr(clip),
        "momentum": repr(momentum),
        "schedule": schedule_text,
        "steps": repr(settings.steps),  # the noise depends on it, so a run cannot be extended
        "noise": repr(noise_multiplier),  # another version of Opacus may find another value
    }
    loop = _DPSGDLoop(settings, task, noise_multiplier, batch, clip, momentum, factor)
    try:
        history = run_baseline_loop(settings, {NAME: task}, loop, method_settings)
    finally:
        loop.close()
    return DPSGDResult({NAME: task.model}, history, epsilon_spent, noise_multiplier)


class _DPSGDLoop:
    """The training loop of DP-SGD: a model with the hooks of Opacus, and the generator of all random numbers.

    Gradients are clipped without being stored sample by sample ("ghost clipping"): that needs a second backward pass,
    but for a network of 200,000 weights and 256 samples it is twenty times as fast.
    """

    def __init__(
        self,
        settings: BaselineSettings,
        task: TrainingTask,
        noise_multiplier: float,
        batch: int,
        clip: float,
        momentum: float,
        factor: Schedule,
    ) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping

        self._settings, self._task, self._factor = settings, task, factor
        # One sample at a time, so that no sample's gradient can depend on another sample.
        self._sample_losses = torch.func.vmap(lambda output, label: settings.loss(output[None], label[None]))
        self._sample_rate = batch / len(task.x)
        seed = hashlib.sha256(f"cgd dp-sgd {settings.seed}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        task.model.train()
        _check_layers(task.model)
        self._parameters = [each for each in task.model.parameters() if each.requires_grad]
        self._module: Any = GradSampleModuleFastGradientClipping(task.model, loss_reduction="sum", max_grad_norm=clip)
        self._sgd = torch.optim.SGD(self._parameters, lr=settings.lr, momentum=momentum)
        self._optimizer: Any = DPOptimizerFastGradientClipping(
            self._sgd,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip,
            expected_batch_size=batch,
            loss_reduction="mean",  # divides by the expected batch size: the actual one is private
            generator=self._generator,
        )

    def step(self, number: int) -> float:
        """Draw a batch, move the model, and return the batch's mean loss before; for an empty batch, of all samples."""
        x, y = self._batch()
        sums = [torch.zeros_like(each) for each in self._parameters]
        if len(x):
            loss = 0.0
            for part_x, part_y in zip(x.split(MAX_PART), y.split(MAX_PART), strict=True):
                loss += self._backward_clipped(part_x, part_y) / len(x)
                for total, parameter in zip(sums, self._parameters, strict=True):
                    total += 0 if parameter.grad is None else parameter.grad
        else:
            with torch.no_grad():
                loss = float(self._settings.loss(self._task.model(self._task.x), self._task.y))
        for total, parameter in zip(sums, self._parameters, strict=True):
            parameter.grad = total
        self._sgd.param_groups[0]["lr"] = self._settings.lr * self._factor(number)
        self._optimizer.step()  # adds noise even to an empty batch, so that the model does not reveal that it was empty
        self._optimizer.zero_grad()
        return loss

    def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate the model."""
        return evaluate(self._settings, [self._task], step)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the model, of the momentum and of the generator."""
        return {
            "model": self._task.model.state_dict(),
            "momentum": [self._sgd.state[each].get("momentum_buffer") for each in self._parameters],
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._task.model.load_state_dict(state["model"])
        for parameter, buffer in zip(self._parameters, state["momentum"], strict=True):
            self._sgd.state[parameter]["momentum_buffer"] = buffer
        self._generator.set_state(state["generator"])

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all samples if the batch has all, else each with the sampling probability."""
        x, y = self._task.x, self._task.y
        if self._sample_rate == 1:
            return x, y
        # In double precision, so that the probability is the one that the accountant assumes.
        drawn = torch.rand(len(x), generator=self._generator, dtype=torch.float64) < self._sample_rate
        return x[drawn], y[drawn]

    def _backward_clipped(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Write the sum of the samples' clipped gradients to the parameters, and return the sum of the losses."""
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        try:
            losses = self._sample_losses(self._module(x), y)
            with warnings.catch_warnings():
                # The hooks of Opacus do not need gradients of the inputs, which torch warns about.
                warnings.filterwarnings(
                    "ignore", "Full backward hook is firing when gradients are computed", UserWarning
                )
                DPTensorFastGradientClipping(self._module, self._optimizer, losses, "sum").backward()
        except (NotImplementedError, AttributeError) as error:  # tied parameters, or unused ones
            raise InputError(
                f"Opacus cannot clip the gradients of this model ({error}); "
                "use each parameter in one layer only, and each layer exactly once"
            ) from error
        return float(losses.detach().sum())

    def close(self) -> None:
        """Remove the hooks and attributes of Opacus from the model."""
        self._optimizer.zero_grad(set_to_none=True)
        self._module.to_standard_module()
        for parameter in self._parameters:
            del parameter.summed_grad  # type: ignore[attr-defined]
        for module in self._task.model.modules():
            module.__dict__.pop("activations", None)


@lru_cache(maxsize=64)  # the search takes seconds
def _calibrate(
    epsilon: float, dp_delta: float, batch: int, samples: int, steps: int, prior_mu: float
) -> tuple[float, float]:
    """Return the noise multiplier with which the steps, and what was opened before, cost at most ε; and that cost."""
    budget = Budget(epsilon, dp_delta)
    if not 0 <= prior_mu < math.sqrt(budget.mu_squared):
        raise InputError(
            f"prior_mu is {prior_mu}, and all that epsilon {epsilon} allows is {math.sqrt(budget.mu_squared):.4g}; "
            "it must be at least 0 and below that: open less before the training, or raise epsilon"
        )
    if batch < samples:
        return _calibrate_sampled(epsilon, dp_delta, batch / samples, steps, prior_mu)
    budget.charge(prior_mu**2, "what was opened before")
    each = budget.mu_squared_each(steps)
    spent = epsilon_of(math.sqrt(prior_mu**2 + steps * each), dp_delta)
    return 1 / math.sqrt(each), min(epsilon, spent)  # ε is rounded up, but the budget was not exceeded


def _calibrate_sampled(
    epsilon: float, dp_delta: float, rate: float, steps: int, prior_mu: float
) -> tuple[float, float]:
    """Do the same for random batches, by the PRV accountant (Gopi et al. 2021)."""
    error = min(EPSILON_ERROR * epsilon, MAX_EPSILON_ERROR)
    # It computes at least the range from −3 to 3, with this distance of points.
    points = 6 / error * math.sqrt(steps * math.log(12_000 / dp_delta) / 2)
    if points > MAX_POINTS:
        raise InputError(
            f"epsilon is {epsilon} and there are {steps} steps with random batches: accounting for them would need "
            f"{points:.0e} points, at most {MAX_POINTS:.0e} fit into memory; raise epsilon, or set batch to the number "
            "of samples"
        )

    def cost(noise_multiplier: float) -> float:
        return _prv_epsilon(noise_multiplier, rate, steps, prior_mu, dp_delta, error)

    low, high = MIN_NOISE, 1.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > MAX_NOISE:
            raise InputError(
                f"epsilon is {epsilon}, and no noise up to {MAX_NOISE:.0e} times the clip norm reaches it in {steps} "
                "steps; raise epsilon, or open less before the training"
            )
    spent = cost(high)
    while spent < (1 - CALIBRATION_TOLERANCE) * epsilon and high - low > CALIBRATION_TOLERANCE * MIN_NOISE:
        middle = (low + high) / 2
        found = cost(middle)
        if found <= epsilon:
            high, spent = middle, found
        else:
            low = middle
    return high, max(0.0, spent)


def _prv_epsilon(
    noise_multiplier: float, rate: float, steps: int, prior_mu: float, dp_delta: float, error: float
) -> float:
    """Return an upper bound of the ε that steps with random batches cost, after something that was μ-GDP."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    prior = [(1 / prior_mu, 1.0, 1)] if prior_mu else []
    accountant.history = [*prior, (noise_multiplier, rate, steps)]
    # A step with all samples has the logarithm of 0, which is −∞ as it should be.
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        # The accountant takes its range from a Rényi bound, which is valid at any order, only less tight.
        warnings.filterwarnings("ignore", "Optimal order is the (largest|smallest) alpha", UserWarning)
        return float(accountant.get_epsilon(delta=dp_delta, eps_error=error))


def _require_opacus() -> None:
    try:
        import opacus  # noqa: F401
    except ImportError as error:
        raise InputError(f"dp-sgd needs Opacus, which cannot be imported ({error}); pip install 'cgd[dp]'") from None


def _check(steps: int, samples: int, epsilon: float, dp_delta: float, batch: int, clip: float) -> None:
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon}; it must be a positive number; smaller is more private, 1 is common")
    if not 0 < dp_delta < 1:
        raise InputError(f"dp_delta is {dp_delta}; it must be a probability between 0 and 1, best below 1/{samples}")
    if not 0 < clip < math.inf:
        raise InputError(f"clip is {clip}; it is the largest norm of a sample's gradient and must be a positive number")
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= samples:
        raise InputError(f"batch is {batch}; it must be a whole number from 1 to the number of samples, {samples}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps is {steps}; dp-sgd needs a whole number of steps, at least 1")


def _check_layers(model: torch.nn.Module) -> None:
    """Raise InputError if a layer's gradients cannot be clipped sample by sample."""
    from opacus.grad_sample import GradSampleModule
    from opacus.validators import ModuleValidator

    for name, layer in model.named_modules():
        # Also layers without parameters, which Opacus accepts although they mix samples.
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"layer {name or 'model'} is {layer}, which mixes the samples of a batch, so that gradients "
                "cannot be clipped sample by sample; replace it by GroupNorm or LayerNorm"
            )
    errors = [*ModuleValidator.validate(model), *GradSampleModule.validate(model)]
    if errors:
        raise InputError(
            f"Opacus cannot handle a layer of the model ({errors[0]}); "
            "replace it; opacus.validators.ModuleValidator.fix suggests a replacement"
        )
