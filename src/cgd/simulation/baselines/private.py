"""Full-batch gradient descent of one model with the clipping and the noise of private CGD.

Compare private CGD with this: both have the same steps, clipping and accountant, so that the difference is the price of
confinement and of the shares of up to t colluders. `dp_sgd` also differs by its random batches and its accountant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from cgd.optim.displacement import SGDRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.dp.settings import PrivacySettings
    from cgd.optim.displacement import UpdateRule
    from cgd.simulation.baselines.settings import BaselineSettings
    from cgd.simulation.result import SimulationResult
    from cgd.simulation.simulate import Schedule


def private_centralised(
    settings: BaselineSettings,
    privacy: PrivacySettings,
    *,
    rule: Callable[[float], UpdateRule] = SGDRule,
    schedule: Schedule | None = None,
    arithmetic: Literal["float", "ring"] = "float",
) -> SimulationResult:
    """Train one model on all samples with differential privacy, from the initial model of `centralised`.

    It is the simulation of one participant that has all records; nobody colludes with it, so `privacy.colluders` has no
    effect. For experiments only: all noise follows from the seed, and the history contains losses without noise.

    Args:
        settings: data, model and training settings.
        privacy: clipping, noise and budget, as for `cgd.simulate`.
        rule: update rule, as a function of the step size.
        schedule: factor of the step size in each step.
        arithmetic: "float" or "ring".

    Returns:
        The result with one participant, r0c0; `spent` is the privacy used.

    Raises:
        InputError: a value is invalid, or the model's gradients cannot be separated by records.
        DivergenceError: the loss is not finite.
    """
    return settings.for_one_participant().simulate(
        mode="towers",
        sample=1,
        rule=rule,
        schedule=schedule,
        arithmetic=arithmetic,
        privacy=replace(privacy, colluders=0),
    )
