"""DP-SGD (Abadi et al. 2016): one model on everybody's data, trained so that it tells little about any one sample.

Opacus clips, adds the noise and accounts for it. What is ours is the loop: it draws batches and noise from one seeded
generator, so that a run can be repeated and resumed to the same bits.
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
from cgd.simulation.baselines.setting import BaselineResult, Learner, evaluate, follow_learners

if TYPE_CHECKING:
    from cgd.simulation.baselines.setting import BaselineSettings
    from cgd.simulation.result import Evaluation

NAME = "dp-sgd"
"""What the one participant is called."""

ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(12, 64),
    *(64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1000),
)
"""The orders of Rényi privacy that are tried: those of Opacus, and higher ones, without which no ε below about 0.1
could be reached at a δ of 1e-5. Above 1029 the binomials in Opacus are no longer finite."""


@dataclass(frozen=True)
class PrivatelyTrained(BaselineResult):
    """What DP-SGD returns.

    Attributes:
        epsilon_spent: the ε that the run cost at its δ; at most the one that was asked for.
        noise_multiplier: the standard deviation of the noise in a sum of clipped gradients, over the clipping norm.
    """

    epsilon_spent: float
    noise_multiplier: float


def dp_sgd(
    setting: BaselineSettings, *, epsilon: float, dp_delta: float = 1e-5, batch: int = 256, clip: float = 1.0
) -> PrivatelyTrained:
    """Train one model on all samples with all features by DP-SGD; it starts where `centralised` does.

    Each step takes every sample with probability batch/n, clips its gradient to the norm `clip`, adds Gaussian noise to
    the sum, and moves by lr/batch times that. The noise is the least with which all `setting.steps` steps together are
    (ε, δ)-private for adding or removing one sample, by Opacus' accountant of Rényi privacy, the successor of the
    moments accountant in the paper. (The PRV accountant would do with about 5% less noise, but it takes gigabytes where
    ε is large.)

    This is for experiments. The noise comes from a seeded generator, so whoever knows the seed can take it away, and
    the history shows training losses, to which no noise was added: what is private is the model alone, and only if the
    seed were secret and random. Layers that draw random numbers, such as Dropout, take them from torch's own
    generator, and a run with them does not repeat to the same bits.

    Args:
        setting: what to train; `loss` must also work on a batch of one, `lr` is the step size.
        epsilon: ε of the whole run.
        dp_delta: δ of the whole run, less than one over the number of samples to mean much.
        batch: the expected number of samples in a step.
        clip: the norm to which each sample's gradient is clipped.

    Returns:
        The model under the name "dp-sgd", and what it cost. The history's training losses are those of the batches.

    Raises:
        InputError: a value makes no sense, Opacus is not installed, or cannot handle the model.
        DivergenceError: the loss is no longer finite.
    """
    _require_opacus()
    x, y = setting.pooled()
    _check(setting.steps, len(x), epsilon, dp_delta, batch, clip)
    noise_multiplier, epsilon_spent = _calibrate(epsilon, dp_delta, batch, len(x), setting.steps)
    learner = Learner(setting.origin(), x, y)
    settings = {
        "epsilon": repr(epsilon),
        "dp_delta": repr(dp_delta),
        "batch": repr(batch),
        "clip": repr(clip),
        "steps": repr(setting.steps),  # they decide the noise, so a run cannot be prolonged
        "noise": repr(noise_multiplier),  # another Opacus may find another one
    }
    descent = _PrivateDescent(setting, learner, noise_multiplier, batch, clip)
    try:
        history = follow_learners(setting, {NAME: learner}, descent, settings)
    finally:
        descent.close()
    return PrivatelyTrained({NAME: learner.model}, history, epsilon_spent, noise_multiplier)


class _PrivateDescent:
    """A model with what Opacus attaches to it, and the generator from which all chance comes.

    Samples' gradients are clipped without being written out one by one ("ghost clipping"): that takes a second backward
    pass, but for a network of 200,000 weights and 256 samples it is twenty times as fast.
    """

    def __init__(
        self, setting: BaselineSettings, learner: Learner, noise_multiplier: float, batch: int, clip: float
    ) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping

        self._setting, self._learner = setting, learner
        # One sample at a time, so that no sample's gradient can depend on another sample.
        self._loss_of_each = torch.func.vmap(lambda output, label: setting.loss(output[None], label[None]))
        self._rate = batch / len(learner.x)
        seed = hashlib.sha256(f"cgd dp-sgd {setting.seed}".encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        learner.model.train()
        _check_layers(learner.model)
        self._parameters = [each for each in learner.model.parameters() if each.requires_grad]
        self._module: Any = GradSampleModuleFastGradientClipping(
            learner.model, loss_reduction="sum", max_grad_norm=clip
        )
        self._optimizer: Any = DPOptimizerFastGradientClipping(
            torch.optim.SGD(self._parameters, lr=setting.lr),
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip,
            expected_batch_size=batch,
            loss_reduction="mean",  # divides by the expected size: the real one is not to be told
            generator=self.generator,
        )

    def step(self, number: int) -> float:  # noqa: ARG002
        """Draw a batch, move the model, and return the mean loss of the batch before; of all samples if it is empty."""
        x, y = self._learner.x, self._learner.y
        # In double precision, for a probability that is the one accounted for.
        drawn = torch.rand(len(x), generator=self.generator, dtype=torch.float64) < self._rate
        chosen = drawn.nonzero().flatten()
        if len(chosen):
            value = self._clipped_gradients(x[chosen], y[chosen])
        else:
            with torch.no_grad():
                value = float(self._setting.loss(self._learner.model(x), y))
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()  # adds the noise, also to nothing: that a batch was empty must not show
        self._optimizer.zero_grad()
        return value

    def evaluate(self, taken: int) -> Evaluation | None:
        """The one model."""
        return evaluate(self._setting, [self._learner], taken)

    def state(self) -> dict[str, Any]:
        """The model, and where the generator stands."""
        return {"model": self._learner.model.state_dict(), "generator": self.generator.get_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""
        self._learner.model.load_state_dict(state["model"])
        self.generator.set_state(state["generator"])

    def _clipped_gradients(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Leave the sum of the samples' clipped gradients in the parameters."""
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        try:
            losses = self._loss_of_each(self._module(x), y)
            with warnings.catch_warnings():
                # The samples need no gradient, and Opacus needs none of theirs; its hooks work all the same.
                warnings.filterwarnings(
                    "ignore", "Full backward hook is firing when gradients are computed", UserWarning
                )
                DPTensorFastGradientClipping(self._module, self._optimizer, losses, "sum").backward()
        except (NotImplementedError, AttributeError) as error:  # tied parameters; those that took no part
            raise InputError(
                f"Opacus cannot clip the gradients of this model ({error}); "
                "use every parameter in one layer, and every layer once"
            ) from error
        return float(losses.detach().mean())

    def close(self) -> None:
        """Take everything off the model that Opacus attached."""
        self._optimizer.zero_grad(set_to_none=True)
        self._module.to_standard_module()
        for parameter in self._parameters:
            del parameter.summed_grad  # type: ignore[attr-defined]
        for module in self._learner.model.modules():
            module.__dict__.pop("activations", None)


