"""The learning rate α_k of the paper (Theorem 1 and section 7.2.2), and schedulers in restarted programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from cgd.errors import InputError
from cgd.optim.option_checks import check_number, check_whole

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def inverse_square_factor(step: int, mu: float, steps: int, hold: int = 0) -> float:
    """Return α_k/α for a step, counted from 0; the other arguments are those of `InverseSquareLR`."""
    if mu == 0 or step < hold:
        return 1.0
    k, shift = step - hold + 1, mu * steps
    root = (1 + shift) / (k + shift)
    return root * root  # root**2 may round differently on another system


def check_decay(mu: float, steps: int, hold: int) -> None:
    """Check the arguments of `inverse_square_factor`.

    Raises:
        InputError: mu, steps or hold is out of range.
    """
    check_number("mu", mu, 0)
    check_whole("steps", steps, 1)
    check_whole("hold", hold)


class InverseSquareLR(LRScheduler):
    """α_k = α·((1 + μT)/(k + μT))²: the paper's α/(k + μT)², scaled so that the first step is α.

    Args:
        optimizer: any torch optimiser, confined or not; its `lr` is α.
        mu: μ ≥ 0; 0 for a fixed learning rate.
        steps: T, the number of steps with a decreasing learning rate.
        hold: the number of steps with the learning rate α before it decreases.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule = InverseSquareLR(optimizer, mu=0.1, steps=10, hold=2)
        >>> rates = []
        >>> for _ in range(5):
        ...     rates.append(round(schedule.get_last_lr()[0], 4))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [1.0, 1.0, 1.0, 0.4444, 0.25]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mu: float, steps: int, hold: int = 0) -> None:
        check_decay(mu, steps, hold)
        self.mu, self.steps, self.hold = mu, steps, hold
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        """Return α_k/α for a step, counted from 0."""
        return inverse_square_factor(step, self.mu, self.steps, self.hold)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of every parameter group."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]


def check_schedulers(schedulers: Iterable[Any]) -> None:
    """Check that schedulers can be set to a step, at the beginning of a training and not only after a restart.

    Raises:
        InputError: one is no scheduler, or depends on losses, which are not stored.
    """
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise InputError(
                "a ReduceLROnPlateau cannot continue without the losses of earlier steps, which are not stored; loop "
                "over range(count), where past sums of losses are repeated, instead of steps()"
            )
        if not isinstance(scheduler, LRScheduler):
            raise InputError(
                f"a {type(scheduler).__name__} was given to steps() as a scheduler; pass those of "
                "torch.optim.lr_scheduler, or none"
            )


def catch_up(schedulers: Iterable[LRScheduler], steps: int) -> None:
    """Step schedulers that belong to a program which starts after this number of steps."""
    for scheduler in schedulers:
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # by an earlier process; else torch warns
        counting = scheduler._schedulers[0] if isinstance(scheduler, ChainedScheduler) else scheduler
        for _ in range(steps - counting.last_epoch):
            scheduler.step()
