"""The two modes of a confined optimiser with fresh origins: weights of the next step, or the confined model."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from cgd.errors import InputError
from cgd.optim import fresh_origins
from cgd.optim.displacement import place_weights, trainable
from cgd.optim.program_checks import check_unwritten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.optim.step_input import StepInput


class EvaluationMode(torch.optim.Optimizer):
    """Base class of confined optimisers: `eval` and `train`, which matter with `cgd.confine(..., fresh_origins=True)`.

    With constant origins the parameters are always those of the confined model, and neither method does anything.

    Examples:
        >>> import cgd, torch
        >>> def train(peers, x, y):
        ...     with cgd.public_seed(7):
        ...         model = torch.nn.Linear(1, 1, bias=False)
        ...     cgd.confine(model, delta=0.1, seed=peers.seed, fresh_origins=True)
        ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=len(x))
        ...     for _ in range(30):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...     optimizer.eval()
        ...     return model.weight.item() - optimizer.state[model.weight]["origin"].item()
        >>> x = torch.tensor([[1.0], [-1.0]])
        >>> with cgd.local_peers(3) as members:
        ...     found = members.run(train, [x] * 3, [3 * x] * 3)
        >>> max(found) - min(found) < 1e-6
        True
    """

    step_input: StepInput
    _evaluating = False
    _gradients: Mapping[torch.Tensor, tuple[int, int] | None] = MappingProxyType({})

    def eval(self) -> None:
        """Set the parameters to the confined model, to predict with it or to save it.

        Raises:
            InputError: the program has written into a parameter; or it is inside local steps.
        """
        self._set_mode(evaluating=True)

    def train(self) -> None:
        """Set the parameters to the weights of the next step, after `eval`.

        Raises:
            InputError: the program has written into a parameter.
        """
        self._set_mode(evaluating=False)

    def check_mode(self) -> None:
        """Check that the parameters can have the weights of a step.

        Raises:
            InputError: the optimiser is in evaluation mode; or its parameters do not have the same kind of origins.
        """
        if self._evaluating:
            raise InputError(
                "the parameters are those of the confined model since optimizer.eval(), and a step needs the gradient "
                "at its fresh origin: call optimizer.train() before the forward pass"
            )
        fresh_origins.check([parameter for group in self.param_groups for parameter in group["params"]])

    def _set_mode(self, *, evaluating: bool) -> None:
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        if evaluating == self._evaluating or not any(map(fresh_origins.is_fresh, everything)):
            return
        fresh_origins.check(everything)
        self.step_input.check_outside_local_steps()
        check_unwritten(self.param_groups, self.state, evaluating=self._evaluating)
        parameters = trainable(*self.param_groups)
        if evaluating:
            self._gradients = {each: _gradient(each) for each in parameters}
        elif any(_gradient(each) not in (None, self._gradients.get(each)) for each in parameters):
            raise InputError(
                "a gradient was computed between optimizer.eval() and optimizer.train(), at the confined model, and a "
                "step needs the one at its fresh origin: evaluate inside torch.no_grad(), or call zero_grad() before "
                "train(), and compute the gradient after it"
            )
        place_weights(parameters, self.state, evaluating=evaluating)
        self._evaluating = evaluating


def _gradient(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return what identifies the present gradient of a parameter; None if there is none, or it is zero."""
    gradient = parameter.grad
    return None if gradient is None or not gradient.any() else (id(gradient), gradient._version)