@lru_cache(maxsize=64)  # the search takes seconds
def _calibrate(epsilon: float, dp_delta: float, batch: int, samples: int, steps: int) -> tuple[float, float]:
    """The noise multiplier with which so many steps cost at most ε, and what they cost with it."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import get_noise_multiplier

    rate = batch / samples
    with warnings.catch_warnings():
        # The search starts from far too much noise, where the highest order is the best; what it finds is a bound
        # whichever the order, only less tight.
        warnings.filterwarnings("ignore", "Optimal order is the (largest|smallest) alpha", UserWarning)
        try:
            noise_multiplier = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=dp_delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
                epsilon_tolerance=epsilon / 1000,
                alphas=ORDERS,
            )
        except ValueError as error:
            raise InputError(
                f"epsilon is {epsilon}, and no noise makes {steps} steps so private at dp_delta {dp_delta} "
                f"({error}); raise epsilon or dp_delta"
            ) from None
        accountant = RDPAccountant()
        accountant.history = [(noise_multiplier, rate, steps)]
        spent = accountant.get_epsilon(delta=dp_delta, alphas=ORDERS)
    return float(noise_multiplier), max(0.0, float(spent))


def _require_opacus() -> None:
    try:
        import opacus  # noqa: F401
    except ImportError as error:
        raise InputError(f"dp-sgd needs Opacus, which cannot be imported ({error}); pip install 'cgd[dp]'") from None


def _check(steps: int, samples: int, epsilon: float, dp_delta: float, batch: int, clip: float) -> None:
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon}; it is a positive number, small for much privacy (1 is common)")
    if not 0 < dp_delta < 1:
        raise InputError(f"dp_delta is {dp_delta}; it is a probability between 0 and 1, below 1/{samples} at best")
    if not 0 < clip < math.inf:
        raise InputError(f"clip is {clip}; it is the largest norm of a sample's gradient, a positive number")
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= samples:
        raise InputError(f"batch is {batch}; it is a whole number from 1 to the number of samples, {samples}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps is {steps}; dp-sgd spreads its noise over a whole number of steps, at least 1")


def _check_layers(model: torch.nn.Module) -> None:
    """Refuse layers whose gradients cannot be clipped sample by sample."""
    from opacus.grad_sample import GradSampleModule
    from opacus.validators import ModuleValidator

    for name, layer in model.named_modules():
        # Also those without parameters, which Opacus lets pass: they mix samples all the same.
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"layer {name or 'model'} is {layer}, which mixes the samples of a batch, so that no sample has a "
                "gradient of its own; replace it by GroupNorm or LayerNorm"
            )
    errors = [*ModuleValidator.validate(model), *GradSampleModule.validate(model)]
    if errors:
        raise InputError(
            f"Opacus cannot handle a layer of the model ({errors[0]}); "
            "replace it, opacus.validators.ModuleValidator.fix shows by what"
        )
