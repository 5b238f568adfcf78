"""DP-SGD (Abadi et al. 2016): one model on the pooled data of all participants, trained with differential privacy.

Opacus clips gradients, adds noise and accounts for the privacy loss. The loop draws batches and noise from one seeded
generator, so that a run can be repeated and resumed with the same bits.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.simulation.baselines.plain import TrainingTask, evaluate, run_baseline_loop
from cgd.simulation.baselines.settings import BaselineResult

if TYPE_CHECKING:
    from cgd.simulation.baselines.settings import BaselineSettings
    from cgd.simulation.result import Evaluation

NAME = "dp-sgd"
"""Name of the only model in the result."""

RENYI_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(12, 64),
    *(64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1000),
)
"""Orders of Rényi differential privacy for the accountant: those of Opacus, and higher ones, without which no ε below
about 0.1 can be reached at a δ of 1e-5. Above 1029 the binomials in Opacus overflow."""


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
    settings: BaselineSettings, *, epsilon: float, dp_delta: float = 1e-5, batch: int = 256, clip: float = 1.0
) -> DPSGDResult:
    """Train one model on all samples with all features by DP-SGD, from the initial model of `centralised`.

    Each step draws every sample with probability batch/n, clips its gradient to the norm `clip`, adds Gaussian noise to
    the sum, and moves by lr/batch times that. The noise is the smallest with which all steps together are
    (ε, δ)-differentially private for adding or removing one sample, by the Rényi accountant of Opacus, the successor of
    the moments accountant in the paper. (The PRV accountant needs about 5% less noise, but gigabytes of memory for a
    large ε.)

    For experiments only: the noise comes from a seeded generator, so anyone who knows the seed can subtract it, and the
    history contains training losses without noise. Only the model is private, and only with a secret random seed.
    Layers that draw random numbers, such as Dropout, use torch's global generator, and a run with them does not repeat
    bit for bit.

    Args:
        settings: data, model and training settings; `loss` must also accept a batch of one.
        epsilon: ε of the whole run.
        dp_delta: δ of the whole run; should be smaller than one over the number of samples.
        batch: expected number of samples in a step.
        clip: norm to which each sample's gradient is clipped.

    Returns:
        The model under the name "dp-sgd", and its privacy loss. The history's training losses are those of the batches.

    Raises:
        InputError: a value is invalid, Opacus is not installed, or it cannot handle the model.
        DivergenceError: the loss is not finite.
    """
    _require_opacus()
    x, y = settings.pooled()
    _check(settings.steps, len(x), epsilon, dp_delta, batch, clip)
    noise_multiplier, epsilon_spent = _calibrate(epsilon, dp_delta, batch, len(x), settings.steps)
    task = TrainingTask(settings.initial_model(), x, y)
    method_settings = {
        "epsilon": repr(epsilon),
        "dp_delta": repr(dp_delta),
        "batch": repr(batch),
        "clip": repr(clip),
        "steps": repr(settings.steps),  # the noise depends on it, so a run cannot be extended
        "noise": repr(noise_multiplier),  # another version of Opacus may find another value
    }
    loop = _DPSGDLoop(settings, task, noise_multiplier, batch, clip)
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
        self, settings: BaselineSettings, task: TrainingTask, noise_multiplier: float, batch: int, clip: float
    ) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping

        self._settings, self._task = settings, task
        # One sample at a time, so that no sample's gradient can depend on another sample.
        self._sample_losses = torch.func.vmap(lambda output, label: settings.loss(output[None], label[None]))
        self._sample_rate = batch / len(task.x)
        seed = hashlib.sha256(f"cgd dp-sgd {settings.seed}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        task.model.train()
        _check_layers(task.model)
        self._parameters = [each for each in task.model.parameters() if each.requires_grad]
        self._module: Any = GradSampleModuleFastGradientClipping(task.model, loss_reduction="sum", max_grad_norm=clip)
        self._optimizer: Any = DPOptimizerFastGradientClipping(
            torch.optim.SGD(self._parameters, lr=settings.lr),
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip,
            expected_batch_size=batch,
            loss_reduction="mean",  # divides by the expected batch size: the actual one is private
            generator=self._generator,
        )

    def step(self, number: int) -> float:  # noqa: ARG002
        """Draw a batch, move the model, and return the batch's mean loss before; for an empty batch, of all samples."""
        x, y = self._task.x, self._task.y
        # In double precision, so that the probability is the one that the accountant assumes.
        drawn = torch.rand(len(x), generator=self._generator, dtype=torch.float64) < self._sample_rate
        chosen = drawn.nonzero().flatten()
        if len(chosen):
            loss = self._backward_clipped(x[chosen], y[chosen])
        else:
            with torch.no_grad():
                loss = float(self._settings.loss(self._task.model(x), y))
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()  # adds noise even to an empty batch, so that the model does not reveal that it was empty
        self._optimizer.zero_grad()
        return loss

    def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate the model."""
        return evaluate(self._settings, [self._task], step)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the model and of the generator."""
        return {"model": self._task.model.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._task.model.load_state_dict(state["model"])
        self._generator.set_state(state["generator"])

    def _backward_clipped(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Write the sum of the samples' clipped gradients to the parameters, and return the mean loss."""
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
        return float(losses.detach().mean())

    def close(self) -> None:
        """Remove the hooks and attributes of Opacus from the model."""
        self._optimizer.zero_grad(set_to_none=True)
        self._module.to_standard_module()
        for parameter in self._parameters:
            del parameter.summed_grad  # type: ignore[attr-defined]
        for module in self._task.model.modules():
            module.__dict__.pop("activations", None)


@lru_cache(maxsize=64)  # the search takes seconds
def _calibrate(epsilon: float, dp_delta: float, batch: int, samples: int, steps: int) -> tuple[float, float]:
    """Return the noise multiplier with which the steps cost at most ε, and the ε they cost with it."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import get_noise_multiplier

    rate = batch / samples
    with warnings.catch_warnings():
        # The search starts with too much noise, where the highest order is optimal. The result is a valid bound at any
        # order, only less tight.
        warnings.filterwarnings("ignore", "Optimal order is the (largest|smallest) alpha", UserWarning)
        try:
            noise_multiplier = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=dp_delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
                epsilon_tolerance=epsilon / 1000,
                alphas=RENYI_ORDERS,
            )
        except ValueError as error:
            raise InputError(
                f"epsilon is {epsilon}, and no amount of noise reaches it in {steps} steps at dp_delta {dp_delta} "
                f"({error}); raise epsilon or dp_delta"
            ) from None
        accountant = RDPAccountant()
        accountant.history = [(noise_multiplier, rate, steps)]
        spent = accountant.get_epsilon(delta=dp_delta, alphas=RENYI_ORDERS)
    return float(noise_multiplier), max(0.0, float(spent))


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
