"""The input of the sums of a step: a member's gradient, or the update of its local steps."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.optim.displacement import trainable
from cgd.optim.flat_vectors import flatten_gradients, join
from cgd.optim.program_checks import unscale

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cgd.optim.local_steps import LocalSteps


class StepInput:
    """The input of an optimiser's steps.

    Attributes:
        batches: the number of batches into which a member divides its records in an epoch; 1 if each step uses all.
            `BatchSampler` sets it. It does not concern local steps.
        local_steps: the block of local steps that the program is in, or whose updates are being summed.
        failed: whether the latest step, or block of local steps, has raised an error.
    """

    def __init__(self) -> None:
        self.batches, self.failed = 1, False
        self.local_steps: LocalSteps | None = None
        self._had_local_steps, self._warned = False, False

    @property
    def updates(self) -> dict[torch.Tensor, torch.Tensor] | None:
        """The updates of this round; None if gradients are summed."""
        return None if self.local_steps is None else self.local_steps.updates

    @property
    def what(self) -> str:
        """The kind of the summed vectors."""
        return "gradient" if self.updates is None else "update"

    def describe(self) -> str:
        """Return what members must have in common, for the context of a sum; empty for gradients of all records."""
        if self.updates is not None:
            return " of updates"
        return f" in {self.parts} batches" if self.parts > 1 else ""

    @property
    def parts(self) -> int:
        """The number of parts into which a member's records are divided, if a sum is about one of them."""
        return self.batches if self.updates is None else 1

    def check_outside_local_steps(self) -> None:
        """Check that the program is not inside a block of local steps.

        Raises:
            InputError: it is.
        """
        if self.local_steps is not None and self.updates is None:
            raise InputError(
                "a step or mode of the confined optimiser was requested inside local_steps(); step the local optimiser "
                "there"
            )

    def check_pass(self, number: int, taken: int) -> None:
        """Check that a pass of a loop over `ConfinedOptimizer.steps` has taken one step.

        Raises:
            InputError: it took none, though none failed, or several.
        """
        if taken != 1 and not (taken == 0 and self.failed):
            raise InputError(
                f"pass {number} of the loop over steps() took {taken} steps of the confined optimiser; every pass "
                "takes one, at all members: call optimizer.step() once, or end one block of local_steps(). Give every "
                "member records in every step, with cgd.BatchSampler; a step after zero_grad() is possible, too, but "
                "then the sum discloses the gradients of the others"
            )

    def vector(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return this member's gradients, without the scale of a GradScaler, or updates as one vector."""
        if self.updates is None:
            self._warn_without_gradients(optimizer)
            return unscale(optimizer, flatten_gradients(parameters))
        self._had_local_steps = True
        return join([self.updates[parameter] for parameter in parameters])

    def _warn_without_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once of a step() out of habit after a block of local steps, whose end has taken the step of the round.

        Without such blocks there is no warning: a member may have no gradient in a step in which others have one.
        """
        if self._warned or not self._had_local_steps:
            return
        if all(each.grad is None for each in trainable(*optimizer.param_groups)):
            self._warned = True
            warnings.warn(
                "no parameter has a gradient: this member takes part in this step with zeros. After a block of "
                "local_steps() no step() is needed, because its end takes the step of the round; leave step() out, or "
                "call backward() before it",
                stacklevel=2,
            )
