"""The learning rate α_k of the paper (Theorem 1 and section 7.2.2), and schedulers in restarted programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def inverse_square_factor(step: int, mu: float, steps: int, hold: int = 0) -> float:
    """Return α_k/α for a step, counted from 0; the other arguments are those of `InverseSquareLR`.

    Raises:
        InputError: mu, steps or hold is out of range.
    """
    if not 0 <= mu < float("inf"):
        raise InputError(f"mu is {mu}; it must be a finite number, at least 0 (0 for a fixed learning rate)")
    if steps < 1 or hold < 0:
        raise InputError(f"steps is {steps} and hold is {hold}; steps must be at least 1 and hold at least 0")
    if mu == 0 or step < hold:
        return 1.0
    k, shift = step - hold + 1, mu * steps
    root = (1 + shift) / (k + shift)
    return root * root  # root**2 may round differently on another system


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
        inverse_square_factor(0, mu, steps, hold)  # rejects values out of range
        self.mu, self.steps, self.hold = mu, steps, hold
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        """Return α_k/α for a step, counted from 0."""
        return inverse_square_factor(step, self.mu, self.steps, self.hold)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of every parameter group."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]


def catch_up(schedulers: Iterable[LRScheduler], steps: int) -> None:
    """Step schedulers that belong to a program which starts after this number of steps.

    Raises:
        InputError: a scheduler depends on losses, which are not stored.
    """
    for scheduler in schedulers:
        if steps and isinstance(scheduler, ReduceLROnPlateau):
            raise InputError(
                "a ReduceLROnPlateau cannot continue without the losses of earlier steps, which are not stored; loop "
                "over range(count), where past sums of losses are repeated, instead of optimizer.steps(count)"
            )
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # by an earlier process; else torch warns
        counting = scheduler._schedulers[0] if isinstance(scheduler, ChainedScheduler) else scheduler
        for _ in range(steps - counting.last_epoch):
            scheduler.step()
